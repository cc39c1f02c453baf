import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from minserve.model.decoder import Decoder
from tests.model.tiny_net import batch_of, full_logits, make_runner, request, row_logits, tiny_decoder, tokens_for

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama mha": ("llama", {"num_key_value_heads": 4}),
    "llama gqa": ("llama", {}),
    "llama mqa": ("llama", {"num_key_value_heads": 1}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama head_dim": ("llama", {"head_dim": 32}),
    "llama bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, **LLAMA3}}),
    "llama yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, **YARN}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 window": ("qwen3", {"head_dim": 32, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3 yarn tied": (
        "qwen3",
        {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, **YARN}},
    ),
}


def save_model(folder: Path, family: str, changes: dict[str, Any], **saving: Any) -> Any:
    """A small random model of transformers, its biases and norms random too, in `folder`."""
    config_class, model_class = FAMILIES[family]
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    torch.manual_seed(5)
    model = model_class(config_class(**{**values, **changes})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder, **saving)
    return model


@torch.inference_mode()
def expected(model: Any, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_agree_with_transformers(tmp_path, family, changes):
    model = save_model(tmp_path, family, changes)
    token_ids = tokens_for(7, 150)
    torch.testing.assert_close(full_logits(Decoder.from_directory(tmp_path), token_ids), expected(model, token_ids), atol=2e-4, rtol=1e-4)


def test_case_74_the_old_spelling_gives_the_same_logits(tmp_path):
    model = save_model(tmp_path, *VARIANTS["llama llama3"])
    file = tmp_path / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    file.write_text(json.dumps(values), encoding="utf-8")
    token_ids = tokens_for(7, 100)
    torch.testing.assert_close(full_logits(Decoder.from_directory(tmp_path), token_ids), expected(model, token_ids), atol=2e-4, rtol=1e-4)


def test_a_sharded_checkpoint(tmp_path):
    model = save_model(tmp_path, "llama", {}, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    token_ids = tokens_for(7, 40)
    torch.testing.assert_close(full_logits(Decoder.from_directory(tmp_path), token_ids), expected(model, token_ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama gqa", "mistral window", "qwen2 window", "qwen3 window"])
def test_chunks_and_single_tokens_give_the_logits_of_one_piece(tmp_path, variant):
    save_model(tmp_path, *VARIANTS[variant])
    decoder, token_ids = Decoder.from_directory(tmp_path), tokens_for(9, 60)
    runner, table, got, start = make_runner(decoder, num_blocks=9, block_size=8), [7, 2, 5, 0, 8, 1, 3, 6], [], 0
    for count in (1, 20, 1, 1, 30, 7):
        got.append(row_logits(runner, batch_of((request("R", token_ids), start, start + count, table[: -(-(start + count) // 8)])))["R"])
        start += count
    torch.testing.assert_close(torch.cat(got), full_logits(decoder, token_ids), atol=1e-4, rtol=1e-4)


def test_bf16_stays_near_fp32(tmp_path):
    save_model(tmp_path, "llama", {"initializer_range": 0.05})
    token_ids = tokens_for(7, 100)
    want = full_logits(Decoder.from_directory(tmp_path), token_ids)
    got = full_logits(Decoder.from_directory(tmp_path, dtype=torch.bfloat16), token_ids, kv_cache_dtype="bf16")
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.1 * want.abs().max()


def test_describe_names_what_was_loaded():
    words = tiny_decoder().describe()
    assert words == "LlamaForCausalLM, 0.1 M parameters, 2 layers, 4 query and 2 KV heads of 32, float32 on cpu"


def test_logits_of_the_real_model_agree_with_transformers(default_model_dir):
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    decoder = Decoder.from_directory(default_model_dir, dtype=torch.float32)
    for length in (1, 20, 200):
        token_ids = tokens_for(length, length, 49_152)
        torch.testing.assert_close(full_logits(decoder, token_ids), expected(model, token_ids), atol=1e-3, rtol=1e-4)
