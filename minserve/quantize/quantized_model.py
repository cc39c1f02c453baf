"""What quantizing a model leaves: its matrices in codes, the few tensors that had to change with them, and a report of what was done.

Why: whoever serves the result and whoever saves it must not differ in what it is. So the result is plain data, beside the weights that
it was made of, and one object makes of both what a decoder loads.

The output head is not among the matrices: it is rounded to int8 by rows where it is loaded, since no checkpoint layout that others read
has a place for a head that is also the embedding.

Invariant: every matrix in codes has a line in the report, and every line a matrix.

Taught in notebook 09.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from minserve.model.quantized_weight import QuantizedWeight
from minserve.model.weights import Weights, quantized
from minserve.quantize.recipe import Recipe
from minserve.quantize.rtn import HEAD, RoundedWeights
from minserve.sim.weight_formats import WeightFormat


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """One matrix that was quantized. The error is that of its outputs over the calibration text, as a share of their mean square."""

    name: str
    num_outputs: int
    num_inputs: int
    num_groups: int
    bytes_before: int
    bytes_after: int
    error: float | None  # None: without calibration text nobody knows


@dataclass(frozen=True, slots=True)
class Report:
    """What was done to a model, matrix by matrix."""

    recipe: str
    matrices: tuple[MatrixReport, ...]
    num_tokens: int  # of calibration text
    elapsed_s: float
    notes: tuple[str, ...] = ()

    @property
    def bytes_before(self) -> int:
        return sum(matrix.bytes_before for matrix in self.matrices)

    @property
    def bytes_after(self) -> int:
        return sum(matrix.bytes_after for matrix in self.matrices)

    @property
    def error(self) -> float | None:
        """Mean of the matrices' errors."""
        errors = [matrix.error for matrix in self.matrices if matrix.error is not None]
        return sum(errors) / len(errors) if errors else None

    def describe(self) -> str:
        """A few lines for a person."""
        text = f" with {self.num_tokens:,} tokens of text" if self.num_tokens else ""
        share = f" ({self.bytes_after / self.bytes_before:.1%})" if self.bytes_before else ""
        lines = [
            f"{self.recipe}: {len(self.matrices)} matrices in {self.elapsed_s:.0f} s{text}; "
            f"{self.bytes_before / 1e6:,.1f} MB became {self.bytes_after / 1e6:,.1f} MB{share}, scales and zeros counted"
        ]
        if self.error is not None:
            worst = max(self.matrices, key=lambda matrix: matrix.error or 0.0)
            lines.append(f"error of the outputs: {self.error:.2%} of their mean square, at most {worst.error:.2%} in {worst.name}")
        return "\n".join([*lines, *self.notes])

    def plain(self) -> dict[str, Any]:
        """Plain data, to write to a file."""
        return asdict(self) | {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedModel:
    """Matrices in codes by the names that they have in floats, and tensors in floats that take the place of others."""

    recipe: Recipe
    quantized: Mapping[str, QuantizedWeight]
    replaced: Mapping[str, Tensor]
    report: Report
    tied_embeddings: bool

    def weights(self, inner: Weights) -> Weights:
        """What a decoder loads. inner: the weights that this was made of"""
        return RoundedHead(_Quantized(inner, self), self.recipe.head_bits, self.tied_embeddings)


class _Quantized:
    """The weights that a model was made of, and in place of some what it has."""

    def __init__(self, inner: Weights, model: QuantizedModel):
        self.inner, self.model = inner, model

    def __contains__(self, name: str) -> bool:
        return name in self.inner

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        if (held := self.quantized(name, shape)) is not None:
            return held.dequantize()
        replaced = self.model.replaced.get(name)
        return self.inner.take(name, shape) if replaced is None else replaced

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        return self.model.quantized.get(name)


class RoundedHead:
    """Weights whose output head is rounded to int8 when it is asked for, unless it is in codes already or head_bits is 16."""

    def __init__(self, inner: Weights, head_bits: int, tied: bool):
        self.inner = inner
        self._rounded = RoundedWeights(inner, WeightFormat(8), head_bits, tied)

    def __contains__(self, name: str) -> bool:
        return name in self.inner

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor in floats: where it is in codes, what they mean."""
        return self._rounded.take(name, shape)

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        held = quantized(self.inner, name, shape)
        return self._rounded.quantized(name, shape) if held is None and name == HEAD else held
