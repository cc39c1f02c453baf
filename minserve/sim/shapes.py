"""What a model's size means: parameters, and the numbers that a token keeps, from any Hugging Face config.json.

Why: cost and memory follow from a dozen integers. They are read here from configs of all kinds, also of models that our decoder
cannot run: experts (MoE), one latent per token (MLA), layers that see a window, layers without a KV cache, two-matrix MLPs.

Invariant: counts are of the text model's weight matrices; norms and biases, under 0.1 % of a model, are left out.

Taught in notebooks 01 and 02.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}  # a number in each format, scales left out
KV_SCALE_BYTES = {"int8": 2, "int4": 4}  # a key or value of one head has a scale of 2 bytes, in int4 one for each half


class UnknownModel(ValueError):
    """No shape of that name, and no config.json there; the message lists what is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of one decoder-only transformer. H = num_heads, K = num_kv_heads, D = head_dim, L = num_layers, V = vocab_size."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int = 4096
    tied_embeddings: bool = False
    num_mlp_matrices: int = 3  # gate, up, down; 2 in older families
    # experts: the MLP of all layers but the first `num_dense_layers` is E experts, of which each token visits a few
    num_experts: int = 0
    num_active_experts: int = 0
    num_shared_experts: int = 0  # visited by every token
    expert_size: int = 0
    num_dense_layers: int = 0
    # attention: some layers may see a window only, some may keep no KV at all
    window: int | None = None
    num_window_layers: int = 0
    num_stateless_layers: int = 0
    latent_size: int = 0  # MLA: numbers kept per token and layer in place of keys and values,
    rotary_size: int = 0  # of which so many carry the position, the same for all heads
    query_rank: int = 0  # MLA: queries are made through this many numbers; 0: directly
    key_size: int = 0  # numbers of a query and a key in one head, where values (head_dim) have fewer; 0: head_dim

    # --- weights ----------------------------------------------------------------------------------

    @property
    def num_embedding_parameters(self) -> int:
        """The table of token vectors: it is looked up, not multiplied. Where it is tied, the output layer's product is counted there."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights: what must be stored."""
        layers = self.num_layers * self._attention_parameters + self.num_dense_mlp_layers * self._dense_mlp_parameters
        experts = self.num_expert_layers * (self.num_experts + self.num_shared_experts) * self.expert_parameters
        return layers + experts + self.num_embedding_parameters * (1 if self.tied_embeddings else 2)

    @property
    def num_active_parameters(self) -> int:
        """The weights that one token meets, embedding included: for a dense model, all of them."""
        return self.num_parameters - self.num_expert_layers * (self.num_experts - self.num_active_experts) * self.expert_parameters

    @property
    def num_layer_parameters(self) -> int:
        """The weights of all layers that one token is multiplied with; the output layer, met by sampled tokens only, comes on top."""
        return self.num_active_parameters - self.num_embedding_parameters * (1 if self.tied_embeddings else 2)

    @property
    def num_output_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def num_dense_mlp_layers(self) -> int:
        return self.num_layers - self.num_expert_layers

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer."""
        return self.num_mlp_matrices * self.hidden_size * self.expert_size

    @property
    def _dense_mlp_parameters(self) -> int:
        return self.num_mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def _attention_parameters(self) -> int:
        E, H, D = self.hidden_size, self.num_heads, self.head_dim
        if not self.latent_size:
            return 2 * E * (H + self.num_kv_heads) * D
        # down to the latent, up to keys and values of every head, and the queries through their own rank
        queries = self.query_rank * (E + H * self.query_head_dim) if self.query_rank else E * H * self.query_head_dim
        up = (self.latent_size - self.rotary_size) * H * (self.query_head_dim - self.rotary_size + D)
        return queries + E * self.latent_size + up + H * D * E

    def weight_bytes(self, weights: str = "bf16") -> int:
        """Bytes of all weights in a format. Quantized formats leave the embedding and the output layer in bf16, as is the custom."""
        bits = bits_of(weights)
        if bits >= 16:
            return self.num_parameters * bits // 8
        plain = self.num_embedding_parameters * (1 if self.tied_embeddings else 2)
        return plain * 2 + (self.num_parameters - plain) * bits // 8

    # --- what a token keeps -----------------------------------------------------------------------

    @property
    def query_head_dim(self) -> int:
        return self.key_size or self.head_dim

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers - self.num_stateless_layers

    @property
    def kv_numbers_per_token_layer(self) -> int:
        """Numbers that a token keeps in one layer: a key and a value for each KV head, or one latent."""
        return self.latent_size or 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token_layer(self, kv: str = "bf16") -> int:
        """Bytes that a token keeps in one layer. Each key and value of a KV head, or the latent, has its own scale where KV has scales."""
        num_vectors = 1 if self.latent_size else 2 * self.num_kv_heads
        return self.kv_numbers_per_token_layer * bits_of(kv) // 8 + num_vectors * KV_SCALE_BYTES.get(kv, 0)

    def kv_bytes_per_token(self, kv: str = "bf16") -> int:
        """Bytes that one token keeps over all layers: 2 x L x K x D numbers, and the scales of quantized formats.

        >>> SHAPES["llama-2-13b"].kv_bytes_per_token("int8") == 2 * 40 * 40 * (128 + 2)
        True
        """
        return self.num_kv_layers * self.kv_bytes_per_token_layer(kv)

    def kv_bytes(self, num_tokens: int, kv: str = "bf16") -> int:
        """Bytes that a request of so many tokens keeps. Layers with a window stop growing at it."""
        kept_by_window = self.num_window_layers * min(num_tokens, self.window or num_tokens)
        kept = (self.num_kv_layers - self.num_window_layers) * num_tokens + kept_by_window
        return self.kv_bytes_per_token_layer(kv) * kept


def bits_of(number_format: str) -> int:
    """Bits of a number. Raises ValueError for an unknown format."""
    if number_format not in BITS:
        raise ValueError(f"number format {number_format!r} is not known; known: {', '.join(BITS)}")
    return BITS[number_format]


# --- reading configs ------------------------------------------------------------------------------


def load_shape(name_or_path: str | Path) -> ModelShape:
    """A shape by its name in the zoo, or from a config.json (the file, or a directory that has one).

    Raises UnknownModel, or ValueError if the file lacks a size.
    """
    known = SHAPES.get(str(name_or_path).lower())
    if known is not None:
        return known
    path = Path(name_or_path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModel(f"no model {str(name_or_path)!r}: give a config.json, or one of {', '.join(SHAPES)}")
    try:
        return shape_from_config(json.loads(file.read_text(encoding="utf-8")), name=file.resolve().parent.name or "model")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error


def shape_from_config(values: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Read a Hugging Face config of whatever family. A model with several parts (vision and text) is read by its text part."""
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(values.get(part), Mapping):
            return shape_from_config({**values[part], "tie_word_embeddings": _tied(values[part], values)}, name)
    values = {**LEFT_OUT.get(str(values.get("model_type")), {}), **values}
    hidden, heads = _size(values, "hidden_size", "n_embd", "n_embed", "d_model"), _size(values, "num_attention_heads", "n_head", "n_heads")
    layers = _size(values, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(values, heads),
        intermediate_size=int(
            _first(values, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
        ),
        vocab_size=_size(values, "vocab_size", "padded_vocab_size"),
        max_positions=int(_first(values, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len") or 4096),
        tied_embeddings=_tied(values),
        num_mlp_matrices=2 if values.get("model_type") in TWO_MATRIX_FAMILIES else 3,
        **{"head_dim": int(values.get("head_dim") or hidden // heads), **_latent(values)},
        **_experts(values, layers),
        **_attention_kinds(values, layers),
    )


# Families whose MLP is up and down without a gate.
TWO_MATRIX_FAMILIES = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "gpt_bigcode"}


# What configs of a family leave out, since it is the same for all its members or the default of their code.
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
    "gemma2": {"sliding_window_pattern": 2},
    "llama4_text": {"n_shared_experts": 1, "sliding_window_pattern": 4},
}


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _size(values: Mapping[str, Any], *names: str) -> int:
    found = _first(values, *names)
    if found is None:
        raise ValueError(f"the config has no {names[0]} (nor {', '.join(names[1:]) or 'another name for it'})")
    return int(found)


def _num_kv_heads(values: Mapping[str, Any], num_heads: int) -> int:
    if values.get("multi_query") and not values.get("new_decoder_architecture"):  # falcon-7b, starcoder
        return 1
    return int(_first(values, "num_key_value_heads", "num_kv_heads", "multi_query_group_num") or num_heads)


def _tied(*configs: Mapping[str, Any]) -> bool:
    """The families that leave the word out tie by default only where they are old (GPT-2, OPT, Falcon) or of Gemma's line."""
    for values in configs:
        if "tie_word_embeddings" in values:
            return bool(values["tie_word_embeddings"])
    kind = str(configs[0].get("model_type", ""))
    return kind in {"gpt2", "opt", "bloom", "falcon", "mpt", "starcoder2", "gpt_bigcode"} or kind.startswith("gemma")


def _latent(values: Mapping[str, Any]) -> dict[str, int]:
    """MLA: a token keeps one latent and one rotated key for all heads."""
    if not values.get("kv_lora_rank"):
        return {}
    rotary = _size(values, "qk_rope_head_dim")
    return {
        "head_dim": _size(values, "v_head_dim"),
        "key_size": _size(values, "qk_nope_head_dim") + rotary,
        "latent_size": _size(values, "kv_lora_rank") + rotary,
        "rotary_size": rotary,
        "query_rank": int(values.get("q_lora_rank") or 0),
    }


def _experts(values: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    num_experts = int(_first(values, "num_local_experts", "num_experts", "n_routed_experts") or 0)
    if num_experts <= 1:
        return {}
    sparse_every = int(_first(values, "decoder_sparse_step", "interleave_moe_layer_step") or 1)
    num_dense = int(values.get("first_k_dense_replace") or 0) or len(values.get("mlp_only_layers") or ())
    if sparse_every > 1:
        num_dense = num_layers - num_layers // sparse_every
    expert_size = int(_first(values, "moe_intermediate_size", "intermediate_size"))
    shared_size = int(values.get("shared_expert_intermediate_size") or 0)
    return {
        "num_experts": num_experts,
        "num_active_experts": int(_first(values, "num_experts_per_tok", "num_experts_per_token", "top_k") or 1),
        "num_shared_experts": int(values.get("n_shared_experts") or 0) or -(-shared_size // expert_size),
        "expert_size": expert_size,
        "num_dense_layers": num_dense,
    }


def _attention_kinds(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """How many layers see a window only, and how many keep no KV (linear attention, state space)."""
    window = _first(values, "sliding_window", "attention_chunk_size")
    kinds = values.get("layer_types")
    if kinds:
        stateless = sum(kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds)
        windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    else:
        every = int(values.get("full_attention_interval") or 1)
        stateless = num_layers - num_layers // every if every > 1 else 0
        pattern = int(values.get("sliding_window_pattern") or 0)
        windowed = num_layers - num_layers // pattern if pattern else num_layers if values.get("model_type") == "mistral" and window else 0
        if values.get("use_sliding_window"):
            windowed = num_layers - int(values.get("max_window_layers") or 0)
    if not window or not windowed:
        return {"num_stateless_layers": stateless}
    return {"window": int(window), "num_window_layers": windowed, "num_stateless_layers": stateless}


# --- the zoo --------------------------------------------------------------------------------------


def _shape(name: str, hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, positions: int, **more: Any) -> ModelShape:
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=more.pop("head_dim", hidden // heads),
        intermediate_size=inner,
        vocab_size=vocab,
        max_positions=positions,
        **more,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("smollm2-135m", 576, 30, 9, 3, 1536, 49_152, 8192, tied_embeddings=True),
        _shape("smollm2-1.7b", 2048, 24, 32, 32, 8192, 49_152, 8192, tied_embeddings=True),
        _shape("llama-2-7b", 4096, 32, 32, 32, 11_008, 32_000, 4096),
        _shape("llama-2-13b", 5120, 40, 40, 40, 13_824, 32_000, 4096),
        _shape("llama-2-70b", 8192, 80, 64, 8, 28_672, 32_000, 4096),
        _shape("llama-3.1-8b", 4096, 32, 32, 8, 14_336, 128_256, 131_072),
        _shape("llama-3.1-70b", 8192, 80, 64, 8, 28_672, 128_256, 131_072),
        _shape("llama-3.1-405b", 16_384, 126, 128, 8, 53_248, 128_256, 131_072),
        _shape("mistral-7b", 4096, 32, 32, 8, 14_336, 32_768, 32_768),
        _shape("qwen2.5-7b", 3584, 28, 28, 4, 18_944, 152_064, 32_768),
        _shape("qwen2.5-72b", 8192, 80, 64, 8, 29_568, 152_064, 32_768),
        _shape("qwen3-0.6b", 1024, 28, 16, 8, 3072, 151_936, 40_960, head_dim=128, tied_embeddings=True),
        _shape("qwen3-8b", 4096, 36, 32, 8, 12_288, 151_936, 40_960, head_dim=128),
        _shape("opt-13b", 5120, 40, 40, 40, 20_480, 50_272, 2048, num_mlp_matrices=2, tied_embeddings=True),
        _shape("mixtral-8x7b", 4096, 32, 32, 8, 14_336, 32_000, 32_768, num_experts=8, num_active_experts=2, expert_size=14_336),
        _shape(
            "qwen3-30b-a3b", 2048, 48, 32, 4, 6144, 151_936, 40_960, head_dim=128, num_experts=128, num_active_experts=8, expert_size=768
        ),
    )
}
