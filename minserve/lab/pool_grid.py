"""The pool as a grid: one cell a block, with its owner, its slots, and what becomes of it.

Why: a block is owned, shared, kept for its content or free, and filled to some slot; all of that is one state and has one look, here.
`view_blocks` says what is seen, without a picture; the rest draws it.

Invariant: a cell's place depends on the number of blocks alone. Colour is never alone: a cell carries its owner's name, its number of
owners, or its place in the line of those to be given up.

Taught in notebook 04.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minserve.core.records import StepRecord
from minserve.core.snapshot import Snapshot
from minserve.lab.sheet import Sheet
from minserve.lab.style import GREY, HALO, INK, LABEL_PT, SMALL_PT, Box, deep, pale, request_colour

WIDTH_IN, MARGIN_IN = 7.0, 0.12
TOP_IN, HEIGHT_IN = 4.55, 2.2  # of the grid, in a picture that is measured in inches
FREE = pale(GREY, 0.4)
HATCH = "////"

# --- what is seen ---------------------------------------------------------------------------------


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

    @property
    def is_idle(self) -> bool:
        return self.idle_rank is not None


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


class Names:
    """How a request is written and coloured. Ids too long for a cell are numbers there; the queues say whose."""

    def __init__(self, order: Iterable[str]):
        order = tuple(order)
        self.colours = {request_id: request_colour(index) for index, request_id in enumerate(order)}
        are_short = all(len(request_id) <= 5 for request_id in order)
        self.short = {request_id: request_id if are_short else f"#{index}" for index, request_id in enumerate(order)}

    def full(self, request_id: str) -> str:
        short = self.short[request_id]
        return short if short == request_id else f"{short} {request_id[:10]}"


# --- how it is drawn ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
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
        return (WIDTH_IN - 2 * MARGIN_IN) / self.columns, min(0.9, HEIGHT_IN / rows)

    @property
    def cell_in(self) -> tuple[float, float]:
        width, height = self.pitch_in
        return 0.92 * width, height - min(0.06, 0.1 * height)

    def corner_in(self, block_id: int) -> tuple[float, float]:
        """The lower left corner of a cell."""
        (width, height), (row, column) = self.pitch_in, divmod(block_id, self.columns)
        return MARGIN_IN + column * width, TOP_IN - row * height - self.cell_in[1]


def draw_pool(sheet: Sheet, snapshot: Snapshot, views: Sequence[BlockView], names: Names, chosen: str = "") -> None:
    """All cells. The blocks of the `chosen` request are framed."""
    grid = Grid(snapshot.num_blocks)
    _draw_grounds(sheet, grid, views, names)
    _draw_slots(sheet, grid, views, names, snapshot.block_size)
    for view in views if grid.columns <= 32 else ():
        _name_block(sheet, grid, view, names)
    sheet.frames += [(*grid.corner_in(view.block_id), *grid.cell_in) for view in views if chosen in view.owners]
    for source, target in snapshot.copies:
        _draw_copy(sheet, grid, source, target)


def _draw_grounds(sheet: Sheet, grid: Grid, views: Sequence[BlockView], names: Names) -> None:
    """Whose it is: a stripe for each of the first four owners, pale; grey for nobody's."""
    width, height = grid.cell_in
    stripes: dict[Box, str] = {}
    for view in views:
        x, y = grid.corner_in(view.block_id)
        owners = view.owners[:4] or ("",)
        for index, owner in enumerate(owners):
            colour = pale(names.colours[owner], 0.35) if owner else FREE
            stripes[x + index * width / len(owners), y, width / len(owners), height] = colour
    sheet.boxes(stripes)
    for hatched, strength in (((view.is_shared for view in views), 0.5), ((view.is_idle for view in views), 0.35)):
        cells = [(*grid.corner_in(view.block_id), *grid.cell_in) for view, is_it in zip(views, hatched, strict=True) if is_it]
        sheet.boxes(dict.fromkeys(cells, "none"), HATCH, edge=pale(INK, strength))


def _draw_slots(sheet: Sheet, grid: Grid, views: Sequence[BlockView], names: Names, block_size: int) -> None:
    """How far it is filled: a row of slots at the foot of the cell; those that this step writes are dark."""
    width, height = grid.cell_in
    foot, slot = 0.36 * height, 0.96 * width / block_size
    gap = 0.12 * slot if slot > 0.06 else 0.0
    slots: dict[Box, str] = {}
    for view in (view for view in views if view.owners or view.is_idle):
        x, y = grid.corner_in(view.block_id)
        colour = names.colours[view.owners[0]] if view.owners else pale(INK, 0.55)
        for index in range(block_size):
            is_filled, is_new = index < view.num_filled, index in view.written
            shade = deep(colour, 0.55) if is_new else colour if is_filled else "white"
            slots[x + 0.02 * width + index * slot, y + 0.03 * height, slot - gap, foot] = shade
    sheet.boxes(slots)


def _name_block(sheet: Sheet, grid: Grid, view: BlockView, names: Names) -> None:
    """The block's id above; below it who owns it, how many do, or when it is given up."""
    (x, y), (width, height) = grid.corner_in(view.block_id), grid.cell_in
    halo, is_small = view.is_shared or view.is_idle, grid.columns > 16
    small = SMALL_PT - 2.5 if is_small else SMALL_PT - 1
    sheet.write(x + 0.03, y + 0.85 * height, f"{view.block_id}", small, colour=pale(INK, 0.8), halo=halo)
    large = SMALL_PT - 1.5 if is_small else LABEL_PT
    sheet.write(x + width / 2, y + 0.57 * height, _owner_words(view, width > 0.6, names), large, "center", halo=halo)


def _owner_words(view: BlockView, is_wide: bool, names: Names) -> str:
    if view.is_idle:
        return f"{'idle ' if is_wide else 'i'}{view.idle_rank}"
    dot, owners = "•" if view.is_cached else "", [names.short[owner] for owner in view.owners]
    if view.is_shared:
        listed = "+".join(owners)
        return f"{listed if is_wide and len(listed) < 7 else ''} ×{len(owners)}{dot}".strip()
    source = f" ←{view.copied_from}" if view.copied_from is not None and is_wide else ""
    return f"{''.join(owners)}{source}{dot}"


def _draw_copy(sheet: Sheet, grid: Grid, source: int, target: int) -> None:
    """An arrow from slots to slots, below the names."""
    width, height = grid.cell_in
    (x0, y0), (x1, y1) = grid.corner_in(source), grid.corner_in(target)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.5, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0, "path_effects": HALO}
    start, end = (x0 + 0.6 * width, y0 + 0.2 * height), (x1 + 0.25 * width, y1 + 0.2 * height)
    sheet.ax.annotate("", xy=end, xytext=start, arrowprops=arrow)
