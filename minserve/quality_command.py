"""`minserve quality`: what formats of weights and of the KV cache cost in quality, on the real model and the project's own prose.

It prints and writes what `quantize/quality.py` measures and adds no numbers of its own. What needs torch is imported when the command
runs, as in `cli.py`, so that `minserve --help` answers at once.
"""

import argparse
import json
import math
import platform
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from minserve.quantize.quality import Quality, Subject

DEFAULT_KV_FORMATS = "fp8,int8,int4"
BETWEEN_FORMATS = re.compile(r",(?=(?:rtn-|gptq-|awq-)?int\d|[./~])")  # a comma inside a recipe is followed by one of its options
OPTIONS: tuple[tuple[str, type, Any, str], ...] = (
    ("model", str, None, "a directory, a hub id, or nothing for SmolLM2-135M-Instruct"),
    ("weights", str, None, "formats, recipes or directories, separated by commas: int8,gptq-int4-g128,awq-int4:scale,./my-awq"),
    ("kv_cache_dtype", str, None, "formats, separated by commas; int4-unmixed is the bare quantizer (without either: fp8,int8,int4)"),
    ("text", str, None, "a file to read in place of the project's own prose"),
    ("reference", str, "bf16", "compute type, and format of the reference's cache: fp32, bf16, fp16"),
    ("documents", int, 16, "how many pieces of text"),
    ("document_tokens", int, 256, "tokens of each"),
    ("tasks", int, 12, "questions of each kind; 0: none"),
    ("outliers", float, None, "measure a copy of the model whose key channels are partly so many times as loud (a power of two)"),
    ("num_threads", int, None, "CPU threads of torch"),
    ("seed", int, 0, "of questions and resampling"),
)


def add_quality(commands: Any) -> None:
    """The command and its options, for `cli.py`."""
    quality = commands.add_parser("quality", help="measure what formats of weights and KV cache cost in perplexity, KL, agreement, tasks")
    for name, kind, default, help_text in OPTIONS:
        shown = "" if default is None else " (default: %(default)s)"
        quality.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=help_text + shown)
    quality.add_argument("--fast", action="store_true", help="read documents only: no greedy texts, no questions")
    quality.add_argument("--json", help="write the results here")
    quality.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    main(json_path=arguments.json, fast=arguments.fast, **{name: getattr(arguments, name) for name, _, _, _ in OPTIONS})


def main(*, json_path: str | None = None, **fields: Any) -> "list[Quality]":
    """Measure, print the table, write what was asked for. `fields` are those of OPTIONS; the others keep their defaults."""
    import torch

    from minserve.quantize.quality import Sample, measure_each, table
    from minserve.quantize.subjects import OpenModel, with_outliers

    settings = {**{name: default for name, _, default, _ in OPTIONS}, "fast": False, **fields}
    if settings["num_threads"] is not None:
        torch.set_num_threads(settings["num_threads"])
    model = OpenModel.from_name(settings["model"])
    if settings["outliers"] is not None:
        model = with_outliers(model, settings["outliers"])
    text = None if settings["text"] is None else Path(settings["text"]).read_text(encoding="utf-8")
    sample = Sample.draw(model, settings["documents"], settings["document_tokens"], settings["tasks"], settings["seed"], text)
    subjects = subjects_of(settings["weights"], settings["kv_cache_dtype"])
    start_s, qualities = time.perf_counter(), []
    options = {name: settings[name] for name in ("reference", "seed", "fast")}
    for quality in tqdm(measure_each(model, subjects, sample=sample, **options), "subjects", len(subjects), disable=None):
        qualities.append(quality)
    asked = f"{len(sample.documents)} documents of {settings['document_tokens']} tokens, {len(sample.tasks)} questions"
    spent = f"computed in {settings['reference']}; {time.perf_counter() - start_s:.0f} s"
    print(f"{model.name}: {asked}; {spent}\n{table(qualities)}")
    if json_path is not None:
        result = {"model": model.name, **provenance(), "settings": settings, "qualities": [as_dict(q) for q in qualities]}
        Path(json_path).write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
        print(f"results: {json_path}")
    return qualities


def subjects_of(weights: str | None, kv_cache_dtype: str | None) -> "list[Subject]":
    """Every format of the weights with every format of the cache; where one side is not named, it stays as the reference has it."""
    from minserve.quantize.quality import Subject
    from minserve.quantize.subjects import parse_format
    from minserve.quantize.weight_subjects import parse_weight_subject

    if weights is None and kv_cache_dtype is None:
        kv_cache_dtype = DEFAULT_KV_FORMATS
    of_weights = [parse_weight_subject(words) for words in BETWEEN_FORMATS.split(weights)] if weights else [None]
    of_cache = [parse_format(name) for name in kv_cache_dtype.split(",")] if kv_cache_dtype else [None]
    return [Subject(of_weight, of_cache_format) for of_weight in of_weights for of_cache_format in of_cache]


def as_dict(quality: "Quality") -> dict[str, Any]:
    """Plain data for JSON, which knows no infinite numbers: they become null."""
    return {name: _finite(value) for name, value in asdict(quality).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def provenance() -> dict[str, Any]:
    """When, where and with what something was measured."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
    }
