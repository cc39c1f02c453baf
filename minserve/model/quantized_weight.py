"""A matrix in codes: what a quantizer makes, what a checkpoint holds, and what a product multiplies by.

Why: round to nearest, GPTQ and AWQ differ in how they choose codes, public checkpoints in how they pack them, and devices in how they
multiply by them. All meet in one form that has nothing packed and nothing fused:

    value[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g],  g = group_of[i]

Invariant: scales that are chosen here are numbers that bf16 and fp16 both hold exactly, so no place where they are stored changes a
weight. Those of other people's files are numbers of fp16, and a product in bf16 rounds them.

Taught in notebook 09.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """One matrix of O outputs and I inputs, the inputs in G groups."""

    bits: int
    codes: Tensor  # [O, I] uint8, from 0 to 2^bits - 1
    scales: Tensor  # [O, G] float32
    zeros: Tensor  # [O, G] float32: the code that means 0, a whole number; 2^(bits - 1) in symmetric formats
    group_of: Tensor  # [I] int64: the group of each input

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights that the codes mean: [O, I]"""
        values = (self.codes - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]
        return values.to(dtype)


def groups_in_order(num_inputs: int, group_size: int | None) -> Tensor:
    """The group of each input where neighbours share one; the last is short if the size does not divide the inputs. -> [I] int64

    Raises ValueError for a size below 1.

    >>> groups_in_order(5, 2)
    tensor([0, 0, 1, 1, 2])
    """
    if group_size is not None and group_size < 1:
        raise ValueError(f"a group has at least 1 input, got {group_size}; None is one group for all {num_inputs}")
    return torch.arange(num_inputs) // min(group_size or num_inputs, num_inputs)


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Matrices over the same inputs as one. Raises ValueError if they differ in bits or groups."""
    first = parts[0]
    for part in parts[1:]:
        if part.bits != first.bits or not torch.equal(part.group_of, first.group_of):
            raise ValueError(f"cannot stack {first.bits}-bit and {part.bits}-bit weights of {first.shape} and {part.shape}: other groups")
    codes, scales, zeros = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales", "zeros"))
    return replace(first, codes=codes, scales=scales, zeros=zeros)


def storable(scales: Tensor) -> Tensor:
    """The nearest scales that bf16 and fp16 both hold exactly, as float32. Below 2^-14 fp16 has steps of 2^-24.

    >>> storable(torch.tensor([0.1, 1e-6]))
    tensor([1.0010e-01, 1.0133e-06])
    """
    return scales.bfloat16().half().bfloat16().float()
