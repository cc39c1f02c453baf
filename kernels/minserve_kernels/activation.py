"""SwiGLU: the gate of the feed-forward layer.

Why: gate and up come out of one product side by side. Done by torch operations, silu(gate) would be written
and read once more: 5 numbers moved for each result instead of 3.

Invariant: computed in float32, rounded once.

Source: GLU Variants Improve Transformer (arXiv 2002.05202). Taught in notebook 05.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # results a program makes, 16 a thread: two loads of 16 bytes


def swiglu(gate_up: Tensor, num_warps: int = 4) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 F], gates first -> [T, F]

    Bytes: 2 T F numbers are read and T F written.
    """
    num_tokens, width = gate_up.shape
    assert width % 2 == 0 and gate_up.stride(1) == 1, (gate_up.shape, gate_up.stride())
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, triton.cdiv(width // 2, TILE))
    _swiglu[grid](gate_up, out, gate_up.stride(0), F=width // 2, TILE=TILE, num_warps=num_warps)
    return out


@triton.jit
def _swiglu(gate_up, out, stride, F: tl.constexpr, TILE: tl.constexpr):
    """One program: TILE results of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = columns < F
    gate = tl.load(gate_up + token * stride + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + F + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(
        out + token * F + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_there
    )
