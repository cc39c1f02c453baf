"""This machine as a device, on a model small enough that it takes seconds. Times are not asserted, only what is done with them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minserve import calibrate
from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.engine import Arrival
from minserve.core.metrics import Summary
from minserve.core.request import InvalidRequest
from minserve.llm import LLM
from minserve.sim.devices import DeviceSpec, load_device
from minserve.sim.workload import exact
from tests.tiny_model import save_tiny_model

SETTINGS: dict[str, Any] = {"dtype": "fp32", "num_blocks": 200, "token_budget": 64, "max_running": 6, "verbose": False}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def peaks() -> DeviceSpec:
    """Made up: what is measured alone has tests of its own."""
    return DeviceSpec(
        name="tiny",
        memory_bytes=1e9,
        bytes_per_s=10e9,
        flops_per_s=50e9,
        weight_read_share=0.8,
        matmul_shares=((16, 0.5), (512, 0.9)),
        packs_weights=True,
        shares_prefix_reads=True,
    )


def some_arrivals() -> list[Arrival]:
    """A dozen requests, half of which begin alike; more than may run at once."""
    prompts = [[*range(40), *range(index, index + 20)] if index % 2 else list(range(100 + index, 130 + index)) for index in range(12)]
    return [(0.0, {"prompt_ids": ids, "params": exact(4 + index)}) for index, ids in enumerate(prompts)]


def test_every_step_is_written_down_with_its_work(llm: LLM, peaks: DeviceSpec):
    inner = llm.engine.runner
    steps = calibrate.record_steps(llm.engine, calibrate.cost_model(llm, peaks), some_arrivals())
    assert llm.engine.runner is inner
    assert len(steps) == len(llm.trace.steps) and [seconds for _, seconds in steps] == [s.elapsed_s for s in llm.trace.steps]
    assert [work.num_tokens for work, _ in steps] == [s.num_tokens for s in llm.trace.steps]
    assert sum(work.num_samples for work, _ in steps) == sum(4 + index for index in range(12))


class Listener:
    """Keeps the batches that it passes on."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.batches: list[dict[str, object]] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.batches.append(batch.plain())
        return self.inner.execute(batch)


def test_the_twin_takes_the_same_steps(model_dir: Path, peaks: DeviceSpec):
    """All at once, the clock does not matter: the engine and its twin on a virtual device hand out the same tokens in the same blocks."""
    seen = []
    with LLM(model_dir, **SETTINGS) as fresh:
        for engine in (fresh.engine, calibrate.twin(fresh, calibrate.cost_model(fresh, peaks))):
            engine.runner = listener = Listener(engine.runner)
            summary = calibrate.serve(engine, some_arrivals())
            assert summary.num_finished == 12 and summary.num_hit_tokens > 0
            seen.append(listener.batches)
    assert seen[0] == seen[1]


def test_the_command_writes_a_device_and_compares(
    model_dir: Path, peaks: DeviceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    requests = [{"id": str(i), "prompt_ids": list(range(i, i + 20)), "max_tokens": 3 + i % 3} for i in range(6)]
    monkeypatch.setattr(calibrate, "load_workload", lambda: {"mixed": requests, "shared": requests[:3]})
    monkeypatch.setattr(calibrate, "measure_peaks", lambda llm, name: replace(peaks, name=name))
    monkeypatch.setattr(calibrate, "POISSON_RATE_PER_S", 1000.0)
    monkeypatch.setattr(
        calibrate,
        "calibration_workload",
        lambda seed, vocab_size: [calibrate.check_workloads({"mixed": requests, "shared": requests})["mixed"]],
    )
    out, results = tmp_path / "here.json", tmp_path / "check.json"
    fit = calibrate.main(
        str(model_dir), str(out), num_rounds=3, check=True, json_path=str(results), dtype="fp32", num_blocks=100, verbose=False
    )
    assert load_device(out) == fit.device and fit.device.name == "here" and fit.num_steps >= 5
    check = json.loads(results.read_text(encoding="utf-8"))["check"]
    assert [(row["workload"], row["metric"]) for row in check][:4] == [
        ("mixed", "wall_s"),
        ("mixed", "ttft_p50_s"),
        ("mixed", "tpot_p50_s"),
        ("shared", "wall_s"),
    ]
    assert len(check) == 15 and all(len(row["real_s"]) == 3 and row["ratio"] > 0 for row in check)
    assert [row["workload"] for row in check][9::3] == ["decode of 1", "decode of 16"]
    printed = capsys.readouterr().out
    assert "a step costs" in printed and "mixed, Poisson 1000.0/s" in printed and f"device written to {out}" in printed


def test_what_only_decodes_shares_nothing() -> None:
    requests = [{"id": "0", "prompt_ids": [1, 2], "max_tokens": 3}]
    made = calibrate.check_workloads({"mixed": requests, "shared": requests})["decode of 16"]
    assert len({arguments["prompt_ids"][0] for _, arguments in made}) == 16 and {time_s for time_s, _ in made} == {0.0}
    assert all(arguments["params"].max_tokens == calibrate.DECODED_TOKENS for _, arguments in made)


def test_the_table_shows_median_range_and_ratio():
    row = calibrate.Comparison("mixed", "wall_s", (22.0, 26.0, 23.0), 24.15)
    assert row.ratio == pytest.approx(1.05)
    assert calibrate.table([row]).splitlines()[1].split() == [
        "mixed",
        "makespan",
        "23,000",
        "(22,000",
        "to",
        "26,000)",
        "ms",
        "24,150",
        "ms",
        "1.05",
    ]


def test_a_run_in_which_somebody_is_refused_is_no_result(llm: LLM):
    with pytest.raises(InvalidRequest, match="1 requests were refused, 12 of 12 finished"):
        calibrate.serve(llm.engine, [*some_arrivals(), (0.0, {"prompt_ids": [99_999], "params": exact(1)})])


def test_a_summary_has_the_metrics_that_are_compared():
    assert set(calibrate.METRICS) <= set(Summary.__slots__)


def test_devices_differ_only_in_what_was_fitted(llm: LLM, peaks: DeviceSpec):
    steps = calibrate.record_steps(llm.engine, calibrate.cost_model(llm, peaks), some_arrivals())
    device = calibrate.fit_device(calibrate.cost_model(llm, peaks), steps).device
    fitted = {
        name: getattr(peaks, name)
        for name in (
            "step_overhead_s",
            "request_overhead_s",
            "prompt_overhead_s",
            "activation_share",
            "kv_read_share",
            "attention_share",
            "gathers_kv",
        )
    }
    assert replace(device, **fitted) == peaks


@pytest.mark.parametrize(("rate", "words"), [(None, ""), (30e9, " at 70% of the bandwidth, 30 GB/s over all rows")])
def test_what_codes_cost_is_told(peaks: DeviceSpec, rate: float | None, words: str):
    share = 0.7 if rate else None
    device = replace(peaks, max_code_rows=4, keeps_weight_copy=False, code_read_share=share, code_row_bytes_per_s=rate)
    text = calibrate.describe(calibrate.Fit(device, 10, 0.05, 1.01))
    assert f"weights in codes: up to 4 rows{words}, beyond by weights made of the codes in every step" in text
    assert "in codes" not in calibrate.describe(calibrate.Fit(peaks, 10, 0.05, 1.01))


def test_quantized_weights_are_in_the_cost_model(model_dir: Path, peaks: DeviceSpec):
    with LLM(model_dir, weights="int8", **SETTINGS) as llm:
        cost = calibrate.cost_model(llm, peaks)
        steps = calibrate.record_steps(llm.engine, cost, some_arrivals())
    assert (cost.weights, cost.head_bits) == ("int8", 8) and len(steps) > 10
    assert cost.weight_bytes == cost.shape.weight_bytes("int8")
