"""The command line: help at once, errors in one line, options that reach the engine, results that can be read back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minserve import cli
from minserve.bench import load_workload
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_help_does_not_load_torch() -> None:
    code = "import sys, minserve.cli\ntry: minserve.cli.main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("demo", "generate", "bench", "model"):
        assert command in done.stdout


def test_generate_streams_one_prompt(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "abc", "--model", str(tiny_dir), "--max-tokens", "5", "--num-blocks", "40", "--dtype", "fp32"]
    assert cli.main(arguments) == 0
    first = capsys.readouterr()
    assert "KV pool: 40 blocks of 16" in first.err and first.out.strip()
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == first.out


def test_generate_takes_a_format_of_weights(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "abc", "--model", str(tiny_dir), "--max-tokens", "5", "--num-blocks", "40", "--dtype", "fp32"]
    assert cli.main([*arguments, "--weights", "int4-g32"]) == 0
    assert "weights in int4+int8" in capsys.readouterr().err
    assert cli.main([*arguments, "--weights", "int3"]) == 1
    assert capsys.readouterr().err.startswith("minserve: weight format 'int3' is not known; examples: int8, int4")


def test_generate_answers_several_prompts_and_samples(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--model",
        str(tiny_dir),
        "--max-tokens",
        "3",
        "--num-blocks",
        "40",
        "--n",
        "2",
        "--temperature",
        "1",
        "--seed",
        "1",
        "--chat",
    ]
    assert cli.main(["generate", "abc", "xyz", *options]) == 0
    out = capsys.readouterr().out
    assert [line.split(" [")[0] for line in out.splitlines() if line.startswith("---")] == ["--- abc"] * 2 + ["--- xyz"] * 2


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["generate", "x", "--temperature", "-1"], 2, "minserve: temperature must be a finite number >= 0, got -1.0"),
        (["generate", "x", "--max-tokens", "0"], 2, "minserve: max_tokens must be an integer >= 1, got 0"),
        (["generate", "x", "--model", "no-such-place"], 1, "minserve: no model 'no-such-place'"),
        (["bench", "--sets", "mixed,none"], 1, "minserve: no request set 'none' in the workload; it has mixed, shared, warmup"),
    ],
)
def test_errors_are_one_line(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == status
    error = capsys.readouterr().err
    assert error.startswith(words) and error.count("\n") == 1


def test_an_impossible_prompt_names_the_numbers(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x" * 600, "--model", str(tiny_dir)]) == 2
    assert "600 prompt tokens and at least 1 output tokens make 601, max_model_len is 512" in capsys.readouterr().err


def test_model_list_names_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "list"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m-instruct")


def test_model_fetch_prints_the_directory(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "fetch", str(tiny_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(tiny_dir)


def tiny_workload(path: Path) -> Path:
    def request(name: str, length: int, max_tokens: int) -> dict:
        return {"id": name, "prompt_ids": [(7 * i + length) % 250 for i in range(length)], "max_tokens": max_tokens}

    shared = [request(f"s{i}", 32, 4) for i in range(3)]
    sets = {"mixed": [request("m0", 20, 6), request("m1", 5, 9)], "shared": shared, "warmup": [request("w0", 8, 2)]}
    path.write_text(json.dumps({"seed": 1, "sets": sets}), encoding="utf-8")
    return path


def test_bench_writes_what_the_peers_write(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, out = tiny_workload(tmp_path / "w.json"), tmp_path / "out.json"
    options = [
        "--model",
        str(tiny_dir),
        "--workload",
        str(workload),
        "--json",
        str(out),
        "--num-blocks",
        "40",
        "--dtype",
        "fp32",
        "--primed",
    ]
    assert cli.main(["bench", *options]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert (result["peer"], result["dtype"], result["num_blocks"]) == ("minserve", "float32", 40)
    assert set(result["sets"]) == {"mixed", "mixed_primed", "shared", "shared_primed"}
    mixed, shared = result["sets"]["mixed"], result["sets"]["shared"]
    assert {name: len(tokens) for name, tokens in mixed["tokens"].items()} == {"m0": 6, "m1": 9}
    assert mixed["out_tok_s"] == pytest.approx(15 / mixed["wall_s"], rel=0.05)
    assert mixed["all_tok_s"] == pytest.approx(40 / mixed["wall_s"], rel=0.05)
    assert mixed["tokens"] == result["sets"]["mixed_primed"]["tokens"]
    assert mixed["hit_tokens"] == 0  # cold, though the same engine has run a warm-up
    assert shared["hit_tokens"] == 2 * 16  # three equal prompts of two blocks: the last token's block is computed by each
    assert 0 < result["decode_step"]["outside_torch_share"] < 1 and result["self_peak_rss_mib"] > 0
    assert "mixed: " in capsys.readouterr().out


def test_bench_under_a_policy(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, out = tiny_workload(tmp_path / "w.json"), tmp_path / "out.json"
    options = ["--model", str(tiny_dir), "--workload", str(workload), "--json", str(out), "--num-blocks", "40", "--dtype", "fp32"]
    assert cli.main(["bench", *options, "--sets", "shared", "--policy", "cap:most=1"]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    shared = result["sets"]["shared"]
    assert result["policy"] == "cap:most=1" and shared["steps"] == 12  # one after the other: three answers of four tokens
    assert result["decode_step"]["batch"] == 3  # a batch, whatever the policy
    capsys.readouterr()
    words = "slo:ttft_ms=0.001,tpot_ms=1000"
    assert cli.main(["bench", *options, "--policy", words]) == 2
    assert "minserve: the policy sent 1 of 1 requests away" in capsys.readouterr().err
    assert cli.main(["bench", "--decode", "--policy", words]) == 1
    assert "leave out policy" in capsys.readouterr().err


def test_the_workload_that_ships_is_the_fixed_one() -> None:
    sets = load_workload()
    assert {name: len(requests) for name, requests in sets.items()} == {"mixed": 64, "shared": 32, "warmup": 4}
    assert sum(len(r["prompt_ids"]) for r in sets["mixed"]) == 8582 and sum(r["max_tokens"] for r in sets["mixed"]) == 4557
    assert sum(len(r["prompt_ids"]) for r in sets["shared"]) == 13312
    assert len({tuple(r["prompt_ids"][:384]) for r in sets["shared"]}) == 1


def test_a_broken_workload_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.json"
    path.write_text('{"sets": {"mixed": [{"id": 1}]}}', encoding="utf-8")
    assert cli.main(["bench", "--workload", str(path)]) == 1
    assert "not a workload" in capsys.readouterr().err
