"""The arena: a policy of one's own, five loads, one scorecard.

A policy is a class with one or two methods of `FirstComeFirstServed` replaced; twenty lines are plenty:

    class ShortPromptsFirst(FirstComeFirstServed):
        def order(self, request):
            return (request.num_prompt_tokens, request.arrival_s, request.order)

    print(play(ShortPromptsFirst))

Why: whether an idea about serving is any good is not a matter of words. It runs here on the engine's own scheduler, against the
policies that are in use, on loads that it cannot know.

A policy is played with every seed that is published, and with one that is not; it is told apart from a cheat by what it decides:

    touching requests, naming others     it is shown views, read-only                              (arena_guard.py)
    dropping, starving                   whom it sends away it gives a reason; nobody waits while nothing runs
    luck of the clock                    the same world again must bring the same decisions
    reading the future                   in a world that is the same up to some second, all decisions before it must be the same
    knowing the answers                  when a request starts must not go with how long its answer will be: nobody knows that yet

Sending requests away is allowed. It costs goodput and fairness.

Invariant: a card is a pure function of policy, traces and seeds, to the last digit.

Taught in notebook 10.
"""

import inspect
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minserve.core.engine import EngineStalled
from minserve.core.policies import Policy
from minserve.core.policy_names import parse_policy
from minserve.core.scheduler import InvalidPolicy
from minserve.core.slo import SloAdmission
from minserve.core.trace import Trace
from minserve.lab.arena_guard import Cheat, Entry, Guard, first_difference
from minserve.lab.arena_score import ANSWERED, Row, Scorecard, score
from minserve.lab.arena_score import jain as jain  # whoever plays finds everything here
from minserve.lab.arena_score import ranking as ranking
from minserve.lab.arena_traces import TRACES as TRACES
from minserve.lab.arena_traces import ArenaTrace, Slo, arena_cost
from minserve.sim.step_times import CostStepTimes

SEEDS = (1,)  # published
SPLITS = (0.35, 0.7)  # of arrivals, or of the run where all come at once: where the future is exchanged
MOST_Z = 6.0  # standard deviations; by chance an honest policy exceeds that once in 500 million cards

# A class, or whatever makes a fresh policy; one that takes an argument is given the trace's limits.
Maker: TypeAlias = Callable[[], Policy] | Callable[[Slo], Policy]


def slo_admission(slo: Slo) -> Policy:
    """Admission that keeps the trace's own limits; where there is only a deadline, the first token is held to it."""
    ttft_s = slo.ttft_s or slo.latency_s or math.inf
    return SloAdmission(CostStepTimes(arena_cost()), ttft_s, slo.tpot_s or ttft_s)


def named_policy(words: str) -> Maker:
    """The maker of a policy in words, as `parse_policy` has them; "slo" alone keeps the limits of the trace."""
    if words == "slo":
        return slo_admission
    times = CostStepTimes(arena_cost())
    parse_policy(words, times)  # a mistake is found here
    return lambda: parse_policy(words, times)


BASELINES: Mapping[str, Maker] = {
    words: named_policy(words)
    for words in (
        "continuous",
        "static:size=16",
        "timeout:size=16",
        "buckets:size=16",
        "cap:most=16",
        "ageing",
        "shrink",
        "grow",
        "wait-when-slow",
        "at-once-when-slow",
        "free-blocks",
        "slo",
    )
}


def play(
    policy: Maker | str,
    traces: Iterable[str | ArenaTrace] = tuple(TRACES),
    seeds: Sequence[int] = SEEDS,
    *,
    unseen_seed: int | None = None,
    checked: bool = True,
    name: str | None = None,
) -> Scorecard:
    """Score a policy: a class, a function that makes one, or words like "cap:most=8".

    `unseen_seed` is drawn by lot if it is not given; it is on the card. Without `checked`, there is neither this seed nor a search for
    cheats, which take three quarters of the time. Raises what the policy raises, and InvalidPolicy.
    """
    if isinstance(policy, str):
        name, policy = name or policy, named_policy(policy)
    called = name or getattr(policy, "__name__", type(policy).__name__)
    chosen = [TRACES[trace] if isinstance(trace, str) else trace for trace in traces]
    unseen_seed = secrets.randbelow(2**31) if unseen_seed is None else unseen_seed
    rows: list[Row] = []
    try:
        runs = [Contest(policy, trace, seed) for seed in seeds for trace in chosen]
        rows = [run.row() for run in runs]
        if not checked:
            return Scorecard(called, tuple(rows))
        for run in runs:
            run.refuse_clairvoyance()
        refuse_known_answers(runs)
        unseen = [Contest(policy, trace, unseen_seed) for trace in chosen]
        refuse_known_answers(unseen)
    except Cheat as cheat:
        return Scorecard(called, tuple(rows), foul=str(cheat))
    return Scorecard(called, tuple(rows), tuple(run.row() for run in unseen))


def make_policy(maker: Maker, slo: Slo) -> Policy:
    """A fresh policy. Raises TypeError for a policy that is already there: what it remembers would get from one run to the next."""
    if not callable(maker):
        raise TypeError(f"a class or a function that makes a policy is needed, got {maker!r}: write lambda: {type(maker).__name__}(...)")
    make: Callable[..., Policy] = maker
    free = [p.name for p in inspect.signature(maker).parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if free not in ([], ["slo"]):
        raise TypeError(f"{maker!r} needs {', '.join(free)}: a policy of the arena is made without arguments, or with one named slo")
    return make(slo) if free else make()


def serve(maker: Maker, trace: ArenaTrace, seed: int, split_s: float = math.inf, stop_s: float = math.inf) -> "Served":
    """Serve a world, or its beginning. Raises Cheat."""

    def look(now_s: float) -> None:
        if now_s >= stop_s:
            raise _Seen

    world = trace.world(seed, split_s)
    guard = Guard(make_policy(maker, trace.slo), look)
    engine = trace.engine(world, guard, arena_cost())
    try:
        engine.run(world.arrivals(), world.then)
    except _Seen:
        pass
    except EngineStalled as error:
        raise Cheat(f"starves requests: on {trace.name}, at {engine.clock.now():.3f} s, {error}") from error
    except InvalidPolicy as error:
        raise InvalidPolicy(str(error).replace("Guard", guard.name, 1)) from error
    return Served(engine.trace, guard.entries, world.answer_tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """What happened, what the policy decided, and how long the answers were or would have been."""

    trace: Trace
    entries: list[Entry]
    answer_tokens: Mapping[str, int]


class _Seen(Exception):
    """The part of a world that was wanted is over."""


class Contest:
    """One run of a policy on one trace with one seed, and what it decided."""

    def __init__(self, maker: Maker, trace: ArenaTrace, seed: int):
        self.maker, self.trace, self.seed, self.cost = maker, trace, seed, arena_cost()
        self.num_requests = len(trace.world(seed))
        self.served = serve(maker, trace, seed)
        self.run = self.served.trace
        self._refuse_unanswered()

    def row(self) -> Row:
        return score(self.trace, self.seed, self.num_requests, self.run, self.cost)

    def _refuse_unanswered(self) -> None:
        """Who was neither answered nor sent away with a reason was dropped by other means."""
        fair = (*ANSWERED, "shed")
        lost = [record.request_id for record in self.run.requests.values() if record.finish_reason not in fair]
        if lost:
            raise Cheat(f"drops requests: on {self.trace.name}, {len(lost)} were neither answered nor sent away, the first is {lost[0]}")

    def refuse_clairvoyance(self) -> None:
        """Compare with worlds that are the same up to some second. Raises Cheat."""
        arrivals_s = sorted(record.arrival_s for record in self.run.requests.values())
        span_s = [self.run.steps[-1].end_s * i / 100 for i in range(100)] if arrivals_s[0] == arrivals_s[-1] else arrivals_s
        for share in SPLITS:
            split_s = math.floor(1024 * span_s[int(share * len(span_s))]) / 1024
            other = serve(self.maker, self.trace, self.seed, split_s, stop_s=split_s)
            words = first_difference(self.served.entries, other.entries, split_s)
            if words is None:
                continue
            again = serve(self.maker, self.trace, self.seed, stop_s=split_s)
            if (same := first_difference(self.served.entries, again.entries, split_s)) is not None:
                raise Cheat(f"cannot be reproduced: on {self.trace.name}, {same}; policies know no clock but now.time_s, and no chance")
            raise Cheat(f"reads the future: on {self.trace.name}, in worlds that differ only from {split_s:.3f} s on, {words}")


def refuse_known_answers(runs: Iterable[Contest]) -> None:
    """Raises Cheat if requests with short (or long) answers were started sooner than chance can explain."""
    found = [(run.trace.name, *known_answers(run.served)) for run in runs]
    pooled = math.fsum(z for _, _, z in found) / math.sqrt(len(found)) if found else 0.0
    name, correlation, z = max(found, key=lambda item: abs(item[2]), default=("", 0.0, 0.0))
    if max(abs(z), abs(pooled)) > MOST_Z:
        kind = "short" if (pooled if abs(pooled) > abs(z) else z) > 0 else "long"
        raise Cheat(
            f"knows answers that are not written yet: requests with {kind} answers are let in first; on {name}, waiting time and answer "
            f"length have a rank correlation of {correlation:.2f}, {abs(z):.1f} standard deviations from chance ({abs(pooled):.1f} in all)"
        )


def known_answers(served: Served) -> tuple[float, float]:
    """Rank correlation of a request's wait and its answer's length, and how many standard deviations from 0 that is.

    Lengths are drawn apart from all that a server sees, so for an honest policy this is chance. Who was sent away waits for ever.
    """
    waits, lengths = [], []
    for request_id, record in served.trace.requests.items():
        waits.append(math.inf if record.queue_s is None else record.queue_s)
        lengths.append(float(served.answer_tokens[request_id]))
    correlation = pearson(ranks(waits), ranks(lengths))
    return correlation, correlation * math.sqrt(max(0, len(waits) - 1))


def ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order; those that are equal share the middle one.

    >>> ranks([10.0, 30.0, 10.0, 20.0])
    [0.5, 3.0, 0.5, 2.0]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            places[index] = (start + end - 1) / 2
        start = end
    return places


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Correlation of two lists; 0 where one of them is constant."""
    if not xs:
        return 0.0
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    pairs = [(x - mean_x, y - mean_y) for x, y in zip(xs, ys, strict=True)]
    spread = math.fsum(x * x for x, _ in pairs) * math.fsum(y * y for _, y in pairs)
    return math.fsum(x * y for x, y in pairs) / math.sqrt(spread) if spread else 0.0
