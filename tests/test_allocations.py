"""What a run asks of its memory, replayed: the pool is held to the trace, and the others to what they are said to allocate."""

from collections.abc import Iterator

import pytest
import torch

from minserve.allocations import Demand, Growth, Recording, demands_of
from minserve.allocators import Pool, Site
from minserve.core.request import SamplingParams
from minserve.llm import LLM
from tests.tiny_model import save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    with LLM(str(model), dtype="fp32", num_blocks=14, block_size=4, max_model_len=48, token_budget=24, verbose=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def recording(llm: LLM) -> Recording:
    """Six requests in a pool too small for them: with prefix hits, preemptions and returns."""
    prompts = [[7 * token % 250 for token in range(9)] + [request] * 3 for request in range(6)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True), progress=False)
    return Recording.of(llm, llm.trace, outputs, run_s=2.0)


@pytest.fixture(scope="module")
def small() -> Recording:
    """Two requests of 5 and 2 tokens, blocks of 4: the first takes 2 blocks and then another, the second 1."""
    demands = (
        Demand((), (Growth("a", 0, 5, True),), ()),
        Demand((), (Growth("a", 5, 6, False), Growth("b", 0, 2, True)), ("b",)),
        Demand((), (Growth("a", 6, 9, False),), ("a",)),
    )
    return Recording(demands, {"a": (1, 2, 3, 4, 5), "b": (6, 7)}, {"a": (8, 9, 10, 11, 12), "b": (3,)}, 8, 4, 3, 24, 1.5)


def test_the_pool_replays_the_run_block_for_block(llm: LLM, recording: Recording) -> None:
    pool = Pool(Site(recording, CPU, writes=False))
    steps = [step for step in llm.trace.steps if step.tokens]
    assert any(step.preempted for step in steps) and any(step.num_hit_tokens for step in steps)
    used: list[tuple[int, int]] = []
    for demand in recording.demands:
        for request_id in demand.preempted:
            pool.drop(request_id)
        for growth in demand.growths:
            pool.grow(growth)
        used.append((pool.blocks.num_used_blocks, pool.blocks.num_idle_blocks))
        for request_id in demand.finished:
            pool.drop(request_id)
        pool.blocks.check()
    assert used == [(step.num_used_blocks, step.num_idle_blocks) for step in steps]
    assert {name: tuple(request.token_ids) for name, request in pool.requests.items()} == {
        name: recording.prompts[name] + recording.outputs[name] for name in recording.prompts
    }


def test_the_sums_of_a_run(llm: LLM, recording: Recording, small: Recording) -> None:
    load = recording.load(6)
    assert load.num_steps == len(recording.demands) and load.num_requests == 6 and load.num_layers == 2
    assert load.bytes_per_token == 2 * 2 * 2 * 32 * 4 and load.step_s == 2.0 / load.num_steps
    assert load.num_tokens == sum(step.num_tokens for step in llm.trace.steps)
    load = small.load(2)
    assert (load.num_steps, load.num_rows, load.num_tokens, load.num_blocks_taken) == (3, 4, 11, 4)
    assert load.calls_per_step == 8 / 3 and load.calls_per_s == 8 / 1.5
    assert small.bytes_per_layer == 8 and small.longest == {"a": 10, "b": 3}


def test_who_comes_back_is_new(recording: Recording) -> None:
    preempted = {name for demand in recording.demands for name in demand.preempted}
    news = [growth.request_id for demand in recording.demands for growth in demand.growths if growth.is_new]
    assert len(news) == 6 + sum(len(demand.preempted) for demand in recording.demands) and preempted <= set(news)


def test_a_replay_that_strays_is_noticed(small: Recording) -> None:
    pool = Pool(Site(small, CPU, writes=False))
    with pytest.raises(AssertionError, match="0 found in the cache"):
        pool.grow(Growth("a", 4, 5, True))


def test_steps_in_which_nothing_ran_ask_for_nothing(llm: LLM) -> None:
    llm.reset_trace()
    assert demands_of(llm.trace) == ()
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
    name = output.request_id
    assert demands_of(llm.trace) == (
        Demand((), (Growth(name, 0, 3, True),), ()),
        Demand((), (Growth(name, 3, 4, False),), (name,)),
    )
