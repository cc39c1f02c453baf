"""What every explorer has: sliders, a picture, and the same numbers in a sentence.

Why: a slider is dead on GitHub and in print, invisible to a test that runs without a browser, and a picture alone says nothing to a
reader who cannot see it. So an explorer is an object with plain attributes (the numbers), shown in one bundle: the live widget, a still
picture, and a sentence. Setting `explorer.context.value = 4096` in a cell does what a finger on the slider does.

A slider's callback may come on another thread while a cell is still running, so figures are made without pyplot and the numbers
change under a lock. What goes wrong in a callback would be lost in a log: it is shown in the caption and kept in `error`.

Invariant: numbers, sentence and picture always belong to one and the same setting of the controls, or there is an `error`.

Taught in notebooks 02, 03 and 06.
"""

import base64
import html
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from minserve.lab import figures
from minserve.lab.style import number_text, shrink_png

WIDTH, CONTROL_WIDTH = "770px", "370px"
SENTENCE_STYLE, LINES_STYLE = "min-height: 5.6em", "height: 8.4em; overflow-y: auto; margin-top: 0.4em"


class Explorer(ABC):
    """Base of the explorers. A subclass makes its controls, and says how numbers, words and picture follow from them."""

    def __init__(self, controls: Sequence[widgets.Widget], bar: Sequence[widgets.Widget] = ()):
        """Controls stand in two columns; those of the bar in a line of their own below."""
        self._lock = threading.RLock()
        self._is_adjusting = False
        self.text = ""
        self.error: Exception | None = None
        self.caption = widgets.HTML(layout=widgets.Layout(width="auto", max_width=WIDTH, min_height="4.4em"))
        self.image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", width=WIDTH, height="auto"))
        for control in (*controls, *bar):
            if control.has_trait("value"):
                control.observe(self._on_change, names="value")
        columns = widgets.Box(controls, layout=widgets.Layout(flex_flow="row wrap", max_width=WIDTH))
        self.view = widgets.VBox([columns, *([widgets.HBox(bar)] if bar else []), self.image, self.caption])
        self.update()

    @abstractmethod
    def compute(self) -> None:
        """Set the plain attributes from the controls' values."""

    @abstractmethod
    def words(self) -> tuple[str, str]:
        """The finding, and the numbers behind it."""

    def details(self) -> Sequence[str]:
        """Lines below the sentence. They lie in a box of a fixed height, so that more of them move nothing."""
        return ()

    @abstractmethod
    def draw(self) -> Figure:
        """A picture of the plain attributes. Its size must not depend on them, or the page jumps."""

    def update(self) -> None:
        """Bring numbers, sentence and picture up to date. Raises what the cost model or the engine raises."""
        with self._lock:
            self.compute()
            (finding, numbers), details = self.words(), self.details()
            picture = figures.png_bytes(self.draw())
            self.error, self.text = None, "\n".join((f"{finding} {numbers}", *details))
            sentence = f"<b>{html.escape(finding)}</b><br>{html.escape(numbers)}"
            if details:
                lines = "<br>".join(map(html.escape, details))
                sentence = f"<div style='{SENTENCE_STYLE}'>{sentence}</div><div style='{LINES_STYLE}'>{lines}</div>"
            self.caption.value = f"<div style='line-height: 1.4'>{sentence}</div>"
            self.image.value = picture

    def _on_change(self, _: Any = None) -> None:
        with self._lock:
            if self._is_adjusting:
                return
            try:
                self.update()
            except Exception as error:  # nobody above would see it
                self._show_error(error)

    def _show_error(self, error: Exception) -> None:
        self.error, self.text = error, f"{type(error).__name__}: {error}"
        self.caption.value = f"<div style='line-height: 1.4'><b>This setting cannot be shown.</b><br>{html.escape(self.text)}</div>"
        blank = figures.new_figure()
        blank.text(0.5, 0.5, "no picture: see the sentence below", ha="center", color=figures.INK)
        self.image.value = figures.png_bytes(blank)

    @contextmanager
    def _adjusting(self) -> Iterator[None]:
        """Controls that the explorer itself sets in here don't call it back."""
        self._is_adjusting = True
        try:
            yield
        finally:
            self._is_adjusting = False

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        with self._lock:
            bundle: dict[str, Any] = dict(self.view._repr_mimebundle_() or {})
            bundle["image/png"] = base64.b64encode(shrink_png(self.image.value)).decode()  # a notebook keeps it
            bundle["text/plain"] = self.text
            return bundle


# --- controls -------------------------------------------------------------------------------------


def choice(description: str, options: Iterable[Any], value: Any) -> Any:
    """A list to choose one of. (Any, since no type checker knows that its value is one of the options.)"""
    return widgets.Dropdown(description=description, options=list(options), value=value, **_looks())


def steps(description: str, low: int, high: int, value: int) -> widgets.SelectionSlider:
    """A slider over the powers of two from `low` to `high` and what lies half way between: equal ways are equal factors."""
    return places(description, halves(low, high), value)


def places(description: str, numbers: Iterable[int], value: int) -> widgets.SelectionSlider:
    """A slider that stops at these numbers only."""
    options = [(f"{number:,}", number) for number in numbers]
    return widgets.SelectionSlider(description=description, options=options, value=value, **_looks())


def halves(low: int, high: int) -> list[int]:
    """Powers of two times `low` up to `high`, and three halves of each.

    >>> halves(2, 16)
    [2, 3, 4, 6, 8, 12, 16]
    """
    numbers = [low]
    while numbers[-1] < high:
        numbers.append(numbers[-1] * 3 // 2 if len(numbers) % 2 else numbers[-2] * 2)
    return [number for number in dict.fromkeys(numbers) if number <= high]


def amount(description: str, low: float, high: float, step: float, value: float, readout_format: str = ".2f") -> widgets.FloatSlider:
    return widgets.FloatSlider(
        description=description, min=low, max=high, step=step, value=value, readout_format=readout_format, **_looks()
    )


def whole(description: str, low: int, high: int, value: int, step: int = 1) -> widgets.IntSlider:
    return widgets.IntSlider(description=description, min=low, max=high, value=value, step=step, **_looks())


def step_buttons(slider: Any) -> list[widgets.Button]:
    """To the start, one back, one forward, to the end."""
    moves: dict[str, Callable[[], int]] = {
        "fast-backward": lambda: slider.min,
        "step-backward": lambda: max(slider.min, slider.value - 1),
        "step-forward": lambda: min(slider.max, slider.value + 1),
        "fast-forward": lambda: slider.max,
    }
    return [_step_button(slider, icon, move) for icon, move in moves.items()]


def _step_button(slider: Any, icon: str, move: Callable[[], int]) -> widgets.Button:
    button = widgets.Button(icon=icon, tooltip=icon.replace("-", " "), layout=widgets.Layout(width="42px"))
    button.on_click(lambda _: setattr(slider, "value", move()))
    return button


def _looks() -> dict[str, Any]:
    return {"style": {"description_width": "130px"}, "layout": widgets.Layout(width=CONTROL_WIDTH)}


# --- words ----------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Seconds for a reader; a dash where there are none.

    >>> duration(0.0174), duration(3.14159), duration(None)
    ('17.4 ms', '3.14 s', '-')
    """
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(num_bytes: float) -> str:
    """Bytes in the units of data sheets.

    >>> size(26_032_000_000), size(819_200)
    ('26.0 GB', '0.819 MB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{number_text(num_bytes / 1e6)} MB"
