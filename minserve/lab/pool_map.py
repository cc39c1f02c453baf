"""One moment of the scheduler as a picture: every block of the pool, the two queues, and what the step's tokens go to.

Why: who holds which block, what is shared, cached or free, who waits and for what are one state, and a reader wants to see it at one
glance and then see the next one. So the picture is a pure function of a snapshot and of the step's record, and the only thing that
knows how blocks look.

Invariant: size and places depend on the size of the pool alone, so stepping from one moment to the next moves nothing. Colour is never
alone: every block carries its owner's name, its number of owners, or its place in the line of those to be given up.

Taught in notebook 04.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minserve.core.records import StepRecord
from minserve.core.snapshot import RequestState, Snapshot
from minserve.lab.style import GREY, HALO, INK, LABEL_PT, SMALL_PT, TITLE_PT, add_boxes, deep, new_figure, pale, request_colour

WIDTH_IN, HEIGHT_IN, MARGIN_IN = 7.0, 4.9, 0.12
POOL_TOP_IN, POOL_HEIGHT_IN = 4.55, 2.2
GAUGE_TOP_IN, GAUGE_HEIGHT_IN = 2.05, 0.17
QUEUE_TOP_IN, ROW_IN, MAX_ROWS = 1.55, 0.155, 8
FREE = pale(GREY, 0.4)
PALE_INK = pale(INK, 0.5)
HATCH = "////"


@dataclass(frozen=True, slots=True)
class BlockView:
    """What is seen of one block: slots [0, filled) hold something, of which this step writes those of `written`."""

    block_id: int
    owners: tuple[str, ...]
    num_filled: int
    written: range
    is_cached: bool
    idle_rank: int | None  # 1: the next to be given up
    copied_from: int | None

    @property
    def is_shared(self) -> bool:
        return len(self.owners) > 1


def view_blocks(snapshot: Snapshot, step_record: StepRecord | None = None) -> list[BlockView]:
    """Every block of the pool, as it is when the step has written its tokens."""
    size, rows = snapshot.block_size, step_record.tokens if step_record else {}
    owners: dict[int, list[str]] = {}
    filled: dict[int, int] = dict.fromkeys(snapshot.idle, size)
    written: dict[int, range] = {}
    for state in snapshot.running:
        start, count = rows.get(state.request_id, (state.num_computed_tokens, 0))
        for index, block_id in enumerate(state.block_ids):
            first = index * size
            owners.setdefault(block_id, []).append(state.request_id)
            filled[block_id] = max(filled.get(block_id, 0), min(size, start + count - first))
            own = range(max(0, start - first), min(size, start + count - first))
            if own:
                written[block_id] = own
    ranks = {block_id: rank for rank, block_id in enumerate(snapshot.idle, start=1)}
    cached, sources = set(snapshot.cached), {target: source for source, target in snapshot.copies}
    return [
        BlockView(
            block_id,
            tuple(owners.get(block_id, ())),
            filled.get(block_id, 0),
            written.get(block_id, range(0)),
            block_id in cached,
            ranks.get(block_id),
            sources.get(block_id),
        )
        for block_id in range(snapshot.num_blocks)
    ]


def pool_map(
    snapshot: Snapshot,
    step_record: StepRecord | None = None,
    title: str = "",
    *,
    order: Sequence[str] = (),
    most_tokens: int | None = None,
    chosen: str = "",
) -> Figure:
    """Pool, budget and queues at one moment: with `step_record`, while that step runs.

    `order` has the ids of all requests of the run, which gives each its colour and keeps it from step to step; `most_tokens` is the
    length of the longest one, which gives the bars their scale. Both are taken from the snapshot where they are not given. The blocks
    of the `chosen` request are framed.
    """
    states = (*snapshot.running, *snapshot.waiting)
    order = order or sorted(state.request_id for state in states)
    names = _Names(order)
    figure = new_figure(HEIGHT_IN)
    figure.set_layout_engine(None)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))  # in inches, so that every place is a plain number
    ax.set_axis_off()
    ax.set_xlim(0, WIDTH_IN)
    ax.set_ylim(0, HEIGHT_IN)
    _write(ax, MARGIN_IN, HEIGHT_IN - 0.16, title, size=TITLE_PT)
    _draw_pool(ax, snapshot, view_blocks(snapshot, step_record), names)
    _frame(ax, snapshot, chosen)
    _draw_block_gauge(ax, snapshot)
    _draw_budget(ax, snapshot, step_record, names)
    _draw_queues(ax, snapshot, step_record, names, most_tokens or max((state.num_tokens for state in states), default=1))
    _draw_legend(ax)
    return figure


class _Names:
    """How a request is written and coloured. Ids too long for a cell are numbers there; the queues say whose."""

    def __init__(self, order: Sequence[str]):
        self.colours = {request_id: request_colour(index) for index, request_id in enumerate(order)}
        are_short = all(len(request_id) <= 5 for request_id in order)
        self.short = {request_id: request_id if are_short else f"#{index}" for index, request_id in enumerate(order)}

    def full(self, request_id: str) -> str:
        short = self.short[request_id]
        return short if short == request_id else f"{short} {request_id[:10]}"


def _write(
    ax: Axes, x: float, y: float, words: str, size: float = SMALL_PT, side: str = "left", colour: str = INK, halo: bool = False
) -> None:
    ax.text(x, y, words, fontsize=size, ha=side, va="center", color=colour, path_effects=HALO if halo else ())


# --- the pool -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where each block lies: rows of cells from the top left, as large as the pool's number of blocks lets them be."""

    num_blocks: int

    @property
    def columns(self) -> int:
        if self.num_blocks <= 8:
            return 4
        few = next((columns for columns in (8, 12, 16, 24, 32) if self.num_blocks <= 4 * columns), 32)
        return few if self.num_blocks <= 256 else 64

    @property
    def pitch_in(self) -> tuple[float, float]:
        rows = -(-self.num_blocks // self.columns)
        return (WIDTH_IN - 2 * MARGIN_IN) / self.columns, min(0.9, POOL_HEIGHT_IN / rows)

    @property
    def cell_in(self) -> tuple[float, float]:
        width, height = self.pitch_in
        return 0.92 * width, height - min(0.06, 0.1 * height)

    def corner_in(self, block_id: int) -> tuple[float, float]:
        """The lower left corner of a cell."""
        (width, height), (row, column) = self.pitch_in, divmod(block_id, self.columns)
        return MARGIN_IN + column * width, POOL_TOP_IN - row * height - self.cell_in[1]


def _draw_pool(ax: Axes, snapshot: Snapshot, views: Sequence[BlockView], names: _Names) -> None:
    grid = _Grid(snapshot.num_blocks)
    _draw_grounds(ax, grid, views, names)
    _draw_slots(ax, grid, views, names, snapshot.block_size)
    if grid.pitch_in[0] > 0.18:
        for view in views:
            _name_block(ax, grid, view, names)
    for source, target in snapshot.copies:
        _draw_copy(ax, grid, source, target)


def _draw_grounds(ax: Axes, grid: _Grid, views: Sequence[BlockView], names: _Names) -> None:
    """Whose it is: a stripe for each of the first four owners, pale; grey for nobody's."""
    width, height = grid.cell_in
    stripes, shared, idle = {}, [], []
    for view in views:
        x, y = grid.corner_in(view.block_id)
        owners = view.owners[:4] or ("",)
        for index, owner in enumerate(owners):
            colour = pale(names.colours[owner], 0.35) if owner else FREE
            stripes[x + index * width / len(owners), y, width / len(owners), height] = colour
        if view.is_shared:
            shared.append((x, y, width, height))
        if view.idle_rank is not None:
            idle.append((x, y, width, height))
    add_boxes(ax, list(stripes), list(stripes.values()))
    add_boxes(ax, shared, "none", HATCH, edge=pale(INK, 0.5))
    add_boxes(ax, idle, "none", HATCH, edge=pale(INK, 0.35))


def _draw_slots(ax: Axes, grid: _Grid, views: Sequence[BlockView], names: _Names, block_size: int) -> None:
    """How far it is filled: a row of slots at the foot of the cell; those that this step writes are dark."""
    width, height = grid.cell_in
    foot, slot = 0.36 * height, 0.96 * width / block_size
    gap = 0.12 * slot if slot > 0.06 else 0.0
    empty, filled, written = {}, {}, {}
    for view in views:
        x, y = grid.corner_in(view.block_id)
        if not view.owners and view.idle_rank is None:
            continue
        colour = names.colours[view.owners[0]] if view.owners else pale(INK, 0.55)
        for index in range(block_size):
            box = (x + 0.02 * width + index * slot, y + 0.03 * height, slot - gap, foot)
            if index in view.written:
                written[box] = deep(colour, 0.55)
            elif index < view.num_filled:
                filled[box] = colour
            else:
                empty[box] = "white"
    for boxes in (empty, filled, written):
        add_boxes(ax, list(boxes), list(boxes.values()))


def _name_block(ax: Axes, grid: _Grid, view: BlockView, names: _Names) -> None:
    """The block's id above; below it who owns it, how many do, or when it is given up."""
    (x, y), (width, height) = grid.corner_in(view.block_id), grid.cell_in
    is_hatched, words = view.is_shared or view.idle_rank is not None, _owner_words(view, width > 0.6, names)
    smaller = 0.0 if grid.columns <= 16 else 1.5
    _write(ax, x + 0.03, y + 0.85 * height, f"{view.block_id}", size=SMALL_PT - 1 - smaller, colour=pale(INK, 0.8), halo=is_hatched)
    size = LABEL_PT if grid.columns <= 16 else SMALL_PT - smaller
    if words:
        _write(ax, x + width / 2, y + 0.57 * height, words, size=size, side="center", halo=is_hatched)


def _owner_words(view: BlockView, is_wide: bool, names: _Names) -> str:
    if view.idle_rank is not None:
        return f"idle {view.idle_rank}" if is_wide else f"i{view.idle_rank}"
    dot, count = "•" if view.is_cached and view.owners else "", len(view.owners)
    if not view.is_shared:
        source = f" ←{view.copied_from}" if view.copied_from is not None and is_wide else ""
        return "".join(names.short[owner] for owner in view.owners) + source + dot
    listed = "+".join(names.short[owner] for owner in view.owners) if is_wide else ""
    return f"{listed if len(listed) < 7 else ''} ×{count}{dot}".strip()


def _frame(ax: Axes, snapshot: Snapshot, chosen: str) -> None:
    grid = _Grid(snapshot.num_blocks)
    width, height = grid.cell_in
    for state in (*snapshot.running, *snapshot.waiting):
        for block_id in state.block_ids if state.request_id == chosen else ():
            x, y = grid.corner_in(block_id)
            ax.plot([x, x + width, x + width, x, x], [y, y, y + height, y + height, y], color=INK, linewidth=1.2)


def _draw_copy(ax: Axes, grid: _Grid, source: int, target: int) -> None:
    """From slots to slots, below the names."""
    width, height = grid.cell_in
    (x0, y0), (x1, y1) = grid.corner_in(source), grid.corner_in(target)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.5, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0, "path_effects": HALO}
    start, end = (x0 + 0.6 * width, y0 + 0.2 * height), (x1 + 0.25 * width, y1 + 0.2 * height)
    ax.annotate("", xy=end, xytext=start, arrowprops=arrow)


# --- the two gauges -------------------------------------------------------------------------------


def _draw_gauge(ax: Axes, left: float, width: float, words: str, total: int, parts: Iterable[tuple[int, str, str, str | None]]) -> None:
    """A bar of `total`, filled from the left by parts of (number, colour, name, hatch)."""
    bottom = GAUGE_TOP_IN - GAUGE_HEIGHT_IN
    _write(ax, left, GAUGE_TOP_IN + 0.09, words)
    add_boxes(ax, [(left, bottom, width, GAUGE_HEIGHT_IN)], FREE)
    x = left
    for number, colour, name, hatch in parts:
        part = width * number / total
        add_boxes(ax, [(x, bottom, max(part - 0.012, 0.0), GAUGE_HEIGHT_IN)], colour, hatch, edge=pale(INK, 0.4))
        if part > 0.065 * len(name):
            _write(ax, x + part / 2, bottom + GAUGE_HEIGHT_IN / 2, name, side="center", halo=True)
        x += part


def _draw_block_gauge(ax: Axes, snapshot: Snapshot) -> None:
    """Blocks owned and idle of the pool, and the line that admission does not cross."""
    total, idle, free = snapshot.num_blocks, len(snapshot.idle), len(snapshot.free)
    used, left, width = total - idle - free, MARGIN_IN, 3.2
    words = f"{total} blocks of {snapshot.block_size}: {used} used, {idle} idle, {free} free; watermark {snapshot.watermark_blocks}"
    _draw_gauge(ax, left, width, words, total, [(used, PALE_INK, "used", None), (idle, FREE, "idle", HATCH)])
    if snapshot.watermark_blocks:
        x = left + width * max(0.0, 1 - snapshot.watermark_blocks / total)
        ax.plot([x, x], [GAUGE_TOP_IN - GAUGE_HEIGHT_IN - 0.04, GAUGE_TOP_IN + 0.03], color=INK, linewidth=1.2, linestyle="--")


def _draw_budget(ax: Axes, snapshot: Snapshot, step_record: StepRecord | None, names: _Names) -> None:
    """The step's rows, in the order in which they were given their tokens, against the token budget."""
    rows, budget = step_record.tokens if step_record else {}, snapshot.token_budget
    prompts = {state.request_id: state.num_prompt_tokens for state in snapshot.running}
    parts = []
    for request_id, (start, count) in rows.items():
        is_decode = count == 1 and start >= prompts[request_id]
        colour = names.colours[request_id]
        parts.append((count, pale(colour) if is_decode else colour, names.short[request_id], None))
    num_decodes = sum(colour == pale(names.colours[request_id]) for request_id, (_, colour, *_) in zip(rows, parts, strict=True))
    spent = f"{sum(count for count, *_ in parts) - num_decodes} prompt (full) and {num_decodes} decode tokens (pale)"
    _draw_gauge(ax, 3.6, WIDTH_IN - MARGIN_IN - 3.6, f"token budget {budget}: {spent if step_record else 'no step runs'}", budget, parts)


# --- the queues -----------------------------------------------------------------------------------


def _draw_queues(ax: Axes, snapshot: Snapshot, step_record: StepRecord | None, names: _Names, most_tokens: int) -> None:
    """Who runs, with the tokens computed of those known and the block table; who waits, in order."""
    running, waiting = snapshot.running, snapshot.waiting
    rows = step_record.tokens if step_record else {}
    preempted = step_record.preempted if step_record else ()
    _write(
        ax, MARGIN_IN, QUEUE_TOP_IN + 0.1, f"{len(running)} running (computed + in this step of known tokens; block table)", size=LABEL_PT
    )
    _write(ax, 5.0, QUEUE_TOP_IN + 0.1, f"{len(waiting)} waiting (known tokens)", size=LABEL_PT)
    for index, state in enumerate(running[:MAX_ROWS]):
        y = QUEUE_TOP_IN - (index + 0.5) * ROW_IN
        count = rows.get(state.request_id, (0, 0))[1]
        _draw_progress(ax, MARGIN_IN, y, 1.1, state, count, most_tokens, names)
        words = f"{state.num_computed_tokens} + {count} of {state.num_tokens}"
        _write(ax, 2.0, y, words)
        _write(ax, 2.85, y, _table_words(state.block_ids))
    for index, state in enumerate(waiting[:MAX_ROWS]):
        y = QUEUE_TOP_IN - (index + 0.5) * ROW_IN
        _draw_progress(ax, 5.0, y, 0.6, state, 0, most_tokens, names)
        _write(ax, 6.35, y, f"{state.num_tokens}{' preempted' if state.request_id in preempted else ''}")
    for x, states in ((MARGIN_IN, running), (5.0, waiting)):
        if len(states) > MAX_ROWS:
            _write(ax, x, QUEUE_TOP_IN - (MAX_ROWS + 0.5) * ROW_IN, f"... and {len(states) - MAX_ROWS} more")


def _draw_progress(ax: Axes, x: float, y: float, width: float, state: RequestState, count: int, most: int, names: _Names) -> None:
    """The name, and a bar of the known tokens: computed, computed in this step, not yet."""
    colour, unit, height = names.colours[state.request_id], width / most, 0.7 * ROW_IN
    _write(ax, x + 0.05, y, names.full(state.request_id))
    left, bottom = x + 0.68, y - height / 2
    done, known = state.num_computed_tokens * unit, state.num_tokens * unit
    add_boxes(ax, [(left, bottom, known, height)], pale(colour, 0.3))
    add_boxes(ax, [(left, bottom, done, height)], colour)
    add_boxes(ax, [(left + done, bottom, count * unit, height)], deep(colour, 0.55))


def _table_words(block_ids: Sequence[int], room: int = 34) -> str:
    """The table, cut in the middle where it is too long for its line."""
    words = " ".join(map(str, block_ids))
    if len(words) <= room:
        return words
    return f"{words[: room // 2].rsplit(' ', 1)[0]} ... {words[-room // 2 :].split(' ', 1)[1]}"


# --- the legend -----------------------------------------------------------------------------------


def _draw_legend(ax: Axes) -> None:
    """One line at the foot. What a cell means must not be guessed."""
    y, height = 0.06, 0.1
    entries: Sequence[tuple[str, str, str | None]] = (
        ("filled slot", PALE_INK, None),
        ("written in this step", deep(PALE_INK, 0.45), None),
        ("shared, ×owners", pale(GREY, 0.6), HATCH),
        ("idle, 1 given up first", FREE, HATCH),
        ("free", FREE, None),
    )
    x = MARGIN_IN
    for words, colour, hatch in entries:
        add_boxes(ax, [(x, y, 0.16, height)], colour, hatch, edge=pale(INK, 0.5))
        _write(ax, x + 0.2, y + height / 2, words)
        x += 0.35 + 0.055 * len(words)
    _write(ax, x, y + height / 2, "• found by its content")
