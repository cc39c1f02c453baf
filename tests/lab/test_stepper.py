"""Stepping and rewinding: what is shown is the state of an engine that knows nothing of explorers, trace or snapshots."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest

from minserve import LLM
from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.policies import StaticBatches
from minserve.core.request import SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.core.snapshot import Snapshot
from minserve.core.trace import Trace
from minserve.lab import figures
from minserve.lab import stepper as stepper_module
from minserve.lab.pool_grid import view_blocks
from minserve.lab.stepper import Replay, SteppingExplorer, little_workload
from minserve.sim.runner import SimulatedRunner
from minserve.sim.swapping import make_swapping_engine
from minserve.sim.workload import exact
from tests.lab.watched import COST, shared_in, shared_of, watched_run, words_of
from tests.tiny_model import save_tiny_model


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures, for tests that don't look at them: they take most of the time."""
    monkeypatch.setattr(stepper_module, "pool_map", lambda *state, **options: None)
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")


@pytest.fixture
def stepper(unpainted: None) -> SteppingExplorer:
    return SteppingExplorer()


# --- the engine's own state -----------------------------------------------------------------------


def shown(explorer: Replay) -> dict[str, Any]:
    """What the explorer shows, in the same words."""
    s = explorer.snapshot

    def queue(states: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(state.request_id, state.num_tokens, state.num_computed_tokens, state.block_ids) for state in states]

    return {
        "running": queue(s.running),
        "waiting": queue(s.waiting),
        "ref_counts": list(s.ref_counts),
        "idle": list(s.idle),
        "free": list(s.free),
        "cached": list(s.cached),
        "copies": list(s.copies),
        "rows": explorer.step_record.tokens if explorer.step_record else {},
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 1},
        {"block_size": 2, "watermark_blocks": 3},
        {"block_size": 8, "token_budget": 7},
        {"block_size": 16, "pool_tokens": 128},
        {"pool_tokens": 48, "token_budget": 32},
        {"prefix_caching": False, "pool_tokens": 72},
    ],
    ids=str,
)
def test_every_step_shows_the_engine_s_own_state(unpainted: None, settings: dict[str, Any]) -> None:
    explorer, runner = SteppingExplorer(**settings), watched_run(little_workload().arrivals(), **settings)
    assert explorer.position.max == len(runner.states) - 1 > 20
    for position, state in enumerate(runner.states):
        explorer.position.value = position
        assert shown(explorer) == state, position
        assert all(words in explorer.text for words in words_of(state, explorer.snapshot.block_size)), position
        assert shared_in(explorer.text) == shared_of(state), position
    for request_id in explorer.request.options:
        explorer.request.value = request_id
        for position in range(0, len(runner.states), 3):
            explorer.position.value = position
            said = [(step, words) for step, words in runner.decisions[request_id] if step <= position]
            assert [(d.step, d.words) for d in explorer.decisions] == said
            assert all(f"step {step}: {words}" in explorer.text for step, words in said)


def test_a_changed_setting_is_another_run_at_the_same_position(stepper: SteppingExplorer) -> None:
    arrivals, now = little_workload().arrivals(), {}
    stepper.position.value = 11
    for name, argument, value in (
        ("block_size", "block_size", 8),
        ("pool", "pool_tokens", 64),
        ("budget", "token_budget", 24),
        ("watermark", "watermark_blocks", 1),
        ("cache", "prefix_caching", False),
        ("block_size", "block_size", 2),
    ):
        getattr(stepper, name).value = now[argument] = value
        assert stepper.error is None and stepper.position.value == 11
        assert shown(stepper) == watched_run(arrivals, **now).states[11], now
        assert stepper.snapshot.num_blocks * stepper.snapshot.block_size == now.get("pool_tokens", 96)  # the memory stays
    stepper.position.value = stepper.position.max
    stepper.cache.value = True  # a shorter run: the position comes down to its end
    assert stepper.position.value == stepper.position.max == len(stepper.trace.steps) and stepper.step_record is None


# --- stepping -------------------------------------------------------------------------------------


def test_rewinding_shows_the_same_picture_and_words() -> None:
    stepper = SteppingExplorer()
    stepper.request.value = "D"
    start, back, forward, end = [child for child in stepper.view.children[1].children if isinstance(child, widgets.Button)]
    seen = {0: (stepper.text, stepper.image.value)}
    trace, last = stepper.trace, len(stepper.trace.steps)
    for button, position in ((forward, 1), (forward, 2), (back, 1), (start, 0), (back, 0), (end, last), (forward, last), (back, last - 1)):
        button.click()
        assert stepper.position.value == position and stepper.trace is trace
        assert seen.setdefault(position, (stepper.text, stepper.image.value)) == (stepper.text, stepper.image.value)
    assert len(set(seen.values())) == len(seen) == 5


def test_the_little_workload_has_everything_to_show(stepper: SteppingExplorer) -> None:
    trace, snapshots = stepper.trace, list(stepper.trace.snapshots)
    summary = trace.summary()
    assert summary.num_preemptions == 1 and summary.num_hit_tokens == 49 and len(trace.requests) == 7
    assert [snapshot.copies for snapshot in snapshots if snapshot.copies] == [((11, 12),)]
    assert max(count for snapshot in snapshots for count in snapshot.ref_counts) == 2
    chunks = [step.tokens["D"][1] for step in trace.steps if "D" in step.tokens]
    assert chunks[:3] == [12, 12, 14]  # two chunks, then preempted and back again in one
    assert any("needs" in d.words and d.words.startswith("waits") for d in trace.why("E") + trace.why("D"))
    given_up = [set(a.idle) - set(b.idle) - set(b.cached) for a, b in zip(snapshots, snapshots[1:], strict=False)]
    assert any(given_up)  # an idle block was taken for something else
    assert trace.requests["F"].num_cached_tokens == 12  # of the 16 shared tokens, one block has been given up


def test_the_words_say_what_the_picture_shows(stepper: SteppingExplorer) -> None:
    stepper.position.value = 5
    assert stepper.text.startswith(
        "Step 5: C#1 starts: 1 of 10 tokens, 9 cached; D starts: 12 of 38 tokens. At 83.2 ms, 5 requests compute 16 of"
    )
    assert "Of 24 blocks of 4, 16 are used, 0 idle and 8 free; shared by 2: 0-3, 9-10; copied: 11 to 12." in (stepper.text)
    assert "Running: A, B, C, C#1, D; waiting: nobody." in stepper.text
    stepper.position.value = 14
    assert stepper.text.startswith("Step 14: A ends.")
    stepper.position.value = 34
    assert stepper.text.startswith("After the last of 34 steps. At 650.1 ms. Of 24 blocks of 4, 0 are used, 23 idle and 1 free.")


def test_the_request_stays_chosen_where_it_can(stepper: SteppingExplorer) -> None:
    stepper.request.value = "D"
    stepper.block_size.value = 8
    assert stepper.request.value == "D" and "D (its blocks are framed)" in stepper.text
    stepper.pool.value = 32  # too small for D
    assert stepper.request.value == "A" and "D" not in stepper.request.options
    stepper.pool.value = 96
    assert "D" in stepper.request.options


# --- what cannot be served ------------------------------------------------------------------------


def test_refused_requests_are_said_in_words(stepper: SteppingExplorer) -> None:
    assert "refused" not in stepper.text and stepper.refused == []
    stepper.pool.value = 32
    assert stepper.error is None and len(stepper.refused) == 1
    assert "1 request is refused: request D: 38 prompt tokens and at least 1 output tokens need 10 blocks of 4" in stepper.text
    stepper.pool.value = 16
    assert f"{stepper.trace.num_refused} requests are refused" in stepper.text and len(stepper.refused) == stepper.trace.num_refused > 1


def test_a_pool_that_serves_nobody_is_shown_empty(unpainted: None) -> None:
    stepper = SteppingExplorer([(0.0, {"prompt_ids": list(range(60)), "params": exact(4)})], pool_tokens=32)
    assert stepper.text.startswith("No step runs: nobody is served.") and "request R0: 60 prompt tokens" in stepper.text
    assert stepper.position.max == 0 and stepper.snapshot.free == tuple(range(8)) and stepper.error is None
    stepper.pool.value = 64
    assert stepper.error is None and stepper.position.max > 0 and "R0 starts" in stepper.text


def test_a_pool_smaller_than_a_block_is_an_error_in_words(unpainted: None) -> None:
    stepper = SteppingExplorer([(0.0, {"prompt_ids": [1, 2], "params": exact(4)})], pool_tokens=8, block_size=4)
    stepper.block_size.value = 16
    assert isinstance(stepper.error, ValueError) and "a pool of 8 tokens has no block of 16" in stepper.caption.value
    stepper.block_size.value = 2
    assert stepper.error is None and stepper.snapshot.num_blocks == 4


def test_options_go_to_the_engine(unpainted: None) -> None:
    arrivals = [(0.0, {"prompt_ids": list(range(10 * i, 10 * i + 8)), "params": exact(8)}) for i in range(3)]
    usual = SteppingExplorer(arrivals, pool_tokens=24)
    assert usual.trace.summary().num_preemptions > 0
    assert SteppingExplorer(arrivals, pool_tokens=24, reserve_whole_answers=True).trace.summary().num_preemptions == 0
    static = SteppingExplorer(arrivals, policy=StaticBatches(1))
    assert max(step.num_running for step in static.trace.steps) == 1
    static.budget.value = 4  # and again with the same policy
    assert max(step.num_running for step in static.trace.steps) == 1
    swapping = SteppingExplorer(arrivals, pool_tokens=24, build=partial(make_swapping_engine, host_link_bytes_per_s=1e9))
    assert swapping.trace.summary().num_preemptions > 0 and swapping.trace.summary().num_recomputed_tokens == 0


# --- recorded runs --------------------------------------------------------------------------------


def test_a_recorded_run_is_replayed_from_memory_and_from_a_file(stepper: SteppingExplorer, tmp_path: Path) -> None:
    stepper.trace.save(tmp_path / "run.json")
    for source in (stepper.trace, tmp_path / "run.json", str(tmp_path / "run.json")):
        replay = SteppingExplorer.replay(source, position=7)
        assert replay.position.value == 7 and not hasattr(replay, "pool")
        for position in (7, 0, 15, stepper.position.max):
            stepper.position.value = replay.position.value = position
            assert (replay.text, replay.snapshot, replay.step_record) == (stepper.text, stepper.snapshot, stepper.step_record)
        stepper.request.value = replay.request.value = "D"
        assert replay.decisions == stepper.decisions != []
        stepper.request.value = "A"


def test_a_trace_without_snapshots_says_how_to_record_them(stepper: SteppingExplorer) -> None:
    bare = Trace()
    bare.steps.extend(stepper.trace.steps)
    with pytest.raises(ValueError, match=r"34 steps and 0 snapshots: .*LLM\(keep_snapshots=True\)"):
        SteppingExplorer.replay(bare)
    with pytest.raises(ValueError, match="0 steps and 0 snapshots"):
        SteppingExplorer.replay(Trace())


def test_a_run_cut_to_its_latest_steps_is_replayed(unpainted: None) -> None:
    runner = SimulatedRunner(COST)
    scheduler = Scheduler(SchedulerConfig(16), BlockManager(24, 4))
    engine = Engine(scheduler, runner, VirtualClock(), ModelLimits(4096, 32_000), Trace(max_records=5, keep_snapshots=True))
    engine.run(little_workload().arrivals())
    replay = SteppingExplorer.replay(engine.trace)
    assert replay.position.max == 5 and replay.text.startswith("Step 29: all go on as before.")
    assert isinstance(replay.snapshot, Snapshot) and [state.request_id for state in replay.snapshot.running] == ["F"]


def test_samples_of_one_prompt_have_logs_of_their_own(unpainted: None) -> None:
    stepper = SteppingExplorer([(0.0, {"prompt_ids": [1, 2, 3], "params": SamplingParams(n=3, max_tokens=3, ignore_eos=True)})])
    assert stepper.request.options == ("R0", "R0#1", "R0#2")
    stepper.position.value, stepper.request.value = stepper.position.max, "R0#2"
    assert [d.words for d in stepper.decisions] == ["waits: R0 computes its prompt", "starts: 1 of 3 tokens, 2 cached"]


def test_a_run_of_the_real_engine_is_replayed(unpainted: None, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    with LLM(path, dtype="fp32", num_blocks=32, block_size=4, max_model_len=128, token_budget=8, keep_snapshots=True, verbose=False) as llm:
        llm.generate(["one two three", "one two three four"], SamplingParams(max_tokens=5, ignore_eos=True), progress=False)
        replay, num_steps = SteppingExplorer.replay(llm.trace), len(llm.trace.steps)
    assert replay.position.max == num_steps > 5 and len(replay.request.options) == 2
    first = replay.request.options[0]
    assert f"{first} starts: 8 of 13 tokens" in replay.text and "8 of 8 tokens" in replay.text
    for position in range(num_steps):
        replay.position.value = position
        assert replay.step_record is not None
        assert sum(len(view.written) for view in view_blocks(replay.snapshot, replay.step_record)) == replay.step_record.num_tokens
    replay.position.value = num_steps
    assert replay.snapshot.running == replay.snapshot.waiting == () and sum(replay.snapshot.ref_counts) == 0
