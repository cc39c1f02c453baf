"""The 139 claims that the course examines, and the four verdicts it can give.

Why: two widely read texts on serving (document A, 91 claims; document B, 48) are full of rules of thumb. The course takes each
one to a number. `claims.json` says of each claim, in our own words: what is said, what the desk check found (arithmetic and primary
sources, before anything was run), the number that decides, and which notebooks examine it. The notebooks' own runs have the last word:
where one disagrees, the data is changed on purpose, never in passing.

Invariant: every claim has exactly one verdict, one deciding number and at least one notebook; `open` says why no run has decided it yet.

Taught in notebook 00.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from types import MappingProxyType


class Verdict(StrEnum):
    HOLDS = "HOLDS"
    CONDITIONAL = "HOLDS WITH CONDITIONS"
    WRONG = "WRONG"
    UNTESTABLE = "UNTESTABLE AS SAID"


MEANING = {
    Verdict.HOLDS: "true as said, within rounding",
    Verdict.CONDITIONAL: "true for some models or loads, or right in direction only",
    Verdict.WRONG: "contradicted by arithmetic, by a run, or by the primary source",
    Verdict.UNTESTABLE: "no metric to decide by; the nearest testable form is examined",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim: what is said, what is expected of it, by which number, and where (a few are looked at twice)."""

    id: str
    verdict: Verdict
    notebooks: tuple[str, ...]
    statement: str
    decides: str
    open: str = ""  # why no notebook has decided it yet


def _load() -> Mapping[str, Claim]:
    text = (resources.files("minserve.lab") / "claims.json").read_text(encoding="utf-8")
    claims = [Claim(**{**row, "verdict": Verdict(row["verdict"]), "notebooks": tuple(row["notebooks"])}) for row in json.loads(text)]
    return MappingProxyType({claim.id: claim for claim in claims})


CLAIMS = _load()
IDS = tuple(CLAIMS)


def require_known(claim_id: str) -> Claim:
    """The claim of that id. Raises ValueError for an unknown one.

    >>> require_known("A27").decides
    '3.26 times; 1/0.3 = 3.33 is the limit'
    """
    if claim_id not in CLAIMS:
        raise ValueError(f"unknown claim {claim_id!r}: the ids are A01 to A91 and B01 to B48")
    return CLAIMS[claim_id]


def desk_verdict(claim_id: str) -> Verdict:
    """What arithmetic and sources say of a claim. Raises ValueError for an unknown id.

    >>> desk_verdict("A27").value
    'WRONG'
    """
    return require_known(claim_id).verdict


def claims_of(notebook: str) -> tuple[str, ...]:
    """The ids of the claims that a notebook ("00" ... "15") examines.

    >>> claims_of("06")
    ('B33', 'B34')
    """
    return tuple(claim.id for claim in CLAIMS.values() if notebook in claim.notebooks)


def verdict_counts() -> dict[str, int]:
    """How many claims got each verdict at the desk."""
    desk = [claim.verdict for claim in CLAIMS.values()]
    return {verdict.value: desk.count(verdict) for verdict in Verdict}
