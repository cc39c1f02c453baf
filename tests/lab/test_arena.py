"""The arena: the same numbers everywhere, every kind of cheat caught and named, and no honest policy accused."""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from minserve.core.engine import Engine
from minserve.core.policies import FirstComeFirstServed, Moment, Policy
from minserve.core.request import Request, RequestStatus
from minserve.core.scheduler import InvalidPolicy
from minserve.lab import arena_guard
from minserve.lab.arena import BASELINES, Contest, known_answers, make_policy, named_policy, play, ranks
from minserve.lab.arena_score import Row
from minserve.lab.arena_traces import ArenaTrace, Slo, WorldRunner
from minserve.lab.policy_template import MyPolicy
from minserve.sim.workload import Lengths, all_at_once, make_workload, poisson

# Forty requests in half a second: too many for a pool of 1,024 tokens, so there are queues and preemptions.
SMALL = ArenaTrace(
    "small",
    "for tests",
    Slo("a limit that some meet", 0.5, 0.05),
    0.5,
    lambda seed: make_workload(40, Lengths.uniform(20, 200), Lengths.exponential(60, 300), poisson(80.0), seed),
    num_blocks=64,
)
FEW = (SMALL,)
CROWD = replace(
    SMALL,
    name="crowd",
    load=lambda seed: make_workload(120, Lengths.constant(20), Lengths.exponential(15, 60), all_at_once(), seed),
)


EXPECTED = (  # on every machine
    Row(
        trace="code",
        seed=1,
        goodput_per_s=1.58,
        num_within=79,
        num_requests=200,
        ttft_p99_s=1.77649506391026,
        tpot_p99_s=0.1276680760205324,
        output_tokens_per_s=109.31906051641771,
        fairness=0.6867085065718962,
        num_recomputed_tokens=0,
        num_shed=0,
        num_preemptions=0,
        wall_s=56.4860324524343,
    ),
    Row(
        trace="batch",
        seed=1,
        goodput_per_s=8.625,
        num_within=69,
        num_requests=96,
        ttft_p99_s=8.161691649071871,
        tpot_p99_s=0.06251008777258246,
        output_tokens_per_s=1273.3829046129306,
        fairness=0.752384290637951,
        num_recomputed_tokens=11131,
        num_shed=0,
        num_preemptions=90,
        wall_s=18.249027779325843,
    ),
)


# --- the same numbers everywhere --------------------------------------------------------------------


def test_reproducible_to_the_last_digit() -> None:
    """These are equal on every machine, or the arena is no arena."""
    card = play("continuous", ["code", "batch"], checked=False)
    assert card.rows == EXPECTED
    assert play("continuous", FEW, checked=False).rows == play(FirstComeFirstServed, FEW, checked=False).rows


def test_the_small_trace_has_queues_and_preemptions() -> None:
    row = play("continuous", FEW, checked=False).row("small")
    assert 10 < row.num_within < 35 and row.num_preemptions > 5 and row.num_recomputed_tokens > 100


def test_seeds_are_rows_and_the_unseen_one_is_apart() -> None:
    card = play(FirstComeFirstServed, FEW, (1, 2), unseen_seed=3)
    assert card.foul is None and card.policy == "FirstComeFirstServed"
    assert [row.seed for row in card.rows] == [1, 2] and [row.seed for row in card.unseen] == [3]
    assert card.row("small", 2) == card.rows[1] != card.rows[0]
    drawn = play(FirstComeFirstServed, FEW)
    assert drawn.unseen[0].seed not in (0, 1) and drawn.rows == card.rows[:1]


# --- honest policies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_are_not_accused(name: str) -> None:
    card = play(BASELINES[name], FEW, unseen_seed=3)
    assert card.foul is None, card.foul
    assert 0 < card.within_share <= 1 and 0 < card.rows[0].fairness <= 1


def test_the_template_is_honest_and_better_than_nothing() -> None:
    assert play(MyPolicy, FEW, unseen_seed=3).foul is None
    assert play(MyPolicy, ["code"], checked=False).within_share > 1.5 * EXPECTED[0].within_share


def test_a_policy_behind_the_guard_decides_as_it_does_without() -> None:
    for maker in (FirstComeFirstServed, named_policy("timeout:size=8"), named_policy("free-blocks")):
        guarded = Contest(maker, SMALL, 1)
        world = SMALL.world(1)
        engine = SMALL.engine(world, make_policy(maker, SMALL.slo), guarded.cost)
        engine.run(world.arrivals(), world.then)
        assert list(engine.trace.steps) == list(guarded.run.steps)


def test_honest_policies_are_far_from_the_line() -> None:
    """Over many worlds, waits and answer lengths go together no more than chance has it."""
    found = [known_answers(Contest(FirstComeFirstServed, SMALL, seed).served)[1] for seed in range(12)]
    assert max(map(abs, found)) < 3.5 and abs(sum(found) / len(found)) < 0.5


def test_sending_away_with_a_reason_is_allowed_and_costs() -> None:
    class Choosy(FirstComeFirstServed):
        def shed(self, now: Moment) -> Sequence[tuple[Request, str]]:
            return [(request, "too long for us") for request in now.waiting if request.num_prompt_tokens > 130]

    card, all_served = play(Choosy, FEW, unseen_seed=3), play("continuous", FEW, checked=False)
    assert card.foul is None and 10 < card.rows[0].num_shed < 30
    assert card.rows[0].num_within <= 40 - card.rows[0].num_shed
    assert card.rows[0].fairness < all_served.rows[0].fairness


# --- cheats -------------------------------------------------------------------------------------------


def foul_of(maker: Any, traces: Sequence[str | ArenaTrace] = FEW) -> str:
    card = play(maker, traces, unseen_seed=3)
    assert card.foul is not None, card
    assert card.within_share == 0.0
    return card.foul


class Silent(FirstComeFirstServed):
    def shed(self, now: Moment) -> Sequence[tuple[Request, str]]:
        return [(request, " ") for request in now.waiting if request.num_prompt_tokens > 150]


class Starver(FirstComeFirstServed):
    """Never lets the long ones in."""

    def candidates(self, now: Moment) -> Sequence[Request]:
        return [request for request in now.waiting if request.num_prompt_tokens <= 150]


class Dawdler(Starver):
    """The same, always about to change its mind."""

    step_s = 1e-6

    def wake_s(self, now: Moment) -> float:
        return now.time_s + self.step_s


class Sleeper(Dawdler):
    step_s = 4.0


class Toucher(FirstComeFirstServed):
    def candidates(self, now: Moment) -> Sequence[Request]:
        for request in now.waiting:
            request.priority = 1
        return now.waiting


class Deleter(FirstComeFirstServed):
    def candidates(self, now: Moment) -> Sequence[Request]:
        for request in now.running:
            del request.priority
        return now.waiting


class Burglar(FirstComeFirstServed):
    """Goes past the view's own refusal."""

    def candidates(self, now: Moment) -> Sequence[Request]:
        for view in now.running:
            shown: Any = view
            object.__setattr__(shown, "_now", shown._now._replace(status=RequestStatus.WAITING))
        return now.waiting


def engine_in_the_frames() -> Engine:
    frame: Any = sys._getframe()
    while not isinstance(frame.f_locals.get("self"), Engine):
        frame = frame.f_back
    return frame.f_locals["self"]


class Aborter(FirstComeFirstServed):
    def candidates(self, now: Moment) -> Sequence[Request]:
        for request in now.waiting[5:]:
            engine_in_the_frames().abort(request.request_id)
            break
        return now.waiting[:5]


class FrameReader(FirstComeFirstServed):
    """Looks up in the engine's own loop who comes next, and keeps seats for the short prompts that are about to come."""

    def candidates(self, now: Moment) -> Sequence[Request]:
        frame: Any = sys._getframe()
        while "todo" not in frame.f_locals:
            frame = frame.f_back
        soon = [len(call["prompt_ids"]) for _, call in frame.f_locals["todo"][:8]]
        return () if now.running and sum(soon) < 800 else now.waiting


class LengthReader(FirstComeFirstServed):
    """Finds the device, and asks how long this world's answers will be: who is soon done goes first."""

    def order(self, request: Request) -> tuple[float, ...]:
        frame: Any = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), Engine):
            frame = frame.f_back
        runner = frame.f_locals["self"].runner
        assert isinstance(runner, WorldRunner)
        return (runner.world._lengths[request.request_id], request.order)


def memory_of(seed: int, trace: ArenaTrace) -> Callable[[], Policy]:
    """A policy that has learnt a published world by heart: who gets a short answer goes first."""
    lengths = {tuple(call["prompt_ids"]): call["params"].max_tokens for _, call in trace.load(seed).arrivals()}

    class Remembers(FirstComeFirstServed):
        def order(self, request: Request) -> tuple[float, ...]:
            return (lengths.get(request.prompt_ids, 0), request.arrival_s, request.order)

    return Remembers


def choosy_memory_of(seed: int, trace: ArenaTrace) -> Callable[[], Policy]:
    """It serves in order of arrival, and sends away who it knows will get a long answer."""
    long = {tuple(call["prompt_ids"]) for _, call in trace.load(seed).arrivals() if call["params"].max_tokens > 15}

    class Choosy(FirstComeFirstServed):
        def shed(self, now: Moment) -> Sequence[tuple[Request, str]]:
            return [(request, "busy") for request in now.waiting if request.prompt_ids in long]

    return Choosy


class Dice(FirstComeFirstServed):
    def token_budget(self, now: Moment) -> int:
        return random.randrange(1, 2048)


class Watch(FirstComeFirstServed):
    def token_budget(self, now: Moment) -> int:
        return 1 + time.perf_counter_ns() // 100 % 1000


class Diary(FirstComeFirstServed):
    """Keeps what it saw in a place that outlives it: the second time, it knows the answers."""

    def __init__(self, seen: dict[str, int]) -> None:
        self.seen, self.known = seen, dict(seen)

    def order(self, request: Request) -> tuple[float, ...]:
        return (self.known.get(request.request_id, 0), request.order)

    def candidates(self, now: Moment) -> Sequence[Request]:
        self.seen.update({request.request_id: request.num_tokens for request in now.running})
        return now.waiting


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (Silent, "drops requests: sends R"),
        (Starver, "starves requests: on small, at"),
        (Dawdler, "asked 301 times"),
        (Sleeper, "nothing runs and it is not let in"),
        (Toucher, "touches requests: sets priority of R"),
        (Deleter, "touches requests: deletes priority of R"),
        (Burglar, "touches requests: what it was shown of R"),
        (Aborter, "were neither answered nor sent away"),
        (FrameReader, "reads the future: on small, in worlds that differ only from"),
        (LengthReader, "reads the future: on small"),
        (Dice, "cannot be reproduced: on small, at"),
        (Watch, "cannot be reproduced"),
    ],
)
def test_cheats_are_caught_and_named(maker: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_guard, "MOST_IDLE_ASKS", 300)
    assert words in foul_of(maker)


def test_what_is_remembered_from_an_earlier_run_is_not_reproducible() -> None:
    seen: dict[str, int] = {}
    assert "cannot be reproduced" in foul_of(lambda: Diary(seen))
    assert len(seen) > 30


def test_a_published_seed_that_is_known_by_heart_shows_in_who_goes_first() -> None:
    foul = foul_of(memory_of(1, CROWD), [CROWD])
    assert foul.startswith("knows answers that are not written yet: requests with short answers are let in first; on crowd, ")
    assert foul_of(choosy_memory_of(1, CROWD), [CROWD]).startswith("knows answers that are not written yet")
    # On a seed that it does not know it is first come, first served, and nobody can say anything against it.
    assert play(memory_of(1, CROWD), [CROWD], (2,), unseen_seed=3).foul is None


def test_naming_what_was_not_shown_is_a_mistake_of_the_policy() -> None:
    class Inventive(FirstComeFirstServed):
        def candidates(self, now: Moment) -> Sequence[Request]:
            return [Request("mine", (1, 2), now.waiting[0].params, 10)] if now.waiting else ()

    class Twice(FirstComeFirstServed):
        def candidates(self, now: Moment) -> Sequence[Request]:
            return [*now.waiting, *now.waiting]

    with pytest.raises(InvalidPolicy, match="Inventive lets start .*mine.*, which is none of the requests"):
        play(Inventive, FEW)
    with pytest.raises(InvalidPolicy, match="^Twice lets start one request twice"):
        play(Twice, FEW)


def test_a_policy_must_be_made_afresh() -> None:
    ready_made: Any = FirstComeFirstServed()
    with pytest.raises(TypeError, match="write lambda: FirstComeFirstServed"):
        play(ready_made, FEW)
    with pytest.raises(TypeError, match="needs size: a policy of the arena is made without arguments, or with one named slo"):
        play(lambda size: FirstComeFirstServed(), FEW)
    with pytest.raises(ValueError, match="no policy 'contineous', did you mean 'continuous'"):
        play("contineous", FEW)


def test_errors_of_a_policy_are_its_own() -> None:
    class Broken(FirstComeFirstServed):
        def candidates(self, now: Moment) -> Sequence[Request]:
            return [now.waiting[99]]

    with pytest.raises(IndexError):
        play(Broken, FEW)


def test_ranks_share_places() -> None:
    assert ranks([5.0, 1.0, 5.0, 5.0]) == [2.0, 0.0, 2.0, 2.0]
