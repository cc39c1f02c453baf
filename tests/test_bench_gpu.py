"""`minserve bench --gpu` without a card: the order of sections, what becomes of failures, the file, and the engine's section on a CPU."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from minserve import bench_gpu, cli
from minserve.allocations import Recording
from minserve.allocators import measure_costs
from minserve.bench_gpu import (
    ENGINES,
    GRACE_S,
    SECTIONS_S,
    NoGpu,
    Run,
    check_kernels,
    default_path,
    measure_allocation,
    measure_ceilings,
    measure_engines,
    measure_table,
    new_report,
    require_gpu,
    run_sections,
    start_section,
)
from minserve.gpu_allocation import ALLOCATORS
from minserve.gpu_table import TABLE
from minserve.llm import LLM
from minserve_kernels.gpu_clock import Work
from minserve_kernels.gpu_time import make_works
from tests.tiny_model import save_tiny_model

MACHINE = {"card": "Card X1 (80GB)", "driver": "1.2", "versions": {"torch": "2.11.0+cu130", "triton": "3.6.0"}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "figures" / "gpu.json"


def make_run(path: Path, limit_s: float = 100.0, now: Callable[[], float] = lambda: 0.0) -> Run:
    return Run(path, new_report(MACHINE, "2026-11-30"), limit_s, now)


def saved(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def seconds_by_bytes(work: Work) -> float:
    return work.num_bytes / 2e12


# --- the command ----------------------------------------------------------------------------------


def test_without_a_card_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--gpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("minserve: bench --gpu measures a CUDA or HIP device and torch sees none on ") and error.count("\n") == 1
    with pytest.raises(NoGpu, match="none on my-laptop; without --gpu it measures the CPU"):
        require_gpu(False, "my-laptop")
    require_gpu(True, "my-laptop")


def test_settings_of_an_engine_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--gpu", "--block-size", "32"]) == 1
    assert "takes none, got block_size" in capsys.readouterr().err


def test_model_and_file_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr(bench_gpu, "main", lambda model, json_path: given.append((model, json_path)))
    assert cli.main(["bench", "--gpu", "--model", "here", "--json", "out.json"]) == cli.main(["bench", "--gpu"]) == 0
    assert given == [("here", "out.json"), (None, None)]


def test_all_of_it_takes_less_than_12_minutes() -> None:
    starting_s = 5.0  # of the first process
    assert sum(SECTIONS_S.values()) + len(SECTIONS_S) * GRACE_S + starting_s <= 12 * 60


def test_the_file_is_named_after_card_and_torch() -> None:
    assert default_path(MACHINE).as_posix() == "figures/data/gpu-card-x1-80gb-torch2.11.json"


# --- sections -------------------------------------------------------------------------------------


def test_sections_run_in_order_and_one_that_fails_stops_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[str] = []

    def start(name: str) -> str | None:
        started.append(name)
        found = saved(path)
        found["ceilings"][name] = len(started)  # what a section adds is kept
        bench_gpu.write(path, found)
        return "its process ended with status -11" if name == "checks" else None

    report = run_sections(path, new_report(MACHINE, "2026-11-30"), start)
    assert started == ["ceilings", "checks", "table", "engine", "allocation"] == list(SECTIONS_S)
    assert report == saved(path)
    assert report["ceilings"] == {"ceilings": 1, "checks": 2, "table": 3, "engine": 4, "allocation": 5}
    assert report["failures"] == [{"what": "checks", "reason": "its process ended with status -11"}]
    assert list(report["sections_s"]) == started
    out = capsys.readouterr().out
    assert "FAILED checks: its process ended with status -11" in out and "1 failure, written to" in out
    assert (report["card"], report["driver"], report["date"], report["versions"]["triton"]) == (
        "Card X1 (80GB)",
        "1.2",
        "2026-11-30",
        "3.6.0",
    )
    assert report["seed"] == bench_gpu.SEED


def test_a_section_is_a_process_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], float]] = []

    def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        seen.append((command[1:], timeout))
        if "table" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 3 if "checks" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert start_section("ceilings", Path("f.json"), None) is None
    assert start_section("checks", Path("f.json"), "model") == "its process ended with status 3"
    assert start_section("table", Path("f.json"), None) == f"it was ended after {SECTIONS_S['table'] + GRACE_S:.0f} s"
    assert seen[1] == (["-m", "minserve.bench_gpu", "checks", "f.json", "model"], SECTIONS_S["checks"] + GRACE_S)


def test_a_process_without_a_card_fails_and_leaves_the_file(path: Path) -> None:
    if torch.cuda.is_available():
        pytest.fail("this test is for machines without a card")
    bench_gpu.write(path, new_report(MACHINE, "2026-11-30"))
    before = path.read_text(encoding="utf-8")
    assert start_section("ceilings", path, None) == "its process ended with status 1"
    assert path.read_text(encoding="utf-8") == before


# --- what sections measure ------------------------------------------------------------------------


def test_ceilings_count_a_copy_twice(path: Path) -> None:
    run = make_run(path)
    measure_ceilings(run, make_works(torch.device("cpu")), lambda work: 1e-3)
    assert saved(path)["ceilings"] == {"copy_bytes_per_s": 2 * 2**30 / 1e-3, "matmul_flops_per_s": 2 * 8192**3 / 1e-3}


def test_checks_tell_right_from_wrong_from_broken(path: Path) -> None:
    def broken() -> float:
        raise RuntimeError("illegal address\nand more")

    checks = {"good": lambda: 0.001, "off": lambda: 0.1, "nan": lambda: float("nan"), "wild": lambda: float("inf"), "broken": broken}
    run = make_run(path)
    check_kernels(run, checks, 0.006)
    found = saved(path)
    assert [(check["name"], check["is_right"], check["error"]) for check in found["checks"]] == [
        ("good", True, 0.001),
        ("off", False, 0.1),
        ("nan", False, None),
        ("wild", False, None),
        ("broken", False, None),
    ]
    assert [failure["what"] for failure in found["failures"]] == ["off", "nan", "wild", "broken"]
    assert found["failures"][-1]["reason"] == "RuntimeError: illegal address"


def test_checks_end_when_time_is_up(path: Path) -> None:
    ticks = iter(range(100))
    run = make_run(path, limit_s=2.0, now=lambda: float(next(ticks)))
    check_kernels(run, {name: lambda: 0.0 for name in "abcdef"}, 0.006)
    found = saved(path)
    assert [check["name"] for check in found["checks"]] == ["a"]
    assert found["failures"] == [{"what": "checks", "reason": "time is up, 5 of 6 were not made, the first of them b"}]


def test_the_table_names_only_works_that_there_are(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(path)
    run.report["ceilings"]["copy_bytes_per_s"] = 4e12
    measure_table(run, make_works(torch.device("cpu")), seconds_by_bytes)
    found = saved(path)
    assert [row["name"] for row in found["table"]] == [row.name for row in TABLE]
    values = {row["name"]: row["value"] for row in found["table"]}
    assert None not in values.values() and not found["failures"]
    assert values["RMSNorm with residual"] == pytest.approx(50.0)  # 2 TB/s of 4
    # At one speed for all, times are as bytes: int8 has (128 + 2) / 256 of bf16's, queries and answers aside.
    assert values["int8 KV, 64 x 4k, against bf16"] == pytest.approx(130 / 256, rel=2e-3)
    assert values["int4 KV, 64 x 4k, against bf16"] == pytest.approx(68 / 256, rel=5e-3)
    assert values["int4 weights, 16 rows, against cuBLAS bf16"] == pytest.approx(2 * 128 / (64 + 4), rel=2e-2)
    out = capsys.readouterr().out
    assert out.count("MISSED") + out.count("  pass") + out.count("  goal") >= len(TABLE)


def test_a_kernel_that_fails_costs_its_rows_only(path: Path) -> None:
    def clock(work: Work) -> float:
        if work is works["prefill 8k"]:
            raise RuntimeError("out of resources")
        return seconds_by_bytes(work)

    works, run = make_works(torch.device("cpu")), make_run(path)
    run.report["ceilings"]["copy_bytes_per_s"] = 4e12
    measure_table(run, works, clock)
    failed = [row for row in saved(path)["table"] if row["verdict"] == "failed"]
    assert [row["name"] for row in failed] == ["prefill, causal, D 128, 8k, paged", "prefill, against SDPA flash"]
    assert failed[0]["error"] == "prefill 8k: RuntimeError: out of resources"


def test_a_table_without_ceilings_or_time_says_so(path: Path) -> None:
    run = make_run(path)
    measure_table(run, make_works(torch.device("cpu")), seconds_by_bytes)
    rows = {row["name"]: row for row in saved(path)["table"]}
    assert rows["SwiGLU"]["error"] == "the copy was not measured" and rows["int8 KV, 64 x 4k, against bf16"]["value"] is not None
    run = make_run(path, limit_s=0.0)
    measure_table(run, make_works(torch.device("cpu")), seconds_by_bytes)
    assert {row["verdict"] for row in saved(path)["table"]} == {"failed"}
    assert {failure["reason"] for failure in saved(path)["failures"]} == {"time is up"}


def test_engines_are_compared_on_the_same_requests(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def request(name: str, length: int, max_tokens: int) -> dict[str, Any]:
        return {"id": name, "prompt_ids": [(7 * i + length) % 250 for i in range(length)], "max_tokens": max_tokens}

    def make_llm(settings: Mapping[str, Any]) -> LLM:
        asked.append(settings)
        if settings.get("cuda_graphs") and "kv_cache_dtype" not in settings:
            raise ValueError("cuda_graphs=True needs a CUDA device")
        formats = {"kv_cache_dtype": settings.get("kv_cache_dtype", "auto")}  # on a CPU there is one backend
        return LLM(model, device="cpu", dtype="fp32", num_blocks=40, verbose=False, **formats)

    asked: list[Mapping[str, Any]] = []
    model = save_tiny_model(tmp_path / "tiny")
    sets = {"mixed": [request("m0", 20, 6), request("m1", 5, 9)], "warmup": [request("w0", 8, 2)]}
    monkeypatch.setattr(bench_gpu, "load_workload", lambda: sets)
    measure_engines(make_run(path), make_llm)
    found = saved(path)
    assert asked == [settings for _, settings in ENGINES]
    assert [entry["name"] for entry in found["engine"]] == [name for name, _ in ENGINES if name != "triton, CUDA graphs"]
    assert [failure["what"] for failure in found["failures"]] == ["engine triton, CUDA graphs"]
    first, second, int8, _ = found["engine"]
    assert first["same_tokens_as_first"] == second["same_tokens_as_first"] == 1.0 and int8["kv_cache_dtype"] == "int8"
    assert first["all_at_once"]["out_tok_s"] == pytest.approx(15 / first["all_at_once"]["wall_s"], rel=0.1)
    assert first["alone"]["hit_tokens"] == 0 and first["dtype"] == "float32"


def test_engines_that_come_too_late_are_named(path: Path) -> None:
    measure_engines(make_run(path, limit_s=0.0), lambda settings: pytest.fail("nothing may be begun"))
    assert [failure["reason"] for failure in saved(path)["failures"]] == ["time is up"] * len(ENGINES)


def test_allocators_are_put_to_a_recorded_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch has one allocator: what is asked of it, and what is written down, is as on a card."""
    now = [0.0]

    def costs_of(recording: Recording, batch_size: int, device: torch.device) -> Iterator[dict[str, Any]]:
        for name in ALLOCATORS:
            now[0] += 40.0
            costs = [asdict(cost) for cost in measure_costs(recording, batch_size, device, 1)]
            yield {"allocator": name, "while_busy": False, "costs": costs}

    requests = [{"id": str(n), "prompt_ids": [n] * (5 + 9 * n), "max_tokens": 4} for n in range(3)]
    monkeypatch.setattr(bench_gpu, "load_workload", lambda: {"mixed": requests})
    with LLM(save_tiny_model(tmp_path / "tiny"), device="cpu", dtype="fp32", num_blocks=40, verbose=False) as llm:
        measure_allocation(make_run(path, 70.0, lambda: now[0]), llm, costs_of)
    found = saved(path)
    assert [entry["allocator"] for entry in found["allocation"]["allocators"]] == ["caching", "emptied after each step"]
    assert found["failures"] == [{"what": "allocation", "reason": "time is up after emptied after each step"}]
    assert found["allocation"]["load"]["num_requests"] == 3 and found["allocation"]["load"]["num_blocks_taken"] == 1 + 2 + 2
    out = capsys.readouterr().out
    assert "caching, between steps\n  pool " in out and "us/call" in out
