"""The real model on the far side of the seam: a ScheduledBatch goes in, one token per finished row comes out.

Why: everything that turns the scheduler's plain data into tensors is here, once per step, so that the layers and the sampler
only see tensors. The runner keeps nothing between steps; all that lasts is in the requests and in the KV cache.

Invariant: block copies come first, then every row's keys and values are written, then its logits are made; a row that does not
reach its last known token yields no token.

Taught in notebook 05.
"""

from itertools import accumulate

import torch
from torch import Tensor

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.model.attention import AttentionMetadata, require_known_backend
from minserve.model.decoder import Decoder
from minserve.model.kv_cache import KVCache
from minserve.model.sampler import Sampler


class ModelRunner:
    """Executes steps on a decoder, a cache and a sampler that it is given."""

    def __init__(self, decoder: Decoder, cache: KVCache, sampler: Sampler, backend: str = "torch"):
        """Raises ValueError for an unknown backend: now, and not in the first step."""
        require_known_backend(backend)
        self.decoder, self.cache, self.sampler, self.backend = decoder, cache, sampler, backend

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
        decoder = self.decoder
        metadata = AttentionMetadata.build(batch, self.cache, decoder.config.windows, decoder.dtype)
        token_ids = torch.tensor([t for row in metadata.rows for t in row.token_ids], device=decoder.device)  # [T]
        return decoder.forward(token_ids, metadata.positions, self.cache, metadata, self.backend), metadata.rows
