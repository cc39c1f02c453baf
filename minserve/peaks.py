"""What of a machine can be measured alone: how fast it reads memory, and how fast the products of a model's shapes run, by their rows.

Why: these are most of a step, and alone they are measured in seconds and without doubt. Weights in codes are multiplied by in two ways
(see model/quantized_linear.py), so both are measured: by codes with few rows, by numbers with many, each as if there were no other.

Invariant: an engine is left as it was found.

Taught in notebooks 01 and 09.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from minserve.llm import LLM
from minserve.model import costs
from minserve.model.decoder import Decoder
from minserve.model.linear import AnyLinear
from minserve.model.quantized_linear import ANY_ROWS, QuantizedLinear
from minserve.model.runner import ModelRunner
from minserve.model.sizing import free_bytes
from minserve.sim.devices import DeviceSpec
from minserve.sim.products import COPY_BYTES
from minserve.sim.shapes import load_shape

ROWS = (1, 2, 16, 32, 64, 128, 256, 512)  # of the timed products
FEW_ROWS = 16  # with less, a product takes as long as its weights need to be read
CODE_ROWS = (1, 2, 4, 8, 16)  # of products with codes


def best_s(function: Callable[[], object], seconds: float = 0.3, least: int = 3) -> float:
    """The shortest of repeated runs: a neighbour can only make it longer."""
    function()
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times_s) < least or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        function()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def measure_read_bytes_per_s(num_bytes: int = 256 << 20) -> float:
    """Memory bandwidth of reading, by a sum over an array that fits into no cache."""
    x = torch.ones(num_bytes // 4)
    return num_bytes / best_s(x.sum, seconds=1.0)


def measure_flops_per_s(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOPs a second of one large square product."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / best_s(lambda: a @ b, seconds=1.0)


@torch.inference_mode()
def measure_products_s(linears: Sequence[AnyLinear], num_rows: int, dtype: torch.dtype) -> float:
    """Seconds of all these products with so many rows: every weight is used once, as in a step."""
    inputs = {linear.in_features: torch.ones(num_rows, linear.in_features, dtype=dtype) for linear in linears}
    return best_s(lambda: [linear(inputs[linear.in_features]) for linear in linears])


def decoder_of(llm: LLM) -> Decoder:
    return cast(ModelRunner, llm.engine.runner).decoder


def layer_products(decoder: Decoder) -> list[AnyLinear]:
    """The products of all layers, in the order of a step."""
    return [linear for layer in decoder.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]


def weight_format(llm: LLM) -> tuple[str, int]:
    """The name of the weights' format, and the bits of the output layer beside quantized ones."""
    return costs.weight_format(decoder_of(llm), llm.model_path, llm.config.weights, llm.dtype)


def measure_layers_s(decoder: Decoder, num_rows: int) -> float:
    """Seconds of the products of all layers with so many rows, the way that the engine computes them."""
    return measure_products_s(layer_products(decoder), num_rows, decoder.dtype)


@contextmanager
def by_codes(linears: Sequence[QuantizedLinear], max_rows: int) -> Iterator[None]:
    """For a while, multiply by codes up to so many rows: 0 for numbers always."""
    settled = [linear.max_code_rows for linear in linears]
    try:
        for linear in linears:
            linear.max_code_rows = max_rows
        yield
    finally:
        for linear, rows in zip(linears, settled, strict=True):
            linear.max_code_rows = rows


def measure_peaks(llm: LLM, name: str) -> DeviceSpec:
    """Bandwidth and matmul rates; the rest of the device is still unknown."""
    decoder, shape = decoder_of(llm), load_shape(llm.model_path)
    linears, num_weights, stored_bytes = layer_products(decoder), shape.num_layer_parameters, shape.layer_bytes(weight_format(llm)[0])
    in_codes = [linear for linear in linears if isinstance(linear, QuantizedLinear) and linear.max_code_rows != ANY_ROWS]
    bytes_per_s, flops_per_s = measure_read_bytes_per_s(), measure_flops_per_s(decoder.dtype)
    with by_codes(in_codes, 0):
        layers_s = {rows: measure_layers_s(decoder, rows) for rows in ROWS}
    rates = {rows: 2 * rows * num_weights / layers_s[rows] for rows in ROWS}
    flops_per_s = max(flops_per_s, *rates.values())
    read_bytes = _bytes_read_in_numbers(stored_bytes, num_weights, _keep_copies(in_codes)) if in_codes else stored_bytes
    return DeviceSpec(
        name=name,
        memory_bytes=float(free_bytes(decoder.device)),
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        weight_read_share=min(1.0, read_bytes / min(layers_s[1], layers_s[2]) / bytes_per_s),
        matmul_shares=tuple((rows, rates[rows] / flops_per_s) for rows in ROWS if rows >= FEW_ROWS),
        packs_weights=decoder.head.is_packed,
        shares_prefix_reads=True,
        source=f"minserve calibrate, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        **(_measure_codes(in_codes, decoder.dtype, stored_bytes, bytes_per_s) if in_codes else {}),
    )


def _bytes_read_in_numbers(stored_bytes: int, num_weights: int, keeps_copy: bool) -> int:
    """What products read that go by numbers: a copy; or codes, and numbers made of them, written and read again. As products.py counts."""
    return COPY_BYTES * num_weights if keeps_copy else stored_bytes + 2 * COPY_BYTES * num_weights


def _measure_codes(in_codes: Sequence[QuantizedLinear], dtype: torch.dtype, stored_bytes: int, bytes_per_s: float) -> dict[str, Any]:
    """The fields of a device for weights in codes; where nothing multiplies by codes, there is little to say."""
    found: dict[str, Any] = {"max_code_rows": in_codes[0].max_code_rows, "keeps_weight_copy": _keep_copies(in_codes)}
    if not all(linear.is_packed for linear in in_codes):
        return found
    with by_codes(in_codes, ANY_ROWS):
        seconds = {rows: measure_products_s(in_codes, rows, dtype) for rows in CODE_ROWS}
    unpacked_per_s = max(stored_bytes * rows / seconds[rows] for rows in CODE_ROWS)
    return {**found, "code_read_share": min(1.0, stored_bytes / seconds[1] / bytes_per_s), "code_row_bytes_per_s": unpacked_per_s}


def _keep_copies(in_codes: Sequence[QuantizedLinear]) -> bool:
    return all(linear.copy_bytes > 0 for linear in in_codes)
