"""What `minserve bench --host` writes down: host time of a step by part, and what allocation costs at the rates of a real run.

Why: "allocation takes 5-15 %" is decided by three numbers: how often one allocates in a step, what a call costs, how long a step is. They
are kept apart here, so that the share can be read, and also asked backwards: what would a call have to cost for it to be 5 %?

Invariant: plain data, read and written as JSON; parts of a step are exclusive of each other and sum to it.

Taught in notebook 11.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# The parts of a step, in the order in which they come; `rest` is the engine's own loop, and `pool` is what the others ask of the blocks.
PARTS = ("policy", "pool", "schedule", "inputs", "model", "sampling", "update", "trace", "text", "rest")
HOST_PARTS = tuple(name for name in PARTS if name not in ("model", "sampling"))


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the time of steps went: medians, over rounds, of a step's mean. `kind`: all steps, or those of `batch_size` decodes alone."""

    batch_size: int
    kind: str
    num_steps: int  # of a round
    step_ms: float
    parts_ms: Mapping[str, float]
    num_clocked: float  # calls a step that were clocked: each costs `clock_us` of the record, and its part pays for it

    def share(self, *parts: str) -> float:
        """Share of a step that the parts take together."""
        return sum(self.parts_ms[part] for part in parts) / sum(self.parts_ms.values())


@dataclass(frozen=True, slots=True)
class Load:
    """What a recorded run asks of an allocator, in all."""

    batch_size: int
    num_requests: int
    num_steps: int
    run_s: float
    num_rows: int  # one request in one step
    num_tokens: int  # computed
    num_blocks_taken: int  # each is given back
    block_size: int
    bytes_per_token: int  # keys and values, all layers
    num_layers: int

    @property
    def step_s(self) -> float:
        return self.run_s / self.num_steps

    @property
    def calls_per_step(self) -> float:
        """Blocks taken and given back."""
        return 2 * self.num_blocks_taken / self.num_steps

    @property
    def calls_per_s(self) -> float:
        return 2 * self.num_blocks_taken / self.run_s

    def call_us(self, share: float, calls_per_step: float | None = None) -> float:
        """What one call would have to cost for all of a step's calls to take that share of the step; by default, calls for blocks.

        >>> load = Load(1, 2, 100, 2.0, 100, 1600, 100, 16, 1024, 1)
        >>> load.calls_per_s, load.calls_per_step, round(load.call_us(0.05))
        (100.0, 2.0, 526)
        """
        # share of the step with the calls in it: without them the step is as long as it was measured
        return 1e6 * share / (1 - share) * self.step_s / (self.calls_per_step if calls_per_step is None else calls_per_step)


@dataclass(frozen=True, slots=True)
class AllocationCost:
    """One way to come by memory, at the rates of a `Load`: medians over rounds, the cost of the replay itself taken off."""

    batch_size: int
    way: str
    calls_per_step: float  # to take and to give back
    ms_per_step: float
    written_ms_per_step: float  # the same with the step's room written to: fresh memory costs page faults, and a moved cache its copy

    @property
    def us_per_call(self) -> float:
        return 1e3 * self.ms_per_step / self.calls_per_step if self.calls_per_step else 0.0


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A run of `minserve bench --host`, with what a number is worth nothing without."""

    date: str
    machine: str
    how: str
    versions: Mapping[str, str]
    engine: str  # as the engine describes itself
    threads: int
    num_rounds: int
    clock_us: float  # of clocking one call
    steps: Sequence[StepParts]
    loads: Sequence[Load]
    costs: Sequence[AllocationCost]
    profiled: Mapping[str, Mapping[str, float]]  # shares of a run at the largest batch: by our own timers, and by cProfile

    def load(self, batch_size: int) -> Load:
        return next(load for load in self.loads if load.batch_size == batch_size)

    def step(self, batch_size: int, kind: str = "all") -> StepParts:
        return next(step for step in self.steps if (step.batch_size, step.kind) == (batch_size, kind))

    def cost(self, batch_size: int, way: str) -> AllocationCost:
        return next(cost for cost in self.costs if (cost.batch_size, cost.way) == (batch_size, way))

    def share(self, cost: AllocationCost, written: bool = False) -> float:
        """Share of a step that the way takes; written: that it takes beyond what the pool does for the same bytes."""
        step_ms = 1e3 * self.load(cost.batch_size).step_s
        if written:
            more_ms = cost.written_ms_per_step - self.cost(cost.batch_size, "pool").written_ms_per_step
            return max(0.0, more_ms) / (step_ms + max(0.0, more_ms))
        # The pool's calls are in the measured step; what another way would add is not.
        return cost.ms_per_step / (step_ms if cost.way == "pool" else step_ms + cost.ms_per_step)


def write_record(record: HostRecord, path: str | Path) -> None:
    Path(path).write_text(json.dumps(asdict(record), indent=1, allow_nan=False), encoding="utf-8")


def read_record(path: str | Path) -> HostRecord:
    """What `write_record` wrote. Raises ValueError for another file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        lists = {"steps": StepParts, "loads": Load, "costs": AllocationCost}
        return HostRecord(**found | {name: tuple(kind(**item) for item in found[name]) for name, kind in lists.items()})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: not a record of minserve bench --host: {error!r}") from error


# --- in words -------------------------------------------------------------------------------------


def step_table(steps: Sequence[StepParts]) -> str:
    """A column for each batch size and kind of steps: ms of a step, and the share of each part."""
    lines = [f"{'batch, steps':<14}" + "".join(f"{f'{s.batch_size} {s.kind}':>12}" for s in steps)]
    lines.append(f"{'ms a step':<14}" + "".join(f"{s.step_ms:12.2f}" for s in steps))
    lines += [f"{part:<14}" + "".join(f"{100 * s.share(part):10.2f} %" for s in steps) for part in PARTS]
    lines.append(f"{'host in all':<14}" + "".join(f"{100 * s.share(*HOST_PARTS):10.2f} %" for s in steps))
    return "\n".join(lines)


def cost_table(record: HostRecord) -> str:
    """A line for each batch size and way."""
    lines = [
        f"{'batch':>5}  {'way':<24}{'calls/step':>11}{'us/call':>9}{'ms/step':>9}{'share':>9}{'written ms':>12}{'beyond the pool':>17}"
    ]
    for cost in record.costs:
        shares = record.share(cost), record.share(cost, written=True)
        lines.append(
            f"{cost.batch_size:5}  {cost.way:<24}{cost.calls_per_step:11.2f}{cost.us_per_call:9.2f}{cost.ms_per_step:9.4f}"
            f"{100 * shares[0]:7.3f} %{cost.written_ms_per_step:12.3f}{100 * shares[1]:15.2f} %"
        )
    return "\n".join(lines)


def describe_need(record: HostRecord, batch_size: int, shares: Sequence[float] = (0.05, 0.15)) -> str:
    """What would have to be true for the shares that are claimed."""
    load, pool = record.load(batch_size), record.cost(batch_size, "pool")
    needed = [load.call_us(share) for share in shares]
    percents = " or ".join(f"{100 * share:g} %" for share in shares)
    return (
        f"{batch_size} at once: {load.calls_per_s:,.0f} blocks a second taken or given back, {load.calls_per_step:.2f} in a step of "
        f"{1e3 * load.step_s:.1f} ms. For {percents} of it, a call would have to take {' or '.join(f'{us:,.0f}' for us in needed)} us; "
        f"the pool takes {pool.us_per_call:.2f} us, {100 * record.share(pool):.3f} %."
    )
