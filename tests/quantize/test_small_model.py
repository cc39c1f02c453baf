"""The small trained model: what it trains on, that a seed settles it, and that the engine reads what is written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minserve.quantize.prose import documents, own_prose
from minserve.quantize.small_model import HELD_OUT_FILE, make, split
from minserve.quantize.subjects import OpenModel
from minserve.quantize.walk import HELD_OUT
from tests.quantize.small import logits_of


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("small"), num_steps=2, progress=False)


def test_what_is_held_out_is_not_trained_on() -> None:
    trained_on, held_out = (set(part.strip().split("\n\n")) for part in split(own_prose()))
    assert sum(map(len, trained_on & held_out)) < 100  # one sentence that several notebooks close with
    assert len("".join(held_out)) > 20_000 and len("".join(trained_on)) > 80_000
    assert all(f"=== {name}" in held_out for name in HELD_OUT)


def test_the_engine_opens_it_and_reads_what_was_held_out(model_dir: Path) -> None:
    model = OpenModel.from_name(model_dir)
    assert model.config.num_parameters == 3_672_320
    assert logits_of(model).isfinite().all()
    text = (model_dir / HELD_OUT_FILE).read_text(encoding="utf-8")
    assert [len(document) for document in documents(model.tokenizer, 8, 256, text)] == [256] * 8
    assert model.tokenizer.decode(model.tokenizer.encode(text[:500])) == text[:500]


def test_weights_are_fp32_and_settled_by_the_seed(model_dir: Path, tmp_path: Path) -> None:
    first = load_file(model_dir / "model.safetensors")
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    again = load_file(make(tmp_path, num_steps=2, progress=False) / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
