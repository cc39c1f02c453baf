"""Weights by the words of `LLM(weights=...)`: rounded at load, or quantized once, saved, and never found half done."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minserve.llm import LLM
from minserve.model.config import ModelConfig, QuantizationConfig
from minserve.model.decoder import Decoder
from minserve.model.tokenizer import Tokenizer
from minserve.model.weights import Checkpoint, quantized
from minserve.quantize import calibration, serving
from minserve.quantize.calibration import quantize_model
from minserve.quantize.quantized_model import QuantizedModel
from minserve.quantize.recipe import Recipe
from minserve.quantize.rtn import RoundedWeights
from minserve.quantize.serving import REPORT, make, open_weights, quantized_directory, quantized_once, save
from tests.model.tiny_net import full_logits, tokens_for
from tests.quantize.fixed_weights import save_uneven_model

LITTLE_TEXT = "documents=8,tokens=128"
RECIPES = (f"gptq-int4-g32:{LITTLE_TEXT}", f"gptq-int4-sym:{LITTLE_TEXT}", f"awq-int4-g32:{LITTLE_TEXT}", f"awq-int4-g64:{LITTLE_TEXT}")
TEXT = tokens_for(0, 60, 256)
PROMPTS = ["a block", "tokens of a request", "x"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_uneven_model(tmp_path_factory.mktemp("model") / "uneven")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "choose_dtype", lambda *_: torch.float32)  # which type is faster is a matter of chance here
    return tmp_path / "cache"


def quantize(source: Path, words: str) -> QuantizedModel:
    config = ModelConfig.from_directory(source)
    return quantize_model(config, Checkpoint(source), Tokenizer(source), Recipe.parse(words), progress=False)


def answers(path: Path, weights: str = "auto") -> list[list[int]]:
    with LLM(path, weights=weights, dtype="fp32", num_blocks=64, max_model_len=256, verbose=False) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, max_tokens=12, progress=False)]


@pytest.mark.parametrize("words", [*RECIPES, "int8", "int4"])
def test_what_is_saved_is_what_is_in_memory(source: Path, tmp_path: Path, words: str) -> None:
    model, config = quantize(source, words), ModelConfig.from_directory(source)
    save(tmp_path / "saved", source, model)
    loaded, in_memory = open_weights(tmp_path / "saved"), model.weights(Checkpoint(source))
    for name, expected in model.quantized.items():
        found = quantized(loaded, name, expected.shape)
        assert found is not None
        for field in ("codes", "scales", "zeros", "group_of"):
            assert torch.equal(getattr(found, field), getattr(expected, field)), (name, field)
    logits = [full_logits(Decoder(config, weights), TEXT) for weights in (loaded, in_memory)]
    assert torch.equal(*logits)
    rounded = full_logits(Decoder(config, RoundedWeights(Checkpoint(source), model.recipe.fmt)), TEXT)
    assert torch.equal(logits[0], rounded) == (model.recipe.fmt.method == "rtn")


@pytest.mark.parametrize("words", RECIPES[::2])
def test_a_saved_model_answers_as_the_one_that_the_engine_made(source: Path, tmp_path: Path, words: str) -> None:
    save(tmp_path / "saved", source, quantize(source, words))
    assert answers(tmp_path / "saved") == answers(source, words) != answers(source)


def test_the_report_and_the_files_agree(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "saved", source, quantize(source, RECIPES[1]))
    report = json.loads((tmp_path / "saved" / REPORT).read_text(encoding="utf-8"))
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    stored = {name.removesuffix(".qweight") + ".weight" for name in tensors if name.endswith(".qweight")}
    groups = {name: tensors[f"{name.removesuffix('.weight')}.scales"].shape[0] for name in stored}
    assert {line["name"] for line in report["matrices"]} == stored
    assert {line["name"]: line["num_groups"] for line in report["matrices"]} == groups
    assert set(groups.values()) == {1, 2} and report["recipe"] == RECIPES[1]  # 64 inputs; 96 and 128
    assert QuantizationConfig.from_directory(tmp_path / "saved") is not None
    assert not (tmp_path / "saved" / "minserve.json").exists()


def test_quantized_once(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = quantized_once(source, Recipe.parse(RECIPES[0]))
    assert f"quantizing uneven by {RECIPES[0]}, once" in capsys.readouterr().err
    monkeypatch.setattr(serving, "quantize_model", None)
    assert quantized_once(source, Recipe.parse(RECIPES[0])) == place
    assert quantized(open_weights(source, RECIPES[0]), "model.layers.0.mlp.up_proj.weight", (96, 64)) is not None
    assert capsys.readouterr().err == ""
    assert place.parent.name == "quantized" and not set(place.name) & set(':,= "')


def test_two_that_ask_at_once_make_it_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def counted(path: Path, recipe: Recipe, target: Path, progress: bool) -> QuantizedModel:
        made.append(target)
        return make(path, recipe, target, progress)

    monkeypatch.setattr(serving, "make", counted)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(quantized_once, source, Recipe.parse(RECIPES[0]), progress=False) for _ in range(2)]
    assert [place.result() for place in asked] == made * 2 and len(made) == 1


def test_another_file_or_recipe_has_another_place(source: Path, tmp_path: Path) -> None:
    recipes = [Recipe.parse(words) for words in (RECIPES[0], f"{RECIPES[0]},seed=1", RECIPES[2])]
    places = {quantized_directory(source, recipe) for recipe in recipes}
    other = save_uneven_model(tmp_path / "uneven")
    places.add(quantized_directory(other, recipes[0]))
    assert len(places) == 4
    assert quantized_directory(source, recipes[0]) in places


@pytest.mark.parametrize("moment", ["quantizing", "writing"])
def test_interrupted_it_leaves_nothing_half_done(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    recipe = Recipe.parse(RECIPES[0])
    with monkeypatch.context() as patch:
        if moment == "quantizing":
            patch.setattr(calibration.LayerByLayer, "merge_scales", interrupted)
        else:
            patch.setattr(json, "dumps", interrupted)  # of config.json, when the tensors are written
        with pytest.raises(KeyboardInterrupt):
            quantized_once(source, recipe, progress=False)
    left = [path.name for path in (cache / "quantized").iterdir()]
    assert all(name.endswith(".lock") for name in left)
    stale = cache / "quantized" / f"{quantized_directory(source, recipe).name}.tmp-dead"
    stale.mkdir()
    place = quantized_once(source, recipe, progress=False)
    assert place.is_dir() and not stale.exists()
    assert not list(cache.glob("quantized/*.tmp-*"))


def test_head_bits_of_the_recipe_are_kept(source: Path, tmp_path: Path) -> None:
    for words, expected in ((f"{RECIPES[0]}", 8), (f"{RECIPES[0]},head=16", None)):
        head = quantized(open_weights(source, words), "lm_head.weight", (320, 64))
        assert (head.bits if head else None) == expected
    head = quantized(open_weights(source, RECIPES[0]), "lm_head.weight", (320, 64))
    rounded = quantized(open_weights(source, "int4"), "lm_head.weight", (320, 64))
    assert head is not None and rounded is not None and torch.equal(head.codes, rounded.codes)


def test_auto_is_what_the_directory_has(source: Path) -> None:
    assert isinstance(open_weights(source), Checkpoint)
    assert isinstance(open_weights(source, "int8"), RoundedWeights)


def test_a_model_in_codes_is_opened_in_no_others(source: Path) -> None:
    place = quantized_once(source, Recipe.parse(RECIPES[0]), progress=False)
    assert quantized(open_weights(place, "gptq-int4-g32"), "model.layers.0.mlp.up_proj.weight", (96, 64)) is not None
    with pytest.raises(ValueError, match="is in gptq-int4-g32 already: open it with weights='auto'"):
        open_weights(place, "int8")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [("int5", "weight format 'int5' is not known"), ("bf16", "compute type"), ("gptq-int4:scale", "option 'scale'")],
)
def test_unknown_words_are_refused(source: Path, words: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LLM(source, weights=words, verbose=False)
