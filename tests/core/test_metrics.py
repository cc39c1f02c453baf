"""From records to numbers. Kind N of the cases, as far as it is about metrics."""

from collections import Counter
from contextlib import suppress
from random import Random

import numpy as np
import pytest

from minserve.core.metrics import goodput, num_recomputed_tokens, occupancy, percentile
from minserve.core.records import RequestRecord, StepRecord
from minserve.core.request import InvalidRequest
from minserve.core.trace import Trace
from tests.core.timed import busy_run
from tests.oracle import add_one, make_engine, run_checked, step_checked


def test_metrics_obey_their_identities():
    engine = busy_run()
    trace, summary = engine.trace, engine.trace.summary()
    records = list(trace.requests.values())
    for r in records:
        assert r.latency_s is not None and r.ttft_s is not None
        assert r.latency_s == pytest.approx(r.ttft_s + (r.tpot_s or 0.0) * (r.num_output_tokens - 1))
        assert sum(r.itl_s) == pytest.approx(r.latency_s - r.ttft_s) and len(r.itl_s) == r.num_output_tokens - 1
    assert summary.num_requests == summary.num_finished == 20
    assert summary.num_preemptions > 0 and summary.num_hit_tokens > 0 and summary.num_recomputed_tokens > 0
    assert summary.num_prompt_tokens == sum(r.num_prompt_tokens for r in records)
    assert summary.num_output_tokens == sum(s.num_new_tokens for s in trace.steps) == sum(r.num_output_tokens for r in records)
    assert summary.wall_s == pytest.approx(trace.steps[-1].end_s - min(r.arrival_s for r in records))
    assert summary.output_tokens_per_s == pytest.approx(summary.num_output_tokens / summary.wall_s)
    assert summary.total_tokens_per_s == pytest.approx((summary.num_prompt_tokens + summary.num_output_tokens) / summary.wall_s)
    assert summary.num_steps == len(trace.steps)
    assert 0 < summary.mean_occupancy <= summary.peak_used_blocks / 20 <= 1


def test_every_token_is_computed_once_unless_it_is_a_hit_or_computed_again():
    engine = busy_run()
    summary = engine.trace.summary()
    num_computed = sum(step.num_tokens for step in engine.trace.steps)
    first_hits = sum(r.num_cached_tokens for r in engine.trace.requests.values())
    stored = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in engine.trace.requests.values())
    assert num_computed == stored - first_hits + summary.num_recomputed_tokens


def test_percentiles_of_the_summary_are_numpys():
    summary = busy_run().trace.summary()
    records = list(busy_run().trace.requests.values())
    ttft_s, tpot_s = [r.ttft_s for r in records], [r.tpot_s for r in records if r.tpot_s is not None]
    itl_s = [gap for r in records for gap in r.itl_s]
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s), ("itl", itl_s)):
        for percent in (50, 99):
            assert getattr(summary, f"{name}_p{percent}_s") == pytest.approx(np.percentile(np.array(values, dtype=float), percent))


def test_percentile_is_numpys():
    random = Random(1)
    for size in (1, 2, 3, 10, 101):
        values = [random.uniform(-5, 5) for _ in range(size)]
        for percent in (0, 1, 25, 50, 90, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert percentile([], 50) is None
    assert percentile(iter([3.0]), 99) == 3.0


def test_an_empty_trace_has_an_empty_summary():
    summary = Trace().summary()
    assert (summary.num_requests, summary.wall_s, summary.output_tokens_per_s) == (0, 0, 0)
    assert (summary.ttft_p50_s, summary.mean_occupancy, summary.peak_used_blocks) == (None, 0, 0)


def step_record(start_s: float, end_s: float, used: int, tokens: dict[str, tuple[int, int]] | None = None) -> StepRecord:
    return StepRecord(0, start_s, end_s, tokens or {}, 0, used, 0, 10 - used, 0, 0, 0)


def test_occupancy_is_weighted_by_time():
    assert occupancy([step_record(0, 3, 10), step_record(5, 6, 2)]) == pytest.approx((3 * 1.0 + 1 * 0.2) / 4)
    assert occupancy([]) == 0 and occupancy([step_record(1, 1, 5)]) == 0


def test_the_peak_holds_the_blocks_of_those_who_end_with_the_step():
    engine = make_engine(64, 4)
    add_one(engine, range(9), 1)
    run_checked(engine)
    [step] = engine.trace.steps
    assert (step.num_used_blocks, step.num_free_blocks) == (3, 61)
    assert engine.trace.summary().peak_used_blocks == 3


def test_recomputed_tokens_are_those_below_what_was_reached():
    steps = [step_record(0, 1, 1, {"a": (0, 10)}), step_record(1, 2, 1, {"a": (4, 4), "b": (0, 3)}), step_record(2, 3, 1, {"a": (8, 5)})]
    assert num_recomputed_tokens(steps) == 4 + 2


def finished_record(name: str, times_s: list[float], reason: str | None = "length") -> RequestRecord:
    return RequestRecord(name, 0.0, 5, token_times_s=times_s, finished_s=times_s[-1] if times_s else None, finish_reason=reason)


def test_goodput_counts_requests_that_meet_every_limit():
    records = [
        finished_record("quick", [1.0, 1.5, 2.0]),
        finished_record("late", [3.0, 3.1, 3.2]),
        finished_record("slow", [1.0, 3.0, 5.0]),
        finished_record("single", [0.5], "stop"),
        finished_record("aborted", [0.5, 0.6], "abort"),
        finished_record("failed", [0.5, 0.6], "error"),
        finished_record("under way", [0.5, 0.6], None),
        finished_record("silent", []),
    ]
    assert goodput(records, 2.0) == 4 / 2
    assert goodput(records, 2.0, ttft_s=1.0) == 3 / 2
    assert goodput(records, 2.0, tpot_s=0.5) == 3 / 2
    assert goodput(records, 2.0, latency_s=2.0) == 2 / 2
    assert goodput(records, 2.0, ttft_s=1.0, tpot_s=0.5) == 2 / 2  # the exact limit is met
    assert goodput(records, 2.0, ttft_s=0.1) == 0
    with pytest.raises(ValueError, match="needs a duration above 0 s, got 0"):
        goodput(records, 0)


@pytest.mark.parametrize("seed", range(20))
def test_case_175_no_request_vanishes_from_the_totals(seed: int):
    random = Random(seed)
    engine = make_engine(24, 4, token_budget=16, max_running=5, max_model_len=64)
    scheduler, trace, num_injected = engine.scheduler, engine.trace, 0

    def assert_balance() -> None:
        reasons = Counter(r.finish_reason for r in trace.requests.values() if r.finished_s is not None)
        num_completed, num_aborted = reasons["length"] + reasons["stop"], reasons["abort"]
        assert num_injected == num_completed + num_aborted + len(scheduler.running) + len(scheduler.waiting) + trace.num_refused

    for _ in range(200):
        num_injected += 1
        with suppress(InvalidRequest):
            add_one(engine, range(random.randrange(0, 80)), random.randrange(1, 30), priority=random.randrange(2))
        assert_balance()
        for _ in range(random.randrange(3)):
            step_checked(engine)
            assert_balance()
        alive = [*scheduler.running, *scheduler.waiting]
        if alive and random.random() < 0.2:
            engine.abort(random.choice(alive).request_id)
            assert_balance()
    assert trace.num_refused > 10 and trace.summary().num_preemptions > 0
    assert len(scheduler.running) + len(scheduler.waiting) > 0  # some are unfinished at the horizon
