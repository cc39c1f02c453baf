"""GGUF to a Hugging Face directory: the same weights, the same logits, the tokenizer that the model was trained with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from minserve.model.convert import UnsupportedGGUF, gguf_to_directory, hugging_face_name, split_halves
from tests.model.tiny_gguf import TEMPLATE, tiny_llama, write_gguf


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_the_model_that_was_written(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(tied)
    gguf_to_directory(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "out")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    token_ids = torch.arange(40)[None] + 5
    with torch.inference_mode():
        assert torch.equal(converted(token_ids).logits, model(token_ids).logits)
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is not tied


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_quantized_weights_are_dequantized_and_rounded_once(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    model = tiny_llama()
    gguf_to_directory(write_gguf(tmp_path / "tiny.gguf", model, matrices=kind), tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.weight"
    original = model.state_dict()[name]
    expected = torch.from_numpy(dequantize(quantize(original.numpy(), kind), kind)).to(torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], expected)
    assert not torch.equal(expected.float(), original)


def test_files_and_special_ids(tmp_path: Path) -> None:
    gguf_to_directory(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer.encode("<|im_end|>안녕 🙂"), skip_special_tokens=True) == "안녕 🙂"


def test_smollm_cuts_every_digit_apart_before_the_blanks(tmp_path: Path) -> None:
    """With the plain rule, the second newline of a numbered list stays alone: other tokens than in training."""
    tokens = {}
    for pre in ("smollm", "gpt-2"):
        gguf_to_directory(write_gguf(tmp_path / f"{pre}.gguf", tiny_llama(), pre=pre), tmp_path / pre)
        tokens[pre] = Tokenizer.from_file(str(tmp_path / pre / "tokenizer.json")).encode("\n\n12").tokens
    assert tokens == {"smollm": ["ĊĊ", "1", "2"], "gpt-2": ["Ċ", "Ċ", "1", "2"]}


def test_what_it_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedGGUF, match="'mamba'"):
        gguf_to_directory(write_gguf(tmp_path / "a.gguf", tiny_llama(), architecture="mamba"), tmp_path / "out")
    with pytest.raises(UnsupportedGGUF, match="'qwen2'"):
        gguf_to_directory(write_gguf(tmp_path / "b.gguf", tiny_llama(), pre="qwen2"), tmp_path / "out")
    for name in ("blk.0.ssm_a.weight", "blk.0.attn_q.bias", "mm.0.weight"):
        with pytest.raises(UnsupportedGGUF, match=name):
            hugging_face_name(name)


def test_split_halves_keeps_heads_apart() -> None:
    neighbours = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    assert split_halves(neighbours, num_heads=2).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_real_default(default_model_dir: Path) -> None:
    """SmolLM2 has 134,515,008 weights and ties its head to its embedding, so the file has no head."""
    config = json.loads((default_model_dir / "config.json").read_text(encoding="utf-8"))
    weights = load_file(default_model_dir / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    assert config["tie_word_embeddings"] and "lm_head.weight" not in weights
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    tokenizer = Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))
    assert tokenizer.encode("The baker cleaned 75 clocks").ids == [504, 38993, 16681, 216, 39, 37, 21951]
