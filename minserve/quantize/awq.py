"""AWQ: scale the weights of loud inputs up before rounding, and cut the ranges of groups a little.

Why: a few inputs are much louder than the others, and an error in their weights is loud in the output. AWQ (Lin et al. 2023,
arXiv:2306.00978) multiplies the weights of input i by s[i] and divides the input by s[i]: the product stays what it was, but the
weights of a loud input now lie on a grid that is finer for them by s[i]. Dividing costs nothing when it is merged into what made
the input (a norm's gain, the product before). The scale is s = magnitude^alpha; alpha 0 is no scale at all, and one number is searched.

Then each group's range is cut by a factor of its own: the largest weights are clipped, all others get a finer grid.

Both searches measure the error of the output over the calibration text, from the Gram matrix of the inputs alone.

Invariant: no scale and no cut are among the candidates, so neither search ends with a greater error, as it measures it, than rounding
to nearest has.

Taught in notebook 09.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minserve.quantize.rtn import output_error, round_to_nearest
from minserve.sim.weight_formats import WeightFormat

SMALLEST_MAGNITUDE = 1e-4  # of an input that was always 0


def search_scale(
    weights: Sequence[Tensor],
    gram_matrix: Tensor,
    magnitude: Tensor,
    fmt: WeightFormat,
    num_steps: int = 20,
) -> Tensor:
    """The scale of each input for which rounding the weights moves the outputs least. -> [I]

    weights: all matrices [O, I] that these inputs meet. gram_matrix: [I, I], magnitude: [I], mean |x|.
    Multiply the weights' columns by the scale, and divide the inputs by it.
    """
    candidates = [scale_of(magnitude, step / num_steps) for step in range(num_steps + 1)]
    errors = [scaled_error(weights, gram_matrix, scale, fmt) for scale in candidates]
    return candidates[errors.index(min(errors))]


def scale_of(magnitude: Tensor, alpha: float) -> Tensor:
    """magnitude^alpha, with the largest as far above 1 as the smallest is below.

    >>> scale_of(torch.tensor([1.0, 4.0, 16.0]), 0.5)
    tensor([0.5000, 1.0000, 2.0000])
    """
    scale = magnitude.clamp(min=SMALLEST_MAGNITUDE) ** alpha
    return scale / (scale.min() * scale.max()).sqrt()


def scaled_error(weights: Sequence[Tensor], gram_matrix: Tensor, scale: Tensor, fmt: WeightFormat) -> float:
    """Error of the outputs when weights are multiplied by the scale and rounded, and inputs divided by it."""
    error = 0.0
    for weight in weights:
        rounded = round_to_nearest(weight * scale, fmt).dequantize() / scale
        error += output_error(weight, rounded, gram_matrix)
    return error


def search_clip(
    weight: Tensor,
    gram_matrix: Tensor,
    fmt: WeightFormat,
    num_steps: int = 10,
    least: float = 0.5,
) -> Tensor:
    """The factor on each group's range, `least` to 1, for which its part of the output moves least. -> [O, G]

    weight: [O, I], gram_matrix: [I, I], both with AWQ's scale on them if there is one: W s and G / (s s^T).
    A group is judged alone, as if the rest of its row were not rounded.
    """
    factors = torch.linspace(1, least, num_steps + 1)
    errors = [clipped_error(weight, gram_matrix, factor, fmt) for factor in factors]
    return factors[torch.stack(errors).argmin(0)]


def clipped_error(weight: Tensor, gram_matrix: Tensor, factor: Tensor, fmt: WeightFormat) -> Tensor:
    """Error of each group's part of each output when all ranges are cut by the factor: [O, G]"""
    difference = round_to_nearest(weight, fmt, shrink=factor).dequantize() - weight
    num_inputs = weight.shape[1]
    size = fmt.group_size or num_inputs
    groups = [slice(start, start + size) for start in range(0, num_inputs, size)]
    errors = [(difference[:, g] @ gram_matrix[g, g] * difference[:, g]).sum(1) for g in groups]
    return torch.stack(errors, dim=1)
