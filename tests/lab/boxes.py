"""Read back what `style.add_boxes` drew."""

from typing import NamedTuple, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex


class Box(NamedTuple):
    left: float
    bottom: float
    width: float
    height: float
    colour: str
    hatch: str | None


def boxes(ax: Axes) -> list[Box]:
    """Every rectangle of the axes, in the order in which they lie on each other."""
    found = []
    for collection in (c for c in ax.collections if isinstance(c, PathCollection)):
        colours = cast(np.ndarray, collection.get_facecolor())
        for path, colour in zip(collection.get_paths(), colours, strict=True):
            for corners in cast(np.ndarray, path.vertices).reshape(-1, 5, 2):
                (left, bottom), (width, height) = corners[0].round(6).tolist(), (corners[2] - corners[0]).round(6).tolist()
                found.append(Box(left, bottom, width, height, to_hex(tuple(colour)), collection.get_hatch()))
    return found


def words(ax: Axes) -> list[str]:
    """All that is written inside the axes, ticks left out."""
    return [text.get_text() for text in ax.texts]
