"""The clock of a card: of several ways the fastest, and none is an error. The lines that touch a card run only there."""

import pytest

from minserve_kernels import gpu_clock
from minserve_kernels.gpu_clock import MOST_COPIES, MOST_ROUNDS, Work, num_copies, num_rounds, seconds_of

L2_BYTES = 60 << 20


def way(name: str) -> gpu_clock.Way:
    return lambda: lambda: name


def test_the_fastest_way_counts_and_those_that_are_refused_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"slow": 3e-3, "fast": 2e-3}

    def clock(one: gpu_clock.Way, copies: int) -> float:
        name = one()()
        if name == "refused":
            raise RuntimeError("No available kernel")
        return seconds[str(name)]

    monkeypatch.setattr(gpu_clock, "_seconds_of_way", clock)
    assert seconds_of(Work((way("slow"), way("refused"), way("fast")), 1 << 30), L2_BYTES) == 2e-3
    with pytest.raises(RuntimeError, match="No available kernel"):
        seconds_of(Work((way("refused"),), 1 << 30), L2_BYTES)
    with pytest.raises(ValueError, match="without ways"):
        seconds_of(Work((), 1 << 30), L2_BYTES)


@pytest.mark.parametrize("num_bytes", [1, 1 << 20, 10 << 20, 239 << 20, 240 << 20, 1 << 34])
def test_sets_of_tensors_are_larger_than_the_cache_together(num_bytes: int) -> None:
    copies = num_copies(num_bytes, L2_BYTES)
    assert 1 <= copies <= MOST_COPIES
    assert copies * num_bytes >= gpu_clock.COLD_FACTOR * L2_BYTES or copies == MOST_COPIES
    assert copies == 1 or (copies - 1) * num_bytes < gpu_clock.COLD_FACTOR * L2_BYTES


def test_short_works_are_repeated() -> None:
    assert [num_rounds(once_s) for once_s in (1e-9, 2e-4, 1e-3, 2e-3, 1.0)] == [MOST_ROUNDS, 10, 2, 1, 1]
