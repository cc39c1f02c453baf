"""`minserve simulate`: a load served by the real scheduler on a device that is not here, in seconds on a laptop.

The words of the command line become parts of the simulator here, and nowhere else: policies, pools, lengths, arrivals.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minserve.core.engine import Engine
from minserve.core.metrics import goodput
from minserve.core.policies import Policy
from minserve.core.policy_names import parse_policy
from minserve.core.records import RequestRecord
from minserve.core.report import compare, table
from minserve.core.request import FinishReason
from minserve.core.trace import Trace
from minserve.sim import simulator
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import load_device
from minserve.sim.disaggregation import PoolRun, run_disaggregated, run_mixed
from minserve.sim.shapes import load_shape
from minserve.sim.step_times import CostStepTimes
from minserve.sim.workload import TRACES, Arrivals, ClosedLoop, LengthPair, Lengths, MultiTurn, Workload, load_jsonl, make_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What can be chosen. None: what the other settings suggest. Raises ValueError for a count below 1."""

    model: str = "llama-2-13b"
    device: str = "a100-80gb"
    weights: str = "bf16"
    kv: str = "bf16"
    head_bits: int = 8
    tensor_parallel: int = 1
    # how requests are batched, and how they hold memory
    policy: str = "continuous"
    batch_size: int | None = None  # most requests at once; what a static batch holds
    wait_ms: float = 50.0  # of a timeout batch
    pool: str = "paged"
    slot_tokens: int | None = None  # room that each request reserves; None: the model's longest
    token_budget: int = 2048
    block_size: int = 16
    memory_fraction: float = 0.9
    prefix_caching: bool = True
    reserve_whole_answers: bool = False  # slots do so anyway
    disaggregate: str | None = None  # devices for prompts : devices for answers
    link_gb_s: float = 25.0
    # the load
    num_requests: int = 200
    lengths: str = "azure-chat"
    prompt: str | None = None  # in place of those of `lengths`
    output: str | None = None
    arrivals: str | None = None
    rate: float | None = None  # requests per second
    cv: float = 3.0  # of the gaps of gamma arrivals
    clients: int = 16  # of a closed loop
    turns: int = 1  # of a chat
    user: str = "50"  # tokens that a user adds in a later turn
    think_s: float = 0.0  # between an answer and the next question, in a closed loop or a chat
    shared_tokens: int = 0
    trace: str | None = None  # a JSONL file in place of all this
    seed: int = 0
    # limits that a caller would set
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "slot_tokens", "block_size", "num_requests", "turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def main(*, json_path: str | None = None, figure: str | None = None, **fields: Any) -> None:
    """Simulate, print the table, write what was asked for."""
    settings = Settings(**fields)
    cost = make_cost(settings)
    run = _one_engine if settings.disaggregate is None else _two_arrangements
    result = run(settings, cost, figure)
    if json_path is not None:
        Path(json_path).write_text(json.dumps({"settings": asdict(settings), **result}), encoding="utf-8")
        print(f"results: {json_path}")


def _one_engine(settings: Settings, cost: CostModel, figure: str | None) -> dict[str, Any]:
    engine = make_engine(settings, cost)
    blocks = engine.scheduler.blocks
    print(f"{_describe(settings, cost)}\npool: {blocks.num_blocks:,} {_pool_words(settings, blocks.block_size)}")
    trace = simulator.simulate(engine, make_load(settings))
    _refuse_nothing(trace)
    print(table(trace.summary(), blocks.num_blocks))
    _print_remarks({"": trace}, settings)
    if figure is not None:
        _draw(trace, figure)
    return {"num_blocks": blocks.num_blocks, "block_size": blocks.block_size, **as_dict(trace, settings)}


def _two_arrangements(settings: Settings, cost: CostModel, figure: str | None) -> dict[str, Any]:
    """Pools for prompts and answers, beside as many devices that do both."""
    if figure is not None:
        raise ValueError("--figure draws the timeline of one engine; leave --disaggregate out")
    num_prefill, num_decode = _two_counts(settings.disaggregate or "")
    if settings.policy != "continuous" or settings.pool != "paged":
        raise ValueError(f"pools of devices run continuous batches in paged memory, got --policy {settings.policy} --pool {settings.pool}")
    options, workload = _engine_options(settings), make_load(settings)
    token_mb = cost.shape.kv_bytes_per_token(cost.kv) / 1e6
    print(f"{_describe(settings, cost)}\nlink: {settings.link_gb_s:g} GB/s for {token_mb:.2f} MB per prompt token")
    runs = {
        f"{num_prefill + num_decode} mixed": run_mixed(cost, workload, num_prefill + num_decode, **options),
        settings.disaggregate or "": run_disaggregated(cost, workload, num_prefill, num_decode, settings.link_gb_s * 1e9, **options),
    }
    num_blocks = cost.pool_blocks(settings.block_size, settings.memory_fraction)
    for run in runs.values():
        _refuse_nothing(run.trace)
    print(compare({name: (run.trace.summary(), num_blocks) for name, run in runs.items()}))
    _print_remarks({name: run.trace for name, run in runs.items()}, settings)
    print(f"the link sends {list(runs.values())[1].link_busy_share:.0%} of the time")
    return {name: _pool_dict(run, settings) for name, run in runs.items()}


# --- words become parts ---------------------------------------------------------------------------

# The keys of a policy that other options set where its own words don't; `padded` is `static` on a device that computes rectangles.
FILLED_KEYS: Mapping[str, Sequence[str]] = {
    "static": ("size",),
    "padded": ("size",),
    "timeout": ("size", "wait_ms"),
    "buckets": ("size", "wait_ms"),
    "slo": ("ttft_ms", "tpot_ms"),
}
BATCH_SIZES = {"static": 32, "padded": 32, "timeout": 32}  # of a policy that says no more; of the others: MOST_RUNNING
MOST_RUNNING = 256
POOLS = ("paged", "slots")
ARRIVALS = ("all-at-once", "poisson", "gamma", "closed")


def make_cost(settings: Settings) -> CostModel:
    shape, device = load_shape(settings.model), load_device(settings.device)
    formats = {"weights": settings.weights, "kv": settings.kv, "head_bits": settings.head_bits}
    return CostModel(shape, device, num_devices=settings.tensor_parallel, **formats)


def make_engine(settings: Settings, cost: CostModel) -> Engine:
    """An engine with the policy and the pool that the settings name."""
    _require_known("pool", settings.pool, POOLS)
    longest = settings.slot_tokens or cost.shape.max_positions
    size = settings.batch_size or BATCH_SIZES.get(settings.policy, MOST_RUNNING)
    if settings.pool == "slots":
        size = _num_slots(settings, cost, longest)
    padded = settings.policy == "padded"
    batching = {"policy": make_policy(settings, cost, size), "padded_rows": size if padded else None}
    token_budget = size * longest if padded else settings.token_budget  # a rectangle is computed in one step
    if settings.pool == "slots":
        return simulator.make_slot_engine(cost, num_slots=size, slot_tokens=longest, **{**batching, "token_budget": token_budget})
    options = {**_engine_options(settings), **batching, "token_budget": token_budget, "max_running": size}
    return simulator.make_engine(cost, **options)


def make_policy(settings: Settings, cost: CostModel, size: int) -> Policy:
    """The policy that --policy names; --batch-size, --wait-ms and the limits set what its words leave open."""
    name, _, rest = settings.policy.partition(":")
    others = {"size": size, "wait_ms": settings.wait_ms, "ttft_ms": settings.slo_ttft_ms, "tpot_ms": settings.slo_tpot_ms}
    given = {pair.partition("=")[0].strip() for pair in rest.split(",")}
    filled = [f"{key}={others[key]}" for key in FILLED_KEYS.get(name, ()) if key not in given and others[key] is not None]
    words = "static" if settings.policy == "padded" else name
    return parse_policy(f"{words}:{','.join([*([rest] if rest else []), *filled])}", CostStepTimes(cost))


def _num_slots(settings: Settings, cost: CostModel, slot_tokens: int) -> int:
    fit = cost.pool_blocks(slot_tokens, settings.memory_fraction)
    if settings.batch_size is not None and settings.batch_size > fit:
        raise ValueError(f"{settings.batch_size} slots of {slot_tokens:,} tokens do not fit beside the weights, {fit} do")
    return settings.batch_size or fit


def _engine_options(settings: Settings) -> dict[str, Any]:
    names = ("block_size", "memory_fraction", "prefix_caching", "reserve_whole_answers", "token_budget")
    return {**{name: getattr(settings, name) for name in names}, "max_running": settings.batch_size or MOST_RUNNING}


def make_load(settings: Settings) -> Workload:
    """The workload that the settings describe."""
    if settings.trace is not None:
        return load_jsonl(settings.trace, settings.num_requests, settings.seed)
    kind = settings.arrivals or ("all-at-once" if settings.rate is None else "poisson")
    _require_known("arrivals", kind, ARRIVALS)
    pair = _lengths(settings)
    more = {"seed": settings.seed, "num_shared_tokens": settings.shared_tokens}
    if kind == "closed":
        return ClosedLoop(settings.clients, settings.num_requests, *pair, think_s=settings.think_s, **more)
    if kind != "all-at-once" and settings.rate is None:
        raise ValueError(f"{kind} arrivals need a --rate in requests per second")
    arrivals = Arrivals(settings.rate or math.inf if kind != "all-at-once" else math.inf, settings.cv if kind == "gamma" else 1.0)
    if settings.turns > 1:
        num_chats, user = math.ceil(settings.num_requests / settings.turns), parse_lengths(settings.user)
        return MultiTurn(num_chats, settings.turns, pair.prompt, user, pair.output, arrivals, think_s=settings.think_s, **more)
    return make_workload(settings.num_requests, *pair, arrivals, **more)


def _lengths(settings: Settings) -> LengthPair:
    _require_known("lengths", settings.lengths, TRACES)
    traffic = TRACES[settings.lengths]
    prompt, output = ((parse_lengths(words) if words else None) for words in (settings.prompt, settings.output))
    return LengthPair(prompt or traffic.prompt, output or traffic.output)


LENGTHS: Mapping[str, tuple[int, Callable[..., Lengths]]] = {  # name -> (how many numbers follow it, distribution)
    "constant": (1, lambda tokens: Lengths.constant(int(tokens))),
    "uniform": (2, lambda low, high: Lengths.uniform(int(low), int(high))),
    "exponential": (2, lambda mean, most: Lengths.exponential(mean, int(most))),
    "lognormal": (4, lambda median, sigma, least, most: Lengths.lognormal(median, sigma, int(least), int(most))),
}


def parse_lengths(words: str) -> Lengths:
    """A distribution in words.

    >>> parse_lengths("512").mean, parse_lengths("uniform:100:300").mean, parse_lengths("exponential:128:1536").most
    (512.0, 200.0, 1536)
    """
    name, *texts = words.split(":") if ":" in words else ("constant", words)
    try:
        numbers = [float(text) for text in texts]
        count, make = LENGTHS[name]
        if len(numbers) != count:
            raise ValueError
    except (ValueError, KeyError):
        forms = "512, uniform:LOW:HIGH, exponential:MEAN:MOST, lognormal:MEDIAN:SIGMA:LEAST:MOST"
        raise ValueError(f"lengths {words!r} are not understood; the forms are {forms}") from None
    return make(*numbers)


def _two_counts(words: str) -> tuple[int, int]:
    left, _, right = words.partition(":")
    if not (left.isdecimal() and right.isdecimal()):
        raise ValueError(f"--disaggregate takes two counts, as in 1:1 (devices for prompts, devices for answers), got {words!r}")
    return int(left), int(right)


def _require_known(what: str, word: str, known: Any) -> None:
    if word not in known:
        raise ValueError(f"{what} {word!r} is not known; known: {', '.join(known)}")


# --- results --------------------------------------------------------------------------------------


def as_dict(trace: Trace, settings: Settings) -> dict[str, Any]:
    """A run as plain data: the summary, and every request's times."""
    return {
        "summary": asdict(trace.summary()),
        "num_refused": trace.num_refused,
        "share_within_slo": _share_within(trace, settings),
        "requests": [_record_dict(record) for record in trace.requests.values()],
    }


def _record_dict(record: RequestRecord) -> dict[str, Any]:
    derived = {name: getattr(record, name) for name in ("num_output_tokens", "ttft_s", "tpot_s", "latency_s", "queue_s")}
    return {**asdict(record), **derived}


def _pool_dict(run: PoolRun, settings: Settings) -> dict[str, Any]:
    transfers = [asdict(transfer) for transfer in run.transfers]
    return {**as_dict(run.trace, settings), "link_busy_share": run.link_busy_share, "transfers": transfers}


def _share_within(trace: Trace, settings: Settings) -> float | None:
    """Share of all requests that meet the limits; None if there are none."""
    limits = {"ttft_s": settings.slo_ttft_ms, "tpot_s": settings.slo_tpot_ms}
    if all(limit is None for limit in limits.values()):
        return None
    met = goodput(trace.requests.values(), 1.0, **{name: None if ms is None else ms / 1e3 for name, ms in limits.items()})
    return met / (len(trace.requests) + trace.num_refused)


def _refuse_nothing(trace: Trace) -> None:
    if not trace.requests:
        raise ValueError(f"all {trace.num_refused} requests were refused: they are longer than the model or its pool allows")


def _describe(settings: Settings, cost: CostModel) -> str:
    prompt, output = settings.prompt or settings.lengths, settings.output or settings.lengths
    load = settings.trace or f"{settings.num_requests:,} requests, {prompt if prompt == output else f'prompts {prompt}, answers {output}'}"
    devices = f"{cost.num_devices} x {cost.device.name}" if cost.num_devices > 1 else cost.device.name
    return f"{cost.shape.name} in {cost.weights}, KV in {cost.kv}, on {devices}; {settings.policy} batches; {load}"


def _pool_words(settings: Settings, block_size: int) -> str:
    return f"{'slots' if settings.pool == 'slots' else 'blocks'} of {block_size:,} tokens"


def _print_remarks(traces: Mapping[str, Trace], settings: Settings) -> None:
    for name, trace in traces.items():
        where = f"{name}: " if name else ""
        if trace.num_refused:
            print(f"{where}{trace.num_refused} requests were refused: they are longer than the model or its pool allows")
        if num_shed := trace.summary().num_shed:
            print(f"{where}{num_shed} requests were sent away: {_last_reason(trace)}")
        share = _share_within(trace, settings)
        if share is not None:
            print(f"{where}{share:.1%} of the requests are within the limits")


def _last_reason(trace: Trace) -> str:
    """Why the last of those who were sent away had to go, as an example."""
    shed = [record.request_id for record in trace.requests.values() if record.finish_reason == FinishReason.SHED]
    return f"{shed[-1]} {trace.why(shed[-1])[-1].words}"


def _draw(trace: Trace, path: str) -> None:
    try:
        from minserve.lab import figures  # matplotlib comes with the extra `lab`; a simulation does not need it
    except ImportError:
        print("no picture: pip install 'minserve[lab]' brings matplotlib")
        return
    print(f"timeline: {figures.save(figures.timeline(trace), Path(path))}")
