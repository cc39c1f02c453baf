"""The machine code of every launch, for cards that are not here. Nothing runs: the compilers and disassemblers need no card.

With another version of Triton, for example the oldest that we name:

    pip install --no-deps --target build/triton36 triton==3.6.0
    PYTHONPATH=build/triton36 pytest tests/kernels/test_aot.py -k sm90
"""

import ast
from pathlib import Path

import pytest
import torch

import minserve_kernels
from minserve_kernels.activation import swiglu
from minserve_kernels.aot import MI300, SM80, SM90, capture, check, report
from minserve_kernels.norm import rms_norm
from tests.kernels.launches import CASES, EXPECTED

CARDS = {"sm80": SM80, "sm90": SM90, "gfx942": MI300}
# NVIDIA's cards before sm_89 have no e4m3, and Triton refuses to compile it for them.
PAIRS = [(case, card) for case in CASES for card in CARDS if not ("/fp8/" in case and card == "sm80")]


@pytest.mark.parametrize(("case", "card"), PAIRS, ids=lambda name: name)
def test_machine_code(case: str, card: str) -> None:
    with capture(CARDS[card]) as launches:
        CASES[case]()
    assert launches
    for name, kernel in launches:
        found = check(kernel, **EXPECTED[name]._asdict())
        assert found.target == CARDS[card] and 0 < found.num_registers <= 512


def launched_kernels() -> set[str]:
    """Names that the package's sources launch: the `name` of every call name[grid](...)."""
    found = set()
    for path in Path(minserve_kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
                found.add(node.func.value.id)
    return found


def test_every_kernel_has_a_case() -> None:
    with capture(SM90) as launches:
        for case in CASES.values():
            case()
    assert {name for name, _ in launches} == launched_kernels() == EXPECTED.keys()


def test_capture_compiles_and_runs_nothing() -> None:
    x = torch.full((2, 64), torch.nan)
    with capture(SM90) as launches:
        rms_norm(x, x[0], 1e-5)
        swiglu(x)
    assert [launch.name for launch in launches] == ["_rms_norm", "_swiglu"]
    with pytest.raises((RuntimeError, ValueError)):  # outside, a launch wants a card, and tensors that lie on it
        swiglu(x)


def test_a_report_reads_the_code_of_both_vendors() -> None:
    x = torch.zeros(2, 4096, dtype=torch.bfloat16)
    # 4096 numbers over 8 x 32 or 8 x 64 threads: 32 or 16 bytes each, of the row and of the weight.
    for target, num_wide_loads in ((SM90, 4), (MI300, 2)):
        with capture(target) as launches:
            rms_norm(x, x[0], 1e-5)
        found = report(launches[0].kernel)
        assert (found.target, found.num_warps, found.num_wide_loads, found.num_mma) == (target, 8, num_wide_loads, 0)
        assert found.shared_bytes == 8 * 4  # a partial sum of each warp
        assert (found.num_spills, found.stack_bytes) == (0, 0) and 8 < found.num_registers < 128


def test_check_says_what_is_missing() -> None:
    x = torch.zeros(2, 576, dtype=torch.bfloat16)
    with capture(SM90) as launches:
        rms_norm(x, x[0], 1e-5)
    kernel = launches[0].kernel
    check(kernel, num_wide_loads=2)
    with pytest.raises(AssertionError, match="num_mma=0"):
        check(kernel, wants_mma=True)
    with pytest.raises(AssertionError, match="num_wide_loads=4"):
        check(kernel, num_wide_loads=1000)
