"""What happened: the engine writes here, and every metric, picture and file is made from what it wrote.

Why: the engine appends one `StepRecord` a step and fills one `RequestRecord` a request, and knows nothing of
who will read them. A picture of the simulator and one of the real engine are drawn by the same code.

Taught in notebooks 00 and 06.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from minserve.core.batch import ScheduledBatch
from minserve.core.metrics import Summary, summarize
from minserve.core.records import Decision, RequestRecord, StepRecord
from minserve.core.request import Request
from minserve.core.scheduler import Scheduler, StepOutput
from minserve.core.snapshot import Snapshot, take_snapshot
from minserve.core.trace_file import read_records, write_perfetto, write_records


class Trace:
    """The records of a run. With `max_records`, the oldest of each kind make room for new ones.

    With `keep_snapshots`, also the state of queues and pool: `snapshots` has one for each of `steps`, taken
    while the step runs (planned, not yet applied), and `after` is the state after the latest one.
    """

    def __init__(self, max_records: int | None = None, keep_snapshots: bool = False):
        if max_records is not None and max_records < 1:
            raise ValueError(f"a trace keeps at least 1 record, got max_records {max_records}")
        self.steps: deque[StepRecord] = deque(maxlen=max_records)
        self.decisions: deque[Decision] = deque(maxlen=max_records)
        self.requests: dict[str, RequestRecord] = {}
        self.snapshots: deque[Snapshot] = deque(maxlen=max_records)
        self.after: Snapshot | None = None
        self.num_refused = 0
        self._max_records = max_records
        self._keep_snapshots = keep_snapshots

    # --- writing: called by the engine ------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        record = RequestRecord(request.request_id, request.arrival_s, request.num_prompt_tokens)
        self.requests[request.request_id] = record

    def plan(self, batch: ScheduledBatch, scheduler: Scheduler, now_s: float) -> None:
        """A step is planned. One and the same reason to wait, step after step, is noted once."""
        for request_id, words in batch.decisions:
            record = self.requests.get(request_id)
            if record is not None and record.last_words != words:
                record.last_words = words
                self.decisions.append(Decision(batch.step, now_s, request_id, words))
        for request_id in batch.preempted_ids:
            record = self.requests.get(request_id)
            if record is not None:
                record.num_preemptions += 1
        if self._keep_snapshots:
            self.snapshots.append(take_snapshot(scheduler, batch.copies))

    def step(
        self, batch: ScheduledBatch, output: StepOutput, scheduler: Scheduler, start_s: float, end_s: float
    ) -> None:
        """A planned step has run, and its results have been applied."""
        self._start(batch, start_s)
        for request, _ in output.tokens:
            self.requests[request.request_id].token_times_s.append(end_s)
        for request in output.finished:
            self.finish(request, end_s)
        self.steps.append(
            StepRecord(
                step=batch.step,
                start_s=start_s,
                end_s=end_s,
                tokens={row.request.request_id: (row.start, row.num_tokens) for row in batch.rows},
                num_new_tokens=len(output.tokens),
                num_used_blocks=batch.num_used_blocks,
                num_idle_blocks=batch.num_idle_blocks,
                num_free_blocks=scheduler.blocks.num_blocks - batch.num_used_blocks,
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
                num_hit_tokens=batch.num_hit_tokens,
                preempted=batch.preempted_ids,
                finished=tuple(request.request_id for request in output.finished),
                num_empty_slots=batch.num_empty_slots,
            )
        )
        if self._keep_snapshots:
            self.after = take_snapshot(scheduler)

    def _start(self, batch: ScheduledBatch, start_s: float) -> None:
        for row in batch.rows:
            record = self.requests.get(row.request.request_id)  # None: aborted meanwhile, and no longer kept
            if record is not None and record.scheduled_s is None:
                record.scheduled_s, record.num_cached_tokens = start_s, row.request.num_cached_tokens

    def finish(self, request: Request, now_s: float) -> None:
        record = self.requests[request.request_id]
        record.finished_s, record.finish_reason = now_s, request.finish_reason
        record.num_preemptions = request.num_preemptions
        if self._max_records is not None and len(self.requests) > self._max_records:
            oldest = next((r.request_id for r in self.requests.values() if r.finished_s is not None), None)
            del self.requests[oldest or request.request_id]

    # --- reading ----------------------------------------------------------------------------------

    def why(self, request_id: str) -> list[Decision]:
        """The decisions on one request, in order."""
        return [d for d in self.decisions if d.request_id == request_id]

    def summary(self) -> Summary:
        return summarize(self.requests.values(), self.steps)

    def save(self, path: str | Path) -> None:
        """Write the run as JSON, for `Trace.load`: to look at it elsewhere, or to replay it."""
        records: Sequence = (self.requests.values(), self.steps, self.decisions, self.snapshots)
        write_records(path, *records, after=self.after, num_refused=self.num_refused)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """A run that `save` wrote. Raises ValueError for another file."""
        found, trace = read_records(path), cls()
        trace.requests = {record.request_id: record for record in found["requests"]}
        trace.steps.extend(found["steps"])
        trace.decisions.extend(found["decisions"])
        trace.snapshots.extend(found["snapshots"])
        trace.after, trace.num_refused = found["after"], found["num_refused"]
        return trace

    def save_perfetto(self, path: str | Path) -> None:
        """Write the run for ui.perfetto.dev or chrome://tracing."""
        write_perfetto(path, self.requests, self.steps)
