"""`minserve bench --host`: where the time of a step goes, part by part, and what allocation costs at the rates of a real run.

Why: that memory management takes 5-15 % of throughput is said of engines that allocate as they serve. Here it is measured: how long
policy, block pool, scheduler, tensors, model, sampling and text take of each step, and what other ways to come by memory would take if
they were called as often as this run calls its pool.

Nothing in the engine keeps time for this. The callables of one engine are wrapped from outside, and given back unwrapped: a wrapped one
costs `clock_us` more, which its part pays, so the share of a part that is called often is an upper bound. A profiler (cProfile) says the
same of the same run; no tool of a GPU is needed for what happens on the host.

Invariant: parts are exclusive (time in a callable that another one calls is not the other's), and sum to the whole.

Taught in notebook 11.
"""

import cProfile
import inspect
import platform
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from tqdm import tqdm

from minserve.allocations import Recording
from minserve.allocators import measure_costs
from minserve.bench import load_workload
from minserve.core.request import SamplingParams
from minserve.host_record import PARTS, HostRecord, StepParts, cost_table, describe_need, step_table, write_record
from minserve.interface import RequestOutput
from minserve.llm import LLM
from minserve.model.runner import ModelRunner
from minserve.model.tokenizer import Detokenizer

BATCH_SIZES = (1, 8, 16)
NUM_ROUNDS = 3
NUM_REPLAYS = 7
LEAST_REQUESTS = 4
MAX_TOKENS = 64  # of an answer: enough for requests to come and go, and for a run of seconds
BLOCKS_A_REQUEST = 40  # of 16 tokens
POLICY = ("order", "candidates", "wake_s", "token_budget", "shed")
POOL = ("find_prefix", "find_fork", "num_idle_of", "start", "num_new_blocks", "grow", "table", "commit", "release", "distrust")


# --- clocks around callables ----------------------------------------------------------------------


class PartClock:
    """Seconds by part, exclusive, and by callable, with all that it calls; `marks` has a copy for the beginning of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.within_s: dict[str, float] = defaultdict(float)
        self.num_calls = 0
        self.marks: list[tuple[float, dict[str, float]]] = []
        self._inner_s = 0.0  # in clocked callables, within the one that is under way

    def clocked(self, part: str, name: str, call: Callable[..., Any], marks: bool = False) -> Callable[..., Any]:
        """`call`, clocked. With `marks`, each call begins a step."""

        def run(*arguments: Any, **named: Any) -> Any:
            before_s, self._inner_s = self._inner_s, 0.0
            start_s = time.perf_counter()
            if marks:
                self.marks.append((start_s, dict(self.seconds)))
            try:
                return call(*arguments, **named)
            finally:
                took_s = time.perf_counter() - start_s
                self.seconds[part] += took_s - self._inner_s
                self.within_s[name] += took_s
                self.num_calls += 1
                self._inner_s = before_s + took_s

        return run

    def per_step_s(self, end_s: float) -> list[dict[str, float]]:
        """Seconds of each part of each step; what no part accounts for, up to the next step, is `rest`."""
        found: list[dict[str, float]] = []
        for (start_s, before), (stop_s, after) in zip(self.marks, [*self.marks[1:], (end_s, self.seconds)], strict=True):
            parts = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in PARTS}
            parts["rest"] = stop_s - start_s - sum(parts[part] for part in PARTS if part != "rest")
            found.append(parts)
        return found


def callables(llm: LLM) -> list[tuple[str, Any, str]]:
    """What is clocked: (part, whose, its name)."""
    engine, runner = llm.engine, cast(ModelRunner, llm.engine.runner)
    scheduler, trace = engine.scheduler, engine.trace
    return [
        *(("pool", scheduler.blocks, name) for name in POOL),
        ("schedule", scheduler, "schedule"),
        ("inputs", runner, "execute"),
        ("inputs", runner.cache, "copy_blocks"),
        ("inputs", runner.operations, "lay_out"),
        ("model", runner.decoder, "forward"),
        ("model", runner.decoder, "logits"),
        ("sampling", runner.sampler, "sample"),
        ("update", scheduler, "update"),
        *(("trace", trace, name) for name in ("plan", "step")),
        *(("text", Detokenizer, name) for name in ("push", "finish")),
        ("rest", engine, "step"),
    ]


@contextmanager
def clocks_around(llm: LLM) -> Iterator[PartClock]:
    """While this is open, every call of `callables` and of the policy is clocked."""
    clock, scheduler = PartClock(), llm.engine.scheduler
    with ExitStack() as stack:
        stack.callback(setattr, scheduler, "policy", scheduler.policy)
        policy = {name: clock.clocked("policy", name, getattr(scheduler.policy, name)) for name in POLICY}
        scheduler.policy = cast(Any, SimpleNamespace(**policy))  # a policy may have no room for other attributes
        for part, owner, name in callables(llm):
            call, is_own = getattr(owner, name), name in vars(owner)
            if is_own:
                stack.callback(setattr, owner, name, call)
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, clock.clocked(part, name, call, marks=owner is llm.engine))
        yield clock


def measure_clock_us(num_calls: int = 20_000) -> float:
    """What clocking a call costs, in microseconds."""

    def nothing() -> None:
        pass

    clocked = PartClock().clocked("rest", "nothing", nothing)
    seconds: list[float] = []
    for call in (clocked, nothing):
        start_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        seconds.append(time.perf_counter() - start_s)
    return 1e6 * (seconds[0] - seconds[1]) / num_calls


# --- runs -----------------------------------------------------------------------------------------


def serve(llm: LLM, requests: Sequence[Mapping[str, Any]], batch_size: int) -> tuple[list[RequestOutput], float]:
    """All requests at once to an engine that runs at most `batch_size` of them, with nothing cached. -> answers, seconds"""
    scheduler = llm.engine.scheduler
    config, scheduler.config = scheduler.config, replace(scheduler.config, max_running=batch_size)
    try:
        scheduler.blocks.flush_cache()
        params = [SamplingParams(max_tokens=min(MAX_TOKENS, request["max_tokens"]), ignore_eos=True) for request in requests]
        start_s = time.perf_counter()
        outputs = llm.generate([request["prompt_ids"] for request in requests], params, progress=False)
        return outputs, time.perf_counter() - start_s
    finally:
        scheduler.config = config


def record_run(llm: LLM, requests: Sequence[Mapping[str, Any]], batch_size: int) -> Recording:
    """A run without clocks, to be replayed."""
    llm.reset_trace()
    outputs, run_s = serve(llm, requests, batch_size)
    return Recording.of(llm, llm.trace, outputs, run_s)


def clock_run(llm: LLM, requests: Sequence[Mapping[str, Any]], batch_size: int) -> tuple[PartClock, list[tuple[str, Mapping[str, float]]]]:
    """A run with clocks. -> the clock, and for each step its kind and its parts: "decode" is one of `batch_size` decodes alone"""
    llm.reset_trace()
    with clocks_around(llm) as clock:
        serve(llm, requests, batch_size)
        end_s = time.perf_counter()
    kinds = ["decode" if [n for _, n in step.tokens.values()] == [1] * batch_size else "other" for step in llm.trace.steps]
    return clock, list(zip(kinds, clock.per_step_s(end_s), strict=True))


def step_parts(rounds: Sequence[tuple[PartClock, Sequence[tuple[str, Mapping[str, float]]]]], batch_size: int) -> list[StepParts]:
    """All steps, and those of `batch_size` decodes alone if there are any: means over steps, then medians over rounds."""
    found: list[StepParts] = []
    for kind in ("all", "decode"):
        chosen = [[parts for own, parts in steps if kind in ("all", own)] for _, steps in rounds]
        if not all(chosen):
            continue
        means = [{part: 1e3 * statistics.fmean(step[part] for step in steps) for part in PARTS} for steps in chosen]
        parts_ms = {part: statistics.median(mean[part] for mean in means) for part in PARTS}
        step_ms = statistics.median(sum(mean.values()) for mean in means)
        num_clocked = rounds[0][0].num_calls / len(rounds[0][1])
        found.append(StepParts(batch_size, kind, len(chosen[0]), step_ms, parts_ms, num_clocked))
    return found


def profile_run(llm: LLM, requests: Sequence[Mapping[str, Any]], batch_size: int) -> dict[str, dict[str, float]]:
    """Shares of a run by callable, with all that it calls: as our clocks have them, and as cProfile has them."""
    llm.reset_trace()
    with clocks_around(llm) as clock:
        _, run_s = serve(llm, requests, batch_size)
    clocked = {name: clock.within_s[name] / run_s for name in ("schedule", "lay_out", "forward", "logits", "sample", "update", "push")}
    llm.reset_trace()
    profiler = cProfile.Profile()
    _, profiled_s = profiler.runcall(serve, llm, requests, batch_size)
    stats = cast(Any, pstats.Stats(profiler)).stats  # (file, line, name) -> calls, calls, own s, s with callees, callers
    profiled: dict[str, float] = {}
    for _, owner, name in callables(llm):
        code = inspect.unwrap(getattr(owner, name)).__code__
        entry = stats.get((code.co_filename, code.co_firstlineno, code.co_name))
        if name in clocked:
            profiled[name] = entry[3] / profiled_s if entry else 0.0
    return {"clocked": clocked, "profiled": profiled, "run_s": {"clocked": run_s, "profiled": profiled_s}}


# --- the command ----------------------------------------------------------------------------------


def measure(llm: LLM, batch_sizes: Sequence[int], num_rounds: int = NUM_ROUNDS, num_replays: int = NUM_REPLAYS) -> HostRecord:
    """Everything, on an engine that has run nothing yet. Raises ValueError for one that is not on a CPU."""
    device = cast(ModelRunner, llm.engine.runner).decoder.device
    if device.type != "cpu":
        raise ValueError(f"bench --host clocks calls that have computed when they return, as on a CPU; this engine is on {device}")
    sets = load_workload()
    chosen = {size: sets["mixed"][: max(LEAST_REQUESTS, 2 * size)] for size in batch_sizes}
    serve(llm, sets["warmup"], max(batch_sizes))
    rounds: dict[int, list[Any]] = {size: [] for size in batch_sizes}
    recordings: dict[int, list[Recording]] = {size: [] for size in batch_sizes}
    with tqdm(total=2 * len(chosen) * num_rounds, unit="run", delay=1.0, leave=False) as bar:
        for _ in range(num_rounds):
            for size, requests in chosen.items():
                recordings[size].append(record_run(llm, requests, size))
                rounds[size].append(clock_run(llm, requests, size))
                bar.update(2)
    usual = {size: sorted(found, key=lambda r: r.run_s)[len(found) // 2] for size, found in recordings.items()}
    return HostRecord(
        date=time.strftime("%Y-%m-%d"),
        machine=f"{platform.machine()}, {platform.system()}",
        how="minserve bench --host",
        versions={"python": platform.python_version(), "torch": torch.__version__},
        engine=llm.describe(),
        threads=torch.get_num_threads(),
        num_rounds=num_rounds,
        clock_us=measure_clock_us(),
        steps=[parts for size in batch_sizes for parts in step_parts(rounds[size], size)],
        loads=[usual[size].load(size) for size in batch_sizes],
        costs=[cost for size in batch_sizes for cost in measure_costs(usual[size], size, device, num_replays)],
        profiled=profile_run(llm, chosen[max(batch_sizes)], max(batch_sizes)),
    )


def main(
    model: str | None,
    json_path: str | None = None,
    *,
    batch_sizes: Sequence[int] | None = None,
    num_rounds: int | None = None,
    **fields: Any,
) -> HostRecord:
    """Measure, print, write the JSON."""
    batch_sizes, num_rounds = batch_sizes or BATCH_SIZES, num_rounds or NUM_ROUNDS
    num_blocks = max(batch_sizes) * BLOCKS_A_REQUEST  # not gigabytes: what is written to has to be there beforehand
    with LLM(model, **{"num_blocks": num_blocks, **fields}) as llm:
        record = measure(llm, batch_sizes, num_rounds)
    print(f"{record.num_rounds} rounds, {record.threads} threads; clocking a call costs {record.clock_us:.2f} us\n")
    print(step_table(record.steps), "", cost_table(record), "", sep="\n")
    for size in batch_sizes:
        print(describe_need(record, size))
    shares = ", ".join(
        f"{name} {100 * share:.1f} and {100 * record.profiled['profiled'][name]:.1f} %"
        for name, share in record.profiled["clocked"].items()
    )
    print(f"Shares of a run by these clocks and by cProfile: {shares}")
    if json_path:
        write_record(record, json_path)
    return record
