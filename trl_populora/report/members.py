"""The members of a population as one table, which the terminal, the page and the card on the Hub show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


HEADER = ("member", "rating", "held out", "matches", "born", "made by", "parents")
WORDS = ("member", "made by", "parents")  # the other columns are numbers


def list_members(members: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[str, ...]]]:
    """
    Cells of every member under `HEADER`, the best first, by role, teachers' first.

    Args:
        members: As `population.json` has them; of a run that has written none yet, `name`, `role`, `mu` and `sigma`
            will do.
    """
    best_first = sorted(members, key=lambda member: (-(member["mu"] or 0.0), member["name"]))
    return {role: [_cells(each) for each in best_first if each["role"] == role] for role in ("teacher", "student")}


def _cells(member: Mapping[str, Any]) -> tuple[str, ...]:
    mu, sigma, rate = member["mu"], member["sigma"], member.get("held_out")
    return (
        member["name"],
        "-" if mu is None or sigma is None else f"{mu:.1f} ± {sigma:.1f}",
        "-" if rate is None else percent(rate),
        str(member.get("age", "-")),
        f"step {member['born']}" if "born" in member else "-",
        member.get("operator", "-"),
        " + ".join(member.get("parents", ())) or "-",
    )


def percent(rate: float) -> str:
    return f"{100 * rate:.0f} %" if rate == rate else "-"
