"""`minserve arena`: a file of a learner's own beside baselines, the file's mistakes in one line, and the template."""

import json
from pathlib import Path

import pytest

from minserve import cli
from minserve.arena_command import load_policies, template
from minserve.lab import arena
from minserve.lab.arena_traces import ArenaTrace, Slo
from minserve.sim.workload import Lengths, make_workload, poisson

SMALL = ArenaTrace(
    "small",
    "for tests",
    Slo("a limit", 0.5, 0.05),
    0.5,
    lambda seed: make_workload(30, Lengths.uniform(20, 200), Lengths.exponential(20, 80), poisson(80.0), seed),
    num_blocks=64,
)
HEAD = "from minserve.core.policies import FirstComeFirstServed\n\n\n"


@pytest.fixture(autouse=True)
def small_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "TRACES", {"small": SMALL})


def policy_file(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(HEAD + body, encoding="utf-8")
    return str(path)


def test_a_file_s_policies_stand_beside_the_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "class Mine(FirstComeFirstServed):\n    pass\n\n\nclass _Hidden(Mine):\n    pass\n"
    path = tmp_path / "cards.json"
    asked = ["--baselines", "cap:most=2;static:size=4", "--seeds", "1,2", "--unseen-seed", "9", "--json", str(path)]
    assert cli.main(["arena", policy_file(tmp_path, body), *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on seed 9, which was not published" in lines[0] and lines[0].startswith("Mine: ")
    assert [line.split("|")[1].strip() for line in lines[-5:-2]][0] == "Mine"
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["seeds"] == [1, 2] and written["traces"] == ["small"]
    assert [(card["policy"], len(card["rows"]), len(card["unseen"])) for card in written["cards"]] == [
        ("Mine", 2, 1),
        ("cap:most=2", 2, 0),
        ("static:size=4", 2, 0),
    ]


def test_a_cheat_is_disqualified_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "class Mine(FirstComeFirstServed):\n    def candidates(self, now):\n        return now.waiting[1:]\n"
    assert cli.main(["arena", policy_file(tmp_path, body), "--baselines", "continuous"]) == 0
    out = capsys.readouterr().out
    assert "Mine is disqualified: starves requests: on small, at" in out
    assert out.splitlines()[-2].split("|")[1].strip() == "Mine"


def test_the_list_alone_is_the_baselines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "BASELINES", {name: arena.BASELINES[name] for name in ("continuous", "cap:most=16")})
    assert cli.main(["arena", "--trace", "small"]) == 0
    names = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert sorted(names) == ["cap:most=16", "continuous", "policy"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x = 1\n", "has no policy: a public class with the methods order, candidates"),
        ("class Mine:\n    pass\n", "(found: Mine)"),
        ("1 / 0\n", "cannot be run: ZeroDivisionError"),
        ("class Mine(FirstComeFirstServed):\n    def order(self, request):\n        return request.eos\n", "Mine failed in order ("),
        ("class Mine(FirstComeFirstServed):\n    def __init__(self, size):\n        pass\n", "needs size"),
        ("class Mine(FirstComeFirstServed):\n    def token_budget(self, now):\n        return 0\n", "Mine gives a step 0 tokens"),
    ],
)
def test_mistakes_in_the_file_are_one_line(body: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["arena", policy_file(tmp_path, body), "--baselines", ""]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("minserve: ") and words in error


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--trace", "smal"], "trace 'smal' is not known; known: small"),
        (["--seeds", "1;2"], "--seeds takes whole numbers"),
        (["--seeds", "-1"], "at least 0"),
        (["nowhere.py"], "nowhere.py is not a Python file"),
        (["--baselines", "cap:mots=3"], "did you mean 'most'"),
    ],
)
def test_mistakes_on_the_line_are_one_line(asked: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["arena", *asked]) == 1
    assert words in capsys.readouterr().err


def test_the_template_is_a_policy_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["arena", "--template"]) == 0
    path = tmp_path / "mine.py"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert list(load_policies(path)) == ["MyPolicy"]
    code = [line for line in template().splitlines() if line.strip() and not line.lstrip().startswith(('"""', "#", "import", "from"))]
    assert len(code) <= 22
