"""Says in one word whether a run went well, with the figures that say so. The page and the terminal show it.

    broken          most proposals are refused, most answers cannot be read, or most completions are cut; or members
                    are clearly worse than at the start
    narrowing       the game goes round in circles: programs of a new form, or the features in use, have become few
    learning        members are clearly better than at the start
    broken          almost all rewards are equal, so there is nothing to learn from
    cannot be told  there are no two evaluations on held-out tasks
    flat            members are neither better nor worse

With fewer than ten logged steps nothing can be told. Otherwise the words are looked for in this order. In the game
"better" is about held-out tasks, by a 95 % interval. In a dataset run it is about the reward in training, by the test
of the table "What changed"; if the test says nothing of a change that is larger than steps differ by, nothing can be
told. The thresholds are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from trl_populora.report.load import Run, name_table
from trl_populora.report.table import FLAT, compare_fifths, find_mean, format_percent, take_fifths


FEWEST_STEPS = 10  # logged steps; each fifth has at least two then
# Metric, the lowest and the highest mean of the last fifth that is no fault, and what the metric is a share of.
FAULTS = (
    ("propose/valid_rate", 0.25, 1.0, "of the proposals became tasks"),
    ("solve/well_formed", 0.25, 1.0, "of the answers could be read"),
    ("completions/clipped_ratio", 0.0, 0.5, "of the completions were cut at `max_completion_length`"),
)
DEAD = ((FLAT, 0.0, 0.95, "of the groups of attempts had equal rewards, from which students learn nothing"),)
# Metric, what it counts, and how it is written. A run narrows if it falls below NARROWED times its value at the start.
NARROW: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("propose/novel_rate", "of the programs had a new form", format_percent),
    ("curriculum/features", "different features were used in recent tasks", "{:.0f}".format),
)
NARROWED = 0.6
MOSTLY = 0.5  # if less than this part of a gain is left at equal effort, it is longer reasoning
FEWEST_LIKE = 0.5  # share of the base's answers that need their like, so that this can be told


@dataclass(frozen=True)
class Verdict:
    """
    What a run came to.

    Args:
        word: `"broken"`, `"narrowing"`, `"learning"`, `"flat"` or `"cannot be told"`.
        why: The figures that say so, as a sentence.
        remark: A sentence, if the gain of a game is mostly longer reasoning, or may be. Of a dataset run, if one of
            several reward functions was always 0. Otherwise empty.
    """

    word: str
    why: str
    remark: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.word.capitalize()}:", self.why, self.remark)))


def judge(run: Run) -> Verdict:
    """Says whether a run has gone well so far."""
    if len(run.history) < FEWEST_STEPS:
        told = f"{len(run.history)} of the {FEWEST_STEPS} steps that a verdict needs are logged."
        return Verdict("cannot be told", told)
    if fault := _find_fault(run, FAULTS):
        return Verdict("broken", fault)
    gain, margin, why, remark = _measure_gain(run) if run.game else _compare_rewards(run)
    if gain < -margin:
        return Verdict("broken", why)
    if run.game and (narrow := _find_narrowing(run)):
        return Verdict("narrowing", narrow)
    if gain > margin:
        return Verdict("learning", why, remark)
    # After "learning", because a run that has learned everything ends so, too. Where an attempt is compared with all
    # attempts of its student, equal rewards in a group still teach.
    compares_groups = run.population.get("settings", {}).get("student_baseline", "group") == "group"
    if compares_groups and (fault := _find_fault(run, DEAD)):
        return Verdict("broken", fault)
    return Verdict("cannot be told" if math.isnan(gain) else "flat", why)


def _find_fault(run: Run, faults: Sequence[tuple[str, float, float, str]]) -> str:
    """Finds a share of the last fifth that leaves little to learn from; empty if there is none."""
    early, late = (find_mean(entries) for entries in take_fifths(run))
    for key, lowest, highest, words in faults:
        if (share := late(key)) is not None and not lowest <= share <= highest:
            return _tell(words, early(key), share, format_percent)
    return ""


def _find_narrowing(run: Run) -> str:
    early, late = (find_mean(entries) for entries in take_fifths(run))
    for key, words, write in NARROW:
        before, after = early(key), late(key)
        if before and after is not None and after < NARROWED * before:
            return _tell(words, before, after, write)
    return ""


def _tell(words: str, before: float | None, after: float, write: Callable[[float], str]) -> str:
    start = "" if before is None else f" (in the first fifth: {write(before)})"
    return f"{write(after)} {words} in the last fifth of the steps{start}."


def _compare_rewards(run: Run) -> tuple[float, float, str, str]:
    """Compares the reward at the start and at the end of a dataset run's training. Returns as `_measure_gain` does."""
    change = next((each for each in compare_fifths(run) if each.name == "reward"), None)
    if change is None or change.difference is None or change.clear is None:
        return math.nan, math.nan, "Too few steps have a reward.", ""
    if change.clear:
        return change.difference, 0.0, f"The {change.told} in training.", _tell_idle_rewards(run)
    # Without a clear change a run is flat, unless the change is larger than steps beside each other differ.
    known = [[entry["reward"] for entry in fifth if entry.get("reward") is not None] for fifth in take_fifths(run)]
    if abs(change.difference) > math.sqrt(fmean(variance(rewards) for rewards in known)):
        why = f"The {change.told} in training, and so few steps do not tell whether that is chance."
        return math.nan, math.nan, why, ""
    return change.difference, math.inf, f"The {change.told} in training.", ""


def _tell_idle_rewards(run: Run) -> str:
    """Says so if some of several reward functions were 0 in every step: then the others alone have risen."""
    if not run.several_functions:
        return ""
    keys = {name: (f"rewards/{name}/mean", f"rewards/{name}/std") for name in run.functions}
    idle = [f"`{n}`" for n, both in keys.items() if {entry.get(key) for entry in run.history for key in both} == {0.0}]
    return f"Reward functions that were 0 in every step: {', '.join(idle)}." if idle else ""


def _measure_gain(run: Run) -> tuple[float, float, str, str]:
    """
    Measures what the students of a game gained on the first table of held-out tasks.

    Returns:
        The last solve rate less the first, half of the difference's 95 % interval, a sentence with both, and a remark
        if the gain is mostly longer reasoning, or may be. NaN without two evaluations.
    """
    table = (run.tables or ["eval/"])[0]
    entries = [entry for entry in run.evaluations if entry.get(f"{table}solve_rate_mean") is not None]
    if len(entries) < 2:
        return math.nan, math.nan, "There are no two evaluations on held-out tasks (`eval_tasks`, `eval_steps`).", ""
    first, last = entries[0], entries[-1]
    rates = [entry[f"{table}solve_rate_mean"] for entry in (first, last)]
    # Both evaluations attempt the same tasks, so their errors go together, and the interval is wider than it need be.
    margin = math.hypot(*(entry[f"{table}solve_rate_margin"] for entry in (first, last)))
    gain = rates[1] - rates[0]
    where = f"held-out tasks{f' ({name})' if (name := name_table(table)) else ''}"
    why = (
        f"The students solve {format_percent(rates[1])} of the {where}, {100 * gain:+.0f} points "
        f"[{100 * (gain - margin):+.0f} to {100 * (gain + margin):+.0f}] since step {first['step']}."
    )
    return gain, margin, why, _tell_reasoning(first, last, table, gain)


def _tell_reasoning(first: dict, last: dict, table: str, gain: float) -> str:
    """
    Says so if a gain is mostly longer reasoning: if less than half of it is left where students and base think or both
    do not, with answers of like length. If most of the base's answers have no like left, this cannot be told.
    """
    names = ("thinking_rate", "mean_length", "like_base")
    figures = [entry[key] for entry in (first, last) for name in names if entry.get(key := table + name) is not None]
    if gain <= 0 or len(figures) < 2 * len(names):  # an earlier version has no such figures
        return ""
    share, length, like, now_share, now_length, now_like = figures
    if now_length <= length and now_share <= share:
        return ""
    told = (
        f"{format_percent(now_share)} of the answers are worked out instead of {format_percent(share)}, an answer has "
        f"{now_length:.0f} tokens instead of {length:.0f}, and"
    )
    if min(like, now_like) < FEWEST_LIKE:
        rest = f"only {format_percent(min(like, now_like))} of the base's answers have their like."
        return f"How much of it is longer reasoning cannot be told: {told} {rest}"
    left = last[f"{table}gain_equal_effort"] - first[f"{table}gain_equal_effort"]
    if left >= MOSTLY * gain:
        return ""
    return f"Most of it is longer reasoning: {told} among answers like the base's {100 * left:+.0f} points are left."
