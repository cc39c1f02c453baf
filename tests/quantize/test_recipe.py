"""Names of recipes: read, written, and refused with what would be right."""

import itertools

import pytest

from minserve.quantize.recipe import Recipe
from minserve.sim.weight_formats import WeightFormat, parse_weights


def test_a_format_alone_is_the_usual_recipe() -> None:
    recipe = Recipe.parse("gptq-int4-g128-sym")
    assert recipe == Recipe(WeightFormat(4, 128, True, "gptq"))
    assert (recipe.order, recipe.damping, recipe.head_bits) == (True, 0.01, 8)
    assert recipe.num_documents * recipe.document_tokens == 16_384


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gptq-int4-g128-sym:no-order,damping=0.1", Recipe(WeightFormat(4, 128, True, "gptq"), order=False, damping=0.1)),
        ("awq-int4:scale", Recipe(parse_weights("awq-int4"), clip=False)),
        ("awq-int4:clip", Recipe(parse_weights("awq-int4"), scale=False)),
        ("awq-int4:scale,clip", Recipe(parse_weights("awq-int4"))),
        ("int4:head=16", Recipe(parse_weights("int4"), head_bits=16)),
        ("gptq-int8:documents=3, tokens=9,seed=2", Recipe(parse_weights("gptq-int8"), num_documents=3, document_tokens=9, seed=2)),
    ],
)
def test_options_change_one_thing_each(words: str, expected: Recipe) -> None:
    assert Recipe.parse(words) == expected
    assert Recipe.parse(expected.name) == expected


def test_every_name_leads_back_to_its_recipe() -> None:
    formats = ("int8", "int4-g32", "gptq-int4-sym", "gptq-int8", "awq-int4-channel")
    options = (("", "head=16"), ("", "damping=0.25", "no-order", "scale", "clip"), ("", "seed=7", "documents=5,tokens=100"))
    num_read = 0
    for name, chosen in itertools.product(formats, itertools.product(*options)):
        words = ":".join(part for part in (name, ",".join(filter(None, chosen))) if part)
        try:
            recipe = Recipe.parse(words)
        except ValueError:
            continue
        assert Recipe.parse(recipe.name) == recipe
        assert sorted(recipe.name.replace(":", ",").split(",")) == sorted(words.replace(":", ",").split(","))
        num_read += 1
    assert num_read == 4 + 2 * 18 + 18


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("int4:scale", "option 'scale' is not one of rtn's; known: head="),
        ("int4:seed=1", "option 'seed=1' is not one of rtn's"),
        ("awq-int4:no-order", "option 'no-order' is not one of awq's; known: clip, documents=..., head=..., scale"),
        ("gptq-int4:order", "option 'order' is not one of gptq's; known: damping=..."),
        ("gptq-int4:damping", "option 'damping' is not one of gptq's"),
        ("gptq-int4:no-order=1", "option 'no-order=1' is not one of gptq's"),
        ("gptq-int4:damping=much", "damping takes a number, got 'much'"),
        ("gptq-int4:damping=-1", "damping is a share from 0 on, got -1.0"),
        ("gptq-int4:damping=nan", "damping is a share from 0 on, got nan"),
        ("gptq-int4:documents=1.5", "documents takes a number, got '1.5'"),
        ("gptq-int4:tokens=0", "calibration needs a token, got 64 documents of 0"),
        ("gptq-int4:", "option '' is not one of gptq's"),
        ("int4:head=4", "the head is kept in 8 or 16 bits, got 4"),
        ("bf16", "weight format 'bf16' is not known"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(words: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Recipe.parse(words)


def test_awq_without_its_searches_is_refused() -> None:
    with pytest.raises(ValueError, match="round to nearest"):
        Recipe(parse_weights("awq-int4"), scale=False, clip=False)
