"""From a case to a deployment: model, card, lengths, load and limits -> formats, cards, settings, copies, cost; each with its reason.

Why: of the many ways to serve a case (see `options.py`), one is recommended by rules that can be read and argued with:

    formats    the safest rung of a ladder; a lower one only where it saves a tenth of the cards, 4-bit weights only where nothing else fits
    cards      as few as carry the load; of equals, the copies that are smallest
    cap        the largest batch that keeps to both limits; a smaller one would turn room away
    tokens     the step size that carries most within the limits

Invariant: whatever is recommended fits and meets both limits by the cost model; what is refused says which number stands in the way,
and the single changes that remove it.

Taught in notebook 14.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from minserve.core.metrics import Summary, goodput
from minserve.lab.choice_reasons import Reason, reasons_for
from minserve.lab.options import CARD_COUNTS, HEAD_BITS, MOST_USE, Case, Expected, Option, expect, ladder, options, plans
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.engine_flags import EngineSettings, engine_settings
from minserve.sim.planner import Plan
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import Lengths, make_workload, poisson

WORTH = 0.9  # a lower rung has to bring the cards down to this share


@dataclass(frozen=True, slots=True)
class Recommendation:
    """An option for a case, what to expect of it, and the reasons."""

    case: Case
    option: Option
    expected: Expected
    reasons: tuple[Reason, ...]

    @property
    def plan(self) -> Plan:
        return self.option.plan

    @property
    def price_per_million_tokens(self) -> float | None:
        """Of output tokens, at the load of the case."""
        if self.case.price_per_hour is None:
            return None
        return self.case.price_per_hour * self.option.num_cards / 3600 / (self.case.rate_per_s * self.case.output_tokens) * 1e6

    def engines(self) -> dict[str, EngineSettings]:
        """The plan in the flags of five engines."""
        return engine_settings(self.plan)


class NothingFits(ValueError):
    """No option serves the case. The message has the number in the way; `changes` the single changes that help."""

    def __init__(self, reason: str, changes: Sequence[str]):
        self.reason, self.changes = reason, tuple(changes)
        helps = f"What would help: {'; or '.join(changes)}." if changes else "No single change of a number helps: take a smaller model."
        super().__init__(f"nothing fits because {reason}. {helps}")


def recommend(case: Case) -> Recommendation:
    """The deployment for the case. Raises NothingFits; ValueError for lengths that make no sense."""
    found = options(case)
    option = choose(case, found)
    if option is None:
        raise _misfit(case, found)
    expected = expect(case, option.plan, option.num_replicas)
    return Recommendation(case, option, expected, tuple(reasons_for(case, option, expected, found)))


def choose(case: Case, found: Sequence[Option]) -> Option | None:
    """The option that the rules of this file prefer; None if all take more cards than there are."""
    fitting = [option for option in found if option.num_cards <= (case.num_cards or math.inf)]
    lowest = len(ladder(case.device)) - 1
    fitting = [option for option in fitting if option.rung < lowest] or fitting
    best: Option | None = None
    for option in sorted(fitting, key=_preference):
        if best is None or (option.rung > best.rung and option.num_cards <= WORTH * best.num_cards):
            best = option
    return best


def _preference(option: Option) -> tuple[float, ...]:
    made = option.plan
    return option.rung, option.num_cards, made.cost.num_devices, -option.capacity_per_s, made.token_budget


# --- the check ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """What the real scheduler did with one copy's share of the load, on the cost model's clock."""

    summary: Summary
    share_within: float  # of the requests, those that met both limits
    goodput_per_s: float  # of one copy


def check(made: Recommendation, *, num_requests: int | None = None, seed: int = 0) -> Checked:
    """Serve one copy's share of the load, with random arrivals, and count who met both limits."""
    case, ours = made.case, made.plan
    num_requests = num_requests or max(16, min(100, 500_000 // case.context_tokens))
    engine = make_engine(
        ours.cost,
        num_blocks=ours.budget.num_blocks,
        block_size=ours.block_size,
        token_budget=ours.token_budget,
        max_running=ours.batch,
        prefix_caching=False,
    )
    lengths = Lengths.constant(case.prompt_tokens), Lengths.constant(case.output_tokens)
    arrivals = poisson(case.rate_per_s / made.option.num_replicas)
    trace = simulate(engine, make_workload(num_requests, *lengths, arrivals, seed))
    summary = trace.summary()
    rate_per_s = goodput(trace.requests.values(), summary.wall_s, ttft_s=case.slo_ttft_s, tpot_s=case.slo_tpot_s)
    return Checked(summary, rate_per_s * summary.wall_s / num_requests, rate_per_s)


# --- when nothing fits ----------------------------------------------------------------------------


def _misfit(case: Case, found: Sequence[Option]) -> NothingFits:
    """Which number stands in the way: memory, a limit, or the number of cards."""
    if found:
        return _too_few_cards(case, found)
    fitting = [made for _, made in plans(case, limited=False)]
    return _too_slow(case, fitting) if fitting else _too_large(case)


def _too_few_cards(case: Case, found: Sequence[Option]) -> NothingFits:
    assert case.num_cards is not None, "without a number of cards some option is chosen"
    needed = min(option.num_cards for option in found)
    carried_per_s = max(case.num_cards // o.plan.cost.num_devices * MOST_USE * o.capacity_per_s for o in found)
    there = "is 1" if case.num_cards == 1 else f"are {case.num_cards}"
    reason = f"{case.rate_per_s:g} requests/s within both limits take {needed} cards of this kind, and there {there}"
    load = next((rate for rate in _lower(carried_per_s) if choose_for(replace(case, rate_per_s=rate))), None)
    changes = [f"a load of {load:g} requests/s"] if load else []
    return NothingFits(reason, [*changes, f"{needed} cards", *_other_cards(case)])


def _lower(rate_per_s: float) -> Iterator[float]:
    """Rates from this one down, in two digits."""
    for share in (1.0, 0.9, 0.75, 0.5, 0.25):
        unit = 10.0 ** (math.floor(math.log10(rate_per_s * share)) - 1)
        yield round(math.floor(rate_per_s * share / unit) * unit, 6)


def choose_for(case: Case) -> Option | None:
    return choose(case, options(case))


def _too_slow(case: Case, fitting: Sequence[Plan]) -> NothingFits:
    """No copy answers even one request within both limits."""
    ttft_s, tpot_s = min(p.alone.ttft_s for p in fitting), min(p.alone.tpot_s for p in fitting)
    fast_enough = [p.alone.ttft_s for p in fitting if p.alone.tpot_s <= case.slo_tpot_s]
    steady_enough = [p.alone.tpot_s for p in fitting if p.alone.ttft_s <= case.slo_ttft_s]
    changes = [f"a TTFT of {_up(min(fast_enough))}"] if fast_enough else []
    changes += [f"a TPOT of {_up(min(steady_enough))}"] if steady_enough else []
    free = choose_for(replace(case, num_cards=None)) if case.num_cards else None
    changes += [f"{free.num_cards} cards"] if free else []
    if ttft_s > case.slo_ttft_s:
        reason = (
            f"a prompt of {case.prompt_tokens:,} tokens takes {_ms(ttft_s)} on an idle engine, and {_ms(case.slo_ttft_s)} are asked for"
        )
    elif tpot_s > case.slo_tpot_s:
        reason = f"a token takes {_ms(tpot_s)} when nobody else is served, and {_ms(case.slo_tpot_s)} are asked for"
    else:
        reason = f"no setting meets a TTFT of {_ms(case.slo_ttft_s)} and a TPOT of {_ms(case.slo_tpot_s)} together"
    return NothingFits(reason, [*changes, *_other_cards(case)])


def _too_large(case: Case) -> NothingFits:
    weights, kv = ladder(case.device)[-1]
    count = max(n for n in CARD_COUNTS if n <= (case.num_cards or n) and case.shape.num_heads % n == 0)
    cost = CostModel(case.shape, case.device, weights=weights, kv=kv, num_devices=count, head_bits=HEAD_BITS)
    reason = (
        f"even in {weights} the weights take {cost.stored_weight_bytes / 1e9:.1f} GB and one request's KV in {kv} "
        f"{cost.kv_bytes_per_token * case.context_tokens / 1e9:.2f} GB, beside 3 GB or more for a step, of the "
        f"{case.device.memory_bytes / 1e9:.0f} GB on {f'each of {count} x' if count > 1 else 'one'} {case.device.name}"
    )
    contexts = (case.context_tokens >> halvings for halvings in range(1, 10))
    shorter = (replace(case, context_tokens=c, output_tokens=min(case.output_tokens, c // 2)) for c in contexts if c >= 256)
    context = next((other.context_tokens for other in shorter if _fits(other)), None)
    more = next((n for n in CARD_COUNTS if n > count and _fits(replace(case, num_cards=n))), None)
    changes = [f"a context of {context:,} tokens"] if context else []
    changes += [f"{more} cards"] if more else []
    return NothingFits(reason, [*changes, *_other_cards(case)])


def _fits(case: Case) -> bool:
    return next(plans(case, limited=False), None) is not None


def _other_cards(case: Case) -> list[str]:
    """The slowest card of the catalogue that serves the case where this one does not."""
    for device in sorted(DEVICES.values(), key=lambda d: d.bytes_per_s * d.memory_bytes):
        is_larger = device.bytes_per_s * device.memory_bytes > case.device.bytes_per_s * case.device.memory_bytes
        if is_larger and choose_for(replace(case, device=device)) is not None:
            return [f"another card ({device.name})"]
    return []


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.{1 if seconds < 0.1 else 0}f} ms"


def _up(seconds: float) -> str:
    """Rounded up to two digits, so that what is named is enough."""
    unit = 10.0 ** (math.floor(math.log10(1e3 * seconds)) - 1)
    return f"{math.ceil(1e3 * seconds / unit) * unit:,g} ms"
