"""Products with quantized weights as kernels: against the reference and float64, at odd sizes, and byte by byte."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from minserve_kernels import quant_gemm, reference
from minserve_kernels.aot import SM90, capture
from minserve_kernels.aot import check as check_code
from minserve_kernels.interpret import interpreted
from minserve_kernels.memtrace import OutOfBounds, trace, traffic
from minserve_kernels.quant_gemm import LEAST_BLOCKS, Tile, choose_tile, int4_linear, int8_linear
from minserve_kernels.weights import outputs_together, pack_int4

TYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = Tile(outputs=16, rows=16, num_splits=1, num_warps=4, num_stages=2)
# Relative error of a whole product. Codes and float32 sums are exact enough; what is left is one rounding of the result.
MOST_ERROR = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}


class Int4(NamedTuple):
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int


def make_int4(num_outputs: int, num_inputs: int, group_size: int) -> Int4:
    codes = pack_int4(torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8), group_size)
    shape = (num_outputs, num_inputs // group_size)
    return Int4(codes, (0.01 + 0.1 * torch.rand(shape)).half(), torch.randint(0, 16, shape).half(), group_size)


def make_int8(num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8), 0.01 + torch.rand(num_outputs)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def check(x: Tensor, exact: Tensor, ours: Callable[[], Tensor], torchs: Tensor) -> None:
    with interpreted():
        got = ours()
    assert got.dtype == x.dtype and got.shape == exact.shape
    assert relative_error(got, exact) < MOST_ERROR[x.dtype]
    assert relative_error(got, torchs) < 2 * MOST_ERROR[x.dtype]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "group_size"),
    [(1, 16, 64, 32), (3, 40, 128, 32), (17, 33, 192, 64), (16, 16, 128, 128), (5, 50, 384, 128)],
)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_int4_equals_the_reference(
    num_rows: int, num_outputs: int, num_inputs: int, group_size: int, num_splits: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, num_inputs).to(dtype), make_int4(num_outputs, num_inputs, group_size)
    tile = SMALL._replace(num_splits=num_splits)
    exact, wanted = reference.int4_linear(x.double(), *weight), reference.int4_linear(x, *weight)
    check(x, exact, lambda: int4_linear(x, *weight, tile=tile), wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 16, 64), (3, 40, 65), (17, 33, 187), (5, 50, 320)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_int8_equals_the_reference(num_rows: int, num_outputs: int, num_inputs: int, num_splits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, num_inputs).to(dtype), make_int8(num_outputs, num_inputs)
    tile = SMALL._replace(num_splits=num_splits)
    exact, wanted = reference.int8_linear(x.double(), *weight), reference.int8_linear(x, *weight)
    check(x, exact, lambda: int8_linear(x, *weight, tile=tile), wanted)


@pytest.mark.parametrize("num_rows", [1, 33])
def test_the_tiles_that_it_chooses_itself(num_rows: int) -> None:
    torch.manual_seed(0)
    x, int4, int8 = torch.randn(num_rows, 1024).bfloat16(), make_int4(200, 1024, 128), make_int8(200, 1024)
    check(x, reference.int4_linear(x.double(), *int4), lambda: int4_linear(x, *int4), reference.int4_linear(x, *int4))
    check(x, reference.int8_linear(x.double(), *int8), lambda: int8_linear(x, *int8), reference.int8_linear(x, *int8))


def test_every_code_and_zero_point_means_what_it_says() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(32)[None]  # group c is all c
    zeros = torch.linspace(0, 15, 16).half()[None]
    zeros[0, 3] = 2.5  # not necessarily whole
    x = torch.zeros(16, 512, dtype=torch.bfloat16)
    x[torch.arange(16), 32 * torch.arange(16) + 7] = 1.0  # row c asks for one weight of group c
    with interpreted():
        y = int4_linear(x, pack_int4(codes, 32), torch.full((1, 16), 2.0).half(), zeros, 32, tile=SMALL)
    assert y.flatten().tolist() == [1.0 if c == 3 else 0.0 for c in range(16)]


def test_large_activations_do_not_drown_in_the_offset() -> None:
    """fp16 takes 1024 off again: where inputs are large and weights cancel, little may remain of the sum."""
    torch.manual_seed(0)
    x = (1000 + torch.randn(4, 128)).half()
    weight = make_int4(16, 128, 128)
    exact = reference.int4_linear(x.double(), *weight)
    with interpreted():
        got = int4_linear(x, *weight, tile=SMALL)
    assert relative_error(got, exact) < 1e-3


def test_what_is_not_finite_stays_so() -> None:
    weight, x = make_int4(16, 64, 32), torch.zeros(2, 64, dtype=torch.bfloat16)
    x[1, 40] = torch.nan
    with interpreted():
        y = int4_linear(x, *weight, tile=SMALL)
    assert y[0].eq(0).all() and y[1].isnan().all()


def test_strides_of_activations_codes_and_scales() -> None:
    torch.manual_seed(0)
    wide_x, wide_codes = torch.full((5, 160), torch.nan), torch.full((20, 96), 0xFF, dtype=torch.uint8)
    weight = make_int4(20, 128, 64)
    x, codes = wide_x[:, :128], wide_codes[:, :64]
    x.copy_(torch.randn(5, 128))
    codes.copy_(weight.codes)
    wanted = reference.int4_linear(x, *weight)
    scales, zeros = outputs_together(weight.scales), outputs_together(weight.zeros)
    with interpreted():
        got = int4_linear(x, codes, scales, zeros, 64, tile=SMALL)
    assert relative_error(got, wanted) < 1e-6


def test_groups_that_are_not_known_are_refused() -> None:
    weight = make_int4(16, 128, 64)
    with pytest.raises(ValueError, match="got 48"):
        int4_linear(torch.zeros(1, 128), *weight._replace(group_size=48))


# --- memory ---------------------------------------------------------------------------------------


def moved(x: Tensor, weight: Int4, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], int]:
    """Bytes by (tensor, load or store) of one int4 product. Whatever else it touches raises."""
    sums = torch.empty(tile.num_splits, len(x), len(weight.codes), dtype=x.dtype if tile.num_splits == 1 else torch.float32)
    out = torch.empty(len(x), len(weight.codes), dtype=x.dtype)
    monkeypatch.setattr(quant_gemm, "_room", lambda *_: sums)
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: out)
    with trace(x=x, codes=weight.codes, scales=weight.scales, zeros=weight.zeros, sums=sums, out=out) as accesses, interpreted():
        int4_linear(x, *weight, tile=tile)
    return {key: found.num_bytes for key, found in traffic(accesses).items()}


def test_every_byte_once_and_none_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(5, 128).bfloat16(), make_int4(40, 128, 64)
    assert moved(x, weight, SMALL._replace(outputs=64), monkeypatch) == {
        ("x", "load"): 5 * 128 * 2,
        ("codes", "load"): 40 * 64,
        ("scales", "load"): 40 * 2 * 2,
        ("zeros", "load"): 40 * 2 * 2,
        ("sums", "store"): 5 * 40 * 2,
    }


def test_splits_read_the_weight_once_and_their_sums_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 320).bfloat16(), make_int4(40, 320, 64)  # 5 groups in 3 splits: 2, 2, 1
    found = moved(x, weight, SMALL._replace(outputs=64, num_splits=3), monkeypatch)
    assert found["codes", "load"] == 40 * 160 and found["x", "load"] == 3 * 320 * 2
    assert found["sums", "store"] == found["sums", "load"] == 3 * 3 * 40 * 4
    assert found["out", "store"] == 3 * 40 * 2


def test_a_split_without_inputs_adds_nothing() -> None:
    x, weight = torch.randn(2, 288), make_int4(16, 288, 32)  # 9 groups in 4 splits: 3, 3, 3, 0
    with interpreted():
        got = int4_linear(x, *weight, tile=SMALL._replace(num_splits=4))
    assert relative_error(got, reference.int4_linear(x, *weight)) < 1e-6


def test_the_tracer_sees_sums_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 128).bfloat16(), make_int4(16, 128, 32)
    monkeypatch.setattr(quant_gemm, "_grid", lambda *_: (1, 1, 2))  # two splits, where room was made for one
    with pytest.raises(OutOfBounds, match="store outside every tensor"):
        moved(x, weight, SMALL, monkeypatch)


@pytest.mark.parametrize("group_size", [32, 64])
def test_small_groups_compile_without_spills(group_size: int) -> None:
    """What the compile cases leave out: models whose widths only small groups divide. 576 = 9 x 64"""
    x, codes = torch.zeros(1, 576, dtype=torch.bfloat16), torch.zeros(1536, 288, dtype=torch.uint8)
    scales = outputs_together(torch.zeros(1536, 576 // group_size, dtype=torch.float16))
    with capture(SM90) as launches:
        int4_linear(x, codes, scales, scales, group_size)
    check_code(launches[0].kernel, wants_mma=True)


def test_a_batch_that_grows_compiles_nothing_anew() -> None:
    codes, scales = torch.zeros(4096, 2048, dtype=torch.uint8), outputs_together(torch.zeros(4096, 32, dtype=torch.float16))
    with capture(SM90) as launches:
        for num_rows in (1, 2, 7, 16):
            int4_linear(torch.zeros(num_rows, 4096, dtype=torch.bfloat16), codes, scales, scales, 128)
    assert len({id(kernel) for name, kernel in launches if name == "_int4_linear"}) == 1


# --- the choice of tiles --------------------------------------------------------------------------


def test_few_rows_get_small_tiles_and_enough_programs() -> None:
    for num_rows, num_outputs, num_blocks in ((1, 4096, 112), (16, 14336, 32), (4, 576, 24)):
        tile = choose_tile(num_rows, num_outputs, num_blocks, 132)
        num_programs = -(-num_outputs // tile.outputs) * tile.num_splits
        assert tile.rows == 16 and tile.num_splits >= 1
        assert num_programs >= 2 * 132 or tile.num_splits == num_blocks // LEAST_BLOCKS


def test_many_rows_are_not_split() -> None:
    assert choose_tile(4096, 14336, 32, 132) == Tile(128, 64, 1, num_warps=8, num_stages=3)
    assert choose_tile(32, 128, 3, 132).num_splits == 1  # too few blocks to share out
    assert choose_tile(4096, 14336, 32, 132, is_float32=True).outputs == 32
