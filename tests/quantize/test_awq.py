"""AWQ's two searches, against loops over tokens in float64."""

import pytest
import torch

from minserve.quantize.awq import clipped_error, scale_of, scaled_error, search_clip, search_scale
from minserve.quantize.rtn import output_error, round_to_nearest
from minserve.sim.weight_formats import WeightFormat, parse_weights
from tests.quantize.made_up import correlated, gram_of, normal, with_loud_input
from tests.quantize.slow_rounding import slow_error, slow_values

FORMATS = [WeightFormat(4, 8, False), WeightFormat(4, 16, True), WeightFormat(4, None, False)]  # 20 inputs


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_scale_is_the_one_that_loops_over_tokens_choose(fmt: WeightFormat) -> None:
    weights, tokens = [normal(6, 20), normal(4, 20, seed=1)], with_loud_input(30, 20)
    magnitude = tokens.double().abs().sum(0) / 30
    slow: dict[int, float] = {}
    for step in range(21):
        scale = magnitude ** (step / 20)
        scale = (scale / (scale.min() * scale.max()).sqrt()).float()
        slow[step] = sum(slow_error(w, slow_values(w * scale, fmt) / scale, tokens) for w in weights)
        fast = scaled_error(weights, gram_of(tokens).matrix, scale, fmt)
        assert fast == pytest.approx(slow[step], rel=1e-5)
    best = min(slow, key=lambda step: slow[step])
    assert 0 < best and slow[best] < 0.8 * slow[0]
    gram = gram_of(tokens)
    torch.testing.assert_close(search_scale(weights, gram.matrix, gram.magnitude, fmt), scale_of(gram.magnitude, best / 20))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_cut_is_the_one_that_loops_over_tokens_choose(fmt: WeightFormat) -> None:
    weight, tokens = normal(6, 20), with_loud_input(30, 20)
    size = fmt.group_size or 20
    starts = range(0, 20, size)
    slow = torch.zeros(11, 6, len(starts))
    for step, o, (g, start) in ((s, o, pair) for s in range(11) for o in range(6) for pair in enumerate(starts)):
        part, seen = weight[o : o + 1, start : start + size], tokens[:, start : start + size]
        slow[step, o, g] = slow_error(part, slow_values(part, fmt, 1 - 0.05 * step), seen)
    matrix = gram_of(tokens).matrix
    fast = torch.stack([clipped_error(weight, matrix, torch.tensor(1 - 0.05 * step), fmt) for step in range(11)])
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-9)
    shrink = search_clip(weight, matrix, fmt)
    torch.testing.assert_close(shrink, 1 - 0.05 * slow.argmin(0))
    assert shrink.shape == (6, len(starts)) and float(shrink.min()) < 1


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-sym", "int4-channel"])
def test_each_search_beats_rounding_to_nearest_on_other_text(name: str) -> None:
    weight, fmt = normal(64, 128), parse_weights(name)
    seen, other = (gram_of(part) for part in with_loud_input(2000, 128).split(1000))
    scale = search_scale([weight], seen.matrix, seen.magnitude, fmt)
    shrink = search_clip(weight, seen.matrix, fmt)
    scaled, scaled_matrix = weight * scale, seen.matrix / scale / scale[:, None]
    both = search_clip(scaled, scaled_matrix, fmt)
    values = {
        "nearest": round_to_nearest(weight, fmt).dequantize(),
        "clip": round_to_nearest(weight, fmt, shrink).dequantize(),
        "scale": round_to_nearest(scaled, fmt).dequantize() / scale,
        "both": round_to_nearest(scaled, fmt, both).dequantize() / scale,
    }
    errors = {name: output_error(weight, value, other.matrix) for name, value in values.items()}
    assert errors["nearest"] > 1.1 * errors["clip"] and errors["nearest"] > 1.5 * errors["scale"]
    assert errors["scale"] > errors["both"] > 0


def test_the_weights_of_a_loud_input_get_a_finer_grid() -> None:
    weight, gram, fmt = normal(64, 64), gram_of(with_loud_input(1000, 64)), parse_weights("int4")
    scale = search_scale([weight], gram.matrix, gram.magnitude, fmt)
    assert int(scale.argmax()) == 5
    before, after = (round_to_nearest(weight, fmt).dequantize(), round_to_nearest(weight * scale, fmt).dequantize() / scale)
    assert (after - weight)[:, 5].norm() < 0.5 * (before - weight)[:, 5].norm()
    assert (after - weight).norm() > (before - weight).norm()  # the others pay


def test_without_a_loud_input_there_is_no_scale() -> None:
    """All inputs equally loud: every alpha gives 1, and the product is the same."""
    weight, fmt = normal(16, 32), WeightFormat(4)
    scale = search_scale([weight], torch.eye(32), torch.full((32,), 0.7), fmt)
    assert torch.equal(scale, torch.ones(32))


def test_neither_search_is_worse_than_rounding_to_nearest() -> None:
    """A channel is a whole row, so what the clip search measures is the error of the output itself."""
    for seed in range(5):
        weight, gram, fmt = normal(8, 32, seed=seed), gram_of(correlated(100, 32, seed=seed)), parse_weights("int4-channel")
        nearest = output_error(weight, round_to_nearest(weight, fmt).dequantize(), gram.matrix)
        scale = search_scale([weight], gram.matrix, gram.magnitude, fmt)
        clipped = round_to_nearest(weight, fmt, search_clip(weight, gram.matrix, fmt))
        assert scaled_error([weight], gram.matrix, scale, fmt) <= nearest
        assert output_error(weight, clipped.dequantize(), gram.matrix) <= nearest * 1.00001


def test_a_scale_for_several_matrices_is_best_for_their_sum() -> None:
    weights, gram, fmt = [normal(8, 32), normal(24, 32, seed=1)], gram_of(with_loud_input(200, 32)), WeightFormat(4)
    scale = search_scale(weights, gram.matrix, gram.magnitude, fmt)
    stacked = search_scale([torch.cat(weights)], gram.matrix, gram.magnitude, fmt)
    torch.testing.assert_close(scale, stacked)


def test_inputs_that_are_always_zero_have_a_finite_scale() -> None:
    tokens = with_loud_input(200, 32)
    tokens[:, [0, 9]] = 0
    gram, weight = gram_of(tokens), normal(16, 32)
    for fmt in (WeightFormat(4), parse_weights("int4-g32")):
        scale = search_scale([weight], gram.matrix, gram.magnitude, fmt)
        assert scale.isfinite().all() and bool((scale > 0).all())
        assert search_clip(weight, gram.matrix, fmt).isfinite().all()


def test_a_short_last_group_is_cut_by_itself() -> None:
    weight, matrix = normal(8, 40), gram_of(correlated(200, 40)).matrix
    shrink = search_clip(weight, matrix, WeightFormat(4, 32))
    assert shrink.shape == (8, 2)
    torch.testing.assert_close(shrink[:, 1:], search_clip(weight[:, 32:], matrix[32:, 32:], WeightFormat(4)))
