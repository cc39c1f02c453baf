"""`minserve quality`: what the formats of the KV cache cost in quality, on the real model and the project's own prose.

It prints and writes what `quantize/quality.py` measures and adds no numbers of its own. What needs torch is imported when the command
runs, as in `cli.py`, so that `minserve --help` answers at once.
"""

import argparse
import json
import math
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minserve.quantize.quality import Quality

OPTIONS: tuple[tuple[str, type, Any, str], ...] = (
    ("model", str, None, "a directory, a hub id, or nothing for SmolLM2-135M-Instruct"),
    ("kv_cache_dtype", str, "fp8,int8,int4", "formats, separated by commas; int4-unmixed is the bare quantizer"),
    ("reference", str, "bf16", "compute type, and format of the reference's cache: fp32, bf16, fp16"),
    ("documents", int, 16, "how many pieces of text"),
    ("document_tokens", int, 256, "tokens of each"),
    ("tasks", int, 12, "questions of each kind"),
    ("outliers", float, None, "measure a copy of the model whose key channels are partly so many times as loud (a power of two)"),
    ("num_threads", int, None, "CPU threads of torch"),
    ("seed", int, 0, "of questions and resampling"),
)


def add_quality(commands: Any) -> None:
    """The command and its options, for `cli.py`."""
    quality = commands.add_parser("quality", help="measure what formats of the KV cache cost in perplexity, KL, agreement and tasks")
    for name, kind, default, help_text in OPTIONS:
        shown = "" if default is None else " (default: %(default)s)"
        quality.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=help_text + shown)
    quality.add_argument("--json", help="write the results here")
    quality.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    main(json_path=arguments.json, **{name: getattr(arguments, name) for name, _, _, _ in OPTIONS})


def main(*, json_path: str | None = None, **fields: Any) -> "list[Quality]":
    """Measure, print the table, write what was asked for. `fields` are those of OPTIONS; the others keep their defaults."""
    import torch

    from minserve.quantize.quality import Sample, measure_all, table
    from minserve.quantize.subjects import OpenModel, parse_format, with_outliers

    settings = {**{name: default for name, _, default, _ in OPTIONS}, **fields}
    if settings["num_threads"] is not None:
        torch.set_num_threads(settings["num_threads"])
    subject = OpenModel.from_name(settings["model"])
    if settings["outliers"] is not None:
        subject = with_outliers(subject, settings["outliers"])
    sample = Sample.draw(subject, settings["documents"], settings["document_tokens"], settings["tasks"], settings["seed"])
    formats = [parse_format(name) for name in settings["kv_cache_dtype"].split(",")]
    start_s = time.perf_counter()
    qualities = measure_all(subject, formats, reference=settings["reference"], sample=sample, seed=settings["seed"])
    print(
        f"{subject.name}: {len(sample.documents)} documents of {settings['document_tokens']} tokens, {len(sample.tasks)} questions; ",
        end="",
    )
    print(f"computed in {settings['reference']}; {time.perf_counter() - start_s:.0f} s\n{table(qualities)}")
    if json_path is not None:
        result = {"model": subject.name, **provenance(), "settings": settings, "qualities": [as_dict(q) for q in qualities]}
        Path(json_path).write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
        print(f"results: {json_path}")
    return qualities


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
