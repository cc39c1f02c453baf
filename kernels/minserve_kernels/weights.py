"""Formats of quantized weights: how a matrix is stored in 8 or 4 bits, and what it means. In plain torch.

    format  a number of weight [O, I] is      stored in
    int8    code * scale of its output        int8 [O, I] and one scale an output [O]
    int4    (code - zero) * scale of its      uint8 [O, I / 2], scales and zeros [O, I / g]
            output and group of g inputs

Two int4 codes share a byte. Within a group of g inputs, byte j (of g / 2) has input j in its low four bits
and input j + g / 2 in its high four. So a kernel reads a group's bytes as they lie, multiplies the low halves
by the first half of the group's inputs, the high halves by the second, and never puts nibbles back in order.

A code is 0 to 15 and a zero is the code, not necessarily whole, that means 0.

Invariant: `unpack_int4(pack_int4(codes, g), g)` equals `codes`.

Taught in notebook 09.
"""

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)  # a tensor core multiplies 16 bf16 at a time: half of the smallest


def require_groups(num_inputs: int, group_size: int) -> None:
    """Raise ValueError unless rows of so many inputs fall into groups of a size that the kernels know."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"int4 groups have {', '.join(map(str, GROUP_SIZES))} inputs, got {group_size}")
    if num_inputs % group_size:
        raise ValueError(f"{num_inputs} inputs do not fall into groups of {group_size}")


def pack_int4(codes: Tensor, group_size: int) -> Tensor:
    """Two codes a byte. codes: [O, I] uint8, 0 to 15 -> [O, I / 2] uint8

    >>> codes = torch.arange(32, dtype=torch.uint8).remainder(16)[None]  # inputs 1 and 17 have the code 1
    >>> hex(pack_int4(codes, 32)[0, 1])
    '0x11'
    """
    require_groups(codes.shape[1], group_size)
    low, high = codes.unflatten(1, (-1, 2, group_size // 2)).unbind(2)  # [O, I / g, g / 2]
    return (low | high << 4).flatten(1)


def unpack_int4(packed: Tensor, group_size: int) -> Tensor:
    """packed: [O, I / 2] uint8 -> codes [O, I] uint8"""
    require_groups(2 * packed.shape[1], group_size)
    halves = packed.unflatten(1, (-1, group_size // 2))  # [O, I / g, g / 2]
    return torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)


def outputs_together(scales: Tensor) -> Tensor:
    """The same scales or zeros [O, I / g], laid out in memory so that the outputs of a group are neighbours.

    >>> outputs_together(torch.zeros(3, 2)).stride()
    (1, 3)
    """
    return scales.T.contiguous().T


def weight_bytes(num_outputs: int, num_inputs: int, group_size: int | None = None) -> int:
    """Bytes of an int4 matrix in groups, or without a group size of an int8 one, scales and zeros in fp16.

    >>> weight_bytes(4096, 4096), weight_bytes(4096, 4096, 128)  # of 33,554,432 in bf16
    (16785408, 8912896)
    """
    if group_size is None:
        return num_outputs * (num_inputs + 2)
    return num_outputs * (num_inputs // 2 + num_inputs // group_size * 4)
