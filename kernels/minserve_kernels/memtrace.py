"""What a kernel reads and writes, address by address: traffic, re-reading, and the faults that hardware
hides.

Why: a wrong block table entry reads somebody's memory and raises nothing; two programs that store to one
place race. In the interpreter every load and store passes through three methods, so all of them can be seen.
Those outside every tensor raise with the program and the line; an element that one program of a launch stores
and another one stores or loads raises as a race; the rest is counted.

    with trace() as accesses, interpreted():
        decode_attention(...)
    traffic(accesses)["codes", "load"].num_bytes

Invariant: under `trace` a kernel computes what it computes without.

Taught in notebook 05.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import triton.runtime.interpreter as interpreter
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from minserve_kernels import interpret

SECTOR_BYTES = 32  # the least that a GPU moves
OWN_FILES = {__file__, interpret.__file__}
NOBODY, SEVERAL = -1, -2

Program = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Access:
    """One load or store of one program: which elements of which tensor, and how many lanes it had."""

    kernel: str
    program: Program
    kind: str  # load, store, atomic
    tensor: str
    element_bytes: int
    elements: np.ndarray  # offsets from the tensor's first element, of the lanes that were on
    num_lanes: int
    line: int  # of the kernel's source file


class OutOfBounds(IndexError):
    """An access outside of every tensor."""


class Race(RuntimeError):
    """Two programs of a launch use one element, and at least one of them stores it."""


@contextmanager
def trace(**tensors: Tensor) -> Iterator[list[Access]]:
    """Watch what kernels do. Whatever one touches must be one of its arguments or one of these tensors.

    Accesses have the names given here, and for other tensors those of the kernel's parameters. Tensors that
    lie in each other count as one.
    """
    watch = _Watch(tensors)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    atomic, launch = InterpreterBuilder.create_atomic_rmw, GridExecutor.__call__

    def seen_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.see("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def seen_store(self: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        watch.see("store", pointers, mask)
        return store(self, pointers, values, mask, *rest)

    def seen_atomic(self: Any, operation: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        watch.see("atomic", pointers, mask)
        return atomic(self, operation, pointers, values, mask, *rest)

    def seen_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        passed = dict(zip(self.arg_names, args, strict=False)) | kwargs
        watch.begin(self.fn.__name__, {name: it for name, it in passed.items() if isinstance(it, Tensor)})
        launch(self, *args, **kwargs)

    methods = {
        "create_masked_load": seen_load,
        "create_masked_store": seen_store,
        "create_atomic_rmw": seen_atomic,
    }
    with (
        interpret.patched(InterpreterBuilder, **methods),
        interpret.patched(GridExecutor, __call__=seen_launch),
    ):
        yield watch.accesses


class _Users(NamedTuple):
    """Which program of the launch has used each element of a tensor: its number, or NOBODY, or SEVERAL."""

    stored: np.ndarray
    loaded: np.ndarray


class _Span(NamedTuple):
    """Where a tensor lies, from its first element to its last."""

    begin: int
    end: int
    name: str
    num_elements: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "_Span":
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        return cls(begin, begin + (last + 1) * tensor.element_size(), name, last + 1)


def _add(span: _Span, spans: list[_Span]) -> None:
    """To the others; tensors that lie in each other, as q and k of one product do, become one."""
    for i, other in enumerate(spans):
        if span.begin < other.end and other.begin < span.end:
            begin, end = min(span.begin, other.begin), max(span.end, other.end)
            name = other.name if (begin, end) == other[:2] else f"{other.name}+{span.name}"
            element_bytes = (other.end - other.begin) // other.num_elements
            spans[i] = _Span(begin, end, name, (end - begin) // element_bytes)
            return
    spans.append(span)


class _Watch:
    """Which tensor an address belongs to, who has used what in this launch, and everything that was seen."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.named: list[_Span] = []
        for name, tensor in tensors.items():
            if tensor.numel():
                _add(_Span.of(name, tensor), self.named)
        self.accesses: list[Access] = []

    def begin(self, kernel: str, arguments: dict[str, Tensor]) -> None:
        """A launch begins: what earlier ones wrote is there for all."""
        spans = list(self.named)
        for name, tensor in arguments.items():
            if tensor.numel():
                is_taken = name in {span.name for span in spans}
                _add(_Span.of(f"{kernel}.{name}" if is_taken else name, tensor), spans)
        spans.sort()
        self.kernel, self.names = kernel, [span.name for span in spans]
        self.begins = np.array([span.begin for span in spans], dtype=np.uint64)
        self.ends = np.array([span.end for span in spans], dtype=np.uint64)
        self.users = {s.name: _Users(*np.full((2, s.num_elements), NOBODY)) for s in spans}

    def see(self, kind: str, pointers: Any, mask: Any) -> None:
        element_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        places, is_on = np.broadcast_arrays(pointers.data, mask.data)
        addresses = places[is_on.astype(bool)].astype(np.uint64).ravel()
        if addresses.size:
            program, line = tuple(interpreter.interpreter_builder.grid_idx), _kernel_line()
            which = self._find(kind, addresses, element_bytes, program, line)
            name = self.names[which]
            elements = ((addresses - self.begins[which]) // np.uint64(element_bytes)).astype(np.int64)
            access = Access(self.kernel, program, kind, name, element_bytes, elements, is_on.size, line)
            self.accesses.append(access)
            self._check_race(access)

    def _find(self, kind: str, addresses: np.ndarray, element_bytes: int, program: Program, line: int) -> int:
        which = np.searchsorted(self.begins, addresses, side="right").astype(np.int64) - 1
        is_bad = (which < 0) | (addresses + np.uint64(element_bytes) > self.ends[np.maximum(which, 0)])
        if is_bad.any():
            where = f"{self.kernel}, program {program}, line {line}"
            raise OutOfBounds(
                f"{kind} outside every tensor: {where}, {is_bad.sum()} of {addresses.size} lanes"
            )
        return int(which[0])

    def _check_race(self, access: Access) -> None:
        (stored, loaded), elements = self.users[access.tensor], access.elements
        me = _number(access.program)
        if access.kind == "store":
            self._complain(access, stored[elements], "stored")
            self._complain(access, loaded[elements], "loaded")
            stored[elements] = me
        elif access.kind == "load":
            self._complain(access, stored[elements], "stored")
            before = loaded[elements]
            loaded[elements] = np.where((before == NOBODY) | (before == me), me, SEVERAL)

    def _complain(self, access: Access, users: np.ndarray, done: str) -> None:
        is_other = (users != NOBODY) & (users != _number(access.program))
        if is_other.any():
            first = int(np.argmax(is_other))
            place = f"{access.tensor}[{access.elements[first]}]"
            other = (
                "several programs" if users[first] == SEVERAL else f"program {_program(int(users[first]))}"
            )
            raise Race(
                f"{self.kernel}: program {access.program} {access.kind}s {place} in line {access.line},"
                f" which {other} {done}"
            )


def _number(program: Program) -> int:
    x, y, z = program
    return x << 40 | y << 20 | z


def _program(number: int) -> Program:
    return number >> 40, number >> 20 & 0xFFFFF, number & 0xFFFFF


def _kernel_line() -> int:
    """The line of the innermost frame that is a kernel's source."""
    frame = inspect.currentframe()
    while frame and (f"triton{os.sep}" in frame.f_code.co_filename or frame.f_code.co_filename in OWN_FILES):
        frame = frame.f_back
    return frame.f_lineno if frame else -1


@dataclass(frozen=True, slots=True)
class Traffic:
    """All accesses of one kind to one tensor."""

    num_bytes: int  # asked for; what one access asks twice counts once
    times_read: float  # the same, over the bytes of all distinct elements
    sector_use: float  # share of the moved 32-byte sectors that was asked for
    lanes_on: float  # share of the lanes that were not masked off


def traffic(accesses: list[Access]) -> dict[tuple[str, str], Traffic]:
    """By (tensor, kind)."""
    by_kind: dict[tuple[str, str], list[Access]] = {}
    for access in accesses:
        by_kind.setdefault((access.tensor, access.kind), []).append(access)
    return {key: _add_up(some) for key, some in by_kind.items()}


def _add_up(accesses: list[Access]) -> Traffic:
    size = accesses[0].element_bytes
    num_asked = sum(np.unique(access.elements).size for access in accesses)
    num_distinct = np.unique(np.concatenate([access.elements for access in accesses])).size
    num_sectors = sum(np.unique(access.elements * size // SECTOR_BYTES).size for access in accesses)
    return Traffic(
        num_bytes=num_asked * size,
        times_read=num_asked / num_distinct,
        sector_use=num_asked * size / (SECTOR_BYTES * num_sectors),
        lanes_on=sum(a.elements.size for a in accesses) / sum(a.num_lanes for a in accesses),
    )
