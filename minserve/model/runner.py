"""The real model on the far side of the seam: a ScheduledBatch goes in, one token per finished row comes out.

Why: everything that turns the scheduler's plain data into tensors is here, once per step, so that the layers and the sampler
only see tensors. The runner keeps nothing between steps; all that lasts is in the requests and in the KV cache.

Invariant: block copies come first, then every row's keys and values are written, then its logits are made; a row that does not
reach its last known token yields no token.

Taught in notebook 05.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.model.attention_triton import TritonOperations
from minserve.model.cuda_graphs import DecodeGraphs, Record
from minserve.model.decoder import Decoder
from minserve.model.kv_cache import KVCache
from minserve.model.operations import choose_operations
from minserve.model.sampler import Sampler


class ModelRunner:
    """Executes steps on a decoder, a cache and a sampler that it is given."""

    def __init__(self, decoder: Decoder, cache: KVCache, sampler: Sampler, backend: str = "auto"):
        """Raises ValueError for a backend that is unknown or cannot serve here: now, and not in the first step."""
        self.decoder, self.cache, self.sampler = decoder, cache, sampler
        self.operations, self._why_operations = choose_operations(backend, cache)
        self.graphs: DecodeGraphs | None = None

    def describe(self) -> str:
        """In one line, what runs between the matrix products."""
        graphs = f", decode steps of up to {self.graphs.sizes[-1]} requests as CUDA graphs" if self.graphs else ""
        return f"attention backend: {self.operations.name}, {self._why_operations}{graphs}"

    def record_graphs(self, max_requests: int, max_tokens: int, record: Record | None = None) -> None:
        """From now on, run decode steps of up to `max_requests` requests of up to `max_tokens` tokens as CUDA graphs."""
        assert isinstance(self.operations, TritonOperations), "a graph is recorded with the kernels"
        self.graphs = DecodeGraphs(self.decoder, self.cache, self.operations, max_requests, max_tokens, record)

    def use(self, decoder: Decoder) -> None:
        """Run other weights of the same shape."""
        self.decoder = decoder
        if self.graphs is not None:
            self.graphs = self.graphs.recorded_for(decoder)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute a step. A request whose logits are unusable gets an error in place of a token; the others are not touched."""
        self.cache.copy_blocks(batch.copies)
        if not batch.rows:
            return StepResult(token_ids={})
        hidden, rows = self.hidden(batch)
        last_tokens = [end - 1 for row, end in zip(rows, accumulate(row.num_tokens for row in rows), strict=True) if row.samples]
        requests = [row.request for row in rows if row.samples]
        if not requests:
            return StepResult(token_ids={})
        sampled = self.sampler.sample(self.decoder.logits(hidden[last_tokens]), requests)
        ids = [request.request_id for request in requests]
        return StepResult(
            token_ids={ids[row]: token for row, token in enumerate(sampled.token_ids) if row not in sampled.errors},
            logprobs={ids[row]: logprob for row, logprob in enumerate(sampled.logprobs) if logprob is not None},
            errors={ids[row]: error for row, error in sampled.errors.items()},
        )

    @torch.inference_mode()
    def hidden(self, batch: ScheduledBatch) -> tuple[Tensor, tuple[ScheduledRequest, ...]]:
        """Run the decoder over every token of the step: hidden states [T, E], and the rows in the order of their tokens."""
        decoder, operations = self.decoder, self.operations
        with on_device(decoder.device):
            if self.graphs is not None and self.graphs.fits(batch.rows):
                return self.graphs.hidden(batch.rows), batch.rows
            step = operations.lay_out(batch, self.cache, decoder.config, decoder.dtype)
            return decoder.forward(step.token_ids, step.positions, self.cache, step, operations), step.rows


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """In here, kernels are launched on `device`: Triton launches on torch's current GPU, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
