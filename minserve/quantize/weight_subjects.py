"""Weights that are measured: in a format of the engine, by a recipe, or under a quantizer that is only tried out.

Why: what the table says of a format must be what the engine serves. A format goes through the engine's own quantized products; a recipe
("gptq-int4:no-order,damping=0.1") changes how its codes are chosen and nothing else. A quantizer without code in the engine is tried as
a `WeightScheme`: the decoder gets, as plain weights, what would be left of them. Both hold the output head in the same way, int8 by rows.

One subject's weights are in memory at a time. They are opened anew for each, which takes as long as it takes to quantize them.

Invariant: opening the same words on the same model twice gives the same weights.

Taught in notebook 09.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from minserve.model.quantized_weight import QuantizedWeight
from minserve.model.weights import Weights
from minserve.quantize.calibration import quantize_model
from minserve.quantize.recipe import Recipe
from minserve.quantize.rtn import RoundedWeights
from minserve.quantize.serving import open_weights
from minserve.quantize.subjects import OpenModel
from minserve.sim.weight_formats import PLAIN_WEIGHTS, WeightFormat, parse_weights

MATRIX = "_proj.weight"  # how the names of the layers' matrices end: their weights are quantized, norms and biases are not


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """A quantizer on trial. round_trip: weight [O, I] float32 -> what is left of it after it was quantized."""

    name: str
    round_trip: Callable[[Tensor], Tensor]
    bytes_per_weight: float | None = None  # None: nobody has counted


def one_scale(weight: Tensor, bits: int = 8) -> Tensor:
    """Rounded with a single symmetric scale for the whole matrix: what int8 was before each output had its own.

    >>> import torch
    >>> one_scale(torch.tensor([[127.0, 3.4], [0.4, 0.6]]))
    tensor([[127.,   3.],
            [  0.,   1.]])
    """
    most = 2 ** (bits - 1) - 1
    step = weight.abs().max() / most
    return (weight / step).round().clamp(-most, most) * step


INT8_TENSOR = WeightScheme("int8-tensor", one_scale, 1.0)


def parse_weight_subject(words: str) -> "str | WeightScheme":
    """A format, a recipe or a directory by its words, checked; "int8-tensor" is the scheme of one scale a matrix. Raises ValueError.

    >>> parse_weight_subject("gptq-int4"), parse_weight_subject("int8-tensor").name
    ('gptq-int4', 'int8-tensor')
    """
    if words == INT8_TENSOR.name:
        return INT8_TENSOR
    if not _is_checkpoint(words):
        Recipe.parse(words)
    return words


def open_subject(model: OpenModel, weights: "str | WeightScheme") -> Weights:
    """The model's weights in a format, by a recipe, from a directory, or under a scheme. GPTQ and AWQ read text first, for minutes."""
    if isinstance(weights, WeightScheme):
        return TriedWeights(model.open_weights(), weights, model.config.tied_embeddings)
    if _is_checkpoint(weights):
        return open_weights(Path(weights).expanduser(), progress=False)
    recipe = Recipe.parse(weights)
    if recipe.fmt.method == "rtn":
        return RoundedWeights(model.open_weights(), recipe.fmt, recipe.head_bits, model.config.tied_embeddings)
    made = quantize_model(model.config, model.open_weights(), model.tokenizer, recipe, progress=False)
    return made.weights(model.open_weights())


def _is_checkpoint(words: str) -> bool:
    """Whether this names a directory: the same model, quantized by `minserve quantize` or by others."""
    return (Path(words).expanduser() / "config.json").is_file()


class TriedWeights:
    """Weights whose matrices have been through a scheme. The head is held as the formats hold it."""

    def __init__(self, inner: Weights, scheme: WeightScheme, tied: bool):
        self.inner, self.scheme = inner, scheme
        self._head = RoundedWeights(inner, parse_weights("int8"), tied=tied)

    def __contains__(self, name: str) -> bool:
        return name in self.inner

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self.inner.take(name, shape)
        return self.scheme.round_trip(tensor.float()) if name.endswith(MATRIX) else tensor

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        return None if name.endswith(MATRIX) else self._head.quantized(name, shape)


# --- words ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """What a line of the table says of the weights. `bytes_per_weight`: mean over the layers' matrices, scales and zeros counted."""

    weights: str
    method: str | None  # rtn, gptq, awq; None: not quantized here, or on trial
    group: str  # inputs that share a scale
    bytes_per_weight: float | None


def label(model: OpenModel, weights: "str | WeightScheme | None", compute: str) -> WeightLabel:
    """The label of a subject's weights; None is the compute type."""
    if isinstance(weights, WeightScheme):
        return WeightLabel(weights.name, None, "", weights.bytes_per_weight)
    if weights is None or weights in PLAIN_WEIGHTS:
        name = weights or compute
        return WeightLabel(name, None, "", 4.0 if name == "fp32" else 2.0)
    if _is_checkpoint(weights):
        return WeightLabel(weights, None, "", None)
    fmt = Recipe.parse(weights).fmt
    group = "channel" if fmt.group_size is None else str(fmt.group_size)
    return WeightLabel(weights, fmt.method, f"{group} {'sym' if fmt.symmetric else 'asym'}", bytes_per_weight(model, fmt))


def bytes_per_weight(model: OpenModel, fmt: WeightFormat) -> float:
    """Mean over the matrices of the layers.

    A layer of SmolLM2-135M in int4, groups of 64 with their zeros: half a byte of code and 4 bytes for every 64.
    """
    c = model.config
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = [(query + 2 * key, c.hidden_size), (c.hidden_size, query), (2 * c.intermediate_size, c.hidden_size)]
    shapes.append((c.hidden_size, c.intermediate_size))
    return sum(fmt.num_bytes(*shape) for shape in shapes) / sum(outputs * inputs for outputs, inputs in shapes)
