"""Sampling by the rules of `minserve.model.sampler`, case by case, on rows small enough to compute by hand."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minserve.core.request import InvalidRequest, Request, SamplingParams
from minserve.model.sampler import NO_TOKEN, Sampler, adjust, best_tokens, draw, report, truncate, uniform

INF = math.inf
V = 320


def request(name: str = "R0", prompt=(1, 2), output=(), stop_ids=(), sample_index=0, **params) -> Request:
    made = Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        max_total_tokens=10_000,
        stop_ids=frozenset(stop_ids),
        sample_index=sample_index,
    )
    made.token_ids.extend(output)
    return made


def sample_one(logits, one: Request) -> int:
    row = torch.as_tensor(logits, dtype=torch.float32)
    return Sampler(len(row)).sample(row[None], [one]).token_ids[0]


def generate(logits: Tensor, requests: list[Request], num_tokens: int) -> list[list[int]]:
    """Run a model whose logits are always the same rows `logits: [B, V]`; returns the output ids of each request."""
    sampler = Sampler(logits.shape[1])
    for _ in range(num_tokens):
        for one, token_id in zip(requests, sampler.sample(logits, requests).token_ids, strict=True):
            one.token_ids.append(token_id)
    return [one.output_ids for one in requests]


def kept_ids(probabilities, **params) -> set[int]:
    ids, _ = truncate(torch.tensor(probabilities, dtype=torch.float64).log(), SamplingParams(temperature=1.0, **params))
    return set(ids.tolist())


def random_rows(num_rows: int, num_tokens: int = V) -> Tensor:
    return torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(5)) * 3


# -- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_of_equal_logits(dtype):
    rows = torch.randint(0, 3, (5, 49_152), generator=torch.Generator().manual_seed(1)).to(dtype)
    requests = [request(), request(logprobs=0), request(logit_bias={0: 0.0}), request(repetition_penalty=2.0, prompt=(49_151,)), request()]
    expected = [int((row == row.max()).nonzero()[0]) for row in rows]
    assert Sampler(49_152).sample(rows, requests).token_ids == expected


def test_greedy_row_does_not_depend_on_its_neighbours():
    rows = random_rows(4)
    alone = [sample_one(row, request()) for row in rows]
    neighbours = [request(), request(temperature=2.0), request(logprobs=3), request(frequency_penalty=1.0, output=(3,))]
    for shift in range(4):
        turned = neighbours[-shift:] + neighbours[:-shift]
        result = Sampler(V).sample(rows, turned)
        assert result.token_ids[shift] == alone[shift]


def test_logits_are_left_as_they_were():
    rows = random_rows(2).double()
    before = rows.clone()
    Sampler(V).sample(
        rows, [request(repetition_penalty=3.0, logit_bias={4: -INF}), request(temperature=0.7, top_k=3, min_tokens=9, stop_ids={5})]
    )
    assert torch.equal(rows, before)


def test_case_98_a_row_of_nan_fails_alone():
    rows = random_rows(5)
    expected = [sample_one(row, request(temperature=1.0, seed=1)) for row in rows]
    rows[1, 7] = math.nan
    rows[2, :] = -INF
    rows[3, 0] = INF
    result = Sampler(V).sample(rows, [request(f"R{i}", temperature=1.0, seed=1) for i in range(5)])
    assert result.errors == {
        1: "request R1: logits hold NaN",
        2: "request R2: every logit is minus infinity",
        3: "request R3: logits hold infinity",
    }
    assert result.token_ids == [expected[0], NO_TOKEN, NO_TOKEN, NO_TOKEN, expected[4]]


def test_a_request_that_forbids_every_token_fails_alone():
    forbids_all = request("R7", logit_bias={0: -INF, 1: -INF}, min_tokens=1, stop_ids={2})
    result = Sampler(3).sample(torch.zeros(2, 3), [forbids_all, request()])
    assert list(result.errors) == [0] and "request R7: no token is left to choose" in result.errors[0]
    assert result.token_ids == [NO_TOKEN, 0]


def test_case_86_padding_of_the_vocabulary_is_never_sampled():
    flat = torch.zeros(1, V)
    sampler, one = Sampler(num_tokens_known=300), request(temperature=1.0, seed=3)
    for _ in range(500):
        one.token_ids += sampler.sample(flat, [one]).token_ids
    assert max(one.output_ids) < 300 and len(set(one.output_ids)) > 200
    padded_best = torch.zeros(1, V)
    padded_best[0, 310] = 9.0
    result = sampler.sample(padded_best, [request(logprobs=5, logit_bias={310: 50.0}, prompt=(310,), repetition_penalty=2.0)])
    assert result.token_ids == [0] and result.logprobs[0] is not None
    assert [token_id for token_id, _ in result.logprobs[0].top] == [0, 1, 2, 3, 4]


def test_case_112_greedy_and_random_rows_in_one_batch():
    rows = random_rows(3, 8)
    rows[0, [1, 2, 5]] = -INF
    banned = int(rows[2].argmax())
    requests = [request(), request(temperature=0.8, seed=11), request(logit_bias={banned: -INF})]
    result = Sampler(8).sample(rows, requests)
    second_best = int(rows[2].topk(2).indices[1])
    assert result.token_ids == [int(rows[0].argmax()), sample_one(rows[1], request(temperature=0.8, seed=11)), second_best]
    assert not result.errors and not rows.isnan().any()


# -- truncation -----------------------------------------------------------------------------------------------------


def test_case_113_top_k_beyond_the_vocabulary_zero_and_minus_one():
    rows = random_rows(1).expand(6, -1)
    off = generate(rows[:1], [request(temperature=1.0, seed=4)], 20)[0]
    ks = [9_999_999, 320, 321, 0, -1]
    requests = [request(temperature=1.0, seed=4, top_k=k) for k in ks] + [request(temperature=1.0, seed=4, top_k=1)]
    texts = generate(rows, requests, 20)
    assert texts[:5] == [off] * 5
    assert texts[5] == [int(rows[0].argmax())] * 20
    with pytest.raises(InvalidRequest, match="top_k must be an integer >= -1, got -2"):
        request(top_k=-2)
    pair = generate(random_rows(2), [request(), request(temperature=1.0, seed=4, top_k=5)], 30)
    assert pair[0] == [int(random_rows(2)[0].argmax())] * 30
    assert set(pair[1]) <= set(random_rows(2)[1].topk(5).indices.tolist())


@pytest.mark.parametrize(("top_k", "top_p", "expected"), [(1, 0.8, {0}), (2, 0.5, {0}), (2, 0.99, {0, 1}), (0, 0.71, {0, 1, 2})])
def test_case_115_top_k_then_top_p(top_k, top_p, expected):
    assert kept_ids([0.4, 0.3, 0.2, 0.1], top_k=top_k, top_p=top_p) == expected


def test_case_116_top_p_at_its_limits():
    flat, certain = [1 / V] * V, [0.0] * 7 + [1.0] + [0.0] * 312
    assert kept_ids(flat, top_p=1.0) == set(range(V))
    assert kept_ids(flat, top_p=0.9999) == set(range(V))
    assert kept_ids(flat, top_p=1e-4) == {0}
    assert kept_ids(flat, top_p=0.0) == {0}  # documented: the best token only
    for top_p in (0.9999, 1e-4, 0.0):
        assert kept_ids(certain, top_p=top_p) == {7}
    assert draw(*truncate(torch.tensor(certain).double().log(), SamplingParams(temperature=1.0)), number=0.0) == 7
    rows = random_rows(2)[:1].expand(2, -1)
    same = generate(rows, [request(temperature=1.0, seed=9), request(temperature=1.0, seed=9, top_p=1.0)], 20)
    assert same[0] == same[1]
    for top_p in (-0.1, 1.1):
        with pytest.raises(InvalidRequest, match=f"top_p must be a finite number from 0 to 1, got {top_p}"):
            request(top_p=top_p)


def test_min_p_is_relative_to_the_best_token():
    assert kept_ids([0.4, 0.3, 0.2, 0.1], min_p=0.5) == {0, 1, 2}
    assert kept_ids([0.4, 0.3, 0.2, 0.1], min_p=1.0) == {0}
    assert kept_ids([0.4, 0.3, 0.2, 0.1], min_p=0.7, top_k=3) == {0, 1}


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, -3.0, -INF]), min_size=2, max_size=12).filter(lambda row: max(row) > -INF),
    st.integers(0, 13),
    st.sampled_from([0.0, 0.2, 0.35, 0.6, 0.95, 1.0]),
    st.sampled_from([0.0, 0.1, 0.45, 1.0]),
    st.sampled_from([1e-30, 0.3, 1.0, 4.0]),
)
def test_truncation_equals_the_naive_rule(row, top_k, top_p, min_p, temperature):
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: top_k or len(row)]
    weight = {i: math.exp((row[i] - max(row)) / temperature) for i in order}
    total, before, kept = sum(weight.values()), 0.0, set()
    for i in order:
        if (before < top_p * total or i == order[0] or top_p == 1.0) and weight[i] >= min_p:
            kept.add(i)
        before += weight[i]
    ids, weights = truncate(torch.tensor(row).double(), SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert ids.tolist() == sorted(kept)
    assert order[0] in kept and weights.max() == 1.0


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
def test_top_p_of_a_large_vocabulary_equals_sorting_everything(spread):
    logits = (torch.randn(49_152, generator=torch.Generator().manual_seed(2)) * spread).double()
    weights, order = torch.sort(torch.exp(logits - logits.max()), descending=True, stable=True)
    before = weights.cumsum(0) - weights
    for top_p in (0.1, 0.9):
        expected = order[before < top_p * weights.sum()].sort().values
        ids, _ = truncate(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert abs(len(ids) - len(expected)) <= 1  # the sums above round differently at the border
        assert torch.equal(ids, expected) or set(ids.tolist()) ^ set(expected.tolist()) <= set(
            order[len(expected) - 1 : len(ids) + 1].tolist()
        )


def test_best_tokens_breaks_ties_by_lower_id():
    assert best_tokens(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 3).tolist() == [1, 3, 0]
    assert best_tokens(torch.zeros(V), 5).tolist() == [0, 1, 2, 3, 4]
    assert best_tokens(torch.zeros(3), 0).tolist() == []
    assert best_tokens(torch.tensor([-INF, 1.0]), 9).tolist() == [1, 0]


# -- penalties, bias, min_tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [(), (0,), (0,) * 100, (1, 0) * 60])
def test_case_118_repetition_penalty_once_per_id_prompt_included_by_sign(output):
    row = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    assert adjust(row, request(prompt=(0, 0, 0, 1), output=output, repetition_penalty=2.0)).tolist() == [1.0, -2.0, 0.5]


def test_case_119_presence_and_frequency_penalties_leave_the_prompt_alone():
    row, ids = torch.zeros(8, dtype=torch.float64), {"prompt": (5, 5, 6), "output": (5, 7, 7, 7)}
    assert adjust(row, request(**ids, frequency_penalty=0.5)).tolist() == [0, 0, 0, 0, 0, -0.5, 0, -1.5]
    assert adjust(row, request(**ids, presence_penalty=0.25)).tolist() == [0, 0, 0, 0, 0, -0.25, 0, -0.25]


def test_case_121_penalties_have_no_window():
    """Case 121 asks for the right end of a window; there is none: an id seen 100 tokens ago counts as one seen just now."""
    row = torch.ones(10, dtype=torch.float64)
    long_ago = request(prompt=(9, *[1, 2, 3, 4] * 25), repetition_penalty=2.0)
    assert adjust(row, long_ago).tolist() == [1, 0.5, 0.5, 0.5, 0.5, 1, 1, 1, 1, 0.5]
    assert adjust(row, request(prompt=(3,), repetition_penalty=2.0)).tolist() == [1, 1, 1, 0.5, 1, 1, 1, 1, 1, 1]
    assert adjust(row, request(prompt=(3,), repetition_penalty=1.0)) is row


def test_logit_bias_and_ids_outside_the_vocabulary():
    row = torch.zeros(4, dtype=torch.float64)
    adjusted = adjust(row, request(prompt=(99,), output=(88,), logit_bias={1: 2.5, 77: 5.0}, repetition_penalty=2.0, frequency_penalty=1.0))
    assert adjusted.tolist() == [0.0, 2.5, 0.0, 0.0]


def test_case_130_min_tokens_holds_back_every_stop_token():
    row = torch.zeros(1, 20)
    row[0, [7, 9, 11]] = torch.tensor([9.0, 8.0, 7.0])
    settings_of: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 2}, {"logprobs": 2}]
    for params in settings_of:
        # 999 is outside the vocabulary: masking it must not matter.
        one = request(stop_ids={7, 9, 11, 999}, min_tokens=5, **params)
        ids = generate(row, [one], 6)[0]
        assert not {7, 9, 11} & set(ids[:5]) and ids[5] in {7, 9, 11}
    with pytest.raises(InvalidRequest, match="min_tokens 6 is greater than max_tokens 5"):
        request(min_tokens=6, max_tokens=5)


# -- random numbers -------------------------------------------------------------------------------------------------


def test_case_122_seed_holds_whatever_the_neighbour_does():
    rows = random_rows(2)
    wanted = {"temperature": 0.8, "seed": 42}
    runs = [generate(rows[:1], [request(**wanted)], 16)[0]]
    runs += [generate(rows, [request(**wanted), request(temperature=0.8)], 16)[0] for _ in range(5)]
    runs += [generate(rows.flip(0), [request(temperature=0.8, seed=1), request(**wanted)], 16)[1]]
    assert len(runs) == 7 and all(run == runs[0] for run in runs)
    assert len(set(runs[0])) > 1


def test_case_122_a_preempted_request_goes_on_with_the_same_tokens():
    rows = random_rows(1)
    whole = generate(rows, [request(temperature=0.8, seed=42)], 16)[0]
    resumed = request(temperature=0.8, seed=42, output=whole[:6])
    assert generate(rows, [resumed], 10)[0] == whole


def test_case_124_no_seed_is_not_seed_0():
    flat = torch.zeros(5, 256)
    texts = generate(flat, [request(temperature=1.0) for _ in range(5)], 8)
    assert len({tuple(text) for text in texts}) >= 4
    code = "from minserve.core.request import *; print(Request('R0', (1,), SamplingParams(temperature=1.0), 9).seed)"
    seeds = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(seeds) == 2  # two fresh processes draw two seeds
    zeros = generate(flat, [request(temperature=1.0, seed=seed) for seed in (0, 0, 0, 1, 2)], 8)
    assert zeros[0] == zeros[1] == zeros[2] and len({tuple(text) for text in zeros}) == 3


def test_case_125_n_samples_differ_and_repeat():
    flat = torch.zeros(4, 256)
    first, again = (generate(flat, [request(temperature=1.0, seed=7, n=4, sample_index=i) for i in range(4)], 8) for _ in range(2))
    assert first == again and len({tuple(text) for text in first}) == 4
    greedy = generate(random_rows(1).expand(4, -1), [request(seed=7, n=4, sample_index=i) for i in range(4)], 8)
    assert greedy == [greedy[0]] * 4


@pytest.mark.parametrize(("temperature", "share"), [(0.0, 1.0), (0.01, 1.0), (0.5, 0.881), (1.0, 0.731), (5.0, 0.550)])
def test_case_131_share_of_the_better_token(temperature, share):
    one = request(temperature=temperature, seed=1)
    assert one.params.temperature == temperature
    logits = torch.tensor([1.0, 0.0])
    if temperature == 0:
        assert sample_one(logits, one) == 0
        return
    ids, weights = truncate(logits.double(), one.params)
    drawn = [draw(ids, weights, uniform(1, 0, place)) for place in range(10_000)]
    assert drawn.count(0) / 10_000 == pytest.approx(share, abs=0.001 if share == 1 else 0.02)


def test_random_numbers_are_uniform_and_fixed():
    numbers = [uniform(seed, 0, place) for seed in range(20) for place in range(500)]
    assert min(numbers) >= 0 and max(numbers) < 1
    counts = [sum(i / 10 <= number < (i + 1) / 10 for number in numbers) for i in range(10)]
    assert all(abs(count - 1_000) < 120 for count in counts)  # 4 standard deviations
    # Fixed for good: a change of these would change every seeded text.
    assert (uniform(0, 0, 0), uniform(42, 1, 3)) == (0.9806404073469595, 0.3579059477754355)


def test_draw_never_takes_a_token_of_no_weight():
    ids, weights = torch.arange(5), torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert [draw(ids, weights, number) for number in (0.0, 0.49, 0.5, 0.99, 1 - 2**-53)] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e308])
def test_extreme_temperatures_stay_finite(temperature):
    row = [1.0, 3e38, -3e38, -INF]
    token_id = sample_one(row, request(temperature=temperature, seed=1))
    assert token_id == 1 if temperature < 1 else token_id in (0, 1, 2)


# -- log probabilities ----------------------------------------------------------------------------------------------


def test_case_127_logprobs_are_strict_json():
    row = torch.tensor([[2.0, 5.0, -INF, 1.0, -3.4e38, 0.0]])
    settings_of: list[dict[str, Any]] = [{"top_k": 1, "temperature": 0.01}, {"logit_bias": {1: -INF}}, {"temperature": 0.0}]
    for extra in settings_of:
        result = Sampler(6).sample(row, [request(logprobs=6, **extra)])
        entry = result.logprobs[0]
        assert entry is not None
        json.dumps(asdict(entry), allow_nan=False)
        # Taken before truncation: all that the model allows, and only the token that the model itself rules out is left out.
        assert [token_id for token_id, _ in entry.top] == [1, 0, 3, 5, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_128_top_list_at_temperature_0(temperature):
    entry = Sampler(4).sample(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), [request(temperature=temperature, logprobs=3, seed=1)]).logprobs[0]
    total = math.log(sum(math.exp(x) for x in (0, 3, 1, 2)))
    assert entry is not None
    assert [token_id for token_id, _ in entry.top] == [1, 3, 2]
    assert [logprob for _, logprob in entry.top] == pytest.approx([3 - total, 2 - total, 1 - total])
    assert entry.logprob == pytest.approx([0, 3, 1, 2][entry.token_id] - total)


def test_logprobs_ignore_penalties_and_break_ties_by_id():
    entry = report(torch.zeros(4, dtype=torch.float64), token_id=3, num_best=2)
    assert (entry.token_id, entry.logprob, [i for i, _ in entry.top]) == (3, pytest.approx(-math.log(4)), [0, 1])
    result = Sampler(4).sample(torch.zeros(2, 4), [request(logprobs=0, logit_bias={2: 5.0}), request()])
    assert result.token_ids == [2, 0] and result.logprobs[1] is None
    assert result.logprobs[0] is not None and result.logprobs[0].logprob == pytest.approx(-math.log(4)) and result.logprobs[0].top == ()
