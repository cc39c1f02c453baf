"""A stand-in model that reads every slot it is given: its text is right only if every block is.

Why: a real model hides most mistakes of a memory manager behind fluent words, and needs seconds to do so. The oracle stores one
number per slot, v(i) = (31 v(i-1) + token(i) + 7) mod 1,000,003, where v(i-1) is read back through the block table. Its next token is
the sum of (j+1) v(j) over all slots, mod 211. A wrong, missing or stale slot changes the text. At a temperature above 0 a number that
depends on the request's seed and the place in its output is added.

Invariant: `oracle_tokens` gives the same tokens without any engine, so that the engine is never its own witness.

Taught in the bonus notebook, the bug museum.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from random import Random

from minserve.core.batch import ScheduledBatch, ScheduledRequest, StepResult
from minserve.core.request import Request

VOCAB_SIZE = 211


def oracle_value(before: int, token_id: int) -> int:
    """v(i), from v(i-1) and the token."""
    return (31 * before + token_id + 7) % 1_000_003


def oracle_values(token_ids: Iterable[int]) -> list[int]:
    """v(i) for every token: what slot i of a request with these tokens must hold."""
    return list(accumulate(token_ids, oracle_value, initial=0))[1:]


Draw = Callable[[int], int]  # place in the output -> what chance adds to the token there


def oracle_tokens(prompt_ids: Sequence[int], max_tokens: int, draw: Draw = lambda place: 0) -> list[int]:
    """The oracle's first `max_tokens` output tokens, by arithmetic alone. `draw` as in `draws`; without it, greedy."""
    values, tokens = oracle_values(prompt_ids), []
    total = sum((j + 1) * v for j, v in enumerate(values))
    for place in range(max_tokens):
        tokens.append((total + draw(place)) % VOCAB_SIZE)
        values.append(oracle_value(values[-1], tokens[-1]))
        total += len(values) * values[-1]
    return tokens


def draws(request: Request) -> Draw:
    """What chance adds to the oracle's token at each place of the output: nothing for a greedy request."""
    seed = request.seed if request.params.seed is None else request.params.seed
    if request.params.is_greedy:
        return lambda place: 0
    return lambda place: Random(f"{seed}:{request.sample_index}:{place}").randrange(VOCAB_SIZE)


class OracleRunner:
    """Computes the oracle's tokens from the slots of a pool. Keeps the batches that it has seen."""

    def __init__(self, num_blocks: int, block_size: int, seconds_per_step: float = 1.0):
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.batches: list[ScheduledBatch] = []
        self.seconds_per_step = seconds_per_step
        self.before_execute: Callable[[ScheduledBatch], object] = lambda batch: None
        self.num_draws = Counter[str]()
        self.errors: dict[str, str] = {}  # request id -> the error that it gets in place of a token

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.before_execute(batch)
        self.batches.append(batch)
        size = self.block_size
        for source, target in batch.copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        for row in batch.rows:  # all are written before any is read, as a layer of the real model does
            for position, token_id in enumerate(row.token_ids, start=row.start):
                before = self._read(row.block_table, position - 1) if position else 0
                slot = row.block_table[position // size] * size + position % size
                self.slots[slot] = oracle_value(before, token_id)
        tokens = {row.request.request_id: self._next_token(row) for row in batch.rows if row.samples}
        ids = [row.request.request_id for row in batch.rows]
        errors = {request_id: self.errors[request_id] for request_id in ids if request_id in self.errors}
        return StepResult(token_ids=tokens, errors=errors, elapsed_s=self.seconds_per_step)

    def _read(self, table: Sequence[int], position: int) -> int:
        value = self.slots[table[position // self.block_size] * self.block_size + position % self.block_size]
        assert value is not None, f"position {position} is read before it was written"
        return value

    def _next_token(self, row: ScheduledRequest) -> int:
        request = row.request
        self.num_draws[request.request_id] += not request.params.is_greedy
        best = sum((j + 1) * self._read(row.block_table, j) for j in range(row.end))
        return (best + draws(request)(request.num_output_tokens)) % VOCAB_SIZE
