"""LLM on a tiny random model: inputs and outputs, errors, threads, memory, and outputs that do not depend on scheduling."""

import gc
import threading
from pathlib import Path

import psutil
import pytest
import torch

from minserve import LLM, EngineConfig, SamplingParams
from minserve.core.policies import StaticBatches, TimeoutBatches
from minserve.core.request import FinishReason, InvalidRequest, RequestTooLong
from minserve.model.quantized_linear import QuantizedLinear
from minserve.model.sizing import PoolTooSmall
from tests.tiny_model import save_tiny_model

PROMPTS = ["The boats came home", "안녕하세요", "a", "one two three four five six seven eight nine ten"]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_llm(path: Path, **fields) -> LLM:
    return LLM(path, verbose=False, **{"dtype": "fp32", "num_blocks": 64, **fields})


@pytest.fixture(scope="module")
def llm(tiny_dir: Path):
    with make_llm(tiny_dir) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest):
    """After each test the shared engine is idle, its pool whole and its tables empty."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.engine.scheduler.check()
        assert not llm.engine.has_work and not llm._live
        assert llm.engine.scheduler.blocks.num_used_blocks == 0


def ids_of(llm: LLM, prompts=PROMPTS, **fields) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, progress=False, **{"max_tokens": 12, "ignore_eos": True, **fields})]


# --- what goes in -----------------------------------------------------------------------------------


def test_a_string_a_list_and_token_ids_give_the_same(llm: LLM) -> None:
    [of_text] = ids_of(llm, PROMPTS[0])
    assert ids_of(llm, [PROMPTS[0]]) == [of_text]
    assert ids_of(llm, list(PROMPTS[0].encode())) == [of_text]
    assert ids_of(llm, [list(PROMPTS[0].encode())]) == [of_text]
    assert len(of_text) == 12


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        (["ok", ""], "the prompt is empty"),
        (["a", [1]], "all strings or all lists of token ids, got \\['list', 'str'\\]"),
        ([[5, 320]], "prompt token 1 is 320, the model knows ids 0 to 319"),
        ([[5, -1]], "prompt token 1 is -1"),
        ([[5, "x"]], "prompt token 1 is 'x'"),
        (7, "prompts must be a string"),
        (["x" * 512], "512 prompt tokens and at least 1 output tokens make 513, max_model_len is 512"),
    ],
)
def test_bad_prompts_are_refused_with_the_numbers_and_nothing_runs(llm: LLM, prompts, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(prompts, max_tokens=2)
    assert not llm.engine.has_work


def test_case_151_huge_max_tokens_is_a_ceiling(llm: LLM) -> None:
    """Capped by what the model's 512 positions leave; the memory does not depend on it."""
    for max_tokens in (502, 503, 10_000, 2**31 - 1, 2**63, None):
        [output] = llm.generate([list(range(10))], SamplingParams(max_tokens=max_tokens, ignore_eos=True), progress=False)
        assert (len(output.token_ids), output.finish_reason) == (502, "length")
    with pytest.raises(InvalidRequest, match="max_tokens must be an integer >= 1, got 1e"):
        llm.generate("x", max_tokens=1e18)


def test_case_152_max_tokens_zero_and_one(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be an integer >= 1, got 0"):
        llm.generate("x", max_tokens=0)
    [output] = llm.generate("x", max_tokens=1, progress=False)
    assert len(output.token_ids) == 1


def test_case_160_lists_of_prompts_and_samples(llm: LLM) -> None:
    outputs = llm.generate([[5, 6], [7, 8, 9]], n=2, max_tokens=3, temperature=1.0, seed=1, progress=False)
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0, 1], [0, 1]]
    assert [len(output.prompt_ids) for output in outputs] == [2, 3]


def test_one_parameter_set_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)], progress=False)
    assert [len(output.token_ids) for output in outputs] == [2, 3]
    with pytest.raises(InvalidRequest, match="2 prompts and 1 sampling params"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequest, match="not both: max_tokens"):
        llm.generate("a", SamplingParams(), max_tokens=3)
    with pytest.raises(InvalidRequest, match="unknown sampling field 'max_token', did you mean 'max_tokens'"):
        llm.generate("a", max_token=3)


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(messages, max_tokens=4, progress=False)
    assert bytes(one.prompt_ids).decode() == "user: hi\nassistant: "
    both = llm.chat([messages, messages], max_tokens=4, progress=False)
    assert [output.token_ids for output in both] == [one.token_ids] * 2
    with pytest.raises(InvalidRequest, match="messages is empty"):
        llm.chat([])


# --- what comes out ---------------------------------------------------------------------------------


def test_stream_equals_generate(llm: LLM) -> None:
    for prompt in PROMPTS:
        [plain] = llm.generate(prompt, max_tokens=40, progress=False)
        assert "".join(llm.stream(prompt, max_tokens=40)) == plain.text


def test_leaving_a_stream_early_gives_the_request_up(llm: LLM) -> None:
    stream = llm.stream("x", max_tokens=400, ignore_eos=True)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    assert list(llm.trace.requests.values())[-1].finish_reason == "abort"


def test_two_streams_and_a_call_in_between_do_not_disturb_each_other(llm: LLM) -> None:
    expected = [output.text for output in llm.generate(PROMPTS[:2], max_tokens=30, ignore_eos=True, progress=False)]
    first, second = (llm.stream(prompt, max_tokens=30, ignore_eos=True) for prompt in PROMPTS[:2])
    pieces = [next(first), next(second)]
    ids_of(llm)
    assert pieces[0] + "".join(first) == expected[0]
    assert pieces[1] + "".join(second) == expected[1]


def test_a_stop_string_ends_text_and_work(llm: LLM) -> None:
    """Cases 143 and 158 in the engine: the text ends before the stop, the reason is "stop", no further token is computed."""
    prompt, [full] = PROMPTS[3], llm.generate(PROMPTS[3], max_tokens=60, ignore_eos=True, progress=False)
    stop = next(full.text[i : i + 2] for i in range(6, len(full.text)) if full.text.find(full.text[i : i + 2]) == i)
    [output] = llm.generate(prompt, max_tokens=60, ignore_eos=True, stop=[stop, "never there"], progress=False)
    assert output.text == full.text[: full.text.index(stop)] and output.finish_reason == "stop"
    assert len(output.token_ids) < 60 and output.token_ids == full.token_ids[: len(output.token_ids)]
    assert "".join(llm.stream(prompt, max_tokens=60, ignore_eos=True, stop=stop)) == output.text
    assert llm.trace.requests[output.request_id].finish_reason == "stop"


def test_case_85_every_end_token_stops(tmp_path: Path) -> None:
    """The model's first choices become its end ids: it stops at once, with reason "stop" and empty text, unless told to go on."""
    with make_llm(save_tiny_model(tmp_path / "a")) as llm:
        [free] = ids_of(llm, "abc", max_tokens=4)
    with make_llm(save_tiny_model(tmp_path / "b", eos_token_id=[7, free[0], 9])) as llm:
        [output] = llm.generate("abc", max_tokens=4, progress=False)
        assert (output.text, output.finish_reason, output.token_ids) == ("", "stop", free[:1])  # case 154: the first token ends it
        assert ids_of(llm, "abc", max_tokens=4) == [free]
        [late] = llm.generate("abc", max_tokens=8, min_tokens=3, progress=False)
        assert len(late.token_ids) >= 3 and free[0] not in late.token_ids[:2]


def test_log_probabilities_come_with_each_token(llm: LLM) -> None:
    [output] = llm.generate("abc", max_tokens=5, ignore_eos=True, logprobs=3, progress=False)
    entries = output.outputs[0].logprobs
    assert entries is not None and [entry.token_id for entry in entries] == output.token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 3 for entry in entries)
    assert llm.generate("abc", max_tokens=2, progress=False)[0].outputs[0].logprobs is None


def test_case_161_cached_tokens_are_counted_once(tiny_dir: Path) -> None:
    with make_llm(tiny_dir) as llm:
        prompt = list(range(40))
        assert llm.generate([prompt], max_tokens=2, progress=False)[0].num_cached_tokens == 0
        [second] = llm.generate([prompt], n=3, temperature=1.0, max_tokens=2, progress=False)
        assert (second.num_cached_tokens, len(second.prompt_ids)) == (32, 40)


# --- sampling in company ----------------------------------------------------------------------------


def test_cases_61_and_122_a_seed_gives_the_same_tokens_in_any_company(tiny_dir: Path) -> None:
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    with make_llm(tiny_dir) as llm:
        alone = llm.generate("abc", seeded, progress=False)[0].token_ids
        for _ in range(5):
            assert llm.generate(["zz", "abc"], [unseeded, seeded], progress=False)[1].token_ids == alone
    with make_llm(tiny_dir, num_blocks=3, block_size=8, prefix_caching=False) as llm:  # two do not fit: one is preempted and comes back
        outputs = llm.generate(["abc", "zzz"], [seeded, seeded], progress=False)
        assert llm.trace.summary().num_preemptions >= 1
        assert outputs[0].token_ids == alone
    with make_llm(tiny_dir, num_blocks=3, block_size=8, prefix_caching=False, reserve_whole_answers=True) as llm:  # one after the other
        outputs = llm.generate(["abc", "zzz"], [seeded, seeded], progress=False)
        assert llm.trace.summary().num_preemptions == 0 and max(step.num_running for step in llm.trace.steps) == 1
        assert outputs[0].token_ids == alone


def test_case_50_the_budget_does_not_change_random_tokens(tiny_dir: Path) -> None:
    prompt, params = list(range(40)), SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    texts = []
    for budget in (8, 16, 24, 512):
        with make_llm(tiny_dir, token_budget=budget) as llm:
            texts.append(llm.generate([prompt], params, progress=False)[0].token_ids)
    assert texts == [texts[0]] * 4 and len(texts[0]) == 10


def test_cases_124_and_125_samples_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    def sample(**fields) -> list[tuple[int, ...]]:
        [output] = llm.generate("a", temperature=3.0, max_tokens=8, ignore_eos=True, progress=False, **fields)
        return [tuple(answer.token_ids) for answer in output.outputs]

    four = sample(n=4, seed=7)
    assert len(set(four)) == 4 and sample(n=4, seed=7) == four
    assert len({sample()[0] for _ in range(5)}) >= 4  # no seed is not seed 0
    assert sample(seed=0) == sample(seed=0)
    assert len(set(ids_of_samples(llm, n=4, temperature=0.0))) == 1


def ids_of_samples(llm: LLM, **fields) -> list[tuple[int, ...]]:
    [output] = llm.generate("a", max_tokens=8, ignore_eos=True, progress=False, **fields)
    return [tuple(answer.token_ids) for answer in output.outputs]


# --- outputs do not depend on scheduling ------------------------------------------------------------


def test_outputs_do_not_depend_on_blocks_budget_or_company(tiny_dir: Path) -> None:
    """Alone, together, in chunks, in a pool that forces preemption, with and without prefix cache: the same tokens in fp32."""
    prompts = [list(range(1, 1 + length)) for length in (3, 9, 16, 17, 40, 61)] + [list(range(1, 33))]
    with make_llm(tiny_dir, prefix_caching=False) as llm:
        alone = [ids_of(llm, [prompt])[0] for prompt in prompts]
    settings = (
        {},
        {"token_budget": 7},
        {"block_size": 4, "num_blocks": 24, "token_budget": 16, "watermark": 0.0},
        {"block_size": 1, "num_blocks": 90, "prefix_caching": False},
        {"max_running": 2, "max_chunk_tokens": 5},
    )
    num_preemptions = 0
    for fields in settings:
        with make_llm(tiny_dir, **fields) as llm:
            assert ids_of(llm, prompts) == alone, fields
            assert ids_of(llm, prompts) == alone, fields  # a second time, from the cache
            num_preemptions += llm.trace.summary().num_preemptions
    assert num_preemptions > 0


def test_case_71_a_prompt_gives_the_same_each_time(llm: LLM) -> None:
    ten, three = list(range(10)), [9, 8, 7]
    first = ids_of(llm, [ten], max_tokens=20)
    assert ids_of(llm, [ten], max_tokens=20) == ids_of(llm, [ten], max_tokens=20) == first
    ids_of(llm, [three], max_tokens=20)
    assert ids_of(llm, [ten], max_tokens=20) == first


# --- failures ---------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(tiny_dir) as llm:
        before = ids_of(llm)
        execute, calls = llm._runner.execute, []

        def fails_once(batch):
            calls.append(batch)
            if len(calls) == 3:
                raise RuntimeError("no more luck")
            return execute(batch)

        monkeypatch.setattr(llm._runner, "execute", fails_once)
        with pytest.raises(RuntimeError, match="no more luck"):
            ids_of(llm)
        llm.engine.scheduler.check()
        assert not llm.engine.has_work
        assert ids_of(llm) == before


def test_case_98_nan_of_one_request_stays_with_it(tiny_dir: Path) -> None:
    """NaN written into A's blocks: A ends with an error, B's tokens are those of a healthy run, A's prefix is not found again."""
    a, b = list(range(20)), list(range(100, 130))
    with make_llm(tiny_dir) as llm:
        healthy = ids_of(llm, [b])[0]
        requests = llm.engine.add(a, SamplingParams(max_tokens=12)) + llm.engine.add(b, SamplingParams(max_tokens=12, ignore_eos=True))
        llm.engine.step()
        llm._runner.cache.blocks[:, llm.engine.scheduler.blocks.table(requests[0])[0]] = float("nan")
        llm.engine.run()
        assert (requests[0].finish_reason, requests[1].finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
        assert requests[0].error is not None and "NaN" in requests[0].error
        assert requests[1].output_ids == healthy
        [again] = llm.generate([a], max_tokens=12, ignore_eos=True, progress=False)
        assert again.num_cached_tokens == 0
        with make_llm(tiny_dir) as fresh:
            assert again.token_ids == ids_of(fresh, [a])[0]


def test_case_32_new_weights_forget_what_the_old_ones_cached(tiny_dir: Path, tmp_path: Path) -> None:
    prompt, other = list(range(33)), save_tiny_model(tmp_path / "other", seed=1)
    with make_llm(other) as llm:
        expected = ids_of(llm, [prompt])
    with make_llm(tiny_dir) as llm:
        assert ids_of(llm, [prompt]) != expected
        llm.load_weights(other)
        assert llm.model_path == other
        [output] = llm.generate([prompt], max_tokens=12, ignore_eos=True, progress=False)
        assert (output.num_cached_tokens, [output.token_ids]) == (0, expected)
        stream = llm.stream("x", max_tokens=9, ignore_eos=True)
        next(stream)
        with pytest.raises(RuntimeError, match="cannot change the weights while 1 requests are under way"):
            llm.load_weights(tiny_dir)
        stream.close()
        with pytest.raises(ValueError, match="not the same kind of model"):
            llm.load_weights(save_tiny_model(tmp_path / "wide", hidden_size=128))


def test_case_88_no_chat_template(tmp_path: Path) -> None:
    with make_llm(save_tiny_model(tmp_path, chat_template=None)) as llm:
        assert len(ids_of(llm, "plain completion works")[0]) == 12
        with pytest.raises(InvalidRequest, match="has no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


# --- settings, memory, life -------------------------------------------------------------------------


def test_unknown_settings_are_named(tiny_dir: Path) -> None:
    with pytest.raises(ValueError, match="unknown engine setting 'num_block', did you mean 'num_blocks'"):
        LLM(tiny_dir, num_block=3)
    with pytest.raises(ValueError, match="attention backend 'cuda' is not known; known: auto, torch, triton"):
        make_llm(tiny_dir, attention_backend="cuda")
    with pytest.raises(ValueError, match="known settings: dtype"):
        EngineConfig.from_fields({"colour": "red"})


def test_the_pool_is_sized_as_told(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_per_block = 2 * 2 * 2 * 32 * 4 * 16
    with LLM(tiny_dir, dtype="fp32", kv_cache_bytes=33 * bytes_per_block + 5) as llm:
        assert llm.num_blocks == 33 and llm.model_path == tiny_dir
        assert "KV pool: 33 blocks of 16 = 528 tokens in fp32" in capsys.readouterr().err
        assert llm._runner.cache.blocks.numel() * 4 == 34 * bytes_per_block  # and the null block
    with pytest.raises(PoolTooSmall, match="31 blocks of 16 hold 496 tokens"):
        LLM(tiny_dir, num_blocks=31, max_model_len=512, verbose=False)
    with pytest.raises(RequestTooLong, match="31 prompt tokens and at least 2 output tokens"), make_llm(tiny_dir, max_model_len=32) as llm:
        llm.generate([list(range(31))], min_tokens=2, max_tokens=2)


def test_the_same_bytes_hold_more_blocks_in_fewer_bits(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of 32: a key or value takes 64 bytes in bf16, 34 in int8, 20 in int4. With heads of 64 it is 1.94 and 3.56 times."""
    num_blocks = {}
    for name in ("bf16", "fp8", "int8", "int4"):
        with LLM(tiny_dir, dtype="bf16", kv_cache_dtype=name, kv_cache_bytes=1_000_000) as llm:
            num_blocks[name] = llm.num_blocks
            assert f"tokens in {name} (1 MiB)" in capsys.readouterr().err
            assert llm.num_blocks == 1_000_000 // llm._runner.cache.bytes_per_block
            assert llm._runner.cache.num_bytes == (llm.num_blocks + 1) * llm._runner.cache.bytes_per_block
    assert num_blocks == {"bf16": 122, "fp8": 244, "int8": 229, "int4": 390}


def test_the_kv_format_is_part_of_a_prefix_and_a_wrong_one_is_refused_before_the_weights_are_loaded(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = set()
    for name in ("auto", "fp32", "int8", "int4"):
        with make_llm(tiny_dir, kv_cache_dtype=name) as llm:
            ids_of(llm, [list(range(33))])
            hashes.add(tuple(llm.engine.scheduler.blocks.cache._by_key))
    assert len(hashes) == 3  # auto is fp32
    monkeypatch.setattr("minserve.llm.Decoder.from_directory", None)
    with pytest.raises(ValueError, match="kv_cache_dtype 'int3' is not known; known: auto, fp32, bf16, fp16, fp8, int8, int4"):
        make_llm(tiny_dir, kv_cache_dtype="int3")
    with pytest.raises(ValueError, match="unknown engine setting 'kv_format'"):
        make_llm(tiny_dir, kv_format="int8")


def test_the_format_of_weights_is_part_of_a_prefix_and_is_said(tiny_dir: Path) -> None:
    hashes, answers = set(), []
    for name, copy in (("auto", "auto"), ("int8", True), ("int8", False), ("int4-g32", True)):
        with make_llm(tiny_dir, weights=name, weight_copy=copy) as llm:
            answers.append(ids_of(llm, [list(range(33))]))
            hashes.add(tuple(llm.engine.scheduler.blocks.cache._by_key)[:1])  # of the block that the prompt fills
            said = llm.describe()
        assert ("; weights in int" in said) == (name != "auto") and ("more by a copy" in said) == (copy is True)
    assert len(hashes) == 3
    assert answers[1] == answers[2]
    with pytest.raises(ValueError, match="weight_copy must be True, False or 'auto', got 'no'"):
        make_llm(tiny_dir, weight_copy="no")


def test_new_weights_come_in_the_format_that_was_asked_for(tiny_dir: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    with make_llm(other, weights="int8") as llm:
        expected = ids_of(llm)
    with make_llm(tiny_dir, weights="int8") as llm:
        assert ids_of(llm) != expected
        llm.load_weights(other)
        assert ids_of(llm) == expected and isinstance(llm._runner.decoder.head, QuantizedLinear)


def test_closing_gives_the_memory_back_and_later_calls_say_so(tiny_dir: Path) -> None:
    def resident_mib() -> float:
        gc.collect()
        return psutil.Process().memory_info().rss / 2**20

    with make_llm(tiny_dir, num_blocks=40_000, max_model_len=512) as llm:  # 625 MiB
        llm._runner.cache.blocks.fill_(0)
        full = resident_mib()
    assert full - resident_mib() > 600
    llm.close()
    for call in (lambda: llm.generate("x"), lambda: next(llm.stream("x")), llm.describe, llm.reset_trace):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    """Widgets' callbacks come from other threads, where torch's gradient mode is on again."""
    expected, results = ids_of(llm), {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: ids_of(llm)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), expected)
    assert torch.is_grad_enabled()


def test_reset_trace_starts_a_new_one(llm: LLM) -> None:
    ids_of(llm)
    old = llm.reset_trace()
    assert len(old.steps) > 0 and len(llm.trace.steps) == 0
    ids_of(llm)
    assert llm.trace.summary().num_requests == len(PROMPTS)


def test_batches_of_any_policy_give_the_same_tokens_and_a_lonely_request_does_not_wait_for_ever(tiny_dir: Path, llm: LLM) -> None:
    expected = ids_of(llm, max_tokens=5)
    for policy in (StaticBatches(2), TimeoutBatches(8, wait_s=0.05)):
        with make_llm(tiny_dir, policy=policy) as batched:
            assert ids_of(batched, max_tokens=5) == expected
            assert batched.generate("alone", max_tokens=2, progress=False)[0].metrics.queue_s is not None
            waited_s = [record.queue_s for record in batched.trace.requests.values()]
            if isinstance(policy, TimeoutBatches):
                assert min(s for s in waited_s if s is not None) >= 0.05  # nobody made the batch full
