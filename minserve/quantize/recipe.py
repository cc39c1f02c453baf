"""How weights are quantized: a format, and the choices that a quantizer leaves open, in one line of words.

Why: a table compares recipes, a checkpoint says by which one it was made, and a second start must know the first one's result again. All
three need one short name. The format comes first, and behind a colon whatever is not as usual:

    gptq-int4-g128-sym:no-order,damping=0.1     GPTQ with inputs as they stand, and ten times the damping
    awq-int4:scale                              AWQ's search for scales alone; :clip is the other one alone
    gptq-int4:documents=16,tokens=128           less calibration text
    int4:head=16                                the output head stays in floats

Invariant: `Recipe.parse(recipe.name) == recipe` for every recipe.

Taught in notebook 09.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from minserve.sim.weight_formats import WeightFormat, parse_weights

FLAGS = {"no-order": ("order", False), "scale": ("clip", False), "clip": ("scale", False)}  # word -> field, and what it becomes
NUMBERS = {"damping": "damping", "documents": "num_documents", "tokens": "document_tokens", "seed": "seed", "head": "head_bits"}
OF_METHOD = {"gptq": {"no-order", "damping"}, "awq": {"scale", "clip"}, "rtn": set[str]()}
OF_ALL = {"head"}
OF_CALIBRATED = {"documents", "tokens", "seed"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A format with its method, and the method's options. Raises ValueError for numbers that make no sense."""

    fmt: WeightFormat
    order: bool = True  # GPTQ: inputs with large activations first
    damping: float = 0.01  # GPTQ: share of the Gram matrix's mean diagonal that is added to it
    scale: bool = True  # AWQ: search for scales
    clip: bool = True  # AWQ: search for cuts of the groups' ranges
    head_bits: int = 8  # of the output head: 8, or 16 where it stays in floats
    num_documents: int = 64  # of calibration text,
    document_tokens: int = 256  # tokens each
    seed: int = 0  # which documents

    def __post_init__(self) -> None:
        if not 0 <= self.damping < math.inf:
            raise ValueError(f"damping is a share from 0 on, got {self.damping}")
        if not (self.scale or self.clip):
            raise ValueError("AWQ without scale and clip is round to nearest: give a format without a method")
        if self.head_bits not in (8, 16):
            raise ValueError(f"the head is kept in 8 or 16 bits, got {self.head_bits}")
        if self.num_documents < 1 or self.document_tokens < 1:
            raise ValueError(f"calibration needs a token, got {self.num_documents} documents of {self.document_tokens}")

    @property
    def is_calibrated(self) -> bool:
        """Whether it reads text; rounding to nearest does not."""
        return self.fmt.method != "rtn"

    @classmethod
    def parse(cls, words: str) -> "Recipe":
        """The recipe of that name. Raises ValueError for unknown words, and for options that the method does not have.

        >>> Recipe.parse("gptq-int4:no-order,damping=0.1").damping
        0.1
        """
        name, _, options = words.partition(":")
        recipe = cls(parse_weights(name))
        if ":" not in words:
            return recipe
        given = [option.strip() for option in options.split(",")]
        if {"scale", "clip"} <= set(given):  # both is what AWQ does anyway
            given = [option for option in given if option not in ("scale", "clip")]
        return replace(recipe, **dict(_read(option, recipe, words) for option in given))

    @property
    def name(self) -> str:
        """The shortest name that means this recipe.

        >>> Recipe.parse("awq-int4-g64:clip,seed=0").name
        'awq-int4:clip'
        """
        options = ",".join(self._options())
        return f"{self.fmt.name}:{options}" if options else self.fmt.name

    def _options(self) -> Iterator[str]:
        usual = Recipe(self.fmt)
        known = _options_of(self)
        yield from (word for word, (field, value) in FLAGS.items() if word in known and getattr(self, field) == value)
        for word, field in NUMBERS.items():
            if word in known and (value := getattr(self, field)) != getattr(usual, field):
                yield f"{word}={value}"


def _options_of(recipe: Recipe) -> set[str]:
    return OF_ALL | OF_METHOD[recipe.fmt.method] | (OF_CALIBRATED if recipe.is_calibrated else set())


def _read(option: str, recipe: Recipe, words: str) -> tuple[str, object]:
    """One option as a field and its value."""
    word, equals, value = option.partition("=")
    known = _options_of(recipe)
    if word not in known or bool(equals) != (word in NUMBERS):
        named = ", ".join(f"{name}=..." if name in NUMBERS else name for name in sorted(known))
        raise ValueError(f"{words}: option {option!r} is not one of {recipe.fmt.method}'s; known: {named}")
    if word in FLAGS:
        return FLAGS[word]
    field = NUMBERS[word]
    kind = {f.name: f.type for f in fields(Recipe)}[field]
    try:
        return field, float(value) if kind is float else int(value)
    except ValueError:
        raise ValueError(f"{words}: {word} takes a number, got {value!r}") from None
