"""The five loads of the arena, and the server that they meet: the same for everybody, to the last digit.

Why: policies can be compared only on one and the same load, and a load must not tell them what a server cannot know. So an answer ends
by an end token that only the device knows; what a request carries is a ceiling, far above the answers.

Arrival times lie on a grid of 1/1024 s and steps take whole multiples of 2^-30 s, about a nanosecond. Both are far finer than what they
measure, and sums of such numbers are exact: no library's last digit and no order of adding gets into a score.

Invariant: a world is a pure function of trace, seed and fork. Two worlds of one seed, one of them forked at some second, are the same
before it and differ afterwards, in who comes and in how long answers get.

Taught in notebook 10.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Arrival, Engine, ModelLimits
from minserve.core.policies import Policy
from minserve.core.request import Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.lengths import TRACES as MEASURED
from minserve.sim.runner import VOCAB_SIZE, SimulatedRunner, next_token
from minserve.sim.shapes import SHAPES
from minserve.sim.workload import Lengths, MultiTurn, Workload, all_at_once, gamma, make_workload, poisson

END_TOKEN = 2  # of the made-up vocabulary
CEILING = 2048  # max_tokens of every request: the answers are shorter, and by how much nobody but the device knows
BLOCK_SIZE = 16
CONFIG = SchedulerConfig(token_budget=2048, max_running=256)


def arena_cost() -> CostModel:
    """The device of the arena: Llama-3.1-8B in bf16 on one A100-80GB. Policies may ask it what a step takes."""
    return CostModel(SHAPES["llama-3.1-8b"], DEVICES["a100-80gb"])


@dataclass(frozen=True, slots=True)
class Slo:
    """What the users of a trace ask for, each request by itself, and why so much. None: no limit."""

    reason: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft_s, "TPOT": self.tpot_s, "whole answer": self.latency_s}
        return ", ".join(f"{name} {1e3 * s:g} ms" if s < 1 else f"{name} {s:g} s" for name, s in limits.items() if s is not None)


class World(Workload):
    """A workload whose answer lengths are known to the device only, and that may take another course from some second on."""

    def __init__(self, load: Workload, split_s: float = math.inf):
        self._load, self._split_s = load, split_s
        # Of those that have come or are sure to come. An answer that ends before the split ends as in the world without it.
        self._lengths: dict[str, int] = {}
        self._lengths_before: dict[str, int] = {}
        first = [(_on_grid(time_s), {"request_id": f"R{i}", **call}) for i, (time_s, call) in enumerate(load.arrivals())]
        super().__init__([self._seal(arrival) for arrival in _reversed_after(first, split_s)])

    def _seal(self, arrival: Arrival) -> Arrival:
        time_s, call = arrival
        request_id, length = call["request_id"], call["params"].max_tokens
        self._lengths_before[request_id] = length
        self._lengths[request_id] = length if self._split_s == math.inf else _other_length(length)
        return time_s, {**call, "params": SamplingParams(max_tokens=CEILING)}

    def then(self, request: Request, now_s: float) -> list[Arrival]:
        """The next question of a chat. Who was sent away does not come back."""
        if request.error is not None:
            return []
        later = [self._seal((_on_grid(time_s), call)) for time_s, call in self._load.then(request, now_s)]
        return [(time_s if time_s < self._split_s else time_s + 1.0, call) for time_s, call in later]

    def num_answer_tokens(self, request: Request, now_s: float) -> int:
        """How long the answer is, the end token included; after the split, what is not yet over gets another length."""
        if now_s < self._split_s:
            return self._lengths_before[request.request_id]
        return max(request.num_output_tokens + 1, self._lengths[request.request_id])

    @property
    def answer_tokens(self) -> Mapping[str, int]:
        """Request id -> length of its answer, of all that have come or are sure to come."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._load)


def _on_grid(time_s: float) -> float:
    return round(1024 * time_s) / 1024


def _reversed_after(arrivals: list[Arrival], split_s: float) -> list[Arrival]:
    """From the split on, others come at other times: the same calls in the opposite order, at gaps in the opposite order."""
    before = [arrival for arrival in arrivals if arrival[0] < split_s]
    after = arrivals[len(before) :]
    if not after:
        return arrivals
    ends_s = after[-1][0] + split_s
    return before + [(ends_s - time_s, call) for time_s, call in reversed(after)]


def _other_length(num_tokens: int) -> int:
    """Short answers become long and long ones short."""
    return max(2, 60_000 // (num_tokens + 60) - 60)


class WorldRunner(SimulatedRunner):
    """The simulated device, where an answer ends by an end token."""

    def __init__(self, cost: CostModel, world: World, clock: VirtualClock):
        super().__init__(cost)
        self.world, self.clock = world, clock

    def execute(self, batch: ScheduledBatch) -> StepResult:
        now_s, tokens = self.clock.now(), {}
        for row in batch.rows:
            if row.samples:
                is_last = row.request.num_output_tokens + 1 >= self.world.num_answer_tokens(row.request, now_s)
                made_up = next_token(row)
                tokens[row.request.request_id] = END_TOKEN if is_last else made_up + (made_up == END_TOKEN)
        elapsed_s = self.cost.of(self.work(batch)).seconds if batch.rows else 0.0
        return StepResult(tokens, elapsed_s=math.ceil(elapsed_s * 2**30) / 2**30)


@dataclass(frozen=True, slots=True)
class ArenaTrace:
    """One load, what its users ask for, and the pool that serves it.

    `window_s` is the time that goodput is counted over: about as long as requests come, the same for every policy.
    """

    name: str
    words: str
    slo: Slo
    window_s: float
    load: Callable[[int], Workload]  # seed -> requests, with answers of exact lengths
    num_blocks: int = 1280  # of the pool, 20,480 tokens; beside the weights the card has room for 25,000 blocks

    def world(self, seed: int, split_s: float = math.inf) -> World:
        """The requests of this seed; from `split_s` on, with another future."""
        return World(self.load(seed), split_s)

    def engine(self, world: World, policy: Policy, cost: CostModel) -> Engine:
        """A fresh server, empty, at second 0."""
        clock = VirtualClock()
        limits = ModelLimits(cost.shape.max_positions, VOCAB_SIZE, frozenset([END_TOKEN]))
        scheduler = Scheduler(CONFIG, BlockManager(self.num_blocks, BLOCK_SIZE), policy)
        return Engine(scheduler, WorldRunner(cost, world, clock), clock, limits)


# --- the five -------------------------------------------------------------------------------------


def _chat(seed: int) -> Workload:
    return make_workload(150, *MEASURED["azure-chat"], poisson(6.0), seed)


def _code(seed: int) -> Workload:
    return make_workload(200, *MEASURED["azure-code"], poisson(4.0), seed, num_shared_tokens=200)


def _batch(seed: int) -> Workload:
    return make_workload(96, Lengths.uniform(50, 250), Lengths.exponential(300, 1200), all_at_once(), seed)


def _bursty(seed: int) -> Workload:
    """A quarter is background work, of lower priority; which one is drawn apart from all else."""
    load = make_workload(160, Lengths.lognormal(400, 0.8, 20, 2000), Lengths.exponential(150, 800), gamma(10.0, 4.0), seed)
    background = (np.random.default_rng([seed, 1]).random(len(load)) < 0.25).tolist()
    calls: list[tuple[float, dict[str, Any]]] = load.arrivals()
    return Workload([(time_s, {**call, "priority": int(low)}) for (time_s, call), low in zip(calls, background, strict=True)])


def _multi_turn(seed: int) -> Workload:
    user, output = Lengths.uniform(20, 200), Lengths.exponential(120, 500)
    return MultiTurn(40, 4, Lengths.uniform(500, 1500), user, output, poisson(4.0), seed, think_s=2.0, num_shared_tokens=400)


_OURS = "MLPerf's limits for Llama-3.1-8B"
TRACES: Mapping[str, ArenaTrace] = {
    trace.name: trace
    for trace in (
        ArenaTrace(
            "chat",
            "150 questions, lengths as in Azure's chats, 6 a second",
            Slo(f"{_OURS} as a server: a reader who waits 2 s is still there, and nobody reads 10 tokens a second", 2.0, 0.1),
            25.0,
            _chat,
        ),
        ArenaTrace(
            "code",
            "200 completions, long prompts with a common beginning and short answers, 4 a second",
            Slo(f"{_OURS} interactive: a completion that comes after half a second comes after the next key", 0.5, 0.03),
            50.0,
            _code,
        ),
        ArenaTrace(
            "batch",
            "96 jobs of short prompts and long answers, all there at the start, in a pool for 8,192 tokens",
            Slo("a job's own deadline: nobody reads along, so neither the first token nor the pace counts", latency_s=8.0),
            8.0,
            _batch,
            num_blocks=512,
        ),
        ArenaTrace(
            "bursty",
            "160 requests in bursts (gaps with cv 4), a quarter of them background work of lower priority",
            Slo(f"{_OURS} as a server; background work is held to the same, or it would be left out", 2.0, 0.1),
            16.0,
            _bursty,
        ),
        ArenaTrace(
            "multi-turn",
            "40 chats of 4 turns, each of which repeats all that was said before",
            Slo("between MLPerf's two: an answer to an answer is expected at once, and read along", 1.0, 0.05),
            30.0,
            _multi_turn,
        ),
    )
}


def with_pool(trace: ArenaTrace, num_blocks: int) -> ArenaTrace:
    """The same load on another pool."""
    return replace(trace, num_blocks=num_blocks)
