"""Compile what the engine launches for GPUs that are not here, and read the machine code.

Why: the interpreter says whether a kernel is right, not whether it is fast. Much of that stands in the
machine code: registers, spills, shared memory, tensor-core instructions, the width of loads. Triton's wheel
has the compilers for both vendors, and none of them needs a card. Signatures are not written by hand, since
hints about divisibility decide the code: the launchers are called with CPU tensors, and their launches are
recorded as the driver would see them.

    with capture(SM90) as compiled:
        decode_attention(q, cache, tables, lengths, scale)
    report(compiled[0].kernel).num_registers

Invariant: nothing runs in here; a launcher's output is left as it was.

Taught in notebook 05.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from minserve_kernels.interpret import patched

SM80, SM90, MI300 = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
KIB = 1 << 10
SHARED_BYTES = {
    80: 163 * KIB,
    86: 99 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    "gfx942": 64 * KIB,
}  # that a program may have


class Launch(NamedTuple):
    """A kernel as it was compiled for one launch."""

    name: str
    kernel: Any


class _AbsentDriver:
    """Answers for a card that is not here."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return repr(self.target)  # a cache of kernels for each target

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextmanager
def capture(target: GPUTarget) -> Iterator[list[Launch]]:
    """In here, launches compile for `target` and don't run; those with CPU tensors too."""
    launches: list[Launch] = []

    def getitem(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            launches.append(Launch(kernel.fn.__name__, kernel.warmup(*args, grid=grid, **kwargs)))

        return launch

    absent = patched(driver, _active=_AbsentDriver(target))
    with knobs.language.scope(), absent, patched(KernelInterface, __getitem__=getitem):
        knobs.language.default_fp_fusion = (
            True  # a * b + c in one instruction: Triton's own default will change
        )
        yield launches


@dataclass(frozen=True, slots=True)
class Report:
    """What the machine code says of one kernel."""

    target: GPUTarget
    num_warps: int
    num_registers: int  # a thread
    shared_bytes: int  # a program
    num_spills: int  # loads and stores of registers that had no room
    stack_bytes: int
    num_mma: int  # tensor-core instructions of a warp (HMMA, IMMA, MFMA)
    num_wgmma: int  # of four warps together (Hopper)
    num_wide_loads: int  # of 16 bytes a thread


def report(kernel: Any) -> Report:
    """Read a compiled kernel's machine code. NVIDIA's is disassembled by the tools in Triton's wheel."""
    return _report_amd(kernel) if kernel.metadata.target.backend == "hip" else _report_nvidia(kernel)


def _report_nvidia(kernel: Any) -> Report:
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        code = _run(knobs.nvidia.nvdisasm.path, "-c", file.name)
    return Report(
        target=kernel.metadata.target,
        num_warps=kernel.metadata.num_warps,
        num_registers=_number(r"\bREG:(\d+)", usage),
        shared_bytes=kernel.metadata.shared,
        num_spills=_count(r"\b(?:LDL|STL)\b", code),
        stack_bytes=_number(r"\bSTACK:(\d+)", usage),
        num_mma=_count(r"\b(?:HMMA|IMMA|QMMA)\.", code),
        num_wgmma=_count(r"\b[HIQ]GMMA\.", code),
        num_wide_loads=_count(r"\b(?:LDG\.E|LDGSTS\.E)[.\w]*\.128", code),
    )


def _report_amd(kernel: Any) -> Report:
    code = kernel.asm["amdgcn"]
    return Report(
        target=kernel.metadata.target,
        num_warps=kernel.metadata.num_warps,
        num_registers=_number(r"\.vgpr_count:\s*(\d+)", code),
        shared_bytes=kernel.metadata.shared,
        num_spills=_number(r"\.vgpr_spill_count:\s*(\d+)", code),
        stack_bytes=_number(r"\.private_segment_fixed_size:\s*(\d+)", code),
        num_mma=_count(r"\bv_mfma", code),
        num_wgmma=0,
        num_wide_loads=_count(r"(?:global|buffer)_load_dwordx4", code),
    )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(
            f"nothing like {pattern!r} in what the compiler's tools print: has their form changed?"
        )
    return int(found[1])


def check(kernel: Any, *, wants_mma: bool = False, num_wide_loads: int = 0, max_spills: int = 0) -> Report:
    """Raise AssertionError, with the whole report, if the machine code lacks or has what it should not."""
    found = report(kernel)
    assert found.shared_bytes <= SHARED_BYTES[found.target.arch], found
    assert found.num_spills <= max_spills and (max_spills or found.stack_bytes == 0), found
    assert not wants_mma or found.num_mma + found.num_wgmma > 0, found
    assert found.num_wide_loads >= num_wide_loads, found
    return found
