"""The state of the scheduler at one moment, as plain data: who waits, who runs, who holds which block.

Why: a picture of memory, and a widget that steps and rewinds, must show what the scheduler and the block
manager really held. A trace keeps one snapshot a step where it is asked to; nothing here can change the
engine.

Invariant: a snapshot is a copy. It stays as it is when the engine goes on.

Taught in notebook 04.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from minserve.core.request import Request
from minserve.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RequestState:
    """How far one request is, and its block table."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int  # prompt and output so far
    num_computed_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Queues and pool at one moment. `ref_counts` has one count a block, by its id.

    Every block is in exactly one of `free` (clean, the next to be taken first), `idle` (cached, without an
    owner, the next to be given up first), and the block tables. `cached` are those that can be found by
    their content, owned or idle; `copies` the (source, target) pairs of the step.
    """

    num_blocks: int
    block_size: int
    token_budget: int
    watermark_blocks: int
    running: tuple[RequestState, ...]
    waiting: tuple[RequestState, ...]
    ref_counts: tuple[int, ...]
    free: tuple[int, ...]
    idle: tuple[int, ...]
    cached: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()

    def owners(self, block_id: int) -> tuple[str, ...]:
        """Ids of the requests whose tables list this block."""
        return tuple(state.request_id for state in self.running if block_id in state.block_ids)


def take_snapshot(scheduler: Scheduler, copies: Iterable[tuple[int, int]] = ()) -> Snapshot:
    """Copy the scheduler's state. The time is linear in the number of blocks."""
    blocks = scheduler.blocks
    return Snapshot(
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        token_budget=scheduler.config.token_budget,
        watermark_blocks=scheduler.config.watermark_blocks,
        running=tuple(_state_of(request, scheduler) for request in scheduler.running),
        waiting=tuple(_state_of(request, scheduler) for request in scheduler.waiting),
        ref_counts=tuple(map(blocks.ref_count, range(blocks.num_blocks))),
        free=blocks.free_ids,
        idle=tuple(blocks.cache.idle),
        cached=tuple(filter(blocks.cache.holds, range(blocks.num_blocks))),
        copies=tuple(copies),
    )


def _state_of(request: Request, scheduler: Scheduler) -> RequestState:
    return RequestState(
        request.request_id,
        request.num_prompt_tokens,
        request.num_tokens,
        request.num_computed_tokens,
        scheduler.blocks.table(request),
    )
