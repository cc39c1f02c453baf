"""Products with weights in codes: by codes and by numbers they are the same, with all that a Linear can do."""

import pytest
import torch
import torch.nn.functional as F

from minserve.model import quantized_linear
from minserve.model.linear import Linear
from minserve.model.packed_int4 import try_pack
from minserve.model.quantized_linear import QuantizedLinear, Scratch, Storage, describe_codes, settle_code_rows
from minserve.model.quantized_weight import QuantizedWeight
from minserve.sim.weight_formats import parse_weights
from tests.model.made_weights import made_weight

KINDS = [(4, 64), (4, None), (4, 128), (4, 1), (8, None), (8, 96)]  # bits, group; of 192 inputs
MOST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the largest result; in bf16 it is rounded after each sum
TWO_WAYS = (Storage(max_code_rows=4), Storage(max_code_rows=4, copy=False))


def inputs(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x, bias, add = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((num_rows, 192), (80,), (num_rows, 80)))
    return x, bias, add


@pytest.mark.parametrize("dtype", MOST_ERROR, ids=str)
@pytest.mark.parametrize("storage", TWO_WAYS, ids=["copy", "pieces"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_the_product_with_the_dequantized_weight(kind: tuple[int, int | None], storage: Storage, dtype: torch.dtype) -> None:
    weight = made_weight(kind[0], 80, 192, kind[1])
    for num_rows in (1, 4, 5, 70):
        x, bias, add = inputs(num_rows, dtype)
        exact = F.linear(x.double(), weight.dequantize().double(), bias.double()) + add.double()
        got = QuantizedLinear(weight, bias, dtype, storage=storage)(x, add.clone())
        plain = QuantizedLinear(weight, None, dtype, storage=storage)(x)
        most = MOST_ERROR[dtype] * exact.abs().max()
        assert got.dtype == dtype and (got.double() - exact).abs().max() < most
        assert (plain.double() + bias.double() + add.double() - exact).abs().max() < 2 * most


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_ways_multiply_by_the_same_numbers(kind: tuple[int, int | None]) -> None:
    """One row a time gives each weight's column: by numbers it is the weight, by codes the weight up to rounding its offset."""
    weight = made_weight(kind[0], 80, 192, kind[1])
    linear = QuantizedLinear(weight, None, torch.bfloat16, storage=Storage(max_code_rows=200))
    by_codes = linear(torch.eye(192, dtype=torch.bfloat16)).T
    linear.max_code_rows = 0
    by_numbers = linear(torch.eye(192, dtype=torch.bfloat16)).T
    assert torch.equal(by_numbers, weight.dequantize(torch.bfloat16))
    scales = weight.scales[:, weight.group_of]
    steps = (by_codes.float() - by_numbers.float()).abs() / scales
    assert steps.max() <= (0.12 if kind[0] == 4 else 0.51)  # of 15 scales or 128, a step of bf16 is up to 1/128


def test_the_rows_decide_which_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = QuantizedLinear(made_weight(4, 80, 192, 64), storage=Storage(max_code_rows=3))
    assert linear.is_packed and linear.has_copy and linear.has_two_ways
    taken: list[str] = []
    product, copy = linear._product, linear._copy
    assert product is not None and copy is not None
    monkeypatch.setattr(linear, "_product", lambda x: taken.append("codes") or product(x))
    monkeypatch.setattr(linear, "_copy", lambda x, add: taken.append("numbers") or copy(x, add))
    for num_rows in (1, 3, 4, 90):
        linear(inputs(num_rows, torch.float32)[0])
    assert taken == ["codes", "codes", "numbers", "numbers"]


def test_pieces_share_a_scratch_that_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "PIECE_WEIGHTS", 64 * 192)
    storage = Storage(copy=False, max_code_rows=0, scratch=Scratch())
    weight = made_weight(4, 200, 192, 64)
    x = inputs(9, torch.float32)[0]
    first, second = (QuantizedLinear(weight, storage=storage) for _ in range(2))
    torch.testing.assert_close(first(x), F.linear(x, weight.dequantize()), atol=1e-4, rtol=1e-4)
    place = storage.scratch._buffer.data_ptr()
    assert torch.equal(second(x), first(x))
    assert (storage.scratch._buffer.numel(), storage.scratch._buffer.data_ptr()) == (64 * 192, place)


@pytest.mark.parametrize("name", ["int4", "int4-g32-sym"])
def test_bytes_are_those_of_the_formula(name: str) -> None:
    fmt = parse_weights(name)
    linear = QuantizedLinear(made_weight(fmt.bits, 128, 192, fmt.group_size, symmetric=fmt.symmetric), dtype=torch.bfloat16)
    assert linear.num_bytes == fmt.num_bytes(128, 192)
    assert linear.copy_bytes == 128 * 192 * 2
    assert QuantizedLinear(made_weight(4, 128, 192, 64), storage=Storage(copy=False)).copy_bytes == 0


def test_without_the_operator_numbers_serve_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "try_pack", lambda *_: None)
    weight, x = made_weight(4, 80, 192, 64), inputs(2, torch.float32)[0]
    expected = F.linear(x, weight.dequantize())
    for copy in (True, False):
        linear = QuantizedLinear(weight, storage=Storage(copy=copy, max_code_rows=4))
        assert not linear.is_packed and not linear.has_two_ways
        torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
        settle_code_rows([linear])
        assert linear.max_code_rows == 0


# --- where the two ways change places -------------------------------------------------------------


class Clock:
    """Time passes by what a product costs: codes one tick a row, numbers `numbers_ticks` for any number of rows."""

    def __init__(self, numbers_ticks: float):
        self.now_s, self.numbers_ticks = 0.0, numbers_ticks

    def perf_counter(self) -> float:
        return self.now_s

    def linears(self, monkeypatch: pytest.MonkeyPatch, num: int) -> list[QuantizedLinear]:
        def passed(self_: QuantizedLinear, x: torch.Tensor) -> None:
            self.now_s += len(x) if len(x) <= self_.max_code_rows else self.numbers_ticks

        monkeypatch.setattr(quantized_linear.time, "perf_counter", self.perf_counter)
        made = [QuantizedLinear(made_weight(4, 64, 64, 32)) for _ in range(num)]
        monkeypatch.setattr(QuantizedLinear, "__call__", passed)
        return made


@pytest.mark.parametrize(
    ("numbers_ticks", "expected"), [(0.5, 0), (1.5, 1), (6.5, 6), (16.5, 16), (30.0, 24), (1000.0, quantized_linear.TRIAL_ROWS[-1])]
)
def test_the_change_is_where_numbers_become_faster(monkeypatch: pytest.MonkeyPatch, numbers_ticks: float, expected: int) -> None:
    linears = Clock(numbers_ticks).linears(monkeypatch, 3)
    settle_code_rows(linears)
    assert [linear.max_code_rows for linear in linears] == [expected] * 3


def test_a_trial_takes_no_more_weights_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "TRIAL_WEIGHTS", 2 * 64 * 64)
    tried: list[int] = []
    monkeypatch.setattr(quantized_linear, "_codes_win", lambda linears, _: tried.append(len(linears)) or True)
    linears = [QuantizedLinear(made_weight(4, 64, 64, 32)) for _ in range(5)]
    settle_code_rows(linears)
    assert set(tried) == {2} and {linear.max_code_rows for linear in linears} == {quantized_linear.TRIAL_ROWS[-1]}


def test_what_is_kept_is_said() -> None:
    def made(weight: QuantizedWeight, **storage) -> QuantizedLinear:
        return QuantizedLinear(weight, None, torch.bfloat16, storage=Storage(**storage))

    large = made_weight(4, 4096, 1024, 64)
    head = made(made_weight(8, 4096, 1024, None, symmetric=True), max_code_rows=2)
    words = describe_codes([made(large, max_code_rows=6)], head)
    assert words == "; weights in int4+int8: 6 MiB, up to 6 rows by codes (output layer 2), more by a copy of 16 MiB"
    words = describe_codes([made(large, max_code_rows=6, copy=False)], Linear(torch.zeros(2, 2)))
    assert words == "; weights in int4: 2 MiB, up to 6 rows by codes, more by numbers made on the way"
    assert describe_codes([], Linear(torch.zeros(2, 2))) == ""


def test_a_weight_that_does_not_fit_a_piece_is_still_cut_by_outputs() -> None:
    weight = made_weight(4, 70, 64, 32)
    packed = try_pack(weight, torch.float32)
    assert packed is not None
    out = torch.empty(6, 64)
    packed.write_values(out, 64)
    assert torch.equal(out, weight.dequantize()[64:])
