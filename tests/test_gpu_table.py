"""The table of `minserve bench --gpu`: shares and ratios by hand, bars in both directions, rows without a number."""

import math

import pytest

from minserve.gpu_table import (
    HEADER,
    MICROSECONDS,
    SHARE,
    SPEED_RATIO,
    TABLE,
    TFLOPS,
    TIME_RATIO,
    Measure,
    Measured,
    Result,
    Row,
    judge,
    line,
    result_of,
)

COPY_BYTES_PER_S = 4e12
SLOW, FAST = Measured(2e-3, 6_000_000_000, 8 * 10**11), Measured(5e-4, 1_000_000_000, 0)


@pytest.mark.parametrize(
    ("measure", "works", "value"),
    [
        (SHARE, ("slow",), 75.0),  # 6 GB in 2 ms are 3 TB/s of 4
        (MICROSECONDS, ("fast",), 500.0),
        (TFLOPS, ("slow",), 400.0),
        (TIME_RATIO, ("fast", "slow"), 0.25),
        (SPEED_RATIO, ("fast", "slow"), 4.0),
    ],
)
def test_a_number_by_hand(measure: Measure, works: tuple[str, ...], value: float) -> None:
    row = Row("row", measure, works, 1.0, 2.0)
    result = result_of(row, {"slow": SLOW, "fast": FAST}, COPY_BYTES_PER_S)
    assert result.value == pytest.approx(value) and result.error is None


def test_bars_count_in_both_directions() -> None:
    more, less = Row("more", SHARE, ("a",), 60, 80), Row("less", TIME_RATIO, ("a", "b"), 0.7, 0.58)
    assert [judge(value, more) for value in (59.9, 60, 79.9, 80, 101)] == ["MISSED", "pass", "pass", "goal", "goal"]
    assert [judge(value, less) for value in (0.71, 0.7, 0.59, 0.58, 0.1)] == ["MISSED", "pass", "pass", "goal", "goal"]
    assert judge(math.nan, more) == judge(math.nan, less) == "MISSED"


def test_what_was_not_measured_has_a_reason_and_no_number() -> None:
    row = Row("ratio", TIME_RATIO, ("slow", "broken"), 0.7, 0.5)
    result = result_of(row, {"slow": SLOW, "broken": "OutOfResources: shared memory"}, COPY_BYTES_PER_S)
    assert (result.value, result.verdict, result.error) == (None, "failed", "broken: OutOfResources: shared memory")
    assert result_of(row, {"slow": SLOW}, COPY_BYTES_PER_S).error == "broken: not measured"
    share = result_of(Row("share", SHARE, ("slow",), 60, 80), {"slow": SLOW}, 0.0)
    assert (share.value, share.error) == (None, "the copy was not measured")


def test_every_row_is_possible() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names) == 19
    for row in TABLE:
        sign = 1 if row.measure.higher_is_better else -1
        assert row.passes > 0 and sign * row.goal > sign * row.passes, row
        assert len(row.works) == (2 if row.measure in (TIME_RATIO, SPEED_RATIO) else 1), row


def test_a_line_says_number_bars_and_verdict() -> None:
    row = Row("KV write, bf16", SHARE, ("a",), 75, 88)
    assert line(Result(row, 81.234)).split("  ")[-1] == "pass"
    assert "81.23 % of copy" in line(Result(row, 81.234)) and ">= 75" in line(Result(row, 81.234))
    assert line(Result(row, None, "a: no")).endswith("failed (a: no)")
    assert line(Result(row, 1.0)).index(">= 75") + len(">= 75") == HEADER.index("pass") + len("pass")


def test_the_file_has_number_bars_and_verdict() -> None:
    row = Row("less", TIME_RATIO, ("a", "b"), 0.7, 0.58)
    assert Result(row, 0.6).to_json() == {
        "name": "less",
        "unit": "x its time",
        "value": 0.6,
        "pass": 0.7,
        "goal": 0.58,
        "verdict": "pass",
        "works": ["a", "b"],
        "error": None,
    }
