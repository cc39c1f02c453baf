"""How long a work takes on a card: replays of a CUDA graph between two events, on tensors in no cache.

Why: Python launches slower than small kernels run, so launches are recorded once and replayed. A kernel that
finds its data in the L2 cache tells nothing about memory, so several sets of tensors take turns. And one
time says nothing, so the median of several counts.

Invariant: a work is timed as it is launched in serving, allocation of its results included.

Taught in notebook 05. Used by `minserve bench --gpu`; only torch is needed. Unmeasured: no GPU was at hand.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

COLD_FACTOR = 4  # sets of tensors take so many times the L2 cache
MOST_COPIES = 64
LEAST_REPLAY_S = 2e-3  # of one timing: less, and the clock's own steps show
MOST_ROUNDS = 20
NUM_REPLAYS = 15

Launch = Callable[[], object]
Way = Callable[[], Launch]  # allocates, and gives what is to be launched


class Work(NamedTuple):
    """Something to time, with the bytes it must move and its FLOPs. Of several ways, the fastest counts."""

    ways: tuple[Way, ...]
    num_bytes: int
    num_flops: int = 0


def num_copies(num_bytes: int, l2_bytes: int) -> int:
    """Sets of tensors that take turns, so that none is left in the L2 cache when its turn comes again.

    >>> num_copies(2 << 30, 60 << 20), num_copies(16 << 20, 60 << 20), num_copies(1000, 60 << 20)
    (1, 15, 64)
    """
    return max(1, min(MOST_COPIES, -(-COLD_FACTOR * l2_bytes // num_bytes)))


def num_rounds(once_s: float) -> int:
    """How often a graph launches all its sets, so that a replay is long enough to be timed.

    >>> num_rounds(1e-4), num_rounds(5e-3), num_rounds(1e-6)
    (20, 1, 20)
    """
    return max(1, min(MOST_ROUNDS, round(LEAST_REPLAY_S / once_s)))


def seconds_of(work: Work, l2_bytes: int) -> float:
    """Seconds of one launch by the fastest way; ways that this card or this torch lacks are passed over.

    Raises what the last of them raised if no way is left.
    """
    times_s: list[float] = []
    refusal: RuntimeError | None = None
    for way in work.ways:
        try:
            times_s.append(_seconds_of_way(way, num_copies(work.num_bytes, l2_bytes)))
        except RuntimeError as error:
            refusal = error
        torch.cuda.empty_cache()
    if not times_s:
        raise refusal or ValueError("a work without ways")
    return min(times_s)


def _seconds_of_way(way: Way, copies: int) -> float:
    launches = [way() for _ in range(copies)]
    for launch in launches[:2] * 2:  # whatever compiles or allocates at first, before anything is recorded
        launch()
    rounds = num_rounds(_replay_s(_recorded(launches)))
    graph = _recorded(launches * rounds)
    return statistics.median(_replay_s(graph) for _ in range(NUM_REPLAYS)) / (copies * rounds)


def _recorded(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    return graph


def _replay_s(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
