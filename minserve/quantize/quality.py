"""What a format costs in quality, of the weights, of the KV cache, or of both, measured against the model without it.

Four instruments, from the finest to the one that a user sees:

    kl           how far the next-token distribution moves, in nats a token: KL(reference || measured), mean over all tokens
    perplexity   exp of the mean surprise at the real next token, and its ratio to the reference's
    agreement    greedy texts of 64 tokens: the share before the first token that differs
    tasks        small questions with one right answer: the share answered exactly

Every number comes with a 95 % interval from resampling documents or prompts, paired with the reference where they are compared.

`reading.py` feeds the documents, through the engine's own paged path, and compares distributions; `writing.py` has the engine write
texts and answers. Weights are opened one subject at a time: a table of twenty formats takes the memory of two models.

Invariant: measured against itself, a format has a KL of 0, a ratio of 1 and an agreement of 1, exactly.

Taught in notebooks 08 and 09.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minserve.model.decoder import Decoder
from minserve.model.quantized_linear import Storage
from minserve.model.runner import ModelRunner
from minserve.model.sizing import DTYPES
from minserve.quantize.intervals import Interval, bootstrap, exp_of_ratio, ratio_of_sums
from minserve.quantize.prose import documents
from minserve.quantize.reading import COUNT, DOCUMENTS_AT_ONCE, KL, NLL, REFERENCE_NLL, SAME_BEST, Expected, compare_distributions
from minserve.quantize.subjects import BLOCK_SIZE, OpenModel, Scheme, labels, make_runner
from minserve.quantize.tasks import Task, make_tasks
from minserve.quantize.weight_subjects import WeightScheme, label, open_subject
from minserve.quantize.writing import GREEDY_TOKENS, greedy_texts, marks_of, num_agreeing

LEAST_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """What is read and asked: documents of equal length, and questions."""

    documents: Sequence[Sequence[int]]
    tasks: Sequence[Task]

    @classmethod
    def draw(
        cls,
        model: OpenModel,
        num_documents: int = 16,
        document_tokens: int = 256,
        num_tasks: int = 12,
        seed: int = 0,
        text: str | None = None,
    ) -> "Sample":
        """Of a text (None: the project's own prose), and `num_tasks` questions of each kind."""
        read = documents(model.tokenizer, num_documents, document_tokens, text)
        return cls(read, make_tasks(num_tasks, seed) if num_tasks else ())


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. None: as the reference has it."""

    weights: str | WeightScheme | None = None
    kv_cache_dtype: str | Scheme | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """What was measured of one subject. `change` is measured less reference, paired. A number that was left out is nan."""

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
    weights: str
    method: str | None  # how the weights' codes were chosen: rtn, gptq, awq; None where they are plain or on trial
    group: str  # inputs that share a scale
    bytes_per_weight: float | None  # of the layers' matrices


def measure(model: str | Path | OpenModel | None, subject: str | Scheme | WeightScheme | Subject, **options: Any) -> Quality:
    """Measure one format; the options are those of `measure_each`."""
    return measure_all(model, [subject], **options)[0]


def measure_all(
    model: str | Path | OpenModel | None, subjects: Sequence[str | Scheme | WeightScheme | Subject], **options: Any
) -> list[Quality]:
    """Measure formats beside one reference. A bare name is a format of the KV cache. The options are those of `measure_each`."""
    return list(measure_each(model, subjects, **options))


def measure_each(
    model: str | Path | OpenModel | None,
    subjects: Sequence[str | Scheme | WeightScheme | Subject],
    *,
    reference: str = "bf16",
    compute: str | None = None,
    sample: Sample | None = None,
    seed: int = 0,
    fast: bool = False,
) -> Iterator[Quality]:
    """Each subject in its turn, as soon as it is measured, beside the model with cache and computation in `reference`.

    reference: fp32, bf16 or fp16. compute: the compute type of the measured side; None: the reference's, so that only formats differ.
    fast: documents alone, no greedy texts and no questions.
    """
    model = model if isinstance(model, OpenModel) else OpenModel.from_name(model)
    for name in (reference, compute or reference):
        if name not in DTYPES:
            raise ValueError(f"compute type {name!r} is not known; known: {', '.join(DTYPES)}")
    subjects = [as_subject(subject) for subject in subjects]
    for subject in subjects:
        labels(model.config, subject.kv_cache_dtype or reference)  # a mistake is told now, not after half the table
    comparison = Comparison(model, sample or Sample.draw(model, seed=seed), reference, compute or reference, seed)
    for weights, group in groupby(subjects, key=lambda subject: subject.weights):
        yield from comparison.measure(weights, [subject.kv_cache_dtype for subject in group], fast=fast)


def as_subject(subject: str | Scheme | WeightScheme | Subject) -> Subject:
    """A bare format is one of the KV cache, a scheme says itself what it is for."""
    if isinstance(subject, Subject):
        return subject
    return Subject(weights=subject) if isinstance(subject, WeightScheme) else Subject(kv_cache_dtype=subject)


class Comparison:
    """The reference, what it says and writes, and the place where one decoder at a time is set beside it."""

    def __init__(self, model: OpenModel, sample: Sample, reference: str = "bf16", compute: str | None = None, seed: int = 0):
        self.model, self.sample, self.reference, self.compute, self.seed = model, sample, reference, compute or reference, seed
        self.num_blocks = max(LEAST_BLOCKS, DOCUMENTS_AT_ONCE * -(-max(map(len, sample.documents)) // BLOCK_SIZE))
        self.base = make_runner(model, model.decoder(DTYPES[reference]), reference, reference, self.num_blocks)
        self.expected = Expected(self.base, sample.documents)

    @cached_property
    def written(self) -> tuple[list[list[int]], list[bool]]:
        """The reference's greedy texts, and the marks of its answers."""
        return greedy_texts(self.model, self.base, self.sample.documents), marks_of(self.model, self.base, self.sample.tasks)

    def decoder(self, weights: str | WeightScheme | None) -> Decoder:
        """The measured side. None: the model as it is."""
        if weights is None:
            return self.base.decoder if self.compute == self.reference else self.model.decoder(DTYPES[self.compute])
        # By the numbers that the codes mean, at any number of rows. Both ways are the same up to rounding, where they change places is
        # measured, and a measured number would not be the same in every run. In fp32 torch's product by codes is slow, too.
        storage = Storage(max_code_rows=0)
        return Decoder(self.model.config, open_subject(self.model, weights), DTYPES[self.compute], storage=storage)

    def measure(
        self,
        weights: str | WeightScheme | None,
        kv_cache_dtypes: Sequence[str | Scheme | None] = (None,),
        fast: bool = False,
        decoder: Decoder | None = None,
    ) -> Iterator[Quality]:
        """Weights, with caches of several formats that read side by side. decoder: what `decoder(weights)` has given before."""
        kinds = [kind or self.reference for kind in kv_cache_dtypes]
        decoder = decoder or self.decoder(weights)
        runners = [make_runner(self.model, decoder, self.compute, kind, self.num_blocks) for kind in kinds]
        read = compare_distributions(self.expected, runners, self.sample.documents)
        for kind, runner, sums in zip(kinds, runners, read, strict=True):
            numbers = {**_read_intervals(sums, self.seed), **self._written_intervals(runner, fast)}
            counted = (*labels(self.model.config, kind), self.compute, self.reference, len(self.sample.documents))
            yield Quality(*counted, **numbers, **asdict(label(self.model, weights, self.compute)))

    def _written_intervals(self, runner: ModelRunner, fast: bool) -> dict[str, Any]:
        if fast:
            return {**_text_intervals((), (), self.seed), **_task_intervals((), (), (), self.seed)}
        texts, marks = self.written
        of_texts = _text_intervals(texts, greedy_texts(self.model, runner, self.sample.documents), self.seed)
        return of_texts | _task_intervals(self.sample.tasks, marks, marks_of(self.model, runner, self.sample.tasks), self.seed)


# --- the numbers of a line -------------------------------------------------------------------------


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


def _text_intervals(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]], seed: int) -> dict[str, Interval]:
    shares = [[num_agreeing(a, b) / GREEDY_TOKENS, 1.0] for a, b in zip(expected, got, strict=True)]
    return {"agreement": bootstrap(torch.tensor(shares, dtype=torch.float64), ratio_of_sums, seed)}


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
    """A line for each subject. Columns about weights stand there only if some are not as the reference has them."""
    rows = [_cells(quality) for quality in qualities]
    shown = [name for name in rows[0] if name not in WEIGHT_COLUMNS or any(q.weights != q.compute for q in qualities)]
    lines = [shown, *([row[name] for name in shown] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(shown))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


WEIGHT_COLUMNS = ("weights", "method", "group", "bytes/weight")


def _cells(q: Quality) -> dict[str, str]:
    numbers = (
        ("perplexity", q.perplexity, 2),
        ("ratio", q.perplexity_ratio, 4),
        ("KL, nats", q.kl, 5),
        ("same best", q.same_best, 3),
        ("agreement", q.agreement, 2),
        ("tasks", q.task_score, 2),
        ("change", q.task_change, 2),
    )
    return {
        "weights": q.weights,
        "method": q.method or "",
        "group": q.group,
        "bytes/weight": "" if q.bytes_per_weight is None else f"{q.bytes_per_weight:.3f}",
        "KV cache": q.kv_cache_dtype,
        "compute": q.compute,
        "bytes/token": "" if q.bytes_per_token is None else f"{q.bytes_per_token:,}",
        **{name: "" if math.isnan(number.value) else number.words(digits) for name, number, digits in numbers},
    }
