"""Admission by service level: start whom you can serve in time, hold back the others, say no early.

Why: a server that takes everybody is late for everybody once more come than it can serve, since the queue
grows and never shrinks. With limits on the time to the first token (TTFT) and per further token (TPOT), and a
prediction of what a step takes, it can tell before it starts a request whether these limits will be met.

Invariant: a request that is sent away could not have met its limit if it had started at once and alone.

Taught in notebook 10.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from minserve.core.policies import FirstComeFirstServed, Moment
from minserve.core.request import Request


class StepTimes(Protocol):
    """Predicted seconds of a step: so many decodes that read so much context, and so many prompt tokens."""

    def step_s(self, num_decodes: int, num_context_tokens: int, num_prompt_tokens: int) -> float: ...


class Forecast:
    """What the next steps take: beside `requests`, and those that join them, one after the other."""

    def __init__(self, times: StepTimes, tpot_s: float, token_budget: int, requests: Sequence[Request]):
        self.times, self.tpot_s, self.token_budget = times, tpot_s, token_budget
        self.num_requests = len(requests)
        self.num_context_tokens = sum(request.num_tokens for request in requests)
        # Of prompts under way: who talks lacks one token, which is no prompt.
        self.num_prompt_tokens = sum(r.num_missing_tokens for r in requests if r.num_missing_tokens > 1)

    def join(self, request: Request) -> None:
        self.num_requests += 1
        self.num_context_tokens += request.num_tokens
        self.num_prompt_tokens += request.num_tokens

    def has_room_for(self, request: Request) -> bool:
        """Whether a step of nothing but decodes stays within the limit, once this one talks, too."""
        num_context_tokens = self.num_context_tokens + request.num_tokens
        return self.times.step_s(self.num_requests + 1, num_context_tokens, 0) <= self.tpot_s

    def first_token_s(self, request: Request) -> float:
        """Until the prompts before it and its own are computed, in steps that the decodes of all share."""
        num_tokens, chunk = self.num_prompt_tokens + request.num_tokens, self.chunk_tokens()
        if chunk == 0:
            return math.inf
        num_steps, num_rest = divmod(num_tokens, chunk)
        return num_steps * self._step_s(chunk) + (self._step_s(num_rest) if num_rest else 0.0)

    def chunk_tokens(self) -> int:
        """Most prompt tokens of a step that stays within the limit; whatever fits, where nobody talks."""
        low, high = 0, max(0, self.token_budget - self.num_requests)
        if self.num_requests == 0 or self._step_s(high) <= self.tpot_s:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._step_s(middle) <= self.tpot_s else (low, middle - 1)
        return low

    def _step_s(self, num_prompt_tokens: int) -> float:
        return self.times.step_s(self.num_requests, self.num_context_tokens, num_prompt_tokens)


class SloAdmission(FirstComeFirstServed):
    """Continuous batching within limits: TTFT of `ttft_s`, TPOT of `tpot_s`, as far as `times` can tell.

    A request starts if its first token will be in time, and everybody's next tokens stay so. Who can no
    longer make it is sent away, or, without `shed`, served after all who can. A step computes as much of
    prompts as leaves its decodes in time. With `patience`, newcomers wait for company for that share of the
    time that they could wait at most. Predictions are not exact, so plans keep a `margin` from both limits.
    """

    def __init__(
        self,
        times: StepTimes,
        ttft_s: float,
        tpot_s: float,
        shed: bool = True,
        patience: float = 0.0,
        margin: float = 0.05,
    ):
        _refuse_nonsense(ttft_s, tpot_s, patience, margin)
        self.times, self.ttft_s, self.tpot_s = times, ttft_s, tpot_s
        self.sheds, self.patience, self.margin = shed, patience, margin
        self._alone_by_length_s: dict[int, float] = {}  # tokens -> seconds

    def shed(self, now: Moment) -> Sequence[tuple[Request, str]]:
        late = [request for request in now.waiting if self._is_late(request, now)] if self.sheds else []
        return [(request, self._reason(request, now)) for request in late]

    def candidates(self, now: Moment) -> Sequence[Request]:
        if self.wake_s(now) > now.time_s:
            return [request for request in now.waiting if request.num_preemptions]
        ahead, chosen = self._forecast(now.running, now), []
        for request in sorted(now.waiting, key=lambda r: self._is_late(r, now)):
            if ahead.num_requests:  # an idle engine keeps nobody waiting
                if ahead.num_prompt_tokens >= now.token_budget or not ahead.has_room_for(request):
                    break
                due_s = self._due_s(request, now)
                if due_s < math.inf and now.time_s + ahead.first_token_s(request) > due_s:
                    continue
            ahead.join(request)
            chosen.append(request)
        return chosen

    def token_budget(self, now: Moment) -> int:
        talking = [request for request in now.running if request.num_missing_tokens == 1]
        chunk = self._forecast(talking, now).chunk_tokens()
        return len(talking) + max(1, chunk)  # 1: no prompt under way stops altogether

    def wake_s(self, now: Moment) -> float:
        """When the first of the newcomers has waited long enough for company."""
        return min((self._leaves_s(r, now) for r in now.waiting if not r.num_preemptions), default=-math.inf)

    def _leaves_s(self, request: Request, now: Moment) -> float:
        slack_s = max(0.0, self.ttft_s - self._alone_s(request, now))
        return request.arrival_s + self.patience * slack_s

    def _due_s(self, request: Request, now: Moment) -> float:
        """When its first token is due. Never, if it has been made, or if it is too late anyway."""
        if request.num_output_tokens or self._is_late(request, now):
            return math.inf
        return request.arrival_s + (1 - self.margin) * self.ttft_s

    def _is_late(self, request: Request, now: Moment) -> bool:
        first_s = now.time_s + self._alone_s(request, now)
        return request.num_output_tokens == 0 and first_s > request.arrival_s + self.ttft_s

    def _alone_s(self, request: Request, now: Moment) -> float:
        """Its prefill on an idle device, nothing of it cached: reckoned once for each length."""
        if request.num_tokens not in self._alone_by_length_s:
            self._alone_by_length_s[request.num_tokens] = self._forecast((), now).first_token_s(request)
        return self._alone_by_length_s[request.num_tokens]

    def _forecast(self, requests: Sequence[Request], now: Moment) -> Forecast:
        return Forecast(self.times, (1 - self.margin) * self.tpot_s, now.token_budget, requests)

    def _reason(self, request: Request, now: Moment) -> str:
        first_s = now.time_s + self._alone_s(request, now) - request.arrival_s
        return f"its first token can come {first_s:.3g} s after arrival, the limit is {self.ttft_s:g} s"


def _refuse_nonsense(ttft_s: float, tpot_s: float, patience: float, margin: float) -> None:
    if not (0 < ttft_s < math.inf and 0 < tpot_s < math.inf and 0 <= patience <= 1 and 0 <= margin < 1):
        raise ValueError(
            f"limits are finite times above 0 s, patience is a share from 0 to 1 and margin one below 1, "
            f"got ttft_s {ttft_s}, tpot_s {tpot_s}, patience {patience}, margin {margin}"
        )
