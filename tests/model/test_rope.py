import math

import pytest
import torch

from minserve.model.config import RopeConfig
from minserve.model.rope import attention_factor, inverse_frequencies, rotate_, rotation


def turned(x: torch.Tensor, positions: list[int], rope: RopeConfig) -> torch.Tensor:
    """x: [T, D], each row turned to its position."""
    y = x[:, None].clone()
    rotate_(y, rotation(torch.tensor(positions), inverse_frequencies(rope, x.shape[-1]), attention_factor(rope)))
    return y[:, 0]


def test_case_65_pairs_are_half_a_head_apart():
    got = turned(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), [1], RopeConfig(theta=10_000.0))
    torch.testing.assert_close(got, torch.tensor([[math.cos(1), 0.0, math.sin(1), 0.0]]))


def test_position_zero_leaves_a_vector_as_it_is():
    x = torch.randn(1, 64)
    assert torch.equal(turned(x, [0], RopeConfig()), x)


def test_dot_products_depend_on_the_distance_only():
    q, k = torch.randn(1, 64), torch.randn(1, 64)
    near = turned(q, [7], RopeConfig()) @ turned(k, [3], RopeConfig()).T
    far = turned(q, [507], RopeConfig()) @ turned(k, [503], RopeConfig()).T
    torch.testing.assert_close(near, far, atol=1e-3, rtol=0)


def test_case_73_angles_are_made_in_float32():
    """In bf16, position 15,962 would become 15,936 and its cosine -0.2680."""
    positions = torch.arange(16_385)
    turn = rotation(positions, inverse_frequencies(RopeConfig(theta=10_000.0), 128))
    exact = (positions.double()[:, None] / 10_000.0 ** (torch.arange(0, 128, 2).double() / 128)).cos()
    assert turn.cos.dtype == torch.float32
    assert (turn.cos[:, 0, 0].double() - exact).abs().max() < 2e-3
    assert turn.cos[15_962, 0, 0, 0].item() == pytest.approx(-0.9080, abs=1e-3)


def test_case_73_the_angle_of_position_1857():
    angle = 1857 * inverse_frequencies(RopeConfig(theta=10_000.0), 32)[1].item()
    assert angle == pytest.approx(1044.268, abs=1e-3)


def test_case_73_bf16_vectors_are_turned_by_float32_angles():
    x = torch.ones(1, 128)
    got = turned(x.bfloat16(), [15_962], RopeConfig())
    torch.testing.assert_close(got.float(), turned(x, [15_962], RopeConfig()), atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("head_dim", "factor", "first", "blend"),
    [
        (64, 32.0, 15, [0.60557, 0.30374, 0.10345]),
        (128, 8.0, 29, [0.82817, 0.64374, 0.49351, 0.37112, 0.27143, 0.19021]),
    ],
)
def test_case_74_llama3_scaling(head_dim, factor, first, blend):
    plain = inverse_frequencies(RopeConfig(theta=500_000.0), head_dim)
    rope = RopeConfig(kind="llama3", theta=500_000.0, factor=factor, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    ratio = inverse_frequencies(rope, head_dim) / plain
    want = torch.cat((torch.ones(first), torch.tensor(blend), torch.full((head_dim // 2 - first - len(blend),), 1 / factor)))
    torch.testing.assert_close(ratio, want, atol=1e-5, rtol=0)


def test_case_76_linear_scaling_stretches_positions():
    x = torch.randn(1, 64)
    got = turned(x, [8], RopeConfig(kind="linear", factor=4.0))
    torch.testing.assert_close(got, turned(x, [2], RopeConfig()))


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_positions=1024)
    ratio = inverse_frequencies(rope, 64) / inverse_frequencies(RopeConfig(), 64)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(0.25)
    assert bool((ratio.diff() <= 0).all())


def test_yarn_attention_factor():
    assert attention_factor(RopeConfig(kind="linear", factor=4.0)) == 1.0
    assert attention_factor(RopeConfig(kind="yarn", factor=4.0)) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(RopeConfig(kind="yarn", factor=0.5)) == 1.0
    assert attention_factor(RopeConfig(kind="yarn", factor=4.0, attention_factor=1.5)) == 1.5
    both = RopeConfig(kind="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.5)
    assert attention_factor(both) == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
