"""Two clocks with one face, so that the engine never asks which world it is in.

Invariant: now() never goes back. Only the virtual clock moves when told to.

Taught in notebook 03.
"""

import time


class WallClock:
    """Seconds of the real world, counted from the clock's creation."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin_s

    def advance(self, seconds: float) -> None:
        """Nothing to do: real time has already passed while the step ran."""

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))


class VirtualClock:
    """Seconds that pass only when someone says so.

    >>> clock = VirtualClock(); clock.advance(0.25); clock.wait_until(0.1); clock.now()
    0.25
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now_s += seconds

    def wait_until(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)
