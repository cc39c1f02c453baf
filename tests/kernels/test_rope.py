"""RoPE as a kernel, against its reference, for all head sizes, apart and in place."""

import pytest
import torch
from torch import Tensor

from minserve_kernels import reference
from minserve_kernels.interpret import interpreted
from minserve_kernels.memtrace import trace, traffic
from minserve_kernels.rope import rope
from tests.kernels.helpers import assert_one_rounding_apart

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def fused(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as they come out of one product, side by side in memory; the values are NaN."""
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    heads[:, num_heads + num_kv_heads :] = torch.nan
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def angles(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(num_tokens, head_dim // 2) * 100
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads"), [(64, 9, 3), (80, 2, 1), (96, 4, 4), (128, 20, 17)])
def test_equals_the_reference(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = fused(3, num_heads, num_kv_heads, head_dim, dtype)
    turn = angles(3, head_dim)
    wanted, before = reference.rope(q, k, *turn), (q.clone(), k.clone())
    with trace(), interpreted():
        got = rope(q, k, *turn)
    for result, should_be, x, untouched in zip(got, wanted, (q, k), before, strict=True):
        assert_one_rounding_apart(result, should_be)
        assert result.is_contiguous() and torch.equal(x, untouched)
    with trace(), interpreted():
        same = rope(q, k, *turn, in_place=True)
    assert same[0] is q and same[1] is k and v.isnan().all()
    for result, first in zip(same, got, strict=True):
        assert torch.equal(result, first)


def test_every_byte_once_and_the_angles_once_a_program() -> None:
    q, k = torch.randn(4, 20, 64).bfloat16(), torch.randn(4, 4, 64).bfloat16()
    with trace() as accesses, interpreted():
        rope(q, k, *angles(4, 64))
    moved = {key: (found.num_bytes, found.times_read, found.sector_use) for key, found in traffic(accesses).items()}
    q_bytes, k_bytes, angle_bytes = 4 * 20 * 64 * 2, 4 * 4 * 64 * 2, 4 * 32 * 4
    assert moved == {
        ("q", "load"): (q_bytes, 1.0, 1.0),
        ("k", "load"): (k_bytes, 1.0, 1.0),
        ("new_q", "store"): (q_bytes, 1.0, 1.0),
        ("new_k", "store"): (k_bytes, 1.0, 1.0),
        ("cos", "load"): (3 * angle_bytes, 3.0, 1.0),  # 16 and 4 query heads, 4 KV heads
        ("sin", "load"): (3 * angle_bytes, 3.0, 1.0),
    }


def test_tokens_without_room_between_their_numbers_only() -> None:
    q, k, _ = fused(2, 4, 2, 64, torch.float32)
    with pytest.raises(AssertionError, match="64"):
        rope(q.transpose(1, 2), k, *angles(2, 64))
