"""What the cost model is told of the model that is served: the device, the formats, and seconds that follow from them."""

from pathlib import Path

import pytest
import torch

from minserve.model.config import ModelConfig
from minserve.model.costs import choose_spec, step_times, weight_format
from minserve.model.decoder import Decoder
from minserve.quantize.serving import open_weights
from minserve.sim.cost_model import CostModel, decode_work
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import load_shape
from tests.tiny_model import save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_decoder(path: Path, weights: str = "auto") -> Decoder:
    return Decoder.from_directory(path, torch.float32, CPU, open_weights(path, weights, progress=False))


def test_a_cpu_is_taken_for_the_one_that_comes_along():
    spec = choose_spec(None, CPU)
    assert spec.name == "zen4-2-cores" and spec.step_overhead_s == pytest.approx(0.00975, abs=1e-5) and spec.gathers_kv


def test_a_device_by_name_or_by_file(tmp_path: Path):
    DEVICES["l4"].save(tmp_path / "mine.json")
    assert choose_spec("h100", CPU) is DEVICES["h100"]
    assert choose_spec(tmp_path / "mine.json", torch.device("cuda")) == DEVICES["l4"]


def test_a_card_must_be_named():
    with pytest.raises(ValueError, match="what a step takes on cuda is not known: give calibration="):
        choose_spec(None, torch.device("cuda"))


def test_formats_are_those_of_the_decoder(tiny_dir: Path):
    assert weight_format(open_decoder(tiny_dir), tiny_dir, "auto", torch.float32) == ("fp32", 16)
    assert weight_format(open_decoder(tiny_dir, "int8"), tiny_dir, "int8", torch.float32) == ("int8", 8)
    in_codes = open_decoder(tiny_dir, "int4-g32-sym")
    assert weight_format(in_codes, tiny_dir, "int4-g32-sym:head16", torch.float32) == ("int4-g32-sym", 8)


def test_steps_take_what_the_cost_model_says_of_this_model(tiny_dir: Path):
    spec, shape = DEVICES["l4"], load_shape(tiny_dir)
    times = step_times(open_decoder(tiny_dir), tiny_dir, "auto", torch.float32, "int8", spec)
    assert shape.num_layers == ModelConfig.from_directory(tiny_dir).num_layers == 2
    expected = CostModel(shape, spec, weights="fp32", kv="int8").of(decode_work(3, 100)).seconds
    assert times.step_s(3, 300, 0) == pytest.approx(expected, rel=1e-12)
    assert times.step_s(3, 300, 200) > expected
