"""Calibration text, and its way through a model one layer at a time.

Why: what the inputs of a product look like depends on all layers before it. But the layers need not all be there: the residual streams
of the text wait in front of the next layer, go through it as often as somebody wants to look, and move on.

The text is a part of the project's own prose that `minserve quality` does not read unless it is told to, and that the small trained model
is not measured on. It is prose of the same kind all the same, so what calibration gains is seen at its best there.

Documents run through the engine's own paged path: each layer writes its keys and values over those of the layer before.

Invariant: walking through all layers gives the hidden states that `Decoder.forward` gives.

Taught in notebook 09.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.core.batch import ScheduledBatch, ScheduledRequest
from minserve.core.request import Request, SamplingParams
from minserve.model.attention import AttentionMetadata
from minserve.model.config import ModelConfig
from minserve.model.decoder import Decoder, Layer
from minserve.model.kv_cache import KVCache
from minserve.model.linear import AnyLinear
from minserve.model.operations import TorchOperations
from minserve.model.sizing import DTYPES, blocks_for
from minserve.model.tokenizer import TextTokenizer
from minserve.model.weights import Weights
from minserve.quantize.gptq import Gram
from minserve.quantize.prose import cut, documents, own_prose, sections

BLOCK_SIZE = 16
TOKENS_AT_ONCE = 2048
MEASURED_DOCUMENTS, MEASURED_TOKENS = 16, 256  # what `minserve quality` reads unless it is told otherwise
HELD_OUT = ("01_memory_bound.ipynb", "06_scheduler.ipynb")  # what the small trained model is measured on
PRODUCTS = ("qkv", "output", "gate_up", "down")  # of a Layer, each with an input of its own


def calibration_documents(tokenizer: TextTokenizer, num_documents: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Seeded pieces of `num_tokens` tokens of the project's prose, none of which is measured on.

    All that there are, if they are fewer: how many depends on the tokenizer. Raises ValueError if there are none.
    """
    measured = {tuple(ids) for ids in documents(tokenizer, MEASURED_DOCUMENTS, MEASURED_TOKENS)}
    texts = [text for name, text in sections(own_prose()) if name not in HELD_OUT]
    runs = [run for text in texts for run in _runs_between(tokenizer.encode(text), measured)]
    pieces = [piece for run in runs for piece in cut(run, num_tokens)]
    if not pieces:
        raise ValueError(f"no piece of the calibration text has {num_tokens} tokens; the longest has {max(map(len, runs))}")
    return random.Random(seed).sample(pieces, min(num_documents, len(pieces)))


def _runs_between(token_ids: list[int], measured: set[tuple[int, ...]]) -> Iterator[list[int]]:
    """What is left of a text where the measured pieces are cut out."""
    run: list[int] = []
    for start in range(0, len(token_ids), MEASURED_TOKENS):
        piece = token_ids[start : start + MEASURED_TOKENS]
        if tuple(piece) in measured:
            yield run
            run = []
        else:
            run = run + piece
    yield run


class Walk:
    """Documents in front of a layer, at first the first one. `streams`: for each batch of them, [T, E] in the compute type."""

    def __init__(self, config: ModelConfig, weights: Weights, token_ids: Sequence[Sequence[int]], dtype: torch.dtype):
        self.config, self.dtype = config, dtype
        self.num_documents, self.num_tokens = len(token_ids), sum(map(len, token_ids))
        self._shell = Decoder(replace(config, num_layers=0, windows=()), weights, dtype)
        self._operations = TorchOperations()
        num_at_once = max(1, TOKENS_AT_ONCE // max(map(len, token_ids)))
        batches = [_batch(token_ids[i : i + num_at_once]) for i in range(0, len(token_ids), num_at_once)]
        num_blocks = max(sum(len(row.block_table) for row in batch.rows) for batch in batches)
        name = next(name for name, known in DTYPES.items() if known == dtype)
        self._cache = KVCache(replace(config, num_layers=1, windows=config.windows[:1]), num_blocks, BLOCK_SIZE, name)
        self.layouts = [self._operations.lay_out(batch, self._cache, config, dtype) for batch in batches]
        self.streams = [F.embedding(layout.token_ids, self._shell.embedding) for layout in self.layouts]

    @torch.inference_mode()
    def through(self, layer: Layer) -> list[Tensor]:
        """The streams behind a layer. Those of the walk stay where they are."""
        return [self._behind(layer, x.clone(), layout) for x, layout in zip(self.streams, self.layouts, strict=True)]

    def watch(self, layer: Layer) -> tuple[dict[str, Gram], list[Tensor]]:
        """The streams behind a layer, and by the names in PRODUCTS what the inputs of its products look like."""
        products = {name: Watched(getattr(layer, name)) for name in PRODUCTS}
        streams = self.through(replace(layer, **products))
        return {name: product.gram for name, product in products.items()}, streams

    def _behind(self, layer: Layer, x: Tensor, layout: AttentionMetadata) -> Tensor:
        shared = self._shell.begin(layout.positions, self._cache, layout, self._operations)
        norm = layer.attention_norm  # in place of the next layer's, too: behind the last product nobody looks at it
        normed = self._operations.norm(x, norm, self.config.norm_eps)
        return self._shell.run_layer(layer, 0, normed, x, norm, shared)[1]


def _batch(token_ids: Sequence[Sequence[int]]) -> ScheduledBatch:
    """Whole documents as the prompts of one step, each in blocks of its own."""
    rows: list[ScheduledRequest] = []
    first_block = 0
    for number, ids in enumerate(token_ids):
        request = Request(request_id=str(number), prompt_ids=tuple(ids), params=SamplingParams(), max_total_tokens=len(ids) + 1)
        last_block = first_block + blocks_for(len(ids), BLOCK_SIZE)
        rows.append(ScheduledRequest(request, 0, len(ids), tuple(range(first_block, last_block)), samples=False))
        first_block = last_block
    return ScheduledBatch(step=0, rows=tuple(rows))


class Watched:
    """A product that shows its inputs to a Gram matrix."""

    def __init__(self, inner: AnyLinear):
        self.inner, self.gram = inner, Gram(inner.in_features)
        self.out_features, self.in_features, self.bias = inner.out_features, inner.in_features, inner.bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        self.gram.add(x)
        return self.inner(x, add)

    @property
    def is_packed(self) -> bool:
        return self.inner.is_packed

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes
