import pytest
import torch
import torch.nn.functional as F

from minserve.model import linear
from minserve.model.linear import Linear


def data(rows: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows)
    x, w, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 48), (80, 48), (80,)))
    return x, w, b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("prepack", [True, False])
def test_agrees_with_f_linear(rows, dtype, prepack):
    x, weight, bias = data(rows, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    add = torch.linspace(-1, 1, rows * 80).view(rows, 80).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(Linear(weight, prepack=prepack)(x), F.linear(x, weight), atol=tolerance, rtol=1e-2)
        torch.testing.assert_close(Linear(weight, bias, prepack)(x), F.linear(x, weight, bias), atol=tolerance, rtol=1e-2)
        torch.testing.assert_close(Linear(weight, bias, prepack)(x, add), F.linear(x, weight, bias) + add, atol=tolerance, rtol=1e-2)


def test_a_weight_is_kept_once():
    _, weight, _ = data(1, torch.float32)
    layer = Linear(weight)
    assert (layer._weight is None) == layer.is_packed
    assert (layer.in_features, layer.out_features, layer.num_bytes) == (48, 80, 80 * 48 * 4)


def test_falls_back_where_the_operator_is_missing(monkeypatch):
    def missing(*_):
        raise RuntimeError("no such operator")

    x, weight, bias = data(3, torch.float32)
    monkeypatch.setattr(linear, "_packed_linear", missing)
    layer = Linear(weight, bias)
    assert not layer.is_packed
    assert torch.equal(layer(x), F.linear(x, weight, bias))


def test_falls_back_where_the_operator_is_wrong(monkeypatch):
    x, weight, _ = data(3, torch.float32)
    monkeypatch.setattr(linear, "_packed_linear", lambda x, packed, bias, add=None: torch.zeros(len(x), 80))
    assert not Linear(weight).is_packed


def test_falls_back_where_the_operator_gives_nan(monkeypatch):
    _, weight, _ = data(3, torch.float32)
    monkeypatch.setattr(linear, "_packed_linear", lambda x, packed, bias, add=None: torch.full((len(x), 80), torch.nan))
    assert not Linear(weight).is_packed
