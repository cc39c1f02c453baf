"""A device with a size: memory that runs out, at the start or in the middle of a step, and neighbours who share the card.

Why: "out of memory" is four troubles, and the cure of one is the cause of another. At the start, the fraction of memory that the engine
may use leaves nothing for keys and values: raise it. In a step, activations find no room beside a pool that took too much: lower it. On
a shared card, the fraction is of memory that somebody else holds: leave him his share. And a pool that is merely too small for those who
were let in never fails; it computes the same tokens again and again: let fewer in.

Nothing here takes real memory. What a device holds is a list of names and bytes; what a step needs at most is the planner's formula.

Invariant: a device never holds more than its size, and what does not fit is refused with all the numbers.

Taught in notebook 11.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.policies import Policy
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.sim.cost_model import CostModel
from minserve.sim.planner import RUNTIME_BYTES, activation_bytes
from minserve.sim.runner import VOCAB_SIZE, SimulatedRunner


class OutOfDeviceMemory(MemoryError):
    """An allocation did not fit. The message says who asked for how much, and who holds the rest."""

    def __init__(self, words: str, missing_bytes: float):
        super().__init__(words)
        self.missing_bytes = missing_bytes


class VirtualDevice:
    """Memory as a list of who holds how much.

    >>> device = VirtualDevice(80e9); device.take("weights", 26e9); device.take("KV pool", 43e9); device.free_bytes / 1e9
    11.0
    """

    def __init__(self, memory_bytes: float):
        self.memory_bytes = memory_bytes
        self.held: dict[str, float] = {}

    @property
    def used_bytes(self) -> float:
        return sum(self.held.values())

    @property
    def free_bytes(self) -> float:
        return self.memory_bytes - self.used_bytes

    def take(self, name: str, num_bytes: float) -> None:
        """Hold so much more under this name. Raises OutOfDeviceMemory, with nothing taken."""
        if num_bytes > self.free_bytes:
            holders = ", ".join(f"{holder} {held / 1e9:.1f}" for holder, held in self.held.items())
            raise OutOfDeviceMemory(
                f"{name} needs {num_bytes / 1e9:.2f} GB, {self.free_bytes / 1e9:.2f} of "
                f"{self.memory_bytes / 1e9:.0f} GB are free (held in GB: {holders or 'nothing'})",
                num_bytes - self.free_bytes,
            )
        self.held[name] = self.held.get(name, 0.0) + num_bytes

    def give_back(self, name: str) -> None:
        """Hold nothing under this name any more."""
        self.held.pop(name, None)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process on the same card, from `start_s` to `end_s`. It takes what it wants as far as that is free."""

    name: str
    num_bytes: float
    start_s: float = 0.0
    end_s: float = float("inf")

    def is_here(self, now_s: float) -> bool:
        return self.start_s <= now_s < self.end_s


class MemoryRunner(SimulatedRunner):
    """The simulated device, with a size: a step whose activations find no room fails, and so do its requests."""

    def __init__(self, cost: CostModel, device: VirtualDevice, clock: VirtualClock, neighbours: Sequence[Neighbour] = ()):
        super().__init__(cost)
        self.device, self.clock, self.neighbours = device, clock, neighbours
        self.num_failed_steps = 0
        self.peak_bytes = 0.0

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.admit_neighbours()
        num_rows = sum(row.samples for row in batch.rows)
        try:
            self.device.take("activations", activation_bytes(self.cost, batch.num_tokens, num_rows))
        except OutOfDeviceMemory as error:
            self.num_failed_steps += 1
            errors = {row.request.request_id: str(error) for row in batch.rows}
            seconds = self.cost.of(self.work(batch)).overhead_s  # found out before anything was computed
            return StepResult({}, errors=errors, elapsed_s=seconds)
        self.peak_bytes = max(self.peak_bytes, self.device.used_bytes)
        self.device.give_back("activations")
        return super().execute(batch)

    def admit_neighbours(self) -> None:
        """Let neighbours come and go as the clock says."""
        for neighbour in self.neighbours:
            is_here = neighbour.is_here(self.clock.now())
            if is_here and neighbour.name not in self.device.held:
                self.device.take(neighbour.name, min(neighbour.num_bytes, self.device.free_bytes))
            elif not is_here:
                self.device.give_back(neighbour.name)


def start_engine(
    cost: CostModel,
    *,
    memory_fraction: float = 0.9,
    of_free_memory: bool = False,
    reserve_bytes: float | None = None,
    neighbours: Iterable[Neighbour] = (),
    token_budget: int = 2048,
    max_running: int = 256,
    watermark_blocks: int = 0,
    reserve_whole_answers: bool = False,
    policy: Policy | None = None,
    block_size: int = 16,
    max_model_len: int | None = None,
    make_scheduler: Callable[[SchedulerConfig, BlockManager, Policy | None], Scheduler] = Scheduler,
) -> Engine:
    """Start an engine on a device of `cost.device`'s size: neighbours first, then weights, then the pool.

    The pool is what the fraction (of all memory, or of what is free) leaves beside weights and a reserve for activations: the most
    that a step of `token_budget` tokens needs, as engines find by a trial at the start, or `reserve_bytes` where somebody knows better.
    Raises OutOfDeviceMemory when the start fails, also where the pool cannot hold one request of `max_model_len` tokens, if given.
    """
    device, clock = VirtualDevice(cost.device.memory_bytes), VirtualClock()
    runner = MemoryRunner(cost, device, clock, tuple(neighbours))
    runner.admit_neighbours()
    lent_bytes = memory_fraction * (device.free_bytes if of_free_memory else device.memory_bytes)
    device.take("weights", cost.stored_weight_bytes)
    device.take("runtime", RUNTIME_BYTES)
    reserve = activation_bytes(cost, token_budget, max_running) if reserve_bytes is None else reserve_bytes
    left_bytes = lent_bytes - device.held["weights"] - RUNTIME_BYTES - reserve
    block_bytes = block_size * cost.kv_bytes_per_token
    _require_room(cost, left_bytes, block_size, memory_fraction, max_model_len)
    device.take("KV pool", left_bytes // block_bytes * block_bytes)
    config = SchedulerConfig(token_budget, max_running, watermark_blocks, None, reserve_whole_answers)
    scheduler = make_scheduler(config, BlockManager(int(left_bytes // block_bytes), block_size, prefix_caching=False), policy)
    limits = ModelLimits(max_model_len or cost.shape.max_positions, max(VOCAB_SIZE, cost.shape.vocab_size))
    return Engine(scheduler, runner, clock, limits)


def _require_room(cost: CostModel, left_bytes: float, block_size: int, memory_fraction: float, max_model_len: int | None) -> None:
    """The pool holds one block, and one request as long as the engine accepts. Raises OutOfDeviceMemory."""
    block_bytes = block_size * cost.kv_bytes_per_token
    if left_bytes < block_bytes:
        raise OutOfDeviceMemory(
            f"no room for keys and values: {memory_fraction:.0%} of the memory, less {cost.stored_weight_bytes / 1e9:.1f} GB of weights, "
            f"{RUNTIME_BYTES / 1e9:.0f} GB for the runtime and the reserve for activations, leaves {left_bytes / 1e9:.1f} GB",
            block_bytes - left_bytes,
        )
    needed_bytes = -(-(max_model_len or 1) // block_size) * block_bytes
    if left_bytes < needed_bytes:
        raise OutOfDeviceMemory(
            f"the pool has {left_bytes / 1e9:.2f} GB, and one request of {max_model_len:,} tokens needs {needed_bytes / 1e9:.2f} GB; "
            f"the longest that fits has {int(left_bytes // block_bytes) * block_size:,} tokens",
            needed_bytes - left_bytes,
        )
