"""RMSNorm, with the residual added on the way.

Why: a norm is a few operations for each number, so it takes as long as its bytes take to move. What can be
saved is bytes: adding the residual in a pass of its own would write the sum and read it back.

Invariant: the sum is rounded to its type before it is normed, so that the norm sees what later layers will
see.

Source: Root Mean Square Layer Normalization (arXiv 1910.07467). Taught in notebook 05.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual, divide each row by its root mean square, and weigh. -> y, x + residual

    x, residual: [T, E], weight: [E]. Bytes: x is read and y written, 2 T E numbers; with a residual that is
    read and a sum that is written, 4 T E. The weight's E numbers stay in the cache.
    """
    num_rows, width = x.shape
    assert x.stride(1) == 1 and weight.shape == (width,), (x.stride(), weight.shape)
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    other = x if residual is None else residual
    padded = triton.next_power_of_2(width)
    _rms_norm[(num_rows,)](
        x,
        other,
        weight,
        y,
        total,
        x.stride(0),
        other.stride(0),
        eps,
        E=width,
        E_PADDED=padded,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps or min(max(padded // 512, 1), 8),  # 16 numbers a thread: two loads of 16 bytes
    )
    return y, total


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    y,
    total,
    x_stride,
    residual_stride,
    eps,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program: one row, all of it in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, E_PADDED)
    is_there = columns < E
    numbers = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        numbers += tl.load(residual + row * residual_stride + columns, mask=is_there, other=0.0).to(
            tl.float32
        )
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + row * E + columns, rounded, mask=is_there)
        numbers = rounded.to(tl.float32)
    weights = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / E + eps)
    tl.store(y + row * E + columns, (normed * weights).to(y.dtype.element_ty), mask=is_there)
