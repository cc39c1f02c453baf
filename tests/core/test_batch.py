"""The two messages across the seam."""

import json
from dataclasses import FrozenInstanceError

import pytest

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.core.request import Request, SamplingParams


def make_row(request_id: str, start: int, num_tokens: int, samples: bool) -> ScheduledRequest:
    request = Request(request_id, (10, 11, 12, 13, 14), SamplingParams(), max_total_tokens=10)
    return ScheduledRequest(request, start, num_tokens, (3, 1), samples)


def test_a_row_is_a_half_open_interval_of_its_requests_tokens():
    row = make_row("a", 1, 3, samples=False)
    assert (row.end, row.token_ids) == (4, [11, 12, 13])


def test_a_batch_counts_its_tokens():
    batch = ScheduledBatch(step=7, rows=(make_row("a", 1, 3, False), make_row("b", 4, 1, True)))
    assert batch.num_tokens == 4
    assert ScheduledBatch(step=0, rows=()).num_tokens == 0


def test_a_batch_as_plain_data():
    batch = ScheduledBatch(step=7, rows=(make_row("a", 1, 3, False),), copies=((2, 5),), preempted_ids=("z",))
    plain = {"step": 7, "rows": [("a", 1, 3, (3, 1), False)], "copies": ((2, 5),), "preempted": ("z",)}
    assert batch.plain() == plain
    assert json.loads(json.dumps(batch.plain()))["rows"] == [["a", 1, 3, [3, 1], False]]


def test_messages_cannot_be_changed():
    batch, result = ScheduledBatch(step=0, rows=()), StepResult({})
    for message, name in ((batch, "step"), (result, "elapsed_s"), (make_row("a", 0, 1, False), "start")):
        with pytest.raises(FrozenInstanceError):
            setattr(message, name, 1)
    assert (result.logprobs, result.errors, result.elapsed_s) == ({}, {}, 0.0)
