"""Where a decoder's weights come from: safetensors files, or random numbers for tests and lessons.

Why: a checkpoint may be one file or many, may hold a tensor twice, lack one, or have been cut short by a broken download.
All of that must end in an error that names the file or the tensor, before anything is served: a model with a gap in it
still writes fluent text. Files are mapped, not read, so a tensor is in memory only once it has been taken.

Invariant: every tensor that `take` returns has the shape that was asked for and comes from the shard that the index names.

Taught in notebook 05.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minserve.model.quantized_weight import QuantizedWeight

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class BrokenCheckpoint(ValueError):
    """The files of a model are incomplete or contradict its config; the message names the file or the tensor."""


class Weights(Protocol):
    """Anything that hands out named tensors."""

    def take(self, name: str, shape: Sequence[int]) -> Tensor: ...

    def __contains__(self, name: str) -> bool: ...


@runtime_checkable
class CodedWeights(Weights, Protocol):
    """Weights of which some are in codes. `take` gives those as numbers."""

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        """A matrix in codes by the name that it would have in floats, such as model.layers.0.mlp.down_proj.weight; None: it is in floats.

        lm_head.weight is asked for too where the output layer is tied to the embedding.
        """
        ...


def quantized(weights: Weights, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
    """The codes of a matrix, or None if these weights have none for it."""
    return weights.quantized(name, shape) if isinstance(weights, CodedWeights) else None


class Checkpoint:
    """The tensors of a Hugging Face model directory. Opening it checks that every file is there and whole."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._file_of = self._read_index()  # tensor name -> file name
        self._files = {name: self._open(name) for name in sorted(set(self._file_of.values()))}
        self._taken: set[str] = set()
        held = {name: set(file.keys()) for name, file in self._files.items()}
        for tensor, file in self._file_of.items():
            if tensor not in held[file]:
                raise BrokenCheckpoint(f"the index says that {file} holds {tensor}, but it does not")

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX_FILE
        if index.exists():
            text = index.read_text(encoding="utf-8")
            return json.loads(text, object_pairs_hook=_refuse_twice)["weight_map"]
        if not (self.directory / SINGLE_FILE).exists():
            raise BrokenCheckpoint(f"neither {SINGLE_FILE} nor {INDEX_FILE} in {self.directory}")
        return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)

    def _open(self, name: str) -> Any:
        path = self.directory / name
        if not path.exists():
            raise BrokenCheckpoint(f"{path} is missing, though the index names it: fetch the model again")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise BrokenCheckpoint(f"{path} is damaged or cut short ({path.stat().st_size:,} bytes): {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Tensor:
        """One tensor as stored, mapped from its file. Raises BrokenCheckpoint if it is missing."""
        if name not in self._file_of:
            raise BrokenCheckpoint(f"tensor {name} is missing from {self.directory}")
        return self._files[self._file_of[name]].get_tensor(name)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """`get`, if it has that shape. Raises BrokenCheckpoint if it is missing or has another."""
        tensor = self.get(name)
        if tuple(tensor.shape) != tuple(shape):
            raise BrokenCheckpoint(f"tensor {name} has shape {tuple(tensor.shape)}, the config says {tuple(shape)}")
        self._taken.add(name)
        return tensor

    @property
    def names(self) -> list[str]:
        """Of all tensors in the files."""
        return sorted(self._file_of)

    def unused(self) -> list[str]:
        """Tensors that nobody took, tables of rotary angles aside (old files store them; they are computed here)."""
        return sorted(name for name in self._file_of if name not in self._taken and not name.endswith("rotary_emb.inv_freq"))


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated names; Python would silently keep the last of them."""
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen and seen[name] != value:
            raise BrokenCheckpoint(f"the index names {name} twice: in {seen[name]} and in {value}")
        seen[name] = value
    return seen


class RandomWeights:
    """Seeded weights for a net without files: norms are 1, everything else is normal with the given spread."""

    def __init__(self, seed: int = 0, spread: float = 0.05):
        self._generator = torch.Generator().manual_seed(seed)
        self._spread = spread

    def __contains__(self, name: str) -> bool:
        return False  # nothing beyond what the decoder asks for

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        if "norm" in name:
            return torch.ones(*shape)
        return torch.randn(*shape, generator=self._generator) * self._spread
