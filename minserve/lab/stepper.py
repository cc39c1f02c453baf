"""Step and rewind: a run of the real scheduler and block manager, one moment at a time.

Why: who gets blocks and who waits is decided step by step, and a drawing of it by hand is right only by luck. Here the engine runs to
its end once for every setting and takes a snapshot a step; stepping and rewinding only choose which snapshot is shown. So every
picture is the engine's own state, and going back costs nothing.

Position k is the moment while step k runs: planned, its blocks given out, its results not yet there. The last position is the moment
after the last step.

Invariant: nothing is shown that is not in the trace. A recorded run, of the real engine too, is replayed by the same code.

Taught in notebooks 04, 06 and 07.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from minserve.core.engine import Arrival, Engine
from minserve.core.records import Decision, StepRecord
from minserve.core.request import InvalidRequest, SamplingParams
from minserve.core.snapshot import Snapshot, take_snapshot
from minserve.core.trace import Trace
from minserve.lab.explorer import Explorer, choice, duration, step_buttons, whole
from minserve.lab.pool_map import pool_map
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine
from minserve.sim.workload import Workload, exact

BLOCK_SIZES = (1, 2, 4, 8, 16)


def little_workload() -> Workload:
    """Seven answers in which everything happens once: a shared beginning, two samples of one prompt, a long prompt, a late hit."""
    system = list(range(1000, 1016))
    calls: Sequence[tuple[float, str, list[int], SamplingParams]] = (
        (0.000, "A", system + list(range(100, 107)), exact(14)),
        (0.000, "B", system + list(range(200, 204)), exact(10)),
        (0.050, "C", list(range(300, 310)), SamplingParams(max_tokens=12, n=2, ignore_eos=True)),
        (0.080, "D", list(range(400, 438)), exact(12)),
        (0.120, "E", list(range(500, 505)), exact(8)),
        (0.550, "F", system + list(range(600, 606)), exact(6)),
    )
    return Workload([(time_s, {"request_id": name, "prompt_ids": ids, "params": params}) for time_s, name, ids, params in calls])


class Replay(Explorer):
    """A recorded run, step by step: blocks, queues, budget, and why the chosen request runs or waits."""

    def __init__(self, trace: Trace, position: int = 0):
        if not trace.steps or len(trace.snapshots) != len(trace.steps):
            raise ValueError(
                f"the trace has {len(trace.steps)} steps and {len(trace.snapshots)} snapshots: to step through a run, record one with "
                "LLM(keep_snapshots=True), make_engine(keep_snapshots=True) or Trace(keep_snapshots=True)"
            )
        self.trace, self.after = trace, trace.after or trace.snapshots[-1]
        self._build([], position)

    def _build(self, controls: Sequence[widgets.Widget], position: int) -> None:
        self.position = whole("position", 0, max(position, 0), max(position, 0))
        self.request = choice("decisions on", [""], "")
        super().__init__([*controls, self.request], [self.position, *step_buttons(self.position)])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        self._fit_controls()
        at, records = self.position.value, self.trace.steps
        self.step_record: StepRecord | None = records[at] if at < len(records) else None
        self.snapshot: Snapshot = self.trace.snapshots[at] if self.step_record else self.after
        last_step = self.step_record.step if self.step_record else math.inf
        self.decisions: list[Decision] = [d for d in self.trace.why(self.request.value) if d.step <= last_step]

    def _fit_controls(self) -> None:
        """As many positions as the run has, and its requests to choose from; what was chosen stays where it can."""
        ids, chosen = tuple(self.trace.requests) or ("",), self.request.value
        with self._adjusting():
            self.position.max = len(self.trace.steps)  # a greater value comes down to it
            if ids != tuple(self.request.options):
                self.request.options = ids
                self.request.value = chosen if chosen in ids else ids[0]

    @property
    def now_s(self) -> float:
        """When the step that is shown begins, from the first arrival on."""
        first_s = min((record.arrival_s for record in self.trace.requests.values()), default=0.0)
        latest_s = self.trace.steps[-1].end_s if self.trace.steps else first_s
        return (self.step_record.start_s if self.step_record else latest_s) - first_s

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        return self._finding(), " ".join(filter(None, (self._step_words(), self._block_words(), self._queue_words())))

    def _finding(self) -> str:
        """What happens in this step, by the decisions that it brought."""
        record = self.step_record
        if record is None:
            num_steps = len(self.trace.steps)
            return f"After the last of {num_steps} steps." if num_steps else "No step runs: nobody is served."
        events = [f"{d.request_id} {d.words}" for d in self.trace.decisions if d.step == record.step]
        events += [f"{request_id} ends" for request_id in record.finished]
        return f"Step {record.step}: {'; '.join(events) if events else 'all go on as before'}."

    def _step_words(self) -> str:
        record, snapshot = self.step_record, self.snapshot
        if record is None:
            return f"At {duration(self.now_s)}."
        num_rows = len(record.tokens)
        who = f"{num_rows} request{'s'[: num_rows != 1]} compute{'s'[: num_rows == 1]}"
        return f"At {duration(self.now_s)}, {who} {record.num_tokens} of {snapshot.token_budget} tokens."

    def _block_words(self) -> str:
        s = self.snapshot
        num_used = s.num_blocks - len(s.idle) - len(s.free)
        by_count = {count: [b for b, of_b in enumerate(s.ref_counts) if of_b == count] for count in sorted({*s.ref_counts} - {0, 1})}
        shared = "".join(f"; shared by {count}: {ranges(block_ids)}" for count, block_ids in by_count.items())
        copied = ", ".join(f"{source} to {target}" for source, target in s.copies)
        return (
            f"Of {s.num_blocks} blocks of {s.block_size}, {num_used} are used, {len(s.idle)} idle and {len(s.free)} free"
            f"{shared}{f'; copied: {copied}' if copied else ''}."
        )

    def _queue_words(self) -> str:
        running, waiting = (", ".join(state.request_id for state in queue) for queue in (self.snapshot.running, self.snapshot.waiting))
        return f"Running: {running or 'nobody'}; waiting: {waiting or 'nobody'}."

    def details(self) -> Sequence[str]:
        """The chosen request's decisions so far, the latest first."""
        so_far = [f"step {d.step}: {d.words}" for d in reversed(self.decisions)]
        return [f"{self.request.value} (its blocks are framed), the latest decision first:", *(so_far or ["none yet"])]

    def draw(self) -> Figure:
        title, order = self._finding(), tuple(self.trace.requests)
        return pool_map(
            self.snapshot,
            self.step_record,
            title if len(title) < 105 else f"{title[:102]}...",
            order=order,
            most_tokens=self._most_tokens,
            chosen=self.request.value,
        )

    @property
    def _most_tokens(self) -> int:
        """The length of the longest request of the run: bars keep their scale from step to step."""
        return max((r.num_prompt_tokens + r.num_output_tokens for r in self.trace.requests.values()), default=1)


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, neighbours as one.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


class SteppingExplorer(Replay):
    """Block size, pool, token budget, watermark and prefix cache -> who holds which block and who waits, step by step.

    The real scheduler serves a few requests to Llama-2-13B on one A100-80GB, with a pool so small that they have to share it.
    Further `options` go to `build`, which makes the engine: `make_engine`, or one that takes the same arguments.
    """

    def __init__(
        self,
        workload: Workload | Sequence[Arrival] | None = None,
        *,
        pool_tokens: int = 96,
        block_size: int = 4,
        token_budget: int = 16,
        watermark_blocks: int = 0,
        prefix_caching: bool = True,
        max_running: int = 8,
        position: int = 0,
        cost: CostModel | None = None,
        build: Callable[..., Engine] = make_engine,
        **options: Any,
    ):
        self.workload = little_workload() if workload is None else workload if isinstance(workload, Workload) else Workload(workload)
        self.cost = cost or CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
        self._make = lambda **settings: build(self.cost, max_running=max_running, keep_snapshots=True, **settings, **options)
        self.block_size = choice("block size", sorted({*BLOCK_SIZES, block_size}), block_size)
        self.pool = whole("pool, tokens", min(16, pool_tokens), max(192, pool_tokens), pool_tokens, math.gcd(8, pool_tokens))
        self.budget = whole("token budget", 1, max(64, token_budget), token_budget)
        self.watermark = whole("watermark, blocks", 0, max(8, watermark_blocks), watermark_blocks)
        self.cache = choice("prefix cache", (("on", True), ("off", False)), prefix_caching)
        self._settings: tuple[object, ...] = ()
        self._build([self.block_size, self.pool, self.budget, self.watermark, self.cache], position)

    @classmethod
    def replay(cls, trace: Trace | str | Path, position: int = 0) -> Replay:
        """The same view of a recorded run, without the settings. Raises ValueError for a trace without snapshots."""
        return Replay(trace if isinstance(trace, Trace) else Trace.load(trace), position)

    def compute(self) -> None:
        controls = (self.block_size, self.pool, self.budget, self.watermark, self.cache)
        settings = tuple(control.value for control in controls)
        if settings != self._settings:  # else only the position has moved
            self._serve()
            self._settings = settings
        super().compute()

    def _serve(self) -> None:
        """Run the whole workload under these settings."""
        engine = self.make_engine()
        engine.run(self.workload.arrivals(), self.workload.then)
        self.trace, self.after = engine.trace, take_snapshot(engine.scheduler)
        self.refused = self._refusals()

    def make_engine(self) -> Engine:
        """A fresh engine with the settings of the controls."""
        num_blocks = self.pool.value // self.block_size.value
        if not num_blocks:
            raise ValueError(f"a pool of {self.pool.value} tokens has no block of {self.block_size.value}")
        return self._make(
            num_blocks=num_blocks,
            block_size=self.block_size.value,
            token_budget=self.budget.value,
            watermark_blocks=self.watermark.value,
            prefix_caching=self.cache.value,
        )

    def _refusals(self) -> list[str]:
        """What an engine of these settings says to those of the workload that it cannot serve."""
        engine, words = self.make_engine(), []
        for _, arguments in sorted(self.workload.arrivals(), key=lambda arrival: arrival[0]):
            try:
                engine.add(**arguments)
            except InvalidRequest as error:
                words.append(str(error))
        return words

    def words(self) -> tuple[str, str]:
        finding, numbers = super().words()
        count = self.trace.num_refused
        refused = f" {count} request{'s are' if count > 1 else ' is'} refused: {'; '.join(self.refused)}." if count else ""
        return finding, numbers + refused
