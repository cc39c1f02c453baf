"""Reasons say what would have been otherwise, with the numbers of the options that were found."""

from dataclasses import replace

from minserve.lab.choice_reasons import reasons_for
from minserve.lab.choices import choose
from minserve.lab.options import Case, expect, options
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES

CASE = Case(
    shape=SHAPES["llama-2-13b"],
    device=DEVICES["a100-80gb"],
    context_tokens=2048,
    output_tokens=256,
    rate_per_s=4.0,
    slo_ttft_s=1.0,
    slo_tpot_s=0.05,
)


def whys(case: Case) -> dict[str, tuple[str, str]]:
    found = options(case)
    option = choose(case, found)
    assert option is not None
    expected = expect(case, option.plan, option.num_replicas)
    return {reason.choice: (reason.value, reason.why) for reason in reasons_for(case, option, expected, found)}


def test_formats_are_compared_by_the_cards_that_they_take() -> None:
    said = whys(CASE)
    assert said["weights"] == ("bf16", "they take 26.0 GB of 80.0 GB on each card; 8 bits would take 3 cards too.")
    assert said["KV cache"][0] == "int8" and said["KV cache"][1].endswith("bf16 would take 4 cards, not 3.")
    assert said["cards a copy (tensor parallel)"][1] == "by cards a copy, the load takes 3 with 1, 4 with 2, 4 with 4, 8 with 8."


def test_limits_and_loads_are_those_of_the_plan() -> None:
    said = whys(CASE)
    assert said["cap (requests at once)"] == (
        "28",
        "with one more, TPOT passes 50.0 ms; the other limits allow: memory 50, step 64, TTFT 64.",
    )
    assert said["tokens a step"][1].startswith("a full copy then carries 2.18 requests/s within both limits (2.08 with 1,024")
    assert said["copies"][0] == "3 (3 cards)" and "they are 61% busy" in said["copies"][1]
    assert "0.95 would hold 9,616 tokens more" in said["memory fraction"][1]


def test_costs_are_named_only_with_a_price() -> None:
    assert "cost of a million output tokens" not in whys(CASE)
    assert whys(replace(CASE, price_per_hour=2.0))["cost of a million output tokens"][0] == "1.63"


def test_a_copy_that_needs_several_cards_says_so() -> None:
    said = whys(replace(CASE, shape=SHAPES["llama-3.1-405b"], rate_per_s=0.2, slo_ttft_s=5.0, slo_tpot_s=0.1))
    assert said["cards a copy (tensor parallel)"][1].startswith("fewer do not hold the model or miss a limit; ")
    assert said["weights"][0] == "int8" and said["weights"][1].endswith("bf16 would not meet the case.")
