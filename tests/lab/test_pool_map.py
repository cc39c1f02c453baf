"""One moment of the scheduler as a picture: what is written on it, and that it keeps its size."""

from dataclasses import replace

from minserve.core.records import StepRecord
from minserve.core.snapshot import RequestState, Snapshot
from minserve.lab.pool_grid import Grid
from minserve.lab.pool_map import pool_map, pool_sheet
from minserve.lab.sheet import Words
from minserve.lab.style import png_bytes, shrink_png

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


def test_pictures_have_one_size_and_are_small() -> None:
    sizes = set()
    for num_blocks, block_size in ((8, 16), (24, 4), (64, 2), (300, 1)):
        state = RequestState("A", 6, 9, 8, tuple(range(num_blocks // 2)))
        counts = tuple(int(block_id < num_blocks // 2) for block_id in range(num_blocks))
        free = tuple(range(num_blocks // 2, num_blocks))
        snapshot = Snapshot(num_blocks, block_size, 16, 0, (state,), (), counts, free, (), ())
        png = png_bytes(pool_map(snapshot, None, "Half of the pool"))
        sizes.add((int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")))
        assert len(shrink_png(png)) < 60_000  # as a notebook keeps it
    assert png_bytes(pool_map(SHARED, STEP)) == png_bytes(pool_map(SHARED, STEP))
    assert sizes == {(770, 539)}
