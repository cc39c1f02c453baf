"""Two controllers of memory pressure: one watches what changes, the other what does not.

Why: an answer grows after it has been admitted, so a door that looks at today's free blocks lets in more than
tomorrow's pool can hold, and the last in line are thrown out and computed again. A controller can close the
door early. It has to look at the free blocks: the ratio of allocated to total memory, which every monitor
shows, is fixed when the pool is taken and says nothing about what is in it.

Invariant: an idle engine always lets somebody in, so no controller can stop an engine for good.

Taught in notebook 11.
"""

from collections.abc import Callable, Sequence

from minserve.core.policies import FirstComeFirstServed, Moment
from minserve.core.request import Request


class FreeBlocksFeedback(FirstComeFirstServed):
    """With less than the share `low` of the blocks free, nobody enters until `high` is; prompts slow down.

    Two marks and not one, so that the door does not flutter. The token budget falls with the free share below
    `high`, but leaves room for a token of everybody who runs.
    """

    def __init__(self, low: float = 0.1, high: float = 0.2):
        if not 0 <= low < high <= 1:
            raise ValueError(
                f"shares of free blocks need 0 <= low < high <= 1, got low {low} and high {high}"
            )
        self.low, self.high = low, high
        self._is_open = True

    def candidates(self, now: Moment) -> Sequence[Request]:
        free_share = now.pressure.num_free_blocks / now.pressure.num_blocks
        self._is_open = free_share >= (self.low if self._is_open else self.high)
        return now.waiting if self._is_open or not now.running else ()

    def token_budget(self, now: Moment) -> int:
        scarcity = now.pressure.num_free_blocks / (self.high * now.pressure.num_blocks)
        wanted = int(now.token_budget * min(1.0, scarcity))
        return max(wanted, len(now.running), 1)


class VramRatioFeedback(FirstComeFirstServed):
    """Nobody enters while allocated over total memory is at `high` or more: as often advised, and of no use.

    `allocated_bytes` is asked in every step, as a monitor would be.
    """

    def __init__(self, allocated_bytes: Callable[[], float], total_bytes: float, high: float = 0.9):
        if total_bytes <= 0 or not 0 < high <= 1:
            raise ValueError(f"a ratio needs total_bytes > 0 and 0 < high <= 1, got {total_bytes} and {high}")
        self.allocated_bytes, self.total_bytes, self.high = allocated_bytes, total_bytes, high

    @property
    def ratio(self) -> float:
        return self.allocated_bytes() / self.total_bytes

    def candidates(self, now: Moment) -> Sequence[Request]:
        return now.waiting if self.ratio < self.high or not now.running else ()
