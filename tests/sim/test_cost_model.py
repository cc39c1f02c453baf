"""FLOPs, bytes and seconds: held against counting one by one, against arithmetic on paper, and against published measurements."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import Any

import pytest

from minserve.core.batch import ScheduledRequest
from minserve.core.request import Request, SamplingParams
from minserve.sim.cost_model import Cost, CostModel, Work, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES, ModelShape

A100 = DEVICES["a100-80gb"]
SMALL = ModelShape(
    name="small",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=1000,
)


def row(start: int, num_tokens: int, table: Sequence[int] = (), samples: bool = True, name: str = "R") -> ScheduledRequest:
    request = Request(name, tuple(range(start + num_tokens)), SamplingParams(), max_total_tokens=10_000)
    return ScheduledRequest(request, start, num_tokens, tuple(table), samples)


def total(works: Sequence[Work]) -> Work:
    return reduce(add, works, Work())


# --- the anchors: what TensorRT-LLM 0.6.1 and AWQ published for an A100-80GB, fp16 -----------------------

LLAMA_7B = SHAPES["llama-2-7b"]  # LLaMA-7B has the same sizes
LLAMA_70B = replace(SHAPES["llama-2-70b"], name="llama-70b")


def prefill_s(cost: CostModel, num_tokens: int, num_prompts: int = 1) -> float:
    """Prompts computed in one step."""
    return cost.of(total([row_work(0, num_tokens)] * num_prompts)).seconds


def decode_s(cost: CostModel, batch: int, prompt: int, output: int) -> float:
    """The first token comes from the prompt; each later one finds the context one token longer."""
    return sum(cost.of(decode_work(batch, prompt + done)).seconds for done in range(1, output))


def batch_60() -> float:
    cost = CostModel(LLAMA_7B, A100)
    return prefill_s(cost, 128, 60) + decode_s(cost, 60, 128, 2048)


def batch_384() -> float:
    cost = CostModel(LLAMA_7B, A100)
    return prefill_s(cost, 128, 384) + decode_s(cost, 384, 128, 128)


def batch_52() -> float:
    """Prompt by prompt: 52 x 2,048 tokens are too many for one step."""
    cost = CostModel(LLAMA_7B, A100)
    return 52 * prefill_s(cost, 2048) + decode_s(cost, 52, 2048, 128)


def first_token_7b() -> float:
    return prefill_s(CostModel(LLAMA_7B, A100), 2048)


def first_token_70b_on_four() -> float:
    return prefill_s(CostModel(LLAMA_70B, A100, num_devices=4), 2048)


def one_token_7b() -> float:
    return CostModel(LLAMA_7B, A100).of(decode_work(1, 1)).seconds


def one_token_13b() -> float:
    return CostModel(SHAPES["llama-2-13b"], A100).of(decode_work(1, 1)).seconds


@pytest.mark.parametrize(
    ("model_s", "measured_s", "within"),
    [
        # fitted: the share of the bandwidth to the first, the share of the FLOP rate at many rows to the second
        pytest.param(batch_60, 63.7, 0.03, id="fitted: batch 60, 128 in, 2,048 out"),
        pytest.param(first_token_7b, 0.133, 0.01, id="fitted: first token of 2,048, alone"),
        # predicted
        pytest.param(batch_384, 8.80, 0.20, id="predicted: batch 384, 128 in, 128 out"),
        pytest.param(batch_52, 11.26, 0.20, id="predicted: batch 52, 2,048 in, 128 out"),
        pytest.param(first_token_70b_on_four, 0.377, 0.20, id="predicted: 70B on four, first token of 2,048"),
        pytest.param(one_token_7b, 0.01077, 0.20, id="predicted: 7B, one request"),
        pytest.param(one_token_13b, 0.01908, 0.20, id="predicted: 13B, one request"),
    ],
)
def test_the_model_is_near_what_was_measured(model_s: Any, measured_s: float, within: float):
    assert model_s() == pytest.approx(measured_s, rel=within)


# --- work --------------------------------------------------------------------------------------------


def brute_force(start: int, num_tokens: int, window: int | None) -> tuple[int, int]:
    """(pairs, context tokens that some query sees), counted one by one."""
    seen = [{key for key in range(query + 1) if window is None or query - key < window} for query in range(start, start + num_tokens)]
    return sum(len(keys) for keys in seen), len(set().union(*seen))


@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
@pytest.mark.parametrize("start", [0, 1, 2, 5, 8, 13])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 20])
def test_row_work_counts_what_is_there(start: int, num_tokens: int, window: int | None):
    work = row_work(start, num_tokens, window=window)
    assert (work.num_pairs, work.num_context_tokens) == brute_force(start, num_tokens, None)
    assert (work.num_window_pairs, work.num_window_tokens) == brute_force(start, num_tokens, window)
    assert (work.num_tokens, work.num_requests, work.num_samples) == (num_tokens, 1, 1)


@pytest.mark.parametrize("window", [None, 8])
def test_the_work_of_a_batch_is_the_sum_of_its_rows(window: int | None):
    rows = [row(0, 20), row(5, 7, samples=False), row(30, 1), row(3, 1)]
    cost = CostModel(replace(SMALL, window=window, num_window_layers=0 if window is None else 1), A100)
    assert cost.work(rows) == total([row_work(r.start, r.num_tokens, r.samples, window) for r in rows])


def test_decode_work_is_a_row_of_one_token_for_each_request():
    assert decode_work(5, 100) == total([row_work(99, 1)] * 5)


def test_a_chunked_prompt_has_the_pairs_of_a_whole_one_and_reads_more():
    whole, chunks = row_work(0, 100), total([row_work(start, 25, samples=start == 75) for start in range(0, 100, 25)])
    assert (chunks.num_pairs, chunks.num_tokens, chunks.num_samples) == (whole.num_pairs, 100, 1)
    assert (whole.num_context_tokens, chunks.num_context_tokens) == (100, 25 + 50 + 75 + 100)


def test_a_device_may_read_a_common_beginning_once():
    device = replace(A100, shares_prefix_reads=True)
    rows = [row(47, 1, table=(7, 8, 9)), row(40, 1, table=(7, 8, 5)), row(33, 1, table=(1, 2, 3))]
    assert CostModel(SMALL, A100).work(rows).num_context_tokens == 48 + 41 + 34
    work = CostModel(SMALL, device).work(rows)
    assert work.num_context_tokens == 48 + 41 + 34 - 2 * 16
    assert work.num_shared_pairs == 2 * 32  # the queries of two with two blocks; all other pairs are their own
    assert CostModel(SMALL, A100).work(rows).num_shared_pairs == 0
    windowed = CostModel(replace(SMALL, window=32, num_window_layers=1), device).work(rows)  # it ends inside the prefix
    assert (windowed.num_context_tokens, windowed.num_shared_pairs) == (48 + 41 + 34, 0)


def test_chunks_share_a_beginning_too_but_not_what_they_write():
    device = replace(A100, shares_prefix_reads=True)
    rows = [row(0, 20, table=(4, 5)), row(16, 8, table=(4, 6)), row(16, 16, table=(4, 8))]  # the first one writes block 4
    work = CostModel(SMALL, device).work(rows)
    assert work.num_context_tokens == 20 + 24 + 32 - 16
    assert work.num_shared_pairs == 16 * (8 + 16) and work.num_pairs == row_work(0, 20).num_pairs + sum(
        row_work(16, n).num_pairs for n in (8, 16)
    )


def test_pairs_with_a_shared_key_run_at_the_full_rate():
    device = replace(A100, shares_prefix_reads=True, attention_share=0.25, gathers_kv=True)
    cost, work = CostModel(SMALL, device), decode_work(4, 100)
    own, shared = cost.of(work), cost.of(replace(work, num_shared_pairs=300))
    assert shared.attention_flops == own.attention_flops and shared.shared_flops == 0.75 * own.attention_flops
    saved_s = shared.shared_flops * (1 / 0.25 - 1) / device.flops_per_s
    assert own.attention_s - shared.attention_s == pytest.approx(saved_s)


# --- FLOPs and bytes on paper ------------------------------------------------------------------------


def cost_of(shape: ModelShape, work: Work, **options: Any) -> Cost:
    return CostModel(shape, A100, **options).of(work)


def test_flops_of_a_prompt_on_paper():
    cost = cost_of(SMALL, row_work(0, 10))
    per_layer = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 96  # q, k, v; output; gate, up, down
    assert cost.linear_flops == 2 * 10 * 2 * per_layer + 2 * 64 * 1000  # one row of logits
    assert cost.attention_flops == 2 * 55 * (2 + 2) * 4 * 16  # 55 pairs, 2 layers, scores and weighted sums


def test_bytes_of_a_decode_step_on_paper():
    cost = cost_of(SMALL, decode_work(3, 100))
    per_token = 2 * 2 * 2 * 16 * 2  # layers, key and value, KV heads, head size, bytes
    assert (cost.kv_read_bytes, cost.kv_written_bytes) == (3 * 100 * per_token, 3 * per_token)
    assert cost.weight_bytes == 2 * (SMALL.num_parameters - SMALL.num_embedding_parameters)  # which is looked up
    assert cost.link_bytes == cost.link_s == 0


def test_13b_at_a_batch_of_64_reads_more_kv_than_weights():
    cost = cost_of(SHAPES["llama-2-13b"], decode_work(64, 1024))
    assert cost.weight_bytes == pytest.approx(25.70e9, rel=1e-3) and cost.kv_read_bytes == pytest.approx(53.7e9, rel=1e-3)
    assert cost.limit == "KV"


def test_layers_with_a_window_read_and_multiply_less():
    windowed = replace(SMALL, window=16, num_window_layers=1)
    cost, full = cost_of(windowed, row_work(99, 1, window=16)), cost_of(SMALL, row_work(99, 1))
    assert cost.kv_read_bytes / full.kv_read_bytes == (100 + 16) / 200
    assert cost.attention_flops / full.attention_flops == (100 + 16) / 200
    assert cost.kv_written_bytes == full.kv_written_bytes


def test_grouped_heads_save_bytes_and_no_attention_flops():
    grouped, all_heads = SHAPES["llama-2-70b"], replace(SHAPES["llama-2-70b"], num_kv_heads=64)
    one, other = cost_of(grouped, decode_work(8, 1000)), cost_of(all_heads, decode_work(8, 1000))
    assert other.kv_read_bytes == 8 * one.kv_read_bytes and other.attention_flops == one.attention_flops


@pytest.mark.parametrize(("kv", "share"), [("fp32", 2.0), ("bf16", 1.0), ("fp8", 0.5), ("int8", 130 / 256), ("int4", 68 / 256)])
def test_kv_bytes_follow_the_bits_and_flops_do_not(kv: str, share: float):
    shape = SHAPES["llama-3.1-8b"]
    cost, plain = cost_of(shape, decode_work(4, 500), kv=kv), cost_of(shape, decode_work(4, 500))
    assert cost.kv_read_bytes == share * plain.kv_read_bytes and cost.kv_written_bytes == share * plain.kv_written_bytes
    assert (cost.flops, cost.weight_bytes) == (plain.flops, plain.weight_bytes)


def test_weight_bytes_follow_the_bits():
    shape = SHAPES["llama-2-13b"]
    cost, plain = cost_of(shape, decode_work(1, 1), weights="int4"), cost_of(shape, decode_work(1, 1))
    table_bytes = 2 * shape.num_embedding_parameters
    assert cost.weight_bytes == shape.weight_bytes("int4") - table_bytes < 0.29 * plain.weight_bytes  # 4.5 bits of 16
    assert cost.linear_flops == plain.linear_flops
    assert plain.limit == cost.limit == "weights" and 2.5 < plain.seconds / cost.seconds < 3.8


def test_a_latent_is_split_by_nobody_and_has_longer_keys_than_values():
    sizes = {"latent_size": 40, "rotary_size": 8, "key_size": 24, "num_kv_heads": 4}
    shape = replace(SMALL, **sizes)
    cost = cost_of(shape, decode_work(2, 50), num_devices=2)
    assert cost.kv_read_bytes == 2 * 50 * 2 * 40 * 2
    assert cost.attention_flops == 2 * 100 * 2 * 4 * (24 + 16) / 2


# --- experts -----------------------------------------------------------------------------------------


def test_few_tokens_visit_few_experts_and_many_visit_all():
    mixtral = SHAPES["mixtral-8x7b"]
    cost = CostModel(mixtral, A100)
    table = mixtral.num_embedding_parameters
    assert cost.weight_bytes_read(1) == pytest.approx(2 * (mixtral.num_active_parameters - table))
    assert cost.weight_bytes_read(4096) == pytest.approx(cost.weight_bytes - 2 * table)
    read = [cost.weight_bytes_read(num_tokens) for num_tokens in (1, 2, 4, 16)]
    assert read == sorted(read)
    # two tokens: an expert is missed by both with (3/4)^2
    experts = 32 * 8 * mixtral.expert_parameters
    assert read[1] == pytest.approx(2 * (mixtral.num_parameters - table - experts * 9 / 16))


def test_the_pool_makes_room_for_a_packed_copy_of_a_tied_table():
    tied, plain = SHAPES["smollm2-135m"], SHAPES["llama-2-13b"]
    packing = replace(A100, packs_weights=True)
    assert CostModel(tied, packing).stored_weight_bytes - tied.weight_bytes() == 2 * tied.num_embedding_parameters
    assert CostModel(plain, packing).stored_weight_bytes == plain.weight_bytes()
    one_less = CostModel(tied, A100).kv_bytes_left() - CostModel(tied, packing).kv_bytes_left()
    assert one_less == 2 * tied.num_embedding_parameters
    assert CostModel(tied, packing).pool_blocks(16) < CostModel(tied, A100).pool_blocks(16)


def test_the_embedding_is_looked_up_and_the_output_layer_read_for_samples_only():
    plain, tied = SHAPES["llama-2-13b"], SHAPES["smollm2-135m"]
    for shape, num_tables in ((plain, 1), (tied, 0)):  # a tied table is the output layer as well
        cost, table_bytes = CostModel(shape, A100), 2 * shape.num_embedding_parameters
        assert cost.weight_bytes_read(8) == cost.weight_bytes - num_tables * table_bytes
        assert cost.weight_bytes_read(8, num_samples=0) == cost.weight_bytes - (num_tables + 1) * table_bytes


def test_keys_and_values_are_written_in_time_too():
    cost = cost_of(SMALL, decode_work(3, 100))
    assert cost.attention_s == pytest.approx((cost.kv_read_bytes + cost.kv_written_bytes) / (A100.bytes_per_s * A100.kv_read_share))


def test_a_token_multiplies_with_its_own_experts_only():
    mixtral = SHAPES["mixtral-8x7b"]
    cost = cost_of(mixtral, row_work(0, 512))
    active = mixtral.num_active_parameters - 2 * 32_000 * 4096
    assert cost.linear_flops == 2 * 512 * active + 2 * 32_000 * 4096


# --- several devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_tensor_parallel_devices_share_weights_kv_and_flops(num_devices: int):
    shape = SHAPES["llama-3.1-70b"]
    one, many = CostModel(shape, A100), CostModel(shape, A100, num_devices=num_devices)
    work = decode_work(16, 1000)
    assert many.weight_bytes == one.weight_bytes / num_devices
    assert many.kv_bytes_per_token == one.kv_bytes_per_token / num_devices
    assert many.of(work).flops == one.of(work).flops / num_devices
    assert many.of(work).kv_read_bytes == one.of(work).kv_read_bytes / num_devices
    assert one.of(work).seconds / num_devices < many.of(work).seconds < one.of(work).seconds


def test_kv_heads_that_cannot_be_split_are_kept_by_several():
    shape = SHAPES["llama-3.1-70b"]  # 8 KV heads
    one, sixteen = CostModel(shape, A100), CostModel(shape, A100, num_devices=16)
    assert sixteen.kv_bytes_per_token == one.kv_bytes_per_token / 8


def test_the_sums_over_the_link_on_paper():
    cost = cost_of(SMALL, row_work(0, 10), num_devices=4)
    per_sum = 2 * 3 / 4 * 10 * 64 * 2  # a ring sends 2 (n - 1) / n of the hidden states, 2 bytes each
    assert cost.link_bytes == 2 * 2 * per_sum
    assert cost.link_s == pytest.approx(cost.link_bytes / 300e9 + 4 * 6 * 10e-6)


def test_a_thin_link_becomes_the_limit():
    work = row_work(0, 2048)
    assert cost_of(SHAPES["llama-2-70b"], work, num_devices=4).limit == "FLOPs"
    thin = CostModel(SHAPES["llama-2-70b"], replace(A100, link_bytes_per_s=5e9), num_devices=4)
    assert thin.of(work).limit == "link"


@pytest.mark.parametrize(
    ("shape", "num_devices", "words"),
    [
        (SHAPES["llama-2-13b"], 3, "40 query heads cannot be shared evenly by 3 devices"),
        (SHAPES["llama-2-13b"], 0, "by 0 devices"),
        (replace(SMALL, num_heads=12, num_kv_heads=3), 2, "3 KV heads can neither be split nor copied evenly over 2 devices"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(shape: ModelShape, num_devices: int, words: str):
    with pytest.raises(ValueError, match=words):
        CostModel(shape, A100, num_devices=num_devices)


# --- seconds -----------------------------------------------------------------------------------------

STEPS = [Work(), row_work(0, 1), row_work(0, 2048), row_work(500, 300, samples=False), decode_work(1, 1), decode_work(256, 2000)]


@pytest.mark.parametrize("work", STEPS, ids=lambda work: f"{work.num_tokens} tokens of {work.num_requests}")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_every_cost_is_the_sum_of_its_parts(work: Work, num_devices: int):
    device = replace(A100, activation_share=0.5, request_overhead_s=1e-5)
    cost = CostModel(SHAPES["llama-3.1-8b"], device, num_devices=num_devices).of(work)
    assert cost.flops == cost.linear_flops + cost.attention_flops
    assert cost.num_bytes == cost.weight_bytes + cost.kv_read_bytes + cost.kv_written_bytes
    parts = {
        "weights" if cost.weights_are_slower else "FLOPs": cost.linear_s,
        "KV": cost.attention_s,
        "activations": cost.activation_s,
        "link": cost.link_s,
        "host": cost.overhead_s,
    }
    assert cost.seconds == pytest.approx(sum(parts.values()))
    assert parts[cost.limit] == max(parts.values())
    assert cost.overhead_s == pytest.approx(0.0005 + 1e-5 * work.num_requests)
    assert all(getattr(cost, field.name) >= 0 for field in fields(Cost))
    # nobody beats the data sheet
    assert cost.seconds > max(cost.flops / device.flops_per_s, (cost.weight_bytes + cost.kv_read_bytes) / device.bytes_per_s)


@pytest.mark.parametrize("one", STEPS)
@pytest.mark.parametrize("other", STEPS)
def test_two_steps_in_one_never_take_longer_than_one_after_the_other(one: Work, other: Work):
    cost = CostModel(SHAPES["llama-2-13b"], A100)
    both = cost.of(one + other)
    assert both.flops == pytest.approx(cost.of(one).flops + cost.of(other).flops)
    assert both.seconds <= cost.of(one).seconds + cost.of(other).seconds


def test_a_step_without_tokens_costs_its_overhead():
    cost = cost_of(SHAPES["llama-2-13b"], Work())
    assert (cost.seconds, cost.flops, cost.num_bytes, cost.limit) == (0.0005, 0, 0, "host")


def test_batching_is_free_until_the_flops_take_over():
    cost = CostModel(SHAPES["llama-2-13b"], A100)
    alone, many = cost.of(decode_work(1, 1)), cost.of(decode_work(64, 1))
    assert many.linear_s == alone.linear_s and many.weights_are_slower
    assert cost.of(decode_work(512, 1)).limit == "FLOPs"


def test_a_device_that_gathers_keys_and_values_first_pays_for_both():
    work = row_work(0, 2048)
    plain, gathering = cost_of(SHAPES["llama-2-7b"], work), CostModel(SHAPES["llama-2-7b"], replace(A100, gathers_kv=True)).of(work)
    assert plain.attention_s < gathering.attention_s < 2 * plain.attention_s


# --- memory ------------------------------------------------------------------------------------------


def test_the_pool_of_a_13b_on_paper():
    cost = CostModel(SHAPES["llama-2-13b"], A100)
    assert cost.pool_blocks(16) == int((0.9 * 80e9 - cost.weight_bytes - 3e9) // (819_200 * 16)) == 3278
    assert cost.pool_blocks(16, memory_fraction=0.6, reserve_bytes=0) == int((48e9 - cost.weight_bytes) // (819_200 * 16))


def test_a_model_that_does_not_fit_names_the_numbers():
    words = r"llama-3.1-70b does not fit: 90% of 1 x 80 GB, less 141.1 GB of bf16 weights and 3.0 GB in reserve, leaves -72.1 GB"
    with pytest.raises(ValueError, match=words):
        CostModel(SHAPES["llama-3.1-70b"], A100).pool_blocks(16)
    assert CostModel(SHAPES["llama-3.1-70b"], A100, num_devices=4).pool_blocks(16) > 1000
