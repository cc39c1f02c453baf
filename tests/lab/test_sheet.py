"""The sheet: words are outlines, in their place and above everything else."""

from typing import cast

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch

from minserve.lab.sheet import Sheet, Words
from minserve.lab.style import INK, png_bytes


def outlines(sheet: Sheet) -> list[PathPatch]:
    """Halo and words, one of a colour, in the order in which they lie on each other."""
    return [artist for artist in sheet.ax.get_children() if isinstance(artist, PathPatch)]


def vertices(patch: PathPatch) -> np.ndarray:
    return cast(np.ndarray, patch.get_path().vertices)


def extents(sheet: Sheet) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of all that is drawn last."""
    corners = vertices(outlines(sheet)[-1])
    (left, bottom), (right, top) = corners.min(axis=0), corners.max(axis=0)
    return left, right, bottom, top


@pytest.mark.parametrize(("side", "left", "right"), [("left", 2.0, 2.806), ("center", 1.597, 2.403), ("right", 1.194, 2.0)])
def test_words_stand_at_their_place(side: str, left: float, right: float) -> None:
    sheet = Sheet(2.0)
    sheet.write(2.0, 1.0, "block 12", 14.0, side)
    sheet.finish()
    found_left, found_right, bottom, top = extents(sheet)
    assert found_left == pytest.approx(left, abs=0.01) and found_right == pytest.approx(right, abs=0.01)
    assert (bottom + top) / 2 == pytest.approx(1.0, abs=0.04) and 0.1 < top - bottom < 0.2  # 14 pt are 0.19 inches
    assert sheet.words == [Words(2.0, 1.0, "block 12", 14.0, side, INK, False)]


def test_words_lie_above_what_was_drawn_after_them() -> None:
    def shot(words_first: bool) -> bytes:
        sheet = Sheet(1.0, 2.0)
        steps = [lambda: sheet.write(0.5, 0.5, "R0", halo=True), lambda: sheet.boxes({(0.0, 0.0, 2.0, 1.0): "#0072b2"})]
        for step in steps if words_first else reversed(steps):
            step()
        return png_bytes(sheet.finish())

    assert shot(True) == shot(False)


def test_a_colour_is_one_path_and_a_halo_lies_below_it() -> None:
    sheet = Sheet(1.0)
    for index in range(50):
        sheet.write(0.1 * index, 0.5, f"{index}", colour="#ff0000" if index % 2 else "#0000ff", halo=index < 3)
    sheet.write(0.1, 0.1, " ")  # nothing to draw
    sheet.finish()
    halo, blue, red = outlines(sheet)
    assert [to_hex(patch.get_facecolor()) for patch in (halo, blue, red)] == ["#ffffff", "#0000ff", "#ff0000"]
    assert len(vertices(halo)) < len(vertices(red)) and halo.get_linewidth() == 2.5


def test_frames_are_lines_around_their_boxes() -> None:
    sheet = Sheet(1.0)
    sheet.frames.append((1.0, 0.25, 2.0, 0.5))
    sheet.finish()
    [lines] = [c for c in sheet.ax.collections if isinstance(c, LineCollection)]
    assert [segment.tolist() for segment in lines.get_segments()] == [[[1.0, 0.25], [3.0, 0.25], [3.0, 0.75], [1.0, 0.75], [1.0, 0.25]]]


def test_an_empty_sheet_is_white() -> None:
    png = png_bytes(Sheet(1.0, 2.0).finish())
    assert (int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")) == (220, 110) and len(png) < 2000
