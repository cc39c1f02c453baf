"""The pool as a grid: what is seen of each block, whose colours it has, and where it lies."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from minserve.core.records import StepRecord
from minserve.core.snapshot import RequestState, Snapshot
from minserve.core.trace import Trace
from minserve.lab.pool_grid import BlockView, Grid, Names, draw_pool, view_blocks
from minserve.lab.sheet import Sheet
from minserve.lab.style import PALETTE, deep, pale
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import Workload, exact
from tests.lab.boxes import Box, boxes

SHARED = Snapshot(
    num_blocks=6,
    block_size=4,
    token_budget=8,
    watermark_blocks=2,
    running=(RequestState("A", 6, 9, 8, (0, 1, 4)), RequestState("B", 6, 6, 4, (0, 3))),
    waiting=(RequestState("D", 30, 30, 0, ()), RequestState("C", 3, 5, 0, ())),
    ref_counts=(2, 1, 0, 1, 1, 0),
    free=(5,),
    idle=(2,),
    cached=(0, 1, 2),
    copies=((1, 3),),
)
STEP = StepRecord(3, 0.0, 1.0, {"A": (8, 1), "B": (4, 2)}, 2, 4, 1, 2, 2, 2, 0, ("C",), ())


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two samples of one prompt, a shared beginning, a long prompt in chunks, a pool that is too small."""
    system = list(range(8))
    calls = [
        {"request_id": "A", "prompt_ids": [*system, 20, 21], "params": replace(exact(9), n=2)},
        {"request_id": "B", "prompt_ids": [*system, 30], "params": exact(8)},
        {"request_id": "C", "prompt_ids": list(range(40, 62)), "params": exact(4)},
    ]
    cost = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
    engine = make_engine(cost, num_blocks=10, block_size=4, token_budget=8, keep_snapshots=True)
    return simulate(engine, Workload([(0.0, call) for call in calls]))


def moments(trace: Trace) -> Iterator[tuple[Snapshot, StepRecord]]:
    yield from zip(trace.snapshots, trace.steps, strict=True)


# --- what is seen ---------------------------------------------------------------------------------


def test_a_block_is_seen_as_it_is_when_the_step_has_written() -> None:
    assert view_blocks(SHARED, STEP) == [
        BlockView(0, ("A", "B"), 4, range(0), True, None, None),
        BlockView(1, ("A",), 4, range(0), True, None, None),
        BlockView(2, (), 4, range(0), True, 1, None),
        BlockView(3, ("B",), 2, range(2), False, None, 1),
        BlockView(4, ("A",), 1, range(1), False, None, None),
        BlockView(5, (), 0, range(0), False, None, None),
    ]


def test_without_a_step_nothing_is_being_written() -> None:
    views = view_blocks(SHARED)
    assert [view.num_filled for view in views] == [4, 4, 4, 0, 0, 0] and not any(view.written for view in views)


def test_every_token_of_a_step_is_written_to_one_slot(trace: Trace) -> None:
    seen = {"copies": 0, "shared": 0, "idle": 0}
    for snapshot, step in moments(trace):
        views = view_blocks(snapshot, step)
        assert sum(len(view.written) for view in views) == step.num_tokens
        assert [len(view.owners) for view in views] == list(snapshot.ref_counts)
        assert all(view.owners == snapshot.owners(view.block_id) for view in views)
        assert {view.block_id for view in views if not view.owners and not view.is_idle} == set(snapshot.free)
        seen["copies"] += len(snapshot.copies)
        seen["shared"] += any(view.is_shared for view in views)
        seen["idle"] += any(view.is_idle for view in views)
    assert all(seen.values()), seen  # or this run would show nothing


# --- how it is drawn ------------------------------------------------------------------------------


def drawn_boxes(snapshot: Snapshot, step: StepRecord, order: tuple[str, ...]) -> list[Box]:
    sheet = Sheet(4.9)
    draw_pool(sheet, snapshot, view_blocks(snapshot, step), Names(order))
    return boxes(sheet.ax)


def ground(figure_boxes: list[Box], block_id: int, num_blocks: int) -> list[str]:
    """The colours of a cell's grounds, from the left."""
    x, y = Grid(num_blocks).corner_in(block_id)
    width, height = Grid(num_blocks).cell_in
    inside = [
        b for b in figure_boxes if abs(b.height - height) < 1e-5 and abs(b.bottom - y) < 1e-5 and x - 1e-5 <= b.left < x + width - 1e-5
    ]
    return [b.colour for b in sorted(inside, key=lambda b: b.left) if not b.hatch]


def test_a_cell_has_its_owners_colours_and_its_slots() -> None:
    drawn = drawn_boxes(SHARED, STEP, ("A", "B"))
    blue, yellow = PALETTE[:2]
    assert ground(drawn, 0, 6) == [pale(blue, 0.35), pale(yellow, 0.35)]
    assert ground(drawn, 3, 6) == [pale(yellow, 0.35)]
    x, y = Grid(6).corner_in(3)
    width, height = Grid(6).cell_in
    slots = [b for b in drawn if x < b.left < x + width and y < b.bottom < y + 0.3 * height and b.height < 0.4 * height]
    assert [b.colour for b in sorted(slots, key=lambda b: b.left)] == [deep(yellow, 0.55)] * 2 + ["#ffffff"] * 2
    assert sum(b.hatch is not None and abs(b.height - height) < 1e-5 for b in drawn) == 2  # the shared one and the idle one


def test_a_request_keeps_its_colour_from_step_to_step(trace: Trace) -> None:
    order = tuple(trace.requests)
    for snapshot, step in moments(trace):
        drawn = drawn_boxes(snapshot, step, order)
        for view in view_blocks(snapshot, step):
            colours = [pale(PALETTE[order.index(owner)], 0.35) for owner in view.owners]
            assert ground(drawn, view.block_id, snapshot.num_blocks) == (colours or [pale("#C8C8C8", 0.4)])


@pytest.mark.parametrize("num_blocks", [1, 6, 8, 24, 40, 64, 128, 192, 256, 700])
def test_cells_lie_beside_each_other_within_the_pool_s_room(num_blocks: int) -> None:
    grid = Grid(num_blocks)
    width, height = grid.cell_in
    corners = [grid.corner_in(block_id) for block_id in range(num_blocks)]
    assert all(0.1 < x and x + width < 6.9 and 2.3 < y and y + height < 4.6 for x, y in corners)
    if num_blocks <= 64:
        assert width > 0.35 and height > 0.45  # room for an id, a name and slots
        for (x0, y0), (x1, y1) in combinations(corners, 2):
            assert abs(x0 - x1) > width or abs(y0 - y1) > height
