"""When a request may start, who runs first, and who gives way: what is a matter of taste in a scheduler.

A policy orders requests: the scheduler serves the smallest first and, when blocks run out, takes the largest
running request out. And it opens the door: `candidates` names those of the waiting who may start now. Whether
there are tokens and blocks for them is the scheduler's business. The order must not change while a request
lives, and no two requests may share a place in it. A policy may also make a step smaller (`token_budget`),
and send away whom it cannot serve well (`shed`). It is asked once a step, before anything of the step is
done, so a policy that raises leaves the engine as it was.

The three classic ways of batching are three doors: always open; open when nobody is inside; open when nobody
is inside and either enough people or the first of them has waited long enough. The others here change one
thing each: how many may be inside, who shares a batch, what waiting is worth.

A policy that remembers something serves one engine; make another for the next one.

Taught in notebooks 03, 06 and 10.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from minserve.core.pressure import Pressure
from minserve.core.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy sees when it is asked: the time, the two queues, the memory."""

    time_s: float  # of the engine's clock
    waiting: Sequence[Request]  # in the policy's order
    running: Sequence[Request]
    pressure: Pressure
    token_budget: int  # most tokens of a step, as the engine is configured
    max_running: int


class Policy(Protocol):
    """What a scheduler asks of its policy. Times are seconds of the engine's clock."""

    def order(self, request: Request) -> tuple[float, ...]:
        """Place in the line: smaller is served earlier and given up later."""
        ...

    def candidates(self, now: Moment) -> Sequence[Request]:
        """Those of the waiting who may start now, in the order to try them."""
        ...

    def wake_s(self, now: Moment) -> float:
        """When `candidates` will say more though nobody comes or goes; infinity: never."""
        ...

    def token_budget(self, now: Moment) -> int:
        """Most tokens of this step; what is above the engine's own budget is cut."""
        ...

    def shed(self, now: Moment) -> Sequence[tuple[Request, str]]:
        """Those of the waiting who are sent away unserved, each with the reason in words."""
        ...


class FirstComeFirstServed:
    """Continuous batching: the door is always open, and nobody is sent away.

    By priority (lower first), then by arrival. A preempted request keeps its place, so newcomers don't
    overtake it.
    """

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.priority, request.arrival_s, request.order)

    def candidates(self, now: Moment) -> Sequence[Request]:
        return now.waiting

    def wake_s(self, now: Moment) -> float:
        return math.inf

    def token_budget(self, now: Moment) -> int:
        return now.token_budget

    def shed(self, now: Moment) -> Sequence[tuple[Request, str]]:
        return ()


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

    def candidates(self, now: Moment) -> Sequence[Request]:
        if all(request.is_finished for request in self._batch):
            self._batch = tuple(now.waiting[: self.size]) if self.is_ready(now) else ()
        # A batch may take several steps to start, and a preempted member comes back into it.
        return [request for request in self._batch if request.status is RequestStatus.WAITING]

    def is_ready(self, now: Moment) -> bool:
        """Whether a batch may start with those who wait, now that nobody runs."""
        return bool(now.waiting)


class TimeoutBatches(StaticBatches):
    """Static batches that wait for more: until there are `size`, or the first has waited `wait_s`."""

    def __init__(self, size: int, wait_s: float):
        super().__init__(size)
        if not 0 <= wait_s < math.inf:
            raise ValueError(f"a batch waits a finite time of at least 0 s, got wait_s {wait_s}")
        self.wait_s = wait_s

    def is_ready(self, now: Moment) -> bool:
        return len(now.waiting) >= self.size or self.wake_s(now) <= now.time_s

    def wake_s(self, now: Moment) -> float:
        return min((request.arrival_s for request in now.waiting), default=math.inf) + self.wait_s


class SizeCap(FirstComeFirstServed):
    """Continuous batching of at most `most` requests at once."""

    def __init__(self, most: int):
        if most < 1:
            raise ValueError(f"at least 1 request must be able to run, got most {most}")
        self.most = most

    def candidates(self, now: Moment) -> Sequence[Request]:
        return now.waiting[: max(0, self.cap(now) - len(now.running))]

    def cap(self, now: Moment) -> int:
        """Most requests at once, at this moment. Who runs already is not taken out when it falls."""
        return self.most


class LengthBuckets(TimeoutBatches):
    """Timeout batches whose members have prompts of about one length, so that a rectangle has few dead cells.

    `edges` are the longest prompts of the buckets, ascending; a last bucket takes what is longer. Of the
    buckets that are full or overdue, the one goes next whose first has waited longest.
    """

    def __init__(self, edges: Sequence[int], size: int, wait_s: float):
        super().__init__(size, wait_s)
        if not edges or list(edges) != sorted(set(edges)) or edges[0] < 1:
            raise ValueError(f"edges of buckets ascend from at least 1 token, got {list(edges)}")
        self.edges = tuple(edges)

    def bucket(self, request: Request) -> int:
        return bisect_left(self.edges, request.num_prompt_tokens)

    def candidates(self, now: Moment) -> Sequence[Request]:
        return super().candidates(replace(now, waiting=self._next_bucket(now)))

    def _next_bucket(self, now: Moment) -> Sequence[Request]:
        buckets: dict[int, list[Request]] = {}
        for request in now.waiting:
            buckets.setdefault(self.bucket(request), []).append(request)
        ready = [members for members in buckets.values() if self.is_ready(replace(now, waiting=members))]
        return min(ready, key=lambda members: min(r.arrival_s for r in members), default=())


class Ageing(FirstComeFirstServed):
    """Priorities, but waiting counts: a level of priority is worth `seconds_per_level` of waiting, no more.

    Who has waited so much longer goes first, so nobody starves behind those who are more important. Two
    requests wait equally fast: whoever is ahead stays ahead, and the order never changes.
    """

    def __init__(self, seconds_per_level: float):
        if not 0 <= seconds_per_level < math.inf:
            raise ValueError(f"a level is worth a finite time of at least 0 s, got {seconds_per_level}")
        self.seconds_per_level = seconds_per_level

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.arrival_s + request.priority * self.seconds_per_level, request.order)
