"""Records, metrics and exports. Kind N of the cases, as far as it is about metrics."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.engine import Engine
from minserve.core.metrics import goodput, num_recomputed_tokens, occupancy, percentile
from minserve.core.records import RequestRecord, StepRecord
from minserve.core.request import InvalidRequest, SamplingParams
from minserve.core.trace import Trace
from minserve.core.trace_file import perfetto_events
from tests.oracle import OracleRunner, add_one, before_steps, is_cold, make_engine, run_checked, step_checked


class TimedRunner(OracleRunner):
    """An oracle whose steps take the given times, one after the other, and 1 ms after that."""

    def __init__(self, num_blocks: int, block_size: int, times_s: list[float]):
        super().__init__(num_blocks, block_size)
        self.times_s = list(times_s)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.seconds_per_step = self.times_s.pop(0) if self.times_s else 0.001
        return super().execute(batch)


def timed_engine(times_s: list[float], num_blocks: int = 64, **options: Any) -> Engine:
    return make_engine(num_blocks, 4, runner=TimedRunner(num_blocks, 4, times_s), **options)


# --- one request ------------------------------------------------------------------------------------


def test_case_172_times_are_differences_of_time_stamps():
    engine = timed_engine([0.010, 0.001, 0.001, 0.010, 0.001], prefix_caching=False)
    request = add_one(engine, range(9), 5)
    for _ in range(3):
        step_checked(engine)
    engine.scheduler.preempt(request)
    engine.clock.advance(0.020)
    run_checked(engine)
    record = engine.trace.requests["R0"]
    assert record.ttft_s == pytest.approx(0.010) and record.latency_s == pytest.approx(0.043)
    assert record.itl_s == pytest.approx([0.001, 0.001, 0.030, 0.001])
    assert sum(record.itl_s) == pytest.approx(0.033)
    assert record.tpot_s == pytest.approx(0.033 / 4)
    assert (record.num_output_tokens, record.num_preemptions) == (5, 1)
    assert is_cold(request, 5)
    summary = engine.trace.summary()
    assert (summary.num_preemptions, summary.num_recomputed_tokens) == (1, 11)  # 9 + 3 - 1 stored, all computed again


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_case_173_times_are_in_order(max_tokens: int):
    engine = timed_engine([0.5] * 9)
    add_one(engine, range(20), 3)  # keeps the engine busy
    step_checked(engine)
    engine.clock.advance(0.25)
    request = add_one(engine, range(50, 56), max_tokens)
    run_checked(engine)
    record = engine.trace.requests[request.request_id]
    first_s, last_s = record.token_times_s[0], record.token_times_s[-1]
    assert record.scheduled_s is not None and record.finished_s is not None
    assert record.arrival_s <= record.scheduled_s <= first_s <= last_s <= record.finished_s
    assert (first_s == last_s) == (max_tokens == 1)
    assert record.queue_s == record.scheduled_s - record.arrival_s >= 0
    assert (record.tpot_s is None) == (max_tokens == 1)
    assert record.finish_reason == "length"


def test_a_request_that_never_started_has_no_times():
    engine = make_engine(64, 4, max_running=1)
    add_one(engine, range(5), 2)
    waiting = add_one(engine, range(5), 2)
    step_checked(engine)
    engine.abort(waiting.request_id)
    record = engine.trace.requests[waiting.request_id]
    assert (record.ttft_s, record.tpot_s, record.latency_s, record.queue_s, record.itl_s) == (None, None, None, None, [])
    assert (record.finished_s, record.finish_reason, record.num_output_tokens) == (1.0, "abort", 0)


def test_what_a_request_found_in_the_cache_is_in_its_record():
    engine = make_engine(64, 4)
    for cached in (0, 8):
        request = add_one(engine, range(9), 2)
        run_checked(engine)
        assert engine.trace.requests[request.request_id].num_cached_tokens == request.num_cached_tokens == cached
    assert engine.trace.summary().num_hit_tokens == 8


# --- many requests ----------------------------------------------------------------------------------


def busy_run(seed: int = 0, **options: Any) -> Engine:
    """Twenty requests at random times in a pool that is too small for them."""
    random = Random(seed)
    engine = timed_engine([random.uniform(0.001, 0.1) for _ in range(500)], num_blocks=20, token_budget=24, max_running=6, **options)
    arrivals = []
    for number in range(20):
        prompt = range(1000 * (number % 3), 1000 * (number % 3) + random.randrange(2, 30))
        arrivals.append((random.uniform(0, 1), {"prompt_ids": prompt, "params": SamplingParams(max_tokens=random.randrange(1, 20))}))
    engine.run(arrivals)
    engine.scheduler.check()
    return engine


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


# --- exports and the decision log --------------------------------------------------------------------


def test_perfetto_export_loads_and_agrees_with_the_trace(tmp_path: Path):
    engine = busy_run()
    path = tmp_path / "한글 trace.json"
    engine.trace.save_perfetto(str(path))
    loaded = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    events = loaded["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(names.values()) == sorted(engine.trace.requests)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(step.tokens) for step in engine.trace.steps)
    steps = {step.step: step for step in engine.trace.steps}
    for e in slices:
        step = steps[e["args"]["step"]]
        assert step.tokens[names[e["tid"]]] == (e["args"]["start"], e["args"]["tokens"])
        assert (e["ts"], e["dur"]) == pytest.approx((step.start_s * 1e6, step.elapsed_s * 1e6))
        assert e["name"] == ("1 token" if e["args"]["tokens"] == 1 else f"{e['args']['tokens']} tokens")
    by_track: dict[int, float] = {}
    for e in slices:  # slices of one track do not overlap
        assert e["ts"] >= by_track.get(e["tid"], 0.0) - 1e-3
        by_track[e["tid"]] = e["ts"] + e["dur"]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "KV blocks"]
    assert [e["args"]["used"] for e in counters] == [step.num_used_blocks for step in engine.trace.steps]
    assert len([e for e in events if e["ph"] == "C" and e["name"] == "requests"]) == len(engine.trace.steps)
    assert loaded["displayTimeUnit"] == "ms"


def test_perfetto_of_a_trace_that_has_forgotten_a_request():
    engine = make_engine(64, 4)
    engine.trace = Trace(max_records=2)
    for number in range(4):
        add_one(engine, range(number + 2), 2)
        run_checked(engine)
    events = perfetto_events(engine.trace.requests, engine.trace.steps)
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["R2", "R3"]
    assert {e["tid"] for e in events if e["ph"] == "X"} <= {0, 1, 2}


def test_the_log_says_why_in_words():
    engine = make_engine(8, 4)
    add_one(engine, range(23), 4)
    waiting = add_one(engine, range(100, 110), 2)
    step_checked(engine)
    [decision] = engine.trace.why(waiting.request_id)
    assert str(decision) == "step 0: R1 waits: needs 3 blocks, 2 free"
    assert (decision.step, decision.time_s, decision.request_id) == (0, 0.0, "R1")
    step_checked(engine)
    step_checked(engine)
    run_checked(engine)
    assert [d.words for d in engine.trace.why("R1")] == [
        "waits: needs 3 blocks, 2 free",
        "waits: needs 3 blocks, 1 free",  # the one that runs has grown
        "starts: 10 of 10 tokens",
    ]


def test_a_decision_on_an_aborted_request_is_not_kept_for_ever():
    engine = make_engine(64, 4)
    engine.trace = Trace(max_records=1)
    for number in range(5):
        add_one(engine, range(number + 2), 1)
        run_checked(engine)
    assert list(engine.trace.requests) == ["R4"] and len(engine.trace.decisions) == 1


def test_a_trace_keeps_at_least_one_record():
    with pytest.raises(ValueError, match="a trace keeps at least 1 record, got max_records 0"):
        Trace(max_records=0)


def test_a_trace_without_a_bound_keeps_everything():
    engine = busy_run()
    assert engine.trace.steps.maxlen is None and len(engine.trace.requests) == 20


# --- memory -----------------------------------------------------------------------------------------


def serve_mixture(engine: Engine, num_requests: int, random: Random, sizes: Callable[[], int]) -> list[int]:
    """60 % ok, 20 % aborted, 20 % refused. Returns the sizes after each hundred."""
    measured = []
    for number in range(num_requests):
        kind = number % 5
        try:
            request = add_one(engine, range(500 if kind == 4 else random.randrange(1, 12)), random.randrange(1, 5))
            if kind == 3:
                for _ in range(random.randrange(3)):
                    step_checked(engine)
                engine.abort(request.request_id)
            elif kind == 1:
                run_checked(engine)
        except InvalidRequest:
            assert kind == 4
        if number % 100 == 99:
            run_checked(engine)
            measured.append(sizes())
    return measured


def test_case_167_nothing_is_kept_of_requests_that_are_gone():
    engine = make_engine(64, 4, max_model_len=200)
    engine.trace = trace = Trace(max_records=100)
    blocks, scheduler = engine.scheduler.blocks, engine.scheduler

    def sizes() -> int:
        assert not scheduler.waiting and not scheduler.running and not blocks._tables
        assert len(trace.requests) <= 100 and len(trace.steps) <= 100 and len(trace.decisions) <= 100
        return len(trace.requests) + len(trace.steps) + len(trace.decisions) + len(blocks.cache) + len(blocks.cache._by_key)

    class Batchless(OracleRunner):
        """Keeps no batches: they would be the test's own leak."""

        def execute(self, batch: ScheduledBatch) -> StepResult:
            result = super().execute(batch)
            self.batches.clear()
            return result

    engine.runner = Batchless(64, 4)
    measured = serve_mixture(engine, 2_000, Random(167), sizes)
    assert trace.num_refused == 400
    assert measured[-1] <= 1.05 * measured[4]
    everything = [value for owner in (engine, scheduler, blocks, blocks.cache, trace) for value in vars(owner).values()]
    assert all(len(value) <= 100 for value in everything if isinstance(value, list | dict | set))


def test_an_abort_during_the_step_of_a_request_that_is_then_forgotten():
    engine = make_engine(64, 4, max_running=2)
    engine.trace = Trace(max_records=1)
    requests = [add_one(engine, range(50 * i, 50 * i + 5), 3) for i in range(3)]
    step_checked(engine)
    before_steps(engine, lambda batch: [engine.abort(name) for name in ("R0", "R2")])
    step_checked(engine)
    before_steps(engine)
    run_checked(engine)
    assert [r.finish_reason for r in requests] == ["abort", "length", "abort"]
    assert list(engine.trace.requests) == ["R1"]


def test_a_preemption_counts_once_even_if_the_victim_is_aborted_in_the_same_step():
    engine = make_engine(6, 4)
    add_one(engine, range(12), 8)
    victim = add_one(engine, range(50, 62), 8)
    step_checked(engine)
    before_steps(engine, lambda batch: engine.abort(victim.request_id))
    step_checked(engine)
    assert victim.num_preemptions == engine.trace.requests["R1"].num_preemptions == 1
