"""GPTQ: round one input after another, and let the inputs that are left make up for the error.

Why: rounding to nearest moves each weight as little as possible, but what counts is how far the output moves. Where two inputs are
correlated, the error of one weight can be taken back by its neighbour's. GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds the
weights of one input, and moves those of all later inputs to where the output, over the calibration text, moves least. How much
each moves follows from the inputs' Gram matrix H = mean of x^T x alone, the same for all outputs:

    U = the upper Cholesky factor of H^-1
    for each input i:   error = (w[i] - rounded w[i]) / U[i, i]
                        w[j] -= error * U[i, j]  for all j > i

Inputs with large activations go first (activation order), while there are many others left to take up their errors. Grids are chosen
before anything moves, for groups of neighbouring inputs. So codes and groups stay in the inputs' own order, and serving needs no
permutation.

Invariant: with a diagonal Gram matrix no weight moves, and the result is that of rounding to nearest.

Taught in notebook 09.
"""

from dataclasses import replace

import torch
from torch import Tensor

from minserve.model.quantized_weight import QuantizedWeight
from minserve.quantize.rtn import nearest_codes, round_to_nearest
from minserve.sim.weight_formats import WeightFormat


class Gram:
    """What the quantizers know of a product's inputs: which go together, and how large each is."""

    def __init__(self, num_inputs: int):
        self.num_tokens = 0
        self._products = torch.zeros(num_inputs, num_inputs)
        self._magnitudes = torch.zeros(num_inputs)

    def add(self, x: Tensor) -> None:
        """x: [T, I] in any float type"""
        x = x.float()
        self.num_tokens += len(x)
        self._products.addmm_(x.T, x)
        self._magnitudes += x.abs().sum(0)

    @property
    def matrix(self) -> Tensor:
        """Mean of x^T x: [I, I]"""
        return self._products / max(self.num_tokens, 1)

    @property
    def magnitude(self) -> Tensor:
        """Mean of |x|: [I]"""
        return self._magnitudes / max(self.num_tokens, 1)


def gptq(
    weight: Tensor,
    gram_matrix: Tensor,
    fmt: WeightFormat,
    *,
    order: bool = True,
    damping: float = 0.01,
    block_size: int = 128,
) -> QuantizedWeight:
    """Codes chosen so that the outputs move least. weight: [O, I], gram_matrix: [I, I]

    order: inputs with large activations first.
    damping: that share of the Gram matrix's mean diagonal is added to its diagonal.
    block_size: the errors of so many inputs reach those after them at once. Changes the speed, not the codes.
    Raises ValueError if the Gram matrix cannot be inverted.
    """
    nearest = round_to_nearest(weight, fmt)  # its grids stay, its codes go
    loudness = gram_matrix.diagonal()
    inputs = loudness.argsort(descending=True, stable=True) if order else torch.arange(len(loudness))
    factor = inverse_factor(gram_matrix[inputs][:, inputs], damping)
    groups = nearest.group_of[inputs]
    scales, zeros = nearest.scales.T[groups], nearest.zeros.T[groups]  # [I, O]
    codes = compensate(weight.float().T[inputs], factor, scales, zeros, fmt.bits, block_size)
    return replace(nearest, codes=codes[inputs.argsort()].T.contiguous())


def inverse_factor(gram_matrix: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with U^T U = (gram_matrix + damping * its mean diagonal)^-1. [I, I] -> [I, I]

    Its row i, times U[i, i], is the first row of the inverse that belongs to inputs i and later alone: all
    that is needed once those before i are rounded. An input that was always 0 goes with no other.
    """
    hessian = gram_matrix.to(torch.float64, copy=True)  # 2 X X^T in the paper; a factor changes nothing
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    diagonal += damping * mean
    diagonal[diagonal == 0] = 1
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        raise ValueError(
            f"the Gram matrix of {len(hessian)} inputs has no inverse: elimination stopped at input {int(failed)}. "
            f"Damping was {damping:g} of a mean diagonal of {mean:g}; more of it or more tokens help"
        )
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()


def compensate(
    rows: Tensor,
    factor: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    block_size: int = 128,
) -> Tensor:
    """Round row after row, the later ones making up for the errors of the earlier. -> codes [I, O] uint8

    rows: [I, O], row i the weights of input i, in the order of rounding; the call moves them.
    factor: [I, I], of `inverse_factor`, in the same order; scales, zeros: [I, O]
    """
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    for start in range(0, len(rows), block_size):
        end = min(start + block_size, len(rows))
        errors = torch.empty_like(rows[start:end])
        for i in range(start, end):
            codes[i] = nearest_codes(rows[i], scales[i], zeros[i], bits)
            rounded = (codes[i] - zeros[i]) * scales[i]
            errors[i - start] = (rows[i] - rounded) / factor[i, i]
            rows[i + 1 : end] -= factor[i, i + 1 : end, None] * errors[i - start]
        rows[end:] -= factor[start:end, end:].T @ errors
    return codes
