"""Rotary positions: turn each pair of a head's numbers by an angle that grows with the token's position.

Why: the dot product of a query and a key then depends on how far apart they are, so a key is stored once, already turned.
Pairs are half a head apart, (i, i + D/2), as in Hugging Face's weights, not neighbours. Long-context variants only change
the angles per position; the turning is the same for all.

Invariant: angles are made in float32 whatever the compute type, from integer positions (bf16 cannot tell 15,936 from 15,962).

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), Llama 3.1's reference code for "llama3". Taught in notebook 05.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from minserve.model.config import RopeConfig


class Rotation(NamedTuple):
    """The turn of every token of a step, made once and used by all layers."""

    cos: Tensor  # [T, 1, 1, D/2] float32
    sin: Tensor  # [T, 1, D/2] float32


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, in radians: [D/2] float32.

    >>> inverse_frequencies(RopeConfig(theta=10_000.0), 4)
    tensor([1.0000, 0.0100])
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies queries and keys by, to keep the softmax as sharp over a longer context; 1 for the others."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Leave waves that fit often into the original context, stretch those that do not fit, blend in between."""
    num_waves = rope.original_max_positions * plain / (2 * math.pi)
    keep = ((num_waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """The same idea as llama3's, blended evenly over the index of the pair instead of over its number of waves."""
    num_pairs = len(plain)

    def pair_with(num_waves: float) -> float:
        return num_pairs * math.log(rope.original_max_positions / (num_waves * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001  # one pair on the border: a step instead of a ramp
    stretch = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - stretch) * plain + stretch * plain / rope.factor


def rotation(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Rotation:
    """The turn of each token. positions: [T] integers; frequencies: [D/2] float32 from `inverse_frequencies`."""
    angles = positions.to(torch.float32)[:, None] * frequencies  # [T, D/2]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return Rotation(cos[:, None, None], sin[:, None])


def rotate_(x: Tensor, turn: Rotation) -> None:
    """Turn all heads of all tokens in place, computing in float32. x: [T, heads, D], any float type.

    (a, b) becomes (a cos - b sin, b cos + a sin).

    >>> x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    >>> rotate_(x, rotation(torch.tensor([1]), torch.tensor([1.0, 0.01]))); x
    tensor([[[0.5403, 0.0000, 0.8415, 0.0000]]])
    """
    halves = x.unflatten(-1, (2, -1))  # [T, heads, 2, D/2], shares x's memory
    wide = halves.to(torch.float32)
    first, second = wide.unbind(2)
    turned = wide * turn.cos
    turned[:, :, 0].addcmul_(second, turn.sin, value=-1)
    turned[:, :, 1].addcmul_(first, turn.sin)
    halves.copy_(turned)
