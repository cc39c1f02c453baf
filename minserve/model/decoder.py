"""One decoder-only transformer that runs the Llama, Mistral, Qwen2 and Qwen3 families.

Why: the families differ in four switches (bias, query/key norm, sliding window, tied head), so one short forward pass is
both easier to read and easier to serve than four. Tokens of all requests of a step stand in one row of length T; only
attention knows which token belongs to whom. The projections of queries, keys and values are one product, those of
gate and up another: fewer, larger products.

Invariant: a decoder holds weights and nothing else; all memory of requests is in the cache that is passed in.

Taught in notebook 05.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.model.config import ModelConfig
from minserve.model.kv_cache import KVCache
from minserve.model.linear import AnyLinear, Linear
from minserve.model.operations import Operations
from minserve.model.quantized_checkpoint import open_checkpoint
from minserve.model.quantized_linear import QuantizedLinear, Storage, describe_codes, settle_code_rows
from minserve.model.quantized_weight import QuantizedWeight, stack
from minserve.model.rope import Rotation, attention_factor, inverse_frequencies, rotation
from minserve.model.weights import Checkpoint, Weights, quantized


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. E = hidden size, I = intermediate size."""

    attention_norm: Tensor  # [E]
    qkv: AnyLinear  # [(H + 2K) * D, E]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    output: AnyLinear  # [E, H * D]
    mlp_norm: Tensor  # [E]
    gate_up: AnyLinear  # [2 I, E]
    down: AnyLinear  # [E, I]
    window: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of a step share."""

    turn: Rotation
    cache: KVCache
    layout: Any  # as `operations.lay_out` has made it
    operations: Operations


class Decoder:
    """Token ids in, hidden states out; logits for the rows that ask for them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        storage: Storage | None = None,
    ):
        """Take the weights layer by layer into `dtype` on `device`. Raises BrokenCheckpoint by the name of what is missing.

        storage: how weights in codes are kept.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        load = _Loader(config, weights, dtype, self.device, storage)
        self.embedding = load.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.layers = [load.layer(i) for i in range(config.num_layers)]
        self.norm = load.tensor("model.norm.weight", (config.hidden_size,))
        self.head = load.head(self.embedding)
        if storage is None or storage.max_code_rows is None:
            self._settle_code_rows()
        self.scale = config.head_dim**-0.5
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.device)
        self._rope_factor = attention_factor(config.rope)

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weights: Weights | None = None,
        storage: Storage | None = None,
    ) -> "Decoder":
        """Load a Hugging Face model directory; `weights` in place of its own, if given.

        Raises UnsupportedModel or BrokenCheckpoint with what is wrong.
        """
        config, weights = ModelConfig.from_directory(path), weights or open_checkpoint(path)
        decoder = cls(config, weights, dtype, device, storage)
        if isinstance(weights, Checkpoint) and (left := weights.unused()):
            warnings.warn(f"{path}: {len(left)} tensors are not part of a {config.architecture}: {', '.join(left[:3])}", stacklevel=2)
        return decoder

    def describe(self) -> str:
        """Architecture, size and compute type in a few words."""
        c = self.config
        heads = f"{c.num_heads} query and {c.num_kv_heads} KV heads of {c.head_dim}"
        type_name = str(self.dtype).removeprefix("torch.")
        shape = f"{c.num_parameters / 1e6:,.1f} M parameters, {c.num_layers} layers, {heads}"
        return f"{c.architecture}, {shape}, {type_name} on {self.device}{describe_codes(self._in_codes(), self.head)}"

    def _in_codes(self) -> list[QuantizedLinear]:
        """The layers' products whose weights are in codes."""
        products = [product for layer in self.layers for product in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [product for product in products if isinstance(product, QuantizedLinear)]

    def _settle_code_rows(self) -> None:
        settle_code_rows(self._in_codes())
        settle_code_rows([self.head] if isinstance(self.head, QuantizedLinear) else [])

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, cache: KVCache, step: Any, operations: Operations) -> Tensor:
        """Run all layers, and write the step's keys and values. token_ids, positions: [T] -> normed hidden states [T, E]

        step: as `operations.lay_out` has made it.
        """
        shared = self.begin(positions, cache, step, operations)
        x = F.embedding(token_ids, self.embedding)  # [T, E], the residual stream
        normed = operations.norm(x, self.layers[0].attention_norm, self.config.norm_eps)
        next_norms = [*[layer.attention_norm for layer in self.layers[1:]], self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            normed, x = self.run_layer(layer, i, normed, x, next_norm, shared)
        return normed

    def begin(self, positions: Tensor, cache: KVCache, step: Any, operations: Operations) -> Step:
        """What all layers need of a step. positions: [T]"""
        return Step(rotation(positions, self._frequencies, self._rope_factor), cache, step, operations)

    @torch.inference_mode()
    def run_layer(self, layer: Layer, index: int, normed: Tensor, x: Tensor, next_norm: Tensor, shared: Step) -> tuple[Tensor, Tensor]:
        """One layer, on the cache's layer `index`. x: [T, E], the residual stream; normed: [T, E], x behind the layer's norm

        -> x after the layer, behind `next_norm`, and as it is. May overwrite x.
        """
        cache, operations, eps = shared.cache, shared.operations, self.config.norm_eps
        q, kv = cache.mix(*self._project(layer, normed, shared.turn, operations))
        attended = cache.unmix(operations.attend(q, kv, cache, index, shared.layout, self.scale, layer.window))  # [T, H * D]
        normed, x = operations.add_norm(layer.output, attended, x, layer.mlp_norm, eps)
        inner = operations.swiglu(layer.gate_up(normed))  # [T, I]
        return operations.add_norm(layer.down, inner, x, next_norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, E], the rows that need a next token -> [R, V] in the compute type"""
        return self.head(hidden)

    def _project(self, layer: Layer, x: Tensor, turn: Rotation, operations: Operations) -> tuple[Tensor, Tensor]:
        """Queries, and keys and values together; q and k turned to their positions. x: [T, E] -> [T, H, D], [T, 2, K, D]"""
        c = self.config
        heads = layer.qkv(x).view(x.shape[0], -1, c.head_dim)  # [T, H + K + K, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, _ = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            q.copy_(operations.norm(q, layer.q_norm, c.norm_eps))
            k.copy_(operations.norm(k, layer.k_norm, c.norm_eps))
        operations.rotate_(heads[:, : c.num_heads + c.num_kv_heads], c.num_heads, turn)
        return heads[:, : c.num_heads], heads[:, c.num_heads :].unflatten(1, (2, c.num_kv_heads))


def load_layer(config: ModelConfig, weights: Weights, index: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Layer:
    """One layer alone: for work that goes from layer to layer and need not hold them all."""
    return _Loader(config, weights, dtype, torch.device(device)).layer(index)


class _Loader:
    """Takes tensors by their Hugging Face names and fuses those that are multiplied by the same input."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device, storage: Storage | None = None):
        self.config, self.weights, self.dtype, self.device, self.storage = config, weights, dtype, device, storage or Storage()

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        # .to() alone may leave the tensor in the mapped file, which someone may overwrite while we serve
        return self.weights.take(name, shape).to(self.device, self.dtype, copy=True)

    def linear(self, prefix: str, names: Sequence[str], out_features: Sequence[int], in_features: int, has_bias: bool) -> AnyLinear:
        """One product of the projections `names`, stacked. Its parts are let go at once, so memory peaks by one layer."""
        wanted = [(f"{prefix}.{n}.weight", (out, in_features)) for n, out in zip(names, out_features, strict=True)]
        codes = [quantized(self.weights, name, shape) for name, shape in wanted]
        stacked = _stacked_codes(codes, prefix, names)
        parts = (
            [] if stacked else [own.dequantize() if own else self.weights.take(*known) for own, known in zip(codes, wanted, strict=True)]
        )
        biases = [self.weights.take(f"{prefix}.{n}.bias", (out,)) for n, out in zip(names, out_features, strict=True) if has_bias]
        bias = self._stacked(biases) if has_bias else None
        if stacked is not None:
            return QuantizedLinear(stacked, bias, self.dtype, self.device, self.storage)
        return Linear(self._stacked(parts), bias)

    def _stacked(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.to(self.device, self.dtype) for part in parts])

    def layer(self, index: int) -> Layer:
        c, name = self.config, f"model.layers.{index}"
        query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        inner, attention, mlp = c.intermediate_size, f"{name}.self_attn", f"{name}.mlp"
        return Layer(
            attention_norm=self.tensor(f"{name}.input_layernorm.weight", (c.hidden_size,)),
            qkv=self.linear(attention, ("q_proj", "k_proj", "v_proj"), (query, key, key), c.hidden_size, c.qkv_bias),
            q_norm=self.tensor(f"{attention}.q_norm.weight", (c.head_dim,)) if c.qk_norm else None,
            k_norm=self.tensor(f"{attention}.k_norm.weight", (c.head_dim,)) if c.qk_norm else None,
            output=self.linear(attention, ("o_proj",), (c.hidden_size,), query, c.output_bias),
            mlp_norm=self.tensor(f"{name}.post_attention_layernorm.weight", (c.hidden_size,)),
            gate_up=self.linear(mlp, ("gate_proj", "up_proj"), (inner, inner), c.hidden_size, c.mlp_bias),
            down=self.linear(mlp, ("down_proj",), (c.hidden_size,), inner, c.mlp_bias),
            window=c.windows[index],
        )

    def head(self, embedding: Tensor) -> AnyLinear:
        """The output head. Where the config ties it to the embedding, a head of floats in the file is checked and not used."""
        name, shape = "lm_head.weight", (embedding.shape[0], embedding.shape[1])
        if (codes := quantized(self.weights, name, shape)) is not None:
            return QuantizedLinear(codes, None, self.dtype, self.device, self.storage)
        if not self.config.tied_embeddings:
            return Linear(self.tensor(name, shape))
        if name in self.weights:
            own = self.weights.take(name, shape)
            if not torch.equal(own.to(embedding), embedding):
                warnings.warn(f"{name} differs from the embedding, but the config ties them: the embedding is used", stacklevel=4)
        return Linear(embedding)


def _stacked_codes(parts: Sequence[QuantizedWeight | None], prefix: str, names: Sequence[str]) -> QuantizedWeight | None:
    """The parts as one matrix in codes, or None if they must be multiplied by as numbers, since some are or their groups differ."""
    held = [part for part in parts if part is not None]
    if not held:
        return None
    if len(held) == len(parts):
        try:
            return stack(held)
        except ValueError:
            pass
    kinds = ", ".join(f"{name} {'in floats' if part is None else f'{part.bits} bits'}" for name, part in zip(names, parts, strict=True))
    warnings.warn(f"{prefix}: {kinds}: not alike in bits and groups, so this one product of them is served in floats", stacklevel=5)
    return None
