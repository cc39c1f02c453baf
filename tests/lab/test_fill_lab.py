"""The fill-ratio lab: its numbers are the device's and the cost model's; each trouble appears where it should, with its cure."""

import pytest

from minserve.lab import figures
from minserve.lab.explorer import size
from minserve.lab.fill_lab import FILLS, NONE, PREEMPTIONS, PROMPT_TOKENS, START, STEP, FillLab
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.pace import pace
from minserve.sim.planner import activation_bytes
from minserve.sim.shapes import SHAPES


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FillLab:
    """No pictures: they take most of the time."""
    monkeypatch.setattr(FillLab, "draw", lambda self: None)
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")
    return FillLab()


def test_the_numbers_are_those_of_the_device_and_the_cost_model(lab: FillLab) -> None:
    cost = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
    assert lab.held["weights"] == cost.stored_weight_bytes and sum(lab.held.values()) + lab.free_bytes == 80e9
    assert lab.held["KV pool"] == lab.num_blocks * 16 * cost.kv_bytes_per_token
    assert lab.num_fit == lab.num_blocks * 16 // (PROMPT_TOKENS + 211) == 38
    assert lab.tokens_per_s == pace(cost, 38, PROMPT_TOKENS, 211).output_tokens_per_s
    assert lab.step_bytes == activation_bytes(cost, 2048, 256) and size(lab.step_bytes) in lab.text
    assert "90% of 80 GB: 38 requests fit" in lab.text and lab.trouble == NONE


def test_more_fill_buys_a_13b_more_than_an_8b(lab: FillLab) -> None:
    rates = list(lab.curve.values())
    assert rates == sorted(rates) and min(lab.curve) > FILLS[0]  # below, not one request fits
    gain_13b = lab.curve[0.9] / lab.curve[0.5]
    lab.model.value = "llama-3.1-8b"
    assert 1.7 < gain_13b < 2.0 and 1.0 < lab.curve[0.9] / lab.curve[0.5] < 1.3


def test_each_trouble_goes_with_its_cure_and_the_opposite_move_keeps_it(lab: FillLab) -> None:
    lab.fill.value = 0.34
    assert lab.trouble == START and lab.cure.startswith("raise the fill") and "no room for keys and values" in lab.refusal.lower()
    lab.fill.value = 0.3
    assert lab.trouble == START and lab.tokens_per_s == 0
    lab.fill.value = 0.5
    assert lab.trouble == NONE

    lab.fill.value, lab.budget.value = 0.98, 32_768
    lab.fill.value = 0.99
    assert lab.trouble == STEP and lab.cure.startswith("lower the fill") and lab.step_bytes > lab.free_bytes
    lab.fill.value = 1.0
    assert lab.trouble == STEP
    lab.budget.value = 2048
    assert lab.trouble == NONE

    lab.fill.value, lab.neighbour.value = 0.9, 30.0
    assert lab.trouble == START and lab.cure.startswith("lower the fill") and "neighbour 30.0" in lab.text
    assert lab.wanted_bytes == pytest.approx(0.9 * 80e9 - lab.held["weights"] - 3e9)  # and 80 - 30 - 27 are free
    lab.fill.value = 0.6
    assert lab.trouble == NONE

    lab.neighbour.value, lab.answer.value = 0.0, 2048
    assert lab.trouble == PREEMPTIONS and lab.num_let_in > 1.5 * lab.num_fit
    assert lab.error is None


def test_it_draws_every_state() -> None:
    lab = FillLab("llama-3.1-8b", fill=0.3)
    pictures = {lab.image.value}
    for fill, neighbour in ((0.9, 0.0), (0.9, 40.0)):
        lab.fill.value, lab.neighbour.value = fill, neighbour
        pictures.add(lab.image.value)
    assert len(pictures) == 3 and lab.error is None
    memory, curve = lab.draw().axes
    assert curve.get_ylim()[0] == memory.get_ylim()[0] == 0 and curve.get_xlabel() == "fill, % of memory"
