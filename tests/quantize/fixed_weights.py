"""A small net whose weights are the same however often and in whatever order they are asked for, and a directory of one."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_model import save_tiny_model


class FixedWeights:
    """Normal weights, and norms whose gains differ a lot from input to input."""

    def __init__(self, spread: float = 0.2):
        self.spread = spread

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode("utf-8")))
        if "norm" in name:
            return torch.rand(*shape, generator=generator) ** 2 * 2 + 0.1
        return torch.randn(*shape, generator=generator) * self.spread


class HeldWeights:
    """Tensors by name, in place of those of other weights."""

    def __init__(self, inner: FixedWeights, tensors: dict[str, Tensor]):
        self.inner, self.tensors = inner, tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.inner.take(name, shape)


def save_uneven_model(path: Path) -> Path:
    """A tiny model directory whose norms have uneven gains. 2 layers, hidden 64, intermediate 96; int4 fits g32."""
    save_tiny_model(path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    gains = FixedWeights()
    tensors |= {name: gains.take(name, tensor.shape) for name, tensor in tensors.items() if "norm" in name}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
