"""Documents read through the engine's own paged path, and what a format does to the next-token distributions.

Why: documents are fed a chunk at a time. A layer writes the step's keys and values before it reads any, and its attention reads them
from the cache: so every score, even those inside one chunk, is made with keys and values as the format has stored them, and the chunk
size changes nothing but rounding. Two rows of logits a token are compared at a time; a distribution is never looked at alone.

What the reference says is the same for every format. Its logits are kept from the first reading on while they are small; where they
are not (a large vocabulary, much text), it reads again beside each.

Invariant: compared with itself, a runner has a KL of 0 and the same best token everywhere, exactly.

Taught in notebook 08.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.core.batch import ScheduledBatch, ScheduledRequest
from minserve.core.request import Request, SamplingParams
from minserve.model.runner import ModelRunner
from minserve.quantize.subjects import BLOCK_SIZE

CHUNK_TOKENS = 64  # of a document in one step
DOCUMENTS_AT_ONCE = 8
MOST_KEPT_BYTES = 2 << 30  # of the reference's logits: 10,000 tokens of a vocabulary of 49,152 in fp32
NLL, REFERENCE_NLL, KL, SAME_BEST, COUNT = range(5)  # what is summed over the tokens of a document


class Expected:
    """The reference's logits of every step of the documents, remembered where they fit `most_bytes`."""

    def __init__(
        self,
        runner: ModelRunner,
        texts: Sequence[Sequence[int]],
        chunk_tokens: int = CHUNK_TOKENS,
        most_bytes: int = MOST_KEPT_BYTES,
    ):
        self.runner, self.texts, self.chunk_tokens = runner, texts, chunk_tokens
        total_bytes = sum(map(len, texts)) * runner.decoder.config.vocab_size * runner.decoder.dtype.itemsize
        self.is_kept = total_bytes <= most_bytes
        self._kept: list[dict[str, Tensor]] = []

    def steps(self) -> Iterator[tuple[ScheduledBatch, dict[str, Tensor]]]:
        """Every step, and its logits by document: [tokens of the row, V]"""
        for i, batch in enumerate(chunks(self.texts, self.chunk_tokens)):
            known = i < len(self._kept)
            logits = self._kept[i] if known else logits_of(self.runner, batch)
            if self.is_kept and not known:
                self._kept.append(logits)
            yield batch, logits


@torch.inference_mode()
def compare_distributions(
    base: ModelRunner | Expected,
    measured: Sequence[ModelRunner],
    texts: Sequence[Sequence[int]],
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Read documents on all runners and compare each one's next-token distributions with those of `base`.

    Returns sums over tokens: [measured, documents, (nll, nll of the reference, kl, same best token, tokens)] float64
    """
    reference = base if isinstance(base, Expected) else Expected(base, texts, chunk_tokens, most_bytes=0)
    sums = torch.zeros(len(measured), len(texts), 5, dtype=torch.float64)
    for batch, expected in reference.steps():
        for i, runner in enumerate(measured):
            for name, logits in logits_of(runner, batch).items():
                start = next(row.start for row in batch.rows if row.request.request_id == name)
                targets = torch.tensor(texts[int(name)][start + 1 : start + 1 + len(logits)])
                sums[i, int(name)] += compare(expected[name][: len(targets)], logits[: len(targets)], targets)
    return sums


def chunks(texts: Sequence[Sequence[int]], chunk_tokens: int = CHUNK_TOKENS) -> Iterator[ScheduledBatch]:
    """Steps that feed all documents, some side by side, each in chunks. The name of a row's request is its document's number."""
    for first in range(0, len(texts), DOCUMENTS_AT_ONCE):
        some = texts[first : first + DOCUMENTS_AT_ONCE]
        requests = [Request(str(first + i), tuple(text), SamplingParams(), len(text) + 1) for i, text in enumerate(some)]
        longest = max(map(len, some))
        num_blocks = -(-longest // BLOCK_SIZE)
        for start in range(0, longest, chunk_tokens):
            rows = [_row(request, start, chunk_tokens, i * num_blocks) for i, request in enumerate(requests) if start < request.num_tokens]
            yield ScheduledBatch(step=0, rows=tuple(rows))


def _row(request: Request, start: int, chunk_tokens: int, first_block: int) -> ScheduledRequest:
    end = min(start + chunk_tokens, request.num_tokens)
    table = tuple(range(first_block, first_block - (-end // BLOCK_SIZE)))
    return ScheduledRequest(request, start, end - start, table, samples=end == request.num_tokens)


@torch.inference_mode()
def logits_of(runner: ModelRunner, batch: ScheduledBatch) -> dict[str, Tensor]:
    """Logits of every token of a step, by document: [tokens of the row, V]"""
    hidden, rows = runner.hidden(batch)
    pieces = hidden.split([row.num_tokens for row in rows])
    return {row.request.request_id: runner.decoder.logits(piece) for row, piece in zip(rows, pieces, strict=True)}


def compare(expected: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Sums over tokens of the five quantities. expected, logits: [n, V], targets: [n] -> [5] float64

    Logits that are not finite count as infinitely wrong. A uniform guess between two tokens against a sure one:

    >>> compare(torch.tensor([[40.0, 0.0]]), torch.zeros(1, 2), torch.tensor([0])).float()
    tensor([0.6931, 0.0000, 0.6931, 1.0000, 1.0000])
    """
    p, q = F.log_softmax(expected.float(), -1), F.log_softmax(logits.float(), -1)
    usable = logits.isfinite().all(-1)
    nll = -q.gather(1, targets[:, None])[:, 0]
    kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
    same = (p.argmax(-1) == q.argmax(-1)) & usable
    parts = (nll.masked_fill(~usable, math.inf), -p.gather(1, targets[:, None])[:, 0], kl.masked_fill(~usable, math.inf), same)
    return torch.stack([*(part.sum(dtype=torch.float64) for part in parts), torch.tensor(len(targets), dtype=torch.float64)])
