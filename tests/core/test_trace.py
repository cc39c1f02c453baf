"""The trace: what the engine writes down of requests, steps, decisions and the pool. Kind N of the cases, as far as it is about times."""

from collections.abc import Callable
from random import Random

import pytest

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.engine import Engine
from minserve.core.request import InvalidRequest
from minserve.core.trace import Trace
from tests.core.timed import busy_run, timed_engine
from tests.oracle import OracleRunner, add_one, before_steps, is_cold, make_engine, run_checked, step_checked

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


# --- snapshots --------------------------------------------------------------------------------------


def test_a_trace_keeps_snapshots_only_where_it_is_asked_to():
    assert not busy_run().trace.snapshots and busy_run().trace.after is None


def test_there_is_a_snapshot_a_step_and_it_agrees_with_the_record():
    trace = busy_run(keep_snapshots=True).trace
    assert len(trace.snapshots) == len(trace.steps) > 20
    for record, snapshot in zip(trace.steps, trace.snapshots, strict=True):
        held = {block_id for state in snapshot.running for block_id in state.block_ids}
        assert (len(held), len(snapshot.idle)) == (record.num_used_blocks, record.num_idle_blocks)
        assert len(snapshot.free) + len(snapshot.idle) == record.num_free_blocks
        states = {state.request_id: state for state in snapshot.running}
        assert record.tokens.keys() <= states.keys()
        assert all(states[name].num_computed_tokens == start for name, (start, _) in record.tokens.items())
        assert not any(state.block_ids for state in snapshot.waiting)
    assert trace.after is not None and not trace.after.running and len(trace.after.free) + len(trace.after.idle) == 20


# --- the decision log ---------------------------------------------------------------------------------


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
