"""Pictures of keys and values, and of what fewer bits for them cost and give.

Why: that a few channels are loud is seen at once in a map of layers and channels, and what that does to a format with sixteen steps, in
the bars of one single key. The last picture is the bargain: tokens that fit against what the model loses.

Invariant: pure functions of numbers, without a number of their own.

Taught in notebook 08.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from minserve.lab.style import (
    GREY,
    HALO,
    INK,
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
    tick_text,
)


def channel_maps(maps: Mapping[str, np.ndarray], head_dim: int, title: str) -> Figure:
    """The size of every channel in every layer, a panel a map, all in one scale of colour. maps: name -> [L, K * D]"""
    figure = new_figure(3.1)
    figure.suptitle(title, x=0.012, ha="left", fontsize=TITLE_PT, color=INK)
    panels = figure.subplots(1, len(maps), sharey=True)
    values = np.concatenate([np.asarray(sizes).ravel() for sizes in maps.values()])
    norm = LogNorm(max(values.min(), values.max() / 300), values.max())
    image = None
    for ax, (name, sizes) in zip(np.atleast_1d(panels), maps.items(), strict=True):
        image = ax.imshow(np.asarray(sizes), aspect="auto", norm=norm, cmap="viridis", interpolation="nearest")
        dress(ax, name, f"channel ({np.shape(sizes)[1] // head_dim} KV heads of {head_dim})")
        ax.set_xticks(range(0, np.shape(sizes)[1] + 1, head_dim))
        for edge in range(head_dim, np.shape(sizes)[1], head_dim):
            ax.axvline(edge - 0.5, color="white", linewidth=1)
    np.atleast_1d(panels)[0].set_ylabel("layer", fontsize=8, color=INK)
    assert image is not None, "no map to draw"
    bar = figure.colorbar(image, ax=panels, pad=0.01, fraction=0.035)
    bar.ax.tick_params(labelsize=SMALL_PT, colors=INK)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(tick_text))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    return figure


def vectors(panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str) -> Figure:
    """One key as it is and as it comes back, number by number. panels: name -> (numbers, what came back)"""
    figure = new_figure(1.0 + 1.25 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, (numbers, back)) in zip(axes, panels.items(), strict=True):
        add_boxes(ax, [(channel - 0.42, 0.0, 0.84, number) for channel, number in enumerate(numbers)], pale(PALETTE[0], 0.5))
        ax.plot(range(len(back)), back, linestyle="none", marker="_", markersize=5, markeredgewidth=1.6, color=PALETTE[3])
        dress(ax, "" if ax is not axes[0] else title, "channel" if ax is axes[-1] else "", "size")
        top = 1.4 * max(map(abs, [*numbers, *back]))  # with room for the name
        ax.set_ylim(-top, top)
        ax.axhline(0, color=INK, linewidth=0.6)
        ax.set_xlim(-1, len(numbers))
        ax.text(0.995, 0.97, name, transform=ax.transAxes, fontsize=SMALL_PT, ha="right", va="top", color=INK, path_effects=HALO)
        ax.yaxis.set_major_locator(MaxNLocator(4))
    fix_margins(figure, left_in=0.55, right_in=0.15, top_in=0.3, bottom_in=0.45)
    return figure


class Bargain(NamedTuple):
    """A format: how many times the tokens of bf16 it holds in the same bytes, and what the model loses, with the interval."""

    capacity: float
    loss: float
    low: float
    high: float


def bargains(formats: Mapping[str, Bargain], gains: Mapping[str, Mapping[str, float]], loss_label: str, bound: float, title: str) -> Figure:
    """Left: what a format loses against what it holds, and a bound for the loss. Right: the throughput that comes of it.

    gains: model -> format -> throughput, in units of that with bf16
    """
    figure = new_figure(3.2)
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=TITLE_PT, color=INK)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1.0])
    _draw_losses(left, formats, loss_label, bound)
    _draw_gains(right, gains)
    fix_margins(figure, left_in=0.72, right_in=0.12, top_in=0.55, bottom_in=0.5)
    figure.subplots_adjust(wspace=0.32)
    return figure


def _draw_losses(ax: Axes, formats: Mapping[str, Bargain], loss_label: str, bound: float) -> None:
    """A dot a format on a logarithmic axis; what is nothing, or less, lies at its foot."""
    dress(ax, "What it costs", "tokens in the same bytes, times bf16", loss_label)
    floor = min(bound, *(made.loss for made in formats.values() if made.loss > 0)) / 3
    middle = (1 + max(made.capacity for made in formats.values())) / 2
    for index, (name, made) in enumerate(formats.items()):
        colour, is_right = PALETTE[index % len(PALETTE)], made.capacity > middle
        low, loss, high = (max(floor, number) for number in (made.low, made.loss, made.high))
        ax.plot([made.capacity] * 2, [low, high], color=colour, linewidth=2)
        ax.plot([made.capacity], [loss], marker="o", markersize=5, color=colour)
        ax.annotate(
            f"{name} {number_text(made.loss)}",
            (made.capacity, loss),
            (-7 if is_right else 7, -9 if abs(math.log(loss / bound)) < 0.4 else 0),  # not on the line of the bound
            textcoords="offset points",
            fontsize=SMALL_PT,
            ha="right" if is_right else "left",
            va="center",
            color=deep(colour),
            path_effects=HALO,
        )
    ax.axhline(bound, color=INK, linewidth=1, linestyle=":")
    ax.text(0.01, bound * 1.15, number_text(bound), transform=ax.get_yaxis_transform(), fontsize=SMALL_PT, color=INK)
    ax.set_yscale("log")
    ax.set_ylim(floor / 1.5, 3 * max(bound, *(made.high for made in formats.values())))
    ax.set_xlim(0.8, 1.08 * max(made.capacity for made in formats.values()))
    ax.yaxis.set_major_formatter(FuncFormatter(tick_text))
    ax.yaxis.set_minor_locator(NullLocator())


def _draw_gains(ax: Axes, gains: Mapping[str, Mapping[str, float]]) -> None:
    """Bars in groups, a group a format, a colour a model."""
    dress(ax, "What it gives", "output tokens/s, times bf16")
    names = list(dict.fromkeys(name for by_format in gains.values() for name in by_format))
    tall = 0.8 / len(gains)
    for place, (model, by_format) in enumerate(gains.items()):
        colour = PALETTE[place % len(PALETTE)] if place % 2 == 0 else pale(PALETTE[place % len(PALETTE)], 0.6)
        rows = [names.index(name) - 0.4 + place * tall for name in by_format]
        add_boxes(ax, [(0.0, row, gain, 0.92 * tall) for row, gain in zip(rows, by_format.values(), strict=True)], colour)
        for row, gain in zip(rows, by_format.values(), strict=True):
            ax.text(gain + 0.03, row + tall / 2, f"{gain:.2f} {model}", fontsize=SMALL_PT, va="center", color=INK, path_effects=HALO)
    ax.axvline(1, color=GREY, linewidth=1, zorder=0.5)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, 1.55 * max(gain for by_format in gains.values() for gain in by_format.values()))
