"""Products with quantized weights: bytes and seconds of each way in which codes become numbers again."""

from dataclasses import replace
from typing import Any

import pytest

from minserve.sim.cost_model import Cost, CostModel, Work, decode_work, row_work
from minserve.sim.devices import DEVICES, DeviceSpec
from minserve.sim.products import StoredWeights
from minserve.sim.shapes import SHAPES
from minserve.sim.weight_formats import parse_weights

A100 = DEVICES["a100-80gb"]
SMOL, LLAMA, MIXTRAL = SHAPES["smollm2-135m"], SHAPES["llama-2-13b"], SHAPES["mixtral-8x7b"]
CPU = DeviceSpec(
    name="cpu",
    memory_bytes=16e9,
    bytes_per_s=20e9,
    flops_per_s=200e9,
    weight_read_share=0.8,
    matmul_shares=((16, 0.9),),
    packs_weights=True,
    max_code_rows=4,
    code_read_share=0.7,
    code_row_bytes_per_s=34e9,
)


def cost_of(shape: Any, device: DeviceSpec, work: Work, weights: str = "int8", **more: Any) -> Cost:
    return CostModel(shape, device, weights=weights, **more).of(work)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "gptq-int4-g128-sym", "awq-int4-channel"])
def test_a_step_reads_codes_scales_and_the_quantized_output_layer(name: str) -> None:
    cost = CostModel(LLAMA, A100, weights=name)
    head = 32_000 * 5120 + 2 * 32_000
    assert cost.weight_bytes_read(3) == LLAMA.layer_bytes(name) + head
    assert cost.weight_bytes_read(3, num_samples=0) == LLAMA.layer_bytes(name)
    assert cost.weight_bytes == cost.weight_bytes_read(3) + 2 * 32_000 * 5120  # the embedding is looked up
    assert CostModel(LLAMA, A100, weights=name, head_bits=16).weight_bytes_read(3) == LLAMA.layer_bytes(name) + 2 * 32_000 * 5120


def test_a_tied_output_layer_is_read_as_int8_and_looked_up_in_bf16() -> None:
    table = 49_152 * 576
    ours, others = CostModel(SMOL, A100, weights="int8"), CostModel(SMOL, A100, weights="int8", head_bits=16)
    assert ours.weight_bytes - others.weight_bytes == table + 2 * 49_152
    assert others.weight_bytes_read(1) - ours.weight_bytes_read(1) == table - 2 * 49_152


def test_head_bits_are_8_or_16() -> None:
    with pytest.raises(ValueError, match="an output layer has 8 or 16 bits, got 4"):
        CostModel(LLAMA, A100, weights="int4", head_bits=4)


def test_experts_that_nobody_visits_are_not_read() -> None:
    cost, format = CostModel(MIXTRAL, A100, weights="int4"), parse_weights("int4")
    expert = 2 * format.num_bytes(14_336, 4096) + format.num_bytes(4096, 14_336)
    assert cost.weight_bytes_read(4096) - cost.weight_bytes_read(1) == pytest.approx(32 * 6 * expert)


def test_devices_share_all_of_it() -> None:
    one, four = (CostModel(LLAMA, A100, weights="int4", num_devices=n) for n in (1, 4))
    assert four.weight_bytes == one.weight_bytes / 4 and four.weight_bytes_read(7) == one.weight_bytes_read(7) / 4


# --- seconds on a GPU -----------------------------------------------------------------------------


def test_many_rows_multiply_in_the_compute_type() -> None:
    prompt = row_work(0, 4096)
    assert cost_of(LLAMA, A100, prompt, "int4").linear_s == cost_of(LLAMA, A100, prompt, "bf16").linear_s
    one = decode_work(1, 1)
    assert cost_of(LLAMA, A100, one, "int4").linear_s == CostModel(LLAMA, A100, weights="int4").weight_bytes_read(1) / (2039e9 * 0.78)


def test_making_bf16_of_the_codes_first_moves_five_bytes_where_bf16_has_two() -> None:
    first = replace(A100, max_code_rows=0, keeps_weight_copy=False)
    one = decode_work(1, 1)
    dequantized, plain = cost_of(LLAMA, first, one), cost_of(LLAMA, A100, one, "bf16")
    assert dequantized.weight_bytes / plain.weight_bytes == pytest.approx(2.5, rel=1e-3)
    assert dequantized.linear_s / plain.linear_s == pytest.approx(2.5, rel=1e-3)
    assert CostModel(LLAMA, first, weights="int8").stored_weight_bytes == LLAMA.weight_bytes("int8")


# --- seconds on a CPU -----------------------------------------------------------------------------


def test_few_rows_read_codes_row_by_row() -> None:
    codes, head = SMOL.layer_bytes("int8"), SMOL.head_bytes("int8")
    one, four = (cost_of(SMOL, CPU, decode_work(n, 1)) for n in (1, 4))
    assert one.weight_bytes == four.weight_bytes == codes + head
    assert one.linear_s == pytest.approx((codes + head) / (20e9 * 0.7)) and one.weights_are_slower
    assert four.linear_s == pytest.approx(4 * (codes + head) / 34e9) and not four.weights_are_slower
    assert one.linear_flops == cost_of(SMOL, CPU, decode_work(1, 1), "bf16").linear_flops


def test_half_the_bits_unpack_in_half_the_time() -> None:
    eight, four = (cost_of(SMOL, CPU, decode_work(4, 1), name).linear_s for name in ("int8-channel", "int4-channel"))
    head = 4 * SMOL.head_bytes("int8") / 34e9
    assert (four - head) / (eight - head) == pytest.approx(SMOL.layer_bytes("int4-channel") / SMOL.layer_bytes("int8-channel"))
    assert (four - head) / (eight - head) == pytest.approx(0.5, rel=0.01)


def test_many_rows_read_the_copy_and_take_as_long_as_plain_weights() -> None:
    work = decode_work(64, 1)
    quantized, plain = cost_of(SMOL, CPU, work), cost_of(SMOL, CPU, work, "bf16")
    assert quantized.weight_bytes == plain.weight_bytes
    by_parts_s = [2 * 64 * n / (200e9 * 0.9) for n in (SMOL.num_layer_parameters, SMOL.num_output_parameters)]
    assert quantized.linear_s == pytest.approx(sum(by_parts_s)) == pytest.approx(plain.linear_s)


def test_a_prompt_reads_the_copy_and_its_last_row_the_codes_of_the_output_layer() -> None:
    cost = cost_of(SMOL, CPU, row_work(0, 256))
    assert cost.weight_bytes == 2 * SMOL.num_layer_parameters + SMOL.head_bytes("int8")
    assert cost_of(SMOL, CPU, row_work(0, 256, samples=False)).weight_bytes == 2 * SMOL.num_layer_parameters
    assert cost_of(SMOL, CPU, Work()).linear_s == 0.0


def test_an_output_layer_that_is_not_quantized_is_read_as_it_is() -> None:
    cost = cost_of(SMOL, CPU, decode_work(1, 1), head_bits=16)
    assert cost.weight_bytes == SMOL.layer_bytes("int8") + 2 * SMOL.num_output_parameters
    assert cost.linear_s == pytest.approx(SMOL.layer_bytes("int8") / 14e9 + 2 * SMOL.num_output_parameters / 16e9)


def test_experts_on_a_cpu() -> None:
    stored = StoredWeights(MIXTRAL, CPU, "int4", 8, 1)
    active_bytes = MIXTRAL.layer_bytes("int4") - 32 * 6 * MIXTRAL.expert_bytes("int4")
    head_s = MIXTRAL.head_bytes("int4") / 14e9
    assert stored.products(1, 1).by_bytes_s == pytest.approx(active_bytes / 14e9 + head_s)
    assert stored.products(3, 1).by_flops_s == pytest.approx((3 * active_bytes + MIXTRAL.head_bytes("int4")) / 34e9)
    everybody = stored.products(512, 1)
    assert everybody.num_bytes == pytest.approx(2 * (MIXTRAL.num_parameters - 2 * 32_000 * 4096) + MIXTRAL.head_bytes("int4"))


def test_the_law_of_one_format_predicts_another() -> None:
    """Two Zen 4 cores, all layers of the 135M, ms: the rates are those of int4 at 1 and 16 rows, and int8 is within a quarter."""
    codes = SMOL.layer_bytes("int4")
    zen = replace(CPU, bytes_per_s=codes / 4.4e-3, code_read_share=1.0, code_row_bytes_per_s=16 * codes / 24.9e-3, max_code_rows=16)
    for name, measured_ms in (("int4", {1: 4.4, 2: 5.1, 4: 7.4, 8: 13.1, 16: 24.9}), ("int8", {1: 7.8, 2: 9.3, 4: 14.7, 8: 26.8, 16: 50})):
        stored = StoredWeights(SMOL, zen, name, 8, 1)
        for rows, ms in measured_ms.items():
            made = stored.products(rows, 0)
            assert 1e3 * max(made.by_bytes_s, made.by_flops_s) == pytest.approx(ms, rel=0.25), (name, rows)


# --- memory ---------------------------------------------------------------------------------------


def test_what_lies_in_memory() -> None:
    table = 49_152 * 576
    copy = 2 * (SMOL.num_layer_parameters + table)  # of the layers and of the quantized output layer
    lean = replace(CPU, keeps_weight_copy=False)
    assert CostModel(SMOL, CPU, weights="int8").stored_weight_bytes == SMOL.weight_bytes("int8") + copy
    assert CostModel(SMOL, lean, weights="int8").stored_weight_bytes == SMOL.weight_bytes("int8")
    assert CostModel(SMOL, A100, weights="int8").stored_weight_bytes == SMOL.weight_bytes("int8")
    as_it_is = CostModel(SMOL, CPU, weights="int8", head_bits=16).stored_weight_bytes
    assert as_it_is == SMOL.weight_bytes("int8", 16) + 2 * SMOL.num_layer_parameters + 2 * table  # the table, laid out anew
    assert CostModel(SMOL, CPU).stored_weight_bytes == SMOL.weight_bytes() + 2 * table


def test_plain_weights_do_not_care_how_codes_are_unpacked() -> None:
    bare = replace(CPU, max_code_rows=None, code_read_share=None, code_row_bytes_per_s=None)
    for work in (decode_work(1, 50), decode_work(64, 50), row_work(0, 300)):
        for name in ("fp32", "bf16", "fp8"):
            assert cost_of(SMOL, CPU, work, name) == cost_of(SMOL, bare, work, name)


# --- what decides claims A45 and B13 --------------------------------------------------------------


def gain(shape: Any, device: DeviceSpec, weights: str, batch: int, context_tokens: int = 1) -> float:
    """How many times as fast as bf16 a decode step is."""
    work = decode_work(batch, context_tokens)
    return cost_of(shape, device, work, "bf16").seconds / cost_of(shape, device, work, weights).seconds


def stops_winning(shape: Any, device: DeviceSpec, weights: str, context_tokens: int) -> int:
    """The first batch at which a step is less than a tenth faster than in bf16."""
    return next(batch for batch in range(1, 1024) if gain(shape, device, weights, batch, context_tokens) < 1.1)


def test_four_bits_help_one_request_most_and_a_large_batch_not_at_all() -> None:
    """A45. Published for AWQ on an A100, 13B at batch 1: 19.1 to 7.9 ms. The model has no host time of that engine, in both 2.4 ms."""
    plain, four = (cost_of(LLAMA, A100, decode_work(1, 1), name, head_bits=16).seconds for name in ("bf16", "awq-int4-g128"))
    assert (1e3 * plain, 1e3 * four) == (pytest.approx(16.7, abs=0.05), pytest.approx(4.9, abs=0.05))
    assert 1e3 * four + (19.1 - 1e3 * plain) == pytest.approx(7.9, rel=0.08)
    gains = [round(gain(LLAMA, A100, "int4", batch, 1024), 2) for batch in (1, 8, 32, 64, 128, 256)]
    assert gains == [3.06, 2.24, 1.53, 1.17, 1.0, 1.0]
    assert [stops_winning(LLAMA, A100, name, 1024) for name in ("int4", "int4-g128", "int8")] == [80, 80, 80]
    assert stops_winning(LLAMA, A100, "int4-g128", 1) == 107  # where no KV is read, FLOPs end it


def test_half_the_bytes_are_at_most_twice_the_speed_and_less_than_bf16_s_if_unpacked_first() -> None:
    """B13. Published for LLM.int8(), Llama-3.1-8B: H100 0.47 at batch 1 and 0.48 at 32; RTX 4090 0.96 and 1.32."""
    assert LLAMA.weight_bytes("int8") / LLAMA.weight_bytes() == pytest.approx(0.506, abs=5e-4)
    assert [round(gain(LLAMA, A100, "int8", batch), 2) for batch in (1, 32, 256)] == [1.94, 1.94, 1.0]
    h100, shape = DEVICES["h100"], SHAPES["llama-3.1-8b"]
    first = replace(h100, max_code_rows=0, keeps_weight_copy=False)
    slower = [
        cost_of(shape, h100, decode_work(batch, 512), "bf16").seconds / cost_of(shape, first, decode_work(batch, 512)).seconds
        for batch in (1, 32, 256)
    ]
    assert slower == pytest.approx([0.42, 0.45, 0.62], abs=0.005)
