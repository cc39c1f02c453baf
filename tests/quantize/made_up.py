"""Weights, and inputs that are as uneven as those of a real layer, to quantize."""

import torch
from torch import Tensor

from minserve.quantize.gptq import Gram


def correlated(num_tokens: int, num_inputs: int, seed: int = 0) -> Tensor:
    """Inputs that share causes, some much louder than others: [T, I]"""
    generator = torch.Generator().manual_seed(seed)
    loudness = torch.rand(num_inputs, generator=generator) ** 3 + 0.05
    mix = torch.randn(num_inputs // 2, num_inputs, generator=generator)
    shared = torch.randn(num_tokens, num_inputs // 2, generator=generator) @ mix
    return (shared / num_inputs**0.5 + 0.3 * torch.randn(num_tokens, num_inputs, generator=generator)) * loudness


def gram_of(*parts: Tensor) -> Gram:
    gram = Gram(parts[0].shape[1])
    for part in parts:
        gram.add(part)
    return gram


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def with_loud_input(num_tokens: int, num_inputs: int, loud: int = 5) -> Tensor:
    tokens = correlated(num_tokens, num_inputs)
    tokens[:, loud] *= 40
    return tokens
