"""What callers give and get: the settings of an engine, the forms a prompt may take, and the answers.

Why: users learn these names first, so they stand in one place, apart from the machinery that serves them. Whatever is malformed is
refused here, by name and with what was given.

Taught in notebook 00.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from minserve.core.records import RequestRecord
from minserve.core.request import InvalidRequest, SamplingParams, TokenLogprob

Prompt: TypeAlias = str | Sequence[int]


class RequestShed(RuntimeError):
    """The policy sent the request away unserved; the message has its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything about an engine that can be chosen. Sizes in bytes, tokens or blocks, as the names say."""

    dtype: str = "auto"  # compute type: auto (timed at start), fp32, bf16, fp16
    weights: str = "auto"  # auto: as the checkpoint has them; or int8, int4, gptq-int4, awq-int4-g128 ...: quantized when it is opened
    weight_copy: bool | str = "auto"  # beside codes, numbers for many rows; auto: on a CPU, if they take a tenth of the free memory
    device: str = "auto"
    num_threads: int | None = None  # of torch on the CPU; None leaves torch's own choice
    attention_backend: str = "auto"  # auto: triton on a CUDA or HIP device, torch elsewhere
    cuda_graphs: bool | str = "auto"  # decode steps as CUDA graphs; auto: with triton on CUDA
    kv_cache_dtype: str = "auto"  # auto: the compute type; fp32, bf16, fp16, or fewer bytes: fp8, int8, int4
    block_size: int = 16  # tokens a block
    num_blocks: int | None = None  # the pool: given in blocks,
    kv_cache_bytes: int | None = None  # or in bytes,
    kv_memory_fraction: float = 0.3  # or as a share of the memory that is free at start
    max_model_len: int | None = None  # prompt + output; None: what the model and the pool allow
    token_budget: int = 512  # tokens a step computes at most
    max_running: int = 64
    max_chunk_tokens: int | None = None
    watermark: float = 0.01  # share of the pool that stays free when a request is admitted
    reserve_whole_answers: bool = False  # a request starts when its longest answer fits: nobody is preempted, more wait
    prefix_caching: bool = True
    max_trace_records: int | None = 100_000
    keep_snapshots: bool = False  # in the trace, a copy of queues and block tables a step: for replays, not for servers

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "EngineConfig":
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f", did you mean {close[0]!r}?" if close else f"; known settings: {', '.join(names)}"
                raise ValueError(f"unknown engine setting {name!r}{hint}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `token_ids` are all generated tokens, an end token included; `text` stops before it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # stop, length, abort, error, or shed: sent away by the policy
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None  # why, where it is error or shed


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt: its n answers, and the times of the first of them (seconds of the engine's clock)."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_ids: tuple[int, ...]
    outputs: list[Completion]
    num_cached_tokens: int
    metrics: RequestRecord

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string or token ids) becomes a list of one. Mixed lists are refused: which was meant cannot be told."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a string, a list of strings or lists of token ids, got {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Prompt, prompts)]
    kinds = {str if isinstance(item, str) else list if isinstance(item, Sequence) else type(item) for item in prompts}
    if not kinds <= {str} and not kinds <= {list}:
        raise InvalidRequest(f"prompts must be all strings or all lists of token ids, got {sorted(kind.__name__ for kind in kinds)}")
    return list(cast(Sequence[Prompt], prompts))


def as_params(
    params: SamplingParams | Mapping[str, Any] | Sequence[SamplingParams] | None, fields: Mapping[str, Any], num_prompts: int
) -> list[SamplingParams]:
    """One set of sampling parameters for each prompt: from an object, a dictionary, a list, or fields by name."""
    if params is not None and fields:
        raise InvalidRequest(f"give sampling fields by name or as params, not both: {', '.join(fields)}")
    if params is None:
        params = SamplingParams.from_dict(fields)
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if isinstance(params, Mapping):
        return [SamplingParams.from_dict(params)] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequest(f"{num_prompts} prompts and {len(params)} sampling params: give one for all, or one for each")
    return list(params)
