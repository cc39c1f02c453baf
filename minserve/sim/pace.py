"""How fast a full batch goes: the time to a first token, the time between tokens and the rate of all, from the cost model alone.

Why: a simulation says what a workload does; this says in microseconds what to expect of a batch that stays full, so that a planner can
try a thousand sizes. The step of nothing but decodes is the easy half. The other half is that every answer is preceded by a prompt,
which somebody else's tokens wait for: at a prompt of 1,792 tokens and an answer of 256, that is a third of a 13B's time on an A100.

Invariant: requests leave as they come, each replaced at once; so a life's steps and seconds add up for one and for all.

Taught in notebook 03.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minserve.sim.cost_model import CostModel, Work, decode_work, row_work


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a full batch goes, when a new request takes the place of each that ends. Seconds by the cost model."""

    batch: int  # requests that run together
    decode_s: float  # a step of nothing but decodes
    tpot_s: float  # between two tokens of a request, with the prompts of newcomers in between
    ttft_s: float  # from the moment a request is admitted; queueing comes on top
    output_tokens_per_s: float  # of the whole batch
    limit: str  # of a decode step: weights, KV, FLOPs, activations, link or host
    roofline_share: float  # what a decode step would take at the peaks of the data sheet, over what it takes


def most_fed(prompt_tokens: int, output_tokens: int, token_budget: int) -> int:
    """The largest batch that can stay full: a step's tokens are shared by decodes and prompts in the ratio of output to prompt.

    However many seats there are, with more people than this some sit empty until a step has room for the next prompt.

    >>> most_fed(4032, 64, 2048)
    32
    """
    return max(1, token_budget * output_tokens // (prompt_tokens + output_tokens))


def pace(cost: CostModel, batch: int, prompt_tokens: int, output_tokens: int, token_budget: int = 2048) -> Pace:
    """The pace of `batch` requests, or as many as the budget can feed, that each bring a prompt and stay for an output.

    A prompt rides in steps with everybody's decodes, as much of it as the budget leaves room for. What it adds to these steps delays
    all others, so each token of an answer also pays for a share of the prompts of those who came while it was being written.
    """
    batch = min(batch, most_fed(prompt_tokens, output_tokens, token_budget))
    context, window = prompt_tokens + (output_tokens + 1) // 2, cost.shape.window  # halfway through the answer
    step = cost.of(decode_work(batch, context, window))
    decode_s = step.seconds
    prompt_steps_s = _prompt_steps_s(cost, decode_work(batch - 1, context, window), prompt_tokens, token_budget)
    num_prompt_steps, ttft_s = len(prompt_steps_s), sum(prompt_steps_s)
    added_s = max(0.0, ttft_s - num_prompt_steps * decode_s)
    life_s = (num_prompt_steps + output_tokens - 1) * decode_s + batch * added_s
    peak_s = max(step.num_bytes / cost.device.bytes_per_s, step.flops / cost.device.flops_per_s)
    return Pace(
        batch=batch,
        decode_s=decode_s,
        tpot_s=(life_s - ttft_s) / (output_tokens - 1) if output_tokens > 1 else decode_s,
        ttft_s=ttft_s,
        output_tokens_per_s=batch * output_tokens / life_s,
        limit=step.limit,
        roofline_share=peak_s / decode_s,
    )


def _prompt_steps_s(cost: CostModel, others: Work, prompt_tokens: int, token_budget: int) -> list[float]:
    """Seconds of the steps that compute a prompt beside the decodes of others."""
    room = max(1, token_budget - others.num_tokens)
    window = cost.shape.window
    starts = range(0, prompt_tokens, room)
    rows = [row_work(start, min(room, prompt_tokens - start), start + room >= prompt_tokens, window) for start in starts]
    return [cost.of(others + row).seconds for row in rows]


def largest_decode_batch(cost: CostModel, context_tokens: int, tpot_s: float, most: int = 4096) -> int:
    """The largest batch whose bare decode step, at this context, takes no longer than `tpot_s`; memory is not asked."""
    return largest(most, lambda batch: cost.of(decode_work(batch, context_tokens, cost.shape.window)).seconds <= tpot_s)


def largest(most: int, is_fine: Callable[[int], bool]) -> int:
    """The greatest number up to `most` that is fine, if all below it are; 0 for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_fine(middle) else (low, middle - 1)
    return low
