"""The device that is not here: on the far side of the seam, a step costs what the cost model says and yields made-up tokens.

Why: the scheduler, the block manager and the engine are the real ones, so a simulated schedule is the schedule. Only the
mathematics is left out. A token depends on the one before and on its place, so requests with the same prompt get the same answer, as
they would from a greedy model, and the prefix cache sees the same hits.

Invariant: the runner keeps nothing between steps.

Taught in notebook 03.
"""

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.sim.cost_model import CostModel, Work, row_work

VOCAB_SIZE = 32_000  # of the made-up tokens; nothing else depends on it


class SimulatedRunner:
    """Answers a batch with made-up tokens and the seconds that it would take."""

    def __init__(self, cost: CostModel):
        self.cost = cost

    def execute(self, batch: ScheduledBatch) -> StepResult:
        tokens = {row.request.request_id: next_token(row) for row in batch.rows if row.samples}
        return StepResult(tokens, elapsed_s=self.cost.of(self.work(batch)).seconds if batch.rows else 0.0)

    def work(self, batch: ScheduledBatch) -> Work:
        """What the device computes for this batch."""
        return self.cost.work(batch.rows)


class PaddedRunner(SimulatedRunner):
    """A device that computes rectangles, as engines did at first: so many rows in every step, each as long as the longest.

    Short prompts are filled up, and who is done is computed on until the last of the batch is. It wants a token budget that lets
    all prompts of a batch into one step.
    """

    def __init__(self, cost: CostModel, num_rows: int):
        super().__init__(cost)
        self.num_rows = num_rows

    def work(self, batch: ScheduledBatch) -> Work:
        num_tokens, end = max(row.num_tokens for row in batch.rows), max(row.end for row in batch.rows)
        return max(self.num_rows, len(batch.rows)) * row_work(end - num_tokens, num_tokens, window=self.cost.shape.window)


def next_token(row: ScheduledRequest) -> int:
    """A stand-in for a greedy model: the same tokens are always followed by the same one."""
    return (31 * row.request.token_ids[row.end - 1] + row.end) % VOCAB_SIZE
