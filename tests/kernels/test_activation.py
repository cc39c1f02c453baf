"""SwiGLU as a kernel, against its reference."""

import pytest
import torch

from minserve_kernels import reference
from minserve_kernels.activation import TILE, swiglu
from minserve_kernels.interpret import interpreted
from minserve_kernels.memtrace import trace, traffic
from tests.kernels.helpers import assert_one_rounding_apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [96, 1536, TILE + 16])
def test_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(3, 2 * width)).to(dtype)
    with trace(), interpreted():
        got = swiglu(gate_up)
    assert_one_rounding_apart(got, reference.swiglu(gate_up))


def test_far_ends_of_the_gate() -> None:
    gate = torch.tensor([-1e4, -90.0, -0.0, 0.0, 90.0, 1e4, torch.nan])
    with interpreted():
        got = swiglu(torch.cat((gate, torch.ones(7)))[None])
    torch.testing.assert_close(got[0], torch.tensor([0.0, 0.0, 0.0, 0.0, 90.0, 1e4, torch.nan]), equal_nan=True)


def test_rows_apart_and_every_byte_once() -> None:
    wide = torch.full((3, 256), torch.nan)
    gate_up = wide[:, :192]
    gate_up.copy_(torch.randn(3, 192))
    with trace() as accesses, interpreted():
        got = swiglu(gate_up)
    assert_one_rounding_apart(got, reference.swiglu(gate_up))
    moved = traffic(accesses)
    assert (moved["gate_up", "load"].num_bytes, moved["out", "store"].num_bytes) == (3 * 192 * 4, 3 * 96 * 4)
    assert moved["gate_up", "load"].times_read == 1.0
