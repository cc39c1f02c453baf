"""Two pools and a link: the same tokens as one engine, times that add up, and where the arrangement wins and loses."""

from typing import Any

import pytest

from minserve.core.block_manager import Share
from minserve.core.metrics import goodput
from minserve.core.records import RequestRecord
from minserve.core.request import Request, SamplingParams
from minserve.sim.cost_model import CostModel, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.disaggregation import PoolRun, ReceivingBlocks, run_disaggregated, run_mixed, send
from minserve.sim.shapes import SHAPES
from minserve.sim.workload import TRACES, ClosedLoop, Lengths, MultiTurn, Workload, make_workload, poisson

A100 = DEVICES["a100-80gb"]
COST = CostModel(SHAPES["llama-3.1-8b"], A100)
LINK = 25e9
SHORT = make_workload(30, Lengths.uniform(50, 300), Lengths.uniform(1, 12), poisson(20.0), seed=2)


def lengths_of(workload: Workload) -> list[tuple[int, int]]:
    return [(len(arguments["prompt_ids"]), arguments["params"].max_tokens) for _, arguments in workload.arrivals()]


# --- the link ----------------------------------------------------------------------------------------


def test_the_link_serves_first_come_first_served():
    transfers = send([(0.0, "a", 100), (2.0, "b", 50), (30.0, "c", 10)], bytes_per_s=10.0)
    assert [(t.request_id, t.start_s, t.end_s) for t in transfers] == [("a", 0.0, 10.0), ("b", 10.0, 15.0), ("c", 30.0, 31.0)]


def test_the_link_carries_the_prompts_keys_and_values():
    run = run_disaggregated(COST, SHORT, 1, 1, LINK)
    going_on = [(num_prompt, num_output) for num_prompt, num_output in lengths_of(SHORT) if num_output > 1]
    assert sum(t.num_bytes for t in run.transfers) == sum(num_prompt for num_prompt, _ in going_on) * 131_072
    assert len(run.transfers) == len(going_on) < 30
    records = run.trace.requests
    for transfer in run.transfers:
        first, second = records[transfer.request_id].token_times_s[:2]
        assert transfer.ready_s == first <= transfer.start_s < transfer.end_s < second
        assert transfer.end_s - transfer.start_s == pytest.approx(transfer.num_bytes / LINK)


# --- one request, on paper ---------------------------------------------------------------------------


def test_the_times_of_a_lone_request_on_paper():
    run = run_disaggregated(COST, make_workload(1, Lengths.constant(1000), Lengths.constant(3)), 1, 1, LINK)
    record = run.trace.requests["R0"]
    prefill_s = COST.of(row_work(0, 1000)).seconds
    link_s = 1000 * 131_072 / LINK
    decode_s = [COST.of(decode_work(1, context)).seconds for context in (1001, 1002)]  # what was received costs nothing
    assert record.token_times_s[0] == record.ttft_s == pytest.approx(prefill_s)
    assert record.itl_s == pytest.approx([link_s + decode_s[0], decode_s[1]])
    assert record.finished_s == record.token_times_s[-1] and record.num_output_tokens == 3
    assert run.link_busy_share == pytest.approx(link_s / record.token_times_s[-1])


def test_a_request_of_one_token_never_sees_the_link():
    run = run_disaggregated(COST, make_workload(1, Lengths.constant(1000), Lengths.constant(1)), 1, 1, LINK)
    assert run.transfers == () and run.trace.requests["R0"].num_output_tokens == 1 and run.link_busy_share == 0


# --- what is received --------------------------------------------------------------------------------


def received(blocks: ReceivingBlocks, name: str, num_prompt: int) -> Request:
    request = Request(name, tuple(range(num_prompt)), SamplingParams(), max_total_tokens=1000)
    blocks.start(request, Share())
    return request


def test_a_request_starts_with_its_prompt_computed_and_holds_its_blocks():
    blocks = ReceivingBlocks(10, 16)
    request = received(blocks, "R", 34)
    assert (request.num_computed_tokens, blocks.num_held_blocks(request), request.num_missing_tokens) == (33, 3, 1)
    blocks.check()


def test_what_was_received_is_gone_after_a_preemption():
    blocks = ReceivingBlocks(10, 16, prefix_caching=False)
    request = received(blocks, "R", 34)
    blocks.release(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    blocks.start(request, Share())
    assert (request.num_computed_tokens, blocks.num_held_blocks(request)) == (0, 0)
    blocks.check()


def test_a_small_pool_preempts_and_computes_again():
    workload = make_workload(12, Lengths.uniform(100, 300), Lengths.uniform(100, 300), seed=3)
    run = run_disaggregated(COST, workload, 1, 1, LINK, num_blocks=80, prefix_caching=False)
    summary = run.trace.summary()
    assert summary.num_finished == 12 and summary.num_preemptions > 0
    assert summary.num_recomputed_tokens >= summary.num_preemptions * 100
    assert [record.num_output_tokens for record in run.trace.requests.values()] == [num_output for _, num_output in lengths_of(workload)]


# --- one trace of many -------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [(1, 1), (2, 1), (1, 3)])
def test_everybody_gets_all_tokens_in_order(pools: tuple[int, int]):
    run = run_disaggregated(COST, SHORT, *pools, LINK)
    records = list(run.trace.requests.values())
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in records] == lengths_of(SHORT)
    assert [r.arrival_s for r in records] == [time_s for time_s, _ in SHORT.arrivals()]
    for record in records:
        assert record.token_times_s == sorted(record.token_times_s) and record.finish_reason == "length"
        assert record.arrival_s <= (record.scheduled_s or 0) < record.token_times_s[0]
    assert [step.end_s for step in run.trace.steps] == sorted(step.end_s for step in run.trace.steps)
    computed = sum(step.num_tokens for step in run.trace.steps)
    assert computed == sum(num_prompt + num_output - 1 for num_prompt, num_output in lengths_of(SHORT))  # nothing twice


def test_mixed_devices_are_engines_side_by_side():
    one, three = run_mixed(COST, SHORT, 1).trace, run_mixed(COST, SHORT, 3).trace
    assert one.summary().num_output_tokens == three.summary().num_output_tokens
    assert {name: r.num_output_tokens for name, r in one.requests.items()} == {n: r.num_output_tokens for n, r in three.requests.items()}
    assert (three.summary().tpot_p50_s or 0) < (one.summary().tpot_p50_s or 0)
    assert max(step.num_running for step in three.steps) < max(step.num_running for step in one.steps)


def test_who_is_refused_is_counted():
    workload = make_workload(4, Lengths.constant(500), Lengths.constant(5))
    run = run_disaggregated(COST, workload, 1, 1, LINK, max_model_len=400)
    assert run.trace.num_refused == 4 and not run.trace.requests


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: run_disaggregated(COST, SHORT, 1, 1, 0.0), "a link sends more than 0 bytes/s, got 0.0"),
        (lambda: run_disaggregated(COST, SHORT, 0, 1, LINK), "a pool has at least 1 device, got 0"),
        (lambda: run_disaggregated(COST, SHORT, 1, 0, LINK), "a pool has at least 1 device, got 0"),
        (lambda: run_mixed(COST, SHORT, 0), "a pool has at least 1 device, got 0"),
        (lambda: run_mixed(COST, ClosedLoop(1, 2, *TRACES["azure-chat"]), 2), "a ClosedLoop waits for answers"),
        (lambda: run_mixed(COST, MultiTurn(1, 2, *TRACES["azure-chat"], Lengths.constant(3)), 2), "a MultiTurn waits for answers"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, words: str):
    with pytest.raises(ValueError, match=words):
        make()


# --- where it wins and where it loses ----------------------------------------------------------------

CHAT = make_workload(160, *TRACES["azure-chat"], poisson(8.0), seed=1)  # two devices are busy, none is overloaded


@pytest.fixture(scope="module")
def mixed() -> PoolRun:
    return run_mixed(COST, CHAT, 2)


def share_in_time(run: PoolRun, ttft_s: float = 1.0, tpot_s: float = 0.016) -> float:
    records: list[RequestRecord] = list(run.trace.requests.values())
    return goodput(records, 1.0, ttft_s=ttft_s, tpot_s=tpot_s) / len(records)


def test_it_wins_even_gaps_where_long_prompts_meet_many_answers(mixed: PoolRun):
    run = run_disaggregated(COST, CHAT, 1, 1, LINK)
    ours, theirs = run.trace.summary(), mixed.trace.summary()
    assert ours.itl_p99_s and theirs.itl_p99_s and ours.tpot_p99_s and theirs.tpot_p99_s
    assert theirs.itl_p99_s > 5 * ours.itl_p99_s and theirs.tpot_p99_s > 1.4 * ours.tpot_p99_s
    assert share_in_time(run) > 0.95 and share_in_time(mixed) < 0.7
    small_chunks = run_mixed(COST, CHAT, 2, token_budget=512)  # the other remedy goes half of the way
    assert share_in_time(mixed) < share_in_time(small_chunks) < 0.8
    # what it costs: one device in place of two for the prompts
    assert ours.ttft_p50_s and theirs.ttft_p50_s and ours.ttft_p50_s > 1.5 * theirs.ttft_p50_s


def test_it_loses_on_a_slow_link(mixed: PoolRun):
    """1,155 tokens of 131 kB, 8 times a second, are 1.2 GB/s."""
    shares = [share_in_time(run_disaggregated(COST, CHAT, 1, 1, link)) for link in (25e9, 2.5e9, 1e9)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < share_in_time(mixed)
    assert run_disaggregated(COST, CHAT, 1, 1, 1e9).link_busy_share > 0.7


def test_it_loses_where_the_pools_do_not_fit_the_load():
    busy = make_workload(160, *TRACES["azure-chat"], poisson(14.0), seed=1)
    few_prompts, even, few_answers = (run_disaggregated(COST, busy, *pools, LINK) for pools in ((1, 3), (2, 2), (3, 1)))
    four = run_mixed(COST, busy, 4)
    assert share_in_time(even) > share_in_time(four) > share_in_time(few_prompts)
    assert (few_prompts.trace.summary().ttft_p50_s or 0) > 5 * (four.trace.summary().ttft_p50_s or 1)
    assert share_in_time(few_answers) < share_in_time(even)


def test_it_loses_throughput_on_short_prompts():
    """Half of the devices have next to nothing to do."""
    short = make_workload(300, Lengths.constant(64), Lengths.uniform(50, 100), seed=1)
    pools, both = run_disaggregated(COST, short, 1, 1, LINK).trace.summary(), run_mixed(COST, short, 2).trace.summary()
    assert pools.output_tokens_per_s < 0.8 * both.output_tokens_per_s


def test_it_gains_nothing_at_low_load():
    quiet = make_workload(40, *TRACES["azure-chat"], poisson(0.5), seed=1)
    pools, both = run_disaggregated(COST, quiet, 1, 1, LINK), run_mixed(COST, quiet, 2)
    assert share_in_time(pools) == share_in_time(both) == 1.0
    assert pools.trace.summary().ttft_p50_s == pytest.approx(both.trace.summary().ttft_p50_s, rel=0.2)
