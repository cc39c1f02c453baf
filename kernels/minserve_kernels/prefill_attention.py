"""Prefill: chunks of queries over their request's whole history, both of which lie in the paged cache.

Why: a prompt's queries are many, so here the products cost and not the memory traffic. A program answers a
tile of queries of one KV head: some of the chunk's tokens, with all the query heads that share the KV head,
so that a short chunk too fills the rows of a matrix unit and a key is fetched once for all of them
(FlashAttention, Dao et al. 2022, with the cache in blocks).

Row r of a tile is query r // G of it and head r % G, with G query heads for a KV head. The keys that a
tile's first query sees are seen by all its rows and need no mask; a second loop goes over the last few,
where each row sees its own part.

The grid is made without knowing the lengths of the chunks, which only the GPU has: request b begins with
tile query_starts[b] // n + b, for n queries a tile. That is at least as many as it needs; tiles that nobody
needs return at once.

Invariant: no slot behind a request's last key is read, nor a block that its table does not name.

Taught in notebook 05.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve_kernels import kv_tile
from minserve_kernels.decode_attention import LOG2_E
from minserve_kernels.kv import PagedKV
from minserve_kernels.kv_tile import (
    add_values,
    key_rows,
    key_scores,
    load_queries,
    softmax_step,
    store_answers,
)

FEW_REQUESTS = 64  # up to so many, one compiled kernel will do


class Tile(NamedTuple):
    """What a program has at hand at a time, and with how many warps."""

    rows: int  # of queries and their heads
    tokens: int  # keys and values
    num_warps: int
    num_stages: int = 3


def choose_tile(dtype: torch.dtype, format: str) -> Tile:
    """The largest that compile without spilling registers, for heads up to 128 on sm_80 and sm_90."""
    if dtype == torch.float32:  # multiplied without matrix units: for checks, not for speed
        return Tile(rows=16, tokens=32, num_warps=4)
    return Tile(rows=128, tokens=32 if format == "int4" else 64, num_warps=8)


def prefill_attention(
    q: Tensor,
    cache: PagedKV,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """q: [T, H, D], tables: [B, M] int32, query_starts: [B + 1] int32, lengths: [B] int32 -> [T, H, D]

    Request b has the queries query_starts[b] ... query_starts[b + 1] - 1, the last of its lengths[b]
    tokens. Tokens behind the last request get no answer: what is there is undefined. `window`: how many
    keys a query sees, its own included.

    FLOPs: 4 * H * D for each query and key that it sees. Bytes: 4 * T * H * D of queries and answers, and
    for each tile of queries the keys and values it sees, mostly from L2.
    """
    (num_tokens, num_heads, _), num_requests = q.shape, len(lengths)
    shapes = kv_tile.layout(q, cache)
    group = num_heads // shapes["K"]
    tile = tile or choose_tile(q.dtype, cache.format)
    num_row_tiles = triton.cdiv(group, tile.rows)  # more than one if so many query heads share a KV head
    tile_queries = max(1, tile.rows // group)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    prefill[(num_tokens // tile_queries + num_requests, shapes["K"] * num_row_tiles)](
        *(q, q.stride(0), q.stride(1), cache.codes, kv_tile.scales_or_codes(cache), tables, tables.stride(0)),
        *(query_starts, lengths, num_requests, out, scale * LOG2_E),
        **shapes,
        REQUESTS_PADDED=max(FEW_REQUESTS, triton.next_power_of_2(num_requests)),
        WINDOW=window or 0,
        TILE=tile.tokens,
        ROWS=tile.rows,
        QUERIES=tile_queries,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def find_request(query_starts, tile, num_requests, REQUESTS_PADDED: tl.constexpr, QUERIES: tl.constexpr):
    """The request that a tile belongs to, and which of its tiles it is."""
    requests = tl.arange(0, REQUESTS_PADDED)
    is_request = requests < num_requests
    first_tiles = tl.load(query_starts + requests, mask=is_request, other=0) // QUERIES + requests
    has_begun = is_request & (first_tiles <= tile)
    return tl.max(tl.where(has_begun, requests, 0), 0), tile - tl.max(tl.where(has_begun, first_tiles, 0), 0)


@triton.jit
def attend(
    state,  # most [ROWS], total [ROWS], y, y_high [ROWS, C_PADDED]
    q_low,
    q_high,
    positions,
    codes,
    scales,
    table,
    kv_head,
    begin,
    end,
    scale_log2,
    IS_MASKED: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take in the keys from `begin` up to `end`. Not masked: every row sees all of them."""
    most, total, y, y_high = state
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < end
        places = key_rows(table, tokens, is_token, kv_head, K, S)
        scores = key_scores(q_low, q_high, codes, scales, places, is_token, C, C_PADDED, FORMAT) * scale_log2
        if IS_MASKED:
            is_seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])
            if WINDOW:
                is_seen = is_seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        p, shrink, most, total = softmax_step(scores, most, total)
        y, y_high = y * shrink[:, None], y_high * shrink[:, None]
        values = places + K * S
        y, y_high = add_values(
            p, y, y_high, codes, scales, values, is_token, C, C_PADDED, FORMAT, q_low.dtype
        )
    return most, total, y, y_high


@triton.jit(do_not_specialize=["num_requests"])
def prefill(
    q,  # [T, H, D]
    q_stride,
    q_head_stride,
    codes,  # [N, 2, K, S, C]
    scales,  # [N, 2, K, S, G]
    tables,  # [B, M]
    table_stride,
    query_starts,  # [B + 1]
    lengths,  # [B]
    num_requests,
    out,  # [T, H, D]
    scale_log2,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    REQUESTS_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Grid (tiles of QUERIES queries, K * tiles of query heads): ROWS rows over all keys they see."""
    GROUP: tl.constexpr = H // K
    HEADS: tl.constexpr = GROUP if GROUP < ROWS else ROWS  # of a tile
    ROW_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tiles take longest: they go first
    request, tile = find_request(query_starts, tile, num_requests, REQUESTS_PADDED, QUERIES)
    first_query, end_query = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    first_query += tile * QUERIES
    if first_query >= end_query:
        return

    kv_head, row_tile = tl.program_id(1) // ROW_TILES, tl.program_id(1) % ROW_TILES
    rows = tl.arange(0, ROWS)
    queries, group_heads = first_query + rows // HEADS, row_tile * HEADS + rows % HEADS
    is_row = (rows < QUERIES * HEADS) & (queries < end_query) & (group_heads < GROUP)
    heads = kv_head * GROUP + group_heads
    q_starts = q + queries.to(tl.int64) * q_stride + heads * q_head_stride
    q_low, q_high = load_queries(q_starts, is_row, C, C_PADDED, FORMAT)

    length = tl.load(lengths + request)
    positions = queries + length - end_query
    first_position = first_query + length - end_query
    end = tl.minimum(first_position + QUERIES, length)
    begin, unmasked_end = 0, (first_position + 1) // TILE * TILE
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        unmasked_end = begin
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, C_PADDED], tl.float32),
        tl.zeros([ROWS, C_PADDED], tl.float32),
    )
    table = tables + request * table_stride
    state = attend(
        *(state, q_low, q_high, positions, codes, scales, table, kv_head, begin, unmasked_end, scale_log2),
        *(False, K, S, C, C_PADDED, FORMAT, WINDOW, TILE),
    )
    most, total, y, y_high = attend(
        *(state, q_low, q_high, positions, codes, scales, table, kv_head, unmasked_end, end, scale_log2),
        *(True, K, S, C, C_PADDED, FORMAT, WINDOW, TILE),
    )
    total = total[:, None]
    answer_rows = queries.to(tl.int64) * H + heads
    store_answers(out, answer_rows, is_row, y / total, y_high / total, C, C_PADDED, FORMAT)
