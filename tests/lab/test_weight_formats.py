"""The explorer of weight formats: the quantizers' errors, the cost model's bytes and seconds, and speeds out of a file."""

from dataclasses import asdict, replace
from typing import Any

import ipywidgets as widgets
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from minserve.bench_decode import Pace
from minserve.lab import figures
from minserve.lab.weight_formats import (
    BATCHES,
    CONTEXTS,
    GROUPS,
    MODELS,
    ZEROS,
    LayerSample,
    MeasuredSpeeds,
    WeightFormatExplorer,
    made_up_layer,
    weights_left,
)
from minserve.quantize.gptq import gptq
from minserve.quantize.rtn import round_to_nearest
from minserve.sim.cost_model import CostModel, decode_work
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.weight_formats import parse_weights
from tests.lab.boxes import boxes
from tests.lab.test_charts import lines

HERE = replace(DEVICES["t4"], name="two-cores")
TOKENS_PER_S = {"bf16": {1: 30.0, 16: 300.0}, "int4": {1: 60.0, 16: 290.0}}
SPEEDS = MeasuredSpeeds("two cores", HERE, TOKENS_PER_S, {"bf16": {1: 1.0, 16: 1.0}, "int4": {16: 0.97, 1: 2.0}})


@pytest.fixture(scope="module")
def layer() -> LayerSample:
    return made_up_layer(32, 64)


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch, layer: LayerSample) -> WeightFormatExplorer:
    """Pictures are drawn but not painted."""
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")
    return WeightFormatExplorer(layer, SPEEDS)


# --- the layer ------------------------------------------------------------------------------------


def test_an_error_is_the_outputs_share_over_inputs_that_did_not_choose() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 32, generator=generator), torch.randn(400, 32, generator=generator)
    sample = LayerSample.of("some", weight, x)
    values = round_to_nearest(weight, parse_weights("int4-g32")).dequantize()
    judged = x[300:]
    assert (sample.chosen_by.num_tokens, sample.judged_by.num_tokens) == (300, 100)
    assert sample.error(values) == pytest.approx(float((judged @ (values - weight).T).norm() / (judged @ weight.T).norm()), rel=1e-4)
    assert sample.error(weight) == 0


def test_what_is_left_is_what_the_quantizers_leave(layer: LayerSample) -> None:
    int4 = parse_weights("int4")
    assert torch.equal(weights_left(layer, int4), round_to_nearest(layer.weight, int4).dequantize())
    by_gptq = gptq(layer.weight, layer.chosen_by.matrix, int4).dequantize()
    assert torch.equal(weights_left(layer, parse_weights("gptq-int4")), by_gptq)
    rtn, awq, best = (layer.error(weights_left(layer, parse_weights(name))) for name in ("int4", "awq-int4", "gptq-int4"))
    assert 0 < best < 0.8 * rtn and 0 < awq < 0.8 * rtn


# --- recorded speeds -------------------------------------------------------------------------------


def test_speeds_are_read_from_what_the_bench_writes() -> None:
    runs = (("bf16", 1, 30.0), ("bf16", 16, 300.0), ("int4", 1, 60.0))
    paces = [asdict(Pace(name, size, 1e3 * size / speed, speed, speed / 31, 0.5, (1.0,))) for name, size, speed in runs]
    read = MeasuredSpeeds.read({"machine": "two cores", "date": "2026-11-30", "paces": paces}, HERE)
    assert read.where == "2026-11-30, two cores" and read.device is HERE
    assert read.tokens_per_s == {"bf16": {1: 30.0, 16: 300.0}, "int4": {1: 60.0}}
    assert read.times_bf16("int4") == [(1, 60 / 31)] and read.times_bf16("int8") == []


# --- the explorer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "group", "zero", "name"), [(8, "channel", 0, "int8"), (4, "64", 1, "int4"), (4, "128", 0, "int4-g128-sym")]
)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_bytes_and_speeds_are_the_cost_model_s(
    explorer: WeightFormatExplorer, bits: int, group: str, zero: int, name: str, method: str
) -> None:
    explorer.bits.value, explorer.group.value, explorer.zero.value, explorer.method.value = bits, group, ZEROS[zero], method
    explorer.batch.value, explorer.context.value = 16, 128
    name = name if method == "rtn" else f"{method}-{name}"
    assert explorer.format == parse_weights(name)
    plain, own = (CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"], weights=weights) for weights in ("bf16", name))
    work = decode_work(16, 128)
    assert explorer.weight_bytes == {"bf16": plain.weight_bytes, name: own.weight_bytes}
    assert explorer.speed == plain.of(work).seconds / own.of(work).seconds > 1.3
    assert explorer.predicted_tokens_per_s == pytest.approx(16 / own.of(work).seconds)
    assert explorer.text.startswith(f"{name}: {own.weight_bytes / plain.weight_bytes:.3f} of bf16's bytes, {explorer.speed:.2f} times")


def test_the_sentence_has_the_errors_of_all_methods(explorer: WeightFormatExplorer, layer: LayerSample) -> None:
    assert list(explorer.errors) == ["rtn", "gptq", "awq"]
    for method, error in explorer.errors.items():
        name = "int4" if method == "rtn" else f"{method}-int4"
        assert error == layer.error(weights_left(layer, parse_weights(name))) and f"{error:.2%}" in explorer.text
    assert f"the layer's outputs are {explorer.errors['rtn']:.2%} off." in explorer.text
    assert explorer.bits_per_weight == 4.5  # 64 codes of 4 bits, a scale and a zero of 16


def test_awq_at_8_bits_is_refused_in_words(explorer: WeightFormatExplorer) -> None:
    explorer.method.value, explorer.bits.value = "awq", 8
    assert isinstance(explorer.error, ValueError) and "AWQ is for 4 bits" in explorer.text
    explorer.method.value = "rtn"
    assert explorer.error is None and list(explorer.errors) == ["rtn", "gptq"]


def test_measured_speeds_stand_beside_their_own_model_and_device_only(explorer: WeightFormatExplorer) -> None:
    assert explorer.measured_speeds() == [] and "Measured" not in explorer.text
    explorer.model.value, explorer.device.value = "smollm2-135m", "two-cores"
    assert explorer.error is None and explorer.measured_speeds() == [(1, 2.0), (16, 0.97)]
    assert "Measured (two cores), tokens/s: 60 (2.00 times bf16) with 1, 290 (0.97 times bf16) with 16." in explorer.text
    explorer.method.value = "gptq"  # other codes, the same product
    assert explorer.measured_speeds() == [(1, 2.0), (16, 0.97)]
    explorer.group.value = "32"
    assert explorer.measured_speeds() == []


def test_every_control_changes_numbers_and_sentence(explorer: WeightFormatExplorer) -> None:
    controls = {
        "bits": 8,
        "group": "32",
        "zero": ZEROS[0],
        "method": "awq",
        "model": "llama-3.1-8b",
        "device": "h100",
        "batch": 64,
        "context": 2048,
    }
    for name, value in controls.items():
        control: Any = getattr(explorer, name)
        first, before = control.value, (numbers_of(explorer), explorer.caption.value)
        control.value = value
        assert explorer.error is None
        assert numbers_of(explorer) != before[0] or name in ("method", "batch")
        assert explorer.caption.value != before[1], name
        control.value = first
        assert (numbers_of(explorer), explorer.caption.value) == before


def numbers_of(explorer: WeightFormatExplorer) -> dict[str, Any]:
    hidden = (widgets.Widget, Figure)
    return {name: value for name, value in vars(explorer).items() if name[0] != "_" and not isinstance(value, hidden)}


def test_every_choice_can_be_shown(explorer: WeightFormatExplorer) -> None:
    for name, values in {"group": GROUPS, "model": MODELS, "device": explorer.devices, "batch": BATCHES, "context": CONTEXTS}.items():
        control: Any = getattr(explorer, name)
        first = control.value
        for value in values:
            control.value = value
            assert explorer.error is None, (name, value)
        control.value = first


def test_the_picture_shows_errors_and_speeds(layer: LayerSample) -> None:
    explorer = WeightFormatExplorer(layer, SPEEDS)
    explorer.model.value, explorer.device.value = "smollm2-135m", "two-cores"
    left, right = explorer.draw().axes
    widths = [box.width for box in sorted(boxes(left), key=lambda box: box.bottom)]
    assert widths == pytest.approx([100 * error for error in explorer.errors.values()], abs=1e-4)
    assert [np.asarray(line).tolist() for line in lines(right)[:2]] == [
        [list(point) for point in explorer.speeds],
        [[1, 2.0], [16, 0.97]],
    ]
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == explorer.text and bundle["image/png"]
