"""The pictures of runs: drawn from any trace, in the house's style, small enough to commit."""

import io
from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from minserve.core.batch import ScheduledBatch
from minserve.core.engine import Engine
from minserve.core.request import SamplingParams
from minserve.core.trace import Trace
from minserve.lab import figures
from minserve.lab.style import PALETTE, pale
from tests.lab.boxes import boxes, words
from tests.oracle import OracleRunner, make_engine

STACK = (pale(PALETTE[0]), PALETTE[0].lower())


def served(token_budget: int = 8) -> Engine:
    """Three requests of 5, 9 and 3 tokens, served on the oracle with blocks of 4."""
    engine = make_engine(num_blocks=6, block_size=4, token_budget=token_budget)
    for first, length, max_tokens in ((10, 5, 3), (30, 9, 2), (60, 3, 4)):
        engine.add(range(first, first + length), SamplingParams(max_tokens=max_tokens))
    engine.run()
    return engine


def batches_of(engine: Engine) -> list[ScheduledBatch]:
    assert isinstance(engine.runner, OracleRunner)
    return engine.runner.batches


def bars(ax: Axes, colour: str) -> set[tuple[float, float, int]]:
    """(left, width, row) of a timeline's bars of one colour."""
    return {(b.left, b.width, round(b.bottom + b.height / 2)) for b in boxes(ax) if b.colour == colour.lower()}


def test_timeline_shows_waits_prompts_and_decodes() -> None:
    rows, pool = figures.timeline(served().trace).axes
    assert bars(rows, figures.WAIT) == {(0.0, 3.0, 0), (0.0, 3.0, 1), (0.0, 6.0, 2)}  # what no step covers, a request waits
    blue, yellow, green = PALETTE[:3]
    assert bars(rows, blue) == {(0.0, 1.0, 0)} and bars(rows, pale(blue)) == {(1.0, 2.0, 0)}  # two decodes are one bar
    assert bars(rows, yellow) == {(0.0, 2.0, 1)} and bars(rows, pale(yellow)) == {(2.0, 1.0, 1)}
    assert bars(rows, green) == {(1.0, 2.0, 2)}  # one token and then two, and yet all prompt: a chunk is not a decode
    assert "s" in pool.get_xlabel() and pool.get_ylim()[0] == 0 and pool.get_ylabel() == "KV blocks"
    assert words(pool) == [" 6 in use at peak "]


def test_timeline_stops_after_a_step_and_keeps_its_axes() -> None:
    trace = served().trace
    whole, part = figures.timeline(trace), figures.timeline(trace, step=1)
    assert part.axes[0].get_xlim() == whole.axes[0].get_xlim() == (0.0, 6.0)
    assert [ax.get_ylim() for ax in part.axes] == [ax.get_ylim() for ax in whole.axes]
    assert max(b.left + b.width for b in boxes(part.axes[0])) == 2.0  # steps 0 and 1 took a second each
    with pytest.raises(ValueError, match="step -1 is not in the trace: it has steps 0 to 5"):
        figures.timeline(trace, step=-1)


def test_timeline_of_many_shows_the_first_until_they_are_done() -> None:
    rows, _ = figures.timeline(served().trace, max_requests=2).axes
    assert rows.get_ylabel() == "request (first 2 of 3)" and rows.get_xlim() == (0.0, 3.0)


def test_a_pause_between_two_steps_is_seen() -> None:
    engine = make_engine(num_blocks=6, block_size=4)
    engine.run([(0.0, {"prompt_ids": [1], "params": SamplingParams(max_tokens=3)})])
    engine.trace.steps[2] = replace(engine.trace.steps[2], start_s=4.0, end_s=5.0)
    engine.trace.requests["R0"].finished_s = 5.0
    rows, _ = figures.timeline(engine.trace).axes
    assert bars(rows, pale(PALETTE[0])) == {(1.0, 1.0, 0), (4.0, 1.0, 0)}


def test_timeline_marks_preemptions_and_states_its_finding() -> None:
    engine = make_engine(num_blocks=4, block_size=4)
    for first in (10, 40):
        engine.add(range(first, first + 7), SamplingParams(max_tokens=8))
    engine.run()
    assert engine.trace.summary().num_preemptions > 0
    rows = figures.timeline(engine.trace).axes[0]
    assert len(rows.lines) >= 1 and "preemptions" in rows.get_title(loc="left")
    assert figures.timeline(engine.trace, title="Mine").axes[0].get_title(loc="left") == "Mine"


def test_a_request_keeps_its_colour() -> None:
    assert figures.request_colour(1) == figures.request_colour(1 + len(figures.PALETTE)) != figures.request_colour(2)


def cells(ax: Axes) -> dict[tuple[int, int], float]:
    """(step, block) -> share of the slots filled, of the blocks that somebody holds."""
    held = [b for b in boxes(ax) if b.height < 0]
    return {(round(b.left + 0.45), round(b.bottom - 0.4)): round(-b.height / 0.8, 2) for b in held}


def test_block_map_fills_each_block_as_far_as_its_slots_are() -> None:
    engine = served()
    [ax] = figures.block_map(batches_of(engine), 6, 4, "Blocks change hands").axes
    expected = {}
    for batch in batches_of(engine):
        for row in batch.rows:
            for index, block in enumerate(row.block_table):
                expected[batch.step, block] = min(4, row.end - 4 * index) / 4
    assert cells(ax) == expected and expected[0, 1] == 0.25  # 5 tokens: block 0 full, one slot of block 1
    assert sum(b.height > 0 for b in boxes(ax)) == 6 * 6  # behind them, every block at every step
    assert sorted(words(ax)) == ["R0", "R0", "R1", "R1", "R1", "R2", "R2"]  # a name where a block changes hands


def test_block_map_stops_after_a_step() -> None:
    batches = batches_of(served())
    whole, part = figures.block_map(batches, 6, 4, ""), figures.block_map(batches, 6, 4, "", step=2)
    assert part.axes[0].get_xlim() == whole.axes[0].get_xlim()
    assert cells(part.axes[0]) == {at: share for at, share in cells(whole.axes[0]).items() if at[0] <= 2}


def test_block_map_hatches_a_block_with_two_owners() -> None:
    engine = make_engine(num_blocks=8, block_size=4)
    for _ in range(2):
        engine.add(range(10, 19), SamplingParams(max_tokens=2))
    engine.run()
    figure = figures.block_map(batches_of(engine), 8, 4, "Two owners")
    [ax] = figure.axes
    assert {round(b.bottom - 0.4) for b in boxes(ax) if b.hatch} == {0, 1}  # the two full blocks of the common 9 tokens
    assert "R0+R1" in words(ax) and "shared" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_block_map_of_many_requests_says_that_colours_repeat() -> None:
    engine = make_engine(num_blocks=12, block_size=4, token_budget=64)
    for first in range(10):
        engine.add([first], SamplingParams(max_tokens=1))
    engine.run()
    figure = figures.block_map(batches_of(engine), 12, 4, "Ten")
    assert [text.get_text() for text in figure.legends[0].get_texts()][-2:] == ["... 10 in turn", "empty"]


def test_token_budget_stacks_prompts_on_decodes_under_the_line() -> None:
    [ax] = figures.token_budget(served().trace, 8).axes
    drawn = {colour: [(round(b.left + 0.45), b.bottom, b.height) for b in boxes(ax) if b.colour == colour] for colour in STACK}
    assert drawn[pale(PALETTE[0])] == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 1), (4, 0, 1), (5, 0, 1)]
    assert drawn[PALETTE[0].lower()] == [(0, 0, 8), (1, 1, 7), (2, 2, 2), (3, 1, 0), (4, 1, 0), (5, 1, 0)]
    assert words(ax) == ["token budget 8"] and ax.get_ylim()[0] == 0
    assert ax.get_title(loc="left") == "The steps use 48% of their token budget"  # 23 tokens of 6 x 8
    [part] = figures.token_budget(served().trace, 8, step=1).axes
    assert max(b.left for b in boxes(part)) == pytest.approx(0.55) and part.get_xlim() == ax.get_xlim()


def test_nothing_to_draw_is_said_so() -> None:
    with pytest.raises(ValueError, match="no steps"):
        figures.timeline(Trace())
    with pytest.raises(ValueError, match="no steps"):
        figures.token_budget(Trace(), 8)
    with pytest.raises(ValueError, match="no batches"):
        figures.block_map([], 6, 4, "")


def test_pictures_are_white_seven_inches_wide_and_small() -> None:
    png = figures.png_bytes(figures.timeline(served().trace))
    pixels = imread(io.BytesIO(png))
    assert pixels.shape[1] == 770 and tuple(pixels[0, 0, :3]) == (1.0, 1.0, 1.0)  # dark themes see a white ground
    assert len(png) < 60_000
