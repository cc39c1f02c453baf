"""Decode attention against its reference in float64: every format, any number of splits, and not a slot too many is read."""

import pytest
import torch

from minserve_kernels import reference
from minserve_kernels.decode_attention import choose_num_splits, decode_attention
from minserve_kernels.interpret import interpreted
from minserve_kernels.kv import bytes_per_head
from minserve_kernels.memtrace import trace, traffic
from tests.kernels.attention_cases import FORMATS, LENGTHS, Paged, bound, error, paged, slots_read


def decode_error(requests: Paged, num_heads: int, dtype: torch.dtype, window: int | None = None, **tuning: int) -> float:
    cache, scale = requests.cache, requests.cache.head_dim**-0.5
    q = torch.randn(len(requests.lengths), num_heads, cache.head_dim).to(dtype)
    with trace(), interpreted():
        got = decode_attention(q, *requests, scale, window, **({"tile_tokens": 16} | tuning))
    assert got.dtype == dtype and got.shape == q.shape
    return error(got, reference.decode_attention(q.double(), *requests, scale, window))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("format", "dtype"), FORMATS, ids=str)
def test_formats(format: str, dtype: torch.dtype, num_splits: int) -> None:
    requests = paged(format, 64, 1, lengths=(7, 50))
    assert decode_error(requests, 3, dtype, num_splits=num_splits) < bound(dtype, format)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_splits"), [(9, 3, 1), (9, 3, 2), (4, 4, 3), (4, 1, 3), (4, 1, 4)])
def test_every_length(num_heads: int, num_kv_heads: int, num_splits: int) -> None:
    """More splits than tiles too: then some of them are empty."""
    requests = paged("bf16", 64, num_kv_heads, lengths=LENGTHS)
    assert decode_error(requests, num_heads, torch.bfloat16, num_splits=num_splits) < bound(torch.bfloat16, requests.cache.format)


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_head_sizes(head_dim: int, format: str) -> None:
    requests = paged(format, head_dim, 2, lengths=(17, 33))
    assert decode_error(requests, 4, torch.bfloat16, num_splits=2) < bound(torch.bfloat16, requests.cache.format)


@pytest.mark.parametrize("format", ["fp32", "int4"])
@pytest.mark.parametrize(("num_slots", "tile_tokens"), [(16, 32), (32, 16), (64, 32)])
def test_a_tile_and_a_block_know_nothing_of_each_other(num_slots: int, tile_tokens: int, format: str) -> None:
    requests = paged(format, 64, 1, lengths=(1, 50), num_slots=num_slots)
    assert decode_error(requests, 2, torch.float32, tile_tokens=tile_tokens) < bound(torch.float32, requests.cache.format)


def test_more_query_heads_than_a_tile_has_rows() -> None:
    requests = paged("fp32", 64, 1, lengths=(17, 20))
    assert decode_error(requests, 37, torch.float32, num_splits=2) < bound(torch.float32, requests.cache.format)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("window", [1, 9, 16, 40, 1000])
def test_window(window: int, num_splits: int) -> None:
    requests = paged("fp32", 64, 1, lengths=(7, 16, 50))
    assert decode_error(requests, 2, torch.float32, window, num_splits=num_splits) < bound(torch.float32, requests.cache.format)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_no_tokens_is_zero(num_splits: int) -> None:
    requests = paged("int4", 64, 1, lengths=(0, 5, 0))
    with trace(), interpreted():
        got = decode_attention(torch.ones(3, 2, 64), *requests, 0.125, num_splits=num_splits, tile_tokens=16)
    assert got[[0, 2]].count_nonzero() == 0 and got[1].count_nonzero() == 2 * 64


def test_queries_may_be_part_of_something_wider() -> None:
    """As a view of queries, keys and values that came out of one product."""
    requests, fused = paged("fp32", 64, 2, lengths=(7, 17)), torch.randn(2, 8, 64)
    q = fused[:, 1:5]
    with trace(), interpreted():
        got = decode_attention(q, *requests, 0.125, tile_tokens=16)
    torch.testing.assert_close(got, reference.decode_attention(q, *requests, 0.125), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", ["bf16", "int8", "int4", "fp8"])
def test_a_nan_is_seen(format: str) -> None:
    requests = paged(format, 64, 1, lengths=(20, 20))
    kv = torch.ones(1, 2, 1, 64)
    kv[0, 1] = torch.nan
    reference.write_kv(kv, requests.slots(0)[3:4], requests.cache)
    with interpreted():
        got = decode_attention(torch.ones(2, 2, 64), *requests, 0.125, tile_tokens=16, num_splits=2)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_scales_smaller_than_fp16_holds_in_a_product() -> None:
    requests = paged("int8", 64, 1, lengths=(33,))
    kv = torch.randn(33, 2, 1, 64) * torch.tensor([1.0, 1e-2])[:, None, None]  # quiet values: scales of 2e-4
    reference.write_kv(kv, requests.slots(0), requests.cache)
    assert decode_error(requests, 2, torch.float16) < bound(torch.float16, "int8")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_reads_each_key_and_value_once_and_nothing_else(format: str, window: int | None) -> None:
    lengths = (1, 16, 17, 50)
    requests = paged(format, 64, 2, lengths)
    cache, q = requests.cache, torch.randn(len(lengths), 4, 64)
    tensors = {"codes": cache.codes} | ({} if cache.scales is None else {"scales": cache.scales})
    with trace(q=q, **tensors) as accesses, interpreted():
        decode_attention(q, *requests, 0.125, window, num_splits=2, tile_tokens=16)
    moved = traffic(accesses)
    num_seen = [length if window is None else min(length, window) for length in lengths]
    seen = [slot for b, n in enumerate(num_seen) for slot in requests.slots(b, lengths[b] - n).tolist()]
    for name in tensors:
        assert slots_read(accesses, cache, name) == set(seen)
        assert moved[name, "load"].times_read == 1
    assert sum(moved[name, "load"].num_bytes for name in tensors) == sum(num_seen) * 2 * 2 * bytes_per_head(64, format)
    assert moved["q", "load"].times_read <= 2  # once for each split


def test_bytes_of_splits_are_those_of_the_docstring() -> None:
    requests, q = paged("bf16", 64, 1, lengths=(33, 48)), torch.randn(2, 4, 64)
    with trace() as accesses, interpreted():
        decode_attention(q, *requests, 0.125, num_splits=3, tile_tokens=16)
    partial = [access for access in accesses if access.tensor in ("answers", "lse")]
    assert {access.kind for access in partial} == {"load", "store"}
    moved = sum(found.num_bytes for found in traffic(partial).values())
    read_twice = 2 * 4 * 3 * 4  # the sums: for the greatest, and for each split's share
    assert moved - read_twice == 8 * 2 * 4 * (64 + 1) * 3


def test_one_split_makes_nothing_but_the_answer() -> None:
    requests, q = paged("bf16", 64, 1, lengths=(33, 50)), torch.randn(2, 4, 64)
    with trace() as accesses, interpreted():
        decode_attention(q, *requests, 0.125, tile_tokens=16)
    assert {access.tensor for access in accesses if access.kind == "store"} == {"answers"}


def test_number_of_splits() -> None:
    assert [choose_num_splits(8, tokens, 132) for tokens in (1, 255, 512, 4096, 100_000)] == [1, 1, 2, 16, 64]
    assert [choose_num_splits(pairs, 1 << 20, 132) for pairs in (1, 3, 132, 263, 264, 1000)] == [512, 128, 2, 2, 1, 1]
