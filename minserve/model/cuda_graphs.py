"""Decode steps as CUDA graphs: the whole decoder is recorded once per batch size and later started with a single call.

Why: a decode step is some hundred short kernels, and Python takes longer to launch them than the GPU to run them. A graph replays
the launches without Python. It replays their arguments, too: the same addresses, the same grids. So a step's numbers are copied
into the arrays that the graph was recorded with, and the batch is padded to a size that has one.

Padding writes nothing (slot -1) and reads nothing (length 0). Steps with chunks of prompts, or with more requests than the
largest graph, run as ever: they keep the GPU busy for longer than they take to launch.

Invariant: a graph holds addresses of the weights and of the cache, so it is valid for the decoder it was recorded with and no other.

Recording follows torch's documentation of torch.cuda.graph. No GPU was at hand when this was written; the logic around it
is tested with a recorder that runs the step again. Taught in notebook 05.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from minserve.core.batch import ScheduledRequest
from minserve.model.attention_triton import Shape, TritonOperations, TritonStep, pack, table_width
from minserve.model.decoder import Decoder
from minserve.model.kv_cache import KVCache

MAX_REQUESTS = 256  # of the largest graph; beyond that, launching is no longer what a step waits for
NUM_WARM_UPS = 2  # runs before recording: they compile kernels and allocate workspaces, which must not happen while recording

Compute: TypeAlias = Callable[[], Tensor]
Record: TypeAlias = Callable[[Compute], tuple[Callable[[], None], Tensor]]  # -> replay, and where its result stands


def wants_graphs(setting: bool | str, backend: str, device: torch.device) -> bool:
    """What the setting cuda_graphs means here. auto: with the kernels on CUDA. Raises ValueError where graphs cannot be had."""
    if setting not in (True, False, "auto"):
        raise ValueError(f"cuda_graphs must be True, False or 'auto', got {setting!r}")
    is_possible = backend == "triton" and device.type == "cuda" and torch.version.hip is None
    if setting is True and not is_possible:
        raise ValueError(f"cuda_graphs=True needs attention_backend 'triton' on a CUDA device, this is {backend!r} on {device}")
    return bool(setting) and is_possible


def batch_sizes(most: int) -> list[int]:
    """Sizes that graphs are recorded for, the smallest first: two in each doubling, so that less than a third of a batch is padding.

    >>> batch_sizes(40)
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
    """
    sizes = [1]
    while sizes[-1] < most:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(min(most, power * 3 // 2 if sizes[-1] == power and power > 1 else power * 2))
    return sizes


class _Graph(NamedTuple):
    """A recorded batch size: where its step's numbers go, what starts it, where its answer stands."""

    shape: Shape
    packed: Tensor  # [shape.num_packed] int32
    replay: Callable[[], None]
    hidden: Tensor  # [size, E]


class DecodeGraphs:
    """Runs decode steps of up to `max_requests` requests of up to `max_tokens` tokens each."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        operations: TritonOperations,
        max_requests: int,
        max_tokens: int,
        record: Record | None = None,
    ):
        self.decoder, self.cache, self.operations = decoder, cache, operations
        self.max_tokens, self.num_blocks = max_tokens, table_width(-(-max_tokens // cache.block_size))
        self.sizes = batch_sizes(min(max_requests, MAX_REQUESTS))
        self._record = record or CudaRecorder(cache.device)
        # The largest first: what the smaller ones allocate fits into what it has given back.
        self._graphs = {size: self._recorded(size) for size in reversed(self.sizes)}

    def recorded_for(self, decoder: Decoder) -> "DecodeGraphs":
        """The same graphs of other weights."""
        return DecodeGraphs(decoder, self.cache, self.operations, self.sizes[-1], self.max_tokens, self._record)

    def fits(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Whether a graph can run this step."""
        return (
            0 < len(rows) <= self.sizes[-1]
            and all(row.num_tokens == 1 for row in rows)
            and max(len(row.block_table) for row in rows) <= self.num_blocks
        )

    @torch.inference_mode()
    def hidden(self, rows: Sequence[ScheduledRequest]) -> Tensor:
        """Hidden states of a step that fits: [len(rows), E], valid until the next call"""
        graph = self._graphs[self.sizes[bisect_left(self.sizes, len(rows))]]
        graph.packed.copy_(pack(rows, graph.shape, self.cache), non_blocking=True)
        graph.replay()
        return graph.hidden[: len(rows)]

    @torch.inference_mode()
    def _recorded(self, size: int) -> _Graph:
        shape = Shape(num_tokens=size, num_decodes=size, num_chunks=0, num_blocks=self.num_blocks)
        packed = pack((), shape, self.cache).to(self.cache.device)  # nothing but padding: recording leaves the cache as it is
        step = TritonStep.of((), shape, packed)
        replay, hidden = self._record(lambda: self.decoder.forward(step.token_ids, step.positions, self.cache, step, self.operations))
        return _Graph(shape, packed, replay, hidden)


class CudaRecorder:
    """Records what a function launches, as a CUDA graph. All graphs of one recorder share a pool of memory."""

    def __init__(self, device: torch.device):
        self.device, self.pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self.device):
            aside = torch.cuda.Stream()  # warming up on the default stream could tie later launches to it
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(NUM_WARM_UPS):
                    compute()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                result = compute()
        return graph.replay, result
