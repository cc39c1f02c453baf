"""A number from a sample, and how far it can be trusted.

Why: twenty documents and eighty questions are a small sample. A format that scores 71 % where the reference scores 72 % may have lost one
question by luck. The bootstrap (Efron 1979) draws samples of the same size from the sample itself, with replacement, and shows how
much the number moves. What two formats did on the same document is drawn together, so that what is hard about the document
cancels out of their difference.

Invariant: the same parts and the same seed give the same interval.

Taught in notebook 08.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A number with the interval that 95 % of the resamples fall into."""

    value: float
    low: float
    high: float

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def words(self, digits: int = 3) -> str:
        """
        >>> Interval(0.5, 0.25, 0.75).words()
        '0.500 (0.250 to 0.750)'
        """
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def bootstrap(parts: Tensor, estimate: Callable[[Tensor], Tensor], seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Interval:
    """`estimate` of the summed parts, with its interval from resampling the units.

    parts: [units, m], what each unit (a document, a prompt) adds to m sums; estimate: [R, m] sums -> [R] numbers.

    >>> bootstrap(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), ratio_of_sums)
    Interval(value=1.0, low=1.0, high=1.0)
    """
    if not len(parts):
        return Interval(math.nan, math.nan, math.nan)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(parts), (num_resamples, len(parts)), generator=generator)
    numbers = estimate(parts[drawn].sum(1)).sort().values  # infinite numbers sort too; they cannot be interpolated
    outside = (1 - CONFIDENCE) / 2
    low, high = math.floor(outside * (num_resamples - 1)), math.ceil((1 - outside) * (num_resamples - 1))
    return Interval(float(estimate(parts.sum(0, keepdim=True))[0]), float(numbers[low]), float(numbers[high]))


def ratio_of_sums(sums: Tensor) -> Tensor:
    """Mean of the first part for each of the second. sums: [R, 2] -> [R]"""
    return sums[:, 0] / sums[:, 1]


def exp_of_ratio(sums: Tensor) -> Tensor:
    """Perplexity from negative log likelihoods and counts of tokens. sums: [R, 2] -> [R]"""
    return ratio_of_sums(sums).exp()
