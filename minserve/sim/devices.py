"""Devices as a dozen numbers: what a data sheet promises, and what share of it real kernels reach.

Why: a step takes as long as its bytes and FLOPs need on the device at hand. The peaks are from data sheets; the shares were
fitted to published measurements (see `cost_model.py`), or, for this machine, to its own by `minserve calibrate`.

Invariant: every number is a peak or a share of a peak, so "% of the limit" always means "of what the data sheet or the
measurement says is possible".

Taught in notebook 01.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

GB = 1e9  # data sheets count in powers of ten
TFLOPS = 1e12


class UnknownDevice(ValueError):
    """No device of that name, and no file; the message lists what is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device. Rates per second; shares from 0 to 1.

    `matmul_shares` are (rows, share of the FLOP rate) of a matrix product with so many rows, interpolated between (in the
    logarithm of the rows) and constant beyond.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float  # dense, in the compute type (bf16 unless the source says otherwise)
    weight_read_share: float = 0.78  # of bytes_per_s, while weights stream in
    kv_read_share: float = 0.78  # the same for keys and values out of their blocks
    matmul_shares: tuple[tuple[float, float], ...] = ((128, 0.60), (1024, 0.67))
    attention_share: float = 0.67  # of flops_per_s, for scores and weighted sums
    activation_share: float | None = None  # of bytes_per_s, for what passes between products; None: hidden behind them
    step_overhead_s: float = 0.0005  # of the host, a step
    request_overhead_s: float = 0.0  # of the host, a request in a step
    prompt_overhead_s: float = 0.0  # on top, a step that computes prompts: where kernels are made for each new shape
    link_bytes_per_s: float = 25 * GB  # to a neighbour, one way
    link_latency_s: float = 10e-6
    gathers_kv: bool = False  # attention first fetches keys and values, then multiplies: their times add up
    packs_weights: bool = False  # weights are laid out anew for their product, so an output layer tied to the embedding is a copy
    shares_prefix_reads: bool = False  # requests that begin with the same blocks have these read once
    # quantized weights, where codes are not multiplied by at any number of rows as on a GPU: see products.py
    max_code_rows: int | None = None  # products of more rows go by weights in the compute type; None: none do
    keeps_weight_copy: bool = True  # which lie there beside the codes; False: they are made from the codes in every step
    code_read_share: float | None = None  # of bytes_per_s, while few rows read codes; None: weight_read_share
    code_row_bytes_per_s: float | None = None  # bytes of codes times rows that are unpacked; None: no limit
    source: str = ""

    def matmul_share(self, num_rows: float) -> float:
        """Share of the FLOP rate that a product with so many rows reaches."""
        shares = self.matmul_shares
        if num_rows <= shares[0][0]:
            return shares[0][1]
        for (low, low_share), (high, high_share) in zip(shares, shares[1:], strict=False):
            if num_rows <= high:
                place = (math.log2(num_rows) - math.log2(low)) / (math.log2(high) - math.log2(low))
                return low_share + place * (high_share - low_share)
        return shares[-1][1]

    @property
    def ridge_flops_per_byte(self) -> float:
        """Where the roof of bytes meets the roof of FLOPs: less work per byte than this, and memory is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def save(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def load_device(name_or_path: str | Path) -> DeviceSpec:
    """A device by its name in the catalogue, or from a file that `minserve calibrate` wrote. Raises UnknownDevice or ValueError."""
    known = DEVICES.get(str(name_or_path).lower())
    if known is not None:
        return known
    path = Path(name_or_path)
    if not path.is_file():
        raise UnknownDevice(f"no device {str(name_or_path)!r}: give a file that `minserve calibrate` wrote, or one of {', '.join(DEVICES)}")
    return device_from_dict(json.loads(path.read_text(encoding="utf-8")), str(path))


def device_from_dict(values: Mapping[str, Any], where: str = "device") -> DeviceSpec:
    """The inverse of `save`. Raises ValueError for a field that is unknown or missing."""
    names = {f.name for f in fields(DeviceSpec)}
    unknown, missing = sorted(values.keys() - names), sorted({"name", "memory_bytes", "bytes_per_s", "flops_per_s"} - values.keys())
    if unknown or missing:
        raise ValueError(f"{where}: not a device ({', '.join([f'unknown: {n}' for n in unknown] + [f'missing: {n}' for n in missing])})")
    shares = values.get("matmul_shares")
    device = DeviceSpec(**{name: value for name, value in values.items() if name != "matmul_shares"})
    return replace(device, matmul_shares=tuple((rows, share) for rows, share in shares)) if shares else device


# Peaks: the vendors' data sheets (dense bf16 or fp16 with fp32 sums; NVLink and PCIe per direction). Shares: the defaults above, which
# were fitted to an A100 and are an assumption everywhere else.
DEVICES = {
    device.name: device
    for device in (
        DeviceSpec(
            name="a100-80gb",
            memory_bytes=80 * GB,
            bytes_per_s=2039 * GB,
            flops_per_s=312 * TFLOPS,
            link_bytes_per_s=300 * GB,
            source="NVIDIA A100 80GB SXM data sheet",
        ),
        DeviceSpec(
            name="a100-40gb",
            memory_bytes=40 * GB,
            bytes_per_s=1555 * GB,
            flops_per_s=312 * TFLOPS,
            link_bytes_per_s=300 * GB,
            source="NVIDIA A100 40GB SXM data sheet",
        ),
        DeviceSpec(
            name="h100",
            memory_bytes=80 * GB,
            bytes_per_s=3350 * GB,
            flops_per_s=989 * TFLOPS,
            link_bytes_per_s=450 * GB,
            source="NVIDIA H100 SXM data sheet",
        ),
        DeviceSpec(
            name="h200",
            memory_bytes=141 * GB,
            bytes_per_s=4800 * GB,
            flops_per_s=989 * TFLOPS,
            link_bytes_per_s=450 * GB,
            source="NVIDIA H200 SXM data sheet",
        ),
        DeviceSpec(
            name="l4",
            memory_bytes=24 * GB,
            bytes_per_s=300 * GB,
            flops_per_s=121 * TFLOPS,
            link_bytes_per_s=32 * GB,
            source="NVIDIA L4 data sheet",
        ),
        DeviceSpec(
            name="rtx-4090",
            memory_bytes=24 * GB,
            bytes_per_s=1008 * GB,
            flops_per_s=165 * TFLOPS,
            link_bytes_per_s=32 * GB,
            source="NVIDIA Ada whitepaper, fp16 with fp32 sums",
        ),
        DeviceSpec(
            name="t4",
            memory_bytes=16 * GB,
            bytes_per_s=320 * GB,
            flops_per_s=65 * TFLOPS,
            link_bytes_per_s=16 * GB,
            source="NVIDIA T4 data sheet, fp16",
        ),
    )
}
