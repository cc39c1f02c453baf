"""What configs of all families leave in the fields of a shape; the numbers that follow are tested in test_shapes.py."""

import pytest

from minserve.sim.model_config import fields_from_config
from minserve.sim.shapes import ModelShape

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}


def test_the_fields_are_those_of_a_shape() -> None:
    fields = fields_from_config({**SIZES, "model_type": "llama", "intermediate_size": 96, "tie_word_embeddings": True})
    assert ModelShape(name="small", **fields) == ModelShape(
        name="small",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=96,
        vocab_size=320,
        tied_embeddings=True,
    )


@pytest.mark.parametrize(("names", "family"), [(("n_embd", "n_layer", "n_head"), "gpt2"), (("d_model", "n_layers", "n_heads"), "mpt")])
def test_other_families_have_other_names(names: tuple[str, ...], family: str) -> None:
    values = dict(zip(names, (64, 2, 4), strict=True))
    fields = fields_from_config({**values, "vocab_size": 320, "model_type": family})
    assert [fields[name] for name in ("hidden_size", "num_layers", "num_heads", "num_mlp_matrices")] == [64, 2, 4, 2]
    assert fields["intermediate_size"] == 256 and fields["tied_embeddings"]


def test_the_text_part_of_a_model_counts() -> None:
    outer = {"model_type": "two-parts", "text_config": {**SIZES, "model_type": "llama"}, "vision_config": {"hidden_size": 9}}
    assert fields_from_config({**outer, "tie_word_embeddings": True})["tied_embeddings"]
    assert fields_from_config(outer)["hidden_size"] == 64


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"the config has no hidden_size \(nor n_embd, n_embed, d_model\)"):
        fields_from_config({"vocab_size": 320})
