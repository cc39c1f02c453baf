"""Requests that were recorded somewhere: a JSONL file, one request a line.

Why: distributions leave out what they don't know; a replay has the bursts and the repetitions of real traffic.

Each line is an object with

    arrival_s                         seconds (0 if left out), or `timestamp`: milliseconds
    prompt_ids                        the prompt's tokens, or how many: num_prompt_tokens, or input_length
    num_output_tokens                 or output_length
    hash_ids                          optional, with a count of prompt tokens: one number for each 512 of them; prompts whose
                                      numbers begin alike begin with the same tokens

The second names are those of Mooncake's published traces, so these can be replayed as they are. Other fields are ignored.

Invariant: every error names the file and the line.

Taught in notebook 03.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minserve.core.engine import Arrival
from minserve.core.request import SamplingParams

TOKENS_PER_HASH = 512


def read_jsonl(path: str | Path, num_requests: int | None, seed: int, vocab_size: int) -> list[Arrival]:
    """The requests of a file, or the first so many; made-up tokens come from the seed. Raises ValueError with file and line."""
    rng = np.random.default_rng(seed)
    found: list[Arrival] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if num_requests is not None and len(found) == num_requests:
            break
        if line.strip():
            try:
                found.append(_arrival(json.loads(line), rng, vocab_size))
            except (ValueError, TypeError) as error:  # JSONDecodeError is a ValueError
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path}: no requests in it")
    return found


def _arrival(values: Any, rng: np.random.Generator, vocab_size: int) -> Arrival:
    if not isinstance(values, Mapping):
        raise ValueError(f"a request is an object with fields, got {values!r}")
    time_s = _number(values, "arrival_s") if "arrival_s" in values else _number(values, "timestamp", 0.0) / 1e3
    output = _count(values, "num_output_tokens", "output_length")
    return time_s, {"prompt_ids": _prompt(values, rng, vocab_size), "params": SamplingParams(max_tokens=output, ignore_eos=True)}


def _prompt(values: Mapping[str, Any], rng: np.random.Generator, vocab_size: int) -> list[int]:
    ids = values.get("prompt_ids")
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ValueError(f"prompt_ids must be a list of tokens from 0 to {vocab_size - 1}")
        return ids
    count = _count(values, "num_prompt_tokens", "input_length")
    tokens: list[int] = []
    for hash_id in values.get("hash_ids") or ():
        tokens += np.random.default_rng(abs(int(hash_id))).integers(vocab_size, size=TOKENS_PER_HASH).tolist()
    return tokens[:count] + rng.integers(vocab_size, size=max(0, count - len(tokens))).tolist()


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _count(values: Mapping[str, Any], *names: str) -> int:
    value = next((values[name] for name in names if name in values), None)
    if type(value) is not int or value < 1:
        raise ValueError(f"{' or '.join(names)} must be an integer >= 1, got {value!r}")
    return value
