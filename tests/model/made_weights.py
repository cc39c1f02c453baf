"""Matrices in codes, drawn from a seed: every code, scales and zeros as a quantizer may choose them."""

import torch

from minserve.model.quantized_weight import QuantizedWeight, groups_in_order, storable


def made_weight(
    bits: int, num_outputs: int, num_inputs: int, group_size: int | None, *, symmetric: bool = False, mixed: bool = False, seed: int = 0
) -> QuantizedWeight:
    """mixed: members of a group are not neighbours, as where GPTQ has ordered the inputs."""
    generator = torch.Generator().manual_seed(seed)
    group_of = groups_in_order(num_inputs, group_size)
    if mixed:
        group_of = group_of[torch.randperm(num_inputs, generator=generator)]
    shape = (num_outputs, int(group_of.max()) + 1)
    zeros = torch.randint(2**bits, shape, generator=generator).float()
    return QuantizedWeight(
        bits=bits,
        codes=torch.randint(2**bits, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8),
        scales=storable(0.001 + 0.01 * torch.rand(shape, generator=generator)),
        zeros=torch.full(shape, 2.0 ** (bits - 1)) if symmetric else zeros,
        group_of=group_of,
    )
