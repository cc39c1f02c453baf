"""The kernels behind the decoder's operations: a step as device tensors, and the calls of a layer.

Why: a kernel reads block tables itself, so nothing is gathered and nothing is grouped by length. What it needs instead is the
step as plain arrays: where each token is written, each request's block table and its number of keys. All of them are
numbers of 4 bytes, packed into one array on the host and sent in one copy.

Requests with one new token (decodes) stand before those with more (chunks of prompts): each layer makes at most two calls of attention,
one kernel for either kind, and concatenates their answers.

Invariant: a kernel is given nothing that depends on values on the device, so a step never waits for it; block tables are
filled up with the null block.

Taught in notebook 05.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minserve.core.batch import ScheduledBatch, ScheduledRequest
from minserve.model.config import ModelConfig
from minserve.model.kv_cache import KVCache
from minserve.model.linear import AnyLinear
from minserve.model.rope import Rotation

ALIGNMENT = 4  # numbers: arrays begin at multiples of 16 bytes, or Triton compiles a kernel again for those that don't
TABLE_MULTIPLE = 16  # block tables are as wide as a multiple of this, for the same reason
NO_SLOT = -1  # what is computed for such a token is not stored: padding

Rows = Sequence[ScheduledRequest]


class Shape(NamedTuple):
    """How long the arrays of a step are. Steps of one shape can share their tensors: see cuda_graphs.py."""

    num_tokens: int
    num_decodes: int
    num_chunks: int
    num_blocks: int  # width of the block tables

    @property
    def arrays(self) -> tuple[tuple[int, ...], ...]:
        """The arrays' own shapes, in the order in which they are packed and in which `TritonStep` has them."""
        decodes, chunks, width = self.num_decodes, self.num_chunks, self.num_blocks
        return (*[(self.num_tokens,)] * 3, (decodes,), (decodes, width), (chunks + 1,), (chunks,), (chunks, width))

    @property
    def num_packed(self) -> int:
        return sum(_aligned(math.prod(array)) for array in self.arrays)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step as arrays, all int32 and views of one. `rows`: decodes first; their tokens stand in the same order."""

    rows: tuple[ScheduledRequest, ...]
    shape: Shape
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] block * S + offset
    decode_lengths: Tensor  # [decodes] keys of each request, its new tokens included
    decode_tables: Tensor  # [decodes, num_blocks]
    query_starts: Tensor  # [chunks + 1] where a chunk's tokens begin among those of all chunks
    chunk_lengths: Tensor  # [chunks]
    chunk_tables: Tensor  # [chunks, num_blocks]

    @classmethod
    def of(cls, rows: tuple[ScheduledRequest, ...], shape: Shape, packed: Tensor) -> "TritonStep":
        """Views of the packed arrays. packed: [shape.num_packed] int32"""
        sizes = [math.prod(array) for array in shape.arrays]
        begins = accumulate(map(_aligned, sizes[:-1]), initial=0)
        views = [packed[i : i + n].view(array) for i, n, array in zip(begins, sizes, shape.arrays, strict=True)]
        return cls(rows, shape, *views)


def in_order(rows: Rows) -> tuple[ScheduledRequest, ...]:
    """Decodes first."""
    return tuple(sorted(rows, key=lambda row: row.num_tokens > 1))


def shape_of(rows: Rows) -> Shape:
    widest = max(len(row.block_table) for row in rows)
    num_decodes = sum(row.num_tokens == 1 for row in rows)
    return Shape(sum(row.num_tokens for row in rows), num_decodes, len(rows) - num_decodes, table_width(widest))


def table_width(num_blocks: int) -> int:
    return -(-num_blocks // TABLE_MULTIPLE) * TABLE_MULTIPLE


def pack(rows: Rows, shape: Shape, cache: KVCache) -> Tensor:
    """The arrays of a step, one behind the other, on the host: [shape.num_packed] int32. rows: from `in_order`

    What a shape has beyond its rows is padding that harms nobody: nothing is read for it and nothing written.
    """
    packed = torch.zeros(shape.num_packed, dtype=torch.int32, pin_memory=cache.device.type == "cuda")  # pinned: copied without waiting
    step, size, num_decodes = TritonStep.of((), shape, packed), cache.block_size, sum(row.num_tokens == 1 for row in rows)
    _fill(step.token_ids, [t for row in rows for t in row.token_ids], 0)
    _fill(step.positions, [p for row in rows for p in range(row.start, row.end)], 0)
    _fill(step.slots, [row.block_table[p // size] * size + p % size for row in rows for p in range(row.start, row.end)], NO_SLOT)
    decodes, chunks = rows[:num_decodes], rows[num_decodes:]
    _fill(step.decode_lengths, [row.end for row in decodes], 0)
    _fill(step.chunk_lengths, [row.end for row in chunks], 0)
    _fill(step.query_starts, [*accumulate((row.num_tokens for row in chunks), initial=0)], 0)
    _fill_tables(step.decode_tables, decodes, cache.null_block)
    _fill_tables(step.chunk_tables, chunks, cache.null_block)
    return packed


def _fill(array: Tensor, values: Sequence[int], padding: int) -> None:
    numbers = array.numpy()
    numbers[: len(values)] = values
    numbers[len(values) :] = padding


def _fill_tables(tables: Tensor, rows: Rows, null_block: int) -> None:
    numbers = tables.numpy()
    numbers[:] = null_block
    for i, row in enumerate(rows):
        numbers[i, : len(row.block_table)] = row.block_table


# --- the kernels ----------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """The launchers that serving needs, by the names they have in minserve_kernels; `minserve_kernels.reference` has the same."""

    rms_norm: Any
    rope: Any
    swiglu: Any
    write_kv: Any
    decode_attention: Any
    prefill_attention: Any


def load_kernels() -> Kernels:
    """The Triton kernels. Imported here, and not above, since Triton is optional: machines without it get this far."""
    from minserve_kernels.activation import swiglu
    from minserve_kernels.decode_attention import decode_attention
    from minserve_kernels.kv_write import write_kv
    from minserve_kernels.norm import rms_norm
    from minserve_kernels.prefill_attention import prefill_attention
    from minserve_kernels.rope import rope

    return Kernels(rms_norm, rope, swiglu, write_kv, decode_attention, prefill_attention)


def launches_are_diverted() -> bool:
    """Whether launches run in the interpreter or are only compiled, so that no GPU is needed."""
    from triton.runtime.jit import KernelInterface  # here, since Triton is optional

    return KernelInterface.__getitem__.__module__ != KernelInterface.__module__


class TritonOperations:
    """The decoder's operations by `kernels`: Triton's, or their torch references, which need no device."""

    name = "triton"

    def __init__(self, kernels: Kernels | Any, needs_device: bool = True):
        self.kernels, self.needs_device = kernels, needs_device

    def lay_out(self, batch: ScheduledBatch, cache: KVCache, config: ModelConfig, dtype: torch.dtype) -> TritonStep:
        if self.needs_device and cache.device.type == "cpu" and not launches_are_diverted():
            raise RuntimeError("the kernels of this engine run on CPU only within `minserve_kernels.interpret.interpreted()`")
        rows = in_order(batch.rows)
        shape = shape_of(rows)
        return TritonStep.of(rows, shape, pack(rows, shape, cache).to(cache.device, non_blocking=True))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.kernels.rms_norm(x.reshape(-1, len(weight)), weight, eps)[0].view(x.shape)

    def add_norm(self, linear: AnyLinear, y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.kernels.rms_norm(linear(y), weight, eps, x)  # the sum is made where it is normed, not in a pass of its own

    def rotate_(self, heads: Tensor, num_heads: int, turn: Rotation) -> None:
        q, k = heads[:, :num_heads], heads[:, num_heads:]
        self.kernels.rope(q, k, turn.cos.flatten(1), turn.sin.flatten(1), in_place=True)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self.kernels.swiglu(gate_up)

    def attend(self, q: Tensor, kv: Tensor, cache: KVCache, layer: int, step: TritonStep, scale: float, window: int | None) -> Tensor:
        kernels, paged, n = self.kernels, cache.paged(layer), step.shape.num_decodes
        kernels.write_kv(kv, step.slots, paged)
        answers = []
        if n:
            answers.append(kernels.decode_attention(q[:n], paged, step.decode_tables, step.decode_lengths, scale, window))
        if step.shape.num_chunks:
            answers.append(kernels.prefill_attention(q[n:], paged, step.chunk_tables, step.query_starts, step.chunk_lengths, scale, window))
        return (answers[0] if len(answers) == 1 else torch.cat(answers)).flatten(1)
