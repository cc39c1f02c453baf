"""Prefill attention against its reference in float64: chunks over histories of any length, and not a slot too many is read."""

import pytest
import torch
from torch import Tensor

from minserve_kernels import reference
from minserve_kernels.aot import SM90, capture, report
from minserve_kernels.interpret import interpreted
from minserve_kernels.memtrace import trace, traffic
from minserve_kernels.prefill_attention import Tile, choose_tile, prefill_attention
from tests.kernels.attention_cases import FORMATS, LENGTHS, Paged, bound, error, paged, slots_read
from tests.kernels.helpers import empty_cache

SMALL = Tile(rows=16, tokens=16, num_warps=4)
NUM_QUERIES = (1, 7, 5, 0, 20, 1)  # a whole prompt, chunks behind a history, one that has no turn, a decode


def starts_of(num_queries: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *num_queries]).cumsum(0).to(torch.int32)


def prefill_error(
    requests: Paged,
    num_queries: tuple[int, ...],
    num_heads: int,
    dtype: torch.dtype,
    window: int | None = None,
    tile: Tile = SMALL,
) -> float:
    cache, tables, lengths = requests
    scale = cache.head_dim**-0.5
    q = torch.randn(sum(num_queries), num_heads, cache.head_dim).to(dtype)
    rest = tables, starts_of(num_queries), lengths, scale, window
    with trace(), interpreted():
        got = prefill_attention(q, cache, *rest, tile=tile)
    assert got.dtype == dtype and got.shape == q.shape
    return error(got, reference.prefill_attention(q.double(), cache, *rest))


@pytest.mark.parametrize(("format", "dtype"), FORMATS, ids=str)
def test_formats(format: str, dtype: torch.dtype) -> None:
    requests = paged(format, 64, 1, lengths=(7, 33))
    assert prefill_error(requests, (7, 3), 3, dtype) < bound(dtype, format)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 1), (4, 4)])
def test_chunks_over_histories(num_heads: int, num_kv_heads: int) -> None:
    requests = paged("bf16", 64, num_kv_heads, lengths=LENGTHS)
    assert prefill_error(requests, NUM_QUERIES, num_heads, torch.bfloat16) < bound(torch.bfloat16, "bf16")


@pytest.mark.parametrize("num_queries", [(50,), (33,), (17,), (16,), (1,)])
def test_any_part_of_a_prompt(num_queries: tuple[int, ...]) -> None:
    requests = paged("fp32", 64, 1, lengths=(50,))
    assert prefill_error(requests, num_queries, 2, torch.float32) < bound(torch.float32, "fp32")


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_head_sizes(head_dim: int, format: str) -> None:
    requests = paged(format, head_dim, 2, lengths=(17, 33))
    assert prefill_error(requests, (3, 5), 4, torch.bfloat16) < bound(torch.bfloat16, format)


@pytest.mark.parametrize("format", ["fp32", "int4"])
@pytest.mark.parametrize(("num_slots", "tile"), [(16, Tile(32, 32, 4)), (32, SMALL), (64, Tile(16, 32, 4))])
def test_a_tile_and_a_block_know_nothing_of_each_other(num_slots: int, tile: Tile, format: str) -> None:
    requests = paged(format, 64, 1, lengths=(9, 50), num_slots=num_slots)
    assert prefill_error(requests, (9, 17), 2, torch.float32, tile=tile) < bound(torch.float32, format)


def test_more_query_heads_than_a_tile_has_rows() -> None:
    requests = paged("fp32", 64, 1, lengths=(5, 20))
    assert prefill_error(requests, (5, 2), 19, torch.float32) < bound(torch.float32, "fp32")


@pytest.mark.parametrize("window", [1, 9, 16, 40, 1000])
def test_window(window: int) -> None:
    requests = paged("fp32", 64, 1, lengths=(7, 50))
    assert prefill_error(requests, (7, 20), 2, torch.float32, window) < bound(torch.float32, "fp32")


@pytest.mark.parametrize("num_queries", [(0, 0, 40), (40, 0, 0), (1,) * 9, (3, 0, 16, 15, 0, 17), (0, 31, 1, 32)])
def test_every_query_finds_its_request(num_queries: tuple[int, ...]) -> None:
    requests = paged("fp32", 64, 1, lengths=[n + 1 for n in num_queries])
    assert prefill_error(requests, num_queries, 1, torch.float32) < bound(torch.float32, "fp32")


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_a_nan_is_seen_but_not_by_tiles_before_it(format: str) -> None:
    requests = paged(format, 64, 1, lengths=(20,))
    kv = torch.ones(1, 2, 1, 64)
    kv[0, 1] = torch.nan
    reference.write_kv(kv, requests.slots(0)[17:18], requests.cache)
    cache, tables, lengths = requests
    with interpreted():
        got = prefill_attention(torch.ones(20, 1, 64), cache, tables, starts_of((20,)), lengths, 0.125, tile=SMALL)
    assert got[17:].isnan().all() and got[:16].isfinite().all()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_reads_what_the_queries_see_and_nothing_else(format: str, window: int | None) -> None:
    requests, num_queries = paged(format, 64, 2, lengths=(17, 50)), (17, 6)
    cache, tables, lengths = requests
    q = torch.randn(sum(num_queries), 4, 64)
    tensors = {"codes": cache.codes} | ({} if cache.scales is None else {"scales": cache.scales})
    with trace(q=q, **tensors) as accesses, interpreted():
        prefill_attention(q, cache, tables, starts_of(num_queries), lengths, 0.125, window, tile=SMALL)
    firsts = [0, 0] if window is None else [0, 50 - 6 + 1 - window]
    seen = [slot for b, first in enumerate(firsts) for slot in requests.slots(b, first).tolist()]
    for name in tensors:
        assert slots_read(accesses, cache, name) == set(seen)
    assert traffic(accesses)["q", "load"].times_read == 1


def test_hopper_multiplies_with_four_warps_together() -> None:
    q, cache = torch.zeros(16, 32, 128, dtype=torch.bfloat16), empty_cache("bf16", 128, 8)
    tables, starts, lengths = torch.zeros(18, dtype=torch.int32).split((15, 2, 1))
    with capture(SM90) as launches:
        prefill_attention(q, cache, tables[None], starts, lengths, 0.125)
    found = report(launches[0].kernel)
    assert found.num_wgmma > 0 and found.num_mma == 0


def test_tiles_are_smaller_where_registers_are_scarce() -> None:
    assert choose_tile(torch.bfloat16, "bf16").rows == 128
    assert choose_tile(torch.bfloat16, "int4").tokens < choose_tile(torch.bfloat16, "int8").tokens
    assert choose_tile(torch.float32, "fp32").rows == 16
