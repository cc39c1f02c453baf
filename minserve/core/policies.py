"""When a request may start, who runs first, and who gives way: what is a matter of taste in a scheduler.

A policy orders requests: the scheduler serves the smallest first and, when blocks run out, takes the largest
running request out. And it opens the door: `candidates` names those of the waiting who may start now. Whether
there are tokens and blocks for them is the scheduler's business. The order must not change while a request
lives, and no two requests may share a place in it.

The three classic ways of batching are three doors: always open; open when nobody is inside; open when nobody
is inside and either enough people or the first of them has waited long enough.

Taught in notebooks 03 and 06 (and, with more policies, in notebook 10).
"""

import math
from collections.abc import Sequence
from typing import Protocol

from minserve.core.request import Request, RequestStatus


class Policy(Protocol):
    """What a scheduler asks of its policy. Times are seconds of the engine's clock."""

    def order(self, request: Request) -> tuple[float, ...]:
        """Place in the line: smaller is served earlier and given up later."""
        ...

    def candidates(
        self, waiting: Sequence[Request], running: Sequence[Request], now_s: float
    ) -> Sequence[Request]:
        """Those of the waiting (in the policy's order) who may start now, in the order to try them."""
        ...

    def wake_s(self, waiting: Sequence[Request]) -> float:
        """When `candidates` will say more though nobody comes or goes; infinity: never."""
        ...


class FirstComeFirstServed:
    """Continuous batching: the door is always open.

    By priority (lower first), then by arrival. A preempted request keeps its place, so newcomers don't
    overtake it.
    """

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.priority, request.arrival_s, request.order)

    def candidates(
        self, waiting: Sequence[Request], running: Sequence[Request], now_s: float
    ) -> Sequence[Request]:
        return waiting

    def wake_s(self, waiting: Sequence[Request]) -> float:
        return math.inf


class StaticBatches(FirstComeFirstServed):
    """The next batch, of at most `size` requests, starts when the last of the one before has ended.

    This is static batching at its kindest: who is done leaves, so no dead row is computed and no memory is
    held for it. What remains is the empty seats.
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a batch holds at least 1 request, got size {size}")
        self.size = size
        self._batch: Sequence[Request] = ()

    def candidates(
        self, waiting: Sequence[Request], running: Sequence[Request], now_s: float
    ) -> Sequence[Request]:
        if all(request.is_finished for request in self._batch):
            self._batch = tuple(waiting[: self.size]) if self.is_ready(waiting, now_s) else ()
        # A batch may take several steps to start, and a preempted member comes back into it.
        return [request for request in self._batch if request.status is RequestStatus.WAITING]

    def is_ready(self, waiting: Sequence[Request], now_s: float) -> bool:
        """Whether a batch may start with those who wait, now that nobody runs."""
        return bool(waiting)


class TimeoutBatches(StaticBatches):
    """Static batches that wait for more: until there are `size`, or the first has waited `wait_s`."""

    def __init__(self, size: int, wait_s: float):
        super().__init__(size)
        if not 0 <= wait_s < math.inf:
            raise ValueError(f"a batch waits a finite time of at least 0 s, got wait_s {wait_s}")
        self.wait_s = wait_s

    def is_ready(self, waiting: Sequence[Request], now_s: float) -> bool:
        return len(waiting) >= self.size or self.wake_s(waiting) <= now_s

    def wake_s(self, waiting: Sequence[Request]) -> float:
        return min((request.arrival_s for request in waiting), default=math.inf) + self.wait_s
