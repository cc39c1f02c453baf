"""The property test of tests/core/test_independence.py, for a sample, on a real net: greedy tokens are those of the cold run.

With fp32 KV that holds but for rounding. With quantized KV it holds for the same reason and one more: what a token's keys and values are
stored as depends on that token's numbers alone, never on who else is in its block, batch or chunk. Numbers that differ in rounding get
the same code, or, on the edge between two, neighbouring ones; that moves logits by less than what lies between the best two here.
With weights in codes, how many rows a step has decides whether it multiplies by the codes or by numbers made of them. Both are the same
weights: the cold run is that of a plain decoder which holds what the codes mean.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from torch import Tensor

from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import FinishReason, Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.model.decoder import Decoder
from minserve.model.linear import Linear
from minserve.model.quantized_linear import QuantizedLinear, Storage
from minserve.model.weights import CodedWeights, RandomWeights
from minserve.quantize.rtn import RoundedWeights
from minserve.sim.weight_formats import parse_weights
from tests.model.tiny_net import make_runner, tiny_config, tiny_decoder, tokens_for

STREAMS = [tokens_for(seed, 80) for seed in range(2)]  # prompts begin alike, so that they share blocks


def make_engine(decoder: Decoder, rng: Random, kv_cache_dtype: str) -> Engine:
    block_size = rng.choice([1, 2, 4, 8, 16])
    num_blocks = rng.randint(80, 140) // block_size + 2
    blocks = BlockManager(num_blocks, block_size, prefix_caching=rng.random() < 0.7)
    config = SchedulerConfig(
        token_budget=rng.choice([5, 16, 40, 512]),
        max_running=rng.choice([2, 4, 8]),
        watermark_blocks=rng.choice([0, 0, 2]),
        max_chunk_tokens=rng.choice([None, None, 7]),
    )
    runner = make_runner(decoder, num_blocks, block_size, kv_cache_dtype)
    return Engine(Scheduler(config, blocks), runner, VirtualClock(), ModelLimits(decoder.config.max_positions, decoder.config.vocab_size))


def cold_run(decoder: Decoder, prompt_ids: tuple[int, ...], max_tokens: int, kv_cache_dtype: str) -> list[int]:
    """Alone, in one piece, every step from the start: nothing is kept from one token to the next."""
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        blocks = BlockManager(1, 512, prefix_caching=False)
        scheduler = Scheduler(SchedulerConfig(token_budget=512), blocks)
        engine = Engine(
            scheduler, make_runner(decoder, 1, 512, kv_cache_dtype), VirtualClock(), ModelLimits(512, decoder.config.vocab_size)
        )
        [request] = engine.add(token_ids, SamplingParams(max_tokens=1))
        engine.run()
        token_ids += request.output_ids
    return token_ids[len(prompt_ids) :]


def play(decoder: Decoder, seed: int, seen: Counter[str], kv_cache_dtype: str) -> list[Request]:
    """One run drawn from `seed`: arrivals, samples, priorities, aborts and forced preemptions at random steps."""
    rng = Random(seed)
    engine = make_engine(decoder, rng, kv_cache_dtype)
    todo = [
        (rng.randint(0, 8), tuple(rng.choice(STREAMS)[: rng.randint(1, 60)]), rng.randint(1, 14), rng.choice([1, 1, 2, 3]))
        for _ in range(7)
    ]
    requests: list[Request] = []
    for step in range(2_000):
        for arrival in [a for a in todo if a[0] == step]:
            params = SamplingParams(max_tokens=arrival[2], n=arrival[3])
            requests += engine.add(arrival[1], params, priority=rng.choice([0, 0, 1]))
            todo.remove(arrival)
        running = engine.scheduler.running
        if running and rng.random() < 0.08:
            engine.scheduler.preempt(rng.choice(running))
        if running and rng.random() < 0.03:
            engine.abort(rng.choice(running).request_id)
        if engine.has_work:
            engine.step()
            engine.scheduler.check()
        elif not todo:
            break
    seen["hits"] += engine.trace.summary().num_hit_tokens
    seen["preemptions"] += sum(request.num_preemptions for request in requests)
    seen["aborts"] += sum(request.finish_reason is FinishReason.ABORT for request in requests)
    seen["whole"] += sum(request.finish_reason is FinishReason.LENGTH for request in requests)
    return requests


@pytest.mark.parametrize(("kv_cache_dtype", "num_seeds"), [("fp32", 12), ("bf16", 3), ("fp8", 3), ("int8", 5), ("int4", 5)])
def test_outputs_of_a_net_never_depend_on_scheduling(kv_cache_dtype: str, num_seeds: int) -> None:
    decoder = tiny_decoder()
    check_independence(decoder, decoder, kv_cache_dtype, num_seeds)


class Numbers:
    """Weights of which those in codes are handed out as the numbers that they mean."""

    def __init__(self, inner: CodedWeights):
        self.inner = inner

    def __contains__(self, name: str) -> bool:
        return name == "lm_head.weight" or name in self.inner

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        codes = self.inner.quantized(name, shape)
        return self.inner.take(name, shape) if codes is None else codes.dequantize()


@pytest.mark.parametrize(("weights", "copy"), [("int8", True), ("int8", False), ("int4", True), ("int4-channel-sym", False)])
def test_with_weights_in_codes_outputs_are_those_of_a_plain_net_of_the_same_numbers(weights: str, copy: bool) -> None:
    def rounded() -> RoundedWeights:
        return RoundedWeights(RandomWeights(0, spread=0.2), parse_weights(weights), tied=False)

    decoder = Decoder(tiny_config(), rounded(), storage=Storage(copy=copy, max_code_rows=4))
    plain = Decoder(tiny_config(), Numbers(rounded()))
    assert isinstance(decoder.head, QuantizedLinear) and isinstance(plain.head, Linear)
    check_independence(decoder, plain, "fp32", 3)


def check_independence(decoder: Decoder, cold_decoder: Decoder, kv_cache_dtype: str, num_seeds: int) -> None:
    """Whatever is served with it, and however it is cut, each request of `decoder` has the tokens of the cold run."""
    seen, cold = Counter[str](), {}
    for seed in range(num_seeds):
        for request in play(decoder, seed, seen, kv_cache_dtype):
            key = request.prompt_ids
            if key not in cold:
                cold[key] = cold_run(cold_decoder, key, 14, kv_cache_dtype)
            assert request.is_finished
            assert request.output_ids == cold[key][: request.num_output_tokens], f"seed {seed}, {request.request_id}"
    assert all(seen[name] > 0 for name in ("hits", "preemptions", "aborts", "whole")), seen
