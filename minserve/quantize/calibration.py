"""Quantize a whole model, layer after layer, while calibration text walks through it.

Why: GPTQ and AWQ must know what the inputs of each matrix look like. So the text (`walk.py`) goes once through a layer as it is, and the
Gram matrices of its four kinds of inputs are collected; then the layer is quantized. For GPTQ the text goes through once more, so that the
next layer sees inputs that quantized layers made, and makes up for their errors, too. For AWQ the next layer sees the inputs of the model
as it was, as in its paper. Matrices that meet the same input are quantized as one, and taken apart again.

AWQ divides the inputs of a product by scales, and what makes these inputs takes the division over:

    q, k, v    the norm before attention
    o          v, where each query head has a KV head of its own; where several share one they would need the same scales: no scale
    gate, up   the norm before the MLP
    down       up, since down multiplies silu(gate) * up

All of it runs on the CPU. SmolLM2-135M with 16 thousand tokens takes 110 s of one Zen 4 core by GPTQ and 155 s by AWQ: not quite half
of GPTQ's goes into walking, a third into Gram matrices in float32, the rest into choosing codes.

A norm's gain is rounded to what bf16 and fp16 hold once it is divided, and the scale becomes what it was divided by in the end.

Invariant: before its matrices are rounded, a model with merged scales computes what it did without. `weights` must give the same tensor
whenever it is asked for it (a checkpoint does, random weights do not).

Taught in notebook 09.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from minserve.model.config import ModelConfig
from minserve.model.decoder import Layer, load_layer
from minserve.model.quantized_weight import QuantizedWeight, storable
from minserve.model.sizing import choose_dtype
from minserve.model.tokenizer import TextTokenizer
from minserve.model.weights import Weights, quantized
from minserve.quantize.awq import search_clip, search_scale
from minserve.quantize.gptq import Gram, gptq
from minserve.quantize.quantized_model import MatrixReport, QuantizedModel, Report
from minserve.quantize.recipe import Recipe
from minserve.quantize.rtn import output_error, round_to_nearest
from minserve.quantize.walk import Walk, calibration_documents
from minserve.sim.weight_formats import WeightFormat

CPU = torch.device("cpu")


@torch.no_grad()
def quantize_model(
    config: ModelConfig,
    weights: Weights,
    tokenizer: TextTokenizer,
    recipe: Recipe,
    progress: bool = True,
    dtype: torch.dtype | None = None,
) -> QuantizedModel:
    """All matrices of the layers, by the recipe. dtype: the compute type of calibration; None: the faster one here.

    Raises ValueError if the weights are in codes already, or if no piece of the calibration text is as long as asked for.
    """
    start_s = time.perf_counter()
    work = LayerByLayer(config, weights, tokenizer, recipe, dtype)
    for index in tqdm(range(config.num_layers), desc=recipe.name, unit="layer", disable=not progress):
        work.quantize_layer(index)
    return work.result(time.perf_counter() - start_s)


@dataclass(frozen=True, slots=True)
class Product:
    """Matrices of a layer that meet the same input, and what makes it: a norm or a matrix, by the name before its ".weight"."""

    field: str  # of Layer
    names: tuple[str, ...]
    maker: str | None  # None: its outputs cannot be divided


def products_of(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """The four of a layer."""
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    value = f"{attention}.v_proj" if config.num_heads == config.num_kv_heads else None
    return (
        Product("qkv", tuple(f"{attention}.{letter}_proj.weight" for letter in "qkv"), f"{layer}.input_layernorm"),
        Product("output", (f"{attention}.o_proj.weight",), value),
        Product("gate_up", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), f"{layer}.post_attention_layernorm"),
        Product("down", (f"{mlp}.down_proj.weight",), f"{mlp}.up_proj"),
    )


class Overlay:
    """Weights that remember what was taken, as `tensors`; what is changed there is what the next one gets."""

    def __init__(self, inner: Weights):
        self.inner = inner
        self.tensors: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.inner

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        if name not in self.tensors:
            if name.endswith("_proj.weight") and quantized(self.inner, name, shape) is not None:
                raise ValueError(f"{name} is in codes already: quantize the model that has it in floats")
            self.tensors[name] = self.inner.take(name, shape)
        return self.tensors[name]


# --- AWQ's scales ---------------------------------------------------------------------------------


def merge_scale(
    tensors: dict[str, Tensor],
    product: Product,
    gram_matrix: Tensor,
    magnitude: Tensor,
    fmt: WeightFormat,
) -> Tensor:
    """Search the scale of a product's inputs, multiply its weights by it, divide what makes the inputs.

    tensors: all of the layer, by name; those that change are replaced. -> the Gram matrix of the inputs now
    """
    assert product.maker is not None
    scale = search_scale([tensors[name].float() for name in product.names], gram_matrix, magnitude, fmt)
    scale = divide_outputs(tensors, product.maker, scale)
    for name in product.names:
        tensors[name] = tensors[name].float() * scale
    return gram_matrix / scale[:, None] / scale


def divide_outputs(tensors: dict[str, Tensor], maker: str, scale: Tensor) -> Tensor:
    """Divide what a norm or a matrix makes by a scale [O]. -> what it was divided by: for a norm, a little different"""
    weight = tensors[f"{maker}.weight"].float()
    if weight.dim() == 2:
        tensors[f"{maker}.weight"] = weight / scale[:, None]
        if (bias := tensors.get(f"{maker}.bias")) is not None:
            tensors[f"{maker}.bias"] = (bias.float() / scale).to(bias.dtype)
        return scale
    divided = storable(weight / scale)
    divided = torch.where(divided == 0, weight, divided)  # a gain of 0, or one too small to be divided
    tensors[f"{maker}.weight"] = divided.to(tensors[f"{maker}.weight"].dtype)
    return torch.where(divided == 0, 1.0, weight / divided)


# --- layer by layer -------------------------------------------------------------------------------


class LayerByLayer:
    """What has been quantized so far, and the text in front of the next layer."""

    def __init__(self, config: ModelConfig, weights: Weights, tokenizer: TextTokenizer, recipe: Recipe, dtype: torch.dtype | None = None):
        self.config, self.weights, self.recipe = config, weights, recipe
        self.dtype = dtype or choose_dtype("auto", CPU)
        self.walk: Walk | None = None
        if recipe.is_calibrated:
            token_ids = calibration_documents(tokenizer, recipe.num_documents, recipe.document_tokens, recipe.seed)
            self.walk = Walk(config, weights, token_ids, self.dtype)
        self.quantized: dict[str, QuantizedWeight] = {}
        self.replaced: dict[str, Tensor] = {}
        self._lines: list[MatrixReport] = []

    def quantize_layer(self, index: int) -> None:
        """Watch the text go through the layer as it is, quantize it, and move the text behind it."""
        overlay = Overlay(self.weights)
        layer = load_layer(self.config, overlay, index, self.dtype)
        original = dict(overlay.tensors)
        grams, streams = self.walk.watch(layer) if self.walk else ({}, [])
        products = products_of(self.config, index)
        matrices = self.merge_scales(products, overlay.tensors, grams)
        for product in products:
            self._quantize(product, overlay.tensors, original, matrices.get(product.field))
        changed = {name: tensor for name, tensor in overlay.tensors.items() if tensor is not original[name]}
        self.replaced |= {name: tensor for name, tensor in changed.items() if name not in self.quantized}
        if self.walk is not None and self.recipe.fmt.method == "gptq":
            streams = self.walk.through(self._quantized_layer(index, overlay))
        if self.walk is not None:
            self.walk.streams = streams

    def merge_scales(
        self,
        products: Sequence[Product],
        tensors: dict[str, Tensor],
        grams: Mapping[str, Gram],
    ) -> dict[str, Tensor]:
        """AWQ's scales of a layer, if the recipe has them. -> Gram matrices of inputs, by the fields of `Layer`"""
        matrices = {field: gram.matrix for field, gram in grams.items()}
        if self.recipe.fmt.method == "awq" and self.recipe.scale:
            for product in (product for product in products if product.maker):
                matrix, magnitude = matrices[product.field], grams[product.field].magnitude
                matrices[product.field] = merge_scale(tensors, product, matrix, magnitude, self.recipe.fmt)
        return matrices

    def _quantize(self, product: Product, tensors: dict[str, Tensor], original: Mapping[str, Tensor], gram_matrix: Tensor | None) -> None:
        parts = [tensors[name].float() for name in product.names]
        try:
            whole = choose_codes(torch.cat(parts), gram_matrix, self.recipe)
        except ValueError as error:
            raise ValueError(f"{' and '.join(product.names)}: {error}") from error
        for name, part, codes in zip(product.names, parts, split(whole, [len(part) for part in parts]), strict=True):
            self.quantized[name] = codes
            self._lines.append(self._line(name, part, codes, original[name].itemsize, gram_matrix))

    def _line(self, name: str, weight: Tensor, codes: QuantizedWeight, itemsize: int, gram_matrix: Tensor | None) -> MatrixReport:
        size, error = weight.shape, None
        if gram_matrix is not None:
            whole = output_error(weight, torch.zeros(()), gram_matrix)
            error = output_error(weight, codes.dequantize(), gram_matrix) / whole if whole else 0.0
        bytes_after = self.recipe.fmt.num_bytes(*size)
        return MatrixReport(name, size[0], size[1], codes.scales.shape[1], weight.numel() * itemsize, bytes_after, error)

    def _quantized_layer(self, index: int, overlay: Overlay) -> Layer:
        """The layer as it will be served, its codes as numbers."""
        overlay.tensors |= {name: self.quantized[name].dequantize() for name in overlay.tensors if name in self.quantized}
        return load_layer(self.config, overlay, index, self.dtype)

    def result(self, elapsed_s: float) -> QuantizedModel:
        num_tokens = self.walk.num_tokens if self.walk else 0
        report = Report(self.recipe.name, tuple(self._lines), num_tokens, elapsed_s, tuple(self._notes()))
        return QuantizedModel(self.recipe, self.quantized, self.replaced, report, self.config.tied_embeddings)

    def _notes(self) -> list[str]:
        c, fmt, notes = self.config, self.recipe.fmt, []
        if self.walk is not None and self.walk.num_documents < self.recipe.num_documents:
            notes.append(f"the text has {self.walk.num_documents} documents for calibration, {self.recipe.num_documents} were asked for")
        if fmt.group_size:
            sizes = sorted({line.num_inputs for line in self._lines if line.num_inputs % fmt.group_size})
            notes += [f"{size:,} inputs in groups of {fmt.group_size}: the last one has {size % fmt.group_size}" for size in sizes]
        if fmt.method == "awq" and self.recipe.scale and c.num_heads != c.num_kv_heads:
            notes.append(f"o_proj has no scale: {c.num_heads} query heads share the outputs of {c.num_kv_heads} KV heads")
        if self.recipe.head_bits == 8:
            head_bytes = WeightFormat(8).num_bytes(c.vocab_size, c.hidden_size)
            notes.append(f"the output head stays in floats in files, and is served as int8 by rows ({head_bytes / 1e6:,.1f} MB)")
        return notes


def choose_codes(weight: Tensor, gram_matrix: Tensor | None, recipe: Recipe) -> QuantizedWeight:
    """A matrix by the recipe's method. weight: [O, I], gram_matrix: [I, I]; round to nearest needs none"""
    fmt = recipe.fmt
    if gram_matrix is None or fmt.method == "rtn":
        return round_to_nearest(weight, fmt)
    if fmt.method == "gptq":
        return gptq(weight, gram_matrix, fmt, order=recipe.order, damping=recipe.damping)
    shrink = search_clip(weight, gram_matrix, fmt) if recipe.clip else None
    return round_to_nearest(weight, fmt, shrink)


def split(whole: QuantizedWeight, num_outputs: Sequence[int]) -> list[QuantizedWeight]:
    """A matrix in codes taken apart by its outputs: the reverse of `stack`."""
    parts = zip(*(tensor.split(list(num_outputs)) for tensor in (whole.codes, whole.scales, whole.zeros)), strict=True)
    return [replace(whole, codes=codes, scales=scales, zeros=zeros) for codes, scales, zeros in parts]
