"""The far side of the seam: made-up tokens that are always the same, and the seconds of the cost model."""

import pytest

from minserve.core.batch import ScheduledBatch, ScheduledRequest
from minserve.core.request import Request, SamplingParams
from minserve.sim.cost_model import CostModel, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.runner import VOCAB_SIZE, PaddedRunner, SimulatedRunner, next_token
from minserve.sim.shapes import SHAPES

RUNNER = SimulatedRunner(CostModel(SHAPES["llama-2-7b"], DEVICES["a100-80gb"]))


def row(name: str, token_ids: tuple[int, ...], start: int = 0, num_tokens: int | None = None) -> ScheduledRequest:
    request = Request(name, token_ids, SamplingParams(), max_total_tokens=1000)
    end = len(token_ids) if num_tokens is None else start + num_tokens
    return ScheduledRequest(request, start, end - start, (), samples=end == len(token_ids))


def test_a_row_that_reaches_its_end_gets_a_token_and_no_other_does():
    batch = ScheduledBatch(0, (row("whole", (5, 6, 7)), row("part", (5, 6, 7), 0, 2), row("decode", (5, 6, 7, 8), 3)))
    result = RUNNER.execute(batch)
    assert result.token_ids.keys() == {"whole", "decode"} and not result.errors
    assert all(0 <= token < VOCAB_SIZE for token in result.token_ids.values())


def test_a_step_takes_what_the_cost_model_says():
    batch = ScheduledBatch(0, (row("a", tuple(range(300))), row("b", tuple(range(50)), 49)))
    assert RUNNER.execute(batch).elapsed_s == RUNNER.cost.of(RUNNER.cost.work(batch.rows)).seconds > 0.0005


def test_a_step_without_rows_takes_no_time():
    result = RUNNER.execute(ScheduledBatch(0, ()))
    assert (result.elapsed_s, dict(result.token_ids)) == (0.0, {})


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_token_depends_on_what_came_before_and_not_on_how_it_was_computed(chunk: int):
    tokens = (9, 4, 9, 4, 31_999)
    assert next_token(row("a", tokens)) == next_token(row("b", tokens, len(tokens) - chunk, chunk))


def test_other_tokens_and_other_places_are_followed_by_others():
    assert len({next_token(row("a", tokens)) for tokens in ((1, 2), (1, 3), (1, 1, 2), (2,))}) == 4


# --- rectangles --------------------------------------------------------------------------------------

PADDED = PaddedRunner(RUNNER.cost, 4)


def test_every_row_of_a_rectangle_is_as_long_as_the_longest():
    prompts = ScheduledBatch(0, (row("a", tuple(range(300))), row("b", tuple(range(50)))))
    assert PADDED.work(prompts) == 4 * row_work(0, 300)
    assert PADDED.execute(prompts).elapsed_s == RUNNER.cost.of(4 * row_work(0, 300)).seconds
    assert PADDED.execute(prompts).token_ids == RUNNER.execute(prompts).token_ids  # callers get what is theirs


def test_who_is_done_is_computed_on():
    last = ScheduledBatch(0, (row("a", tuple(range(300)), 299),))
    assert PADDED.work(last) == decode_work(4, 300)


def test_a_rectangle_holds_all_who_are_there():
    many = ScheduledBatch(0, tuple(row(f"{i}", (1, 2, 3), 2) for i in range(9)))
    assert PADDED.work(many) == decode_work(9, 3)
    assert PADDED.execute(ScheduledBatch(0, ())).elapsed_s == 0.0
