"""`docs/metrics.md` as tests read it: the keys that it explains, and what of it a run has logged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trl_populora.tasks.kind import Reject


PAGE = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
STANDS_FOR = {
    "member": r"(teacher|student)_\d+|agent",
    "reason": "|".join(reason.value for reason in Reject),
    "k": r"\d+",
}
OPEN = "[^/]+"


def table(page: str, section: str) -> list[list[str]]:
    """The cells of the rows of a section's first table, without the two lines of its head."""
    (text,) = (part for part in page.split("\n## ") if part.startswith(section + "\n"))
    lines = re.search(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()[2:]]


def rows(section: str) -> list[str]:
    """The keys in the table of a section, as the page writes them."""
    return [key.strip("`") for key, *_ in table(PAGE, section)]


SECTIONS = ("In every step", "In every evaluation", "With some settings", "Seconds")
STEP, EVALUATION, SOME_SETTINGS, SECONDS = map(rows, SECTIONS)
PROMPTS = rows("In a dataset run")
REASONS = rows("Why a proposal is turned down")
UNITS = {cells[0].strip("`"): cells[2] for section in SECTIONS for cells in table(PAGE, section)}


def explained(keys: Iterable[str]) -> set[str]:
    """
    The rows of the page that explain some keys; a row that names more of a key goes before one that leaves it open.

    Raises:
        `AssertionError`: If the page says nothing of a key.
    """
    patterns = {row: _pattern(row) for row in (*STEP, *EVALUATION, *SOME_SETTINGS, *SECONDS, *PROMPTS)}
    patterns = dict(sorted(patterns.items(), key=lambda item: item[1].count(OPEN)))
    found, unknown = set(), []
    for key in keys:
        row = next((row for row, pattern in patterns.items() if re.fullmatch(pattern, key)), None)
        found.add(row) if row else unknown.append(key)
    assert not unknown, f"docs/metrics.md does not explain {unknown}"
    return found


def _pattern(row: str) -> str:
    return re.sub(r"\\\{(\w+)\\\}", lambda name: f"({STANDS_FOR.get(name[1], OPEN)})", re.escape(row))
