"""Memory pressure: the record agrees with the block manager and with the trace, at every moment of a run."""

import pytest

from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.pressure import Pressure
from minserve.core.request import SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.core.trace_file import perfetto_events
from tests.oracle import OracleRunner


def engine_of(num_blocks: int = 12, block_size: int = 4) -> Engine:
    scheduler = Scheduler(SchedulerConfig(token_budget=8), BlockManager(num_blocks, block_size))
    return Engine(scheduler, OracleRunner(num_blocks, block_size), VirtualClock(), ModelLimits(100, 1000))


def test_the_parts_of_a_pool_add_up() -> None:
    pressure = Pressure(100, 16, num_used_blocks=60, num_idle_blocks=30, num_running=5, num_waiting=2, num_empty_slots=48)
    assert (pressure.num_free_blocks, pressure.num_clean_blocks) == (40, 10)
    assert pressure.used_share == 0.6 and pressure.fragmentation == pytest.approx(48 / 960)
    assert Pressure(8, 4, 0, 0, 0, 0, 0).fragmentation == 0.0


def test_it_is_what_the_scheduler_holds() -> None:
    engine = engine_of()
    for length in (5, 6, 9):
        engine.add([100 * length + i for i in range(length)], SamplingParams(max_tokens=6))  # nothing in common
    engine.step()  # 5 tokens of the first, 3 of the second
    now = engine.scheduler.pressure()
    assert (now.num_used_blocks, now.num_running, now.num_waiting) == (3, 2, 1)
    assert now.num_empty_slots == 3 + 1  # 8 slots for 5 tokens, 4 for 3
    assert now.num_blocks == 12 and now.block_size == 4


def test_the_trace_has_it_of_every_step_and_the_viewer_shows_it() -> None:
    engine = engine_of()
    for length in (5, 6, 9, 3):
        engine.add(range(length), SamplingParams(max_tokens=6))
    engine.run()
    for step in engine.trace.steps:
        stored = {request_id: start + count for request_id, (start, count) in step.tokens.items()}
        if len(stored) == step.num_running + len(step.finished):  # everybody computed something in this step
            assert step.num_empty_slots == sum(-end % 4 for end in stored.values())
        assert step.num_used_blocks + step.num_free_blocks == 12
    events = perfetto_events(engine.trace.requests, engine.trace.steps)
    empty = [event["args"]["empty"] for event in events if event["name"] == "empty slots"]
    assert empty == [step.num_empty_slots for step in engine.trace.steps] and max(empty) > 0
    blocks = [event["args"] for event in events if event["name"] == "KV blocks"]
    assert all(sum(counts.values()) == 12 for counts in blocks)
    after = engine.scheduler.pressure()
    assert after.num_used_blocks == after.num_empty_slots == after.num_running == 0 and after.num_idle_blocks > 0
