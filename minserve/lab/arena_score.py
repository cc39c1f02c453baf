"""What a run in the arena is worth: one row of numbers a trace, and the card that holds them.

Why: no single number says which policy is better. Goodput asks whether the limits were met, the tails by how much they were missed, the
rate what the device was used for, fairness whether some paid for the others, and recomputed tokens what was thrown away on the way.

Goodput is counted over a window that belongs to the trace, not to the run: who sends requests away is done sooner, and should gain
nothing by that. Tails are those of the answered requests; a request that was sent away is missing in goodput and is a 0 in fairness.

Invariant: every number is a pure function of the engine's records; sums of fractions are exact before they are rounded.

Taught in notebook 10.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minserve.core.metrics import goodput
from minserve.core.records import RequestRecord
from minserve.core.report import box
from minserve.core.request import FinishReason
from minserve.core.trace import Trace
from minserve.lab.arena_traces import CONFIG, ArenaTrace
from minserve.sim.cost_model import CostModel, decode_work, row_work

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace with one seed."""

    trace: str
    seed: int
    goodput_per_s: float  # requests within the trace's limits, over the trace's window
    num_within: int
    num_requests: int
    ttft_p99_s: float | None  # of those that were answered
    tpot_p99_s: float | None
    output_tokens_per_s: float
    fairness: float
    num_recomputed_tokens: int
    num_shed: int
    num_preemptions: int
    wall_s: float

    @property
    def within_share(self) -> float:
        return self.num_within / self.num_requests


@dataclass(frozen=True, slots=True)
class Scorecard:
    """A policy's rows, on published seeds and on one that it cannot have prepared for. With a foul, they count for nothing."""

    policy: str
    rows: tuple[Row, ...]
    unseen: tuple[Row, ...] = ()
    foul: str | None = None

    @property
    def within_share(self) -> float:
        """Share of requests within the limits, every trace and seed weighing the same. 0 after a foul."""
        return 0.0 if self.foul or not self.rows else math.fsum(row.within_share for row in self.rows) / len(self.rows)

    @property
    def unseen_share(self) -> float:
        """The same on the seed that was not published."""
        return 0.0 if self.foul or not self.unseen else math.fsum(row.within_share for row in self.unseen) / len(self.unseen)

    def row(self, trace: str, seed: int | None = None) -> Row:
        """The row of this trace; without a seed, of the first one."""
        return next(row for row in self.rows if row.trace == trace and seed in (None, row.seed))

    def table(self) -> str:
        """The card in words."""
        lines = [f"{self.policy}: {self.within_share:.1%} within the limits"]
        if self.foul:
            lines = [f"{self.policy} is disqualified: {self.foul}"]
        elif self.unseen:
            lines[0] += f"; on seed {self.unseen[0].seed}, which was not published, {self.unseen_share:.1%}"
        return "\n".join([*lines, box([HEADS, *map(_cells, (*self.rows, *self.unseen))])] if self.rows else lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "within_share": self.within_share, "unseen_share": self.unseen_share}

    def __str__(self) -> str:
        return self.table()


HEADS = (
    "trace",
    "seed",
    "goodput/s",
    "within",
    "TTFT p99",
    "TPOT p99",
    "tokens/s",
    "fairness",
    "recomputed",
    "sent away",
)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.trace,
        str(row.seed),
        f"{row.goodput_per_s:.2f}",
        f"{row.num_within} of {row.num_requests}",
        _seconds(row.ttft_p99_s),
        _seconds(row.tpot_p99_s),
        f"{row.output_tokens_per_s:,.0f}",
        f"{row.fairness:.3f}",
        f"{row.num_recomputed_tokens:,}",
        str(row.num_shed),
    )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def ranking(cards: Sequence[Scorecard]) -> str:
    """Several cards as one table, the best first: share of requests within the limits, trace by trace."""
    names = list(dict.fromkeys(row.trace for card in cards for row in card.rows))
    ranked = sorted(cards, key=lambda card: (card.foul is not None, -card.within_share))
    rows = [("policy", *names, "all", "unseen seed", "fairness", "recomputed")]
    for card in ranked:
        if card.foul:
            rows.append((card.policy, *["-"] * len(names), "disqualified", "-", "-", "-"))
            continue
        shares = [_mean([row.within_share for row in card.rows if row.trace == name]) for name in names]
        fairness, recomputed = _mean([row.fairness for row in card.rows]), sum(row.num_recomputed_tokens for row in card.rows)
        unseen = f"{card.unseen_share:.1%}" if card.unseen else "-"
        cells = [f"{share:.0%}" for share in shares]
        rows.append((card.policy, *cells, f"{card.within_share:.1%}", unseen, f"{fairness:.3f}", f"{recomputed:,}"))
    return box(rows)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


# --- from records to a row ------------------------------------------------------------------------


def score(trace: ArenaTrace, seed: int, num_requests: int, run: Trace, cost: CostModel) -> Row:
    """The row of a run. `num_requests` counts those too that never came, since the answer before them was refused."""
    records, slo, summary = list(run.requests.values()), trace.slo, run.summary()
    met = goodput(records, 1.0, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, latency_s=slo.latency_s)
    shares = [served_share(record, cost) for record in records]
    return Row(
        trace=trace.name,
        seed=seed,
        goodput_per_s=met / trace.window_s,
        num_within=int(met),
        num_requests=num_requests,
        ttft_p99_s=summary.ttft_p99_s,
        tpot_p99_s=summary.tpot_p99_s,
        output_tokens_per_s=summary.output_tokens_per_s,
        fairness=jain([*shares, *[0.0] * (num_requests - len(shares))]),
        num_recomputed_tokens=summary.num_recomputed_tokens,
        num_shed=sum(record.finish_reason == FinishReason.SHED for record in records),
        num_preemptions=summary.num_preemptions,
        wall_s=summary.wall_s,
    )


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 if all get the same, 1/n if one gets everything, 0 if nobody gets anything.

    >>> jain([2.0, 2.0, 2.0]), jain([1.0, 0.0, 0.0, 0.0]), jain([1.0, 2.0, 3.0])
    (1.0, 0.25, 0.8571428571428571)
    """
    values = list(values)
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 0.0


def served_share(record: RequestRecord, cost: CostModel) -> float:
    """The time a request would take on an empty server, over the time it took: 1 is as good as it gets, 0 is no answer."""
    latency_s = record.latency_s
    if latency_s is None or record.finish_reason not in ANSWERED:
        return 0.0
    return min(1.0, alone_s(cost, record.num_prompt_tokens, record.num_output_tokens) / latency_s)


def alone_s(cost: CostModel, num_prompt_tokens: int, num_output_tokens: int) -> float:
    """Seconds of a request on an empty server, without cached blocks; decodes cost what the one half-way through costs."""
    seconds, budget = 0.0, CONFIG.token_budget
    for start in range(0, num_prompt_tokens, budget):
        seconds += cost.of(row_work(start, min(budget, num_prompt_tokens - start))).seconds
    middle = num_prompt_tokens + (num_output_tokens + 1) // 2
    return seconds + (num_output_tokens - 1) * cost.of(decode_work(1, middle)).seconds
