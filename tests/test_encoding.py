"""Text files are read and written as UTF-8 by name: on Korean Windows, where some of the classes are, the system's own is cp949."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Position of the mode, or None for the calls that are always text.
CALLS: dict[str, int | None] = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "read_text": None, "write_text": None}


def without_encoding(source: str) -> list[int]:
    """Lines of calls that open text without saying its encoding."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _lacks_encoding(node)]


def _lacks_encoding(call: ast.Call) -> bool:
    is_method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in CALLS or any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    # `path.open("rb")` has the mode first, `open(path, "rb")` and `io.open(path, "rb")` second: any such string will do.
    modes += call.args[:2] if is_method else call.args[1:2]
    is_binary = any(isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" in mode.value for mode in modes)
    return CALLS[name] is None or not (is_binary or _opens_bytes(call))


def _opens_bytes(call: ast.Call) -> bool:
    """`archive.open(member)` of a zip file and Pillow's `Image.open(file)` give bytes and pictures."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in ("archive", "Image")


@pytest.mark.parametrize("folder", ["minserve", "tests", "kernels"])
def test_case_191_every_text_file_names_its_encoding(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in without_encoding(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "bad", ["open(p)", "open(p, 'w')", "p.open()", "p.open('a')", "p.read_text()", "p.write_text(s)", "io.open(p, mode='r')"]
)
def test_case_191_the_check_sees(bad: str) -> None:
    assert without_encoding(f"x = 1\n{bad}") == [2]


@pytest.mark.parametrize(
    "good",
    [
        "open(p, 'rb')",
        "p.open('wb')",
        "open(p, encoding='utf-8')",
        "p.read_bytes()",
        "p.read_text(encoding='utf-8')",
        "archive.open(name)",
        "Image.open(file)",
    ],
)
def test_case_191_the_check_lets_pass(good: str) -> None:
    assert without_encoding(good) == []
