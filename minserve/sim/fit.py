"""A device fitted to the steps of a real engine: what is left of a step after its matrix products, shared out among its causes.

Why: bandwidth and matmul rates can be measured alone. What the host, the gather of keys and values, the attention products and
the small operations between the products cost can only be seen in whole steps. Their sum is linear in what the cost model counts, so
six coefficients are found by least squares, none below what the hardware allows.

Steps are weighted by 1 / seconds, as if their error grew with the square root of their length: then neither the many short decodes nor
the few long chunks decide alone.

Taught in notebook 01.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from minserve.sim.cost_model import Cost, CostModel, Work
from minserve.sim.devices import DeviceSpec

Array = NDArray[np.float64]
NUM_VOTES = 4
NUM_COEFFICIENTS = 6  # step, request, step with prompts, activation bytes, KV bytes, attention FLOPs
MAX_LOG_ERROR = 0.5  # a step that takes e^0.5 = 1.65 times what the others say, or less than its inverse, is a disturbance


@dataclass(frozen=True, slots=True)
class Fit:
    """The device, and how well it explains the steps it was fitted to: the median of |predicted / measured - 1|, and the sums' ratio."""

    device: DeviceSpec
    num_steps: int
    median_error: float
    total_ratio: float


def fit_device(cost: CostModel, steps: Sequence[tuple[Work, float]]) -> Fit:
    """Complete the device of `cost`, of which bandwidth and matmul rates are known, from (work, seconds) of measured steps.

    Raises ValueError for fewer steps than there are unknowns.
    """
    if len(steps) < NUM_COEFFICIENTS:
        raise ValueError(f"{len(steps)} steps cannot determine {NUM_COEFFICIENTS} coefficients")
    bare = cost.device
    costs = [cost.of(work) for work, _ in steps]
    counts = np.array([_counts(work, c) for (work, _), c in zip(steps, costs, strict=True)])
    seconds = np.array([s for _, s in steps])
    known = np.array([c.linear_s + c.shared_flops / bare.flops_per_s for c in costs])
    least = np.array([0, 0, 0, 0, 1 / bare.bytes_per_s, 1 / bare.flops_per_s])  # nothing is faster than the peaks
    fixed = known + counts @ least
    believed, extra = np.ones(len(steps), dtype=bool), np.zeros(NUM_COEFFICIENTS)
    for _ in range(NUM_VOTES):
        extra = nonnegative_least_squares(counts[believed], (seconds - fixed)[believed], 1 / np.sqrt(seconds[believed]))
        # A neighbour's burst can make a step of 50 ms take a second. Steps that are far off do not vote in the next round.
        near = np.abs(np.log(seconds / (fixed + counts @ extra))) < MAX_LOG_ERROR
        believed = near if near.sum() >= NUM_COEFFICIENTS else believed
    per_unit = least + extra
    step_s, request_s, prompt_s, activation_s, kv_s, attention_s = per_unit.tolist()
    device = replace(
        bare,
        step_overhead_s=step_s,
        request_overhead_s=request_s,
        prompt_overhead_s=prompt_s,
        activation_share=1 / (activation_s * bare.bytes_per_s) if activation_s else None,
        kv_read_share=1 / (kv_s * bare.bytes_per_s),
        attention_share=1 / (attention_s * bare.flops_per_s),
        gathers_kv=True,
    )
    predicted = known + counts @ per_unit
    return Fit(device, len(steps), float(np.median(np.abs(predicted / seconds - 1))), float(predicted.sum() / seconds.sum()))


def _counts(work: Work, cost: Cost) -> list[float]:
    """What the coefficients are multiplied with, in their order."""
    kv_bytes, own_flops = cost.kv_read_bytes + cost.kv_written_bytes, cost.attention_flops - cost.shared_flops
    return [1, work.num_requests, work.num_chunks > 0, cost.activation_bytes, kv_bytes, own_flops]


def nonnegative_least_squares(a: Array, b: Array, weights: Array) -> Array:
    """The x >= 0 that minimizes the weighted squares of a x - b. a: [rows, n], b and weights: [rows] -> [n]

    With n this small every choice of non-zero unknowns can be tried; the best one without a negative value is the answer.
    """
    scale = np.abs(a).max(axis=0)
    scaled, target = a / scale * weights[:, None], b * weights
    best, least_error = np.zeros(a.shape[1]), float(target @ target)
    for size in range(1, a.shape[1] + 1):
        for chosen in map(list, combinations(range(a.shape[1]), size)):
            x = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            error = float(((scaled[:, chosen] @ x - target) ** 2).sum())
            if (x >= 0).all() and error < least_error:
                least_error, best = error, np.zeros(a.shape[1])
                best[chosen] = x
    return best / scale
