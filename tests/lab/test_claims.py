"""The list of claims: complete, each with one verdict, one number and a notebook, in words that fit on a line."""

import json
from importlib import resources
from typing import Any, cast

import pytest

from minserve.lab import claims
from minserve.lab.claims import CLAIMS


def test_every_claim_has_one_verdict_and_a_notebook() -> None:
    assert len(claims.IDS) == len(set(claims.IDS)) == 139
    assert claims.IDS == (*(f"A{number:02d}" for number in range(1, 92)), *(f"B{number:02d}" for number in range(1, 49)))
    assert claims.verdict_counts() == {"HOLDS": 30, "HOLDS WITH CONDITIONS": 79, "WRONG": 22, "UNTESTABLE AS SAID": 8}
    planned = [claim_id for number in range(16) for claim_id in claims.claims_of(f"{number:02d}")]
    assert set(planned) == set(claims.IDS)
    assert sorted(claim_id for claim_id in set(planned) if planned.count(claim_id) > 1) == ["A84", "B33", "B34"]


def test_the_file_says_each_claim_once_and_nothing_else() -> None:
    rows = json.loads((resources.files("minserve.lab") / "claims.json").read_text(encoding="utf-8"))
    wanted = {"id", "verdict", "notebooks", "statement", "decides"}
    assert len(rows) == len(CLAIMS) and all(row.keys() - {"open"} == wanted for row in rows)
    assert all(row["open"].strip() for row in rows if "open" in row)  # an open claim says why


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_a_claim_is_one_line_with_a_number_that_decides(claim: claims.Claim) -> None:
    assert 10 <= len(claim.statement) <= 120 and claim.statement[-1] == "." and claim.statement == claim.statement.strip()
    assert 5 <= len(claim.decides) <= 110 and claim.decides[-1] not in ".;," and "\n" not in claim.statement + claim.decides
    assert " | " not in claim.statement + claim.decides  # the mark between the fields of a record
    if claim.decides.startswith("none:"):  # an opinion: nothing to measure, and said so
        assert claim.verdict is claims.Verdict.UNTESTABLE


def test_no_two_claims_say_the_same() -> None:
    assert len({claim.statement for claim in CLAIMS.values()}) == 139


def test_every_verdict_has_a_meaning() -> None:
    assert list(claims.MEANING) == list(claims.Verdict)


def test_the_data_cannot_be_changed_in_passing() -> None:
    with pytest.raises(TypeError):
        cast(Any, CLAIMS)["A27"] = CLAIMS["A26"]
    with pytest.raises(AttributeError):
        cast(Any, CLAIMS["A27"]).verdict = claims.Verdict.HOLDS


def test_unknown_ids_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'C01'"):
        claims.desk_verdict("C01")
