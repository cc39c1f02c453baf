"""One environment, said once: conda's file, the Makefile and CI follow pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import minserve

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def conda_items() -> list[str]:
    """The list items of environment.yml, indented ones with two blanks. The file is flat enough to need no YAML reader."""
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    return [line.rstrip().replace("- ", "", 1) for line in lines if line.lstrip().startswith("- ")]


def test_conda_gives_the_same_environment() -> None:
    channel, python, pip, pip_section, project = (item.strip() for item in conda_items())
    assert channel == "conda-forge"
    assert python == f"python{PROJECT['requires-python']}"
    assert (pip, pip_section) == ("pip", "pip:")
    assert project == "-e .[dev]"  # the extra that `make setup` installs; no version stands twice


def test_dev_holds_lab_triton_and_the_tools_of_make_test() -> None:
    names = {Requirement(text).name for text in EXTRAS["dev"]}
    assert Requirement("minserve[lab,triton]") in map(Requirement, EXTRAS["dev"])
    assert {"ruff", "pyright", "pytest", "pytest-cov", "nbval", "hypothesis"} <= names
    assert {"matplotlib", "ipywidgets", "jupyterlab"} <= {Requirement(text).name for text in EXTRAS["lab"]}


def test_triton_is_asked_for_on_linux_only() -> None:
    [triton] = map(Requirement, EXTRAS["triton"])
    assert triton.name == "triton" and triton.marker is not None
    assert [triton.marker.evaluate({"platform_system": system}) for system in ("Linux", "Darwin", "Windows")] == [True, False, False]
    everywhere = PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["lab"]
    assert "triton" not in {Requirement(text).name for text in everywhere}


def test_case_200_no_upper_bound_replaces_a_library_that_is_loaded() -> None:
    """Case 200: on a hosted notebook with numpy 2 and torch 2 in place, our install line leaves both alone."""
    requirements = [Requirement(text) for text in PROJECT["dependencies"] + EXTRAS["lab"]]
    assert {clause.operator for requirement in requirements for clause in requirement.specifier} == {">="}
    bounds = {requirement.name: requirement.specifier for requirement in requirements}
    assert bounds["numpy"].contains("2.0.2") and bounds["torch"].contains("2.11.0+cu128")


def test_the_makefile_installs_a_torch_that_the_project_accepts() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [version] = re.findall(r"^TORCH \?= (\S+)$", makefile, flags=re.MULTILINE)
    [torch] = [Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == "torch"]
    assert torch.specifier.contains(version)
    assert "'.[dev]'" in makefile


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text(encoding="utf-8").rstrip().endswith("\nmake test")


def test_this_python_is_one_that_is_promised() -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(".".join(map(str, sys.version_info[:3])))
    assert re.fullmatch(r"\d+\.\d+\.\d+", minserve.__version__)


def test_an_old_python_is_refused_in_words(tmp_path: Path) -> None:
    """A stand-in for python3.9 that runs the Makefile's check with another version in sys."""
    old = tmp_path / "python3.9"
    pretend = "import sys; sys.version_info = (3, 9, 2); sys.version = '3.9.2 (old)'; exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{pretend}" "$2"\n', encoding="utf-8")
    old.chmod(0o755)
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "pyproject.toml").touch()
    run = subprocess.run(["make", "setup", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert run.returncode != 0 and "minserve needs Python 3.11 or newer" in run.stderr and "3.9.2" in run.stderr
    assert not (tmp_path / ".venv").exists()
