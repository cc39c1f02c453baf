"""`minserve arena`: a learner's policy beside those that are in use, on the loads and the scorecard of `lab/arena.py`.

A file of one's own is run as it is: it is the learner's own code, on the learner's own machine. The policies in it are searched for
cheats; the baselines, which are minserve's own, are not, since that takes three quarters of the time.
"""

import argparse
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from minserve.lab.arena_score import Scorecard

METHODS = ("order", "candidates", "wake_s", "token_budget", "shed")
OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("trace", str, "only these, separated by commas: chat, code, batch, bursty, multi-turn"),
    ("seeds", str, "published seeds, separated by commas (default: 1)"),
    ("unseen_seed", int, "the seed that no policy can have prepared for (default: drawn by lot)"),
    ("baselines", str, "policies to compare with, as in continuous;cap:most=8;slo (default: a dozen; none: an empty word)"),
    ("json", str, "write the scorecards here"),
)


class PolicyFailed(RuntimeError):
    """A learner's policy raised an error; the message says which, and in which line."""


def add_arena(commands: Any) -> None:
    """The command and its options, for `cli.py`."""
    arena = commands.add_parser("arena", help="let a policy of your own compete on five loads (--template: one to begin with)")
    arena.add_argument("file", nargs="?", metavar="FILE.py", help="a file with a policy, or several: classes with the methods of Policy")
    arena.add_argument("--template", action="store_true", help="print twenty lines of policy to begin with, and nothing else")
    for name, kind, help_text in OPTIONS:
        arena.add_argument(f"--{name.replace('_', '-')}", type=kind, help=help_text)
    arena.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.template:
        print(template(), end="")
        return
    settings = {name: getattr(arguments, name) for name, _, _ in OPTIONS if name != "json"}
    main(arguments.file, json_path=arguments.json, **settings)


def template() -> str:
    """A policy file to begin with."""
    return (Path(__file__).parent / "lab" / "policy_template.py").read_text(encoding="utf-8")


def main(
    file: str | None = None,
    *,
    trace: str | None = None,
    seeds: str | None = None,
    unseen_seed: int | None = None,
    baselines: str | None = None,
    json_path: str | None = None,
) -> "list[Scorecard]":
    """Play, print the cards of the file's policies and the table of all, write what was asked for."""
    from minserve.lab import arena  # not at the top: `minserve --help` should answer at once

    traces, published = _traces(trace, arena.TRACES), _seeds(seeds) or arena.SEEDS
    chosen = arena.BASELINES if baselines is None else {words: arena.named_policy(words) for words in baselines.split(";") if words}
    own = load_policies(file) if file is not None else {}
    cards = []
    for name, maker in tqdm({**own, **chosen}.items(), "policies", disable=None):
        is_own = name in own
        cards.append(_play(arena, maker, name, traces, published, unseen_seed, is_own))
    for card in cards[: len(own)]:
        print(f"{card.table()}\n")
    print(arena.ranking(cards))
    if json_path is not None:
        _write(json_path, traces, published, cards)
    return cards


def _play(
    arena: Any, maker: Any, name: str, traces: Sequence[str], seeds: Sequence[int], unseen_seed: int | None, is_own: bool
) -> "Scorecard":
    try:
        return arena.play(maker, traces, seeds, unseen_seed=unseen_seed, checked=is_own, name=name)
    except Exception as error:
        if not is_own:
            raise
        place = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if f.name in METHODS or f.name == "__init__"), None)
        where = f" in {place.name} ({place.filename}, line {place.lineno})" if place else ""
        raise PolicyFailed(f"policy {name} failed{where}: {type(error).__name__}: {error}") from error


def _traces(words: str | None, known: Mapping[str, Any]) -> list[str]:
    names = words.split(",") if words else list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"trace {name!r} is not known; known: {', '.join(known)}")
    return names


def _seeds(words: str | None) -> tuple[int, ...]:
    try:
        seeds = tuple(int(word) for word in words.split(",")) if words else ()
    except ValueError:
        raise ValueError(f"--seeds takes whole numbers, separated by commas, got {words!r}") from None
    if any(seed < 0 for seed in seeds):
        raise ValueError(f"seeds are at least 0, got {words!r}")
    return seeds


def load_policies(path: str | Path) -> dict[str, Any]:
    """The policies of a file: its own public classes that have a policy's five methods. Raises ValueError if there is none."""
    spec = importlib.util.spec_from_file_location("_arena_policy", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as for any import: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    classes = {name: value for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == spec.name}
    found = {name: value for name, value in classes.items() if not name.startswith("_") and all(hasattr(value, m) for m in METHODS)}
    if not found:
        raise ValueError(
            f"{path} has no policy: a public class with the methods {', '.join(METHODS)}; a subclass of FirstComeFirstServed has them all "
            f"(found: {', '.join(classes) or 'no class'})"
        )
    return found


def _write(path: str, traces: Sequence[str], seeds: Sequence[int], cards: "Sequence[Scorecard]") -> None:
    result = {"traces": list(traces), "seeds": list(seeds), "cards": [card.as_dict() for card in cards]}
    Path(path).write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
    print(f"results: {path}")
