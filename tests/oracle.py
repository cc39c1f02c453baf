"""Stand-in models that make scheduling and memory faults visible in milliseconds.

The oracle stores one number per slot: v(i) = (31 v(i-1) + token(i) + 7) mod 1,000,003, where v(i-1) is read back through the
block table. Its next token is the sum of (j+1) v(j) over all slots, mod 211. A wrong, missing or stale slot changes the text.
"""

from collections.abc import Callable, Sequence
from typing import Any

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig

VOCAB_SIZE = 211


class OracleRunner:
    """Computes the oracle's tokens from the slots of a pool. Keeps the batches it has seen, for tests to read."""

    def __init__(self, num_blocks: int, block_size: int, seconds_per_step: float = 1.0):
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.batches: list[ScheduledBatch] = []
        self.seconds_per_step = seconds_per_step
        self.before_execute: Callable[[ScheduledBatch], None] = lambda batch: None

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.before_execute(batch)
        self.batches.append(batch)
        size = self.block_size
        for source, target in batch.copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        for row in batch.rows:  # all are written before any is read, as a layer of the real model does
            for position, token_id in enumerate(row.token_ids, start=row.start):
                before = self._read(row.block_table, position - 1) if position else 0
                self.slots[row.block_table[position // size] * size + position % size] = (31 * before + token_id + 7) % 1_000_003
        tokens = {row.request.request_id: self._next_token(row.block_table, row.end) for row in batch.rows if row.samples}
        return StepResult(token_ids=tokens, elapsed_s=self.seconds_per_step)

    def _read(self, table: Sequence[int], position: int) -> int:
        value = self.slots[table[position // self.block_size] * self.block_size + position % self.block_size]
        assert value is not None, f"position {position} is read before it was written"
        return value

    def _next_token(self, table: Sequence[int], end: int) -> int:
        return sum((j + 1) * self._read(table, j) for j in range(end)) % VOCAB_SIZE


class ScriptedRunner:
    """Gives each request the tokens of its script, one after the other."""

    def __init__(self, scripts: dict[str, Sequence[int]] | Sequence[int]):
        self.scripts = scripts

    def execute(self, batch: ScheduledBatch) -> StepResult:
        def token(request: Request) -> int:
            script = self.scripts[request.request_id] if isinstance(self.scripts, dict) else self.scripts
            return script[request.num_output_tokens]

        return StepResult({row.request.request_id: token(row.request) for row in batch.rows if row.samples}, elapsed_s=1.0)


def make_engine(
    num_blocks: int,
    block_size: int,
    *,
    runner: Any = None,
    max_model_len: int = 100_000,
    vocab_size: int = 10_000,
    eos_ids: frozenset[int] = frozenset(),
    prefix_caching: bool = True,
    seconds_per_step: float = 1.0,
    block_options: dict[str, Any] | None = None,
    **config: Any,
) -> Engine:
    """An engine on the oracle, with a virtual clock. `config` are fields of SchedulerConfig; budget and cap are large by default."""
    options = {"token_budget": 1_000_000, "max_running": 1_000_000, **config}
    blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching, **(block_options or {}))
    scheduler = Scheduler(SchedulerConfig(**options), blocks)
    runner = runner or OracleRunner(num_blocks, block_size, seconds_per_step)
    return Engine(scheduler, runner, VirtualClock(), ModelLimits(max_model_len, vocab_size, eos_ids))


def cold_run(prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens of the same request alone in a large pool, cache off, prompt in one piece."""
    engine = make_engine(num_blocks=len(prompt_ids) + max_tokens + 1, block_size=1, prefix_caching=False)
    [request] = engine.add(prompt_ids, SamplingParams(max_tokens=max_tokens))
    engine.run()
    return request.output_ids


def step_checked(engine: Engine) -> Any:
    """One step, and the conservation laws after it."""
    output = engine.step()
    engine.scheduler.check()
    return output


def run_checked(engine: Engine, max_steps: int = 10_000) -> int:
    """Step until idle with check() after each step; returns the number of steps."""
    steps = 0
    while engine.has_work:
        assert steps < max_steps, f"still busy after {max_steps} steps"
        step_checked(engine)
        steps += 1
    return steps
