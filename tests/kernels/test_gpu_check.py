"""The checks that a card's kernels must pass, in the interpreter: right kernels pass, and each kind of fault is seen."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minserve_kernels import gpu_check
from minserve_kernels.gpu_check import MOST_ERROR, ON_A_CARD, Heads, Sizes, make_checks, poisoned_memory
from minserve_kernels.interpret import interpreted

SMALL = Sizes(heads=(Heads(4, 2, 64), Heads(3, 1, 80)), lengths=(1, 16, 33), widths=(80,), products=((3, 20, 64),))
CPU = torch.device("cpu")
CHECKS = make_checks(CPU, SMALL)


@pytest.mark.parametrize("name", CHECKS)
def test_right_kernels_pass(name: str) -> None:
    torch.manual_seed(0)
    with interpreted():
        assert CHECKS[name]() <= MOST_ERROR


def test_on_a_card_everything_is_checked() -> None:
    names = set(make_checks(CPU, ON_A_CARD))
    for kernel in ("rms_norm", "swiglu", "rope", "write_kv", "decode_attention", "prefill_attention", "int8_linear", "int4_linear"):
        assert any(name.startswith(kernel) for name in names)
    for format in ("bf16", "fp8", "int8", "int4"):
        for shape in ("9/3 heads, D 64", "32/8 heads, D 128"):
            assert f"decode_attention {format}, {shape}" in names and f"write_kv {format}, {shape}" in names
    assert "prefill_attention bf16, 9/3 heads, D 64, window 100" in names


def error_with(kernel: str, fault: Callable, check: str, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(gpu_check, kernel, fault)
    torch.manual_seed(0)
    with interpreted():
        return CHECKS[check]()


def test_a_kernel_that_writes_nothing_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(gate_up: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)

    assert math.isnan(error_with("swiglu", nothing, "swiglu 80", monkeypatch))


def test_one_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check.decode_attention

    def wrong(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = right(q, *rest)
        out[1, 3, 7] += 0.5
        return out

    assert error_with("decode_attention", wrong, "decode_attention bf16, 4/2 heads, D 64", monkeypatch) > 10 * MOST_ERROR


@pytest.mark.parametrize("format", ["bf16", "fp8", "int8", "int4"])
def test_a_slot_too_many_is_seen(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check.write_kv

    def wrong(kv: torch.Tensor, slots: torch.Tensor, cache: gpu_check.PagedKV) -> None:
        right(kv, slots, cache)
        right(kv[:1], torch.tensor([cache.codes.shape[0] * 16 - 1]), cache)  # the last block is nobody's

    assert error_with("write_kv", wrong, f"write_kv {format}, 4/2 heads, D 64", monkeypatch) == math.inf


def test_a_key_beyond_the_length_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check.decode_attention

    def longer(q: torch.Tensor, cache: gpu_check.PagedKV, tables: torch.Tensor, lengths: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(q, cache, tables, lengths + 1, *rest)

    assert math.isnan(error_with("decode_attention", longer, "decode_attention int8, 4/2 heads, D 64", monkeypatch))


def test_fresh_memory_is_poisoned_in_a_check_only() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(64).isnan().all() and torch.empty_like(torch.zeros(8, dtype=torch.bfloat16)).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before
