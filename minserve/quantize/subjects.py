"""What is measured: a model that can be opened in any compute type, with its cache in any format, or in one that is only tried out.

Why: a format costs quality in the cache and nowhere else, so both sides of a comparison are the same decoder in the same compute type,
each with a cache of its own. A quantizer that has no code in the engine yet is tried as a `Scheme`: the cache stores, in the compute
type, what would be left of the numbers after a write and a read.

`with_outliers` makes a model on which cheap quantizers fail. Some real models have a few key channels that are tens of times louder
than the others (Qwen2's key biases). Here some key channels are made louder by a power of two and the same channels of the queries
quieter by as much; every product of a query and a key stays what it was, to the last bit, in every float type. Rotary positions mix
channels i and i + D/2, so these two are always scaled together.

Taught in notebook 08.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from minserve.model import zoo
from minserve.model.config import ModelConfig
from minserve.model.decoder import Decoder
from minserve.model.kv_cache import KVCache, bytes_per_token
from minserve.model.runner import ModelRunner
from minserve.model.sampler import Sampler
from minserve.model.tokenizer import TextTokenizer, Tokenizer
from minserve.model.weights import Checkpoint, Weights
from minserve_kernels import kv

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A config, a tokenizer, and a way to the weights. Opening the same one twice gives the same model."""

    name: str
    config: ModelConfig
    tokenizer: TextTokenizer
    open_weights: Callable[[], Weights]

    @classmethod
    def from_name(cls, name: str | Path | None = None) -> "OpenModel":
        """A directory, a hub id, or None for the default: as `minserve.model.zoo` resolves it."""
        path = zoo.resolve(name, progress=False)
        return cls(path.name, ModelConfig.from_directory(path), Tokenizer(path), lambda: Checkpoint(path))

    def decoder(self, dtype: torch.dtype) -> Decoder:
        return Decoder(self.config, self.open_weights(), dtype)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantizer on trial. round_trip: kv [T, 2, K, D] float32, keys first -> what a read after a write would give."""

    name: str
    round_trip: Callable[[Tensor], Tensor]
    size_of: str | None = None  # the format that takes as many bytes, if one does


UNMIXED = "-unmixed"


def parse_format(words: str) -> "str | Scheme":
    """A format of the engine by its name; with "-unmixed" behind it, the bare quantizer on keys and values as they are.

    >>> parse_format("int8"), parse_format("int4-unmixed").name
    ('int8', 'int4-unmixed')
    """
    if not words.endswith(UNMIXED):
        return words
    name = words.removesuffix(UNMIXED)
    if name not in kv.CODES:
        raise ValueError(f"KV format {name!r} is not known; known: {', '.join(kv.CODES)}")
    return Scheme(words, lambda x: kv.decode(*kv.encode(x, name), name, torch.float32), name)


class TrialCache(KVCache):
    """A cache in the compute type that holds what a scheme leaves of keys and values."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, compute: str, scheme: Scheme):
        super().__init__(config, num_blocks, block_size, compute)
        self.scheme = scheme

    def write(self, layer: int, kv: Tensor, place: tuple[Tensor, Tensor]) -> None:
        super().write(layer, self.scheme.round_trip(kv.float()).to(kv.dtype), place)


def make_runner(model: OpenModel, decoder: Decoder, compute: str, kv_cache_dtype: str | Scheme, num_blocks: int) -> ModelRunner:
    """A runner with a cache of its own, in a format of the engine or under a scheme on trial."""
    if isinstance(kv_cache_dtype, Scheme):
        cache: KVCache = TrialCache(model.config, num_blocks, BLOCK_SIZE, compute, kv_cache_dtype)
    else:
        cache = KVCache(model.config, num_blocks, BLOCK_SIZE, kv_cache_dtype)
    return ModelRunner(decoder, cache, Sampler(model.tokenizer.num_tokens_known))


def labels(config: ModelConfig, kv_cache_dtype: str | Scheme) -> tuple[str, int | None]:
    """Name and bytes per token of a format or a scheme."""
    if not isinstance(kv_cache_dtype, Scheme):
        return kv_cache_dtype, bytes_per_token(config, kv_cache_dtype)
    size_of = kv_cache_dtype.size_of
    return kv_cache_dtype.name, None if size_of is None else bytes_per_token(config, size_of)


# --- a model with loud key channels ---------------------------------------------------------------


def with_outliers(model: OpenModel, factor: float = 8.0, num_pairs: int = 1, seed: int = 0) -> OpenModel:
    """The same model, with `num_pairs` pairs of key channels `factor` times as loud in every layer. All logits stay as they are.

    factor: a power of two, so that nothing is rounded. Raises ValueError for another, and for models that norm queries and keys.
    """
    if factor <= 0 or torch.frexp(torch.tensor(factor)).mantissa != 0.5:
        raise ValueError(f"factor must be a power of two, got {factor}: others would round the weights")
    if model.config.qk_norm:
        raise ValueError(f"{model.name} norms queries and keys, which undoes any scale of their projections")
    half = model.config.head_dim // 2
    if not 0 < num_pairs <= half:
        raise ValueError(f"num_pairs must be from 1 to {half}, got {num_pairs}")
    rng = random.Random(seed)
    gains = [_gain(model.config.head_dim, rng.sample(range(half), num_pairs), factor) for _ in range(model.config.num_layers)]
    name = f"{model.name} with outliers x{factor:g}"
    return replace(model, name=name, open_weights=lambda: LoudKeys(model.open_weights(), gains))


def _gain(head_dim: int, pairs: Sequence[int], factor: float) -> Tensor:
    """What each key channel of a head is multiplied by: [D]"""
    gain = torch.ones(head_dim)
    gain[[*pairs, *(pair + head_dim // 2 for pair in pairs)]] = factor
    return gain


class LoudKeys:
    """Weights in which key channels are louder, and the queries' quieter by as much. gains: for each layer, [D]"""

    def __init__(self, inner: Weights, gains: Sequence[Tensor]):
        self.inner, self.gains = inner, gains

    def __contains__(self, name: str) -> bool:
        return name in self.inner

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self.inner.take(name, shape)
        if ".k_proj." not in name and ".q_proj." not in name:
            return tensor
        gain = self.gains[int(name.split(".")[2])].to(tensor.dtype)  # model.layers.7.self_attn.k_proj.weight
        heads = tensor.unflatten(0, (-1, len(gain)))  # [heads, D, E], a bias [heads, D]
        gain = gain[:, None] if tensor.dim() == 2 else gain
        return (heads * gain if ".k_proj." in name else heads / gain).flatten(0, 1)
