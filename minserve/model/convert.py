"""Turn the GGUF file of a Llama model into an ordinary Hugging Face directory: safetensors, config, tokenizer.

Why: GGUF is what llama.cpp ships, one file with everything in it. The rest of minserve, and every engine it is
compared with, reads the directory form; so the conversion is done once and forgotten.

Invariant: the directory holds the values of the GGUF file, dequantized and rounded once to bfloat16. Precision that
the file has thrown away (4 bits a weight in Q4_1) does not come back.

Taught in notebook 09.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, TokenType
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


class UnsupportedGGUF(ValueError):
    """The file is of an architecture or with a tokenizer that this converter does not know; the message names it."""


_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_to_directory(gguf_path: Path, out_dir: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and model.safetensors (bfloat16) to out_dir.

    Raises UnsupportedGGUF for another architecture than llama, or a tokenizer it has no rule for.
    """
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = dict(_weights(reader, fields))
    config = _config(fields, tied="lm_head.weight" not in weights)
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")})
    _tokenizer(fields).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(fields))
    if template := fields.get("tokenizer.chat_template"):
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    if (architecture := fields["general.architecture"]) != "llama":
        raise UnsupportedGGUF(f"architecture {architecture!r}: only llama is converted; fetch its safetensors instead")
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    num_heads = llama["attention.head_count"]
    theta = llama.get("rope.freq_base", 10_000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": llama.get("attention.head_count_kv", num_heads),
        "head_dim": llama.get("rope.dimension_count", llama["embedding_length"] // num_heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": llama["attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # transformers 5 reads the first form, older readers the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _weights(reader: GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and bfloat16 tensor of each weight of the file."""
    heads = {"attn_q": fields.get("llama.attention.head_count", 1), "attn_k": fields.get("llama.attention.head_count_kv", 1)}
    for tensor in reader.tensors:
        kind = tensor.name.removesuffix(".weight").split(".")[-1]
        values = _dequantized(tensor)
        if kind in heads:
            values = split_halves(values, heads[kind])
        yield hugging_face_name(tensor.name), torch.from_numpy(values).to(torch.bfloat16).contiguous()


def _dequantized(tensor: ReaderTensor) -> np.ndarray:
    """float32 values in numpy's order; GGUF lists the fastest dimension first."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)


def hugging_face_name(name: str) -> str:
    """
    >>> hugging_face_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        layer, kind = match.groups()
        if kind in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[kind]}.weight"
    elif (kind := name.removesuffix(".weight")) in _TOP_LEVEL:
        return f"{_TOP_LEVEL[kind]}.weight"
    raise UnsupportedGGUF(f"tensor {name!r} has no place in a llama model")


def split_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the query and key rows. weight: [num_heads * D, hidden], returned in the same shape.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates dimension i with i + D/2.

    >>> split_halves(np.array([[0], [2], [1], [3]]), num_heads=1).ravel().tolist()
    [0, 1, 2, 3]
    """
    num_rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(num_rows, hidden)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE of the file. Its special tokens are never cut and are dropped by skip_special_tokens."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields["tokenizer.ggml.pre"])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How the text is cut before the merges. SmolLM was trained with every digit apart, which moves the blanks before it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gpt-2":
        return byte_level
    raise UnsupportedGGUF(f"tokenizer.ggml.pre {name!r}: known are smollm and gpt-2")


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id", "unk_token": "unknown_token_id"}
    named = {name: tokens[fields[f"tokenizer.ggml.{key}"]] for name, key in ids.items() if f"tokenizer.ggml.{key}" in fields}
    return named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "add_bos_token": fields.get("tokenizer.ggml.add_bos_token", False),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
