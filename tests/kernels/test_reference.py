"""The references, against torch's own operations and plain arithmetic: what everything else is held against."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minserve_kernels import reference
from minserve_kernels.kv import PagedKV, decode, encode
from minserve_kernels.weights import pack_int4
from tests.kernels.helpers import poisoned_cache

DOUBLE = torch.float64


def paged(format: str, lengths: list[int], num_kv_heads: int = 2, head_dim: int = 32) -> tuple[PagedKV, Tensor, list[Tensor]]:
    """A cache, block tables in no order, and each request's numbers [length, 2, K, D] as the format has them."""
    cache = poisoned_cache(format, head_dim, num_kv_heads, num_blocks=9)
    free = [7, 2, 5, 0, 8, 1, 4, 6, 3]
    tables, numbers = torch.zeros(len(lengths), 4, dtype=torch.int32), []
    for b, length in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(-(-length // 16))])
        tables[b, : len(blocks)] = blocks
        kv, tokens = torch.randn(length, 2, num_kv_heads, head_dim), torch.arange(length)
        reference.write_kv(kv, blocks[tokens // 16] * 16 + tokens % 16, cache)
        numbers.append(decode(*encode(kv, format), format, DOUBLE))
    return cache, tables, numbers


def dense(q: Tensor, kv: Tensor, scale: float, window: int | None = None) -> Tensor:
    """By torch: q [n, H, D], the last n tokens; kv [length, 2, K, D] -> [n, H, D]"""
    n, length = len(q), len(kv)
    keys, values = kv.permute(1, 2, 0, 3)
    sees = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    if window is not None:
        sees &= ~torch.ones(n, length, dtype=torch.bool).tril(length - n - window)
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], attn_mask=sees, scale=scale, enable_gqa=True)[
        0
    ].transpose(0, 1)


def test_rms_norm() -> None:
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.rand(40)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5)[0], torch.rms_norm(x, (40,), weight, 1e-5))
    y, total = reference.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, torch.rms_norm(x + residual, (40,), weight, 1e-5))


def test_rope_turns_pairs_half_a_head_apart() -> None:
    q, k, angle = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.rand(3, 8) * 6
    for x, got in zip((q, k), reference.rope(q, k, angle.cos(), angle.sin()), strict=True):
        turned = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones(3, 8), angle)[:, None]
        torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), dim=-1))


def test_rope_in_place_gives_the_same_tensors() -> None:
    q, k, angle = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.rand(3, 8)
    wanted = reference.rope(q, k, angle.cos(), angle.sin())
    got = reference.rope(q, k, angle.cos(), angle.sin(), in_place=True)
    assert got[0] is q and got[1] is k and torch.equal(q, wanted[0]) and torch.equal(k, wanted[1])


def test_swiglu() -> None:
    gate, up = torch.randn(2, 3, 10)
    torch.testing.assert_close(reference.swiglu(torch.cat((gate, up), dim=1)), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("format", ["fp32", "fp8", "int8", "int4"])
def test_write_and_gather_find_each_other(format: str) -> None:
    cache, tables, numbers = paged(format, [33, 16, 7])
    for b, kv in enumerate(numbers):
        keys, values = reference.gather(cache, tables[b], len(kv), DOUBLE)
        assert torch.equal(torch.stack((keys, values)), kv.permute(1, 2, 0, 3))


def test_negative_slots_are_padding() -> None:
    cache = poisoned_cache("fp32", 32, 2)
    reference.write_kv(torch.ones(3, 2, 2, 32), torch.tensor([-1, 20, -1]), cache)
    assert (cache.codes == 1).nonzero()[:, [0, 3]].unique(dim=0).tolist() == [[1, 4]]
    assert cache.codes.isnan().sum() == cache.codes.numel() - 2 * 2 * 32


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8", "int8", "int4"])
def test_attention(format: str, window: int | None) -> None:
    torch.manual_seed(0)
    lengths, num_queries = [33, 16, 7], [5, 16, 1]
    cache, tables, numbers = paged(format, lengths)
    q = torch.randn(sum(num_queries), 6, 32, dtype=DOUBLE)
    starts = torch.tensor([0, 5, 21, 22])
    got = reference.prefill_attention(q, cache, tables, starts, torch.tensor(lengths), 0.2, window)
    parts = q.split(num_queries)
    wanted = torch.cat([dense(part, kv, 0.2, window) for part, kv in zip(parts, numbers, strict=True)])
    torch.testing.assert_close(got, wanted)
    last = q[starts[1:] - 1]  # the last query of each request is what a decode would ask
    torch.testing.assert_close(reference.decode_attention(last, cache, tables, torch.tensor(lengths), 0.2, window), wanted[starts[1:] - 1])


def test_padding_is_answered_with_zeros() -> None:
    cache, tables, numbers = paged("fp32", [20])
    q = torch.randn(2, 4, 32)
    got = reference.decode_attention(q, cache, tables[[0, 0]], torch.tensor([0, 20]), 0.2)
    assert got[0].abs().max() == 0
    torch.testing.assert_close(got[1:], dense(q[1:].double(), numbers[0], 0.2).float())


def test_rounded_once_at_the_end() -> None:
    cache, tables, _ = paged("bf16", [40])
    q = torch.randn(1, 4, 32).bfloat16()
    arguments = (cache, tables, torch.tensor([40]), 0.2)
    got, exact = reference.decode_attention(q, *arguments), reference.decode_attention(q.double(), *arguments)
    assert got.dtype == torch.bfloat16 and torch.equal(got, exact.bfloat16())


def test_linear_of_8_bits() -> None:
    x, codes, scales = torch.randn(3, 32), torch.randint(-127, 128, (5, 32), dtype=torch.int8), torch.rand(5)
    torch.testing.assert_close(reference.int8_linear(x, codes, scales), F.linear(x, codes * scales[:, None]))


def test_linear_of_4_bits() -> None:
    x, codes = torch.randn(3, 64), torch.randint(16, (5, 64), dtype=torch.uint8)
    scales, zeros = torch.rand(5, 2), torch.rand(5, 2) * 15
    weight = (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    torch.testing.assert_close(reference.int4_linear(x, pack_int4(codes, 32), scales, zeros, 32), F.linear(x, weight))


def test_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import minserve_kernels.kv, minserve_kernels.reference; import minserve_kernels.norm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "norm.py" in done.stderr and last.startswith("ModuleNotFoundError: import of triton")
