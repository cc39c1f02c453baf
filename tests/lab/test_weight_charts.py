"""The pictures of weights: what is drawn where, and that no words lie on others."""

import numpy as np
import pytest
from matplotlib.axes import Axes

from minserve.lab.style import new_figure
from minserve.lab.weight_charts import MEASURED, Frame, Loss, bargain, columns, draw_bars, draw_speeds, loud_inputs, number_lines, speeds
from tests.lab.boxes import boxes, words
from tests.lab.test_charts import all_apart, lines

LOSSES = {
    "int4, rounded": [Loss(4.06, 1.2, 1.1, 1.3), Loss(4.28, 0.7, 0.6, 0.8), Loss(4.5, 0.4, 0.3, 0.5)],
    "int8": [Loss(8.03, 0.002, 0.001, 0.003)],
    "AWQ": [Loss(4.06, 0.8, 0.7, 0.9), Loss(4.5, 0.3, 0.28, 0.33)],
    "GPTQ": [Loss(4.06, 0.5, 0.4, 0.6), Loss(4.5, 0.29, 0.2, 0.35)],
}
SPEEDS = {
    "13B, A100, int4-g128": [(1, 3.4), (16, 3.3), (256, 1.0)],
    "13B, int8": [(1, 1.9), (16, 1.9), (256, 1.0)],
    "here": [(1, 1.9), (16, 1.0)],
}


def dots(ax: Axes, marker: str) -> list[list[tuple[float, float]]]:
    return [points for points, line in zip(lines(ax), ax.lines, strict=True) if line.get_marker() == marker]


def test_each_number_hangs_on_its_nearest_point() -> None:
    figure = number_lines({"coarse": ([0.4, 2.6], [0.0, 1.0, 2.0, 3.0]), "fine": ([0.4], [0.0, 0.5])}, "Two grids")
    upper, lower = figure.axes
    assert lines(upper)[:2] == [[(0.4, 0.62), (0.0, 0.12)], [(2.6, 0.62), (3.0, 0.12)]] and lines(lower)[0][1] == (0.5, 0.12)
    assert [x for x, _ in dots(upper, "o")[0]] == [0.4, 2.6] and [x for x, _ in dots(lower, "|")[0]] == [0.0, 0.5]
    assert words(upper) == ["coarse"] and words(lower) == ["fine"] and all_apart(figure)


def test_columns_share_one_scale_of_colour_with_no_shift_in_its_middle() -> None:
    before, after = np.zeros((2, 3)), np.array([[0.25, -0.5, 0.0], [0.0, 2.0, 0.0]])
    figure = columns({"0 of 3": Frame(before, 0), "2 of 3": Frame(after, 2)}, "Moments", "steps")
    first, second, bar = figure.axes
    shown = [ax.images[0] for ax in (first, second)]
    assert [np.asarray(image.get_array()).tolist() for image in shown] == [before.tolist(), after.tolist()]
    assert {(image.norm.vmin, image.norm.vmax) for image in shown} == {(-2.0, 2.0)} and float(
        np.asarray(shown[0].norm(np.zeros(1)))[0]
    ) == 0.5
    assert lines(second)[-1][0][0] == 1.5 and bar.get_ylabel() == "steps" and all_apart(figure)


def test_a_matrix_that_never_moved_can_be_shown() -> None:
    [image] = columns({"0 of 3": Frame(np.zeros((2, 3)), 0)}, "", "").axes[0].images
    assert (image.norm.vmin, image.norm.vmax) == (-1.0, 1.0)


def test_loud_inputs_are_marked_and_errors_named() -> None:
    figure = loud_inputs([1.0, 9.0, 2.0], [1], {"all rounded": 7.75, "the loudest kept": 3.7}, "%", "One of three")
    left, right = figure.axes
    bars = sorted(boxes(left), key=lambda box: box.left)
    assert [bar.height for bar in bars] == [1.0, 9.0, 2.0] and bars[0].colour == bars[2].colour != bars[1].colour
    assert words(left) == ["the loudest 1"] and words(right) == ["7.75", "3.7"] and all_apart(figure)
    assert sorted(box.width for box in boxes(right)) == [3.7, 7.75]


def test_the_chosen_bar_has_the_full_colour() -> None:
    ax = new_figure().subplots()
    draw_bars(ax, {"rtn": 3.0, "gptq": 1.0}, "", "", chosen="gptq")
    colours = {box.width: box.colour for box in boxes(ax)}
    assert colours[1.0] == "#0072b2" != colours[3.0]


def test_the_bargain_has_a_line_a_method_and_whiskers() -> None:
    figure = bargain(LOSSES, "KL", SPEEDS, "requests in a step", "int4 costs")
    left, right = figure.axes
    shown = lines(left)
    assert shown[0] == [(p.bits, p.loss) for p in LOSSES["int4, rounded"]] and shown[1] == [(4.06, 1.1), (4.06, 1.3)]
    assert words(left) == list(LOSSES) and words(right) == ["bf16", *SPEEDS]
    assert [lines(right)[i] for i in range(3)] == list(SPEEDS.values())
    assert right.get_ylim()[0] == 0 and all_apart(figure)


def test_speeds_are_named_where_no_other_line_is_near() -> None:
    figure = speeds(SPEEDS, "requests in a step", "Faster for few")
    [ax] = figure.axes
    assert words(ax) == ["bf16", *SPEEDS] and ax.get_ylabel() == "speed, times bf16" and all_apart(figure)
    assert [lines(ax)[i] for i in range(3)] == list(SPEEDS.values())
    low, high = ([(1, 2.0), (4, 1.0)], [(1, 2.1), (4, 3.0)])  # far from each other at 4 only
    [ax] = speeds({"low": low, "high": high, "end": [(4, 0.1), (64, 0.1)]}, "", "").axes
    across = {text.get_text(): text.get_position()[0] for text in ax.texts}
    assert across["low"] == across["high"] == across["end"] > 0.3


def test_a_loss_of_nothing_is_drawn_at_the_foot() -> None:
    left, _ = bargain({**LOSSES, "bf16": [Loss(16.0, 0.0, -0.1, 0.1)]}, "", SPEEDS, "", "").axes
    low, _ = left.get_ylim()
    assert all(low < y for points in lines(left) for _, y in points)


def test_measured_speeds_are_dots_and_the_batch_is_marked() -> None:
    ax = new_figure().subplots()
    draw_speeds(ax, {"predicted": [(1, 2.0), (4, 1.0)], MEASURED: [(1, 1.5)]}, "", top=4.4, mark=4)
    assert [line.get_linestyle() for line in ax.lines[:2]] == ["-", "None"] and lines(ax)[-1][0][0] == 4
    assert ax.get_ylim() == pytest.approx((0, 4.4)) and [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "4"]
