"""Small questions with exact answers, made from a seed: what a model of 135 million weights can do at least in part.

Why: perplexity averages over easy words, and a cache that has lost one key in a list hardly moves it. To copy words, to find a number
in a list, to write a line in the form of others, the right token must be read out of the cache at the right place.

Invariant: the same seed gives the same questions; a question's answer is one line and follows from its prompt alone.

Taught in notebook 08.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST_EACH = 100  # additions that are different do not go on for ever
WORDS = (
    *("apple", "lemon", "river", "stone", "table", "house", "paper", "cloud", "horse", "bread", "glass", "chair", "plant", "ocean"),
    *("train", "clock", "tiger", "garden", "candle", "bridge", "orange", "pencil", "window", "button", "castle", "basket", "rocket"),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and what the first line of a greedy answer must be."""

    kind: str
    prompt: str
    answer: str


def make_tasks(num_each: int = 16, seed: int = 0) -> list[Task]:
    """`num_each` questions of every kind. Those of one kind share their examples, as the prompts of a service do.

    >>> task = make_tasks(1)[3]
    >>> task.prompt.splitlines()[-1], task.answer
    ('30, 31, 32, 33,', '34, 35.')
    """
    if not 0 < num_each <= MOST_EACH:
        raise ValueError(f"there are from 1 to {MOST_EACH} questions of each kind, {num_each} were asked for")
    tasks: list[Task] = []
    for kind, make in KINDS.items():
        rng, drawn = random.Random(f"{seed} {kind}"), {}
        while len(drawn) < NUM_EXAMPLES[kind] + num_each:
            question, answer = make(rng)
            drawn[question] = answer  # a question that has been drawn before is drawn in vain
        pairs = list(drawn.items())
        examples = "".join(f"{question} {answer}\n" for question, answer in pairs[: NUM_EXAMPLES[kind]])
        tasks += [Task(kind, examples + question, answer) for question, answer in pairs[NUM_EXAMPLES[kind] :]]
    return tasks


def _copy(rng: random.Random) -> tuple[str, str]:
    numbers = [str(rng.randrange(100, 1000)) for _ in range(16)]
    return f"First list: {' '.join(numbers)}\nThe same list again: {' '.join(numbers[:2])}", " ".join(numbers[2:])


def _look_up(rng: random.Random) -> tuple[str, str]:
    prices = {word: str(rng.randrange(10, 100)) for word in rng.sample(WORDS, 12)}
    asked = rng.choice(list(prices))
    lines = "\n".join(f"The price of the {word} is {price}." for word, price in prices.items())
    return f"{lines}\n\nThe price of the {asked} is", f"{prices[asked]}."


def _format(rng: random.Random) -> tuple[str, str]:
    name, count, color = rng.choice(WORDS), rng.randrange(10, 100), rng.choice(("red", "blue", "green", "black", "white"))
    return f"{name}, {count}, {color} =>", json.dumps({"name": name, "count": count, "color": color})


def _count(rng: random.Random) -> tuple[str, str]:
    start, step = rng.randrange(10, 80), rng.choice((1, 2, 5, 10))
    numbers = [str(start + i * step) for i in range(6)]
    return f"{', '.join(numbers[:4])},", f"{numbers[4]}, {numbers[5]}."


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(2, 30), rng.randrange(2, 10)
    return f"{a} + {b} =", str(a + b)


KINDS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = {
    "copy": _copy,
    "look up": _look_up,
    "format": _format,
    "count": _count,
    "add": _add,
}
NUM_EXAMPLES: Mapping[str, int] = {"copy": 0, "look up": 0, "format": 3, "count": 4, "add": 8}
