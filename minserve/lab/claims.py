"""The 139 claims that the course examines, and the four verdicts it can give.

Why: two widely read texts on serving (document A, 91 claims; document B, 48) are full of rules of thumb. The course takes each
one to a number. This file knows which claims there are, which notebook examines each, and what the desk check said: arithmetic
and primary sources, before anything was run. The notebooks' own runs have the last word.

Invariant: every claim has exactly one desk verdict and at least one notebook.

Taught in notebook 00.
"""

from enum import StrEnum


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

IDS = tuple(f"A{number:02d}" for number in range(1, 92)) + tuple(f"B{number:02d}" for number in range(1, 49))

# What is not listed here holds with conditions.
_DESK = {
    Verdict.HOLDS: "A12 A13 A15 A20 A21 A22 A30 A31 A32 A62 A65 A74 A82 A89 A90 "
    "B04 B10 B15 B20 B23 B24 B25 B27 B29 B31 B33 B39 B41 B42 B44",
    Verdict.WRONG: "A05 A06 A09 A17 A27 A42 A43 A44 A46 A47 A51 A53 A54 A56 A57 A58 A61 A64 A76 A81 B07 B19",
    Verdict.UNTESTABLE: "A50 A67 A86 A91 B01 B34 B46 B48",
}

# A few claims are looked at twice, where a second notebook has the better instrument.
_PLAN = {
    "01": "A01 A60 A63 B02 B05 B06 B30",
    "02": "A03 A04 A05 A06 A07 A09 A79 B03 B04 B07 B20 B21 B22 B23 B24 B25 B26 B27 B28",
    "03": "A12 A13 A14 A15 A16 A18 A19 A20 B31 B32 B33 B34 B35 B44",
    "04": "A10 A11 A17 A21 A62 A69 A70 A75 A76 B29 B43",
    "06": "B33 B34",
    "07": "A22 A23 A24 A25 A26 A27 A28 A29 A44 A78 A87 A88",
    "08": "A30 A31 A32 A33 A34 A35 A36 A37 A38 A39 A86",
    "09": "A45 B08 B09 B10 B11 B12 B13 B14 B15 B16 B17 B18 B19 B40",
    "10": "A40 A41 A42 A46 A47 A48 A49 A50 A56 A57 A61 A64 A81 A83 A84 A85 B36 B37 B45",
    "11": "A08 A43 A51 A52 A53 A54 A55 A58 A68 A71 A72 A73 A74 A77 A89 A90 B41 B42",
    "12": "A02",
    "13": "A84",
    "14": "A59 A65 A66 A67 A80 A82 A91 B01 B38 B39 B46 B47 B48",
}


def desk_verdict(claim_id: str) -> Verdict:
    """What arithmetic and sources say of a claim. Raises ValueError for an unknown id.

    >>> desk_verdict("A27").value
    'WRONG'
    """
    require_known(claim_id)
    return next((verdict for verdict, ids in _DESK.items() if claim_id in ids.split()), Verdict.CONDITIONAL)


def claims_of(notebook: str) -> tuple[str, ...]:
    """The ids of the claims that a notebook ("00" ... "15") examines.

    >>> claims_of("06")
    ('B33', 'B34')
    """
    return tuple(_PLAN.get(notebook, "").split())


def verdict_counts() -> dict[str, int]:
    """How many claims got each verdict at the desk."""
    desk = [desk_verdict(claim_id) for claim_id in IDS]
    return {verdict.value: desk.count(verdict) for verdict in Verdict}


def require_known(claim_id: str) -> None:
    if claim_id not in IDS:
        raise ValueError(f"unknown claim {claim_id!r}: the ids are A01 to A91 and B01 to B48")
