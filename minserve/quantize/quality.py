"""What a format of the KV cache costs in quality, measured against the model without it.

Four instruments, from the finest to the one that a user sees:

    kl           how far the next-token distribution moves, in nats a token: KL(reference || measured), mean over all tokens
    perplexity   exp of the mean surprise at the real next token, and its ratio to the reference's
    agreement    greedy texts of 64 tokens: the share before the first token that differs
    tasks        small questions with one right answer: the share answered exactly

Every number comes with a 95 % interval from resampling documents or prompts, paired with the reference where they are compared.

Documents are fed through the engine's own paged path, a chunk at a time. A layer writes the step's keys and values before it reads
any, and its attention reads them from the cache: so every score, even those inside one chunk, is made with keys and values as the
format has stored them, and the chunk size changes nothing but rounding. The reference walks through the same chunks at the same time:
only two rows of logits a token are held, never those of a whole text.

Invariant: measured against itself, a format has a KL of 0, a ratio of 1 and an agreement of 1, exactly.

Taught in notebook 08.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.core.batch import ScheduledBatch, ScheduledRequest
from minserve.core.block_manager import BlockManager
from minserve.core.clock import WallClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.model.runner import ModelRunner
from minserve.model.sizing import DTYPES
from minserve.quantize.intervals import Interval, bootstrap, exp_of_ratio, ratio_of_sums
from minserve.quantize.prose import documents
from minserve.quantize.subjects import BLOCK_SIZE, OpenModel, Scheme, labels, make_runner
from minserve.quantize.tasks import Task, make_tasks

CHUNK_TOKENS = 64  # of a document in one step
DOCUMENTS_AT_ONCE = 8
PROMPT_TOKENS = 32  # of a document that a greedy text begins with
GREEDY_TOKENS = 64
LEAST_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """What is read and asked: documents of equal length, and questions."""

    documents: Sequence[Sequence[int]]
    tasks: Sequence[Task]

    @classmethod
    def draw(cls, model: OpenModel, num_documents: int = 16, document_tokens: int = 256, num_tasks: int = 12, seed: int = 0) -> "Sample":
        """Of the project's own prose, and `num_tasks` questions of each kind."""
        return cls(documents(model.tokenizer, num_documents, document_tokens), make_tasks(num_tasks, seed))


@dataclass(frozen=True, slots=True)
class Quality:
    """What was measured of one format. `change` is measured less reference, paired."""

    kv_cache_dtype: str
    bytes_per_token: int | None  # None: a scheme that nobody has counted
    compute: str
    reference: str
    num_documents: int
    num_tokens: int  # that were predicted
    perplexity: Interval
    perplexity_ratio: Interval
    kl: Interval
    same_best: Interval  # share of tokens where the most likely next token is the reference's
    agreement: Interval
    task_score: Interval
    task_change: Interval
    scores: Mapping[str, float]  # of each kind of task


def measure(model: str | Path | OpenModel | None, kv_cache_dtype: str | Scheme, **options: Any) -> Quality:
    """Measure one format; the options are those of `measure_all`."""
    return measure_all(model, [kv_cache_dtype], **options)[0]


def measure_all(
    model: str | Path | OpenModel | None,
    kv_cache_dtypes: Sequence[str | Scheme],
    *,
    reference: str = "bf16",
    compute: str | None = None,
    sample: Sample | None = None,
    seed: int = 0,
) -> list[Quality]:
    """Measure formats beside one reference: the model with cache and computation in `reference` (fp32, bf16 or fp16).

    compute: the compute type of the measured side; None: the reference's, so that only the cache differs.
    """
    model = model if isinstance(model, OpenModel) else OpenModel.from_name(model)
    sample = sample or Sample.draw(model, seed=seed)
    compute = compute or reference
    for name in (reference, compute):
        if name not in DTYPES:
            raise ValueError(f"compute type {name!r} is not known; known: {', '.join(DTYPES)}")
    decoders = {name: model.decoder(DTYPES[name]) for name in {reference, compute}}
    num_blocks = max(LEAST_BLOCKS, DOCUMENTS_AT_ONCE * -(-max(map(len, sample.documents)) // BLOCK_SIZE))
    base = make_runner(model, decoders[reference], reference, reference, num_blocks)
    measured = [make_runner(model, decoders[compute], compute, name, num_blocks) for name in kv_cache_dtypes]
    read = compare_distributions(base, measured, sample.documents)
    texts = [_greedy_texts(model, runner, sample.documents) for runner in (base, *measured)]
    marks = [_marks(model, runner, sample.tasks) for runner in (base, *measured)]
    qualities = []
    for i, name in enumerate(kv_cache_dtypes):
        numbers = {**_read_intervals(read[i], seed), **_text_intervals(texts[0], texts[i + 1], seed)}
        numbers |= _task_intervals(sample.tasks, marks[0], marks[i + 1], seed)
        qualities.append(Quality(*labels(model.config, name), compute, reference, len(sample.documents), **numbers))
    return qualities


# --- reading documents ----------------------------------------------------------------------------

NLL, REFERENCE_NLL, KL, SAME_BEST, COUNT = range(5)  # what is summed over the tokens of a document


@torch.inference_mode()
def compare_distributions(
    base: ModelRunner, measured: Sequence[ModelRunner], texts: Sequence[Sequence[int]], chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Read documents on all runners and compare each one's next-token distributions with those of `base`.

    Returns sums over tokens: [measured, documents, (nll, nll of the reference, kl, same best token, tokens)] float64
    """
    sums = torch.zeros(len(measured), len(texts), 5, dtype=torch.float64)
    for batch in chunks(texts, chunk_tokens):
        expected = _logits(base, batch)
        for i, runner in enumerate(measured):
            for name, logits in _logits(runner, batch).items():
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


def _logits(runner: ModelRunner, batch: ScheduledBatch) -> dict[str, Tensor]:
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


def _read_intervals(sums: Tensor, seed: int) -> dict[str, Any]:
    """sums: [documents, 5]"""
    surplus = torch.stack((sums[:, NLL] - sums[:, REFERENCE_NLL], sums[:, COUNT]), dim=1)
    return {
        "num_tokens": int(sums[:, COUNT].sum()),
        "perplexity": bootstrap(sums[:, [NLL, COUNT]], exp_of_ratio, seed),
        "perplexity_ratio": bootstrap(surplus, exp_of_ratio, seed),
        "kl": bootstrap(sums[:, [KL, COUNT]], ratio_of_sums, seed),
        "same_best": bootstrap(sums[:, [SAME_BEST, COUNT]], ratio_of_sums, seed),
    }


# --- writing texts --------------------------------------------------------------------------------


def greedy(
    model: OpenModel, runner: ModelRunner, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], stops: bool
) -> list[list[int]]:
    """The engine's greedy answers, all prompts served together. A request that fails (NaN) gives what it has so far."""
    blocks = BlockManager(runner.cache.num_blocks, BLOCK_SIZE, prefix_caching=True)
    limits = ModelLimits(model.config.max_positions, model.config.vocab_size, model.tokenizer.eos_ids)
    engine = Engine(Scheduler(SchedulerConfig(), blocks), runner, WallClock(), limits)
    params = [SamplingParams(max_tokens=most, ignore_eos=not stops) for most in max_tokens]
    added = [engine.add(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    while engine.has_work:
        engine.step()
    return [request.output_ids for request in added]


def _greedy_texts(model: OpenModel, runner: ModelRunner, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    prompts = [text[:PROMPT_TOKENS] for text in texts]
    return greedy(model, runner, prompts, [GREEDY_TOKENS] * len(prompts), stops=False)


def num_agreeing(expected: Sequence[int], got: Sequence[int]) -> int:
    """Tokens before the first difference. Behind it two texts are about different things, and equal tokens say nothing.

    >>> num_agreeing([1, 2, 3, 4], [1, 2, 9, 4])
    2
    """
    return next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))


def _text_intervals(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]], seed: int) -> dict[str, Interval]:
    shares = [[num_agreeing(a, b) / GREEDY_TOKENS, 1.0] for a, b in zip(expected, got, strict=True)]
    return {"agreement": bootstrap(torch.tensor(shares, dtype=torch.float64), ratio_of_sums, seed)}


# --- answering questions --------------------------------------------------------------------------


def _marks(model: OpenModel, runner: ModelRunner, tasks: Sequence[Task]) -> list[bool]:
    """Which questions are answered exactly: the first line of the greedy answer, no more and no less."""
    encode = model.tokenizer.encode
    most = [len(encode(f" {task.answer}\n")) for task in tasks]
    answers = greedy(model, runner, [encode(task.prompt) for task in tasks], most, stops=True)
    lines = [model.tokenizer.decode(ids).split("\n")[0].strip() for ids in answers]
    return [line == task.answer for line, task in zip(lines, tasks, strict=True)]


def _task_intervals(tasks: Sequence[Task], expected: Sequence[bool], got: Sequence[bool], seed: int) -> dict[str, Any]:
    parts = torch.tensor([[b, b - a, 1.0] for a, b in zip(expected, got, strict=True)], dtype=torch.float64).view(-1, 3)
    by_kind = {kind: [mark for task, mark in zip(tasks, got, strict=True) if task.kind == kind] for kind in {t.kind: 0 for t in tasks}}
    return {
        "task_score": bootstrap(parts[:, [0, 2]], ratio_of_sums, seed),
        "task_change": bootstrap(parts[:, [1, 2]], ratio_of_sums, seed),
        "scores": {kind: sum(marks) / len(marks) for kind, marks in by_kind.items()},
    }


# --- words ----------------------------------------------------------------------------------------


def table(qualities: Sequence[Quality]) -> str:
    """A line for each format."""
    heads = ("KV cache", "compute", "bytes/token", "perplexity", "ratio", "KL, nats", "same best", "agreement", "tasks", "change")
    rows = [heads, *(_cells(q) for q in qualities)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cells(q: Quality) -> tuple[str, ...]:
    size = "" if q.bytes_per_token is None else f"{q.bytes_per_token:,}"
    return (
        q.kv_cache_dtype,
        q.compute,
        size,
        q.perplexity.words(2),
        q.perplexity_ratio.words(4),
        q.kl.words(5),
        q.same_best.words(3),
        q.agreement.words(2),
        q.task_score.words(2),
        q.task_change.words(2),
    )
