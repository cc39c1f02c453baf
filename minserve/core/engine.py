"""The loop of serving: schedule, execute, update, record.

Why: the same dozen lines drive the real model and the simulator. The engine is given its runner and its clock
and knows neither; all that a request needs is in the request, all that a step did is in the trace.

Invariant: whatever a caller sends and whatever a step does, the engine goes on: a bad request is refused
before it is queued, a failed step ends its own requests and returns their blocks, everybody else loses
nothing.

Taught in notebooks 00 and 06.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.clock import VirtualClock, WallClock
from minserve.core.request import FinishReason, InvalidRequest, Request, RequestTooLong, SamplingParams
from minserve.core.scheduler import Scheduler, StepOutput
from minserve.core.trace import Trace


class Runner(Protocol):
    """Whatever can compute a batch: the real model, the simulator, a test's oracle."""

    def execute(self, batch: ScheduledBatch) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engine must know of a model to refuse what it cannot serve.

    `max_model_len` bounds prompt + output.
    """

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()


Arrival: TypeAlias = tuple[float, dict[str, Any]]  # the time in s, and the arguments of Engine.add


class EngineStalled(RuntimeError):
    """Requests wait and nothing can ever run them: blocks are held outside the engine."""


class Engine:
    """Requests in, tokens out, step by step: a scheduler, a runner, a clock and a trace."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: WallClock | VirtualClock,
        limits: ModelLimits,
        trace: Trace | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.limits = limits
        self.trace = trace or Trace()
        self._num_arrivals = 0

    # --- requests ---------------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        arrival_s: float | None = None,
    ) -> list[Request]:
        """Queue a prompt; with n > 1, n requests that share it.

        `max_tokens` is a ceiling: prompt + output end at the model's limit, or at what the whole pool can
        hold. Raises InvalidRequest or RequestTooLong, with the numbers.
        """
        params = params or SamplingParams()
        request_id = request_id if request_id is not None else self._unused_id()
        arrival_s = self.clock.now() if arrival_s is None else arrival_s
        try:
            self._refuse_invalid(request_id, prompt_ids, params, priority, salt)
            if not math.isfinite(arrival_s):
                raise InvalidRequest(
                    f"request {request_id}: arrival_s must be a finite number, got {arrival_s}"
                )
            requests = self._make_requests(request_id, tuple(prompt_ids), params, priority, salt, arrival_s)
            self.scheduler.add(requests)
        except InvalidRequest:
            self.trace.num_refused += 1
            raise
        self._num_arrivals += len(requests)
        for request in requests:
            self.trace.arrive(request)
        return requests

    def _unused_id(self) -> str:
        """R and a number; a caller who names requests in the same way may have taken some."""
        number = self._num_arrivals
        while self.scheduler.find(f"R{number}"):
            number += 1
        return f"R{number}"

    def _make_requests(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        salt: str,
        arrival_s: float,
    ) -> list[Request]:
        room = self.limits.max_model_len - len(prompt_ids)
        requests: list[Request] = []
        for index in range(params.n):
            request = Request(
                request_id=f"{request_id}#{index}" if index else request_id,
                prompt_ids=prompt_ids,
                params=params,
                max_total_tokens=len(prompt_ids) + min(room, params.max_tokens or room),
                stop_ids=frozenset(params.stop_token_ids)
                | (frozenset() if params.ignore_eos else self.limits.eos_ids),
                priority=priority,
                arrival_s=arrival_s,
                order=self._num_arrivals + index,
                salt=salt,
                sample_index=index,
                parent=requests[0] if index else None,
            )
            if requests:
                request.seed = requests[0].seed  # samples differ by their index, not by luck
            requests.append(request)
        return requests

    def _refuse_invalid(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, priority: int, salt: str
    ) -> None:
        if not isinstance(request_id, str) or not isinstance(salt, str):
            raise InvalidRequest(f"request id and salt must be strings, got {request_id!r} and {salt!r}")
        if not len(prompt_ids):
            raise InvalidRequest(f"request {request_id}: the prompt is empty, at least 1 token is needed")
        for index, token_id in enumerate(prompt_ids):
            if not _is_int(token_id) or not 0 <= token_id < self.limits.vocab_size:
                raise InvalidRequest(
                    f"request {request_id}: prompt token {index} is {token_id!r}, "
                    f"the model knows ids 0 to {self.limits.vocab_size - 1}"
                )
        if not _is_int(priority):
            raise InvalidRequest(f"request {request_id}: priority must be an integer, got {priority!r}")
        num_least = max(1, params.min_tokens)
        if len(prompt_ids) + num_least > self.limits.max_model_len:
            raise RequestTooLong(
                f"request {request_id}: {len(prompt_ids)} prompt tokens and at least {num_least} output "
                f"tokens make {len(prompt_ids) + num_least}, max_model_len is {self.limits.max_model_len}"
            )

    def abort(self, request_id: str) -> bool:
        """Give up a request and the samples that share its prompt, at any moment. False if there is none."""
        requests = self.scheduler.find(request_id)
        for request in requests:
            self.finish(request, FinishReason.ABORT)
        return bool(requests)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End one request from outside the step: a stop string was seen, a caller went away."""
        if not request.is_finished:
            self.scheduler.finish(request, reason)
            self.trace.finish(request, self.clock.now())

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> StepOutput:
        """Schedule, execute, update, record. A step that fails ends its requests, and its error is raised."""
        start_s = self.clock.now()
        batch = self.scheduler.schedule(start_s)
        self.trace.plan(batch, self.scheduler, start_s)
        try:
            result = self.runner.execute(batch)
            self.clock.advance(result.elapsed_s)
            output = self.scheduler.update(batch, result)
        except BaseException as error:  # a KeyboardInterrupt too: the step's blocks may not be filled
            output = self.scheduler.fail(batch, f"{type(error).__name__}: {error}")
            self.trace.step(batch, output, self.scheduler, start_s, self.clock.now())
            raise
        self.trace.step(batch, output, self.scheduler, start_s, self.clock.now())
        return output

    @property
    def wake_s(self) -> float:
        """When the policy will let somebody start though nobody comes or goes; infinity: never."""
        return self.scheduler.policy.wake_s(self.scheduler.moment(self.clock.now()))

    def run(
        self,
        arrivals: Iterable[Arrival] = (),
        then: Callable[[Request, float], Iterable[Arrival]] | None = None,
    ) -> list[Request]:
        """Step until nothing is left. Returns the requests that steps ended, in that order.

        `then(request, now_s)` may answer a request's end with further arrivals: the next question of a chat,
        the next request of a client who sends one at a time. An arrival that is refused is counted in the
        trace and left out; those after it still come.
        """
        todo = sorted(arrivals, key=_time_of)
        finished: list[Request] = []
        while todo or self.has_work:
            while todo and todo[0][0] <= self.clock.now():
                arrival_s, arguments = todo.pop(0)
                with suppress(InvalidRequest):
                    self.add(**arguments, arrival_s=arrival_s)
            if self.has_work:
                ended = self.step().finished
                finished.extend(ended)
                for request in ended:
                    for arrival in then(request, self.clock.now()) if then else ():
                        insort(todo, arrival, key=_time_of)
                if not self.is_held_up:
                    continue
            self.wait(todo[0][0] if todo else math.inf)
        return finished

    @property
    def is_held_up(self) -> bool:
        """The last step came to nothing though somebody waits: another one at once would too."""
        record = self.trace.steps[-1]
        return self.has_work and not record.tokens and not record.preempted

    def wait(self, next_arrival_s: float = math.inf) -> None:
        """Nothing can run before somebody comes or the policy changes its mind. EngineStalled: never."""
        wake_s = self.wake_s if self.has_work else math.inf
        # What came due while the last step was under way is news to the policy: it is asked again at once.
        will_change = self.has_work and wake_s > self.trace.steps[-1].start_s
        until_s = min(next_arrival_s, wake_s if will_change else math.inf)
        if until_s < math.inf:
            self.clock.wait_until(until_s)
        elif self.has_work:
            raise EngineStalled(self._describe_stall())

    def _describe_stall(self) -> str:
        blocks, waiting = self.scheduler.blocks, self.scheduler.waiting
        words = f": {waiting[0].request_id} has {waiting[0].num_tokens} tokens" if waiting else ""
        room = f"{blocks.num_free_blocks} of {blocks.num_blocks} blocks free"
        return f"{len(waiting)} requests wait and nothing can run ({room}{words})"


def _time_of(arrival: Arrival) -> float:
    return arrival[0]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
