"""What is predicted of a step is what the simulator charges for it; and what predictions are worth to a server with limits."""

from dataclasses import replace

import pytest

from minserve.core.batch import ScheduledRequest
from minserve.core.metrics import goodput
from minserve.core.policies import FirstComeFirstServed, SizeCap
from minserve.core.request import Request, SamplingParams
from minserve.core.slo import SloAdmission
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.step_times import CostStepTimes
from minserve.sim.workload import TRACES, make_workload, poisson

COST_8B = CostModel(SHAPES["llama-3.1-8b"], DEVICES["a100-80gb"])


def row(start: int, num_tokens: int) -> ScheduledRequest:
    request = Request(f"R{start}", tuple(range(start + num_tokens)), SamplingParams(), max_total_tokens=9_999)
    return ScheduledRequest(request, start, num_tokens, (), samples=True)


SHAPES_TRIED = {
    "dense": SHAPES["llama-3.1-8b"],
    "experts": SHAPES["mixtral-8x7b"],
    "windows": replace(SHAPES["llama-3.1-8b"], window=64, num_window_layers=16),
}


@pytest.mark.parametrize("shape", SHAPES_TRIED)
@pytest.mark.parametrize("rows", [[row(99, 1), row(499, 1), row(1399, 1)], [row(0, 300)], [row(99, 1), row(899, 1), row(0, 700)], []])
def test_a_step_is_predicted_as_it_is_charged(shape: str, rows: list[ScheduledRequest]):
    cost = CostModel(SHAPES_TRIED[shape], DEVICES["a100-80gb"])
    decodes = [r for r in rows if r.num_tokens == 1]
    num_prompt_tokens = sum(r.num_tokens for r in rows) - len(decodes)
    predicted_s = CostStepTimes(cost).step_s(len(decodes), sum(r.end for r in decodes), num_prompt_tokens)
    assert predicted_s == pytest.approx(cost.of(cost.work(rows)).seconds, rel=1e-12) and predicted_s > 0


def test_limits_are_kept_in_overload_where_others_fail():
    """Azure's chats at four times what an 8B on an A100 can serve within 2 s and 100 ms."""
    times, load = CostStepTimes(COST_8B), make_workload(120, *TRACES["azure-chat"], poisson(32.0), seed=1)
    found: dict[str, float] = {}
    for name, policy in {"slo": SloAdmission(times, 2.0, 0.1), "all": FirstComeFirstServed(), "64": SizeCap(64)}.items():
        trace = simulate(make_engine(COST_8B, policy=policy), load)
        found[name] = goodput(trace.requests.values(), trace.summary().wall_s, ttft_s=2.0, tpot_s=0.1)
        if name == "slo":  # whoever is let in is served in time
            served = [record for record in trace.requests.values() if record.finish_reason == "length"]
            in_time = [r for r in served if (r.ttft_s or 0.0) <= 2.0 and (r.tpot_s or 0.0) <= 0.1]
            assert len(in_time) == len(served) > 60
    assert found["slo"] > 2 * max(rate for name, rate in found.items() if name != "slo")
