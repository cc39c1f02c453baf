"""A seeded net of two layers, hand-made batches for it, and an engine around it: what the tests of model/ share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minserve.core.batch import ScheduledBatch, ScheduledRequest
from minserve.core.block_manager import BlockManager
from minserve.core.clock import VirtualClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.model.config import ModelConfig
from minserve.model.decoder import Decoder
from minserve.model.kv_cache import KVCache
from minserve.model.runner import ModelRunner
from minserve.model.sampler import Sampler
from minserve.model.weights import RandomWeights


def tiny_config(**changes: Any) -> ModelConfig:
    """2 layers, hidden 64, 4 query and 2 KV heads of 32, 320 logits."""
    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_positions": 512,
    }
    return ModelConfig(**{**values, **changes})


def tiny_decoder(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Decoder:
    return Decoder(tiny_config(**changes), RandomWeights(seed, spread=0.2), dtype)


def request(name: str, token_ids: Sequence[int]) -> Request:
    return Request(request_id=name, prompt_ids=tuple(token_ids), params=SamplingParams(), max_total_tokens=512)


def tokens_for(seed: int, count: int, vocab_size: int = 320) -> list[int]:
    """`count` token ids that are the same in every run."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(*rows: tuple[Request, int, int, Sequence[int]], copies: Sequence[tuple[int, int]] = ()) -> ScheduledBatch:
    """A step of rows (request, start, end, block table)."""
    made = [ScheduledRequest(r, start, end - start, tuple(table), end == r.num_tokens) for r, start, end, table in rows]
    return ScheduledBatch(step=0, rows=tuple(made), copies=tuple(copies))


def make_runner(decoder: Decoder, num_blocks: int = 64, block_size: int = 16, kv_cache_dtype: str = "fp32") -> ModelRunner:
    cache = KVCache(decoder.config, num_blocks, block_size, kv_cache_dtype)
    return ModelRunner(decoder, cache, Sampler(decoder.config.vocab_size))


def row_logits(runner: ModelRunner, batch: ScheduledBatch) -> dict[str, Tensor]:
    """Logits of every token of every row of a step, by request id: [tokens of the row, V]"""
    hidden, rows = runner.hidden(batch)
    pieces = runner.decoder.logits(hidden).split([row.num_tokens for row in rows])
    return {row.request.request_id: piece for row, piece in zip(rows, pieces, strict=True)}


def full_logits(decoder: Decoder, token_ids: Sequence[int], **cache: Any) -> Tensor:
    """Logits of a prompt computed alone and in one piece: [T, V]"""
    runner = make_runner(decoder, **cache)
    num_blocks = -(-len(token_ids) // runner.cache.block_size)
    return row_logits(runner, batch_of((request("alone", token_ids), 0, len(token_ids), range(num_blocks))))["alone"]


def make_engine(
    decoder: Decoder,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    token_budget: int = 512,
    max_running: int = 64,
    prefix_caching: bool = False,
    kv_cache_dtype: str = "fp32",
) -> Engine:
    blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
    scheduler = Scheduler(SchedulerConfig(token_budget=token_budget, max_running=max_running), blocks)
    runner = make_runner(decoder, num_blocks, block_size, kv_cache_dtype)
    return Engine(scheduler, runner, VirtualClock(), ModelLimits(decoder.config.max_positions, decoder.config.vocab_size))


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def generate(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, logprobs: int | None = None) -> list[Request]:
    """Run prompts together, greedy, to `max_tokens` each; the requests in the order of the prompts."""
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
    added = [engine.add(prompt, params)[0] for prompt in prompts]
    while engine.has_work:
        engine.step()
    engine.scheduler.blocks.check()
    return added
