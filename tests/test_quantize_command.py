"""`minserve quantize`: its options as a recipe, and a directory that is served."""

import argparse
import json
from pathlib import Path

import pytest

from minserve.cli import main
from minserve.quantize.recipe import Recipe
from minserve.quantize.serving import REPORT
from minserve.quantize_command import add_quantize, words_of
from tests.quantize.fixed_weights import save_uneven_model

LITTLE_TEXT = ["--documents", "8", "--tokens", "128"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_uneven_model(tmp_path_factory.mktemp("model") / "uneven")


def words(*options: str) -> str:
    parser = argparse.ArgumentParser()
    add_quantize(parser.add_subparsers())
    return words_of(parser.parse_args(["quantize", "default", "--out", "x", *options]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", "gptq-int4"),
        ("--method rtn --bits 8", "rtn-int8"),
        ("--group-size 128 --sym", "gptq-int4-g128-sym"),
        ("--method awq --group-size channel --asym --only clip", "awq-int4-channel-asym:clip"),
        ("--no-order --damping 0.1 --documents 3 --tokens 9 --seed 1 --head 16",
         "gptq-int4:no-order,damping=0.1,documents=3,tokens=9,seed=1,head=16"),
    ],
)  # fmt: skip
def test_options_are_the_words_of_a_recipe(options: str, expected: str) -> None:
    assert words(*options.split()) == expected
    Recipe.parse(expected)


def test_a_quantized_directory_is_written_and_served(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report_path = tmp_path / "new" / "awq", tmp_path / "report.json"
    options = ["--method", "awq", "--group-size", "32", *LITTLE_TEXT, "--json", str(report_path)]
    assert main(["quantize", str(source), "--out", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert "awq-int4-g32:documents=8,tokens=128: 14 matrices in" in said and "with 1,024 tokens of text" in said
    assert "o_proj has no scale: 4 query heads share the outputs of 2 KV heads" in said
    assert f"minserve generate --model {out}" in said
    report = json.loads(report_path.read_text(encoding="utf-8"))
    assert report == json.loads((out / REPORT).read_text(encoding="utf-8"))
    assert len(report["matrices"]) == 14 and report["bytes_after"] < report["bytes_before"] / 4
    assert [path.name for path in out.parent.iterdir()] == ["awq"]  # nothing beside it
    assert main(["generate", "--model", str(out), "--max-tokens", "4", "--num-blocks", "16", "--max-model-len", "256", "a block"]) == 0
    assert capsys.readouterr().out.strip()


def test_nothing_is_written_over(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    assert main(["quantize", str(source), "--out", str(tmp_path), "--recipe", "int8"]) == 1
    assert f"{tmp_path} is there and not an empty directory" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["quantize", str(source), "--out", str(empty), "--recipe", "int8"]) == 0
    assert "int8: 14 matrices" in capsys.readouterr().out and (empty / REPORT).exists()


def test_options_that_a_method_does_not_have_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(source), "--out", str(tmp_path / "x"), "--only", "clip"]) == 1
    assert "option 'clip' is not one of gptq's" in capsys.readouterr().err
    assert main(["quantize", str(source), "--out", str(tmp_path / "x"), "--group-size", "48"]) == 1
    assert "groups have 32, 64, 128 inputs" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
