"""AWQ: scale the weights of loud inputs up before rounding, and cut the ranges of groups a little.

Why: a few inputs are much louder than the others, and an error in their weights is loud in the output. AWQ (Lin et al. 2023,
arXiv:2306.00978) multiplies the weights of input i by s[i] and divides the input by s[i]: the product stays what it was, but the
weights of a loud input now lie on a grid that is finer for them by s[i]. Dividing costs nothing when it is merged into what made
the input (a norm's gain, the product before). The scale is s = magnitude^alpha; alpha 0 is no scale at all, and one number is searched.

Then each group's range is cut by a factor of its own: the largest weights are clipped, all others get a finer grid.

Both searches measure the error of the output over the calibration text, from the Gram matrix of the inputs alone.

Invariant: no scale and no cut are among the candidates, so neither search ends with a greater error than rounding to nearest has.

Taught in notebook 09.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minserve.model.quantized_weight import groups_in_order
from minserve.quantize.rtn import output_error, round_to_nearest
from minserve.sim.weight_formats import WeightFormat

SMALLEST_MAGNITUDE = 1e-4  # of an input that was always 0


def search_scale(weights: Sequence[Tensor], gram_matrix: Tensor, magnitude: Tensor, fmt: WeightFormat, num_steps: int = 20) -> Tensor:
    """The scale of each input for which rounding all weights [O, I] over these inputs moves the outputs least. -> [I]

    gram_matrix: [I, I], magnitude: [I], mean |x|. Multiply the weights' columns by the scale, divide the inputs by it.
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
    """Error of the outputs when the weights are multiplied by the scale, rounded, and the inputs divided by it."""
    rounded = (round_to_nearest(weight * scale, fmt).dequantize() / scale for weight in weights)
    return sum(output_error(weight, values, gram_matrix) for weight, values in zip(weights, rounded, strict=True))


def search_clip(weight: Tensor, gram_matrix: Tensor, fmt: WeightFormat, num_steps: int = 10, least: float = 0.5) -> Tensor:
    """The factor, from `least` to 1, on each group's range for which the group's part of the output moves least. -> [O, G]

    weight: [O, I], gram_matrix: [I, I]. A group is judged alone, as if the rest of its row were not rounded.
    """
    factors = torch.linspace(1, least, num_steps + 1)
    errors = torch.stack([clipped_error(weight, gram_matrix, factor, fmt) for factor in factors])  # [steps, O, G]
    return factors[errors.argmin(0)]


def clipped_error(weight: Tensor, gram_matrix: Tensor, factor: Tensor, fmt: WeightFormat) -> Tensor:
    """Error of each group's part of each output when all ranges are cut by the factor: [O, G]"""
    group_of = groups_in_order(weight.shape[1], fmt.group_size)
    shrink = factor.expand(len(weight), int(group_of[-1]) + 1)
    difference = round_to_nearest(weight, fmt, shrink).dequantize() - weight
    groups = [(group_of == g).nonzero()[:, 0] for g in range(shrink.shape[1])]
    parts = [difference[:, group] for group in groups]
    return torch.stack([(part @ gram_matrix[group][:, group] * part).sum(1) for part, group in zip(parts, groups, strict=True)], dim=1)
