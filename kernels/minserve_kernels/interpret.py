"""Run kernels on CPU tensors, with the rounding of a GPU: no GPU, no environment variable.

Why: Triton has an interpreter that runs one program at a time in numpy. It shows whether a kernel's logic is
right, but it is silently wrong where kernels are interesting: `tl.dot` on bf16 multiplies bit patterns,
float32 becomes bf16 by truncation, fp8 loses carries. Here these are repaired, and kernels stay compilable in
the same process.

    with interpreted():
        rms_norm(x, weight, eps)        # a launcher: its kernels run here
    interpret(kernel)[grid](...)        # or one kernel by hand

What it cannot show: races between warps, missing barriers, bank conflicts, speed.

The repairs lean on private names of Triton (tried with 3.6 and 3.9). Tests hold products and casts against
torch, so that a Triton that moves them fails loudly.

Invariant: everything is patched for the time of one launch and taken back at its end. Outside, Triton is as
ever.

Taught in notebook 05.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction, KernelInterface

Launcher = Callable[..., None]


@contextmanager
def interpreted(strict: bool = False) -> Iterator[None]:
    """In here, kernels run on CPU tensors wherever they are launched.

    strict: `tl.device_assert` and integer overflow raise; everything takes 1.5 times as long.
    """
    launch = KernelInterface.__getitem__

    def getitem(kernel: Any, grid: Any) -> Any:
        is_plain = isinstance(
            kernel, (JITFunction, InterpretedFunction)
        )  # the second with TRITON_INTERPRET=1
        return interpret(kernel, strict)[grid] if is_plain else launch(kernel, grid)

    with patched(KernelInterface, __getitem__=getitem):
        yield


def interpret(kernel: Any, strict: bool = False) -> "Interpreted":
    """The kernel as something that runs here: interpret(kernel)[grid](...)"""
    return Interpreted(kernel.fn, strict)


@dataclasses.dataclass(frozen=True, slots=True)
class Interpreted:
    """A kernel that is launched like any other, and runs program by program."""

    function: Callable[..., Any]
    strict: bool

    def __getitem__(self, grid: Any) -> Launcher:
        def launch(*args: Any, **kwargs: Any) -> None:
            kernel = _function(self.function)
            with _honest(self.strict):
                try:
                    kernel.run(*args, grid=grid, warmup=False, **kwargs)
                except InterpreterError as error:
                    raise _cause(error) from None

        return launch


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """In here, `owner` has these attributes instead of its own."""
    saved = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


@cache  # by the plain function: hashing a JITFunction walks its globals, which a launch has patched
def _function(function: Callable[..., Any]) -> Any:
    return InterpretedFunction(function)


def _cause(error: BaseException) -> BaseException:
    """What the kernel or a helper raised, out of what Triton wraps it in."""
    while isinstance(error, InterpreterError) and error.__cause__:
        error = error.__cause__
    return error


@contextmanager
def _honest(strict: bool) -> Iterator[None]:
    """The time of one launch.

    Triton patches its language anew at every call of every helper, and leaves some of that behind. Here each
    module is patched once a launch and taken back at the end, which is faster by half.
    """
    patch = interpreter._patch_lang
    seen: set[int] = set()
    options = dataclasses.replace(
        interpreter.interpreter_builder.options, debug=strict, sanitize_overflow=strict
    )
    with ExitStack() as undo:
        undo.enter_context(np.errstate(all="ignore"))  # a GPU makes its inf and NaN without a word

        def patch_once(function: Any) -> "_Nothing":
            module = id(function.__globals__)
            if module not in seen:
                seen.add(module)
                undo.callback(patch(function).restore)
            return _NOTHING

        undo.enter_context(patched(InterpreterBuilder, **BUILDER))
        undo.enter_context(patched(interpreter.interpreter_builder, options=options))
        undo.enter_context(patched(JITFunction, __call__=_call_helper))
        undo.enter_context(patched(interpreter, _patch_lang=patch_once))
        yield


class _Nothing:
    """What Triton expects of a patch: it can be taken back. The launch does that."""

    def restore(self) -> None:
        pass


_NOTHING = _Nothing()


def _call_helper(helper: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel calls tl.sum, tl.cdiv or a function of its own."""
    return _function(helper.fn)(*args, **kwargs)


# --- numbers as a GPU rounds them -------------------------------------------------------------------

TORCH_TYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
# numpy lacks these: the interpreter holds their bit patterns.
AS_BITS = {tl.bfloat16: torch.uint16, tl.float8e4nv: torch.uint8, tl.float8e5: torch.uint8}
FP8_MOST = 448.0


def _to_torch(handle: Any) -> Tensor:
    kind = handle.dtype.scalar
    numbers = torch.from_numpy(np.array(handle.data, order="C"))
    if kind in AS_BITS:
        numbers = numbers.reshape(-1).view(AS_BITS[kind]).view(TORCH_TYPES[kind]).reshape(handle.data.shape)
    return numbers


def _convert(handle: Any, target: Any) -> Any:
    """Between floating types, by torch: to the nearest, ties to even; e4m3 saturates."""
    target, numbers = target.scalar, _to_torch(handle)
    if target is tl.float8e4nv:
        numbers = numbers.float()
        numbers = torch.where(numbers.isnan(), numbers, numbers.clamp(-FP8_MOST, FP8_MOST))
    numbers = numbers.to(TORCH_TYPES[target]).contiguous()
    return TensorHandle((numbers.view(AS_BITS[target]) if target in AS_BITS else numbers).numpy(), target)


def _tf32(numbers: np.ndarray) -> np.ndarray:
    """float32 with 10 bits of mantissa, to the nearest, ties to even: what tensor cores multiply."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    is_odd = (bits >> np.uint32(13)) & np.uint32(1)
    return ((bits + np.uint32(0xFFF) + is_odd) & np.uint32(0xFFFFE000)).view(np.float32)


_cast, _float_to_float = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp


def _cast_impl(self: Any, handle: Any, target: Any) -> Any:
    source_kind, target_kind = handle.dtype.scalar, target.scalar
    has_bits = source_kind in AS_BITS or target_kind in AS_BITS
    if has_bits and source_kind in TORCH_TYPES and target_kind in TORCH_TYPES:
        return _convert(handle, target)
    if source_kind in AS_BITS:
        handle = _convert(handle, tl.float32)
    if target_kind in AS_BITS:
        return _convert(_cast(self, handle, tl.float32), target)
    return _cast(self, handle, target)


def _create_fp_to_fp(self: Any, handle: Any, target: Any, rounding: Any) -> Any:
    if handle.dtype.scalar in TORCH_TYPES and target.scalar in TORCH_TYPES:
        return _convert(handle, target)
    return _float_to_float(self, handle, target, rounding)


def _create_dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, _imprecise: Any) -> Any:
    num_terms, least = a.data.shape[-1], 256 // a.dtype.scalar.primitive_bitwidth
    if num_terms < least:  # NVIDIA compiles no smaller product: 8 terms of 4 bytes, 16 of 2, 32 of 1
        raise ValueError(f"tl.dot over K={num_terms}: {a.dtype} needs at least {least}")
    x, y = (_to_torch(h).float().numpy() if h.dtype.scalar in AS_BITS else h.data for h in (a, b))
    if a.dtype.scalar is tl.float32 and precision != interpreter._ir.INPUT_PRECISION.IEEE:
        x, y = _tf32(x), _tf32(y)
    return TensorHandle(np.matmul(x, y, dtype=acc.data.dtype) + acc.data, acc.dtype.scalar)


def _comparison(compare: Any) -> Any:
    """Comparisons give int1, between scalars too, so that masks can be combined with them."""
    return lambda self, left, right: TensorHandle(compare(left.data, right.data), tl.int1)


COMPARISONS = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LE": np.less_equal,
    "GE": np.greater_equal,
    "LT": np.less,
    "GT": np.greater,
}
# What is repaired, by the name of the builder's method.
BUILDER = {
    "cast_impl": _cast_impl,
    "create_fp_to_fp": _create_fp_to_fp,
    "create_dot": _create_dot,
    **{
        name: _comparison(COMPARISONS[name[-2:]])
        for name in dir(InterpreterBuilder)
        if name.startswith(("create_icmp", "create_fcmp"))
    },
}
