"""Two policies on one clock: every moment shows what had happened by then, and nothing else."""

from dataclasses import replace

import ipywidgets as widgets
import numpy as np
import pytest
from matplotlib.figure import Figure

from minserve.core.metrics import goodput
from minserve.core.policies import FirstComeFirstServed
from minserve.core.trace import Trace
from minserve.lab import figures
from minserve.lab.arena import BASELINES, play, serve
from minserve.lab.arena_traces import ArenaTrace, Slo
from minserve.lab.policy_duel import NUM_MOMENTS, Course, PolicyDuel, Side
from minserve.sim.workload import Lengths, make_workload, poisson
from tests.lab.boxes import boxes

SMALL = ArenaTrace(
    "small",
    "for tests",
    Slo("a limit that some meet", 0.5, 0.05),
    0.5,
    lambda seed: make_workload(40, Lengths.uniform(20, 200), Lengths.exponential(60, 300), poisson(80.0), seed),
    num_blocks=128,
)
TRACES = {"small": SMALL, "tight": replace(SMALL, name="tight", slo=Slo("few meet this one", 0.1, 0.05))}
POLICIES = ("continuous", "static:size=16", "slo")


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures, for tests that don't look at them: they take most of the time."""
    monkeypatch.setattr(PolicyDuel, "draw", lambda self: Figure())
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")


@pytest.fixture
def duel(unpainted: None) -> PolicyDuel:
    return PolicyDuel(trace="small", traces=TRACES)


def seen_by_hand(trace: Trace, now_s: float) -> dict[str, float]:
    """A moment, counted from the records one by one."""
    steps = [step for step in trace.steps if step.end_s <= now_s]
    records = trace.requests.values()
    ended = [record for record in records if record.finished_s is not None and record.finished_s <= now_s]
    return {
        "num_arrived": sum(record.arrival_s <= now_s for record in records),
        "num_running": steps[-1].num_running if steps else 0,
        "num_answered": sum(record.finish_reason == "stop" for record in ended),
        "num_within": goodput(ended, 1.0, ttft_s=0.5, tpot_s=0.05),
        "num_shed": sum(record.finish_reason == "shed" for record in ended),
        "num_output_tokens": sum(time_s <= now_s for record in records for time_s in record.token_times_s),
        "num_preemptions": sum(len(step.preempted) for step in steps),
        "used_share": steps[-1].num_used_blocks / 128 if steps else 0.0,
    }


def test_every_moment_is_what_had_happened_by_then() -> None:
    for policy in POLICIES:
        course = Course(policy, BASELINES[policy], SMALL, 1)
        for share in (0.0, 0.03, 0.2, 0.5, 0.8, 1.0):
            side, by_hand = course.side(share * course.end_s), seen_by_hand(course.trace, share * course.end_s)
            assert {name: getattr(side, name) for name in by_hand} == by_hand, (policy, share)
            assert side.num_waiting == side.num_arrived - side.num_running - side.num_answered - side.num_shed >= 0
        end = course.side(course.end_s)
        assert (end.num_arrived, end.num_running, end.num_waiting) == (40, 0, 0)
        assert end.num_within == play(policy, (SMALL,), checked=False).row("small").num_within


def test_both_sides_have_the_same_arrivals_and_one_clock(duel: PolicyDuel) -> None:
    assert duel.left.policy == "continuous" and duel.right.policy == "static:size=16"
    for moment in (0, 5, 20, 60, NUM_MOMENTS):
        duel.moment.value = moment
        assert duel.error is None
        assert duel.left.now_s == duel.right.now_s == duel.now_s == duel.end_s * moment / NUM_MOMENTS
        assert duel.left.num_arrived == duel.right.num_arrived
        assert f"At {duel.now_s:.1f} s, " in duel.text
    assert duel.left.num_within > duel.right.num_within
    assert f"continuous has {duel.left.num_within} requests within the limits, static:size=16 {duel.right.num_within}." in duel.text


def test_rewinding_brings_the_same_state_and_choices_are_run_once(duel: PolicyDuel, monkeypatch: pytest.MonkeyPatch) -> None:
    duel.moment.value = 40
    before: tuple[Side, Side, str] = (duel.left, duel.right, duel.text)
    duel.second.value = "slo"
    assert duel.right.policy == "slo" and duel.right != before[1] and duel.left.num_arrived == duel.right.num_arrived
    duel.moment.value = 90
    monkeypatch.setattr("minserve.lab.policy_duel.serve", lambda *arguments: pytest.fail("served again"))
    duel.second.value, duel.moment.value = "static:size=16", 40
    assert (duel.left, duel.right, duel.text) == before


def test_another_trace_is_another_run(duel: PolicyDuel) -> None:
    before = duel.left.num_within
    duel.trace.value = "tight"
    assert duel.error is None and duel.left.num_within < before
    assert "TTFT 100 ms, TPOT 50 ms" in duel.text


def test_a_policy_of_one_s_own_can_be_chosen(unpainted: None) -> None:
    class Mine(FirstComeFirstServed):
        pass

    class Starves(FirstComeFirstServed):
        def candidates(self, now):
            return ()

    duel = PolicyDuel("Mine", "continuous", "small", mine={"Mine": Mine, "Starves": Starves}, traces=TRACES)
    assert replace(duel.left, policy="continuous") == duel.right
    assert f"both have {duel.left.num_within} requests within the limits" in duel.text
    duel.second.value = "Starves"
    assert duel.error is not None and "starves requests" in duel.text


def test_playing_moves_the_slider(duel: PolicyDuel) -> None:
    """The page itself links the two; the player stands beside the slider, and does not call the kernel a second time."""
    source, target = duel._link.source, duel._link.target
    assert source == (duel.play, "value") and target == (duel.moment, "value")
    assert (duel.play.min, duel.play.max) == (duel.moment.min, duel.moment.max) == (0, NUM_MOMENTS)
    bar = duel.view.children[1]
    assert isinstance(bar, widgets.HBox) and not any(isinstance(child, widgets.Play) for child in bar.children)
    text = duel.text
    duel.play.value = 3  # as the page would tell: only the slider's own move redraws
    assert duel.moment.value == NUM_MOMENTS and duel.text == text


def test_the_picture_shows_the_past_only_and_keeps_its_place() -> None:
    duel = PolicyDuel(trace="small", traces=TRACES, moment=NUM_MOMENTS)
    last, whole = duel.image.value, duel.draw()
    duel.moment.value = 30
    part = duel.draw()
    assert duel.image.value != last and part.get_size_inches().tolist() == whole.get_size_inches().tolist()
    for before, after in zip(part.axes, whole.axes, strict=True):
        assert before.get_xlim() == after.get_xlim() and before.get_ylim() == after.get_ylim()
        assert before.get_position().bounds == after.get_position().bounds
    for ax in part.axes[:2]:
        drawn = boxes(ax)
        assert len(drawn) > 10 and max(box.left + box.width for box in drawn) <= duel.now_s + 1e-6
    for ax in part.axes[2:4]:
        running, waiting = (np.asarray(line.get_xdata()) for line in ax.lines[:2])
        assert running.max() == waiting.max() <= duel.now_s
    assert part.axes[1].get_title(loc="left").startswith("static:size=16\n")
    duel.moment.value = NUM_MOMENTS
    assert duel.image.value == last


def test_the_still_is_in_the_notebook(duel: PolicyDuel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    duel.update()
    bundle = duel._repr_mimebundle_()
    assert bundle["text/plain"] == duel.text and bundle["image/png"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_the_course_is_the_run_of_the_arena() -> None:
    course = Course("continuous", BASELINES["continuous"], SMALL, 2)
    assert list(course.trace.steps) == list(serve(FirstComeFirstServed, SMALL, 2).trace.steps)
