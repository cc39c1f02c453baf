"""One moment of the scheduler as a picture: what is seen of each block, what is written on it, and that nothing moves."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from minserve.core.records import StepRecord
from minserve.core.snapshot import RequestState, Snapshot
from minserve.core.trace import Trace
from minserve.lab.pool_grid import BlockView, Grid, view_blocks
from minserve.lab.pool_map import pool_map, pool_sheet
from minserve.lab.sheet import Words
from minserve.lab.style import PALETTE, deep, pale, png_bytes, shrink_png
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import Workload, exact
from tests.lab.boxes import Box, boxes

EMPTY = Snapshot(6, 4, 16, 0, (), (), (0,) * 6, (0, 1, 2, 3, 4, 5), (), ())
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


# --- what is written and drawn --------------------------------------------------------------------


def texts(words: list[Words]) -> list[str]:
    return [word.text for word in words]


def test_the_words_can_be_read_without_colours() -> None:
    found = texts(pool_sheet(SHARED, STEP, "C is preempted").words)
    for text in (
        "C is preempted",
        "A+B ×2•",  # owners, how many, and that it can be found
        "A•",
        "idle 1",
        "B ←1",
        "6 blocks of 4: 4 used, 1 idle, 1 free; watermark 2",
        "token budget 8: 2 prompt (full), 1 decode (pale)",
        "8 + 1 of 9",
        "4 + 2 of 6",
        "0 1 4",
        "0 3",
        "2 waiting: tokens known",
        "30",
        "5, preempted",
    ):
        assert text in found, text
    assert [text for text in found if text in ("0", "1", "2", "3", "4", "5")] == ["0", "1", "2", "3", "4", "5"]  # the blocks' ids
    assert found.index("D", found.index("2 waiting: tokens known")) < found.index("5, preempted")  # in the order of the queue


def test_between_steps_the_budget_is_untouched() -> None:
    assert "token budget 16: no step runs" in texts(pool_sheet(EMPTY, None, "").words)


def ground(figure_boxes: list[Box], block_id: int, num_blocks: int) -> list[str]:
    """The colours of a cell's grounds, from the left."""
    x, y = Grid(num_blocks).corner_in(block_id)
    width, height = Grid(num_blocks).cell_in
    inside = [
        b for b in figure_boxes if abs(b.height - height) < 1e-5 and abs(b.bottom - y) < 1e-5 and x - 1e-5 <= b.left < x + width - 1e-5
    ]
    return [b.colour for b in sorted(inside, key=lambda b: b.left) if not b.hatch]


def test_a_cell_has_its_owners_colours_and_its_slots() -> None:
    drawn = boxes(pool_sheet(SHARED, STEP, "", order=("A", "B", "C", "D")).ax)
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
        drawn = boxes(pool_sheet(snapshot, step, "", order=order).ax)
        for view in view_blocks(snapshot, step):
            colours = [pale(PALETTE[order.index(owner)], 0.35) for owner in view.owners]
            assert ground(drawn, view.block_id, snapshot.num_blocks) == (colours or [pale("#C8C8C8", 0.4)])


def test_the_chosen_request_s_blocks_are_framed() -> None:
    grid = Grid(6)
    framed = pool_sheet(SHARED, STEP, "", chosen="B").frames
    assert framed == [(*grid.corner_in(0), *grid.cell_in), (*grid.corner_in(3), *grid.cell_in)]


def test_long_names_are_numbers_that_the_queues_explain() -> None:
    named = replace(SHARED, running=tuple(replace(state, request_id=f"chat-{state.request_id}") for state in SHARED.running))
    found = texts(pool_sheet(named, None, "", order=("chat-B", "chat-A")).words)
    assert "#1+#0 ×2•" in found and "#1 chat-A" in found and "#0 chat-B" in found


def test_long_queues_and_tables_are_cut() -> None:
    many = tuple(RequestState(f"R{index}", 4, 4, 0, ()) for index in range(30))
    table = RequestState("A", 400, 400, 399, tuple(range(100)))
    found = texts(pool_sheet(replace(EMPTY, num_blocks=100, running=(table,), waiting=many), None, "").words)
    assert "... and 23 more" in found and "30 waiting: tokens known" in found
    [line] = [text for text in found if text.startswith("0 1 2") and "..." in text]
    assert len(line) < 45 and line.endswith(" 98 99")


# --- places ---------------------------------------------------------------------------------------


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


def test_pictures_have_one_size_and_are_small(trace: Trace) -> None:
    sizes = set()
    for num_blocks, block_size in ((8, 16), (24, 4), (64, 2), (300, 1)):
        state = RequestState("A", 6, 9, 8, tuple(range(num_blocks // 2)))
        counts = tuple(int(block_id < num_blocks // 2) for block_id in range(num_blocks))
        free = tuple(range(num_blocks // 2, num_blocks))
        snapshot = Snapshot(num_blocks, block_size, 16, 0, (state,), (), counts, free, (), ())
        png = png_bytes(pool_map(snapshot, None, "Half of the pool"))
        sizes.add((int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")))
        assert len(shrink_png(png)) < 60_000  # as a notebook keeps it
    snapshot, step = next(moments(trace))
    assert png_bytes(pool_map(snapshot, step)) == png_bytes(pool_map(snapshot, step))
    assert sizes == {(770, 539)}
