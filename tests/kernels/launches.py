"""Every kernel of the package at shapes of real models, for the test that compiles them for cards that are not here.

A case calls a launcher with CPU tensors, as the engine does with a card's: their types, their strides and what divides their sizes
decide the machine code, what they hold does not. A name is kernel/format/model.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minserve_kernels.activation import swiglu
from minserve_kernels.decode_attention import decode_attention
from minserve_kernels.kv_write import write_kv
from minserve_kernels.norm import rms_norm
from minserve_kernels.prefill_attention import prefill_attention
from minserve_kernels.quant_gemm import int4_linear, int8_linear
from minserve_kernels.rope import rope
from minserve_kernels.weights import outputs_together
from tests.kernels.helpers import empty_cache

BF16 = torch.bfloat16


class Expected(NamedTuple):
    """What the machine code of a kernel must have, on every card. Nothing spills unless it is said here."""

    num_wide_loads: int = 0  # of 16 bytes a thread, at least
    wants_mma: bool = False
    max_spills: int = 0


# By the kernel's name. A kernel that is not here may not be launched.
EXPECTED = {
    "_rms_norm": Expected(num_wide_loads=2),  # the row and the weight
    "_rope": Expected(num_wide_loads=4),  # both halves of queries, and of keys
    "_swiglu": Expected(num_wide_loads=2),  # gate and up
    "_write_kv": Expected(num_wide_loads=1),
    "decode_split": Expected(num_wide_loads=4, wants_mma=True),
    "decode_reduce": Expected(),
    "prefill": Expected(num_wide_loads=2, wants_mma=True),
    "_int8_linear": Expected(num_wide_loads=3, wants_mma=True),  # on sm_90 the activations only: codes come in 8 bytes
    "_int4_linear": Expected(num_wide_loads=6, wants_mma=True),
    "_add_splits": Expected(num_wide_loads=1),
}


class Model(NamedTuple):
    """Sizes by which a launch is compiled."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


SMOL = Model(num_heads=9, num_kv_heads=3, head_dim=64, hidden=576, intermediate=1536)
LLAMA = Model(num_heads=32, num_kv_heads=8, head_dim=128, hidden=4096, intermediate=14336)
NUM_TOKENS = 4


def _norm(model: Model, with_residual: bool) -> None:
    x = torch.zeros(NUM_TOKENS, model.hidden, dtype=BF16)
    rms_norm(x, x[0], 1e-5, x.clone() if with_residual else None)


def _fused(model: Model) -> Tensor:
    """Queries, keys and values of a step, as they come out of one product. [T, H + 2 K, D]"""
    return torch.zeros(NUM_TOKENS, model.num_heads + 2 * model.num_kv_heads, model.head_dim, dtype=BF16)


def _rope(model: Model) -> None:
    q, k, _ = _fused(model).split((model.num_heads, model.num_kv_heads, model.num_kv_heads), dim=1)
    rope(q, k, *torch.zeros(2, NUM_TOKENS, model.head_dim // 2), in_place=True)


def _swiglu(model: Model) -> None:
    swiglu(torch.zeros(NUM_TOKENS, 2 * model.intermediate, dtype=BF16))


def _write_kv(model: Model, format: str) -> None:
    kv = _fused(model)[:, model.num_heads :].unflatten(1, (2, model.num_kv_heads))
    write_kv(kv, torch.arange(NUM_TOKENS), empty_cache(format, model.head_dim, model.num_kv_heads))


def _decode(model: Model, format: str, num_splits: int) -> None:
    q = torch.zeros(NUM_TOKENS, model.num_heads, model.head_dim, dtype=BF16)
    tables, lengths = torch.zeros(NUM_TOKENS, 16, dtype=torch.int32), torch.zeros(NUM_TOKENS, dtype=torch.int32)
    cache = empty_cache(format, model.head_dim, model.num_kv_heads)
    decode_attention(q, cache, tables, lengths, model.head_dim**-0.5, num_splits=num_splits)


def _prefill(model: Model, format: str) -> None:
    q = torch.zeros(NUM_TOKENS, model.num_heads, model.head_dim, dtype=BF16)
    tables, lengths = torch.zeros(1, 16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    cache = empty_cache(format, model.head_dim, model.num_kv_heads)
    prefill_attention(q, cache, tables, torch.zeros(2, dtype=torch.int32), lengths, model.head_dim**-0.5)


def _int8_linear(model: Model, num_tokens: int) -> None:
    codes = torch.zeros(model.hidden, model.intermediate, dtype=torch.int8)
    int8_linear(torch.zeros(num_tokens, model.intermediate, dtype=BF16), codes, torch.zeros(model.hidden, dtype=torch.float16))


def _int4_linear(model: Model, num_tokens: int) -> None:
    codes = torch.zeros(model.hidden, model.intermediate // 2, dtype=torch.uint8)
    scales = outputs_together(torch.zeros(model.hidden, model.intermediate // 128, dtype=torch.float16))
    int4_linear(torch.zeros(num_tokens, model.intermediate, dtype=BF16), codes, scales, scales, 128)


CASES: dict[str, Callable[[], object]] = {
    "norm/bf16/smol": partial(_norm, SMOL, with_residual=True),
    "norm/bf16/llama": partial(_norm, LLAMA, with_residual=False),
    "rope/bf16/smol": partial(_rope, SMOL),
    "rope/bf16/llama": partial(_rope, LLAMA),
    "rope/bf16/head80": partial(_rope, LLAMA._replace(head_dim=80)),
    "swiglu/bf16/smol": partial(_swiglu, SMOL),
    "write_kv/bf16/smol": partial(_write_kv, SMOL, "bf16"),
    "write_kv/fp8/smol": partial(_write_kv, SMOL, "fp8"),
    "write_kv/int8/smol": partial(_write_kv, SMOL, "int8"),
    "write_kv/int4/llama": partial(_write_kv, LLAMA, "int4"),
    "decode/bf16/smol": partial(_decode, SMOL, "bf16", num_splits=1),
    "decode/bf16/llama": partial(_decode, LLAMA, "bf16", num_splits=3),
    "decode/bf16/head80": partial(_decode, LLAMA._replace(head_dim=80), "bf16", num_splits=1),
    "decode/fp8/llama": partial(_decode, LLAMA, "fp8", num_splits=3),
    "decode/int8/llama": partial(_decode, LLAMA, "int8", num_splits=3),
    "decode/int4/llama": partial(_decode, LLAMA, "int4", num_splits=3),
    "prefill/bf16/llama": partial(_prefill, LLAMA, "bf16"),
    "prefill/int8/smol": partial(_prefill, SMOL, "int8"),
    "prefill/int4/llama": partial(_prefill, LLAMA, "int4"),
    "int8_linear/bf16/llama": partial(_int8_linear, LLAMA, NUM_TOKENS),
    "int8_linear/bf16/llama-prompt": partial(_int8_linear, LLAMA, 256),
    "int4_linear/bf16/llama": partial(_int4_linear, LLAMA, NUM_TOKENS),
    "int4_linear/bf16/llama-prompt": partial(_int4_linear, LLAMA, 256),
}
