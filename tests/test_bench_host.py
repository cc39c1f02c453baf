"""Clocks around the engine: what they count, that parts are exclusive and sum to the whole, and that nothing of them is left behind."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minserve import bench_host, cli
from minserve.bench_host import PartClock, callables, clock_run, clocks_around, measure_clock_us, profile_run, record_run, serve, step_parts
from minserve.host_record import PARTS, read_record
from minserve.llm import LLM
from minserve.model.tokenizer import Detokenizer
from tests.tiny_model import save_tiny_model


def request(name: int, length: int, max_tokens: int) -> dict[str, Any]:
    return {"id": f"r{name}", "prompt_ids": [(7 * i + name) % 250 for i in range(length)], "max_tokens": max_tokens}


REQUESTS = [request(name, 5 + 9 * name, 6 + name) for name in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="fp32", num_blocks=64, verbose=False) as llm:
        yield llm


def test_parts_are_exclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(bench_host, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = PartClock()
    pool = clock.clocked("pool", "grow", lambda: wait(1.0))
    policy = clock.clocked("policy", "order", lambda: wait(0.5))

    def schedule() -> None:
        wait(2.0)
        pool()
        policy()
        pool()

    planned = clock.clocked("schedule", "schedule", schedule)

    def step() -> None:
        wait(0.25)
        planned()

    engine_step = clock.clocked("rest", "step", step, marks=True)
    engine_step()
    wait(10.0)  # between two steps: of nobody's part
    engine_step()
    assert clock.seconds == {"pool": 4.0, "policy": 1.0, "schedule": 4.0, "rest": 0.5}
    assert clock.within_s == {"grow": 4.0, "order": 1.0, "schedule": 9.0, "step": 9.5} and clock.num_calls == 10
    first, second = clock.per_step_s(now[0])
    assert first == dict.fromkeys(PARTS, 0.0) | {"pool": 2.0, "policy": 0.5, "schedule": 2.0, "rest": 10.25}
    assert second["rest"] == 0.25


def test_a_call_that_raises_is_clocked_and_raises() -> None:
    clock = PartClock()
    with pytest.raises(ZeroDivisionError):
        clock.clocked("pool", "grow", lambda: 1 / 0)()
    assert clock.num_calls == 1 and clock.seconds["pool"] > 0


def test_clocks_are_taken_off_again(llm: LLM) -> None:
    policy, push = llm.engine.scheduler.policy, Detokenizer.push
    before = [(vars(owner).get(name), getattr(owner, name)) for _, owner, name in callables(llm)]
    with pytest.raises(KeyError), clocks_around(llm):
        assert Detokenizer.push is not push
        raise KeyError
    assert [(vars(owner).get(name), getattr(owner, name)) for _, owner, name in callables(llm)] == before
    assert llm.engine.scheduler.policy is policy and Detokenizer.push is push


def test_clocked_or_not_a_run_is_the_same(llm: LLM) -> None:
    plain, _ = serve(llm, REQUESTS, 2)
    plain_tokens = [output.token_ids for output in plain]
    llm.reset_trace()
    with clocks_around(llm) as clock:
        clocked, seconds = serve(llm, REQUESTS, 2)
    assert [output.token_ids for output in clocked] == plain_tokens
    assert [len(tokens) for tokens in plain_tokens] == [6, 7, 8, 9]
    assert max(step.num_running for step in llm.trace.steps) <= 2 and llm.engine.scheduler.config.max_running == 64
    assert set(clock.seconds) == set(PARTS) and sum(clock.seconds.values()) < seconds
    assert len(clock.marks) == len(llm.trace.steps)


def test_steps_of_decodes_alone(llm: LLM) -> None:
    clock, steps = clock_run(llm, REQUESTS, 2)
    decodes = [step for step in llm.trace.steps if sorted(n for _, n in step.tokens.values()) == [1, 1]]
    assert [kind for kind, _ in steps].count("decode") == len(decodes) > 3
    every, decode = step_parts([(clock, steps)], 2)
    assert (every.kind, every.num_steps, decode.kind, decode.num_steps) == ("all", len(steps), "decode", len(decodes))
    assert every.step_ms == pytest.approx(sum(every.parts_ms.values())) and all(ms >= 0 for ms in every.parts_ms.values())
    assert every.num_clocked == clock.num_calls / len(steps)
    only = [(clock, [(kind, parts) for kind, parts in steps if kind == "other"])]
    assert [parts.kind for parts in step_parts(only, 2)] == ["all"]


def test_a_recording_is_of_a_run_without_clocks(llm: LLM) -> None:
    recording = record_run(llm, REQUESTS, 2)
    assert recording.run_s > 0
    assert [len(ids) for ids in recording.prompts.values()] == [5, 14, 23, 32]
    assert sum(len(ids) for ids in recording.outputs.values()) == 6 + 7 + 8 + 9
    assert recording.load(2).num_tokens == sum(len(r["prompt_ids"]) + r["max_tokens"] - 1 for r in REQUESTS)


def test_a_profiler_names_the_same_callables(llm: LLM) -> None:
    found = profile_run(llm, REQUESTS, 4)
    assert found["clocked"].keys() == found["profiled"].keys()
    assert all(0 < share < 1 for way in ("clocked", "profiled") for share in found[way].values())


def test_what_a_clock_costs_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))  # a second each time that the clock is read
    monkeypatch.setattr(bench_host, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    assert measure_clock_us(num_calls=10) == 1e6 * 2  # a clocked call reads it twice


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "host.json"
    monkeypatch.setattr(bench_host, "load_workload", lambda: {"mixed": REQUESTS, "warmup": REQUESTS[:1]})
    monkeypatch.setattr(bench_host, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(bench_host, "NUM_ROUNDS", 1)
    assert cli.main(["bench", "--host", "--model", str(model), "--dtype", "fp32", "--json", str(path)]) == 0
    record = read_record(path)
    assert [(step.batch_size, step.kind) for step in record.steps] == [(1, "all"), (1, "decode"), (2, "all"), (2, "decode")]
    assert [load.batch_size for load in record.loads] == [1, 2] and "KV pool" in record.engine
    assert all(cost.calls_per_step > 0 for cost in record.costs) and record.cost(2, "pool").written_ms_per_step > 0
    out = capsys.readouterr().out
    assert "host in all" in out and "moved when it grows" in out and "For 5 % or 15 % of it" in out and "by cProfile: schedule" in out


def test_an_engine_on_a_card_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.runner.decoder, "device", SimpleNamespace(type="cuda", __str__=lambda: "cuda:0"))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="as on a CPU; this engine is on"):
        bench_host.measure(llm, [1])
