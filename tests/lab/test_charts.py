"""The charts: the numbers they show, the limits, the labels, and what they refuse."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from minserve.lab import charts, style
from minserve.sim.devices import DEVICES, DeviceSpec
from tests.lab.boxes import boxes, words

DEVICE = DeviceSpec(name="round", memory_bytes=80e9, bytes_per_s=1e12, flops_per_s=100e12)


def written(figure: Figure) -> list[Bbox]:
    """Where the words inside the axes lie, in dots; of words along a slope the box says nothing."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [text.get_window_extent(canvas.get_renderer()) for ax in figure.axes for text in ax.texts if not text.get_rotation()]


def all_apart(figure: Figure) -> bool:
    """No words lie on other words or beyond the picture."""
    places = written(figure)
    inside = all(0 <= box.x0 and box.x1 <= 770 and 0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in places)
    return inside and not any(Bbox.intersection(a.padded(-1), b.padded(-1)) for a, b in combinations(places, 2))


def lines(ax: Axes) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in np.asarray(line.get_xydata())] for line in ax.lines]


# --- the roofline ---------------------------------------------------------------------------------


def test_roofline_has_two_roofs_and_a_ridge() -> None:
    [ax] = charts.roofline(DEVICE, [], "Two roofs").axes
    roofs, ridge = lines(ax)
    assert roofs[1] == (100.0, 100.0) and roofs[0][1] == pytest.approx(roofs[0][0])  # 1 TB/s: as many TFLOP/s as FLOP per byte
    assert roofs[2][1] == 100.0 and [x for x, _ in ridge] == [100.0, 100.0]
    assert words(ax) == ["1,000 GB/s from memory", "100 TFLOP/s", "ridge: 100 FLOP per byte"]
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_ylabel() == "TFLOP/s"


def test_roofline_says_which_share_of_its_limit_a_measured_point_reaches() -> None:
    points = [("decode", 2e9, 1e9, 0.002), ("prompt", 1e12, 1e9, 0.02), ("on paper", 2e9, 1e9, None)]
    [ax] = charts.roofline(DEVICE, points, "").axes
    assert words(ax)[3:] == ["prompt, 50%", "on paper", "decode, 50%"]  # from the top down
    measured, prompt, paper = ax.lines[2:]
    assert lines(ax)[2:] == [[(2.0, 1.0)], [(1000.0, 50.0)], [(2.0, 2.0)]]  # the last lies on the roof, and is hollow
    assert paper.get_markerfacecolor() == "white" != measured.get_markerfacecolor() == prompt.get_markerfacecolor()


def test_roofline_of_a_small_machine_counts_in_gflops_and_labels_keep_apart() -> None:
    machine = DeviceSpec(name="cpu", memory_bytes=24e9, bytes_per_s=26e9, flops_per_s=410e9)
    points = [(f"{n} tokens", 0.27e9 * n, 0.27e9, 0.011 + 0.0007 * n) for n in (1, 2, 3, 4, 5, 6, 8, 16, 64)]
    figure = charts.roofline(machine, points, "")
    assert figure.axes[0].get_ylabel() == "GFLOP/s" and all_apart(figure)


def test_roofline_label_without_room_at_its_right_lies_under_its_point() -> None:
    figure = charts.roofline(DEVICE, [("a prompt chunk of many tokens", 1e12, 1e9, 0.02)], "")
    [ax] = figure.axes
    box, (x, y) = written(figure)[-1], ax.transData.transform((1000.0, 50.0))
    assert box.x0 < x < box.x1 <= ax.bbox.x1 and box.y1 < y


# --- curves ---------------------------------------------------------------------------------------


def test_curves_begin_at_zero_and_are_named_where_they_end() -> None:
    figure = charts.curves({"static": [(1, 2.0), (2, 3.0)], "paged": [(1, 2.5), (2, 3.01)]}, "slots", "tokens/s", "Paging gains")
    [ax] = figure.axes
    assert lines(ax) == [[(1, 2.0), (2, 3.0)], [(1, 2.5), (2, 3.01)]] and ax.get_ylim()[0] == 0.0
    assert words(ax) == ["static", "paged"] and all_apart(figure)
    assert ax.texts[0].get_position()[1] < ax.texts[1].get_position()[1]  # moved apart, in the order of the lines
    assert len({line.get_linestyle() for line in ax.lines}) == 2  # grey print tells them apart


def test_curves_show_limits_on_logarithmic_axes() -> None:
    series = {"bf16": [(256.0, 0.2), (65_536.0, 53.0)]}
    figure = charts.curves(series, "tokens", "GB", "", log_x=True, log_y=True, limit=(26.0, "the weights"), mark_x=(4096.0, "window"))
    [ax] = figure.axes
    assert ax.get_xscale() == ax.get_yscale() == "log" and words(ax) == ["the weights", "window", "bf16"]
    assert lines(ax)[1:] == [[(0.0, 26.0), (1.0, 26.0)], [(4096.0, 0.0), (4096.0, 1.0)]]
    low, high = ax.get_ylim()
    assert low < 0.2 and high > 53 and all_apart(figure)


def test_curves_refuse_nothing() -> None:
    with pytest.raises(ValueError, match="no points to draw in b"):
        charts.curves({"a": [(1, 1)], "b": []}, "", "", "")
    with pytest.raises(ValueError, match="no series"):
        charts.curves({}, "", "", "")


def test_latency_throughput_is_in_milliseconds_and_names_its_points() -> None:
    series = {"13B": [(60.0, 0.016), (645.0, 0.025), (963.0, 0.033)]}
    figure = charts.latency_throughput(series, "Batching is cheap", limit_s=0.04, labels=("1", "16", "32"))
    [ax] = figure.axes
    assert lines(ax)[0] == [(60.0, 16.0), (645.0, 25.0), (963.0, 33.0)]
    assert words(ax) == ["limit 40 ms", "13B", "1", "16", "32"] and ax.get_xlim()[0] == 0.0
    assert ax.get_ylabel() == "time per output token, ms" and ax.get_yscale() == "linear"
    steep = charts.latency_throughput({"cap 10": [(300.0, 0.1), (310.0, 39.0)]}, "", latency="TTFT")
    assert steep.axes[0].get_yscale() == "log" and steep.axes[0].get_ylabel() == "TTFT, ms"


# --- bars -----------------------------------------------------------------------------------------


def test_bars_begin_at_zero_and_end_with_their_number() -> None:
    figure = charts.bars({"static": 226, "continuous": 663, "paged": 908.4}, "tokens/s", "A ladder", limit=(1000, "limit"))
    [ax] = figure.axes
    assert [(b.left, b.width, round(b.bottom + 0.36)) for b in boxes(ax)] == [(0, 226, 0), (0, 663, 1), (0, 908.4, 2)]
    assert words(ax) == ["226", "663", "908", "limit"] and ax.get_xlim()[0] == 0.0 and all_apart(figure)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["static", "continuous", "paged"]


def test_bars_refuse_what_has_no_zero() -> None:
    with pytest.raises(ValueError, match=r"need values from 0 up, got \{'a': -1\}"):
        charts.bars({"a": -1}, "", "")
    with pytest.raises(ValueError, match="from 0 up"):
        charts.bars({}, "", "")
    assert charts.bars({"a": 0.0}, "", "").axes[0].get_xlim() == (0.0, 1.1)


def test_stacked_bars_show_parts_side_by_side_and_name_them_once() -> None:
    rows = {"slots": {"live": 33.0, "never": 61.0, "free": 6.0}, "blocks": {"live": 97.0, "never": 2.0, "free": 1.0}}
    figure = charts.stacked_bars(rows, "% of the pool", "Blocks", empty="free")
    [ax] = figure.axes
    assert [(b.left, b.width, round(b.bottom + 0.36)) for b in boxes(ax)][:3] == [(0, 33, 0), (33, 61, 0), (94, 6, 0)]
    assert [b.left + b.width for b in boxes(ax) if b.colour == style.GREY.lower()] == [100, 100]
    assert words(ax) == ["33", "61", "6", "97", "2"] and ax.get_xlim()[0] == 0.0 and all_apart(figure)  # the narrowest has no room
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["live", "never", "free"]
    assert len({b.colour for b in boxes(ax)}) == 3


def test_stacked_bars_refuse_what_has_no_zero() -> None:
    for rows in ({}, {"a": {"live": -1.0}}):
        with pytest.raises(ValueError, match="need parts from 0 up"):
            charts.stacked_bars(rows, "", "")


def test_waterfall_parts_stand_on_each_other_up_to_what_is_left() -> None:
    figure = charts.vram_waterfall({"weights": 26e9, "KV": 43e9, "activations": 3e9}, DEVICES["a100-80gb"].memory_bytes, "An A100")
    [ax] = figure.axes
    assert [(b.left, b.width) for b in boxes(ax)] == [(0, 26), (26, 43), (69, 3), (72, 8)]
    assert words(ax) == ["26.0 GB, 32%", "43.0 GB, 54%", "3.0 GB, 4%", "8.0 GB, 10%", "80 GB"] and all_apart(figure)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["weights", "KV", "activations", "left"]


def test_waterfall_hatches_what_is_too_much() -> None:
    figure = charts.vram_waterfall({"weights": 141e9, "KV": 20e9}, 80e9, "Too large")
    [ax] = figure.axes
    assert [(b.left, b.width, b.hatch) for b in boxes(ax)] == [(0, 141, None), (141, 20, None), (80, 81, "////")]
    assert words(ax)[2] == "81.0 GB, 101%" and ax.get_xlim()[1] > 161 and all_apart(figure)


def test_charts_are_small_enough_to_commit() -> None:
    points = [(f"batch {n}", 26e9 * n, 26e9, 0.02) for n in (1, 8, 64)]
    assert len(style.png_bytes(charts.roofline(DEVICES["a100-80gb"], points, "A title that states the finding"))) < 60_000
