"""Policies in words, and what holds under every one of them, whatever arrives: nobody starves, the pool stays whole, the order stands."""

import inspect
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minserve.core.batch import ScheduledBatch
from minserve.core.engine import Arrival, Engine
from minserve.core.policies import FirstComeFirstServed, LengthBuckets, Policy, SizeCap, StaticBatches, TimeoutBatches
from minserve.core.policy_names import POLICY_NAMES, needs_step_times, parse_policy
from minserve.core.request import FinishReason, Request, SamplingParams
from minserve.core.scheduler import StepOutput
from minserve.core.slo import SloAdmission
from tests.core.test_slo import Linear
from tests.oracle import FaithfulRunner, assert_idle, draws, make_engine, oracle_tokens


def make(words: str) -> Policy:
    return parse_policy(words, Linear())


def test_a_name_alone_is_a_policy():
    assert type(make("continuous")) is type(make("continuous:")) is FirstComeFirstServed
    assert vars(make("timeout")) == vars(TimeoutBatches(32, 0.05)) and vars(make("static")) == vars(StaticBatches(32))


def test_keys_in_words():
    buckets, slo = make("buckets:edges=10/20/30, size=4,wait_ms=7.5"), make("slo:ttft_ms=500,tpot_ms=40,shed=no,patience=0.5")
    assert isinstance(buckets, LengthBuckets) and (buckets.edges, buckets.size, buckets.wait_s) == ((10, 20, 30), 4, 0.0075)
    assert isinstance(slo, SloAdmission) and (slo.ttft_s, slo.tpot_s, slo.sheds, slo.patience, slo.margin) == (0.5, 0.04, False, 0.5, 0.05)
    assert isinstance(cap := make("cap:most=3"), SizeCap) and cap.most == 3


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name not in ("slo", "continuous")])
def test_a_name_alone_has_the_defaults_of_its_class(name: str):
    policy = make(name)
    defaults = {key: p.default for key, p in inspect.signature(type(policy)).parameters.items() if p.default is not inspect.Parameter.empty}
    assert {key: getattr(policy, key) for key in defaults} == defaults


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "no policy ''"),
        ("statics", "no policy 'statics', did you mean 'static'"),
        ("cap:mots=3", "policy 'cap' has no key 'mots', did you mean 'most'? Its keys: most=32"),
        ("continuous:size=3", "policy 'continuous' has no key 'size'. It has none."),
        ("cap:most", "'most' is not key=value"),
        ("cap:most=3,most=4", "'most=4' is given twice"),
        ("cap:most=3.5", "most of policy 'cap' must be something like 32, got '3.5'"),
        ("cap:most=0", "at least 1 request must be able to run, got most 0"),
        ("timeout:wait_ms=inf", "wait_ms of policy 'timeout' must be something like 50.0, got 'inf'"),
        ("buckets:edges=a/b", "edges of policy 'buckets' must be something like 256/1024, got 'a/b'"),
        ("slo:ttft_ms=500", "policy 'slo' needs tpot_ms, as in slo:tpot_ms=500"),
        ("slo", "policy 'slo' needs ttft_ms and tpot_ms, as in slo:ttft_ms=500,tpot_ms=500"),
        ("slo:ttft_ms=x,tpot_ms=5", "ttft_ms of policy 'slo' must be a finite number, got 'x'"),
        ("slo:ttft_ms=5,tpot_ms=5,shed=perhaps", "shed of policy 'slo' must be something like yes, got 'perhaps'"),
    ],
)
def test_words_that_are_wrong(words: str, complaint: str):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        make(words)


def test_a_policy_that_predicts_needs_step_times():
    assert [name for name in POLICY_NAMES if needs_step_times(name)] == ["slo"] and needs_step_times("slo:ttft_ms=5")
    with pytest.raises(ValueError, match="no step times are given"):
        parse_policy("slo:ttft_ms=500,tpot_ms=50")


# --- under every policy, whatever arrives ---------------------------------------------------------------

SMALL = {  # settings that a handful of requests can feel
    "static": "size=2",
    "timeout": "size=3,wait_ms=2000",
    "buckets": "edges=4/8,size=2,wait_ms=3000",
    "cap": "most=2",
    "ageing": "seconds_per_level=2.5",
    "shrink": "most=4,least=1",
    "grow": "least=1,most=4,per_queued=1",
    "wait-when-slow": "size=3,longest_wait_ms=4000",
    "at-once-when-slow": "size=2,longest_wait_ms=3000",
    "free-blocks": "low=0.2,high=0.5",
    "slo": "ttft_ms=50,tpot_ms=20,patience=0.5",
}


class AnyOrder(FaithfulRunner):
    """Holds every batch against the contract of the seam, but lets a policy choose who goes first."""

    def _check_order(self, batch: ScheduledBatch) -> None:
        """A policy may let somebody overtake: buckets do."""


@dataclass
class Watched(Engine):
    """An engine that checks the conservation laws after every step, and that nobody's place in line ever changes."""

    inner: Engine
    places: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.inner.scheduler, self.inner.runner, self.inner.clock, self.inner.limits)

    def step(self) -> StepOutput:
        assert len(self.trace.steps) < 2_000, "no end in sight"
        output, scheduler = super().step(), self.scheduler
        scheduler.check()
        for request in (*scheduler.waiting, *scheduler.running):
            place = scheduler.policy.order(request)
            assert self.places.setdefault(request.request_id, place) == place
        assert len(set(self.places.values())) == len(self.places), "two requests share a place in line"
        return output


def watched(name: str, num_blocks: int, token_budget: int) -> Watched:
    runner = AnyOrder(num_blocks, 4)
    inner = make_engine(num_blocks, 4, runner=runner, token_budget=token_budget, max_running=5)
    runner.scheduler = inner.scheduler
    inner.scheduler.policy = make(f"{name}:{SMALL[name]}" if name in SMALL else name)
    return Watched(inner)


def a_request() -> st.SearchStrategy[tuple[float, int, int, int, int]]:
    """When it comes (with what is left of the second in which a step is under way), lengths, priority, samples."""
    times_s = st.floats(0, 12, allow_nan=False, width=16)
    return st.tuples(times_s, st.integers(1, 12), st.integers(1, 12), st.sampled_from([0, 0, 1, 3]), st.sampled_from([1, 1, 1, 2]))


def loads() -> st.SearchStrategy[list[Arrival]]:
    def arrivals(drawn: list[tuple[float, int, int, int, int]]) -> list[Arrival]:
        return [
            (time_s, {"prompt_ids": range(30 * k, 30 * k + n), "params": SamplingParams(max_tokens=m, n=samples), "priority": p})
            for k, (time_s, n, m, p, samples) in enumerate(drawn)
        ]

    return st.lists(a_request(), min_size=1, max_size=9).map(arrivals)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_nobody_starves_the_pool_stays_whole_and_the_order_stands(name: str):
    reasons: set[FinishReason | None] = set()

    @settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(loads(), st.integers(6, 14), st.sampled_from([3, 16, 64]))
    def holds(load: list[Arrival], num_blocks: int, token_budget: int) -> None:
        engine = watched(name, num_blocks, token_budget)
        finished = engine.run(load)
        assert_idle(engine)
        assert len(finished) == len(set(finished)) == sum(arguments["params"].n for _, arguments in load)
        for request in finished:
            assert_answered(request)
        reasons.update(request.finish_reason for request in finished)

    holds()
    assert (FinishReason.SHED in reasons) == (name == "slo") and FinishReason.LENGTH in reasons


def assert_answered(request: Request) -> None:
    """All of the tokens that it gives alone, or sent away before the first of them, with the reason."""
    if request.finish_reason is FinishReason.SHED:
        assert request.error and request.output_ids == []
    else:
        num_tokens = request.max_total_tokens - request.num_prompt_tokens
        assert request.output_ids == oracle_tokens(request.prompt_ids, num_tokens, draws(request))
