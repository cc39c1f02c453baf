"""What is timed on a card: kernels at the sizes of real serving, and torch's own ways to the same answers.

Why: a time alone says little. Beside each work stand the bytes that it must move (each once) or its FLOPs, so
that a time becomes a share of what the card can do. And beside our kernels stand the ways that need none:
attention over keys that lie together as if there were no blocks, and over keys that were gathered first.

A work makes its tensors anew whenever it is asked, so that a clock can use several in turn and none is found
in the L2 cache. Tensors hold random numbers: zeros draw less power, and a card that draws less runs faster.

Invariant: the bytes of a work are those that any program for it has to move; nothing is read twice on paper.

Taught in notebook 05. Used by `minserve bench --gpu`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minserve_kernels.activation import swiglu
from minserve_kernels.decode_attention import decode_attention
from minserve_kernels.gpu_check import Heads
from minserve_kernels.gpu_clock import Launch, Way, Work
from minserve_kernels.kv import CODES, NUM_SCALES, PagedKV, bytes_per_head, num_codes
from minserve_kernels.kv_write import write_kv
from minserve_kernels.norm import rms_norm
from minserve_kernels.prefill_attention import prefill_attention
from minserve_kernels.quant_gemm import int4_linear, int8_linear
from minserve_kernels.rope import rope
from minserve_kernels.weights import outputs_together, weight_bytes

BF16_BYTES = 2
NUM_SLOTS = 16
# Not among them: the plain math that torch falls back to, which takes memory in squares.
SDPA_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def _randn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


# --- ceilings -------------------------------------------------------------------------------------


def copy(num_bytes: int, device: torch.device) -> Work:
    """A copy reads and writes: it moves twice its size."""

    def make() -> Launch:
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Work((make,), 2 * num_bytes)


def matmul(size: int, device: torch.device) -> Work:
    def make() -> Launch:
        a, b = _randn(size, size, device=device), _randn(size, size, device=device)
        return lambda: a @ b

    return Work((make,), 3 * size * size * BF16_BYTES, 2 * size**3)


# --- attention ------------------------------------------------------------------------------------


def random_cache(heads: Heads, num_blocks: int, format: str, device: torch.device) -> PagedKV:
    shape = (num_blocks, 2, heads.num_kv_heads, NUM_SLOTS)
    code_shape = (*shape, num_codes(heads.head_dim, format))
    if format in NUM_SCALES:
        codes = torch.empty(code_shape, dtype=torch.uint8, device=device).random_().view(CODES[format])
        scales = 0.01 + 0.01 * torch.rand(*shape, NUM_SCALES[format], device=device)
        return PagedKV(codes, scales.half(), heads.head_dim, format)
    codes = _randn(*code_shape, device=device).to(CODES[format])
    return PagedKV(codes, None, heads.head_dim, format)


def random_tables(batch: int, context: int, device: torch.device) -> Tensor:
    """Block tables of a pool in which the blocks of all requests lie mixed. -> [B, M] int32"""
    blocks_each = -(-context // NUM_SLOTS)
    return torch.randperm(batch * blocks_each, device=device).int().view(batch, blocks_each)


def attention_bytes(heads: Heads, batch: int, context: int, num_queries: int, format: str) -> int:
    """Keys and values once, scales with them, queries and answers in bf16."""
    kv_bytes = 2 * heads.num_kv_heads * bytes_per_head(heads.head_dim, format) * batch * context
    return kv_bytes + 2 * batch * num_queries * heads.num_heads * heads.head_dim * BF16_BYTES


def causal_flops(heads: Heads, num_tokens: int) -> int:
    """Of scores and of weighted values, for each query and key that it sees."""
    return 4 * heads.num_heads * heads.head_dim * num_tokens * (num_tokens + 1) // 2


def paged_decode(heads: Heads, batch: int, context: int, format: str, device: torch.device) -> Work:
    def make() -> Launch:
        tables = random_tables(batch, context, device)
        cache = random_cache(heads, tables.numel(), format, device)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        q = _randn(batch, heads.num_heads, heads.head_dim, device=device)
        return lambda: decode_attention(q, cache, tables, lengths, heads.head_dim**-0.5)

    return Work((make,), attention_bytes(heads, batch, context, 1, format))


def contiguous_decode(heads: Heads, batch: int, context: int, device: torch.device) -> Work:
    """torch's attention over keys and values that lie together, as if there were no blocks."""

    def fetched() -> Fetched:
        shape = (batch, heads.num_kv_heads, context, heads.head_dim)
        keys, values = _randn(*shape, device=device), _randn(*shape, device=device)
        return lambda: (keys, values)

    return Work(_sdpa_ways(heads, batch, fetched, device), attention_bytes(heads, batch, context, 1, "bf16"))


def gathered_decode(heads: Heads, batch: int, context: int, device: torch.device) -> Work:
    """Gather the blocks of all requests, then torch's attention: it reads, writes, and reads again."""

    def fetched() -> Fetched:
        tables = random_tables(batch, context, device)
        cache = random_cache(heads, tables.numel(), "bf16", device)
        rows = cache.codes.view(-1, NUM_SLOTS * heads.head_dim)  # a row is a block of one head
        kv_heads = torch.arange(heads.num_kv_heads, device=device)[:, None]
        keys_at = (tables[:, None].long() * (2 * heads.num_kv_heads) + kv_heads).flatten()  # [B * K * M]
        values_at = keys_at + heads.num_kv_heads
        shape = (batch, heads.num_kv_heads, context, heads.head_dim)
        return lambda: (
            rows.index_select(0, keys_at).view(shape),
            rows.index_select(0, values_at).view(shape),
        )

    return Work(_sdpa_ways(heads, batch, fetched, device), attention_bytes(heads, batch, context, 1, "bf16"))


Fetched = Callable[[], tuple[Tensor, Tensor]]  # -> keys, values: [B, K, context, D] each


def _sdpa_ways(
    heads: Heads, batch: int, fetched: Callable[[], Fetched], device: torch.device
) -> tuple[Way, ...]:
    """One query a request by every backend, the query heads of a KV head as heads or as so many queries."""

    def way(backend: SDPBackend, is_folded: bool) -> Launch:
        fetch = fetched()
        q = _randn(batch, heads.num_heads, 1, heads.head_dim, device=device)
        q = q.view(batch, heads.num_kv_heads, -1, heads.head_dim) if is_folded else q

        def launch() -> Tensor:
            keys, values = fetch()
            with _by(backend, device):
                return F.scaled_dot_product_attention(q, keys, values, enable_gqa=not is_folded)

        return launch

    return tuple(partial(way, backend, is_folded) for backend in SDPA_BACKENDS for is_folded in (False, True))


def _by(backend: SDPBackend, device: torch.device) -> AbstractContextManager[object]:
    """That backend of torch's attention and no other; a CPU has none of them."""
    return sdpa_kernel(backend) if device.type == "cuda" else nullcontext()


def paged_prefill(heads: Heads, num_tokens: int, device: torch.device) -> Work:
    def make() -> Launch:
        tables = random_tables(1, num_tokens, device)
        cache = random_cache(heads, tables.numel(), "bf16", device)
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        lengths = starts[1:].clone()
        q = _randn(num_tokens, heads.num_heads, heads.head_dim, device=device)
        return lambda: prefill_attention(q, cache, tables, starts, lengths, heads.head_dim**-0.5)

    return Work(
        (make,), attention_bytes(heads, 1, num_tokens, num_tokens, "bf16"), causal_flops(heads, num_tokens)
    )


def contiguous_prefill(heads: Heads, num_tokens: int, device: torch.device) -> Work:
    def make() -> Launch:
        q = _randn(1, heads.num_heads, num_tokens, heads.head_dim, device=device)
        k, v = (_randn(1, heads.num_kv_heads, num_tokens, heads.head_dim, device=device) for _ in range(2))

        def launch() -> Tensor:
            with _by(SDPBackend.FLASH_ATTENTION, device):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return launch

    return Work(
        (make,), attention_bytes(heads, 1, num_tokens, num_tokens, "bf16"), causal_flops(heads, num_tokens)
    )


# --- pointwise ------------------------------------------------------------------------------------


def norm(num_tokens: int, width: int, device: torch.device) -> Work:
    """With a residual: two are read, two are written, and the weight."""

    def make() -> Launch:
        x, residual, weight = (
            _randn(*shape, device=device) for shape in ((num_tokens, width), (num_tokens, width), (width,))
        )
        return lambda: rms_norm(x, weight, 1e-5, residual)

    return Work((make,), (4 * num_tokens + 1) * width * BF16_BYTES)


def activation(num_tokens: int, width: int, device: torch.device) -> Work:
    def make() -> Launch:
        gate_up = _randn(num_tokens, 2 * width, device=device)
        return lambda: swiglu(gate_up)

    return Work((make,), 3 * num_tokens * width * BF16_BYTES)


def rotation(heads: Heads, num_tokens: int, device: torch.device) -> Work:
    """In place: queries and keys are read and written; a token's sines and cosines are float32."""

    def make() -> Launch:
        q, k = (
            _randn(num_tokens, n, heads.head_dim, device=device)
            for n in (heads.num_heads, heads.num_kv_heads)
        )
        angles = torch.rand(num_tokens, heads.head_dim // 2, device=device)
        cos, sin = angles.cos(), angles.sin()
        return lambda: rope(q, k, cos, sin, in_place=True)

    numbers = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    return Work((make,), num_tokens * (2 * numbers * BF16_BYTES + 4 * heads.head_dim))


def kv_write(heads: Heads, num_tokens: int, format: str, device: torch.device) -> Work:
    """Every token into a slot of its own; slot ids are read too."""

    def make() -> Launch:
        num_blocks = -(-num_tokens // NUM_SLOTS)
        cache = random_cache(heads, num_blocks, format, device)
        kv = _randn(num_tokens, 2, heads.num_kv_heads, heads.head_dim, device=device)
        slots = torch.randperm(num_blocks * NUM_SLOTS, device=device)[:num_tokens].int()
        return lambda: write_kv(kv, slots, cache)

    head_bytes = heads.head_dim * BF16_BYTES + bytes_per_head(heads.head_dim, format)
    return Work((make,), num_tokens * (2 * heads.num_kv_heads * head_bytes + 4))


# --- products with weights ------------------------------------------------------------------------


def product_bytes(num_rows: int, num_outputs: int, num_inputs: int, num_weight_bytes: int) -> int:
    return num_weight_bytes + num_rows * (num_inputs + num_outputs) * BF16_BYTES


def bf16_product(num_rows: int, num_outputs: int, num_inputs: int, device: torch.device) -> Work:
    def make() -> Launch:
        x, weight = (
            _randn(num_rows, num_inputs, device=device),
            _randn(num_outputs, num_inputs, device=device),
        )
        return lambda: F.linear(x, weight)

    num_bytes = product_bytes(num_rows, num_outputs, num_inputs, num_outputs * num_inputs * BF16_BYTES)
    return Work((make,), num_bytes, 2 * num_rows * num_outputs * num_inputs)


def int8_product(num_rows: int, num_outputs: int, num_inputs: int, device: torch.device) -> Work:
    def make() -> Launch:
        x = _randn(num_rows, num_inputs, device=device)
        codes = (
            torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=device).random_().view(torch.int8)
        )
        scales = 0.01 + torch.rand(num_outputs, device=device).half()
        return lambda: int8_linear(x, codes, scales)

    num_bytes = product_bytes(num_rows, num_outputs, num_inputs, weight_bytes(num_outputs, num_inputs))
    return Work((make,), num_bytes, 2 * num_rows * num_outputs * num_inputs)


def int4_product(
    num_rows: int, num_outputs: int, num_inputs: int, device: torch.device, group_size: int = 128
) -> Work:
    def make() -> Launch:
        x = _randn(num_rows, num_inputs, device=device)
        codes = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device=device).random_()
        shape = (num_outputs, num_inputs // group_size)
        scales = outputs_together(0.01 + torch.rand(shape, device=device).half())
        zeros = outputs_together(torch.randint(0, 16, shape, device=device).half())
        return lambda: int4_linear(x, codes, scales, zeros, group_size)

    num_bytes = product_bytes(
        num_rows, num_outputs, num_inputs, weight_bytes(num_outputs, num_inputs, group_size)
    )
    return Work((make,), num_bytes, 2 * num_rows * num_outputs * num_inputs)


# --- all of it ------------------------------------------------------------------------------------

LLAMA, SMOL = Heads(32, 8, 128), Heads(9, 3, 64)


def make_works(device: torch.device) -> dict[str, Work]:
    """By the names that the table of `minserve bench --gpu` uses. Nothing is allocated yet."""
    return {
        "copy": copy(1 << 30, device),
        "matmul": matmul(8192, device),
        "decode bf16 64 x 4k": paged_decode(LLAMA, 64, 4096, "bf16", device),
        "decode bf16 16 x 16k": paged_decode(LLAMA, 16, 16384, "bf16", device),
        "decode bf16 8 x 4k": paged_decode(LLAMA, 8, 4096, "bf16", device),
        "decode bf16 1 x 4k": paged_decode(LLAMA, 1, 4096, "bf16", device),
        "decode bf16 smol 256 x 2k": paged_decode(SMOL, 256, 2048, "bf16", device),
        "decode int8 64 x 4k": paged_decode(LLAMA, 64, 4096, "int8", device),
        "decode fp8 64 x 4k": paged_decode(LLAMA, 64, 4096, "fp8", device),
        "decode int4 64 x 4k": paged_decode(LLAMA, 64, 4096, "int4", device),
        "contiguous 64 x 4k": contiguous_decode(LLAMA, 64, 4096, device),
        "gathered 64 x 4k": gathered_decode(LLAMA, 64, 4096, device),
        "prefill 8k": paged_prefill(LLAMA, 8192, device),
        "contiguous prefill 8k": contiguous_prefill(LLAMA, 8192, device),
        "norm": norm(32768, 4096, device),
        "swiglu": activation(8192, 14336, device),
        "rope": rotation(LLAMA, 16384, device),
        "write bf16": kv_write(LLAMA, 65536, "bf16", device),
        "int4 1 row": int4_product(1, 14336, 4096, device),
        "int4 16 rows": int4_product(16, 14336, 4096, device),
        "int8 16 rows": int8_product(16, 14336, 4096, device),
        "cublas 16 rows": bf16_product(16, 14336, 4096, device),
    }
