"""Two clocks with one face."""

import time

import pytest

from minserve.core.clock import VirtualClock, WallClock


def test_the_virtual_clock_moves_when_told_to():
    clock = VirtualClock()
    assert clock.now() == 0.0
    clock.advance(0.25)
    clock.advance(0.0)
    assert clock.now() == 0.25
    clock.wait_until(1.5)
    assert clock.now() == 1.5
    clock.wait_until(1.0)  # already past
    assert clock.now() == 1.5
    assert VirtualClock(start_s=3.0).now() == 3.0


def test_the_virtual_clock_never_goes_back():
    clock = VirtualClock()
    with pytest.raises(ValueError, match=r"a clock cannot go back: advance\(-0.5\)"):
        clock.advance(-0.5)
    assert clock.now() == 0.0


def test_the_wall_clock_moves_by_itself(monkeypatch: pytest.MonkeyPatch):
    clock = WallClock()
    assert clock.now() >= 0.0  # counted from its creation
    before_s = clock.now()
    clock.advance(1e9)
    assert before_s <= clock.now() < 1e9
    clock.wait_until(before_s + 0.02)
    assert clock.now() >= before_s + 0.02
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    clock.wait_until(0.0)
    assert slept_s == [0.0]
