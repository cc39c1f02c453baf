"""The planner's form: its state is the recommendation of its case, also where nothing fits."""

import pytest

from minserve.lab import figures
from minserve.lab.choices import recommend
from minserve.lab.planner_form import PlannerForm


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> PlannerForm:
    """No pictures: they take half of the time."""
    monkeypatch.setattr(PlannerForm, "draw", lambda self: None)
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")
    return PlannerForm()


def test_the_form_says_what_the_search_says(form: PlannerForm) -> None:
    assert form.made is not None and form.misfit is None and form.error is None
    assert form.made.reasons == recommend(form.case).reasons and form.made.plan.batch == 64
    assert form.case.rate_per_s == 4.0 and form.case.slo_ttft_s == 1.0 and form.case.prompt_tokens == 1792
    assert form.text.startswith("1 copy: llama-3.1-8b in bf16, KV in bf16, on 1 x a100-80gb.")
    assert all(reason.why[1:] in form.text for reason in form.made.reasons)


def test_every_control_changes_the_case(form: PlannerForm) -> None:
    seen = [form.case]
    changes = ((form.model, "llama-2-13b"), (form.device, "h100"), (form.context, 4096), (form.output, 512), (form.rate, 8.0))
    for control, value in (*changes, (form.ttft, 2000), (form.tpot, 40), (form.cards, 16), (form.price, 0.0)):
        control.value = value
        assert form.error is None and form.case not in seen
        seen.append(form.case)
    assert form.case.price_per_hour is None and form.case.num_cards == 16 and "A million" not in form.text


def test_flags_follow_the_engine_and_nothing_else_is_asked_again(form: PlannerForm) -> None:
    made = form.made
    assert form.command.startswith("vllm serve MODEL --gpu-memory-utilization 0.900")
    form.engine.value = "sglang"
    assert form.made is made and form.command.startswith("python -m sglang.launch_server") and form.command in form.text


def test_a_simulation_comes_on_request_and_goes_with_the_case(form: PlannerForm) -> None:
    assert form.checked is None and "Simulated" not in form.text
    form.simulated.value = True
    assert form.checked is not None and form.checked.share_within == 1.0
    assert "Simulated, one copy's share: 100% of 100 requests within both limits" in form.text
    form.simulated.value = False
    form.rate.value = 2.0
    assert form.checked is None


def test_where_nothing_fits_the_form_says_why_and_what_would_help(form: PlannerForm) -> None:
    form.model.value, form.cards.value = "llama-3.1-70b", 1
    assert form.made is None and form.error is None and form.command == ""
    assert form.text.startswith("Nothing fits: llama-3.1-70b on a100-80gb")
    assert form.misfit is not None and "takes 1,194 ms on an idle engine" in form.text and form.text.endswith("cards.")
    form.cards.value = 32
    assert form.made is not None and form.misfit is None


def test_an_answer_is_at_most_half_of_a_request(form: PlannerForm) -> None:
    form.context.value = 256
    assert form.case.output_tokens == 128


def test_the_picture_has_one_size_and_shows_what_is_too_much() -> None:
    form = PlannerForm()
    sizes = [tuple(form.draw().get_size_inches())]
    form.model.value, form.cards.value = "llama-3.1-70b", 1
    assert form.made is None
    figure = form.draw()
    assert [tuple(figure.get_size_inches())] == sizes
    assert "too much" in [label.get_text() for label in figure.axes[0].get_yticklabels()]
