"""Tables of a run: what changed in its steps, what changed on `eval_dataset`, and its members.

The first table compares the first and the last fifth of the logged steps, the second the first and the last
evaluation. The page shows all three tables, the terminal and the card on the Hub only the members.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from trl_populora.errors import make_printable
from trl_populora.population.members import ROLES
from trl_populora.report.load import Run, name_table
from trl_populora.run.read import POPULATION_FILE, list_rewards, name_holder, read_population


# A change counts as clear if Welch's test of a run's first fifth against its last gives a p-value below this.
CHANCE = 0.01

Form = Literal["share", "number", "count", "seconds"]

# Metrics that are shares in [0, 1], and what the table of a game calls them.
FLAT = "frac_reward_zero_std"
SHARES: tuple[tuple[str, str], ...] = (
    ("solve/rate", "fresh tasks: attempts right"),
    ("solve/archive_rate", "archived tasks: attempts right"),
    ("solve/thinking_rate", "answers worked out first"),
    ("solve/well_formed", "answers that can be read"),
    ("propose/valid_rate", "proposals that became tasks"),
    ("propose/novel_rate", "programs of a new form"),
    ("solve/frac_none", "tasks that nobody solved"),
    ("solve/frac_all", "tasks that every attempt solved"),
    (FLAT, "tasks at which all attempts were worth the same"),
)


@dataclass(frozen=True)
class Change:
    """
    One line of the table of changes.

    Args:
        name: Name of the metric, in words.
        form: How its values are written.
        first, last: Value before and after: the mean of a fifth, or one evaluation; `None` without a value.
        clear: Whether the change is more than chance; `None` if one side has fewer than two values, and for
            evaluations.
        base: Value of the base without an adapter; `None` without a value.
    """

    name: str
    form: Form
    first: float | None
    last: float | None
    clear: bool | None = None
    base: float | None = None

    @property
    def difference(self) -> float | None:
        """`last` minus `first`."""
        return None if self.first is None or self.last is None else self.last - self.first

    @property
    def told(self) -> str:
        """The change as a sentence without a full stop."""
        before, after, base = (format_value(value, self.form) for value in (self.first, self.last, self.base))
        # "rose" and "fell" claim a change, so they are kept for clear ones.
        verb = "went" if not self.clear else "rose" if (self.difference or 0) > 0 else "fell"
        return f"{self.name} {verb} from {before} to {after}" + (
            f" (the base: {base})" if self.base is not None else ""
        )


def take_fifths(run: Run) -> tuple[list[dict], list[dict]]:
    """
    Takes the first and the last fifth of a run's logged steps, at least one step each; empty below two steps. If
    members came or left, rewards and lengths are averaged over the members that stayed. Averages over all would change
    even where no member does.
    """
    size = max(1, len(run.history) // 5)
    if len(run.history) < 2:
        return [], []
    first, last = run.history[:size], run.history[-size:]
    moved = _list_moved(run)
    if not moved:
        return first, last
    stayed = [name for name in run.members("student") if name not in moved]
    # The members' figures of which these metrics are means.
    own = {"reward": "reward", "completions/mean_length": "length"}
    own |= {f"rewards/{name}/mean": f"rewards/{name}" for name in run.functions}

    def among_stayed(entry: dict) -> dict:
        means = {}
        for metric, figure in own.items():
            known = [entry[key] for name in stayed if entry.get(key := f"member/{name}/{figure}") is not None]
            means[metric] = fmean(known) if known else None
        return entry | means

    return list(map(among_stayed, first)), list(map(among_stayed, last))


def _list_moved(run: Run) -> set[str]:
    """Lists the seats of a dataset run in which a member came or left."""
    return {event["seat"] for event in run.lineage if event["operator"] in ("join", "leave")}


def compare_fifths(run: Run) -> list[Change]:
    """Compares the means of metrics in the first fifth of the logged steps with those in the last fifth."""
    first, last = take_fifths(run)
    if not first:
        return []
    rewards = [f"rewards/{name}/mean" for name in run.functions] if run.game or run.several_functions else []
    rows: list[tuple[str, str, Form]] = [(key, name, "share") for key, name in SHARES]
    if not run.game:
        rows = [("reward", "reward", "number")]
        if not _list_moved(run):  # this share is known only of all members together
            rows.append((FLAT, "prompts at which all rewards of a member were equal", "share"))
    # Rates by kind follow the rate over all kinds.
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
    found = [_make_change(name, form, _pick_known(key, first), _pick_known(key, last)) for key, name, form in rows]
    return [change for change in found if change.first is not None or change.last is not None]


def compare_evaluations(run: Run) -> tuple[tuple[int, int], list[Change]]:
    """Compares the members on `eval_dataset` in the first evaluation and the last. Returns the two steps as well."""
    if len(run.evaluations) < 2:
        return (0, 0), []
    first, last = run.evaluations[0], run.evaluations[-1]
    found = []
    # In the game each table has lines for the mean, the best student and thinking. Only the first table has lines by
    # kind, to keep the list short.
    for table in run.tables if not run.game else ():
        words = f"evaluation{f' ({name})' if (name := name_table(table)) else ''}"
        before, after = (_average_members(entry, table, _list_moved(run)) for entry in (first, last))
        found.append(Change(f"{words}: reward, mean", "number", before, after))
        before, after = (entry.get(f"{table}reward_best") for entry in (first, last))
        found.append(Change(f"{words}: reward, the best member", "number", before, after))
    for table in run.tables if run.game else ():
        words = f"held-out tasks{f' ({name})' if (name := name_table(table)) else ''}"
        rows = [("solve_rate_mean", "base/solve_rate", f"{words}: attempts right")]
        rows += [("solve_rate_best", "base/solve_rate", f"{words}: the best student")]
        rows += [
            (f"{kind}/solve_rate", f"base/{kind}/solve_rate", f"{words}: {kind}")
            for kind in (run.held_out_kinds if table == run.tables[0] else ())
        ]
        rows += [("thinking_rate", "base/thinking_rate", f"{words}: worked out first")]
        for key, base, name in rows:
            before, after = (entry.get(table + key) for entry in (first, last))
            found.append(Change(name, "share", before, after, base=next(reversed(run.series(table + base)[1]), None)))
    return (first["step"], last["step"]), found


def _average_members(entry: Mapping[str, Any], table: str, moved: Collection[str]) -> float | None:
    """Averages the members' rewards on a table, without the seats in which members came or left; `None` if empty."""
    rewards = [reward for name, reward in list_rewards(entry, table).items() if name not in moved]
    return fmean(rewards) if rewards else None


def find_mean(entries: Sequence[dict]) -> Callable[[str], float | None]:
    """Returns a function that computes the mean of a metric over some entries; it returns `None` without a value."""
    return lambda key: fmean(known) if (known := _pick_known(key, entries)) else None


def _pick_known(key: str, entries: Sequence[dict]) -> list[float]:
    return [entry[key] for entry in entries if entry.get(key) is not None]


def _make_change(name: str, form: Form, first: Sequence[float], last: Sequence[float]) -> Change:
    before, after = (fmean(values) if values else None for values in (first, last))
    return Change(name, form, before, after, clear=_differ(first, last))


def _differ(first: Sequence[float], last: Sequence[float]) -> bool | None:
    """Says whether two samples have different means, by Welch's test; `None` below two values each."""
    if min(len(first), len(last)) < 2:
        return None
    if len(set(first)) == len(set(last)) == 1:
        # The test needs values that vary. Chance parts twice five values like this in 2 of 252 orders, less than 1 %.
        # It parts twice four values so in 2 of 70.
        return first[0] != last[0] and min(len(first), len(last)) >= 5
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        # scipy warns if the values of a sample hardly differ. The answer is right even so.
        warnings.simplefilter("ignore", RuntimeWarning)
        return bool(ttest_ind(first, last, equal_var=False).pvalue < CHANCE)


def format_value(value: float | None, form: Form, sign: bool = False) -> str:
    """
    Formats a value for a table; `-` without a value.

    Args:
        value: The value, or a difference of two.
        form: What the value is. A share is written in percent.
        sign: Whether it is a difference, which gets a sign. A difference of shares is in percentage points.
    """
    if value is None:
        return "-"
    digits = {"share": 0, "number": 2, "count": 0, "seconds": 0 if abs(value) >= 10 else 1}[form]
    # Adding 0.0 turns "-0" into "0".
    shown = round(100 * value if form == "share" else value, digits) + 0.0
    text = format(shown, ("+" if sign and shown else "") + f".{digits}f")
    return text + {"share": "" if sign else " %", "seconds": " s"}.get(form, "")


# The table of members.


# These columns hold words and are aligned to the left, the others to the right.
WORDS = ("member", "made by", "parents")
# `best_student_by` decides by which figure the members are sorted, the highest first. For a value that is not listed
# here it is `mu`.
FIGURES = {"reward on eval_dataset": "eval_reward", "reward": "reward"}


@dataclass(frozen=True)
class Members:
    """
    The table of the members of a run.

    Args:
        header: Names of the columns.
        roles: Cells of each member by role, the best member first.
        left: Cells of the members that have left a dataset run, the last to leave first.
    """

    header: tuple[str, ...]
    roles: dict[str, list[tuple[str, ...]]]
    left: list[tuple[str, ...]]


def list_members(population: Mapping[str, Any], members: Iterable[Mapping[str, Any]] | None = None) -> Members:
    """
    Makes the table of the members. It has the settings in which they differ and, in a dataset run, their rewards.
    Members that have left are shown with the figures that they had when they left.

    Args:
        population: Contents of `population.json`; empty while there is none.
        members: The members to show; by default those of `population`. They need only `name`, `role`, `mu` and
            `sigma`.
    """
    shown = [*(population.get("members", []) if members is None else members)]
    gone = population.get("left") or []
    both = [*shown, *gone]
    answers = any("reward" in member for member in shown)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {"member": lambda member: member["name"]}
    # Members of a game have settings only if they began with different ones. Older records of members that have left
    # have none.
    settings = [member["settings"] for member in both if member.get("settings")]
    names = {name: None for own in settings for name in own}  # in the order of the settings
    for name in (name for name in names if len({str(own.get(name)) for own in settings}) > 1):
        columns[name] = partial(_format_setting_of, name)
    if answers:
        columns["reward"] = lambda member: _format_reward(member.get("reward"))
        if any(member.get("eval_reward") is not None for member in both):
            columns["eval reward"] = lambda member: _format_reward(member.get("eval_reward"))
    rated = not answers or population.get("settings", {}).get("member_prompts") == "shared"
    if rated:
        columns["rating"] = _format_rating
    if not answers:
        columns["held out"] = lambda member: format_percent(member.get("held_out"))
        columns["matches"] = lambda member: str(member.get("age", "-"))
    if not answers or any(member.get("born") for member in shown):
        columns["born"] = lambda member: f"step {member['born']}" if "born" in member else "-"
        columns["made by"] = lambda member: member.get("operator", "-")
        columns["parents"] = lambda member: " + ".join(member.get("parents", ())) or "-"
    decides = next((key for words, key in FIGURES.items() if _decided_by(population, words)), "mu")
    # If figures are equal, the rating decides, then the order of the members. The best student is chosen likewise.
    best_first = sorted(shown, key=lambda member: (-_get(member, decides), -_get(member, "mu")))

    def write(member: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(cell(member) for cell in columns.values())

    cells = {role: [write(each) for each in best_first if each["role"] == role] for role in ROLES}
    left = [write({**each, "name": f"{name_holder(each)}, left after step {each['step']}"}) for each in reversed(gone)]
    return Members(tuple(columns), cells, left)


def _decided_by(population: Mapping[str, Any], words: str) -> bool:
    """
    Says whether the figure that is called `words` decided who is the best student. If several students had the highest
    figure, and the rating decided between them, this is true as well.
    """
    why = population.get("best_student_by", "")
    return why == words or why.endswith(f"the highest {words}")


def _get(member: Mapping[str, Any], figure: str) -> float:
    value = member.get(figure)
    return -math.inf if value is None or math.isnan(value) else value


def tell_best(population: Mapping[str, Any], saved: bool) -> str:
    """
    Says which member of a dataset run is best, by which figure, and which others have the same figure. Empty in the
    game, and with a single member.

    Args:
        population: Contents of `population.json`.
        saved: Whether the adapter of the best member lies at the root of the directory.
    """
    members, name = population.get("members", []), population.get("best_student")
    best: Mapping[str, Any] = next((member for member in members if member["name"] == name), {})
    if len(members) < 2 or "reward" not in best:
        return ""
    words = next((words for words in FIGURES if _decided_by(population, words)), "rating")
    equal = [each for each in members if _get(each, FIGURES.get(words, "mu")) == _get(best, FIGURES.get(words, "mu"))]
    if len(equal) < 2:
        return f"Best by {words}: {name}{', whose adapter lies at the root' if saved else ''}."
    tied = [each for each in equal if _get(each, "mu") == _get(best, "mu")]
    why = "by rating" if len(tied) < 2 else "as the first of those with equal ratings"
    names = ", ".join(each["name"] for each in equal)
    taken = f"The adapter at the root is that of {name}" if saved else f"{name} counts as the best"
    return f"No single best by {words}: {names} are equal. {taken}, {why}."


def _format_rating(member: Mapping[str, Any]) -> str:
    mu, sigma = member["mu"], member["sigma"]
    return "-" if mu is None or sigma is None else f"{mu:.1f} ± {sigma:.1f}"


def _format_reward(reward: float | None) -> str:
    return "-" if reward is None or reward != reward else f"{reward:+z.3f}"


def _format_setting_of(name: str, member: Mapping[str, Any]) -> str:
    """Formats a setting of a member; `-` if it has none."""
    value = (member.get("settings") or {}).get(name)
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def format_percent(rate: float | None) -> str:
    """Formats a share in percent; `-` for `None` and NaN."""
    return "-" if rate is None or math.isnan(rate) else f"{100 * rate:.0f} %"


# The same table on the terminal.


def print_population(run: str | Path) -> None:
    """
    Prints the members of a run, the best first in each role: in the game with ratings and held-out solve rates, in a
    dataset run with the settings in which they differ and their rewards. In a dataset run members that have left stand
    below, and a line says which member is best and by which figure.

    The table is plain text if rich is not installed.

    Raises:
        `ValueError`: If `population.json` is missing or broken.
    """
    if not Path(run, POPULATION_FILE).exists():
        raise ValueError(
            f"{run} holds no population.json. Name a run's directory; a run in its first step has none yet."
        )
    population = read_population(run)
    title = f"Population after {population['step']} steps on {population['base_model']}"
    if (base := population.get("held_out_base")) is not None:
        title += f", which solves {format_percent(base)} of the held-out tasks"
    # The file may come from a stranger, and its texts must not command the terminal.
    title = make_printable(title)
    found = list_members(population)
    header = tuple(map(make_printable, found.header))
    sections = [[tuple(map(make_printable, row)) for row in rows] for rows in (*found.roles.values(), found.left)]
    best = make_printable(tell_best(population, Path(run, "adapter_model.safetensors").exists()))
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        lines = [header, *(row for rows in sections for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            title += "\n" + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        sys.stdout.write(title + "\n" + (f"{best}\n" if best else ""))
        return
    table = Table(title=Text(title))
    for column in header:
        table.add_column(column, justify="left" if column in WORDS else "right", no_wrap=True)
    for rows in sections:
        for row in rows:
            # rich would read `[...]` in a `str` as markup. A `Text` is shown unchanged.
            table.add_row(*map(Text, row))
        table.add_section()
    # rich would cut cells in a narrow terminal, and assumes 80 columns for a file or a log.
    console, needed = Console(), Console(width=10_000).measure(table).maximum
    fits = console.is_terminal and needed <= console.width
    (console if fits else Console(width=max(120, needed))).print(table)
    if best:
        sys.stdout.write(f"{best}\n")


def format_duration(seconds: float) -> str:
    """Formats a duration with its two largest units: `42 s`, `3 min 32 s`, `5 h 12 min`, `2 d 3 h`."""
    whole = round(seconds)
    for unit, next_unit, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {next_unit}"
    return f"{whole} s"
