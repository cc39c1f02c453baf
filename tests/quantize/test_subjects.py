"""Models and caches that are measured: outliers that leave the model what it was, and quantizers on trial."""

import pytest
import torch

from minserve.model.kv_cache import bytes_per_token
from minserve.model.weights import RandomWeights
from minserve.quantize.quality import KL
from minserve.quantize.subjects import LoudKeys, Scheme, labels, make_runner, parse_format, with_outliers
from tests.quantize.small import logits_of, small_model, sums_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_change_no_logit_by_a_single_bit(dtype: torch.dtype) -> None:
    """With a bias, as Qwen2 has it."""
    model = small_model(qkv_bias=True)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    loud = with_outliers(model, factor=64.0, num_pairs=3)
    assert torch.equal(logits_of(loud, dtype, kv_cache_dtype=name), logits_of(model, dtype, kv_cache_dtype=name))


def test_outliers_are_in_the_keys_of_one_rotary_pair() -> None:
    plain, gain = RandomWeights(0), torch.tensor([1.0, 8.0, 1.0, 8.0])
    loud = LoudKeys(RandomWeights(0), [gain])
    for kind, expected in (("k", gain), ("q", 1 / gain), ("v", torch.ones(4))):
        name = f"model.layers.0.self_attn.{kind}_proj.weight"
        ratio = loud.take(name, (8, 3)) / plain.take(name, (8, 3))
        assert torch.equal(ratio, expected.repeat(2)[:, None].expand(8, 3))


def test_each_layer_has_its_own_loud_channels() -> None:
    weights = with_outliers(small_model(num_layers=6), seed=1).open_weights()
    assert isinstance(weights, LoudKeys)
    loud = [torch.nonzero(gain > 1).flatten().tolist() for gain in weights.gains]
    assert all(high == low + 16 for low, high in loud)
    assert len({low for low, _ in loud}) > 1


def test_outliers_refuse_what_they_cannot_keep_exact() -> None:
    with pytest.raises(ValueError, match="power of two, got 10"):
        with_outliers(small_model(), factor=10.0)
    with pytest.raises(ValueError, match="power of two, got 0"):
        with_outliers(small_model(), factor=0.0)
    with pytest.raises(ValueError, match="norms queries and keys"):
        with_outliers(small_model(qk_norm=True))
    with pytest.raises(ValueError, match="from 1 to 16, got 17"):
        with_outliers(small_model(), num_pairs=17)


@pytest.mark.parametrize("name", ["int8-unmixed", "int4-unmixed"])
def test_outliers_break_the_bare_quantizer(name: str) -> None:
    scheme = parse_format(name)
    calm, loud = (sums_of(model, scheme)[:, KL].sum() for model in (small_model(), with_outliers(small_model(), factor=64.0)))
    assert loud > 10 * calm


def test_a_scheme_that_changes_nothing_costs_nothing() -> None:
    assert sums_of(small_model(), Scheme("identity", lambda kv: kv))[:, KL].tolist() == [0, 0, 0]


def test_a_scheme_on_trial_equals_the_format_of_the_engine() -> None:
    trial, real = sums_of(small_model(), parse_format("int8-unmixed")), sums_of(small_model(), "int8")
    assert real[:, KL].min() > 0
    assert torch.allclose(trial[:, KL], real[:, KL], rtol=1e-3)


def test_a_scheme_sees_keys_before_values_of_every_token() -> None:
    seen: list[torch.Tensor] = []
    scheme = Scheme("spy", lambda kv: seen.append(kv) or kv)
    sums_of(small_model(), scheme)
    assert {tensor.shape[1:] for tensor in seen} == {(2, 2, 32)}
    assert sum(len(tensor) for tensor in seen) == 2 * 3 * 90  # layers x documents x tokens


def test_formats_by_name() -> None:
    config = small_model().config
    assert labels(config, "int4") == ("int4", bytes_per_token(config, "int4"))
    unmixed = parse_format("int4-unmixed")
    assert labels(config, unmixed) == ("int4-unmixed", bytes_per_token(config, "int4"))
    assert labels(config, Scheme("mine", lambda kv: kv)) == ("mine", None)
    with pytest.raises(ValueError, match="'int5' is not known"):
        parse_format("int5-unmixed")


def test_an_engines_format_gets_an_engines_cache() -> None:
    model = small_model()
    runner = make_runner(model, model.decoder(torch.float32), "fp32", "int8", 8)
    assert runner.cache.blocks.dtype == torch.int8
