"""What happened, as plain records; every metric, picture and export is a pure function of them.

Why: the engine appends one `StepRecord` a step and fills one `RequestRecord` a request, and knows nothing of
who will read them. A picture of the simulator and one of the real engine are drawn by the same code.

Metrics follow vLLM's definitions: TTFT = first token - arrival; ITL = each gap between tokens; TPOT = (last -
first token) / (tokens - 1), undefined for a single token; goodput = requests that meet every given limit, per
second. Times are differences of time stamps, never sums of step costs, so waiting and recomputation are in
them.

Taught in notebooks 00 and 06.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minserve.core.batch import ScheduledBatch
from minserve.core.request import FinishReason, Request
from minserve.core.scheduler import Scheduler, StepOutput


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: who computed which tokens, and when (seconds of the engine's clock).

    Blocks are counted while the step runs, so that those of a request which ends with it are in the peak; the
    queues after it.
    """

    step: int
    start_s: float
    end_s: float
    tokens: dict[str, tuple[int, int]]  # request id -> (first position, number of tokens)
    num_new_tokens: int  # tokens given to callers
    num_used_blocks: int
    num_idle_blocks: int  # cached, without an owner
    num_free_blocks: int  # idle ones included
    num_running: int
    num_waiting: int
    num_hit_tokens: int  # taken over instead of computed: prefix hits and forks
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()

    @property
    def elapsed_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.tokens.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """Why the scheduler did or did not run a request in a step, in words."""

    step: int
    time_s: float
    request_id: str
    words: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.request_id} {self.words}"


@dataclass(slots=True)
class RequestRecord:
    """The times of one request's life, seconds of the engine's clock."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    scheduled_s: float | None = None  # start of the first step that computed something for it
    token_times_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    last_words: str = ""  # of the decision log: one and the same reason, step after step, is noted once

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def latency_s(self) -> float | None:
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s


class Trace:
    """The records of a run. With `max_records`, the oldest of each kind make room for new ones."""

    def __init__(self, max_records: int | None = None):
        if max_records is not None and max_records < 1:
            raise ValueError(f"a trace keeps at least 1 record, got max_records {max_records}")
        self.steps: deque[StepRecord] = deque(maxlen=max_records)
        self.decisions: deque[Decision] = deque(maxlen=max_records)
        self.requests: dict[str, RequestRecord] = {}
        self.num_refused = 0
        self._max_records = max_records

    # --- writing: called by the engine ------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        self.requests[request.request_id] = RequestRecord(
            request.request_id, request.arrival_s, request.num_prompt_tokens
        )

    def step(
        self, batch: ScheduledBatch, output: StepOutput, scheduler: Scheduler, start_s: float, end_s: float
    ) -> None:
        self._note_decisions(batch, start_s)
        for row in batch.rows:
            record = self.requests.get(
                row.request.request_id
            )  # None: aborted during the step, and no longer kept
            if record is not None and record.scheduled_s is None:
                record.scheduled_s, record.num_cached_tokens = start_s, row.request.num_cached_tokens
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
            )
        )

    def _note_decisions(self, batch: ScheduledBatch, now_s: float) -> None:
        """A request that waits for one and the same reason step after step is noted once."""
        for request_id, words in batch.decisions:
            record = self.requests.get(request_id)
            if record is not None and record.last_words != words:
                record.last_words = words
                self.decisions.append(Decision(batch.step, now_s, request_id, words))
        for request_id in batch.preempted_ids:
            record = self.requests.get(request_id)
            if (
                record is not None and record.finished_s is None
            ):  # one aborted during the step has its final count
                record.num_preemptions += 1

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

    def summary(self) -> "Summary":
        return summarize(self.requests.values(), self.steps)

    def save_perfetto(self, path: str) -> None:
        """Write the run for ui.perfetto.dev or chrome://tracing: one track a request, counters for blocks and queues."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": perfetto_events(self), "displayTimeUnit": "ms"}, file)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest values, as numpy does. None for no values.

    >>> percentile([1, 2, 3, 4], 50)
    2.5
    """
    ranked = sorted(values)
    if not ranked:
        return None
    place = (len(ranked) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """What one table says of a run. Percentiles of TTFT and TPOT are over requests, of ITL over all gaps."""

    num_requests: int
    num_finished: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    peak_used_blocks: int
    mean_occupancy: float  # share of the pool that was owned, averaged over the time of the steps
    num_hit_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_steps: int


def summarize(requests: Iterable[RequestRecord], steps: Iterable[StepRecord]) -> Summary:
    requests, steps = list(requests), list(steps)
    num_prompt = sum(r.num_prompt_tokens for r in requests)
    num_output = sum(r.num_output_tokens for r in requests)
    wall_s = _wall_s(requests, steps)
    rate = 1 / wall_s if wall_s > 0 else 0.0
    ttft_s = [r.ttft_s for r in requests if r.ttft_s is not None]
    tpot_s = [r.tpot_s for r in requests if r.tpot_s is not None]
    itl_s = [gap for r in requests for gap in r.itl_s]
    return Summary(
        num_requests=len(requests),
        num_finished=sum(r.finished_s is not None for r in requests),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        wall_s=wall_s,
        output_tokens_per_s=num_output * rate,
        total_tokens_per_s=(num_prompt + num_output) * rate,
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        tpot_p50_s=percentile(tpot_s, 50),
        tpot_p99_s=percentile(tpot_s, 99),
        itl_p50_s=percentile(itl_s, 50),
        itl_p99_s=percentile(itl_s, 99),
        peak_used_blocks=max((s.num_used_blocks for s in steps), default=0),
        mean_occupancy=occupancy(steps),
        num_hit_tokens=sum(s.num_hit_tokens for s in steps),
        num_preemptions=sum(r.num_preemptions for r in requests),
        num_recomputed_tokens=num_recomputed_tokens(steps),
        num_steps=len(steps),
    )


def _wall_s(requests: Sequence[RequestRecord], steps: Sequence[StepRecord]) -> float:
    if not requests or not steps:
        return 0.0
    return steps[-1].end_s - min(r.arrival_s for r in requests)


def occupancy(steps: Iterable[StepRecord]) -> float:
    """Share of the pool in requests' hands, weighted by time. 0 for no steps."""
    steps = list(steps)
    elapsed_s = sum(s.elapsed_s for s in steps)
    total = sum(s.elapsed_s * s.num_used_blocks / (s.num_used_blocks + s.num_free_blocks) for s in steps)
    return total / elapsed_s if elapsed_s > 0 else 0.0


def num_recomputed_tokens(steps: Iterable[StepRecord]) -> int:
    """Tokens computed again after a preemption: those that start below what the request had already reached."""
    reached: dict[str, int] = {}
    again = 0
    for step in steps:
        for request_id, (start, count) in step.tokens.items():
            again += max(0, min(reached.get(request_id, 0), start + count) - start)
            reached[request_id] = max(reached.get(request_id, 0), start + count)
    return again


def goodput(
    requests: Iterable[RequestRecord],
    wall_s: float,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    latency_s: float | None = None,
) -> float:
    """Requests per second that came to their end (not aborted, no error) and meet every limit given.

    A request without a TPOT (one token) meets any TPOT limit.
    """

    def meets(record: RequestRecord) -> bool:
        if (
            record.ttft_s is None
            or record.latency_s is None
            or record.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)
        ):
            return False
        return all(
            limit is None or value <= limit
            for value, limit in (
                (record.ttft_s, ttft_s),
                (record.tpot_s or 0.0, tpot_s),
                (record.latency_s, latency_s),
            )
        )

    if wall_s <= 0:
        raise ValueError(f"goodput is a rate and needs a duration above 0 s, got {wall_s}")
    return sum(meets(r) for r in requests) / wall_s


def perfetto_events(trace: Trace) -> list[dict[str, Any]]:
    """Chrome trace events: a slice per request and step, counters per step; times in microseconds."""
    tracks = {request_id: number for number, request_id in enumerate(trace.requests, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": request_id}}
        for request_id, tid in tracks.items()
    ]
    for step in trace.steps:
        start_us, elapsed_us = step.start_s * 1e6, step.elapsed_s * 1e6
        for request_id, (start, count) in step.tokens.items():
            args = {"step": step.step, "start": start, "tokens": count}
            name = f"{count} token{'s'[: count > 1]}"
            tid = tracks.get(request_id, 0)
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": 1,
                    "tid": tid,
                    "ts": start_us,
                    "dur": elapsed_us,
                    "args": args,
                }
            )
        blocks = {"used": step.num_used_blocks, "idle": step.num_idle_blocks}
        queues = {"running": step.num_running, "waiting": step.num_waiting}
        events.append({"ph": "C", "name": "KV blocks", "pid": 1, "ts": start_us, "args": blocks})
        events.append({"ph": "C", "name": "requests", "pid": 1, "ts": start_us, "args": queues})
    return events
