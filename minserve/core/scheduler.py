"""Who computes how many tokens in this step, and in which blocks.

Why: there is one rule. Every request has `num_tokens` known tokens and `num_computed_tokens` computed ones; a
step hands out tokens, within a budget, until the second number reaches the first, and a row that reaches it
gives one more token. A long prompt cut in chunks, decodes beside prefills, prefix hits and the return of a
preempted request all follow from that.

Order within a step: running requests that lack one token, then running ones that lack more, then waiting
ones; so a long prompt never holds up those who are already talking. A waiting request is admitted only if all
its known tokens fit beside what is promised to the running ones, plus a watermark; nobody overtakes the first
one that does not fit. Answers grow, so blocks may run out later, and then the last of the running ones is
preempted. With whole answers reserved at admission that never happens, and more requests wait.

Invariant: a request is in exactly one of waiting and running; one that has computed nothing holds no block.

Taught in notebook 06.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.core.block_manager import BlockManager, Share
from minserve.core.policies import FirstComeFirstServed, Moment, Policy
from minserve.core.pressure import Pressure, take_pressure
from minserve.core.request import FinishReason, InvalidRequest, Request, RequestStatus, RequestTooLong


class InvalidPolicy(ValueError):
    """A policy answered what a scheduler cannot do; the message names the policy and the request."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`token_budget` tokens a step at most, `max_running` requests at once, `watermark_blocks` kept free at
    admission, and, where given, no more than `max_chunk_tokens` of one request in a step.

    With `reserve_whole_answers`, a request is admitted only if its longest answer fits beside the longest
    answers of all who run: nobody is ever preempted for want of blocks.
    """

    token_budget: int = 512
    max_running: int = 64
    watermark_blocks: int = 0
    max_chunk_tokens: int | None = None
    reserve_whole_answers: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("token_budget", 1),
            ("max_running", 1),
            ("watermark_blocks", 0),
            ("max_chunk_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought its callers: (request, new token) pairs, and the requests that ended."""

    tokens: tuple[tuple[Request, int], ...] = ()
    finished: tuple[Request, ...] = ()


@dataclass(slots=True)
class _Plan:
    """A step while it is being put together."""

    budget: int
    rows: dict[str, ScheduledRequest] = field(default_factory=dict)
    copies: dict[str, tuple[int, int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    decisions: list[tuple[str, str]] = field(default_factory=list)
    num_hit_tokens: int = 0

    def note(self, request: Request, words: str) -> None:
        self.decisions.append((request.request_id, words))

    def drop(self, request: Request) -> None:
        row = self.rows.pop(request.request_id, None)
        self.budget += row.num_tokens if row else 0
        self.copies.pop(request.request_id, None)


class Scheduler:
    """The two queues, and the one place that moves requests between them."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Policy | None = None):
        self.config = config
        self.blocks = blocks
        self.policy = policy or FirstComeFirstServed()
        self.waiting: list[Request] = []  # in the policy's order
        self.running: list[Request] = []
        # id -> the unfinished request of that id, and those that fork from it
        self._families: dict[str, list[Request]] = {}
        self._num_steps = 0

    # --- coming and going ------------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue a request and the samples that fork from it, all or none.

        Raises RequestTooLong or InvalidRequest.
        """
        for request in requests:
            self._refuse_impossible(request)
        for request in requests:
            request.max_total_tokens = min(request.max_total_tokens, self._most_tokens)
            insort(self.waiting, request, key=self.policy.order)
            for name in _family_names(request):
                self._families.setdefault(name, []).append(request)

    @property
    def _most_tokens(self) -> int:
        return self.blocks.num_slots + 1  # the last token of a request is never stored

    def _refuse_impossible(self, request: Request) -> None:
        num_least = request.num_prompt_tokens + max(1, request.params.min_tokens)
        if num_least > self._most_tokens:
            blocks, num_output_tokens = self.blocks, num_least - request.num_prompt_tokens
            raise RequestTooLong(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and at least "
                f"{num_output_tokens} output tokens need {blocks.num_blocks_for(num_least - 1)} blocks of "
                f"{blocks.block_size}, the whole pool has {blocks.num_blocks} ({blocks.num_slots} tokens)"
            )
        if self.find(request.request_id):
            raise InvalidRequest(f"request id {request.request_id!r} is already in use")

    def find(self, request_id: str) -> list[Request]:
        """The unfinished request of this id and the siblings that fork from it."""
        return list(self._families.get(request_id, ()))

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request at any moment, wherever it is. Ending it twice changes nothing."""
        if request.is_finished:
            return
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        if reason is FinishReason.ERROR:
            self.blocks.distrust(request)
        self.blocks.release(request)
        request.status, request.finish_reason, request.error = RequestStatus.FINISHED, reason, error
        for name in _family_names(request):
            self._families[name].remove(request)
            if not self._families[name]:
                del self._families[name]

    # --- planning a step -------------------------------------------------------------------------

    def moment(self, now_s: float) -> Moment:
        """What the policy sees now."""
        config = self.config
        return Moment(
            now_s, self.waiting, self.running, self.pressure(), config.token_budget, config.max_running
        )

    def pressure(self) -> Pressure:
        """How full the pool is, and how many requests run and wait."""
        return take_pressure(self.blocks, self.running, len(self.waiting))

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Hand out this step's tokens and blocks. An empty batch means that nothing can run now.

        Raises InvalidPolicy, with nothing changed, if the policy answers what cannot be done.
        """
        plan, shed, candidates = self._ask_policy(self.moment(now_s))
        for request, reason in shed:
            self.finish(request, FinishReason.SHED, reason)
            plan.note(request, f"is sent away: {reason}")
        self._continue_running(plan)
        # Only now can nobody be taken out of the step any more: blocks that it fills may be found, even by
        # requests admitted below, since a step writes keys and values before it reads them.
        for row in plan.rows.values():
            self.blocks.commit(row.request, row.end)
        if not plan.preempted:
            self._admit_waiting(plan, candidates)
        self._num_steps += 1
        return ScheduledBatch(
            step=self._num_steps - 1,
            rows=tuple(plan.rows.values()),
            copies=tuple(plan.copies.values()),
            preempted_ids=tuple(plan.preempted),
            num_hit_tokens=plan.num_hit_tokens,
            num_used_blocks=self.blocks.num_used_blocks,
            num_idle_blocks=self.blocks.num_idle_blocks,
            num_empty_slots=self._num_empty_slots(plan),
            shed=tuple(request for request, _ in shed),
            decisions=tuple(plan.decisions),
        )

    def _num_empty_slots(self, plan: _Plan) -> int:
        """Slots of the running that this step leaves empty; a block table ends with its tokens."""
        rows, size = plan.rows, self.blocks.block_size
        ends = (
            rows[r.request_id].end if r.request_id in rows else r.num_computed_tokens for r in self.running
        )
        return sum(-end % size for end in ends)

    def _ask_policy(self, now: Moment) -> tuple[_Plan, Sequence[tuple[Request, str]], Sequence[Request]]:
        """An empty plan with the step's budget, who is sent away, and who may start."""
        shed = tuple(self.policy.shed(now))
        if shed:
            gone = [request for request, _ in shed]
            self._require_waiting(gone, "sends away")
            now = replace(now, waiting=[request for request in now.waiting if request not in gone])
        candidates = self.policy.candidates(now)
        if candidates is not now.waiting:  # most policies name all, and the line may be long
            candidates = tuple(candidates)
            self._require_waiting(candidates, "lets start")
        budget = self.policy.token_budget(now)
        if budget < 1:
            name = type(self.policy).__name__
            raise InvalidPolicy(f"{name} gives a step {budget} tokens, at least 1 is needed")
        return _Plan(min(budget, self.config.token_budget)), shed, tuple(candidates)

    def _require_waiting(self, requests: Sequence[Request], verb: str) -> None:
        name = type(self.policy).__name__
        for request in requests:
            if request.status is not RequestStatus.WAITING:
                raise InvalidPolicy(f"{name} {verb} {request.request_id}, which is {request.status}")
        if len({request.request_id for request in requests}) < len(requests):
            raise InvalidPolicy(f"{name} {verb} one request twice: {[r.request_id for r in requests]}")

    def _continue_running(self, plan: _Plan) -> None:
        for request in sorted(self.running, key=lambda r: (r.num_missing_tokens > 1, self.policy.order(r))):
            was_taken_out = request.status is not RequestStatus.RUNNING  # earlier in this loop
            if plan.budget > 0 and not was_taken_out:
                num_tokens = self._share_of_budget(request, plan)
                if self._make_room(request, request.num_computed_tokens + num_tokens, plan):
                    self._place(request, num_tokens, plan)

    def _share_of_budget(self, request: Request, plan: _Plan) -> int:
        return min(request.num_missing_tokens, plan.budget, self.config.max_chunk_tokens or plan.budget)

    def _make_room(self, request: Request, end: int, plan: _Plan) -> bool:
        """Take out the last running requests until the blocks suffice. False if it had to go itself."""
        while (needed := self.blocks.num_new_blocks(request, end)) > self.blocks.num_free_blocks:
            victim = self._choose_victim()
            room = f"{needed} block{'s'[: needed > 1]}, {self.blocks.num_free_blocks} free"
            self._take_out(victim, f"{request.request_id} needs {room}", plan)
            if victim is request:
                return False
        return True

    def _choose_victim(self) -> Request:
        """The last in the policy's order: the first one always goes on, so there is no livelock."""
        return max(self.running, key=self.policy.order)

    def _take_out(self, victim: Request, reason: str, plan: _Plan) -> None:
        plan.drop(victim)
        self.preempt(victim)
        plan.preempted.append(victim.request_id)
        plan.note(victim, f"is preempted: {reason}")

    def preempt(self, request: Request) -> None:
        """Back to the queue with its tokens but without its blocks: all of it is computed again later."""
        self.running.remove(request)
        self.blocks.release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=self.policy.order)

    def _place(self, request: Request, num_tokens: int, plan: _Plan) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        copy = self.blocks.grow(request, end)
        if copy is not None:
            plan.copies[request.request_id] = copy
        table = self.blocks.table(request)  # covers [0, end) and no more: nobody holds blocks for later steps
        samples = end == request.num_tokens
        plan.rows[request.request_id] = ScheduledRequest(request, start, num_tokens, table, samples)
        plan.budget -= num_tokens

    # --- admission -------------------------------------------------------------------------------

    def _admit_waiting(self, plan: _Plan, candidates: Sequence[Request]) -> None:
        if self.waiting and not candidates:
            plan.note(self.waiting[0], "waits: the policy lets nobody start now")
        promised = sum(map(self._num_promised, self.running))
        for request in candidates:
            parent = self._parent_at_work(request)
            if parent is not None:
                plan.note(request, f"waits: {parent.request_id} computes its prompt")
                continue
            refusal, share = self._judge(request, promised, plan)
            if refusal:
                plan.note(request, f"waits: {refusal}")
                return
            self._admit(request, share, plan)
            promised += self._num_promised(request)

    def _num_promised(self, request: Request) -> int:
        """Blocks that a running request has not been given yet and that are kept for it."""
        num_kept = self.blocks.num_blocks_for(self._num_tokens_kept(request))
        return num_kept - self.blocks.num_held_blocks(request)

    def _num_tokens_kept(self, request: Request) -> int:
        """Tokens that admission keeps room for: those the request has, or all that it may ever store."""
        if self.config.reserve_whole_answers:
            return request.max_total_tokens - 1  # the last one is never stored
        return request.num_tokens

    def _parent_at_work(self, request: Request) -> Request | None:
        """The sibling whose blocks this one will fork, while it is still computing their common prompt."""
        parent = request.parent
        if parent is None or parent.is_finished:
            return None
        return parent if parent.num_computed_tokens < request.num_prompt_tokens - 1 else None

    def _judge(self, request: Request, promised: int, plan: _Plan) -> tuple[str | None, Share]:
        """Why the request must wait (None: it need not), and the blocks that it need not compute."""
        if len(self.running) >= self.config.max_running:
            return f"{len(self.running)} requests run, at most {self.config.max_running} may", Share()
        if plan.budget == 0:
            return f"the step's {self.config.token_budget} tokens are given out", Share()
        share = self._find_share(request)
        # Shared blocks that are idle now stop being free when taken: they are hits, not room. A partly filled
        # shared block will be copied, which takes one more.
        full = share.num_tokens // self.blocks.block_size
        needed = self.blocks.num_blocks_for(self._num_tokens_kept(request)) - full
        free = self.blocks.num_free_blocks - self.blocks.num_idle_of(share) - promised
        watermark = self.config.watermark_blocks if self.running else 0  # an idle engine keeps nobody waiting
        if needed + watermark > free:
            return self._describe_shortage(needed, watermark, free, promised), share
        return None, share

    def _describe_shortage(self, needed: int, watermark: int, free: int, promised: int) -> str:
        whole = " for its whole answer" if self.config.reserve_whole_answers else ""
        reserve = f" and {watermark} in reserve" if watermark else ""
        pledged = f" ({promised} more are promised)" if promised else ""
        return f"needs {needed} block{'s'[: needed > 1]}{whole}{reserve}, {max(free, 0)} free{pledged}"

    def _find_share(self, request: Request) -> Share:
        parent, num_tokens = request.parent, request.num_prompt_tokens - 1
        is_fresh = request.num_output_tokens == 0 and num_tokens > 0
        if parent is not None and parent.status is RequestStatus.RUNNING and is_fresh:
            return self.blocks.find_fork(parent, num_tokens)
        return self.blocks.find_prefix(request)

    def _admit(self, request: Request, share: Share, plan: _Plan) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        self.blocks.start(request, share)
        if request.num_preemptions == 0:
            request.num_cached_tokens = share.num_tokens
        plan.num_hit_tokens += share.num_tokens
        num_tokens = self._share_of_budget(request, plan)
        self._place(request, num_tokens, plan)
        self.blocks.commit(request, request.num_computed_tokens + num_tokens)
        verb = "resumes" if request.num_preemptions else "starts"
        cached = f", {share.num_tokens} cached" if share.num_tokens else ""
        plan.note(request, f"{verb}: {num_tokens} of {request.num_tokens} tokens{cached}")

    # --- after the step --------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, result: StepResult) -> StepOutput:
        """Apply a step's result: count what was computed, append tokens, end what is done."""
        tokens: list[tuple[Request, int]] = []
        finished: list[Request] = list(batch.shed)
        for row in batch.rows:
            request = row.request
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted or taken out while the step was under way
            request.num_computed_tokens = row.end
            if request.request_id in result.errors:
                self.finish(request, FinishReason.ERROR, result.errors[request.request_id])
            elif row.samples:
                token_id = result.token_ids[request.request_id]
                tokens.append((request, token_id))
                self._append(request, token_id, result)
            if request.is_finished:
                finished.append(request)
        return StepOutput(tuple(tokens), tuple(finished))

    def _append(self, request: Request, token_id: int, result: StepResult) -> None:
        request.token_ids.append(token_id)
        if request.request_id in result.logprobs:
            request.logprobs.append(result.logprobs[request.request_id])
        if token_id in request.stop_ids and request.num_output_tokens >= request.params.min_tokens:
            self.finish(request, FinishReason.STOP)
        elif request.num_tokens >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)

    def fail(self, batch: ScheduledBatch, error: str) -> StepOutput:
        """The step came to nothing: its requests end with an error, and no block they filled is trusted."""
        failed = tuple(row.request for row in batch.rows if not row.request.is_finished)
        for request in failed:
            self.finish(request, FinishReason.ERROR, error)
        return StepOutput(finished=batch.shed + failed)

    def check(self) -> None:
        """The conservation laws of blocks and queues. Raises AssertionError, with the numbers."""
        self.blocks.check()
        waiting, running = {r.request_id for r in self.waiting}, {r.request_id for r in self.running}
        assert not waiting & running, f"in both queues: {sorted(waiting & running)}"
        assert len(waiting) == len(self.waiting) and len(running) == len(self.running), (
            "a request is queued twice"
        )
        assert self.waiting == sorted(self.waiting, key=self.policy.order), "the waiting line is out of order"
        for request in self.waiting:
            held = self.blocks.num_held_blocks(request)
            assert held == 0 and request.num_computed_tokens == 0, (
                f"{request.request_id} waits and holds {held} blocks"
            )
        for request in self.running:
            held, needed = (
                self.blocks.num_held_blocks(request),
                self.blocks.num_blocks_for(request.num_computed_tokens),
            )
            assert held == needed, (
                f"{request.request_id} has computed {request.num_computed_tokens} tokens "
                f"and holds {held} blocks"
            )
        assert self.running or self.blocks.num_used_blocks == 0, (
            f"nothing runs, yet {self.blocks.num_used_blocks} blocks are held"
        )
        queued = {name for request in (*self.waiting, *self.running) for name in _family_names(request)}
        assert queued == self._families.keys(), f"queued: {sorted(queued)}, known: {sorted(self._families)}"


def _family_names(request: Request) -> set[str]:
    """The ids under which a request is found: its own, and that of the one it forks from."""
    return {request.request_id, (request.parent or request).request_id}
