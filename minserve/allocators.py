"""Ways to come by memory for keys and values, each put to the demands of the same run.

Why: what a pool saves shows only beside what else could be called as often: its free list alone; a tensor for each new block; one for each
block and layer; one for each whole answer; a cache without room, moved whenever it grows; and pages of the operating system for each new
block, which nobody keeps for the next.

Invariant: all ways are given the same demands in the same order, and what the replay itself takes is taken off.

Taught in notebook 11.
"""

import gc
import mmap
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minserve.allocations import Demand, Growth, Recording
from minserve.core.block_manager import BlockManager
from minserve.core.request import Request, SamplingParams
from minserve.host_record import AllocationCost, Load


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


@dataclass(frozen=True, slots=True)
class Pace:
    """What stands around a step's demands: `begin` before them (work for a card, say), `end` after them (waiting for it)."""

    begin: Callable[[], object] | None = None
    end: Callable[[], object] | None = None


def replay_s(demands: Sequence[Demand], store: Store, pace: Pace | None = None) -> float:
    """Seconds to meet all demands, without a garbage collection that happens to fall into them."""
    pace, collects = pace or Pace(), gc.isenabled()
    gc.disable()
    try:
        return _replay_s(demands, store, pace)
    finally:
        if collects:
            gc.enable()


def _replay_s(demands: Sequence[Demand], store: Store, pace: Pace) -> float:
    start_s = time.perf_counter()
    for demand in demands:
        if pace.begin is not None:
            pace.begin()
        for request_id in demand.preempted:
            store.drop(request_id)
        for growth in demand.growths:
            store.grow(growth)
        for request_id in demand.finished:
            store.drop(request_id)
        if pace.end is not None:
            pace.end()
    return time.perf_counter() - start_s


def measure_costs(
    recording: Recording, batch_size: int, device: torch.device, num_rounds: int, pace: Pace | None = None
) -> list[AllocationCost]:
    """Every way on one recording; the ways take turns, so that a machine that slows down slows them all."""
    makes = {"nothing": Nothing, **{name: way.make for name, way in WAYS.items() if device.type == "cpu" or way.make is not Pages}}
    seconds: dict[tuple[str, bool], list[float]] = {(name, writes): [] for writes in (False, True) for name in makes}
    for _ in range(num_rounds):
        for (name, writes), found in seconds.items():
            store = makes[name](Site(recording, device, writes))
            found.append(replay_s(recording.demands, store, pace))
    load = recording.load(batch_size)

    def ms_per_step(name: str, writes: bool) -> float:
        over_s = (own - none for own, none in zip(seconds[name, writes], seconds["nothing", writes], strict=True))
        return 1e3 * statistics.median(over_s) / load.num_steps

    return [
        AllocationCost(batch_size, name, way.num_calls(load) / load.num_steps, ms_per_step(name, False), ms_per_step(name, True))
        for name, way in WAYS.items()
        if name in makes
    ]
