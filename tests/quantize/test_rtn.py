"""Round to nearest, by itself and as weights are loaded."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from minserve.model.decoder import Decoder
from minserve.model.quantized_weight import QuantizedWeight, storable
from minserve.model.weights import RandomWeights
from minserve.quantize.rtn import RoundedWeights, grid, group_ranges, output_error, round_to_nearest
from minserve.sim.weight_formats import WeightFormat, parse_weights
from tests.model.tiny_net import full_logits, tiny_config, tokens_for
from tests.quantize.made_up import normal
from tests.quantize.slow_rounding import slow_codes, slow_error, slow_values

NAMES = ["int8", "int8-g32-asym", "int4", "int4-g32-sym", "int4-g128", "int4-channel", "int4-channel-sym"]


def in_steps(quantized: QuantizedWeight, weight: Tensor) -> Tensor:
    """How far each weight has moved, in steps of its grid."""
    return (quantized.dequantize() - weight).abs() / quantized.scales[:, quantized.group_of]


@pytest.mark.parametrize("name", NAMES)
def test_same_codes_as_the_slow_version(name: str) -> None:
    weight, fmt = normal(24, 160), parse_weights(name)
    quantized = round_to_nearest(weight, fmt)
    assert torch.equal(quantized.codes.long(), slow_codes(weight, fmt))
    assert torch.equal(quantized.dequantize().double(), slow_values(weight, fmt))
    assert quantized.scales.shape == quantized.zeros.shape == (24, fmt.num_groups(160))


@pytest.mark.parametrize("name", NAMES)
def test_no_weight_moves_by_more_than_half_a_step(name: str) -> None:
    weight, fmt = normal(200, 256), parse_weights(name)
    beyond = 0.0 if fmt.symmetric else 2**fmt.bits / 256  # what the rounded scale may lack at the ends
    assert float(in_steps(round_to_nearest(weight, fmt), weight).max()) <= 0.5 + beyond


@pytest.mark.parametrize("bits, most, half_step", [(8, 0.04, 0.0434), (4, 0.625, 0.7344)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_group_on_one_side_of_zero(bits: int, most: float, half_step: float, sign: int) -> None:
    """Case 104: the range is stretched to 0, else the zero point, clipped to a code, would move the whole group.

    In 4 bits the exact scale, 22 / 15, would leave 0.6; in 8 significant bits it is 47 / 32.
    """
    weight = sign * torch.arange(-22.0, -14.0)[None]
    quantized = round_to_nearest(weight, WeightFormat(bits, None, symmetric=False))
    error = (quantized.dequantize() - weight).abs().max()
    assert float(error) <= most and float(error) <= half_step
    assert float(quantized.zeros) == (2**bits - 1 if sign == 1 else 0)


@pytest.mark.parametrize("name", ["int4-g32-sym", "int4-g64-sym", "int4-channel-sym", "int8", "int8-g128"])
def test_rounding_twice_changes_nothing_on_a_symmetric_grid(name: str) -> None:
    """Case 106. The scale comes back too: one of the ends that chose it is always in use."""
    once = round_to_nearest(normal(100, 256), parse_weights(name))
    twice = round_to_nearest(once.dequantize(), parse_weights(name))
    assert torch.equal(once.codes, twice.codes) and torch.equal(once.scales, twice.scales)


def test_rounding_twice_on_an_asymmetric_grid_moves_few_groups_by_less_than_a_step() -> None:
    once = round_to_nearest(normal(400, 256), parse_weights("int4"))
    twice = round_to_nearest(once.dequantize(), parse_weights("int4"))
    assert 0 < float((once.scales != twice.scales).float().mean()) < 0.03  # an end's code was not used: the range is smaller now
    assert float(in_steps(twice, once.dequantize()).max()) <= 0.55


def test_a_foreign_grid_of_all_sixteen_codes_is_kept() -> None:
    """Case 106: absmax / 7 would move -4 .. 3.5 by up to 0.286."""
    weight = torch.arange(-8.0, 8.0)[None] * 0.5
    for sign in (1, -1):
        quantized = round_to_nearest(sign * weight, WeightFormat(4))
        moved = float((quantized.dequantize() - sign * weight).abs().max())
        assert moved == (0 if sign == 1 else pytest.approx(0.28125))  # 4 / 7 in 8 bits is 0.5703125


@pytest.mark.parametrize("num_inputs, group_size", [(288, 128), (288, 256), (192, 128), (64, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_size_that_does_not_divide_leaves_a_short_last_group(num_inputs: int, group_size: int, symmetric: bool) -> None:
    """Case 107: every group, the last one too, is rounded as if it stood alone, and counts in the bytes."""
    weight, fmt = normal(8, num_inputs), WeightFormat(4, group_size, symmetric)
    quantized = round_to_nearest(weight, fmt)
    alone = [round_to_nearest(part, WeightFormat(4, None, symmetric)).dequantize() for part in weight.split(group_size, dim=1)]
    assert torch.equal(quantized.dequantize(), torch.cat(alone, dim=1))
    num_groups = math.ceil(num_inputs / group_size)
    assert quantized.scales.shape == (8, num_groups)
    assert fmt.num_bytes(8, num_inputs) == 8 * (num_inputs // 2 + 4 * num_groups)


def test_the_error_grows_evenly_with_the_group() -> None:
    """Case 109: 5 to 11.2 % a doubling, with no jump at any size; a whole row is one more doubling."""
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((1024, 1024), dtype=np.float32)).view(512, 2048)
    sizes = (32, 64, 128, 256, 512, 1024, None)
    errors = [float((round_to_nearest(weight, WeightFormat(4, size)).dequantize() - weight).norm()) for size in sizes]
    ratios = [after / before for before, after in zip(errors, errors[1:], strict=False)]
    assert errors[0] == pytest.approx(94.14, abs=0.01)  # were -8 left unused, it would be 99.28
    assert min(ratios) > 1.05 and max(ratios) < 1.112


@pytest.mark.parametrize("symmetric", [True, False])
def test_special_group_sizes(symmetric: bool) -> None:
    """Case 110: a group of all inputs or more is a channel, one of 1 is exact but for its scale, 0 and -1 are refused."""
    weight = normal(6, 40)
    channel = round_to_nearest(weight, WeightFormat(4, None, symmetric))
    for size in (40, 64):
        same = round_to_nearest(weight, WeightFormat(4, size, symmetric))
        assert torch.equal(same.codes, channel.codes) and torch.equal(same.scales, channel.scales)
    assert channel.scales.shape == (6, 1)
    single = round_to_nearest(weight, WeightFormat(4, 1, symmetric))
    torch.testing.assert_close(single.dequantize(), weight, rtol=2**-8, atol=1e-7)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1 input, got {size}"):
            round_to_nearest(weight, WeightFormat(4, size, symmetric))


def test_zeros_and_tiny_weights_stay_where_they_are() -> None:
    weight = torch.tensor([[0.0] * 8, [1e-9, -1e-9] * 4, [0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]])
    for fmt in (WeightFormat(4), WeightFormat(4, None, False), WeightFormat(8), WeightFormat(8, None, False)):
        values = round_to_nearest(weight, fmt).dequantize()
        assert (values[:2] == 0).all() and (values[2][weight[2] == 0] == 0).all()
        assert values.isfinite().all()


def test_scales_are_storable() -> None:
    weight = normal(64, 64) * torch.logspace(-6, 3, 64)[:, None]
    for name in NAMES:
        scales = round_to_nearest(weight, parse_weights(name)).scales
        assert torch.equal(storable(scales), scales) and torch.equal(scales.half().float(), scales)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e7])
def test_weights_without_a_grid_are_refused(bad: float) -> None:
    weight = normal(2, 8)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="no 4-bit grid"):
        round_to_nearest(weight, WeightFormat(4))


def test_a_smaller_range_clips_the_ends_and_is_finer_inside() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.3, 0.11, -0.2, 0.0]])
    whole, half = (round_to_nearest(weight, WeightFormat(8, None, False), torch.tensor([[f]])) for f in (1.0, 0.5))
    assert float(half.scales) == float(whole.scales) / 2
    assert half.dequantize().abs().max() == pytest.approx(0.5, rel=0.01)
    inside = slice(2, 6)
    assert in_steps(half, weight)[:, inside].max() <= 0.5
    assert torch.equal(half.dequantize().double(), slow_values(weight, WeightFormat(8, None, False), 0.5))


def test_ranges_of_groups() -> None:
    low, high = group_ranges(torch.tensor([[1.0, 2.0, 3.0, -4.0, 5.0]]), 2)
    assert low.tolist() == [[1, -4, 0]] and high.tolist() == [[2, 3, 5]]


def test_grid_covers_its_range() -> None:
    low, high = torch.tensor([-8.0, -1.0, 2.0, 0.0]), torch.tensor([1.0, 7.0, 30.0, 0.0])
    scales, zeros = grid(low, high, 4, symmetric=True)
    assert scales.tolist() == [1, 1, pytest.approx(30 / 7, rel=1 / 256), 2**-24] and zeros.tolist() == [8] * 4
    scales, zeros = grid(low, high, 4, symmetric=False)
    assert zeros.tolist() == [13, 2, 0, 0] and scales[2] == 2


def test_output_error_is_the_mean_over_tokens() -> None:
    weight, values, tokens = normal(5, 12), normal(5, 12, seed=1), normal(40, 12, seed=2)
    assert output_error(weight, values, tokens.T @ tokens / 40) == pytest.approx(slow_error(weight, values, tokens), rel=1e-5)
    assert output_error(weight, weight, tokens.T @ tokens) == 0


class Stored:
    """Named tensors."""

    def __init__(self, **tensors: Tensor):
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.num_taken = 0

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        self.num_taken += 1
        assert tuple(self.tensors[name].shape) == tuple(shape)
        return self.tensors[name]

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        return None


DOWN, EMBEDDING, HEAD = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


def stored(**more: Tensor) -> Stored:
    down = normal(8, 96).bfloat16()
    bias, norm = torch.ones(8), torch.ones(96)
    layer = {"model__layers__0__mlp__down_proj__weight": down, "model__layers__0__mlp__down_proj__bias": bias, "model__norm__weight": norm}
    return Stored(**layer, model__embed_tokens__weight=normal(30, 96, seed=1), **more)


def test_weights_are_rounded_as_they_are_taken() -> None:
    inner = stored()
    rounded = RoundedWeights(inner, parse_weights("int4"))
    got, want = rounded.quantized(DOWN, (8, 96)), round_to_nearest(inner.tensors[DOWN].float(), parse_weights("int4"))
    assert got is not None and torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
    assert rounded.quantized("model.norm.weight", (96,)) is None and rounded.quantized(EMBEDDING, (30, 96)) is None
    assert rounded.take("model.norm.weight", (96,)) is inner.tensors["model.norm.weight"]
    assert DOWN in rounded and "model.layers.1.mlp.down_proj.weight" not in rounded


def test_a_tied_head_is_the_embedding_in_int8() -> None:
    inner = stored()
    rounded = RoundedWeights(inner, parse_weights("int4"))
    want = round_to_nearest(inner.tensors[EMBEDDING], WeightFormat(8))
    for taken_before in (False, True):
        if taken_before:
            rounded.take(EMBEDDING, (30, 96))
        head = rounded.quantized(HEAD, (30, 96))
        assert head is not None and torch.equal(head.codes, want.codes)
    assert inner.num_taken == 2  # a tensor that was taken is not read again
    assert RoundedWeights(inner, parse_weights("int4"), head_bits=16).quantized(HEAD, (30, 96)) is None


def test_a_head_of_its_own_is_used_unless_the_config_ties_it() -> None:
    own = normal(30, 96, seed=2)
    for tied, source in ((None, own), (False, own), (True, normal(30, 96, seed=1))):
        head = RoundedWeights(stored(lm_head__weight=own), parse_weights("int8"), tied=tied).quantized(HEAD, (30, 96))
        assert head is not None and torch.equal(head.codes, round_to_nearest(source, WeightFormat(8)).codes)


def test_the_tied_head_of_random_weights_is_their_embedding() -> None:
    rounded = RoundedWeights(RandomWeights(3), parse_weights("int8"))
    embedding = rounded.take(EMBEDDING, (30, 96))  # RandomWeights never gives the same tensor twice
    head = rounded.quantized(HEAD, (30, 96))
    assert head is not None and torch.equal(head.codes, round_to_nearest(embedding, WeightFormat(8)).codes)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_multiplies_by_the_rounded_weights(tied: bool) -> None:
    """The same logits as from a decoder that takes the values of the codes as its weights."""
    config, fmt = tiny_config(tied_embeddings=tied), parse_weights("int4-g32")

    class Values(RandomWeights):
        def take(self, name: str, shape: Sequence[int]) -> Tensor:
            weight = super().take(name, shape)
            known = WeightFormat(8) if name == HEAD else fmt if name.endswith("_proj.weight") else None
            return round_to_nearest(weight, known).dequantize() if known else weight

    rounded = Decoder(config, RoundedWeights(RandomWeights(0, 0.2), fmt, 16 if tied else 8, tied))
    values, exact = Decoder(config, Values(0, 0.2)), Decoder(config, RandomWeights(0, 0.2))
    got, want, floats = (full_logits(decoder, tokens_for(0, 40)) for decoder in (rounded, values, exact))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert (got - floats).abs().max() > 0.1


def test_a_head_of_many_rows_is_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minserve.quantize.rtn.ROWS_AT_ONCE", 7)
    head = RoundedWeights(stored(), parse_weights("int4")).quantized(HEAD, (30, 96))
    assert head is not None and torch.equal(head.codes, round_to_nearest(normal(30, 96, seed=1), WeightFormat(8)).codes)


def test_other_bits_of_the_head_are_refused() -> None:
    with pytest.raises(ValueError, match="8 or 16 bits, got 4"):
        RoundedWeights(stored(), parse_weights("int4"), head_bits=4)
