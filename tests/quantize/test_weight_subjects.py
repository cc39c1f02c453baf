"""Weights that are measured: by their words, as codes of the engine, as a scheme on trial, and out of a directory."""

from pathlib import Path

import pytest
import torch

from minserve.model.decoder import Decoder
from minserve.model.quantized_linear import QuantizedLinear
from minserve.model.weights import quantized
from minserve.quantize.recipe import Recipe
from minserve.quantize.rtn import round_to_nearest
from minserve.quantize.serving import make
from minserve.quantize.subjects import OpenModel
from minserve.quantize.weight_subjects import (
    INT8_TENSOR,
    WeightScheme,
    bytes_per_weight,
    label,
    one_scale,
    open_subject,
    parse_weight_subject,
)
from minserve.sim.weight_formats import parse_weights
from tests.quantize.small import small_model
from tests.tiny_model import save_tiny_model

DOWN, SHAPE = "model.layers.1.mlp.down_proj.weight", (64, 96)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> OpenModel:
    return OpenModel.from_name(model_dir)


@pytest.mark.parametrize("words", ["int8", "int4-g32-sym", "gptq-int4:documents=2,tokens=64", "awq-int4:scale,documents=2,tokens=64"])
def test_a_format_is_served_from_codes(model: OpenModel, words: str) -> None:
    decoder = Decoder(model.config, open_subject(model, words), torch.float32)
    layer = decoder.layers[1]
    for linear in (layer.qkv, layer.output, layer.gate_up, layer.down, decoder.head):
        assert isinstance(linear, QuantizedLinear)
    assert isinstance(layer.down, QuantizedLinear) and layer.down.bits == int(words.split("int")[1][0])
    assert isinstance(decoder.head, QuantizedLinear) and decoder.head.bits == 8


def test_opened_twice_the_weights_are_the_same(model: OpenModel) -> None:
    first, second = (quantized(open_subject(model, "gptq-int4:documents=2,tokens=64"), DOWN, SHAPE) for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)


def test_a_scheme_sees_every_matrix_of_the_layers_and_the_head_is_int8(model: OpenModel) -> None:
    seen: list[tuple[int, ...]] = []
    decoder = Decoder(model.config, open_subject(model, WeightScheme("spy", lambda w: seen.append(w.shape) or w * 2)), torch.float32)
    assert len(seen) == 2 * 7 and (64, 96) in seen
    assert isinstance(decoder.head, QuantizedLinear)
    assert not isinstance(decoder.layers[0].down, QuantizedLinear)


def test_a_scheme_that_rounds_equals_the_format(model: OpenModel) -> None:
    fmt = parse_weights("int4")
    tried = open_subject(model, WeightScheme("mine", lambda weight: round_to_nearest(weight, fmt).dequantize()))
    real = quantized(open_subject(model, "int4"), DOWN, SHAPE)
    assert real is not None and torch.equal(tried.take(DOWN, SHAPE), real.dequantize())


def test_one_scale_serves_the_loudest_output() -> None:
    weight = torch.tensor([[1.0, -0.5], [100.0, 3.0]])
    assert torch.allclose(one_scale(weight), torch.tensor([[1.0, -0.5], [100.0, 3.0]]), atol=100 / 127 / 2)
    assert one_scale(weight)[0].tolist() == pytest.approx([100 / 127, -100 / 127])


def test_a_directory_that_was_quantized_is_a_subject(model: OpenModel, model_dir: Path, tmp_path: Path) -> None:
    words, target = "int4-g32", tmp_path / "quantized"
    make(model_dir, Recipe.parse(words), target, progress=False)
    name = parse_weight_subject(str(target))
    stored, fresh = (quantized(open_subject(model, subject), DOWN, SHAPE) for subject in (name, words))
    assert stored is not None and fresh is not None
    assert torch.equal(stored.dequantize(), fresh.dequantize())
    assert quantized(open_subject(model, name), "lm_head.weight", (320, 64)) is not None
    assert label(model, name, "fp32").weights == str(target)


def test_words_are_checked_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match="int5"):
        parse_weight_subject("int5")
    assert parse_weight_subject("int8-tensor") is INT8_TENSOR
    assert parse_weight_subject("gptq-int4:no-order,damping=0.1") == "gptq-int4:no-order,damping=0.1"


def test_labels_and_bytes(model: OpenModel) -> None:
    assert label(model, None, "bf16").bytes_per_weight == 2.0 and label(model, None, "fp32").weights == "fp32"
    assert label(model, "awq-int4-g32-sym:scale", "fp32").group == "32 sym"
    assert label(model, INT8_TENSOR, "fp32").bytes_per_weight == 1.0
    assert bytes_per_weight(small_model(hidden_size=128, intermediate_size=256), parse_weights("int4")) == 0.5 + 4 / 64
