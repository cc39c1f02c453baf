"""Ways to come by memory: what each allocates for the same demands."""

from types import SimpleNamespace

import pytest
import torch

from minserve import allocators
from minserve.allocations import Demand, Growth, Recording
from minserve.allocators import WAYS, Pace, Site, measure_costs, replay_s

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small() -> Recording:
    """Two requests of 5 and 2 tokens, blocks of 4: the first takes 2 blocks and then another, the second 1."""
    demands = (
        Demand((), (Growth("a", 0, 5, True),), ()),
        Demand((), (Growth("a", 5, 6, False), Growth("b", 0, 2, True)), ("b",)),
        Demand((), (Growth("a", 6, 9, False),), ("a",)),
    )
    return Recording(demands, {"a": (1, 2, 3, 4, 5), "b": (6, 7)}, {"a": (8, 9, 10, 11, 12), "b": (3,)}, 8, 4, 3, 24, 1.5)


SIZES = {
    "block tensors": [96, 96, 96, 96],  # 3 layers x 4 tokens x 8 bytes
    "layer tensors": [32] * 12,
    "whole answers": [80] * 3 + [24] * 3,
    "moved when it grows": [0] * 3 + [40] * 3 + [48] * 3 + [0] * 3 + [16] * 3 + [72] * 3,
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_allocated(name: str, small: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    site = Site(small, CPU, writes=False)
    store = WAYS[name].make(site)
    empty = Site.empty
    monkeypatch.setattr(Site, "empty", lambda self, *shape: sizes.append(torch.Size(shape).numel()) or empty(self, *shape))
    assert replay_s(small.demands, store) > 0
    assert sizes == SIZES[name]
    is_real = len([size for size in sizes if size])  # a tensor of no bytes is no call
    assert 2 * is_real == WAYS[name].num_calls(small.load(2))
    assert not vars(store)["held"]


def test_every_way_runs_with_and_without_writing(small: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(allocators, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    around: list[str] = []
    pace = Pace(lambda: around.append("begin"), lambda: around.append("end"))
    costs = measure_costs(small, 2, CPU, num_rounds=1, pace=pace)
    assert [cost.way for cost in costs] == list(WAYS) and {cost.batch_size for cost in costs} == {2}
    assert {cost.ms_per_step for cost in costs} == {0.0}  # by that clock every replay takes a second, the empty one too
    assert around == ["begin", "end"] * 3 * 2 * (1 + len(WAYS))
    assert costs[0].calls_per_step == 8 / 3
    assert "pages of the system" not in [cost.way for cost in measure_costs(small, 2, torch.device("meta"), num_rounds=1)]
