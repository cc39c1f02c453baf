"""`minserve calibrate`: this machine as a device of the simulator, measured in about two minutes.

Why: a simulator is worth as much as its device. Three things are measured: how fast memory is read, how fast matrix products of the
model's shapes run at 1 to 512 rows, and how long steps of the real engine take that were laid out for the purpose (decodes of
many sizes and contexts, chunks, both together). What the products leave of a step is shared out by `sim.fit`.

Invariant: nothing of what the simulator is later checked against (the workload of `minserve bench`) is used here.

Taught in notebook 01.
"""

import time
from collections.abc import Callable, Sequence

import torch

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.request import Request, SamplingParams
from minserve.llm import LLM
from minserve.model.linear import Linear

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DECODES = ((64, 512), (32, 512), (16, 512), (8, 512), (1, 512), (64, 128), (32, 128), (16, 128), (4, 128), (64, 32), (16, 32), (1, 32))
CHUNKS = ((512, 0), (256, 0), (128, 0), (64, 0), (32, 0), (512, 512), (128, 512), (32, 512))  # tokens, and how many come before
MIXED = ((8, 128, 256), (32, 128, 64), (32, 128, 256), (32, 512, 448), (60, 128, 448))  # decodes, their context, a chunk beside them


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
def measure_layers_s(llm: LLM, num_rows: int) -> float:
    """Seconds of all products of all layers with so many rows: every weight is used once, as in a step."""
    decoder = llm.engine.runner.decoder  # type: ignore[attr-defined]
    linears: list[Linear] = [linear for layer in decoder.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    inputs = {linear.in_features: torch.ones(num_rows, linear.in_features, dtype=decoder.dtype) for linear in linears}
    return best_s(lambda: [linear(inputs[linear.in_features]) for linear in linears])
