"""Pictures of weights on a grid, of how GPTQ and AWQ choose, and of what fewer bits cost and give.

Why: rounding is seen on a number line; that one column's error is taken up by the columns that are left, in a row of maps; that a few
inputs are loud, in bars. The last picture is the bargain: what the model loses for the bits of a weight, and the speed by batch size.

Invariant: pure functions of numbers, without a number of their own.

Taught in notebook 09.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from minserve.lab.style import (
    GREY,
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

Points = Sequence[tuple[float, float]]
MEASURED = "measured"


# --- rounding -------------------------------------------------------------------------------------


def number_lines(panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str) -> Figure:
    """Numbers above, the points of a grid below, and from each number a line to its nearest point. panels: name -> (numbers, points)"""
    figure = new_figure(0.75 + 0.8 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, (numbers, points)) in zip(axes, panels.items(), strict=True):
        grid = np.asarray(points, dtype=float)
        dress(ax, title if ax is axes[0] else "")
        for number in numbers:
            nearest = float(grid[np.abs(grid - number).argmin()])
            ax.plot([number, nearest], [0.62, 0.12], color=pale(PALETTE[3], 0.7), linewidth=1)
        ax.plot(numbers, [0.62] * len(numbers), linestyle="none", marker="o", markersize=4.5, color=PALETTE[0])
        ax.plot(grid, [0.0] * len(grid), linestyle="none", marker="|", markersize=11, markeredgewidth=1.3, color=INK)
        ax.axhline(0, color=GREY, linewidth=0.8, zorder=0.5)
        ax.text(0.0, 0.97, name, transform=ax.transAxes, fontsize=SMALL_PT, va="top", color=INK, path_effects=HALO)
        ax.set_ylim(-0.3, 1.35)
        ax.yaxis.set_visible(False)
        ax.spines["left"].set_visible(False)
    axes[-1].set_xlabel("weight; the marks below are the points of the grid", fontsize=8, color=INK)
    fix_margins(figure, left_in=0.15, right_in=0.15, top_in=0.3, bottom_in=0.45)
    return figure


class Frame(NamedTuple):
    """A moment of GPTQ: how far each weight is from where it began, and how many columns, in the order of rounding, are done."""

    shifts: np.ndarray  # [O, I]
    num_rounded: int


def columns(frames: Mapping[str, Frame], title: str, unit: str) -> Figure:
    """The shifts of a matrix, moment by moment, all in one scale of colour. Left of the line stand the rounded columns."""
    figure = new_figure(2.5)
    figure.suptitle(title, x=0.012, ha="left", fontsize=TITLE_PT, color=INK)
    axes = figure.subplots(1, len(frames), sharey=True, squeeze=False)[0]
    most = max(float(np.abs(frame.shifts).max()) for frame in frames.values()) or 1.0
    image = None
    for ax, (name, frame) in zip(axes, frames.items(), strict=True):
        image = ax.imshow(frame.shifts, cmap="PuOr", norm=TwoSlopeNorm(0.0, -most, most), aspect="auto", interpolation="nearest")
        dress(ax, name, "input, in order of rounding" if ax is axes[0] else "input", "output" if ax is axes[0] else "")
        ax.title.set_fontsize(SMALL_PT)
        ax.axvline(frame.num_rounded - 0.5, color=INK, linewidth=1.8)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
    assert image is not None, "no moment to draw"
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.04)
    bar.set_label(unit, fontsize=SMALL_PT, color=INK)
    bar.ax.tick_params(labelsize=SMALL_PT, colors=INK)
    return figure


# --- loud inputs ----------------------------------------------------------------------------------


def loud_inputs(magnitudes: Sequence[float], loud: Sequence[int], errors: Mapping[str, float], error_label: str, title: str) -> Figure:
    """Left: how large each input is, the loud ones marked. Right: bars of what is left of the error, by what was done."""
    figure = new_figure(2.9)
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=TITLE_PT, color=INK)
    left, right = figure.subplots(1, 2)
    dress(left, "Mean size of each input", f"input of the layer ({len(magnitudes)})", "mean |x|")
    marked = set(loud)
    colours = [PALETTE[3] if i in marked else pale(PALETTE[0], 0.7) for i in range(len(magnitudes))]
    wide = max(1.0, len(magnitudes) / 220)  # a bar of less than a dot would be lost
    add_boxes(left, [(i - wide / 2, 0.0, wide, size) for i, size in enumerate(magnitudes)], colours)
    left.set_xlim(-2, len(magnitudes) + 1)
    left.set_ylim(0, 1.18 * max(magnitudes))
    left.text(
        0.99, 0.98, f"the loudest {len(marked)}", transform=left.transAxes, fontsize=SMALL_PT, color=deep(PALETTE[3]), ha="right", va="top"
    )
    draw_bars(right, errors, "What is left of the error", error_label)
    fix_margins(figure, left_in=0.55, right_in=0.15, top_in=0.55, bottom_in=0.5)
    figure.subplots_adjust(wspace=0.55)  # with room for the names of the bars
    return figure


def draw_bars(ax: Axes, values: Mapping[str, float], title: str, x_label: str, chosen: str | None = None) -> None:
    """A bar a name from zero, with its number; the chosen one in the full colour, or all."""
    dress(ax, title, x_label)
    colours = [PALETTE[0] if chosen in (None, name) else pale(PALETTE[0]) for name in values]
    add_boxes(ax, [(0.0, row - 0.36, value, 0.72) for row, value in enumerate(values.values())], colours)
    top = max(values.values()) or 1.0
    for row, value in enumerate(values.values()):
        ax.text(value + 0.02 * top, row, number_text(value), fontsize=SMALL_PT, va="center", color=INK, path_effects=HALO)
    ax.set_yticks(range(len(values)), list(values))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.set_xlim(0, 1.25 * top)
    ax.xaxis.set_major_formatter(FuncFormatter(tick_text))


# --- the bargain ----------------------------------------------------------------------------------


class Loss(NamedTuple):
    """What a format takes and costs: bits of a weight, scales counted, and a loss with its interval."""

    bits: float
    loss: float
    low: float
    high: float


def bargain(losses: Mapping[str, Sequence[Loss]], loss_label: str, lines: Mapping[str, Points], x_label: str, title: str) -> Figure:
    """Left: what the model loses for the bits of a weight, a line a method. Right: speed by batch size, in units of that in bf16."""
    figure = new_figure(3.3)
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=TITLE_PT, color=INK)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, losses, loss_label)
    draw_speeds(right, lines, x_label)
    fix_margins(figure, left_in=0.62, right_in=0.15, top_in=0.55, bottom_in=0.5)
    figure.subplots_adjust(wspace=0.24)
    return figure


def _draw_losses(ax: Axes, losses: Mapping[str, Sequence[Loss]], loss_label: str) -> None:
    """Lines with whiskers, both axes logarithmic; each named beside its last point."""
    dress(ax, "What it costs", "bits of a weight, with scales and zeros", loss_label)
    shown = [point for points in losses.values() for point in points]
    floor = min(point.loss for point in shown if point.loss > 0) / 3
    for index, points in enumerate(losses.values()):
        colour = PALETTE[index % len(PALETTE)]
        bits, values = [p.bits for p in points], [max(floor, p.loss) for p in points]
        ax.plot(bits, values, color=colour, linestyle=LINES[index % len(LINES)], marker=MARKERS[index % len(MARKERS)], markersize=4.5)
        for point in points:
            ax.plot([point.bits] * 2, [max(floor, point.low), max(floor, point.high)], color=colour, linewidth=1.6)
    ax.set(xscale="log", yscale="log")
    ax.set_xlim(0.86 * min(p.bits for p in shown), 1.22 * max(p.bits for p in shown))
    ax.set_ylim(floor / 1.5, 2.5 * max(p.high for p in shown))
    ax.set_xticks([4, 5, 6, 8], ["4", "5", "6", "8"])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(tick_text))
    _name(ax, {name: (points[-1].bits, max(floor, points[-1].loss)) for name, points in losses.items()}, across=0.025, up=0.0)


def speeds(lines: Mapping[str, Points], x_label: str, title: str) -> Figure:
    """Speed by batch size, in units of that in bf16: a line a model and format."""
    figure = new_figure(3.0)
    draw_speeds(figure.subplots(), lines, x_label, title)
    fix_margins(figure, left_in=0.5, right_in=0.15, top_in=0.35, bottom_in=0.5)
    return figure


def draw_speeds(
    ax: Axes, lines: Mapping[str, Points], x_label: str, title: str = "What it gives", top: float | None = None, mark: float | None = None
) -> None:
    """Lines over the batch on a logarithmic axis, each named where no other is near, and bf16 as the line at 1.

    What is called measured is dots without a line. `mark` is a batch with a line upright.
    """
    dress(ax, title, x_label, "speed, times bf16")
    for index, (name, points) in enumerate(lines.items()):
        colour, line = PALETTE[index % len(PALETTE)], "none" if name == MEASURED else LINES[index % len(LINES)]
        ax.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker=MARKERS[index % len(MARKERS)], markersize=4)
    batches = sorted({x for points in lines.values() for x, _ in points})
    ax.set_xscale("log")
    ax.set_xlim(batches[0] / 1.15, batches[-1] * 1.15)
    shown = [2**i for i in range(0, 12, 2) if batches[0] <= 2**i <= batches[-1]] or batches
    ax.set_xticks(shown, [tick_text(batch) for batch in shown])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.axhline(1, color=INK, linewidth=1, linestyle=":")
    ax.text(0.02, 0.97, "bf16", transform=ax.get_yaxis_transform(), fontsize=SMALL_PT, color=INK, va="top")
    if mark is not None:
        ax.axvline(mark, color=INK, linewidth=1, linestyle=":", zorder=0.5)
    ax.set_ylim(0, top or 1.2 * max(1.0, *(y for points in lines.values() for _, y in points)))
    ax.yaxis.set_major_formatter(FuncFormatter(tick_text))
    _name(ax, {name: _free_point(ax, name, lines) for name in lines}, across=0.0, up=0.045)


def _free_point(ax: Axes, name: str, lines: Mapping[str, Points]) -> tuple[float, float]:
    """The point of a line that is farthest from all other lines, of those above which its name has room. The limits must be set."""
    others = [points for other, points in lines.items() if other != name]
    dots = [_on_axes(ax, point) for points in others for point in points]

    def has_room(point: tuple[float, float]) -> bool:
        left, bottom = _on_axes(ax, point)
        right, top = left + 0.02 * len(name), bottom + 0.09
        return right < 1 and not any(left < x < right and bottom < y < top for x, y in dots)

    def distance(point: tuple[float, float]) -> float:
        heights = (np.interp(point[0], *zip(*points, strict=True), left=np.inf, right=np.inf) for points in others)
        return min((abs(float(height) - point[1]) for height in heights), default=0.0)

    return max(list(filter(has_room, lines[name])) or lines[name][:1], key=distance)


def _on_axes(ax: Axes, point: tuple[float, float]) -> tuple[float, float]:
    across, up = ax.transLimits.transform(ax.transScale.transform(point))
    return float(across), float(up)


def _name(ax: Axes, places: Mapping[str, tuple[float, float]], across: float, up: float) -> None:
    """A name beside each point, so far to the right and above, moved apart where they would lie on each other. The limits must be set."""
    on_axes = [_on_axes(ax, place) for place in places.values()]
    ups = spread([height + up for _, height in on_axes], gap=0.07)
    for index, (name, height) in enumerate(zip(places, ups, strict=True)):
        colour, left = deep(PALETTE[index % len(PALETTE)]), on_axes[index][0] + across
        ax.text(left, height, name, transform=ax.transAxes, fontsize=SMALL_PT, color=colour, va="center", path_effects=HALO)
