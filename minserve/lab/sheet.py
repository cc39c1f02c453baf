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
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
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
        by_colour: dict[str, list[Path]] = {}
        halos: list[Path] = []
        for words in self.words:
            if words.text.strip():
                outline = _place(words)
                by_colour.setdefault(words.colour, []).append(outline)
                halos += [outline] if words.has_halo else []
        if halos:
            self._draw_outlines(halos, "white", linewidth=HALO_PT)
        for colour, outlines in by_colour.items():
            self._draw_outlines(outlines, colour, linewidth=0.0)
        return self.figure

    def _draw_outlines(self, outlines: list[Path], colour: str, linewidth: float) -> None:
        # As an artist and no more: neither a patch nor a collection, which would ask for the extents of every curve.
        patch = PathPatch(Path.make_compound_path(*outlines), facecolor=colour, edgecolor=colour, linewidth=linewidth, joinstyle="round")
        self.ax.add_artist(patch)


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
