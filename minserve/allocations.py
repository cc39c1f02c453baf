"""What a run asked of its memory, step by step: made from its trace, to be put to any allocator.

Why: the cost of allocation is calls times the price of a call. Calls are not guessed here: the trace of a run that took place says, in
each step, which requests grew, to where, and who ended.

Invariant: replayed on the pool, the blocks in use are those of the trace, in every step.

Taught in notebook 11.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from minserve.core.trace import Trace
from minserve.host_record import Load
from minserve.interface import RequestOutput
from minserve.llm import LLM
from minserve.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Growth:
    """A request computes its tokens [start, end) in a step. One that is new and starts later than 0 was given the blocks before it."""

    request_id: str
    start: int
    end: int
    is_new: bool  # starts, or comes back

    def num_new_blocks(self, block_size: int) -> int:
        return -(-self.end // block_size) - -(-self.start // block_size)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one step asks: who is taken out, who grows, who has ended when it is over."""

    preempted: tuple[str, ...]
    growths: tuple[Growth, ...]
    finished: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The demands of a run, the tokens of its requests, and the pool they were served from."""

    demands: tuple[Demand, ...]
    prompts: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]
    num_blocks: int
    block_size: int
    num_layers: int
    bytes_per_token: int
    run_s: float

    @property
    def bytes_per_layer(self) -> int:
        """Of one token in one layer."""
        return self.bytes_per_token // self.num_layers

    @property
    def longest(self) -> Mapping[str, int]:
        """Most tokens a request stores: what a whole answer reserves."""
        return {name: len(prompt) + len(self.outputs[name]) for name, prompt in self.prompts.items()}

    @classmethod
    def of(cls, llm: LLM, trace: Trace, outputs: Sequence[RequestOutput], run_s: float) -> "Recording":
        """Of a run of one answer a prompt that began with an empty cache."""
        return cls(
            demands=demands_of(trace),
            prompts={output.request_id: output.prompt_ids for output in outputs},
            outputs={output.request_id: tuple(output.token_ids) for output in outputs},
            num_blocks=llm.num_blocks,
            block_size=llm.pool.block_size,
            num_layers=len(cast(ModelRunner, llm.engine.runner).decoder.layers),
            bytes_per_token=llm.pool.bytes_per_token,
            run_s=run_s,
        )

    def load(self, batch_size: int) -> Load:
        """The sums of all that is asked."""
        growths = [growth for demand in self.demands for growth in demand.growths]
        return Load(
            batch_size=batch_size,
            num_requests=len(self.prompts),
            num_steps=len(self.demands),
            run_s=self.run_s,
            num_rows=len(growths),
            num_tokens=sum(growth.end - growth.start for growth in growths),
            num_blocks_taken=sum(growth.num_new_blocks(self.block_size) for growth in growths),
            block_size=self.block_size,
            bytes_per_token=self.bytes_per_token,
            num_layers=self.num_layers,
        )


def demands_of(trace: Trace) -> tuple[Demand, ...]:
    """The trace's steps as demands; steps in which nothing ran are left out."""
    found: list[Demand] = []
    held: set[str] = set()
    for step in trace.steps:
        held -= set(step.preempted)
        growths = tuple(Growth(name, start, start + count, name not in held) for name, (start, count) in step.tokens.items())
        held |= step.tokens.keys()
        held -= set(step.finished)
        if growths:
            found.append(Demand(step.preempted, growths, step.finished))
    return tuple(found)
