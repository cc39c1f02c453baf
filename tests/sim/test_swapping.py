"""Swapping: what comes back is what went out (an oracle that keeps real host copies), times that add up, and when it beats recomputing."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minserve.core.batch import ScheduledBatch
from minserve.core.block_manager import Share
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import FinishReason, Request, SamplingParams
from minserve.core.scheduler import SchedulerConfig
from minserve.sim.cost_model import CostModel, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.runner import PaddedRunner
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.swapping import (
    HostCopy,
    SwappingBatch,
    SwappingBlocks,
    SwappingScheduler,
    make_swapping_engine,
    recompute_s,
    swap_s,
)
from minserve.sim.workload import Lengths, Workload, make_workload
from tests.core.test_independence import Interrupted, Play, Scenario, SpoilingRunner, scenarios
from tests.oracle import add_one, before_steps, is_cold, run_checked, step_checked

A100 = DEVICES["a100-80gb"]
COST = CostModel(SHAPES["llama-2-13b"], A100)
CROWD = make_workload(24, Lengths.uniform(100, 300), Lengths.uniform(100, 400), seed=1)


# --- an oracle with host memory ----------------------------------------------------------------------


class HostRunner(SpoilingRunner):
    """An oracle that really moves what a batch moves: a block that comes back wrong changes the text."""

    def __init__(self, num_blocks: int, block_size: int, seconds_per_step: float = 1.0):
        super().__init__(num_blocks, block_size, seconds_per_step)
        self.host: dict[int, list[int | None]] = {}

    def move(self, batch: ScheduledBatch) -> None:
        assert isinstance(batch, SwappingBatch)
        assert not (batch.moves_out and batch.moves_in), "blocks move both ways"
        size = self.block_size
        for device_id, host_id in batch.moves_out:
            self.host[host_id] = self.slots[device_id * size : (device_id + 1) * size]
        for host_id, device_id in batch.moves_in:
            self.slots[device_id * size : (device_id + 1) * size] = self.host.pop(host_id)


def swapping_oracle(num_blocks: int, block_size: int, num_host_blocks: int | None = None, **options: Any) -> Engine:
    """An engine on the oracle whose victims are swapped out; every batch is held against the contract of the seam."""
    config = {"token_budget": 1_000_000, "max_running": 1_000_000, **options.pop("config", {})}
    scheduler = SwappingScheduler(SchedulerConfig(**config), SwappingBlocks(num_blocks, block_size, num_host_blocks, **options))
    runner = HostRunner(num_blocks, block_size)
    runner.scheduler = scheduler
    engine = Engine(scheduler, runner, VirtualClock(), ModelLimits(100_000, 10_000))
    before_steps(engine, runner.move)
    return engine


def parts(engine: Engine) -> tuple[SwappingScheduler, SwappingBlocks]:
    assert isinstance(engine.scheduler, SwappingScheduler)
    return engine.scheduler, engine.scheduler.blocks


@dataclass
class SwappingPlay(Play):
    """A scenario of test_independence, with host memory behind the pool."""

    num_host_blocks: int | None = None
    fails_at: int | None = None  # of the steps that move blocks, the one that comes to nothing
    num_moving: int = 0

    def make_engine(self) -> Engine:
        s = self.scenario
        options = {"prefix_caching": s.prefix_caching, **self.block_options}
        return swapping_oracle(s.num_blocks, s.block_size, self.num_host_blocks, config=s.limits, **options)

    def _interrupt_inside(self, batch: ScheduledBatch) -> None:
        assert isinstance(batch, SwappingBatch) and isinstance(self.runner, HostRunner)
        self._count(batch)
        super()._interrupt_inside(batch)
        self.num_moving += batch.num_moves > 0
        if batch.num_moves and self.num_moving == self.fails_at:
            self.seen["lost on the way out"] += len(batch.moves_out)
            self.seen["lost on the way in"] += len(batch.moves_in)
            raise Interrupted
        self.runner.move(batch)

    def _count(self, batch: SwappingBatch) -> None:
        words = [words for _, words in batch.decisions]
        self.seen["out"] += len(batch.moves_out)
        self.seen["in"] += len(batch.moves_in)
        self.seen["full host"] += sum(w.startswith("is preempted") for w in words)
        self.seen["some cached, some moved"] += sum("cached" in w and "back over the link" in w for w in words)
        self.seen["all cached"] += sum(w.startswith("resumes") and "cached" in w and "link" not in w for w in words)


def play(scenario: Scenario, num_host_blocks: int | None, fails_at: int | None) -> Counter[str]:
    run = SwappingPlay(scenario, num_host_blocks=num_host_blocks, fails_at=fails_at)
    run.run()
    run.check_outputs()
    run.check_trace()
    assert parts(run.engine)[1].host_copies == {}, "nobody waits, and somebody has host memory"
    return run.seen


def test_outputs_never_depend_on_swapping():
    """Derandomized; the runs of test_independence (forks, priorities, hits, interruptions, failed steps), with and without room."""
    seen: Counter[str] = Counter()

    @settings(max_examples=400, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(scenarios(), st.none() | st.integers(0, 12), st.none() | st.integers(1, 4))
    def holds(scenario: Scenario, num_host_blocks: int | None, fails_at: int | None) -> None:
        seen.update(play(scenario, num_host_blocks, fails_at))

    holds()
    wanted = ("out", "in", "full host", "some cached, some moved", "all cached", "lost on the way out", "lost on the way in", "whole")
    assert not [name for name in wanted if seen[name] == 0], f"never drawn; drawn: {seen}"


# --- one request on paper ----------------------------------------------------------------------------


def two_collide(num_host_blocks: int | None = None, prefix_caching: bool = False) -> tuple[Engine, Request, Request]:
    """Two requests of 7 + 8 tokens in 6 blocks of 4: with 11 tokens each they hold all, and with the 12th stored one gives way."""
    engine = swapping_oracle(6, 4, num_host_blocks, prefix_caching=prefix_caching)
    return engine, add_one(engine, range(7), 8), add_one(engine, range(50, 57), 8)


def test_who_gives_way_goes_out_and_comes_back_whole():
    engine, first, second = two_collide()
    scheduler, blocks = parts(engine)
    while not second.num_preemptions:
        step_checked(engine)
    assert (second.num_tokens, second.num_computed_tokens, second.status) == (13, 0, "waiting")
    assert blocks.host_copies == {"R1": HostCopy(12, (0, 1, 2))} and blocks.num_held_blocks(second) == 0
    run_checked(engine)
    assert is_cold(first, 8) and is_cold(second, 8)
    assert [d.words for d in engine.trace.why("R1")] == [
        "starts: 7 of 7 tokens",
        "is swapped out: R0 needs 1 block, 0 free; 3 blocks over the link",
        "waits: needs 4 blocks, 2 free",
        "resumes: 1 of 13 tokens, 3 blocks back over the link",
    ]
    assert (scheduler.num_blocks_out, scheduler.num_blocks_in, blocks.host_copies) == (3, 3, {})
    assert engine.trace.summary().num_recomputed_tokens == 0 and engine.trace.summary().num_hit_tokens == 0


def test_blocks_that_the_pool_still_has_do_not_come_back_over_the_link():
    engine, first, second = two_collide(prefix_caching=True)
    run_checked(engine)
    assert is_cold(first, 8) and is_cold(second, 8)
    # Of its 3 blocks the first one's 4th took the last; the other two were idle and are found.
    assert [d.words for d in engine.trace.why("R1")][-1] == "resumes: 1 of 13 tokens, 8 cached, 1 block back over the link"
    assert (parts(engine)[0].num_blocks_out, parts(engine)[0].num_blocks_in) == (3, 1)


@pytest.mark.parametrize(("num_host_blocks", "moved", "again"), [(0, 0, 12), (2, 0, 12), (3, 3, 0)])
def test_if_the_host_is_full_the_victim_is_computed_again(num_host_blocks: int, moved: int, again: int):
    engine, first, second = two_collide(num_host_blocks)
    run_checked(engine)
    assert is_cold(first, 8) and is_cold(second, 8) and second.num_preemptions == 1
    assert (parts(engine)[0].num_blocks_out, engine.trace.summary().num_recomputed_tokens) == (moved, again)
    words = [d.words for d in engine.trace.why("R1")][1]
    assert words == (
        "is swapped out: R0 needs 1 block, 0 free; 3 blocks over the link"
        if moved
        else "is preempted: R0 needs 1 block, 0 free; the host is full"
    )


def swapped_out() -> tuple[Engine, Request]:
    engine, _, second = two_collide()
    while not second.num_preemptions:
        step_checked(engine)
    assert parts(engine)[1].host_copies
    return engine, second


def test_who_is_given_up_while_away_leaves_no_blocks_at_the_host():
    engine, second = swapped_out()
    engine.abort("R1")
    engine.scheduler.check()
    assert parts(engine)[1].host_copies == {} and second.finish_reason is FinishReason.ABORT
    run_checked(engine)


def test_who_is_preempted_by_hand_is_computed_again():
    engine = swapping_oracle(20, 4, prefix_caching=False)
    request = add_one(engine, range(7), 8)
    step_checked(engine)
    engine.scheduler.preempt(request)
    run_checked(engine)
    assert is_cold(request, 8) and parts(engine)[0].num_blocks_out == 0
    assert engine.trace.summary().num_recomputed_tokens == 7


def test_new_weights_make_host_copies_worthless():
    engine, second = swapped_out()
    engine.abort("R0")
    parts(engine)[1].flush_cache()
    run_checked(engine)
    assert is_cold(second, 8) and engine.trace.summary().num_recomputed_tokens == 12


def test_a_step_that_fails_leaves_no_name_on_a_block_that_was_not_filled():
    engine, _, second = two_collide(prefix_caching=True)
    assert isinstance(engine.runner, HostRunner)
    move = engine.runner.move

    def lose(batch: ScheduledBatch) -> None:
        assert isinstance(batch, SwappingBatch)
        if not batch.moves_in:
            return move(batch)
        engine.abort("R1")  # it has ended when the step fails, so the step's end doesn't touch it
        raise Interrupted

    before_steps(engine, lose)
    with pytest.raises(Interrupted):
        run_checked(engine)
    engine.scheduler.check()
    before_steps(engine, move)
    again = add_one(engine, second.token_ids, 3)
    run_checked(engine)  # the runner compares every slot that is read
    assert again.num_cached_tokens == 8 and is_cold(again, 3)  # what the pool still had, and not what was to come in


def held_by(blocks: SwappingBlocks, name: str, num_tokens: int) -> Request:
    """A request that has computed so many tokens, in blocks of its own."""
    request = Request(name, tuple(range(num_tokens + 1)), SamplingParams(), max_total_tokens=100)
    blocks.start(request, Share())
    blocks.grow(request, num_tokens)
    request.num_computed_tokens = num_tokens
    return request


def test_host_blocks_are_used_again():
    blocks = SwappingBlocks(8, 4)
    request = held_by(blocks, "R", 10)
    for _ in range(2):
        assert blocks.swap_out(request) == 3 and blocks.host_copies["R"] == HostCopy(10, (0, 1, 2))
        blocks.check()
        blocks.drop_copy(request)
    blocks.check()


def test_a_copy_that_is_shorter_than_what_the_pool_has_is_not_used():
    """Taken out in the middle of its prompt; meanwhile another request has computed the same one."""
    blocks = SwappingBlocks(8, 4)
    other = held_by(blocks, "other", 8)
    blocks.commit(other, 8)
    request = Request("R", tuple(range(9)), SamplingParams(), max_total_tokens=100)
    blocks.host_copies["R"] = HostCopy(3, (0,))
    blocks.start(request, blocks.find_prefix(request))
    assert (request.num_computed_tokens, blocks.moves_in, blocks.host_copies) == (8, [], {})


# --- the laws: each is broken once -------------------------------------------------------------------


def test_check_sees_a_host_block_with_two_owners():
    engine, _ = swapped_out()
    copies = parts(engine)[1].host_copies
    copies["R1"] = HostCopy(12, (0, 1, 1))
    with pytest.raises(AssertionError, match="host blocks: 3 owned \\+ 0 free of 3, or one of them twice"):
        engine.scheduler.check()


def test_check_sees_a_copy_with_too_few_blocks():
    engine, _ = swapped_out()
    parts(engine)[1].host_copies["R1"] = HostCopy(13, (0, 1, 2))
    with pytest.raises(AssertionError, match="R1 has 13 tokens in 3 host blocks"):
        engine.scheduler.check()


def test_check_sees_host_blocks_of_one_who_runs():
    engine, _ = swapped_out()
    copies = parts(engine)[1].host_copies
    copies["R0"] = copies.pop("R1")
    with pytest.raises(AssertionError, match="R0 doesn't wait and has 12 tokens in host memory"):
        engine.scheduler.check()


def test_check_sees_a_copy_of_more_than_the_request_has():
    engine, second = swapped_out()
    del second.token_ids[-1]
    with pytest.raises(AssertionError, match="R1 has 12 tokens and 12 tokens in host memory"):
        engine.scheduler.check()


# --- seconds -----------------------------------------------------------------------------------------


def test_the_two_prices_on_paper():
    assert swap_s(COST, 1000) == pytest.approx(2 * 1000 * 819_200 / 25e9) == pytest.approx(0.0655, abs=1e-4)
    assert swap_s(COST, 1000, 50e9) == pytest.approx(swap_s(COST, 1000) / 2)
    halves = CostModel(SHAPES["llama-2-13b"], A100, num_devices=2)
    assert swap_s(halves, 1000) == pytest.approx(swap_s(COST, 1000) / 2)
    alone = COST.of(row_work(0, 1000, samples=False)).seconds
    assert recompute_s(COST, 1000) == pytest.approx(alone - A100.step_overhead_s)
    decodes = decode_work(32, 1000)
    longer = COST.of(decodes + row_work(0, 1000, samples=False)).seconds - COST.of(decodes).seconds
    assert recompute_s(COST, 1000, decodes) == pytest.approx(longer)


def test_large_victims_are_swapped_at_a_gain_and_small_ones_ride_along_with_the_decodes():
    decodes = decode_work(32, 1000)
    assert swap_s(COST, 2048) < 0.6 * recompute_s(COST, 2048, decodes)
    assert swap_s(COST, 64) > 2 * recompute_s(COST, 64, decodes)  # the weights are read anyway
    small_kv = CostModel(SHAPES["llama-3.1-8b"], A100)  # 131,072 bytes a token: grouped queries favour the link
    assert swap_s(small_kv, 1024) < 0.2 * recompute_s(small_kv, 1024, decodes)


def test_what_a_batch_moves_is_charged_to_its_step():
    batch = SwappingBatch(0, (), moves_out=((0, 0), (1, 1)))
    engine = make_swapping_engine(COST, num_blocks=10, host_link_bytes_per_s=1e9)
    block_s = 16 * 819_200 / 1e9
    assert engine.runner.execute(batch).elapsed_s == pytest.approx(2 * block_s)
    assert engine.runner.execute(ScheduledBatch(0, ())).elapsed_s == 0.0
    assert (batch.num_moves, batch.plain()["out"]) == (2, ((0, 0), (1, 1)))


def seconds_of(**options: Any) -> tuple[float, float, int]:
    """Wall time, seconds on the link, tokens computed again, of a crowd in 200 blocks."""
    engine = make_swapping_engine(COST, num_blocks=200, prefix_caching=False, **options)
    summary = simulate(engine, CROWD).summary()
    engine.scheduler.check()
    assert summary.num_finished == 24 and summary.num_preemptions > 10
    return summary.wall_s, engine.link_busy_s, summary.num_recomputed_tokens


def test_the_link_is_waited_for_unless_it_overlaps():
    endless = seconds_of(host_link_bytes_per_s=1e15)
    slow, overlapping = seconds_of(), seconds_of(overlaps=True)
    assert slow[1] == overlapping[1] > 0.3 and endless[1] < 1e-4  # the schedule is the same
    assert slow[0] == pytest.approx(endless[0] + slow[1])
    assert endless[0] < overlapping[0] < slow[0]
    assert slow[2] == overlapping[2] == 0


def test_swapping_against_recomputing_in_a_schedule():
    recomputing = make_engine(COST, num_blocks=200, prefix_caching=False)
    again = simulate(recomputing, CROWD).summary()
    with_link, behind_a_slow_one = seconds_of(), seconds_of(host_link_bytes_per_s=2e9)
    assert again.num_recomputed_tokens > 3000
    assert with_link[0] < again.wall_s < behind_a_slow_one[0]


def test_a_host_of_no_bytes_gives_the_engine_that_recomputes():
    plain = make_engine(COST, num_blocks=200)
    with_host = make_swapping_engine(COST, num_blocks=200, host_memory_bytes=0)
    assert simulate(plain, CROWD).summary() == simulate(with_host, CROWD).summary()
    assert with_host.link_busy_s == 0


def test_options_arrive():
    engine = make_swapping_engine(
        COST,
        num_blocks=40,
        block_size=8,
        prefix_caching=False,
        watermark_blocks=2,
        host_memory_bytes=1e8,
        padded_rows=4,
        keep_snapshots=True,
    )
    blocks, config = engine.scheduler.blocks, engine.scheduler.config
    assert (blocks.num_blocks, blocks.block_size, blocks.prefix_caching, config.watermark_blocks) == (40, 8, False, 2)
    assert blocks.num_host_blocks == int(1e8 // (8 * 819_200)) == 15
    assert isinstance(engine.runner.runner, PaddedRunner)
    assert simulate(engine, Workload(CROWD.arrivals()[:1])).snapshots


def test_a_link_of_no_bytes_per_second_is_refused():
    with pytest.raises(ValueError, match="a link sends more than 0 bytes/s, got 0"):
        make_swapping_engine(COST, host_link_bytes_per_s=0)
