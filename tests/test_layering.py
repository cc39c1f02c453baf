"""The house's direction: imports run one way, and each room knows only the libraries it may know. Read with `ast`, nothing is run."""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Top to bottom: a file imports only from its own room or from rooms above it.
ROOMS = (
    "core",
    "sim",
    "model",
    "quantize",
    "interface",
    "llm",
    "serve",
    "scale",
    "host_record",
    "lab",
    "bench",
    "gpu_table",
    "allocations",
    "allocators",
    "bench_host",
    "gpu_allocation",
    "bench_gpu",
    "peaks",
    "calibrate",
    "bench_decode",
    "demo",
    "plan",
    "simulate",
    "arena_command",
    "quantize_command",
    "quality_command",
    "cli",
)
# Inside core the reading order is the order of imports; in the other rooms any order without a circle will do.
CORE_ORDER = (
    "request",
    "batch",
    "clock",
    "prefix_cache",
    "block_manager",
    "pressure",
    "policies",
    "controllers",
    "feedback",
    "slo",
    "policy_names",
    "scheduler",
    "snapshot",
    "records",
    "metrics",
    "trace_file",
    "trace",
    "report",
    "engine",
)
# Triton's interpreter computes in numpy, so what repairs and watches it does too.
NUMPY_KERNEL_TOOLS = {"minserve_kernels.interpret", "minserve_kernels.memtrace"}
DRAWING = {"matplotlib", "ipywidgets", "IPython"}


def package_sources() -> dict[str, str]:
    """Dotted module name -> source, for minserve and, once they are there, the kernels."""
    files = [(ROOT, path) for path in (ROOT / "minserve").rglob("*.py")]
    files += [(ROOT / "kernels", path) for path in (ROOT / "kernels").rglob("*.py")]
    return {_module_name(path.relative_to(base)): path.read_text(encoding="utf-8") for base, path in files}


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(module: str, source: str, modules: Mapping[str, str]) -> set[str]:
    """Dotted names that a module imports, in functions too; `from a import b` is a.b where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names}
    return found - {module}


def complaints(sources: Mapping[str, str]) -> list[str]:
    """Every import that breaks a rule, in words, and the circle if there is one."""
    graph = {module: imports_of(module, source, sources) for module, source in sources.items()}
    found = [f"{module} imports {target}: {why}" for module in graph for target in graph[module] if (why := _wrong(module, target))]
    try:
        # minserve/__init__ names its children for type checkers and loads them at first use, so it closes no circle.
        inside = {module: {target for target in graph[module] if target in graph} for module in graph if module != "minserve"}
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        found.append("circle: " + " -> ".join(error.args[1]))
    return sorted(found)


def _wrong(module: str, target: str) -> str | None:
    """Why this one import is not allowed, or None."""
    library = target.split(".")[0]
    if target.startswith("."):
        return "relative imports hide the room"
    if library == "numpy" and module in NUMPY_KERNEL_TOOLS:
        return None
    if module.startswith("minserve_kernels"):
        return None if library in sys.stdlib_module_names | {"torch", "triton", "minserve_kernels"} else "kernels stand alone"
    if module == "minserve":
        return None
    room = module.split(".")[1]
    return next(_wrong_library(room, library), None) if library != "minserve" else _wrong_room(module, target)


def _wrong_library(room: str, library: str) -> Iterator[str]:
    if room == "core" and library not in sys.stdlib_module_names:
        yield "core is standard library only"
    if room == "sim" and library not in sys.stdlib_module_names | {"numpy"}:
        yield "sim knows numpy at most"
    if room != "lab" and library in DRAWING:
        yield "drawing belongs in lab"


def _wrong_room(module: str, target: str) -> str | None:
    if target == "minserve":
        return None  # the version
    room, other = module.split(".")[1], target.split(".")[1]
    if room not in ROOMS or other not in ROOMS:
        return f"not a room of the house: {room if room not in ROOMS else other}"
    if ROOMS.index(other) > ROOMS.index(room):
        return f"upward: {other} stands below {room}"
    if room == other == "core" and module.count(".") == target.count(".") == 2:
        file, other_file = module.split(".")[2], target.split(".")[2]
        if file not in CORE_ORDER or other_file not in CORE_ORDER:
            return "not in core's reading order"
        if CORE_ORDER.index(other_file) > CORE_ORDER.index(file):
            return f"upward: {other_file} is read after {file}"
    return None


def test_imports_run_one_way() -> None:
    sources = package_sources()
    assert {"minserve", "minserve.core.request", "minserve.model.zoo"} <= sources.keys()
    assert complaints(sources) == []


BAD = {
    "core is standard library only": {"minserve.core.batch": "def f():\n    import torch"},
    "sim knows numpy at most": {"minserve.sim.runner": "from torch import nn"},
    "drawing belongs in lab": {"minserve.llm": "import matplotlib.pyplot as plt"},
    "kernels stand alone": {"minserve_kernels.norm": "from minserve.core import request"},
    "minserve_kernels.norm imports numpy: kernels stand alone": {"minserve_kernels.norm": "import numpy as np"},
    "minserve_kernels.memtrace imports pandas: kernels stand alone": {"minserve_kernels.memtrace": "import numpy, pandas"},
    "relative imports hide the room": {"minserve.core.batch": "from . import request"},
    "upward: model stands below core": {"minserve.core.engine": "from minserve.model.runner import ModelRunner"},
    "upward: lab stands below llm": {"minserve.llm": "from minserve.lab import figures", "minserve.lab.figures": ""},
    "upward: engine is read after scheduler": {"minserve.core.scheduler": "import minserve.core.engine"},
    "not in core's reading order": {"minserve.core.batch": "from minserve.core.helpers import x"},
    "not a room of the house: utils": {"minserve.utils": "from minserve.core.request import Request"},
    "circle: ": {"minserve.model.a": "from minserve.model import b", "minserve.model.b": "from minserve.model.a import x"},
}


@pytest.mark.parametrize("complaint", BAD)
def test_the_checker_sees(complaint: str) -> None:
    found = complaints(BAD[complaint])
    assert len(found) == 1 and complaint in found[0]


def test_the_checker_lets_pass() -> None:
    good = {
        "minserve": "from minserve.llm import LLM",
        "minserve.core.request": "import dataclasses\nfrom collections.abc import Mapping",
        "minserve.core.batch": "from minserve.core.request import Request",
        "minserve.model.runner": "import torch\nfrom minserve.core.batch import StepResult",
        "minserve.lab.figures": "from matplotlib.figure import Figure\nfrom minserve.core import trace",
        "minserve.core.trace": "",
        "minserve.cli": "from minserve.lab import figures\nfrom minserve import __version__",
        "minserve_kernels.norm": "import torch, triton",
        "minserve_kernels.interpret": "import numpy as np",
    }
    assert complaints(good) == []
