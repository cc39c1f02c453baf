"""Pictures of numbers: curves, latency against throughput, bars (whole or in parts), the memory budget, the roofline.

Why: a chart is an argument. Each states its finding in the title, shows the limit as a line, names its lines where they end, and begins
its bars at zero.

Invariant: pure functions of numbers; times come in seconds and sizes in bytes, and are shown in the unit that reads best.

Taught in notebook 01.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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
    fix_margins,
    new_panel,
    number_text,
    pale,
    spread,
    tick_text,
)
from minserve.sim.devices import DeviceSpec

Points = Sequence[tuple[float, float]]  # (x, y), in the order of the line
RooflinePoint = tuple[str, float, float, float | None]  # label, FLOPs, bytes, seconds (None: not measured, drawn hollow on the roof)

DOTS = (0, (1, 1.5))


# --- curves ---------------------------------------------------------------------------------------


def curves(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    limit: tuple[float, str] | None = None,
    mark_x: tuple[float, str] | None = None,
) -> Figure:
    """Lines with their names at their ends; `limit` is a line across with its words, `mark_x` one upright.

    Without logarithms the y axis begins at zero. Raises ValueError for a line without points.
    """
    empty = [name for name, points in series.items() if not points]
    if not series or empty:
        raise ValueError(f"no points to draw in {', '.join(empty) or 'no series'}")
    figure, ax = new_panel(title, x_label, y_label)
    for index, points in enumerate(series.values()):
        colour, line, marker = PALETTE[index % len(PALETTE)], LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
        ax.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker=marker if len(points) <= 16 else "", markersize=4)
    _scale(ax, [point for points in series.values() for point in points], log_x, log_y, limit)
    _draw_limits(ax, limit, mark_x)
    _name_lines(ax, series)
    return figure


def _scale(ax: Axes, points: Points, log_x: bool, log_y: bool, limit: tuple[float, str] | None) -> None:
    ys = [y for _, y in points if math.isfinite(y)] + ([limit[0]] if limit else [])
    for axis, is_log, values in ((ax.xaxis, log_x, [x for x, _ in points]), (ax.yaxis, log_y, ys)):
        if is_log:
            (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log")
            axis.set_major_locator(_log_ticks(max(values) / min(values)))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(tick_text))
    if log_y:
        ax.set_ylim(min(ys) / 1.3, max(ys) * 1.4)
    else:
        ax.set_ylim(min(0.0, *ys), 1.12 * max(ys) or 1.0)


def _log_ticks(ratio: float) -> LogLocator:
    """Ticks at 1, 2, 5, 10 where powers of ten alone would be too few."""
    return LogLocator(subs=(1, 2, 5) if ratio < 300 else (1,), numticks=12)


def _draw_limits(ax: Axes, limit: tuple[float, str] | None, mark_x: tuple[float, str] | None) -> None:
    if limit is not None:
        ax.axhline(limit[0], color=INK, linewidth=1, linestyle=DOTS)
        _note(ax, limit[1], (0, limit[0]), (4, 2), xycoords=ax.get_yaxis_transform())
    if mark_x is not None:
        ax.axvline(mark_x[0], color=INK, linewidth=1, linestyle=DOTS)
        _note(ax, mark_x[1], (mark_x[0], 1), (3, -2), xycoords=ax.get_xaxis_transform(), va="top")


def _on_axes(ax: Axes, x: float, y: float) -> tuple[float, float]:
    """A point of the data as a share of the axes' width and height; the limits must be set."""
    across, up = ax.transLimits.transform(ax.transScale.transform((x, y)))
    return float(across), float(up)


def _name_lines(ax: Axes, series: Mapping[str, Points]) -> None:
    """Each name where its line ends, moved apart where they would lie on each other."""
    ends = [_on_axes(ax, *points[-1]) for points in series.values()]
    for index, (name, up) in enumerate(zip(series, spread([up for _, up in ends], gap=0.065), strict=True)):
        colour = deep(PALETTE[index % len(PALETTE)])
        ax.text(ends[index][0] + 0.012, up, name, transform=ax.transAxes, fontsize=SMALL_PT, color=colour, va="center", path_effects=HALO)


def latency_throughput(
    series: Mapping[str, Points],
    title: str,
    *,
    latency: str = "time per output token",
    throughput: str = "output tokens/s",
    limit_s: float | None = None,
    labels: Sequence[str] = (),
) -> Figure:
    """What more load costs: (throughput, latency in seconds) along each line.

    `labels` name the points of every line, batch sizes for example. The latency is shown in milliseconds, on a logarithmic axis if it
    spans more than a factor of 30.
    """
    in_ms = {name: [(x, 1e3 * y) for x, y in points] for name, points in series.items()}
    ys = [y for points in in_ms.values() for _, y in points]
    limit = None if limit_s is None else (1e3 * limit_s, f"limit {number_text(1e3 * limit_s)} ms")
    log_y = bool(ys) and max(ys) > 30 * min(ys) > 0
    figure = curves(in_ms, throughput, f"{latency}, ms", title, log_y=log_y, limit=limit)
    [ax] = figure.axes
    ax.set_xlim(left=0)
    for points in in_ms.values():
        for label, point in zip(labels, points, strict=False):
            _note(ax, label, point, (0, 5), ha="center")
    return figure


# --- bars -----------------------------------------------------------------------------------------


def bars(values: Mapping[str, float], x_label: str, title: str, *, limit: tuple[float, str] | None = None) -> Figure:
    """One bar a name, from zero, with its number at its end. Raises ValueError for a negative value or none at all."""
    if not values or min(values.values()) < 0:
        raise ValueError(f"bars begin at zero and need values from 0 up, got {dict(values)}")
    figure, ax = new_panel(title, x_label, "", height_in=0.95 + 0.3 * len(values))
    add_boxes(ax, [(0.0, row - 0.36, value, 0.72) for row, value in enumerate(values.values())], PALETTE[0])
    top = max(*values.values(), limit[0] if limit else 0.0) or 1.0
    for row, value in enumerate(values.values()):
        ax.text(value + 0.006 * top, row, number_text(value), fontsize=SMALL_PT, va="center", color=INK, path_effects=HALO)
    _name_rows(ax, values)
    ax.set_xlim(0, 1.1 * top)
    ax.xaxis.set_major_formatter(FuncFormatter(tick_text))
    if limit is not None:
        _draw_limits(ax, None, limit)
    return figure


def stacked_bars(rows: Mapping[str, Mapping[str, float]], x_label: str, title: str, *, empty: str | None = None) -> Figure:
    """One bar a name, from zero, cut into parts with their numbers; the words for the parts stand below, the part called `empty` is grey.

    Raises ValueError for a negative part or no bar at all.
    """
    if not rows or min(value for parts in rows.values() for value in parts.values()) < 0:
        raise ValueError(f"bars begin at zero and need parts from 0 up, got {dict(rows)}")
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    hues = dict(zip((name for name in names if name != empty), (pale(colour, 0.6) for colour in PALETTE), strict=False))
    top = max(sum(parts.values()) for parts in rows.values()) or 1.0
    figure, ax = new_panel(title, x_label, "", height_in=1.25 + 0.3 * len(rows))
    for row, parts in enumerate(rows.values()):
        for (name, value), end in zip(parts.items(), accumulate(parts.values()), strict=True):
            add_boxes(ax, [(end - value, row - 0.36, value, 0.72)], hues.get(name, GREY), edge="white")
            words = f"{value:,.0f}" if top >= 50 else number_text(value)
            if value > 0.014 * len(words) * top:  # it has room for its number
                ax.text(end - value / 2, row, words, fontsize=SMALL_PT, color=INK, ha="center", va="center")
    _name_rows(ax, rows)
    ax.set_xlim(0, 1.02 * top)
    ax.xaxis.set_major_formatter(FuncFormatter(tick_text))
    handles = [Patch(color=hues.get(name, GREY), label=name) for name in names]
    figure.legend(handles=handles, fontsize=SMALL_PT, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def _name_rows(ax: Axes, names: Iterable[str]) -> None:
    names = list(names)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(names) - 0.5, -0.5)


def vram_waterfall(parts: Mapping[str, float], total_bytes: float, title: str) -> Figure:
    """What a device's memory goes to: each part begins where the one before ends, up to the memory there is.

    What is left is shown too; what is too much is hatched, beyond the line.
    """
    left_bytes = total_bytes - sum(parts.values())
    rows = {**parts, "left": left_bytes} if left_bytes >= 0 else {**parts, "too much": left_bytes}
    figure, ax = new_panel(title, "GB", "", height_in=0.95 + 0.3 * len(rows))
    widest = max(total_bytes, total_bytes - left_bytes)
    ends = list(accumulate(rows.values()))
    for row, (name, num_bytes) in enumerate(rows.items()):
        colour = PALETTE[row % len(PALETTE)] if name in parts else GREY
        left, right = sorted((ends[row] - num_bytes, ends[row]))
        add_boxes(ax, [(left / 1e9, row - 0.36, (right - left) / 1e9, 0.72)], colour, "////" if num_bytes < 0 else None, edge="white")
        words = f"{abs(num_bytes) / 1e9:,.1f} GB, {abs(num_bytes) / total_bytes:.0%}"
        if right < 0.82 * widest:
            _note(ax, words, (right / 1e9, row), (4, 0), va="center")
        elif left > 0.18 * widest:
            _note(ax, words, (left / 1e9, row), (-4, 0), va="center", ha="right")
        else:  # no room on either side
            _note(ax, words, (left / 1e9, row), (4, 0), va="center", color="white", path_effects=())
    _name_rows(ax, rows)
    ax.set_xlim(0, 1.02 * widest / 1e9)
    ax.set_ylim(top=-1.1)  # room for the name of the line
    ax.axvline(total_bytes / 1e9, color=INK, linewidth=1)
    _note(ax, f"{total_bytes / 1e9:,.0f} GB", (total_bytes / 1e9, -1.1), (-4, -2), ha="right", va="top")
    return figure


# --- the roofline ---------------------------------------------------------------------------------


def roofline(
    device: DeviceSpec, points: Sequence[RooflinePoint], title: str, spent_s: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """FLOPs a byte against FLOPs a second, under the two roofs of a device.

    A measured point is filled and says which share of its limit it reaches; one without seconds is hollow and lies on the roof.
    `spent_s` (name -> what its time goes to) is drawn as bars below.
    """
    unit, unit_name = (1e12, "TFLOP/s") if device.flops_per_s >= 1e13 else (1e9, "GFLOP/s")
    below_in = 0.25 * len(spent_s) + 0.1 if spent_s else 0.0
    figure, ax = new_panel(title, "FLOP per byte", unit_name, height_in=3.4 + below_in)
    fix_margins(figure, left_in=0.7, right_in=0.15, top_in=0.3, bottom_in=0.5 + below_in)
    if spent_s:
        _draw_shares(figure, spent_s)
    dots, words = [], []
    for label, flops, num_bytes, seconds in points:
        intensity = flops / num_bytes
        roof = min(device.flops_per_s, device.bytes_per_s * intensity)
        reached = roof if seconds is None else flops / seconds
        dots.append((intensity, reached / unit))
        words.append(label if seconds is None else f"{label}, {reached / roof:.0%}")
    _draw_roofs(ax, device, dots, unit)
    for (x, y), (*_, seconds) in zip(dots, points, strict=True):
        ax.plot([x], [y], "o", color=PALETTE[0], markersize=5, markerfacecolor="white" if seconds is None else PALETTE[0])
    _name_points(ax, [_on_axes(ax, x, y) for x, y in dots], words)
    return figure


def _draw_shares(figure: Figure, rows: Mapping[str, Mapping[str, float]]) -> None:
    """At the foot of the figure a bar a row, all of one length, cut by what the row is made of."""
    width_in, height_in = figure.get_size_inches()
    ax = figure.add_axes((0.7 / width_in, 0.05 / height_in, 1 - 0.85 / width_in, 0.25 * len(rows) / height_in))
    colour_of = dict(zip(dict.fromkeys(name for parts in rows.values() for name in parts), PALETTE, strict=False))
    for row, parts in enumerate(rows.values()):
        start, total = 0.0, sum(parts.values())
        for name, value in parts.items():
            share, words = value / total, f"{name} {value / total:.0%}"
            if share > 0:
                add_boxes(ax, [(start, row - 0.36, share, 0.72)], pale(colour_of[name], 0.6), edge="white")
            if share > 0.011 * len(words):  # it has room for its name
                ax.text(start + share / 2, row, words, fontsize=SMALL_PT, color=INK, ha="center", va="center")
            start += share
    _name_rows(ax, rows)
    ax.tick_params(labelsize=SMALL_PT, colors=INK)
    ax.set_xlim(0, 1)
    ax.xaxis.set_visible(False)
    ax.spines[:].set_visible(False)


def _draw_roofs(ax: Axes, device: DeviceSpec, dots: Points, unit: float) -> None:
    """The two roofs with their names, the ridge, and limits that show all the dots."""
    ridge, peak, slope = device.ridge_flops_per_byte, device.flops_per_s / unit, device.bytes_per_s / unit
    low, high = min([ridge / 30] + [x / 2 for x, _ in dots]), max([ridge * 10] + [x * 3 for x, _ in dots])
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min([slope * low] + [y / 1.5 for _, y in dots]), 3 * peak))
    for axis, (start, end) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        axis.set_major_locator(_log_ticks(end / start))
        axis.set_major_formatter(FuncFormatter(tick_text))
        axis.set_minor_locator(NullLocator())
    ax.plot([low, ridge, high], [slope * low, peak, peak], color=INK, linewidth=1.5)
    ax.plot([ridge, ridge], [ax.get_ylim()[0], peak], color=INK, linewidth=1, linestyle=DOTS)
    (x0, y0), (x1, y1) = (ax.transData.transform(point) for point in ((low, slope * low), (ridge, peak)))
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    middle = math.sqrt(low * ridge)
    speed = f"{number_text(device.bytes_per_s / 1e9)} GB/s from memory"
    _note(ax, speed, (middle, slope * middle), (-6, 5), rotation=angle, rotation_mode="anchor", ha="center")
    flops = f"{number_text(peak)} {'TFLOP/s' if unit == 1e12 else 'GFLOP/s'}"
    _note(ax, flops, (high, peak), (-4, 4), ha="right")
    _note(ax, f"ridge: {number_text(ridge)} FLOP per byte", (ridge, peak), (0, 10), ha="center")


def _name_points(ax: Axes, places: Sequence[tuple[float, float]], words: Sequence[str]) -> None:
    """A label below and to the right of each point, as far down as it takes to cover no other; a far one gets a thread."""
    taken = [(x - 0.006, y - 0.012, x + 0.006, y + 0.012) for x, y in places]  # left, bottom, right, top; shares of the axes
    for (x, y), text in sorted(zip(places, words, strict=True), key=lambda pair: -pair[0][1]):
        wide, tall = 0.0092 * len(text), 0.052
        left = min(x + 0.012, 0.99 - wide)  # one that would leave the axes comes to lie under its point
        tries = [y - tall * (0.9 + 0.5 * number) for number in range(16)]
        free = [low for low in tries if not any(_overlap((left, low, left + wide, low + tall), box) for box in taken)]
        low = max(0.01, (free or tries[-1:])[0])
        taken.append((left, low, left + wide, low + tall))
        ax.text(left, low, text, transform=ax.transAxes, fontsize=SMALL_PT, color=INK, path_effects=HALO)
        if y - low > 2 * tall:
            ax.plot([x, left], [y, low + tall], transform=ax.transAxes, color=GREY, linewidth=0.7, zorder=1)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _note(ax: Axes, words: str, point: tuple[float, float], offset: tuple[float, float], **how: Any) -> None:
    """Small words near a point of the data; the offset is in points of print."""
    ax.annotate(words, point, offset, **{"textcoords": "offset points", "fontsize": SMALL_PT, "color": INK, "path_effects": HALO} | how)
