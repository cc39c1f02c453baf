"""The museum's exhibits, run outside a notebook: every fault is caught by its check, every sound class and every solution passes.

The notebook asserts this of itself. Here it is asked from outside, with the notebook's own classes, visits and laws.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest

from minserve.core.block_manager import BlockManager
from minserve.core.prefix_cache import PrefixCache
from minserve.core.scheduler import Scheduler

PATH = Path(__file__).resolve().parents[1] / "notebooks" / "bonus_bug_museum.ipynb"
LAWS = {  # exhibit -> the laws that see it
    "Leak": ["books", "progress"],
    "Twice": ["books", "text"],
    "Abort": ["farewell"],
    "Name": ["text"],
    "Room": ["progress"],
    "Order": ["reuse"],
    "Door": ["progress"],
    "Hurry": ["fairness"],
    "Phase": ["text"],
    "Return": ["books", "fairness"],
}


@pytest.fixture(scope="module")
def museum() -> Mapping[str, Any]:
    """All names of the notebook after its code cells have run, in their order."""
    names: dict[str, Any] = {"__name__": "bonus_bug_museum"}
    for cell in nbformat.reads(PATH.read_text(encoding="utf-8"), as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, f"cell {cell.id}", "exec"), names)
    return names


def visit_of(museum: Mapping[str, Any], exhibit: str) -> Any:
    return dict(museum["museum"])[museum[f"Faulty{exhibit}"]]


def test_the_exhibits_are_those_of_the_table(museum: Mapping[str, Any]) -> None:
    assert [faulty.__name__ for faulty, _ in museum["museum"]] == [f"Faulty{exhibit}" for exhibit in LAWS]


@pytest.mark.parametrize("exhibit", LAWS)
def test_the_fault_is_caught_and_the_package_passes(museum: Mapping[str, Any], exhibit: str) -> None:
    faulty, faults, visit = museum[f"Faulty{exhibit}"], museum["exhibit_faults"], visit_of(museum, exhibit)
    assert faulty.__bases__[0] in (BlockManager, PrefixCache, Scheduler)
    assert [line.split(":")[0] for line in faults(faulty, visit)] == LAWS[exhibit]
    assert faults(faulty.__base__, visit) == []


@pytest.mark.parametrize("exhibit", LAWS)
def test_the_stub_is_not_right_yet_and_the_solution_is(museum: Mapping[str, Any], exhibit: str) -> None:
    visit, verdict = visit_of(museum, exhibit), museum["exercise_verdict"]
    assert verdict(museum[f"Exercise{exhibit}"], visit) is False
    assert verdict(museum[f"Solution{exhibit}"], visit) is True
    assert museum[f"Solution{exhibit}"].__bases__ == museum[f"Faulty{exhibit}"].__bases__


@pytest.mark.parametrize("exhibit", LAWS)
def test_the_solution_repairs_the_method_that_the_fault_is_in(museum: Mapping[str, Any], exhibit: str) -> None:
    methods = [{name for name in vars(museum[f"{kind}{exhibit}"]) if not name.startswith("__")} for kind in ("Faulty", "Solution")]
    assert methods[0] == methods[1] and len(methods[0]) == 1


def test_the_exercise_in_design_refuses_a_visit_that_accuses_the_package(museum: Mapping[str, Any]) -> None:
    parts = [faulty for faulty, _ in museum["museum"]]
    with pytest.raises(ValueError, match="the package's own engine, on this visit: progress: EngineStalled: still busy"):
        museum["exercise_caught"](museum["solution_visit"](2, 6), parts)
    quiet = {"engine": {"num_blocks": 6}, "asks": [museum["exhibit_ask"](0, [1, 2], 2)]}
    assert museum["exercise_caught"](quiet, parts) == [1, 2]  # even two tokens show a block kept, and one freed twice
