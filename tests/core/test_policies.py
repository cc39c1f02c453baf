"""Who runs first, and who gives way."""

from minserve.core.policies import FirstComeFirstServed
from minserve.core.request import Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from tests.oracle import add_one, is_cold, make_engine, run_checked


def make_request(name: str, priority: int, arrival_s: float, order: int) -> Request:
    return Request(name, (1,), SamplingParams(), max_total_tokens=5, priority=priority, arrival_s=arrival_s, order=order)


def test_priority_then_arrival_then_place_in_line():
    requests = [make_request("d", 1, 0.0, 0), make_request("c", 0, 2.0, 1), make_request("b", 0, 1.0, 3), make_request("a", 0, 1.0, 2)]
    assert [r.request_id for r in sorted(requests, key=FirstComeFirstServed().order)] == ["a", "b", "c", "d"]


class ShortestFirst:
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
