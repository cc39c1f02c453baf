"""Rotary positions: turn pairs of a head's numbers by angles that grow with the token's position.

Why: all heads of a token are turned by the same angles, so a program takes many heads of one token and reads
their cosines and sines once. Pairs are half a head apart, (i, i + D/2): two runs of neighbours, which load 16
bytes at a time.

Invariant: turned in float32, rounded once. A program reads all that it turns before it writes, so it may do
so in place.

Source: RoFormer (arXiv 2104.09864). Taught in notebook 05.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_HEADS = 16  # that a program turns


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool = False, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Turn every head of queries and keys by its token's angles. -> q, k; `in_place`: the same tensors

    q: [T, H, D], k: [T, K, D], cos, sin: [T, D/2] float32. Tokens may lie any distance apart, as they do
    where q, k and v came out of one product. Bytes: 2 T (H + K) D numbers and T D floats of angles.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    for x in (q, k):
        assert x.stride()[1:] == (head_dim, 1), (x.shape, x.stride())
    assert (
        cos.shape == sin.shape == (num_tokens, head_dim // 2) and cos.is_contiguous() and sin.is_contiguous()
    )
    new_q, new_k = (x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    padded = triton.next_power_of_2(head_dim // 2)
    num_tiles = triton.cdiv(num_heads, NUM_HEADS) + triton.cdiv(num_kv_heads, NUM_HEADS)
    _rope[(num_tokens, num_tiles)](
        q,
        k,
        new_q,
        new_k,
        cos,
        sin,
        q.stride(0),
        k.stride(0),
        new_q.stride(0),
        new_k.stride(0),
        H=num_heads,
        K=num_kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=padded,
        NUM_HEADS=NUM_HEADS,
        num_warps=num_warps
        or max(NUM_HEADS * padded // 512, 1),  # 16 numbers a thread: two loads of 16 bytes
    )
    return new_q, new_k


@triton.jit
def _rope(
    q,
    k,
    new_q,
    new_k,
    cos,
    sin,
    q_stride,
    k_stride,
    new_q_stride,
    new_k_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
):
    """One program: up to NUM_HEADS heads of one token, of its queries or of its keys."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_query_tiles: tl.constexpr = (H + NUM_HEADS - 1) // NUM_HEADS
    columns = tl.arange(0, HALF_PADDED)
    angles = token * HALF + columns
    c = tl.load(cos + angles, mask=columns < HALF, other=0.0)[None, :]
    s = tl.load(sin + angles, mask=columns < HALF, other=0.0)[None, :]
    if tile < num_query_tiles:
        heads = tile * NUM_HEADS + tl.arange(0, NUM_HEADS)
        _turn(q + token * q_stride, new_q + token * new_q_stride, c, s, heads, columns, H, HALF)
    else:
        heads = (tile - num_query_tiles) * NUM_HEADS + tl.arange(0, NUM_HEADS)
        _turn(k + token * k_stride, new_k + token * new_k_stride, c, s, heads, columns, K, HALF)


@triton.jit
def _turn(x, y, c, s, heads, columns, NUM_ALL: tl.constexpr, HALF: tl.constexpr):
    """(a, b) becomes (a cos - b sin, b cos + a sin). x, y: a token's heads"""
    places = heads[:, None] * (2 * HALF) + columns[None, :]
    is_there = (heads < NUM_ALL)[:, None] & (columns < HALF)[None, :]
    a = tl.load(x + places, mask=is_there, other=0.0).to(tl.float32)
    b = tl.load(x + places + HALF, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y + places, (a * c - b * s).to(y.dtype.element_ty), mask=is_there)
    tl.store(y + places + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=is_there)
