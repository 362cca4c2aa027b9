"""What changed in a run: its first fifth beside its last, and held-out tasks before and after."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from trl_populora.report.load import Run, table_name


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
