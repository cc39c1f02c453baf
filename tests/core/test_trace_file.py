"""A run as a file: what was written comes back, and other files are refused."""

import json
from pathlib import Path

import pytest

from minserve.core.trace import Trace
from minserve.core.trace_file import perfetto_events
from tests.core.timed import busy_run
from tests.oracle import add_one, make_engine, run_checked


def test_a_run_comes_back_as_it_was(tmp_path: Path):
    trace = busy_run(keep_snapshots=True).trace
    trace.num_refused = 3
    trace.save(tmp_path / "runs" / "한글.json")
    loaded = Trace.load(tmp_path / "runs" / "한글.json")
    assert len(loaded.steps) == len(loaded.snapshots) > 20 and any(s.copies or s.idle for s in loaded.snapshots)
    assert (loaded.steps, loaded.decisions, loaded.requests) == (trace.steps, trace.decisions, trace.requests)
    assert (loaded.snapshots, loaded.after, loaded.num_refused) == (trace.snapshots, trace.after, 3)
    assert loaded.summary() == trace.summary() and loaded.why("R7") == trace.why("R7") != []


def test_a_run_without_snapshots_comes_back_too(tmp_path: Path):
    trace = busy_run().trace
    trace.save(tmp_path / "run.json")
    loaded = Trace.load(tmp_path / "run.json")
    assert loaded.steps == trace.steps and not loaded.snapshots and loaded.after is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no JSON", "JSONDecodeError"),
        ("[1, 2]", "its format is 'list'"),
        ('{"format": "minserve-trace-0"}', "its format is 'minserve-trace-0', not 'minserve-trace-1'"),
        ('{"format": "minserve-trace-1", "requests": []}', "KeyError: 'steps'"),
        ('{"format": "minserve-trace-1", "requests": [{"name": "R0"}]}', "unexpected keyword argument 'name'"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str, words: str):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="other.json is not a trace of minserve") as error:
        Trace.load(path)
    assert words in str(error.value)


def test_perfetto_export_loads_and_agrees_with_the_trace(tmp_path: Path):
    engine = busy_run()
    path = tmp_path / "한글 trace.json"
    engine.trace.save_perfetto(str(path))
    loaded = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    events = loaded["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(names.values()) == sorted(engine.trace.requests)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(step.tokens) for step in engine.trace.steps)
    steps = {step.step: step for step in engine.trace.steps}
    for e in slices:
        step = steps[e["args"]["step"]]
        assert step.tokens[names[e["tid"]]] == (e["args"]["start"], e["args"]["tokens"])
        assert (e["ts"], e["dur"]) == pytest.approx((step.start_s * 1e6, step.elapsed_s * 1e6))
        assert e["name"] == ("1 token" if e["args"]["tokens"] == 1 else f"{e['args']['tokens']} tokens")
    by_track: dict[int, float] = {}
    for e in slices:  # slices of one track do not overlap
        assert e["ts"] >= by_track.get(e["tid"], 0.0) - 1e-3
        by_track[e["tid"]] = e["ts"] + e["dur"]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "KV blocks"]
    assert [e["args"]["used"] for e in counters] == [step.num_used_blocks for step in engine.trace.steps]
    assert len([e for e in events if e["ph"] == "C" and e["name"] == "requests"]) == len(engine.trace.steps)
    assert loaded["displayTimeUnit"] == "ms"


def test_perfetto_of_a_trace_that_has_forgotten_a_request():
    engine = make_engine(64, 4)
    engine.trace = Trace(max_records=2)
    for number in range(4):
        add_one(engine, range(number + 2), 2)
        run_checked(engine)
    events = perfetto_events(engine.trace.requests, engine.trace.steps)
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["R2", "R3"]
    assert {e["tid"] for e in events if e["ph"] == "X"} <= {0, 1, 2}
