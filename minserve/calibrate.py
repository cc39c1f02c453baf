"""`minserve calibrate`: this machine as a device of the simulator, and how well the simulator then predicts it.

Why: a simulator is worth as much as its device. How fast memory is read and how fast the products of the model's shapes run at 1 to 512
rows is measured alone (`peaks.py`). Then the real engine serves a workload of its own (a burst, a trickle, a shared beginning), each of its
steps is written down as work and seconds, and what the products leave of a step is shared out by `sim/fit.py`.

Invariant: nothing of what the simulator is checked against (`check`) is used to fit it. Machines drift by a tenth within minutes, so the
runs to fit and the runs to check take turns, and medians are compared.

Taught in notebook 01.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from minserve.bench import load_workload
from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.engine import Arrival, Engine, Runner
from minserve.core.metrics import Summary
from minserve.core.request import InvalidRequest
from minserve.llm import LLM
from minserve.peaks import measure_peaks, weight_format
from minserve.sim.cost_model import CostModel, Work
from minserve.sim.devices import DeviceSpec
from minserve.sim.fit import Fit, fit_device
from minserve.sim.shapes import load_shape
from minserve.sim.simulator import make_engine
from minserve.sim.workload import Arrivals, Lengths, all_at_once, exact, make_workload, poisson

DECODED_TOGETHER, DECODED_TOKENS = (1, 16), 64
POISSON_RATE_PER_S = 1.5  # of the open version of `mixed`: about half of what two Zen 4 cores can serve


def cost_model(llm: LLM, device: DeviceSpec) -> CostModel:
    """The cost model of what `llm` serves, in its formats, on a device."""
    weights, head_bits = weight_format(llm)
    return CostModel(load_shape(llm.model_path), device, weights=weights, kv=llm.pool.kv_cache_dtype, head_bits=head_bits)


# --- steps of the real engine ---------------------------------------------------------------------


class RecordingRunner:
    """Notes the work of every step that it passes on."""

    def __init__(self, inner: Runner, cost: CostModel):
        self.inner, self.cost = inner, cost
        self.works: list[Work] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.works.append(self.cost.work(batch.rows))
        return self.inner.execute(batch)


def calibration_workload(seed: int, vocab_size: int) -> list[list[Arrival]]:
    """What is served to be fitted to, part by part: a mixed burst, many short, few long, a trickle at two rates, a common beginning.

    Short and long stand apart so that what a request costs and what its context costs can be told apart.
    """
    chat, answer = Lengths.lognormal(150, 0.9, 8, 512), Lengths.exponential(90, 256)
    kinds: list[tuple[int, Lengths, Lengths, Arrivals, int]] = [
        (40, chat, answer, all_at_once(), 0),
        (14, chat, answer, poisson(1.0), 0),
        (48, Lengths.uniform(8, 64), Lengths.uniform(16, 64), all_at_once(), 0),
        (14, chat, answer, poisson(2.5), 0),
        (24, Lengths.uniform(384, 512), Lengths.uniform(8, 48), all_at_once(), 0),
        (24, Lengths.uniform(272, 384), Lengths.uniform(8, 64), all_at_once(), 256),
    ]
    return [
        make_workload(count, prompt, output, when, seed + part, num_shared_tokens=shared, vocab_size=vocab_size).arrivals()
        for part, (count, prompt, output, when, shared) in enumerate(kinds)
    ]


def serve(engine: Engine, arrivals: Iterable[Arrival]) -> Summary:
    """Serve from a cold cache, the first arrival now; what came of it."""
    engine.scheduler.blocks.flush_cache()
    engine.trace = type(engine.trace)()
    start_s = engine.clock.now()
    engine.run([(start_s + time_s, arguments) for time_s, arguments in arrivals])
    summary = engine.trace.summary()
    if engine.trace.num_refused or summary.num_finished < summary.num_requests:
        raise InvalidRequest(f"{engine.trace.num_refused} requests were refused, {summary.num_finished} of {summary.num_requests} finished")
    return summary


def record_steps(engine: Engine, cost: CostModel, arrivals: Iterable[Arrival]) -> list[tuple[Work, float]]:
    """Serve the arrivals: (work, seconds) of every step that computed something."""
    inner, engine.runner = engine.runner, (recorder := RecordingRunner(engine.runner, cost))
    try:
        serve(engine, arrivals)
    finally:
        engine.runner = inner
    return [(work, s.elapsed_s) for work, s in zip(recorder.works, engine.trace.steps, strict=True) if work.num_tokens]


# --- the check ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload on both: medians of the real runs, the simulation, seconds."""

    workload: str
    metric: str
    real_s: tuple[float, ...]
    simulated_s: float

    @property
    def ratio(self) -> float:
        return self.simulated_s / statistics.median(self.real_s)


def check_workloads(sets: Mapping[str, Sequence[Mapping[str, Any]]], seed: int = 7) -> dict[str, list[Arrival]]:
    """The fixed workload of `minserve bench`, its `mixed` requests arriving one by one, at random, and few requests that only decode."""
    at_once = {name: [(0.0, _arguments(request)) for request in sets[name]] for name in ("mixed", "shared")}
    times_s = poisson(POISSON_RATE_PER_S).times_s(np.random.default_rng(seed), len(sets["mixed"]))
    open_loop = [(time_s, arguments) for time_s, (_, arguments) in zip(times_s, at_once["mixed"], strict=True)]
    decodes = {f"decode of {count}": [(0.0, _short_prompt(number)) for number in range(count)] for count in DECODED_TOGETHER}
    return {**at_once, f"mixed, Poisson {POISSON_RATE_PER_S}/s": open_loop, **decodes}


def _short_prompt(number: int) -> dict[str, Any]:
    """A few bytes, other ones for each number, and a longer answer."""
    return {"prompt_ids": [(17 * number + 5 * place) % 256 for place in range(16)], "params": exact(DECODED_TOKENS)}


def _arguments(request: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt_ids": request["prompt_ids"], "params": exact(request["max_tokens"])}


def twin(llm: LLM, cost: CostModel) -> Engine:
    """The engine of `llm` on a virtual device: the same scheduler settings and the same pool."""
    config, limits = llm.config, llm.engine.limits
    return make_engine(
        cost,
        num_blocks=llm.num_blocks,
        block_size=config.block_size,
        prefix_caching=config.prefix_caching,
        token_budget=config.token_budget,
        max_running=config.max_running,
        max_chunk_tokens=config.max_chunk_tokens,
        watermark_blocks=llm.engine.scheduler.config.watermark_blocks,
        max_model_len=limits.max_model_len,
    )


METRICS = ("wall_s", "ttft_p50_s", "tpot_p50_s")


def compare(llm: LLM, cost: CostModel, workloads: Mapping[str, list[Arrival]], real: Mapping[str, list[Summary]]) -> list[Comparison]:
    """Simulate each workload and set it beside its real runs."""
    found: list[Comparison] = []
    for name, arrivals in workloads.items():
        simulated = serve(twin(llm, cost), arrivals)
        for metric in METRICS:
            found.append(Comparison(name, metric, tuple(getattr(s, metric) for s in real[name]), getattr(simulated, metric)))
    return found


def table(comparisons: Sequence[Comparison]) -> str:
    """The check as text: real median and range, simulated, and their ratio."""
    words = {"wall_s": "makespan", "ttft_p50_s": "TTFT p50", "tpot_p50_s": "TPOT p50"}
    lines = [f"{'workload':<22} {'':<9} {'real, median (range)':>32} {'simulated':>12} {'ratio':>6}"]
    for c in comparisons:
        middle, low, high = (f"{1e3 * value:,.0f}" for value in (statistics.median(c.real_s), min(c.real_s), max(c.real_s)))
        real = f"{middle} ({low} to {high}) ms"
        lines.append(f"{c.workload:<22} {words[c.metric]:<9} {real:>32} {1e3 * c.simulated_s:>9,.0f} ms {c.ratio:>6.2f}")
    return "\n".join(lines)


# --- the command ----------------------------------------------------------------------------------


def main(model: str | None, out: str, *, num_rounds: int = 1, check: bool = False, json_path: str | None = None, **fields: Any) -> Fit:
    """Measure, fit, write the device to `out`; with `check`, serve and simulate the workloads of `minserve bench` as well."""
    workloads = check_workloads(load_workload()) if check else {}
    with LLM(model, **fields) as llm:
        peaks = measure_peaks(llm, Path(out).stem)
        print(f"memory {peaks.bytes_per_s / 1e9:.1f} GB/s, products up to {peaks.flops_per_s / 1e9:.0f} GFLOP/s", flush=True)
        cost = cost_model(llm, peaks)
        steps: list[tuple[Work, float]] = []
        real: dict[str, list[Summary]] = {workload: [] for workload in workloads}
        for number in range(num_rounds):
            parts = calibration_workload(10 * number, llm.engine.limits.vocab_size)
            for part, workload in zip_longest(parts, workloads):  # taking turns, so that a slow minute is in both
                steps += record_steps(llm.engine, cost, part) if part else []
                if workload:
                    real[workload].append(serve(llm.engine, workloads[workload]))
            print(f"round {number + 1} of {num_rounds}: {len(steps)} steps so far", file=sys.stderr, flush=True)
        fit = fit_device(cost, steps)
        comparisons = compare(llm, cost_model(llm, fit.device), workloads, real)
    print(describe(fit))
    if check:
        print(table(comparisons))
    fit.device.save(out)
    print(f"device written to {out}")
    if json_path:
        result = {"device": asdict(fit.device), "check": [{**asdict(c), "ratio": c.ratio} for c in comparisons]}
        Path(json_path).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return fit


def describe(fit: Fit) -> str:
    """What was found, in words."""
    d = fit.device
    small = f"{d.activation_share:.0%}" if d.activation_share else "too little to see"
    return (
        f"a step costs {1e3 * d.step_overhead_s:.1f} ms, {1e3 * d.prompt_overhead_s:.1f} ms more with prompts, and "
        f"{1e6 * d.request_overhead_s:.0f} us a request; of the bandwidth, weights reach "
        f"{d.weight_read_share:.0%}, keys and values {d.kv_read_share:.0%}, small operations {small}; of the matmul rate, "
        f"{', '.join(f'{share:.0%} at {rows:.0f} rows' for rows, share in d.matmul_shares)}, attention {d.attention_share:.0%}\n"
        f"{_describe_codes(d)}"
        f"over {fit.num_steps} steps: median error {fit.median_error:.1%}, sum {fit.total_ratio - 1:+.1%}"
    )


def _describe_codes(device: DeviceSpec) -> str:
    if device.max_code_rows is None:
        return ""
    many = "a copy of the weights" if device.keeps_weight_copy else "weights made of the codes in every step"
    rate, share = device.code_row_bytes_per_s, device.code_read_share
    speed = f" at {share:.0%} of the bandwidth, {rate / 1e9:.0f} GB/s over all rows" if rate and share else ""
    return f"weights in codes: up to {device.max_code_rows} rows{speed}, beyond by {many}\n"
