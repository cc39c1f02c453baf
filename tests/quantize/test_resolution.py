"""Decibels a bit: on weights with a known answer, and on a matrix of the real model."""

import math
from pathlib import Path

import pytest
import torch

from minserve.model.weights import Checkpoint
from minserve.quantize.resolution import slope, sqnr_by_bits, sqnr_db
from minserve.sim.weight_formats import WeightFormat


def test_noise_of_a_uniform_grid_is_a_twelfth_of_a_squared_step() -> None:
    weight = torch.rand(64, 4096, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = sqnr_by_bits(weight, WeightFormat(8, None, True), [8])
    assert found[8] == pytest.approx(10 * math.log10((1 / 3) / ((2 / 255) ** 2 / 12)), abs=0.1)


def test_weights_on_the_grid_have_no_noise() -> None:
    weight = torch.tensor([[-8.0, 7.0, 1.0, 0.0]])
    assert sqnr_by_bits(weight, WeightFormat(4), [4]) == {4: math.inf}
    assert sqnr_db(weight, weight + 1) == pytest.approx(10 * math.log10(114 / 4))


@pytest.mark.parametrize(("group_size", "symmetric"), [(64, False), (None, True)])
def test_a_bit_is_worth_six_decibels_on_real_weights(default_model_dir: Path, group_size: int | None, symmetric: bool) -> None:
    """From 4 bits on. Below, one bit more is more than twice as many steps."""
    weight = Checkpoint(default_model_dir).take("model.layers.10.mlp.down_proj.weight", (576, 1536)).float()
    found = sqnr_by_bits(weight, WeightFormat(4, group_size, symmetric))
    assert slope({bits: found[bits] for bits in range(4, 9)}) == pytest.approx(6.0, abs=0.3)
    assert found[3] - found[2] > 6.3
