"""The pictures: drawn from any trace, in the house's style, without pyplot, small enough to commit."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from minserve.core.batch import ScheduledBatch
from minserve.core.engine import Engine
from minserve.core.request import SamplingParams
from minserve.core.trace import Trace
from minserve.lab import figures
from tests.oracle import OracleRunner, make_engine


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


def rectangles(ax: Axes) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def bars(ax: Axes) -> list[tuple[float, float, float, float]]:
    """(left, width, row, opacity) of the horizontal bars of a timeline."""
    return [(round(p.get_x(), 2), round(p.get_width(), 2), round(p.get_y() + 0.4, 2), p.get_alpha() or 1.0) for p in rectangles(ax)]


def test_timeline_shows_waits_prompts_and_decodes() -> None:
    rows, pool = figures.timeline(served().trace).axes
    drawn = bars(rows)
    assert (0.0, 6.0, 2.0, 0.5) in drawn  # request 2 is there from the start: what no step covers, it waits
    assert (0.0, 1.0, 0.0, 1.0) in drawn and (1.0, 1.0, 0.0, 0.45) in drawn  # request 0: its prompt in step 0, then a decode
    assert (1.0, 1.0, 2.0, 1.0) in drawn  # one token, and yet prompt: a chunk, not a decode
    assert "s" in pool.get_xlabel() and pool.get_ylim()[0] == 0 and pool.get_ylabel() == "KV blocks"


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


def test_block_map_fills_each_block_as_far_as_its_slots_are() -> None:
    engine = served()
    [ax] = figures.block_map(batches_of(engine), 6, 4, "Blocks change hands").axes
    cells = {}  # (step, block) -> share of the slots filled
    for patch in rectangles(ax):
        if patch.get_alpha() is None:
            step, block = round(patch.get_x() + 0.45), round(patch.get_y() - 0.4)
            cells[step, block] = round(-patch.get_height() / 0.8, 2)
    expected = {}
    for batch in batches_of(engine):
        for row in batch.rows:
            for index, block in enumerate(row.block_table):
                expected[batch.step, block] = min(4, row.end - 4 * index) / 4
    assert cells == expected and cells[0, 1] == 0.25  # 5 tokens: block 0 full, one slot of block 1


def test_block_map_hatches_a_block_with_two_owners() -> None:
    engine = make_engine(num_blocks=8, block_size=4)
    for _ in range(2):
        engine.add(range(10, 19), SamplingParams(max_tokens=2))
    engine.run()
    [ax] = figures.block_map(batches_of(engine), 8, 4, "Two owners").axes
    assert any(patch.get_hatch() for patch in ax.patches)


def test_nothing_to_draw_is_said_so() -> None:
    with pytest.raises(ValueError, match="no steps"):
        figures.timeline(Trace())
    with pytest.raises(ValueError, match="no batches"):
        figures.block_map([], 6, 4, "")


def test_pictures_are_white_seven_inches_wide_and_small(tmp_path: Path) -> None:
    png = figures.png_bytes(figures.timeline(served().trace))
    pixels = imread(io.BytesIO(png))
    assert pixels.shape[1] == 770 and tuple(pixels[0, 0, :3]) == (1.0, 1.0, 1.0)  # dark themes see a white ground
    assert len(png) < 60_000
    assert figures.save(figures.new_figure(), tmp_path / "new" / "empty.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_case_190_minus_signs_are_drawn_without_a_warning() -> None:
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from minserve.lab import figures\n"
        "figure = figures.new_figure()\n"
        "left, right = figure.subplots(1, 2)\n"
        "left.plot([-1, 1], [-1, 1]); right.plot([0.001, 1], [0.001, 1]); right.set_yscale('log'); right.set_xscale('log')\n"
        "figures.png_bytes(figure)\n"
        "import sys; assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
