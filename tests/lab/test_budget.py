"""The budget explorer: the scheduler's own answer for every budget, and what the trade-off is made of."""

from itertools import pairwise
from typing import Any

import pytest

from minserve.core.clock import VirtualClock
from minserve.core.metrics import percentile
from minserve.lab import figures
from minserve.lab.budget import BUDGETS, MODELS, PROMPTS, BudgetExplorer
from minserve.lab.explorer import duration
from minserve.sim.cost_model import CostModel, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> BudgetExplorer:
    """No pictures: they take a third of the time."""
    monkeypatch.setattr(BudgetExplorer, "draw", lambda self: None)
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")
    return BudgetExplorer()


def test_the_numbers_are_the_scheduler_s(budget: BudgetExplorer) -> None:
    budget.model.value, budget.rate.value, budget.prompt.value, budget.budget.value = "llama-3.1-8b", 1.5, 1000, 256
    engine = make_engine(CostModel(SHAPES["llama-3.1-8b"], DEVICES["a100-80gb"]), token_budget=256, prefix_caching=False)
    assert isinstance(engine.clock, VirtualClock)
    ended = engine.run(budget.workload().arrivals())
    records = engine.trace.requests.values()
    gaps_s = [later - earlier for record in records for earlier, later in pairwise(record.token_times_s)]
    assert len(ended) == 13 and max(step.num_tokens for step in engine.trace.steps) == 256
    assert budget.worst_gap_s == max(gaps_s) and budget.summary.itl_p99_s == percentile(gaps_s, 99)
    first_s = percentile([r.token_times_s[0] - r.arrival_s for r in records], 50)
    assert budget.summary.ttft_p50_s == first_s
    assert budget.gaps_s == engine.trace.requests["watched"].itl_s and len(budget.gaps_s) == 255
    assert f"the first token comes after {duration(first_s)} (median)" in budget.text
    assert f"the longest gap between two tokens is {duration(max(gaps_s))}." in budget.text


def test_a_small_budget_keeps_gaps_short_and_lets_newcomers_wait(budget: BudgetExplorer) -> None:
    worst_s = [budget.curve[n].worst_gap_s for n in BUDGETS]
    assert worst_s == sorted(worst_s) and worst_s[-1] > 8 * worst_s[0]
    ttft_s = [budget.curve[n].summary.ttft_p50_s or 0.0 for n in BUDGETS]
    assert ttft_s[0] > 3 * ttft_s[-1] and ttft_s[1] > ttft_s[-1]
    tpot_s = [budget.curve[n].summary.tpot_p50_s or 0.0 for n in BUDGETS]
    assert tpot_s[0] < tpot_s[3] < tpot_s[-1]


def test_a_gap_is_a_step_with_a_prompt_in_it(budget: BudgetExplorer) -> None:
    """One whole prompt beside a few that decode: the longest gap of a budget that lets one prompt into a step."""
    cost = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
    budget.rate.value, budget.budget.value = 1.0, 2048
    alone_s, beside_s = cost.of(row_work(0, 1500)).seconds, cost.of(row_work(0, 1500) + decode_work(4, 1800)).seconds
    assert alone_s < budget.worst_gap_s < beside_s
    assert min(budget.gaps_s) > cost.of(decode_work(1, 64)).seconds * 0.99


def test_the_same_newcomers_come_whatever_the_budget(budget: BudgetExplorer) -> None:
    before = budget.workload().arrivals()
    budget.budget.value = 64
    assert budget.workload().arrivals() == before
    assert [len(call["prompt_ids"]) for _, call in before] == [64] + [1500] * 16 and before[0][1]["request_id"] == "watched"
    budget.rate.value = 3.0
    assert len(budget.workload().arrivals()) == 1 + 24


def test_a_setting_is_served_once(budget: BudgetExplorer, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    monkeypatch.setattr(BudgetExplorer, "serve", lambda self, workload, n: served.append(n) or budget.curve[512])
    text = budget.text
    budget.budget.value = 128
    assert served == []  # the curve has it
    budget.rate.value = 1.0
    assert served == list(BUDGETS)
    budget.rate.value = 2.0
    budget.budget.value = 2048
    assert served == list(BUDGETS) and budget.text == text


def test_a_budget_beside_the_usual_ones_joins_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")
    explorer = BudgetExplorer(token_budget=1600, num_prompt_tokens=1200)
    assert list(explorer.curve) == [64, 128, 256, 512, 1024, 1600, 2048, 4096] and explorer.prompt.value == 1200
    assert "With a budget of 1,600 tokens" in explorer.text


@pytest.mark.parametrize("model", MODELS)
def test_nobody_is_refused_or_preempted(budget: BudgetExplorer, model: str) -> None:
    budget.model.value, budget.rate.value, budget.prompt.value = model, 3.0, PROMPTS[-1]
    for served in budget.curve.values():
        assert (served.summary.num_finished, served.summary.num_preemptions) == (25, 0)


def floats(values: Any) -> list[float]:
    return [float(value) for value in values]


def test_the_picture_marks_the_chosen_budget() -> None:
    budget = BudgetExplorer()
    left, right = budget.draw().axes
    points = [(floats(line.get_xdata()), floats(line.get_ydata())) for line in left.lines]
    rings = [(xs[0], ys[0]) for xs, ys in points if len(xs) == 1]
    served = budget.curve[2048]
    ttft_s, tpot_s = served.summary.ttft_p50_s or 0.0, served.summary.tpot_p50_s or 0.0
    assert rings == [(ttft_s, 1e3 * served.worst_gap_s), (ttft_s, 1e3 * tpot_s)]
    names = [text.get_text() for text in left.texts]
    assert "64" in names and "2,048, 4,096" in names  # two budgets that come to the same share their words
    top = right.get_ylim()[1]
    budget.budget.value = 64
    assert budget.draw().axes[1].get_ylim()[1] == top  # the scale stays: a stall is seen to go
