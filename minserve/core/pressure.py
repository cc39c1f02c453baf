"""How full the pool is and how many requests want it: the engine's own memory metrics, as a plain record.

Why: from outside, an engine's memory looks the same at rest and about to burst, since the pool is taken at
the start. What goes up and down is inside it: blocks that are owned, cached or clean, and who waits for them.

Invariant: used + idle + clean = all blocks, as in the block manager. Nothing here changes the engine.

Taught in notebook 11.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minserve.core.block_manager import BlockManager
from minserve.core.request import Request


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pool and queues at one moment. Counts of blocks, requests and slots (one slot: one token's K and V)."""

    num_blocks: int
    block_size: int  # slots
    num_used_blocks: int  # referenced by at least one request
    num_idle_blocks: int  # cached, without an owner: given up as soon as somebody needs them
    num_running: int
    num_waiting: int
    num_empty_slots: int  # in the last blocks of running requests: the only waste that paging leaves

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now: clean ones and idle ones."""
        return self.num_blocks - self.num_used_blocks

    @property
    def num_clean_blocks(self) -> int:
        return self.num_free_blocks - self.num_idle_blocks

    @property
    def used_share(self) -> float:
        """Share of the pool in requests' hands."""
        return self.num_used_blocks / self.num_blocks

    @property
    def fragmentation(self) -> float:
        """Share of the used slots that hold nothing. 0 for an unused pool."""
        num_slots = self.num_used_blocks * self.block_size
        return self.num_empty_slots / num_slots if num_slots else 0.0


def take_pressure(blocks: BlockManager, running: Sequence[Request], num_waiting: int) -> Pressure:
    """The pressure now. The time is linear in the number of running requests."""
    size = blocks.block_size
    return Pressure(
        num_blocks=blocks.num_blocks,
        block_size=size,
        num_used_blocks=blocks.num_used_blocks,
        num_idle_blocks=blocks.num_idle_blocks,
        num_running=len(running),
        num_waiting=num_waiting,
        num_empty_slots=sum(-request.num_computed_tokens % size for request in running),
    )
