"""Importing minserve costs nothing, and its three names are found where they live."""

import json
import subprocess
import sys

import pytest

import minserve
from minserve.core import request

HEAVY = ("torch", "transformers", "triton", "numpy", "matplotlib", "huggingface_hub")


def loaded_by(statement: str) -> list[str]:
    """Which of the heavy libraries a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout)


@pytest.mark.parametrize(
    "statement",
    [
        "import minserve",
        "import minserve.core",
        "from minserve import SamplingParams",
        "import minserve.core.engine",
        "dir(__import__('minserve'))",
    ],
)
def test_nothing_heavy_is_loaded(statement: str) -> None:
    assert loaded_by(statement) == []


def test_loaded_by_sees_what_is_loaded() -> None:
    assert loaded_by("import numpy") == ["numpy"]


def test_public_names() -> None:
    assert minserve.SamplingParams is request.SamplingParams
    assert {"LLM", "EngineConfig", "SamplingParams"} <= set(dir(minserve))
    assert (minserve.LLM.__module__, minserve.EngineConfig.__module__) == ("minserve.llm", "minserve.interface")
    with pytest.raises(ImportError, match="cannot import name 'Llm' from 'minserve'"):
        exec("from minserve import Llm")
