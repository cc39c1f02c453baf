"""The planner: the anchors of the course, budgets that add up, errors that help, and requests that really fit."""

import random
from dataclasses import replace

import pytest

from minserve.core.metrics import Summary
from minserve.sim import planner
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.planner import DoesNotFit, Plan, plan
from minserve.sim.shapes import SHAPES, ModelShape, shape_from_config
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import Lengths, all_at_once, make_workload

A100 = DEVICES["a100-80gb"]


def cost_of(model: str = "llama-2-13b", kv: str = "bf16", num_devices: int = 1) -> CostModel:
    return CostModel(SHAPES[model], A100, kv=kv, num_devices=num_devices)


# --- anchors: 90 % of 80 GB, less weights and 3 GB ------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kv", "requests"),
    [("llama-2-13b", "fp16", 25), ("llama-2-13b", "int8", 50), ("llama-3.1-8b", "fp16", 197), ("llama-3.1-8b", "int8", 388)],
)
def test_requests_of_2048_tokens(model: str, kv: str, requests: int) -> None:
    assert planner.requests_that_fit(cost_of(model, kv), 2048) == requests
    assert plan(SHAPES[model], A100, context_tokens=2048, kv=kv).num_requests == requests


def test_requests_fall_as_one_over_the_context() -> None:
    fits = [planner.requests_that_fit(cost_of(), 256 * 2**i) for i in range(7)]
    assert fits == [204, 102, 51, 25, 12, 6, 3]  # 204.9 of 256: there are no 205
    tokens = planner.kv_tokens_that_fit(cost_of())
    assert fits == [tokens // (256 * 2**i) for i in range(7)]


def test_kv_tokens_by_memory_fraction() -> None:
    tokens = [planner.kv_tokens_that_fit(cost_of(), fraction) for fraction in (0.6, 0.7, 0.8, 0.9, 0.92)]
    assert tokens == [23_155, 32_921, 42_686, 52_452, 54_405]
    assert planner.kv_tokens_that_fit(cost_of(), 0.3) == 0  # less than the weights


def test_kv_weighs_as_much_as_the_weights() -> None:
    crossovers = [planner.tokens_where_kv_equals_weights(cost_of(m)) for m in ("llama-2-13b", "llama-3.1-8b", "llama-3.1-70b")]
    assert [round(tokens / 1000) for tokens in crossovers] == [32, 123, 431]


def test_blocks_are_those_of_the_cost_model() -> None:
    for fraction in (0.5, 0.9):
        assert planner.blocks_that_fit(cost_of(), 16, fraction, 3e9) == cost_of().pool_blocks(16, fraction, 3e9)


# --- the budget -----------------------------------------------------------------------------------


def test_a_budget_adds_up_and_keeps_the_reserve() -> None:
    budget = plan(SHAPES["llama-2-13b"], A100, context_tokens=2048).budget
    assert sum(budget.parts().values()) == pytest.approx(80e9, abs=1)
    assert budget.activation_bytes + budget.runtime_bytes == 3e9
    assert budget.kv_bytes == 3278 * 16 * 819_200
    assert 8e9 <= budget.headroom_bytes < 8e9 + budget.block_bytes


def test_activations_of_a_13b_by_hand() -> None:
    # In the MLP: residual and normed copy of 5,120, and gate, up and product of 13,824, in 2 bytes; 25 rows of 32,000 logits in 10.
    by_hand = 2 * 2048 * (2 * 5120 + 3 * 13_824) + 10 * 25 * 32_000
    assert planner.activation_bytes(cost_of(), 2048, 25) == by_hand == 219_812_352
    assert planner.activation_bytes(cost_of(), 16_384, 25) + 1e9 == pytest.approx(3e9, rel=0.1)  # what 3 GB stands for


def test_activations_count_visited_experts_and_share_the_inside() -> None:
    mixtral = CostModel(SHAPES["mixtral-8x7b"], A100)
    assert planner.activation_bytes(mixtral, 100, 0) == 2 * 100 * (2 * 4096 + 2 * (3 * 14_336 + 4096))
    two = planner.activation_bytes(cost_of(num_devices=2), 100, 0)
    assert two == 2 * 100 * (2 * 5120 + 3 * 13_824 / 2)


def test_the_reserve_grows_where_steps_need_it() -> None:
    large = plan(SHAPES["llama-2-13b"], A100, context_tokens=2048, token_budget=65_536).budget
    assert large.runtime_bytes == pytest.approx(1e9) and large.activation_bytes > 6e9
    given = plan(SHAPES["llama-2-13b"], A100, context_tokens=2048, reserve_bytes=1e9).budget
    assert given.activation_bytes + given.runtime_bytes == 1e9
    with pytest.raises(ValueError, match=r"a reserve of 0.10 GB is too small: the activations alone take 0.22 GB"):
        plan(SHAPES["llama-2-13b"], A100, context_tokens=2048, reserve_bytes=1e8)


def test_experts_count_for_capacity_but_not_for_the_step() -> None:
    made = plan(SHAPES["mixtral-8x7b"], A100, context_tokens=2048, weights="int4")
    assert made.budget.weight_bytes == pytest.approx(46.7e9 * 4.5 / 8, rel=0.02)  # all experts are stored, groups of 64 with scale and zero
    assert made.cost.weight_bytes_read(1) < 0.35 * made.budget.weight_bytes  # one token reads two of eight


def test_tensor_parallel_shares_weights_and_kv() -> None:
    four = plan(SHAPES["llama-3.1-70b"], A100, context_tokens=2048, num_devices=4)
    assert four.budget.weight_bytes == pytest.approx(141.1e9 / 4, rel=1e-3)
    assert four.budget.block_bytes == 16 * 327_680 / 4
    shares = [four.budget.weight_bytes / 80e9, four.budget.kv_bytes / 80e9]
    assert shares == pytest.approx([0.44, 0.42], abs=0.005)


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "context", "words"),
    [
        ("llama-3.1-70b", 2048, "141.1 GB of bf16 weights .* would fit with --weights int4 .40 requests., or --tensor-parallel 4 .201 req"),
        ("llama-3.1-405b", 2048, "It would fit with --tensor-parallel 16 "),
        (
            "llama-2-13b",
            65_536,
            "KV needs 53.69 GB. It would fit with .*--kv int8 .1 request., or --tensor-parallel 2 .*, or --context 52448",
        ),
    ],
)
def test_what_does_not_fit_says_what_would(model: str, context: int, words: str) -> None:
    with pytest.raises(DoesNotFit, match=words):
        plan(SHAPES[model], A100, context_tokens=context)


def test_the_advice_holds() -> None:
    assert plan(SHAPES["llama-3.1-70b"], A100, context_tokens=2048, weights="int4").num_requests == 40
    assert plan(SHAPES["llama-3.1-70b"], A100, context_tokens=2048, weights="int8", num_devices=2).num_requests == 98
    assert plan(SHAPES["llama-3.1-70b"], A100, context_tokens=2048, num_devices=4).num_requests == 201
    assert plan(SHAPES["llama-2-13b"], A100, context_tokens=52_448).num_requests == 1


def test_advice_keeps_to_the_output_layer_that_was_asked_for() -> None:
    """Two cards of 80 GB hold a 70B in int8; with its output layer in 16 bits that is a quarter of a gigabyte more on each."""
    for head_bits, requests in ((8, 98), (16, 97)):
        with pytest.raises(DoesNotFit, match=rf"--weights int8 \({requests} requests\)"):
            plan(SHAPES["llama-3.1-70b"], A100, context_tokens=2048, num_devices=2, head_bits=head_bits)


def test_two_changes_at_once_are_advised_where_one_is_not_enough() -> None:
    with pytest.raises(DoesNotFit, match=r"It would fit with --weights int4 --tensor-parallel 16 \(30 requests\)"):
        plan(SHAPES["llama-3.1-405b"], DEVICES["l4"], context_tokens=2048)
    assert plan(SHAPES["llama-3.1-405b"], DEVICES["l4"], context_tokens=2048, weights="int4", num_devices=16).num_requests == 30
    with pytest.raises(DoesNotFit, match="No smaller format and no number of such devices up to 32 is enough"):
        plan(SHAPES["llama-3.1-405b"], DEVICES["t4"], context_tokens=2048, reserve_bytes=12e9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context_tokens": 1}, "of 1 tokens"),
        ({"context_tokens": 100, "output_tokens": 100}, "between 1 and 99 can be output, got 100"),
        ({"context_tokens": 100, "memory_fraction": 1.2}, "memory fraction must be above 0 and at most 1, got 1.2"),
        ({"context_tokens": 100, "block_size": 0}, "block_size 0"),
        ({"context_tokens": 100, "num_devices": 3}, "40 query heads cannot be shared evenly by 3"),
        ({"context_tokens": 100, "kv": "int5"}, "int5"),
        ({"context_tokens": 100, "weights": "awq-int8"}, "AWQ is for 4 bits"),
        ({"context_tokens": 100, "weights": "int4", "head_bits": 4}, "8 or 16 bits, got 4"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(SHAPES["llama-2-13b"], A100, **settings)


# --- what decides claims B14 and B40 ---------------------------------------------------------------

CODE_LLAMA_34B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 22_016,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}


def smallest_card_gb(shape: ModelShape, weights: str) -> int | None:
    """The smallest of the cards that people buy on which one request of 2,048 tokens runs, with 1 GB of runtime and 5 % left over."""
    for card_gb in (8, 12, 16, 24, 32, 48):
        cost = CostModel(shape, replace(DEVICES["rtx-4090"], memory_bytes=card_gb * 1e9), weights=weights, head_bits=16)
        reserve = planner.RUNTIME_BYTES + planner.activation_bytes(cost, 512, 1)
        if planner.requests_that_fit(cost, 2048, memory_fraction=0.95, reserve_bytes=reserve):
            return card_gb
    return None


def test_four_bits_bring_13b_and_34b_onto_a_card_of_24_gb_and_not_70b() -> None:
    shapes = [SHAPES[name] for name in ("llama-2-7b", "llama-3.1-8b", "llama-2-13b", "llama-2-70b")]
    shapes.insert(3, shape_from_config(CODE_LLAMA_34B))
    cards = {name: [smallest_card_gb(shape, name) for shape in shapes] for name in ("bf16", "int8", "int4", "int4-g128")}
    assert cards == {
        "bf16": [24, 24, 32, None, None],
        "int8": [12, 12, 24, 48, None],
        "int4": [8, 8, 12, 24, 48],
        "int4-g128": [8, 8, 12, 24, 48],
    }
    assert [round(shape.weight_bytes("int4-g128", 16) / 1e9, 1) for shape in shapes] == [4.0, 5.8, 7.4, 18.7, 37.4]


def test_kv_in_8_bits_gains_three_times_the_tokens_that_weights_in_8_bits_gain() -> None:
    """13B on 80 GB: 8-bit weights free 12.8 GB, 8-bit keys and values halve what each token takes."""
    options = (("bf16", "bf16"), ("int8", "bf16"), ("int4", "bf16"), ("bf16", "fp8"), ("bf16", "int8"), ("int8", "int8"))
    plans = [plan(SHAPES["llama-2-13b"], A100, context_tokens=2048, weights=weights, kv=kv) for weights, kv in options]
    tokens = [planner.kv_tokens_that_fit(made.cost) for made in plans]
    assert tokens == [52_452, 68_135, 74_916, 104_905, 103_291, 134_174]
    assert [round(100 * (count / tokens[0] - 1)) for count in tokens] == [0, 30, 43, 100, 97, 156]
    rates = [round(made.full.output_tokens_per_s) for made in plans if made.full]  # a full batch of 2,048 tokens each
    assert rates == [407, 479, 502, 612, 607, 669]
    alone_ms = [round(1e3 * made.alone.decode_s, 1) for made in plans]  # one request by itself: there weights are what counts
    assert alone_ms == [17.7, 9.6, 6.1, 17.2, 17.2, 9.1]


# --- targets --------------------------------------------------------------------------------------


def planned(slo_ttft_s: float | None = None, slo_tpot_s: float | None = None) -> Plan:
    return plan(SHAPES["llama-2-13b"], A100, context_tokens=2048, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s)


def test_memory_tpot_ttft_or_the_step_limits_the_batch() -> None:
    assert (planned().limited_by, planned().batch) == ("memory", 25)
    assert (planned(slo_tpot_s=0.04).limited_by, planned(slo_tpot_s=0.04).batch) == ("TPOT", 13)
    both = planned(slo_tpot_s=0.05, slo_ttft_s=0.23)
    assert both.limited_by == "TTFT" and both.batch == both.limits["TTFT"] < both.limits["TPOT"]
    small_steps = plan(SHAPES["llama-3.1-8b"], A100, context_tokens=4096, output_tokens=64)
    assert (small_steps.limited_by, small_steps.batch) == ("step", 2048 * 64 // 4096)


def test_one_more_would_miss_the_target() -> None:
    for targets in ({"slo_tpot_s": 0.04}, {"slo_ttft_s": 0.235}):
        made = planned(**targets)
        assert made.full is not None
        paces = [planner.pace(made.cost, batch, made.prompt_tokens, made.output_tokens) for batch in (made.batch, made.batch + 1)]
        values = [p.tpot_s if "slo_tpot_s" in targets else p.ttft_s for p in paces]
        assert values[0] <= next(iter(targets.values())) < values[1]
        assert made.full == paces[0]


def test_a_target_that_nobody_can_meet_gives_no_batch() -> None:
    made = planned(slo_tpot_s=0.001)
    assert (made.batch, made.limited_by, made.full) == (0, "TPOT", None)
    assert made.alone.tpot_s > 0.001


def test_price_is_that_of_all_devices() -> None:
    made = plan(SHAPES["llama-3.1-70b"], A100, context_tokens=2048, num_devices=4)
    assert made.full is not None
    assert made.price_per_million_tokens(2.0) == pytest.approx(4 * 2.0 / 3600 / made.full.output_tokens_per_s * 1e6)


# --- the simulator is asked -----------------------------------------------------------------------


def serve(made: Plan, num_requests: int) -> Summary:
    """So many requests of the planned length, side by side from the first step on, on the plan's blocks."""
    engine = make_engine(
        made.cost,
        num_blocks=made.budget.num_blocks,
        block_size=made.block_size,
        prefix_caching=False,
        token_budget=num_requests * made.context_tokens,
        max_running=num_requests,
        max_model_len=made.context_tokens,
    )
    prompt, output = Lengths.constant(made.prompt_tokens), Lengths.constant(made.output_tokens)
    trace = simulate(engine, make_workload(num_requests, prompt, output, all_at_once(), seed=1))
    engine.scheduler.check()
    summary = trace.summary()
    assert summary.num_finished == num_requests
    assert max(step.num_used_blocks for step in trace.steps) <= made.budget.num_blocks
    return summary


def has_waited(summary: Summary, made: Plan) -> bool:
    return summary.num_preemptions > 0 or summary.num_steps > made.output_tokens


@pytest.mark.parametrize("seed", range(8))
def test_the_plans_requests_fit_and_one_more_does_not(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice((1, 8, 16, 32))
    made = plan(
        SHAPES[rng.choice(("llama-2-7b", "llama-2-13b", "qwen3-8b"))],
        DEVICES[rng.choice(("a100-40gb", "a100-80gb", "h200"))],
        context_tokens=block_size * rng.randrange(2000 // block_size, 7000 // block_size),
        output_tokens=rng.randrange(2, 40),
        kv=rng.choice(("bf16", "int8")),
        block_size=block_size,
        memory_fraction=rng.uniform(0.85, 0.95),
    )
    assert not has_waited(serve(made, made.num_requests), made)
    assert has_waited(serve(made, made.num_requests + 1), made)
