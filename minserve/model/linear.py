"""The one class through which every matrix product with a weight goes.

Why: how a weight is stored is a decision of its own. On the CPU oneDNN multiplies faster by a weight that was laid out
for it beforehand; later a weight may be quantized or split over devices. The decoder sees none of that.

Measured on two Zen 4 cores, all products of a SmolLM2-135M step in bf16, ms at 1 / 16 / 64 / 256 / 512 rows: plain
22 / 27 / 58 / 173 / 278, prepacked 10 / 15 / 45 / 145 / 270. The private operators that do it are checked against
F.linear for every weight, and F.linear takes over where they are missing or wrong.

Invariant: `Linear(weight, bias)(x)` equals `F.linear(x, weight, bias)` up to rounding.

Taught in notebook 05.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_ROWS_HINT = 16  # oneDNN chooses its layout for this many rows; the choice hardly matters between 1 and 512


class AnyLinear(Protocol):
    """What a decoder multiplies by: a `Linear`, or a `QuantizedLinear` where the weight is in codes."""

    out_features: int
    in_features: int
    bias: Tensor | None

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor: ...

    @property
    def is_packed(self) -> bool: ...

    @property
    def num_bytes(self) -> int: ...


class Linear:
    """y = x weight^T + bias. weight: [out, in], bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, prepack: bool = True):
        assert weight.dim() == 2, f"a weight is a matrix, got {tuple(weight.shape)}"
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = bias
        self._packed = _prepack(weight, bias) if prepack and weight.device.type == "cpu" else None
        self._weight = weight if self._packed is None else None  # one copy in memory, not two

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """x: [T, in], add: [T, out] or None -> x weight^T + bias + add, [T, out]. Adding here saves a pass over memory."""
        if self._packed is not None:
            return _packed_linear(x, self._packed, self.bias, add)
        assert self._weight is not None
        y = F.linear(x, self._weight, self.bias)
        return y if add is None else y.add_(add)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def num_bytes(self) -> int:
        return self.out_features * self.in_features * self.dtype.itemsize


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, add: Tensor | None = None) -> Tensor:
    if add is None:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, add, packed, bias, "add")


@torch.inference_mode()
def _prepack(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The weight in oneDNN's layout, or None if this build of torch cannot or does it wrong."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS_HINT)
        x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=torch.float32).view(2, -1).to(weight.dtype)
        add = torch.ones(2, weight.shape[0], dtype=weight.dtype)
        got, want = _packed_linear(x, packed, bias, add).float(), F.linear(x, weight, bias).float() + 1
    except (AttributeError, RuntimeError):  # no such operator, or not for this type
        return None
    scale = want.abs().max()
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    return packed if bool((got - want).abs().max() <= tolerance * scale) else None
