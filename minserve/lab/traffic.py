"""Pictures of a kernel's memory traffic: which program read which block of the KV cache, and how much of it.

Why: a block table is a list of numbers until one sees where they lead. A row is a program, a column a block where it lies in
memory; the number in a box is the place of that block in its request's table. Two boxes in one column are bytes that were fetched twice.

Invariant: pure functions of what `minserve_kernels.memtrace` has seen; nothing here knows a kernel, or needs Triton.

Taught in notebook 05.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minserve.lab.style import (
    GREY,
    INK,
    LABEL_PT,
    SMALL_PT,
    TITLE_PT,
    add_boxes,
    fix_margins,
    new_figure,
    pale,
    request_colour,
)

Program = tuple[int, int, int]
ROW_IN, HEAD_IN, FOOT_IN = 0.15, 0.3, 0.62
LEFT_IN, RIGHT_IN, WIDTH_IN = 1.35, 0.15, 7.0
AXES_IN = WIDTH_IN - LEFT_IN - RIGHT_IN


class Access(Protocol):
    """A load or a store, as `minserve_kernels.memtrace.Access` has it."""

    @property
    def program(self) -> Program: ...
    @property
    def kind(self) -> str: ...
    @property
    def tensor(self) -> str: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def elements(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Bytes that programs loaded from each of N blocks, and how many of these bytes differ."""

    by_program: Mapping[Program, np.ndarray]  # [N] each
    distinct_bytes: np.ndarray  # [N]

    @property
    def times_fetched(self) -> np.ndarray:
        """How often each block's bytes were loaded, those that were loaded at all; 0 for a block that nobody read. [N]"""
        loaded = sum(self.by_program.values(), np.zeros_like(self.distinct_bytes))
        return loaded / np.maximum(self.distinct_bytes, 1)


@dataclass(frozen=True, slots=True)
class Row:
    """One program in the picture: its name, the request that it works for (its colour), and its bytes by block."""

    name: str
    request: int
    block_bytes: np.ndarray  # [N]


def block_reads(accesses: Iterable[Access], tensor: str, num_block_elements: int, num_blocks: int) -> BlockReads:
    """Add up the loads from a tensor whose first dimension is the block."""
    by_program: dict[Program, np.ndarray] = {}
    seen = np.zeros(num_blocks * num_block_elements, dtype=bool)
    element_bytes = 1
    for access in accesses:
        if access.tensor == tensor and access.kind == "load":
            element_bytes = access.element_bytes
            blocks = np.unique(access.elements) // num_block_elements
            counted = element_bytes * np.bincount(blocks, minlength=num_blocks)
            by_program[access.program] = by_program.get(access.program, 0) + counted
            seen[access.elements] = True
    return BlockReads(by_program, element_bytes * seen.reshape(num_blocks, -1).sum(axis=1))


def traffic_map(panels: Mapping[str, Sequence[Row]], tables: Sequence[Sequence[int]], part_bytes: int, num_blocks: int) -> Figure:
    """Programs against blocks, a panel a name (its title). tables: each request's blocks, in the order of its tokens.

    part_bytes: what a program could read of one block; a box is filled up to the share that it did read.
    """
    heights = [HEAD_IN + ROW_IN * len(rows) for rows in panels.values()]
    figure = new_figure(sum(heights) + FOOT_IN, WIDTH_IN)
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    fix_margins(figure, left_in=LEFT_IN, right_in=RIGHT_IN, top_in=0.02, bottom_in=FOOT_IN)
    figure.subplots_adjust(hspace=0.0)
    for ax, (title, rows) in zip(axes, panels.items(), strict=True):
        _draw_panel(ax, title, rows, tables, part_bytes, num_blocks)
    axes[-1].set_xlabel("block, where it lies in memory; in the box, its place in the request's table", fontsize=LABEL_PT, color=INK)
    axes[-1].tick_params(axis="x", bottom=True, labelbottom=True)
    requests = sorted({row.request for rows in panels.values() for row in rows})
    handles = [Patch(color=pale(request_colour(request), 0.6), label=f"request {request}") for request in requests]
    handles.append(Patch(facecolor="white", edgecolor=GREY, label="slots not read"))
    figure.legend(handles=handles, fontsize=SMALL_PT, loc="lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_panel(ax: Axes, title: str, rows: Sequence[Row], tables: Sequence[Sequence[int]], part_bytes: int, num_blocks: int) -> None:
    full, filled, colours = [], [], []
    for y, row in enumerate(rows):
        for block in np.flatnonzero(row.block_bytes).tolist():
            share = min(1.0, row.block_bytes[block] / part_bytes)
            full.append((block - 0.46, y - 0.42, 0.92, 0.84))
            filled.append((block - 0.46, y + 0.42 - 0.84 * share, 0.92, 0.84 * share))
            colours.append(pale(request_colour(row.request), 0.6))
            place = list(tables[row.request]).index(block)
            ax.text(block, y + 0.03, str(place), fontsize=SMALL_PT - 1, color=INK, ha="center", va="center")
    ax.axhline(len(rows) - 0.5, color=GREY, linewidth=0.5)
    for box in full:
        left, bottom, width, height = box
        ax.plot(*_outline(left, bottom, width, height), color=GREY, linewidth=0.5)
    add_boxes(ax, filled, colours)
    ax.set_xlim(-0.6, num_blocks - 0.4)
    ax.set_ylim(len(rows) - 0.4, -0.5 - HEAD_IN / ROW_IN)  # the title has its room inside
    left, top = 0.05 - LEFT_IN, HEAD_IN + ROW_IN * len(rows) - 0.05  # from the figure's left edge: a title is longer than the axes
    ax.text(left / AXES_IN, top / (top + 0.05), title, fontsize=TITLE_PT, color=INK, va="top", transform=ax.transAxes)
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.set_xticks(range(0, num_blocks, 2 if num_blocks > 16 else 1))
    ax.tick_params(axis="both", length=0, labelsize=SMALL_PT, colors=INK)
    ax.spines[:].set_visible(False)


def _outline(left: float, bottom: float, width: float, height: float) -> tuple[list[float], list[float]]:
    right, top = left + width, bottom + height
    return [left, right, right, left, left], [bottom, bottom, top, top, bottom]
