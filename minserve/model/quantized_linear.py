"""A matrix product with a quantized weight, in place of `Linear`: by its codes at few rows, by its numbers at many.

Why: with few rows a product waits for its weight, and codes are a half or a quarter of the bytes. With many it computes, and on a CPU the
codes must first become numbers: the fewer bytes no longer pay. So there are two ways to multiply, and a number of rows at which they
change places. It depends on the machine, and is measured on the weights themselves when a model is opened.

    on a CPU          few rows: torch's int4 product (`packed_int4.py`)
                      many:     a copy of the weight in the compute type, or where there is no room for one, a piece of the weight after
                                the other made into numbers in one scratch buffer that all layers share
    on a CUDA or HIP  Triton's products (`minserve_kernels.quant_gemm`) for any number of rows: written and interpreted, not yet measured
    device            on a card. Without Triton: pieces in a scratch buffer

Invariant: whatever way is taken, a product is the one with `weight.dequantize()`, up to rounding in the compute type.

Taught in notebook 09.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.model.linear import AnyLinear, Linear
from minserve.model.packed_int4 import try_pack
from minserve.model.quantized_weight import QuantizedWeight
from minserve.model.triton_weights import WeightKernels, triton_product

PIECE_WEIGHTS = 1 << 20  # of a matrix that become numbers at once: small enough to stay in a cache until they are multiplied by
PIECE_OUTPUTS = 64  # a piece is a multiple of so many outputs
ANY_ROWS = 1 << 30
ASSUMED_CODE_ROWS = 4  # until it is measured
TRIAL_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TRIAL_WEIGHTS = 1 << 25  # a trial takes no more: enough that what one way has read is no longer in a cache when its turn comes again
NUM_TRIALS = 5
CLEAR_RATIO = 1.5  # two trials are enough where one way takes so much longer


@dataclass(frozen=True, slots=True)
class Storage:
    """How quantized weights are kept."""

    copy: bool = True  # on a CPU: numbers beside the codes
    max_code_rows: int | None = None  # the most rows that are multiplied by codes; None: as measured
    kernels: WeightKernels | None = None  # Triton's products
    scratch: "Scratch" = field(default_factory=lambda: Scratch())


class Scratch:
    """Room for one piece of numbers, shared by products that never run at the same time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def get(self, num_outputs: int, num_inputs: int, like: Tensor) -> Tensor:
        """[outputs, inputs] in the type and on the device of `like`, with whatever was there before."""
        size, buffer = num_outputs * num_inputs, self._buffer
        if buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = self._buffer = like.new_empty(size)
        return buffer[:size].view(num_outputs, num_inputs)


class Pieces(Protocol):
    """A weight in codes that becomes numbers, piece by piece."""

    def write_values(self, out: Tensor, first: int = 0) -> None:
        """The weights of outputs from `first` on, as many as fit. out: [outputs, I]"""
        ...

    @property
    def num_bytes(self) -> int: ...


class Product(Protocol):
    """A product with a weight's codes as they lie. x: [T, I] -> [T, O]"""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def num_bytes(self) -> int: ...


class QuantizedLinear:
    """y = x weight^T + bias. weight: [O, I] in codes, bias: [O] or None."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        storage: Storage | None = None,
    ):
        """x and y are in `dtype`."""
        storage, device = storage or Storage(), torch.device(device)
        self.out_features, self.in_features = weight.shape
        self.bits, self.dtype, self.bias, self._scratch = weight.bits, dtype, bias, storage.scratch
        self._copy: Linear | None = None
        if storage.kernels is not None:
            self._product = triton_product(weight, storage.kernels, device)
            self._pieces = None if self._product else PlainCodes(weight, device)
            self.max_code_rows = ANY_ROWS if self._product else 0
            return
        self._product = try_pack(weight, dtype) if device.type == "cpu" else None
        self._pieces = self._product or PlainCodes(weight, device)
        self.max_code_rows = 0 if self._product is None else ASSUMED_CODE_ROWS if storage.max_code_rows is None else storage.max_code_rows
        if storage.copy and device.type == "cpu":
            numbers = torch.empty(weight.shape, dtype=dtype)
            self._pieces.write_values(numbers)
            self._copy, self._pieces = Linear(numbers, bias), None

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """x: [T, I], add: [T, O] or None -> x weight^T + bias + add, [T, O]"""
        if self._product is not None and x.shape[0] <= self.max_code_rows:
            y = self._product(x)
        elif self._copy is not None:
            return self._copy(x, add)
        else:
            y = self._by_pieces(x)
        if self.bias is not None:
            y += self.bias
        return y if add is None else y.add_(add)

    def _by_pieces(self, x: Tensor) -> Tensor:
        assert self._pieces is not None, "codes that are multiplied by at any number of rows, or a copy, serve the rest"
        y = x.new_empty(len(x), self.out_features)
        step = max(1, PIECE_WEIGHTS // self.in_features // PIECE_OUTPUTS) * PIECE_OUTPUTS
        for first in range(0, self.out_features, step):
            last = min(first + step, self.out_features)
            numbers = self._scratch.get(last - first, self.in_features, x)
            self._pieces.write_values(numbers, first)
            y[:, first:last] = F.linear(x, numbers)
        return y

    @property
    def is_packed(self) -> bool:
        """Whether products are computed from codes as they lie, at least with few rows."""
        return self._product is not None

    @property
    def has_copy(self) -> bool:
        """Whether there are numbers in the compute type, beside the codes or in place of them."""
        return self._copy is not None

    @property
    def has_two_ways(self) -> bool:
        """Whether there is a choice for each number of rows."""
        return self._product is not None and (self._copy is not None or self._pieces is not None)

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and zeros."""
        held = self._product or self._pieces
        return 0 if held is None else held.num_bytes

    @property
    def copy_bytes(self) -> int:
        """Of the numbers in the compute type beside the codes, or in place of them where no product takes codes."""
        return 0 if self._copy is None else self._copy.num_bytes


# --- where the two ways change places -------------------------------------------------------------


@torch.inference_mode()
def settle_code_rows(linears: Sequence[QuantizedLinear]) -> None:
    """Measure up to how many rows codes are faster than numbers, and tell all of them: from 0 to the most that are tried.

    Passes over the weights take turns, codes and numbers, so that each finds a cache full of the other's.
    """
    linears = [linear for linear in linears if linear.has_two_ways]
    chosen, num_weights = [], 0
    for linear in linears:
        num_weights += linear.in_features * linear.out_features
        if not chosen or num_weights <= TRIAL_WEIGHTS:
            chosen.append(linear)
    num_won = bisect_left(TRIAL_ROWS, True, key=lambda num_rows: not _codes_win(chosen, num_rows)) if chosen else 0
    for linear in linears:
        linear.max_code_rows = TRIAL_ROWS[num_won - 1] if num_won else 0


def _codes_win(linears: Sequence[QuantizedLinear], num_rows: int) -> bool:
    """By the sums of each product's best times: on a busy machine a whole pass is never undisturbed."""
    inputs = {linear.in_features: torch.ones(num_rows, linear.in_features, dtype=linear.dtype) for linear in linears}
    best_s = torch.full((2, len(linears)), torch.inf, dtype=torch.float64)
    numbers_s = codes_s = 0.0
    for trial in range(NUM_TRIALS):
        for way, max_code_rows in enumerate((0, num_rows)):
            for i, linear in enumerate(linears):
                linear.max_code_rows = max_code_rows
                start_s = time.perf_counter()
                linear(inputs[linear.in_features])
                best_s[way, i] = min(best_s[way, i], time.perf_counter() - start_s)
        numbers_s, codes_s = best_s.sum(1).tolist()
        if trial and max(numbers_s, codes_s) > CLEAR_RATIO * min(numbers_s, codes_s):
            break
    return codes_s < numbers_s


def describe_codes(layers: Sequence[QuantizedLinear], head: AnyLinear) -> str:
    """What is kept of weights in codes and when they are multiplied by, to be added to a sentence; nothing where there are none."""
    held = [*layers, head] if isinstance(head, QuantizedLinear) else list(layers)
    if not held:
        return ""
    bits = "+".join(f"int{bits}" for bits in sorted({linear.bits for linear in held}))
    words = f"; weights in {bits}: {sum(linear.num_bytes for linear in held) / 2**20:,.0f} MiB"
    if not any(linear.has_two_ways for linear in held):
        return words
    copy_bytes = sum(linear.copy_bytes for linear in held)
    copy = f"a copy of {copy_bytes / 2**20:,.0f} MiB" if copy_bytes else "numbers made on the way"
    rows = f"up to {layers[0].max_code_rows} rows by codes" if layers else "by codes"
    head_rows = f" (output layer {head.max_code_rows})" if isinstance(head, QuantizedLinear) else ""
    return f"{words}, {rows}{head_rows}, more by {copy}"


# --- codes without a product ----------------------------------------------------------------------


class PlainCodes:
    """A weight that no product here multiplies by as it lies. Two codes of 4 bits share a byte."""

    def __init__(self, weight: QuantizedWeight, device: torch.device):
        self._bits, self._num_inputs = weight.bits, weight.shape[1]
        codes = weight.codes.to(device)
        if self._bits == 4:
            codes = F.pad(codes, (0, self._num_inputs % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        self._bytes, self._group_of = codes, weight.group_of.to(device)
        self._scales, self._zeros = weight.scales.to(device, torch.float16), weight.zeros.to(device, torch.int16)

    def write_values(self, out: Tensor, first: int = 0) -> None:
        last = first + len(out)
        codes = self._bytes[first:last]
        if self._bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)[:, : self._num_inputs]
        scales, zeros = (numbers[first:last].to(out.dtype)[:, self._group_of] for numbers in (self._scales, self._zeros))
        out.copy_(codes).sub_(zeros).mul_(scales)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._bytes, self._scales, self._zeros))
