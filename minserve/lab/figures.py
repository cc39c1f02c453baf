"""Pictures of traces and batches: who ran when, who holds which block, what a step was filled with.

Why: every picture is a pure function of what the engine wrote down, so the simulator and the real engine are drawn by the same code. A
request keeps its colour in every picture; waiting and free are grey, what is shared or cached is hatched.

Invariant: with `step`, a picture stops after that step and keeps the axes of the whole run, so that stepping through it moves nothing
else. Many boxes are one collection: 40 requests over 300 steps are drawn while a hand is still on the slider.

Taught in notebook 00.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minserve.core.batch import ScheduledBatch
from minserve.core.records import RequestRecord, StepRecord
from minserve.core.trace import Trace
from minserve.lab.style import (
    GREY,
    HALO,
    INK,
    PALETTE,
    SMALL_PT,
    add_boxes,
    dress,
    fix_margins,
    new_figure,
    new_panel,
    pale,
    png_bytes,
    request_colour,
    save,
)

__all__ = ["GREY", "INK", "PALETTE", "block_map", "new_figure", "png_bytes", "request_colour", "save", "timeline", "token_budget"]

WAIT = pale(GREY, 0.8)  # thin bars of it: in grey print, thickness still tells waiting from decoding


# --- the step timeline ----------------------------------------------------------------------------


def timeline(
    trace: Trace, title: str | None = None, max_requests: int = 40, step: int | None = None, height_in: float | None = None
) -> Figure:
    """Who waited, who computed prompt tokens and who decoded, over time; below, the blocks in use.

    Works for any trace, of the real engine or of a simulation. Of more than `max_requests`, the first to arrive are shown until they are
    done. Raises ValueError for a trace without steps.
    """
    records = sorted(trace.requests.values(), key=lambda r: r.arrival_s)[:max_requests]
    steps = _steps_of_records(_steps_of(trace), records)
    drawn, origin_s = _until(steps, step), min(record.arrival_s for record in records)
    figure = new_figure(height_in or 2.6 + 0.12 * len(records))
    rows, pool = figure.subplots(2, 1, sharex=True, height_ratios=[max(2.0, 0.12 * len(records)), 1.0])
    first = f" (first {len(records)} of {len(trace.requests):,})" if len(records) < len(trace.requests) else ""
    dress(rows, title or _finding(trace), y_label=f"request{first}")
    dress(pool, x_label="seconds since the first arrival", y_label="KV blocks")
    _draw_requests(rows, records, drawn, origin_s)
    _draw_pool(pool, steps, drawn, origin_s)
    rows.xaxis.set_visible(False)  # the lower panel's serves both
    rows.set_xlim(0, steps[-1].end_s - origin_s)
    _mark_step(figure, None if step is None else drawn[-1].end_s - origin_s)
    figure.legend(handles=_timeline_legend(), fontsize=SMALL_PT, loc="lower center", ncols=4, frameon=False)
    fix_margins(figure, left_in=0.6, right_in=0.15, top_in=0.3, bottom_in=0.7)
    return figure


def _steps_of_records(steps: Sequence[StepRecord], records: Sequence[RequestRecord]) -> list[StepRecord]:
    """The steps until the last of these requests is done."""
    last_s = max(steps[-1].end_s if record.finished_s is None else record.finished_s for record in records)
    return [step for step in steps if step.start_s < last_s] or list(steps[:1])


def _steps_of(trace: Trace) -> list[StepRecord]:
    if not trace.steps:
        raise ValueError("the trace has no steps: serve something first")
    return list(trace.steps)


def _until(steps: Sequence[StepRecord], step: int | None) -> list[StepRecord]:
    """The steps up to this one. Raises ValueError if it is before them all."""
    kept = [record for record in steps if step is None or record.step <= step]
    if not kept:
        raise ValueError(f"step {step} is not in the trace: it has steps {steps[0].step} to {steps[-1].step}")
    return kept


def _mark_step(figure: Figure, place: float | None) -> None:
    for ax in figure.axes if place is not None else ():
        ax.axvline(place or 0.0, color=INK, linewidth=0.8)


def _timeline_legend() -> list[Patch]:
    return [
        Patch(color=WAIT, label="waits (thin)"),
        Patch(color=PALETTE[0], label="prompt tokens"),
        Patch(color=pale(PALETTE[0]), label="decodes"),
        Patch(facecolor="white", hatch="////", edgecolor=GREY, label="cached blocks without an owner"),
    ]


def _finding(trace: Trace) -> str:
    s = trace.summary()
    return f"{s.num_requests} requests share the steps: {s.output_tokens_per_s:.0f} output tokens/s, {s.num_preemptions} preemptions"


def _draw_requests(ax: Axes, records: Sequence[RequestRecord], steps: Sequence[StepRecord], origin_s: float) -> None:
    row_of = {record.request_id: index for index, record in enumerate(records)}
    now_s = steps[-1].end_s
    waits, colours, boxes = [], [], []
    for index, record in enumerate(records):
        end_s = min(now_s, record.finished_s if record.finished_s is not None else now_s)
        if end_s > record.arrival_s:
            waits.append((record.arrival_s - origin_s, index - 0.12, end_s - record.arrival_s, 0.24))
    for index, is_decode, start_s, end_s in spans(records, steps):
        boxes.append((start_s - origin_s, index - 0.4, end_s - start_s, 0.8))
        colours.append(pale(request_colour(index)) if is_decode else request_colour(index))
    add_boxes(ax, waits, WAIT)
    add_boxes(ax, boxes, colours)
    crosses = [(step.start_s - origin_s, row_of[i]) for step in steps for i in step.preempted if i in row_of]
    if crosses:
        ax.plot(*zip(*crosses, strict=True), linestyle="none", marker="x", color=INK, markersize=5)
    ax.set_ylim(len(records) - 0.4, -0.6)
    ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))


def spans(records: Sequence[RequestRecord], steps: Sequence[StepRecord]) -> list[tuple[int, bool, float, float]]:
    """(row, decodes, start, end) of each stretch of steps in which a request did one and the same thing."""
    row_of = {record.request_id: index for index, record in enumerate(records)}
    gap_s = (steps[-1].end_s - steps[0].start_s) / 2000  # less than half a dot: the host's time between two steps
    spans: list[tuple[int, bool, float, float]] = []
    last: dict[int, int] = {}  # row -> its latest span
    for step in steps:
        for request_id in row_of.keys() & step.tokens.keys():
            index = row_of[request_id]
            is_decode = _is_decode(records[index], *step.tokens[request_id])
            before = spans[last[index]] if index in last else None
            if before is not None and before[1] == is_decode and step.start_s - before[3] <= gap_s:
                spans[last[index]] = (index, is_decode, before[2], step.end_s)
            else:
                last[index] = len(spans)
                spans.append((index, is_decode, step.start_s, step.end_s))
    return spans


def _is_decode(record: RequestRecord, start: int, num_tokens: int) -> bool:
    """One token beyond the prompt; what a preempted request computes again counts as prompt."""
    return num_tokens == 1 and start >= record.num_prompt_tokens


def _draw_pool(ax: Axes, steps: Sequence[StepRecord], drawn: Sequence[StepRecord], origin_s: float) -> None:
    times_s = [step.start_s - origin_s for step in drawn] + [drawn[-1].end_s - origin_s]
    used = [step.num_used_blocks for step in drawn]
    idle = [step.num_used_blocks + step.num_idle_blocks for step in drawn]
    ax.fill_between(times_s, [*idle, idle[-1]], step="post", facecolor="white", hatch="////", edgecolor=GREY, linewidth=0)
    ax.fill_between(times_s, [*used, used[-1]], step="post", facecolor=PALETTE[0], linewidth=0)
    top = max(1, *(step.num_used_blocks + step.num_idle_blocks for step in steps))
    ax.set_ylim(0, 1.35 * top)
    peak_s = times_s[used.index(max(used))]
    is_late = peak_s > 0.7 * (steps[-1].end_s - origin_s)
    words, side = f" {max(used)} in use at peak ", "right" if is_late else "left"
    ax.text(peak_s, max(used), words, fontsize=SMALL_PT, va="bottom", ha=side, color=INK, path_effects=HALO)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))


# --- the token-budget bar -------------------------------------------------------------------------


def token_budget(trace: Trace, token_budget: int, title: str | None = None, step: int | None = None) -> Figure:
    """What each step was filled with, decode tokens first and prompt tokens on top, against the budget.

    Raises ValueError for a trace without steps.
    """
    steps = _steps_of(trace)
    drawn = _until(steps, step)
    decodes = [_num_decodes(trace, record) for record in drawn]
    prompts = [record.num_tokens - num for record, num in zip(drawn, decodes, strict=True)]
    share = sum(record.num_tokens for record in drawn) / (token_budget * len(drawn))
    figure, ax = new_panel(title or f"The steps use {share:.0%} of their token budget", "step", "tokens in the step")
    stacks = zip(drawn, decodes, prompts, strict=True)
    lower, upper = zip(*[((s.step - 0.45, 0, 0.9, low), (s.step - 0.45, low, 0.9, high)) for s, low, high in stacks], strict=True)
    add_boxes(ax, lower, pale(PALETTE[0]))
    add_boxes(ax, upper, PALETTE[0])
    ax.axhline(token_budget, color=INK, linewidth=1, linestyle="--")
    ax.text(steps[-1].step + 0.6, token_budget, f"token budget {token_budget:,}", fontsize=SMALL_PT, va="bottom", ha="right", color=INK)
    ax.set_xlim(steps[0].step - 0.6, steps[-1].step + 0.6)
    ax.set_ylim(0, 1.2 * max(token_budget, *(record.num_tokens for record in steps)))
    ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    _mark_step(figure, None if step is None else drawn[-1].step + 0.5)
    handles = [Patch(color=PALETTE[0], label="prompt tokens"), Patch(color=pale(PALETTE[0]), label="decode tokens, one a request")]
    figure.legend(handles=handles, fontsize=SMALL_PT, loc="lower center", ncols=2, frameon=False)
    fix_margins(figure, left_in=0.6, right_in=0.15, top_in=0.3, bottom_in=0.7)
    return figure


def _num_decodes(trace: Trace, step: StepRecord) -> int:
    records = trace.requests
    return sum(i in records and _is_decode(records[i], start, count) for i, (start, count) in step.tokens.items())


# --- the block map --------------------------------------------------------------------------------


def block_map(batches: Sequence[ScheduledBatch], num_blocks: int, block_size: int, title: str, step: int | None = None) -> Figure:
    """Who owns which block, step by step: one cell a block and step, filled as far as its slots are; a block with two owners is hatched.

    Raises ValueError for no batches.
    """
    if not batches:
        raise ValueError("no batches to draw: let the engine run some steps first")
    order = list(dict.fromkeys(row.request.request_id for batch in batches for row in batch.rows))
    figure, ax = new_panel(title, "step", "block", height_in=1.2 + min(0.3 * num_blocks, 5.0))
    drawn = [batch for batch in batches if step is None or batch.step <= step]
    add_boxes(ax, [(batch.step - 0.45, block - 0.4, 0.9, 0.8) for batch in drawn for block in range(num_blocks)], pale(GREY, 0.5))
    cells = [cell for batch in drawn for cell in _cells(batch, block_size)]
    _draw_cells(ax, cells, {request_id: request_colour(index) for index, request_id in enumerate(order)})
    if len(batches) <= 32 and num_blocks <= 40:
        _name_owners(ax, cells)
    ax.set_xlim(batches[0].step - 0.6, batches[-1].step + 0.6)
    ax.set_ylim(num_blocks - 0.4, -0.6)
    ax.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    _mark_step(figure, None if step is None else step + 0.5)
    handles = _block_legend(order, any(len(cell.owners) > 1 for cell in cells))
    figure.legend(handles=handles, fontsize=SMALL_PT, loc="upper right", frameon=False)
    widest = max(len(str(handle.get_label())) for handle in handles)
    fix_margins(figure, left_in=0.5, right_in=0.6 + 0.06 * widest, top_in=0.3, bottom_in=0.45)
    return figure


class _Cell(NamedTuple):
    step: int
    block: int
    owners: tuple[str, ...]
    share: float  # of its slots that are filled


def _cells(batch: ScheduledBatch, block_size: int) -> list[_Cell]:
    """The blocks in somebody's hands during a step."""
    held: dict[int, list[tuple[str, int]]] = {}  # block id -> (request, slots filled)
    for row in batch.rows:
        for index, block_id in enumerate(row.block_table):
            held.setdefault(block_id, []).append((row.request.request_id, min(block_size, row.end - index * block_size)))
    return [
        _Cell(batch.step, block_id, tuple(request_id for request_id, _ in owners), max(filled for _, filled in owners) / block_size)
        for block_id, owners in held.items()
    ]


def _draw_cells(ax: Axes, cells: Iterable[_Cell], colours: Mapping[str, str]) -> None:
    for shared, hatch in ((False, None), (True, "////")):
        drawn = [cell for cell in cells if (len(cell.owners) > 1) == shared]
        boxes = [(cell.step - 0.45, cell.block + 0.4, 0.9, -0.8 * cell.share) for cell in drawn]  # filled from below
        add_boxes(ax, boxes, [colours[cell.owners[0]] for cell in drawn], hatch, edge="white")


def _name_owners(ax: Axes, cells: Iterable[_Cell]) -> None:
    """Write a request's name where it takes a block over, so that the picture can be read without its colours."""
    before: dict[int, _Cell] = {}  # block id -> its latest cell
    for cell in cells:
        last = before.get(cell.block)
        if last is None or last.owners != cell.owners or last.step + 1 < cell.step:
            name = "+".join(cell.owners) if len(cell.owners) < 3 else f"{len(cell.owners)} owners"
            ax.text(cell.step - 0.4, cell.block, name, fontsize=SMALL_PT, va="center", color=INK, path_effects=HALO)
        before[cell.block] = cell


def _block_legend(order: Sequence[str], some_are_shared: bool) -> list[Patch]:
    """One patch a colour; more requests than colours take them in turn."""
    handles = [Patch(color=request_colour(index), label=request_id) for index, request_id in enumerate(order[: len(PALETTE)])]
    if len(order) > len(PALETTE):
        handles.append(Patch(color="white", label=f"... {len(order)} in turn"))
    if some_are_shared:
        handles.append(Patch(facecolor="white", hatch="////", edgecolor=GREY, label="shared"))
    return [*handles, Patch(color=pale(GREY, 0.5), label="empty")]
