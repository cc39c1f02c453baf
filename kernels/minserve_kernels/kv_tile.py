"""A tile of keys or values: where it lies in the cache, and how its codes take part in a product.

Why: decode and prefill read the same cache in the same formats; what differs is who asks. So what a format
means to a kernel stands here once, as functions that both are compiled with.

A cache [N, 2, K, S, C] is read as a list of rows: row ((block * 2 + kind) * K + head) * S + slot holds the
C codes of one key or value, and its scales stand in the same row of [N, 2, K, S, G]. A head is stored in
parts that have a scale each: int4 has two parts, the halves of the head, everything else one. C is the size
of a part; C_PADDED, the next power of two, is what a tile has room for.

Shapes: M rows of queries, TILE tokens.

Invariant: what is masked off is not read.

Taught in notebook 05.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from minserve_kernels.kv import PagedKV


def layout(q: Tensor, cache: PagedKV) -> dict[str, Any]:
    """What a kernel is compiled for. q: [..., H, D]"""
    _, _, num_kv_heads, num_slots, num_codes = cache.codes.shape
    num_heads, head_dim = q.shape[-2:]
    assert head_dim == cache.head_dim and num_heads % num_kv_heads == 0, (q.shape, cache.codes.shape)
    assert q.stride(-1) == 1 and cache.codes.is_contiguous(), (q.stride(), cache.codes.stride())
    assert cache.scales is None or cache.scales.is_contiguous()
    padded = triton.next_power_of_2(head_dim)
    shapes = {"H": num_heads, "K": num_kv_heads, "S": num_slots, "C": num_codes}
    return shapes | {"C_PADDED": padded // 2 if cache.format == "int4" else padded, "FORMAT": cache.format}


def scales_or_codes(cache: PagedKV) -> Tensor:
    """The scales, or something to pass in their place where the format has none."""
    return cache.codes if cache.scales is None else cache.scales


@triton.jit
def load_queries(starts, is_row, C: tl.constexpr, C_PADDED: tl.constexpr, FORMAT: tl.constexpr):
    """The first and the second part of queries that begin at `starts` [M] -> [M, C_PADDED] each, padding 0"""
    columns = tl.arange(0, C_PADDED)
    is_there = is_row[:, None] & (columns < C)[None, :]
    places = starts[:, None] + columns[None, :]
    q = tl.load(places, mask=is_there, other=0.0)
    q_high = q
    if FORMAT == "int4":
        q_high = tl.load(places + C, mask=is_there, other=0.0)
    return q, q_high


@triton.jit
def store_answers(
    answers, rows, is_row, y, y_high, C: tl.constexpr, C_PADDED: tl.constexpr, FORMAT: tl.constexpr
):
    """Both parts [M, C_PADDED] to the given rows of `answers`, which is contiguous."""
    columns = tl.arange(0, C_PADDED)
    is_there = is_row[:, None] & (columns < C)[None, :]
    places = answers + rows[:, None] * (2 * C if FORMAT == "int4" else C) + columns[None, :]
    tl.store(places, y.to(answers.dtype.element_ty), mask=is_there)
    if FORMAT == "int4":
        tl.store(places + C, y_high.to(answers.dtype.element_ty), mask=is_there)


@triton.jit
def key_rows(table, tokens, is_token, kv_head, K: tl.constexpr, S: tl.constexpr):
    """Rows of the cache that hold the keys of a request's tokens [TILE]; the values are K * S rows on."""
    blocks = tl.load(table + tokens // S, mask=is_token, other=0).to(tl.int64)  # codes may pass 2**31
    return (blocks * (2 * K) + kv_head) * S + tokens % S


@triton.jit
def load_codes(codes, rows, is_token, C: tl.constexpr, C_PADDED: tl.constexpr):
    """-> [TILE, C_PADDED], 0 where there is no token"""
    columns = tl.arange(0, C_PADDED)
    is_there = is_token[:, None]
    if C != C_PADDED:
        is_there = is_there & (columns < C)[None, :]
    return tl.load(codes + rows[:, None] * C + columns[None, :], mask=is_there, other=0.0)


@triton.jit
def split_nibbles(codes, dtype: tl.constexpr):
    """Bytes to the numbers of both parts, -7.5 to 7.5: exact in any type."""
    return ((codes & 15).to(tl.float32) - 7.5).to(dtype), ((codes >> 4).to(tl.float32) - 7.5).to(dtype)


@triton.jit
def key_scores(
    q, q_high, codes, scales, rows, is_token, C: tl.constexpr, C_PADDED: tl.constexpr, FORMAT: tl.constexpr
):
    """Products of queries [M, C_PADDED] and the keys in `rows` [TILE] -> [M, TILE] in float32"""
    keys = load_codes(codes, rows, is_token, C, C_PADDED)
    if FORMAT == "int4":
        low, high = split_nibbles(keys, q.dtype)
        scale_low = tl.load(scales + rows * 2, mask=is_token, other=0.0).to(tl.float32)
        scale_high = tl.load(scales + rows * 2 + 1, mask=is_token, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(low), input_precision="ieee") * scale_low[None, :]
        return scores + tl.dot(q_high, tl.trans(high), input_precision="ieee") * scale_high[None, :]
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    if FORMAT == "int8":
        scores *= tl.load(scales + rows, mask=is_token, other=0.0).to(tl.float32)[None, :]
    return scores


@triton.jit
def add_values(
    p,
    y,
    y_high,
    codes,
    scales,
    rows,
    is_token,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    q_type: tl.constexpr,
):
    """y, y_high [M, C_PADDED] plus the values in `rows` [TILE], weighted with p [M, TILE]"""
    dtype = q_type
    if q_type == tl.float16 and (FORMAT == "int8" or FORMAT == "int4"):
        dtype = tl.bfloat16  # a weight times a scale may be smaller than what fp16 can hold
    values = load_codes(codes, rows, is_token, C, C_PADDED)
    if FORMAT == "int4":
        low, high = split_nibbles(values, dtype)
        scale_low = tl.load(scales + rows * 2, mask=is_token, other=0.0).to(tl.float32)
        scale_high = tl.load(scales + rows * 2 + 1, mask=is_token, other=0.0).to(tl.float32)
        y = tl.dot((p * scale_low[None, :]).to(dtype), low, y, input_precision="ieee")
        y_high = tl.dot((p * scale_high[None, :]).to(dtype), high, y_high, input_precision="ieee")
    else:
        if FORMAT == "int8":
            p *= tl.load(scales + rows, mask=is_token, other=0.0).to(tl.float32)[None, :]
        y = tl.dot(p.to(dtype), values.to(dtype), y, input_precision="ieee")
    return y, y_high


@triton.jit
def softmax_step(scores, most, total):
    """Take in the scores [M, TILE] of more keys -> their weights, a factor for what was summed before, state

    `most` [M] is the greatest score so far, `total` [M] the sum of exp2(score - most). A row that has seen
    no key keeps -inf and 0.
    """
    new_most = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    return p, shrink, new_most, total * shrink + tl.sum(p, 1)
