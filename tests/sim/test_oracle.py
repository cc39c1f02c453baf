"""The oracle: right by arithmetic, and betrayed by every slot that is not what it should be."""

import pytest

from minserve.core.batch import ScheduledBatch, ScheduledRequest
from minserve.core.request import Request, SamplingParams
from minserve.sim.oracle import VOCAB_SIZE, OracleRunner, draws, oracle_tokens, oracle_values


def make_row(table: tuple[int, ...], start: int, num_tokens: int, temperature: float = 0.0) -> ScheduledRequest:
    request = Request("R0", (5, 6, 7), SamplingParams(temperature=temperature), max_total_tokens=9, seed=3)
    return ScheduledRequest(request, start, num_tokens, table, samples=start + num_tokens == 3)


def test_values_and_tokens_by_hand() -> None:
    assert oracle_values([5, 6]) == [5 + 7, 31 * 12 + 6 + 7]
    assert oracle_tokens([5, 6], 1) == [(1 * 12 + 2 * 385) % 211] == [149]
    assert oracle_tokens([5, 6], 2)[1] == (12 + 2 * 385 + 3 * (31 * 385 + 149 + 7)) % 211


def test_the_runner_agrees_with_the_arithmetic_whatever_the_blocks_and_the_chunks() -> None:
    whole, chunked = OracleRunner(6, 2), OracleRunner(6, 2)
    expected = oracle_tokens([5, 6, 7], 1)
    assert whole.execute(ScheduledBatch(0, (make_row((4, 1), 0, 3),))).token_ids == {"R0": expected[0]}
    assert chunked.execute(ScheduledBatch(0, (make_row((3, 0), 0, 2),))).token_ids == {}
    assert chunked.execute(ScheduledBatch(1, (make_row((3, 0), 2, 1),))).token_ids == {"R0": expected[0]}
    assert [batch.step for batch in chunked.batches] == [0, 1]


def test_a_stale_slot_changes_the_text_and_an_unwritten_one_is_an_error() -> None:
    runner = OracleRunner(6, 2)
    with pytest.raises(AssertionError, match="position 1 is read before it was written"):
        runner.execute(ScheduledBatch(0, (make_row((4, 1), 2, 1),)))
    runner.execute(ScheduledBatch(1, (make_row((4, 1), 0, 3),)))
    runner.slots[8] = 999  # block 4, slot 0
    changed = runner.execute(ScheduledBatch(2, (make_row((4, 1), 2, 1),)))
    assert changed.token_ids["R0"] != oracle_tokens([5, 6, 7], 1)[0]


def test_a_copied_block_holds_what_its_source_held() -> None:
    runner = OracleRunner(6, 2)
    runner.execute(ScheduledBatch(0, (make_row((4, 1), 0, 3),)))
    copied = runner.execute(ScheduledBatch(1, (make_row((2, 1), 2, 1),), copies=((4, 2),)))
    assert copied.token_ids["R0"] == oracle_tokens([5, 6, 7], 1)[0]


def test_chance_belongs_to_the_request_and_its_place() -> None:
    row = make_row((4, 1), 0, 3, temperature=1.0)
    draw = draws(row.request)
    assert draw(0) == draw(0) and {draw(place) for place in range(50)} != {0}
    runner = OracleRunner(6, 2)
    [token] = runner.execute(ScheduledBatch(0, (row,))).token_ids.values()
    assert token == (oracle_tokens([5, 6, 7], 1)[0] + draw(0)) % VOCAB_SIZE == oracle_tokens([5, 6, 7], 1, draw)[0]
    assert runner.num_draws == {"R0": 1}


def test_a_request_may_get_an_error_in_place_of_a_token() -> None:
    runner = OracleRunner(6, 2)
    runner.errors["R0"] = "NaN"
    assert runner.execute(ScheduledBatch(0, (make_row((4, 1), 0, 3),))).errors == {"R0": "NaN"}
