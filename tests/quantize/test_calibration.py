"""A whole small net by each method: against the quantizers on hand-made Gram matrices, and before rounding against itself."""

import pytest
import torch
from torch import Tensor

from minserve.model.config import ModelConfig
from minserve.model.decoder import Decoder, load_layer
from minserve.model.quantized_weight import QuantizedWeight, stack
from minserve.model.tokenizer import ByteTokenizer
from minserve.quantize import calibration
from minserve.quantize.awq import search_clip
from minserve.quantize.calibration import LayerByLayer, Overlay, divide_outputs, products_of, quantize_model, split
from minserve.quantize.gptq import gptq
from minserve.quantize.quantized_model import QuantizedModel
from minserve.quantize.recipe import Recipe
from minserve.quantize.rtn import RoundedWeights, output_error, round_to_nearest
from minserve.quantize.walk import Walk, calibration_documents
from tests.model.tiny_net import full_logits, tiny_config, tokens_for
from tests.quantize.fixed_weights import FixedWeights, HeldWeights

CONFIG = tiny_config()
OWN_HEADS = tiny_config(num_kv_heads=4, qkv_bias=True, mlp_bias=True)
LITTLE_TEXT = "documents=8,tokens=128"
MATRICES = {
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def quantized(words: str, config: ModelConfig = CONFIG) -> QuantizedModel:
    return quantize_model(config, FixedWeights(), ByteTokenizer(), Recipe.parse(words), progress=False, dtype=torch.float32)


def take(name: str, shape: tuple[int, ...]) -> Tensor:
    return FixedWeights().take(name, shape)


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and torch.equal(a.zeros, b.zeros)


@pytest.mark.parametrize("words", ["int8", "int4", f"gptq-int4-g32-sym:{LITTLE_TEXT}", f"awq-int4-channel:{LITTLE_TEXT}"])
def test_the_report_says_what_was_done(words: str) -> None:
    model = quantized(words)
    fmt, report = model.recipe.fmt, model.report
    expected = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in MATRICES.items()}
    assert {name: weight.shape for name, weight in model.quantized.items()} == expected
    assert {line.name: (line.num_outputs, line.num_inputs) for line in report.matrices} == expected
    for line in report.matrices:
        weight = model.quantized[line.name]
        assert weight.bits == fmt.bits and weight.scales.shape == (line.num_outputs, line.num_groups)
        assert line.num_groups == fmt.num_groups(line.num_inputs)
        assert (line.bytes_before, line.bytes_after) == (weight.codes.numel() * 4, fmt.num_bytes(*weight.shape))
        assert (line.error is not None and 0 < line.error < 0.1) if model.recipe.is_calibrated else line.error is None
    assert report.bytes_after == sum(fmt.num_bytes(*shape) for shape in expected.values())
    assert report.recipe == words and report.num_tokens == (1024 if model.recipe.is_calibrated else 0)
    assert f"{words}: 14 matrices" in report.describe()


def test_a_group_that_is_cut_short_is_in_the_report() -> None:
    assert "96 inputs in groups of 64: the last one has 32" in quantized("int4").report.describe()
    assert "groups" not in quantized("int4-g32").report.describe()


def test_text_that_is_shorter_than_asked_for_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "calibration_documents", lambda *_: [tokens_for(seed, 50) for seed in range(3)])
    report = quantized("gptq-int4-g32:documents=4,tokens=50").report
    assert report.num_tokens == 150
    assert "the text has 3 documents for calibration, 4 were asked for" in report.notes


def test_the_reported_error_is_that_of_the_outputs() -> None:
    model = quantized(f"gptq-int4-g32:{LITTLE_TEXT}")
    layer = load_layer(CONFIG, FixedWeights(), 0, torch.float32)
    grams, _ = Walk(CONFIG, FixedWeights(), calibration_documents(ByteTokenizer(), 8, 128), torch.float32).watch(layer)
    name = "model.layers.0.mlp.down_proj.weight"
    weight, matrix = take(name, (64, 96)), grams["down"].matrix
    error = output_error(weight, model.quantized[name].dequantize(), matrix) / output_error(weight, torch.zeros(64, 96), matrix)
    assert model.report.matrices[6].name == name
    assert model.report.matrices[6].error == pytest.approx(error, rel=1e-3)


def test_gptq_sees_the_inputs_that_quantized_layers_made() -> None:
    recipe = Recipe.parse(f"gptq-int4-g32:{LITTLE_TEXT},damping=0.05")
    model, walk = quantized(recipe.name), Walk(CONFIG, FixedWeights(), calibration_documents(ByteTokenizer(), 8, 128), torch.float32)
    in_codes = HeldWeights(FixedWeights(), {name: weight.dequantize() for name, weight in model.quantized.items()})
    for index in range(2):
        layer = load_layer(CONFIG, FixedWeights(), index, torch.float32)
        grams, unquantized = walk.watch(layer)
        for product in products_of(CONFIG, index):
            for name in product.names:
                weight = take(name, model.quantized[name].shape)
                assert same(model.quantized[name], gptq(weight, grams[product.field].matrix, recipe.fmt, damping=0.05))
        walk.streams = walk.through(load_layer(CONFIG, in_codes, index, torch.float32))
        assert not torch.allclose(walk.streams[0], unquantized[0], rtol=1e-2)
    assert model.replaced == {}


def test_options_reach_gptq() -> None:
    names = [f"gptq-int4-g32:{LITTLE_TEXT}{option}" for option in ("", ",no-order", ",damping=1", ",seed=1")]
    codes = [quantized(name).quantized["model.layers.0.mlp.up_proj.weight"].codes for name in names]
    assert not any(torch.equal(codes[i], codes[j]) for i in range(4) for j in range(i))
    assert torch.equal(codes[0], quantized(names[0]).quantized["model.layers.0.mlp.up_proj.weight"].codes)


def merged(config: ModelConfig) -> tuple[dict[str, Tensor], list[str]]:
    """All tensors of a net with AWQ's scales merged, none of them rounded, and the names of those that changed."""
    recipe = Recipe.parse(f"awq-int4-g32:{LITTLE_TEXT}")
    work = LayerByLayer(config, FixedWeights(), ByteTokenizer(), recipe, torch.float32)
    assert work.walk is not None
    tensors: dict[str, Tensor] = {}
    changed: list[str] = []
    for index in range(config.num_layers):
        overlay = Overlay(FixedWeights())
        grams, work.walk.streams = work.walk.watch(load_layer(config, overlay, index, torch.float32))
        before = dict(overlay.tensors)
        work.merge_scales(products_of(config, index), overlay.tensors, grams)
        changed += [name for name, tensor in overlay.tensors.items() if tensor is not before[name]]
        tensors |= overlay.tensors
    return tensors, changed


@pytest.mark.parametrize(("config", "num_unchanged"), [(CONFIG, 2), (OWN_HEADS, 0)])
def test_merged_scales_leave_the_function_as_it_was(config: ModelConfig, num_unchanged: int) -> None:
    tensors, changed = merged(config)
    unchanged = [name for name in tensors if name not in changed and name.endswith("_proj.weight")]
    assert len(unchanged) == num_unchanged and all("o_proj" in name for name in unchanged)  # KV heads are shared: o has no scale
    ratio = tensors["model.layers.0.input_layernorm.weight"] / take("model.layers.0.input_layernorm.weight", (64,))
    assert ratio.max() > 1.5 * ratio.min()  # something happened
    text = tokens_for(0, 100)
    expected = full_logits(Decoder(config, FixedWeights()), text)
    found = full_logits(Decoder(config, HeldWeights(FixedWeights(), tensors)), text)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_awq_replaces_norms_and_biases_and_rounds_the_scaled_weights() -> None:
    model = quantized(f"awq-int4-g32:{LITTLE_TEXT}", OWN_HEADS)
    tensors, changed = merged(OWN_HEADS)
    expected = {name for name in changed if not name.endswith("_proj.weight")}
    kinds = {name.split(".", 3)[3] for name in expected}
    assert kinds == {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.v_proj.bias", "mlp.up_proj.bias"}
    assert model.replaced.keys() == expected
    assert all(torch.equal(model.replaced[name], tensors[name]) for name in expected)
    only_scale = quantized(f"awq-int4-g32:scale,{LITTLE_TEXT}", OWN_HEADS)
    for name, weight in only_scale.quantized.items():
        assert same(weight, round_to_nearest(tensors[name], model.recipe.fmt))


def test_awq_without_scales_cuts_the_ranges_of_the_weights_as_they_are() -> None:
    model = quantized(f"awq-int4-g32:clip,{LITTLE_TEXT}")
    grams, _ = Walk(CONFIG, FixedWeights(), calibration_documents(ByteTokenizer(), 8, 128), torch.float32).watch(
        load_layer(CONFIG, FixedWeights(), 0, torch.float32)
    )
    name = "model.layers.0.mlp.down_proj.weight"
    weight = take(name, (64, 96))
    shrink = search_clip(weight, grams["down"].matrix, model.recipe.fmt)
    assert model.replaced == {} and shrink.min() < 1
    assert same(model.quantized[name], round_to_nearest(weight, model.recipe.fmt, shrink))


def test_calibrated_codes_are_nearer_to_the_model_than_nearest_ones() -> None:
    """At channels, where a grid is coarse. Mean KL of the next token on text that was not read."""
    text = ByteTokenizer().encode("A request waits until the scheduler finds blocks for it, and then its prompt is computed. " * 3)
    expected = full_logits(Decoder(CONFIG, FixedWeights()), text).log_softmax(-1)
    kl = {}
    for name in ("int4-channel", "gptq-int4-channel", "awq-int4-channel"):
        weights = quantized(name).weights(FixedWeights())
        found = full_logits(Decoder(CONFIG, weights), text).log_softmax(-1)
        kl[name] = float((expected.exp() * (expected - found)).sum(-1).mean())
    assert kl["gptq-int4-channel"] < 0.8 * kl["int4-channel"]
    assert kl["awq-int4-channel"] < kl["int4-channel"]


def test_rounding_a_whole_model_is_rounding_each_matrix() -> None:
    model, rounded = quantized("int4-g32"), RoundedWeights(FixedWeights(), Recipe.parse("int4-g32").fmt)
    for name, weight in model.quantized.items():
        expected = rounded.quantized(name, weight.shape)
        assert expected is not None and same(weight, expected)


def test_a_norm_divided_is_what_bf16_and_fp16_hold() -> None:
    gains, scale = torch.tensor([1.0, 0.5, 0.0, 1e-30]), torch.tensor([0.3, 7.0, 2.0, 5.0])
    tensors = {"norm.weight": gains}
    exact = divide_outputs(tensors, "norm", scale)
    merged_gains = tensors["norm.weight"]
    assert torch.equal(merged_gains[:2], merged_gains[:2].bfloat16().half().float())
    assert torch.equal(merged_gains[2:], gains[2:]) and torch.equal(exact[2:], torch.ones(2))
    assert torch.allclose(merged_gains * exact, gains) and torch.allclose(exact[:2], scale[:2], rtol=2**-8)


def test_apart_and_together_again() -> None:
    whole = round_to_nearest(torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), Recipe.parse("int4-g32").fmt)
    parts = split(whole, [1, 4, 5])
    assert [part.shape for part in parts] == [(1, 8), (4, 8), (5, 8)]
    assert same(stack(parts), whole)


def test_what_is_in_codes_is_not_quantized_again() -> None:
    rounded = RoundedWeights(FixedWeights(), Recipe.parse("int8").fmt)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj.weight is in codes already"):
        quantize_model(CONFIG, rounded, ByteTokenizer(), Recipe.parse("int4"), progress=False)


def test_an_error_names_its_matrices() -> None:
    spoiled = HeldWeights(FixedWeights(), {"model.layers.1.mlp.down_proj.weight": torch.full((64, 96), torch.inf)})
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.down_proj.weight: no 4-bit grid"):
        quantize_model(CONFIG, spoiled, ByteTokenizer(), Recipe.parse("int4"), progress=False)
