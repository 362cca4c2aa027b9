"""Tables of a run: what changed from its first fifth to its last, and its members, on the terminal too."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from trl_populora.errors import make_printable
from trl_populora.report.load import Run, table_name
from trl_populora.run.read import POPULATION_FILE, read_population


# A difference is called one if steps as unlike as these would show it by chance in one of a hundred cases.
CHANCE = 0.01

Form = Literal["share", "number", "count", "seconds"]

SHARES: tuple[tuple[str, str], ...] = (
    ("solve/rate", "fresh tasks: attempts right"),
    ("solve/archive_rate", "archived tasks: attempts right"),
    ("solve/thinking_rate", "answers worked out first"),
    ("solve/well_formed", "answers that can be read"),
    ("propose/valid_rate", "proposals that became tasks"),
    ("propose/novel_rate", "programs of a new form"),
    ("solve/frac_none", "tasks that nobody solved"),
    ("solve/frac_all", "tasks that every attempt solved"),
    ("frac_reward_zero_std", "tasks at which all attempts were worth the same"),
)


@dataclass(frozen=True)
class Change:
    """
    One line of the table.

    Args:
        name: What it is, in words.
        form: How it reads.
        first, last: Before and after; `None` where nothing was seen.
        clear: Whether it changed by more than steps differ among themselves; `None` where too few steps were logged to
            say.
        base: The same of the base without any adapter.
    """

    name: str
    form: Form
    first: float | None
    last: float | None
    clear: bool | None = None
    base: float | None = None

    @property
    def difference(self) -> float | None:
        return None if self.first is None or self.last is None else self.last - self.first

    @property
    def told(self) -> str:
        """As a sentence would say it."""
        before, after, base = (write(value, self.form) for value in (self.first, self.last, self.base))
        verb = "went" if not self.clear else "rose" if (self.difference or 0) > 0 else "fell"
        return f"{self.name} {verb} from {before} to {after}" + (
            f" (the base: {base})" if self.base is not None else ""
        )


def fifths(run: Run) -> tuple[list[dict], list[dict]]:
    """The first and the last fifth of a run's logged steps, at least one step each; empty for fewer than two steps."""
    size = max(1, len(run.history) // 5)
    return (run.history[:size], run.history[-size:]) if len(run.history) > 1 else ([], [])


def changes(run: Run) -> list[Change]:
    """Shares, rewards, what the kinds measure, and seconds, in the first fifth of the logged steps and in the last."""
    first, last = fifths(run)
    if not first:
        return []
    functions = sorted({key for entry in run.history for key in entry if key.startswith("rewards/")})
    rewards = [key for key in functions if key.endswith("/mean")]
    rows: list[tuple[str, str, Form]] = [(key, name, "share") for key, name in SHARES]
    if len(run.kinds) > 1:
        rows[1:1] = [(f"solve/{kind}/rate", f"{kind}: attempts right", "share") for kind in run.kinds]
    rows += [(key, f"reward: {key.split('/')[1]}", "number") for key in rewards]
    rows += [(f"curriculum/{name}", f"tasks: {name.replace('_', ' ')}", "number") for name in run.measures]
    rows += [("curriculum/features", "different features in recent tasks", "count")] * (
        "curriculum/features" in run.breadth
    )
    rows += [
        ("completions/mean_length", "tokens of a completion", "count"),
        ("step_time", "time of a step", "seconds"),
    ]
    found = [_change(name, form, _known(key, first), _known(key, last)) for key, name, form in rows]
    return [change for change in found if change.first is not None or change.last is not None]


def held_out_changes(run: Run) -> tuple[tuple[int, int], list[Change]]:
    """The steps of the first and last evaluation, and the students' figures then; none with fewer than two of them."""
    if len(run.evaluations) < 2:
        return (0, 0), []
    first, last = run.evaluations[0], run.evaluations[-1]
    found = []
    for table in run.tables:
        words = f"held-out tasks{f' ({name})' if (name := table_name(table)) else ''}"
        rows = [("solve_rate_mean", "base/solve_rate", f"{words}: attempts right")]
        rows += [("solve_rate_best", "base/solve_rate", f"{words}: the best student")]
        rows += [
            (f"{kind}/solve_rate", f"base/{kind}/solve_rate", f"{words}: {kind}")
            for kind in (run.held_out_kinds if table == run.tables[0] else ())
        ]
        rows += [("thinking_rate", "base/thinking_rate", f"{words}: worked out first")]
        for key, base, name in rows:
            before, after = (entry.get(table + key) for entry in (first, last))
            found.append(Change(name, "share", before, after, base=_latest(run, table + base)))
    return (first["step"], last["step"]), found


def _latest(run: Run, key: str) -> float | None:
    _, values = run.series(key)
    return values[-1] if values else None


def _known(key: str, entries: Sequence[dict]) -> list[float]:
    return [entry[key] for entry in entries if entry.get(key) is not None]


def _change(name: str, form: Form, first: Sequence[float], last: Sequence[float]) -> Change:
    before, after = (fmean(values) if values else None for values in (first, last))
    return Change(name, form, before, after, clear=_differ(first, last))


def _differ(first: Sequence[float], last: Sequence[float]) -> bool | None:
    """Welch's test; as if steps were independent, which they nearly are but for slow drifts."""
    if min(len(first), len(last)) < 2:
        return None
    if len(set(first)) == len(set(last)) == 1:
        return first[0] != last[0]
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():  # of values that hardly differ, whose answer is "no"
        warnings.simplefilter("ignore", RuntimeWarning)
        return bool(ttest_ind(first, last, equal_var=False).pvalue < CHANCE)


def write(value: float | None, form: Form, sign: bool = False) -> str:
    """A value as tables show it, `-` where there is none; `sign` for a difference, in points where it is of shares."""
    if value is None:
        return "-"
    digits = {"share": 0, "number": 2, "count": 0, "seconds": 0 if abs(value) >= 10 else 1}[form]
    shown = round(100 * value if form == "share" else value, digits) + 0.0  # no "-0"
    text = format(shown, ("+" if sign and shown else "") + f".{digits}f")
    return text + {"share": "" if sign else " %", "seconds": " s"}.get(form, "")


# The members of a population as one table, which the terminal, the page and the card on the Hub show.


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


# The members of a run as a table on the terminal.


def print_population(run: str | Path) -> None:
    """
    Prints the members of a run with their ratings and their solve rates on held-out tasks, best first in each role; as
    plain text without rich.

    Raises:
        `ValueError`: If `population.json` is missing or broken.
    """
    if not Path(run, POPULATION_FILE).exists():
        raise ValueError(f"{run} holds no population.json: no run has logged a step or an evaluation there.")
    population = read_population(run)
    title = f"Population after {population['step']} steps on {population['base_model']}"
    if (base := population.get("held_out_base")) is not None:
        title += f", which solves {percent(base)} of the held-out tasks"
    title = make_printable(title)
    roles = {
        role: [tuple(map(make_printable, row)) for row in rows]
        for role, rows in list_members(population["members"]).items()
    }
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        lines = [HEADER, *(row for rows in roles.values() for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            title += "\n" + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        sys.stdout.write(title + "\n")
        return
    table = Table(title=Text(title))
    for column in HEADER:
        table.add_column(column, justify="left" if column in WORDS else "right", no_wrap=True)
    for rows in roles.values():
        for row in rows:
            table.add_row(*map(Text, row))  # a text is shown as it is, a `str` would be read as markup
        table.add_section()
    console = Console()
    # Into a file or a log, where rich assumes 80 columns, two parents' names would be cut.
    (console if console.is_terminal else Console(width=120)).print(table)


def duration(seconds: float) -> str:
    """Two units that matter: `42 s`, `3 min 32 s`, `5 h 12 min`, `2 d 3 h`."""
    whole = round(seconds)
    for unit, next_unit, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {next_unit}"
    return f"{whole} s"
