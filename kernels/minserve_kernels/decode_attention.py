"""Decode: one query token of each request against all of its keys and values, wherever their blocks lie.

Why: this is what an engine does most of the time, and it is all memory traffic: a key is fetched, used for
the H / K query heads that share it, and not needed again. So the kernel's aim is that every byte of the
cache comes once and that enough of them are on their way.

    split    one program answers the query heads of one KV head of one request over one part ("split") of
    its keys. Few requests
             alone would leave most of a GPU idle; splits keep it busy (Flash-Decoding, Dao et al. 2023).
    reduce   puts the splits of a head together. With one split nothing is to be put together, and `split`
    writes the answer.

The matrix units multiply 16 rows at least, so the query heads of a KV head are padded to 16 rows. A tile of
keys is as long as it likes: each of its tokens looks its block up in the table, so blocks of any size fill
it. Softmax runs along (Milakov and Gimelshein 2018), in powers of two, since that is what the hardware
computes.

Scales of int8 and int4 codes are multiplied into the scores and into the weights, one product per key and
not D of them. An int4 byte holds the numbers j and j + D/2 of a head, so the query is cut in two halves and
no nibbles are shuffled (`kv_tile`).

Invariant: no slot behind a request's last key is read, nor a block that its table does not name.

Taught in notebook 05.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve_kernels import kv_tile
from minserve_kernels.kv import PagedKV
from minserve_kernels.kv_tile import (
    add_values,
    key_rows,
    key_scores,
    load_queries,
    softmax_step,
    store_answers,
)

ROWS = 16  # of a tile of queries: the least that matrix units multiply
MIN_SPLIT_TOKENS = 256  # a shorter split costs more than it brings
LOG2_E = math.log2(math.e)


def decode_attention(
    q: Tensor,
    cache: PagedKV,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    *,
    num_splits: int | None = None,
    tile_tokens: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Tensor:
    """q: [B, H, D], tables: [B, M] int32, lengths: [B] int32, own token included -> [B, H, D]

    A request of length 0 gets zeros. `window`: how many keys a query sees, its own included.

    Bytes: sum(lengths) * 2 K * bytes_per_head of the cache, each once (more than 16 query heads for a KV
    head read them again, from L2), 2 * B * H * D of queries and answers. With n splits, also 8 * B * H * (D
    + 1) * n of partial answers, written and read: for n = 1 none.
    """
    num_requests, num_heads, head_dim = q.shape
    shapes = kv_tile.layout(q, cache)
    tile_tokens = tile_tokens or choose_tile_tokens(q, cache)
    if num_splits is None:
        most_keys = tables.shape[1] * shapes["S"]
        num_splits = choose_num_splits(num_requests * shapes["K"], most_keys, num_processors(q.device))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    answers = lse = out  # of the splits; with one split there is nothing to keep
    if num_splits > 1:
        answers = torch.empty(num_requests, num_heads, num_splits, head_dim, device=q.device)
        lse = torch.empty(num_requests, num_heads, num_splits, device=q.device)
    num_row_tiles = triton.cdiv(num_heads // shapes["K"], ROWS)
    range_of_split = {"NUM_SPLITS": num_splits, "WINDOW": window or 0, "TILE": tile_tokens}
    decode_split[(shapes["K"] * num_row_tiles, num_requests, num_splits)](
        *(
            q,
            q.stride(0),
            q.stride(1),
            cache.codes,
            kv_tile.scales_or_codes(cache),
            tables,
            tables.stride(0),
            lengths,
        ),
        *(out if num_splits == 1 else answers, lse, scale * LOG2_E),
        **shapes,
        **range_of_split,
        ROWS=ROWS,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        decode_reduce[(num_heads, num_requests)](
            *(answers, lse, lengths, out),
            D=head_dim,
            D_PADDED=triton.next_power_of_2(head_dim),
            SPLITS_PADDED=triton.next_power_of_2(num_splits),
            **range_of_split,
            num_warps=1,
        )
    return out


def choose_tile_tokens(q: Tensor, cache: PagedKV) -> int:
    """Keys that a program fetches at a time: 16 KiB of them, if registers last on sm_80, sm_90 and gfx942."""
    if q.dtype == torch.float32:  # multiplied without matrix units: for checks, not for speed
        return 16
    has_room = q.dtype == torch.bfloat16 and cache.head_dim in (64, 128)  # tried by compiling
    return 128 if has_room and cache.codes.itemsize == 1 else 64


def choose_num_splits(num_pairs: int, most_keys: int, num_processors: int) -> int:
    """So many that each processor has two programs, if they are not too short. num_pairs: request and KV head

    A power of two: the kernel is compiled for each number, and batches of all sizes come along.

    >>> [choose_num_splits(pairs, keys, 132) for pairs, keys in ((8, 4096), (16 * 8, 16384), (64 * 8, 4096))]
    [16, 4, 1]
    """
    wanted = triton.next_power_of_2(triton.cdiv(2 * num_processors, num_pairs))
    most = max(1, most_keys // MIN_SPLIT_TOKENS)
    return min(wanted, 1 << (most.bit_length() - 1))


def num_processors(device: torch.device) -> int:
    """A GPU's multiprocessors; a CPU, where kernels are interpreted, runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def split_range(length, split, NUM_SPLITS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """First key of a split, and the one behind its last. Splits are whole tiles; the last may be empty."""
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    split_tokens = tl.cdiv(tl.cdiv(length - first, TILE), NUM_SPLITS) * TILE
    begin = first + split * split_tokens
    return begin, tl.minimum(begin + split_tokens, length)


@triton.jit
def decode_split(
    q,  # [B, H, D]
    q_stride,
    q_head_stride,
    codes,  # [N, 2, K, S, C]
    scales,  # [N, 2, K, S, G]
    tables,  # [B, M]
    table_stride,
    lengths,  # [B]
    answers,  # [B, H, NUM_SPLITS, D]
    lse,  # [B, H, NUM_SPLITS]: log2 of the sum of exp2 of a split's scores
    scale_log2,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (K * tiles of ROWS query heads, B, NUM_SPLITS): answers from one split of the keys."""
    GROUP: tl.constexpr = H // K
    ROW_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head, row_tile = tl.program_id(0) // ROW_TILES, tl.program_id(0) % ROW_TILES
    request, split = tl.program_id(1), tl.program_id(2)
    begin, end = split_range(tl.load(lengths + request), split, NUM_SPLITS, WINDOW, TILE)
    if NUM_SPLITS > 1 and begin >= end:
        return  # `decode_reduce` knows

    rows = row_tile * ROWS + tl.arange(0, ROWS)
    heads, is_row = kv_head * GROUP + rows, rows < GROUP
    q_low, q_high = load_queries(q + request * q_stride + heads * q_head_stride, is_row, C, C_PADDED, FORMAT)
    table = tables + request * table_stride
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, C_PADDED], tl.float32)
    y_high = tl.zeros([ROWS, C_PADDED], tl.float32)
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < end
        places = key_rows(table, tokens, is_token, kv_head, K, S)
        scores = key_scores(q_low, q_high, codes, scales, places, is_token, C, C_PADDED, FORMAT) * scale_log2
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        p, shrink, most, total = softmax_step(scores, most, total)
        y, y_high = y * shrink[:, None], y_high * shrink[:, None]
        y, y_high = add_values(
            p, y, y_high, codes, scales, places + K * S, is_token, C, C_PADDED, FORMAT, q.dtype.element_ty
        )

    sum_or_1 = tl.where(total == 0, 1.0, total)  # no key at all: the answer is 0
    starts = (request * H + heads) * NUM_SPLITS + split
    store_answers(
        answers, starts, is_row, y / sum_or_1[:, None], y_high / sum_or_1[:, None], C, C_PADDED, FORMAT
    )
    if NUM_SPLITS > 1:
        tl.store(lse + starts, most + tl.log2(sum_or_1), mask=is_row)


@triton.jit
def decode_reduce(
    answers,  # [B, H, NUM_SPLITS, D]
    lse,  # [B, H, NUM_SPLITS]
    lengths,  # [B]
    out,  # [B, H, D]
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (H, B): the splits' answers, each weighted with its share of the whole softmax."""
    head, request = tl.program_id(0), tl.program_id(1)
    row = request * tl.num_programs(0) + head
    splits, columns = tl.arange(0, SPLITS_PADDED), tl.arange(0, D_PADDED)
    begins, ends = split_range(tl.load(lengths + request), splits, NUM_SPLITS, WINDOW, TILE)
    is_split = (splits < NUM_SPLITS) & (begins < ends)
    lses = tl.load(lse + row * NUM_SPLITS + splits, mask=is_split, other=float("-inf"))
    most = tl.max(lses, 0)
    total = tl.sum(tl.where(is_split, tl.exp2(lses - most), 0.0), 0)
    y = tl.zeros([D_PADDED], tl.float32)
    for split in range(tl.sum(is_split.to(tl.int32), 0)):  # those that have keys are the first ones
        place = row * NUM_SPLITS + split
        share = tl.exp2(tl.load(lse + place) - most) / total
        y += share * tl.load(answers + place * D + columns, mask=columns < D, other=0.0)
    tl.store(out + row * D + columns, y.to(out.dtype.element_ty), mask=columns < D)
