"""The pace of a full batch, by hand where it is simple and against the simulator where it is not."""

import statistics

import pytest

from minserve.sim.cost_model import CostModel, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.pace import largest, largest_decode_batch, most_fed, pace
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import Lengths, all_at_once, make_workload


def cost_of(model: str, device: str = "a100-80gb", num_devices: int = 1) -> CostModel:
    return CostModel(SHAPES[model], DEVICES[device], num_devices=num_devices)


def test_one_request_by_itself() -> None:
    cost = cost_of("llama-2-13b")
    alone = pace(cost, 1, prompt_tokens=1000, output_tokens=101)
    decode_s = cost.of(decode_work(1, 1051)).seconds
    assert alone.ttft_s == pytest.approx(cost.of(row_work(0, 1000)).seconds)
    assert alone.decode_s == alone.tpot_s == pytest.approx(decode_s)
    assert alone.output_tokens_per_s == pytest.approx(101 / (alone.ttft_s + 100 * decode_s))
    assert alone.limit == "weights" and 0.7 < alone.roofline_share < 0.78


def test_a_long_prompt_takes_steps_beside_the_others() -> None:
    cost = cost_of("llama-3.1-8b")
    others = decode_work(9, 5050)
    pieces = [(0, 2039), (2039, 2039), (4078, 922)]  # nine of a step's 2,048 tokens are the others'
    by_hand = sum(cost.of(others + row_work(start, count, start > 4000)).seconds for start, count in pieces)
    assert pace(cost, 10, prompt_tokens=5000, output_tokens=100).ttft_s == pytest.approx(by_hand)


def test_a_window_bounds_what_is_read() -> None:
    shape = SHAPES["mistral-7b"]
    assert shape.window is None
    windowed = decode_work(4, 10_000, window=4096)
    assert (windowed.num_context_tokens, windowed.num_window_tokens) == (40_000, 16_384)
    assert decode_work(4, 1000, window=4096).num_window_tokens == 4000


def test_a_step_feeds_only_so_many() -> None:
    assert most_fed(4032, 64, 2048) == 32
    assert pace(cost_of("llama-3.1-8b"), 500, 4032, 64).batch == 32


def test_largest_decode_batch_at_a_context() -> None:
    cost = cost_of("llama-2-13b")
    batch = largest_decode_batch(cost, 1024, tpot_s=0.040)
    assert batch == 44
    assert cost.of(decode_work(44, 1024)).seconds <= 0.040 < cost.of(decode_work(45, 1024)).seconds
    assert largest_decode_batch(cost, 1024, tpot_s=0.001) == 0


def test_largest_searches_to_both_ends() -> None:
    for answer in (0, 1, 37, 100):
        assert largest(100, lambda n, answer=answer: n <= answer) == answer


@pytest.mark.parametrize(
    ("model", "device", "num_devices", "batch", "prompt", "output"),
    [
        ("llama-2-13b", "a100-80gb", 1, 25, 1792, 256),
        ("llama-2-13b", "a100-80gb", 1, 25, 512, 128),
        ("llama-3.1-8b", "h100", 1, 64, 1024, 256),
        ("llama-3.1-8b", "h100", 1, 64, 4096, 64),  # twice as many seats as a step can feed
        ("llama-3.1-8b", "h100", 1, 32, 8192, 256),
        ("mixtral-8x7b", "h100", 2, 64, 768, 256),
    ],
)
def test_the_simulator_agrees_within_5_percent(model: str, device: str, num_devices: int, batch: int, prompt: int, output: int) -> None:
    """Many more requests than seats, answers of half to one and a half times the mean; the first and the last batch are not counted."""
    cost = cost_of(model, device, num_devices)
    engine = make_engine(cost, num_blocks=10**6, max_running=batch, prefix_caching=False)
    lengths = Lengths.uniform(output // 2, output + output // 2)
    trace = simulate(engine, make_workload(5 * batch, Lengths.constant(prompt), lengths, all_at_once(), seed=1))
    records = sorted(trace.requests.values(), key=lambda r: r.scheduled_s or 0.0)
    start_s, end_s = records[batch].scheduled_s, records[-1].scheduled_s
    assert start_s is not None and end_s is not None
    num_tokens = sum(start_s < time_s <= end_s for r in records for time_s in r.token_times_s)
    tpot_s = statistics.mean(r.tpot_s for r in records[batch:-batch] if r.tpot_s)
    mean_output = round(statistics.mean(r.num_output_tokens for r in records))
    predicted = pace(cost, batch, prompt, mean_output)
    assert predicted.output_tokens_per_s == pytest.approx(num_tokens / (end_s - start_s), rel=0.05)
    assert predicted.tpot_s == pytest.approx(tpot_s, rel=0.05)
