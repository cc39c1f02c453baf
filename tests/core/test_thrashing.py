"""Work thrown away: how much of it our scheduler does at worst, why it can never do only that, and two faults which together can.

Either of two rules keeps a scheduler from livelock. (1) Who is admitted fits with all its known tokens, beside what is promised to the
others: so blocks run short only because somebody got a token, and tokens are finite. (2) Who gives way is the last in order: so the first
one never loses what it has, and alone it always fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import Request, RequestStatus
from minserve.core.scheduler import Scheduler, SchedulerConfig
from tests.oracle import OracleRunner, add_one, faithful_engine, is_cold, step_checked

# --- the two faults ----------------------------------------------------------------------------------


class FirstChunkAdmission(Scheduler):
    """Fault 1: who fits with its first chunk is admitted, and nothing is promised to those who run."""

    def _num_tokens_kept(self, request: Request) -> int:
        if request.status is RequestStatus.RUNNING:
            return self.blocks.num_held_blocks(request) * self.blocks.block_size
        return min(request.num_tokens, self.config.max_chunk_tokens or self.config.token_budget)


class LargestGivesWay(Scheduler):
    """Fault 2: the victim is the one that holds most blocks, since that frees the most at once."""

    def _choose_victim(self) -> Request:
        return max(self.running, key=self.blocks.num_held_blocks)


class BothFaults(LargestGivesWay, FirstChunkAdmission):
    """Whoever gets ahead is thrown out by the one behind it, and comes back at once."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run that was given up after so many steps."""

    num_steps: int
    num_output_tokens: tuple[int, ...]
    num_preemptions: int
    num_rounds: int  # steps that preempted
    num_computed_tokens: int
    num_recomputed_tokens: int

    @property
    def recomputed_share(self) -> float:
        return self.num_recomputed_tokens / self.num_computed_tokens


def serve(
    kind: type[Scheduler], lengths: Sequence[tuple[int, int]], num_blocks: int, *, max_steps: int = 3000, block_size: int = 4, **config: int
) -> Outcome:
    """Requests of so many prompt and output tokens, all at once, without a cache, on the oracle."""
    blocks = BlockManager(num_blocks, block_size, prefix_caching=False)
    limits = ModelLimits(max_model_len=10_000, vocab_size=10_000)
    engine = Engine(kind(SchedulerConfig(**config), blocks), OracleRunner(num_blocks, block_size), VirtualClock(), limits)  # pyright: ignore
    requests = [add_one(engine, range(100 * i, 100 * i + prompt), output) for i, (prompt, output) in enumerate(lengths)]
    num_steps = 0
    while engine.has_work and num_steps < max_steps:
        step_checked(engine)
        num_steps += 1
    assert all(is_cold(r, r.num_output_tokens) for r in requests)
    summary = engine.trace.summary()
    return Outcome(
        num_steps,
        tuple(r.num_output_tokens for r in requests),
        summary.num_preemptions,
        sum(bool(step.preempted) for step in engine.trace.steps),
        sum(step.num_tokens for step in engine.trace.steps),
        summary.num_recomputed_tokens,
    )


# --- livelock ----------------------------------------------------------------------------------------

# Two prompts of 10 blocks each in a pool of 16: one fits at a time.
PAIR = [(40, 4), (40, 4)]
CHUNKS = {"token_budget": 16, "max_chunk_tokens": 8}


@pytest.mark.parametrize(("kind", "preemptions", "recomputed"), [(Scheduler, 0, 0), (LargestGivesWay, 0, 0), (FirstChunkAdmission, 2, 48)])
def test_one_rule_is_enough(kind: type[Scheduler], preemptions: int, recomputed: int):
    outcome = serve(kind, PAIR, 16, **CHUNKS)
    assert (outcome.num_steps, outcome.num_output_tokens) == (16, (4, 4))
    assert (outcome.num_preemptions, outcome.num_recomputed_tokens) == (preemptions, recomputed)


def test_without_both_the_engine_works_for_ever_and_nobody_gets_anywhere():
    outcome = serve(BothFaults, PAIR, 16, **CHUNKS)
    assert outcome.num_steps == 3000 and outcome.num_preemptions == 999
    assert outcome.num_output_tokens == (1, 3) == serve(BothFaults, PAIR, 16, max_steps=100, **CHUNKS).num_output_tokens
    assert outcome.recomputed_share > 0.99


@pytest.mark.parametrize(("watermark", "ends"), [(0, False), (3, False), (4, True), (10, True)])
def test_a_watermark_cures_that_livelock(watermark: int, ends: bool):
    outcome = serve(BothFaults, PAIR, 16, watermark_blocks=watermark, **CHUNKS)
    assert (outcome.num_output_tokens == (4, 4)) == ends
    assert outcome.num_steps == (16 if ends else 3000)


# --- thrash ------------------------------------------------------------------------------------------

SIX = [(40, 30)] * 6  # 70 tokens each in 24 blocks of 4: one whole answer fits, two prompts do


def test_admission_by_the_first_chunk_computes_most_things_more_than_once():
    ours, by_chunk = serve(Scheduler, SIX, 24, **CHUNKS), serve(FirstChunkAdmission, SIX, 24, **CHUNKS)
    assert ours.num_output_tokens == by_chunk.num_output_tokens == (30,) * 6
    assert (ours.num_preemptions, by_chunk.num_preemptions) == (5, 45)
    assert ours.num_computed_tokens == 638 and by_chunk.num_computed_tokens == 1378
    assert ours.recomputed_share == pytest.approx(0.35, abs=0.01) and by_chunk.recomputed_share == pytest.approx(0.70, abs=0.01)


def test_a_watermark_or_reserved_answers_cure_it():
    by_watermark = [serve(FirstChunkAdmission, SIX, 24, watermark_blocks=w, **CHUNKS).num_preemptions for w in (0, 4, 8, 10)]
    assert by_watermark == [45, 35, 14, 5]
    reserved = serve(Scheduler, SIX, 24, reserve_whole_answers=True, **CHUNKS)
    assert (reserved.num_preemptions, reserved.num_recomputed_tokens, reserved.num_computed_tokens) == (0, 0, 6 * 69)


# --- what holds in every run of ours -----------------------------------------------------------------


@dataclass(frozen=True)
class Crowd:
    """Requests of one priority, all at once, and a pool that is too small for them."""

    lengths: tuple[tuple[int, int], ...]
    num_blocks: int
    block_size: int
    config: dict[str, int]


def crowds() -> st.SearchStrategy[Crowd]:
    config = {
        "token_budget": st.integers(1, 30),
        "max_chunk_tokens": st.none() | st.integers(1, 9),
        "max_running": st.integers(1, 8),
        "watermark_blocks": st.integers(0, 3),
    }
    lengths = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=2, max_size=8).map(tuple)
    return st.builds(Crowd, lengths, st.integers(8, 20), st.integers(2, 4), st.fixed_dictionaries(config))


def test_the_first_rule_alone_ends_every_run():
    """Even with the worst victim: a round of preemptions is paid for by a token, and tokens are finite."""
    num_rounds = 0

    @settings(max_examples=200, derandomize=True, deadline=None, database=None)
    @given(crowds())
    def holds(crowd: Crowd) -> None:
        nonlocal num_rounds
        outcome = serve(LargestGivesWay, crowd.lengths, crowd.num_blocks, block_size=crowd.block_size, **crowd.config)
        room = crowd.num_blocks * crowd.block_size + 1
        assert outcome.num_output_tokens == tuple(min(o, room - p) for p, o in crowd.lengths)
        assert outcome.num_rounds <= sum(outcome.num_output_tokens)
        num_rounds += outcome.num_rounds

    holds()
    assert num_rounds > 50


def test_every_step_makes_progress_and_who_gave_way_waits_for_an_end():
    """The two rules at work, and what follows: no step is for nothing, and there are fewer rounds of preemptions than ends."""
    num_rounds = num_chunks = 0

    @settings(max_examples=200, derandomize=True, deadline=None, database=None)
    @given(crowds())
    def holds(crowd: Crowd) -> None:
        nonlocal num_rounds, num_chunks
        engine = faithful_engine(crowd.num_blocks, crowd.block_size, prefix_caching=False, **crowd.config)
        requests = [add_one(engine, range(100 * i, 100 * i + p), o) for i, (p, o) in enumerate(crowd.lengths)]
        somebody_waits_for_an_end = False
        while engine.has_work:
            first = min((r for r in requests if not r.is_finished), key=engine.scheduler.policy.order)
            num_before = first.num_computed_tokens
            output = step_checked(engine)
            step = engine.trace.steps[-1]
            # Rule 2: the first one advances, or all the budget went to others who each got a token.
            assert output.tokens or first.num_computed_tokens > num_before
            assert first.request_id not in step.preempted
            # Rule 1: what the victims had is partly taken, so nobody starts before somebody ends.
            started = [d for d in engine.trace.decisions if d.step == step.step and d.words.startswith(("starts", "resumes"))]
            assert not (started and somebody_waits_for_an_end), f"{started[0]} after a preemption, and nobody has ended"
            somebody_waits_for_an_end = (somebody_waits_for_an_end or bool(step.preempted)) and not output.finished
            num_rounds += bool(step.preempted)
            num_chunks += len(step.tokens) > len(output.tokens)
        room = crowd.num_blocks * crowd.block_size + 1
        assert all(is_cold(r, min(o, room - p)) for r, (p, o) in zip(requests, crowd.lengths, strict=True))

    holds()
    assert num_rounds > 50 and num_chunks > 50
