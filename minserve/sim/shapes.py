"""What a model's size means: parameters, the bytes of its weights in any format, and the numbers that a token keeps.

Why: cost and memory follow from a dozen integers, also of models that our decoder cannot run: experts (MoE), one latent per token (MLA),
layers that see a window, layers without a KV cache, two-matrix MLPs. `model_config.py` reads the integers, the zoo has some at hand.

Invariant: counts are of the text model's weight matrices; norms and biases, under 0.1 % of a model, are left out.

Taught in notebooks 01 and 02.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minserve.sim.model_config import fields_from_config
from minserve.sim.weight_formats import WeightFormat, bits_of_weights, quantized_format

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}  # a number of KV in each format, scales left out
KV_SCALE_BYTES = {"int8": 2, "int4": 4}  # a key or value of one head has a scale of 2 bytes, in int4 one for each half


Matrix = tuple[int, int]  # outputs, inputs


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
        layers = self.num_layers * _size(self.attention_matrices) + self.num_dense_mlp_layers * _size(self.dense_mlp_matrices)
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
        return _size(self.expert_matrices)

    # --- matrices and bytes -----------------------------------------------------------------------

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Those of one layer: queries, keys, values, output; with MLA, down to the latent, up to keys and values, and so on."""
        E, H, K, D = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        if not self.latent_size:
            return (H * D, E), (K * D, E), (K * D, E), (E, H * D)
        rank, wide = self.query_rank, H * self.query_head_dim
        queries = ((rank, E), (wide, rank)) if rank else ((wide, E),)
        up = (H * (self.query_head_dim - self.rotary_size + D), self.latent_size - self.rotary_size)
        return *queries, (self.latent_size, E), up, (E, H * D)

    @property
    def dense_mlp_matrices(self) -> tuple[Matrix, ...]:
        return self._mlp_matrices(self.intermediate_size)

    @property
    def expert_matrices(self) -> tuple[Matrix, ...]:
        """Those of one expert in one layer; a shared one is as large."""
        return self._mlp_matrices(self.expert_size)

    def _mlp_matrices(self, inner_size: int) -> tuple[Matrix, ...]:
        return *[(inner_size, self.hidden_size)] * (self.num_mlp_matrices - 1), (self.hidden_size, inner_size)

    def expert_bytes(self, weights: str = "bf16") -> int:
        """Bytes of one expert in one layer."""
        return _num_bytes(self.expert_matrices, weights)

    def layer_bytes(self, weights: str = "bf16") -> int:
        """Bytes of the matrices of all layers, each with its own scales and zeros."""
        attention = self.num_layers * _num_bytes(self.attention_matrices, weights)
        mlp = self.num_dense_mlp_layers * _num_bytes(self.dense_mlp_matrices, weights)
        experts = self.num_expert_layers * (self.num_experts + self.num_shared_experts) * self.expert_bytes(weights)
        return attention + mlp + experts

    def embedding_bytes(self, weights: str = "bf16") -> int:
        """Bytes of the table of token vectors, which nobody quantizes: a token looks up one row."""
        return self.num_embedding_parameters * max(16, bits_of_weights(weights)) // 8

    def head_bytes(self, weights: str = "bf16", head_bits: int = 8) -> int:
        """Bytes of the output layer as it is multiplied with. Beside quantized weights it has `head_bits`: 8 here, 16 in most engines."""
        if quantized_format(weights) is None or head_bits == 16:
            return self.embedding_bytes(weights)
        return WeightFormat(head_bits).num_bytes(self.vocab_size, self.hidden_size)

    def has_own_head(self, weights: str = "bf16", head_bits: int = 8) -> bool:
        """Whether the output layer is stored beside the embedding: where it is not tied to it, or quantized while the table is not."""
        return not self.tied_embeddings or (quantized_format(weights) is not None and head_bits != 16)

    def weight_bytes(self, weights: str = "bf16", head_bits: int = 8) -> int:
        """Bytes of all weights in a format, scales and zeros counted.

        >>> shape = SHAPES["llama-2-13b"]
        >>> [f"{shape.weight_bytes(name) / 1e9:.2f} GB" for name in ("bf16", "int8", "int4", "int4-g128")]
        ['26.03 GB', '13.18 GB', '7.63 GB', '7.23 GB']
        """
        head = self.head_bytes(weights, head_bits) if self.has_own_head(weights, head_bits) else 0
        return self.layer_bytes(weights) + self.embedding_bytes(weights) + head

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


def _size(matrices: Iterable[Matrix]) -> int:
    return sum(num_outputs * num_inputs for num_outputs, num_inputs in matrices)


def _num_bytes(matrices: Iterable[Matrix], weights: str) -> int:
    format = quantized_format(weights)
    if format is None:
        return _size(matrices) * bits_of_weights(weights) // 8
    return sum(format.num_bytes(*matrix) for matrix in matrices)


def bits_of(number_format: str) -> int:
    """Bits of a number of KV. Raises ValueError for an unknown format."""
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
    """A shape from a Hugging Face config of whatever family. Raises ValueError if a size is missing."""
    return ModelShape(name=name, **fields_from_config(values))


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
