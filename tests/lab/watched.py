"""A run of the scheduler that is watched by hand: what the stepping explorer must show, found without it, trace or snapshots."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Arrival, Engine, ModelLimits
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.runner import SimulatedRunner
from minserve.sim.shapes import SHAPES

COST = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])


def state_of(scheduler: Scheduler, batch: ScheduledBatch | None = None) -> dict[str, Any]:
    """What the scheduler and its block manager hold, asked of them directly."""
    blocks = scheduler.blocks
    return {
        "running": [(r.request_id, r.num_tokens, r.num_computed_tokens, blocks.table(r)) for r in scheduler.running],
        "waiting": [(r.request_id, r.num_tokens, r.num_computed_tokens, blocks.table(r)) for r in scheduler.waiting],
        "ref_counts": [blocks.ref_count(block_id) for block_id in range(blocks.num_blocks)],
        "idle": list(blocks.cache.idle),
        "free": list(blocks.free_ids),
        "cached": [block_id for block_id in range(blocks.num_blocks) if blocks.cache.holds(block_id)],
        "copies": list(batch.copies) if batch else [],
        "rows": {row.request.request_id: (row.start, row.num_tokens) for row in batch.rows} if batch else {},
    }


class WatchingRunner(SimulatedRunner):
    """Looks at the scheduler while a step runs, and keeps what the scheduler said about whom, without repetitions."""

    scheduler: Scheduler

    def __init__(self) -> None:
        super().__init__(COST)
        self.states: list[dict[str, Any]] = []
        self.decisions: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.states.append(state_of(self.scheduler, batch))
        for request_id, words in batch.decisions:
            said = self.decisions[request_id]
            if not said or said[-1][1] != words:
                said.append((batch.step, words))
        return super().execute(batch)


def watched_run(
    arrivals: Sequence[Arrival],
    pool_tokens: int = 96,
    block_size: int = 4,
    token_budget: int = 16,
    watermark_blocks: int = 0,
    prefix_caching: bool = True,
) -> WatchingRunner:
    """The run under these settings; the state after it is the last one."""
    runner = WatchingRunner()
    blocks = BlockManager(pool_tokens // block_size, block_size, prefix_caching=prefix_caching)
    scheduler = runner.scheduler = Scheduler(SchedulerConfig(token_budget, 8, watermark_blocks), blocks)
    Engine(scheduler, runner, VirtualClock(), ModelLimits(4096, 32_000)).run(arrivals)
    runner.states.append(state_of(scheduler))
    return runner


def words_of(state: dict[str, Any], block_size: int) -> list[str]:
    """What a caption must say of such a state, the shared blocks left out."""
    counts, queues = state["ref_counts"], [", ".join(row[0] for row in state[queue]) or "nobody" for queue in ("running", "waiting")]
    num_used = sum(count > 0 for count in counts)
    return [
        f"Of {len(counts)} blocks of {block_size}, {num_used} are used, {len(state['idle'])} idle and {len(state['free'])} free",
        f"Running: {queues[0]}; waiting: {queues[1]}.",
    ]


def shared_in(caption: str) -> dict[int, int]:
    """Block id -> number of owners, of the shared blocks that a caption names."""
    counts: dict[int, int] = {}
    for count, listed in re.findall(r"; shared by (\d+): ([\d, -]+)", caption):
        for part in listed.split(", "):
            first, _, last = part.partition("-")
            counts.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(count)))
    return counts


def shared_of(state: dict[str, Any]) -> dict[int, int]:
    return {block_id: count for block_id, count in enumerate(state["ref_counts"]) if count > 1}
