"""Part of `minserve bench --gpu`: what allocation costs on a card, by three allocators, at the rates of a run on that card.

Why: on a card a call of the driver (cudaMalloc, cudaFree) may wait for all that is under way, which is why torch keeps what it was given
back, and why engines set a pool aside. The demands of a recorded run are put to the pool, to torch's caching allocator, to the same
with its cache given back after every step, and to the driver's own calls. Each once between steps, when the card has nothing to do, as
minserve allocates; and once while a product of about a step's length is under way, as an engine does that plans ahead.

Invariant: what is counted is the time beyond the same steps without allocation.

Unmeasured: no GPU was at hand when this was written. Taught in notebook 11.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch.cuda.memory import caching_allocator_enable

from minserve.allocations import Recording
from minserve.allocators import Pace, measure_costs

NUM_ROUNDS = 3
PRODUCT_SIZE = 4096
ALLOCATORS = ("caching", "emptied after each step", "the driver's own calls")


@contextmanager
def without_cache(device: torch.device) -> Iterator[None]:
    """Every tensor made in here is a cudaMalloc, and its end a cudaFree."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    caching_allocator_enable(False)
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        caching_allocator_enable(True)


def step_work(device: torch.device, step_s: float) -> Callable[[], None]:
    """Queues products that keep the card busy for about that long."""
    a = torch.zeros(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.mm(a, a, out=out)
    end.record()
    end.synchronize()
    return _repeat(lambda: torch.mm(a, a, out=out), num_products(step_s, begin.elapsed_time(end) / 1e3))


def _repeat(call: Callable[[], object], num_times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(num_times):
            call()

    return run


def num_products(step_s: float, product_s: float) -> int:
    """
    >>> num_products(3e-3, 2e-4), num_products(1e-4, 2e-4), num_products(1.0, 2e-4)
    (15, 1, 100)
    """
    return max(1, min(100, round(step_s / product_s)))


def allocation_costs(recording: Recording, batch_size: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """For each allocator, idle and busy, what every way takes; one after the other, so that a caller may stop."""
    busy = step_work(device, recording.run_s / len(recording.demands))

    def wait() -> None:
        torch.cuda.synchronize(device)

    def wait_and_empty() -> None:
        wait()
        torch.cuda.empty_cache()

    for allocator in ALLOCATORS:
        end = wait_and_empty if allocator == ALLOCATORS[1] else wait
        for while_busy in (False, True):
            pace = Pace(busy if while_busy else None, end)
            if allocator == ALLOCATORS[2]:
                with without_cache(device):
                    costs = measure_costs(recording, batch_size, device, 1, pace)
            else:
                costs = measure_costs(recording, batch_size, device, NUM_ROUNDS, pace)
            yield {"allocator": allocator, "while_busy": while_busy, "costs": [asdict(cost) for cost in costs]}


def lines(found: Mapping[str, Any], step_s: float) -> str:
    """What `allocation_costs` yielded, in words: for each way its microseconds a call and its share of a step."""
    costs: Sequence[Mapping[str, Any]] = found["costs"]
    head = f"{found['allocator']}, {'while the card works' if found['while_busy'] else 'between steps'}"
    body = (f"{c['way']} {1e3 * c['ms_per_step'] / c['calls_per_step']:.1f} us/call, {share(c, step_s):.2f} %" for c in costs)
    return "\n  ".join([head, *body])


def share(cost: Mapping[str, Any], step_s: float) -> float:
    """Percent of a step that has the cost in it.

    >>> share({"ms_per_step": 1.0}, step_s=0.019)
    5.0
    """
    return 100 * cost["ms_per_step"] / (1e3 * step_s + cost["ms_per_step"])
