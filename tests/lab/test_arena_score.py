"""Scores: Jain's index, shares of an empty server's time, windows that do not depend on the policy."""

import math

import pytest

from minserve.core.records import RequestRecord
from minserve.core.trace import Trace
from minserve.lab.arena_score import Row, Scorecard, alone_s, jain, ranking, score, served_share
from minserve.lab.arena_traces import TRACES, arena_cost
from minserve.sim.cost_model import decode_work, row_work

COST = arena_cost()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.25] * 7, 1.0),
        ([1.0, 0.0, 0.0, 0.0, 0.0], 0.2),  # one gets everything: 1 / n
        ([1.0, 1.0, 0.0, 0.0], 0.5),  # k of n get the same: k / n
        ([1.0, 2.0, 3.0], 36 / 42),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_jain(values: list[float], expected: float) -> None:
    assert jain(values) == expected
    assert jain([3 * value for value in values]) == pytest.approx(expected)  # only the shares count


def record(name: str, prompt: int, times_s: list[float], reason: str | None = "stop", arrival_s: float = 0.0) -> RequestRecord:
    return RequestRecord(name, arrival_s, prompt, times_s[0] if times_s else None, times_s, times_s[-1] if times_s else None, reason)


def test_alone_is_prefill_in_chunks_and_decodes() -> None:
    decode_s = COST.of(decode_work(1, 105)).seconds
    assert alone_s(COST, 100, 9) == pytest.approx(COST.of(row_work(0, 100)).seconds + 8 * decode_s)
    two_chunks_s = COST.of(row_work(0, 2048)).seconds + COST.of(row_work(2048, 952)).seconds
    assert alone_s(COST, 3000, 1) == pytest.approx(two_chunks_s)


def test_the_share_of_an_empty_server_s_time() -> None:
    alone = alone_s(COST, 100, 3)
    assert served_share(record("a", 100, [alone, alone, 4 * alone]), COST) == pytest.approx(0.25)
    assert served_share(record("b", 100, [alone / 9, alone / 9, alone / 2]), COST) == 1.0  # cached blocks: no better than as good as alone
    assert served_share(record("c", 100, [], "shed"), COST) == 0.0
    assert served_share(record("d", 100, [alone], "abort"), COST) == 0.0


def test_goodput_is_counted_over_the_trace_s_window() -> None:
    run = Trace()
    for name, times_s, reason in (
        ("in", [0.4, 0.42], "stop"),
        ("late", [0.6, 0.62], "stop"),
        ("slow", [0.4, 0.5], "stop"),
        ("gone", [], "shed"),
    ):
        run.requests[name] = record(name, 50, times_s, reason)
    row = score(TRACES["code"], 1, 5, run, COST)
    assert (row.num_within, row.num_requests, row.num_shed) == (1, 5, 1)
    assert row.goodput_per_s == 1 / 50.0 and row.within_share == 0.2
    shares = [served_share(found, COST) for found in run.requests.values()]
    assert row.fairness == jain([*shares, 0.0])  # the fifth never came


def card(name: str, within: int, foul: str | None = None) -> Scorecard:
    row = Row("chat", 1, within / 10, within, 10, None, 0.04, 100.0, 0.5, 7, 0, 0, 1.0)
    return Scorecard(name, (row,), (row,), foul)


def test_cards_in_words_and_ranked() -> None:
    good, bad, foul = card("good", 9), card("bad", 3), card("foul", 10, "reads the future")
    assert good.within_share == good.unseen_share == 0.9 and foul.within_share == 0.0
    assert good.table().startswith("good: 90.0% within the limits; on seed 1, which was not published, 90.0%")
    assert "foul is disqualified: reads the future" in str(foul)
    lines = ranking([bad, foul, good]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["good", "bad", "foul"]
    assert "disqualified" in lines[4] and "100" not in lines[4]
    assert good.as_dict()["rows"][0]["num_within"] == 9 and math.isclose(good.as_dict()["within_share"], 0.9)
