"""Preemption by swapping: who gives way keeps its keys and values in host memory, and brings them back later.

Why: recomputation pays with FLOPs, swapping with time on the link between device and host, there and back.
Which is cheaper depends on three numbers: bytes per token, bytes per second of the link, and the seconds that
a prompt token costs. `swap_s` and `recompute_s` are the two sides of that comparison; an engine from
`make_swapping_engine` shows what becomes of it in a schedule.

A step that swaps takes as long as its computation and its transfers one after the other, as in the first
version of vLLM: the device waits for the link. With `overlaps` it takes as long as the longer of them: that
is the best that a second stream could reach.

What moves: out goes every block that holds tokens of the victim, those too that others share, for they may be
gone before it comes back; in come only those that the prefix cache no longer has. Whole blocks move, the last
one too. If host memory is full, the victim is recomputed as anywhere else, and so is one that is preempted by
hand (`Scheduler.preempt`).

Invariant: what comes back is not computed again; only those who wait have blocks in host memory, and each
block one owner. A step that preempts admits nobody, so no step moves blocks both ways.

Taught in notebook 06.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.block_manager import BlockManager, Share
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, Runner
from minserve.core.policies import Policy
from minserve.core.request import FinishReason, Request
from minserve.core.scheduler import Scheduler, SchedulerConfig, StepOutput
from minserve.sim.cost_model import CostModel, Work, row_work
from minserve.sim.simulator import make_engine

HOST_LINK_BYTES_PER_S = 25e9  # what PCIe 4.0 x16 reaches, one way, of the 32e9 on its data sheet

# --- the two prices -------------------------------------------------------------------------------


def swap_s(cost: CostModel, num_tokens: int, host_link_bytes_per_s: float = HOST_LINK_BYTES_PER_S) -> float:
    """Seconds on the link for so many tokens, there and back.

    With tensor parallelism, each device moves its own share.
    """
    return 2 * num_tokens * cost.kv_bytes_per_token / host_link_bytes_per_s


def recompute_s(cost: CostModel, num_tokens: int, beside: Work | None = None) -> float:
    """Seconds by which a step gets longer when it computes so many tokens again, all at once.

    `beside` is what the step does anyway: without it, nothing, and the weights are read for them only.
    """
    beside = beside or Work()
    again = row_work(0, num_tokens, samples=False, window=cost.shape.window)
    return cost.of(beside + again).seconds - cost.of(beside).seconds


# --- what crosses the seam ------------------------------------------------------------------------

Move = tuple[int, int]  # (from this block, to that one): one is on the device, the other in host memory


@dataclass(frozen=True, slots=True)
class SwappingBatch(ScheduledBatch):
    """What one step moves and computes: out to the host, in from the host, then copies and rows as ever."""

    moves_out: tuple[Move, ...] = ()
    moves_in: tuple[Move, ...] = ()

    @property
    def num_moves(self) -> int:
        return len(self.moves_out) + len(self.moves_in)

    def plain(self) -> dict[str, object]:
        return {**ScheduledBatch.plain(self), "out": self.moves_out, "in": self.moves_in}


class SwappingRunner:
    """Any runner, and a link that takes `block_s` seconds for every block that a batch moves."""

    def __init__(self, runner: Runner, block_s: float, overlaps: bool = False):
        self.runner, self.block_s, self.overlaps = runner, block_s, overlaps

    def execute(self, batch: ScheduledBatch) -> StepResult:
        result = self.runner.execute(batch)
        link_s = batch.num_moves * self.block_s if isinstance(batch, SwappingBatch) else 0.0
        both_s = max(result.elapsed_s, link_s) if self.overlaps else result.elapsed_s + link_s
        return replace(result, elapsed_s=both_s)


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Keys and values of one who waits: so many tokens, in these blocks of host memory."""

    num_tokens: int
    block_ids: tuple[int, ...]


class SwappingBlocks(BlockManager):
    """A pool with another one behind it, in host memory, for those who were taken out."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int | None = None, **options: Any):
        super().__init__(num_blocks, block_size, **options)
        self.num_host_blocks = num_host_blocks  # None: as many as are asked for
        self.host_copies: dict[str, HostCopy] = {}  # by request id
        self.moves_out: list[Move] = []  # of the step that is being planned
        self.moves_in: list[Move] = []
        self._num_host_known = num_host_blocks or 0
        self._free_host = list(range(self._num_host_known - 1, -1, -1))

    def swap_out(self, request: Request) -> int:
        """Plan to move the request's tokens out. Returns the number of blocks.

        It is 0, and nothing has changed, if the host is full.
        """
        num_needed = self.num_blocks_for(request.num_computed_tokens)
        if self.num_host_blocks is None:
            self._enlarge_host(num_needed)
        if num_needed > len(self._free_host):
            return 0
        host_ids = tuple(self._free_host.pop() for _ in range(num_needed))
        self.host_copies[request.request_id] = HostCopy(request.num_computed_tokens, host_ids)
        self.moves_out += zip(self.table(request)[:num_needed], host_ids, strict=True)
        return num_needed

    def _enlarge_host(self, num_needed: int) -> None:
        num_known = self._num_host_known + max(0, num_needed - len(self._free_host))
        self._free_host[:0] = range(num_known - 1, self._num_host_known - 1, -1)
        self._num_host_known = num_known

    def start(self, request: Request, share: Share) -> None:
        """As ever; what the host has beyond the shared blocks comes in, and counts as computed."""
        super().start(request, share)
        copy = self.drop_copy(request)
        if copy is not None and copy.num_tokens > share.num_tokens:
            self.grow(request, copy.num_tokens)
            num_here = len(share.block_ids)
            self.moves_in += zip(copy.block_ids[num_here:], self.table(request)[num_here:], strict=True)
            request.num_computed_tokens = copy.num_tokens

    def drop_copy(self, request: Request) -> HostCopy | None:
        copy = self.host_copies.pop(request.request_id, None)
        if copy is not None:
            self._free_host += reversed(copy.block_ids)  # the next copy takes the same ones
        return copy

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """These blocks were never filled: nobody may find them."""
        for block_id in block_ids:
            self.cache.forget(block_id)
            if block_id in self.cache.idle:
                del self.cache.idle[block_id]
                self._free.append(block_id)

    def flush_cache(self) -> int:
        """What the host has was computed with the old weights too: dropped, and its owners computed again."""
        num_forgotten = super().flush_cache()
        self._free_host += [block_id for copy in self.host_copies.values() for block_id in copy.block_ids]
        self.host_copies.clear()
        return num_forgotten

    def check(self) -> None:
        """Those of the pool, and of host memory: every block is free or has one owner."""
        super().check()
        owned = [block_id for copy in self.host_copies.values() for block_id in copy.block_ids]
        places, num_known = Counter(self._free_host + owned), self._num_host_known
        counts = f"{len(owned)} owned + {len(self._free_host)} free of {num_known}"
        assert places == Counter(range(num_known)), f"host blocks: {counts}, or one of them twice"
        for name, copy in self.host_copies.items():
            num_held, needed = len(copy.block_ids), self.num_blocks_for(copy.num_tokens)
            assert num_held == needed, f"{name} has {copy.num_tokens} tokens in {num_held} host blocks"


# --- the scheduler --------------------------------------------------------------------------------


class SwappingScheduler(Scheduler):
    """A scheduler whose victims go to host memory. Who goes and who comes is decided as ever."""

    blocks: SwappingBlocks

    def __init__(self, config: SchedulerConfig, blocks: SwappingBlocks, policy: Policy | None = None):
        super().__init__(config, blocks, policy)
        self.num_blocks_out = self.num_blocks_in = 0  # over the link, so far

    def schedule(self, now_s: float) -> SwappingBatch:
        self.blocks.moves_out, self.blocks.moves_in = [], []
        batch = super().schedule(now_s)
        planned = {f.name: getattr(batch, f.name) for f in fields(ScheduledBatch)}
        moves_out, moves_in = tuple(self.blocks.moves_out), tuple(self.blocks.moves_in)
        self.num_blocks_out += len(moves_out)
        self.num_blocks_in += len(moves_in)
        return SwappingBatch(**planned, moves_out=moves_out, moves_in=moves_in)

    def _take_out(self, victim: Request, reason: str, plan: Any) -> None:
        assert victim.request_id not in plan.copies, f"{victim.request_id} gives way with a copy under way"
        num_moved = self.blocks.swap_out(victim)
        super()._take_out(victim, reason, plan)
        words = f"is swapped out: {reason}; {_count(num_moved)} over the link"
        if not num_moved:
            words = f"is preempted: {reason}; the host is full"
        plan.decisions[-1] = (victim.request_id, words)

    def _admit(self, request: Request, share: Share, plan: Any) -> None:
        num_before = len(self.blocks.moves_in)
        super()._admit(request, share, plan)
        if num_moved := len(self.blocks.moves_in) - num_before:
            name, words = plan.decisions[-1]
            plan.decisions[-1] = (name, f"{words}, {_count(num_moved)} back over the link")

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        super().finish(request, reason, error)
        self.blocks.drop_copy(request)

    def fail(self, batch: ScheduledBatch, error: str) -> StepOutput:
        """The step came to nothing, and nobody knows what it moved: its victims are computed again."""
        output = super().fail(batch, error)
        for request in self.waiting:
            if request.request_id in batch.preempted_ids:
                self.blocks.drop_copy(request)
        if isinstance(batch, SwappingBatch):
            self.blocks.forget_blocks(device_id for _, device_id in batch.moves_in)
        return output

    def check(self) -> None:
        super().check()
        waiting = {request.request_id: request for request in self.waiting}
        for name, copy in self.blocks.host_copies.items():
            at_host = f"{copy.num_tokens} tokens in host memory"
            assert name in waiting, f"{name} doesn't wait and has {at_host}"
            num_tokens = waiting[name].num_tokens
            assert copy.num_tokens < num_tokens, f"{name} has {num_tokens} tokens and {at_host}"


def _count(num_blocks: int) -> str:
    return f"{num_blocks} block{'s'[: num_blocks > 1]}"


# --- the engine -----------------------------------------------------------------------------------


class SwappingEngine(Engine):
    """An engine with host memory behind its pool."""

    scheduler: SwappingScheduler
    runner: SwappingRunner

    @property
    def link_busy_s(self) -> float:
        """Seconds that the link has been sending so far, either way."""
        return (self.scheduler.num_blocks_out + self.scheduler.num_blocks_in) * self.runner.block_s


def make_swapping_engine(
    cost: CostModel,
    *,
    host_link_bytes_per_s: float = HOST_LINK_BYTES_PER_S,
    host_memory_bytes: float | None = None,
    overlaps: bool = False,
    **options: Any,
) -> SwappingEngine:
    """An engine of `make_engine`, with its options, whose victims are swapped out.

    Without `host_memory_bytes`, host memory has no limit. With tensor parallelism every device has a link and
    host memory of its own.
    """
    if host_link_bytes_per_s <= 0:
        raise ValueError(f"a link sends more than 0 bytes/s, got {host_link_bytes_per_s}")
    plain = make_engine(cost, **options)
    known, policy = plain.scheduler.blocks, plain.scheduler.policy
    block_bytes = known.block_size * cost.kv_bytes_per_token
    num_host_blocks = None if host_memory_bytes is None else int(host_memory_bytes // block_bytes)
    caching = known.prefix_caching
    blocks = SwappingBlocks(known.num_blocks, known.block_size, num_host_blocks, prefix_caching=caching)
    scheduler = SwappingScheduler(plain.scheduler.config, blocks, policy)
    runner = SwappingRunner(plain.runner, block_bytes / host_link_bytes_per_s, overlaps)
    return SwappingEngine(scheduler, runner, VirtualClock(), plain.limits, plain.trace)
