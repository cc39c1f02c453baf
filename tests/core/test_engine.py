"""The loop of serving: what is refused, what goes wrong in a step, and what time does."""

from typing import Any

import pytest

from minserve.core.batch import ScheduledBatch, StepResult
from minserve.core.clock import VirtualClock, WallClock
from minserve.core.engine import Arrival, Engine, EngineStalled, ModelLimits
from minserve.core.request import FinishReason, InvalidRequest, Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from tests.oracle import (
    OracleRunner,
    ScriptedRunner,
    add_one,
    assert_idle,
    before_steps,
    cold_run,
    is_cold,
    make_engine,
    oracle_tokens,
    run_checked,
    step_checked,
)

# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_ids", "options", "words"),
    [
        ([], {}, "request R0: the prompt is empty, at least 1 token is needed"),
        ([5, -1], {}, "request R0: prompt token 1 is -1, the model knows ids 0 to 99"),
        ([5, 100], {}, "request R0: prompt token 1 is 100, the model knows ids 0 to 99"),
        ([5.0], {}, "request R0: prompt token 0 is 5.0, the model knows ids 0 to 99"),
        ([True], {}, "request R0: prompt token 0 is True, the model knows ids 0 to 99"),
        ("text", {}, "request R0: prompt token 0 is 't', the model knows ids 0 to 99"),
        ([5], {"priority": 0.5}, "request R0: priority must be an integer, got 0.5"),
        ([5], {"request_id": 7}, "request id and salt must be strings, got 7 and ''"),
        ([5], {"request_id": ["R"]}, "request id and salt must be strings"),
        ([5], {"salt": None}, "request id and salt must be strings, got 'R0' and None"),
        ([5], {"arrival_s": float("nan")}, "request R0: arrival_s must be a finite number, got nan"),
        ([5], {"params": SamplingParams(min_tokens=20)}, "1 prompt tokens and at least 20 output tokens make 21, max_model_len is 20"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(prompt_ids: Any, options: dict[str, Any], words: str):
    engine = make_engine(16, 4, vocab_size=100, max_model_len=20)
    with pytest.raises(InvalidRequest, match=words):
        engine.add(prompt_ids, **options)
    assert not engine.has_work and not engine.trace.requests and engine.trace.num_refused == 1
    assert engine.run([(0.0, {"prompt_ids": [5], "params": SamplingParams(max_tokens=3)})])[0].request_id == "R0"
    assert_idle(engine)


def test_an_id_in_use_is_refused_and_free_again_when_its_request_has_ended():
    engine = make_engine(16, 4)
    first = add_one(engine, [1, 2], 3, request_id="mine")
    with pytest.raises(InvalidRequest, match="request id 'mine' is already in use"):
        add_one(engine, [3, 4], 3, request_id="mine")
    run_checked(engine)
    second = add_one(engine, [3, 4], 3, request_id="mine")
    run_checked(engine)
    assert is_cold(first, 3) and is_cold(second, 3)


def test_a_name_that_looks_like_ours_is_in_nobodys_way():
    engine = make_engine(16, 4)
    add_one(engine, [1, 2], 3, request_id="R1")
    names = [engine.add([3], SamplingParams(max_tokens=2, n=n))[0].request_id for n in (1, 2, 1)]
    assert names == ["R2", "R3", "R4"]
    run_checked(engine)


def test_samples_are_named_after_the_first_one_and_share_its_seed():
    engine = make_engine(16, 4)
    samples = engine.add([1, 2], SamplingParams(max_tokens=2, n=3), salt="s", priority=4)
    assert [s.request_id for s in samples] == ["R0", "R0#1", "R0#2"]
    assert [s.sample_index for s in samples] == [0, 1, 2] and len({s.seed for s in samples}) == 1
    assert [s.parent for s in samples] == [None, samples[0], samples[0]]
    assert all((s.salt, s.priority) == ("s", 4) for s in samples)
    assert add_one(engine, [1, 2], 2).request_id == "R3"


def test_the_models_end_tokens_end_a_request_unless_it_says_otherwise():
    prompt = range(9)
    tokens = oracle_tokens(prompt, 8)
    end = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])  # a token that comes for the first time
    engine = make_engine(64, 4, eos_ids=frozenset({tokens[end]}))
    stopped = add_one(engine, prompt, 8)
    [on] = engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    [own] = engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=[tokens[1]]))
    [late] = engine.add(prompt, SamplingParams(max_tokens=8, min_tokens=end + 2))
    run_checked(engine)
    assert (stopped.output_ids, stopped.finish_reason) == (tokens[: end + 1], "stop")
    assert (on.output_ids, on.finish_reason) == (tokens, "length")
    assert (own.output_ids, own.finish_reason) == (tokens[: tokens.index(tokens[1]) + 1], "stop")
    assert late.num_output_tokens > end + 1


def test_without_max_tokens_a_request_goes_as_far_as_the_model_or_the_pool():
    for num_blocks, max_model_len, room in ((64, 20, 11), (4, 1_000, 8)):
        engine = make_engine(num_blocks, 4, max_model_len=max_model_len)
        [request] = engine.add(range(9))
        run_checked(engine)
        assert request.output_ids == oracle_tokens(range(9), room) and request.finish_reason == "length"


# --- what goes wrong in a step ----------------------------------------------------------------------


def fail_once(engine: Engine, error: BaseException) -> None:
    def hook(batch: ScheduledBatch) -> None:
        before_steps(engine)
        raise error

    before_steps(engine, hook)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), AssertionError("ours")], ids=repr)
def test_a_step_that_raises_ends_its_requests_and_the_others_go_on(error: BaseException):
    engine = make_engine(16, 4, max_running=2)
    requests = [add_one(engine, range(20 * i, 20 * i + 9), 4) for i in range(4)]
    step_checked(engine)
    fail_once(engine, error)
    with pytest.raises(type(error)):
        engine.step()
    engine.scheduler.check()
    words = f"{type(error).__name__}: {error}"
    assert [(r.finish_reason, r.error) for r in requests] == [("error", words)] * 2 + [(None, None)] * 2
    assert engine.scheduler.blocks.num_free_blocks == 16
    assert engine.trace.steps[-1].finished == ("R0", "R1") and engine.trace.requests["R0"].finish_reason == "error"
    again = add_one(engine, range(9), 4)
    run_checked(engine)
    assert again.num_cached_tokens == 0  # nothing of the failed step is found
    assert is_cold(requests[2], 4) and is_cold(requests[3], 4) and is_cold(again, 4)
    assert_idle(engine)


def test_a_runner_that_always_raises_runs_out_of_requests():
    engine = make_engine(16, 4, max_running=1)
    requests = [add_one(engine, range(9), 4) for _ in range(3)]

    def hook(batch: ScheduledBatch) -> None:
        raise RuntimeError("no")

    before_steps(engine, hook)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            engine.run()
    assert [r.finish_reason for r in requests] == ["error"] * 3
    assert_idle(engine)


class ForgetfulRunner(OracleRunner):
    """Answers one row too few."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        result = super().execute(batch)
        return StepResult(dict(list(result.token_ids.items())[:-1]), elapsed_s=1.0)


def test_a_runner_that_forgets_a_row_leaves_no_half_applied_step():
    engine = make_engine(16, 4, runner=ForgetfulRunner(16, 4))
    requests = [add_one(engine, range(20 * i, 20 * i + 9), 4) for i in range(2)]
    with pytest.raises(KeyError):
        engine.step()
    assert [r.finish_reason for r in requests] == ["error"] * 2
    assert_idle(engine)
    assert engine.scheduler.blocks.num_idle_blocks == 0


def test_an_error_for_one_row_lets_its_neighbours_share_what_is_sound():
    """Three requests share a prefix; one of them is NaN later on. The others keep their blocks, and are right."""
    engine = make_engine(64, 4)
    requests = [add_one(engine, [*range(12), 50 + i], 6) for i in range(3)]
    step_checked(engine)
    runner = engine.runner
    assert isinstance(runner, OracleRunner)
    runner.errors["R1"] = "NaN"
    output = step_checked(engine)
    assert output.finished == (requests[1],) and [r.request_id for r, _ in output.tokens] == ["R0", "R2"]
    again = add_one(engine, [*range(12), 99], 3)
    run_checked(engine)
    assert again.num_cached_tokens == 0
    assert is_cold(requests[0], 6) and is_cold(requests[2], 6) and is_cold(again, 3)
    assert_idle(engine)


def test_finish_from_outside_ends_one_request():
    engine = make_engine(64, 4)
    a, b = add_one(engine, range(9), 6), add_one(engine, range(9), 6)
    step_checked(engine)
    engine.finish(a, FinishReason.STOP)
    engine.finish(a, FinishReason.ABORT)
    assert a.finish_reason is FinishReason.STOP and engine.trace.requests["R0"].finish_reason == "stop"
    run_checked(engine)
    assert a.num_output_tokens == 1 and is_cold(b, 6)


# --- time and the run -------------------------------------------------------------------------------


def test_run_waits_for_arrivals_and_returns_those_that_ended():
    engine = make_engine(64, 4)
    params = SamplingParams(max_tokens=2)
    arrivals = [(10.0, {"prompt_ids": [7, 8], "params": params}), (0.0, {"prompt_ids": [1, 2, 3], "params": params, "request_id": "first"})]
    finished = engine.run(arrivals)
    assert [r.request_id for r in finished] == ["first", "R1"] and all(is_cold(r, 2) for r in finished)
    assert [(s.start_s, s.end_s) for s in engine.trace.steps] == [(0.0, 1.0), (1.0, 2.0), (10.0, 11.0), (11.0, 12.0)]
    assert [r.arrival_s for r in finished] == [0.0, 10.0]


def test_run_counts_refused_arrivals_and_serves_the_others():
    engine = make_engine(64, 4, max_model_len=10)
    arrivals: list[tuple[float, dict[str, Any]]] = [(float(i), {"prompt_ids": range(n)}) for i, n in enumerate([0, 5, 10, 9])]
    finished = engine.run(arrivals)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in finished] == [(9, 1), (5, 5)]
    assert engine.trace.num_refused == 2 and len(engine.trace.requests) == 2
    assert engine.run([(0.0, {"prompt_ids": []})]) == []  # nothing but a refusal: the run ends


def test_an_arrival_in_the_middle_of_a_step_is_seen_after_it():
    engine = make_engine(64, 4)
    params = SamplingParams(max_tokens=2)
    engine.run([(0.0, {"prompt_ids": [1], "params": params}), (0.5, {"prompt_ids": [2], "params": params})])
    record = engine.trace.requests["R1"]
    assert (record.arrival_s, record.scheduled_s, record.queue_s, record.ttft_s) == (0.5, 1.0, 0.5, 1.5)


def test_a_stalled_run_waits_for_the_next_arrival_and_then_says_so():
    engine = make_engine(4, 4, seconds_per_step=0.0)
    blocks = engine.scheduler.blocks
    holder = add_one(make_engine(4, 4), range(4), 1)
    blocks.start(holder, blocks.find_prefix(holder))
    blocks.grow(holder, 4)
    stuck = {"prompt_ids": range(14), "params": SamplingParams(max_tokens=2)}
    small = {"prompt_ids": range(50, 53), "params": SamplingParams(max_tokens=2), "priority": -1}
    with pytest.raises(EngineStalled, match=r"1 requests wait and nothing can run \(3 of 4 blocks free: R0 has 14 tokens\)"):
        engine.run([(0.0, stuck), (5.0, small)])
    assert engine.clock.now() == 5.0
    assert [r.finish_reason for r in engine.scheduler.find("R0")] == [None]
    assert engine.trace.requests["R1"].finish_reason == "length"


def test_a_step_with_nothing_to_do_does_nothing():
    engine = make_engine(4, 4)
    output = step_checked(engine)
    assert output.tokens == () and output.finished == () and not engine.has_work
    assert engine.run() == []


def test_the_wall_clock_drives_the_same_engine():
    limits, blocks = ModelLimits(100, 10_000), make_engine(16, 4).scheduler.blocks
    engine = Engine(Scheduler(SchedulerConfig(), blocks), OracleRunner(16, 4), WallClock(), limits)
    [request] = engine.run([(0.01, {"prompt_ids": range(9), "params": SamplingParams(max_tokens=3)})])
    assert is_cold(request, 3)
    record = engine.trace.requests["R0"]
    assert record.arrival_s == 0.01 and 0.01 <= record.token_times_s[0] <= record.token_times_s[-1] < 1.5  # not the runner's 3 s
    assert isinstance(engine.clock, WallClock) and not isinstance(engine.clock, VirtualClock)


def test_case_136_outputs_do_not_depend_on_the_budget():
    outputs = []
    for token_budget in (8, 16, 24, 64, 100, 384, 1_000):
        engine = make_engine(2_000, 16, token_budget=token_budget)
        requests = [add_one(engine, range(100 * n, 101 * n), 20) for n in range(3, 91, 3)]
        run_checked(engine)
        outputs.append([r.output_ids for r in requests])
    assert all(o == outputs[0] for o in outputs)
    assert outputs[0] == [oracle_tokens(range(100 * n, 101 * n), 20) for n in range(3, 91, 3)]


# --- the stand-ins themselves -----------------------------------------------------------------------


def test_the_oracle_by_hand():
    """Prompt 5, 3: v = 12, then 31 * 12 + 3 + 7 = 382; 12 + 2 * 382 = 776 = 3 * 211 + 143."""
    assert oracle_tokens([5, 3], 1) == [143]
    assert oracle_tokens([5, 3], 2) == [143, (776 + 3 * ((31 * 382 + 143 + 7) % 1_000_003)) % 211]
    for prompt in ([5, 3], list(range(40))):
        assert cold_run(prompt, 12) == oracle_tokens(prompt, 12)


def test_scripts_are_per_request_or_for_all():
    engine = make_engine(16, 4, runner=ScriptedRunner([5, 6, 7]))
    assert [add_one(engine, [1], 3), engine.run()][0].output_ids == [5, 6, 7]
    engine = make_engine(16, 4, runner=ScriptedRunner({"a": [1, 2], "b": [3, 4]}))
    a, b = add_one(engine, [9], 2, request_id="a"), add_one(engine, [9], 2, request_id="b")
    engine.run()
    assert (a.output_ids, b.output_ids) == ([1, 2], [3, 4])


def test_the_end_of_a_request_may_bring_further_arrivals():
    """A client who thinks for 2.5 s and asks again, twice; each answer takes 2 steps of 1 s."""
    engine = make_engine(64, 4)
    arguments = {"prompt_ids": range(3), "params": SamplingParams(max_tokens=2)}

    def ask_again(request: Request, now_s: float) -> list[Arrival]:
        return [(now_s + 2.5, arguments)] if request.request_id != "R2" else []

    finished = engine.run([(0.0, arguments)], then=ask_again)
    assert [r.request_id for r in finished] == ["R0", "R1", "R2"]
    assert [record.scheduled_s for record in engine.trace.requests.values()] == [0.0, 4.5, 9.0]
