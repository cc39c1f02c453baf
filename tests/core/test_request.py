"""What a caller may ask for, and the arithmetic of a request's progress."""

import math
from typing import Any

import pytest

from minserve.core.request import FinishReason, InvalidRequest, Request, RequestStatus, RequestTooLong, SamplingParams, TokenLogprob


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 0, "max_tokens must be an integer >= 1, got 0"),
        ("max_tokens", 1.5, "max_tokens must be an integer >= 1, got 1.5"),
        ("max_tokens", True, "max_tokens must be an integer >= 1, got True"),
        ("min_tokens", -1, "min_tokens must be an integer >= 0, got -1"),
        ("temperature", -0.1, "temperature must be a finite number >= 0, got -0.1"),
        ("temperature", math.nan, "temperature must be a finite number >= 0, got nan"),
        ("temperature", math.inf, "temperature must be a finite number >= 0, got inf"),
        ("temperature", "hot", "temperature must be a finite number >= 0, got 'hot'"),
        ("top_k", -2, "top_k must be an integer >= -1, got -2"),
        ("top_p", 1.1, "top_p must be a finite number from 0 to 1, got 1.1"),
        ("top_p", -0.1, "top_p must be a finite number from 0 to 1, got -0.1"),
        ("min_p", 2, "min_p must be a finite number from 0 to 1, got 2"),
        ("repetition_penalty", 0, "repetition_penalty must be greater than 0, got 0"),
        ("presence_penalty", math.nan, "presence_penalty must be a finite number, got nan"),
        ("frequency_penalty", None, "frequency_penalty must be a finite number, got None"),
        ("n", 0, "n must be an integer >= 1, got 0"),
        ("n", 129, "n must be at most 128, got 129"),
        ("seed", -1, "seed must be an integer >= 0, got -1"),
        ("logprobs", -1, "logprobs must be an integer >= 0, got -1"),
        ("logprobs", 21, "logprobs must be at most 20, got 21"),
        ("stop", "", "stop must hold non-empty strings, got ''"),
        ("stop", ["a", 5], "stop must hold non-empty strings, got 5"),
        ("stop", 5, "stop cannot be 5"),
        ("stop_token_ids", [-3], "a token id in stop_token_ids or logit_bias must be an integer >= 0, got -3"),
        ("stop_token_ids", None, "stop_token_ids cannot be None"),
        ("logit_bias", {5: math.inf}, "logit_bias of token 5 must be a finite number, got inf"),
        ("logit_bias", {5: math.nan}, "logit_bias of token 5 must be a finite number, got nan"),
        ("logit_bias", {"5": 1.0}, "a token id in stop_token_ids or logit_bias must be an integer >= 0, got '5'"),
        ("logit_bias", [5], r"logit_bias cannot be \[5\]"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_number(name: str, value: Any, words: str):
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**{name: value})


def test_the_limits_themselves_are_legal():
    params = SamplingParams(
        max_tokens=1, min_tokens=1, top_k=-1, top_p=0, min_p=1, seed=0, logprobs=0, logit_bias={0: -math.inf}, presence_penalty=-2
    )
    assert (params.max_tokens, params.seed, params.logprobs, params.is_greedy) == (1, 0, 0, True)
    assert not SamplingParams(temperature=0.01).is_greedy


def test_case_130_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="min_tokens 6 is greater than max_tokens 5"):
        SamplingParams(max_tokens=5, min_tokens=6)
    assert SamplingParams(min_tokens=6).min_tokens == 6  # without a ceiling there is nothing to be beyond


def test_one_form_for_what_can_be_written_in_two():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]) == SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2))
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}  # a later change of the caller's own dictionary changes nothing here


def test_from_plain_data():
    assert SamplingParams.from_dict({"temperature": 0.5, "seed": None}) == SamplingParams(temperature=0.5)
    with pytest.raises(InvalidRequest, match="unknown sampling field 'temprature', did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 0.5})
    with pytest.raises(InvalidRequest, match="unknown sampling field 'qqq'; known fields: max_tokens, min_tokens, "):
        SamplingParams.from_dict({"qqq": 1})
    with pytest.raises(InvalidRequest, match="top_p must be"):
        SamplingParams.from_dict({"top_p": 2})


def test_an_invalid_request_is_a_value_error():
    assert issubclass(InvalidRequest, ValueError) and issubclass(RequestTooLong, InvalidRequest)


def test_a_request_counts_its_tokens():
    request = Request("R", (1, 2, 3), SamplingParams(), max_total_tokens=10)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens, request.num_missing_tokens) == (3, 3, 0, 3)
    request.num_computed_tokens = 3
    request.token_ids.append(7)
    assert (request.num_tokens, request.num_output_tokens, request.num_missing_tokens) == (4, 1, 1)
    assert request.output_ids == [7] and request.prompt_ids == (1, 2, 3)
    assert not request.is_finished
    request.status = RequestStatus.FINISHED
    assert request.is_finished


def test_two_requests_are_never_equal_and_have_seeds_of_their_own():
    a, b = (Request("R", (1,), SamplingParams(), max_total_tokens=10) for _ in range(2))
    assert a != b and len({a, b}) == 2
    assert a.seed != b.seed and a.token_ids is not b.token_ids and a.logprobs is not b.logprobs


def test_reasons_are_plain_strings():
    assert [str(r) for r in FinishReason] == ["stop", "length", "abort", "error", "shed"]
    assert FinishReason.STOP == "stop"
    assert TokenLogprob(5, -0.5).top == ()
