"""What the production engines add to this one, and in what state they are: facts with their source and date.

Why: "take an engine that has proven itself" is good advice that expires. Of the two engines that document B names, one has been put into
maintenance since. So each fact in `engines.json` has the page that says it and a date, and says itself when it has become old:

    published   the source bears this date (a release, an announcement)
    read        the source bears none: the month in which it was read for this course
    reported    other pages say so of this source; it was not read itself

Nothing here was run for this course; versions are those of the package index in November 2026.

Invariant: no fact without a source and a date; each basic feature is on from the start, asked for by a flag, or absent.

Taught in notebook 14.
"""

import datetime
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

ON, FLAG, NO = "on", "by a flag", "no"
BASICS = ("KV cache", "KV in blocks", "continuous batching")
HOW = ("published", "read", "reported")
DAYS_A_YEAR = 365


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement, where it stands, and from when it is (2026-11 or 2026-11-30)."""

    words: str
    source: str
    date: str
    how: str

    def age_days(self, today: datetime.date) -> int:
        """Since the first day that the date can mean."""
        year, month, *day = (int(part) for part in self.date.split("-"))
        return (today - datetime.date(year, month, *(day or [1]))).days

    def is_old(self, today: datetime.date) -> bool:
        """Older than a year: look again before relying on it."""
        return self.age_days(today) > DAYS_A_YEAR

    def line(self, today: datetime.date) -> str:
        return f"{self.words} ({self.how} {self.date}{', older than a year' if self.is_old(today) else ''})"


@dataclass(frozen=True, slots=True)
class ProductionEngine:
    """One engine: its state, what it adds, and whether the basics are on when it starts."""

    name: str
    is_maintained: bool
    state: tuple[Fact, ...]
    adds: tuple[Fact, ...]
    basics: dict[str, str]
    basics_source: str

    @property
    def facts(self) -> tuple[Fact, ...]:
        return self.state + self.adds


def _engine(row: dict[str, Any]) -> ProductionEngine:
    facts = {name: tuple(Fact(**fact) for fact in row[name]) for name in ("state", "adds")}
    return ProductionEngine(**{**row, **facts, "basics": dict(zip(BASICS, row["basics"], strict=True))})


def _load() -> dict[str, ProductionEngine]:
    text = (resources.files("minserve.lab") / "engines.json").read_text(encoding="utf-8")
    return {row["name"]: _engine(row) for row in json.loads(text)}


ENGINES = _load()
