"""A quantized matrix as torch's int4 product on the CPU takes it. That product also serves 8 bits, as two planes of 4.

Why: with few rows a product takes as long as its weight takes to be read, and this is the one operator of torch that reads 4 bits a weight
and unpacks them in registers. It wants groups of one size, 32, 64, 128 or 256 inputs, and codes from 0 to 15. Other matrices are brought
into that form, and mean the same weights in it:

    groups of other sizes    a scale is repeated for each piece of the largest size that every border respects
    groups out of order      inputs of a group are put side by side, and x is put into the same order
    8 bits                   code = 16 high + low: [high | low] times [x, x], with scales [16 s | s]

The second product of the 8 bits reads as much as one of 8 bits would, and takes less time on two Zen 4 cores than torch's own int8 product:
ms for all layers of SmolLM2-135M at 1 / 4 / 8 / 16 rows 8 / 15 / 27 / 50, against 12 / 15 / 26 / 39; with 4 bits 4 / 7 / 13 / 25.

The operator's layout is private to torch and to the CPU. It is read back and compared for every weight; `try_pack` gives None where it is
missing, other than known, or wrong, and the weight is then served without it.

Invariant: `write_values` gives (code - zero) * scale, rounded once to the compute type, with the scale that the operator multiplies by; the
operator itself rounds offset = (8 - zero) * scale instead, by at most 1/32 of a scale in bf16.

Taught in notebook 09.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.model.quantized_weight import QuantizedWeight

EVEN_SIZES = (256, 128, 64, 32)  # inputs a group
BLOCKS = (64, 32)  # outputs that lie together in memory: with AVX-512, with AVX2
MIDDLE = 8  # what the operator subtracts from a code


@dataclass(frozen=True, slots=True, eq=False)
class Nibbles:
    """A matrix of 4 bits in groups of one size, J = I of inputs, or 2 I in two planes: value = (code - zero) * scale."""

    codes: Tensor  # [O, J] uint8, 0 to 15
    scales: Tensor  # [O, J / group_size] float32
    zeros: Tensor  # the same shape, whole numbers
    group_size: int
    order: Tensor | None  # [I]: which input of x each column multiplies; None: the one in its place
    num_planes: int  # 2: the left half is 16 times as much as the right


def as_nibbles(weight: QuantizedWeight, sizes: tuple[int, ...] = EVEN_SIZES) -> Nibbles | None:
    """The same matrix in groups of the largest of `sizes` that fits, 8 bits as two planes; None if none fits.

    >>> codes, ones = torch.tensor([[0x73] * 32], dtype=torch.uint8), torch.ones(1, 1)
    >>> as_nibbles(QuantizedWeight(8, codes, ones, 128 * ones, torch.zeros(32, dtype=torch.int64))).codes[0, [0, -1]]
    tensor([7, 3], dtype=torch.uint8)
    """
    group_of, order = weight.group_of, None
    if bool((group_of.diff() < 0).any()):
        order = group_of.argsort(stable=True)
        group_of = group_of[order]
    size = _even_size(group_of, sizes)
    if size is None:
        return None
    codes = weight.codes if order is None else weight.codes[:, order]
    scales, zeros = weight.scales[:, group_of[::size]], weight.zeros[:, group_of[::size]]
    if weight.bits == 4:
        return Nibbles(codes, scales, zeros, size, order, 1)
    high = (zeros / 16).floor()
    return Nibbles(
        codes=torch.cat((codes >> 4, codes & 15), 1),
        scales=torch.cat((16 * scales, scales), 1),
        zeros=torch.cat((high, zeros - 16 * high), 1),
        group_size=size,
        order=order,
        num_planes=2,
    )


def arrange(x: Tensor, order: Tensor | None, num_planes: int) -> Tensor:
    """The inputs as the columns of nibbles want them. x: [T, I] -> [T, J]"""
    x = x if order is None else x[:, order]
    return x if num_planes == 1 else torch.cat((x, x), 1)


def _even_size(group_of: Tensor, sizes: tuple[int, ...]) -> int | None:
    """The largest size of which every border between groups, and the number of inputs, is a multiple."""
    borders = [*(group_of.diff().nonzero().flatten() + 1).tolist(), len(group_of)]
    return next((size for size in sizes if all(border % size == 0 for border in borders)), None)


# --- torch's operator -----------------------------------------------------------------------------


class PackedInt4:
    """Nibbles in the operator's layout."""

    def __init__(self, nibbles: Nibbles, dtype: torch.dtype, block: int):
        """Raises RuntimeError or AttributeError where this torch cannot. block: outputs that it puts together."""
        self.num_outputs, self._block, self._dtype = len(nibbles.codes), block, dtype
        self._group_size, self._num_planes, self._order = nibbles.group_size, nibbles.num_planes, nibbles.order
        missing = -self.num_outputs % block
        codes = F.pad(nibbles.codes, (0, 0, 0, missing)).int()
        self._codes = to_operators_layout(codes)  # bytes: [O / block, J, block / 2]
        self._scales = F.pad(_scales_and_offsets(nibbles, dtype), (0, 0, 0, missing))  # [J / group_size, O, 2]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, I] -> [T, O]"""
        x = arrange(x, self._order, self._num_planes)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(x, self._codes, self._group_size, self._scales)
        return y if y.shape[1] == self.num_outputs else y[:, : self.num_outputs].contiguous()

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def write_values(self, out: Tensor, first: int = 0) -> None:
        """The weights of outputs from `first` on, a multiple of the block, as many as fit. out: [outputs, I] in the compute type"""
        assert first % self._block == 0, f"outputs lie in blocks of {self._block}, {first} is inside of one"
        last = first + len(out)
        out.copy_(self.codes(first // self._block, -(-last // self._block))[: len(out)])
        scales, zeros = self._scales_and_zeros(first, last)
        out.unflatten(1, (-1, self._group_size)).sub_(zeros[:, :, None]).mul_(scales[:, :, None])
        if self._order is not None:
            out.copy_(out[:, self._order.argsort()])

    def _scales_and_zeros(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Of these outputs, [outputs, I / group_size] in the compute type. A zero is a whole number, so its offset tells it exactly."""
        scales, offsets = self._scales[:, first:last].float().transpose(0, 1).unbind(2)  # [outputs, J / group_size]
        middle = MIDDLE
        if self._num_planes == 2:
            offsets = torch.stack(offsets.chunk(2, 1)).sum(0)
            scales = scales.chunk(2, 1)[1]
            middle = 17 * MIDDLE  # 16 * 8 + 8
        zeros = torch.where(scales == 0, 0.0, middle - (offsets / scales).round())
        return scales.to(self._dtype), zeros.to(self._dtype)

    def codes(self, first: int = 0, last: int | None = None) -> Tensor:
        """The codes of blocks from `first` to before `last`, planes put together. -> [outputs, I] uint8"""
        bytes_ = self._codes.view(-1, self._num_planes, self._codes.shape[1] * 2 // self._num_planes, self._block // 2)[first:last]
        lower, upper = bytes_ & 15, bytes_ >> 4  # a byte has an output's code, and that of the one half a block further
        codes = torch.stack((lower, upper), 2)  # [blocks, planes, 2, I, block / 2]
        codes = codes[:, 0] if self._num_planes == 1 else (codes[:, 0] << 4) | codes[:, 1]
        return codes.transpose(2, 3).flatten(0, 2)


def to_operators_layout(codes: Tensor) -> Tensor:
    """codes: [O, J] int32. Its second argument means nothing on a CPU."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def _scales_and_offsets(nibbles: Nibbles, dtype: torch.dtype) -> Tensor:
    """[J / group_size, O, 2]: value = (code - 8) * scale + offset.

    Of two planes only the sum of their offsets counts. The first has it as far as `dtype` can hold it, the second what is left.
    """
    offsets = (MIDDLE - nibbles.zeros) * nibbles.scales
    if nibbles.num_planes == 2:
        total = torch.stack(offsets.chunk(2, 1)).sum(0)
        held = total.to(dtype).float()
        offsets = torch.cat((held, total - held), 1)
    return torch.stack((nibbles.scales, offsets), 2).transpose(0, 1).to(dtype).contiguous()


@torch.inference_mode()
def try_pack(weight: QuantizedWeight, dtype: torch.dtype) -> PackedInt4 | None:
    """The weight for torch's operator, or None if its groups do not fit or this build of torch cannot, or does it wrong."""
    nibbles = as_nibbles(weight)
    if nibbles is None:
        return None
    codes = weight.codes if nibbles.order is None else weight.codes[:, nibbles.order]
    for block in BLOCKS:
        try:
            packed = PackedInt4(nibbles, dtype, block)
            if torch.equal(packed.codes()[: len(codes)], codes) and _multiplies_right(packed, weight.shape[1], dtype):
                return packed
        except (AttributeError, RuntimeError):  # no such operator, or not for this type
            return None
    return None


def _multiplies_right(packed: PackedInt4, num_inputs: int, dtype: torch.dtype) -> bool:
    """Tried on random inputs: with a ramp, the roundings of a group's offset would add up."""
    x = torch.randn(2, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.empty(packed.num_outputs, num_inputs, dtype=dtype)
    packed.write_values(weight)
    got, want = packed(x).float(), F.linear(x, weight).float()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    return bool((got - want).abs().max() <= tolerance * want.abs().max())  # False for NaN
