"""What a run asked of its memory, step by step, and the same demands put to other allocators.

Why: the cost of allocation is calls times the price of a call, so it is measured with the calls of a run that took place: its trace says
in each step which requests grew, to where, and who ended. Each way to come by memory replays that: the engine's own pool; its free list
alone; a tensor for each new block; one for each block and layer; one for each whole answer; a cache without room, moved whenever it grows;
and pages of the operating system for each new block, which nobody keeps for the next.

Invariant: replayed on the pool, the blocks in use are those of the trace, in every step.

Taught in notebook 11.
"""

import mmap
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from minserve.core.block_manager import BlockManager
from minserve.core.request import Request, SamplingParams
from minserve.core.trace import Trace
from minserve.host_record import AllocationCost, Load
from minserve.interface import RequestOutput
from minserve.llm import LLM
from minserve.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Growth:
    """A request computes its tokens [start, end) in a step. One that is new and starts later than 0 was given the blocks before it."""

    request_id: str
    start: int
    end: int
    is_new: bool  # starts, or comes back

    def num_new_blocks(self, block_size: int) -> int:
        return -(-self.end // block_size) - -(-self.start // block_size)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one step asks: who is taken out, who grows, who has ended when it is over."""

    preempted: tuple[str, ...]
    growths: tuple[Growth, ...]
    finished: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The demands of a run, the tokens of its requests, and the pool they were served from."""

    demands: tuple[Demand, ...]
    prompts: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]
    num_blocks: int
    block_size: int
    num_layers: int
    bytes_per_token: int
    run_s: float

    @property
    def bytes_per_layer(self) -> int:
        """Of one token in one layer."""
        return self.bytes_per_token // self.num_layers

    @property
    def longest(self) -> Mapping[str, int]:
        """Most tokens a request stores: what a whole answer reserves."""
        return {name: len(prompt) + len(self.outputs[name]) for name, prompt in self.prompts.items()}

    @classmethod
    def of(cls, llm: LLM, trace: Trace, outputs: Sequence[RequestOutput], run_s: float) -> "Recording":
        """Of a run of one answer a prompt that began with an empty cache."""
        return cls(
            demands=demands_of(trace),
            prompts={output.request_id: output.prompt_ids for output in outputs},
            outputs={output.request_id: tuple(output.token_ids) for output in outputs},
            num_blocks=llm.num_blocks,
            block_size=llm.pool.block_size,
            num_layers=len(cast(ModelRunner, llm.engine.runner).decoder.layers),
            bytes_per_token=llm.pool.bytes_per_token,
            run_s=run_s,
        )

    def load(self, batch_size: int) -> Load:
        """The sums of all that is asked."""
        growths = [growth for demand in self.demands for growth in demand.growths]
        return Load(
            batch_size=batch_size,
            num_requests=len(self.prompts),
            num_steps=len(self.demands),
            run_s=self.run_s,
            num_rows=len(growths),
            num_tokens=sum(growth.end - growth.start for growth in growths),
            num_blocks_taken=sum(growth.num_new_blocks(self.block_size) for growth in growths),
            block_size=self.block_size,
            bytes_per_token=self.bytes_per_token,
            num_layers=self.num_layers,
        )


def demands_of(trace: Trace) -> tuple[Demand, ...]:
    """The trace's steps as demands; steps in which nothing ran are left out."""
    found: list[Demand] = []
    held: set[str] = set()
    for step in trace.steps:
        held -= set(step.preempted)
        growths = tuple(Growth(name, start, start + count, name not in held) for name, (start, count) in step.tokens.items())
        held |= step.tokens.keys()
        held -= set(step.finished)
        if growths:
            found.append(Demand(step.preempted, growths, step.finished))
    return tuple(found)


# --- ways to come by memory -----------------------------------------------------------------------


class Store(Protocol):
    """Memory for keys and values, by one way. With `writes`, the room of the step's tokens is written to as well."""

    def grow(self, growth: Growth) -> None: ...

    def drop(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Site:
    """Where a store is built: for which run, on which device, and whether it writes."""

    recording: Recording
    device: torch.device
    writes: bool

    def empty(self, *shape: int) -> Tensor:
        """Bytes that nobody has set."""
        return torch.empty(*shape, dtype=torch.uint8, device=self.device)

    def memory(self) -> Tensor:
        """That of a pool [layer, block, byte], which an engine that has run for a while has written to everywhere."""
        return self.empty(self.recording.num_layers, self.recording.num_blocks, self.block_bytes).zero_()

    @property
    def block_bytes(self) -> int:
        """Of one block in one layer."""
        return self.recording.block_size * self.recording.bytes_per_layer


class Nothing:
    """Does nothing: what the replay itself takes, which is taken off."""

    def __init__(self, site: Site):
        pass

    def grow(self, growth: Growth) -> None:
        pass

    def drop(self, request_id: str) -> None:
        pass


class Pool:
    """The engine's own block manager, asked for all that a scheduler asks of it, prefixes and their names included."""

    def __init__(self, site: Site):
        recording, self.writes = site.recording, site.writes
        self.blocks = BlockManager(recording.num_blocks, recording.block_size)
        self.outputs, params = recording.outputs, SamplingParams()
        self.requests = {name: Request(name, prompt, params, len(prompt)) for name, prompt in recording.prompts.items()}
        if self.writes:
            self.memory = site.memory()

    def grow(self, growth: Growth) -> None:
        blocks, request = self.blocks, self.requests[growth.request_id]
        if growth.is_new:
            blocks.start(request, blocks.find_prefix(request))
            assert request.num_computed_tokens == growth.start, f"{growth}: {request.num_computed_tokens} found in the cache"
        blocks.num_new_blocks(request, growth.end)  # is there room?
        blocks.grow(request, growth.end)
        table = blocks.table(request)
        blocks.commit(request, growth.end)
        if self.writes:
            for block_id in table[-(-growth.start // blocks.block_size) :]:
                self.memory[:, block_id].zero_()
        request.num_computed_tokens = growth.end
        if growth.end == request.num_tokens:
            request.token_ids.append(self.outputs[growth.request_id][request.num_output_tokens])

    def drop(self, request_id: str) -> None:
        request = self.requests[request_id]
        self.blocks.release(request)
        request.num_computed_tokens = 0


class FreeList:
    """The pool's own allocator alone: ids popped from a list, and pushed again. No names, no references, no tables."""

    def __init__(self, site: Site):
        self.site, self.block_size = site, site.recording.block_size
        self.free = list(range(site.recording.num_blocks))
        self.held: dict[str, list[int]] = {}
        if site.writes:
            self.memory = site.memory()

    def grow(self, growth: Growth) -> None:
        held = self.held.setdefault(growth.request_id, [])
        for _ in range(growth.num_new_blocks(self.block_size)):
            held.append(self.free.pop())
            if self.site.writes:
                self.memory[:, held[-1]].zero_()

    def drop(self, request_id: str) -> None:
        self.free.extend(self.held.pop(request_id))


class BlockTensors:
    """A tensor for each new block, all layers in one; it goes when its request does."""

    num_parts = 1

    def __init__(self, site: Site):
        self.site, self.block_size = site, site.recording.block_size
        self.shape = (site.recording.num_layers * site.block_bytes // self.num_parts,)
        self.held: dict[str, list[Tensor]] = {}

    def grow(self, growth: Growth) -> None:
        held = self.held.setdefault(growth.request_id, [])
        for _ in range(growth.num_new_blocks(self.block_size)):
            for _ in range(self.num_parts):
                held.append(self.site.empty(*self.shape))
                if self.site.writes:
                    held[-1].zero_()

    def drop(self, request_id: str) -> None:
        del self.held[request_id]


class LayerTensors(BlockTensors):
    """A tensor for each new block and layer."""

    def __init__(self, site: Site):
        self.num_parts = site.recording.num_layers
        super().__init__(site)


class Pages:
    """Memory of the operating system for each new block, by its own call and not by way of an allocator that keeps what comes back."""

    def __init__(self, site: Site):
        self.site, self.block_size = site, site.recording.block_size
        self.num_bytes = site.recording.num_layers * site.block_bytes
        self.zeros = bytes(self.num_bytes)
        self.held: dict[str, list[mmap.mmap]] = {}

    def grow(self, growth: Growth) -> None:
        held = self.held.setdefault(growth.request_id, [])
        for _ in range(growth.num_new_blocks(self.block_size)):
            held.append(mmap.mmap(-1, self.num_bytes))
            if self.site.writes:
                held[-1].write(self.zeros)

    def drop(self, request_id: str) -> None:
        for pages in self.held.pop(request_id):
            pages.close()


class WholeAnswers:
    """A tensor for each request and layer when it starts, long enough for its whole answer."""

    def __init__(self, site: Site):
        self.site, self.longest = site, site.recording.longest
        self.held: dict[str, list[Tensor]] = {}

    def grow(self, growth: Growth) -> None:
        recording, name = self.site.recording, growth.request_id
        if growth.is_new:
            shape = (self.longest[name], recording.bytes_per_layer)
            self.held[name] = [self.site.empty(*shape) for _ in range(recording.num_layers)]
        if self.site.writes:
            for layer in self.held[name]:
                layer[growth.start : growth.end].zero_()

    def drop(self, request_id: str) -> None:
        del self.held[request_id]


class Moved:
    """A tensor for each request and layer that is just long enough: when it grows there is a new one, and the old one is copied into it.

    Without writing, the new one is only allocated and the old one given back.
    """

    def __init__(self, site: Site):
        self.site = site
        longest = max(growth.end - growth.start for demand in site.recording.demands for growth in demand.growths)
        self.num_layers, self.width = site.recording.num_layers, site.recording.bytes_per_layer
        self.new = site.empty(longest, self.width).zero_()
        self.held: dict[str, list[Tensor]] = {}

    def grow(self, growth: Growth) -> None:
        if growth.is_new:  # what it was given by others is moved as well
            self.held[growth.request_id] = [self.site.empty(growth.start, self.width) for _ in range(self.num_layers)]
        held = self.held[growth.request_id]
        if self.site.writes:
            new = self.new[: growth.end - growth.start]
            for layer, old in enumerate(held):
                held[layer] = torch.cat((old, new))
        else:
            for layer in range(len(held)):
                held[layer] = self.site.empty(growth.end, self.width)

    def drop(self, request_id: str) -> None:
        del self.held[request_id]


# --- replaying ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A way by its name, and how many calls of its allocator a load is, to take and to give back."""

    make: Callable[[Site], Store]
    num_calls: Callable[[Load], int]


WAYS: Mapping[str, Way] = {
    "pool": Way(Pool, lambda load: 2 * load.num_blocks_taken),
    "its free list alone": Way(FreeList, lambda load: 2 * load.num_blocks_taken),
    "block tensors": Way(BlockTensors, lambda load: 2 * load.num_blocks_taken),
    "layer tensors": Way(LayerTensors, lambda load: 2 * load.num_blocks_taken * load.num_layers),
    "whole answers": Way(WholeAnswers, lambda load: 2 * load.num_requests * load.num_layers),
    "moved when it grows": Way(Moved, lambda load: 2 * load.num_rows * load.num_layers),
    "pages of the system": Way(Pages, lambda load: 2 * load.num_blocks_taken),
}


def replay_s(demands: Sequence[Demand], store: Store, device: torch.device, work: Callable[[], object] | None = None) -> float:
    """Seconds to meet all demands. `work` is queued on the device before each step's demands, as a model's step would be."""
    _finish(device)
    start_s = time.perf_counter()
    for demand in demands:
        if work is not None:
            work()
        for request_id in demand.preempted:
            store.drop(request_id)
        for growth in demand.growths:
            store.grow(growth)
        for request_id in demand.finished:
            store.drop(request_id)
    _finish(device)
    return time.perf_counter() - start_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_costs(
    recording: Recording, batch_size: int, device: torch.device, num_rounds: int, work: Callable[[], object] | None = None
) -> list[AllocationCost]:
    """Every way on one recording; the ways take turns, so that a machine that slows down slows them all."""
    makes = {"nothing": Nothing, **{name: way.make for name, way in WAYS.items() if device.type == "cpu" or way.make is not Pages}}
    seconds: dict[tuple[str, bool], list[float]] = {(name, writes): [] for writes in (False, True) for name in makes}
    for _ in range(num_rounds):
        for (name, writes), found in seconds.items():
            store = makes[name](Site(recording, device, writes))
            found.append(replay_s(recording.demands, store, device, work))
    load = recording.load(batch_size)

    def ms_per_step(name: str, writes: bool) -> float:
        over_s = (own - none for own, none in zip(seconds[name, writes], seconds["nothing", writes], strict=True))
        return 1e3 * statistics.median(over_s) / load.num_steps

    return [
        AllocationCost(batch_size, name, way.num_calls(load) / load.num_steps, ms_per_step(name, False), ms_per_step(name, True))
        for name, way in WAYS.items()
        if name in makes
    ]
