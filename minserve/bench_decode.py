"""`minserve bench --decode`: tokens a second of weight formats, side by side, by the number of requests that decode together.

Why: with few requests a decode step waits for the weights, and a format of half the bytes may halve it; with many it computes, and the
same format gains nothing or costs. Where that turns is what one asks before choosing a format, and it is another place on each machine.

All formats are open in one process. For each batch size they take turns, round by round and in another order each time, so that a
machine that slows down slows them all; ratios are of runs within a round, and medians over rounds. The floor of a step is the time to
read once what the format stores of its weights, and the keys and values of its requests, at the bandwidth that is measured here first.

Invariant: the steps that are timed are decode steps alone, of the same contexts in every format.

Taught in notebook 09.
"""

import json
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minserve.calibrate import cost_model
from minserve.core.request import SamplingParams
from minserve.llm import LLM
from minserve.peaks import measure_read_bytes_per_s
from minserve.sim.cost_model import decode_work
from minserve.sim.devices import DeviceSpec
from minserve.sim.weight_formats import PLAIN_WEIGHTS

FORMATS = "bf16,int8,int4"
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS = 32
WARM_STEPS = 3  # of decode, before the clock starts
NUM_STEPS = 16  # that are timed together
NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Pace:
    """What one format did at one batch size: medians over rounds."""

    weights: str
    batch_size: int
    step_ms: float
    tokens_per_s: float
    ratio: float  # of tokens a second to those of the first format
    floor_share: float  # of the time, what reading takes at the machine's bandwidth
    rounds_ms: tuple[float, ...]  # a step, in each round


def open_format(model: str | None, weights: str, dtype: str, num_blocks: int, **fields: Any) -> LLM:
    """An engine with the weights in that format: a plain one is the compute type, a quantized one computes in `dtype`."""
    formats = {"dtype": weights} if weights in PLAIN_WEIGHTS else {"weights": weights, "dtype": dtype}
    return LLM(model, verbose=False, **{"num_blocks": num_blocks, "max_model_len": PROMPT_TOKENS + 64, **fields, **formats})


def decode_step_s(llm: LLM, batch_size: int, num_steps: int = NUM_STEPS) -> float:
    """Mean seconds of a decode step of so many requests, over `num_steps` of them. Nothing else may be under way."""
    engine = llm.engine
    engine.scheduler.blocks.flush_cache()
    params = SamplingParams(max_tokens=WARM_STEPS + num_steps + 1, ignore_eos=True)
    prompts = [[(17 * request + 5 * token) % engine.limits.vocab_size for token in range(PROMPT_TOKENS)] for request in range(batch_size)]
    added = [request for prompt in prompts for request in engine.add(prompt, params)]
    while any(request.num_output_tokens < 1 for request in added):
        engine.step()
    for _ in range(WARM_STEPS - 1):
        engine.step()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    seconds = (time.perf_counter() - start_s) / num_steps
    for request in added:
        engine.abort(request.request_id)
    return seconds


def measure(
    llms: Mapping[str, LLM], batch_sizes: Sequence[int], num_rounds: int = NUM_ROUNDS, num_steps: int = NUM_STEPS
) -> dict[tuple[str, int], list[float]]:
    """Seconds of a step for each format and batch size, a number for each round."""
    names = list(llms)
    found: dict[tuple[str, int], list[float]] = {(name, size): [] for size in batch_sizes for name in names}
    with tqdm(total=len(found) * num_rounds, unit="run", delay=1.0, leave=False) as bar:
        for turn in range(num_rounds):
            for size in batch_sizes:
                first = (turn + size) % len(names)
                for name in names[first:] + names[:first]:
                    found[name, size].append(decode_step_s(llms[name], size, num_steps))
                    bar.update()
    return found


def paces(llms: Mapping[str, LLM], seconds: Mapping[tuple[str, int], Sequence[float]], bytes_per_s: float) -> list[Pace]:
    """Medians, ratios to the first format, and shares of the floor."""
    baseline = next(iter(llms))
    here = DeviceSpec(name="here", memory_bytes=1.0, bytes_per_s=bytes_per_s, flops_per_s=1.0)
    found: list[Pace] = []
    for (name, size), own_s in seconds.items():
        cost = cost_model(llms[name], here).of(decode_work(size, PROMPT_TOKENS + WARM_STEPS + NUM_STEPS // 2))
        step_s = statistics.median(own_s)
        ratio = statistics.median(base / own for base, own in zip(seconds[baseline, size], own_s, strict=True))
        floor_share = cost.num_bytes / bytes_per_s / step_s
        found.append(Pace(name, size, 1e3 * step_s, size / step_s, ratio, floor_share, tuple(1e3 * s for s in own_s)))
    return found


def table(found: Sequence[Pace]) -> str:
    """A line for each batch size; for each format, tokens a second, the ratio to the first and the share of the floor."""
    names = list(dict.fromkeys(pace.weights for pace in found))
    lines = ["batch  " + "".join(f"{name:>30}" for name in names), "       " + len(names) * f"{'tokens/s   ratio    floor':>30}"]
    for size in dict.fromkeys(pace.batch_size for pace in found):
        row = [pace for pace in found if pace.batch_size == size]
        lines.append(f"{size:5}  " + "".join(f"{p.tokens_per_s:13,.1f} {p.ratio:7.2f} {100 * p.floor_share:6.0f} %" for p in row))
    return "\n".join(lines)


def main(
    model: str | None,
    formats: str | None = None,
    json_path: str | None = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    num_rounds: int = NUM_ROUNDS,
    num_steps: int = NUM_STEPS,
    **fields: Any,
) -> list[Pace]:
    """Measure, print the table, write the JSON. The first format is what ratios are to; a plain one among them, the compute type of all."""
    names = (formats or FORMATS).split(",")
    dtype = fields.pop("dtype", None) or next((name for name in names if name in PLAIN_WEIGHTS), "auto")
    num_blocks = max(batch_sizes) * (-(-(PROMPT_TOKENS + WARM_STEPS + num_steps + 1) // 16) + 1)
    with ExitStack() as stack:
        llms = {name: stack.enter_context(open_format(model, name, dtype, num_blocks, **fields)) for name in names}
        bytes_per_s = measure_read_bytes_per_s()
        threads = torch.get_num_threads()
        print(f"memory is read at {bytes_per_s / 1e9:.1f} GB/s by {threads} threads; {num_rounds} rounds of {num_steps} steps")
        for llm in llms.values():
            print(llm.describe().splitlines()[0])
        found = paces(llms, measure(llms, batch_sizes, num_rounds, num_steps), bytes_per_s)
        described = {name: llm.describe() for name, llm in llms.items()}
    print(table(found))
    if json_path:
        result = {"date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {platform.system()}", "torch": torch.__version__}
        result |= {"threads": threads, "bytes_per_s": bytes_per_s, "num_rounds": num_rounds, "steps": num_steps}
        result |= {"engines": described, "paces": [asdict(pace) for pace in found]}
        Path(json_path).write_text(json.dumps(result), encoding="utf-8")
    return found
