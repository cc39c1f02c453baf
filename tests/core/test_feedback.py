"""Feedback on memory: the door closes and opens at its two marks, and the ratio of allocated memory never moves it."""

import pytest

from minserve.core.feedback import FreeBlocksFeedback, VramRatioFeedback
from minserve.core.policies import Moment
from minserve.core.pressure import Pressure
from minserve.core.request import Request, SamplingParams

WAITING = [Request("W", (1,), SamplingParams(), 10)]
RUNNING = [Request(f"R{index}", (1,), SamplingParams(), 10) for index in range(4)]


def moment(num_used_blocks: int, running: list[Request] = RUNNING) -> Moment:
    pressure = Pressure(100, 16, num_used_blocks, 0, len(running), 1, 0)
    return Moment(0.0, WAITING, running, pressure, token_budget=200, max_running=8)


def test_the_door_closes_below_the_low_mark_and_opens_at_the_high_one() -> None:
    policy = FreeBlocksFeedback(low=0.1, high=0.2)
    doors = [bool(policy.candidates(moment(used))) for used in (0, 85, 90, 91, 85, 81, 80, 89, 95)]
    assert doors == [True, True, True, False, False, False, True, True, False]


def test_steps_get_smaller_as_blocks_get_scarce_but_everybody_may_go_on() -> None:
    policy = FreeBlocksFeedback(low=0.1, high=0.2)
    assert [policy.token_budget(moment(used)) for used in (0, 80, 90, 99, 100)] == [200, 200, 100, 10, 4]


def test_an_idle_engine_lets_somebody_in_whatever_the_memory() -> None:
    full = moment(100, running=[])
    assert FreeBlocksFeedback().candidates(full) == WAITING and FreeBlocksFeedback().token_budget(full) == 1
    assert VramRatioFeedback(lambda: 99.0, 100.0).candidates(full) == WAITING


@pytest.mark.parametrize(("allocated_bytes", "is_open"), [(89.0, True), (90.0, False), (99.0, False)])
def test_the_ratio_says_the_same_of_an_empty_pool_and_a_full_one(allocated_bytes: float, is_open: bool) -> None:
    policy = VramRatioFeedback(lambda: allocated_bytes, 100.0, high=0.9)
    assert [bool(policy.candidates(moment(used))) for used in (0, 50, 100)] == [is_open] * 3


def test_senseless_marks_are_refused_with_their_numbers() -> None:
    for low, high in ((0.2, 0.2), (-0.1, 0.2), (0.1, 1.1)):
        with pytest.raises(ValueError, match=f"got low {low} and high {high}"):
            FreeBlocksFeedback(low, high)
    with pytest.raises(ValueError, match="got 0.0 and 0.9"):
        VramRatioFeedback(lambda: 1.0, 0.0)
