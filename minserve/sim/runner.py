"""The device that is not here: on the far side of the seam, a step costs what the cost model says and yields made-up tokens.

Why: the scheduler, the block manager and the engine are the real ones, so a simulated schedule is the schedule. Only the
mathematics is left out. A token depends on the one before and on its place, so requests with the same prompt get the same answer, as
they would from a greedy model, and the prefix cache sees the same hits.

Invariant: the runner keeps nothing between steps.

Taught in notebook 03.
"""

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.sim.cost_model import CostModel

VOCAB_SIZE = 32_000  # of the made-up tokens; nothing else depends on it


class SimulatedRunner:
    """Answers a batch with made-up tokens and the seconds that it would take."""

    def __init__(self, cost: CostModel):
        self.cost = cost

    def execute(self, batch: ScheduledBatch) -> StepResult:
        tokens = {row.request.request_id: next_token(row) for row in batch.rows if row.samples}
        return StepResult(tokens, elapsed_s=self.cost.batch_cost(batch).seconds if batch.rows else 0.0)


def next_token(row: ScheduledRequest) -> int:
    """A stand-in for a greedy model: the same tokens are always followed by the same one."""
    return (31 * row.request.token_ids[row.end - 1] + row.end) % VOCAB_SIZE
