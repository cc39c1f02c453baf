"""The explorers in a real browser: JupyterLab runs a notebook, a mouse and a key move a slider, the picture follows.

Needs Chromium. Where it is missing the test says so, and with MINSERVE_REQUIRE_BROWSER=1 (as in .ci/run) it fails. What the browser
saw is kept in the folder MINSERVE_SCREENSHOTS, if that is set.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser

from minserve.lab.stepper import little_workload
from tests.lab.browser import LabServer, OpenNotebook, chromium, find_chromium, lab_server
from tests.lab.watched import shared_in, shared_of, watched_run, words_of

pytestmark = pytest.mark.browser

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SLIDERS = {"02_kv_cache.ipynb": "context", "03_batching.ipynb": "length spread"}  # the one that each test moves
WHOLE = "02_kv_cache.ipynb"  # runs with all its cells; of the others, which nbval runs whole, only those that the explorer needs
EXPLORERS = "explorers.ipynb"
ALL_EXPLORERS = (
    "from minserve.lab.widgets import BatchingExplorer, RooflineExplorer, VramCalculator\nVramCalculator()",
    "BatchingExplorer()",
    "RooflineExplorer()",
    "from minserve.lab.widgets import BudgetExplorer\nBudgetExplorer()",
    "from minserve.lab.stepper import SteppingExplorer\nSteppingExplorer()",
    "from minserve.lab.fill_lab import FillLab\nFillLab()",
    "from minserve.lab.policy_duel import PolicyDuel\nPolicyDuel(trace='batch')",
    "from minserve.lab.planner_form import PlannerForm\nPlannerForm()",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        words = "no Chromium here, so the explorers were not tried in a browser: apt-get install chromium"
        if os.environ.get("MINSERVE_REQUIRE_BROWSER") == "1":
            pytest.fail(words)
        pytest.skip(words)
    with chromium(executable) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab over copies of the notebooks, and a notebook of nothing but explorers. Not started where there is no browser."""
    folder = tmp_path_factory.mktemp("notebooks")
    for name in SLIDERS:
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        if name != WHOLE:
            first = next(cell for cell in notebook.cells if cell.cell_type == "code")
            notebook.cells = [cell for cell in notebook.cells if cell is first or cell.cell_type != "code" or "Explorer()" in cell.source]
        nbformat.write(notebook, folder / name)
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    cells = [nbformat.v4.new_code_cell(source) for source in ALL_EXPLORERS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / EXPLORERS)
    with lab_server(folder, tmp_path_factory.mktemp("jupyter")) as server:
        yield server


@pytest.fixture(scope="module")
def opened(browser: Browser, server: LabServer) -> dict[str, OpenNotebook]:
    """All notebooks, under way at the same time: one after another they would take twice as long."""
    opened: dict[str, OpenNotebook] = {}
    for name in (*SLIDERS, EXPLORERS):
        server.set("apputils-extension/themes", {"theme": "JupyterLab Dark" if name == EXPLORERS else "JupyterLab Light"})
        opened[name] = OpenNotebook(browser.new_page(viewport={"width": 1280, "height": 1300}), server, name)
    for notebook in opened.values():
        notebook.run_all()
    return opened


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    return Path(os.environ.get("MINSERVE_SCREENSHOTS") or tmp_path)


def test_all_explorers_follow_the_hand_in_the_dark_theme(opened: dict[str, OpenNotebook], screenshots: Path) -> None:
    notebook = opened[EXPLORERS]
    notebook.wait_for_end()
    for slider in ("context", "length spread", "requests decoding", "newcomers", "fill", "a request"):
        explorer = notebook.explorer(slider)
        before = (explorer.caption, explorer.picture())
        after = explorer.drag(0.9)
        assert before[0] != after[0] and before[1] != after[1]
        if slider == "length spread":
            explorer.choose("policy", "static")
            explorer.wait_for_words("Shown: static")
            explorer.click("step backward")
            explorer.wait_for_words("1 run and 0 wait")
        explorer.save_screenshot(screenshots / f"dark-{slider.replace(' ', '-')}.png")
    assert notebook.complaints == [] and notebook.outside_requests == []


def test_stepping_shows_the_engine_s_own_state(opened: dict[str, OpenNotebook], screenshots: Path) -> None:
    """Forward five, back two, other blocks: each time words and picture follow an engine that the page knows nothing of."""
    notebook, arrivals = opened[EXPLORERS], little_workload().arrivals()
    notebook.wait_for_end()
    explorer, pictures = notebook.explorer("position"), {}

    def expect(step: int, block_size: int, seen: tuple[str, str]) -> None:
        caption, picture = seen
        state = watched_run(arrivals, block_size=block_size).states[step]
        assert [words for words in (f"Step {step}:", *words_of(state, block_size)) if words not in caption] == [], caption
        assert shared_in(caption) == shared_of(state)
        assert pictures.setdefault((step, block_size), picture) == picture

    expect(0, 4, (explorer.caption, explorer.picture()))
    expect(3, 4, explorer.click("step forward", times=3))
    expect(5, 4, explorer.click("step forward", times=2))
    explorer.save_screenshot(screenshots / "dark-position-5.png")
    expect(3, 4, explorer.click("step backward", times=2))
    expect(3, 8, explorer.choose("block size", "8"))
    explorer.save_screenshot(screenshots / "dark-blocks-of-8.png")
    assert len(set(pictures.values())) == len(pictures) == 4
    assert notebook.complaints == [] and notebook.outside_requests == []


def test_a_duel_plays_and_stops(opened: dict[str, OpenNotebook], screenshots: Path) -> None:
    """The player moves the slider, the kernel follows; after a pause, one step back is one step."""
    notebook = opened[EXPLORERS]
    notebook.wait_for_end()
    explorer = notebook.explorer("moment")
    explorer.drag(0.2)
    start_s = _clock(explorer.caption)
    explorer.play_until(lambda: _clock(explorer.caption) > start_s + 2.0)
    stopped_s = _clock(explorer.caption)
    explorer.save_screenshot(screenshots / "dark-duel.png")
    back_s = _clock(explorer.click("step backward")[0])
    assert start_s < back_s < stopped_s < back_s + 1.0
    explorer.choose("right", "slo")
    explorer.wait_for_words("slo: ")
    assert _clock(explorer.caption) < stopped_s  # the clock is that of the slower run, which is another one now
    assert notebook.complaints == [] and notebook.outside_requests == []


def _clock(caption: str) -> float:
    """The moment that is shown, in seconds."""
    return float(caption.removeprefix("At ").split(" s,")[0])


@pytest.mark.parametrize("name", SLIDERS)
def test_a_notebook_runs_and_its_explorer_follows_the_hand(opened: dict[str, OpenNotebook], screenshots: Path, name: str) -> None:
    notebook = opened[name]
    notebook.wait_for_end()
    explorer = notebook.explorer(SLIDERS[name])
    explorer.save_screenshot(screenshots / f"{name[:2]}-before.png")
    seen = [(explorer.caption, explorer.picture()), explorer.drag(0.7), explorer.press("ArrowLeft")]
    explorer.save_screenshot(screenshots / f"{name[:2]}-after.png")
    captions, pictures = zip(*seen, strict=True)
    assert len(set(captions)) == len(set(pictures)) == 3
    assert notebook.complaints == [] and notebook.outside_requests == []
