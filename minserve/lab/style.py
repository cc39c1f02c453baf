"""How every picture of the course looks: size, colours, labels, and the way to bytes.

Why: a reader who has learned one picture should read the next at once. So there is one width, one palette that colour-blind readers can
tell apart, one place for titles (which state the finding) and labels beside what they name instead of a legend, where there is room.
Hue is never alone: lightness, hatching or the kind of line says the same in grey print.

Invariant: figures are made without pyplot, since a widget's callback may draw on another thread while a cell draws too; and every
figure has a white ground, also in a dark notebook.

Taught in notebook 00.
"""

import io
import pathlib
import textwrap
from collections.abc import Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from PIL import Image

# Okabe and Ito's palette, in an order that keeps neighbours apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8A6D00", "#5B5EA6")
GREY = "#C8C8C8"
INK = "#333333"
LINES = ("-", "--", "-.", ":")  # with the palette: a line is known by its dashes too
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HALO = (withStroke(linewidth=2.5, foreground="white"),)  # around words that lie on something drawn
TITLE_PT, LABEL_PT, SMALL_PT = 9, 8, 7

Box = tuple[float, float, float, float]  # left, bottom, width, height


def new_figure(height_in: float = 3.0, width_in: float = 7.0) -> Figure:
    """An empty figure of the house: white ground (dark themes too), constrained layout, 110 dots an inch."""
    return Figure(figsize=(width_in, height_in), dpi=110, facecolor="white", layout="constrained")


def new_panel(title: str, x_label: str, y_label: str, height_in: float = 3.0) -> tuple[Figure, Axes]:
    """A figure with one dressed pair of axes."""
    figure = new_figure(height_in)
    ax = figure.subplots()
    dress(ax, title, x_label, y_label)
    return figure, ax


def fix_margins(figure: Figure, left_in: float, right_in: float, top_in: float, bottom_in: float) -> None:
    """Margins that depend on nothing drawn: half the time of the constrained layout, and from one step to the next nothing moves."""
    width_in, height_in = figure.get_size_inches()
    figure.set_layout_engine(None)
    right, top = 1 - right_in / width_in, 1 - top_in / height_in
    figure.subplots_adjust(left=left_in / width_in, right=right, top=top, bottom=bottom_in / height_in, hspace=0.1)


def dress(ax: Axes, title: str = "", x_label: str = "", y_label: str = "") -> None:
    """Small labels, a title at the left that may take two lines, no frame at the top and the right."""
    ax.set_title(textwrap.fill(title, 100), fontsize=TITLE_PT, loc="left", color=INK)
    ax.set_xlabel(x_label, fontsize=LABEL_PT, color=INK)
    ax.set_ylabel(y_label, fontsize=LABEL_PT, color=INK)
    ax.tick_params(labelsize=SMALL_PT, colors=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)


def request_colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def pale(colour: str, strength: float = 0.45) -> str:
    """The colour mixed with white: 1 leaves it as it is, 0 is white.

    >>> pale("#0072B2", 0.5)
    '#80b8d8'
    """
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def deep(colour: str, strength: float = 0.65) -> str:
    """The colour mixed with black, for words: yellow on white is hard to read."""
    red, green, blue = (strength * part for part in to_rgb(colour))
    return to_hex((red, green, blue))


def add_boxes(ax: Axes, boxes: Sequence[Box], colours: str | Sequence[str], hatch: str | None = None, edge: str = "none") -> None:
    """Draw many rectangles as one path a colour: thousands of them cost little more than ten."""
    if not boxes:
        return
    left, bottom, width, height = np.array(boxes, dtype=float).T
    xs = np.stack([left, left + width, left + width, left, left], axis=1)
    ys = np.stack([bottom, bottom, bottom + height, bottom + height, bottom], axis=1)
    corners = np.stack([xs, ys], axis=2)  # [box, corner, (x, y)]
    codes = np.array([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], dtype=Path.code_type)
    of_box = np.array([colours] * len(boxes) if isinstance(colours, str) else colours)
    distinct = list(dict.fromkeys(of_box.tolist()))
    chosen = [corners[of_box == colour] for colour in distinct]
    paths = [Path(some.reshape(-1, 2), np.tile(codes, len(some))) for some in chosen]
    ax.add_collection(PathCollection(paths, facecolors=distinct, edgecolors=edge, linewidths=0, hatch=hatch, snap=True))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places apart until neighbours keep `gap`, each crowd around its own middle; the order stays.

    >>> spread([1.0, 1.0, 5.0], 2.0)
    [0.0, 2.0, 5.0]
    """

    def middle(crowd: Sequence[int]) -> float:
        return sum(places[index] for index in crowd) / len(crowd)

    crowds: list[list[int]] = []  # from low to high; each takes len(crowd) * gap of room around its middle
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        crowds.append([index])
        while len(crowds) > 1 and middle(crowds[-1]) - middle(crowds[-2]) < gap * (len(crowds[-1]) + len(crowds[-2])) / 2:
            last = crowds.pop()
            crowds[-1].extend(last)
    moved = {index: middle(crowd) + gap * (rank - (len(crowd) - 1) / 2) for crowd in crowds for rank, index in enumerate(crowd)}
    return [moved[index] for index in range(len(places))]


def number_text(value: float) -> str:
    """Three digits for measured numbers, all of them for counts.

    >>> number_text(46080), number_text(3.2573), number_text(1928.4)
    ('46,080', '3.26', '1,928')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def tick_text(value: float, _place: object = None) -> str:
    """The number beside a tick: all digits up to a million.

    >>> tick_text(16384.0), tick_text(0.05), tick_text(2.5e6), tick_text(3e9)
    ('16,384', '0.05', '2.5M', '3G')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:,.6g}{letter}"
    return f"{value:,.6g}"


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG. Laid out once, where `savefig` would do it twice: a slider's hand waits for this."""
    buffer = io.BytesIO()
    cast(FigureCanvasAgg, FigureCanvasAgg(figure)).print_png(buffer)
    return buffer.getvalue()


def small_png_bytes(figure: Figure) -> bytes:
    """The figure as PNG of at most 256 colours, for pictures that a file keeps. Takes half as long again."""
    return shrink_png(png_bytes(figure))


def shrink_png(png: bytes) -> bytes:
    """The same picture in at most 256 colours: a third of the bytes."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        colours = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        colours.save(buffer, "png", optimize=True)
    return buffer.getvalue()


def save(figure: Figure, path: str | pathlib.Path) -> pathlib.Path:
    """Write the figure as PNG or SVG, by the ending of the path; makes the folder."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
