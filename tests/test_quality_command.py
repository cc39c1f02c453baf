"""`minserve quality` on a model of a few hundred kilobytes: the table, the file, and what it refuses."""

import json
import math
from pathlib import Path

import pytest

from minserve import cli
from minserve.quality_command import as_dict
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


def test_outliers_are_an_option(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", "--model", model_dir, "--kv-cache-dtype", "bf16", "--outliers", "32", *FEW]) == 0
    assert "with outliers x32" in capsys.readouterr().out


def test_mistakes_are_one_line(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", "--model", model_dir, "--kv-cache-dtype", "int5", *FEW]) == 1
    assert "'int5' is not known" in capsys.readouterr().err
    assert cli.main(["quality", "--model", model_dir, "--documents", "9999"]) == 1
    assert "9999 were asked for" in capsys.readouterr().err


def test_infinite_numbers_become_null() -> None:
    found = as_dict(measure(small_model(), Scheme("nan", lambda kv: kv * math.nan), reference="fp32", sample=SAMPLE))
    assert found["kl"] == {"value": None, "low": None, "high": None}
    json.dumps(found, allow_nan=False)
