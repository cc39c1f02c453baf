"""The helpers of the notebooks' cells: what they show, in both forms, and what they refuse."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minserve.core.engine import Engine
from minserve.core.metrics import Summary, summarize
from minserve.core.scheduler import Scheduler
from minserve.lab import notebook
from minserve.lab.claims import CLAIMS
from minserve.lab.style import new_figure

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What the helpers display, in order, instead of displaying it."""
    bundles: list[dict[str, str]] = []
    monkeypatch.setattr(notebook, "display", lambda bundle, raw: bundles.append(bundle))
    return bundles


def test_setup_names_the_machine_in_one_line_without_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    notebook.setup()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and torch.__version__ in out and "cores" in out
    assert "/" not in out and "\\" not in out


def test_setup_makes_a_figure_show_as_png_and_leaves_pyplot_alone() -> None:
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from matplotlib.figure import Figure\n"
        "shell = InteractiveShell.instance()\n"
        "from minserve.lab.notebook import setup\n"
        "setup()\n"
        "figure = Figure(); figure.subplots()\n"
        "data, _ = shell.display_formatter.format(figure)\n"
        "assert 'image/png' in data, data\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr


def test_show_source_shows_the_live_lines(shown: list[dict[str, str]]) -> None:
    notebook.show_source(Engine.step)
    [bundle] = shown
    assert bundle["text/plain"].startswith("# minserve.core.engine.Engine.step\ndef step(self)")
    assert "```python\ndef step(self)" in bundle["text/markdown"] and "self.runner.execute(batch)" in bundle["text/markdown"]


def test_show_source_refuses_more_than_it_may_show() -> None:
    with pytest.raises(ValueError, match=r"Scheduler has \d\d\d lines, at most 40"):
        notebook.show_source(Scheduler)
    with pytest.raises(ValueError, match="at most 2 are shown"):
        notebook.show_source(Engine.step, max_lines=2)
    with pytest.raises(ValueError, match=r"Engine.step is \d+ columns wide, at most 60"):
        notebook.show_source(Engine.step, max_columns=60)


def test_show_source_shows_what_a_kernel_wraps(shown: list[dict[str, str]]) -> None:
    class Wrapped:  # as @triton.jit leaves a kernel: an object that is no function, and the function in it
        fn = staticmethod(notebook.versions)

    notebook.show_source(Wrapped())
    [bundle] = shown
    assert bundle["text/plain"].startswith("# minserve.lab.notebook.versions\ndef versions()")


def test_without_triton_a_notebook_of_kernels_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    with pytest.raises(notebook.TritonMissing, match="Linux only.*no other notebook needs it") as raised:
        notebook.require_triton()
    assert raised.value._render_traceback_() == [str(raised.value)]


def test_without_triton_a_cell_shows_the_sentence_and_no_traceback() -> None:
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from minserve.lab import notebook\n"
        "notebook.find_spec = lambda name: None\n"
        "result = InteractiveShell.instance().run_cell('from minserve.lab.notebook import require_triton; require_triton()')\n"
        "assert isinstance(result.error_in_exec, ImportError)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("Triton is not installed here") and out.stdout.count("\n") == 1


def test_with_triton_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(notebook, "find_spec", lambda name: True)
    notebook.require_triton()
    assert capsys.readouterr().out == ""


def test_show_gives_the_picture_and_the_sentence(shown: list[dict[str, str]]) -> None:
    notebook.show(new_figure(), "An empty picture.")
    picture, caption = shown
    assert picture["image/png"].startswith("iVBOR") and picture["text/plain"] == "An empty picture."
    assert caption["text/markdown"] == "*An empty picture.*"


def test_export_keeps_the_figure_only_where_it_is_asked_to(
    shown: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(notebook.FIGURES_FOLDER, raising=False)
    notebook.export(new_figure(), "empty", "An empty picture.")
    assert not list(tmp_path.rglob("*")) and shown[1]["text/plain"] == "An empty picture."
    monkeypatch.setenv(notebook.FIGURES_FOLDER, str(tmp_path / "figures"))
    notebook.export(new_figure(), "empty", "An empty picture.")
    [written] = (tmp_path / "figures").iterdir()
    assert written.name == "empty.png" and base64.b64encode(written.read_bytes()).decode() == shown[2]["image/png"]


@pytest.mark.parametrize("name", ["../empty", "Empty", "empty.png", ""])
def test_export_refuses_a_name_that_leaves_its_folder(name: str, shown: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="names a figure"):
        notebook.export(new_figure(), name, "")
    assert not shown


def test_make_outputs_exports_into_the_folder_of_figures() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [recipe] = re.findall(r"^outputs:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert f'{notebook.FIGURES_FOLDER}="$(CURDIR)/figures" $(BIN)/jupyter nbconvert --to notebook --execute' in recipe


@pytest.mark.parametrize(
    ("naive", "real"),
    [([1, (2, 3)], [1, [2, 3]]), ({"a": 0.5}, {"a": 0.5}), (torch.ones(2), [1.0, 1.0]), ("R0", "R0"), (float("inf"), float("inf"))],
)
def test_assert_same_accepts_equal_values_of_either_form(naive: Any, real: Any, capsys: pytest.CaptureFixture[str]) -> None:
    notebook.assert_same(naive, real)
    assert capsys.readouterr().out.startswith("same: ")


@pytest.mark.parametrize(
    ("naive", "real"),
    [([1, 2], [1, 3]), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (torch.ones(2), torch.ones(3)), (1.0, 1.1), (float("nan"), 1.0), ([], None)],
)
def test_assert_same_prints_both_sides_on_failure(naive: Any, real: Any) -> None:
    with pytest.raises(AssertionError) as error:
        notebook.assert_same(naive, real)
    assert f"naive: {naive!r}" in str(error.value) and f"real:  {real!r}" in str(error.value)


def test_assert_same_within_a_tolerance() -> None:
    notebook.assert_same({"x": [1.0, torch.zeros(1)]}, {"x": [1.05, torch.full((1,), 0.05)]}, tolerance=0.1)
    with pytest.raises(AssertionError):
        notebook.assert_same([1.0], [1.2], tolerance=0.1)


@pytest.mark.parametrize(
    ("guess", "plain"),
    [
        (..., "no guess yet; it is 46,080 bytes"),
        (None, "no guess yet; it is 46,080 bytes"),
        (23_040, "guess 23,040, it is 46,080 bytes, 2.00 times your guess"),
        (0, "guess 0, it is 46,080 bytes, and the guess was nothing"),
    ],
)
def test_reveal_puts_the_guess_beside_the_number(guess: Any, plain: str, shown: list[dict[str, str]]) -> None:
    notebook.reveal(guess, 46_080, "bytes")
    assert shown[0]["text/plain"] == plain


def test_check_tells_untried_from_wrong_from_right(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [notebook.check(answer, lambda x: x == 4, "count again") for answer in (..., None, 3, 4)]
    assert answers == [False, False, False, True]
    assert capsys.readouterr().out.splitlines() == ["not tried yet", "not tried yet", "not yet (3): count again", "right"]


def test_claim_is_one_line_that_a_program_can_read(shown: list[dict[str, str]]) -> None:
    notebook.claim("A27", measured="3.26x", verdict="WRONG", why="1/(1 - 0.7) bounds it.")
    assert shown[0]["text/plain"].split(" | ") == ["claim", "A27", "WRONG", "3.26x", "1/(1 - 0.7) bounds it."]
    assert CLAIMS["A27"].statement in shown[0]["text/markdown"]  # the reader is told what was said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("A92", "WRONG", "3", "so"), "unknown claim 'A92'"),
        (("A27", "MAYBE", "3", "so"), "'MAYBE' is not a verdict"),
        (("A27", "HOLDS", "3", "so"), "A27: the run says HOLDS, claims.json expects WRONG .decided by: 3.26 times"),
        (("A27", "WRONG", " ", "so"), "A27: say in words what was measured"),
        (("A27", "WRONG", "3", ""), "A27: say in words what was measured"),
        (("A27", "WRONG", "3 | 4", "so"), "got '3 | 4'"),
    ],
)
def test_claim_refuses_what_it_does_not_know_or_expect(fields: tuple[str, ...], words: str, shown: list[dict[str, str]]) -> None:
    claim_id, verdict, measured, why = fields
    with pytest.raises(ValueError, match=words.replace("|", r"\|")):
        notebook.claim(claim_id, measured=measured, verdict=verdict, why=why)
    assert not shown


def test_record_writes_a_number_down_with_where_it_comes_from(shown: list[dict[str, str]]) -> None:
    notebook.record("memory bandwidth", 26.71828, "GB/s", seed=3)
    kind, name, value, unit, rest = shown[0]["text/plain"].split(" | ", 4)
    assert (kind, name, value, unit) == ("record", "memory bandwidth", "26.7", "GB/s")
    entry = json.loads(rest)
    assert entry["value"] == 26.71828 and entry["seed"] == 3 and entry["machine"] == notebook.machine()
    assert entry["versions"]["torch"] == torch.__version__ and entry["threads"] == torch.get_num_threads()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
    assert "seed 3" in shown[0]["text/markdown"] and "\n" not in shown[0]["text/plain"]


def test_lines_are_found_again_in_an_executed_notebook(shown: list[dict[str, str]]) -> None:
    notebook.claim("A27", measured="3.26x", verdict="WRONG", why="1/0.3 | 3.33 bounds it.")
    notebook.record("bytes", 23_040, "B")
    score = {"output_type": "display_data", "data": {"text/plain": ["score | 00 | 3 | - | - | 0", " | - | -\n"]}}
    claim, entry = ({"output_type": "display_data", "data": bundle} for bundle in shown)
    stream = {"output_type": "stream", "text": "claim | printed, not shown"}
    executed = {"cells": [{"outputs": [claim, stream, entry]}, {"cell_type": "markdown"}, {"outputs": [score]}]}
    assert notebook.lines_of(executed, "claim") == [("A27", "WRONG", "3.26x", "1/0.3 | 3.33 bounds it.")]
    assert notebook.lines_of(executed, "score") == [("00", "3", "-", "-", "0", "-", "-")]
    [(name, value, unit, rest)] = notebook.lines_of(executed, "record")
    assert (name, value, unit, json.loads(rest)["value"]) == ("bytes", "23,040", "B", 23_040)


def test_score_is_one_row(shown: list[dict[str, str]]) -> None:
    summary: Summary = summarize([], [])
    notebook.score("00", summary, 3 * notebook.MIB)
    assert shown[0]["text/plain"] == "score | 00 | 3 | - | - | 0 | - | -"
    assert len({line.count("|") for line in shown[0]["text/markdown"].splitlines()}) == 1


def test_score_names_and_counts_weights_in_another_format(shown: list[dict[str, str]]) -> None:
    notebook.score("09", summarize([], []), 300 * notebook.MIB, weights=("gptq-int4", 90 * notebook.MIB))
    assert shown[0]["text/plain"] == "score | 09 | 300 (gptq-int4 weights 90) | - | - | 0 | - | -"
    executed = {"cells": [{"outputs": [{"output_type": "display_data", "data": shown[0]}]}]}
    assert notebook.lines_of(executed, "score") == [("09", "300 (gptq-int4 weights 90)", "-", "-", "0", "-", "-")]


def test_resident_bytes_counts_this_process() -> None:
    before = notebook.resident_bytes()
    held = torch.ones(64 * notebook.MIB // 4)
    assert notebook.resident_bytes() - before > 48 * notebook.MIB
    del held
