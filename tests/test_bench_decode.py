"""Formats side by side: what is run, in which order, and what is made of the times. Times themselves are not asserted."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from minserve import bench_decode, cli
from minserve.bench_decode import PROMPT_TOKENS, WARM_STEPS, decode_step_s, measure, open_format, paces, table
from minserve.llm import LLM
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_only_decode_steps_are_timed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_format(str(model), "int4", "fp32", 64) as llm:
        assert (llm.config.weights, llm.config.dtype) == ("int4", "fp32")
        read: list[int] = []  # the clock: how many steps have been run
        clock = SimpleNamespace(perf_counter=lambda: read.append(len(llm.trace.steps)) or float(read[-1]))
        monkeypatch.setattr(bench_decode, "time", clock)
        assert decode_step_s(llm, 3, num_steps=5) == 1.0  # a second a step, by that clock
        first, last = read
        timed = list(llm.trace.steps)[first:last]
        assert len(timed) == 5
        assert all([count for _, count in step.tokens.values()] == [1, 1, 1] for step in timed)
        assert first == 1 + WARM_STEPS - 1
        assert not llm.engine.has_work and llm.engine.scheduler.blocks.num_used_blocks == 0


def test_formats_take_turns_and_each_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[object, int]] = []
    monkeypatch.setattr(bench_decode, "decode_step_s", lambda llm, size, _: order.append((llm, size)) or 0.5)
    names = dict.fromkeys("abc")
    found = measure({name: name for name in names}, [1], num_rounds=3)  # type: ignore[arg-type]
    assert "".join(str(llm) for llm, _ in order) == "bcacababc"
    assert found == {(name, 1): [0.5] * 3 for name in names}


def test_ratios_are_of_runs_within_a_round(model: Path) -> None:
    with open_format(str(model), "fp32", "fp32", 64) as plain, open_format(str(model), "int8", "fp32", 64) as coded:
        llms: dict[str, LLM] = {"fp32": plain, "int8": coded}
        seconds = {("fp32", 2): [1.0, 2.0, 6.0], ("int8", 2): [0.5, 2.0, 2.0]}
        first, second = paces(llms, seconds, bytes_per_s=1e6)
    assert (first.step_ms, first.tokens_per_s, first.ratio) == (2000.0, 1.0, 1.0)
    assert (second.step_ms, second.tokens_per_s, second.ratio) == (2000.0, 1.0, 2.0)  # 2, 1 and 3 in the rounds
    assert 0 < second.floor_share < first.floor_share < 1
    assert table([first, second]).splitlines()[-1].split()[:3] == ["2", "1.0", "1.00"]


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decode, "measure_read_bytes_per_s", lambda: 1e9)
    monkeypatch.setattr(bench_decode, "decode_step_s", lambda llm, size, _: 0.001 * size)
    path = tmp_path / "decode.json"
    assert cli.main(["bench", "--decode", "--model", str(model), "--weights", "bf16,int4", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "memory is read at 1.0 GB/s" in out and "weights in int4+int8" in out
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert [(pace["weights"], pace["batch_size"]) for pace in saved["paces"]][:2] == [("bf16", 1), ("int4", 1)]
    assert len(saved["paces"]) == 2 * 6 and saved["bytes_per_s"] == 1e9 and set(saved["engines"]) == {"bf16", "int4"}
    assert PROMPT_TOKENS + 64 <= 512
