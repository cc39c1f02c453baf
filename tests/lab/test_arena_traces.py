"""The loads of the arena: sealed, on a grid, the same for everybody, and with a past that a fork leaves as it was."""

import math

import pytest

from minserve.core.batch import ScheduledBatch
from minserve.core.policies import FirstComeFirstServed
from minserve.core.request import FinishReason
from minserve.lab.arena_traces import CEILING, END_TOKEN, TRACES, World, WorldRunner, arena_cost, with_pool
from minserve.sim.workload import Lengths, MultiTurn, Workload, exact


def test_five_traces_each_with_limits_and_a_reason() -> None:
    assert list(TRACES) == ["chat", "code", "batch", "bursty", "multi-turn"]
    for trace in TRACES.values():
        assert 90 <= len(trace.world(1)) <= 200 and len(trace.slo.reason) > 40
        assert any((trace.slo.ttft_s, trace.slo.tpot_s, trace.slo.latency_s))
    assert str(TRACES["code"].slo) == "TTFT 500 ms, TPOT 30 ms" and str(TRACES["batch"].slo) == "whole answer 8 s"


@pytest.mark.parametrize("name", TRACES)
def test_a_request_does_not_carry_its_future(name: str) -> None:
    trace = TRACES[name]
    calls = trace.world(1).arrivals()
    assert calls == trace.world(1).arrivals() != trace.world(2).arrivals()
    assert {call["params"].max_tokens for _, call in calls} == {CEILING} and not any(call["params"].ignore_eos for _, call in calls)
    assert all((1024 * time_s).is_integer() for time_s, _ in calls)
    assert max(call["params"].max_tokens for _, call in trace.load(1).arrivals()) < CEILING


@pytest.mark.parametrize("name", ["chat", "bursty"])
def test_a_fork_has_the_same_past_and_another_future(name: str) -> None:
    trace = TRACES[name]
    one = trace.world(1).arrivals()
    split_s = one[80][0]
    two = trace.world(1, split_s).arrivals()
    past = [arrival for arrival in one if arrival[0] < split_s]
    assert 20 < len(past) < len(one) - 20 and two[: len(past)] == past
    assert len(two) == len(one) and min(time_s for time_s, _ in two[len(past) :]) >= split_s
    assert [time_s for time_s, _ in two] == sorted(time_s for time_s, _ in two)
    assert two[len(past) :] != one[len(past) :]


def served(world: World, num_blocks: int = 2048) -> dict[str, tuple[int, str | None]]:
    trace = with_pool(TRACES["chat"], num_blocks)
    engine = trace.engine(world, FirstComeFirstServed(), arena_cost())
    engine.run(world.arrivals(), world.then)
    for record in engine.trace.steps:
        assert (2**30 * record.end_s).is_integer()
    return {name: (record.num_output_tokens, record.finish_reason) for name, record in engine.trace.requests.items()}


def test_answers_end_by_the_end_token_as_long_as_the_load_has_them() -> None:
    calls = [(float(i), {"prompt_ids": list(range(10, 30 + i)), "params": exact(3 + 20 * i)}) for i in range(4)]
    assert served(World(Workload(calls))) == {f"R{i}": (3 + 20 * i, FinishReason.STOP) for i in range(4)}


def test_after_the_split_what_is_not_over_gets_another_length() -> None:
    calls = [(0.0, {"prompt_ids": [7, 8, 9], "params": exact(count)}) for count in (5, 100, 900)]
    until = served(World(Workload(calls), split_s=0.25))
    assert until["R0"][0] == 5  # over by then
    assert until["R1"][0] == 60_000 // 160 - 60 == 315
    assert 5 < until["R2"][0] < 100  # would have become 2: ends with the next step


def test_the_made_up_tokens_never_end_an_answer_by_chance() -> None:
    """Token t at place e gives 31 t + e: this one would be the end token."""
    prompt = [1000] * 1001 + [next(t for t in range(32_000) if (31 * t + 1002) % 32_000 == END_TOKEN)]
    world = World(Workload([(0.0, {"prompt_ids": prompt, "params": exact(50)})]))
    assert served(world) == {"R0": (50, FinishReason.STOP)}


def test_a_chat_goes_on_after_an_answer_and_ends_where_it_is_sent_away() -> None:
    load = MultiTurn(1, 3, Lengths.constant(10), Lengths.constant(5), Lengths.constant(4), think_s=1.0)
    world = World(load)
    assert list(served(world)) == ["C0.0", "C0.1", "C0.2"] and len(world) == 3
    engine = TRACES["chat"].engine(world, FirstComeFirstServed(), arena_cost())
    (request,) = engine.add(**world.arrivals()[0][1])
    assert len(world.then(request, 0.0)) == 1
    request.error = "too late"
    assert world.then(request, 0.0) == []


def test_an_empty_step_takes_no_time() -> None:
    trace = TRACES["chat"]
    world = trace.world(1)
    runner = trace.engine(world, FirstComeFirstServed(), arena_cost()).runner
    assert isinstance(runner, WorldRunner) and runner.execute(ScheduledBatch(0, ())).elapsed_s == 0.0
    assert math.isinf(world._split_s)
