"""The kernel that writes the KV cache, against its reference: the same codes, and nothing else is touched."""

import pytest
import torch
from torch import Tensor

from minserve_kernels import reference
from minserve_kernels.interpret import interpreted
from minserve_kernels.kv import CODES, PagedKV, bytes_per_head, decode
from minserve_kernels.kv_write import write_kv
from minserve_kernels.memtrace import trace, traffic
from tests.kernels.helpers import empty_cache, poisoned_cache

TYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOTS = [3, 40, 17, 16, 63]


def keys_and_values(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Loud, quiet and zero tokens, as the last heads of one product: tokens lie apart."""
    torch.manual_seed(0)
    heads = torch.randn(5, 2 + 2 * num_kv_heads, head_dim) * torch.tensor([1.0, 300.0, 1e-3, 0.0, 8.0])[:, None, None]
    return heads.to(dtype)[:, 2:].unflatten(1, (2, num_kv_heads))


def same_bytes(a: PagedKV, b: PagedKV) -> bool:
    parts = ((a.codes, b.codes), (a.scales, b.scales))
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in parts if x is not None and y is not None)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 3), (80, 1), (96, 2), (128, 9)])
def test_equals_the_reference_and_touches_nothing_else(head_dim: int, num_kv_heads: int, format: str, dtype: torch.dtype) -> None:
    kv, slots = keys_and_values(num_kv_heads, head_dim, dtype), torch.tensor(SLOTS)
    got, wanted = poisoned_cache(format, head_dim, num_kv_heads), poisoned_cache(format, head_dim, num_kv_heads)
    with trace(), interpreted():
        write_kv(kv, slots, got)
    reference.write_kv(kv, slots, wanted)
    assert same_bytes(got, wanted)


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64], ids=str)
def test_padding_is_not_written(slot_type: torch.dtype) -> None:
    kv = keys_and_values(2, 64, torch.float32)
    got, wanted = empty_cache("int8", 64, 2), empty_cache("int8", 64, 2)
    with trace(), interpreted():
        write_kv(kv, torch.tensor([-1, 5, -1, -1, 20], dtype=slot_type), got)
    reference.write_kv(kv[[1, 4]], torch.tensor([5, 20]), wanted)
    assert same_bytes(got, wanted) and got.codes.count_nonzero() > 200


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("format", CODES)
def test_what_is_not_finite_stays_so(format: str, bad: float) -> None:
    kv, cache = torch.ones(1, 2, 1, 64), empty_cache(format, 64, 1)
    kv[0, 1, 0, 5] = bad
    with interpreted():
        write_kv(kv, torch.tensor([0]), cache)
    keys, values = decode(cache.codes, cache.scales, format, torch.float32)[0, :, 0, 0]
    assert not values[5].isfinite()
    if bad != bad:
        assert values[5].isnan()
    torch.testing.assert_close(keys, torch.ones(64), rtol=0.07, atol=0)  # the other heads don't know


def test_fp8_saturates() -> None:
    kv, cache = torch.full((1, 2, 1, 64), 1e4), empty_cache("fp8", 64, 1)
    kv[0, 1] = -450.0
    with interpreted():
        write_kv(kv, torch.tensor([0]), cache)
    assert cache.codes.float()[0, :, 0, 0, 0].tolist() == [448.0, -448.0]


@pytest.mark.parametrize("format", CODES)
def test_bytes_are_those_of_the_formula(format: str) -> None:
    kv, cache = keys_and_values(3, 64, torch.bfloat16), empty_cache(format, 64, 3)
    with trace() as accesses, interpreted():
        write_kv(kv, torch.tensor(SLOTS), cache)
    moved = traffic(accesses)
    num_heads = 5 * 2 * 3
    assert (moved["kv", "load"].num_bytes, moved["kv", "load"].times_read) == (num_heads * 64 * 2, 1.0)
    stored = sum(found.num_bytes for (_, kind), found in moved.items() if kind == "store")
    assert stored == num_heads * bytes_per_head(64, format)
