"""The search behind a recommendation: what fits, what a copy carries, and how long people wait in line."""

import math
from dataclasses import replace

import pytest

from minserve.lab.options import MOST_LATE, MOST_USE, Case, Line, capacity_per_s, copies_for, expect, ladder, options, plans
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES

CHAT = Case(
    shape=SHAPES["llama-2-13b"],
    device=DEVICES["a100-80gb"],
    context_tokens=2048,
    output_tokens=256,
    rate_per_s=4.0,
    slo_ttft_s=1.0,
    slo_tpot_s=0.05,
)


def test_a_case_refuses_what_makes_no_sense() -> None:
    for name in ("rate_per_s", "slo_ttft_s", "slo_tpot_s", "price_per_hour", "num_cards"):
        with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
            replace(CHAT, **{name: 0})
    with pytest.raises(ValueError, match="between 1 and 2047 can be output"):
        list(plans(replace(CHAT, output_tokens=2048)))


def test_formats_are_those_that_the_card_can_multiply_in() -> None:
    assert ladder(DEVICES["a100-80gb"])[:2] == (("bf16", "bf16"), ("bf16", "int8"))
    assert ladder(DEVICES["h100"])[3] == ("fp8", "fp8")
    assert ladder(DEVICES["t4"])[0] == ("fp16", "fp16")
    assert all(rungs[-1][0].startswith("awq-int4") for rungs in map(ladder, DEVICES.values()))


def test_every_option_keeps_to_both_limits_and_carries_the_load() -> None:
    found = options(CHAT)
    assert {(o.rung, o.plan.cost.num_devices) for o in found} == {(rung, n) for rung in range(5) for n in (1, 2, 4, 8)}
    for option in found:
        full = option.plan.full
        assert full is not None and full.ttft_s <= 1.0 and full.tpot_s <= 0.05
        assert option.num_replicas * MOST_USE * option.capacity_per_s >= CHAT.rate_per_s
        assert option.num_cards == option.num_replicas * option.plan.cost.num_devices


def test_with_fewer_cards_copies_are_not_shared_by_more() -> None:
    assert {made.cost.num_devices for _, made in plans(replace(CHAT, num_cards=2))} == {1, 2}
    assert {made.cost.num_devices for _, made in plans(replace(CHAT, shape=SHAPES["llama-3.1-70b"]), limited=False)} == {1, 2, 4, 8}


def test_a_line_of_one_is_the_formula_of_m_d_1() -> None:
    line = Line(1, 0.5, 2.0)
    assert line.mean_s == pytest.approx(0.5 / (2 * 0.5) * 2.0)
    assert line.share_waiting == pytest.approx(0.5) and line.share_waiting_longer(0.0) == pytest.approx(0.5)
    assert Line(1, 1.0, 2.0).mean_s == math.inf and Line(1, 1.2, 2.0).share_waiting_longer(5.0) == 1.0
    assert [Line(n, 0.8, 1.0).mean_s for n in (1, 4, 16)] == sorted((Line(n, 0.8, 1.0).mean_s for n in (1, 4, 16)), reverse=True)


def test_as_many_run_as_carry_the_load_and_more_copies_wait_less() -> None:
    made = next(o.plan for o in options(CHAT) if o.rung == 1 and o.plan.cost.num_devices == 1)
    few, many = (expect(CHAT, made, count) for count in (3, 6))
    assert few.use == pytest.approx(4 / 3 / capacity_per_s(made)) and many.use == pytest.approx(few.use / 2)
    assert many.num_running < few.num_running < made.batch
    assert many.wait_s < few.wait_s and many.late_share < few.late_share <= MOST_LATE
    assert few.ttft_s > few.wait_s and few.tpot_s < CHAT.slo_tpot_s


def test_copies_are_the_fewest_by_both_rules() -> None:
    for case in (CHAT, replace(CHAT, slo_ttft_s=0.5), replace(CHAT, rate_per_s=0.2)):
        for option in options(case)[:3]:
            count = option.num_replicas
            assert expect(case, option.plan, count).late_share <= MOST_LATE
            one_less = expect(case, option.plan, count - 1) if count > 1 else None
            assert one_less is None or one_less.use > MOST_USE or one_less.late_share > MOST_LATE
    assert copies_for(CHAT, options(CHAT)[0].plan) == options(CHAT)[0].num_replicas
