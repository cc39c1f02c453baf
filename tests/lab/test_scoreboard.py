"""The scoreboard: read from outputs, complete, and unable to pass a claim that nothing has decided."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from minserve.lab import scoreboard
from minserve.lab.claims import CLAIMS, Verdict
from minserve.lab.scoreboard import Row, Run

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
A27, A02 = CLAIMS["A27"], CLAIMS["A02"]
RUN = Run("07", "A27", "WRONG", "3.26 times", "Formula, and the real engine, here.")


def write_notebook(path: Path, *lines: str) -> Path:
    outputs = [{"output_type": "display_data", "data": {"text/plain": line}} for line in lines]
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "outputs": outputs}]}), encoding="utf-8")
    return path


def test_every_claim_has_a_record_of_a_run_or_says_that_it_is_open() -> None:
    board = scoreboard.read_board(NOTEBOOKS)
    assert scoreboard.faults_of(board) == []
    assert [row.claim.id for row in board] == list(CLAIMS)
    counts = scoreboard.count_states(board)
    assert sum(counts.values()) == 139 and counts["open"] == sum(bool(claim.open) for claim in CLAIMS.values())


def test_records_are_read_from_outputs_in_the_order_of_the_course(tmp_path: Path) -> None:
    write_notebook(tmp_path / "07_b.ipynb", "claim | A27 | WRONG | 3.26 times | Formula | and more")
    write_notebook(tmp_path / "00_a.ipynb", "claim | A27 | WRONG | 3.3 | Count.", "record | x | 1 | s | {}")
    write_notebook(tmp_path / "bonus_c.ipynb", "claim | A26 | HOLDS | 1 | not of the course")
    board = {row.claim.id: row for row in scoreboard.read_board(tmp_path)}
    first, last = board["A27"].runs
    assert first == Run("00", "A27", "WRONG", "3.3", "Count.") and last.why == "Formula | and more"
    assert board["A27"].state == "WRONG" and board["A27"].number == "3.26 times"
    assert board["A26"].runs == () and board["A26"].state == "open"


def test_a_file_that_is_no_notebook_is_named(tmp_path: Path) -> None:
    (tmp_path / "03_x.ipynb").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"03_x\.ipynb is not a notebook"):
        scoreboard.read_board(tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(A27, ()), "A27 has neither a record nor the word 'open'"),
        (Row(replace(A27, open="later"), (RUN,)), "A27 is open in the data, and notebook 07 has decided it"),
        (Row(A27, (replace(RUN, verdict="HOLDS"),)), "A27: notebook 07 says HOLDS, the data WRONG"),
    ],
)
def test_a_board_with_a_fault_says_so(row: Row, words: str) -> None:
    assert scoreboard.faults_of([row]) == [words]


def test_a_sound_board_has_no_fault() -> None:
    assert scoreboard.faults_of([Row(A27, (RUN,)), Row(replace(A02, open="later"), ())]) == []


def test_a_run_names_what_decided_it() -> None:
    assert RUN.deciders == ("a formula", "the real engine")
    assert replace(RUN, why="Simulation, 13B.").deciders == ("the simulator",)
    assert replace(RUN, why="A picture.").deciders == ()


def test_the_table_has_a_row_for_each_claim_with_its_number_and_place() -> None:
    lines = scoreboard.as_markdown([Row(A27, (replace(RUN, notebook="00"), RUN)), Row(A02, ())]).splitlines()
    assert lines[2] == f"| A27 | {A27.statement} | WRONG | 3.26 times | 00, 07 |"
    assert lines[3] == f"| A02 | {A02.statement} | open | {A02.open} | 12 |"


def test_the_picture_has_a_square_for_each_claim_in_the_row_of_its_notebook() -> None:
    rows = [Row(A27, (RUN,)), Row(CLAIMS["A26"], (replace(RUN, claim_id="A26", verdict="HOLDS WITH CONDITIONS"),)), Row(A02, ())]
    figure = scoreboard.picture(rows, "Two are decided")
    [ax] = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["07", "12"]
    assert ax.get_xlim()[1] > 2 and len(ax.collections) == 3
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["1 holds with conditions", "1 wrong", "1 open"]
    assert scoreboard.COLOURS.keys() == scoreboard.HATCHES.keys() == set(Verdict)
