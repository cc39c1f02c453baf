"""`minserve quantize`: quantize a model once and save it as a checkpoint that this and other engines load.

It says what `quantize/calibration.py` has done, and adds no choices of its own. What needs torch is imported when the command runs, as in
`cli.py`, so that `minserve --help` answers at once.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minserve.quantize.recipe import Recipe

if TYPE_CHECKING:
    from minserve.quantize.quantized_model import Report


def add_quantize(commands: Any) -> None:
    """The command and its options, for `cli.py`."""
    quantize = commands.add_parser("quantize", help="quantize a model's weights once and save it as safetensors")
    quantize.add_argument("model", help="a directory, a hub id, or 'default' for SmolLM2-135M-Instruct")
    quantize.add_argument("--out", required=True, help="the directory to write; must not be there, or be empty")
    quantize.add_argument("--method", choices=("rtn", "gptq", "awq"), default="gptq", help="who chooses the codes (default: %(default)s)")
    quantize.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of a code (default: %(default)s)")
    quantize.add_argument("--group-size", help="inputs that share a scale: 32, 64, 128, or channel (default: 64, in 8 bits channel)")
    middle = quantize.add_mutually_exclusive_group()
    middle.add_argument("--sym", dest="middle", action="store_const", const="sym", help="0 is the middle code (default in 8 bits)")
    middle.add_argument("--asym", dest="middle", action="store_const", const="asym", help="each group has its own zero (default in 4 bits)")
    quantize.add_argument("--no-order", action="store_true", help="GPTQ: inputs as they stand, not the loudest first")
    quantize.add_argument("--damping", type=float, help="GPTQ: share of the Gram matrix's mean diagonal added to it (default: 0.01)")
    quantize.add_argument("--only", choices=("scale", "clip"), help="AWQ: one of its two searches alone")
    quantize.add_argument("--head", type=int, choices=(8, 16), help="bits of the output head (default: 8)")
    quantize.add_argument("--documents", type=int, help="pieces of calibration text (default: 64)")
    quantize.add_argument("--tokens", type=int, help="tokens of each (default: 256)")
    quantize.add_argument("--seed", type=int, help="which pieces (default: 0)")
    quantize.add_argument("--recipe", help="all of the above but --out in one: gptq-int4-g128-sym:no-order,damping=0.1")
    quantize.add_argument("--num-threads", type=int, help="CPU threads of torch")
    quantize.add_argument("--json", help="write the report here, too")
    quantize.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    recipe = Recipe.parse(arguments.recipe or words_of(arguments))
    main(arguments.model, recipe, Path(arguments.out), num_threads=arguments.num_threads, json_path=arguments.json)


def words_of(arguments: argparse.Namespace) -> str:
    """The options as the words of a recipe."""
    group = (
        None if arguments.group_size is None else arguments.group_size if arguments.group_size == "channel" else f"g{arguments.group_size}"
    )
    name = "-".join(part for part in (arguments.method, f"int{arguments.bits}", group, arguments.middle) if part)
    options = [word for word, is_given in (("no-order", arguments.no_order), (arguments.only, arguments.only)) if is_given]
    for word in ("damping", "documents", "tokens", "seed", "head"):
        if (value := getattr(arguments, word)) is not None:
            options.append(f"{word}={value}")
    return f"{name}:{','.join(options)}" if options else name


def main(
    model: str | None,
    recipe: Recipe,
    out: Path,
    *,
    num_threads: int | None = None,
    json_path: str | None = None,
    progress: bool = True,
) -> "Report":
    """Quantize, save, and say what was done. Raises ValueError before any work if `out` holds something."""
    import torch

    from minserve.model import zoo
    from minserve.model.wheel import directory_bytes
    from minserve.quantize.serving import make

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and not an empty directory: nothing is written over")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    path = zoo.resolve(model, progress=progress)
    report = make(path, recipe, out, progress).report
    print(report.describe())
    print(f"{path.name}: {directory_bytes(path) / 1e6:,.1f} MB of files; {out}: {directory_bytes(out) / 1e6:,.1f} MB")
    print(f'to serve it: minserve generate --model {out} "The capital of France is"')
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report.plain(), indent=1), encoding="utf-8")
    return report
