"""Prompts on some devices, answers on others, and a link between them; and the same number of devices that do both.

Why: a step that computes a prompt is long, and everybody's next token waits for it. Two pools keep the two apart: the gaps between
tokens become even, at the price of a link that must carry every prompt's keys and values, and of devices that cannot help each other
when one kind of work is scarce. Which weighs more is a question of numbers, so it is simulated.

Requests flow one way, so the stages are simulated one after another, each with the engine's own parts: the prompts' pool makes the first
token, the link sends what it computed, first come, first served, and the answers' pool goes on from there. Within a pool, requests are
dealt out in turn.

Left out: blocks stay taken on the sending side while the link is busy; and requests that wait for others' answers (closed loops, chats).

Invariant: what was received is not computed again (but after a preemption), and a record has the times at which a caller saw the tokens.

Taught in notebook 03 (and, with real processes, in notebook 13).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minserve.core.block_manager import BlockManager, Share
from minserve.core.clock import VirtualClock
from minserve.core.engine import Arrival, Engine
from minserve.core.records import RequestRecord
from minserve.core.request import Request
from minserve.core.scheduler import Scheduler
from minserve.core.trace import Trace
from minserve.sim.cost_model import CostModel
from minserve.sim.simulator import make_engine
from minserve.sim.workload import Workload


class ReceivingBlocks(BlockManager):
    """A pool whose requests come with keys and values: all but the last of their prompt tokens are there when they start.

    After a preemption they are not: what was received is gone, and is computed again like any prompt.
    """

    def start(self, request: Request, share: Share) -> None:
        super().start(request, share)
        if request.num_preemptions == 0:
            num_received = request.num_prompt_tokens - 1
            self.grow(request, num_received)
            request.num_computed_tokens = num_received


@dataclass(frozen=True, slots=True)
class Transfer:
    """A prompt's keys and values on the link, in seconds of the common clock."""

    request_id: str
    num_bytes: int
    ready_s: float  # the prompt was computed
    start_s: float  # the link was free
    end_s: float


@dataclass(frozen=True, slots=True)
class PoolRun:
    """What became of a workload on several devices: one trace as its callers saw it, and what went over the link."""

    trace: Trace
    transfers: tuple[Transfer, ...] = ()

    @property
    def link_busy_share(self) -> float:
        """Share of the run during which the link sent. 0 without transfers."""
        wall_s = self.trace.summary().wall_s
        return sum(t.end_s - t.start_s for t in self.transfers) / wall_s if wall_s > 0 else 0.0


def run_mixed(cost: CostModel, workload: Workload, num_devices: int, **options: Any) -> PoolRun:
    """Every device computes prompts and answers. `options` are those of `make_engine`."""
    engines = [make_engine(cost, **options) for _ in range(_at_least_one(num_devices))]
    _deal(engines, _named(workload))
    return PoolRun(_merge([engine.trace for engine in engines], {}))


def run_disaggregated(
    cost: CostModel, workload: Workload, num_prefill: int, num_decode: int, link_bytes_per_s: float, **options: Any
) -> PoolRun:
    """`num_prefill` devices compute prompts and first tokens, `num_decode` the rest; all share one link.

    A device is what `cost` describes (with tensor parallelism, a group). `options` are those of `make_engine`.
    """
    if link_bytes_per_s <= 0:
        raise ValueError(f"a link sends more than 0 bytes/s, got {link_bytes_per_s}")
    arrivals = _named(workload)
    max_tokens = {arguments["request_id"]: arguments["params"].max_tokens for _, arguments in arrivals}
    senders = [make_engine(cost, **options) for _ in range(_at_least_one(num_prefill))]
    prefilled = _deal(senders, [(time_s, _with_tokens(arguments, 1)) for time_s, arguments in arrivals])
    records = {name: record for engine in senders for name, record in engine.trace.requests.items()}

    going_on = [request for request in prefilled if max_tokens[request.request_id] != 1]
    bytes_per_token = cost.shape.kv_bytes_per_token(cost.kv)
    ready = sorted((records[r.request_id].token_times_s[0], r.request_id, r.num_prompt_tokens * bytes_per_token) for r in going_on)
    transfers = send(ready, link_bytes_per_s)

    by_name = {request.request_id: request for request in going_on}
    receivers = [_receiver(cost, **options) for _ in range(_at_least_one(num_decode))]
    _deal(receivers, [(t.end_s, _rest_of(by_name[t.request_id], max_tokens[t.request_id])) for t in transfers])
    return PoolRun(_merge([engine.trace for engine in receivers], records, senders), transfers)


def send(ready: Iterable[tuple[float, str, int]], bytes_per_s: float) -> tuple[Transfer, ...]:
    """First come, first served: (time, request id, bytes) in the order of the times.

    >>> [t.end_s for t in send([(0.0, "a", 30), (1.0, "b", 10), (9.0, "c", 10)], bytes_per_s=10.0)]
    [3.0, 4.0, 10.0]
    """
    transfers: list[Transfer] = []
    free_s = 0.0
    for ready_s, request_id, num_bytes in ready:
        start_s = max(ready_s, free_s)
        free_s = start_s + num_bytes / bytes_per_s
        transfers.append(Transfer(request_id, num_bytes, ready_s, start_s, free_s))
    return tuple(transfers)


# --- the pools ------------------------------------------------------------------------------------


def _at_least_one(count: int) -> int:
    if count < 1:
        raise ValueError(f"a pool has at least 1 device, got {count}")
    return count


def _named(workload: Workload) -> list[Arrival]:
    """Arrivals in order, each with a name that is the same in every pool."""
    if type(workload).then is not Workload.then:
        raise ValueError(f"a {type(workload).__name__} waits for answers, and pools are simulated one after the other: give arrival times")
    arrivals = sorted(workload.arrivals(), key=lambda arrival: arrival[0])
    return [(time_s, {"request_id": f"R{index}", **arguments}) for index, (time_s, arguments) in enumerate(arrivals)]


def _deal(engines: Sequence[Engine], arrivals: Sequence[Arrival]) -> list[Request]:
    """Serve request i on engine i modulo their number; those who came to their end."""
    return [request for index, engine in enumerate(engines) for request in engine.run(arrivals[index :: len(engines)])]


def _with_tokens(arguments: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    return {**arguments, "params": replace(arguments["params"], max_tokens=max_tokens)}


def _rest_of(request: Request, max_tokens: int | None) -> dict[str, Any]:
    """What is left to do for a request that has its first token."""
    left = None if max_tokens is None else max_tokens - 1
    return {
        "request_id": request.request_id,
        "prompt_ids": tuple(request.token_ids),
        "params": replace(request.params, max_tokens=left),
        "priority": request.priority,
        "salt": request.salt,
    }


def _receiver(cost: CostModel, **options: Any) -> Engine:
    """An engine as all others, but for its pool of blocks."""
    plain = make_engine(cost, **options)
    known = plain.scheduler.blocks
    blocks = ReceivingBlocks(known.num_blocks, known.block_size, prefix_caching=known.prefix_caching)
    return Engine(Scheduler(plain.scheduler.config, blocks, plain.scheduler.policy), plain.runner, VirtualClock(), plain.limits)


# --- one trace of many ----------------------------------------------------------------------------


def _merge(last: Sequence[Trace], first: dict[str, RequestRecord], senders: Sequence[Engine] = ()) -> Trace:
    """All steps in the order of their ends; each request's record from its arrival to its last token, wherever that was made."""
    merged = Trace()
    traces = [*(engine.trace for engine in senders), *last]
    merged.steps.extend(sorted((step for trace in traces for step in trace.steps), key=lambda step: step.end_s))
    merged.num_refused = sum(trace.num_refused for trace in traces)
    ended = {name: record for trace in last for name, record in trace.requests.items()}
    both = {name: _joined(first[name], ended[name]) if name in first else ended[name] for name in ended}
    everybody = {**first, **both}.values()
    merged.requests.update((record.request_id, record) for record in sorted(everybody, key=lambda record: record.arrival_s))
    return merged


def _joined(first: RequestRecord, rest: RequestRecord) -> RequestRecord:
    return replace(
        first,
        token_times_s=first.token_times_s + rest.token_times_s,
        finished_s=rest.finished_s,
        finish_reason=rest.finish_reason,
        num_preemptions=first.num_preemptions + rest.num_preemptions,
    )
