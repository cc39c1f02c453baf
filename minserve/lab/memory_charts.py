"""Pictures of memory under pressure: what fill buys, which move cures and which makes worse, the pool over time, the price of a call.

Why: four arguments of notebook 11, one picture each. More fill is more room and, for a model whose keys and values are large, more
speed. Each trouble has its own cure, and the opposite move makes it worse. Seen from outside, a full pool looks like an empty one. And
what allocation costs is calls times price.

Invariant: pure functions of numbers and records; nothing here measures anything.

Taught in notebook 11.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from minserve.core.pressure import Pressure
from minserve.lab.style import (
    GREY,
    HALO,
    INK,
    LINES,
    MARKERS,
    PALETTE,
    SMALL_PT,
    add_boxes,
    deep,
    dress,
    fix_margins,
    new_figure,
    new_panel,
    number_text,
    pale,
    spread,
    tick_text,
)

DOTS = (0, (1, 1.5))


# --- what fill buys -------------------------------------------------------------------------------


class Filled(NamedTuple):
    """What one fill of a card bought."""

    fill: float  # share of the card's memory
    kv_tokens: int
    tokens_per_s: float


def fills(models: Mapping[str, Sequence[Filled]], defaults: Mapping[str, float], title: str) -> Figure:
    """Room for keys and values, and the rate, each as a share of its value at the last fill; `defaults` are fills with names, upright.

    Raises ValueError for a model without points.
    """
    if not models or not all(models.values()):
        raise ValueError("no fills to draw")
    figure = new_figure(3.2)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", color=INK)
    left, right = figure.subplots(1, 2)
    for ax, name, of in ((left, "room for KV", 1), (right, "output tokens/s", 2)):
        dress(ax, f"{name}, % of that at the highest fill", "fill, % of the card's memory", "")
        for index, (model, points) in enumerate(models.items()):
            ys = [100 * point[of] / points[-1][of] for point in points]
            colour, line, marker = PALETTE[index], LINES[index], MARKERS[index]
            ax.plot([100 * point.fill for point in points], ys, color=colour, linestyle=line, marker=marker, markersize=4)
            # The lines meet at 100 at the right, and are named where they are apart: the first below its beginning, the others above.
            how = {"fontsize": SMALL_PT, "color": deep(colour), "va": "bottom" if index else "top", "path_effects": HALO}
            ax.annotate(model, (100 * points[0].fill, ys[0]), (5, 6 if index else -5), textcoords="offset points", **how)
        ax.set_ylim(0, 119)
        for fill in defaults.values():
            ax.axvline(100 * fill, color=INK, linewidth=0.8, linestyle=DOTS, zorder=0)
    _name_defaults(right, defaults)
    return figure


def _name_defaults(ax: Axes, defaults: Mapping[str, float]) -> None:
    """Names of upright lines, one below the other at the foot."""
    for row, (name, fill) in enumerate(defaults.items()):
        ax.text(100 * fill - 0.5, 3 + 8 * row, name, fontsize=SMALL_PT, ha="right", color=INK, path_effects=HALO)


# --- moves ----------------------------------------------------------------------------------------


class Role(StrEnum):
    """What a move does to a trouble."""

    WORSE = "makes it worse"
    TROUBLE = "the trouble"
    CURE = "cures it"


COLOURS = {Role.WORSE: PALETTE[3], Role.TROUBLE: PALETTE[1], Role.CURE: PALETTE[2]}


class Move(NamedTuple):
    """One setting of a knob, and how bad the trouble was with it."""

    words: str
    value: float
    role: Role


def moves(panels: Mapping[str, tuple[str, Sequence[Move]]], title: str) -> Figure:
    """A panel a trouble, (unit, moves): a bar a move, from zero, coloured by what the move does. Raises ValueError for none."""
    if not panels or not all(rows for _, rows in panels.values()):
        raise ValueError("no moves to draw")
    num_rows = -(-len(panels) // 2)
    most = max(len(rows) for _, rows in panels.values())
    figure = new_figure(0.55 + num_rows * (0.65 + 0.22 * most))
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", color=INK)
    grid = figure.subplots(num_rows, min(2, len(panels)), squeeze=False).ravel()
    for ax, (name, (unit, rows)) in zip(grid, panels.items(), strict=False):
        _draw_moves(ax, name, unit, rows)
    for ax in grid[len(panels) :]:
        ax.set_visible(False)
    handles = [Patch(color=pale(COLOURS[role], 0.6), label=role.value) for role in Role]
    figure.legend(handles=handles, fontsize=SMALL_PT, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_moves(ax: Axes, name: str, unit: str, rows: Sequence[Move]) -> None:
    dress(ax, name, unit, "")
    add_boxes(ax, [(0.0, row - 0.38, move.value, 0.76) for row, move in enumerate(rows)], [pale(COLOURS[move.role], 0.6) for move in rows])
    top = max(move.value for move in rows) or 1.0
    for row, move in enumerate(rows):
        ax.text(move.value + 0.015 * top, row, number_text(round(move.value, 2)), fontsize=SMALL_PT, va="center", color=INK)
    ax.set_yticks(range(len(rows)), [move.words for move in rows])
    for label, move in zip(ax.get_yticklabels(), rows, strict=True):  # a bar of nothing has no colour of its own
        label.set_color(deep(COLOURS[move.role]))
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 1.18 * top), ylim=(len(rows) - 0.5, -0.5))
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(tick_text))


# --- the pool over time ---------------------------------------------------------------------------


def pressures(seen: Sequence[Pressure], held: Sequence[float], preempted: Sequence[int], title: str, held_label: str) -> Figure:
    """Step by step: who holds the pool's blocks, the memory that the process holds (share of its most), and who runs and waits.

    `preempted` are the steps in which somebody was thrown out. Raises ValueError unless there is one number held for each pressure.
    """
    if not seen or len(seen) != len(held):
        raise ValueError(f"one number held for each of at least one pressure, got {len(held)} for {len(seen)}")
    figure = new_figure(3.9)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    fix_margins(figure, left_in=0.5, right_in=1.35, top_in=0.3, bottom_in=0.45)
    steps = range(len(seen))
    dress(top, title, "", "% of the pool")
    layers = [[100 * p.used_share for p in seen], [100 * p.num_idle_blocks / p.num_blocks for p in seen]]
    layers.append([100 - used - idle for used, idle in zip(*layers, strict=True)])
    top.stackplot(steps, layers, colors=[pale(PALETTE[0], 0.6), pale(PALETTE[4], 0.5), pale(GREY, 0.5)], step="mid")
    most = max(held)
    top.plot(steps, [100 * value / most for value in held], color=INK, linewidth=1.5)
    _name_right(top, {held_label: (98, INK), "free blocks": (78, INK), "blocks in use": (30, deep(PALETTE[0]))})
    for step in preempted:
        top.axvline(step, color=PALETTE[3], linewidth=1, linestyle=LINES[1])
    if preempted:
        words = f"{len(preempted)} preemptions" if len(preempted) > 1 else "a preemption"
        _name_right(top, {words: (54, deep(PALETTE[3]))})
    top.set(ylim=(0, 103), xlim=(-0.5, len(seen) - 0.5))
    dress(bottom, "", "step", "requests")
    for index, (name, values) in enumerate(
        {"running": [p.num_running for p in seen], "waiting": [p.num_waiting for p in seen]}.items(),
    ):
        bottom.plot(steps, values, color=PALETTE[index], linestyle=LINES[index], drawstyle="steps-mid")
        _name_right(bottom, {name: (80 - 45 * index, deep(PALETTE[index]))})
    bottom.set_ylim(bottom=0)
    bottom.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return figure


def _name_right(ax: Axes, names: Mapping[str, tuple[float, str]]) -> None:
    """Words to the right of the axes, at so many per cent of their height."""
    for words, (up, colour) in names.items():
        ax.text(1.012, up / 100, words, transform=ax.transAxes, fontsize=SMALL_PT, color=colour, va="center")


# --- the price of a call --------------------------------------------------------------------------


def call_prices(rates: Sequence[float], costs_us: Mapping[str, float], band: tuple[float, float], title: str) -> Figure:
    """What share of the time allocation takes, by the price of a call: a line for each rate (calls a second), both axes logarithmic.

    `band` is the share that is claimed; `costs_us` are prices with their names, upright.
    """
    figure, ax = new_panel(title, "price of a call, microseconds", "% of the time", height_in=3.2)
    low, high = 0.5 * min(0.5, *costs_us.values()), 2000.0
    ax.axhspan(100 * band[0], 100 * band[1], color=pale(PALETTE[1], 0.35), zorder=0)
    ax.text(1.2 * low, 100 * (band[0] * band[1]) ** 0.5, "said", fontsize=SMALL_PT, va="center", color=deep(PALETTE[1]))
    for index, rate in enumerate(rates):
        ends = [(price, 1e-4 * rate * price) for price in (low, high)]
        ax.plot(*zip(*ends, strict=True), color=PALETTE[0], linestyle=LINES[index % len(LINES)], linewidth=1.2)
        ax.text(high * 1.15, ends[1][1], f"{rate:,.0f} calls/s", fontsize=SMALL_PT, va="center", color=deep(PALETTE[0]))
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.003, 300))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(tick_text))
        axis.set_minor_locator(NullLocator())
    ups = spread([0.93 - 0.09 * index for index in range(len(costs_us))], gap=0.08)
    for (name, price), up in zip(costs_us.items(), ups, strict=True):
        ax.axvline(price, color=INK, linewidth=0.8, linestyle=DOTS)
        words = f" {name}: {number_text(float(price))} us"
        ax.text(price, up, words, transform=ax.get_xaxis_transform(), fontsize=SMALL_PT, color=INK, path_effects=HALO)
    return figure
