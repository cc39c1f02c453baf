"""Engines on the oracle whose steps take chosen times, for the tests of records, metrics and files."""

from random import Random
from typing import Any

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.engine import Engine
from minserve.core.request import SamplingParams
from minserve.core.trace import Trace
from tests.oracle import OracleRunner, make_engine


class TimedRunner(OracleRunner):
    """An oracle whose steps take the given times, one after the other, and 1 ms after that."""

    def __init__(self, num_blocks: int, block_size: int, times_s: list[float]):
        super().__init__(num_blocks, block_size)
        self.times_s = list(times_s)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.seconds_per_step = self.times_s.pop(0) if self.times_s else 0.001
        return super().execute(batch)


def timed_engine(times_s: list[float], num_blocks: int = 64, **options: Any) -> Engine:
    return make_engine(num_blocks, 4, runner=TimedRunner(num_blocks, 4, times_s), **options)


def busy_run(seed: int = 0, keep_snapshots: bool = False, **options: Any) -> Engine:
    """Twenty requests at random times in a pool that is too small for them."""
    random = Random(seed)
    engine = timed_engine([random.uniform(0.001, 0.1) for _ in range(500)], num_blocks=20, token_budget=24, max_running=6, **options)
    engine.trace = Trace(keep_snapshots=keep_snapshots)
    arrivals = []
    for number in range(20):
        prompt = range(1000 * (number % 3), 1000 * (number % 3) + random.randrange(2, 30))
        arrivals.append((random.uniform(0, 1), {"prompt_ids": prompt, "params": SamplingParams(max_tokens=random.randrange(1, 20))}))
    engine.run(arrivals)
    engine.scheduler.check()
    return engine
