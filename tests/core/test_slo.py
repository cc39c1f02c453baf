"""Limits that are kept: what a forecast says, who starts, who waits, who is sent away, and what that is worth in overload."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.engine import Arrival, Engine
from minserve.core.metrics import goodput
from minserve.core.policies import FirstComeFirstServed, SizeCap
from minserve.core.request import Request, SamplingParams
from minserve.core.slo import Forecast, SloAdmission
from tests.oracle import OracleRunner, add_one, make_engine


@dataclass(frozen=True)
class Linear:
    """10 ms a step, 2 ms more for each decode, 0.1 ms for each token of context, 1 ms for each token of a prompt."""

    def step_s(self, num_decodes: int, num_context_tokens: int, num_prompt_tokens: int) -> float:
        return (10 + 2 * num_decodes + 0.1 * num_context_tokens + num_prompt_tokens) / 1e3


class LinearRunner(OracleRunner):
    """An oracle whose steps take what Linear says of them."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        talking = [row for row in batch.rows if row.start >= row.request.num_prompt_tokens]
        num_prompt_tokens = batch.num_tokens - len(talking)
        self.seconds_per_step = Linear().step_s(len(talking), sum(row.end for row in talking), num_prompt_tokens) if batch.rows else 0.0
        return super().execute(batch)


def linear_engine(policy: FirstComeFirstServed, token_budget: int = 100) -> Engine:
    engine = make_engine(400, 4, runner=LinearRunner(400, 4), token_budget=token_budget, prefix_caching=False)
    engine.scheduler.policy = policy
    return engine


def request(num_prompt_tokens: int, num_computed: int = 0, arrival_s: float = 0.0) -> Request:
    made = Request("R", tuple(range(num_prompt_tokens)), SamplingParams(), max_total_tokens=99, arrival_s=arrival_s)
    made.num_computed_tokens = num_computed
    return made


# --- the forecast ---------------------------------------------------------------------------------------


def test_a_forecast_by_hand():
    """Two talk, 20 tokens of context each: their step takes 10 + 4 + 4 = 18 ms, so 12 tokens of a prompt fit into 30.5 ms."""
    forecast = Forecast(Linear(), 0.0305, 100, [request(20, 19), request(20, 19)])
    assert (forecast.num_requests, forecast.num_context_tokens, forecast.num_prompt_tokens) == (2, 40, 0)
    assert forecast.chunk_tokens() == 12
    # 30 tokens: two steps of 12 at 30 ms, one of 6 at 24 ms
    assert forecast.first_token_s(request(30)) == pytest.approx(0.084)
    # three that talk, with 40 + 85 and 86 tokens of context: 28.5 and 28.6 ms
    assert Forecast(Linear(), 0.02855, 100, [request(20, 19)] * 2).has_room_for(request(85))
    assert not Forecast(Linear(), 0.02855, 100, [request(20, 19)] * 2).has_room_for(request(86))


def test_prompts_under_way_and_those_that_join_come_first():
    forecast = Forecast(Linear(), 10.0, 50, [request(40, 10)])
    assert forecast.num_prompt_tokens == 30
    forecast.join(request(5))
    assert (forecast.num_requests, forecast.num_context_tokens, forecast.num_prompt_tokens) == (2, 45, 35)
    # 35 + 61 = 96 tokens in steps of 48, the budget less a token for each of the two
    assert forecast.first_token_s(request(61)) == pytest.approx(2 * Linear().step_s(2, 45, 48))


def test_alone_a_prompt_may_take_whole_steps():
    forecast = Forecast(Linear(), 0.001, 50, [])
    assert forecast.chunk_tokens() == 50
    assert forecast.first_token_s(request(120)) == pytest.approx(0.060 + 0.060 + 0.030)


def test_beside_decodes_that_are_too_slow_already_no_first_token_is_in_sight():
    assert Forecast(Linear(), 0.015, 50, [request(50, 49)]).first_token_s(request(10)) == math.inf


# --- who starts, who waits, who is sent away ------------------------------------------------------------


def arrivals(*times_s: float, num_prompt_tokens: int = 20, max_tokens: int = 20) -> list[Arrival]:
    params = SamplingParams(max_tokens=max_tokens)
    return [(time_s, {"prompt_ids": range(7 * n, 7 * n + num_prompt_tokens), "params": params}) for n, time_s in enumerate(times_s)]


def words_of(engine: Engine, name: str) -> list[str]:
    return [decision.words for decision in engine.trace.why(name)]


def test_who_would_slow_the_others_waits_until_there_is_room():
    """Three talk at 10 + 6 + 0.1 x 60 = 22 ms and more; a fourth would make it 26 ms, over the limit of 25."""
    engine = linear_engine(SloAdmission(Linear(), ttft_s=5.0, tpot_s=0.025, margin=0.0))
    engine.run(arrivals(0.0, 0.0, 0.0, 0.0))
    starts_s = [record.scheduled_s for record in engine.trace.requests.values()]
    ends_s = [record.finished_s for record in engine.trace.requests.values()]
    assert words_of(engine, "R3")[0] == "waits: the policy lets nobody start now"
    assert None not in starts_s and starts_s[3] == min(end for end in ends_s[:3] if end is not None)
    assert engine.trace.summary().num_shed == 0


def test_who_can_no_longer_make_it_is_told_so_with_both_numbers():
    """The first leaves no room in its steps: 30 ms of prefill, then decodes of 14.1, 14.2, 14.3 and 14.4 ms. At 87 ms it is too late
    for the second, whose prefill takes 70."""
    engine = linear_engine(SloAdmission(Linear(), ttft_s=0.15, tpot_s=0.014))
    engine.run([*arrivals(0.0, max_tokens=8), *arrivals(0.0, num_prompt_tokens=60, max_tokens=4)])
    assert [record.finish_reason for record in engine.trace.requests.values()] == ["length", "shed"]
    assert words_of(engine, "R1") == [
        "waits: the policy lets nobody start now",
        "is sent away: its first token can come 0.157 s after arrival, the limit is 0.15 s",
    ]


def test_a_prompt_that_is_too_long_for_the_limit_is_sent_away_at_once():
    engine = linear_engine(SloAdmission(Linear(), ttft_s=0.1, tpot_s=1.0))
    engine.run([*arrivals(0.0, num_prompt_tokens=91), *arrivals(0.0, num_prompt_tokens=89)])
    assert [record.finish_reason for record in engine.trace.requests.values()] == ["shed", "length"]
    assert engine.trace.steps[0].finished == ("R0",)


def test_without_shedding_the_late_are_served_after_those_who_can_still_be_in_time():
    engine = linear_engine(SloAdmission(Linear(), ttft_s=0.1, tpot_s=0.014, shed=False, margin=0.0))
    engine.run([*arrivals(0.0, num_prompt_tokens=99), *arrivals(0.0, 0.03, max_tokens=2)])
    starts_s = {name: record.scheduled_s for name, record in engine.trace.requests.items()}
    assert sorted(starts_s, key=lambda name: starts_s[name] or 0.0) == ["R1", "R2", "R0"]
    assert engine.trace.summary().num_shed == 0


def test_an_idle_engine_keeps_nobody_waiting_even_if_its_limit_cannot_be_met():
    engine = linear_engine(SloAdmission(Linear(), ttft_s=1.0, tpot_s=0.001))
    engine.run(arrivals(0.0, 0.0, max_tokens=3))
    assert [record.num_output_tokens for record in engine.trace.requests.values()] == [3, 3]
    assert max(len(step.tokens) for step in engine.trace.steps) == 1  # one after the other


def test_a_step_computes_no_more_of_prompts_than_leaves_its_decodes_in_time():
    engine = linear_engine(SloAdmission(Linear(), ttft_s=9.0, tpot_s=0.030, margin=0.0))
    engine.run([*arrivals(0.0, max_tokens=30), *arrivals(0.05, num_prompt_tokens=80, max_tokens=2)])
    mixed = [step.elapsed_s for step in engine.trace.steps if step.tokens.get("R1", (0, 0))[1] > 1]
    assert len(mixed) == 6 and all(0.029 < elapsed_s <= 0.030 for elapsed_s in mixed[:-1])  # the last has the rest


def test_company_is_waited_for_as_long_as_the_share_of_the_slack():
    """Slack of 20 prompt tokens: 330 ms less the 30 that they take. Half of it passes before the first starts, and the others with it."""
    engine = linear_engine(SloAdmission(Linear(), ttft_s=0.33, tpot_s=1.0, patience=0.5))
    engine.run(arrivals(0.0, 0.02, 0.1))
    assert [record.scheduled_s for record in engine.trace.requests.values()] == pytest.approx([0.15, 0.15, 0.15])


def test_a_preempted_request_is_neither_late_nor_kept_waiting_for_company():
    engine = linear_engine(SloAdmission(Linear(), ttft_s=0.1, tpot_s=1.0))
    talking = add_one(engine, range(20), 40)
    while talking.num_output_tokens < 20:
        engine.step()
    assert engine.clock.now() > 0.2
    engine.scheduler.preempt(talking)
    engine.run()
    assert talking.finish_reason == "length" and talking.num_output_tokens == 40


# --- what it is worth -----------------------------------------------------------------------------------


def goodput_of(policy: FirstComeFirstServed, load: Sequence[Arrival]) -> float:
    engine = linear_engine(policy)
    engine.run(load)
    summary = engine.trace.summary()
    return goodput(engine.trace.requests.values(), summary.wall_s, ttft_s=0.5, tpot_s=0.04)


def test_in_overload_it_serves_more_in_time_than_anything_that_takes_everybody():
    """100 requests a second for two seconds; the device makes about a third of them."""
    load = arrivals(*(0.01 * number for number in range(200)))
    slo = goodput_of(SloAdmission(Linear(), ttft_s=0.5, tpot_s=0.04), load)
    others = [goodput_of(policy, load) for policy in (FirstComeFirstServed(), *map(SizeCap, (2, 4, 8, 12, 16)))]
    assert slo > 3 * max(others) > 0


def test_under_light_load_it_changes_nothing():
    load = arrivals(*(0.8 * number for number in range(10)))
    assert goodput_of(SloAdmission(Linear(), ttft_s=0.5, tpot_s=0.04), load) == goodput_of(FirstComeFirstServed(), load) > 1.2


@pytest.mark.parametrize(
    "make",
    [
        lambda: SloAdmission(Linear(), 0.0, 0.1),
        lambda: SloAdmission(Linear(), 1.0, math.inf),
        lambda: SloAdmission(Linear(), 1.0, 0.1, patience=1.5),
        lambda: SloAdmission(Linear(), 1.0, 0.1, margin=1.0),
    ],
)
def test_limits_that_make_no_sense_are_refused(make: Callable[[], object]):
    with pytest.raises(ValueError, match="got ttft_s"):
        make()
