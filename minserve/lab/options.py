"""The ways to serve a case: formats, cards that share a copy, tokens a step, and how many copies carry the load.

Why: a planner answers "what does this setting give?". Whoever runs a service asks the other way round, "which setting do I take?", and
the answer is a search over few things, judged by the planner, the cost model, and a line in which people wait:

    capacity   what a copy carries when it is always full, within both limits
    the line   requests come at random, so they come in crowds: a newcomer waits for the prompts before it, and where few fit for a seat
    copies     so many that each is at most 80 % busy, and at most one first token in twenty comes late

Invariant: every option fits, and meets both limits by the cost model at its cap.

Taught in notebook 14.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from minserve.sim.devices import DeviceSpec
from minserve.sim.pace import Pace, largest, pace
from minserve.sim.planner import DoesNotFit, Plan, plan
from minserve.sim.shapes import ModelShape

MOST_USE = 0.8  # of what a copy can carry: random arrivals come in crowds, and at 1 the queue has no end
MOST_LATE = 0.05  # of the requests, that may have their first token later than asked for
TOKEN_BUDGETS = (512, 1024, 2048, 4096, 8192)
CARD_COUNTS = (1, 2, 4, 8)  # that share one copy of the model
MOST_PROMPT_STEPS = 32  # budgets that would cut a prompt into more pieces are not tried
HEAD_BITS = 16  # of the output layer beside quantized weights, as production engines keep it
FP8_CARDS = ("h100", "h200", "l4", "rtx-4090")  # multiply in fp8; others take int8 for 8 bits
NO_BF16_CARDS = ("t4",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What somebody has and wants. Requests have `context_tokens` in all, of which `output_tokens` are answer."""

    shape: ModelShape
    device: DeviceSpec
    context_tokens: int
    output_tokens: int
    rate_per_s: float  # requests
    slo_ttft_s: float
    slo_tpot_s: float
    price_per_hour: float | None = None  # of one card
    num_cards: int | None = None  # that there are; None: as many as it takes

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "slo_ttft_s", "slo_tpot_s", "price_per_hour", "num_cards"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens - self.output_tokens


@dataclass(frozen=True, slots=True)
class Expected:
    """What the formula says of one copy at its share of the load."""

    num_running: int
    wait_s: float  # mean time in the two lines
    ttft_s: float  # mean: the lines, half a step until the running one is over, the steps of the prompt
    tpot_s: float
    use: float  # share of what a copy could carry
    late_share: float  # of the requests, whose first token comes later than asked for


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve a case: a plan for a copy of the model, and so many copies."""

    rung: int  # of the ladder of formats
    plan: Plan
    num_replicas: int

    @property
    def num_cards(self) -> int:
        return self.num_replicas * self.plan.cost.num_devices

    @property
    def capacity_per_s(self) -> float:
        return capacity_per_s(self.plan)


def capacity_per_s(made: Plan) -> float:
    """Requests a second that one copy carries when it is always full."""
    assert made.full is not None, "an option has a batch"
    return made.full.output_tokens_per_s / made.output_tokens


# --- the search -----------------------------------------------------------------------------------


def ladder(device: DeviceSpec) -> tuple[tuple[str, str], ...]:
    """Formats of weights and KV, the safest first; 8 bits are fp8 where the card multiplies in it, else int8."""
    plain = "fp16" if device.name in NO_BF16_CARDS else "bf16"
    eight = "fp8" if device.name in FP8_CARDS else "int8"
    return (plain, plain), (plain, eight), (eight, plain), (eight, eight), ("awq-int4-g128", eight)


def plans(case: Case, *, limited: bool = True) -> Iterator[tuple[int, Plan]]:
    """Every plan that fits into memory, with its rung; without limits, whether or not it is fast enough."""
    ttft_s, tpot_s = (case.slo_ttft_s, case.slo_tpot_s) if limited else (None, None)
    counts = [n for n in CARD_COUNTS if case.shape.num_heads % n == 0 and n <= (case.num_cards or n)]
    budgets = [n for n in TOKEN_BUDGETS if case.prompt_tokens <= MOST_PROMPT_STEPS * n]
    for rung, (weights, kv) in enumerate(ladder(case.device)):
        for num_devices in counts:
            for token_budget in budgets or TOKEN_BUDGETS[-1:]:
                try:
                    yield (
                        rung,
                        plan(
                            case.shape,
                            case.device,
                            context_tokens=case.context_tokens,
                            output_tokens=case.output_tokens,
                            weights=weights,
                            kv=kv,
                            num_devices=num_devices,
                            head_bits=HEAD_BITS,
                            token_budget=token_budget,
                            slo_ttft_s=ttft_s,
                            slo_tpot_s=tpot_s,
                        ),
                    )
                except DoesNotFit:
                    break  # a larger step leaves even less


def options(case: Case) -> list[Option]:
    """Every way to serve the case that keeps to both limits, however many cards it takes."""
    return [Option(rung, made, copies_for(case, made)) for rung, made in plans(case) if made.full is not None]


# --- the load -------------------------------------------------------------------------------------


def expect(case: Case, made: Plan, num_replicas: int) -> Expected:
    """What one copy does at its share of the load: as many run as carry it, and a newcomer stands in a line."""
    share_per_s = case.rate_per_s / num_replicas

    def at(batch: int) -> Pace:
        return pace(made.cost, batch, made.prompt_tokens, made.output_tokens, made.token_budget)

    too_few = largest(made.batch, lambda batch: at(batch).output_tokens_per_s < share_per_s * made.output_tokens)
    now, use = at(min(made.batch, too_few + 1)), share_per_s / capacity_per_s(made)
    lines = (
        Line(1, share_per_s * now.ttft_s, now.ttft_s),  # for the prompts before one's own
        Line(made.batch, use, now.ttft_s + made.output_tokens * now.tpot_s),  # for a seat
    )
    wait_s, ready_s = sum(line.mean_s for line in lines), now.decode_s / 2 + now.ttft_s
    late_share = min(1.0, sum(line.share_waiting_longer(case.slo_ttft_s - ready_s) for line in lines))
    return Expected(now.batch, wait_s, wait_s + ready_s, now.tpot_s, use, late_share)


@dataclass(frozen=True, slots=True)
class Line:
    """Random arrivals before so many seats, each taken for equally long (M/D/c): Sakasegawa's approximation of the mean wait.

    >>> one, many = Line(1, 0.5, 1.0), Line(32, 0.8, 8.0)
    >>> one.mean_s, f"{many.mean_s:.3f} s", f"{one.share_waiting_longer(1.0):.3f}"
    (0.5, '0.127 s', '0.184')
    """

    num_seats: int
    use: float  # share of the time that a seat is taken
    seconds: float  # for which it is taken

    @property
    def share_waiting(self) -> float:
        return self.use ** (math.sqrt(2 * (self.num_seats + 1)) - 1) if self.use < 1 else 1.0

    @property
    def mean_s_of_waiting(self) -> float:
        """Mean wait of those who wait at all."""
        return self.seconds / (2 * self.num_seats * (1 - self.use)) if self.use < 1 else math.inf

    @property
    def mean_s(self) -> float:
        return self.share_waiting * self.mean_s_of_waiting

    def share_waiting_longer(self, seconds: float) -> float:
        """As if the waits of those who wait were exponential."""
        return self.share_waiting * math.exp(-max(0.0, seconds) / self.mean_s_of_waiting)


def copies_for(case: Case, made: Plan) -> int:
    """So many that each is at most 80 % busy, and at most one first token in twenty comes late."""
    count = math.ceil(case.rate_per_s / (MOST_USE * capacity_per_s(made)))
    while expect(case, made, count).late_share > MOST_LATE:
        count += 1 + count // 8
    return count
