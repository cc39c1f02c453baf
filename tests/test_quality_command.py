"""`minserve quality` on a model of a few hundred kilobytes: the table, the file, and what it refuses."""

import json
import math
from pathlib import Path

import pytest

from minserve import cli
from minserve.quality_command import as_dict, subjects_of
from minserve.quantize.quality import measure
from minserve.quantize.subjects import Scheme
from tests.quantize.small import SAMPLE, small_model
from tests.tiny_model import save_tiny_model

FEW = ["--documents", "2", "--document-tokens", "40", "--tasks", "1"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048))


def test_the_command_prints_and_writes(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quality.json"
    formats = "int8,int4-unmixed"
    assert cli.main(["quality", "--model", model_dir, "--kv-cache-dtype", formats, "--reference", "fp32", "--json", str(path), *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 documents of 40 tokens, 5 questions; computed in fp32" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == formats.split(",")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [quality["kv_cache_dtype"] for quality in written["qualities"]] == formats.split(",")
    assert written["qualities"][0]["num_tokens"] == 2 * 39
    assert written["settings"]["seed"] == 0 and written["versions"]["torch"]


def test_weights_are_measured_by_their_recipes(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, path = tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_text("A text of one's own is read in place of the project's. " * 10, encoding="utf-8")
    words = "int8,gptq-int4:no-order,documents=2,tokens=64,int8-tensor"
    asked = ["--weights", words, "--text", str(text), "--reference", "fp32", "--fast", "--json", str(path)]
    assert cli.main(["quality", "--model", model_dir, *asked, *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("weights") and "agreement (" not in lines[2]
    written = json.loads(path.read_text(encoding="utf-8"))["qualities"]
    assert [quality["weights"] for quality in written] == ["int8", "gptq-int4:no-order,documents=2,tokens=64", "int8-tensor"]
    assert written[0]["agreement"] == {"value": None, "low": None, "high": None}


@pytest.mark.parametrize(
    ("weights", "cache", "expected"),
    [
        (None, None, [(None, "fp8"), (None, "int8"), (None, "int4")]),
        ("int8,awq-int4:clip", None, [("int8", None), ("awq-int4:clip", None)]),
        ("int8", "bf16,int4", [("int8", "bf16"), ("int8", "int4")]),
    ],
)
def test_every_format_of_weights_meets_every_format_of_the_cache(
    weights: str | None, cache: str | None, expected: list[tuple[str | None, str | None]]
) -> None:
    assert [(subject.weights, subject.kv_cache_dtype) for subject in subjects_of(weights, cache)] == expected


def test_outliers_are_an_option(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", "--model", model_dir, "--kv-cache-dtype", "bf16", "--outliers", "32", *FEW]) == 0
    assert "with outliers x32" in capsys.readouterr().out


def test_mistakes_are_one_line(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", "--model", model_dir, "--kv-cache-dtype", "int5", *FEW]) == 1
    assert "'int5' is not known" in capsys.readouterr().err
    assert cli.main(["quality", "--model", model_dir, "--weights", "int4:order", *FEW]) == 1
    assert "int4:order: option 'order' is not one of rtn's" in capsys.readouterr().err
    assert cli.main(["quality", "--model", model_dir, "--documents", "9999"]) == 1
    assert "9999 were asked for" in capsys.readouterr().err


def test_infinite_numbers_become_null() -> None:
    found = as_dict(measure(small_model(), Scheme("nan", lambda kv: kv * math.nan), reference="fp32", sample=SAMPLE))
    assert found["kl"] == {"value": None, "low": None, "high": None}
    json.dumps(found, allow_nan=False)
