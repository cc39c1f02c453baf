"""What a bit is worth: the signal-to-noise ratio of rounded weights against the number of bits.

Why: one bit more halves the step of a grid, and with it the error: a quarter of the noise power, 10 log10 4 = 6.02 dB. The rule holds
where the step is small beside what it rounds and the ends of the grid stay where they are. In an asymmetric grid of 2^b points the range is
cut into 2^b - 1 steps, so the second bit triples their number and the eighth hardly more than doubles it.

Invariant: weights that the grid holds exactly have a ratio of infinity.

Taught in notebook 09.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from minserve.quantize.rtn import round_to_nearest
from minserve.sim.weight_formats import WeightFormat

BITS = range(2, 9)


def sqnr_db(weight: Tensor, rounded: Tensor) -> float:
    """Power of the weights over the power of their errors, in dB.

    >>> sqnr_db(torch.tensor([10.0, 10.0]), torch.tensor([11.0, 9.0]))
    20.0
    """
    weight, error = weight.double(), rounded.double() - weight.double()
    return float(10 * torch.log10(weight.square().sum() / error.square().sum()))


def sqnr_by_bits(weight: Tensor, fmt: WeightFormat, bits: Iterable[int] = BITS) -> dict[int, float]:
    """dB for each number of bits, by round to nearest with the groups and the symmetry of `fmt`."""
    return {b: sqnr_db(weight, round_to_nearest(weight, replace(fmt, bits=b)).dequantize()) for b in bits}


def slope(by_bits: dict[int, float]) -> float:
    """dB a bit, by least squares.

    >>> slope({2: 10.0, 3: 16.0, 4: 22.0})
    6.0
    """
    bits = torch.tensor(list(by_bits), dtype=torch.float64)
    values = torch.tensor(list(by_bits.values()), dtype=torch.float64)
    bits, values = bits - bits.mean(), values - values.mean()
    return float((bits * values).sum() / bits.square().sum())
