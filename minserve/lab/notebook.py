"""Helpers of the notebooks' cells: set-up, live source, comparisons, guesses, verdicts, the scorecard.

Why: a notebook should hold ideas and numbers, not plumbing. Each helper shows one thing, and shows it in two forms: for the
eye (Markdown or a picture) and as plain text, which tests compare and notebook 15 collects.

Invariant: no helper touches pyplot, which is not safe beside a widget's callback, nor keeps anything between calls.

Taught in notebook 00.
"""

import base64
import datetime
import inspect
import json
import math
import os
import platform
import re
import textwrap
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from IPython.core.getipython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure

from minserve import __version__
from minserve.core.metrics import Summary
from minserve.lab import style
from minserve.lab.claims import Verdict, require_known

MIB = 1 << 20
FIGURES_FOLDER = "MINSERVE_FIGURES"  # the environment variable that `make outputs` sets, and no one who only reads and runs
NUM_FIELDS = {"claim": 5, "score": 8, "record": 5}  # of the plain lines that notebook 15 and the tests collect
SCORE_COLUMNS = ("notebook", "memory MiB", "TTFT p50 ms", "TPOT p50 ms", "output tokens/s", "quality", "cost")


def setup() -> None:
    """Make figures show as PNG, and print the machine in one line: a number without its machine is a rumour."""
    shell: Any = get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["image/png"].for_type(Figure, _png_base64)  # IPython's own helper would load pyplot
    print(f"{machine()}; {', '.join(f'{name} {version}' for name, version in versions().items())}, threads: {torch.get_num_threads()}")


class TritonMissing(ImportError):
    """Triton is not installed. A cell that raises it shows the sentence, without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [str(self)]


def require_triton() -> None:
    """For a notebook of kernels, before it imports any. Raises TritonMissing, in words that help, where Triton is not installed."""
    if find_spec("triton") is None:
        raise TritonMissing(
            "Triton is not installed here (it comes for Linux only: pip install 'minserve[triton]'), so the cells of this notebook "
            "cannot run; its saved outputs can be read as they are, and no other notebook needs it."
        )


def machine() -> str:
    """What this runs on, without a name or a path of its owner."""
    memory_gib = psutil.virtual_memory().total / 2**30
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB memory, {device}"


def versions() -> dict[str, str]:
    return {"minserve": __version__, "Python": platform.python_version(), "torch": torch.__version__}


def show_source(obj: Any, max_lines: int = 40, max_columns: int = 110) -> None:
    """Show the live source of a function, method, class or kernel. Raises ValueError if a projector could not show it in one piece."""
    plain = getattr(obj, "fn", obj)  # what @triton.jit has wrapped
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(plain))).rstrip()
    num_lines = source.count("\n") + 1
    if num_lines > max_lines:
        raise ValueError(f"{plain.__qualname__} has {num_lines} lines, at most {max_lines} are shown at a time: choose a part of it")
    num_columns = max(len(line) for line in source.splitlines())
    if num_columns > max_columns:
        raise ValueError(f"{plain.__qualname__} is {num_columns} columns wide, at most {max_columns} are shown: break its lines")
    name = f"{plain.__module__}.{plain.__qualname__}"
    _show(f"`{name}`\n\n```python\n{source}\n```", f"# {name}\n{source}")


def show(figure: Figure, caption: str) -> None:
    """Show a figure with one sentence that says the same in words and numbers, for those who cannot see it."""
    display({"image/png": _png_base64(figure), "text/plain": caption}, raw=True)
    _show(f"*{caption}*", caption)


def export(figure: Figure, name: str, caption: str) -> None:
    """Show a figure; while `make outputs` runs, also keep it as figures/NAME.png, for the README.

    Whoever runs the notebook otherwise changes nothing in the clone. Raises ValueError for a name that is no file's name.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(f"{name!r} names a figure in small letters, digits and _, without a folder or an ending")
    show(figure, caption)
    folder = os.environ.get(FIGURES_FOLDER)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(style.small_png_bytes(figure))


def _png_base64(figure: Figure) -> str:
    return base64.b64encode(style.small_png_bytes(figure)).decode()


def assert_same(naive: Any, real: Any, tolerance: float = 0.0) -> None:
    """Assert that the naive version and the real one agree; the error shows both. Tensors and floats may differ by `tolerance`."""
    if not _same(naive, real, tolerance):
        raise AssertionError(f"naive and real differ\nnaive: {naive!r}\nreal:  {real!r}")
    print(f"same: {_shortened(real)}")


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
        return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=tolerance)
    if isinstance(a, float) or isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=0.0, abs_tol=tolerance)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _shortened(value: Any, num_characters: int = 70) -> str:
    text = repr(value)
    return text if len(text) <= num_characters else text[: num_characters - 4] + " ..."


def reveal(guess: Any, measured: float, unit: str = "") -> None:
    """Put a guess beside what came out. A guess of `...` or None is one not made yet."""
    value = f"{style.number_text(measured)} {unit}".rstrip()
    if guess is None or guess is ...:
        _show(f"**{value}**. No guess yet: put a number in place of `...` and run the cell again.", f"no guess yet; it is {value}")
        return
    ratio = f"{measured / guess:.2f} times your guess" if guess else "and the guess was nothing"
    _show(
        f"Your guess: {style.number_text(guess)} {unit}. It is **{value}**, {ratio}.",
        f"guess {style.number_text(guess)}, it is {value}, {ratio}",
    )


def check(answer: Any, is_right: Callable[[Any], bool], hint: str) -> bool:
    """Judge the answer to an exercise; one of `...` or None has not been tried. Says what it found and returns whether it is right."""
    if answer is None or answer is ...:
        print("not tried yet")
        return False
    right = bool(is_right(answer))
    print("right" if right else f"not yet ({_shortened(answer)}): {hint}")
    return right


def claim(claim_id: str, *, measured: str, verdict: str, why: str) -> None:
    """State the verdict that a run came to on one claim. The plain form is one line, `claim | id | verdict | measured | why`.

    Raises ValueError for an unknown id, a word that is not one of the four verdicts, nothing measured or argued, and for a verdict other
    than the expected one: then either the run or `claims.json` is to be looked at again.
    """
    known = require_known(claim_id)
    if verdict not in list(Verdict):
        raise ValueError(f"{verdict!r} is not a verdict: choose one of {', '.join(v.value for v in Verdict)}")
    if verdict != known.verdict:
        raise ValueError(
            f"{claim_id}: the run says {verdict}, claims.json expects {known.verdict} (decided by: {known.decides}). "
            "Look at both again; if the run is right, change the data on purpose"
        )
    if not measured.strip() or not why.strip() or " | " in measured:
        raise ValueError(f"{claim_id}: say in words what was measured, and why that decides; got {measured!r} and {why!r}")
    said = f"**{claim_id} · {verdict}** · said: {known.statement} Measured: **{measured}**. {why}"
    _show(said, f"claim | {claim_id} | {verdict} | {measured} | {why}")


def record(name: str, value: float, unit: str, *, seed: int | None = None) -> None:
    """Write a measured number down with where it comes from. The plain form is one line, `record | name | value | unit | JSON`.

    The JSON has all of it, the value unrounded, and where it was measured: machine, versions, threads, date, seed.
    """
    entry = {"name": name, "value": value, "unit": unit, "seed": seed, "machine": machine(), "versions": versions()}
    entry |= {"threads": torch.get_num_threads(), "date": datetime.date.today().isoformat()}
    chance = "nothing random in it" if seed is None else f"seed {seed}"
    rounded = style.number_text(value)
    said = f"{name}: **{rounded} {unit}** · {entry['machine']}, {entry['date']}, {chance}"
    _show(said, f"record | {name} | {rounded} | {unit} | {json.dumps(entry)}")


def lines_of(notebook: Mapping[str, Any], kind: str) -> list[tuple[str, ...]]:
    """The claims, scores or records in the outputs of an executed notebook (the parsed .ipynb), each as the fields after its kind."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    texts = [output.get("data", {}).get("text/plain", "") for output in outputs]
    lines = [line for text in texts for line in (text if isinstance(text, str) else "".join(text)).splitlines()]
    return [tuple(line.split(" | ", NUM_FIELDS[kind] - 1)[1:]) for line in lines if line.startswith(f"{kind} | ")]


def score(
    notebook: str,
    summary: Summary,
    memory_bytes: int,
    quality: str = "-",
    cost: str = "-",
    weights: tuple[str, int] | None = None,
) -> None:
    """Show a row of the scorecard that runs through the course; a dash is a column that is not measured yet.

    weights: the name of their format and their bytes, where these are not the model's own; told beside the memory, which includes them.

    The plain form is one line, `score | notebook | memory | TTFT | TPOT | tokens/s | quality | cost`.
    """
    memory = f"{memory_bytes / MIB:.0f}" + (f" ({weights[0]} weights {weights[1] / MIB:.0f})" if weights else "")
    cells = (notebook, memory, _ms(summary.ttft_p50_s), _ms(summary.tpot_p50_s))
    cells += (f"{summary.output_tokens_per_s:.0f}", quality, cost)
    table = [SCORE_COLUMNS, ("---",) * len(SCORE_COLUMNS), cells]
    _show("\n".join(f"| {' | '.join(row)} |" for row in table), f"score | {' | '.join(cells)}")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return psutil.Process().memory_info().rss


def _show(markdown: str, plain: str) -> None:
    display({"text/markdown": markdown, "text/plain": plain}, raw=True)
