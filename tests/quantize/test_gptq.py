"""GPTQ against the formula, an inverse for every input; and what must hold whatever the numbers."""

import itertools
import math

import pytest
import torch

from minserve.quantize.gptq import Gram, gptq, inverse_factor
from minserve.quantize.rtn import output_error, round_to_nearest
from minserve.sim.weight_formats import WeightFormat, parse_weights
from tests.quantize.made_up import correlated, gram_of, normal
from tests.quantize.slow_rounding import slow_error, slow_gptq

FORMATS = [
    WeightFormat(4, 16, False),  # 40 inputs: the last group has 8
    WeightFormat(4, 16, True),
    WeightFormat(4, None, False),
    WeightFormat(8, None, True),
    WeightFormat(8, 8, False),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("damping", [0.01, 0.2])
def test_same_codes_as_the_slow_version(fmt: WeightFormat, order: bool, damping: float) -> None:
    weight, matrix = normal(48, 40), gram_of(correlated(300, 40)).matrix
    diagonal = matrix.diagonal().tolist()
    turns = sorted(range(40), key=lambda i: -diagonal[i]) if order else list(range(40))
    damped = matrix.double() + damping * sum(diagonal) / 40 * torch.eye(40)
    want, ties = slow_gptq(weight, damped, fmt, turns)
    got = gptq(weight, matrix, fmt, order=order, damping=damping, block_size=7)
    same = (got.codes == want).all(1)
    assert int((~same).sum()) <= int(ties.sum()) <= 4  # an output that met a tie may go on differently
    assert bool(same[~ties].all())
    nearest = round_to_nearest(weight, fmt)
    assert torch.equal(got.scales, nearest.scales) and torch.equal(got.zeros, nearest.zeros)
    assert not torch.equal(got.codes, nearest.codes)


def test_the_error_is_the_one_over_the_tokens() -> None:
    weight, tokens, fmt = normal(16, 40), correlated(200, 40), WeightFormat(4, 16, False)
    values = gptq(weight, gram_of(tokens).matrix, fmt).dequantize()
    assert output_error(weight, values, gram_of(tokens).matrix) == pytest.approx(slow_error(weight, values, tokens), rel=1e-5)


@pytest.mark.parametrize("name", ["int4", "int4-g32-sym", "int4-channel", "int8"])
def test_better_than_to_nearest_on_text_it_has_seen_and_on_other_text(name: str) -> None:
    weight, fmt = normal(64, 128), parse_weights(name)
    seen, other = (gram_of(part).matrix for part in correlated(4000, 128).split(2000))
    nearest, plain, ordered = (
        quantized.dequantize()
        for quantized in (round_to_nearest(weight, fmt), gptq(weight, seen, fmt, order=False), gptq(weight, seen, fmt))
    )
    for matrix in (seen, other):
        errors = [output_error(weight, values, matrix) for values in (nearest, plain, ordered)]
        assert errors[0] > 1.5 * errors[1] > 0 and errors[1] > 1.1 * errors[2] > 0
    assert (ordered - weight).norm() > (nearest - weight).norm()  # single weights are further off


def test_between_to_nearest_and_the_best_codes_of_all() -> None:
    """Three inputs have few enough codes to try all combinations near the weights."""
    weight, matrix, fmt = normal(200, 3), gram_of(correlated(50, 4)[:, :3]).matrix, WeightFormat(4)
    nearest = round_to_nearest(weight, fmt)
    steps = torch.tensor(list(itertools.product((-2, -1, 0, 1, 2), repeat=3)))  # [125, 3]
    codes = (nearest.codes[:, None].long() + steps).clamp(0, 15)  # [O, 125, 3]
    difference = (codes - 8) * nearest.scales[:, None] - weight[:, None]
    best = float((difference @ matrix * difference).sum(2).amin(1).sum())
    errors = [output_error(weight, q.dequantize(), matrix) for q in (gptq(weight, matrix, fmt, damping=0), nearest)]
    assert best <= errors[0] < errors[1]
    assert errors[0] < best + 0.6 * (errors[1] - best)


@pytest.mark.parametrize("order", [True, False])
def test_inputs_that_do_not_go_together_are_rounded_to_nearest(order: bool) -> None:
    weight, fmt = normal(32, 96), parse_weights("int4")
    diagonal = torch.rand(96, generator=torch.Generator().manual_seed(1)) + 0.1
    assert torch.equal(gptq(weight, diagonal.diag(), fmt, order=order).codes, round_to_nearest(weight, fmt).codes)


def test_the_block_size_changes_only_the_speed() -> None:
    weight, matrix, fmt = normal(32, 96), gram_of(correlated(500, 96)).matrix, parse_weights("int4-g32")
    one, some, all_at_once = (gptq(weight, matrix, fmt, block_size=size).codes for size in (1, 40, 96))
    assert int((one != some).any(1).sum()) <= 1 and int((one != all_at_once).any(1).sum()) <= 1  # sums in another order: a tie


def test_codes_and_groups_stay_in_the_inputs_own_order() -> None:
    """Loud inputs first is an order of work. Inputs given in another order come back in that order."""
    weight, matrix, fmt = normal(32, 64), gram_of(correlated(500, 64)).matrix, WeightFormat(4)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    codes = gptq(weight, matrix, fmt).codes
    moved = gptq(weight[:, shuffled], matrix[shuffled][:, shuffled], fmt).codes
    assert int((moved != codes[:, shuffled]).any(1).sum()) <= 1
    assert gptq(weight, matrix, WeightFormat(4, 32)).group_of.tolist() == [0] * 32 + [1] * 32


@pytest.mark.parametrize("damping", [0.01, 0.0])
def test_inputs_that_are_always_zero(damping: float) -> None:
    tokens = correlated(500, 64)
    dead = torch.tensor([0, 17, 63])
    tokens[:, dead] = 0
    weight, fmt = normal(32, 64), parse_weights("int4-g32")
    quantized = gptq(weight, gram_of(tokens).matrix, fmt, damping=damping)
    alive = [i for i in range(64) if i not in dead.tolist()]
    assert torch.equal(quantized.codes[:, dead], round_to_nearest(weight, fmt).codes[:, dead])
    assert not torch.equal(quantized.codes[:, alive], round_to_nearest(weight, fmt).codes[:, alive])
    nothing = gptq(weight, torch.zeros(64, 64), fmt, damping=damping)
    assert torch.equal(nothing.codes, round_to_nearest(weight, fmt).codes)


def test_fewer_tokens_than_inputs() -> None:
    """Damping makes up for what the tokens leave open; without it there is an error that says so."""
    weight, tokens, fmt = normal(16, 64), correlated(500, 64)[:20], WeightFormat(4)
    matrix = gram_of(tokens).matrix
    nearest, values = round_to_nearest(weight, fmt).dequantize(), gptq(weight, matrix, fmt).dequantize()
    assert output_error(weight, values, matrix) < 0.1 * output_error(weight, nearest, matrix)
    with pytest.raises(ValueError, match=r"64 inputs has no inverse: elimination stopped at input \d+.*Damping was 0 of"):
        gptq(weight, matrix, fmt, damping=0)


def test_a_gram_matrix_that_is_not_a_number_is_refused() -> None:
    matrix = torch.eye(8)
    matrix[3, 3] = math.nan
    with pytest.raises(ValueError, match="no inverse"):
        gptq(normal(4, 8), matrix, WeightFormat(4))


def test_nothing_given_is_changed() -> None:
    weight, matrix = normal(8, 32), gram_of(correlated(100, 32)).matrix.double()
    before = weight.clone(), matrix.clone()
    gptq(weight, matrix, WeightFormat(4), order=False)
    inverse_factor(matrix, 0.01)
    assert torch.equal(weight, before[0]) and torch.equal(matrix, before[1])


def test_the_factor_holds_the_inverse_of_every_rest() -> None:
    matrix = gram_of(correlated(200, 12)).matrix
    factor = inverse_factor(matrix, 0.01).double()
    damped = matrix.double() + 0.01 * matrix.double().diagonal().mean() * torch.eye(12)
    assert torch.equal(factor, factor.triu())
    for i in range(12):
        torch.testing.assert_close(factor[i, i] * factor[i, i:], torch.linalg.inv(damped[i:, i:])[0], rtol=1e-5, atol=1e-6)


def test_gram_is_a_mean_over_all_tokens_added() -> None:
    tokens = correlated(90, 24)
    gram = gram_of(*tokens.split((10, 0, 70, 10)))
    torch.testing.assert_close(gram.matrix.double(), tokens.double().T @ tokens.double() / 90, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gram.magnitude, tokens.abs().mean(0))
    assert gram.num_tokens == 90
    half = gram_of(tokens.bfloat16())
    assert half.matrix.dtype == half.magnitude.dtype == torch.float32
    torch.testing.assert_close(half.matrix, tokens.bfloat16().float().T @ tokens.bfloat16().float() / 90)
    assert (Gram(3).matrix == 0).all() and (Gram(3).magnitude == 0).all()
