"""RMSNorm as a kernel, against its reference, on rows that lie anywhere."""

import pytest
import torch

from minserve_kernels import reference
from minserve_kernels.interpret import interpreted
from minserve_kernels.memtrace import trace, traffic
from minserve_kernels.norm import rms_norm
from tests.kernels.helpers import assert_one_rounding_apart

TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [64, 80, 96, 576])
def test_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, width).to(dtype), 3 * torch.randn(3, width).to(dtype), torch.rand(width).to(dtype)
    with trace(), interpreted():
        alone, together = rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5, residual)
    assert alone[1] is x
    assert_one_rounding_apart(alone[0], reference.rms_norm(x, weight, 1e-5)[0])
    y, total = reference.rms_norm(x, weight, 1e-5, residual)
    assert_one_rounding_apart(together[0], y)
    assert torch.equal(together[1], total)


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    x, residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16), torch.ones(1, 64, dtype=torch.bfloat16)
    residual[0, 0] = 3.0  # 257 is no bf16 and becomes 256; 259 becomes 260
    with interpreted():
        y, total = rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 0.0, residual)
    assert total[0, :2].tolist() == [260.0, 256.0]
    assert_one_rounding_apart(y, reference.rms_norm(total, torch.ones(64), 0.0)[0])


def test_rows_apart_and_what_lies_between_is_not_read() -> None:
    wide = torch.full((3, 96), torch.nan)
    x, residual, weight = wide[:, :40], torch.randn(3, 64)[:, :40], torch.rand(40)
    x.copy_(torch.randn(3, 40))
    with trace(), interpreted():
        y, total = rms_norm(x, weight, 1e-5, residual)
    wanted = reference.rms_norm(x, weight, 1e-5, residual)
    assert_one_rounding_apart(y, wanted[0])
    assert torch.equal(total, wanted[1])


def test_every_byte_once() -> None:
    x, residual, weight = torch.randn(4, 576), torch.randn(4, 576), torch.rand(576)
    with trace() as accesses, interpreted():
        rms_norm(x, weight, 1e-5, residual)
    row_bytes = 4 * 576 * 4
    assert {key: (moved.num_bytes, moved.times_read) for key, moved in traffic(accesses).items()} == {
        ("x", "load"): (row_bytes, 1.0),
        ("residual", "load"): (row_bytes, 1.0),
        ("weight", "load"): (row_bytes, 4.0),
        ("total", "store"): (row_bytes, 1.0),
        ("y", "store"): (row_bytes, 1.0),
    }
