"""Helpers of the notebooks' cells: set-up, live source, comparisons, guesses, verdicts, the scorecard.

Why: a notebook should hold ideas and numbers, not plumbing. Each helper shows one thing, and shows it in two forms: for the
eye (Markdown or a picture) and as plain text, which tests compare and notebook 15 collects.

Invariant: no helper touches pyplot, which is not safe beside a widget's callback, nor keeps anything between calls.

Taught in notebook 00.
"""

import base64
import inspect
import math
import os
import platform
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from IPython.core.getipython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure

from minserve.core.trace import Summary
from minserve.lab import figures
from minserve.lab.claims import Verdict, require_known

MIB = 1 << 20
SCORE_COLUMNS = ("notebook", "memory MiB", "TTFT p50 ms", "TPOT p50 ms", "output tokens/s", "quality", "cost")


def setup() -> None:
    """Make figures show as PNG, and print the machine in one line: a number without its machine is a rumour."""
    shell: Any = get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["image/png"].for_type(Figure, _png_base64)  # IPython's own helper would load pyplot
    memory_gib = psutil.virtual_memory().total / 2**30
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB memory, {device}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, threads: {torch.get_num_threads()}"
    )


def show_source(obj: Any, max_lines: int = 40) -> None:
    """Show the live source of a function, method or class. Raises ValueError if it is longer than `max_lines`."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(obj))).rstrip()
    num_lines = source.count("\n") + 1
    if num_lines > max_lines:
        raise ValueError(f"{obj.__qualname__} has {num_lines} lines, at most {max_lines} are shown at a time: choose a part of it")
    name = f"{obj.__module__}.{obj.__qualname__}"
    _show(f"`{name}`\n\n```python\n{source}\n```", f"# {name}\n{source}")


def show(figure: Figure, caption: str) -> None:
    """Show a figure with one sentence that says the same in words and numbers, for those who cannot see it."""
    display({"image/png": _png_base64(figure), "text/plain": caption}, raw=True)
    _show(f"*{caption}*", caption)


def _png_base64(figure: Figure) -> str:
    return base64.b64encode(figures.png_bytes(figure)).decode()


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
    value = f"{_number(measured)} {unit}".rstrip()
    if guess is None or guess is ...:
        _show(f"**{value}**. No guess yet: put a number in place of `...` and run the cell again.", f"no guess yet; it is {value}")
        return
    ratio = f"{measured / guess:.2f} times your guess" if guess else "and the guess was nothing"
    _show(f"Your guess: {_number(guess)} {unit}. It is **{value}**, {ratio}.", f"guess {_number(guess)}, it is {value}, {ratio}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def check(answer: Any, is_right: Callable[[Any], bool], hint: str) -> bool:
    """Judge the answer to an exercise; one of `...` or None has not been tried. Says what it found and returns whether it is right."""
    if answer is None or answer is ...:
        print("not tried yet")
        return False
    right = bool(is_right(answer))
    print("right" if right else f"not yet ({_shortened(answer)}): {hint}")
    return right


def claim(claim_id: str, *, measured: str, verdict: str, why: str) -> None:
    """State a verdict on one claim. Raises ValueError for an unknown id or a word that is not one of the four verdicts.

    The plain form is one line, `claim | id | verdict | measured | why`.
    """
    require_known(claim_id)
    if verdict not in list(Verdict):
        raise ValueError(f"{verdict!r} is not a verdict: choose one of {', '.join(v.value for v in Verdict)}")
    _show(f"**{claim_id} · {verdict}** · measured: {measured}. {why}", f"claim | {claim_id} | {verdict} | {measured} | {why}")


def score(notebook: str, summary: Summary, memory_bytes: int, quality: str = "-", cost: str = "-") -> None:
    """Show a row of the scorecard that runs through the course; a dash is a column that is not measured yet.

    The plain form is one line, `score | notebook | memory | TTFT | TPOT | tokens/s | quality | cost`.
    """
    cells = (notebook, f"{memory_bytes / MIB:.0f}", _ms(summary.ttft_p50_s), _ms(summary.tpot_p50_s))
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
