"""The interpreter rounds as a GPU does, and leaves Triton as it was. Held against torch, so that a new Triton fails loudly."""

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve_kernels.activation import swiglu
from minserve_kernels.aot import SM90, capture
from minserve_kernels.interpret import interpret, interpreted
from minserve_kernels.norm import rms_norm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@triton.jit
def _dot(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, input_precision=PRECISION))


@triton.jit
def _cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _add_in_own_type(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, _twice(tl.load(x + i)))


@triton.jit
def _twice(x):
    return (x.to(tl.float32) * 2).to(x.dtype)


@triton.jit
def _masked(x, out, low, high, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=(i < 3) & (high > low), other=-1.0))


@triton.jit
def _asserts(x):
    tl.device_assert(tl.load(x) > 0, "x is not positive")


@triton.jit
def _overflows(x, out):
    tl.store(out, tl.load(x) + 2147483647)


def product(a: Tensor, b: Tensor, precision: str = "tf32") -> Tensor:
    out = torch.empty(a.shape[0], b.shape[1])
    interpret(_dot)[(1,)](a, b, out, M=a.shape[0], N=b.shape[1], K=a.shape[1], PRECISION=precision)
    return out


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    interpret(_cast)[(1,)](x, out, N=len(x))
    return out


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
def test_products_multiply_numbers_and_not_their_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 32).to(dtype), torch.randn(32, 16).to(dtype)
    torch.testing.assert_close(product(a, b), a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def every_kind_of_number() -> Tensor:
    """4096 of all sizes, what lies between two neighbours of the target, and what is no number."""
    torch.manual_seed(0)
    wide = torch.randn(3072) * torch.logspace(-9, 6, 3072)
    between = 1 + torch.arange(1016) / 1024  # halfway cases of every type with less than 10 bits
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 448.0, 464.0, 1e30])
    return torch.cat((wide, between, special))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_casts_round_to_the_nearest(source: torch.dtype, target: torch.dtype) -> None:
    x = every_kind_of_number().to(source)
    wanted = x.float()
    if target == E4M3:  # a GPU saturates, torch makes NaN
        wanted = torch.where(wanted.isnan(), wanted, wanted.clamp(-448, 448))
    wanted, got = wanted.to(target), cast(x, target)
    is_nan = wanted.float().isnan()
    assert torch.equal(got.float().isnan(), is_nan)
    assert torch.equal(bits(got)[~is_nan], bits(wanted)[~is_nan])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_all_bytes_decode(dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(cast(x, torch.float32), x.float(), rtol=0, atol=0, equal_nan=True)


def test_float32_products_are_tf32_unless_told() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 64), torch.randn(64, 16)
    exact = a.double() @ b.double()
    error = {precision: (product(a, b, precision).double() - exact).norm() / exact.norm() for precision in ("tf32", "ieee")}
    assert 1e-4 < error["tf32"] < 1e-3 and error["ieee"] < 1e-6


def test_tf32_keeps_ten_bits_to_the_nearest_even() -> None:
    ulp = 2.0**-10
    numbers = torch.tensor([1 + ulp, 1 + ulp / 2, 1 + ulp * 3 / 2, 1 + ulp * 0.51, 1 + ulp / 4, -1 - ulp * 3 / 2, 1.0, 0.0])
    rounded = product(torch.diag(numbers), torch.eye(8)).diag()
    assert rounded.tolist() == [1 + ulp, 1.0, 1 + 2 * ulp, 1 + ulp, 1.0, -1 - 2 * ulp, 1.0, 0.0]


def test_a_scalar_condition_joins_a_mask() -> None:
    x, out = torch.arange(8.0), torch.empty(8)
    interpret(_masked)[(1,)](x, out, 1, 2, N=8)
    assert out.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    interpret(_masked)[(1,)](x, out, 2, 2, N=8)
    assert out.tolist() == [-1] * 8


def test_helpers_keep_the_type_of_their_argument() -> None:
    x = torch.tensor([1.0, -2.5, 3e38, 0.0], dtype=torch.bfloat16)
    out = torch.empty_like(x)
    interpret(_add_in_own_type)[(1,)](x, out, N=4)
    assert out.tolist() == [2.0, -5.0, torch.inf, 0.0]


def test_a_product_that_no_card_has_is_refused_in_its_own_words() -> None:
    with pytest.raises(ValueError, match=r"tl.dot over K=8: .*bf16.* needs at least 16"):
        product(torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16))


def test_strict_raises_what_a_card_would_pass_over() -> None:
    bad, most, out = torch.tensor([-1.0]), torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    interpret(_asserts)[(1,)](bad)
    interpret(_overflows)[(1,)](most, out)
    assert out.item() == -(2**31)
    with pytest.raises(AssertionError, match="x is not positive"):
        interpret(_asserts, strict=True)[(1,)](bad)
    with pytest.raises(Exception, match="overflow"):
        interpret(_overflows, strict=True)[(1,)](most, out)


def language() -> dict[tuple[str, str], Any]:
    """Everything of Triton's language that the interpreter is known to replace."""
    owners = {"tl": tl, "core": tl.core, "tensor": tl.tensor, "math": tl.math, "dtype": tl.dtype, "jit": triton.JITFunction}
    return {(name, key): value for name, owner in owners.items() for key, value in vars(owner).items() if inspect.isfunction(value)}


def test_triton_is_left_as_it_was_and_compiles_before_and_after() -> None:
    x = torch.randn(2, 64)
    with capture(SM90) as before:
        rms_norm(x, x[0], 1e-5)
    names = language()
    with interpreted():
        assert rms_norm(x, x[0], 1e-5)[0].isfinite().all()
    with pytest.raises(ValueError, match="K=4"), interpreted():  # also when a kernel raises
        interpret(_dot)[(1,)](x, x, x, M=4, N=4, K=4, PRECISION="ieee")
    changed = {name for name, value in language().items() if names.get(name) is not value}
    assert changed == set()
    with capture(SM90) as after:
        swiglu(x)  # not compiled before: nothing comes out of a cache of this process
    assert [len(launches) for launches in (before, after)] == [1, 1] and "cubin" in after[0].kernel.asm


def test_outside_of_the_context_a_launch_wants_a_card() -> None:
    x = torch.randn(2, 64)
    with interpreted():
        swiglu(x)
    with pytest.raises((RuntimeError, ValueError)):
        swiglu(x)
