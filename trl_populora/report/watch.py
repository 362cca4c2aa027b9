"""A run on the terminal while it goes on: curves, population, the last task with its attempts; needs rich.

Reads the run's files and nothing else, so it may run anywhere that sees them, and start before the run does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trl_populora.errors import printable
from trl_populora.report.canvas import COLORS
from trl_populora.report.load import Run, Sample, load_figures, load_last_task, name_reject, stamp
from trl_populora.report.members import HEADER, WORDS, list_members
from trl_populora.report.summary import Form, write
from trl_populora.report.terminal import duration


if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
LINES, ATTEMPT_LINES, ATTEMPTS = 14, 5, 4  # of a task that are shown, of an attempt, and attempts
WIDE = 120  # columns from which the task stands beside the curves

CURVES: tuple[tuple[str, str, Form], ...] = (
    ("solve/rate", "fresh tasks solved", "share"),
    ("solve/thinking_rate", "answers worked out", "share"),
    ("propose/valid_rate", "proposals valid", "share"),
    ("rewards/teacher_reward/mean", "teachers' reward", "number"),
    ("rewards/student_reward/mean", "students' reward", "number"),
    ("population/teacher/mu_mean", "teachers' rating", "number"),
    ("population/student/mu_mean", "students' rating", "number"),
)


@dataclass
class WatchArguments:
    """What `populora watch` needs."""

    run: str = field(metadata={"help": "Directory of a run: going on, finished, or not begun yet."})
    once: bool = field(default=False, metadata={"help": "Print one frame and end, as into a file or a pipe."})
    seconds: float = field(default=2.0, metadata={"help": "Seconds between two looks at the files."})


def watch(options: WatchArguments, console: Console | None = None) -> None:
    """
    Shows a run on the terminal, or on another `console`, until it is finished or Ctrl-C; the last frame stays.

    Raises:
        `ValueError`: If a file of the run is broken, or `seconds` is not positive.
    """
    from rich.console import Console
    from rich.live import Live

    if not options.seconds > 0:
        raise ValueError(f"`seconds` must be positive, got {options.seconds}.")
    console, look = console or Console(), _Look(Path(options.run))
    if console.is_terminal and not options.once and not look.now().finished:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                while not look.now().finished:
                    live.update(frame(look, console.width), refresh=True)
                    time.sleep(options.seconds)
            except KeyboardInterrupt:  # the usual way out
                pass
    console.print(frame(look, console.width))


class _Look:
    """What a run's files say, read again when they have changed."""

    def __init__(self, root: Path):
        self.root = root
        self.run = Run(root.name, [])
        self._stamp: tuple | None = None
        self.task: Sample | None = None

    def now(self) -> Run:
        seen = stamp(self.root)
        if seen != self._stamp:
            with suppress(OSError):  # a run from the start has just moved an earlier one's files aside
                self.run, self.task, self._stamp = load_figures(self.root), load_last_task(self.root), seen
        return self.run


def frame(look: _Look, width: int) -> RenderableType:
    """One picture of the run for a terminal of so many columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    run = look.now()
    parts: list[RenderableType] = [_style(_title(run, look.root), "bold"), Text("")]
    wide = width >= WIDE
    room = width // 2 - 2 if wide else width
    left: list[RenderableType] = [curves(run, room)] if run.history or run.evaluations else []
    if run.population:
        left += [Text(""), population(run)]
    if look.task is None:
        return Group(*parts, *left)
    if not wide:
        return Group(*parts, *left, Text(""), last_task(look.task))
    sides = Table.grid(padding=(0, 2))
    sides.add_column(width=room)
    sides.add_column(ratio=1)
    sides.add_row(Group(*left), last_task(look.task))
    return Group(*parts, sides)


def _title(run: Run, root: Path) -> str:
    if not root.is_dir():
        return f"{root} is not there yet; waiting for a run to begin."
    if not run.history:
        begun = f"has evaluated {len(run.evaluations)} time(s) and" if run.evaluations else "has"
        return f"{root} {begun} not logged a step yet."
    steps, evaluations = run.seconds
    done = f"step {run.step} of {run.planned}" if run.planned else f"step {run.step}"
    parts = [run.name, done, f"{duration(steps + evaluations)} so far"]
    if run.finished:
        parts[1] += ", finished"
    elif run.planned:
        recent = [entry["step_time"] for entry in run.history[-10:] if entry.get("step_time") is not None]
        if recent:
            parts.append(f"{duration(sum(recent) / len(recent) * (run.planned - run.step))} of steps to go")
        parts.append(f"last step {duration(max(0.0, time.time() - _written(root)))} ago")
    if run.population.get("settings", {}).get("single_agent"):
        parts.append("single agent")
    return " | ".join(parts)


def _written(root: Path) -> float:
    return (root / "metrics.jsonl").stat().st_mtime


def curves(run: Run, width: int) -> Table:
    """A line per curve: its shape, its extremes, where it began and where it is."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading, side in (("", "left"), ("", "left"), ("first", "right"), ("now", "right"), ("range", "right")):
        table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
    rows: list[tuple[str, str, Form]] = [(f"{t}solve_rate_mean", _held_out(t), "share") for t in run.tables]
    rows += CURVES
    rows += [(f"curriculum/{name}", f"tasks: {name.replace('_', ' ')}", "number") for name in run.measures]
    rows += [("curriculum/features", "different features in recent tasks", "count")] * (
        "curriculum/features" in run.breadth
    )
    rows.append(("step_time", "time of a step", "seconds"))
    for key, name, form in rows:
        _, values = run.series(key)
        if values:
            spread = f"{write(min(values), form)} to {write(max(values), form)}"
            color = next((COLORS[role] for role in COLORS if role in key), "default")
            cells = [write(values[0], form), write(values[-1], form), spread]
            table.add_row(_style(name, ""), _style(sparkline(values, max(8, width - 62)), color), *cells)
    return table


def _held_out(table: str) -> str:
    name = table.removeprefix("eval/").rstrip("_")
    return f"held-out solved {name}".rstrip()


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks between their least and their largest, several of them one block where there are too many."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[n : n + size] for n in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if scale else BLOCKS[3] for value in means)


def population(run: Run) -> Table:
    """The members, best first in each role."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in HEADER:
        table.add_column(column, justify="left" if column in WORDS else "right", no_wrap=True)
    for role, rows in list_members(run.population["members"]).items():
        for name, *cells in rows:
            table.add_row(_style(name, COLORS[role]), *(_style(cell, "") for cell in cells))
    return table


def last_task(sample: Sample) -> RenderableType:
    """A proposal with its verdict and the attempts at it; what models wrote is shown, never obeyed."""
    from rich.console import Group
    from rich.text import Text

    proposal, attempts = sample
    right = sum(attempt["correct"] for attempt in attempts)
    verdict = f"{right} of {len(attempts)} right" if proposal["valid"] else name_reject(proposal)
    head = f"step {proposal['step']}, {proposal['member']}, {proposal['kind']}: {verdict}"
    parts = [_style(head, COLORS["teacher"]), Text(excerpt(proposal["completion"], LINES))]
    for attempt in attempts[:ATTEMPTS]:
        mark = "✓ right" if attempt["correct"] else "✗ wrong" if attempt["well_formed"] else "✗ unreadable"
        parts.append(_style(f"{attempt['member']} {mark}", COLORS["student"]))
        parts.append(Text(excerpt(attempt["completion"], ATTEMPT_LINES)))
    if len(attempts) > ATTEMPTS:
        parts.append(Text(f"and {len(attempts) - ATTEMPTS} more attempts", style="dim"))
    return Group(*parts)


def _style(text: str, color: str) -> Text:
    from rich.text import Text

    return Text(printable(text), style=color)


def excerpt(text: str, lines: int) -> str:
    """The first lines of what a model wrote; control characters, which could steer a terminal, become `·`."""
    shown = printable(text.strip().expandtabs(4), keep="\n", instead="·").split("\n")
    return "\n".join(shown[:lines] + (["..."] if len(shown) > lines else []))
