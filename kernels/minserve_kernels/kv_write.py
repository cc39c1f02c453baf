"""Write a step's keys and values into the cache, in the cache's format.

Why: quantizing is free here. The numbers are in registers on their way to memory anyway; to find the largest
of a head and to divide by it costs nothing beside the bytes, of which int4 writes a quarter.

Invariant: codes and scales are those of `kv.encode`, up to a GPU's faster division; what is not finite stays
so.

Taught in notebook 08.
"""

import triton
import triton.language as tl
from torch import Tensor

from minserve_kernels.kv import INT4_MOST, PagedKV

MOST_ROWS = 16  # heads that a program writes


def write_kv(kv: Tensor, slots: Tensor, cache: PagedKV, num_warps: int | None = None) -> None:
    """Store a step's keys and values in the cache's format. A negative slot is padding: nothing is written.

    kv: [T, 2, K, D], keys first; slots: [T] ids, each block x S + offset, no two alike. Bytes: 2 T K heads
    are read in their own type, and written in D + 2 bytes each (int8), D / 2 + 4 (int4), or D numbers.
    """
    num_tokens, _, num_kv_heads, head_dim = kv.shape
    _, _, cache_heads, num_slots, num_codes = cache.codes.shape
    assert kv.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1), (kv.shape, kv.stride())
    assert (cache_heads, cache.head_dim) == (num_kv_heads, head_dim), (cache.codes.shape, kv.shape)
    assert cache.codes.is_contiguous() and (cache.scales is None or cache.scales.is_contiguous())
    num_rows, padded = (
        min(MOST_ROWS, triton.next_power_of_2(2 * num_kv_heads)),
        triton.next_power_of_2(num_codes),
    )
    _write_kv[(num_tokens, triton.cdiv(2 * num_kv_heads, num_rows))](
        kv,
        slots,
        cache.codes,
        cache.codes if cache.scales is None else cache.scales,
        kv.stride(0),
        HEADS=2 * num_kv_heads,
        D=head_dim,
        S=num_slots,
        C=num_codes,
        C_PADDED=padded,
        ROWS=num_rows,
        INT4_MOST=INT4_MOST,
        FORMAT=cache.format,
        num_warps=num_warps or max(num_rows * padded // 512, 1),  # 16 numbers a thread: two loads of 16 bytes
    )


@triton.jit
def _write_kv(
    kv,
    slots,
    codes,
    scales,
    kv_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    INT4_MOST: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program: up to ROWS of a token's 2 K heads. To the cache, keys and values are heads alike."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    heads, columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, C_PADDED)
    is_head = heads < HEADS
    is_there = is_head[:, None] & (columns < C)[None, :]
    if slot >= 0:
        targets = (slot // S * HEADS + heads) * S + slot % S  # rows of [N, 2 K, S, C]
        places = kv + token * kv_stride + heads[:, None] * D + columns[None, :]
        x = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
        if FORMAT == "int4":
            x_high = tl.load(places + C, mask=is_there, other=0.0).to(tl.float32)
            scale, scale_high = _scale(x, INT4_MOST), _scale(x_high, INT4_MOST)
            tl.store(scales + targets * 2, scale, mask=is_head)
            tl.store(scales + targets * 2 + 1, scale_high, mask=is_head)
            numbers = (_nibble(x, scale) | _nibble(x_high, scale_high) << 4).to(tl.uint8)
        elif FORMAT == "int8":
            scale = _scale(x, 127.0)
            tl.store(scales + targets, scale, mask=is_head)
            numbers = _clamp(_round(_divide(x, scale)), -127.0, 127.0).to(tl.int8)
        elif FORMAT == "fp8":
            # A cast alone would make NaN of some that are finite. x - x is NaN where x is not.
            numbers = tl.where(tl.abs(x) < float("inf"), _clamp(x, -448.0, 448.0), x - x).to(tl.float8e4nv)
        else:
            numbers = x.to(codes.dtype.element_ty)
        tl.store(codes + targets[:, None] * C + columns[None, :], numbers, mask=is_there)


@triton.jit
def _scale(x, most):
    """What divides the largest number of each row to `most`; NaN where one is, which tl.max passes over."""
    nans = tl.sum(tl.where(x != x, x, 0.0), 1)
    return (tl.max(tl.abs(x), 1) / most + nans).to(tl.float16)


@triton.jit
def _divide(x, scale):
    """x / scale; 0 where the scale is 0, and 0 for NaN, whose scale is NaN and tells it."""
    divisor = scale.to(tl.float32)[:, None]
    ratio = x / tl.where(divisor == 0.0, 1.0, divisor)
    return tl.where((divisor == 0.0) | (ratio != ratio), 0.0, ratio)


@triton.jit
def _nibble(x, scale):
    return _clamp(_round(_divide(x, scale) + 7.5), 0.0, 15.0).to(tl.int32)


@triton.jit
def _clamp(x, least, most):
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def _round(x):
    """To the nearest whole number, ties to even."""
    # Beyond 2^23 a float32 has no fraction left, so adding 1.5 x 2^23 drops it.
    return (x + 12582912.0) - 12582912.0
