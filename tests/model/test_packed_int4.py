"""Weights of 8 and 4 bits in the layout of torch's int4 product: what is multiplied by is what the codes mean, in every grouping."""

import pytest
import torch

from minserve.model import packed_int4
from minserve.model.packed_int4 import PackedInt4, arrange, as_nibbles, try_pack
from minserve.model.quantized_weight import QuantizedWeight
from tests.model.made_weights import made_weight

SHAPES = [(80, 192, 64), (33, 288, 128), (64, 576, None), (1, 64, 32), (130, 320, 256)]  # O, I, group
MOST_ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # of the largest result


def values_of(packed: PackedInt4, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(weight.shape, dtype=dtype)
    packed.write_values(out)
    return out


@pytest.mark.parametrize("dtype", MOST_ERROR, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_weight_multiplies_and_comes_back(shape: tuple, bits: int, mixed: bool, dtype: torch.dtype) -> None:
    weight = made_weight(bits, *shape, mixed=mixed)
    packed = try_pack(weight, dtype)
    assert packed is not None
    assert torch.equal(values_of(packed, weight, dtype), weight.dequantize(dtype))
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double() @ weight.dequantize().double().T
    got = packed(x)
    assert got.dtype == dtype and got.is_contiguous()
    assert (got.double() - exact).abs().max() < MOST_ERROR[dtype] * exact.abs().max()
    for row in range(5):  # who else is in a step changes nothing
        assert torch.equal(packed(x[row : row + 1])[0], got[row])


def test_nibbles_mean_the_same_weights() -> None:
    for bits in (4, 8):
        weight = made_weight(bits, 6, 192, 96, mixed=True)
        nibbles = as_nibbles(weight)
        assert nibbles is not None and nibbles.group_size == 32 and nibbles.codes.max() == 15
        columns = (nibbles.codes - nibbles.zeros.repeat_interleave(32, 1)) * nibbles.scales.repeat_interleave(32, 1)
        x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
        got = arrange(x, nibbles.order, nibbles.num_planes) @ columns.T
        torch.testing.assert_close(got, x @ weight.dequantize().T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_inputs", "group_size", "expected"), [(576, None, 64), (1536, None, 256), (288, 128, 32), (192, 128, 64)])
def test_case_107_groups_that_do_not_divide_are_cut_where_all_borders_agree(num_inputs: int, group_size: int, expected: int) -> None:
    nibbles = as_nibbles(made_weight(4, 16, num_inputs, group_size))
    assert nibbles is not None and nibbles.group_size == expected


@pytest.mark.parametrize(("num_inputs", "group_size"), [(64, 1), (48, None), (64, 24)])
def test_what_no_size_fits_is_not_packed(num_inputs: int, group_size: int | None) -> None:
    assert try_pack(made_weight(4, 64, num_inputs, group_size), torch.float32) is None


def test_bytes_are_those_of_the_formula_where_groups_are_the_products_own() -> None:
    packed = try_pack(made_weight(4, 128, 576, 64), torch.bfloat16)
    assert packed is not None and packed.num_bytes == 128 * (576 // 2 + 4 * 576 // 64)
    repeated = try_pack(made_weight(8, 128, 576, None, symmetric=True), torch.bfloat16)
    assert repeated is not None and repeated.num_bytes == 128 * (576 + 2 * 9 * 4)  # 9 copies of a scale, in two planes, with offsets


def test_case_101_every_byte_is_two_codes_that_do_not_touch_each_other() -> None:
    """All 256 pairs of neighbours in a byte, -6 2 3 -2 among them, come back."""
    high, low = torch.arange(256) // 16, torch.arange(256) % 16
    codes = torch.stack([high if output % 2 else low for output in range(64)]).to(torch.uint8)  # [64, 256]
    codes[32:] = codes[:32].flip(0)
    codes[0, :4] = torch.tensor([-6, 2, 3, -2]) + 8
    ones = torch.ones(64, 1)
    weight = QuantizedWeight(4, codes, ones, 8 * ones, torch.zeros(256, dtype=torch.int64))
    packed = try_pack(weight, torch.float32)
    assert packed is not None and torch.equal(packed.codes(), codes)
    assert packed(torch.eye(256)[:4])[:, 0].tolist() == [-6, 2, 3, -2]


def test_a_group_whose_scale_is_zero_means_zeros() -> None:
    weight = made_weight(4, 64, 64, 32)
    weight.scales[3] = 0
    packed = try_pack(weight, torch.bfloat16)
    assert packed is not None and values_of(packed, weight, torch.bfloat16)[3].abs().max() == 0


@pytest.mark.parametrize("failure", ["missing", "wrong product", "nan", "other layout"])
def test_a_torch_without_the_operator_or_with_another_is_noticed(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    class Other:
        def __call__(self, codes, tiles):
            if failure == "missing":
                raise RuntimeError("no such operator")
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, tiles)
            return packed.flip(0) if failure == "other layout" else packed

    weight, call = made_weight(4, 64, 64, 32), PackedInt4.__call__
    if failure == "wrong product":
        monkeypatch.setattr(PackedInt4, "__call__", lambda self, x: 1.1 * call(self, x))
    elif failure == "nan":
        monkeypatch.setattr(PackedInt4, "__call__", lambda self, x: torch.nan * call(self, x))
    else:
        monkeypatch.setattr(packed_int4, "to_operators_layout", lambda codes: Other()(codes, 1))
    assert try_pack(weight, torch.float32) is None
    monkeypatch.undo()
    assert try_pack(weight, torch.float32) is not None
