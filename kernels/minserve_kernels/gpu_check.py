"""Every kernel on a real card, held against its reference in float64, on random data.

Why: the interpreter knows no warps, no approximate exp2 and no rounding of a matrix unit; a card does. What
could be read by mistake is poisoned: slots that no token was written to are NaN, blocks that no table names
too, and so is the memory that answers are written into.

Invariant: a check looks at every number that a kernel returns: one NaN, or one row too far off, and it fails.

Taught in notebook 05. Used by `minserve bench --gpu`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minserve_kernels import reference
from minserve_kernels.activation import swiglu
from minserve_kernels.decode_attention import decode_attention
from minserve_kernels.kv import CODES, NUM_SCALES, PagedKV, decode, encode, num_codes
from minserve_kernels.kv_write import write_kv
from minserve_kernels.norm import rms_norm
from minserve_kernels.prefill_attention import prefill_attention
from minserve_kernels.quant_gemm import int4_linear, int8_linear
from minserve_kernels.rope import rope
from minserve_kernels.weights import pack_int4

FP8_NAN = 0x7F
FORMATS = ("bf16", "fp8", "int8", "int4")
# Relative error of a whole result in bf16: rounding it once is 0.0015, rounding attention's weights as much.
MOST_ERROR = 6e-3


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Sizes(NamedTuple):
    """How large the checked problems are."""

    heads: tuple[Heads, ...]
    lengths: tuple[int, ...]  # of the requests
    widths: tuple[int, ...]  # of rows
    products: tuple[tuple[int, int, int], ...]  # rows, outputs, inputs


ON_A_CARD = Sizes(
    heads=(Heads(9, 3, 64), Heads(32, 8, 128), Heads(8, 8, 80), Heads(16, 1, 96)),
    lengths=(1, 16, 17, 300, 1025, 4000),
    widths=(576, 4096),
    products=((1, 576, 1536), (16, 4096, 4096), (33, 1000, 1024), (300, 1536, 4096)),
)

Check = Callable[
    [], float
]  # -> relative error against float64: right if it is at most MOST_ERROR, so never if it is NaN


def make_checks(
    device: torch.device, sizes: Sizes = ON_A_CARD, formats: Sequence[str] = FORMATS
) -> dict[str, Check]:
    """All checks by name. Each makes its own data when it is called."""
    checks: dict[str, Check] = {}
    for width in sizes.widths:
        checks[f"rms_norm {width}"] = partial(check_norm, width, device)
        checks[f"swiglu {width}"] = partial(check_swiglu, width, device)
    for rows, outputs, inputs in sizes.products:
        checks[f"int8_linear {rows} x {inputs} x {outputs}"] = partial(
            check_int8, rows, outputs, inputs, device
        )
        for group_size in (32, 64, 128):
            if inputs % group_size == 0:
                name = f"int4_linear {rows} x {inputs} x {outputs}, groups of {group_size}"
                checks[name] = partial(check_int4, rows, outputs, inputs, group_size, device)
    for heads in sizes.heads:
        shape = f"{heads.num_heads}/{heads.num_kv_heads} heads, D {heads.head_dim}"
        checks[f"rope {shape}"] = partial(check_rope, heads, device)
        for format in formats:
            checks[f"write_kv {format}, {shape}"] = partial(check_write, heads, sizes.lengths, format, device)
            for window in (None, 100) if heads == sizes.heads[0] else (None,):
                which = f"{format}, {shape}" + (f", window {window}" if window else "")
                arguments = (heads, sizes.lengths, format, window, device)
                checks[f"decode_attention {which}"] = partial(check_decode, *arguments)
                checks[f"prefill_attention {which}"] = partial(check_prefill, *arguments)
    return checks


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Of the worst row: of a token, or of a request. NaN if anything in it is NaN."""
    got, exact = got.double().flatten(1), exact.double().flatten(1)
    return float(((got - exact).norm(dim=1) / exact.norm(dim=1)).max())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """In here, torch.empty gives NaN: what a kernel forgets to write can be seen."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills all fresh memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _randn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


# --- pointwise kernels and products ---------------------------------------------------------------


def check_norm(width: int, device: torch.device) -> float:
    x, residual, weight = (_randn(*shape, device=device) for shape in ((7, width), (7, width), (width,)))
    exact, _ = reference.rms_norm((x + residual).double(), weight.double(), 1e-5)
    with poisoned_memory():
        y, total = rms_norm(x, weight, 1e-5, residual)
    return max(relative_error(y, exact), relative_error(total, x + residual))


def check_swiglu(width: int, device: torch.device) -> float:
    gate_up = _randn(7, 2 * width, device=device)
    with poisoned_memory():
        got = swiglu(gate_up)
    return relative_error(got, reference.swiglu(gate_up.double()))


def check_rope(heads: Heads, device: torch.device) -> float:
    q = _randn(7, heads.num_heads, heads.head_dim, device=device)
    k = _randn(7, heads.num_kv_heads, heads.head_dim, device=device)
    angles = torch.rand(7, heads.head_dim // 2, device=device) * 6.0
    exact = reference.rope(q.double(), k.double(), angles.cos(), angles.sin())
    with poisoned_memory():
        got = rope(q, k, angles.cos(), angles.sin())
    return max(relative_error(got[0], exact[0]), relative_error(got[1], exact[1]))


def check_int8(rows: int, outputs: int, inputs: int, device: torch.device) -> float:
    x = _randn(rows, inputs, device=device)
    codes = torch.randint(-127, 128, (outputs, inputs), device=device).to(torch.int8)
    scales = 0.01 + torch.rand(outputs, device=device)
    with poisoned_memory():
        got = int8_linear(x, codes, scales)
    return relative_error(got, reference.int8_linear(x.double(), codes, scales))


def check_int4(rows: int, outputs: int, inputs: int, group_size: int, device: torch.device) -> float:
    x, shape = _randn(rows, inputs, device=device), (outputs, inputs // group_size)
    codes = pack_int4(torch.randint(0, 16, (outputs, inputs), device=device).to(torch.uint8), group_size)
    scales = (0.01 + torch.rand(shape, device=device)).half()
    weight = (codes, scales, torch.randint(0, 16, shape, device=device).half(), group_size)
    with poisoned_memory():
        got = int4_linear(x, *weight)
    return relative_error(got, reference.int4_linear(x.double(), *weight))


# --- kernels on the cache -------------------------------------------------------------------------


class Filled(NamedTuple):
    """A cache of some requests' random keys and values, NaN in all other places."""

    cache: PagedKV
    tables: Tensor  # [B, M] int32, filled up with a poisoned block
    lengths: Tensor  # [B] int32
    kv: Tensor  # [T, 2, K, D] what was stored, all requests behind each other
    slots: Tensor  # [T] and where


def poisoned_cache(
    heads: Heads, num_blocks: int, format: str, device: torch.device, num_slots: int = 16
) -> PagedKV:
    """Whoever reads a slot that was not written gets NaN: integers cannot be NaN, but their scales can."""
    shape = (num_blocks, 2, heads.num_kv_heads, num_slots)
    codes = torch.zeros(*shape, num_codes(heads.head_dim, format), device=device, dtype=CODES[format])
    if format in NUM_SCALES:
        scales = torch.full((*shape, NUM_SCALES[format]), torch.nan, device=device, dtype=torch.float16)
        return PagedKV(codes, scales, heads.head_dim, format)
    if format == "fp8":
        codes.view(torch.uint8).fill_(FP8_NAN)
    else:
        codes.fill_(torch.nan)
    return PagedKV(codes, None, heads.head_dim, format)


def fill(
    heads: Heads, lengths: Sequence[int], format: str, device: torch.device, store: bool = True
) -> Filled:
    """Requests of these lengths, in blocks that lie about at random."""
    num_slots = 16
    needs = [-(-length // num_slots) for length in lengths]
    order = torch.randperm(sum(needs), device=device).int()  # block sum(needs) is nobody's
    tables = torch.full((len(lengths), max(needs) + 1), sum(needs), dtype=torch.int32, device=device)
    slots: list[Tensor] = []
    for i, blocks in enumerate(order.split(needs)):
        tables[i, : len(blocks)] = blocks
        slots.append(
            (blocks[:, None] * num_slots + torch.arange(num_slots, device=device)).flatten()[: lengths[i]]
        )
    cache = poisoned_cache(heads, sum(needs) + 1, format, device)
    kv = _randn(sum(lengths), 2, heads.num_kv_heads, heads.head_dim, device=device)
    filled = Filled(
        cache, tables, torch.tensor(lengths, dtype=torch.int32, device=device), kv, torch.cat(slots)
    )
    if store:
        reference.write_kv(kv, filled.slots, cache)
    return filled


def check_write(heads: Heads, lengths: Sequence[int], format: str, device: torch.device) -> float:
    """The values that are stored, against `kv.encode`'s; infinite if a slot changed that nobody wrote to."""
    cache, _, _, kv, slots = fill(heads, lengths, format, device, store=False)
    write_kv(kv, slots, cache)
    stored = (
        decode(cache.codes, cache.scales, format, torch.float64).permute(0, 3, 1, 2, 4).flatten(0, 1)
    )  # [N * S, ...]
    written = torch.zeros(len(stored), dtype=torch.bool, device=device).index_fill_(0, slots.long(), True)
    if not stored[~written].isnan().all():
        return float("inf")
    exact = decode(
        *encode(kv, format), format, torch.float64
    )  # as a whole: one code in a thousand may round the other way
    return relative_error(stored[slots.long()].flatten()[None], exact.flatten()[None])


def check_decode(
    heads: Heads, lengths: Sequence[int], format: str, window: int | None, device: torch.device
) -> float:
    cache, tables, sizes, _, _ = fill(heads, lengths, format, device)
    q = _randn(len(lengths), heads.num_heads, heads.head_dim, device=device)
    arguments = (cache, tables, sizes, heads.head_dim**-0.5, window)
    with poisoned_memory():
        got = decode_attention(q, *arguments)
    return relative_error(got, reference.decode_attention(q.double(), *arguments))


def check_prefill(
    heads: Heads, lengths: Sequence[int], format: str, window: int | None, device: torch.device
) -> float:
    """Chunks of a third of their request, so that there is history before them."""
    cache, tables, sizes, _, _ = fill(heads, lengths, format, device)
    starts = torch.tensor([0, *(-(-length // 3) for length in lengths)], device=device).cumsum(0).int()
    q = _randn(int(starts[-1]), heads.num_heads, heads.head_dim, device=device)
    arguments = (cache, tables, starts, sizes, heads.head_dim**-0.5, window)
    with poisoned_memory():
        got = prefill_attention(q, *arguments)
    return relative_error(got, reference.prefill_attention(q.double(), *arguments))
