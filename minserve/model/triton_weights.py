"""A quantized matrix as Triton's products take it: `minserve_kernels.quant_gemm`.

Why: on a GPU a weight stays in codes until it is in registers, at any number of rows. The kernels want codes in their own order, 8 bits
with one symmetric scale an output, 4 bits in groups of 32, 64 or 128 inputs; everything else is brought into the second form as for the
CPU (`packed_int4.py`), in which no weight changes.

Invariant: a product is the one with `weight.dequantize()`, up to rounding. Interpreted and compiled here, not yet measured on a card.

Taught in notebook 09.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minserve.model.attention_triton import launches_are_diverted
from minserve.model.packed_int4 import Nibbles, arrange, as_nibbles
from minserve.model.quantized_weight import QuantizedWeight

OLDEST_CAPABILITY = (8, 0)  # of NVIDIA's cards that Triton supports


class WeightKernels(NamedTuple):
    """Triton's products and the layouts that they want, by the names they have in minserve_kernels."""

    int8_linear: Any
    int4_linear: Any
    pack_int4: Any
    outputs_together: Any
    group_sizes: tuple[int, ...]


def load_weight_kernels() -> WeightKernels:
    """Imported here, and not above, since Triton is optional: machines without it get this far."""
    from minserve_kernels.quant_gemm import int4_linear, int8_linear
    from minserve_kernels.weights import GROUP_SIZES, outputs_together, pack_int4

    return WeightKernels(int8_linear, int4_linear, pack_int4, outputs_together, tuple(sorted(GROUP_SIZES, reverse=True)))


class TritonInt8:
    """One symmetric scale an output."""

    def __init__(self, weight: QuantizedWeight, kernels: WeightKernels, device: torch.device):
        self._kernels = kernels
        self._codes = (weight.codes.to(device) ^ 128).view(torch.int8)  # code - 128: the upper half of the bytes become the positive
        self._scales = weight.scales[:, 0].to(device, torch.float16)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.cuda.device_of(x):  # Triton launches on the current GPU
            return self._kernels.int8_linear(x, self._codes, self._scales)

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes


class TritonInt4:
    """Scales and zeros for groups of inputs."""

    def __init__(self, nibbles: Nibbles, kernels: WeightKernels, device: torch.device):
        self._kernels, self._group_size = kernels, nibbles.group_size
        self._codes = kernels.pack_int4(nibbles.codes, nibbles.group_size).to(device)
        scales_and_zeros = (nibbles.scales, nibbles.zeros)
        self._scales, self._zeros = (kernels.outputs_together(part.to(device, torch.float16)) for part in scales_and_zeros)
        self._order = None if nibbles.order is None else nibbles.order.to(device)
        self._num_planes = nibbles.num_planes

    def __call__(self, x: Tensor) -> Tensor:
        x = arrange(x, self._order, self._num_planes)
        with torch.cuda.device_of(x):
            return self._kernels.int4_linear(x, self._codes, self._scales, self._zeros, self._group_size)

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._zeros.nbytes


def triton_product(weight: QuantizedWeight, kernels: WeightKernels, device: torch.device) -> TritonInt8 | TritonInt4 | None:
    """The weight for Triton's products, or None if its groups fit none of them."""
    if weight.bits == 8 and weight.scales.shape[1] == 1 and bool((weight.zeros == 128).all()):
        return TritonInt8(weight, kernels, device)
    nibbles = as_nibbles(weight, kernels.group_sizes)
    return None if nibbles is None else TritonInt4(nibbles, kernels, device)


def choose_weight_kernels(backend: str, device: torch.device) -> WeightKernels | None:
    """Triton's products where the attention backend of that name would be Triton, or None: then torch multiplies."""
    if backend == "torch" or find_spec("triton") is None or find_spec("minserve_kernels") is None:
        return None
    if device.type != "cuda":
        return load_weight_kernels() if backend == "triton" and launches_are_diverted() else None
    is_old = torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY
    return None if is_old else load_weight_kernels()
