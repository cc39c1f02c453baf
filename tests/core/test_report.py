"""Tables: the numbers of a summary, framed and aligned."""

from dataclasses import replace

import pytest

from minserve.core.metrics import summarize
from minserve.core.records import RequestRecord
from minserve.core.report import box, compare, table
from minserve.core.request import FinishReason
from tests.oracle import add_one, make_engine, run_checked


def summary_of(num_requests: int):
    engine = make_engine(64, 4)
    for index in range(num_requests):
        add_one(engine, range(3 + index), 5)
    run_checked(engine)
    return engine.trace.summary()


def test_a_table_has_the_numbers_of_the_run():
    lines = table(summary_of(3), 64).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0] == lines[-1] and set(lines[0]) == {"+", "-"}
    cells = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines[1:-1]}
    assert cells["requests"].startswith("3 of 3 finished, in ")
    assert (cells["prompt tokens"], cells["output tokens"], cells["preemptions"]) == ("12", "15", "0")
    assert cells["KV blocks at peak"].endswith(" of 64") and cells["TPOT p50 / p99"] == "1,000 ms / 1,000 ms"  # a second a step


def test_who_was_sent_away_is_not_counted_as_finished():
    ended = {"stop": 2, "length": 1, "shed": 3}
    records = [
        RequestRecord(f"{reason}{i}", 0.0, 5, finished_s=1.0, finish_reason=FinishReason(reason))
        for reason in ended
        for i in range(ended[reason])
    ]
    summary = summarize([*records, RequestRecord("waits", 0.0, 5)], [])
    assert (summary.num_requests, summary.num_finished, summary.num_shed) == (7, 6, 3)
    assert "| 3 of 7 finished, 3 sent away, in 0 steps" in table(summary, 8)


def test_runs_side_by_side_have_a_column_each():
    first, second = summary_of(1), summary_of(2)
    lines = compare({"one": (first, 64), "two": (second, 32)}).splitlines()
    assert [cell.strip() for cell in lines[1].split("|")[1:-1]] == ["", "one", "two"]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == ["output tokens", "5", "10"]
    assert len({len(line) for line in lines}) == 1


def test_what_is_not_known_is_a_dash():
    assert "TTFT p50 / p99    | - / -" in table(summarize([], []), 8)
    assert "12 ms / -" in table(replace(summarize([], []), itl_p50_s=0.0123), 8)


def test_rows_of_different_lengths_are_a_bug():
    with pytest.raises(ValueError, match="shorter|longer"):
        box([("a", "b"), ("c",)])
