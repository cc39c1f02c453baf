"""Chains of steps: what must follow, where an answer breaks, and the error of a step from closed forms."""

import random

import pytest
import torch

from minserve.quantize.chains import (
    KINDS,
    Chain,
    error_by_half,
    error_change,
    error_per_step,
    follow,
    make_chains,
    num_right,
    survival,
)
from minserve.quantize.subjects import make_runner
from tests.quantize.small import small_model


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_seed_gives_the_same_chains(kind: str) -> None:
    chains = make_chains(kind, 5, 12, seed=1)
    assert chains == make_chains(kind, 5, 12, seed=1) != make_chains(kind, 5, 12, seed=2)
    assert {len(chain.steps) for chain in chains} == {12}


def test_what_follows_is_in_the_prompt() -> None:
    for chain in make_chains("copy", 5):
        first, second = chain.prompt.split("\n")
        assert [*second.split()[4:], *chain.steps] == first.split()[2:]
    for chain in make_chains("count", 5):
        numbers = [int(word) for word in [*chain.prompt.replace(",", "").split(), *chain.steps]]
        assert len({after - before for before, after in zip(numbers, numbers[1:], strict=False)}) == 1


@pytest.mark.parametrize(("text", "right"), [(" 6, 8, 10, 12", 3), (" 6, 8, 11", 2), ("6 8", 2), (" 7, 8, 10", 0), ("", 0), ("6\n8 10", 1)])
def test_a_chain_breaks_at_the_first_wrong_number(text: str, right: int) -> None:
    assert num_right(Chain("2, 4,", ("6", "8", "10")), text) == right


def test_an_error_that_is_the_same_at_every_step_is_found_again() -> None:
    rng = random.Random(0)
    right = torch.tensor([next((i for i in range(16) if rng.random() < 0.05), 16) for _ in range(4000)])
    found = error_per_step(right)
    assert found.value == pytest.approx(0.05, abs=0.003) and found.low < 0.05 < found.high
    early, late = error_by_half(right)
    assert early.value == pytest.approx(0.05, abs=0.006) and late.value == pytest.approx(0.05, abs=0.006)
    assert survival(right)[10].item() == pytest.approx(0.95**10, abs=0.02)


def test_steps_that_get_harder_show_in_the_second_half() -> None:
    early, late = error_by_half(torch.tensor([16, 9, 10, 9]))
    assert early.value == 0 and late.value == pytest.approx(3 / (8 + 2 + 3 + 2))


def test_changes_are_paired() -> None:
    right = torch.tensor([16, 3, 16, 0])
    same = error_change(right, right)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert error_change(right, torch.tensor([16, 3, 7, 0])).value == pytest.approx(3 / (16 + 4 + 8 + 1) - 2 / (16 + 4 + 16 + 1))


def test_a_net_that_knows_no_numbers_is_right_nowhere() -> None:
    model = small_model()
    runner = make_runner(model, model.decoder(torch.float32), "fp32", "fp32", 64)
    assert follow(model, runner, make_chains("count", 3, 4)).tolist() == [0, 0, 0]
