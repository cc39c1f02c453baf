"""Kind A of the cases from real bug reports: block accounting. Leaks, double frees, rollback."""

from typing import Any

import pytest

from minserve.core.batch import ScheduledBatch
from minserve.core.block_manager import BlockManager
from minserve.core.request import FinishReason, Request, SamplingParams
from tests.oracle import add_one, assert_idle, before_steps, is_cold, make_engine, run_checked, step_checked


def make_request(prompt_ids: Any, request_id: str = "R") -> Request:
    return Request(request_id, tuple(prompt_ids), SamplingParams(), max_total_tokens=1_000)


def test_case_1_finished_requests_give_their_blocks_back():
    engine = make_engine(64, 16)
    blocks, num_evictions = engine.scheduler.blocks, 0
    for number in range(40):
        known = len(blocks.cache)
        request = add_one(engine, range(100 * number, 100 * number + 40), 8)
        run_checked(engine)
        num_evictions += known + 2 - len(blocks.cache)  # 47 stored tokens fill 2 blocks
        assert is_cold(request, 8) and request.num_preemptions == 0
        assert all(blocks.ref_count(b) == 0 for b in range(64))
        assert_idle(engine)
    assert num_evictions == 40 * 2 - len(blocks.cache) == 17


def test_case_2_a_new_block_has_one_owner():
    blocks = BlockManager(4, 4, prefix_caching=False)
    request = make_request(range(6))
    for _ in range(10):
        blocks.start(request, blocks.find_prefix(request))
        blocks.grow(request, 6)
        assert [blocks.ref_count(b) for b in blocks.table(request)] == [1, 1]
        assert blocks.num_free_blocks == 2
        blocks.check()
        blocks.release(request)
        assert blocks.num_free_blocks == 4 and all(blocks.ref_count(b) == 0 for b in range(4))
        blocks.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_case_4_a_request_that_finds_no_block_keeps_those_it_has(prefix_caching: bool):
    engine = make_engine(6, 4, prefix_caching=prefix_caching)
    blocks = engine.scheduler.blocks
    first, second = add_one(engine, range(12), 8), add_one(engine, range(50, 62), 8)
    step_checked(engine)
    old = blocks.table(first)
    assert len(old) == 3 and blocks.num_free_blocks == 0
    step_checked(engine)
    assert blocks.table(first)[:3] == old and blocks.num_held_blocks(first) == 4
    assert blocks.num_held_blocks(second) == 0 and second.num_preemptions == 1
    assert blocks.num_free_blocks == 2
    run_checked(engine)
    assert is_cold(first, 8) and is_cold(second, 8)
    assert_idle(engine)


def test_case_5_a_chunk_that_finishes_a_block_takes_no_extra_one():
    for held in range(10):
        for chunk in range(1, 10):
            blocks = BlockManager(8, 4)
            request = make_request(range(20))
            blocks.start(request, blocks.find_prefix(request))
            blocks.grow(request, held)
            request.num_computed_tokens = held
            assert blocks.num_new_blocks(request, held + chunk) == -(-(held + chunk) // 4) - -(-held // 4)
            assert blocks.grow(request, held + chunk) is None
            assert blocks.num_held_blocks(request) == -(-(held + chunk) // 4)
            blocks.check()
    engine = make_engine(16, 4, max_chunk_tokens=3)  # 3 tokens in one block, then 3 and 2 more: 2 blocks hold all 8
    request = add_one(engine, range(8), 1)
    held_after = []
    before_steps(engine, lambda batch: held_after.append(engine.scheduler.blocks.num_held_blocks(request)))
    run_checked(engine)
    assert held_after == [1, 2, 2]


@pytest.mark.parametrize("token_budget", [16, 12])
@pytest.mark.parametrize("same", [True, False])
def test_case_7_who_is_not_scheduled_holds_nothing(token_budget: int, same: bool):
    engine = make_engine(16, 4, token_budget=token_budget)
    blocks = engine.scheduler.blocks
    requests = [add_one(engine, range(12), 4), add_one(engine, range(12) if same else range(50, 62), 4)]
    while engine.has_work:
        step_checked(engine)
        for request in requests:
            if not request.is_finished:
                assert blocks.num_held_blocks(request) == blocks.num_blocks_for(request.num_computed_tokens)
        held = sum(blocks.ref_count(b) for b in range(16))
        assert held == sum(blocks.num_held_blocks(r) for r in requests)
    assert all(is_cold(r, 4) for r in requests)
    first = engine.trace.steps[0].tokens
    assert ("R1" in first) == (token_budget == 16)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_case_8_the_slot_of_the_last_token_is_freed_once(prefix_caching: bool):
    engine = make_engine(256, 1, token_budget=4, prefix_caching=prefix_caching)
    request = add_one(engine, range(8), 200)
    run_checked(engine)
    blocks = engine.scheduler.blocks
    assert is_cold(request, 200)
    assert len(blocks._free) + blocks.num_idle_blocks == 256 == len({*blocks._free, *blocks.cache.idle})
    assert blocks.num_idle_blocks == (207 if prefix_caching else 0)  # the stored tokens: 8 + 200 - 1


@pytest.mark.parametrize("n", [2, 4])
def test_case_10_an_abort_takes_the_samples_with_it(n: int):
    engine = make_engine(64, 4)
    for number in range(100):
        samples = engine.add(range(10), SamplingParams(max_tokens=64, n=n, ignore_eos=True))
        while not samples[-1].num_output_tokens:
            step_checked(engine)
        assert engine.abort(samples[0].request_id)
        assert [s.finish_reason for s in samples] == [FinishReason.ABORT] * n
        assert not engine.has_work, f"round {number}"
        assert_idle(engine)
        assert not engine.scheduler.blocks._tables


def test_case_10_an_abort_before_the_samples_fork():
    engine = make_engine(64, 4)
    samples = engine.add(range(10), SamplingParams(max_tokens=64, n=4))
    step_checked(engine)
    assert [len(s.output_ids) for s in samples] == [1, 0, 0, 0]
    engine.abort(samples[0].request_id)
    assert all(s.finish_reason is FinishReason.ABORT for s in samples)
    assert_idle(engine)


def test_case_10_an_abort_reaches_samples_whose_first_one_has_ended():
    engine = make_engine(64, 4, max_running=2)
    samples = engine.add(range(10), SamplingParams(max_tokens=8, n=3))
    while not samples[0].is_finished:
        step_checked(engine)
    assert engine.abort(samples[0].request_id)
    assert [s.finish_reason for s in samples] == ["length", "abort", "abort"]
    assert_idle(engine)


def test_an_abort_of_one_sample_leaves_the_others():
    engine = make_engine(64, 4)
    samples = engine.add(range(10), SamplingParams(max_tokens=8, n=3))
    step_checked(engine)
    step_checked(engine)
    assert engine.abort(samples[1].request_id)
    run_checked(engine)
    assert [s.finish_reason for s in samples] == ["length", "abort", "length"]
    assert is_cold(samples[0], 8) and is_cold(samples[2], 8)


@pytest.mark.parametrize("when", ["first step", "decode step", "last token"])
def test_case_11_an_abort_between_plan_and_result(when: str):
    engine = make_engine(64, 4)
    requests = [add_one(engine, range(50 * i, 50 * i + 10), 3 if i == 1 else 8) for i in range(3)]
    place = {"first step": 0, "decode step": 1, "last token": 2}[when]
    for _ in range(place):
        step_checked(engine)

    def abort_middle(batch: ScheduledBatch) -> None:
        assert len(batch.rows) == 3
        assert engine.abort("R1")

    before_steps(engine, abort_middle)
    output = step_checked(engine)
    before_steps(engine)
    assert [r.request_id for r, _ in output.tokens] == ["R0", "R2"] and output.finished == ()
    assert requests[1].finish_reason is FinishReason.ABORT and requests[1].num_output_tokens == place
    assert [r.num_output_tokens for r in (requests[0], requests[2])] == [place + 1] * 2
    run_checked(engine)
    assert requests[1].num_output_tokens == place
    assert is_cold(requests[0], 8) and is_cold(requests[2], 8)
    assert_idle(engine)
    assert engine.trace.requests["R1"].finish_reason == "abort"


def test_case_13_abort_of_one_that_waits_is_unknown_or_has_ended():
    engine = make_engine(16, 4, max_running=1)
    requests = [add_one(engine, range(50 * i, 50 * i + 6), 3) for i in range(3)]
    step_checked(engine)
    assert engine.abort("R1")
    assert not engine.abort("nope")
    assert not engine.abort("R1")
    while not requests[0].is_finished:
        step_checked(engine)
    assert not engine.abort("R0") and not engine.abort("R0")
    step_checked(engine)
    assert engine.scheduler.running == [requests[2]]
    run_checked(engine)
    assert [r.finish_reason for r in requests] == ["length", "abort", "length"]
    assert is_cold(requests[2], 3)
    assert_idle(engine)


def test_abort_of_nothing_in_particular_aborts_nobody():
    engine = make_engine(16, 4)
    request = add_one(engine, range(6), 3)
    nothing: Any = None
    assert not engine.abort(nothing) and not engine.abort("")
    run_checked(engine)
    assert is_cold(request, 3)


def test_case_14_a_second_release_changes_nothing():
    blocks = BlockManager(8, 4)
    request = make_request(range(10))
    blocks.start(request, blocks.find_prefix(request))
    blocks.grow(request, 10)
    for _ in range(2):
        blocks.release(request)
        assert blocks.num_free_blocks == 8
        assert sorted(blocks._free) == list(range(8))
        blocks.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_case_14_blocks_with_two_owners_come_back_with_the_last(prefix_caching: bool):
    engine = make_engine(8, 4, prefix_caching=prefix_caching)
    blocks = engine.scheduler.blocks
    parent, child = engine.add(range(9), SamplingParams(max_tokens=4, n=2))
    step_checked(engine)
    step_checked(engine)
    shared = set(blocks.table(parent)) & set(blocks.table(child))
    assert len(shared) == 2 and all(blocks.ref_count(b) == 2 for b in shared)
    engine.finish(parent, FinishReason.STOP)
    engine.finish(parent, FinishReason.STOP)
    assert all(blocks.ref_count(b) == 1 for b in shared)
    engine.scheduler.check()
    run_checked(engine)
    assert is_cold(child, 4)
    assert_idle(engine)


@pytest.mark.parametrize("num_prompt_tokens", [3, 4, 5, 8])
def test_case_16_a_token_takes_a_new_block_when_it_is_fed(num_prompt_tokens: int):
    engine = make_engine(16, 4)
    blocks = engine.scheduler.blocks
    request = add_one(engine, range(num_prompt_tokens), 6)
    registered: list[tuple[int, ...]] = []
    register = blocks.cache.register

    def note(block_id: int, tokens: Any, parent: Any) -> Any:
        registered.append(tuple(tokens))
        return register(block_id, tokens, parent)

    blocks.cache.register = note
    fed: list[tuple[int, int]] = []
    before_steps(engine, lambda batch: fed.append((batch.rows[0].end - 1, blocks.num_held_blocks(request))))
    run_checked(engine)
    assert [p for p, _ in fed] == list(range(num_prompt_tokens - 1, num_prompt_tokens + 5))
    assert all(held == p // 4 + 1 for p, held in fed)
    stored = request.token_ids[:-1]
    assert registered == [tuple(stored[i : i + 4]) for i in range(0, len(stored) - 3, 4)]  # each full block once
    assert is_cold(request, 6)


def test_what_an_aborted_step_was_to_fill_is_not_found():
    """R0 is aborted during a step that then comes to nothing: its block has a name, and rubbish in it."""
    engine = make_engine(16, 4)

    def abort_and_fail(batch: ScheduledBatch) -> None:
        engine.abort("R0")
        raise RuntimeError("no step today")

    add_one(engine, range(9), 3)
    before_steps(engine, abort_and_fail)
    with pytest.raises(RuntimeError, match="no step today"):
        engine.step()
    engine.scheduler.check()
    before_steps(engine)
    again = add_one(engine, range(9), 3)
    run_checked(engine)
    assert again.num_cached_tokens == 0 and is_cold(again, 3)
    assert engine.trace.requests["R0"].finish_reason == "abort"
