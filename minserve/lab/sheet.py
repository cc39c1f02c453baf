"""A white sheet that is measured in inches: boxes, frames and words at plain numbers, hundreds of them while a hand is on the slider.

Why: a picture of a state is a layout, not a chart: no axis says anything, and everything has its place. And matplotlib takes a
millisecond for each piece of text, too long for two hundred blocks with an id and an owner each. So all words of a sheet are drawn as
one path of outlines.

Invariant: words lie above everything else, in whatever order they were written.

Taught in notebook 04.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from minserve.lab.style import INK, SMALL_PT, Box, add_boxes, new_figure

SIDES = {"left": 0.0, "center": 0.5, "right": 1.0}
HALO_PT = 2.5


class Words(NamedTuple):
    """Words at a place, in inches from the lower left corner: their side there, and the middle of their height."""

    x: float
    y: float
    text: str
    size_pt: float
    side: str
    colour: str
    has_halo: bool


class Sheet:
    """Put boxes, frames and words on it, then `finish` it."""

    def __init__(self, height_in: float, width_in: float = 7.0):
        self.figure = new_figure(height_in, width_in)
        self.figure.set_layout_engine(None)
        self.ax = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.ax.set_axis_off()
        self.ax.set_xlim(0, width_in)
        self.ax.set_ylim(0, height_in)
        self.words: list[Words] = []
        self.frames: list[Box] = []

    def boxes(self, boxes: dict[Box, str], hatch: str | None = None, edge: str = "none") -> None:
        """Rectangles by their colour."""
        add_boxes(self.ax, list(boxes), list(boxes.values()), hatch, edge)

    def write(
        self, x: float, y: float, text: str, size_pt: float = SMALL_PT, side: str = "left", colour: str = INK, halo: bool = False
    ) -> None:
        self.words.append(Words(x, y, text, size_pt, side, colour, halo))

    def finish(self) -> Figure:
        """Draw frames and words above the boxes."""
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)] for x, y, w, h in self.frames]
        self.ax.add_collection(LineCollection(corners, colors=INK, linewidths=1.2, capstyle="projecting"))
        haloed = [_place(words) for words in self.words if words.text.strip() and words.has_halo]
        if haloed:
            halo = Path.make_compound_path(*haloed)
            self.ax.add_collection(PathCollection([halo], facecolors="white", edgecolors="white", linewidths=HALO_PT, joinstyle="round"))
        by_colour: dict[str, list[Path]] = {}
        for words in self.words:
            if words.text.strip():
                by_colour.setdefault(words.colour, []).append(_place(words))
        paths = [Path.make_compound_path(*paths) for paths in by_colour.values()]
        self.ax.add_collection(PathCollection(paths, facecolors=list(by_colour), linewidths=0))
        return self.figure


def _place(words: Words) -> Path:
    """The outlines of the words, in inches and in their place."""
    outline, width = _outline(words.text)
    unit = words.size_pt / 72
    origin = (words.x - SIDES[words.side] * width * unit, words.y - 0.36 * unit)  # half the height of a digit
    return Path(np.asarray(outline.vertices) * unit + origin, outline.codes)


@lru_cache(maxsize=4096)  # of a pure function: remembering changes nothing but the time
def _outline(text: str) -> tuple[Path, float]:
    """The text at size 1, and its width."""
    path = TextPath((0, 0), text, size=1)
    return path, float(np.asarray(path.vertices)[:, 0].max())
