"""`minserve bench --gpu`: one prepared run that measures the kernels and the engine on a real card, in less than 12 minutes.

Why: time on a card is short and dear, so nothing should have to be thought of there. In order: what the card can do (a copy, a
product), whether every kernel is right (against float64), the table of `gpu_table.py`, the whole engine with each backend, and what
allocation costs by the driver, by torch's cache and by a pool.

Each section is a process of its own with a share of the time: a kernel that hangs, or that leaves the card unusable for its
process, costs its section and not the run. Sections write what they have found into the file as soon as they have it.

Invariant: a number in the file was measured in this run, on the card it names; what was not measured has a reason.

No GPU was at hand when this was written: all but the lines that touch a device is tested without one. Taught in notebook 05.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from minserve.allocations import Recording
from minserve.bench import load_workload, run_set
from minserve.bench_host import BLOCKS_A_REQUEST, record_run
from minserve.gpu_allocation import allocation_costs, lines
from minserve.gpu_table import HEADER, TABLE, Measured, line, result_of
from minserve.llm import LLM
from minserve.model.runner import ModelRunner
from minserve_kernels.gpu_clock import Work, seconds_of

# Seconds that a section may take until it measures nothing new, in order; together, and with GRACE_S each, less than 12 minutes.
SECTIONS_S = {"ceilings": 40.0, "checks": 150.0, "table": 190.0, "engine": 180.0, "allocation": 50.0}
GRACE_S = 20.0  # for what a section has begun, and then its process is ended
ALLOCATION_BATCH = 16
SEED = 20261129
ENGINES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("torch", {"attention_backend": "torch"}),
    ("triton, no graphs", {"attention_backend": "triton", "cuda_graphs": False}),
    ("triton, CUDA graphs", {"attention_backend": "triton", "cuda_graphs": True}),
    ("triton, CUDA graphs, int8 KV", {"attention_backend": "triton", "cuda_graphs": True, "kv_cache_dtype": "int8"}),
    ("triton, CUDA graphs, int4 KV", {"attention_backend": "triton", "cuda_graphs": True, "kv_cache_dtype": "int4"}),
)
Clock = Callable[[Work], float]  # -> seconds of one launch


class NoGpu(RuntimeError):
    """There is nothing here to measure."""


# --- the run: one file, one process a section -----------------------------------------------------


def main(model: str | None, json_path: str | None = None) -> dict[str, Any]:
    """Measure everything on the card that is here, print it, write the JSON. Raises NoGpu where there is none."""
    require_gpu(torch.cuda.is_available(), platform.node())
    machine = describe_machine(torch.device("cuda", torch.cuda.current_device()))
    print(f"{machine['card']}, driver {machine['driver']}, {', '.join(f'{k} {v}' for k, v in machine['versions'].items())}", flush=True)
    path = Path(json_path) if json_path else default_path(machine)
    return run_sections(path, new_report(machine, time.strftime("%Y-%m-%d")), partial(start_section, path=path, model=model))


def require_gpu(is_available: bool, machine: str) -> None:
    """Raise NoGpu, in one sentence, unless there is a card."""
    if not is_available:
        raise NoGpu(f"bench --gpu measures a CUDA or HIP device and torch sees none on {machine}; without --gpu it measures the CPU")


def new_report(machine: Mapping[str, Any], date: str) -> dict[str, Any]:
    """The file's form, with nothing measured yet."""
    what = "kernels and engine on one card: ceilings, errors against float64, the table of shares and ratios, tokens a second"
    empty = {"ceilings": {}, "checks": [], "works": {}, "table": [], "engine": [], "allocation": {}, "sections_s": {}, "failures": []}
    return {"what": what, **machine, "date": date, "seed": SEED, **empty}


def default_path(machine: Mapping[str, Any]) -> Path:
    """figures/data/gpu-<card>-torch<version>.json

    >>> default_path({"card": "NVIDIA H200", "versions": {"torch": "2.11.0+cu130"}}).as_posix()
    'figures/data/gpu-nvidia-h200-torch2.11.json'
    """
    card = re.sub(r"[^a-z0-9]+", "-", machine["card"].lower()).strip("-")
    return Path("figures/data") / f"gpu-{card}-torch{'.'.join(machine['versions']['torch'].split('.')[:2])}.json"


def run_sections(path: Path, report: dict[str, Any], start: Callable[[str], str | None]) -> dict[str, Any]:
    """All sections in their order, whatever becomes of each. `start` runs one and returns what went wrong with it as a whole."""
    write(path, report)
    for name in SECTIONS_S:
        print(f"\n--- {name}", flush=True)
        begin_s = time.monotonic()
        reason = start(name)
        report = json.loads(path.read_text(encoding="utf-8"))
        report["sections_s"][name] = round(time.monotonic() - begin_s, 1)
        if reason is not None:
            print(f"FAILED {name}: {reason}", flush=True)
            report["failures"].append({"what": name, "reason": reason})
        write(path, report)
    took_s, num_failures = sum(report["sections_s"].values()), len(report["failures"])
    print(f"\n{took_s:.0f} s in all, {num_failures} failure{'' if num_failures == 1 else 's'}, written to {path}")
    return report


def start_section(name: str, path: Path, model: str | None) -> str | None:
    """Run a section in a process of its own. -> what went wrong, or None"""
    command = [sys.executable, "-m", "minserve.bench_gpu", name, str(path), *([model] if model else [])]
    limit_s = SECTIONS_S[name] + GRACE_S
    try:
        status = subprocess.run(command, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return f"it was ended after {limit_s:.0f} s"
    return None if status == 0 else f"its process ended with status {status}"


def write(path: Path, report: Mapping[str, Any]) -> None:
    """As a whole or not at all: the process may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
    os.replace(beside, path)


# --- a section ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """What was found so far, where it is written, and until when new things may be begun."""

    path: Path
    report: dict[str, Any]
    limit_s: float
    now: Callable[[], float] = time.monotonic
    end_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.end_s = self.now() + self.limit_s

    @property
    def is_over(self) -> bool:
        return self.now() >= self.end_s

    def say(self, text: str) -> None:
        """Print, and write what was found up to here."""
        print(text, flush=True)
        write(self.path, self.report)

    def fail(self, what: str, error: Exception | str) -> str:
        """Note and say what went wrong. -> the reason in one line"""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        reason = text.strip().splitlines()[0][:200]
        self.report["failures"].append({"what": what, "reason": reason})
        self.say(f"FAILED {what}: {reason}")
        return reason


def section(arguments: Sequence[str]) -> None:
    """What `start_section` starts: measure one section and add it to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=SECTIONS_S)
    parser.add_argument("path", type=Path)
    parser.add_argument("model", nargs="?")
    given = parser.parse_args(arguments)
    run = Run(given.path, json.loads(given.path.read_text(encoding="utf-8")), SECTIONS_S[given.name])
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(SEED)
    # Imported here: they need Triton, which is optional, and `minserve bench` without a card must not.
    from minserve_kernels.gpu_check import MOST_ERROR, make_checks
    from minserve_kernels.gpu_time import make_works

    clock = partial(seconds_of, l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size)
    if given.name == "ceilings":
        measure_ceilings(run, make_works(device), clock)
    elif given.name == "checks":
        check_kernels(run, make_checks(device), MOST_ERROR)
    elif given.name == "table":
        measure_table(run, make_works(device), clock)
    elif given.name == "engine":
        measure_engines(run, lambda settings: LLM(given.model, device=str(device), verbose=False, **settings))
    else:
        with LLM(given.model, device=str(device), verbose=False, num_blocks=ALLOCATION_BATCH * BLOCKS_A_REQUEST) as llm:
            measure_allocation(run, llm, allocation_costs)
    write(run.path, run.report)


def measure_ceilings(run: Run, works: Mapping[str, Work], clock: Clock) -> None:
    """What the card can do at most, as everything else is a share of it."""
    copy, product = works["copy"], works["matmul"]
    ceilings = run.report["ceilings"]
    ceilings["copy_bytes_per_s"] = copy.num_bytes / clock(copy)
    run.say(f"copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written")
    ceilings["matmul_flops_per_s"] = product.num_flops / clock(product)
    run.say(f"bf16 product {ceilings['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s")


def check_kernels(run: Run, checks: Mapping[str, Callable[[], float]], most_error: float) -> None:
    """Every kernel against float64. What is wrong is a failure of the run; its times are measured all the same."""
    for number, (name, check) in enumerate(checks.items()):
        if run.is_over:
            run.fail("checks", f"time is up, {len(checks) - number} of {len(checks)} were not made, the first of them {name}")
            break
        try:
            error = check()
        except Exception as raised:
            run.report["checks"].append({"name": name, "error": None, "is_right": False, "reason": run.fail(name, raised)})
            continue
        is_right = error <= most_error  # NaN is not
        run.report["checks"].append({"name": name, "error": error if error < float("inf") else None, "is_right": is_right})
        if not is_right:
            run.fail(name, f"relative error {error:.2g} against float64, at most {most_error:g} is right")
    num_right = sum(check["is_right"] for check in run.report["checks"])
    run.say(f"{num_right} of {len(checks)} checks against float64 are right")


def measure_table(run: Run, works: Mapping[str, Work], clock: Clock) -> None:
    """Time every work; after each, the rows of the table that it decides are written, and at the end all are printed."""
    measured: dict[str, Measured | str] = {}
    copy_bytes_per_s = run.report["ceilings"].get("copy_bytes_per_s", 0.0)
    for name, work in works.items():
        if name in ("copy", "matmul"):
            continue
        measured[name] = run.fail(name, "time is up") if run.is_over else _measure(run, name, work, clock)
        results = [result_of(row, measured, copy_bytes_per_s) for row in TABLE]
        run.report["table"] = [result.to_json() for result in results]
        if isinstance(found := measured[name], Measured):
            run.report["works"][name] = {"seconds": found.seconds, "bytes": found.num_bytes, "flops": found.num_flops}
            run.say(f"{name:<28} {1e6 * found.seconds:>10.1f} us")
    run.say("\n".join(["", HEADER, *(line(result_of(row, measured, copy_bytes_per_s)) for row in TABLE)]))


def _measure(run: Run, name: str, work: Work, clock: Clock) -> Measured | str:
    try:
        return Measured(clock(work), work.num_bytes, work.num_flops)
    except Exception as error:  # a kernel that does not compile leaves the others to be measured
        return run.fail(name, error)


def measure_engines(run: Run, make_llm: Callable[[Mapping[str, Any]], LLM]) -> None:
    """Tokens a second of the whole engine on the fixed workload, all requests at once and one alone, for each way to run it."""
    sets = load_workload()
    first_tokens: dict[str, list[int]] = {}
    for name, settings in ENGINES:
        if run.is_over:
            run.fail(f"engine {name}", "time is up")
            continue
        try:
            found = _serve(make_llm, settings, sets)
        except Exception as error:
            run.fail(f"engine {name}", error)
            continue
        tokens = found.pop("tokens")
        first_tokens = first_tokens or tokens
        entry = {"name": name, "settings": dict(settings), **found, "same_tokens_as_first": same_share(tokens, first_tokens)}
        run.report["engine"].append(entry)
        run.say(
            f"{name:<30} {found['all_at_once']['out_tok_s']:>9,.0f} tokens/s together, {found['alone']['out_tok_s']:>7,.0f} alone, "
            f"{100 * entry['same_tokens_as_first']:.1f} % of the tokens as with {run.report['engine'][0]['name']}"
        )


def _serve(make_llm: Callable[[Mapping[str, Any]], LLM], settings: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    with make_llm(settings) as llm:
        for requests in (sets["warmup"], sets["mixed"][:1]):  # compiles what the sets will launch
            run_set(llm, requests)
        found: dict[str, Any] = {}
        for name, requests in (("all_at_once", sets["mixed"]), ("alone", sets["mixed"][:1])):
            llm.engine.scheduler.blocks.flush_cache()
            run_set(llm, requests)  # a first time for kernels of other shapes
            llm.engine.scheduler.blocks.flush_cache()
            found[name] = run_set(llm, requests)
        tokens = found["all_at_once"].pop("tokens")
        found["alone"].pop("tokens")
        return {**found, "tokens": tokens, "dtype": str(llm.dtype).removeprefix("torch."), "kv_cache_dtype": llm.pool.kv_cache_dtype}


def measure_allocation(run: Run, llm: LLM, costs_of: Callable[[Recording, int, torch.device], Iterable[Mapping[str, Any]]]) -> None:
    """Record a run of the fixed workload, and put what it asked of its memory to each allocator of the card."""
    requests = load_workload()["mixed"][: 2 * ALLOCATION_BATCH]
    record_run(llm, requests, ALLOCATION_BATCH)  # a first time, which compiles
    recording = record_run(llm, requests, ALLOCATION_BATCH)
    load = recording.load(ALLOCATION_BATCH)
    run.report["allocation"] = {"load": asdict(load), "allocators": []}
    run.say(f"a run of {load.num_steps} steps of {1e3 * load.step_s:.2f} ms, {load.calls_per_step:.1f} blocks taken or given back in each")
    for found in costs_of(recording, ALLOCATION_BATCH, cast(ModelRunner, llm.engine.runner).decoder.device):
        run.report["allocation"]["allocators"].append(found)
        run.say(lines(found, load.step_s))
        if run.is_over:
            run.fail("allocation", f"time is up after {found['allocator']}")
            break


def same_share(tokens: Mapping[str, Sequence[int]], others: Mapping[str, Sequence[int]]) -> float:
    """Share of the tokens before the first that differs, over all requests: after it, greedy answers go their own ways.

    >>> same_share({"a": [1, 2, 3, 4], "b": [5]}, {"a": [1, 2, 9, 4], "b": [5]})
    0.6
    """
    num_same = sum(
        next((i for i, (a, b) in enumerate(zip(ids, others[name], strict=True)) if a != b), len(ids)) for name, ids in tokens.items()
    )
    return num_same / sum(map(len, tokens.values()))


# --- the machine ----------------------------------------------------------------------------------


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Card, driver and versions: what a number is worth nothing without."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "card": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "versions": {
            "torch": torch.__version__,
            **{name: installed(name) for name in ("triton", "transformers")},
            "python": platform.python_version(),
        },
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """As nvidia-smi says it; None where there is no nvidia-smi."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


if __name__ == "__main__":
    section(sys.argv[1:])
