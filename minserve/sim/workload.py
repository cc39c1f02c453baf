"""Who asks for what, and when: lengths, arrivals, shared beginnings, conversations, and recorded traces.

Why: what an engine is good at shows only under a load, and a load is four things: when requests come, how long their prompts are,
how long their answers become, and what their prompts have in common. Each is chosen here on its own, and each has its own stream of
random numbers: another spread of lengths leaves the arrivals as they were, so two runs differ in one thing only.

Prompts are made-up tokens; two of them have nothing in common unless a shared beginning is asked for. Answers have a
given length: end-of-text is ignored.

Invariant: a workload is a pure function of its arguments, and keeps nothing while it is served, so it can be served twice.

Taught in notebook 03.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minserve.core.engine import Arrival
from minserve.core.request import Request, SamplingParams
from minserve.sim.lengths import TRACES as TRACES  # whoever makes a workload finds its parts here
from minserve.sim.lengths import LengthPair as LengthPair
from minserve.sim.lengths import Lengths
from minserve.sim.recorded import read_jsonl
from minserve.sim.runner import VOCAB_SIZE

# --- arrivals -------------------------------------------------------------------------------------


def _refuse_unless(holds: bool, words: str) -> None:
    if not holds:
        raise ValueError(words)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come: a rate, and how uneven the gaps are. cv 0: like a clock; 1: Poisson; more: in bursts."""

    rate_per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _refuse_unless(self.rate_per_s > 0, f"requests arrive at a rate above 0 per second, got {self.rate_per_s}")
        _refuse_unless(0 <= self.cv < math.inf, f"the gaps' coefficient of variation is a finite number >= 0, got {self.cv}")

    def times_s(self, rng: np.random.Generator, count: int) -> list[float]:
        """`count` ascending times; the first gap begins at 0 s."""
        if self.rate_per_s == math.inf:
            return [0.0] * count
        gap_s = 1 / self.rate_per_s
        gaps_s = rng.gamma(1 / self.cv**2, gap_s * self.cv**2, count) if self.cv else np.full(count, gap_s)
        return np.cumsum(gaps_s).tolist()


def all_at_once() -> Arrivals:
    return Arrivals(math.inf)


def poisson(rate_per_s: float) -> Arrivals:
    return Arrivals(rate_per_s)


def gamma(rate_per_s: float, cv: float) -> Arrivals:
    """Gamma distributed gaps: cv 1 is Poisson, a greater one comes in bursts."""
    return Arrivals(rate_per_s, cv)


# --- workloads ------------------------------------------------------------------------------------


class Workload:
    """Requests at given times. `then` makes the kinds below wait for an answer before they go on."""

    def __init__(self, first: Sequence[Arrival]):
        self._first = tuple(first)

    def arrivals(self) -> list[Arrival]:
        """What comes in any case, for Engine.run."""
        return list(self._first)

    def then(self, request: Request, now_s: float) -> list[Arrival]:
        """What comes because this request has ended."""
        return []

    def __len__(self) -> int:
        """Requests, those included that come because of others."""
        return len(self._first)


def exact(num_tokens: int) -> SamplingParams:
    """Sampling for an answer of exactly so many tokens."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def make_workload(
    num_requests: int,
    prompt: Lengths,
    output: Lengths,
    arrivals: Arrivals | None = None,
    seed: int = 0,
    *,
    num_shared_tokens: int = 0,
    num_groups: int = 1,
    vocab_size: int = VOCAB_SIZE,
) -> Workload:
    """Independent requests, all at once unless `arrivals` says otherwise.

    The first `num_shared_tokens` of a prompt are those of its group (request i is of group i modulo `num_groups`); lengths stay.
    """
    streams = _streams(seed)
    times_s = (arrivals or all_at_once()).times_s(streams["times"], num_requests)
    prompts = _prompts(streams, prompt, num_requests, num_shared_tokens, num_groups, vocab_size)
    outputs = output.sample(streams["outputs"], num_requests)
    return Workload(
        [(time_s, {"prompt_ids": ids, "params": exact(count)}) for time_s, ids, count in zip(times_s, prompts, outputs, strict=True)]
    )


def load_jsonl(path: str | Path, num_requests: int | None = None, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Workload:
    """Replay a recorded trace, or its first so many requests; the fields are in `recorded.py`. Raises ValueError with file and line."""
    return Workload(read_jsonl(path, num_requests, seed, vocab_size))


def _streams(seed: int) -> dict[str, np.random.Generator]:
    names = ("times", "prompts", "outputs", "tokens", "prefixes", "thinking")
    return dict(zip(names, np.random.default_rng(seed).spawn(len(names)), strict=True))


def _prompts(
    streams: Mapping[str, np.random.Generator], lengths: Lengths, count: int, num_shared: int, num_groups: int, vocab_size: int
) -> list[list[int]]:
    prefixes = [_tokens(streams["prefixes"], num_shared, vocab_size) for _ in range(num_groups)]
    prompts: list[list[int]] = []
    for index, length in enumerate(lengths.sample(streams["prompts"], count)):
        prefix = prefixes[index % num_groups][:length]
        prompts.append(prefix + _tokens(streams["tokens"], length - len(prefix), vocab_size))
    return prompts


def _tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    return rng.integers(vocab_size, size=count).tolist()


class ClosedLoop(Workload):
    """So many clients, each of whom sends a request, waits for its end, thinks, and sends the next.

    Request i is client i modulo `num_clients`'s. Thinking takes exponential times of the given mean.
    """

    def __init__(
        self,
        num_clients: int,
        num_requests: int,
        prompt: Lengths,
        output: Lengths,
        seed: int = 0,
        *,
        think_s: float = 0.0,
        num_shared_tokens: int = 0,
        vocab_size: int = VOCAB_SIZE,
    ):
        _refuse_unless(num_clients >= 1, f"a closed loop has at least 1 client, got {num_clients}")
        requests = make_workload(
            num_requests, prompt, output, seed=seed, num_shared_tokens=num_shared_tokens, vocab_size=vocab_size
        ).arrivals()
        pauses_s = _streams(seed)["thinking"].exponential(think_s, num_requests).tolist()
        self._calls = [{"request_id": f"Q{index}", **arguments} for index, (_, arguments) in enumerate(requests)]
        self._next = {
            self._calls[index]["request_id"]: (pauses_s[index], self._calls[index + num_clients])
            for index in range(num_requests - num_clients)
        }
        super().__init__([(0.0, arguments) for arguments in self._calls[:num_clients]])

    def then(self, request: Request, now_s: float) -> list[Arrival]:
        if request.request_id not in self._next:
            return []
        pause_s, arguments = self._next[request.request_id]
        return [(now_s + pause_s, arguments)]

    def __len__(self) -> int:
        return len(self._calls)


class MultiTurn(Workload):
    """Conversations: the next prompt is all that was said so far, the answer included, and what the user adds after thinking.

    The first prompt has `prompt` tokens, of which the first `num_shared_tokens` (a system prompt) are the same in all chats;
    each later turn adds `user` tokens. A chat ends after `num_turns`, or when it has become too long for the engine.
    """

    def __init__(
        self,
        num_chats: int,
        num_turns: int,
        prompt: Lengths,
        user: Lengths,
        output: Lengths,
        arrivals: Arrivals | None = None,
        seed: int = 0,
        *,
        think_s: float = 5.0,
        num_shared_tokens: int = 0,
        vocab_size: int = VOCAB_SIZE,
    ):
        streams = _streams(seed)
        times_s = (arrivals or all_at_once()).times_s(streams["times"], num_chats)
        prompts = _prompts(streams, prompt, num_chats, num_shared_tokens, 1, vocab_size)
        num_later = num_chats * (num_turns - 1)
        added = [_tokens(streams["tokens"], count, vocab_size) for count in user.sample(streams["prompts"], num_later)]
        pauses_s = streams["thinking"].exponential(think_s, num_later).tolist()
        outputs = output.sample(streams["outputs"], num_chats * num_turns)
        self._num_requests = num_chats * num_turns
        # (id of the turn before) -> (pause, id, what the user adds, length of the answer); the turns of all chats, one after another
        self._next = {
            f"C{index % num_chats}.{index // num_chats}": (
                pauses_s[index],
                f"C{index % num_chats}.{index // num_chats + 1}",
                added[index],
                outputs[num_chats + index],
            )
            for index in range(num_later)
        }
        super().__init__(
            [
                (times_s[chat], {"request_id": f"C{chat}.0", "prompt_ids": prompts[chat], "params": exact(outputs[chat])})
                for chat in range(num_chats)
            ]
        )

    def then(self, request: Request, now_s: float) -> list[Arrival]:
        if request.request_id not in self._next:
            return []
        pause_s, request_id, added, num_output = self._next[request.request_id]
        prompt_ids = [*request.token_ids, *added]
        return [(now_s + pause_s, {"request_id": request_id, "prompt_ids": prompt_ids, "params": exact(num_output)})]

    def __len__(self) -> int:
        return self._num_requests
