"""What is measured alone, on a model small enough that it takes seconds. Times are not asserted, only what is done with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minserve import peaks
from minserve.llm import LLM
from minserve.model.quantized_linear import ANY_ROWS, QuantizedLinear
from minserve.sim.devices import DeviceSpec
from minserve.sim.shapes import ModelShape, load_shape
from tests.tiny_model import save_tiny_model

SETTINGS: dict[str, Any] = {"dtype": "fp32", "num_blocks": 32, "verbose": False}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Products take a millisecond and a microsecond a row, whoever computes them; the rows that were asked for are kept."""
    asked: list[int] = []

    def measure(linears: list[Any], num_rows: int, dtype: torch.dtype) -> float:
        asked.append(num_rows)
        seen.append({linear.max_code_rows for linear in linears if isinstance(linear, QuantizedLinear)})
        return 1e-3 + 1e-6 * num_rows

    seen: list[set[int]] = []
    monkeypatch.setattr(peaks, "measure_products_s", measure)
    monkeypatch.setattr(peaks, "measure_read_bytes_per_s", lambda: 1e9)
    monkeypatch.setattr(peaks, "measure_flops_per_s", lambda dtype: 1e9)
    yield asked
    assert all(len(rows) <= 1 for rows in seen)  # all go one way at a time


def test_best_is_the_shortest() -> None:
    assert 0 <= peaks.best_s(lambda: None, seconds=0.0) < 0.1


def test_peaks_are_rates_and_shares(model_dir: Path) -> None:
    with LLM(model_dir, **SETTINGS) as llm:
        device = peaks.measure_peaks(llm, "tiny")
    assert device.bytes_per_s > 1e8 and device.flops_per_s > 1e8
    assert 0 < device.weight_read_share <= 1 and all(0 < share <= 1 for _, share in device.matmul_shares)
    assert [rows for rows, _ in device.matmul_shares] == [16, 32, 64, 128, 256, 512]
    assert device.shares_prefix_reads and "torch" in device.source
    assert (device.max_code_rows, device.code_read_share, device.code_row_bytes_per_s) == (None, None, None)


def measured(model_dir: Path, **settings: Any) -> tuple[DeviceSpec, int, ModelShape]:
    """The device, up to how many rows the engine had settled on codes, and the model."""
    with LLM(model_dir, weights="int8", **settings, **SETTINGS) as llm:
        in_codes = [linear for linear in peaks.layer_products(peaks.decoder_of(llm)) if isinstance(linear, QuantizedLinear)]
        settled = {linear.max_code_rows for linear in in_codes}
        device = peaks.measure_peaks(llm, "tiny")
        assert {linear.max_code_rows for linear in in_codes} == settled and len(in_codes) == 8  # left as it was found
    return device, settled.pop(), load_shape(model_dir)


def test_codes_and_the_copy_are_measured_each_as_if_there_were_no_other(model_dir: Path, fast: list[int]) -> None:
    device, settled, shape = measured(model_dir, weight_copy=True)
    assert (device.max_code_rows, device.keeps_weight_copy) == (settled, True)
    assert fast == [*peaks.ROWS, *peaks.CODE_ROWS]
    codes = shape.layer_bytes("int8")
    assert device.code_read_share == pytest.approx(codes / 1.001e-3 / 1e9)
    assert device.code_row_bytes_per_s == pytest.approx(16 * codes / 1.016e-3)
    assert device.weight_read_share == pytest.approx(2 * shape.num_layer_parameters / 1.001e-3 / 1e9)


def test_without_a_copy_codes_are_read_and_numbers_written_and_read(model_dir: Path, fast: list[int]) -> None:
    device, _, shape = measured(model_dir, weight_copy=False)
    assert not device.keeps_weight_copy
    moved = shape.layer_bytes("int8") + 4 * shape.num_layer_parameters
    assert device.weight_read_share == pytest.approx(moved / 1.001e-3 / 1e9)


def test_codes_at_any_number_of_rows_are_read_like_other_weights(model_dir: Path, fast: list[int]) -> None:
    """As on a graphics card: then there are no two ways to tell apart."""
    with LLM(model_dir, weights="int8", **SETTINGS) as llm:
        for linear in peaks.layer_products(peaks.decoder_of(llm)):
            assert isinstance(linear, QuantizedLinear)
            linear.max_code_rows = ANY_ROWS
        device = peaks.measure_peaks(llm, "card")
    assert device.max_code_rows is None and fast == [*peaks.ROWS]
    assert device.weight_read_share == pytest.approx(load_shape(model_dir).layer_bytes("int8") / 1.001e-3 / 1e9)


@pytest.mark.parametrize(
    ("given", "named"),
    [("auto", ("fp32", 16)), ("int8", ("int8", 8)), ("rtn-int4-g32", ("rtn-int4-g32", 8))],
)
def test_the_format_by_its_name(model_dir: Path, given: str, named: tuple[str, int]) -> None:
    with LLM(model_dir, weights=given, **SETTINGS) as llm:
        assert peaks.weight_format(llm) == named
