"""Benchmarks by contenders: on the terminal, as Markdown, JSON and a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_populora.evaluation.benchmarks.contenders import SUMMARY, Contender
from trl_populora.evaluation.benchmarks.jobs import Pair
from trl_populora.evaluation.benchmarks.suite import BENCHMARKS
from trl_populora.files import write_json
from trl_populora.report.canvas import picture


AVERAGE = "average"


@dataclass
class Table:
    """
    Scores in percent; `None` where there is none.

    Args:
        contenders (`list[Contender]`): Columns.
        rows (`dict[str, dict[str, float | None]]`): By benchmark and contender; `AVERAGE` is the last.
        questions (`dict[str, int | None]`): By benchmark.
    """

    contenders: list[Contender]
    rows: dict[str, dict[str, float | None]]
    questions: dict[str, int | None]

    @property
    def columns(self) -> list[str]:
        """Members, what they come to, then base and compared."""
        members = [each.name for each in self.contenders if each.is_member]
        return [*members, *SUMMARY, *(each.name for each in self.contenders if not each.is_member)]


def make_table(pairs: Sequence[Pair]) -> Table:
    """The table of all pairs. Best and worst in the last row are whole members: the best and the worst average."""
    contenders = list(dict.fromkeys(pair.contender for pair in pairs))
    members = [each.name for each in contenders if each.is_member]
    rows: dict[str, dict[str, float | None]] = {}
    questions: dict[str, int | None] = {}
    for pair in pairs:
        result = pair.result
        rows.setdefault(pair.benchmark, {})[pair.contender.name] = 100 * result["score"] if result else None
        questions[pair.benchmark] = result["questions"] if result else questions.get(pair.benchmark)
    rows[AVERAGE] = {each.name: _mean([row[each.name] for row in rows.values()]) for each in contenders}
    for row in rows.values():
        known = [score for name in members if (score := row[name]) is not None]
        row["mean"] = _mean([row[name] for name in members])
        row["best"], row["worst"] = (max(known), min(known)) if len(known) == len(members) else (None, None)
    return Table(contenders, rows, questions)


def _mean(scores: Sequence[float | None]) -> float | None:
    """Of all or of none: a mean over what happens to be there would be compared with others."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else None


def _text(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"


def _title(row: str) -> str:
    return BENCHMARKS[row].title if row in BENCHMARKS else row


def as_markdown(table: Table) -> str:
    """The table as GitHub shows it."""
    lines = ["| benchmark | questions | " + " | ".join(table.columns) + " |"]
    lines.append("|---|---:|" + "---:|" * len(table.columns))
    for name, row in table.rows.items():
        cells = [_title(name), str(table.questions.get(name) or ""), *(_text(row[column]) for column in table.columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def show(table: Table, title: str) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=title)
    shown.add_column("benchmark", no_wrap=True)
    for column in table.columns:
        shown.add_column(column.replace("_", "\n"), justify="right", style="bold" if column in SUMMARY else None)
    for name, row in table.rows.items():
        shown.add_row(_title(name), *(_text(row[column]) for column in table.columns), end_section=name != AVERAGE)
    console = Console()
    # Into a file or a log, where rich assumes 80 columns, eight members would not fit.
    (console if console.is_terminal else Console(width=180)).print(shown)


def save(table: Table, directory: Path, details: dict[str, Any]) -> None:
    """Writes `evaluation.json`, `evaluation.md` and `evaluation.png`."""
    scores = {name: {column: row[column] for column in table.columns} for name, row in table.rows.items()}
    columns = [{"name": each.name, "role": each.role} for each in table.contenders]
    found = {"columns": columns, "questions": table.questions, "scores": scores}
    write_json(directory / "evaluation.json", details | found)
    (directory / "evaluation.md").write_text(as_markdown(table))
    draw(table, directory / "evaluation.png")


def draw(table: Table, path: Path) -> None:
    """A heat map: each row in shades from its lowest to its highest score."""
    shades = []
    for row in table.rows.values():
        known = [score for score in row.values() if score is not None]
        low, span = (min(known), max(known) - min(known)) if known else (0.0, 0.0)
        shades.append([0.5 if not span or (score := row[c]) is None else (score - low) / span for c in table.columns])

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        axis.imshow(shades, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for y, (row, shade) in enumerate(zip(table.rows.values(), shades, strict=True)):
            for x, column in enumerate(table.columns):
                color = "white" if shade[x] < 0.6 else "black"
                axis.text(x, y, _text(row[column]), ha="center", va="center", fontsize=8, color=color)
        axis.set_xticks(range(len(table.columns)), table.columns, rotation=40, ha="right", fontsize=8)
        axis.set_yticks(range(len(table.rows)), [_title(name) for name in table.rows], fontsize=8)
        axis.grid(False)
        axis.set_title("Score in percent; shades compare the columns of a row", fontsize=9)

    picture(path, (2 + 0.75 * len(table.columns), 1.6 + 0.4 * len(table.rows)), paint)
