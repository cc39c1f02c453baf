"""Decode steps as graphs, with a recorder that runs the step again instead of a GPU that replays it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minserve.core.engine import Engine
from minserve.model.attention_triton import TritonOperations
from minserve.model.cuda_graphs import DecodeGraphs, batch_sizes, wants_graphs
from minserve.model.decoder import Decoder
from minserve_kernels import reference
from tests.model.tiny_net import batch_of, generate, make_engine, request, runner_of, tiny_decoder, tokens_for


class FakeRecorder:
    """A replay reads its step where it was recorded and leaves its answer where it was, like a CUDA graph; `replayed` has the sizes."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.num_recorded = 0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = compute()
        self.num_recorded += 1

        def replay() -> None:
            self.replayed.append(len(result))
            result.copy_(compute())

        return replay, result


def graph_engine(decoder: Decoder, max_requests: int = 4, max_tokens: int = 128, **engine) -> tuple[Engine, FakeRecorder]:
    made, recorder = make_engine(decoder, **engine), FakeRecorder()
    runner = runner_of(made)
    runner.operations = TritonOperations(reference, needs_device=False)
    runner.record_graphs(max_requests, max_tokens, recorder)
    return made, recorder


def test_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 3, 4, 5]
    assert batch_sizes(256) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for n in range(1, 257):
        assert next(size for size in batch_sizes(256) if size >= n) < 1.5 * n


def test_tokens_are_those_without_graphs():
    decoder, prompts = tiny_decoder(), [tokens_for(i, 5 + 9 * i) for i in range(3)]
    want = [r.output_ids for r in generate(make_engine(decoder), prompts, 12)]
    engine, recorder = graph_engine(decoder)
    assert [r.output_ids for r in generate(engine, prompts, 12)] == want
    assert recorder.num_recorded == 4 and recorder.replayed == [3] * 11  # the first token of each comes of its prompt


def test_a_batch_is_padded_to_a_size_that_has_a_graph():
    decoder, prompts = tiny_decoder(), [tokens_for(i, 5) for i in range(5)]
    engine, recorder = graph_engine(decoder, max_requests=8)
    want = [r.output_ids for r in generate(make_engine(decoder), prompts, 6)]
    assert [r.output_ids for r in generate(engine, prompts, 6)] == want
    assert recorder.replayed == [6] * 5


def test_recording_and_padding_leave_the_cache_as_it_is():
    engine = make_engine(tiny_decoder(), num_blocks=8)
    runner = runner_of(engine)
    cache = runner.cache
    cache.blocks[:, : cache.num_blocks] = torch.nan
    runner.operations = TritonOperations(reference, needs_device=False)
    runner.record_graphs(4, 128, FakeRecorder())
    assert cache.blocks[:, : cache.num_blocks].isnan().all()
    generate(engine, [tokens_for(i, 5) for i in range(3)], 6)  # 5 + 5 tokens each are written: the last token is not
    assert (~cache.blocks.isnan()).sum() == cache.blocks[:, -1].numel() + 3 * 10 * cache.blocks[:, 0, :, :, 0].numel()
    assert (cache.blocks[:, cache.null_block] == 0).all()


def test_steps_that_no_graph_can_run():
    engine, recorder = graph_engine(tiny_decoder(), max_requests=2, max_tokens=300)
    graphs = runner_of(engine).graphs
    assert graphs is not None and graphs.num_blocks == 32  # 19 blocks hold 300 tokens; tables are as wide as a multiple of 16

    def rows(*tokens: tuple[int, int, int]):
        """(start, end, blocks)"""
        made = [(request(f"R{i}", tokens_for(1, 512)), start, end, range(blocks)) for i, (start, end, blocks) in enumerate(tokens)]
        return batch_of(*made).rows

    assert graphs.fits(rows((7, 8, 1))) and graphs.fits(rows((7, 8, 1), (511, 512, 32)))
    assert not graphs.fits(rows((7, 9, 1)))  # a chunk
    assert not graphs.fits(rows((7, 8, 1), (0, 3, 1)))
    assert not graphs.fits(rows((7, 8, 1), (7, 8, 1), (7, 8, 1)))  # too many
    assert not graphs.fits(rows((511, 512, 33)))  # too long
    assert not graphs.fits(())
    generate(engine, [tokens_for(i, 5) for i in range(3)], 6)
    assert recorder.replayed == []


def test_more_requests_than_the_largest_graph_run_without():
    decoder, prompts = tiny_decoder(), [tokens_for(i, 5) for i in range(3)]
    engine, recorder = graph_engine(decoder, max_requests=2)
    want = [r.output_ids for r in generate(make_engine(decoder), prompts, 6)]
    assert [r.output_ids for r in generate(engine, prompts, 6)] == want
    assert recorder.replayed == []


def test_other_weights_are_recorded_anew():
    old, new, prompt = tiny_decoder(), tiny_decoder(seed=1), tokens_for(1, 5)
    engine, recorder = graph_engine(old)
    first = generate(engine, [prompt], 6)[0].output_ids
    runner_of(engine).use(new)
    assert recorder.num_recorded == 8 and isinstance(runner_of(engine).graphs, DecodeGraphs)
    want = generate(make_engine(new), [prompt], 6)[0].output_ids
    assert generate(engine, [prompt], 6)[0].output_ids == want != first


def test_it_is_said_that_graphs_run():
    engine, _ = graph_engine(tiny_decoder())
    assert runner_of(engine).describe().endswith(", decode steps of up to 4 requests as CUDA graphs")


def test_what_the_setting_means(monkeypatch):
    cpu, card = torch.device("cpu"), torch.device("cuda", 0)
    assert wants_graphs("auto", "triton", card) and wants_graphs(True, "triton", card)
    assert not wants_graphs("auto", "torch", card) and not wants_graphs("auto", "triton", cpu) and not wants_graphs(False, "triton", card)
    with pytest.raises(ValueError, match="this is 'triton' on cpu"):
        wants_graphs(True, "triton", cpu)
    with pytest.raises(ValueError, match="True, False or 'auto', got 'yes'"):
        wants_graphs("yes", "triton", card)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not wants_graphs("auto", "triton", card)
