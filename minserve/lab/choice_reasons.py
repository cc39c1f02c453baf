"""Why each part of a recommendation is as it is: one sentence a choice, each with the number that decides.

Why: a setting without its reason is a superstition. Every sentence here compares with what was not chosen, by the same planner, or says
which limit a number comes from.

Invariant: a reason's numbers are those of the option and of the others that were found for the same case; none is written by hand.

Taught in notebook 14.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minserve.lab.explorer import duration, size
from minserve.lab.options import MOST_USE, Case, Expected, Option, ladder
from minserve.sim.planner import Plan, share_out


@dataclass(frozen=True, slots=True)
class Reason:
    """One choice: what, its value, and why in one sentence with a number."""

    choice: str
    value: str
    why: str


def reasons_for(case: Case, option: Option, expected: Expected, found: Sequence[Option]) -> Iterator[Reason]:
    """All reasons, in the order in which one would decide."""
    yield _weights(case, option, found)
    yield _kv(case, option, found)
    yield _cards_a_copy(option, found)
    yield _fraction(option.plan)
    yield _cap(case, option.plan)
    yield _token_budget(option, found)
    yield _policy(case, option, expected)
    yield _copies(case, option, expected)
    yield from _expectations(case, option, expected)


# --- formats --------------------------------------------------------------------------------------


def _weights(case: Case, option: Option, found: Sequence[Option]) -> Reason:
    cost, rungs = option.plan.cost, ladder(case.device)
    plain, lowest = rungs[0][0], len(rungs) - 1
    taken = f"{size(cost.stored_weight_bytes)} of {size(case.device.memory_bytes)} on each card"
    if cost.weights == plain:
        other = _instead("8 bits", _fewest(found, range(option.rung + 1, lowest)), option)
        return Reason("weights", cost.weights, f"they take {taken}; {other}.")
    other = _instead(plain, _fewest(found, [rung for rung, (weights, _) in enumerate(rungs) if weights == plain]), option)
    test = "; 4 bits ask for a test of quality first" if option.rung == lowest else ""
    return Reason("weights", cost.weights, f"they take {taken}; {other}{test}.")


def _kv(case: Case, option: Option, found: Sequence[Option]) -> Reason:
    cost, rungs = option.plan.cost, ladder(case.device)
    kept = f"a token keeps {cost.kv_bytes_per_token:,.0f} bytes on a card, a request {size(option.plan.request_bytes)}"
    others = [rung for rung, (weights, kv) in enumerate(rungs) if weights == cost.weights and kv != cost.kv]
    if not others:
        return Reason("KV cache", cost.kv, f"{kept}; whoever needs 4-bit weights has no room for KV in 16 bits.")
    name = "8 bits" if cost.kv == rungs[0][1] else rungs[0][1]
    return Reason("KV cache", cost.kv, f"{kept}; {_instead(name, _fewest(found, others), option)}.")


def _fewest(found: Sequence[Option], rungs: Iterable[int]) -> int | None:
    """The fewest cards that serve the case in formats of these rungs."""
    wanted = set(rungs)
    return min((option.num_cards for option in found if option.rung in wanted), default=None)


def _instead(name: str, fewest: int | None, option: Option) -> str:
    if fewest is None:
        return f"{name} would not meet the case"
    return f"{name} would take {_cards(fewest)}{' too' if fewest == option.num_cards else f', not {option.num_cards:,}'}"


# --- cards and memory -----------------------------------------------------------------------------


def _cards_a_copy(option: Option, found: Sequence[Option]) -> Reason:
    num_devices = option.plan.cost.num_devices
    fewest: dict[int, int] = {}
    for other in (o for o in found if o.rung == option.rung):
        n = other.plan.cost.num_devices
        fewest[n] = min(fewest.get(n, other.num_cards), other.num_cards)
    smaller = "" if num_devices == 1 or min(fewest) < num_devices else "fewer do not hold the model or miss a limit; "
    counts = ", ".join(f"{count:,} with {n}" for n, count in sorted(fewest.items()))
    return Reason("cards a copy (tensor parallel)", str(num_devices), f"{smaller}by cards a copy, the load takes {counts}.")


def _fraction(made: Plan) -> Reason:
    fraction = min(0.98, made.memory_fraction + 0.05)
    more = share_out(made.cost, made.context_tokens, fraction, token_budget=made.token_budget)
    gained = (more.num_blocks - made.budget.num_blocks) * made.block_size
    reserve = made.budget.activation_bytes + made.budget.runtime_bytes
    why = f"a step's activations and the runtime have {size(reserve)} inside it; {fraction:.2f} would hold {gained:,} tokens more"
    return Reason("memory fraction", f"{made.memory_fraction:.2f}", f"{why} and leave {size(more.headroom_bytes)} for surprises.")


# --- the batch ------------------------------------------------------------------------------------


def _cap(case: Case, made: Plan) -> Reason:
    limits = {"TTFT": duration(case.slo_ttft_s), "TPOT": duration(case.slo_tpot_s)}
    by = made.limited_by
    words = {"memory": f"{made.num_requests:,} requests fit into memory", "step": f"a step of {made.token_budget:,} tokens feeds no more"}
    first = words.get(by) or f"with one more, {by} passes {limits[by]}"
    others = ", ".join(f"{name} {count:,}" for name, count in made.limits.items() if name != by)
    return Reason("cap (requests at once)", f"{made.batch:,}", f"{first}; the other limits allow: {others}.")


def _token_budget(option: Option, found: Sequence[Option]) -> Reason:
    made = option.plan
    alike = (o for o in found if o.rung == option.rung and o.plan.cost.num_devices == made.cost.num_devices)
    rates = ", ".join(f"{o.capacity_per_s:.2f} with {o.plan.token_budget:,}" for o in alike if o.plan.token_budget != made.token_budget)
    why = f"a full copy then carries {option.capacity_per_s:.2f} requests/s within both limits{f' ({rates})' if rates else ''}."
    return Reason("tokens a step", f"{made.token_budget:,}", why)


def _policy(case: Case, option: Option, expected: Expected) -> Reason:
    life_s = expected.ttft_s + case.output_tokens * expected.tpot_s
    why = (
        f"a request takes {duration(life_s)}; a static batch would keep a newcomer at the door for half of that, against a TTFT of "
        f"{duration(case.slo_ttft_s)}. Above {option.num_replicas * option.capacity_per_s:.2f} requests/s, turn away who would come late."
    )
    return Reason("policy", "continuous", why)


# --- the load -------------------------------------------------------------------------------------


def _copies(case: Case, option: Option, expected: Expected) -> Reason:
    why = (
        f"{case.rate_per_s:g} requests/s, and a full copy carries {option.capacity_per_s:.2f}: they are {expected.use:.0%} busy; "
        f"random arrivals come in crowds, so {MOST_USE:.0%} is the most that is planned."
    )
    return Reason("copies", f"{option.num_replicas:,} ({_cards(option.num_cards)})", why)


def _expectations(case: Case, option: Option, expected: Expected) -> Iterator[Reason]:
    full = option.plan.full
    assert full is not None, "an option has a batch"
    why = f"of it {duration(expected.wait_s)} in line; later than the {duration(case.slo_ttft_s)} asked for: {expected.late_share:.1%}."
    yield Reason("TTFT, mean", duration(expected.ttft_s), why)
    asked = duration(case.slo_tpot_s)
    yield Reason(
        "TPOT, mean",
        duration(expected.tpot_s),
        f"{expected.num_running} run on average; at the cap {duration(full.tpot_s)}, asked for: {asked}.",
    )
    tokens_per_s, most = case.rate_per_s * case.output_tokens, option.num_replicas * full.output_tokens_per_s
    yield Reason("output tokens/s", f"{tokens_per_s:,.0f}", f"what the load asks for; full copies give {most:,.0f}.")
    if case.price_per_hour is not None:
        hourly = case.price_per_hour * option.num_cards
        price, best = (hourly / 3600 / rate * 1e6 for rate in (tokens_per_s, most))
        why = f"{hourly:g} an hour for {_cards(option.num_cards)}; {best:.2f} if all copies were always full."
        yield Reason("cost of a million output tokens", f"{price:.2f}", why)


def _cards(count: int) -> str:
    return f"{count:,} card{'s'[: count != 1]}"
