"""The pictures of keys and values: what is drawn where, and that no words lie on others."""

import numpy as np
import pytest

from minserve.lab.kv_charts import Bargain, bargains, channel_maps, vectors
from tests.lab.boxes import boxes, words
from tests.lab.test_charts import all_apart

FORMATS = {
    "fp8": Bargain(2.0, 0.0074, 0.0069, 0.0081),
    "int8": Bargain(1.94, 0.0008, 0.0007, 0.0009),
    "int4 as it is": Bargain(3.56, 0.112, 0.1, 0.12),
    "int4 mixed": Bargain(3.56, 0.0475, 0.04, 0.05),
}
GAINS = {"13B": {"int8": 1.4, "int4": 1.74}, "8B": {"int8": 1.09, "int4": 1.14}}


def test_channel_maps_share_one_scale_of_colour() -> None:
    keys, values = np.full((3, 8), 2.0), np.full((3, 8), 0.1)
    keys[1, 5] = 20.0
    figure = channel_maps({"keys": keys, "values": values}, head_dim=4, title="Loud")
    left, right, bar = figure.axes
    shown = [ax.images[0] for ax in (left, right)]
    assert [np.asarray(image.get_array()).tolist() for image in shown] == [keys.tolist(), values.tolist()]
    assert {(image.norm.vmin, image.norm.vmax) for image in shown} == {(0.1, 20.0)} and bar is not None
    assert left.get_xlabel() == "channel (2 KV heads of 4)" and [float(np.asarray(line.get_xdata())[0]) for line in left.lines] == [3.5]


def test_what_is_very_small_does_not_take_the_scale() -> None:
    sizes = np.array([[0.0, 1.0, 30.0, 3.0]])
    [image] = channel_maps({"keys": sizes}, head_dim=4, title="").axes[0].images
    assert (image.norm.vmin, image.norm.vmax) == (pytest.approx(0.1), 30.0)


def test_vectors_show_each_number_and_what_came_back() -> None:
    figure = vectors({"as it is": ([1.0, -8.0, 2.0], [0.5, -8.0, 1.5]), "mixed": ([3.0, 4.0, -5.0], [3.0, 4.0, -5.0])}, "One key")
    upper, lower = figure.axes
    assert [box.height for box in boxes(upper)] == [1.0, -8.0, 2.0] and [float(y) for y in np.asarray(upper.lines[0].get_ydata())] == [
        0.5,
        -8.0,
        1.5,
    ]
    assert [box.height for box in boxes(lower)] == [3.0, 4.0, -5.0]
    assert words(upper) == ["as it is"] and words(lower) == ["mixed"] and all_apart(figure)


def test_bargains_are_named_with_their_numbers() -> None:
    figure = bargains(FORMATS, GAINS, "KL, nats a token", 0.01, "int8 is nearly free")
    left, right = figure.axes
    dots = [
        (float(np.asarray(line.get_xdata())[0]), float(np.asarray(line.get_ydata())[0])) for line in left.lines if line.get_marker() == "o"
    ]
    assert dots == [(made.capacity, made.loss) for made in FORMATS.values()]
    spans = [tuple(np.asarray(line.get_ydata()).tolist()) for line in left.lines[:-1] if line.get_marker() != "o"]
    assert spans == [(made.low, made.high) for made in FORMATS.values()]
    assert words(left) == ["fp8 0.0074", "int8 0.0008", "int4 as it is 0.112", "int4 mixed 0.0475", "0.01"]
    assert sorted(words(right)) == ["1.09 8B", "1.14 8B", "1.40 13B", "1.74 13B"]
    assert sorted(box.width for box in boxes(right)) == [1.09, 1.14, 1.4, 1.74]
    assert all_apart(figure)


def test_a_loss_of_nothing_is_drawn_at_the_foot() -> None:
    left, _ = bargains({**FORMATS, "bf16": Bargain(1.0, 0.0, -0.1, 0.1)}, GAINS, "", 0.01, "").axes
    low, _ = left.get_ylim()
    assert all(low < float(y) for line in left.lines for y in np.asarray(line.get_ydata()))
