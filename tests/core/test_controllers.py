"""Caps that follow the queue, and gates that follow the rate of arrivals: their numbers, and what a run shows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from minserve.core.controllers import ArrivalRate, GrowWhenQueued, ServeAtOnceWhenSlow, ShrinkWhenQueued, WaitWhenSlow
from minserve.core.engine import Arrival, Engine
from minserve.core.policies import FirstComeFirstServed, Moment, SizeCap
from minserve.core.request import Request, SamplingParams
from tests.oracle import make_engine


def request(order: int, arrival_s: float = 0.0) -> Request:
    return Request(f"R{order}", (1, 2), SamplingParams(), max_total_tokens=5, arrival_s=arrival_s, order=order)


def moment(num_waiting: int, num_running: int = 0) -> Moment:
    empty = make_engine(8, 4).scheduler.moment(0.0)
    requests = [request(number) for number in range(num_waiting + num_running)]
    return replace(empty, running=requests[:num_running], waiting=requests[num_running:])


@pytest.mark.parametrize(
    ("policy", "caps"),
    [
        (ShrinkWhenQueued(32, 4), {0: 32, 1: 28, 8: 16, 24: 8, 56: 4, 1000: 4}),  # 32 / (1 + queue / 8)
        (GrowWhenQueued(8, 64, 2), {0: 8, 1: 10, 8: 24, 28: 64, 1000: 64}),
        (SizeCap(7), {0: 7, 1000: 7}),
    ],
)
def test_caps_by_queue(policy: SizeCap, caps: dict[int, int]):
    assert {queue: policy.cap(moment(queue)) for queue in caps} == caps


def test_a_cap_below_what_runs_lets_nobody_in_and_takes_nobody_out():
    assert not ShrinkWhenQueued(32, 4).candidates(moment(56, num_running=20))
    assert len(ShrinkWhenQueued(32, 4).candidates(moment(56, num_running=1))) == 3


def test_to_grow_with_the_queue_needs_a_queue():
    """They come one a second and stay for eight steps of one, so eight run together. Who finds the door open waits for nobody; behind
    a cap of 2, and 2 more for each that waits, two thirds wait for others to wait with them: up to two steps, and longer at the end,
    when nobody comes any more."""
    load = arrivals([float(second) for second in range(30)])
    waits_s = {type(policy): queued_s(serve(policy, load)) for policy in (SizeCap(8), GrowWhenQueued(2, 32, 2))}
    assert max(waits_s[SizeCap]) == 0.0
    assert sum(wait_s > 0 for wait_s in waits_s[GrowWhenQueued]) == 19 and waits_s[GrowWhenQueued][-6:] == [0.0, 2.0, 1.0, 0.0, 4.0, 3.0]


def queued_s(engine: Engine) -> list[float]:
    return [record.queue_s for record in engine.trace.requests.values() if record.queue_s is not None]


def serve(policy: FirstComeFirstServed, arrivals: Sequence[Arrival]) -> Engine:
    engine = make_engine(512, 4)
    engine.scheduler.policy = policy
    engine.run(arrivals)
    engine.scheduler.check()
    return engine


def arrivals(times_s: Sequence[float], max_tokens: int = 8) -> list[Arrival]:
    return [(time_s, {"prompt_ids": range(n, n + 4), "params": SamplingParams(max_tokens=max_tokens)}) for n, time_s in enumerate(times_s)]


def test_to_shrink_when_queued_makes_the_queue_longer():
    """A burst of 64 answers of 8 tokens. A step takes a second however many take part, so eight seats make eight tokens a second."""
    policies = {"fixed": SizeCap(8), "shrink": ShrinkWhenQueued(8, 2), "grow": GrowWhenQueued(8, 32, 2)}
    ends_s = {name: serve(policy, arrivals([0.0] * 64)).clock.now() for name, policy in policies.items()}
    assert ends_s["fixed"] == 64.0 and ends_s["grow"] < 32.0 and ends_s["shrink"] > 150.0


# --- the rate, and gates --------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_last_arrivals_each_counted_once():
    rate = ArrivalRate(window=3)
    assert rate.per_s == 0.0
    first, second, third, fourth = (request(order, time_s) for order, time_s in enumerate((0.0, 4.0, 5.0, 6.0)))
    rate.see([first])
    assert rate.per_s == 0.0
    rate.see([first, second])
    rate.see([second, first])
    assert rate.per_s == 1 / 4
    rate.see([fourth, third])
    assert rate.per_s == 2 / 2  # of three arrivals, from 4 to 6 s


def test_a_burst_is_infinitely_fast():
    rate = ArrivalRate()
    rate.see([request(0, 1.0), request(1, 1.0)])
    assert rate.per_s == math.inf


def starts_s(engine: Engine) -> list[float | None]:
    return [record.scheduled_s for record in engine.trace.requests.values()]


def test_who_waits_when_slow():
    """One request in ten seconds: the gate that waits makes each of them wait, and nobody ever joins them."""
    slow = arrivals([0.0, 10.0, 20.0, 30.0], max_tokens=1)
    assert starts_s(serve(WaitWhenSlow(4, longest_wait_s=3.0), slow)) == [3.0, 13.0, 23.0, 33.0]
    assert starts_s(serve(ServeAtOnceWhenSlow(4, longest_wait_s=3.0), slow)) == [0.0, 10.0, 20.0, 30.0]


def test_who_waits_when_fast():
    """One request a second: the gate that waits only while they come fast begins to wait when it has seen two of them."""
    fast = arrivals([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], max_tokens=1)
    assert starts_s(serve(WaitWhenSlow(3, longest_wait_s=9.0), fast)) == [2.0, 2.0, 2.0, 5.0, 5.0, 5.0, 9.0]
    assert starts_s(serve(ServeAtOnceWhenSlow(3, longest_wait_s=9.0), fast)) == [0.0, 3.0, 3.0, 3.0, 6.0, 6.0, 6.0]


@pytest.mark.parametrize(("rate_per_s", "waits_s"), [(0.0, (3.0, 0.0)), (1.0, (3.0, 0.0)), (2.0, (2.0, 3.0)), (math.inf, (0.0, 3.0))])
def test_waits_by_rate(rate_per_s: float, waits_s: tuple[float, float]):
    gates = WaitWhenSlow(4, 3.0), ServeAtOnceWhenSlow(4, 3.0)
    assert tuple(gate.wait_s(rate_per_s) for gate in gates) == waits_s


def test_a_preempted_request_does_not_wait_at_the_gate_again():
    engine = make_engine(6, 4)
    engine.scheduler.policy = WaitWhenSlow(2, longest_wait_s=50.0)
    engine.run(arrivals([0.0, 0.0], max_tokens=14))
    [first, second] = engine.trace.requests.values()
    assert second.num_preemptions > 0 and second.finished_s is not None and second.finished_s < 50.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: ShrinkWhenQueued(4, 8),
        lambda: ShrinkWhenQueued(4, 0),
        lambda: GrowWhenQueued(8, 4),
        lambda: GrowWhenQueued(8, 16, 0),
        lambda: WaitWhenSlow(0, 1.0),
        lambda: ServeAtOnceWhenSlow(2, math.inf),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Callable[[], object]):
    with pytest.raises(ValueError, match="got"):
        make()
