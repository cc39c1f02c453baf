"""A device is found again from the steps that it would take."""

import random
from dataclasses import replace

import numpy as np
import pytest

from minserve.sim.cost_model import CostModel, Work, decode_work, row_work
from minserve.sim.devices import DeviceSpec
from minserve.sim.fit import fit_device, nonnegative_least_squares
from minserve.sim.shapes import SHAPES

SMOLLM2 = SHAPES["smollm2-135m"]
BARE = DeviceSpec(name="cpu", memory_bytes=24e9, bytes_per_s=30e9, flops_per_s=400e9, matmul_shares=((16, 0.5), (512, 0.95)))
TRUE = replace(
    BARE,
    step_overhead_s=0.012,
    request_overhead_s=2e-4,
    prompt_overhead_s=0.01,
    activation_share=0.4,
    kv_read_share=0.3,
    attention_share=0.5,
    gathers_kv=True,
)


def some_steps(seed: int = 0) -> list[Work]:
    rng = random.Random(seed)
    decodes = [decode_work(rng.randrange(1, 65), rng.randrange(16, 600)) for _ in range(60)]
    return decodes + [decode_work(rng.randrange(1, 33), 200) + row_work(rng.randrange(500), rng.randrange(16, 480)) for _ in range(30)]


def test_a_device_is_found_again_from_its_steps():
    cost = CostModel(SMOLLM2, TRUE)
    fit = fit_device(CostModel(SMOLLM2, BARE), [(work, cost.of(work).seconds) for work in some_steps()])
    for name in ("step_overhead_s", "request_overhead_s", "prompt_overhead_s", "activation_share", "kv_read_share", "attention_share"):
        assert getattr(fit.device, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert fit.median_error < 1e-9 and fit.total_ratio == pytest.approx(1.0) and fit.num_steps == 90


def test_noise_moves_the_prediction_of_other_steps_little():
    cost, rng = CostModel(SMOLLM2, TRUE), random.Random(1)
    noisy = [(work, cost.of(work).seconds * rng.lognormvariate(0, 0.15)) for work in some_steps()]
    fitted = CostModel(SMOLLM2, fit_device(CostModel(SMOLLM2, BARE), noisy).device)
    others = some_steps(seed=2)
    assert sum(fitted.of(w).seconds for w in others) == pytest.approx(sum(cost.of(w).seconds for w in others), rel=0.05)


def test_a_burst_of_a_neighbour_does_not_count():
    cost = CostModel(SMOLLM2, TRUE)
    disturbed = [(work, cost.of(work).seconds * (20 if index % 30 == 7 else 1)) for index, work in enumerate(some_steps())]
    device = fit_device(CostModel(SMOLLM2, BARE), disturbed).device
    assert device.step_overhead_s == pytest.approx(TRUE.step_overhead_s, rel=0.02)
    assert device.kv_read_share == pytest.approx(TRUE.kv_read_share, rel=0.02)


def test_no_part_is_faster_than_the_hardware():
    """Steps that take no longer than their products: the rest is explained by nothing, and the peaks stay the limit."""
    cost = CostModel(SMOLLM2, replace(BARE, step_overhead_s=0.0))
    fit = fit_device(CostModel(SMOLLM2, BARE), [(work, cost.of(work).linear_s) for work in some_steps()])
    assert fit.device.kv_read_share == pytest.approx(1.0) and fit.device.attention_share == pytest.approx(1.0)
    assert fit.device.step_overhead_s == 0.0 and fit.device.activation_share is None


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="4 steps cannot determine 6 coefficients"):
        fit_device(CostModel(SMOLLM2, BARE), [(decode_work(1, 1), 0.01)] * 4)


def test_least_squares_stay_at_or_above_zero():
    a = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    x = nonnegative_least_squares(a, np.array([2.0, -1.0, 1.0]), np.ones(3))
    assert x.tolist() == pytest.approx([1.5, 0.0])  # unconstrained it is [2, -1]
    assert nonnegative_least_squares(a, np.array([-1.0, -2.0, -3.0]), np.ones(3)).tolist() == [0.0, 0.0]
