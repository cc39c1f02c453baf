"""Formats of the KV cache: how a head's numbers are stored, and what they mean, for kernels and engine alike.

A number costs 4, 2, 1 or half a byte. Integer formats share a scale among the numbers of a token and head
(int8) or of half a head (int4), so that a loud token does not cost a quiet one its digits:

    format      a number is           bytes for D numbers
    fp32 ...    itself                4 D; bf16 and fp16: 2 D
    fp8         an e4m3 float         D
    int8        code * scale          D + 2
    int4        (code - 7.5) * scale  D / 2 + 4

Two int4 codes share a byte: byte j has number j in its low half and number j + D/2 in its high half. So a
kernel splits its query in two and never interleaves nibbles.

Invariant: what is not finite stays not finite. A NaN that goes in comes out as a NaN, never as a plausible
number.

Taught in notebook 08.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODES = {**PLAIN, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
NUM_SCALES = {"int8": 1, "int4": 2}  # for each token and head; formats that are not here have none
INT4_MOST = 8.0  # the 16 codes stand in the middles of 16 steps of equal width, and these reach from -8 to 8
FP8_MOST = 448.0  # the largest number of e4m3


class PagedKV(NamedTuple):
    """One layer's cache: by block, key or value, KV head and slot, a head's C codes and G scales."""

    codes: Tensor  # [N, 2, K, S, C]
    scales: Tensor | None  # [N, 2, K, S, G] in fp16, where the format has scales
    head_dim: int  # D
    format: str


def num_codes(head_dim: int, format: str) -> int:
    """Numbers that are stored for a head of D numbers.

    >>> num_codes(64, "int4"), num_codes(64, "int8")
    (32, 64)
    """
    if format not in CODES:
        raise ValueError(f"KV format {format!r} is not known; known: {', '.join(CODES)}")
    if format == "int4" and head_dim % 2:
        raise ValueError(f"int4 stores two numbers a byte and needs an even head size, got {head_dim}")
    return head_dim // 2 if format == "int4" else head_dim


def bytes_per_head(head_dim: int, format: str) -> int:
    """Bytes of one head's keys (or values) of one token, scales included.

    >>> [bytes_per_head(64, name) for name in ("fp32", "bf16", "fp8", "int8", "int4")]
    [256, 128, 64, 66, 36]
    """
    return num_codes(head_dim, format) * CODES[format].itemsize + 2 * NUM_SCALES.get(format, 0)


def encode(x: Tensor, format: str) -> tuple[Tensor, Tensor | None]:
    """x: [..., D] -> codes [..., C], scales [..., G] or None"""
    if format == "int8":
        return _encode_int8(x.float())
    if format == "int4":
        return _encode_int4(x.float())
    if format == "fp8":  # torch would make NaN of finite numbers beyond the largest
        x = torch.where(x.isfinite(), x.clamp(-FP8_MOST, FP8_MOST), torch.nan)
    return x.to(CODES[format]), None


def _encode_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scales(x, 127)
    codes = _divide(x, scales).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def _encode_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    halves = x.unflatten(-1, (2, -1))  # [..., 2, D / 2]
    scales = _scales(halves, INT4_MOST)
    codes = (_divide(halves, scales) + 7.5).round().clamp(0, 15).to(torch.uint8)
    low, high = codes.unbind(-2)
    return low | high << 4, scales.squeeze(-1)


def _scales(x: Tensor, most: float) -> Tensor:
    """What divides the largest number of the last dimension to `most`, rounded as stored. -> [..., 1]"""
    return (x.abs().amax(-1, keepdim=True) / most).to(torch.float16)


def _divide(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales; 0 where the scale is 0, and 0 for NaN, whose scale is NaN and tells it."""
    scales = scales.float()
    return torch.nan_to_num(torch.where(scales == 0, 0.0, x / scales), nan=0.0)


def decode(codes: Tensor, scales: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    """codes: [..., C], scales: [..., G] -> [..., D]"""
    if format == "int4":
        assert scales is not None
        halves = torch.stack((codes & 15, codes >> 4), dim=-2).float() - 7.5  # [..., 2, D / 2]
        return (halves * scales.float().unsqueeze(-1)).flatten(-2).to(dtype)
    if format == "int8":
        assert scales is not None
        return (codes.float() * scales.float()).to(dtype)
    return codes.to(dtype)
