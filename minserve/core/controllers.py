"""Policies whose numbers follow what they see: two rules that are often repeated, and their opposites.

Why: "when the queue grows, shrink the batch" and "when requests are rare, wait for a larger batch" sound like
common sense. Each stands here beside its opposite, so that a run can decide.

    the queue is long       ShrinkWhenQueued: fewer at once      GrowWhenQueued: more at once
    requests are rare       WaitWhenSlow: wait longer            ServeAtOnceWhenSlow: don't wait

Invariant: they see the past only. A rate of arrivals is one of those who have come.

Taught in notebook 10.
"""

import math
from collections import deque
from collections.abc import Sequence

from minserve.core.policies import FirstComeFirstServed, Moment, SizeCap
from minserve.core.request import Request


class ShrinkWhenQueued(SizeCap):
    """Runs `most` at once when nobody waits, fewer the more wait, never fewer than `least`."""

    def __init__(self, most: int = 32, least: int = 4):
        super().__init__(most)
        _refuse_unless_ascending(least, most)
        self.least = least

    def cap(self, now: Moment) -> int:
        return max(self.least, int(self.most / (1 + len(now.waiting) / 8)))


class GrowWhenQueued(SizeCap):
    """Runs `least` at once, and `per_queued` more for each that waits, never more than `most`.

    What it runs above `least` it starts because others wait: under load, most wait for some to follow.
    """

    def __init__(self, least: int = 8, most: int = 64, per_queued: int = 2):
        super().__init__(most)
        _refuse_unless_ascending(least, most)
        if per_queued < 1:
            raise ValueError(f"the cap must grow with the queue, got per_queued {per_queued}")
        self.least, self.per_queued = least, per_queued

    def cap(self, now: Moment) -> int:
        return min(self.most, self.least + self.per_queued * len(now.waiting))


def _refuse_unless_ascending(least: int, most: int) -> None:
    if not 1 <= least <= most:
        raise ValueError(f"caps need 1 <= least <= most, got least {least} and most {most}")


class ArrivalRate:
    """Requests per second, estimated from the last `window` arrivals. 0 until two have come."""

    def __init__(self, window: int = 16):
        self._keys: deque[tuple[float, int]] = deque(maxlen=window)  # (arrival_s, order), ascending

    def see(self, requests: Sequence[Request]) -> None:
        """Count those who have come since the last time. Whoever is seen twice counts once."""
        last = self._keys[-1] if self._keys else (-math.inf, -1)
        keys = [(request.arrival_s, request.order) for request in requests]
        self._keys.extend(sorted(key for key in keys if key > last))

    @property
    def per_s(self) -> float:
        if len(self._keys) < 2:
            return 0.0
        elapsed_s = self._keys[-1][0] - self._keys[0][0]
        return (len(self._keys) - 1) / elapsed_s if elapsed_s > 0 else math.inf


class WaitWhenSlow(FirstComeFirstServed):
    """Continuous batching behind a gate: newcomers enter when `size` wait, or after some time.

    The first of them waits as long as it takes for `size` to come at the present rate, but at most
    `longest_wait_s`: the slower they come, the longer it waits.
    """

    def __init__(self, size: int, longest_wait_s: float):
        if size < 1 or not 0 <= longest_wait_s < math.inf:
            raise ValueError(
                f"a gate needs a size of at least 1 and a finite wait, got size {size} and {longest_wait_s} s"
            )
        self.size, self.longest_wait_s = size, longest_wait_s
        self._rate = ArrivalRate()

    def wait_s(self, rate_per_s: float) -> float:
        return min(self.longest_wait_s, self.size / rate_per_s) if rate_per_s > 0 else self.longest_wait_s

    def candidates(self, now: Moment) -> Sequence[Request]:
        wake_s = self.wake_s(now)  # asked first: it counts the arrivals
        if len(now.waiting) >= self.size or wake_s <= now.time_s:
            return now.waiting
        return [request for request in now.waiting if request.num_preemptions]  # the gate is behind them

    def wake_s(self, now: Moment) -> float:
        self._rate.see(now.waiting)
        newcomers = [request.arrival_s for request in now.waiting if not request.num_preemptions]
        return min(newcomers, default=math.inf) + self.wait_s(self._rate.per_s)


class ServeAtOnceWhenSlow(WaitWhenSlow):
    """The same gate, closed only while they come fast: if `size` will come within `longest_wait_s`."""

    def wait_s(self, rate_per_s: float) -> float:
        return self.longest_wait_s if rate_per_s * self.longest_wait_s >= self.size else 0.0
