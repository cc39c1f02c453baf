"""What stands between a learner's policy and the engine: it hands out views instead of requests, and writes down what is decided.

Why: a score means something only if nobody wins by what a server cannot do. A policy is shown requests as a server knows them, cannot
change them, and has to name the very ones that it was shown. Whoever keeps requests waiting while nothing runs, or sends them away
without a word, is found here; what a policy knew of the future is found by comparing the decisions of two runs, in arena.py.

Python has no walls: someone who digs in frames or in the garbage collector gets at the engine. What that brings is knowledge of the
future, and it shows in the decisions.

Invariant: an honest policy decides as it would without the guard.

Taught in notebook 10.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, cast

from minserve.core.policies import Moment, Policy
from minserve.core.request import Request, RequestStatus, SamplingParams
from minserve.core.scheduler import InvalidPolicy

MOST_IDLE_S = 30.0  # so long may somebody wait while nothing runs: a hundred times what any batch is worth waiting for
MOST_IDLE_ASKS = 10_000


class Cheat(Exception):
    """A policy did what no policy may; the message says what, to whom and when."""


class _Now(NamedTuple):
    """What of a request changes while it lives."""

    status: RequestStatus
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class RequestView:
    """A request as its server knows it, to read only. It stays the same object while the request lives, and is kept up to date.

    Its names are those of `Request`. Left out: the tokens of the answer, the sampling seed, and whatever would be a way to the request.
    """

    __slots__ = ("_fixed", "_now")

    _fixed: "tuple[str, tuple[int, ...], SamplingParams, int, int, float, int, str]"
    _now: _Now

    def __init__(self, request: Request):
        r = request
        fixed = (r.request_id, r.prompt_ids, r.params, r.max_total_tokens, r.priority, r.arrival_s, r.order, r.salt)
        object.__setattr__(self, "_fixed", fixed)
        object.__setattr__(self, "_now", _now_of(request))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise Cheat(f"touches requests: sets {name} of {self.request_id} to {value!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise Cheat(f"touches requests: deletes {name} of {self.request_id}")

    def __repr__(self) -> str:
        return f"<{self.request_id}: {self.status}, {self.num_tokens} tokens>"

    request_id = property(lambda self: self._fixed[0])
    prompt_ids = property(lambda self: self._fixed[1])
    params = property(lambda self: self._fixed[2])
    max_total_tokens = property(lambda self: self._fixed[3])
    priority = property(lambda self: self._fixed[4])
    arrival_s = property(lambda self: self._fixed[5])
    order = property(lambda self: self._fixed[6])
    salt = property(lambda self: self._fixed[7])
    num_prompt_tokens = property(lambda self: len(self._fixed[1]))
    status = property(lambda self: self._now.status)
    num_tokens = property(lambda self: self._now.num_tokens)
    num_computed_tokens = property(lambda self: self._now.num_computed_tokens)
    num_cached_tokens = property(lambda self: self._now.num_cached_tokens)
    num_preemptions = property(lambda self: self._now.num_preemptions)
    num_output_tokens = property(lambda self: self._now.num_tokens - len(self._fixed[1]))
    num_missing_tokens = property(lambda self: self._now.num_tokens - self._now.num_computed_tokens)
    is_finished = property(lambda self: self._now.status is RequestStatus.FINISHED)


def _now_of(request: Request) -> _Now:
    r = request
    return _Now(r.status, len(r.token_ids), r.num_computed_tokens, r.num_cached_tokens, r.num_preemptions)


class _Shown:
    """A request, what the policy sees of it, and what was put into that."""

    __slots__ = ("face", "fixed", "key", "now", "request", "view")

    def __init__(self, request: Request):
        self.request, self.view = request, RequestView(request)
        self.face = cast(Request, self.view)  # what a policy takes it for
        self.fixed, self.now = self.view._fixed, self.view._now
        self.key: Any = None  # the policy's order of it

    def refresh(self) -> None:
        """Bring the view up to date. Whoever has changed it has put another object in."""
        if self.view._now is not self.now or self.view._fixed is not self.fixed:
            raise Cheat(f"touches requests: what it was shown of {self.request.request_id} has been changed")
        self.now = _now_of(self.request)
        object.__setattr__(self.view, "_now", self.now)


class Entry(NamedTuple):
    """One decision: when, of what kind, and what was decided."""

    time_s: float
    kind: str
    what: Any


class Guard:
    """A policy for the engine, around a policy that sees views.

    `look` is called with the time at each step before the policy is asked: it may end the run by raising.
    """

    def __init__(self, policy: Policy, look: Callable[[float], None] | None = None):
        self._policy, self._look = policy, look
        self._shown: dict[str, _Shown] = {}  # of the requests that live, by id
        self._asked: tuple[Moment, Moment] | None = None  # the latest moment, and the same in views
        self._idle: tuple[str, float, int] | None = None  # who waits longest while nothing runs, since when, asked how often
        self.entries: list[Entry] = []

    @property
    def name(self) -> str:
        return type(self._policy).__name__

    # --- what the scheduler asks ------------------------------------------------------------------

    def order(self, request: Request) -> tuple[float, ...]:
        """The policy is asked once a request: the order must not change while it lives."""
        shown = self._shown.get(request.request_id)
        if shown is None or shown.request is not request:
            shown = self._shown[request.request_id] = _Shown(request)
            shown.key = self._policy.order(shown.face)
            self.entries.append(Entry(request.arrival_s, "order", (request.request_id, shown.key)))
        return shown.key

    def shed(self, now: Moment) -> Sequence[tuple[Request, str]]:
        """Asked first in every step, so this is where the views are brought up to date."""
        if self._look is not None:
            self._look(now.time_s)
        self._refuse_starving(now)
        shed = tuple(self._policy.shed(self._show(now)))
        if not shed:
            return ()
        gone = [(self._request(view, "sends away"), words) for view, words in shed]
        for request, words in gone:
            if not isinstance(words, str) or not words.strip():
                raise Cheat(f"drops requests: sends {request.request_id} away at {now.time_s:.3f} s without a reason, says {words!r}")
        self.entries.append(Entry(now.time_s, "shed", tuple((request.request_id, words) for request, words in gone)))
        return gone

    def candidates(self, now: Moment) -> Sequence[Request]:
        moment = self._moment(now)
        named = self._policy.candidates(moment)
        if named is moment.waiting:
            self.entries.append(Entry(now.time_s, "candidates", "all"))
            return now.waiting
        requests = [self._request(view, "lets start") for view in named]
        self.entries.append(Entry(now.time_s, "candidates", tuple(request.request_id for request in requests)))
        return requests

    def token_budget(self, now: Moment) -> int:
        budget = self._policy.token_budget(self._moment(now))
        self.entries.append(Entry(now.time_s, "token_budget", budget))
        return budget

    def wake_s(self, now: Moment) -> float:
        wake_s = self._policy.wake_s(self._show(now))
        self.entries.append(Entry(now.time_s, "wake_s", wake_s))
        return wake_s

    # --- views ------------------------------------------------------------------------------------

    def _show(self, now: Moment) -> Moment:
        """The moment in views, all of them as they are now."""
        waiting, finished = RequestStatus.WAITING, RequestStatus.FINISHED
        for request_id, shown in list(self._shown.items()):
            request, before = shown.request, shown.now
            if request.status is before.status is waiting and request.num_preemptions == before.num_preemptions:
                continue  # who waits does not change, and a line may be long
            shown.refresh()
            if request.status is finished:
                del self._shown[request_id]
        return self._moment(now)

    def _moment(self, now: Moment) -> Moment:
        if self._asked is None or self._asked[0] is not now:
            shown = self._shown
            waiting, running = (tuple([shown[r.request_id].face for r in queue]) for queue in (now.waiting, now.running))
            self._asked = now, replace(now, waiting=waiting, running=running)
        return self._asked[1]

    def _request(self, view: Any, verb: str) -> Request:
        """The request behind a view. Raises InvalidPolicy for what the policy was not shown or is long gone."""
        shown = self._shown.get(view.request_id) if isinstance(view, RequestView) else None
        if shown is None or shown.view is not view:
            raise InvalidPolicy(f"{self.name} {verb} {view!r}, which is none of the requests that it was shown")
        return shown.request

    # --- starving ---------------------------------------------------------------------------------

    def _refuse_starving(self, now: Moment) -> None:
        """Nobody runs, somebody waits, and it goes on like that."""
        if now.running or not now.waiting:
            self._idle = None
            return
        oldest = min(now.waiting, key=lambda request: (request.arrival_s, request.order))
        if self._idle is None or self._idle[0] != oldest.request_id:
            self._idle = (oldest.request_id, now.time_s, 0)
        request_id, since_s, num_asks = self._idle
        self._idle = (request_id, since_s, num_asks + 1)
        if now.time_s - since_s > MOST_IDLE_S or num_asks > MOST_IDLE_ASKS:
            raise Cheat(
                f"starves requests: {request_id} waits since {oldest.arrival_s:.3f} s, and from {since_s:.3f} to {now.time_s:.3f} s "
                f"nothing runs and it is not let in, though asked {num_asks} times"
            )


def first_difference(entries: Sequence[Entry], others: Sequence[Entry], until_s: float = math.inf) -> str | None:
    """Where two runs decide differently before `until_s`, in words; None if nowhere."""
    one, two = ([entry for entry in run if entry.time_s < until_s] for run in (entries, others))
    for a, b in zip(one, two, strict=False):
        if a != b:
            return f"at {a.time_s:.3f} s, {a.kind} was {_short(a.what)} once and then {_short(b.what)}"
    if len(one) != len(two):
        return f"before {until_s:.3f} s, it was asked {len(one)} and then {len(two)} times"
    return None


def _short(what: Any) -> str:
    words = repr(what)
    return words if len(words) <= 60 else f"{words[:57]}..."
