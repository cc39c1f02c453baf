"""Formats of quantized weights: which input is in which nibble, and the bytes."""

import pytest
import torch

from minserve_kernels.weights import GROUP_SIZES, outputs_together, pack_int4, require_groups, unpack_int4, weight_bytes


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_byte_j_of_a_group_has_inputs_j_and_j_plus_half(group_size: int) -> None:
    codes = torch.zeros(2, 2 * group_size, dtype=torch.uint8)
    half = group_size // 2
    codes[1, group_size + 3] = 5  # output 1, second group: its input 3
    codes[1, group_size + 3 + half] = 10
    packed = pack_int4(codes, group_size)
    assert packed.shape == (2, group_size) and packed.dtype == torch.uint8
    assert packed.nonzero().tolist() == [[1, half + 3]] and packed[1, half + 3] == 5 + 16 * 10


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_unpacking_undoes_packing(group_size: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (5, 3 * group_size), dtype=torch.uint8)
    assert torch.equal(unpack_int4(pack_int4(codes, group_size), group_size), codes)


def test_groups_that_are_not_known_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="32, 64, 128 inputs, got 48"):
        require_groups(96, 48)
    with pytest.raises(ValueError, match="576 inputs do not fall into groups of 128"):
        pack_int4(torch.zeros(1, 576, dtype=torch.uint8), 128)


def test_bytes_are_those_of_the_tensors() -> None:
    num_outputs, num_inputs, group_size = 24, 256, 64
    codes = pack_int4(torch.zeros(num_outputs, num_inputs, dtype=torch.uint8), group_size)
    scales = torch.zeros(num_outputs, num_inputs // group_size, dtype=torch.float16)
    assert weight_bytes(num_outputs, num_inputs, group_size) == codes.nbytes + 2 * scales.nbytes
    assert weight_bytes(num_outputs, num_inputs) == num_outputs * num_inputs + num_outputs * 2


def test_outputs_together_keeps_the_numbers() -> None:
    scales = torch.randn(6, 4)
    laid_out = outputs_together(scales)
    assert torch.equal(laid_out, scales) and laid_out.stride() == (1, 6)
