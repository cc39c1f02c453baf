"""Lengths that are what they say, arrivals at their rate, and requests that share what they should and nothing else."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.core.engine import Arrival
from minserve.core.request import Request
from minserve.core.trace import Trace
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.runner import VOCAB_SIZE
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import (
    TRACES,
    ClosedLoop,
    Lengths,
    MultiTurn,
    Workload,
    all_at_once,
    gamma,
    load_jsonl,
    make_workload,
    poisson,
)

COST = CostModel(SHAPES["llama-2-7b"], DEVICES["a100-80gb"])


def serve(workload: Workload, **options: Any) -> Trace:
    return simulate(make_engine(COST, **options), workload)


def prompts_of(workload: Workload) -> list[list[int]]:
    return [arguments["prompt_ids"] for _, arguments in workload.arrivals()]


def outputs_of(workload: Workload) -> list[int]:
    return [arguments["params"].max_tokens for _, arguments in workload.arrivals()]


def draw(lengths: Lengths, count: int = 20_000, seed: int = 0) -> list[int]:
    return lengths.sample(np.random.default_rng(seed), count)


# --- lengths -----------------------------------------------------------------------------------------

ALL_LENGTHS = {
    "constant": Lengths.constant(300),
    "uniform": Lengths.uniform(100, 300),
    "exponential": Lengths.exponential(128, 1536),
    "lognormal": Lengths.lognormal(700, 1.0, 8, 4000),
    "through": Lengths.through((0, 10), (0.5, 100), (1, 1000)),
}


@pytest.mark.parametrize("name", ALL_LENGTHS)
def test_a_distribution_describes_what_it_draws(name: str):
    lengths = ALL_LENGTHS[name]
    drawn = draw(lengths)
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(lengths.mean, rel=0.02)
    assert statistics.pstdev(drawn) / mean == pytest.approx(lengths.cv, abs=0.02)
    assert statistics.median(drawn) == pytest.approx(lengths.percentile(50), rel=0.03)
    assert lengths.percentile(0) <= min(drawn) and max(drawn) <= lengths.most == lengths.percentile(100)
    assert all(type(length) is int and length >= 1 for length in drawn)


def test_distributions_on_paper():
    assert (ALL_LENGTHS["constant"].mean, ALL_LENGTHS["constant"].cv) == (300, 0)
    uniform = Lengths.uniform(1, 4)
    assert uniform.mean == 2.5 and uniform.cv == pytest.approx(math.sqrt(5 / 4) / 2.5)
    assert {length: draw(uniform).count(length) / 20_000 for length in (1, 2, 3, 4)} == pytest.approx(
        dict.fromkeys((1, 2, 3, 4), 0.25), abs=0.01
    )
    assert Lengths.exponential(128, 100_000).mean == pytest.approx(128, rel=0.002)
    assert Lengths.exponential(128, 100_000).cv == pytest.approx(1, rel=0.01)
    wide = Lengths.lognormal(100, 0.5, 1, 100_000)
    assert wide.mean == pytest.approx(100 * math.exp(0.125), rel=0.005)
    assert wide.percentile(84.134) == pytest.approx(100 * math.exp(0.5), abs=1)
    assert Lengths.through((0, 10), (0.5, 100), (1, 1000)).percentile(25) == round(math.sqrt(10 * 100))


def test_lengths_are_cut_at_both_ends():
    cut = Lengths.lognormal(100, 2.0, 50, 200)
    assert (min(draw(cut)), max(draw(cut))) == (50, 200) == (cut.percentile(0), cut.most)
    assert max(draw(Lengths.exponential(128, 32))) == 32 and min(draw(Lengths.exponential(1, 32))) == 1


def test_another_spread_ranks_the_same_requests_alike():
    narrow, wide = draw(Lengths.lognormal(100, 0.1, 1, 9999), 50), draw(Lengths.lognormal(100, 1.0, 1, 9999), 50)
    assert max(range(50), key=narrow.__getitem__) == max(range(50), key=wide.__getitem__)


# (mean, median, 90th percentile, variation) of Azure's traces of 2023 and of Mooncake's conversations, as computed from them
PUBLISHED = {
    "azure-chat": ((1155, 1020, 2734, None), (211, 129, 424, 0.77)),
    "azure-code": ((2048, 1469, 5186, None), (28, 13, 55, 2.15)),
    "mooncake": ((12_035, 6909, 27_367, None), (343, 350, 597, None)),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("side", ["prompt", "output"])
def test_traces_have_the_published_statistics(name: str, side: str):
    mean, median, p90, cv = PUBLISHED[name][side == "output"]
    lengths: Lengths = getattr(TRACES[name], side)
    assert lengths.mean == pytest.approx(mean, rel=0.01)
    assert (lengths.percentile(50), lengths.percentile(90)) == (median, p90)
    assert cv is None or lengths.cv == pytest.approx(cv, rel=0.02)
    drawn = draw(lengths, 5000, seed=1)  # and so do as many requests as one would simulate
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(median, rel=0.05)
    assert cv is None or statistics.pstdev(drawn) / statistics.fmean(drawn) == pytest.approx(cv, rel=0.08)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Lengths.constant(0), "at least 1 token, got 0"),
        (lambda: Lengths.uniform(5, 4), "1 <= low <= high, got 5 and 4"),
        (lambda: Lengths.exponential(0, 4), "mean > 0"),
        (lambda: Lengths.lognormal(100, -1, 1, 2), "sigma >= 0, got 100 and -1"),
        (lambda: Lengths.lognormal(100, 1, 5, 2), "1 <= least <= most, got 5 and 2"),
        (lambda: Lengths.through((0, 10), (0.5, 5), (1, 20)), "points must ascend"),
        (lambda: poisson(0), "rate above 0 per second, got 0"),
        (lambda: gamma(1, -1), "finite number >= 0, got -1"),
        (lambda: ClosedLoop(0, 1, Lengths.constant(1), Lengths.constant(1)), "at least 1 client, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_numbers(make: Any, words: str):
    with pytest.raises(ValueError, match=words):
        make()


# --- arrivals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cv", "burst"), [(0.5, "smooth"), (1.0, "Poisson"), (3.0, "bursts")])
def test_gaps_have_the_rate_and_the_variation(cv: float, burst: str):
    times_s = gamma(4.0, cv).times_s(np.random.default_rng(0), 50_000)
    gaps_s = np.diff([0.0, *times_s])
    assert times_s == sorted(times_s) and gaps_s.mean() == pytest.approx(0.25, rel=0.03), burst
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_is_gamma_with_a_variation_of_one():
    assert poisson(4.0) == gamma(4.0, 1.0)
    gaps_s = np.diff(poisson(4.0).times_s(np.random.default_rng(0), 50_000))
    assert (gaps_s > 0.25).mean() == pytest.approx(math.exp(-1), abs=0.01)


def test_a_variation_of_zero_is_a_clock_and_an_infinite_rate_is_all_at_once():
    assert gamma(4.0, 0.0).times_s(np.random.default_rng(0), 3) == [0.25, 0.5, 0.75]
    assert all_at_once().times_s(np.random.default_rng(0), 3) == [0.0, 0.0, 0.0]


# --- workloads ---------------------------------------------------------------------------------------

MIXED = (Lengths.uniform(40, 200), Lengths.exponential(20, 100))


def test_the_same_arguments_make_the_same_requests():
    one, two = make_workload(50, *MIXED, poisson(2.0), seed=3), make_workload(50, *MIXED, poisson(2.0), seed=3)
    assert one.arrivals() == two.arrivals() and len(one) == 50
    other = make_workload(50, *MIXED, poisson(2.0), seed=4)
    assert all(mine != theirs for mine, theirs in zip(one.arrivals(), other.arrivals(), strict=True))


def test_one_choice_changes_one_thing():
    plain = make_workload(50, *MIXED, poisson(2.0), seed=3)
    longer = make_workload(50, MIXED[0], Lengths.constant(90), poisson(2.0), seed=3)
    at_once = make_workload(50, *MIXED, seed=3)
    assert prompts_of(longer) == prompts_of(plain) == prompts_of(at_once)
    assert outputs_of(at_once) == outputs_of(plain) != outputs_of(longer)
    assert [time_s for time_s, _ in longer.arrivals()] == [time_s for time_s, _ in plain.arrivals()]


def test_answers_have_exactly_their_length():
    workload = make_workload(20, *MIXED)
    assert all(arguments["params"].ignore_eos for _, arguments in workload.arrivals())
    records = serve(workload).requests.values()
    assert [record.num_output_tokens for record in records] == outputs_of(workload)


def test_prompts_have_nothing_in_common():
    beginnings = {tuple(prompt[:16]) for prompt in prompts_of(make_workload(300, *MIXED))}
    assert len(beginnings) == 300
    assert serve(make_workload(20, *MIXED)).summary().num_hit_tokens == 0


def test_shared_beginnings_are_those_of_the_group_and_lengths_stay():
    workload = make_workload(12, *MIXED, seed=3, num_shared_tokens=64, num_groups=3)
    prompts = prompts_of(workload)
    assert [len(prompt) for prompt in prompts] == [len(prompt) for prompt in prompts_of(make_workload(12, *MIXED, seed=3))]
    for i, prompt in enumerate(prompts):
        assert all((prompt[:40] == other[:40]) == (i % 3 == j % 3) for j, other in enumerate(prompts))
    assert len({tuple(prompt[64:]) for prompt in prompts if len(prompt) > 64}) == sum(len(prompt) > 64 for prompt in prompts)
    assert serve(workload).summary().num_hit_tokens > 0


def test_tokens_stay_within_a_smaller_vocabulary():
    workload = make_workload(20, *MIXED, num_shared_tokens=8, vocab_size=320)
    assert 300 < max(token for prompt in prompts_of(workload) for token in prompt) < 320
    assert max(token for prompt in prompts_of(make_workload(20, *MIXED)) for token in prompt) < VOCAB_SIZE


# --- closed loops ------------------------------------------------------------------------------------


def test_a_client_sends_the_next_request_when_the_last_has_ended():
    trace = serve(ClosedLoop(4, 23, *MIXED, seed=1))
    records = trace.requests
    assert len(records) == 23 and max(step.num_running for step in trace.steps) <= 4
    for index in range(4, 23):
        assert records[f"Q{index}"].arrival_s == records[f"Q{index - 4}"].finished_s


def test_a_client_thinks_in_between():
    records = serve(ClosedLoop(2, 400, Lengths.constant(8), Lengths.constant(2), think_s=3.0)).requests
    pauses_s = [records[f"Q{i}"].arrival_s - (records[f"Q{i - 2}"].finished_s or 0) for i in range(2, 400)]
    assert min(pauses_s) >= 0 and statistics.fmean(pauses_s) == pytest.approx(3.0, rel=0.1)


def test_more_clients_than_requests():
    assert len(serve(ClosedLoop(9, 3, *MIXED)).requests) == 3


# --- conversations -----------------------------------------------------------------------------------


def test_the_next_turn_is_all_that_was_said_and_a_little_more():
    workload = MultiTurn(3, 3, Lengths.constant(50), Lengths.uniform(5, 9), Lengths.uniform(10, 30), poisson(1.0), think_s=2.0)
    engine = make_engine(COST)
    requests: dict[str, Request] = {}

    def then(request: Request, now_s: float) -> list[Arrival]:
        requests[request.request_id] = request
        return workload.then(request, now_s)

    engine.run(workload.arrivals(), then)
    assert len(requests) == len(workload) == 9
    for chat in range(3):
        for turn in (1, 2):
            before, after = requests[f"C{chat}.{turn - 1}"], requests[f"C{chat}.{turn}"]
            assert list(after.prompt_ids[: before.num_tokens]) == before.token_ids
            assert 5 <= after.num_prompt_tokens - before.num_tokens <= 9
            assert after.arrival_s > (engine.trace.requests[before.request_id].finished_s or math.inf)
            assert after.num_cached_tokens == (before.num_tokens - 1) // 16 * 16


def test_chats_share_their_system_prompt():
    workload = MultiTurn(5, 1, Lengths.constant(100), Lengths.constant(5), Lengths.constant(5), num_shared_tokens=64)
    assert len({tuple(prompt[:64]) for prompt in prompts_of(workload)}) == 1
    assert len({tuple(prompt[64:]) for prompt in prompts_of(workload)}) == 5


def test_a_chat_that_has_become_too_long_ends():
    trace = serve(MultiTurn(1, 5, Lengths.constant(100), Lengths.constant(50), Lengths.constant(50)), max_model_len=250)
    assert list(trace.requests) == ["C0.0", "C0.1"] and trace.num_refused == 1


@pytest.mark.parametrize("make", [lambda: ClosedLoop(3, 9, *MIXED, think_s=1.0), lambda: MultiTurn(3, 2, *MIXED, MIXED[1], poisson(1.0))])
def test_a_workload_can_be_served_twice(make: Any):
    workload = make()
    assert serve(workload).requests == serve(workload).requests == serve(make()).requests


# --- recorded traces ---------------------------------------------------------------------------------


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_recorded_trace(tmp_path: Path):
    lines = [
        {"arrival_s": 1.5, "prompt_ids": [1, 2, 3], "num_output_tokens": 4},
        "",
        {"num_prompt_tokens": 20, "num_output_tokens": 5, "user": "somebody"},
    ]
    workload = load_jsonl(write_lines(tmp_path / "t.jsonl", *lines))
    assert [time_s for time_s, _ in workload.arrivals()] == [1.5, 0.0]
    assert prompts_of(workload)[0] == [1, 2, 3] and len(prompts_of(workload)[1]) == 20
    assert outputs_of(workload) == [4, 5]
    assert len(load_jsonl(tmp_path / "t.jsonl", num_requests=1)) == 1


def test_mooncakes_format_with_blocks_that_repeat(tmp_path: Path):
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [46, 47, 48]},
        {"timestamp": 4500, "input_length": 1300, "output_length": 9, "hash_ids": [46, 47, 99]},
    ]
    workload = load_jsonl(write_lines(tmp_path / "t.jsonl", *lines))
    one, two = prompts_of(workload)
    assert ([time_s for time_s, _ in workload.arrivals()], len(one), len(two)) == ([3.0, 4.5], 1100, 1300)
    assert one[:1024] == two[:1024] and one[1024:] != two[1024:1100]
    assert serve(workload).summary().num_hit_tokens == 1024


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting property name"),
        ("[1]", r"a request is an object with fields, got \[1\]"),
        ({"num_prompt_tokens": 3}, "num_output_tokens or output_length must be an integer >= 1, got None"),
        ({"num_prompt_tokens": 0, "num_output_tokens": 3}, "num_prompt_tokens or input_length must be an integer >= 1, got 0"),
        ({"prompt_ids": [], "num_output_tokens": 3}, "prompt_ids must be a list of tokens from 0 to 31999"),
        ({"prompt_ids": [32_000], "num_output_tokens": 3}, "prompt_ids must be a list of tokens from 0 to 31999"),
        ({"prompt_ids": [1], "num_output_tokens": 3, "arrival_s": "noon"}, "arrival_s must be a finite number, got 'noon'"),
        ({"input_length": 600, "output_length": 3, "hash_ids": ["x"]}, "invalid literal"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: Any, words: str):
    path = write_lines(tmp_path / "t.jsonl", {"num_prompt_tokens": 3, "num_output_tokens": 3}, line)
    with pytest.raises(ValueError, match=f"t.jsonl, line 2: {words}"):
        load_jsonl(path)


def test_an_empty_trace_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="t.jsonl: no requests in it"):
        load_jsonl(write_lines(tmp_path / "t.jsonl"))
