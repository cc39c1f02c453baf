"""The oracle of minserve.sim.oracle as the tests use it: in an engine, and watched over by a runner that trusts nobody."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig, StepOutput
from minserve.sim.oracle import OracleRunner, draws, oracle_tokens, oracle_values

__all__ = ["OracleRunner", "draws", "oracle_tokens", "oracle_values"]  # tests find all of the oracle here


class FaithfulRunner(OracleRunner):
    """An oracle that also holds every batch against the contract of the seam, before and after computing it.

    Give it the scheduler (`runner.scheduler = engine.scheduler`) before the first step.
    """

    scheduler: Scheduler

    def __init__(self, num_blocks: int, block_size: int, seconds_per_step: float = 1.0):
        super().__init__(num_blocks, block_size, seconds_per_step)
        self._cached_before: dict[int, object] = {}  # block id -> what it was known as after the step before

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._check_limits(batch)
        for row in batch.rows:
            self._check_row(row)
        self._check_writes(batch)
        self._check_copies(batch)
        self._cached_before = {b: self._name(b) for b in range(self.scheduler.blocks.num_blocks)}
        result = super().execute(batch)
        for row in batch.rows:  # not only what the tokens, mod 211, let through: every slot that the row may read
            stored = [self._read(row.block_table, position) for position in range(row.end)]
            assert stored == oracle_values(row.request.token_ids[: row.end]), f"{row.request.request_id} stores {stored}"
        return result

    def _name(self, block_id: int) -> object:
        return self.scheduler.blocks.cache._by_id.get(block_id)

    def _check_limits(self, batch: ScheduledBatch) -> None:
        config = self.scheduler.config
        assert batch.num_tokens <= config.token_budget, f"{batch.num_tokens} tokens in a step of {config.token_budget}"
        assert len(self.scheduler.running) <= config.max_running
        ids = [row.request.request_id for row in batch.rows]
        assert len(set(ids)) == len(ids), f"a request has two rows: {ids}"
        assert not set(ids) & set(batch.preempted_ids), f"preempted and computed in one step: {ids}, {batch.preempted_ids}"
        assert {row.request for row in batch.rows} <= set(self.scheduler.running)
        assert all(row.num_tokens <= (config.max_chunk_tokens or row.num_tokens) for row in batch.rows)
        self._check_order(batch)

    def _check_order(self, batch: ScheduledBatch) -> None:
        """Nobody who could start is overtaken; only a sample that waits for the one it forks from lets others by."""
        scheduler, order = self.scheduler, self.scheduler.policy.order
        started = [name for name, words in batch.decisions if words.startswith(("starts", "resumes"))]
        for row in batch.rows:
            if row.request.request_id in started:
                early = [r for r in scheduler.waiting if order(r) < order(row.request) and not scheduler._parent_at_work(r)]
                assert not early, f"{row.request.request_id} overtakes {[r.request_id for r in early]}"

    def _check_row(self, row: ScheduledRequest) -> None:
        request, table = row.request, row.block_table
        assert row.num_tokens >= 1 and row.start == request.num_computed_tokens and row.end <= request.num_tokens
        assert row.samples == (row.end == request.num_tokens)
        assert row.token_ids == request.token_ids[row.start : row.end]
        assert len(table) == -(-row.end // self.block_size), f"{len(table)} blocks for {row.end} tokens"
        assert len(set(table)) == len(table) and table == self.scheduler.blocks.table(request)

    def _check_writes(self, batch: ScheduledBatch) -> None:
        written = [b for row in batch.rows for b in row.block_table[row.start // self.block_size :]]
        assert len(set(written)) == len(written), f"two rows write one block: {written}"
        for row in batch.rows:
            for block_id in row.block_table[row.start // self.block_size :]:
                owners = [r.request_id for r in self.scheduler.running if block_id in self.scheduler.blocks.table(r)]
                readers = [r.request.request_id for r in batch.rows if block_id in r.block_table]
                # Whoever else owns it came in this step and reads what this row writes: its row comes later.
                later = readers[readers.index(row.request.request_id) + 1 :]
                assert set(owners) == {row.request.request_id, *later}, f"block {block_id} is written and owned by {owners}"
                known = self._cached_before.get(block_id)
                assert known is None or known is not self._name(block_id), f"block {block_id} is written while it is cached"

    def _check_copies(self, batch: ScheduledBatch) -> None:
        sources, targets = {s for s, _ in batch.copies}, [t for _, t in batch.copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets), f"copies get in each other's way: {batch.copies}"
        for target in targets:
            assert [target in row.block_table for row in batch.rows].count(True) == 1, f"block {target} is copied for nobody"


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


def faithful_engine(num_blocks: int, block_size: int, **options: Any) -> Engine:
    """`make_engine`, with a runner that holds every batch against the contract of the seam."""
    runner = FaithfulRunner(num_blocks, block_size)
    engine = make_engine(num_blocks, block_size, runner=runner, **options)
    runner.scheduler = engine.scheduler
    return engine


def batches_of(engine: Engine) -> list[ScheduledBatch]:
    """Every batch that the engine's oracle has computed."""
    assert isinstance(engine.runner, OracleRunner)
    return engine.runner.batches


def cold_run(prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens of the same request alone in a large pool, cache off, prompt in one piece."""
    engine = make_engine(num_blocks=len(prompt_ids) + max_tokens + 1, block_size=1, prefix_caching=False)
    [request] = engine.add(prompt_ids, SamplingParams(max_tokens=max_tokens))
    engine.run()
    return request.output_ids


def before_steps(engine: Engine, hook: Callable[[ScheduledBatch], object] | None = None) -> None:
    """Call `hook` between planning and computing of every step from now on. None: no longer."""
    assert isinstance(engine.runner, OracleRunner)
    engine.runner.before_execute = hook or (lambda batch: None)


def step_checked(engine: Engine) -> StepOutput:
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


def add_one(engine: Engine, prompt_ids: Iterable[int], max_tokens: int, **options: Any) -> Request:
    """Queue one request with n = 1. `options` are arguments of Engine.add."""
    [request] = engine.add(list(prompt_ids), SamplingParams(max_tokens=max_tokens), **options)
    return request


def is_cold(request: Request, max_tokens: int) -> bool:
    """True if the request's output is all of its cold run."""
    return request.output_ids == oracle_tokens(request.prompt_ids, max_tokens, draws(request))


def assert_idle(engine: Engine) -> None:
    """Nothing queued, nothing held."""
    scheduler = engine.scheduler
    assert not scheduler.waiting and not scheduler.running
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    scheduler.check()
