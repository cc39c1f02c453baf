"""The pictures of service under load: what is drawn where, in which units, and that no words lie on others."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minserve.lab.slo_charts import Panel, Spot, load_curves, queue_lengths, scorecard_bars
from tests.lab.boxes import boxes, words
from tests.lab.test_charts import all_apart, lines

TTFT = {
    "cap 10": [Spot(0.5, [0.5, 0.7, 0.6]), Spot(1.5, [3.0, 12.0, 9.0])],
    "cap 64": [Spot(0.5, [0.5, 0.6, 0.7]), Spot(2.5, [0.8, 1.0, 2.0])],
}
TPOT = {"cap 10": [Spot(0.5, [0.03]), Spot(1.5, [0.04])], "cap 64": [Spot(0.5, [0.03]), Spot(2.5, [0.09])]}


def picture(limits: dict[str, float] | None = None) -> Figure:
    panels = [Panel("First token", TTFT, limits or {"450 ms": 0.45, "2 s": 2.0}, "s"), Panel("Each further", TPOT, {"40 ms": 0.04})]
    return load_curves(panels, "requests/s", "A finding", mark_x={"cap 10": 1.6})


def bands(ax: Axes) -> list[tuple[float, float, float, float]]:
    """Of each band: its left and right end, its least and greatest value."""
    found = []
    for band in ax.collections:
        [path] = band.get_paths()
        corners = np.asarray(path.vertices)
        (left, low), (right, high) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
        found.append((left, right, low, high))
    return found


def test_a_line_goes_through_the_medians_of_the_seeds_in_a_band_from_least_to_greatest() -> None:
    left, right = picture().axes
    assert lines(left)[0] == [(0.5, 0.6), (1.5, 9.0)] and lines(right)[0] == [(0.5, 30.0), (1.5, 40.0)]  # seconds; milliseconds
    assert bands(left) == [(0.5, 1.5, 0.5, 12.0), (0.5, 2.5, 0.5, 2.0)]
    assert left.get_ylabel() == "s" and right.get_ylabel() == "ms" and left.get_yscale() == "log" and left.get_xlim()[0] == 0


def test_limits_lie_across_and_ceilings_at_the_foot_of_the_line_of_that_name() -> None:
    figure = picture()
    left, right = figure.axes
    assert [line for line in lines(left) if len({y for _, y in line}) == 1] == [[(0, 0.45), (1, 0.45)], [(0, 2.0), (1, 2.0)]]
    assert [line for line in lines(right) if len({y for _, y in line}) == 1] == [[(0, 40.0), (1, 40.0)]]
    [(foot, colour)] = [(line, drawn.get_color()) for line, drawn in zip(lines(left), left.lines, strict=True) if line[0][0] == 1.6]
    assert {x for x, _ in foot} == {1.6} and max(y for _, y in foot) < 0.1 and colour == left.lines[0].get_color()
    assert words(left) == ["450 ms", "2 s", "cap 10", "cap 64"] and all_apart(figure)


def test_words_of_a_limit_below_all_lines_stand_under_it() -> None:
    left, _ = picture().axes
    under, over = left.texts[0], left.texts[1]
    found = [(text.get_text(), text.get_verticalalignment()) for text in (under, over)]
    assert found == [("450 ms", "top"), ("2 s", "bottom")]


def test_what_a_logarithm_cannot_show_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="First: the line 'cap 10' needs spots with values above 0"):
        load_curves([Panel("First", {"cap 10": [Spot(1.0, [0.0, 1.0])]})], "x", "t")
    with pytest.raises(ValueError, match="the line 'empty'"):
        load_curves([Panel("First", {"empty": []})], "x", "t")


def test_queues_are_named_above_their_peaks() -> None:
    figure = queue_lengths({"fixed": [(0, 0), (10, 3)], "shrink": [(0, 0), (10, 50), (30, 0)]}, "Feeds itself")
    [ax] = figure.axes
    assert lines(ax) == [[(0, 0), (10, 3)], [(0, 0), (10, 50), (30, 0)]] and ax.get_ylim()[0] == 0 and ax.get_xlim() == (0, 30)
    place = {text.get_text(): text.get_position() for text in ax.texts}
    assert place["shrink"][0] == pytest.approx(10 / 30 + 0.025) and place["shrink"][1] > 0.8 > 0.2 > place["fixed"][1]
    assert all_apart(figure)
    with pytest.raises(ValueError, match="no points to draw in idle"):
        queue_lengths({"idle": []}, "t")


def test_a_scorecard_has_a_column_a_measure_each_with_its_own_axis() -> None:
    scores = {
        "continuous": {"goodput": 2.5, "TTFT p99, s (less is better)": 16.0, "sent away": 0},
        "by SLO": {"goodput": 3.5, "TTFT p99, s (less is better)": 1.9, "sent away": 22},
    }
    figure = scorecard_bars(scores, "A few refusals")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["goodput", "TTFT p99, s", "sent away"]
    assert [sorted(box.width for box in boxes(ax)) for ax in figure.axes] == [[2.5, 3.5], [1.9, 16.0], [0.0, 22.0]]
    assert [words(ax) for ax in figure.axes] == [["2.5", "3.5"], ["16", "1.9"], ["0", "22"]]
    hues = [{box.colour for box in boxes(ax)} for ax in figure.axes]
    assert hues[0] == hues[2] != hues[1] and all_apart(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["continuous", "by SLO"]


def test_a_score_that_is_missing_or_negative_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="missing or negative: b: goodput"):
        scorecard_bars({"a": {"goodput": 1.0}, "b": {}}, "t")
    with pytest.raises(ValueError, match="a: goodput"):
        scorecard_bars({"a": {"goodput": -1.0}}, "t")
