"""The weights of a model directory, in the format that was asked for: what `LLM(weights=...)` opens.

    auto                    as the directory has them, in floats or in codes
    int8, int4-g128-sym     rounded to nearest while they are loaded, in seconds
    gptq-int4, awq-int4     quantized once, in minutes, saved in the cache, and loaded from there ever after

Any recipe (`recipe.py`) will do, "gptq-int4:no-order" too.

Why: what takes minutes must be done once, and never be found half done. So a quantized model is made in a directory beside its place, under
a lock, and moved there by one rename. Its place is named by a digest of all that it depends on: the files, the recipe, the text.

Invariant: a directory that `save` has made is whole or not there; a saved model serves the tokens that the one in memory does.

Taught in notebook 09.
"""

import hashlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from minserve.model.config import ModelConfig, QuantizationConfig
from minserve.model.quantized_checkpoint import open_checkpoint, write_quantized
from minserve.model.tokenizer import Tokenizer
from minserve.model.weights import Checkpoint, Weights
from minserve.model.wheel import MANIFEST, locked
from minserve.model.zoo import cache_directory
from minserve.quantize.calibration import quantize_model
from minserve.quantize.prose import own_prose
from minserve.quantize.quantized_model import QuantizedModel, RoundedHead
from minserve.quantize.recipe import Recipe
from minserve.quantize.rtn import RoundedWeights
from minserve.sim.weight_formats import PLAIN_WEIGHTS, WeightFormat

AUTO = "auto"
REPORT = "minserve_quantization.json"
VERSION = 1  # what is in the cache is made again when quantizing changes and this number grows


def open_weights(path: str | Path, weights: str = AUTO, *, cache_dir: str | Path | None = None, progress: bool = True) -> Weights:
    """The weights of a model directory in a format or by a recipe. Minutes at the first time for GPTQ and AWQ, seconds after that.

    Raises ValueError for unknown words, and for a directory that is in codes already, others than those asked for.
    """
    path = Path(path)
    if weights == AUTO:
        return _as_stored(path)
    if weights in PLAIN_WEIGHTS:
        raise ValueError(f"weights={weights!r} is a compute type, not a format of codes: give it as dtype, and weights='auto'")
    recipe = Recipe.parse(weights)
    if (stored := QuantizationConfig.from_directory(path)) is not None:
        if _format_of(stored) != recipe.fmt:
            raise ValueError(
                f"{path} is in {_format_of(stored).name} already: open it with weights='auto', or quantize the model in floats"
            )
        return _as_stored(path)
    if not recipe.is_calibrated:
        return RoundedWeights(Checkpoint(path), recipe.fmt, recipe.head_bits, ModelConfig.from_directory(path).tied_embeddings)
    return _as_stored(quantized_once(path, recipe, cache_dir=cache_dir, progress=progress))


def _as_stored(path: Path) -> Weights:
    checkpoint, stored = open_checkpoint(path), QuantizationConfig.from_directory(path)
    if stored is None or stored.head_bits == 16:
        return checkpoint
    return RoundedHead(checkpoint, stored.head_bits, ModelConfig.from_directory(path).tied_embeddings)


def _format_of(stored: QuantizationConfig) -> WeightFormat:
    if stored.name is not None:
        return Recipe.parse(stored.name).fmt
    return WeightFormat(stored.bits, stored.group_size, stored.symmetric, stored.method)


# --- quantized once -------------------------------------------------------------------------------


def quantized_once(path: Path, recipe: Recipe, *, cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """The directory of a quantized model in the cache, made now if it is not there. Two processes that ask at once make it once."""
    target = quantized_directory(path, recipe, cache_dir)
    if not target.is_dir():
        with locked(target, progress):
            for stale in target.parent.glob(f"{target.name}.tmp-*"):  # we hold the lock, so whoever left them has died
                shutil.rmtree(stale, ignore_errors=True)
            if not target.is_dir():
                if progress:
                    print(f"minserve: quantizing {path.name} by {recipe.name}, once and for some minutes, in {target}", file=sys.stderr)
                make(path, recipe, target, progress)
    return target


def quantized_directory(path: Path, recipe: Recipe, cache_dir: str | Path | None = None) -> Path:
    """Where the cache has a model by a recipe. Another file, another text or another way to quantize has another place."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(path.glob("*.safetensors"))]
    depends_on = (VERSION, recipe.name, (path / "config.json").read_text(encoding="utf-8"), files, own_prose())
    digest = hashlib.sha256(repr(depends_on).encode("utf-8")).hexdigest()[:12]
    words = re.sub(r"[^\w.-]", "_", recipe.name)  # Windows has no file with a colon in its name
    return cache_directory(cache_dir) / "quantized" / f"{path.name}-{words}-{digest}"


def make(path: Path, recipe: Recipe, target: Path, progress: bool = True) -> QuantizedModel:
    """Quantize the model of a directory and save it as `target`, which must not be there, or be empty."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent, ignore_cleanup_errors=True) as work:
        model = quantize_model(ModelConfig.from_directory(path), open_checkpoint(path), Tokenizer(path), recipe, progress)
        made = Path(work) / "model"
        save(made, path, model)
        if target.is_dir():
            target.rmdir()  # raises if there is something in it
        made.replace(target)
    return model


def save(directory: Path, source: Path, model: QuantizedModel) -> None:
    """Write a quantized model with the tokenizer of its source, and the report beside it."""
    write_quantized(directory, source, model.quantized, model.recipe.fmt, model.replaced, model.recipe.head_bits)
    (directory / MANIFEST).unlink(missing_ok=True)  # it describes the source's files
    (directory / REPORT).write_text(json.dumps(model.report.plain(), indent=1), encoding="utf-8")
