"""What is being served, and on what, as the cost model wants to know it: so that a policy can tell what a step will take.

Why: a policy that keeps limits (`core.slo`) must predict steps of the real engine, on the machine at hand. `minserve calibrate` measures
that machine and writes a file; where none is given, a CPU is taken for the one that comes with minserve.

Invariant: a prediction decides when a request runs, never what it says. A wrong device makes a policy too bold or too timid, no more.

Taught in notebook 10.
"""

import json
from importlib import resources
from pathlib import Path

import torch

from minserve.model.config import QuantizationConfig
from minserve.model.decoder import Decoder
from minserve.model.kv_formats import AUTO
from minserve.model.quantized_linear import QuantizedLinear
from minserve.model.sizing import DTYPES
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DeviceSpec, device_from_dict, load_device
from minserve.sim.shapes import load_shape
from minserve.sim.step_times import CostStepTimes
from minserve.sim.weight_formats import WeightFormat

OWN_CPU = "zen4-2-cores.json"  # as calibrated for the README; beside `workload.json`


def choose_spec(calibration: str | Path | None, device: torch.device) -> DeviceSpec:
    """The device of a file that `minserve calibrate` wrote, or of the catalogue. Raises ValueError where none is given and none fits."""
    if calibration is not None:
        return load_device(calibration)
    if device.type != "cpu":
        raise ValueError(
            f"what a step takes on {device.type} is not known: give calibration=, a device (h100, a100-80gb ...) or a file of "
            "`minserve calibrate`"
        )
    text = (resources.files("minserve") / OWN_CPU).read_text(encoding="utf-8")
    return device_from_dict(json.loads(text), OWN_CPU)


def weight_format(decoder: Decoder, path: Path, weights: str, dtype: torch.dtype) -> tuple[str, int]:
    """The name of the weights' format, and the bits of the output layer beside quantized ones.

    `path` is the model's directory, `weights` what was asked for.
    """
    linears = [linear for layer in decoder.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if not any(isinstance(linear, QuantizedLinear) for linear in linears):
        return next(name for name, known in DTYPES.items() if known == dtype), 16
    head_bits = 8 if isinstance(decoder.head, QuantizedLinear) else 16
    stored = QuantizationConfig.from_directory(path)
    if weights != AUTO or stored is None:
        return weights.partition(":")[0], head_bits  # behind the colon stand options of the quantizer
    return stored.name or WeightFormat(stored.bits, stored.group_size, stored.symmetric, stored.method).name, head_bits


def step_times(decoder: Decoder, path: Path, weights: str, dtype: torch.dtype, kv: str, spec: DeviceSpec) -> CostStepTimes:
    """Predicted seconds of this model's steps on a device."""
    name, head_bits = weight_format(decoder, path, weights, dtype)
    return CostStepTimes(CostModel(load_shape(path), spec, weights=name, kv=kv, head_bits=head_bits))
