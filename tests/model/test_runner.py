import pytest
import torch

from minserve.core.batch import ScheduledBatch
from minserve.model.decoder import Decoder
from minserve.model.sampler import SampledTokens, Sampler
from tests.model.tiny_net import batch_of, full_logits, generate, make_engine, make_runner, request, tiny_decoder, tokens_for


class FailsForB(Sampler):
    def sample(self, logits, requests):
        rows = {i: "NaN" for i, r in enumerate(requests) if r.request_id == "B"}
        return SampledTokens([-1 if i in rows else 7 for i in range(len(requests))], [None] * len(requests), rows)


def cold(decoder: Decoder, prompt: list[int], max_tokens: int) -> list[int]:
    return generate(make_engine(decoder, num_blocks=40), [prompt], max_tokens)[0].output_ids


def test_tokens_are_those_of_recomputing_the_whole_text_each_time():
    decoder, prompt = tiny_decoder(), tokens_for(1, 10)
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(full_logits(decoder, tokens)[-1].argmax()))
    assert cold(decoder, prompt, 8) == tokens[10:]


def test_an_empty_batch():
    assert make_runner(tiny_decoder()).execute(ScheduledBatch(step=3, rows=())).token_ids == {}


def test_a_row_that_does_not_reach_its_last_token_gives_none():
    runner = make_runner(tiny_decoder())
    done, rest = request("A", tokens_for(1, 5)), request("B", tokens_for(2, 50))
    result = runner.execute(batch_of((done, 0, 5, [0]), (rest, 0, 20, [1, 2])))
    assert list(result.token_ids) == ["A"]
    assert runner.execute(batch_of((rest, 20, 40, [1, 2, 3]))).token_ids == {}
    assert list(runner.execute(batch_of((rest, 40, 50, [1, 2, 3, 4]))).token_ids) == ["B"]


def test_copies_come_before_the_step():
    """B goes on from a copy of A's block and writes its own token behind it; A's block stays as it was."""
    decoder, shared = tiny_decoder(), tokens_for(1, 10)
    a, b = request("A", [*shared, 5]), request("B", [*shared, 6])
    runner = make_runner(decoder)
    runner.execute(batch_of((request("P", shared), 0, 10, [0])))
    result = runner.execute(batch_of((a, 10, 11, [0]), (b, 10, 11, [3]), copies=[(0, 3)]))
    assert result.token_ids == {r.request_id: int(full_logits(decoder, r.token_ids)[-1].argmax()) for r in (a, b)}


def test_results_go_to_their_requests_though_rows_are_reordered():
    decoder = tiny_decoder()
    runner, requests = make_runner(decoder), [request(f"R{i}", tokens_for(i, length)) for i, length in enumerate((30, 1, 70, 2))]
    tables = [[0, 1], [2], [3, 4, 5, 6, 7], [8]]
    result = runner.execute(batch_of(*[(r, 0, r.num_tokens, table) for r, table in zip(requests, tables, strict=True)]))
    assert result.token_ids == {r.request_id: int(full_logits(decoder, r.token_ids)[-1].argmax()) for r in requests}
    assert result.elapsed_s == 0.0


def test_an_error_of_the_sampler_goes_to_its_request_only():
    runner = make_runner(tiny_decoder())
    runner.sampler = FailsForB(320)
    result = runner.execute(batch_of((request("A", [1, 2, 3]), 0, 3, [0]), (request("B", [4]), 0, 1, [1])))
    assert (dict(result.token_ids), dict(result.errors)) == ({"A": 7}, {"B": "NaN"})


def test_case_64_positions_go_on_one_by_one(monkeypatch):
    decoder, seen = tiny_decoder(), []
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda ids, positions, *rest: seen.append(positions.tolist()) or forward(ids, positions, *rest))
    generate(make_engine(decoder), [tokens_for(1, 6)], 8)
    assert seen == [[0, 1, 2, 3, 4, 5], [6], [7], [8], [9], [10], [11], [12]]
    seen.clear()
    engine = make_engine(decoder, block_size=4, prefix_caching=True)
    generate(engine, [tokens_for(1, 6)], 1)
    generate(engine, [tokens_for(1, 6)], 3)
    assert seen == [[0, 1, 2, 3, 4, 5], [4, 5], [6], [7]]


def test_case_71_nothing_is_remembered_between_generations():
    engine = make_engine(tiny_decoder(windows=(8, 8)))
    long, short = tokens_for(1, 10), tokens_for(2, 3)
    first = [generate(engine, [long], 20)[0].output_ids for _ in range(3)]
    assert first[0] == first[1] == first[2]
    brief = generate(engine, [short], 20)[0].output_ids
    assert generate(engine, [long], 20)[0].output_ids == first[0]
    assert brief == generate(engine, [short], 20)[0].output_ids


def test_case_133_requests_together_and_apart():
    decoder, prompts = tiny_decoder(), [tokens_for(1, 3), tokens_for(2, 9)]
    together = generate(make_engine(decoder), prompts, 16, logprobs=0)
    for prompt, got in zip(prompts, together, strict=True):
        apart = generate(make_engine(decoder), [prompt], 16, logprobs=0)[0]
        assert got.output_ids == apart.output_ids
        assert [t.logprob for t in got.logprobs] == pytest.approx([t.logprob for t in apart.logprobs], abs=1e-4)


@pytest.mark.parametrize(("dtype", "kv_cache_dtype", "largest_gap"), [(torch.float32, "fp32", 1e-3), (torch.bfloat16, "bf16", 0.1)])
def test_case_134_a_cached_prefix_changes_no_more_than_rounding(dtype, kv_cache_dtype, largest_gap):
    """The same 8 tokens after a 40-token prompt, 32 of them from the cache: sum of log probabilities with and without."""
    decoder, prompt = tiny_decoder(dtype), tokens_for(1, 40)

    def run(prefix_caching: bool):
        engine = make_engine(decoder, prefix_caching=prefix_caching, kv_cache_dtype=kv_cache_dtype)
        generate(engine, [prompt], 8)
        return generate(engine, [prompt], 8, logprobs=0)[0]

    cached, plain = run(True), run(False)
    assert (cached.num_cached_tokens, plain.num_cached_tokens) == (32, 0)
    gap = abs(sum(t.logprob for t in cached.logprobs) - sum(t.logprob for t in plain.logprobs))
    assert cached.output_ids == plain.output_ids
    assert gap < largest_gap


def test_case_136_the_token_budget_changes_nothing():
    decoder = tiny_decoder()
    prompts = [tokens_for(i, 3 + 3 * i) for i in range(30)]  # 3 to 90 tokens
    want = None
    for budget in (8, 16, 24, 64, 100, 384, 1000):
        engine = make_engine(decoder, num_blocks=256, token_budget=budget, max_running=min(budget, 30))
        got = [r.output_ids for r in generate(engine, prompts, 20)]
        want = want or got
        assert got == want, f"budget {budget}"
    assert want is not None and want[7] == cold(decoder, prompts[7], 20)


def test_a_prefix_cached_prompt_gives_the_cold_tokens():
    decoder, prefix = tiny_decoder(), tokens_for(1, 48)
    prompts = [[*prefix, *tokens_for(i, 5)] for i in range(4)]
    engine = make_engine(decoder, prefix_caching=True)
    assert [r.output_ids for r in generate(engine, prompts, 10)] == [cold(decoder, p, 10) for p in prompts]
