"""Kind D of the cases from real bug reports: preemption, and what must survive it."""

import pytest

from minserve.core.block_manager import BlockManager
from minserve.core.engine import EngineStalled
from minserve.core.request import Request, RequestStatus, SamplingParams
from tests.oracle import (
    OracleRunner,
    add_one,
    assert_idle,
    batches_of,
    faithful_engine,
    is_cold,
    make_engine,
    oracle_tokens,
    run_checked,
    step_checked,
)


def hold_blocks(blocks: BlockManager, num_blocks: int) -> Request:
    """Take blocks in the name of somebody outside the engine. Give them back with blocks.release(holder)."""
    holder = Request("holder", tuple(range(num_blocks * blocks.block_size)), SamplingParams(), max_total_tokens=1_000)
    blocks.start(holder, blocks.find_prefix(holder))
    blocks.grow(holder, holder.num_tokens)
    return holder


def test_case_58_a_second_prefill_goes_by_the_tokens_known_now():
    engine = faithful_engine(64, 4, prefix_caching=False, token_budget=8)
    request = add_one(engine, range(3), 24)
    for _ in range(20):
        step_checked(engine)
    assert request.num_output_tokens == 20
    engine.scheduler.preempt(request)
    num_given = []
    for _ in range(3):
        step_checked(engine)
        num_given.append(request.num_output_tokens)
    assert [step.tokens["R0"] for step in list(engine.trace.steps)[-3:]] == [(0, 8), (8, 8), (16, 7)]
    assert num_given == [20, 20, 21]
    run_checked(engine)
    assert is_cold(request, 24)
    assert engine.trace.summary().num_recomputed_tokens == 22  # of the 23 tokens all but the last had been computed


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_case_59_a_request_that_preempts_itself_waits_without_blocks(prefix_caching: bool):
    engine = faithful_engine(4, 4, prefix_caching=prefix_caching)
    blocks, scheduler = engine.scheduler.blocks, engine.scheduler
    request = add_one(engine, range(10), 6)
    for _ in range(3):
        step_checked(engine)
    holder = hold_blocks(blocks, 1)
    assert (request.num_tokens, blocks.num_held_blocks(request), blocks.num_free_blocks) == (13, 3, 0)
    for number in range(3):  # 13 tokens stored need a 4th block
        engine.step()
        assert scheduler.waiting == [request] and not scheduler.running and request.status is RequestStatus.WAITING
        assert blocks.num_held_blocks(request) == 0 and request.num_computed_tokens == 0
        assert request.num_preemptions == 1 and not engine.trace.steps[-1].tokens, f"step {number}"
        blocks.check()
    blocks.release(holder)
    run_checked(engine)
    assert is_cold(request, 6) and request.num_preemptions == 1
    assert [d.words.split(":")[0] for d in engine.trace.why("R0")] == ["starts", "is preempted", "waits", "resumes"]
    assert_idle(engine)


def test_case_59_a_run_that_can_never_go_on_says_so():
    engine = make_engine(4, 4)
    holder = hold_blocks(engine.scheduler.blocks, 1)
    request = add_one(engine, range(13), 2)
    with pytest.raises(EngineStalled, match=r"1 requests wait and nothing can run \(3 of 4 blocks free: R0 has 13 tokens\)"):
        engine.run()
    engine.scheduler.blocks.release(holder)
    assert engine.run() == [request] and is_cold(request, 2)


def test_case_61_a_seeded_request_goes_on_with_its_own_stream():
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=42)

    engine = faithful_engine(64, 4)
    [undisturbed] = engine.add(range(9), params)
    run_checked(engine)

    engine = faithful_engine(64, 4)
    [preempted] = engine.add(range(9), params)
    for _ in range(5):
        step_checked(engine)
    engine.scheduler.preempt(preempted)
    run_checked(engine)
    assert isinstance(engine.runner, OracleRunner) and engine.runner.num_draws == {"R0": 20}

    engine = faithful_engine(64, 4)
    engine.add(range(50, 60), SamplingParams(max_tokens=4, temperature=1.0, seed=1))
    [moved] = engine.add(range(9), params)
    run_checked(engine)
    places = [[row.request for row in batch.rows].index(moved) for batch in batches_of(engine)]
    assert places == [1] * 4 + [0] * 16

    assert undisturbed.output_ids == preempted.output_ids == moved.output_ids
    assert len(set(undisturbed.output_ids)) > 10


def test_case_62_a_preempted_request_is_not_overtaken_by_newcomers():
    engine = faithful_engine(64, 4, max_running=1)
    first = add_one(engine, range(9), 8)
    newcomers = [add_one(engine, range(50 * i, 50 * i + 5), 2) for i in (1, 2)]
    for _ in range(3):
        step_checked(engine)
    engine.scheduler.preempt(first)
    assert engine.scheduler.waiting == [first, *newcomers]
    step_checked(engine)
    assert engine.scheduler.running == [first]
    run_checked(engine)
    assert [name for step in engine.trace.steps for name in step.finished] == ["R0", "R1", "R2"]


def test_case_62_of_two_victims_the_older_one_comes_back_first():
    engine = faithful_engine(12, 16)
    requests = [add_one(engine, range(50 * i, 50 * i + 16), 4) for i in range(8)]
    newcomer = add_one(engine, range(500, 516), 1)
    step_checked(engine)
    newcomer_started = newcomer.num_computed_tokens > 0 or newcomer.is_finished
    assert newcomer_started  # it fits beside the eight, and ends in its first step
    late = add_one(engine, range(600, 616), 1)
    step_checked(engine)
    assert engine.trace.steps[-1].preempted == ("R7", "R6")
    assert engine.scheduler.waiting == [requests[6], requests[7], late]
    run_checked(engine)
    starts = [d.request_id for d in engine.trace.decisions if d.words.startswith(("starts", "resumes")) and d.step > 1]
    assert starts == ["R6", "R7", late.request_id]
    assert all(is_cold(r, 4) for r in requests)


def test_case_62_nobody_is_preempted_twice_before_another_one_got_a_token():
    engine = faithful_engine(10, 4)
    requests = [add_one(engine, range(50 * i, 50 * i + 8), 16) for i in range(6)]
    run_checked(engine)
    tokens_since: dict[str, int] = {}  # tokens given to anybody since the request's last preemption
    for step in engine.trace.steps:
        for name in step.preempted:
            assert tokens_since.get(name, 1) > 0, f"{name} is preempted twice in a row"
            tokens_since[name] = 0
        for name in tokens_since:
            tokens_since[name] += step.num_new_tokens
    assert engine.trace.summary().num_preemptions > 0
    assert all(is_cold(r, 16) for r in requests)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_preemption_in_the_middle_of_a_prompt(after: int):
    engine = faithful_engine(64, 4, token_budget=8)
    request = add_one(engine, range(30), 3)
    for _ in range(after):
        step_checked(engine)
    engine.scheduler.preempt(request)
    step_checked(engine)
    assert engine.trace.steps[-1].tokens["R0"][0] == 8 * after  # its own blocks were still in the cache
    run_checked(engine)
    assert is_cold(request, 3)


def test_a_preemption_between_plan_and_result_loses_only_that_step():
    engine = faithful_engine(64, 4)
    request = add_one(engine, range(9), 5)
    scheduler = engine.scheduler
    step_checked(engine)
    batch = scheduler.schedule(0.0)
    result = engine.runner.execute(batch)
    scheduler.preempt(request)
    assert scheduler.update(batch, result).tokens == ()
    scheduler.check()
    assert request.num_output_tokens == 1 and request.num_computed_tokens == 0


def test_samples_that_are_preempted_wait_for_the_one_they_fork_from():
    engine = faithful_engine(64, 4, token_budget=6)
    samples = engine.add(range(10), SamplingParams(max_tokens=4, n=3))
    for _ in range(3):
        step_checked(engine)
    for sample in samples:
        engine.scheduler.preempt(sample)
        engine.scheduler.check()
    run_checked(engine)
    assert all(s.output_ids == oracle_tokens(range(10), 4) for s in samples)
