"""Recommendations: the rules, held against the real scheduler; and what is said where nothing fits."""

import re
from dataclasses import replace

import pytest

from minserve.lab.choices import NothingFits, check, choose, recommend
from minserve.lab.options import Case, options
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES

CHAT = Case(
    shape=SHAPES["llama-3.1-8b"],
    device=DEVICES["a100-80gb"],
    context_tokens=2048,
    output_tokens=256,
    rate_per_s=4.0,
    slo_ttft_s=1.0,
    slo_tpot_s=0.05,
    price_per_hour=2.0,
)


def case_of(model: str, device: str, **changes: float) -> Case:
    return replace(CHAT, shape=SHAPES[model], device=DEVICES[device], **changes)


def test_a_small_model_on_a_large_card_needs_no_quantization() -> None:
    made = recommend(CHAT)
    assert (made.plan.cost.weights, made.plan.cost.kv, made.option.num_cards) == ("bf16", "bf16", 1)
    assert (made.plan.batch, made.plan.token_budget) == (64, 512)
    assert made.price_per_million_tokens == pytest.approx(2.0 / 3600 / (4 * 256) * 1e6)
    assert recommend(replace(CHAT, price_per_hour=None)).price_per_million_tokens is None


def test_the_same_settings_stand_in_the_flags_of_every_engine() -> None:
    engines = recommend(CHAT).engines()
    assert "--max-num-seqs 64" in engines["vllm"].flags and "--max-num-batched-tokens 512" in engines["vllm"].flags
    assert "--max-running-requests 64" in engines["sglang"].flags
    assert engines.keys() == {"vllm", "sglang", "tgi", "trtllm", "llamacpp"}


def test_a_lower_rung_must_save_a_tenth_of_the_cards() -> None:
    case = case_of("llama-2-13b", "a100-80gb")
    found = options(case)
    fewest = {rung: min(o.num_cards for o in found if o.rung == rung) for rung in range(5)}
    assert (fewest[0], fewest[1], fewest[2], fewest[3]) == (4, 3, 3, 3)
    chosen = choose(case, found)
    assert chosen is not None and chosen.rung == 1 and chosen.num_cards == 3  # KV in int8 saves a card, weights in int8 no other


def test_four_bits_are_taken_only_where_nothing_else_serves() -> None:
    made = recommend(case_of("llama-2-13b", "rtx-4090", context_tokens=4096, rate_per_s=0.2, slo_ttft_s=2.0, num_cards=1))
    assert made.plan.cost.weights == "awq-int4-g128" and "test of quality" in made.reasons[0].why
    assert all(o.rung == 4 for o in options(made.case) if o.num_cards <= 1)
    assert "int4" not in recommend(replace(made.case, num_cards=None)).plan.cost.weights


@pytest.mark.parametrize(
    "case",
    [
        CHAT,
        case_of("llama-2-13b", "a100-80gb"),
        case_of("llama-3.1-70b", "h100", context_tokens=8192, output_tokens=512, slo_ttft_s=2.0),
    ],
    ids=lambda case: case.shape.name,
)
def test_the_real_scheduler_keeps_what_the_formula_promises(case: Case) -> None:
    made = recommend(case)
    checked = check(made, num_requests=60)
    assert checked.share_within >= 0.95
    s = checked.summary
    assert s.ttft_p50_s is not None and 0.4 * made.expected.ttft_s < s.ttft_p50_s < 1.2 * made.expected.ttft_s
    assert s.tpot_p50_s is not None and 0.75 * made.expected.tpot_s < s.tpot_p50_s < 1.15 * made.expected.tpot_s
    assert s.num_preemptions == 0 and checked.goodput_per_s <= 60 / s.wall_s


def test_twice_the_load_would_not_do() -> None:
    """The check can fail: the same plan, with twice the load and half the time."""
    made = recommend(CHAT)
    crowded = replace(made, case=replace(CHAT, rate_per_s=8.0, slo_ttft_s=0.5))
    assert check(crowded, num_requests=60).share_within < 0.7


def test_each_reason_has_a_number_and_a_sentence() -> None:
    reasons = recommend(CHAT).reasons
    assert [reason.choice for reason in reasons][:3] == ["weights", "KV cache", "cards a copy (tensor parallel)"]
    assert len({reason.choice for reason in reasons}) == len(reasons) == 12
    assert all(re.search(r"\d", reason.why) and reason.why.endswith(".") for reason in reasons)
    cap = next(reason for reason in reasons if reason.choice.startswith("cap"))
    assert cap.value == "64" and "a step of 512 tokens feeds no more" in cap.why and "memory 197" in cap.why


# --- where nothing fits ---------------------------------------------------------------------------


def why_not(case: Case) -> NothingFits:
    with pytest.raises(NothingFits) as caught:
        recommend(case)
    return caught.value


def test_too_large_a_model_is_told_with_bytes() -> None:
    misfit = why_not(case_of("llama-3.1-70b", "rtx-4090", rate_per_s=0.5, slo_ttft_s=4.0, slo_tpot_s=0.1, num_cards=2))
    assert "awq-int4-g128 the weights take 20.3 GB" in misfit.reason and "24 GB on each of 2 x rtx-4090" in misfit.reason
    assert misfit.changes[0] == "4 cards"
    assert str(misfit).startswith("nothing fits because even in") and str(misfit).endswith(".")


def test_too_long_a_prompt_is_told_with_the_least_ttft_that_would_do() -> None:
    case = case_of("llama-3.1-70b", "l4", context_tokens=8192, output_tokens=512, slo_ttft_s=2.0)
    misfit = why_not(case)
    assert re.search(r"a prompt of 7,680 tokens takes 2,\d{3} ms on an idle engine, and 2,000 ms are asked for", misfit.reason)
    found = re.fullmatch(r"a TTFT of ([\d,]+) ms", misfit.changes[0])
    assert found and options(replace(case, slo_ttft_s=float(found[1].replace(",", "")) / 1e3))


def test_too_quick_tokens_are_told_with_the_least_tpot() -> None:
    misfit = why_not(case_of("llama-3.1-8b", "t4", slo_ttft_s=5.0, slo_tpot_s=0.005))
    assert re.search(r"a token takes [\d.]+ ms when nobody else is served, and 5.0 ms are asked for", misfit.reason)
    assert misfit.changes[0].startswith("a TPOT of ")


def test_too_few_cards_are_told_with_the_load_that_they_carry() -> None:
    case = replace(CHAT, rate_per_s=40.0, slo_tpot_s=0.03, num_cards=2)
    misfit = why_not(case)
    assert "40 requests/s within both limits take 9 cards of this kind, and there are 2" in misfit.reason
    found = re.fullmatch(r"a load of ([\d.]+) requests/s", misfit.changes[0])
    assert found and recommend(replace(case, rate_per_s=float(found[1]))).option.num_cards <= 2
    assert misfit.changes[1] == "9 cards" and recommend(replace(case, num_cards=9)).option.num_cards == 9
