"""How long prompts and answers are: distributions of token counts, and three that match the statistics of public traces.

Why: the spread of the lengths decides what batching, paging and caps are worth, far more than their mean.

Invariant: a distribution is its quantile function; drawing, describing and comparing all go through it.

Taught in notebook 03.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

_SHARES = (np.arange(10_000) + 0.5) / 10_000  # where a distribution is read to describe it


def _refuse_unless(holds: bool, words: str) -> None:
    if not holds:
        raise ValueError(words)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, given by its quantile function: share of requests -> tokens that so many stay below.

    >>> Lengths.uniform(100, 300).mean, round(Lengths.exponential(128, 512).cv, 2)
    (200.0, 0.94)
    """

    words: str
    quantile: Callable[[np.ndarray], np.ndarray]
    least: int = 1

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw `count` lengths. One uniform number each, so that another distribution ranks the same requests alike."""
        return self._tokens(rng.random(count)).tolist()

    def percentile(self, percent: float) -> int:
        return int(self._tokens(np.array([percent / 100]))[0])

    @property
    def mean(self) -> float:
        return float(self._tokens(_SHARES).mean())

    @property
    def cv(self) -> float:
        """Standard deviation over mean: 0 for equal lengths, about 1 for exponential ones."""
        tokens = self._tokens(_SHARES)
        return float(tokens.std() / tokens.mean())

    @property
    def most(self) -> int:
        return self.percentile(100)

    def _tokens(self, shares: np.ndarray) -> np.ndarray:
        return np.maximum(np.rint(self.quantile(np.clip(shares, 1e-12, 1 - 1e-12))), self.least).astype(int)

    @classmethod
    def constant(cls, tokens: int) -> "Lengths":
        _refuse_unless(tokens >= 1, f"a length is at least 1 token, got {tokens}")
        return cls(f"{tokens} tokens", lambda shares: np.full(shares.shape, float(tokens)))

    @classmethod
    def uniform(cls, low: int, high: int) -> "Lengths":
        _refuse_unless(1 <= low <= high, f"uniform lengths need 1 <= low <= high, got {low} and {high}")
        return cls(f"uniform {low} to {high}", lambda shares: low - 0.5 + (high - low + 1) * shares, low)

    @classmethod
    def exponential(cls, mean: float, most: int) -> "Lengths":
        """Mean before cutting: what would be longer than `most` tokens is `most` tokens long."""
        _refuse_unless(0 < mean and 1 <= most, f"exponential lengths need mean > 0 and most >= 1, got {mean} and {most}")
        return cls(f"exponential {mean:g}, at most {most}", lambda shares: np.minimum(-mean * np.log1p(-shares), most))

    @classmethod
    def lognormal(cls, median: float, sigma: float, least: int, most: int) -> "Lengths":
        """exp(normal) around `median`, `sigma` wide in natural logarithms, cut at both ends."""
        _refuse_unless(median > 0 and sigma >= 0, f"lognormal lengths need median > 0 and sigma >= 0, got {median} and {sigma}")
        _refuse_unless(1 <= least <= most, f"lognormal lengths need 1 <= least <= most, got {least} and {most}")
        normal = NormalDist()

        def quantile(shares: np.ndarray) -> np.ndarray:
            deviations = np.array([normal.inv_cdf(share) for share in shares])
            return np.clip(median * np.exp(sigma * deviations), least, most)

        return cls(f"lognormal {median:g} x e^(+-{sigma:g}), {least} to {most}", quantile, least)

    @classmethod
    def through(cls, *points: tuple[float, float]) -> "Lengths":
        """The curve through (share, tokens) points, from share 0 to share 1, straight in the logarithm of the tokens."""
        shares, tokens = [share for share, _ in points], [count for _, count in points]
        ascending = shares == sorted(shares) and tokens == sorted(tokens) and shares[0] == 0 and shares[-1] == 1 and tokens[0] >= 1
        _refuse_unless(ascending, f"points must ascend from share 0 to share 1, from at least 1 token; got {points}")
        logs = np.log(tokens)
        return cls(f"{tokens[0]:g} to {tokens[-1]:g} tokens", lambda wanted: np.exp(np.interp(wanted, shares, logs)), int(tokens[0]))


class LengthPair(NamedTuple):
    """Prompts and answers of one kind of traffic, drawn independently of each other."""

    prompt: Lengths
    output: Lengths


# Curves through the published statistics of three public traces: Microsoft Azure's of November 2023 (19,366 conversations, 8,819 code
# completions) and Mooncake's conversations (12,031). Median and 90th percentile of each are the traces'; the other points were chosen
# so that the mean is within 1 % too, and, for Azure's outputs, the coefficient of variation (0.77 and 2.15). No lognormal does that: of
# Azure's chat outputs the mean asks for a sigma of 0.99, the 90th percentile for 0.93 and the variation for 0.68. What does not match
# is what these numbers do not tell: the longest requests (cut where the mean wants it), whether long prompts have long answers, and
# Azure's arrival times.
TRACES: Mapping[str, LengthPair] = {
    "azure-chat": LengthPair(
        Lengths.through((0, 20), (0.5, 1020), (0.9, 2734), (1, 4000)),
        Lengths.through((0, 20), (0.25, 100), (0.5, 129), (0.65, 275), (0.9, 424), (1, 700)),
    ),
    "azure-code": LengthPair(
        Lengths.through((0, 90), (0.5, 1469), (0.9, 5186), (1, 7400)),
        Lengths.through((0, 6), (0.5, 13), (0.9, 55), (0.98, 70), (1, 1000)),
    ),
    "mooncake": LengthPair(
        Lengths.through((0, 890), (0.5, 6909), (0.9, 27_367), (1, 72_000)),
        Lengths.through((0, 10), (0.5, 350), (0.9, 597), (1, 1850)),
    ),
}
