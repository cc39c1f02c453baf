"""Rounding as the papers write it, one number at a time in float64: what the fast versions are held against. Shares no code with them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minserve.sim.weight_formats import WeightFormat

TIE = 1e-4  # a weight this close to the middle between two codes, in steps, may get either


@dataclass(frozen=True, slots=True)
class Grid:
    scale: float
    zero: int
    top: int

    def code(self, value: float) -> int:
        return min(max(round(value / self.scale) + self.zero, 0), self.top)

    def value(self, code: int) -> float:
        return (code - self.zero) * self.scale

    def is_tie(self, value: float) -> bool:
        return abs(abs(value / self.scale - math.floor(value / self.scale)) - 0.5) < TIE


def eight_bits(number: float) -> float:
    """The nearest number of 8 significant bits, and of steps not below 2^-24."""
    mantissa, exponent = math.frexp(number)
    number = math.ldexp(round(mantissa * 256), exponent - 8)
    return round(number * 2**24) / 2**24


def make_grid(group: list[float], fmt: WeightFormat, shrink: float = 1.0) -> Grid:
    low, high, top = min(0.0, *group) * shrink, max(0.0, *group) * shrink, 2**fmt.bits - 1
    if fmt.symmetric:
        middle = (top + 1) // 2
        return Grid(max(eight_bits(max(-low / middle, high / (middle - 1))), 2**-24), middle, top)
    scale = max(eight_bits((high - low) / top), 2**-24)
    return Grid(scale, min(max(round(-low / scale), 0), top), top)


def grids_of(row: list[float], fmt: WeightFormat, shrink: float = 1.0) -> list[Grid]:
    """The grid of each input."""
    size = fmt.group_size or len(row)
    groups = [row[start : start + size] for start in range(0, len(row), size)]
    return [grid for group in groups for grid in [make_grid(group, fmt, shrink)] * len(group)]


def slow_codes(weight: Tensor, fmt: WeightFormat) -> Tensor:
    """Round to nearest: [O, I] int64"""
    rows = weight.double().tolist()
    return torch.tensor([[grid.code(value) for grid, value in zip(grids_of(row, fmt), row, strict=True)] for row in rows])


def slow_values(weight: Tensor, fmt: WeightFormat, shrink: float = 1.0) -> Tensor:
    """The weights after rounding to nearest: [O, I] float64"""
    rows = weight.double().tolist()
    values = [[grid.value(grid.code(v)) for grid, v in zip(grids_of(row, fmt, shrink), row, strict=True)] for row in rows]
    return torch.tensor(values, dtype=torch.float64)


def slow_gptq(weight: Tensor, hessian: Tensor, fmt: WeightFormat, order: list[int]) -> tuple[Tensor, Tensor]:
    """Optimal brain surgeon, an input at a time in the given order: the inverse of what is left is made anew for each.

    hessian: damped already. Returns codes [O, I], and which outputs met a tie [O].
    """
    rows, hessian = weight.double().clone(), hessian.double()
    grids = [grids_of(row, fmt) for row in weight.double().tolist()]
    codes = torch.zeros(rows.shape, dtype=torch.int64)
    ties = torch.zeros(len(rows), dtype=torch.bool)
    for done, q in enumerate(order):
        left = order[done:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        for o, row in enumerate(rows):
            grid, value = grids[o][q], float(row[q])
            codes[o, q] = grid.code(value)
            ties[o] |= grid.is_tie(value)
            row[left] -= (value - grid.value(int(codes[o, q]))) / inverse[0, 0] * inverse[:, 0]
    return codes, ties


def slow_error(weight: Tensor, values: Tensor, tokens: Tensor) -> float:
    """Mean over tokens of the squared distance of the outputs, token by token."""
    return sum(float((weight.double() @ x - values.double() @ x).square().sum()) for x in tokens.double()) / len(tokens)
