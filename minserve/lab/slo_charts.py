"""Pictures of service under load: latency by load with the limits as lines, what seeds do to it, and scorecards of policies.

Why: near the load that a server can just carry, waiting times differ by factors of ten from one seed to the next. A single line would
claim a precision that is not there. So every line here is the median of several runs, in a band from the least to the greatest.

Invariant: pure functions of numbers, without a number of their own; seconds come in and are shown as s or ms.

Taught in notebook 10.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from minserve.lab.style import (
    HALO,
    INK,
    LINES,
    MARKERS,
    PALETTE,
    SMALL_PT,
    TITLE_PT,
    add_boxes,
    deep,
    dress,
    fix_margins,
    new_figure,
    number_text,
    pale,
    spread,
    tick_text,
)

DOTS = (0, (1, 1.5))
GAP = 0.07  # between two names, as a share of the axes' height


class Spot(NamedTuple):
    """One setting, run with several seeds: where it stands on the x axis, and what came out, one value a seed."""

    x: float
    values: Sequence[float]


Lines = Mapping[str, Sequence[Spot]]


class Panel(NamedTuple):
    """What one pair of axes shows: a line a name, and limits across with their words. In seconds; shown in `unit`."""

    title: str
    lines: Lines
    limits: Mapping[str, float] = {}
    unit: str = "ms"


UNITS = {"s": 1.0, "ms": 1e3}


# --- lines with bands -----------------------------------------------------------------------------


def load_curves(panels: Sequence[Panel], x_label: str, title: str, *, mark_x: Mapping[str, float] | None = None) -> Figure:
    """Latency by load, side by side, on logarithmic axes: a line through the medians of the seeds, in a band from least to greatest.

    `limits` are dotted lines across, `mark_x` short marks at the foot (words -> x), in the colour of the line of that name. Raises
    ValueError for a line without spots or a value that is not above zero, which a logarithm cannot show.
    """
    for panel in panels:
        _refuse_unless_positive(panel)
    figure = new_figure(3.3)
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=TITLE_PT, color=INK)
    for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        dress(ax, panel.title, x_label)
        _draw_lines(ax, panel, mark_x or {})
    fix_margins(figure, left_in=0.5, right_in=0.62, top_in=0.55, bottom_in=0.48)
    figure.subplots_adjust(wspace=0.42)
    return figure


def _refuse_unless_positive(panel: Panel) -> None:
    for name, spots in panel.lines.items():
        if not spots or any(not spot.values or min(spot.values) <= 0 for spot in spots):
            raise ValueError(f"{panel.title}: the line {name!r} needs spots with values above 0, got {list(spots)}")


def _draw_lines(ax: Axes, panel: Panel, mark_x: Mapping[str, float]) -> None:
    scale = UNITS[panel.unit]
    for index, (name, spots) in enumerate(panel.lines.items()):
        colour = PALETTE[index % len(PALETTE)]
        xs, middles = [spot.x for spot in spots], [scale * median(spot.values) for spot in spots]
        lows, highs = [scale * min(spot.values) for spot in spots], [scale * max(spot.values) for spot in spots]
        ax.fill_between(xs, lows, highs, color=pale(colour, 0.35), linewidth=0, zorder=0.6)
        ax.plot(xs, middles, color=colour, linestyle=LINES[index % len(LINES)], marker=MARKERS[index % len(MARKERS)], markersize=4)
        if name in mark_x:
            ax.axvline(mark_x[name], ymax=0.06, color=colour, linewidth=2.5)
    _scale(ax, panel, scale)
    least = min(y for spots in panel.lines.values() for spot in spots for y in spot.values)
    for words, limit_s in panel.limits.items():
        _draw_limit(ax, scale * limit_s, words, is_below=limit_s < least)
    _name_ends(ax, {name: (spots[-1].x, scale * median(spots[-1].values)) for name, spots in panel.lines.items()})


def _draw_limit(ax: Axes, y: float, words: str, is_below: bool) -> None:
    """A dotted line with its words above it, or under it where it lies below all that is drawn."""
    ax.axhline(y, color=INK, linewidth=1, linestyle=DOTS)
    how = {"textcoords": "offset points", "fontsize": SMALL_PT, "color": INK, "path_effects": HALO}
    offset, va = ((4, -3), "top") if is_below else ((4, 2), "bottom")
    ax.annotate(words, (0, y), offset, xycoords=ax.get_yaxis_transform(), va=va, **how)


def _scale(ax: Axes, panel: Panel, scale: float) -> None:
    ys = [scale * y for spots in panel.lines.values() for spot in spots for y in spot.values]
    ys += [scale * limit_s for limit_s in panel.limits.values()]
    ax.set_yscale("log")
    ax.set_ylim(min(ys) / 1.6, 1.6 * max(ys))
    ax.set_xlim(left=0)
    ax.set_ylabel(panel.unit, fontsize=SMALL_PT, color=INK)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(ys) < 300 * min(ys) else (1,), numticks=12))
    ax.yaxis.set_minor_locator(NullLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(tick_text))


def _name_ends(ax: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Each name at the right of its line's end, moved apart where two would lie on each other. The limits must be set."""
    places = [ax.transLimits.transform(ax.transScale.transform(end)) for end in ends.values()]
    ups = spread([float(up) for _, up in places], GAP)
    for index, (name, (across, _), up) in enumerate(zip(ends, places, ups, strict=True)):
        ax.text(
            float(across) + 0.025,
            up,
            name,
            transform=ax.transAxes,
            fontsize=SMALL_PT,
            color=deep(PALETTE[index % len(PALETTE)]),
            va="center",
            path_effects=HALO,
        )


# --- what happened in time ------------------------------------------------------------------------


def queue_lengths(lines: Mapping[str, Sequence[tuple[float, float]]], title: str, *, y_label: str = "waiting requests") -> Figure:
    """How many wait, over time, a line a policy; each is named above its peak. Raises ValueError for a line without points."""
    empty = [name for name, points in lines.items() if not points]
    if not lines or empty:
        raise ValueError(f"no points to draw in {', '.join(empty) or 'no lines'}")
    figure = new_figure(2.7)
    ax = figure.subplots()
    dress(ax, title, "seconds", y_label)
    for index, points in enumerate(lines.values()):
        ax.plot(*zip(*points, strict=True), color=PALETTE[index % len(PALETTE)], linestyle=LINES[index % len(LINES)], linewidth=1.4)
    ax.set_xlim(0, max(x for points in lines.values() for x, _ in points))
    ax.set_ylim(0, 1.2 * max(y for points in lines.values() for _, y in points) or 1.0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(tick_text))
    fix_margins(figure, left_in=0.5, right_in=0.3, top_in=0.35, bottom_in=0.48)
    _name_ends(ax, {name: max(points, key=lambda point: point[1]) for name, points in lines.items()})
    return figure


# --- scorecards -----------------------------------------------------------------------------------


def scorecard_bars(scores: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Policies by several measures: scores[policy][measure]. A column a measure, with its own axis from zero; a row a policy.

    A column whose name ends in "(less is better)" is drawn in another hue. Raises ValueError for negative or missing scores.
    """
    measures = list(dict.fromkeys(name for row in scores.values() for name in row))
    missing = [f"{policy}: {name}" for policy, row in scores.items() for name in measures if not row.get(name, -1.0) >= 0]
    if not measures or missing:
        raise ValueError(f"bars begin at zero and need every score; missing or negative: {', '.join(missing) or 'all'}")
    figure = new_figure(1.05 + 0.24 * len(scores))
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=TITLE_PT, color=INK)
    axes = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for ax, name in zip(axes, measures, strict=True):
        words = name.removesuffix(" (less is better)")
        _draw_bars(ax, [row[name] for row in scores.values()], words, PALETTE[0] if words == name else PALETTE[1])
    axes[0].set_yticks(range(len(scores)), list(scores))
    fix_margins(figure, left_in=0.15 + 0.062 * max(map(len, scores)), right_in=0.1, top_in=0.55, bottom_in=0.12)
    figure.subplots_adjust(wspace=0.16)
    return figure


def _draw_bars(ax: Axes, values: Sequence[float], title: str, colour: str) -> None:
    dress(ax, title)
    ax.title.set_fontsize(SMALL_PT)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_visible(False)
    ax.spines["bottom"].set_visible(False)
    top = max(values) or 1.0
    add_boxes(ax, [(0.0, row - 0.36, value, 0.72) for row, value in enumerate(values)], pale(colour, 0.8))
    for row, value in enumerate(values):
        ax.text(value + 0.03 * top, row, number_text(value), fontsize=SMALL_PT, va="center", color=INK)
    ax.set_xlim(0, 1.5 * top)
    ax.set_ylim(len(values) - 0.5, -0.5)
