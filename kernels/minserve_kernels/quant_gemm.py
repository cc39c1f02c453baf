"""Products with quantized weights: the weight stays in 8 or 4 bits until it is in registers.

Why: with few rows a product takes as long as its weight takes to be read. A weight of half or a quarter of
the bytes is read in half or a quarter of the time, if unpacking it costs less. Three things keep it cheap:

- Codes lie in memory as they are multiplied: wide loads, and no nibble changes its place (see `weights.py`).
- A nibble becomes a float without a conversion, which a GPU does slowly. Between 128 and 256 numbers of bf16
  are 1 apart, so 128 + c is the bits of 128 with c in the lowest four: one OR (in fp16, 1024 does it).
- Scale, zero point and that 128 belong to a whole group of inputs, so they are applied to the group's sum and
  not to each weight: sum x (c - z) s = s (sum x c - z sum x).

The weight stands on the left of the matrix units' product, its outputs as rows: even one token fills them.
Few programs would leave most of a GPU idle; then the inputs are split among several, and a second kernel adds
up their sums.

Invariant: sums are in float32 and in a fixed order: the same product on the same card gives the same bits.

Taught in notebook 09.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve_kernels.weights import require_groups

# Bits to OR a code into, and the number that these are by themselves. A float32 is converted.
MAGIC = {torch.bfloat16: (0x4300, 128), torch.float16: (0x6400, 1024), torch.float32: (0, 0)}
INT8_BLOCK = 64  # inputs that a program multiplies at once; for int4 it is a group
LEAST_BLOCKS = 4  # of a split: with less, a program is mostly its beginning and its end


class Tile(NamedTuple):
    """What a program computes, and how: outputs x rows numbers, over one of `num_splits` parts of the sum."""

    outputs: int
    rows: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_tile(
    num_rows: int, num_outputs: int, num_blocks: int, num_processors: int, is_float32: bool = False
) -> Tile:
    """The tile for so many rows and outputs, and inputs in so many blocks, on so many multiprocessors.

    >>> choose_tile(1, 14336, 32, 132)  # 112 programs are not enough
    Tile(outputs=128, rows=16, num_splits=3, num_warps=4, num_stages=3)
    >>> choose_tile(4096, 14336, 32, 132)
    Tile(outputs=128, rows=64, num_splits=1, num_warps=8, num_stages=3)
    """
    outputs = 128
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    if is_float32:  # no matrix unit multiplies it: a tile is what the registers of ordinary products hold
        outputs, rows = 32, 16
    num_programs = triton.cdiv(num_outputs, outputs) * triton.cdiv(num_rows, rows)
    wanted = triton.cdiv(2 * num_processors, num_programs)  # two on a processor hide each other's waiting
    num_splits = max(1, min(wanted, num_blocks // LEAST_BLOCKS))
    return Tile(outputs, rows, num_splits, num_warps=8 if rows == 64 else 4, num_stages=3)


def _tile_for(x: Tensor, num_outputs: int, num_blocks: int) -> Tile:
    num_processors = 108  # an A100's, where kernels are interpreted or only compiled
    if x.device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return choose_tile(len(x), num_outputs, num_blocks, num_processors, x.dtype == torch.float32)


# --- int8: a scale for each output -----------------------------------------------------------------


def int8_linear(x: Tensor, codes: Tensor, scales: Tensor, tile: Tile | None = None) -> Tensor:
    """x W^T with W = codes * scales. x: [T, I], codes: [O, I] int8, scales: [O] -> [T, O]

    Bytes: O I of codes and 2 O of scales, once for each tile of rows; 2 T I and 2 T O of activations. With n
    splits, also 8 n T O of sums, written and read.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(codes)
    assert codes.shape == (num_outputs, num_inputs) and scales.shape == (num_outputs,), (
        codes.shape,
        scales.shape,
    )
    assert x.stride(1) == codes.stride(1) == scales.stride(0) == 1, (
        x.stride(),
        codes.stride(),
        scales.stride(),
    )
    num_blocks = triton.cdiv(num_inputs, INT8_BLOCK)
    tile = tile or _tile_for(x, num_outputs, num_blocks)
    sums = _room(x, num_outputs, tile)
    _int8_linear[_grid(num_rows, num_outputs, tile)](
        *(x, codes, scales, sums, num_rows, num_outputs, num_inputs, x.stride(0), codes.stride(0)),
        triton.cdiv(num_blocks, tile.num_splits),
        INPUTS=INT8_BLOCK,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return _added(sums, x.dtype)


@triton.jit(do_not_specialize=["num_rows"])  # or 1 row would be compiled apart from 2
def _int8_linear(
    x,  # [T, I]
    codes,  # [O, I]
    scales,  # [O]
    sums,  # [splits, T, O]
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    codes_stride,
    blocks_a_split,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of rows, splits)."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = output < num_outputs, row < num_rows
    codes_row = codes + output.to(tl.int64)[:, None] * codes_stride
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    first = tl.program_id(2) * blocks_a_split
    last = tl.minimum(first + blocks_a_split, tl.cdiv(num_inputs, INPUTS))
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in range(first, last):
        column = block * INPUTS + tl.arange(0, INPUTS)
        is_column = column < num_inputs
        weight = tl.load(codes_row + column[None, :], mask=is_output[:, None] & is_column[None, :], other=0)
        numbers = tl.load(x_row + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        # A code is exact in bf16. Only float32 has a choice of precision, and keeps its own.
        total = tl.dot(weight.to(numbers.dtype), tl.trans(numbers), total, input_precision="ieee")
    scale = tl.load(scales + output, mask=is_output, other=0.0).to(tl.float32)
    _store(sums, scale[:, None] * total, row, output, num_rows, num_outputs)


# --- int4: a scale and a zero point for each output and group of inputs ----------------------------


def int4_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int, tile: Tile | None = None
) -> Tensor:
    """x W^T with W = (codes - zeros) * scales, two codes a byte as `weights.pack_int4` packs them.

    x: [T, I], codes: [O, I / 2] uint8, scales, zeros: [O, I / group_size] -> [T, O]
    Scales and zeros are read for many outputs at once, so they are best stored with outputs side by side
    (`weights.outputs_together`); any strides are right. Raises ValueError for groups that are not known.

    Bytes: O I / 2 of codes and 4 O I / group_size of scales and zeros, once for each tile of rows; 2 T I and
    2 T O of activations. With n splits, also 8 n T O of sums, written and read.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(codes)
    require_groups(num_inputs, group_size)
    num_groups = num_inputs // group_size
    assert codes.shape == (num_outputs, num_inputs // 2), (codes.shape, x.shape)
    assert scales.shape == zeros.shape == (num_outputs, num_groups), (scales.shape, zeros.shape)
    assert scales.stride() == zeros.stride(), (scales.stride(), zeros.stride())
    assert x.stride(1) == codes.stride(1) == 1, (x.stride(), codes.stride())
    tile = tile or _tile_for(x, num_outputs, num_groups)
    sums = _room(x, num_outputs, tile)
    magic, offset = MAGIC[x.dtype]
    _int4_linear[_grid(num_rows, num_outputs, tile)](
        *(x, codes, scales, zeros, sums, num_rows, num_outputs, num_groups, x.stride(0), codes.stride(0)),
        *(scales.stride(0), scales.stride(1), triton.cdiv(num_groups, tile.num_splits)),
        MAGIC_BITS=magic,
        OFFSET=offset,
        GROUP=group_size,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return _added(sums, x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _int4_linear(
    x,  # [T, I]
    codes,  # [O, I / 2]
    scales,  # [O, I / GROUP]
    zeros,  # [O, I / GROUP]
    sums,  # [splits, T, O]
    num_rows,
    num_outputs,
    num_groups,
    x_stride,
    codes_stride,
    scales_stride,
    scales_group_stride,
    groups_a_split,
    MAGIC_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of rows, splits)."""
    HALF: tl.constexpr = GROUP // 2
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    is_output, is_row = output < num_outputs, row < num_rows
    codes_row = codes + output.to(tl.int64)[:, None] * codes_stride + column[None, :]
    x_row = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    first = tl.program_id(2) * groups_a_split
    last = tl.minimum(first + groups_a_split, num_groups)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for group in range(first, last):
        packed = tl.load(codes_row + group * HALF, mask=is_output[:, None], other=0)
        x_low = tl.load(x_row + group * GROUP, mask=is_row[:, None], other=0.0)
        x_high = tl.load(x_row + group * GROUP + HALF, mask=is_row[:, None], other=0.0)
        place = output * scales_stride + group * scales_group_stride
        scale = tl.load(scales + place, mask=is_output, other=0.0).to(tl.float32)
        zero = tl.load(zeros + place, mask=is_output, other=0.0).to(tl.float32) + OFFSET
        low = _floats(packed & 15, x_low.dtype, MAGIC_BITS)
        high = _floats(packed >> 4, x_low.dtype, MAGIC_BITS)
        products = tl.dot(low, tl.trans(x_low), input_precision="ieee")
        products = tl.dot(high, tl.trans(x_high), products, input_precision="ieee")
        x_sum = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), 1)
        total += scale[:, None] * (products - zero[:, None] * x_sum[None, :])
    _store(sums, total, row, output, num_rows, num_outputs)


@triton.jit
def _floats(nibbles, dtype: tl.constexpr, MAGIC_BITS: tl.constexpr):
    """Nibbles as floats, each larger by the number whose bits `MAGIC_BITS` are."""
    if MAGIC_BITS == 0:
        numbers = nibbles.to(dtype)
    else:
        numbers = (nibbles.to(tl.int16) | MAGIC_BITS).to(dtype, bitcast=True)
    return numbers


# --- sums over splits ------------------------------------------------------------------------------


def _grid(num_rows: int, num_outputs: int, tile: Tile) -> tuple[int, int, int]:
    return triton.cdiv(num_outputs, tile.outputs), triton.cdiv(num_rows, tile.rows), tile.num_splits


def _room(x: Tensor, num_outputs: int, tile: Tile) -> Tensor:
    """[splits, T, O] for the programs' sums; with one split these are the result."""
    dtype = x.dtype if tile.num_splits == 1 else torch.float32
    return x.new_empty(tile.num_splits, len(x), num_outputs, dtype=dtype)


@triton.jit
def _store(sums, values, row, output, num_rows, num_outputs):
    """values: [OUTPUTS, ROWS] -> sums[this split, row, output]"""
    place = (tl.program_id(2).to(tl.int64) * num_rows + row)[None, :] * num_outputs + output[:, None]
    is_inside = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    tl.store(sums + place, values.to(sums.dtype.element_ty), mask=is_inside)


def _added(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """sums: [splits, T, O] -> [T, O]"""
    if len(sums) == 1:
        return sums[0]
    out = torch.empty_like(sums[0], dtype=dtype)
    _add_splits[(triton.cdiv(out.numel(), 1024),)](sums, out, out.numel(), len(sums), NUMBERS=1024)
    return out


@triton.jit
def _add_splits(sums, out, num_numbers, num_splits, NUMBERS: tl.constexpr):
    """Grid (tiles of the result's numbers)."""
    place = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    total = tl.zeros((NUMBERS,), tl.float32)
    for _ in range(num_splits):
        total += tl.load(sums + place, mask=place < num_numbers, other=0.0)
        sums += num_numbers
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < num_numbers)
