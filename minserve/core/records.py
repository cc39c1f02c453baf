"""What is written down of a run: a record a step, a record a request, and every decision in words.

Why: records are plain data. Who reads them (metrics, pictures, files) needs no engine, and the engine that
writes them knows none of its readers.

Times are differences of time stamps, never sums of step costs, so waiting and recomputation are in them.

Taught in notebooks 00 and 06.
"""

from dataclasses import dataclass, field


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
    num_empty_slots: int = 0  # of the used blocks: nothing is stored in them yet

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
