"""Kind C of the cases from real bug reports: admission, capacity, chunking, fairness."""

from collections import Counter

import pytest

from minserve.core.request import Request, RequestTooLong, SamplingParams
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


def test_case_38_prompt_larger_than_the_pool():
    engine = make_engine(50, 16, max_model_len=2_048)
    with pytest.raises(RequestTooLong, match=r"912 prompt tokens .* need 57 blocks of 16, the whole pool has 50 \(800 tokens\)"):
        add_one(engine, range(912), 1)
    small = add_one(engine, range(20), 5)
    run_checked(engine)
    assert is_cold(small, 5)
    assert engine.trace.num_refused == 1
    assert engine.trace.num_refused + engine.trace.summary().num_finished == 2
    assert_idle(engine)


def test_case_38_a_refused_arrival_does_not_hold_up_those_behind_it():
    engine = make_engine(50, 16, max_model_len=2_048)
    arrivals = [(0.0, {"prompt_ids": range(912)}), (0.0, {"prompt_ids": range(20), "params": SamplingParams(max_tokens=5)})]
    [small] = engine.run(arrivals)
    assert is_cold(small, 5) and engine.trace.num_refused == 1


@pytest.mark.parametrize("with_neighbour", [False, True])
def test_case_40_a_lone_request_ends_where_the_pool_ends(with_neighbour: bool):
    engine = make_engine(2, 4)
    alone = add_one(engine, range(8), 8)
    small = add_one(engine, range(50, 53), 2) if with_neighbour else None
    run_checked(engine, max_steps=10)
    assert alone.output_ids == oracle_tokens(range(8), 1) and alone.finish_reason == "length"
    assert alone.num_preemptions == 0
    assert small is None or is_cold(small, 2)
    assert_idle(engine)


@pytest.mark.parametrize(("max_tokens", "given"), [(52, 52), (54, 54), (55, 55), (56, 55)])
def test_case_41_a_request_that_fits_exactly_runs_to_its_end(max_tokens: int, given: int):
    engine = make_engine(32, 2)
    request = add_one(engine, range(10), max_tokens)
    num_steps = run_checked(engine, max_steps=60)
    assert request.output_ids == oracle_tokens(range(10), given)
    assert request.finish_reason == "length" and request.num_preemptions == 0
    assert num_steps == given  # no step goes by without a token
    assert engine.trace.summary().peak_used_blocks == -(-(10 + given - 1) // 2)


def test_case_41_min_tokens_that_cannot_be_reached_are_refused():
    engine = make_engine(32, 2)
    with pytest.raises(RequestTooLong, match="10 prompt tokens and at least 56 output tokens need 33 blocks of 2, the whole pool has 32"):
        engine.add(range(10), SamplingParams(min_tokens=56))
    engine.add(range(10), SamplingParams(min_tokens=55))
    run_checked(engine)


def test_case_43_one_shortage_takes_one_request_out():
    engine = faithful_engine(12, 4)
    blocks = engine.scheduler.blocks
    requests = [add_one(engine, range(50 * i, 50 * i + 16), 6) for i in range(3)]
    step_checked(engine)
    assert blocks.num_free_blocks == 0
    step_checked(engine)
    record = engine.trace.steps[-1]
    assert record.preempted == ("R2",) and set(record.tokens) == {"R0", "R1"}
    assert [blocks.num_held_blocks(r) for r in requests] == [5, 5, 0] and blocks.num_free_blocks == 2
    assert [str(d) for d in engine.trace.why("R2")][-1] == "step 1: R2 is preempted: R0 needs 1 block, 0 free"
    run_checked(engine)
    assert all(is_cold(r, 6) for r in requests)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_case_44_progress_under_sustained_shortage(prefix_caching: bool):
    engine = faithful_engine(40, 4, prefix_caching=prefix_caching)
    requests = [add_one(engine, range(50 * i, 50 * i + 24), 24) for i in range(12)]
    num_steps = run_checked(engine, max_steps=500)
    assert all(is_cold(r, 24) for r in requests)
    assert all(step.num_tokens >= 1 for step in engine.trace.steps)
    summary = engine.trace.summary()
    assert summary.num_preemptions == sum(r.num_preemptions for r in requests) <= 60
    assert num_steps < 150, "the reference needs 79 steps and 8 preemptions"
    # the log is limited: one line for each change of mind, not one for each step of waiting
    assert len(engine.trace.decisions) <= 12 * 2 + 2 * summary.num_preemptions + num_steps


def test_case_46_prefills_do_not_starve_running_requests():
    engine = faithful_engine(1_000, 16, token_budget=64)
    talking = [add_one(engine, range(50 * i, 50 * i + 4), 60) for i in range(4)]
    step_checked(engine)
    newcomers = []
    for number in range(50):
        newcomers.append(add_one(engine, range(1_000 + 100 * number, 1_000 + 100 * number + 64), 1))
        step_checked(engine)
        assert [r.num_output_tokens for r in talking] == [number + 2] * 4  # a token in every step
    run_checked(engine)
    assert all(is_cold(r, 1) for r in newcomers)
    ttft_s = [engine.trace.requests[r.request_id].ttft_s for r in newcomers]
    assert max(t for t in ttft_s if t is not None) <= 10  # seconds, one a step: 60 tokens of 64 come through


@pytest.mark.parametrize(("max_chunk_tokens", "short_step", "long_step"), [(None, 11, 10), (16, 2, 21)])
def test_case_47_a_long_prompt_and_a_short_one(max_chunk_tokens: int | None, short_step: int, long_step: int):
    """First come first served, unless a prompt's share of a step is capped."""
    engine = make_engine(100, 16, token_budget=32, max_chunk_tokens=max_chunk_tokens)
    long = add_one(engine, range(320), 1)
    step_checked(engine)
    short = add_one(engine, range(1_000, 1_008), 1)
    run_checked(engine)
    first_token_s = [engine.trace.requests[r.request_id].token_times_s[0] for r in (short, long)]
    assert first_token_s[0] == short_step <= 11
    assert first_token_s[1] == (10 if max_chunk_tokens is None else 20)
    assert is_cold(long, 1) and is_cold(short, 1)


@pytest.mark.parametrize(("token_budget", "num_tokens", "num_blocks"), [(16, 16, 1), (16, 32, 2), (16, 48, 3), (24, 48, 3)])
def test_case_49_the_last_chunk_ends_on_a_block_boundary(token_budget: int, num_tokens: int, num_blocks: int):
    engine = faithful_engine(16, 16, token_budget=token_budget)
    request = add_one(engine, range(num_tokens), 3)
    while not request.num_output_tokens:
        step_checked(engine)
    assert engine.scheduler.blocks.num_held_blocks(request) == num_blocks
    assert request.output_ids == oracle_tokens(range(num_tokens), 1)
    step_checked(engine)
    assert engine.scheduler.blocks.num_held_blocks(request) == num_blocks + 1
    run_checked(engine)
    assert is_cold(request, 3)


@pytest.mark.parametrize("token_budget", [8, 16, 24, 1_000])
def test_case_50_only_the_last_chunk_draws(token_budget: int):
    def run(token_budget: int) -> tuple[Request, Counter[str]]:
        runner = OracleRunner(16, 4)
        engine = make_engine(16, 4, runner=runner, token_budget=token_budget)
        [request] = engine.add(range(40), SamplingParams(max_tokens=10, temperature=1.0, seed=7))
        run_checked(engine)
        return request, runner.num_draws

    request, num_draws = run(token_budget)
    assert request.output_ids == run(1_000)[0].output_ids and request.num_output_tokens == 10
    assert num_draws == {"R0": 10}


def test_case_52_free_tokens_are_not_free_blocks():
    engine = faithful_engine(12, 16)
    requests = [add_one(engine, range(50 * i, 50 * i + 16), 3) for i in range(8)]
    step_checked(engine)
    assert engine.scheduler.blocks.num_free_blocks == 4
    step_checked(engine)
    record = engine.trace.steps[-1]
    assert record.preempted == ("R7", "R6") and len(record.tokens) == 6 and record.num_free_blocks == 0
    run_checked(engine)
    assert all(is_cold(r, 3) for r in requests)


def test_case_53_a_prompt_is_not_begun_that_finds_no_room_for_its_end():
    engine = faithful_engine(8, 4, token_budget=8)
    first = add_one(engine, range(21), 3)
    second = add_one(engine, range(50, 66), 3)
    while not first.is_finished:
        step_checked(engine)
        assert engine.scheduler.blocks.num_held_blocks(second) == 0
    run_checked(engine)
    assert is_cold(first, 3) and is_cold(second, 3) and second.num_preemptions == 0


def test_case_53_a_prompt_under_way_finds_the_pool_full():
    """The older one's tokens come first: they take the blocks that the second one's next chunk would have needed."""
    engine = faithful_engine(8, 4, token_budget=9)
    first = add_one(engine, range(15), 12)
    for _ in range(2):
        step_checked(engine)
    second = add_one(engine, range(50, 66), 3)  # 4 blocks, just the free ones
    step_checked(engine)
    assert second.num_computed_tokens == 8 and engine.scheduler.blocks.num_held_blocks(second) == 2
    while not first.is_finished:
        before = first.num_output_tokens
        step_checked(engine)
        assert first.num_output_tokens == before + 1
    run_checked(engine)
    assert second.num_preemptions >= 1
    assert is_cold(first, 12) and is_cold(second, 3)


def test_case_55_no_preemption_without_a_shortage():
    engine = faithful_engine(1_000, 16)
    lengths = [3, 5, 9, 17, 33, 34, 60, 61]
    requests = [add_one(engine, range(100 * i, 100 * i + n), 20) for i, n in enumerate(lengths)]
    num_steps = run_checked(engine)
    assert engine.trace.summary().num_preemptions == 0
    assert num_steps == 20 and all(len(step.tokens) == 8 for step in engine.trace.steps)
    assert all(is_cold(r, 20) for r in requests)


@pytest.mark.parametrize("max_tokens", [10, None])
@pytest.mark.parametrize(("num_tokens", "num_given"), [(14, 2), (15, 1)])
def test_case_56_prompt_just_below_the_model_limit(num_tokens: int, num_given: int, max_tokens: int | None):
    engine = make_engine(16, 4, max_model_len=16)
    [request] = engine.add(range(num_tokens), SamplingParams(max_tokens=max_tokens))
    run_checked(engine)
    assert request.output_ids == oracle_tokens(range(num_tokens), num_given) and request.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [10, None])
@pytest.mark.parametrize("num_tokens", [16, 17])
def test_case_56_prompt_at_the_model_limit(num_tokens: int, max_tokens: int | None):
    """Prompt + output <= max_model_len, and there is at least one output token."""
    engine = make_engine(16, 4, max_model_len=16)
    total = num_tokens + 1
    with pytest.raises(RequestTooLong, match=f"{num_tokens} prompt tokens and at least 1 output tokens make {total}, max_model_len is 16"):
        engine.add(range(num_tokens), SamplingParams(max_tokens=max_tokens))
    assert not engine.has_work


# --- the order of things ---------------------------------------------------------------------------


def test_priorities_come_before_arrival():
    engine = faithful_engine(64, 4, max_running=1)
    add_one(engine, range(5), 2)
    step_checked(engine)
    late = [add_one(engine, range(50 * i, 50 * i + 5), 1, priority=p) for i, p in enumerate([5, 0, 5, -1], start=1)]
    run_checked(engine)
    ended = [name for step in engine.trace.steps for name in step.finished]
    assert ended == ["R0", late[3].request_id, late[1].request_id, late[0].request_id, late[2].request_id]


def test_the_least_important_one_gives_way():
    engine = faithful_engine(6, 4)
    low = add_one(engine, range(12), 8, priority=1)
    high = add_one(engine, range(50, 62), 8)
    step_checked(engine)
    step_checked(engine)
    assert engine.trace.steps[-1].preempted == (low.request_id,) and set(engine.trace.steps[-1].tokens) == {high.request_id}
    run_checked(engine)
    assert is_cold(low, 8) and is_cold(high, 8) and high.num_preemptions == 0


def test_nobody_overtakes_the_first_one_that_does_not_fit():
    engine = faithful_engine(8, 4)
    add_one(engine, range(20), 4)
    step_checked(engine)
    big, small = add_one(engine, range(50, 70), 2), add_one(engine, range(100, 103), 2)
    step_checked(engine)
    assert set(engine.trace.steps[-1].tokens) == {"R0"} and engine.scheduler.waiting == [big, small]
    assert [d.words for d in engine.trace.why("R1")] == ["waits: needs 5 blocks, 2 free"]
    assert engine.trace.why("R2") == []
    run_checked(engine)
    assert is_cold(big, 2) and is_cold(small, 2)


def test_the_watermark_keeps_blocks_for_those_who_run():
    num_preemptions = []
    for watermark_blocks in (0, 2):
        engine = faithful_engine(8, 4, watermark_blocks=watermark_blocks)
        requests = [add_one(engine, range(50 * i, 50 * i + 12), 8) for i in range(2)]
        step_checked(engine)
        requests.append(add_one(engine, range(100, 107), 1))
        step_checked(engine)
        if watermark_blocks:
            assert [d.words for d in engine.trace.why("R2")] == ["waits: needs 2 blocks and 2 in reserve, 0 free"]
        run_checked(engine)
        assert all(is_cold(r, 8) for r in requests[:2]) and is_cold(requests[2], 1)
        num_preemptions.append(engine.trace.summary().num_preemptions)
    engine = faithful_engine(4, 4, watermark_blocks=3)  # an idle engine ignores it: otherwise this one would wait for ever
    request = add_one(engine, range(16), 1)
    run_checked(engine, max_steps=2)
    assert is_cold(request, 1)


def test_what_is_promised_to_a_chunked_prompt_is_not_given_away():
    engine = faithful_engine(8, 4, token_budget=8, max_chunk_tokens=4)
    first = add_one(engine, range(20), 2)  # 5 blocks, one chunk of 4 tokens in a step
    second = add_one(engine, range(50, 66), 2)  # 4 blocks
    step_checked(engine)
    assert set(engine.trace.steps[-1].tokens) == {"R0"}
    assert [d.words for d in engine.trace.why("R1")] == ["waits: needs 4 blocks, 3 free (4 more are promised)"]
    run_checked(engine)
    assert is_cold(first, 2) and is_cold(second, 2) and second.num_preemptions == 0


def test_the_words_of_waiting():
    engine = faithful_engine(64, 4, token_budget=8, max_running=2)
    add_one(engine, range(12), 4)
    add_one(engine, range(50, 54), 4)
    add_one(engine, range(100, 104), 4)
    step_checked(engine)
    step_checked(engine)
    assert [str(d) for d in engine.trace.decisions] == [
        "step 0: R0 starts: 8 of 12 tokens",
        "step 0: R1 waits: the step's 8 tokens are given out",
        "step 1: R1 starts: 4 of 4 tokens",
        "step 1: R2 waits: 2 requests run, at most 2 may",
    ]
    step_checked(engine)
    assert len(engine.trace.decisions) == 4  # the same reason is noted once


def test_samples_share_the_prompt_and_copy_its_last_block():
    engine = faithful_engine(64, 4)
    samples = engine.add(range(10), SamplingParams(max_tokens=6, n=3))
    blocks = engine.scheduler.blocks
    step_checked(engine)
    assert [d.words for d in engine.trace.why("R0#1")] == ["waits: R0 computes its prompt"]
    step_checked(engine)
    assert engine.trace.steps[-1].tokens == {"R0": (10, 1), "R0#1": (9, 1), "R0#2": (9, 1)}
    tables = [blocks.table(s) for s in samples]
    assert len({t[:2] for t in tables}) == 1 and len({t[2] for t in tables}) == 3
    copies = batches_of(engine)[-1].copies
    assert sorted(copies) == sorted((tables[0][2], t[2]) for t in tables[1:])
    run_checked(engine)
    assert all(is_cold(s, 6) for s in samples)


def test_a_sample_goes_its_own_way_when_its_first_one_is_gone():
    for prefix_caching in (True, False):
        engine = faithful_engine(64, 4, max_running=1, prefix_caching=prefix_caching)
        samples = engine.add(range(10), SamplingParams(max_tokens=3, n=2))
        run_checked(engine)
        assert all(is_cold(s, 3) for s in samples)
        assert samples[1].num_cached_tokens == (8 if prefix_caching else 0)


def test_a_sample_that_forks_late_names_its_own_blocks():
    """The first one is blocks ahead when the second one forks: its later blocks are not the second one's."""
    engine = faithful_engine(64, 2, max_running=2)
    add_one(engine, range(100, 103), 4)
    first, second = engine.add(range(5), SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=3))
    while not second.num_output_tokens:
        step_checked(engine)
    assert first.num_computed_tokens >= 8 and not first.is_finished
    run_checked(engine)
    assert is_cold(first, 9) and is_cold(second, 9) and first.output_ids != second.output_ids
    for sample in (first, second):
        again = add_one(engine, sample.token_ids, 3)
        run_checked(engine)
        assert again.num_cached_tokens == 12 and is_cold(again, 3)


def test_an_admission_counts_the_copy_of_a_shared_last_block():
    """The sample shares both blocks of the prompt, and still needs one more: its copy of the second one."""
    engine = faithful_engine(2, 4)
    samples = engine.add(range(7), SamplingParams(max_tokens=2, n=2))
    step_checked(engine)
    assert [d.words for d in engine.trace.why("R0#1")] == ["waits: R0 computes its prompt"]
    step_checked(engine)
    assert [d.words for d in engine.trace.why("R0#1")][1:] == ["waits: needs 1 block, 0 free"]
    run_checked(engine)
    assert all(is_cold(s, 2) for s in samples)


def test_one_token_prompts_fork_too():
    engine = faithful_engine(64, 4)
    samples = engine.add([5], SamplingParams(max_tokens=3, n=3))
    run_checked(engine)
    assert all(is_cold(s, 3) for s in samples)
