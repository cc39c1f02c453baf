"""The list of claims: complete, and each with one verdict and a notebook."""

import pytest

from minserve.lab import claims


def test_every_claim_has_one_verdict_and_a_notebook() -> None:
    assert len(claims.IDS) == len(set(claims.IDS)) == 139
    assert claims.verdict_counts() == {"HOLDS": 30, "HOLDS WITH CONDITIONS": 79, "WRONG": 22, "UNTESTABLE AS SAID": 8}
    planned = [claim_id for number in range(16) for claim_id in claims.claims_of(f"{number:02d}")]
    assert set(planned) == set(claims.IDS)
    assert sorted(claim_id for claim_id in set(planned) if planned.count(claim_id) > 1) == ["A84", "B33", "B34"]


def test_every_verdict_has_a_meaning() -> None:
    assert list(claims.MEANING) == list(claims.Verdict)


def test_unknown_ids_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'C01'"):
        claims.desk_verdict("C01")
