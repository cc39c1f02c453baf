"""What a model is, read from its Hugging Face config.json into plain numbers.

Why: the decoder, the cache and the planner ask one frozen record instead of a file with several spellings per setting.
Whatever the record cannot express is refused by name here: a setting that is skipped gives fluent nonsense later.

Invariant: a ModelConfig that exists can be run by `decoder.py`; query heads divide evenly over KV heads.

Taught in notebook 05.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
QUANTIZED_BITS = {"gptq": (4, 8), "awq": (4,)}
CODE_ORDERS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # the first is what a file that says nothing means


class UnsupportedModel(ValueError):
    """The model needs something that the decoder cannot do; the message names it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. Only the fields that `kind` uses mean anything; see `rope.py`."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """In which layout a checkpoint holds its codes. No part of a ModelConfig: the same model may come in floats."""

    method: str  # "gptq" or "awq"
    bits: int
    group_size: int | None  # None: all inputs of an output
    symmetric: bool = False
    zeros_less_one: bool = False  # the first layout of GPTQ stores each zero minus one
    name: str | None = None  # the format that `minserve quantize` was asked for
    head_bits: int = 16  # 8: the output layer, in floats in the file, is rounded to codes when it is read

    @classmethod
    def from_directory(cls, path: str | Path) -> "QuantizationConfig | None":
        """Read `config.json` of a Hugging Face model directory; None where the weights are in floats."""
        return quantization_config(json.loads((Path(path) / "config.json").read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. H = num_heads, K = num_kv_heads, D = head_dim, L = num_layers, V = vocab_size."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: how many tokens back a query sees, itself included; None: all

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd; rotary positions turn pairs")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        assert len(self.windows) == self.num_layers, f"{len(self.windows)} windows for {self.num_layers} layers"

    @property
    def num_parameters(self) -> int:
        E, attention = self.hidden_size, (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = 2 * E * attention + 3 * E * self.intermediate_size + 2 * E
        return self.num_layers * layer + E + self.vocab_size * E * (1 if self.tied_embeddings else 2)

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` of a Hugging Face model directory. Raises UnsupportedModel, FileNotFoundError."""
        file = Path(path) / "config.json"
        return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Build from the values of a config.json; what is missing takes the default of transformers.

        >>> ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"]})
        Traceback (most recent call last):
        ...
        minserve.model.config.UnsupportedModel: architecture GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, \
MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
        """
        architecture = _architecture(values)
        _refuse_unsupported(values)
        num_heads = int(values["num_attention_heads"])
        is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        reads_attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        attention_bias = reads_attention_bias and bool(values.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=int(values["vocab_size"]),
            hidden_size=int(values["hidden_size"]),
            intermediate_size=int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
            head_dim=int(values.get("head_dim") or (128 if is_qwen3 else int(values["hidden_size"]) // num_heads)),
            max_positions=int(values.get("max_position_embeddings", 2048)),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=rope_config(values),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(values.get("mlp_bias", False)),
            qk_norm=is_qwen3,
            windows=_windows(architecture, values),
        )


def _architecture(values: Mapping[str, Any]) -> str:
    names: Sequence[str] = values.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return names[0]


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported, only 'silu'")
    quantization_config(values)


def quantization_config(values: Mapping[str, Any]) -> QuantizationConfig | None:
    """How the weights are quantized, from the values of a config.json; None: they are in floats.

    Raises UnsupportedModel for a method, a number of bits or an order of codes that `quantized_checkpoint.py` does not read.
    """
    given: Mapping[str, Any] | None = values.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method", "unnamed")
    if method not in QUANTIZED_BITS:
        raise UnsupportedModel(f"the weights are quantized ({method}); only {', '.join(QUANTIZED_BITS)} or floats can be loaded")
    if (bits := given.get("bits", 0)) not in QUANTIZED_BITS[method]:
        raise UnsupportedModel(
            f"{method} weights of {bits} bits are not supported, only of {' or '.join(map(str, QUANTIZED_BITS[method]))}"
        )
    key = "checkpoint_format" if method == "gptq" else "version"
    order = str(given.get(key) or CODE_ORDERS[method][0]).lower()
    if order not in CODE_ORDERS[method]:
        raise UnsupportedModel(
            f"{method} weights with {key} {order!r} are not supported, only {' or '.join(map(repr, CODE_ORDERS[method]))}"
        )
    if given.get("dynamic"):
        raise UnsupportedModel("gptq weights with 'dynamic', settings for some layers, are not supported")
    ours = given.get("minserve") or {}
    return QuantizationConfig(
        method,
        int(bits),
        _group_size(given),
        symmetric=bool(given.get("sym", False)),
        zeros_less_one=order == "gptq",
        name=ours.get("format"),
        head_bits=int(ours.get("head_bits", 16)),
    )


def _group_size(given: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale. Files say -1 where all of an output do."""
    size = int(given.get("group_size", 128))
    if size == -1:
        return None
    if size < 1:
        raise UnsupportedModel(f"quantization_config: group_size must be -1 or at least 1, got {size}")
    return size


def rope_config(values: Mapping[str, Any]) -> RopeConfig:
    """Read both spellings: `rope_scaling` beside `rope_theta`, or `rope_parameters` (transformers 5) with all in one.

    Within either, the type stands under "rope_type" or, in old files, under "type". Raises UnsupportedModel by the type's name.
    """
    given: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type")) or "default"
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModel(f"RoPE parameters per kind of layer are not supported: {', '.join(given)}")
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if (share := given.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {share} is not supported, only 1.0")
    if kind in ("linear", "llama3") and not given.get("factor"):
        raise UnsupportedModel(f"RoPE type {kind!r} needs a factor")
    max_positions = values.get("max_position_embeddings", 2048)
    original = given.get("original_max_position_embeddings") or values.get("original_max_position_embeddings") or max_positions
    return RopeConfig(
        kind=kind,
        theta=float(given.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        factor=float(given.get("factor") or max_positions / original),
        original_max_positions=int(original),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )


def _windows(architecture: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer. Mistral has one for all layers, Qwen one for the layers named or from an index on."""
    num_layers = int(values["num_hidden_layers"])
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    window = values.get("sliding_window", 4096)  # 4096 is what transformers assumes; null in the file means none
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not values.get("use_sliding_window", False):
        window = None
    first = int(values.get("max_window_layers", 28))
    kinds = values.get("layer_types") or ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer type {sorted(unknown)[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
