"""A whole model directory of a few hundred kilobytes: seeded random weights, and a tokenizer whose ids are bytes."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 320  # 258 are known to the tokenizer: the rest is padding, as in real models
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def save_tiny_model(path: Path, seed: int = 0, chat_template: str | None = TEMPLATE, **config: Any) -> Path:
    """2 layers, hidden 64, 4 query and 2 KV heads of 32; end of text is id 257. `config` overrides LlamaConfig's fields."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # larger than usual, so that greedy choices are clear-cut and depend on the whole context
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**settings, **config})).save_pretrained(path)
    save_byte_tokenizer(path, chat_template)
    return path


def save_byte_tokenizer(path: Path, chat_template: str | None = TEMPLATE) -> None:
    letters = _letter_of_byte()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {"<start>": 256, "<end>": 257}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<start>", eos_token="<end>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)


def _letter_of_byte() -> list[str]:
    """The printable stand-ins that byte-level tokenizers use: printable bytes stand for themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
