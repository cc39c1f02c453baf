"""One policy, two engines: the real one decides as the simulated one does, and what it says does not depend on who decides when."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minserve import LLM
from minserve.bench import run_set
from minserve.calibrate import cost_model, twin
from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.clock import VirtualClock
from minserve.core.engine import Arrival, Engine, Runner
from minserve.core.policies import FirstComeFirstServed, Moment
from minserve.core.policy_names import POLICY_NAMES, parse_policy
from minserve.core.request import FinishReason, InvalidRequest, Request, SamplingParams
from minserve.core.slo import SloAdmission
from minserve.core.trace import Trace
from minserve.interface import RequestShed
from minserve.model.costs import choose_spec
from minserve.sim.cost_model import CostModel
from minserve.sim.step_times import CostStepTimes
from tests.tiny_model import save_tiny_model

# Settings small enough to be felt by two dozen short requests; where none are given, those of the bare name.
SETTINGS = {
    "static": "size=4",
    "timeout": "size=4,wait_ms=30",
    "buckets": "edges=16/32,size=3,wait_ms=30",
    "cap": "most=3",
    "ageing": "seconds_per_level=0.04",
    "shrink": "most=6,least=2",
    "grow": "least=2,most=6",
    "wait-when-slow": "size=4,longest_wait_ms=30",
    "at-once-when-slow": "size=4,longest_wait_ms=30",
    "free-blocks": "low=0.3,high=0.5",
    "slo": "ttft_ms=60,tpot_ms=20",
}


def words_of(name: str) -> str:
    return f"{name}:{SETTINGS[name]}" if name in SETTINGS else name


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny_dir: Path):
    with LLM(tiny_dir, verbose=False, dtype="fp32", num_blocks=24, token_budget=48, max_running=8) as llm:
        yield llm


def loads() -> list[Arrival]:
    """Two dozen requests in half a second, a few of them together, with three levels of priority."""
    arrivals: list[Arrival] = []
    for index in range(24):
        prompt = [(7 * index + 3 * place) % 256 for place in range(5 + 13 * index % 40)]
        params = SamplingParams(max_tokens=2 + 5 * index % 11, ignore_eos=True)
        time_s = 0.02 * (index - index % 3)
        arrivals.append((time_s, {"prompt_ids": prompt, "params": params, "priority": index % 3, "request_id": f"Q{index}"}))
    return arrivals


class TimedByTheCostModel:
    """The real model, whose steps take virtual time: what the simulator says they take."""

    def __init__(self, inner: Runner, cost: CostModel):
        self.inner, self.cost = inner, cost

    def execute(self, batch: ScheduledBatch) -> StepResult:
        seconds = self.cost.of(self.cost.work(batch.rows)).seconds if batch.rows else 0.0
        return replace(self.inner.execute(batch), elapsed_s=seconds)


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> tuple[Trace, dict[str, list[int]]]:
    requests = engine.run(arrivals)
    engine.scheduler.check()
    return engine.trace, {request.request_id: request.output_ids for request in requests if request.finish_reason is not FinishReason.SHED}


@pytest.fixture(scope="module")
def cost(llm: LLM) -> CostModel:
    return cost_model(llm, choose_spec(None, torch.device("cpu")))


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[int]]:
    """What each request is answered when nobody else is there."""
    arguments = [arguments for _, arguments in loads()]
    return {a["request_id"]: llm.generate([a["prompt_ids"]], a["params"], progress=False)[0].token_ids for a in arguments}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_both_engines_decide_alike_and_no_policy_changes_an_answer(llm: LLM, cost: CostModel, alone: dict[str, list[int]], name: str):
    times = CostStepTimes(cost)
    simulated = twin(llm, cost)
    simulated.scheduler.policy = parse_policy(words_of(name), times)
    llm.engine.scheduler.blocks.flush_cache()
    real_scheduler, policy = llm.engine.scheduler, llm.engine.scheduler.policy
    real_scheduler.policy = parse_policy(words_of(name), times)
    real = Engine(real_scheduler, TimedByTheCostModel(llm.engine.runner, cost), VirtualClock(), llm.engine.limits)
    try:
        (trace, answers), (expected, made_up) = serve(real, loads()), serve(simulated, loads())
    finally:
        real_scheduler.policy = policy
    steps = [(s.tokens, s.start_s, s.end_s, s.num_used_blocks, s.preempted, s.finished) for s in trace.steps]
    assert steps == [(s.tokens, s.start_s, s.end_s, s.num_used_blocks, s.preempted, s.finished) for s in expected.steps]
    reasons = {name: record.finish_reason for name, record in trace.requests.items()}
    assert reasons == {name: record.finish_reason for name, record in expected.requests.items()}
    assert answers.keys() == made_up.keys() and answers == {name: alone[name] for name in answers}
    assert 24 - len(answers) == trace.summary().num_shed == expected.summary().num_shed
    assert (len(answers) < 24) == (name == "slo"), f"{name} served {len(answers)}"


def test_the_policies_differ_in_what_they_do(cost: CostModel, llm: LLM):
    """So that the test above compares something: every name has a schedule of its own."""
    schedules: dict[str, object] = {}
    for name in POLICY_NAMES:
        engine = twin(llm, cost)
        engine.scheduler.policy = parse_policy(words_of(name), CostStepTimes(cost))
        trace, _ = serve(engine, loads())
        schedules[name] = tuple(tuple(step.tokens.items()) for step in trace.steps)
    assert len(set(schedules.values())) == len(POLICY_NAMES)


# --- LLM(policy=...) ----------------------------------------------------------------------------------


class SendsLongPromptsAway(FirstComeFirstServed):
    def shed(self, now: Moment) -> list[tuple[Request, str]]:
        return [(r, f"{r.num_prompt_tokens} prompt tokens are too many") for r in now.waiting if r.num_prompt_tokens > 20]


def open_llm(path: Path, **fields) -> LLM:
    return LLM(path, verbose=False, **{"dtype": "fp32", "num_blocks": 40, **fields})


def test_who_is_sent_away_is_told_why(tiny_dir: Path):
    with open_llm(tiny_dir, policy=SendsLongPromptsAway()) as llm:
        served, shed = llm.generate(["short", "a prompt of more than twenty bytes"], max_tokens=3, ignore_eos=True, progress=False)
        assert (served.finish_reason, len(served.token_ids), served.outputs[0].error) == ("length", 3, None)
        assert (shed.finish_reason, shed.token_ids, shed.text) == ("shed", [], "")
        assert shed.outputs[0].error == "34 prompt tokens are too many"
        assert llm.trace.summary().num_shed == 1
        with pytest.raises(RequestShed, match="request R2 was sent away: 34 prompt tokens are too many"):
            list(llm.stream("a prompt of more than twenty bytes", max_tokens=3))
        assert "".join(llm.stream("short", max_tokens=3, ignore_eos=True)) == served.text
        assert not llm.engine.has_work and llm.engine.scheduler.blocks.num_used_blocks == 0


def test_a_policy_in_words(tiny_dir: Path):
    with open_llm(tiny_dir, policy="cap:most=2") as llm:
        llm.generate(["a", "b", "c", "d", "e"], max_tokens=4, ignore_eos=True, progress=False)
        assert max(len(step.tokens) for step in llm.trace.steps) == 2


def test_a_policy_that_predicts_knows_this_model_on_a_device(tiny_dir: Path):
    words = "slo:ttft_ms=60000,tpot_ms=10000"
    with open_llm(tiny_dir, policy=words) as own, open_llm(tiny_dir, policy=words, calibration="h100") as other:
        policies = [llm.engine.scheduler.policy for llm in (own, other)]
        times = [policy.times for policy in policies if isinstance(policy, SloAdmission)]
        assert [t.cost.device.name for t in times if isinstance(t, CostStepTimes)] == ["zen4-2-cores", "h100"]
        assert [output.finish_reason for output in own.generate(["a", "bc"], max_tokens=3, ignore_eos=True, progress=False)] == [
            "length"
        ] * 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": "cup:most=3"}, "no policy 'cup', did you mean 'cap'"),
        ({"policy": "slo:ttft_ms=5"}, "policy 'slo' needs tpot_ms"),
        ({"policy": "slo:ttft_ms=5,tpot_ms=1", "calibration": "a1000"}, "no device 'a1000'"),
    ],
)
def test_words_that_are_wrong(tiny_dir: Path, fields: dict[str, str], words: str):
    with pytest.raises(ValueError, match=words):
        open_llm(tiny_dir, **fields)


def test_a_bench_refuses_a_policy_that_sends_somebody_away(tiny_dir: Path):
    def request(name: str, num_prompt_tokens: int):
        return {"id": name, "prompt_ids": list(range(num_prompt_tokens)), "max_tokens": 2}

    with open_llm(tiny_dir, policy=SendsLongPromptsAway()) as llm:
        assert len(run_set(llm, [request("a", 5), request("b", 20)])["tokens"]["b"]) == 2
        with pytest.raises(InvalidRequest, match="sent 1 of 2 requests away.* 21 prompt tokens are too many"):
            run_set(llm, [request("a", 5), request("b", 21)])
