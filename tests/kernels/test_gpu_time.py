"""What is timed on a card, in the interpreter at small sizes: it runs, and it moves the bytes that are counted for it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from minserve_kernels import gpu_time, reference
from minserve_kernels.gpu_check import Heads
from minserve_kernels.gpu_clock import Work
from minserve_kernels.interpret import interpreted
from minserve_kernels.memtrace import trace

CPU, HEADS = torch.device("cpu"), Heads(4, 2, 64)
NOT_COUNTED = {"tables", "lengths", "query_starts", "first_tiles"}  # a few numbers for each request


def moved_bytes(work: Work) -> int:
    """Every byte that a launch's kernels touch, each once for loads and once for stores; block tables aside."""
    launch = work.ways[0]()
    with trace() as accesses, interpreted():
        launch()
    elements: dict[tuple[str, str, int], set[int]] = {}
    for access in accesses:
        if access.tensor not in NOT_COUNTED:
            key = (access.tensor, access.kind, access.element_bytes)
            elements.setdefault(key, set()).update(np.unique(access.elements).tolist())
    return sum(element_bytes * len(some) for (_, _, element_bytes), some in elements.items())


WORKS: dict[str, Work] = {
    "decode bf16": gpu_time.paged_decode(HEADS, 2, 40, "bf16", CPU),
    "decode fp8": gpu_time.paged_decode(HEADS, 2, 40, "fp8", CPU),
    "decode int8": gpu_time.paged_decode(HEADS, 2, 40, "int8", CPU),
    "decode int4": gpu_time.paged_decode(HEADS, 2, 40, "int4", CPU),
    "prefill": gpu_time.paged_prefill(HEADS, 40, CPU),
    "norm": gpu_time.norm(3, 96, CPU),
    "swiglu": gpu_time.activation(3, 96, CPU),
    "rope": gpu_time.rotation(HEADS, 3, CPU),
    "write bf16": gpu_time.kv_write(HEADS, 20, "bf16", CPU),
    "write int4": gpu_time.kv_write(HEADS, 20, "int4", CPU),
    "int8 product": gpu_time.int8_product(3, 40, 128, CPU),
    "int4 product": gpu_time.int4_product(3, 40, 256, CPU),
}


@pytest.mark.parametrize("name", WORKS)
def test_bytes_counted_are_bytes_moved(name: str) -> None:
    torch.manual_seed(0)
    assert moved_bytes(WORKS[name]) == WORKS[name].num_bytes


def test_torchs_ways_agree_with_each_other() -> None:
    def answers(work: Work) -> list[torch.Tensor]:
        found = []
        for way in work.ways:
            torch.manual_seed(1)
            found.append(way()())
        return [answer.flatten() for answer in found if isinstance(answer, torch.Tensor)]

    for work in (gpu_time.contiguous_decode(HEADS, 2, 32, CPU), gpu_time.gathered_decode(HEADS, 2, 32, CPU)):
        first, *others = answers(work)
        assert len(others) == 5  # three backends, folded and not
        for other in others:
            torch.testing.assert_close(other.float(), first.float(), atol=2e-2, rtol=2e-2)


def test_gathering_fetches_what_the_tables_name() -> None:
    """The gathered answer is that of the kernel on the same cache: both make their tensors in one order from one seed."""
    torch.manual_seed(2)
    gathered = gpu_time.gathered_decode(HEADS, 2, 32, CPU).ways[0]()()
    torch.manual_seed(2)
    tables = gpu_time.random_tables(2, 32, CPU)
    cache = gpu_time.random_cache(HEADS, tables.numel(), "bf16", CPU)
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16)[:, :, 0]
    lengths = torch.full((2,), 32, dtype=torch.int32)
    wanted = reference.decode_attention(q, cache, tables, lengths, 64**-0.5)
    assert isinstance(gathered, torch.Tensor)
    torch.testing.assert_close(gathered[:, :, 0].float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_flops_of_causal_attention_by_counting() -> None:
    seen = sum(range(1, 9))  # keys that 8 queries see
    assert gpu_time.causal_flops(Heads(4, 2, 16), 8) == 4 * seen * (2 * 16 + 2 * 16)


@pytest.mark.parametrize("make", [gpu_time.copy, gpu_time.matmul], ids=["copy", "matmul"])
def test_ceilings_run(make: Callable[[int, torch.device], Work]) -> None:
    work = make(32, CPU)
    work.ways[0]()()
    assert (work.num_bytes, work.num_flops) == ((64, 0) if make is gpu_time.copy else (3 * 32 * 32 * 2, 2 * 32**3))


def test_products_of_all_kinds_count_the_same_flops() -> None:
    makers = (gpu_time.bf16_product, gpu_time.int8_product, gpu_time.int4_product)
    assert {make(3, 40, 256, CPU).num_flops for make in makers} == {2 * 3 * 40 * 256}
