"""A net of two layers to measure, with text and questions for it."""

from typing import Any

import torch
from torch import Tensor

from minserve.model.tokenizer import ByteTokenizer
from minserve.model.weights import RandomWeights
from minserve.quantize.quality import Sample, compare_distributions
from minserve.quantize.subjects import OpenModel, Scheme, make_runner
from minserve.quantize.tasks import Task
from tests.model.tiny_net import full_logits, tiny_config, tokens_for

TEXTS = [tokens_for(seed, 90) for seed in range(3)]
SAMPLE = Sample(TEXTS, [Task("echo", f"{word} ->", word) for word in ("one", "two", "three")])


def small_model(**changes: Any) -> OpenModel:
    return OpenModel("small", tiny_config(**changes), ByteTokenizer(), lambda: RandomWeights(0, spread=0.2))


def logits_of(model: OpenModel, dtype: torch.dtype = torch.float32, **cache: Any) -> Tensor:
    """Logits of the first text: [T, V]"""
    return full_logits(model.decoder(dtype), TEXTS[0], **cache)


def sums_of(model: OpenModel, kv_cache_dtype: str | Scheme, **options: Any) -> Tensor:
    """What `compare_distributions` finds against fp32: [documents, 5]"""
    decoder = model.decoder(torch.float32)
    base, measured = (make_runner(model, decoder, "fp32", name, 64) for name in ("fp32", kv_cache_dtype))
    return compare_distributions(base, [measured], TEXTS, **options)[0]
