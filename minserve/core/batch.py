"""The two messages that cross the seam between the scheduler and whatever runs the model.

Why: the real model and the simulator are exchangeable because each sees a `ScheduledBatch` and answers with a
`StepResult`, and nothing else passes between them.

Invariant: a row computes the half-open interval [start, start + num_tokens) of its request's tokens, its
block table covers exactly the tokens [0, start + num_tokens), and a runner writes keys and values before it
reads any: a row may rely on slots that an earlier row of the same batch writes (a prefix shared by requests
that arrive together).

Taught in notebook 06.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from minserve.core.request import Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step. `samples` is true where the row reaches the last known token."""

    request: Request
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens to feed. Valid until the result of the step is applied."""
        return self.request.token_ids[self.start : self.end]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step computes. Copies (source block, target block) are carried out before anything is written.

    `decisions` says in words why requests start, wait or give way: (request id, words). The counts of blocks
    and slots are those of the pool while the step runs: a request that ends with it still holds its blocks.
    `shed` are the requests that the policy has sent away: they have ended, and the step reports them.
    """

    step: int
    rows: tuple[ScheduledRequest, ...]
    copies: tuple[tuple[int, int], ...] = ()
    preempted_ids: tuple[str, ...] = ()
    num_hit_tokens: int = 0
    num_used_blocks: int = 0
    num_idle_blocks: int = 0
    num_empty_slots: int = 0
    shed: tuple[Request, ...] = ()
    decisions: tuple[tuple[str, str], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def plain(self) -> dict[str, object]:
        """Plain data, to compare the batches of two runs and to write them to a file."""
        rows = [(r.request.request_id, r.start, r.num_tokens, r.block_table, r.samples) for r in self.rows]
        return {"step": self.step, "rows": rows, "copies": self.copies, "preempted": self.preempted_ids}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step: one token for every row that samples, by request id, or an error in its place.

    `elapsed_s` is the time the step is said to take; a virtual clock advances by it, the wall clock ignores
    it.
    """

    token_ids: Mapping[str, int]
    logprobs: Mapping[str, TokenLogprob] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    elapsed_s: float = 0.0
