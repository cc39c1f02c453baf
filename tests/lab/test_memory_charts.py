"""Pictures of memory under pressure: they show all they are given, in its place, and refuse to draw nothing."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minserve.core.pressure import Pressure
from minserve.lab.memory_charts import COLOURS, Filled, Move, Role, call_prices, fills, moves, pressures
from minserve.lab.style import deep, png_bytes

MODELS = {
    "large": [Filled(0.5, 100, 30.0), Filled(0.7, 200, 45.0), Filled(0.9, 400, 60.0)],
    "small": [Filled(0.5, 800, 99.0), Filled(0.9, 1000, 100.0)],
}


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def words_of(figure: Figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_fills_are_shares_of_the_highest_fill() -> None:
    figure = fills(MODELS, {"an engine": 0.88}, "a finding")
    room, speed = figure.axes
    assert [list(map(round, ys(line))) for line in room.lines[:2]] == [[25, 50, 100], [80, 100]]
    assert [list(map(round, ys(line))) for line in speed.lines[:2]] == [[50, 75, 100], [99, 100]]
    assert xs(room.lines[2])[0] == xs(speed.lines[2])[0] == 88
    assert words_of(figure).count("large") == words_of(figure).count("small") == 2 and "an engine" in words_of(figure)
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_a_move_has_a_bar_its_number_and_the_colour_of_its_role() -> None:
    rows = [Move("more", 3.342, Role.WORSE), Move("as it is", 1.0, Role.TROUBLE), Move("less", 0.0, Role.CURE)]
    figure = moves({"start": ("GB", rows), "step": ("requests", rows), "thrash": ("s", rows)}, "a finding")
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title(loc="left") for ax in shown] == ["start", "step", "thrash"]
    assert [text.get_text() for text in shown[0].texts] == ["3.34", "1", "0"]
    labels = shown[2].get_yticklabels()
    assert [label.get_text() for label in labels] == ["more", "as it is", "less"]
    assert [to_hex(label.get_color()).upper() for label in labels] == [deep(COLOURS[role]).upper() for role in Role]
    assert shown[1].get_xlabel() == "requests" and png_bytes(figure)


def test_pressures_draw_the_pool_the_memory_held_and_the_queues() -> None:
    seen = [Pressure(10, 4, used, 1, 3, 2, 0) for used in (2, 9, 5)]
    figure = pressures(seen, [99.0, 100.0, 100.0], [1], "a finding", "memory held")
    pool, queues = figure.axes
    held, thrown = pool.lines
    assert list(ys(held)) == [99.0, 100.0, 100.0] and xs(thrown)[0] == 1
    assert len(pool.collections) == 3  # used, idle, clean
    assert [list(ys(line)) for line in queues.lines] == [[3, 3, 3], [2, 2, 2]]
    assert {"memory held", "a preemption", "running", "waiting"} <= set(words_of(figure)) and png_bytes(figure)


def test_a_line_of_prices_is_rate_times_price() -> None:
    figure = call_prices((100, 500), {"a pool": 5.0}, (0.05, 0.15), "a finding")
    [ax] = figure.axes
    hundred, five_hundred, mark = ax.lines
    assert [y / x for x, y in zip(xs(hundred), ys(hundred), strict=True)] == pytest.approx([0.01, 0.01])
    assert [y / x for x, y in zip(xs(five_hundred), ys(five_hundred), strict=True)] == pytest.approx([0.05, 0.05])
    assert xs(mark)[0] == 5.0 and " a pool: 5 us" in words_of(figure) and png_bytes(figure)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no fills"):
        fills({"large": []}, {}, "")
    with pytest.raises(ValueError, match="no moves"):
        moves({"start": ("GB", [])}, "")
    with pytest.raises(ValueError, match="got 2 for 1"):
        pressures([Pressure(10, 4, 2, 1, 3, 2, 0)], [1.0, 2.0], [], "", "memory held")
