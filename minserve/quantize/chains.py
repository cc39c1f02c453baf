"""Chains of equal steps, each of which needs the ones before it: how fast the share that is still right falls.

Why: that few bits harm "reasoning in many steps" may mean two things. Every step may fail a little more often: then the share of whole
chains falls as (1 - e)^k, fast, though nothing gets worse from step to step. Or later steps may fail more often than early ones. A
chain of equal steps tells them apart: copy the next number of a list, or add the same amount once more. What is wrong once ends
the chain, as it would end a proof.

    e = chains that broke / steps that were tried

Invariant: a step is tried only where all before it were right, so steps tried = steps right + chains broken.

Taught in notebook 09.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minserve.model.runner import ModelRunner
from minserve.quantize.intervals import Interval, bootstrap, ratio_of_sums
from minserve.quantize.subjects import OpenModel
from minserve.quantize.writing import greedy

NUM_STEPS = 16


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt, and the numbers that must follow it."""

    prompt: str
    steps: tuple[str, ...]


def copy_chain(rng: random.Random, num_steps: int) -> Chain:
    """A list of numbers of three digits, and its beginning once more."""
    numbers = [str(rng.randrange(100, 1000)) for _ in range(num_steps + 2)]
    return Chain(f"First list: {' '.join(numbers)}\nThe same list again: {' '.join(numbers[:2])}", tuple(numbers[2:]))


def count_chain(rng: random.Random, num_steps: int) -> Chain:
    """The first six numbers of an arithmetic series: with fewer, this small model often mistakes the amount that is added."""
    start, amount = rng.randrange(10, 80), rng.choice((1, 2, 5, 10))
    numbers = [str(start + i * amount) for i in range(num_steps + 6)]
    return Chain(f"{', '.join(numbers[:6])},", tuple(numbers[6:]))


KINDS: Mapping[str, Callable[[random.Random, int], Chain]] = {"copy": copy_chain, "count": count_chain}


def make_chains(kind: str, num_chains: int = 48, num_steps: int = NUM_STEPS, seed: int = 0) -> list[Chain]:
    """The same seed gives the same chains.

    >>> make_chains("count", 1, 3)[0]
    Chain(prompt='35, 45, 55, 65, 75, 85,', steps=('95', '105', '115'))
    """
    rng = random.Random(f"{seed} {kind}")
    return [KINDS[kind](rng, num_steps) for _ in range(num_chains)]


def num_right(chain: Chain, text: str) -> int:
    """Steps that are right before the first that is not.

    >>> num_right(Chain("2, 4,", ("6", "8", "10")), " 6, 8, 9, 10")
    2
    """
    numbers = re.findall(r"\d+", text.split("\n")[0])
    return next((i for i, step in enumerate(chain.steps) if i >= len(numbers) or numbers[i] != step), len(chain.steps))


def follow(model: OpenModel, runner: ModelRunner, chains: Sequence[Chain]) -> Tensor:
    """How far the greedy answers are right: [chains] steps"""
    encode = model.tokenizer.encode
    most = [len(encode(", ".join(chain.steps))) + 4 for chain in chains]
    answers = greedy(model, runner, [encode(chain.prompt) for chain in chains], most, stops=True)
    return torch.tensor([num_right(chain, model.tokenizer.decode(ids)) for chain, ids in zip(chains, answers, strict=True)])


def survival(right: Tensor, num_steps: int = NUM_STEPS) -> Tensor:
    """The share of chains that are right for at least so many steps: [num_steps + 1], the first is 1.

    >>> survival(torch.tensor([0, 2, 2, 1]), 2)
    tensor([1.0000, 0.7500, 0.5000])
    """
    return (right[:, None] >= torch.arange(num_steps + 1)).float().mean(0)


def error_per_step(right: Tensor, num_steps: int = NUM_STEPS, seed: int = 0) -> Interval:
    """Chains that broke for each step that was tried.

    >>> error_per_step(torch.tensor([4, 4, 1]), 4).value  # one broke in 4 + 4 + 2 steps
    0.1
    """
    return bootstrap(_parts(right, num_steps), ratio_of_sums, seed)


def error_change(reference: Tensor, measured: Tensor, num_steps: int = NUM_STEPS, seed: int = 0) -> Interval:
    """By how much a step fails more often than the reference's, chains paired."""
    parts = torch.cat((_parts(measured, num_steps), _parts(reference, num_steps)), dim=1)
    return bootstrap(parts, lambda sums: ratio_of_sums(sums[:, :2]) - ratio_of_sums(sums[:, 2:]), seed)


def error_by_half(right: Tensor, num_steps: int = NUM_STEPS, seed: int = 0) -> tuple[Interval, Interval]:
    """The error per step in the first half of the steps and in the second: equal, if a step does not care how many came before.

    No chain that reaches the second half: its interval is nan.
    """
    half = num_steps // 2
    late = right[right >= half] - half
    return error_per_step(right.clamp(max=half), half, seed), error_per_step(late, num_steps - half, seed)


def _parts(right: Tensor, num_steps: int) -> Tensor:
    """Of each chain: whether it broke, and the steps that were tried. [chains, 2] float64"""
    broke = (right < num_steps).double()
    return torch.stack((broke, right + broke), dim=1)
