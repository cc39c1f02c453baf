"""Names of weight formats and their bytes, which are those of the kernels' storage where that knows the format."""

import pytest

from minserve.sim.weight_formats import (
    GROUP_SIZES,
    METHODS,
    UNSCALED_BITS,
    WeightFormat,
    bits_of_weights,
    parse_weights,
    quantized_format,
)
from minserve_kernels.weights import weight_bytes

FORMATS = [
    WeightFormat(bits, group_size, symmetric, method)
    for bits in (8, 4)
    for group_size in (None, *GROUP_SIZES)
    for symmetric in (True, False)
    for method in METHODS
    if (bits, method) != (8, "awq")
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_name_means_its_format(format: WeightFormat) -> None:
    assert parse_weights(format.name) == quantized_format(format.name) == format
    assert bits_of_weights(format.name) == format.bits


def test_every_format_has_one_name_and_more_words_that_mean_it() -> None:
    assert len({format.name for format in FORMATS}) == len(FORMATS)
    assert parse_weights("rtn-int4-g64-asym") == parse_weights("int4") and parse_weights("rtn-int8-channel-sym") == parse_weights("int8")


@pytest.mark.parametrize("name", ["", "int3", "int4-g16", "int4-g0", "int8-", "sym-int4", "gguf-int4", "int4-sym-g64", "INT4", "awq-int8"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not known|groups have 32, 64, 128 inputs|AWQ is for 4 bits"):
        parse_weights(name)


def test_what_is_not_quantized_is_no_format_but_has_bits() -> None:
    assert [quantized_format(name) for name in UNSCALED_BITS] == [None] * 4
    assert [bits_of_weights(name) for name in UNSCALED_BITS] == [32, 16, 16, 8]
    with pytest.raises(ValueError, match="'bf8' is not known; examples: int8, .*; not quantized are fp32, bf16, fp16, fp8"):
        quantized_format("bf8")


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_that_the_kernels_store(group_size: int, method: str) -> None:
    for symmetric in (True, False):
        format = WeightFormat(4, group_size, symmetric, method)
        assert format.num_bytes(48, 3 * group_size) == weight_bytes(48, 3 * group_size, group_size)
    assert WeightFormat(8).num_bytes(48, 576) == weight_bytes(48, 576)


def test_a_short_last_group_has_its_scale_too() -> None:
    """576 inputs are four groups of 128 and one of 64; 5 codes of 4 bits are 3 bytes."""
    assert parse_weights("int4-g128").num_bytes(10, 576) == 10 * (288 + 5 * 4)
    assert parse_weights("int4-channel").num_bytes(10, 5) == 10 * (3 + 4)
    assert parse_weights("int8-g128-asym").num_bytes(10, 576) == 10 * (576 + 5 * 4)
