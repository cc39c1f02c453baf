"""Facts about production engines: each with a source and a date, and old ones say so."""

import datetime
import re

from minserve.lab.engines import BASICS, ENGINES, FLAG, HOW, NO, ON, Fact

TODAY = datetime.date(2026, 11, 30)


def test_every_fact_has_its_source_its_date_and_how_it_is_known() -> None:
    facts = [fact for engine in ENGINES.values() for fact in engine.facts]
    assert len(facts) >= 20
    for fact in facts:
        assert fact.source.startswith("https://") and fact.how in HOW and fact.words
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", fact.date) and 0 <= fact.age_days(TODAY) < 5 * 365


def test_an_old_fact_says_so_and_a_day_more_makes_it_old() -> None:
    fact = Fact("it is new", "https://example.org", "2025-11-30", "published")
    assert fact.age_days(TODAY) == 365 and not fact.is_old(TODAY)
    assert fact.line(TODAY) == "it is new (published 2025-11-30)"
    assert fact.line(datetime.date(2026, 12, 1)) == "it is new (published 2025-11-30, older than a year)"
    assert Fact("", "", "2026-11", "read").age_days(TODAY) == 29


def test_one_of_the_two_engines_that_document_b_names_is_no_longer_developed() -> None:
    assert ENGINES["vLLM"].is_maintained and not ENGINES["TGI"].is_maintained
    assert ENGINES["TGI"].state[0].date == "2025-12-11"
    assert [name for name, engine in ENGINES.items() if not engine.is_maintained] == ["TGI"]


def test_the_basics_are_on_in_both_of_them() -> None:
    for engine in ENGINES.values():
        assert tuple(engine.basics) == BASICS and set(engine.basics.values()) <= {ON, FLAG, NO} and engine.basics_source
    assert all(ENGINES[name].basics[basic] == ON for name in ("vLLM", "TGI") for basic in BASICS)
    assert ENGINES["llama.cpp"].basics["KV in blocks"] == NO
