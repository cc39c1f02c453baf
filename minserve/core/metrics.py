"""From records to the numbers by which servers are compared: TTFT, TPOT, ITL, throughput, goodput, occupancy.

Definitions are vLLM's: TTFT = first token - arrival; ITL = each gap between tokens; TPOT = (last - first
token) / (tokens - 1), undefined for a single token; goodput = requests that meet every given limit, per
second.

Taught in notebooks 00 and 10.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minserve.core.records import RequestRecord, StepRecord
from minserve.core.request import FinishReason


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
    num_shed: int = 0  # of num_finished: sent away unserved by the policy


def summarize(requests: Iterable[RequestRecord], steps: Iterable[StepRecord]) -> Summary:
    requests, steps = list(requests), list(steps)
    # The prompts of those who were sent away cost nothing.
    served = [r for r in requests if r.finish_reason != FinishReason.SHED]
    num_prompt = sum(r.num_prompt_tokens for r in served)
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
        num_shed=sum(r.finish_reason == FinishReason.SHED for r in requests),
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
    """Tokens computed again after a preemption: those below what the request had already reached."""
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
