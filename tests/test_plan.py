"""`minserve plan`: what it prints and writes, from the command line, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minserve import cli

A100 = ["--device", "a100-80gb", "--context", "2048"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def titles(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("# ") and not line.startswith("#   ")]


def test_a_13b_on_an_a100(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", "llama-2-13b", *A100)
    for line in (
        "llama-2-13b in bf16, KV in bf16, on 1 x a100-80gb",
        "  weights        26.03 GB  32.5%  13.0 billion parameters",
        "  KV             42.97 GB  53.7%  3,278 blocks of 16 = 52,448 tokens",
        "  total          80.00 GB 100.0%",
        "requests that fit: 25 of 2,048 tokens (1.68 GB each)",
        "  of length      1k   2k   4k   8k  16k  32k  64k 128k",
        "  fit            51   25   12    6    3    1    0    0",
        "batch: 25, limited by memory (step allows 256)",
    ):
        assert line in out.splitlines()
    assert "vllm" not in out


def test_targets_price_and_experts(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", "qwen3-30b-a3b", "--device", "h100", "--slo-ttft", "500", "--slo-tpot", "20", "--price-per-hour", "3.6")
    assert "30.5 billion parameters (3.3 for a token)" in out
    assert "batch for TTFT 500 ms and TPOT 20 ms: " in out and "limited by TPOT (memory allows " in out
    rate = float(out.split("throughput  ")[1].split(" ")[0].replace(",", ""))
    price = float(out.split("cost        ")[1].split(" ")[0])
    assert price == pytest.approx(3.6 / 3600 / rate * 1e6, rel=0.01)
    assert "if prompts were computed elsewhere, TPOT alone would allow " in out


def test_a_target_that_cannot_be_met_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", "llama-2-13b", *A100, "--slo-tpot", "5")
    assert "batch for TPOT 5 ms: none. A single request by itself has TTFT 224 ms, TPOT 17.7 ms: TPOT cannot be met here" in out


def test_what_does_not_fit_is_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "llama-3.1-70b", *A100]) == 1
    error = capsys.readouterr().err
    assert error.startswith("minserve: llama-3.1-70b with a request of 2,048 tokens does not fit on 1 x a100-80gb: 90% of 80 GB")
    assert "It would fit with --weights int4 (40 requests), or --tensor-parallel 4 (201 requests)." in error and error.count("\n") == 1


def test_the_output_layer_has_as_many_bits_as_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = {}
    for bits in ("8", "16"):
        results = tmp_path / f"{bits}.json"
        run(capsys, "--model", "llama-3.1-8b", *A100, "--weights", "gptq-int4-g128", "--head-bits", bits, "--json", str(results))
        held[bits] = json.loads(results.read_text(encoding="utf-8"))
    assert [held[bits]["head_bits"] for bits in ("8", "16")] == [8, 16] and held["8"]["weights"] == "gptq-int4-g128"
    table = 128_256 * 4096
    assert held["16"]["bytes"]["weights"] - held["8"]["bytes"]["weights"] == table - 2 * 128_256


@pytest.mark.parametrize(("name", "command"), [("vllm", "vllm serve MODEL"), ("llamacpp", "llama-server -m MODEL-BF16.gguf")])
def test_explain_prints_one_engine(name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", "llama-2-13b", *A100, "--explain", name)
    assert command in out and len(titles(out)) == 1


def test_explain_prints_all_engines(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", "llama-2-13b", *A100, "--explain", "all", "--tensor-parallel", "2", "--kv", "int8", "--weights", "int4")
    assert titles(out) == [
        "# vLLM",
        "# SGLang",
        "# TGI (in maintenance mode since December 2025: for a new service choose another)",
        "# TensorRT-LLM",
        "# llama.cpp server",
    ]


def test_any_config_is_a_model_and_results_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    results, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    out = run(capsys, "--model", str(tmp_path), "--device", "t4", "--context", "1000", "--json", str(results), "--figure", str(picture))
    assert "note: 1,000 tokens are beyond the model's 512 positions" in out
    assert f"results: {results}" in out and f"picture: {picture}" in out
    values = json.loads(results.read_text(encoding="utf-8"))
    assert values["kv_bytes_per_token"] == 2 * 2 * 4 * 16 * 2
    assert sum(values["bytes"][name] for name in ("weights", "activations", "runtime", "KV", "headroom")) == pytest.approx(16e9)
    assert values["batch"] == values["limits"][values["limited_by"]] == values["full"]["batch"]
    assert values["requests_by_context"]["1024"] == values["num_blocks"] // 64
    assert set(values["flags"]) == {"vllm", "sglang", "tgi", "trtllm", "llamacpp"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, minserve.cli\n"
        "assert minserve.cli.main(['plan', '--model', 'llama-2-7b', '--device', 'l4', '--explain', 'all']) == 0\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "llama-2-7b in bf16, KV in bf16, on 1 x l4" in done.stdout
