import math
import random
from dataclasses import replace

import pytest
import torch

from minserve.core.batch import ScheduledBatch
from minserve.model import attention
from minserve.model.attention import AttentionMetadata, paged_attention, plan_groups
from minserve.model.kv_cache import KVCache
from minserve_kernels.kv import decode, encode
from tests.model.tiny_net import batch_of, full_logits, make_runner, request, row_logits, tiny_config, tiny_decoder, tokens_for

D = 32
SCALE = D**-0.5
MIXES = {
    "decodes of many lengths": [(n - 1, n) for n in (1, 2, 16, 17, 33, 64, 65, 130, 200)],
    "prompts": [(0, 1), (0, 5), (0, 16), (0, 100), (0, 129), (0, 300)],
    "chunks with history": [(16, 40), (37, 165), (7, 8), (100, 300)],
    "everything": [(0, 33), (40, 41), (16, 48), (99, 100), (0, 200), (150, 290), (63, 64)],
}


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """One request, one query token and head at a time. q: [t, H, D]; k, v: [end, K, D] -> [t, H * D]"""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for i in range(len(q)):
        seen = slice(max(0, start + i + 1 - window) if window else 0, start + i + 1)
        for head in range(q.shape[1]):
            weights = torch.softmax(k[seen, head // group] @ q[i, head] * SCALE, dim=0)
            out[i, head] = weights @ v[seen, head // group]
    return out.flatten(1)


def scenario(chunks: list[tuple[int, int]], num_heads: int, num_kv_heads: int, size: int, seed: int = 0, kv_cache_dtype: str = "fp32"):
    """Requests computed up to `start` that now compute [start, end), with random keys and values in scattered blocks."""
    torch.manual_seed(seed)
    config = tiny_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=D, num_layers=1)
    num_blocks = sum(-(-end // size) for _, end in chunks) + 3
    cache = KVCache(config, num_blocks, size, kv_cache_dtype)
    # Whatever is not written is poison.
    for tensor in (cache.blocks, cache.scales) if cache.scales is not None else (cache.blocks,):
        tensor[:, :num_blocks] = torch.nan if tensor.is_floating_point() else 77
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    rows, kvs = [], {}
    for i, (start, end) in enumerate(chunks):
        table = [free.pop() for _ in range(-(-end // size))]
        rows.append((request(f"R{i}", [1] * end), start, end, table))
        kvs[f"R{i}"] = kv = torch.randn(end, 2, num_kv_heads, D)
        slots = torch.tensor([table[p // size] * size + p % size for p in range(end)])
        cache.write(0, kv, cache.place(slots))
    queries = {f"R{i}": torch.randn(end - start, num_heads, D) for i, (start, end) in enumerate(chunks)}
    return cache, batch_of(*rows), queries, kvs


def attend(cache: KVCache, batch: ScheduledBatch, queries: dict[str, torch.Tensor], window: int | None = None) -> dict[str, torch.Tensor]:
    metadata = AttentionMetadata.build(batch, cache, {window}, torch.float32)
    q = torch.cat([queries[row.request.request_id] for row in metadata.rows])
    out = paged_attention(q, cache, 0, metadata, SCALE, window)
    pieces = out.split([row.num_tokens for row in metadata.rows])
    return {row.request.request_id: piece for row, piece in zip(metadata.rows, pieces, strict=True)}


@pytest.mark.parametrize("chunks", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("window", [None, 7, 70])
def test_any_mix_equals_one_request_at_a_time(chunks, window):
    cache, batch, queries, kvs = scenario(chunks, num_heads=4, num_kv_heads=2, size=16)
    got = attend(cache, batch, queries, window)
    for row in batch.rows:
        name = row.request.request_id
        k, v = kvs[name].unbind(1)
        torch.testing.assert_close(got[name], naive(queries[name], k, v, row.start, window), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("num_shared", [0, 43])
def test_any_format_equals_attention_over_the_numbers_that_it_keeps(num_shared: int, kv_cache_dtype: str):
    """With 43 shared blocks, enough that they are fetched once for all who begin with them."""
    chunks = [(0, 5), *[(699, 700)] * 4, (701, 702), (690, 730)] if num_shared else MIXES["everything"]
    cache, batch, queries, kvs = scenario(chunks, num_heads=6, num_kv_heads=2, size=16, kv_cache_dtype=kv_cache_dtype)
    if num_shared:
        first, model, *others = batch.rows
        others = [replace(row, block_table=model.block_table[:num_shared] + row.block_table[num_shared:]) for row in others]
        batch = replace(batch, rows=(first, model, *others))
        for row in others:
            kvs[row.request.request_id][: num_shared * 16] = kvs["R1"][: num_shared * 16]
    assert any(group.num_shared for group in plan_groups(batch.rows, 16)) == bool(num_shared)
    got = attend(cache, batch, queries)
    for row in batch.rows:
        name = row.request.request_id
        kept = decode(*encode(kvs[name], kv_cache_dtype), kv_cache_dtype, torch.float32)
        want = naive(queries[name], kept[:, 0], kept[:, 1], row.start, None)
        torch.testing.assert_close(got[name], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 3, 16, 32])
def test_any_block_size(size):
    cache, batch, queries, kvs = scenario(MIXES["everything"], num_heads=2, num_kv_heads=1, size=size, seed=size)
    got = attend(cache, batch, queries)
    for row in batch.rows:
        name = row.request.request_id
        torch.testing.assert_close(got[name], naive(queries[name], kvs[name][:, 0], kvs[name][:, 1], row.start, None), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(12, 12), (32, 8), (28, 4), (4, 1)])
@pytest.mark.parametrize("chunk", [(0, 3), (16, 17)])
def test_case_70_each_query_head_reads_its_kv_head(num_heads, num_kv_heads, chunk):
    """Values of KV head h are all h, so the output of a query head is the number of the head that it read."""
    cache, batch, queries, _ = scenario([chunk], num_heads, num_kv_heads, size=16)
    cache.blocks[0, :-1] = torch.arange(num_kv_heads).float()[:, None, None]
    out = attend(cache, batch, queries)["R0"].view(-1, num_heads, D)[-1, :, 0]
    assert out.round().tolist() == [head // (num_heads // num_kv_heads) for head in range(num_heads)]


@pytest.mark.parametrize("window", [None, 5])
def test_case_68_garbage_behind_the_last_token_changes_nothing(window):
    """17 tokens in blocks of 16: 15 unused slots, and the rest of the pool, hold five different things."""
    results = []
    for garbage in (0.0, 1e3, -1e3, math.inf, math.nan):
        cache, batch, queries, kvs = scenario([(16, 17), (0, 17), (16, 19)], num_heads=4, num_kv_heads=2, size=16)
        cache.blocks[:, : cache.num_blocks] = garbage
        for row in batch.rows:
            slots = torch.tensor([row.block_table[p // 16] * 16 + p % 16 for p in range(row.end)])
            cache.write(0, kvs[row.request.request_id], cache.place(slots))
        results.append(attend(cache, batch, queries, window))
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in results[0])
    assert all(bool(answer.isfinite().all()) for answer in results[0].values())


def test_case_67_a_chunk_sees_only_what_is_computed_so_far():
    """40 tokens in chunks of 16 over a cache of NaN: finite, and the same as in one piece."""
    decoder, token_ids = tiny_decoder(), tokens_for(1, 40)
    runner = make_runner(decoder, num_blocks=5)
    runner.cache.blocks[:, :5] = torch.nan
    pieces = []
    for start in (0, 16, 32):
        end = min(40, start + 16)
        table = [4, 1, 3][: -(-end // 16)]
        pieces.append(row_logits(runner, batch_of((request("R", token_ids), start, end, table)))["R"])
    got = torch.cat(pieces)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, full_logits(decoder, token_ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(5, 7), (8, 3), tuple(range(1, 9))])
def test_case_77_requests_of_a_batch_keep_to_their_own_slots(lengths):
    decoder = tiny_decoder()
    runner = make_runner(decoder, block_size=4)
    rows, used = [], 0
    for i, length in enumerate(lengths):
        num_blocks = -(-length // 4)
        rows.append((request(f"R{i}", tokens_for(i, length)), 0, length, range(used, used + num_blocks)))
        used += num_blocks
    batch = batch_of(*rows)
    metadata = AttentionMetadata.build(batch, runner.cache, {None}, torch.float32)
    slots = (metadata.place[0] * 4 + metadata.place[1]).tolist()
    assert len(set(slots)) == sum(lengths)
    got = row_logits(runner, batch)
    for row in batch.rows:
        alone = full_logits(decoder, row.token_ids, block_size=4)
        torch.testing.assert_close(got[row.request.request_id], alone, atol=1e-4, rtol=1e-4)


def test_a_row_may_read_slots_that_an_earlier_row_of_the_step_writes():
    """Two requests with the same 32 tokens in front: the first writes blocks 0 and 1, the second computes its last 8 tokens only."""
    decoder, prefix = tiny_decoder(), tokens_for(1, 32)
    a, b = [*prefix, *tokens_for(2, 5)], [*prefix, *tokens_for(3, 8)]
    runner = make_runner(decoder)
    runner.cache.blocks[:, :64] = torch.nan
    got = row_logits(runner, batch_of((request("A", a), 0, 37, [0, 1, 2]), (request("B", b), 32, 40, [0, 1, 3])))
    torch.testing.assert_close(got["A"], full_logits(decoder, a), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["B"], full_logits(decoder, b)[32:], atol=1e-4, rtol=1e-4)


def test_a_step_may_need_many_groups(monkeypatch):
    monkeypatch.setattr(attention, "MAX_GROUP_TOKENS", 64)
    cache, batch, queries, kvs = scenario(MIXES["decodes of many lengths"] * 2, num_heads=4, num_kv_heads=2, size=16)
    assert len(AttentionMetadata.build(batch, cache, {None}, torch.float32).groups) > 10
    got = attend(cache, batch, queries)
    for row in batch.rows:
        name = row.request.request_id
        torch.testing.assert_close(got[name], naive(queries[name], kvs[name][:, 0], kvs[name][:, 1], row.start, None), atol=1e-5, rtol=1e-4)


def step_of(chunks: list[tuple[int, int]]) -> ScheduledBatch:
    return batch_of(*[(request(f"R{i}", [1] * end), start, end, (i,)) for i, (start, end) in enumerate(chunks)])


def test_groups_hold_every_row_once_and_are_bounded():
    lengths = random.Random(3).choices(range(1, 9000), k=100)
    batch = step_of([(n - 1, n) for n in lengths] + [(0, 70), (0, 68), (64, 200), (0, 400), (5, 7)])
    groups = plan_groups(batch.rows, 16)
    names = [row.request.request_id for rows, _, _ in groups for row in rows]
    assert sorted(names) == sorted(row.request.request_id for row in batch.rows)
    assert all(len(rows) == 1 or len(rows) * max(row.end for row in rows) <= attention.MAX_GROUP_TOKENS for rows, _, _ in groups)
    assert [len(rows) for rows, num_queries, _ in groups if num_queries == 96] == [2], "chunks of one shape go together"


def cost(groups: list[list[int]]) -> int:
    return sum(attention.GROUP_COST_TOKENS + len(group) * -(-max(group) // attention.ROUND_KEYS) * attention.ROUND_KEYS for group in groups)


@pytest.mark.parametrize("seed", range(20))
def test_decodes_are_cut_where_it_is_cheapest(seed):
    """Against every way to cut 9 lengths in order."""
    lengths = sorted(random.Random(seed).choices(range(1, 800), k=9), reverse=True)
    got = [[row.end for row in rows] for rows, _, _ in plan_groups(step_of([(n - 1, n) for n in lengths]).rows, 16)]
    ways = []
    for cuts in range(1 << 8):
        way = [[lengths[0]]]
        for i, length in enumerate(lengths[1:]):
            way.append([length]) if cuts >> i & 1 else way[-1].append(length)
        ways.append(way)
    assert cost(got) == min(map(cost, ways))


def test_positions_follow_the_rows():
    cache, batch, _, _ = scenario([(16, 20), (6, 7)], num_heads=2, num_kv_heads=1, size=16)
    metadata = AttentionMetadata.build(batch, cache, {None}, torch.float32)
    assert metadata.positions.tolist() == [6, 16, 17, 18, 19]  # decodes first


# --- requests that begin with the same blocks -----------------------------------------------------------


def family(tails: list[tuple[int, int]], num_shared_blocks: int, size: int = 16, seed: int = 0):
    """Requests whose first blocks are the same; `tails` are (start, end) counted behind these. As from `scenario`."""
    shared = num_shared_blocks * size
    cache, batch, queries, kvs = scenario(
        [(shared + start, shared + end) for start, end in tails], num_heads=4, num_kv_heads=2, size=size, seed=seed
    )
    first = batch.rows[0]
    rows = []
    for row in batch.rows:
        name, table = row.request.request_id, (*first.block_table[:num_shared_blocks], *row.block_table[num_shared_blocks:])
        kvs[name][:shared] = kvs[first.request.request_id][:shared]
        rows.append((row.request, row.start, row.end, table))
        for block_id in set(row.block_table) - set(table):
            cache.blocks[:, block_id] = torch.nan  # nobody may read the copies that are not shared
    return cache, batch_of(*rows), queries, kvs


@pytest.mark.parametrize("tails", [[(9, 10), (0, 1), (40, 41)], [(0, 5), (3, 9), (1, 30)], [(4, 5), (0, 7), (20, 21), (16, 40)]])
@pytest.mark.parametrize("window", [None, 20])
def test_a_shared_prefix_changes_nothing(monkeypatch, tails, window):
    monkeypatch.setattr(attention, "GROUP_COST_TOKENS", 8)
    cache, batch, queries, kvs = family(tails, num_shared_blocks=3)
    metadata = AttentionMetadata.build(batch, cache, {window}, torch.float32)
    assert any(group.shared is not None for group in metadata.groups) == (window is None)  # a window ends inside the prefix
    got = attend(cache, batch, queries, window)
    for row in batch.rows:
        name = row.request.request_id
        k, v = kvs[name].unbind(1)
        torch.testing.assert_close(got[name], naive(queries[name], k, v, row.start, window), atol=1e-5, rtol=1e-4)


def test_only_blocks_that_all_have_computed_are_shared(monkeypatch):
    """The second row writes its third block in this step, as a request does that hit two blocks of the prefix."""
    monkeypatch.setattr(attention, "GROUP_COST_TOKENS", 8)
    a, b = request("A", [1] * 60), request("B", [1] * 60)
    [plan] = plan_groups(batch_of((a, 59, 60, [7, 8, 9, 1]), (b, 59, 60, [7, 8, 9, 2])).rows, 16)
    assert (len(plan.rows), plan.num_shared) == (2, 48)
    plans = plan_groups(batch_of((a, 40, 60, [7, 8, 9, 1]), (b, 42, 60, [7, 8, 9, 2])).rows, 16)
    assert [plan.num_shared for plan in plans] == [32]


def test_a_prefix_is_shared_only_where_that_saves_more_than_a_group_costs():
    def num_shared(num_rows: int) -> list[int]:
        rows = [(request(f"R{i}", [1] * 401), 400, 401, [*range(24), 100 + i, 200 + i]) for i in range(num_rows)]
        return [plan.num_shared for plan in plan_groups(batch_of(*rows).rows, 16) if plan.rows]

    assert num_shared(2) == [0]  # 384 tokens saved, a group costs 1,024
    assert num_shared(32) == [384]
