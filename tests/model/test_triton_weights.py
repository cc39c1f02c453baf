"""Weights in codes for Triton's products, in the interpreter; and who gets them."""

import pytest
import torch
import torch.nn.functional as F

from minserve.model import triton_weights
from minserve.model.decoder import Decoder
from minserve.model.quantized_linear import ANY_ROWS, QuantizedLinear, Storage
from minserve.model.triton_weights import TritonInt4, TritonInt8, choose_weight_kernels, load_weight_kernels, triton_product
from minserve.model.weights import RandomWeights
from minserve.quantize.rtn import RoundedWeights
from minserve.sim.weight_formats import parse_weights
from minserve_kernels.interpret import interpreted
from minserve_kernels.weights import weight_bytes
from tests.model.made_weights import made_weight
from tests.model.tiny_net import full_logits, tiny_config, tokens_for

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "mixed", "kind"),
    [
        (8, None, True, False, TritonInt8),
        (8, None, False, False, TritonInt4),  # two planes
        (8, 96, True, True, TritonInt4),
        (4, 64, False, False, TritonInt4),
        (4, None, True, True, TritonInt4),
    ],
)
def test_equals_the_product_with_the_dequantized_weight(
    bits: int, group_size: int | None, symmetric: bool, mixed: bool, kind: type, dtype: torch.dtype
) -> None:
    weight = made_weight(bits, 40, 192, group_size, symmetric=symmetric, mixed=mixed)
    generator = torch.Generator().manual_seed(0)
    x, bias, add = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 192), (40,), (3, 40)))
    linear = QuantizedLinear(weight, bias, dtype, storage=Storage(kernels=load_weight_kernels()))
    assert isinstance(linear._product, kind) and linear.max_code_rows == ANY_ROWS and not linear.has_two_ways
    with interpreted():
        got = linear(x, add.clone())
    exact = F.linear(x.double(), weight.dequantize().double(), bias.double()) + add.double()
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() < (2e-6 if dtype == torch.float32 else 1e-2) * exact.abs().max()


def test_a_net_in_codes_computes_with_kernels_what_it_does_without() -> None:
    config, fmt, text = tiny_config(), parse_weights("int4-g32"), tokens_for(0, 5)
    plain = Decoder(config, RoundedWeights(RandomWeights(0, spread=0.2), fmt, tied=False), storage=Storage(max_code_rows=0))
    storage = Storage(kernels=load_weight_kernels())
    by_kernels = Decoder(config, RoundedWeights(RandomWeights(0, spread=0.2), fmt, tied=False), storage=storage)
    assert isinstance(by_kernels.head, QuantizedLinear) and isinstance(by_kernels.head._product, TritonInt8)
    assert by_kernels.describe().endswith("; weights in int4+int8: 0 MiB")
    with interpreted():
        got = full_logits(by_kernels, text)
    torch.testing.assert_close(got, full_logits(plain, text), atol=1e-4, rtol=1e-4)


def test_bytes_are_those_of_the_kernels_formula() -> None:
    kernels = load_weight_kernels()
    for bits, group_size in ((8, None), (4, 64)):
        product = triton_product(made_weight(bits, 128, 192, group_size, symmetric=bits == 8), kernels, CPU)
        assert product is not None and product.num_bytes == weight_bytes(128, 192, group_size)


def test_groups_that_no_kernel_takes_are_served_as_numbers() -> None:
    weight = made_weight(4, 40, 48, 24)
    linear = QuantizedLinear(weight, storage=Storage(kernels=load_weight_kernels()))
    assert not linear.is_packed and not linear.has_copy
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(linear(x), F.linear(x, weight.dequantize()), atol=1e-5, rtol=1e-5)


def test_kernels_are_chosen_as_those_of_attention_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_weight_kernels("auto", CPU) is None
    assert choose_weight_kernels("triton", CPU) is None
    with interpreted():
        assert choose_weight_kernels("triton", CPU) is not None
        assert choose_weight_kernels("auto", CPU) is None
        assert choose_weight_kernels("torch", CPU) is None
    card = torch.device("cuda", 0)
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, given=capability: given)
        assert (choose_weight_kernels("auto", card) is not None) == expected
    monkeypatch.setattr(triton_weights, "find_spec", lambda _: None)
    assert choose_weight_kernels("auto", card) is None
