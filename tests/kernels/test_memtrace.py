"""The memory tracer sees what is out of bounds, what races, and how many bytes move."""

import inspect

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve_kernels.interpret import interpret
from minserve_kernels.memtrace import Access, OutOfBounds, Race, trace, traffic


@triton.jit
def _copy(x, out, n, stride, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + i, tl.load(x + i * stride, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def _copy_unmasked(x, out, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(x + i)  # beyond the end
    tl.store(out + i, values)


@triton.jit
def _sum_to(x, out, n, TILE: tl.constexpr, SLOTS: tl.constexpr):
    i = tl.arange(0, TILE)
    tl.store(out + tl.program_id(0) % SLOTS, tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0))


@triton.jit
def _take_from_neighbour(x):
    i = tl.program_id(0)
    tl.store(x + i, tl.load(x + i + 1) + 1)


@triton.jit
def _count(out):
    tl.atomic_add(out, 1.0)


def line_of(kernel: triton.JITFunction, text: str) -> int:
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


def copied(n: int, stride: int) -> tuple[list[Access], Tensor]:
    x, out = torch.arange(float(n * stride)), torch.zeros(n)
    with trace(x=x, out=out) as accesses:
        interpret(_copy)[(triton.cdiv(n, 16),)](x, out, n, stride, TILE=16)
    assert torch.equal(out, x[::stride])
    return accesses, out


def test_traffic_of_a_copy() -> None:
    accesses, _ = copied(40, 1)  # 3 programs of 16 lanes, 8 of which are off
    moved = traffic(accesses)
    assert moved.keys() == {("x", "load"), ("out", "store")}
    for found in moved.values():
        assert (found.num_bytes, found.times_read, found.sector_use, found.lanes_on) == (160, 1.0, 1.0, 40 / 48)


def test_strided_reads_use_an_eighth_of_what_moves() -> None:
    moved = traffic(copied(16, 8)[0])
    assert moved["x", "load"].sector_use == 1 / 8 and moved["x", "load"].num_bytes == 64
    assert moved["out", "store"].sector_use == 1.0


def test_reading_again_is_counted() -> None:
    x, out = torch.ones(20), torch.zeros(3)
    with trace(x=x, out=out) as accesses:
        interpret(_sum_to)[(3,)](x, out, 20, TILE=32, SLOTS=3)
    assert out.tolist() == [20.0] * 3
    assert (traffic(accesses)["x", "load"].times_read, traffic(accesses)["x", "load"].num_bytes) == (3.0, 240)


def test_an_access_says_who_and_where() -> None:
    accesses, _ = copied(20, 1)
    last = accesses[-1]
    assert (last.kernel, last.program, last.kind, last.tensor) == ("_copy", (1, 0, 0), "store", "out")
    assert last.elements.tolist() == [16, 17, 18, 19] and (last.num_lanes, last.element_bytes) == (16, 4)
    assert last.line == line_of(_copy, "tl.store")


def test_out_of_bounds_names_the_program_and_the_line() -> None:
    x, out = torch.zeros(40), torch.zeros(48)
    line = line_of(_copy_unmasked, "beyond the end")
    with pytest.raises(OutOfBounds, match=rf"load .* _copy_unmasked, program \(2, 0, 0\), line {line}, 8 of 16 lanes"), trace(x=x, out=out):
        interpret(_copy_unmasked)[(3,)](x, out, TILE=16)


def test_arguments_are_watched_by_the_names_of_the_parameters() -> None:
    source, target = torch.arange(16.0), torch.zeros(16)
    with trace() as accesses:
        interpret(_copy)[(1,)](source, target, 16, 1, TILE=16)
    assert traffic(accesses).keys() == {("x", "load"), ("out", "store")}
    with trace(source=source) as accesses:
        interpret(_copy)[(1,)](x=source, out=target, n=16, stride=1, TILE=16)
    assert traffic(accesses).keys() == {("source", "load"), ("out", "store")}
    with trace(x=target) as accesses:  # the name is taken
        interpret(_copy)[(1,)](source, target, 16, 1, TILE=16)
    assert traffic(accesses).keys() == {("_copy.x", "load"), ("x", "store")}


def test_one_tensor_in_two_places_is_one() -> None:
    x = torch.ones(16)
    with trace() as accesses:
        interpret(_copy)[(1,)](x, x, 16, 1, TILE=16)
    assert traffic(accesses).keys() == {("x", "load"), ("x", "store")}


def test_tensors_that_lie_in_each_other_become_one() -> None:
    whole = torch.zeros(48)
    x, out = whole[:32], whole[16:]
    with pytest.raises(Race, match=r"\(1, 0, 0\) loads x\+out\[16\] .* \(0, 0, 0\) stored"), trace():
        interpret(_copy)[(2,)](x, out, 32, 1, TILE=16)


def test_memory_of_nobody_is_out_of_bounds() -> None:
    x, out = torch.zeros(16), torch.zeros(20)
    with pytest.raises(OutOfBounds, match="store"), trace():
        interpret(_copy)[(1,)](x, out[:8], 16, 1, TILE=16)
    with trace(whole=out):
        interpret(_copy)[(1,)](x, out[:8], 16, 1, TILE=16)


def test_a_strided_view_ends_where_its_last_element_does() -> None:
    whole = torch.zeros(4, 32)
    x, out = whole[:3, :16], torch.zeros(80)
    with trace(x=x, out=out):
        interpret(_copy)[(5,)](x, out, 80, 1, TILE=16)  # 2 * 32 + 16 elements from the first to the last
    with pytest.raises(OutOfBounds), trace():
        interpret(_copy)[(6,)](x, torch.zeros(81), 81, 1, TILE=16)


def test_two_programs_that_store_one_element_race() -> None:
    x, out = torch.ones(8), torch.zeros(3)
    with pytest.raises(Race, match=r"program \(2, 0, 0\) stores out\[0\] .* program \(0, 0, 0\) stored"), trace(x=x, out=out):
        interpret(_sum_to)[(3,)](x, out, 8, TILE=8, SLOTS=2)


def test_one_program_that_stores_what_another_loads_races() -> None:
    x = torch.zeros(3)
    with pytest.raises(Race, match=r"program \(1, 0, 0\) stores x\[1\] .* program \(0, 0, 0\) loaded"), trace(x=x):
        interpret(_take_from_neighbour)[(2,)](x)
    interpret(_take_from_neighbour)[(2,)](x)  # without the tracer nobody notices


def test_a_later_launch_may_read_what_an_earlier_one_wrote() -> None:
    x, between, out = torch.arange(32.0), torch.zeros(32), torch.zeros(32)
    with trace(x=x, between=between, out=out) as accesses:
        interpret(_copy)[(2,)](x, between, 32, 1, TILE=16)
        interpret(_copy)[(1,)](between, out, 32, 1, TILE=32)
        interpret(_copy)[(1,)](x, between, 32, 1, TILE=32)
    assert torch.equal(out, x) and len(accesses) == 8


def test_atomics_are_seen_and_do_not_race() -> None:
    out = torch.zeros(1)
    with trace(out=out) as accesses:
        interpret(_count)[(5,)](out)
    assert out.item() == 5.0 and [access.kind for access in accesses] == ["atomic"] * 5
