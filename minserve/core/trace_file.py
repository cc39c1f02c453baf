"""A recorded run as a file: JSON that can be read back and replayed, and events for a trace viewer.

Why: a run that was slow or wrong on one machine is looked at on another, step by step, with the same
pictures. The file holds what the records hold and nothing else, so it is read without the engine that wrote
it.

Invariant: reading what was written gives equal records.

Taught in notebook 06.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minserve.core.records import Decision, RequestRecord, StepRecord
from minserve.core.snapshot import RequestState, Snapshot

FORMAT = "minserve-trace-1"


def write_records(
    path: str | Path,
    requests: Iterable[RequestRecord],
    steps: Iterable[StepRecord],
    decisions: Iterable[Decision],
    snapshots: Iterable[Snapshot],
    after: Snapshot | None,
    num_refused: int,
) -> None:
    """Write a run as JSON. Makes the folder."""
    plain = {
        "format": FORMAT,
        "num_refused": num_refused,
        "requests": [asdict(record) for record in requests],
        "steps": [asdict(record) for record in steps],
        "decisions": [asdict(decision) for decision in decisions],
        "snapshots": [asdict(snapshot) for snapshot in snapshots],
        "after": after and asdict(after),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(plain), encoding="utf-8")


def read_records(path: str | Path) -> dict[str, Any]:
    """The records of a file that `write_records` wrote, by the names of its arguments.

    Raises ValueError for a file of another kind.
    """
    try:
        plain = json.loads(Path(path).read_text(encoding="utf-8"))
        found = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
        if found != FORMAT:
            raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
        return {
            "requests": [RequestRecord(**record) for record in plain["requests"]],
            "steps": [_step(record) for record in plain["steps"]],
            "decisions": [Decision(**decision) for decision in plain["decisions"]],
            "snapshots": [_snapshot(snapshot) for snapshot in plain["snapshots"]],
            "after": plain["after"] and _snapshot(plain["after"]),
            "num_refused": plain["num_refused"],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of minserve: {type(error).__name__}: {error}") from error


def _step(plain: Mapping[str, Any]) -> StepRecord:
    tokens = {request_id: (start, count) for request_id, (start, count) in plain["tokens"].items()}
    names = {name: tuple(plain[name]) for name in ("preempted", "finished")}
    return StepRecord(**{**plain, **names, "tokens": tokens})


def _snapshot(plain: Mapping[str, Any]) -> Snapshot:
    """JSON has lists where a snapshot has tuples."""
    queues = {name: tuple(map(_request_state, plain[name])) for name in ("running", "waiting")}
    ids = {name: tuple(plain[name]) for name in ("ref_counts", "free", "idle", "cached")}
    copies = tuple((source, target) for source, target in plain["copies"])
    return Snapshot(**{**plain, **queues, **ids, "copies": copies})


def _request_state(plain: Mapping[str, Any]) -> RequestState:
    return RequestState(**{**plain, "block_ids": tuple(plain["block_ids"])})


# --- for ui.perfetto.dev and chrome://tracing -----------------------------------------------------


def write_perfetto(path: str | Path, requests: Iterable[str], steps: Iterable[StepRecord]) -> None:
    """One track a request, counters for blocks and queues."""
    events = perfetto_events(requests, steps)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def perfetto_events(requests: Iterable[str], steps: Iterable[StepRecord]) -> list[dict[str, Any]]:
    """Chrome trace events: a slice per request (by id) and step, counters per step; times in microseconds."""
    tracks = {request_id: number for number, request_id in enumerate(requests, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": request_id}}
        for request_id, tid in tracks.items()
    ]
    for step in steps:
        time = {"pid": 1, "ts": step.start_s * 1e6}
        for request_id, (start, count) in step.tokens.items():
            args = {"step": step.step, "start": start, "tokens": count}
            slice_ = {"ph": "X", "name": f"{count} token{'s'[: count > 1]}", "tid": tracks.get(request_id, 0)}
            events.append({**slice_, **time, "dur": step.elapsed_s * 1e6, "args": args})
        clean = step.num_free_blocks - step.num_idle_blocks
        blocks = {"used": step.num_used_blocks, "idle": step.num_idle_blocks, "clean": clean}
        queues = {"running": step.num_running, "waiting": step.num_waiting}
        events.append({"ph": "C", "name": "KV blocks", **time, "args": blocks})
        events.append({"ph": "C", "name": "requests", **time, "args": queues})
        events.append({"ph": "C", "name": "empty slots", **time, "args": {"empty": step.num_empty_slots}})
    return events
