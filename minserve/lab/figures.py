"""The pictures of the course, each a pure function of a trace.

One style: 7 in wide, colours that colour-blind readers can tell apart, and colour means something: a request keeps its
colour in every figure, free is grey, cached is hatched. Figures are made without pyplot, since a widget's callback may
draw on another thread while a cell draws too.

Taught in notebook 00.
"""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minserve.core.batch import ScheduledBatch
from minserve.core.trace import RequestRecord, StepRecord, Trace

# Okabe and Ito's palette, in an order that keeps neighbours apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8A6D00", "#5B5EA6")
GREY = "#C8C8C8"
INK = "#333333"


def new_figure(height_in: float = 3.0, width_in: float = 7.0) -> Figure:
    """An empty figure of the house: white ground (dark themes too), constrained layout, 110 dots an inch."""
    return Figure(figsize=(width_in, height_in), dpi=110, facecolor="white", layout="constrained")


def request_colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def png_bytes(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as PNG or SVG, by the ending of the path; makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def timeline(trace: Trace, title: str | None = None, max_requests: int = 40) -> Figure:
    """Who waited, who computed prompt tokens and who decoded, over time; below, the blocks in use.

    Works for any trace, of the real engine or of a simulation. Raises ValueError for a trace without steps.
    """
    steps = list(trace.steps)
    if not steps:
        raise ValueError("the trace has no steps: serve something first")
    records = sorted(trace.requests.values(), key=lambda r: r.arrival_s)[:max_requests]
    figure = new_figure(height_in=2.6 + 0.12 * len(records))
    rows, pool = figure.subplots(2, 1, sharex=True, height_ratios=[max(2.0, 0.12 * len(records)), 1.0])
    origin_s = min(record.arrival_s for record in records)
    _draw_requests(rows, records, steps, origin_s)
    _draw_pool(pool, steps, origin_s)
    rows.set_title(title or _finding(trace), fontsize=9, loc="left", color=INK)
    figure.legend(handles=_timeline_legend(), fontsize=7, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _timeline_legend() -> list[Patch]:
    return [
        Patch(color=GREY, alpha=0.5, label="waits"),
        Patch(color=PALETTE[0], label="prompt tokens"),
        Patch(color=PALETTE[0], alpha=0.45, label="decodes"),
        Patch(color=PALETTE[0], label="blocks: owned"),
        Patch(facecolor="white", hatch="////", edgecolor=GREY, label="blocks: cached, no owner"),
    ]


def _finding(trace: Trace) -> str:
    s = trace.summary()
    return f"{s.num_requests} requests share the steps: {s.output_tokens_per_s:.0f} output tokens/s, {s.num_preemptions} preemptions"


def _draw_requests(ax: Axes, records: Sequence[RequestRecord], steps: Sequence[StepRecord], origin_s: float) -> None:
    row_of = {record.request_id: index for index, record in enumerate(records)}
    for index, record in enumerate(records):
        end_s = record.finished_s if record.finished_s is not None else steps[-1].end_s
        ax.barh(index, end_s - record.arrival_s, left=record.arrival_s - origin_s, height=0.8, color=GREY, alpha=0.5, linewidth=0)
    for step in steps:
        for request_id, (start, num_tokens) in step.tokens.items():
            index = row_of.get(request_id)
            if index is not None:
                is_decode = num_tokens == 1 and start >= records[index].num_prompt_tokens  # pale; a chunk of prompt is full colour
                shade = 0.45 if is_decode else 1.0
                left_s = step.start_s - origin_s
                ax.barh(index, step.elapsed_s, left=left_s, height=0.8, color=request_colour(index), alpha=shade, linewidth=0)
        for request_id in step.preempted:
            if request_id in row_of:
                ax.plot(step.start_s - origin_s, row_of[request_id], marker="x", color=INK, markersize=5)
    ax.set_ylim(len(records) - 0.4, -0.6)
    ax.set_ylabel("request")
    ax.set_yticks(range(0, len(records), max(1, len(records) // 8)))
    ax.tick_params(labelsize=7)


def _draw_pool(ax: Axes, steps: Sequence[StepRecord], origin_s: float) -> None:
    times_s = [step.start_s - origin_s for step in steps] + [steps[-1].end_s - origin_s]
    used = [step.num_used_blocks for step in steps]
    idle = [step.num_used_blocks + step.num_idle_blocks for step in steps]
    ax.stairs(idle, times_s, fill=True, color="white", hatch="////", edgecolor=GREY, linewidth=0)
    ax.stairs(used, times_s, fill=True, color=PALETTE[0])
    top = max(*idle, 1)
    ax.set_ylim(0, 1.35 * top)
    ax.text(times_s[used.index(max(used))], max(used), f" {max(used)} in use at peak", fontsize=7, va="bottom", color=INK)
    ax.set_ylabel("KV blocks")
    ax.set_xlabel("seconds since the first arrival")
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.tick_params(labelsize=7)


def block_map(batches: Sequence[ScheduledBatch], num_blocks: int, block_size: int, title: str) -> Figure:
    """Who owns which block, step by step: one cell a block and step, filled as far as its slots are; a block with two owners is hatched.

    Raises ValueError for no batches.
    """
    if not batches:
        raise ValueError("no batches to draw: let the engine run some steps first")
    order = list(dict.fromkeys(row.request.request_id for batch in batches for row in batch.rows))
    figure = new_figure(height_in=1.0 + 0.3 * num_blocks)
    ax = figure.subplots()
    for batch in batches:
        ax.bar([batch.step] * num_blocks, 0.8, bottom=[b - 0.4 for b in range(num_blocks)], width=0.9, color=GREY, alpha=0.4)
        _draw_block_column(ax, batch, block_size, order)
    ax.set_ylim(num_blocks - 0.4, -0.6)
    ax.set_yticks(range(num_blocks))
    ax.set_xticks([batch.step for batch in batches])
    ax.set_xlabel("step")
    ax.set_ylabel("block")
    ax.tick_params(labelsize=7)
    handles = [Patch(color=request_colour(index), label=request_id) for index, request_id in enumerate(order)]
    handles.append(Patch(color=GREY, alpha=0.4, label="empty slots"))
    figure.legend(handles=handles, fontsize=7, loc="outside right upper", frameon=False)
    ax.set_title(title, fontsize=9, loc="left", color=INK)
    return figure


def _draw_block_column(ax: Axes, batch: ScheduledBatch, block_size: int, order: Sequence[str]) -> None:
    owners: dict[int, list[tuple[int, int]]] = {}  # block id -> (request's place in the order, slots filled)
    for row in batch.rows:
        for index, block_id in enumerate(row.block_table):
            filled = min(block_size, row.end - index * block_size)
            owners.setdefault(block_id, []).append((order.index(row.request.request_id), filled))
    for block_id, held in owners.items():
        share = 0.8 * max(filled for _, filled in held) / block_size
        hatch = "////" if len(held) > 1 else None
        colour = request_colour(held[0][0])
        ax.bar(batch.step, -share, bottom=block_id + 0.4, width=0.9, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
