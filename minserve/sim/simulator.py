"""The engine on a virtual device: the parts put together, and a workload served on the virtual clock.

Why: what a student explores on a laptop must be what the real engine does. So this file only chooses sizes and connects the engine's own
scheduler and block manager with a runner that asks the cost model; there is no second scheduler.

Invariant: a simulation is a pure function of its arguments: the same workload gives the same trace, to the last digit.

Taught in notebook 03.
"""

from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.policies import Policy
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.core.trace import Trace
from minserve.sim.cost_model import RESERVE_BYTES, CostModel
from minserve.sim.runner import VOCAB_SIZE, PaddedRunner, SimulatedRunner
from minserve.sim.workload import Workload


def make_engine(
    cost: CostModel,
    *,
    policy: Policy | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    memory_fraction: float = 0.9,
    reserve_bytes: float = RESERVE_BYTES,
    prefix_caching: bool = True,
    token_budget: int = 2048,
    max_running: int = 256,
    max_chunk_tokens: int | None = None,
    watermark_blocks: int = 0,
    reserve_whole_answers: bool = False,
    max_model_len: int | None = None,
    padded_rows: int | None = None,
    keep_snapshots: bool = False,
) -> Engine:
    """An engine whose steps take what `cost` says. Without `num_blocks`, the pool is what the device has left beside the weights.

    With `padded_rows`, every step takes as long as a rectangle of so many rows, each as long as the longest (see PaddedRunner).
    Raises ValueError if the model does not fit.
    """
    num_blocks = num_blocks or cost.pool_blocks(block_size, memory_fraction, reserve_bytes)
    blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
    config = SchedulerConfig(token_budget, max_running, watermark_blocks, max_chunk_tokens, reserve_whole_answers)
    limits = ModelLimits(max_model_len or cost.shape.max_positions, max(VOCAB_SIZE, cost.shape.vocab_size))
    runner = SimulatedRunner(cost) if padded_rows is None else PaddedRunner(cost, padded_rows)
    return Engine(Scheduler(config, blocks, policy), runner, VirtualClock(), limits, Trace(keep_snapshots=keep_snapshots))


def make_slot_engine(
    cost: CostModel,
    *,
    num_slots: int,
    slot_tokens: int,
    policy: Policy | None = None,
    token_budget: int = 2048,
    padded_rows: int | None = None,
) -> Engine:
    """An engine whose requests each reserve room for `slot_tokens` tokens, as engines did before paging.

    A slot pool *is* a paged pool with one block per request: a block as long as the longest request that is accepted.
    """
    return make_engine(
        cost,
        policy=policy,
        num_blocks=num_slots,
        block_size=slot_tokens,
        prefix_caching=False,
        token_budget=token_budget,
        max_running=num_slots,
        max_model_len=slot_tokens,
        padded_rows=padded_rows,
    )


def simulate(engine: Engine, workload: Workload) -> Trace:
    """Serve the workload to its end, on the engine's own clock."""
    engine.run(workload.arrivals(), workload.then)
    return engine.trace
