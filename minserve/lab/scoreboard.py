"""What became of every claim: the verdicts that the notebooks' runs came to, in one table.

Why: a list of verdicts that somebody typed is one more text to believe. This one is read out of the outputs of the executed notebooks, so
each row is a run that can be run again; what no run has decided yet says "open" in `claims.json`, with the reason.

Invariant: a claim has a record or is open, never both and never neither; a record's verdict is that of the data.

Taught in notebook 15.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minserve.lab.claims import CLAIMS, Claim, Verdict
from minserve.lab.notebook import lines_of
from minserve.lab.style import GREY, INK, PALETTE, SMALL_PT, add_boxes, new_panel

OPEN = "open"
# What a run's own words name as that which decided. A run may name several.
DECIDERS: Mapping[str, str] = {
    "a formula": r"[Ff]ormula|By construction|Cost model|[Pp]lanner",
    "the simulator": r"[Ss]imulat",
    "the real engine": r"[Rr]eal engine|\bEngine\b|\bhere\b|[Rr]ecorded|[Tt]oy|block manager",
    "sources": r"[Dd]ocumentation|[Pp]ublished|[Ss]ources?\b|release notes",
}
COLOURS = {
    Verdict.HOLDS: PALETTE[2],
    Verdict.CONDITIONAL: PALETTE[4],
    Verdict.WRONG: PALETTE[3],
    Verdict.UNTESTABLE: PALETTE[5],
}
HATCHES = {Verdict.CONDITIONAL: "//", Verdict.UNTESTABLE: "..", Verdict.WRONG: "xx", Verdict.HOLDS: None}


@dataclass(frozen=True, slots=True)
class Run:
    """One verdict as a notebook's output states it."""

    notebook: str  # its number, "07"
    claim_id: str
    verdict: str
    measured: str
    why: str

    @property
    def deciders(self) -> tuple[str, ...]:
        """What decided, by the run's own words: a formula, the simulator, the real engine, sources. Empty: counting."""
        words = f"{self.measured} {self.why}"
        return tuple(name for name, pattern in DECIDERS.items() if re.search(pattern, words))


@dataclass(frozen=True, slots=True)
class Row:
    """A claim, and all runs that met it, in the order of the course."""

    claim: Claim
    runs: tuple[Run, ...]

    @property
    def state(self) -> str:
        """The verdict of the last run, or "open"."""
        return self.runs[-1].verdict if self.runs else OPEN

    @property
    def number(self) -> str:
        """The number that decided, as the last run measured it; of an open claim, why it is open."""
        return self.runs[-1].measured if self.runs else self.claim.open


def read_runs(notebook: Path) -> list[Run]:
    """The verdicts in the outputs of an executed notebook. Raises ValueError for a file that is not one."""
    number, _, _ = notebook.stem.partition("_")
    try:
        lines = lines_of(json.loads(notebook.read_text(encoding="utf-8")), "claim")
        return [Run(number, *fields) for fields in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{notebook.name} is not a notebook with verdicts: {reason}") from error


def read_board(folder: Path) -> list[Row]:
    """A row for each of the 139 claims, from the numbered notebooks of a folder."""
    runs = [run for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")) for run in read_runs(path)]
    by_claim = {claim_id: tuple(run for run in runs if run.claim_id == claim_id) for claim_id in CLAIMS}
    return [Row(claim, by_claim[claim.id]) for claim in CLAIMS.values()]


def faults_of(board: Iterable[Row]) -> list[str]:
    """What is wrong with a board: no record, one of an open claim, another verdict than the data's."""
    faults = []
    for row in board:
        claim = row.claim
        if not row.runs and not claim.open:
            faults.append(f"{claim.id} has neither a record nor the word {OPEN!r}")
        if row.runs and claim.open:
            where = f"notebook {row.runs[-1].notebook}"
            faults.append(f"{claim.id} is {OPEN} in the data, and {where} has decided it")
        for run in row.runs:
            if run.verdict != claim.verdict:
                where = f"notebook {run.notebook}"
                faults.append(f"{claim.id}: {where} says {run.verdict}, the data {claim.verdict}")
    return faults


def count_states(board: Iterable[Row]) -> dict[str, int]:
    """How many claims got each verdict by a run, and how many are open."""
    counts = Counter(row.state for row in board)
    return {state: counts[state] for state in (*Verdict, OPEN)}


def as_markdown(board: Iterable[Row]) -> str:
    """The board as a table: claim, what is said, verdict, the number that decides, and where it was decided."""
    lines = ["| claim | said | verdict | the number that decides | notebook |", "| --- | --- | --- | --- | --- |"]
    for row in board:
        places = ", ".join(dict.fromkeys(run.notebook for run in row.runs)) or ", ".join(row.claim.notebooks)
        lines.append(f"| {row.claim.id} | {row.claim.statement} | {row.state} | {row.number} | {places} |")
    return "\n".join(lines)


def picture(board: Sequence[Row], title: str) -> Figure:
    """A square for each claim, in the row of the notebook that decided it; an open claim is in that of its plan, and empty."""
    figure, ax = new_panel(title, "claims", "notebook", 3.4)
    places = {row.claim.id: row.runs[-1].notebook if row.runs else row.claim.notebooks[-1] for row in board}
    notebooks = sorted(set(places.values()))
    for level, notebook in enumerate(notebooks):
        rows = sorted((row for row in board if places[row.claim.id] == notebook), key=lambda row: [*Verdict, OPEN].index(row.state))
        for state in dict.fromkeys(row.state for row in rows):
            boxes = [(x + 0.06, -level - 0.4, 0.88, 0.8) for x, row in enumerate(rows) if row.state == state]
            verdict = Verdict(state) if state != OPEN else None
            add_boxes(ax, boxes, COLOURS[verdict] if verdict else GREY, HATCHES[verdict] if verdict else None, edge="white")
    ax.set_yticks([-level for level in range(len(notebooks))], notebooks)
    ax.set_xlim(0, max(Counter(places.values()).values()) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(-len(notebooks) + 0.4, 0.6)
    names = {**{verdict.value: COLOURS[verdict] for verdict in Verdict}, OPEN: GREY}
    counts = count_states(board)
    handles = [
        Patch(facecolor=colour, edgecolor="white", hatch=_hatch(name), label=f"{counts[name]} {name.lower()}")
        for name, colour in names.items()
        if counts[name]
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=SMALL_PT, frameon=False, labelcolor=INK)
    return figure


def _hatch(state: str) -> str | None:
    return None if state == OPEN else HATCHES[Verdict(state)]
