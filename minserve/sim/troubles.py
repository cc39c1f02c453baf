"""Five ways in which memory ruins a service, each on a virtual card, with what cures it and the opposite move that makes it worse.

Why: "out of memory" names five troubles, and the cure of one is the cause of another: the fraction that must be raised for one must
be lowered for the next. So no fill is right for all; one has to know which trouble it is.

    start      beside the weights no room is left for the longest request: more of the card, or less to keep
    step       the activations of a large step find no room beside the pool: less of the card, or smaller steps
    shared     the fraction is of a card that somebody else sits on: a fraction of what is free
    guest      somebody comes later: only room that was left can take him in
    thrash     too many are let in, thrown out and computed again: fewer at once, or only whom the pool can hold

Invariant: every outcome is a run of the real scheduler on the virtual device; nothing here says what should come of it.

Taught in notebook 11.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minserve.core.policies import SizeCap
from minserve.core.request import FinishReason, Request, RequestStatus
from minserve.core.scheduler import Scheduler
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.virtual_device import Neighbour, OutOfDeviceMemory, start_engine
from minserve.sim.workload import Lengths, Workload, make_workload, poisson

Settings = Mapping[str, Any]  # of start_engine; "weights", "kv" are the cost model's


class HastyScheduler(Scheduler):
    """Admits whoever's next chunk fits, and promises nothing to those who run: fast to start, and thrashes."""

    def _num_tokens_kept(self, request: Request) -> int:
        if self.config.reserve_whole_answers:
            return super()._num_tokens_kept(request)
        if request.status is RequestStatus.RUNNING:
            return self.blocks.num_held_blocks(request) * self.blocks.block_size
        return min(request.num_tokens, self.config.token_budget)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a start and, where it succeeded, of the load."""

    error: str = ""  # of the start, or of the first request that failed
    missing_bytes: float = 0.0  # by which the start failed
    num_pool_tokens: int = 0
    num_answered: int = 0
    num_failed: int = 0
    output_tokens_per_s: float = 0.0  # of requests that were answered
    num_preemptions: int = 0
    recomputed_share: float = 0.0  # of all tokens that were computed
    worst_gap_s: float = 0.0  # between two tokens of one answer

    @property
    def starts(self) -> bool:
        return self.num_pool_tokens > 0


@dataclass(frozen=True, slots=True)
class Trouble:
    """A setting that fails on a load, what would cure it, and the opposite move."""

    symptom: str
    model: str
    device: str
    load: Workload
    settings: Settings
    cures: Mapping[str, Settings]
    opposite: tuple[str, Settings]
    neighbours: tuple[Neighbour, ...] = field(default=())

    def play(self) -> dict[str, Outcome]:
        """As it is, with each cure, and with the opposite move."""
        words, opposite = self.opposite
        rows: dict[str, Settings] = {"as it is": {}, **self.cures, words: opposite}
        return {name: self.try_out(change) for name, change in rows.items()}

    def try_out(self, change: Settings) -> Outcome:
        """Start with the settings, some of them changed, and serve the load."""
        settings = {"neighbours": self.neighbours, **self.settings, **change}
        formats = {name: settings.pop(name) for name in ("weights", "kv") if name in settings}
        cost = CostModel(SHAPES[self.model], DEVICES[self.device], **formats)
        return serve(cost, self.load, settings)


def serve(cost: CostModel, load: Workload, settings: Settings) -> Outcome:
    """Start an engine on its virtual device, and let it serve the load."""
    try:
        engine = start_engine(cost, **settings)
    except OutOfDeviceMemory as error:
        return Outcome(str(error), error.missing_bytes)
    ended = engine.run(load.arrivals(), load.then)
    failed = [request for request in ended if request.finish_reason is FinishReason.ERROR]
    answered = [request for request in ended if request.finish_reason is not FinishReason.ERROR]
    steps, summary = engine.trace.steps, engine.trace.summary()
    gaps_s = [gap_s for record in engine.trace.requests.values() for gap_s in record.itl_s]
    return Outcome(
        error=str(failed[0].error) if failed else "",
        num_pool_tokens=engine.scheduler.blocks.num_slots,
        num_answered=len(answered),
        num_failed=len(failed),
        output_tokens_per_s=sum(request.num_output_tokens for request in answered) / summary.wall_s,
        num_preemptions=summary.num_preemptions,
        recomputed_share=summary.num_recomputed_tokens / sum(step.num_tokens for step in steps),
        worst_gap_s=max(gaps_s, default=0.0),
    )


# --- the five -------------------------------------------------------------------------------------


def at_the_start() -> Trouble:
    """An 8B on a card of 24 GB, for contexts of 32k: beside the weights the pool is a little too small."""
    return Trouble(
        symptom="the engine does not start",
        model="llama-3.1-8b",
        device="l4",
        load=make_workload(4, Lengths.constant(4000), Lengths.constant(20)),
        settings={"memory_fraction": 0.9, "max_model_len": 32_768},
        cures={
            "fraction 0.95": {"memory_fraction": 0.95},
            "context 16,384": {"max_model_len": 16_384},
            "KV in fp8": {"kv": "fp8"},
            "weights in int8": {"weights": "int8"},
        },
        opposite=("fraction 0.8", {"memory_fraction": 0.8}),
    )


def in_a_step() -> Trouble:
    """A 13B whose pool was sized without a trial of the largest step: when prompts come together, their activations find no room."""
    return Trouble(
        symptom="it starts, and requests fail when many prompts meet",
        model="llama-2-13b",
        device="a100-80gb",
        load=make_workload(40, Lengths.uniform(1000, 2000), Lengths.uniform(20, 60), poisson(8.0)),
        settings={"memory_fraction": 0.99, "token_budget": 16_384, "reserve_bytes": 0.0},
        cures={
            "fraction 0.95": {"memory_fraction": 0.95},
            "steps of 2,048 tokens": {"token_budget": 2048},
            "a trial of the largest step": {"reserve_bytes": None},
        },
        opposite=("fraction 0.999", {"memory_fraction": 0.999}),
    )


def on_a_shared_card() -> Trouble:
    """The same 13B beside somebody who holds 12 GB: 0.9 of the card is more than is free."""
    return Trouble(
        symptom="the engine does not start, though its fraction is the usual one",
        model="llama-2-13b",
        device="a100-80gb",
        load=make_workload(20, Lengths.uniform(200, 1000), Lengths.uniform(20, 60)),
        settings={"memory_fraction": 0.9},
        cures={"fraction 0.8": {"memory_fraction": 0.8}, "0.9 of what is free": {"of_free_memory": True}},
        opposite=("fraction 0.95", {"memory_fraction": 0.95}),
        neighbours=(Neighbour("neighbour", 12e9),),
    )


def with_a_guest(num_bytes: float = 8.2e9) -> Trouble:
    """The card is empty at the start; two seconds later somebody takes nearly all that was left, for three seconds."""
    return Trouble(
        symptom="requests fail while somebody else is on the card",
        model="llama-2-13b",
        device="a100-80gb",
        load=make_workload(60, Lengths.uniform(200, 1000), Lengths.uniform(20, 60), poisson(8.0)),
        settings={"memory_fraction": 0.9},
        cures={"fraction 0.85": {"memory_fraction": 0.85}},
        opposite=("fraction 0.95", {"memory_fraction": 0.95}),
        neighbours=(Neighbour("guest", num_bytes, 2.0, 5.0),),
    )


def by_thrash() -> Trouble:
    """Long prompts in a small pool, and a door that looks at the next chunk only: most of the work is done again."""
    return Trouble(
        symptom="nothing fails, and throughput has gone",
        model="llama-2-13b",
        device="a100-80gb",
        load=make_workload(30, Lengths.uniform(2000, 4000), Lengths.uniform(50, 400), seed=1),
        settings={"memory_fraction": 0.5, "token_budget": 512, "make_scheduler": HastyScheduler},
        cures={
            "room for the whole prompt": {"make_scheduler": Scheduler},
            "4 at once": {"policy": SizeCap(4)},
            "watermark of 200 blocks": {"watermark_blocks": 200},
            "whole answers reserved": {"reserve_whole_answers": True},
            "fraction 0.9": {"memory_fraction": 0.9},
        },
        opposite=("fraction 0.45", {"memory_fraction": 0.45}),
    )


TROUBLES = {
    "start": at_the_start,
    "step": in_a_step,
    "shared": on_a_shared_card,
    "guest": with_a_guest,
    "thrash": by_thrash,
}
