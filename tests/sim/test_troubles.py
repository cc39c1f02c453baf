"""Each trouble is there, each cure ends it, and the opposite move makes it worse: by runs of the real scheduler on the virtual device."""

from dataclasses import replace
from functools import cache

import pytest

from minserve.core.scheduler import Scheduler
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.planner import RUNTIME_BYTES, blocks_that_fit, requests_that_fit
from minserve.sim.shapes import ModelShape
from minserve.sim.troubles import TROUBLES, HastyScheduler, Outcome, Trouble, by_thrash, on_a_shared_card, with_a_guest
from minserve.sim.virtual_device import MemoryRunner, Neighbour, OutOfDeviceMemory, start_engine


@cache
def played(name: str) -> tuple[Trouble, dict[str, Outcome]]:
    trouble = TROUBLES[name]()
    return trouble, trouble.play()


@pytest.mark.parametrize("name", TROUBLES)
def test_every_cure_answers_everybody(name: str) -> None:
    trouble, outcomes = played(name)
    assert list(outcomes) == ["as it is", *trouble.cures, trouble.opposite[0]]
    for cure in trouble.cures:
        assert (outcomes[cure].num_answered, outcomes[cure].num_failed, outcomes[cure].error) == (len(trouble.load), 0, "")


@pytest.mark.parametrize(("name", "missing_gb"), [("start", (0.29, 2.69)), ("shared", (3.70, 7.70))])
def test_a_start_that_fails_says_what_is_missing_and_the_opposite_move_makes_it_more(name: str, missing_gb: tuple[float, float]) -> None:
    trouble, outcomes = played(name)
    before, worse = outcomes["as it is"], outcomes[trouble.opposite[0]]
    assert not before.starts and not worse.starts
    assert (round(before.missing_bytes / 1e9, 2), round(worse.missing_bytes / 1e9, 2)) == missing_gb


def test_the_start_names_the_longest_request_that_would_fit() -> None:
    _, outcomes = played("start")
    assert "one request of 32,768 tokens needs 4.29 GB; the longest that fits has 30,528 tokens" in outcomes["as it is"].error
    assert outcomes["context 16,384"].num_pool_tokens == 30_528
    assert outcomes["KV in fp8"].num_pool_tokens == 2 * 30_528


@pytest.mark.parametrize(("name", "num_failed"), [("step", (38, 40)), ("guest", (12, 31))])
def test_a_running_engine_fails_more_requests_the_more_it_took(name: str, num_failed: tuple[int, int]) -> None:
    trouble, outcomes = played(name)
    before, worse = outcomes["as it is"], outcomes[trouble.opposite[0]]
    assert (before.num_failed, worse.num_failed) == num_failed
    assert before.num_answered + before.num_failed == len(trouble.load) and before.starts
    assert "activations needs" in before.error and "KV pool" in before.error


def test_what_cures_the_start_is_poison_for_the_step() -> None:
    """One knob, opposite moves: the fraction is raised for the one, lowered for the other."""
    fraction_of = {name: TROUBLES[name]().settings["memory_fraction"] for name in TROUBLES}
    start, step = played("start")[0], played("step")[0]
    assert start.cures["fraction 0.95"]["memory_fraction"] > fraction_of["start"] > start.opposite[1]["memory_fraction"]
    assert step.cures["fraction 0.95"]["memory_fraction"] < fraction_of["step"] < step.opposite[1]["memory_fraction"]
    thrash = played("thrash")[0]
    assert thrash.cures["fraction 0.9"]["memory_fraction"] > fraction_of["thrash"] > thrash.opposite[1]["memory_fraction"]


def test_thrash_fails_nobody_and_computes_most_tokens_again() -> None:
    trouble, outcomes = played("thrash")
    before, worse = outcomes["as it is"], outcomes[trouble.opposite[0]]
    assert before.num_failed == worse.num_failed == 0
    assert before.recomputed_share > 0.7 and worse.recomputed_share > 0.8 and before.num_preemptions > 150
    for cure in ("room for the whole prompt", "4 at once", "watermark of 200 blocks", "whole answers reserved"):
        assert outcomes[cure].recomputed_share <= 0.06
        assert outcomes[cure].output_tokens_per_s > 1.4 * before.output_tokens_per_s > 2 * worse.output_tokens_per_s
    assert outcomes["fraction 0.9"].output_tokens_per_s > 2 * before.output_tokens_per_s
    assert outcomes["4 at once"].worst_gap_s < 0.1 < 3 < before.worst_gap_s


def test_a_hasty_door_is_the_scheduler_s_own_where_whole_answers_are_reserved() -> None:
    trouble = by_thrash()
    hasty = trouble.try_out({"reserve_whole_answers": True})
    assert hasty == trouble.try_out({"reserve_whole_answers": True, "make_scheduler": Scheduler})
    assert trouble.settings["make_scheduler"] is HastyScheduler


@pytest.mark.parametrize(("shock_gb", "survives"), [(2, 0.95), (5, 0.9), (10, 0.85)])
def test_the_fraction_that_survives_a_guest(shock_gb: float, survives: float) -> None:
    """A guest of so many GB who comes while we run fits beside the fraction that leaves him room, and beside none greater."""
    trouble = with_a_guest(1e9 * shock_gb)
    failed = {fraction: trouble.try_out({"memory_fraction": fraction}).num_failed for fraction in (survives, survives + 0.05)}
    assert failed[survives] == 0 < failed[survives + 0.05]


def test_a_share_of_what_is_free_leaves_the_neighbour_alone_whatever_he_holds() -> None:
    trouble = on_a_shared_card()
    pools = [trouble.try_out({"of_free_memory": True, "memory_fraction": fraction}).num_pool_tokens for fraction in (0.8, 0.9, 0.95)]
    assert pools == sorted(pools) and pools[0] > 0


# --- sizes of a pool ------------------------------------------------------------------------------

CASE = CostModel(  # a request of 40,960 tokens needs 4.375 GiB
    ModelShape(
        name="case", num_layers=28, hidden_size=1024, num_heads=8, num_kv_heads=8, head_dim=128, intermediate_size=3072, vocab_size=1000
    ),
    DEVICES["l4"],
)


def test_a_pool_of_half_a_gib_refuses_what_it_cannot_hold_and_names_what_it_can() -> None:
    """0.51 GiB hold 298 blocks of 16: 4,768 tokens."""
    fraction = (CASE.stored_weight_bytes + RUNTIME_BYTES + 0.51 * 2**30) / CASE.device.memory_bytes
    with pytest.raises(OutOfDeviceMemory, match="one request of 40,960 tokens needs 4.70 GB; the longest that fits has 4,768 tokens"):
        start_engine(CASE, memory_fraction=fraction, reserve_bytes=0.0, max_model_len=40_960)
    engine = start_engine(CASE, memory_fraction=fraction, reserve_bytes=0.0, max_model_len=4768)
    assert engine.scheduler.blocks.num_blocks == 298


def test_the_start_and_the_plan_count_the_same_blocks() -> None:
    """2,048 blocks: for one request of 32,768 tokens as for four of 8,192."""
    pool_bytes = 2048 * 16 * CASE.kv_bytes_per_token
    fraction = (CASE.stored_weight_bytes + RUNTIME_BYTES + pool_bytes + 1) / CASE.device.memory_bytes
    engine = start_engine(CASE, memory_fraction=fraction, reserve_bytes=0.0, max_model_len=32_768)
    assert engine.scheduler.blocks.num_blocks == blocks_that_fit(CASE, 16, fraction, RUNTIME_BYTES) == 2048
    for tokens, num_requests in ((32_768, 1), (8192, 4), (32_769, 0)):
        assert requests_that_fit(CASE, tokens, memory_fraction=fraction, reserve_bytes=RUNTIME_BYTES) == num_requests


def test_what_is_missing_at_the_start_is_nobody_s_to_share_out() -> None:
    """24 in all, 22.5 free, 10 for ourselves, all of the rest: 12.5 for keys and values, and not 14."""
    device = replace(CASE.device, memory_bytes=24.0 * 2**30)
    cost, ours = CostModel(CASE.shape, device), 10.0 * 2**30
    reserve_bytes = ours - cost.stored_weight_bytes - RUNTIME_BYTES
    neighbours = (Neighbour("neighbour", 1.5 * 2**30),)

    def pool_and_room(of_free_memory: bool) -> tuple[float, float]:
        """GiB of the pool, and GiB that are left for the step's 10."""
        engine = start_engine(cost, memory_fraction=1.0, of_free_memory=of_free_memory, reserve_bytes=reserve_bytes, neighbours=neighbours)
        assert isinstance(engine.runner, MemoryRunner)
        room_bytes = engine.runner.device.free_bytes + cost.stored_weight_bytes + RUNTIME_BYTES
        return engine.scheduler.blocks.num_slots * cost.kv_bytes_per_token / 2**30, room_bytes / 2**30

    assert pool_and_room(True) == pytest.approx((12.5, 10.0), abs=0.002)
    assert pool_and_room(False) == pytest.approx((14.0, 8.5), abs=0.002)  # 1.5 too few: some step will fail
