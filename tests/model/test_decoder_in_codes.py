"""A decoder that is given codes: which of its products take them, and what becomes of those that cannot."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minserve.model import quantized_linear
from minserve.model.decoder import Decoder
from minserve.model.linear import Linear
from minserve.model.quantized_linear import QuantizedLinear, Storage
from minserve.model.quantized_weight import QuantizedWeight
from minserve.model.weights import RandomWeights
from minserve.quantize.rtn import RoundedWeights, round_to_nearest
from minserve.sim.weight_formats import WeightFormat, parse_weights
from tests.model.tiny_net import full_logits, tiny_config, tokens_for

INT4 = parse_weights("int4-g32")
TEXT = tokens_for(0, 20)


class Partly(RandomWeights):
    """Random weights, of which matrices whose names end in a word of `formats` are in codes. `numbers`: hand these out as numbers."""

    def __init__(self, formats: dict[str, WeightFormat], numbers: bool = False):
        super().__init__(0, spread=0.2)
        self.formats, self.numbers = formats, numbers

    def _codes(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        matrix = name.removesuffix(".weight")
        fmt = next((fmt for word, fmt in self.formats.items() if matrix.endswith(word)), None)
        return None if fmt is None else round_to_nearest(super().take(name, shape), fmt)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        codes = self._codes(name, shape) if self.numbers else None
        return super().take(name, shape) if codes is None else codes.dequantize()

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        return None if self.numbers else self._codes(name, shape)


def made(formats: dict[str, WeightFormat], numbers: bool = False, **config) -> Decoder:
    return Decoder(tiny_config(**config), Partly(formats, numbers), storage=Storage(max_code_rows=4))


def agree(formats: dict[str, WeightFormat], **config) -> None:
    expected = full_logits(made(formats, numbers=True, **config), TEXT)
    torch.testing.assert_close(full_logits(made(formats, **config), TEXT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [{}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}, {"qk_norm": True}], ids=str)
def test_all_or_some_products_in_codes_give_the_logits_of_their_numbers(config: dict) -> None:
    agree({"_proj": INT4, "lm_head": WeightFormat(8)}, **config)
    agree({"down_proj": INT4, "o_proj": WeightFormat(8)}, **config)
    decoder = made({"down_proj": INT4})
    assert [isinstance(product, QuantizedLinear) for product in (decoder.layers[0].down, decoder.layers[0].qkv, decoder.head)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("formats", "complaint"),
    [
        ({"q_proj": INT4}, "layers.0.self_attn: q_proj 4 bits, k_proj in floats, v_proj in floats"),
        (
            {"gate_proj": INT4, "up_proj": replace(INT4, group_size=64)},
            "gate_proj 4 bits, up_proj 4 bits: not alike in bits and groups",
        ),
        ({"gate_proj": INT4, "up_proj": WeightFormat(8)}, "layers.0.mlp: gate_proj 4 bits, up_proj 8 bits"),
    ],
)
def test_parts_of_a_product_that_do_not_fit_together_are_served_in_floats(formats: dict[str, WeightFormat], complaint: str) -> None:
    with pytest.warns(UserWarning, match=complaint):
        agree(formats)


def test_a_tied_head_is_asked_for_too() -> None:
    config = tiny_config(tied_embeddings=True)
    for head_bits, kind in ((8, QuantizedLinear), (16, Linear)):
        decoder = Decoder(config, RoundedWeights(RandomWeights(), INT4, head_bits), storage=Storage(max_code_rows=1))
        assert isinstance(decoder.head, kind) and decoder.embedding.shape == (320, 64)


def test_what_is_kept_is_part_of_the_description() -> None:
    assert (
        "; weights in int4+int8: 0 MiB, up to 4 rows by codes (output layer 4)"
        in made({"_proj": INT4, "lm_head": WeightFormat(8)}).describe()
    )
    assert made({}).describe().endswith("on cpu")


def test_rows_are_measured_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(quantized_linear, "_codes_win", lambda linears, num_rows: tried.append(len(linears)) or num_rows <= 8)
    weights = Partly({"_proj": INT4, "lm_head": WeightFormat(8)})
    decoder = Decoder(tiny_config(), weights, storage=Storage())
    assert set(tried) == {8, 1}  # the products of two layers, and the head by itself
    assert isinstance(decoder.head, QuantizedLinear) and decoder.head.max_code_rows == 8
    tried.clear()
    made({"_proj": INT4})
    assert tried == []
