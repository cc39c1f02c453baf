"""Resampling: closed forms, repeatability, and that the interval covers as often as it says."""

import math

import torch

from minserve.quantize.intervals import Interval, bootstrap, exp_of_ratio, ratio_of_sums


def test_the_value_is_the_estimate_of_all_units() -> None:
    parts = torch.tensor([[2.0, 1.0], [6.0, 3.0], [1.0, 2.0]], dtype=torch.float64)
    assert bootstrap(parts, ratio_of_sums).value == 9 / 6
    assert bootstrap(parts, exp_of_ratio).value == math.exp(9 / 6)


def test_equal_units_leave_no_doubt() -> None:
    assert bootstrap(torch.ones(5, 2), ratio_of_sums) == Interval(1.0, 1.0, 1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    parts = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert bootstrap(parts, ratio_of_sums, seed=3) == bootstrap(parts, ratio_of_sums, seed=3)
    assert bootstrap(parts, ratio_of_sums, seed=3) != bootstrap(parts, ratio_of_sums, seed=4)


def test_the_interval_is_that_of_a_normal_mean() -> None:
    """400 numbers with deviation 1: the mean is known to +- 1.96 / 20."""
    numbers = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    numbers = (numbers - numbers.mean()) / numbers.std()
    found = bootstrap(torch.stack((numbers, torch.ones_like(numbers)), dim=1), ratio_of_sums)
    assert abs(found.low + 0.098) < 0.01 and abs(found.high - 0.098) < 0.01


def test_it_covers_the_truth_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(2)
    samples = torch.randn(200, 40, generator=generator, dtype=torch.float64)
    covered = [
        0.0 in bootstrap(torch.stack((s, torch.ones_like(s)), dim=1), ratio_of_sums, seed=i, num_resamples=500)
        for i, s in enumerate(samples)
    ]
    assert 0.90 <= sum(covered) / len(covered) <= 0.98


def test_infinite_parts_make_an_infinite_number_and_not_a_nan() -> None:
    parts = torch.tensor([[1.0, 1.0]] * 9 + [[math.inf, 1.0]], dtype=torch.float64)
    found = bootstrap(parts, ratio_of_sums)
    assert found.value == math.inf and found.high == math.inf and not math.isnan(found.low)


def test_no_units_give_no_number() -> None:
    assert math.isnan(bootstrap(torch.empty(0, 2), ratio_of_sums).value)
