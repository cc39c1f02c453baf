"""What every explorer inherits, tried on one that divides by its slider."""

import threading
from typing import Any

import pytest
from matplotlib.figure import Figure

from minserve.lab import figures
from minserve.lab.explorer import Explorer, amount, choice, places, step_buttons, steps, whole


class Dividing(Explorer):
    """12 over the number; the answer's half is another control, which follows by itself."""

    def __init__(self) -> None:
        self.number, self.half = whole("number", 0, 12, 3), amount("half", 0.0, 100.0, 0.5, 0.0)
        self.calls: list[str] = []
        super().__init__([self.number], [self.half])

    def compute(self) -> None:
        self.calls.append(threading.current_thread().name)
        self.share = 12 / self.number.value
        with self._adjusting():
            self.half.value = self.share / 2

    def words(self) -> tuple[str, str]:
        return f"<{self.share}>", "is the share."

    def draw(self) -> Figure:
        figure = figures.new_figure(height_in=0.5)
        figure.text(0, 0, f"{self.share}")
        return figure


def test_a_change_brings_numbers_sentence_and_picture() -> None:
    explorer = Dividing()
    assert (explorer.share, explorer.text, explorer.error) == (4.0, "<4.0> is the share.", None)
    assert "<b>&lt;4.0&gt;</b>" in explorer.caption.value  # words are words, whatever signs are in them
    picture = bytes(explorer.image.value)
    explorer.number.value = 6
    assert (explorer.share, explorer.text) == (2.0, "<2.0> is the share.") and bytes(explorer.image.value) != picture


def test_what_the_explorer_sets_itself_does_not_call_it_back() -> None:
    explorer = Dividing()
    explorer.number.value = 4
    assert len(explorer.calls) == 2 and explorer.half.value == 1.5
    explorer.half.value = 50.0  # somebody else's hand does
    assert len(explorer.calls) == 3


def test_an_error_in_a_callback_is_shown_and_the_next_change_heals_it() -> None:
    explorer = Dividing()
    before = bytes(explorer.image.value)
    explorer.number.value = 0
    assert isinstance(explorer.error, ZeroDivisionError)
    assert explorer.text == "ZeroDivisionError: division by zero" and explorer.text in explorer.caption.value
    assert bytes(explorer.image.value).startswith(b"\x89PNG") and bytes(explorer.image.value) != before
    assert explorer._repr_mimebundle_()["text/plain"] == explorer.text
    explorer.number.value = 6
    assert explorer.error is None and explorer.share == 2.0 and "division" not in explorer.caption.value


def test_an_error_outside_a_callback_is_raised() -> None:
    explorer = Dividing()
    explorer.number.value = 0
    with pytest.raises(ZeroDivisionError):
        explorer.update()


def test_a_callback_may_come_on_another_thread() -> None:
    explorer = Dividing()
    thread = threading.Thread(target=lambda: setattr(explorer.number, "value", 2), name="subshell")
    thread.start()
    thread.join()
    assert explorer.calls[-1] == "subshell" and explorer.share == 6.0 and explorer.error is None


def test_a_change_waits_until_the_one_before_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer, is_painting, may_paint, paint = Dividing(), threading.Event(), threading.Event(), figures.png_bytes

    def slow(figure: Figure) -> bytes:
        is_painting.set()
        assert may_paint.wait(10)
        return paint(figure)

    monkeypatch.setattr(figures, "png_bytes", slow)
    first = threading.Thread(target=lambda: setattr(explorer.number, "value", 2))
    second = threading.Thread(target=lambda: setattr(explorer.number, "value", 12))
    first.start()
    assert is_painting.wait(10)
    second.start()
    second.join(0.2)  # without the lock it would be done by now
    assert len(explorer.calls) == 2 and explorer.share == 6.0  # the second waits: it would change numbers under the first one's picture
    may_paint.set()
    first.join()
    second.join()
    assert len(explorer.calls) == 3 and explorer.text == "<1.0> is the share."


@pytest.mark.parametrize("slider", [whole("n", 0, 9, 3), amount("x", 0.0, 1.0, 0.1, 0.5), steps("tokens", 128, 512, 256)])
def test_sliders_follow_the_hand(slider: Any) -> None:
    assert slider.continuous_update


def test_steps_are_equal_factors() -> None:
    slider = steps("tokens", 128, 2048, 256)
    assert slider.value == 256 and [label for label, _ in slider.options] == [
        "128",
        "192",
        "256",
        "384",
        "512",
        "768",
        "1,024",
        "1,536",
        "2,048",
    ]


def test_a_choice_has_names_for_its_values() -> None:
    chooser = choice("on", (("yes", True), ("no", False)), True)
    chooser.value = False
    assert chooser.label == "no"


def test_places_are_where_a_slider_stops() -> None:
    slider = places("token budget", (64, 1024, 100), 1024)
    assert slider.value == 1024 and [label for label, _ in slider.options] == ["64", "1,024", "100"]


def test_step_buttons_stay_within_their_slider() -> None:
    slider = whole("step", 2, 5, 3)
    start, back, forward, end = step_buttons(slider)
    seen = []
    for button in (back, back, forward, end, forward, start, back):
        button.click()
        seen.append(slider.value)
    assert seen == [2, 2, 3, 5, 5, 2, 2]
    slider.max = 9  # another run is longer
    end.click()
    assert slider.value == 9


class Telling(Dividing):
    """And tells how it came about."""

    def details(self) -> list[str]:
        return [f"12 < {self.number.value}?"] * self.number.value


def test_details_are_lines_of_their_own_in_a_box_that_keeps_its_height() -> None:
    explorer = Telling()
    assert explorer.text.split("\n") == ["<4.0> is the share."] + ["12 < 3?"] * 3
    assert explorer.caption.value.count("12 &lt; 3?") == 3 and "height: 8.4em" in explorer.caption.value
    explorer.number.value = 12
    assert explorer.text.count("\n") == 12 and explorer.caption.value.count("height: 8.4em") == 1
    assert "em; overflow" not in Dividing().caption.value
