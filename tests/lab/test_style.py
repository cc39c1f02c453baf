"""The style: colours, boxes, labels kept apart, and figures that leave as bytes without pyplot."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from minserve.lab import style
from tests.lab.boxes import Box, boxes


def lightness(colour: str) -> float:
    """What a grey printer makes of it: 0 black, 1 white (Rec. 709)."""
    red, green, blue = to_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_request_keeps_its_colour() -> None:
    assert style.request_colour(1) == style.request_colour(1 + len(style.PALETTE)) != style.request_colour(2)


@pytest.mark.parametrize("colour", style.PALETTE)
def test_prompt_and_decode_differ_in_grey_print_and_words_can_be_read(colour: str) -> None:
    assert lightness(style.pale(colour)) - lightness(colour) > 0.15
    assert lightness(style.deep(colour)) < 0.5  # dark words on the white ground
    assert style.pale(colour, 1.0) == style.deep(colour, 1.0) == colour.lower()


def test_boxes_are_one_path_a_colour() -> None:
    figure, ax = style.new_panel("A title", "x", "y")
    style.add_boxes(ax, [(0, 0, 1, 2), (1, 0, 1, 3), (2, 5, 1, -1)], ["#111111", "#222222", "#111111"], hatch="//")
    style.add_boxes(ax, [], "#333333")
    assert len(ax.collections) == 1
    assert boxes(ax) == [
        Box(0.0, 0.0, 1.0, 2.0, "#111111", "//"),
        Box(2.0, 5.0, 1.0, -1.0, "#111111", "//"),
        Box(1.0, 0.0, 1.0, 3.0, "#222222", "//"),
    ]
    assert ax.get_title(loc="left") == "A title" and figure.axes == [ax]


def test_spread_keeps_the_gap_the_order_and_the_middle() -> None:
    assert style.spread([], 1.0) == []
    assert style.spread([3.0, 1.0], 1.0) == [3.0, 1.0]
    moved = style.spread([0.5, 0.1, 0.5, 0.52], 0.1)
    assert moved == pytest.approx([0.506667 - 0.1, 0.1, 0.506667, 0.506667 + 0.1], abs=1e-5)
    crowd = style.spread([0.0, 0.15, 0.2, 0.3], 0.2)  # pushing one apart reaches its neighbours
    assert crowd == pytest.approx([-0.1375, 0.0625, 0.2625, 0.4625]) and sum(crowd) == pytest.approx(0.65)


def test_margins_are_what_they_are_told() -> None:
    figure, ax = style.new_panel("", "", "")
    style.fix_margins(figure, left_in=0.7, right_in=0.35, top_in=0.3, bottom_in=0.6)
    place = ax.get_position()
    assert (place.x0, place.x1, place.y0, place.y1) == pytest.approx((0.1, 0.95, 0.2, 0.9))


def test_a_long_title_takes_two_lines() -> None:
    _, ax = style.new_panel("word " * 30, "", "")
    assert ax.get_title(loc="left").count("\n") == 1


def test_bytes_are_the_picture_at_its_size_on_white(tmp_path: Path) -> None:
    figure, ax = style.new_panel("A title", "x", "y", height_in=2.0)
    ax.plot([1, 2], [1, 2])
    pixels = imread(io.BytesIO(style.png_bytes(figure)))
    assert pixels.shape[:2] == (220, 770) and tuple(pixels[0, 0, :3]) == (1.0, 1.0, 1.0)  # dark themes see a white ground
    assert style.save(style.new_figure(), tmp_path / "new" / "empty.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert style.save(style.new_figure(), tmp_path / "empty.png").read_bytes()[:4] == b"\x89PNG"


def test_a_kept_picture_is_less_than_half_as_large_and_looks_the_same() -> None:
    figure, ax = style.new_panel("A title", "x", "y")
    for index in range(8):
        ax.plot([0, 1, 2], [index, 2 * index, 1], color=style.PALETTE[index])
    full, small = style.png_bytes(figure), style.small_png_bytes(figure)
    before, after = (imread(io.BytesIO(png))[:, :, :3] for png in (full, small))
    assert len(small) < 0.5 * len(full) and before.shape == after.shape
    assert abs(before - after).max() < 0.1 and abs(before - after).mean() < 0.002
    assert tuple(after[0, 0]) == (1.0, 1.0, 1.0)


def test_case_190_minus_signs_are_drawn_without_a_warning() -> None:
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from minserve.lab import charts, figures, style\n"
        "figure = style.new_figure()\n"
        "left, right = figure.subplots(1, 2)\n"
        "left.plot([-1, 1], [-1, 1]); right.plot([0.001, 1], [0.001, 1]); right.set_yscale('log'); right.set_xscale('log')\n"
        "style.png_bytes(figure)\n"
        "style.png_bytes(charts.curves({'a': [(1e-3, -1.0), (1.0, 2.0)]}, 'x', 'y', 'Below zero', log_x=True))\n"
        "import sys; assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
