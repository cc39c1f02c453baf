"""Kind B of the cases from real bug reports: the prefix cache. Identity, sharing, eviction."""

from collections.abc import Callable, Hashable, Sequence
from random import Random

import pytest

from minserve.core.engine import Engine
from minserve.core.prefix_cache import hash_block
from minserve.core.request import Request, SamplingParams
from tests.oracle import (
    OracleRunner,
    add_one,
    before_steps,
    faithful_engine,
    is_cold,
    make_engine,
    oracle_tokens,
    run_checked,
    step_checked,
)


def ask(engine: Engine, prompt_ids: Sequence[int], max_tokens: int, **options: str) -> Request:
    """Run one request to its end, and compare it with its cold run."""
    request = add_one(engine, prompt_ids, max_tokens, **options)
    run_checked(engine)
    assert is_cold(request, max_tokens)
    return request


def num_computed_tokens(engine: Engine, request: Request) -> int:
    return sum(step.tokens.get(request.request_id, (0, 0))[1] for step in engine.trace.steps)


def test_case_17_a_block_that_is_reused_loses_its_name():
    engine = faithful_engine(3, 4)
    ask(engine, range(1, 9), 1)
    ask(engine, range(101, 113), 1)
    assert ask(engine, range(1, 9), 1).num_cached_tokens == 0


def test_case_19_only_full_blocks_are_shared():
    engine = faithful_engine(32, 2)
    [first] = engine.add([1, 2, 3], SamplingParams(max_tokens=3, temperature=1.0, seed=1))
    run_checked(engine)
    a, b, _ = first.output_ids
    prompt = [1, 2, 3, a, b]
    both = [engine.add(prompt, SamplingParams(max_tokens=6, temperature=1.0, seed=seed))[0] for seed in (5, 6)]
    written: list[int] = []

    def note(batch: object) -> None:
        blocks = engine.scheduler.blocks
        for request in both:
            if not request.is_finished:
                target = blocks.table(request)[request.num_computed_tokens // 2]
                assert blocks.ref_count(target) == 1
                written.append(target)

    before_steps(engine, note)
    run_checked(engine)
    assert len(written) == 12 and [r.num_cached_tokens for r in both] == [4, 4]
    assert both[0].output_ids != both[1].output_ids
    assert all(is_cold(request, 6) for request in both)


def constant_hash(parent_key: Hashable, tokens: Sequence[int]) -> Hashable:
    return 0


def eight_bit_hash(parent_key: Hashable, tokens: Sequence[int]) -> Hashable:
    digest = hash_block(parent_key, tokens)
    assert isinstance(digest, bytes)
    return digest[0]


@pytest.mark.parametrize("weak_hash", [constant_hash, eight_bit_hash])
def test_case_20_a_collision_is_a_miss(weak_hash: Callable[[Hashable, Sequence[int]], Hashable]):
    engine = faithful_engine(512, 8, block_options={"hash_block": weak_hash})
    random = Random(20)
    prompts = [[random.randrange(200) for _ in range(40)] for _ in range(64)]
    served: list[list[int]] = []
    num_hits = 0
    for _ in range(2):
        for prompt in random.sample(prompts, len(prompts)):
            request = ask(engine, prompt, 3)
            same = max((_num_shared_blocks(prompt, other) for other in served), default=0)
            assert request.num_cached_tokens <= 8 * min(same, 4)
            num_hits += request.num_cached_tokens
            served.append(request.token_ids[:-1])
    assert num_hits >= 8  # the one prompt that came first, at least, is found again


def _num_shared_blocks(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i in range(min(len(a), len(b)) // 8) if a[8 * i : 8 * i + 8] != b[8 * i : 8 * i + 8]), min(len(a), len(b)) // 8)


def test_case_20_a_chain_is_compared_to_its_beginning():
    """Same tokens in the second block, other tokens in the first: the block's own tokens are not enough."""

    def hash_without_parent(parent_key: Hashable, tokens: Sequence[int]) -> Hashable:
        return tuple(tokens)

    engine = make_engine(64, 4, block_options={"hash_block": hash_without_parent})
    ask(engine, [1, 1, 1, 1, 9, 9, 9, 9, 5], 2)
    assert ask(engine, [2, 2, 2, 2, 9, 9, 9, 9, 5], 2).num_cached_tokens == 0
    assert ask(engine, [2, 2, 2, 2, 9, 9, 9, 9, 5], 2).num_cached_tokens == 4  # the collision leaves the second block unnamed


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(16, 0), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_case_22_a_fully_cached_prompt_computes_what_its_logits_need(num_tokens: int, num_cached: int):
    engine = faithful_engine(64, 16)
    num_held: list[int] = []
    for expected in (0, num_cached, num_cached):
        request = add_one(engine, range(num_tokens), 4)
        while not request.is_finished:
            num_held.append(engine.scheduler.blocks.num_held_blocks(request))
            step_checked(engine)
        assert is_cold(request, 4) and request.num_cached_tokens == expected
        assert 1 <= num_computed_tokens(engine, request) - 3 <= (16 if expected or num_tokens == 16 else num_tokens)
    assert num_held[3] == num_held[7] == num_held[11] == -(-(num_tokens + 2) // 16)


def test_case_23_a_full_hit_does_not_break_the_chain():
    engine = faithful_engine(64, 16)
    assert ask(engine, range(32), 2).num_cached_tokens == 0
    assert ask(engine, range(32), 2).num_cached_tokens == 16
    assert ask(engine, range(64), 2).num_cached_tokens == 32
    assert ask(engine, range(67), 2).num_cached_tokens == 64


def test_case_25_a_longer_prompt_in_the_cache_does_not_answer_for_a_shorter_one():
    engine = faithful_engine(64, 4)
    ask(engine, range(24), 2)
    assert ask(engine, range(12), 2).num_cached_tokens == 8
    assert ask(engine, range(11), 2).num_cached_tokens == 8


def test_case_26_a_preempted_request_finds_its_own_blocks():
    engine = faithful_engine(64, 4)
    request = add_one(engine, range(10), 8)
    for _ in range(3):
        step_checked(engine)
    assert (request.num_tokens, request.num_computed_tokens) == (13, 12)
    engine.scheduler.preempt(request)
    engine.scheduler.check()
    step_checked(engine)
    assert engine.trace.steps[-1].tokens == {"R0": (12, 1)} and engine.trace.steps[-1].num_hit_tokens == 12
    assert request.num_cached_tokens == 0  # what a caller is told: at first admission there was nothing to find
    run_checked(engine)
    assert is_cold(request, 8)


def test_case_28_hits_are_not_room():
    engine = faithful_engine(8, 4)
    blocks = engine.scheduler.blocks
    ask(engine, range(8), 1)  # 2 cached blocks without an owner
    holder = add_one(engine, range(50, 62), 4)  # 3 blocks, and a 4th as soon as it decodes
    step_checked(engine)
    assert (blocks.num_free_blocks, blocks.num_idle_blocks) == (5, 2)
    asking = add_one(engine, range(22), 1)  # 6 blocks: 2 hits and 4 new ones
    step_checked(engine)
    assert not asking.num_computed_tokens and not blocks.table(asking)
    # the holder has taken one more meanwhile: 4 free, 2 of them the hits
    assert [d.words for d in engine.trace.why("R2")] == ["waits: needs 4 blocks, 2 free"]
    while not holder.is_finished:
        assert asking in engine.scheduler.waiting
        step_checked(engine)
    step_checked(engine)
    assert asking.is_finished and asking.num_cached_tokens == 8
    assert is_cold(asking, 1) and is_cold(holder, 4)


def test_case_28_with_exactly_the_numbers_of_the_report():
    """5 free of which 2 are the hits: 3 are truly free, and 4 are needed."""
    engine = faithful_engine(8, 4)
    blocks = engine.scheduler.blocks
    ask(engine, range(8), 1)
    holder = add_one(engine, range(50, 60), 3)  # 3 blocks to its end
    step_checked(engine)
    asking = add_one(engine, range(22), 1)
    step_checked(engine)
    assert (blocks.num_free_blocks, blocks.num_idle_blocks) == (5, 2)
    assert [str(d) for d in engine.trace.why("R2")] == ["step 2: R2 waits: needs 4 blocks, 3 free"]
    run_checked(engine)
    assert is_cold(asking, 1) and is_cold(holder, 3) and holder.num_preemptions == asking.num_preemptions == 0


def test_case_29_a_block_in_use_is_not_evicted():
    engine = faithful_engine(5, 4)
    blocks = engine.scheduler.blocks
    ask(engine, range(8), 1)
    running = add_one(engine, range(10), 3)
    step_checked(engine)
    chain = blocks.table(running)
    assert running.num_cached_tokens == 8 and len(chain) == 3
    newcomer = add_one(engine, range(50, 62), 2)
    while not running.is_finished:
        assert newcomer in engine.scheduler.waiting
        assert blocks.table(running) == chain and all(blocks.ref_count(b) >= 1 for b in chain)
        step_checked(engine)
    run_checked(engine)
    assert is_cold(running, 3) and is_cold(newcomer, 2)


def test_case_31_nothing_is_shared_between_settings_that_shape_the_keys():
    engine = faithful_engine(64, 16)
    cached = [ask(engine, range(33), 2, salt=salt).num_cached_tokens for salt in ("adapter a", "adapter a", "adapter b", "adapter b")]
    assert cached == [0, 32, 0, 32]


def test_case_31_the_namespace_is_part_of_every_name():
    blocks = [make_engine(8, 4, block_options={"namespace": name}).scheduler.blocks for name in ("fp32", "int8")]
    roots = [b.cache.root("") for b in blocks]
    assert roots[0] != roots[1]
    names = [b.cache.register(0, range(4), root).key for b, root in zip(blocks, roots, strict=True)]
    assert names[0] != names[1]


def test_case_32_a_flush_forgets_everything():
    engine = faithful_engine(64, 16)
    ask(engine, range(33), 2)
    blocks = engine.scheduler.blocks
    assert blocks.num_idle_blocks == 2
    assert blocks.flush_cache() == 2
    blocks.check()
    assert blocks.num_idle_blocks == 0 and blocks.num_free_blocks == 64 and blocks.flush_cache() == 0
    assert ask(engine, range(33), 2).num_cached_tokens == 0
    assert ask(engine, range(33), 2).num_cached_tokens == 32


def test_case_32_a_flush_is_refused_while_blocks_are_held():
    """A running request's blocks were computed with the old weights, and it would make them known again."""
    engine = faithful_engine(64, 16)
    request = add_one(engine, range(33), 4)
    step_checked(engine)
    with pytest.raises(RuntimeError, match="3 of 64 blocks are held"):
        engine.scheduler.blocks.flush_cache()
    engine.scheduler.check()
    engine.scheduler.preempt(request)
    assert engine.scheduler.blocks.flush_cache() == 2
    run_checked(engine)
    assert is_cold(request, 4)


def test_case_34_the_whole_prompt_is_looked_up_and_not_only_its_first_chunk():
    engine = faithful_engine(64, 16, token_budget=64)
    ask(engine, range(192), 1)
    request = ask(engine, range(197), 1)
    assert request.num_cached_tokens == 192
    assert engine.trace.steps[-1].tokens == {"R1": (192, 5)} and num_computed_tokens(engine, request) == 5


def test_case_35_the_end_of_a_chain_is_given_up_first():
    engine = faithful_engine(6, 4)
    ask(engine, range(16), 1)
    assert (engine.scheduler.blocks.num_idle_blocks, engine.scheduler.blocks.num_free_blocks) == (4, 6)
    ask(engine, range(50, 62), 1)
    assert ask(engine, range(17), 1).num_cached_tokens == 12


def test_clean_blocks_are_used_up_before_cached_ones():
    engine = faithful_engine(6, 4)
    ask(engine, range(16), 1)
    ask(engine, range(50, 57), 1)  # 2 blocks: just the clean ones
    assert ask(engine, range(17), 1).num_cached_tokens == 16


def test_the_least_recently_used_chain_is_given_up_first():
    engine = faithful_engine(6, 4)
    ask(engine, range(8), 1)
    ask(engine, range(50, 58), 1)
    ask(engine, range(9), 1)  # the first chain is used again
    ask(engine, range(100, 116), 1)  # 4 blocks: 2 clean ones, then the second chain
    assert ask(engine, range(9), 1).num_cached_tokens == 8


def test_case_37_a_chunked_prompt_without_a_cache():
    engine = make_engine(8, 8, prefix_caching=False, token_budget=16)
    runner = engine.runner
    assert isinstance(runner, OracleRunner)
    request = add_one(engine, range(40), 3)
    num_held = []
    while not request.is_finished:
        step_checked(engine)
        num_held.append(engine.scheduler.blocks.num_held_blocks(request))
    assert [step.tokens["R0"] for step in engine.trace.steps] == [(0, 16), (16, 16), (32, 8), (40, 1), (41, 1)]
    assert num_held == [2, 4, 5, 6, 0]
    assert is_cold(request, 3)
    assert engine.scheduler.blocks.num_free_blocks == 8 and engine.scheduler.blocks.num_idle_blocks == 0


# --- requests that arrive together -----------------------------------------------------------------


def test_a_prompt_computed_in_this_step_is_shared_in_this_step():
    engine = faithful_engine(64, 4)
    requests = [add_one(engine, range(9), 3) for _ in range(3)]
    step_checked(engine)
    assert engine.trace.steps[0].tokens == {"R0": (0, 9), "R1": (8, 1), "R2": (8, 1)}
    assert [r.num_cached_tokens for r in requests] == [0, 8, 8]
    assert engine.scheduler.blocks.num_used_blocks == 2 + 3
    run_checked(engine)
    assert all(is_cold(r, 3) for r in requests)


def test_two_copies_of_one_content_keep_the_first_one_known():
    """Both compute the block [4, 8) at the same time; when the one that was known first goes, its block is found, not the other's."""
    engine = faithful_engine(64, 4)
    blocks = engine.scheduler.blocks
    first, second = add_one(engine, range(6), 4), add_one(engine, range(6), 8)
    while not first.is_finished:
        tables = blocks.table(first), blocks.table(second)
        step_checked(engine)
    assert tables[0][0] == tables[1][0] and tables[0][1] != tables[1][1]
    found = blocks.cache.match(second.token_ids, "", 2)
    assert [b.block_id for b in found] == list(tables[0][:2])
    third = ask(engine, [*second.prompt_ids, *oracle_tokens(range(6), 3)], 2)
    assert third.num_cached_tokens == 8
    run_checked(engine)
    assert is_cold(first, 4) and is_cold(second, 8)


def test_an_error_takes_its_blocks_out_of_the_cache_and_nobody_else_with_it():
    """Like case 98: one row is NaN. It ends with reason error, and no later request starts from its blocks."""
    engine = faithful_engine(64, 4)
    runner = engine.runner
    assert isinstance(runner, OracleRunner)
    bad, good = add_one(engine, range(9), 5), add_one(engine, range(50, 59), 5)
    step_checked(engine)
    runner.errors["R0"] = "NaN in the logits"
    output = step_checked(engine)
    assert output.finished == (bad,) and [r for r, _ in output.tokens] == [good]
    assert (bad.finish_reason, bad.error, bad.num_output_tokens) == ("error", "NaN in the logits", 1)
    again = add_one(engine, range(9), 5)
    run_checked(engine)
    assert again.num_cached_tokens == 0 and is_cold(again, 5) and is_cold(good, 5)
    assert ask(engine, range(50, 59), 5).num_cached_tokens == 8
