"""Who runs first, who gives way, and when a batch starts."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from minserve.core.block_manager import Share
from minserve.core.engine import Arrival, Engine, EngineStalled
from minserve.core.policies import Ageing, FirstComeFirstServed, LengthBuckets, SizeCap, StaticBatches, TimeoutBatches
from minserve.core.request import Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from tests.oracle import add_one, is_cold, make_engine, run_checked


def make_request(name: str, priority: int, arrival_s: float, order: int) -> Request:
    return Request(name, (1,), SamplingParams(), max_total_tokens=5, priority=priority, arrival_s=arrival_s, order=order)


def test_priority_then_arrival_then_place_in_line():
    requests = [make_request("d", 1, 0.0, 0), make_request("c", 0, 2.0, 1), make_request("b", 0, 1.0, 3), make_request("a", 0, 1.0, 2)]
    assert [r.request_id for r in sorted(requests, key=FirstComeFirstServed().order)] == ["a", "b", "c", "d"]


class ShortestFirst(FirstComeFirstServed):
    """By the length of the prompt: another policy, to see that the scheduler asks it."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.num_prompt_tokens, request.order)


def test_the_scheduler_asks_its_policy_and_only_it():
    engine = make_engine(64, 4)
    engine.scheduler = Scheduler(SchedulerConfig(max_running=1), engine.scheduler.blocks, ShortestFirst())
    requests = [add_one(engine, range(n), 2) for n in (9, 3, 6)]
    run_checked(engine)
    assert [name for step in engine.trace.steps for name in step.finished] == ["R1", "R2", "R0"]
    assert all(is_cold(r, 2) for r in requests)


def test_first_come_first_served_is_what_one_gets_without_asking():
    assert isinstance(make_engine(4, 4).scheduler.policy, FirstComeFirstServed)


# --- batches -----------------------------------------------------------------------------------------


def batching_engine(policy: FirstComeFirstServed, **options: Any) -> Engine:
    """The oracle, one second a step, behind a policy."""
    engine = make_engine(64, 4, **options)
    engine.scheduler.policy = policy
    return engine


def arrival(time_s: float, num_prompt_tokens: int, max_tokens: int) -> Arrival:
    return (time_s, {"prompt_ids": range(num_prompt_tokens), "params": SamplingParams(max_tokens=max_tokens)})


def starts_s(engine: Engine) -> list[float | None]:
    return [record.scheduled_s for record in engine.trace.requests.values()]


def test_a_static_batch_keeps_its_empty_seats_until_all_have_ended():
    engine = batching_engine(StaticBatches(2))
    engine.run([arrival(0.0, 3, 2), arrival(0.0, 3, 5), arrival(0.0, 3, 1), arrival(0.5, 3, 1)])
    assert starts_s(engine) == [0.0, 0.0, 5.0, 5.0]  # continuous batching would start the third at 2


def test_continuous_batching_fills_a_seat_at_once():
    engine = batching_engine(FirstComeFirstServed(), max_running=2)
    engine.run([arrival(0.0, 3, 2), arrival(0.0, 3, 5), arrival(0.0, 3, 1), arrival(0.5, 3, 1)])
    assert starts_s(engine) == [0.0, 0.0, 2.0, 3.0]


def test_a_static_batch_takes_whoever_waits_and_nobody_later():
    engine = batching_engine(StaticBatches(8))
    engine.run([arrival(0.0, 3, 3), arrival(1.0, 3, 1)])
    assert starts_s(engine) == [0.0, 3.0]


def test_a_batch_whose_prompts_take_several_steps_still_starts_whole():
    engine = batching_engine(StaticBatches(3), token_budget=4)
    engine.run([arrival(0.0, 4, 2), arrival(0.0, 4, 2), arrival(0.0, 4, 2), arrival(0.0, 4, 2)])
    assert engine.trace.steps[0].tokens.keys() == {"R0"}
    records = list(engine.trace.requests.values())
    assert records[3].scheduled_s == max(r.finished_s for r in records[:3] if r.finished_s is not None)


def test_a_timeout_batch_starts_when_it_is_full_or_the_first_has_waited():
    engine = batching_engine(TimeoutBatches(2, wait_s=3.0))
    engine.run([arrival(0.0, 3, 1), arrival(1.5, 3, 1), arrival(10.0, 3, 1)])
    assert starts_s(engine) == [1.5, 1.5, 13.0]


def test_the_time_to_start_may_come_while_a_step_finds_nothing_to_do():
    """An empty step takes a second here: the policy is asked again after it, though nobody comes and no time is left to wait."""
    engine = batching_engine(TimeoutBatches(2, wait_s=0.5))
    engine.run([arrival(0.0, 3, 1)])
    assert starts_s(engine) == [1.0]


def test_a_timeout_batch_says_why_it_waits():
    engine = batching_engine(TimeoutBatches(2, wait_s=3.0))
    add_one(engine, range(3), 1)
    engine.step()
    assert [d.words for d in engine.trace.why("R0")] == ["waits: the policy lets nobody start now"]


def test_a_preempted_member_comes_back_into_its_batch():
    engine = make_engine(6, 4)
    engine.scheduler.policy = StaticBatches(2)
    requests = [add_one(engine, range(n, n + 8), 8) for n in (0, 20, 40)]
    run_checked(engine)
    assert sum(r.num_preemptions for r in requests) > 0 and all(is_cold(r, 8) for r in requests)


def test_case_the_pool_never_frees_and_the_policy_waits_no_more():
    """An overdue batch that finds no blocks is a stall, not an endless loop."""
    engine = batching_engine(TimeoutBatches(4, wait_s=1.0))
    thief = make_request("thief", 0, 0.0, 99)
    engine.scheduler.blocks.start(thief, Share())
    engine.scheduler.blocks.grow(thief, engine.scheduler.blocks.num_slots)
    add_one(engine, range(3), 1)
    with pytest.raises(EngineStalled, match="0 of 64 blocks free"):
        engine.run()


# --- one thing changed each --------------------------------------------------------------------------


def test_a_cap_is_all_that_a_size_cap_adds():
    engine = batching_engine(SizeCap(2))
    engine.run([arrival(0.0, 3, 2), arrival(0.0, 3, 5), arrival(0.0, 3, 1), arrival(0.5, 3, 1)])
    assert starts_s(engine) == [0.0, 0.0, 2.0, 3.0]  # as continuous batching with max_running=2


def test_a_preempted_request_keeps_its_seat_under_a_cap():
    """It is the first in line, so nobody who waits takes the seat that it left."""
    engine = make_engine(6, 4)
    engine.scheduler.policy = SizeCap(2)
    requests = [add_one(engine, range(n, n + 8), 8) for n in (0, 20, 40)]
    run_checked(engine)
    assert requests[1].num_preemptions > 0 and all(is_cold(r, 8) for r in requests)
    assert [name for step in engine.trace.steps for name in step.finished] == ["R0", "R1", "R2"]


def test_buckets_batch_prompts_of_one_length():
    engine = batching_engine(LengthBuckets([4, 8], size=2, wait_s=10.0))
    engine.run([arrival(0.0, 3, 2), arrival(0.0, 12, 2), arrival(1.0, 8, 2), arrival(2.0, 4, 2), arrival(3.0, 5, 2)])
    # 3 and 4 tokens share a bucket, full at 2 s; 8 and 5 share the next, full at 3 s, begun when that batch has ended; 12 is alone.
    assert starts_s(engine) == [2.0, 10.0, 4.0, 2.0, 4.0]


def test_of_the_overdue_buckets_the_one_goes_first_whose_first_has_waited_longest():
    engine = batching_engine(LengthBuckets([4], size=2, wait_s=1.0))
    engine.run([arrival(0.0, 3, 9), arrival(2.0, 9, 1), arrival(3.0, 3, 1), arrival(4.0, 3, 1)])
    assert starts_s(engine) == [1.0, 10.0, 11.0, 11.0]  # the full bucket came later


def test_an_edge_belongs_to_the_bucket_below_it():
    policy = LengthBuckets([4, 8], size=2, wait_s=0.0)
    requests = [Request("r", tuple(range(n)), SamplingParams(), max_total_tokens=99) for n in (1, 4, 5, 8, 9, 50)]
    assert [policy.bucket(r) for r in requests] == [0, 0, 1, 1, 2, 2]


def test_ageing_is_priority_until_the_wait_is_worth_a_level():
    order = Ageing(seconds_per_level=10.0).order
    old, young, younger = make_request("old", 1, 0.0, 0), make_request("young", 0, 9.0, 1), make_request("younger", 0, 11.0, 2)
    assert sorted([younger, old, young], key=order) == [young, old, younger]
    assert sorted([younger, old, young], key=FirstComeFirstServed().order) == [young, younger, old]


@pytest.mark.parametrize(("policy", "start_s"), [(FirstComeFirstServed(), 20.0), (Ageing(4.0), 4.0)])
def test_nobody_starves_behind_a_stream_of_the_important(policy: FirstComeFirstServed, start_s: float):
    """One request a second, each of one step, in the one seat there is; the unimportant one comes with the first."""
    engine = batching_engine(policy, max_running=1)
    stream = [(float(second), {"prompt_ids": range(3), "params": SamplingParams(max_tokens=1)}) for second in range(20)]
    unimportant = (0.0, {"prompt_ids": range(9), "params": SamplingParams(max_tokens=1), "priority": 1, "request_id": "X"})
    engine.run([*stream, unimportant])
    assert engine.trace.requests["X"].scheduled_s == start_s


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticBatches(0),
        lambda: TimeoutBatches(2, -1.0),
        lambda: TimeoutBatches(2, math.inf),
        lambda: SizeCap(0),
        lambda: LengthBuckets([], 2, 1.0),
        lambda: LengthBuckets([8, 4], 2, 1.0),
        lambda: LengthBuckets([0, 4], 2, 1.0),
        lambda: Ageing(-1.0),
        lambda: Ageing(math.inf),
    ],
)
def test_sizes_that_make_no_sense_are_refused(make: Callable[[], object]):
    with pytest.raises(ValueError, match="got"):
        make()
