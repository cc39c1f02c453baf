"""Round to nearest: each weight becomes the nearest point of a grid that its group shares.

Why: it needs no data and takes seconds, it is what GPTQ (minserve/quantize/gptq.py) and AWQ (minserve/quantize/awq.py) set out to beat,
and both end in it: GPTQ rounds one input after another, AWQ rounds weights that it has scaled first.

A grid has 2^bits points, scale apart, and 0 is always one of them: a weight of 0 stays 0, and so do the zeros that pad a matrix. So
the range of a group is stretched until it contains 0. In a symmetric grid 0 is the middle code, 2^(bits - 1), and the scale is the
smallest for which the whole range of codes, -8 to 7 in 4 bits, covers the group. In an asymmetric one 0 lies where the group needs it.

Scales are rounded to 8 significant bits before any code is chosen, so that they are the same wherever they are stored.

Invariant: on a symmetric grid no weight moves by more than half a step, and rounding what is rounded already changes nothing. An
asymmetric grid is used to its ends: where rounding made its scale smaller, the ends fall short by up to 1/256 of its length.

Taught in notebook 09.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.model.quantized_weight import QuantizedWeight, groups_in_order, stack, storable
from minserve.model.weights import Weights
from minserve.sim.weight_formats import WeightFormat

SMALLEST_SCALE = 2.0**-24  # of those that fp16 holds
ROWS_AT_ONCE = 4096  # of a head of 128 thousand rows; rounding takes a few float32 copies of what it rounds


def grid(low: Tensor, high: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zeros of the grids that cover the ranges from low to high. All of one shape, any.

    Raises ValueError if a range is not finite.

    >>> grid(torch.tensor([-4.0]), torch.tensor([3.5]), 4, symmetric=True)
    (tensor([0.5000]), tensor([8.]))
    >>> grid(torch.tensor([-1.0]), torch.tensor([14.0]), 4, symmetric=False)
    (tensor([1.]), tensor([1.]))
    """
    low, high = low.clamp(max=0), high.clamp(min=0)  # 0 is on every grid
    middle, top = 2 ** (bits - 1), 2**bits - 1
    exact = torch.maximum(low / -middle, high / (middle - 1)) if symmetric else (high - low) / top
    scales = storable(exact).clamp(min=SMALLEST_SCALE)
    if not scales.isfinite().all():
        raise ValueError(f"no {bits}-bit grid with an fp16 scale covers {low.min():g} to {high.max():g}")
    zeros = torch.full_like(scales, middle) if symmetric else (-low / scales).round().clamp(0, top)
    return scales, zeros


def nearest_codes(values: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """The codes of the grid points nearest to the values -> uint8. Beyond the ends of a grid, its ends."""
    return ((values / scales).round_() + zeros).clamp_(0, 2**bits - 1).to(torch.uint8)


def group_ranges(weight: Tensor, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest weight of each group; in a short last group, or 0. [O, I] -> two of [O, G]"""
    num_inputs = weight.shape[1]
    size = min(group_size or num_inputs, num_inputs)
    groups = F.pad(weight, (0, -num_inputs % size)).unflatten(1, (-1, size))  # [O, G, size]
    return groups.amin(2), groups.amax(2)


def round_to_nearest(weight: Tensor, fmt: WeightFormat, shrink: Tensor | None = None) -> QuantizedWeight:
    """Each weight on the nearest point of its group's grid. weight: [O, I]

    shrink: [O, G], or one number: factors on the groups' ranges. What lies outside falls on a grid's ends.

    >>> round_to_nearest(torch.tensor([[-4.0, 0.2, 3.5]]), WeightFormat(4)).codes
    tensor([[ 0,  8, 15]], dtype=torch.uint8)
    """
    weight, group_of = weight.float(), groups_in_order(weight.shape[1], fmt.group_size)
    low, high = group_ranges(weight, fmt.group_size)
    if shrink is not None:
        low, high = low * shrink, high * shrink
    scales, zeros = grid(low, high, fmt.bits, fmt.symmetric)
    codes = nearest_codes(weight, scales[:, group_of], zeros[:, group_of], fmt.bits)
    return QuantizedWeight(fmt.bits, codes, scales, zeros, group_of)


def output_error(weight: Tensor, quantized_values: Tensor, gram_matrix: Tensor) -> float:
    """Mean over tokens of |x W^T - x Q^T|^2, from the mean of x^T x alone: tr(D G D^T) with D = Q - W.

    weight, quantized_values: [O, I], gram_matrix: [I, I], as `minserve.quantize.gptq.Gram` collects it.

    >>> output_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]]), torch.eye(2) * 5)
    5.0
    """
    difference = quantized_values - weight
    return float((difference @ gram_matrix * difference).sum())


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class RoundedWeights:
    """Weights that are rounded as they are taken: those of the layers' products to `fmt`, the head to int8.

    head_bits: 8, or 16 for a head that is not rounded.
    tied: whether the head is the embedding; None: it is if `inner` has no other.
    """

    def __init__(self, inner: Weights, fmt: WeightFormat, head_bits: int = 8, tied: bool | None = None):
        if head_bits not in (8, 16):
            raise ValueError(f"the head is kept in 8 or 16 bits, got {head_bits}")
        self.inner, self.fmt, self.head_bits = inner, fmt, head_bits
        self.tied = HEAD not in inner if tied is None else tied
        self._embedding: Tensor | None = None  # until the head is made of it

    def __contains__(self, name: str) -> bool:
        return name in self.inner

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor as it was before rounding."""
        tensor = self.inner.take(name, shape)
        if name == EMBEDDING and self.tied:
            self._embedding = tensor
        return tensor

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        """The matrix in codes; None if it is not one of those that are rounded."""
        if name == HEAD:
            return _rounded(self._head(shape), WeightFormat(8)) if self.head_bits == 8 else None
        return _rounded(self.inner.take(name, shape), self.fmt) if name.endswith("_proj.weight") else None

    def _head(self, shape: Sequence[int]) -> Tensor:
        if not self.tied:
            return self.inner.take(HEAD, shape)
        embedding, self._embedding = self._embedding, None
        return self.inner.take(EMBEDDING, shape) if embedding is None else embedding


def _rounded(weight: Tensor, fmt: WeightFormat) -> QuantizedWeight:
    return stack([round_to_nearest(rows, fmt) for rows in weight.split(ROWS_AT_ONCE)])
