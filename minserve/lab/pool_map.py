"""One moment of the scheduler as a picture: every block of the pool, the two queues, and what the step's tokens go to.

Why: who holds which block, what is shared, cached or free, who waits and for what are one state, and a reader wants to see it at one
glance and then see the next one. So the picture is a pure function of a snapshot and of the step's record.

Invariant: size and places depend on the size of the pool alone, so stepping from one moment to the next moves nothing.

Taught in notebook 04.
"""

from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from minserve.core.records import StepRecord
from minserve.core.snapshot import RequestState, Snapshot
from minserve.lab.pool_grid import FREE, HATCH, MARGIN_IN, WIDTH_IN, Names, draw_pool, view_blocks
from minserve.lab.sheet import Sheet
from minserve.lab.style import GREY, INK, LABEL_PT, TITLE_PT, deep, pale

HEIGHT_IN = 4.9
GAUGE_TOP_IN, GAUGE_HEIGHT_IN = 2.05, 0.17
QUEUE_TOP_IN, ROW_IN, MAX_ROWS = 1.53, 0.157, 7
PALE_INK = pale(INK, 0.5)


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
    return pool_sheet(snapshot, step_record, title, order, most_tokens, chosen).finish()


def pool_sheet(
    snapshot: Snapshot,
    step_record: StepRecord | None,
    title: str,
    order: Sequence[str] = (),
    most_tokens: int | None = None,
    chosen: str = "",
) -> Sheet:
    """The picture before it is finished: its words can be read."""
    states = (*snapshot.running, *snapshot.waiting)
    names = Names(dict.fromkeys((*order, *sorted(state.request_id for state in states))))
    sheet = Sheet(HEIGHT_IN, WIDTH_IN)
    sheet.write(MARGIN_IN, HEIGHT_IN - 0.16, title, TITLE_PT)
    draw_pool(sheet, snapshot, view_blocks(snapshot, step_record), names, chosen)
    _draw_block_gauge(sheet, snapshot)
    _draw_budget(sheet, snapshot, step_record, names)
    _draw_queues(sheet, snapshot, step_record, names, most_tokens or max((state.num_tokens for state in states), default=1))
    _draw_legend(sheet)
    return sheet


# --- the two gauges -------------------------------------------------------------------------------


def _draw_gauge(sheet: Sheet, left: float, width: float, words: str, total: int, parts: Iterable[tuple[int, str, str, str | None]]) -> None:
    """A bar of `total`, filled from the left by parts of (number, colour, name, hatch)."""
    bottom = GAUGE_TOP_IN - GAUGE_HEIGHT_IN
    sheet.write(left, GAUGE_TOP_IN + 0.1, words, LABEL_PT)
    sheet.boxes({(left, bottom, width, GAUGE_HEIGHT_IN): FREE})
    x = left
    for number, colour, name, hatch in parts:
        part = width * number / total
        sheet.boxes({(x, bottom, max(part - 0.012, 0.0), GAUGE_HEIGHT_IN): colour}, hatch, edge=pale(INK, 0.4))
        if part > 0.068 * len(name):
            sheet.write(x + part / 2, bottom + GAUGE_HEIGHT_IN / 2, name, side="center", halo=True)
        x += part


def _draw_block_gauge(sheet: Sheet, snapshot: Snapshot) -> None:
    """Blocks owned and idle of the pool, and the line that admission does not cross."""
    total, idle, free = snapshot.num_blocks, len(snapshot.idle), len(snapshot.free)
    used, left, width = total - idle - free, MARGIN_IN, 3.2
    words = f"{total} blocks of {snapshot.block_size}: {used} used, {idle} idle, {free} free; watermark {snapshot.watermark_blocks}"
    _draw_gauge(sheet, left, width, words, total, [(used, PALE_INK, "used", None), (idle, FREE, "idle", HATCH)])
    if snapshot.watermark_blocks:
        x = left + width * max(0.0, 1 - snapshot.watermark_blocks / total)
        sheet.ax.plot([x, x], [GAUGE_TOP_IN - GAUGE_HEIGHT_IN - 0.04, GAUGE_TOP_IN + 0.03], color=INK, linewidth=1.2, linestyle="--")


def _draw_budget(sheet: Sheet, snapshot: Snapshot, step_record: StepRecord | None, names: Names) -> None:
    """The step's rows, in the order in which they were given their tokens, against the token budget."""
    rows, budget = step_record.tokens if step_record else {}, snapshot.token_budget
    prompts = {state.request_id: state.num_prompt_tokens for state in snapshot.running}
    parts = []
    for request_id, (start, count) in rows.items():
        is_decode = count == 1 and start >= prompts[request_id]
        colour = names.colours[request_id]
        parts.append((count, pale(colour) if is_decode else colour, names.short[request_id], None))
    num_decodes = sum(colour == pale(names.colours[request_id]) for request_id, (_, colour, *_) in zip(rows, parts, strict=True))
    spent = f"{sum(count for count, *_ in parts) - num_decodes} prompt (full), {num_decodes} decode (pale)"
    _draw_gauge(sheet, 3.6, WIDTH_IN - MARGIN_IN - 3.6, f"token budget {budget}: {spent if step_record else 'no step runs'}", budget, parts)


# --- the queues -----------------------------------------------------------------------------------


def _draw_queues(sheet: Sheet, snapshot: Snapshot, step_record: StepRecord | None, names: Names, most_tokens: int) -> None:
    """Who runs, with the tokens computed of those known and the block table; who waits, in order."""
    running, waiting = snapshot.running, snapshot.waiting
    rows = step_record.tokens if step_record else {}
    preempted = step_record.preempted if step_record else ()
    y = QUEUE_TOP_IN + 0.1
    sheet.write(MARGIN_IN, y, f"{len(running)} running: tokens computed + this step's, of those known; block table", LABEL_PT)
    sheet.write(5.0, y, f"{len(waiting)} waiting: tokens known", LABEL_PT)
    for index, state in enumerate(running[:MAX_ROWS]):
        y = QUEUE_TOP_IN - (index + 0.5) * ROW_IN
        count = rows.get(state.request_id, (0, 0))[1]
        _draw_progress(sheet, y, state, count, most_tokens, names)
        sheet.write(2.1, y, f"{state.num_computed_tokens} + {count} of {state.num_tokens}", LABEL_PT)
        sheet.write(3.05, y, _table_words(state.block_ids), LABEL_PT)
    for index, state in enumerate(waiting[:MAX_ROWS]):
        y = QUEUE_TOP_IN - (index + 0.5) * ROW_IN
        sheet.boxes({(5.0, y - 0.35 * ROW_IN, 0.1, 0.7 * ROW_IN): names.colours[state.request_id]})
        sheet.write(5.16, y, names.full(state.request_id), LABEL_PT)
        sheet.write(5.95, y, f"{state.num_tokens}{', preempted' if state.request_id in preempted else ''}", LABEL_PT)
    for x, states in ((MARGIN_IN, running), (5.0, waiting)):
        if len(states) > MAX_ROWS:
            sheet.write(x, QUEUE_TOP_IN - (MAX_ROWS + 0.5) * ROW_IN, f"... and {len(states) - MAX_ROWS} more")


def _draw_progress(sheet: Sheet, y: float, state: RequestState, count: int, most_tokens: int, names: Names) -> None:
    """The name, and a bar of the known tokens: computed, computed in this step, not yet."""
    colour, left, unit = names.colours[state.request_id], MARGIN_IN + 0.85, 1.05 / most_tokens
    sheet.write(MARGIN_IN, y, names.full(state.request_id), LABEL_PT)
    done, known = state.num_computed_tokens * unit, state.num_tokens * unit
    for start, width, shade in ((0.0, known, pale(colour, 0.3)), (0.0, done, colour), (done, count * unit, deep(colour, 0.55))):
        sheet.boxes({(left + start, y - 0.35 * ROW_IN, width, 0.7 * ROW_IN): shade})


def _table_words(block_ids: Sequence[int], room: int = 29) -> str:
    """The table, cut in the middle where it is too long for its line."""
    words = " ".join(map(str, block_ids))
    if len(words) <= room:
        return words
    return f"{words[: room // 2].rsplit(' ', 1)[0]} ... {words[-room // 2 :].split(' ', 1)[1]}"


# --- the legend -----------------------------------------------------------------------------------


def _draw_legend(sheet: Sheet) -> None:
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
        sheet.boxes({(x, y, 0.16, height): colour}, hatch, edge=pale(INK, 0.5))
        sheet.write(x + 0.2, y + height / 2, words)
        x += 0.35 + 0.055 * len(words)
    sheet.write(x, y + height / 2, "• found by its content")
