"""Benchmarks by contenders: on the terminal, as Markdown, JSON and a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trl_populora.evaluation.benchmarks.contenders import BASE, SUMMARY, Contender
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
        answers (`dict[str, dict[str, list[float]]]`): By benchmark and contender, the mean score (0 to 1) of each
            question's answers, of whom they are known; `mean` is that of the members.
    """

    contenders: list[Contender]
    rows: dict[str, dict[str, float | None]]
    questions: dict[str, int | None]
    answers: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Members, what they come to, then base and compared."""
        members = [each.name for each in self.contenders if each.is_member]
        return [*members, *SUMMARY, *(each.name for each in self.contenders if not each.is_member)]

    def margin(self, row: str, column: str) -> float | None:
        """Half of the 95 % interval of a score, in percent: as it would come out on other questions of the kind."""
        found = self.answers.get(row, {}).get(column)
        return _margin(found, 0.0) if found else None

    def gain(self, row: str, column: str) -> tuple[float, float] | None:
        """What a column has over the base and half of its 95 % interval, in percent, paired by question."""
        answers = self.answers.get(row, {})
        if column == BASE or not {column, BASE} <= answers.keys():
            return None
        differences = [a - b for a, b in zip(answers[column], answers[BASE], strict=True)]
        return 100 * fmean(differences), _margin(differences, -1.0)

    def sheets(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """What is shown: a title, the columns and the rows of scores, then of gains where they are known."""
        scores = [
            [_title(row), str(self.questions.get(row) or ""), *(self._score(row, each) for each in self.columns)]
            for row in self.rows
        ]
        sheets = [("score in percent", ["benchmark", "questions", *self.columns], scores)]
        columns = [each for each in self.columns if any(self.gain(row, each) for row in self.rows)]
        if columns:
            gains = [[_title(row), *(self._gain(row, each) for each in columns)] for row in self.answers]
            sheets.append(("over the base, paired by question, with 95 % intervals", ["benchmark", *columns], gains))
        return sheets

    def _score(self, row: str, column: str) -> str:
        margin = self.margin(row, column)
        return _text(self.rows[row][column]) + ("" if margin is None else f" ± {margin:.1f}")

    def _gain(self, row: str, column: str) -> str:
        gain = self.gain(row, column)
        return "-" if gain is None else f"{gain[0]:+.1f} ± {gain[1]:.1f}"


def _margin(values: Sequence[float], lowest: float) -> float:
    """
    1.96 standard errors of the mean over questions, in percent: the samples of one question depend on each other.

    Two more at either end, as Agresti and Coull have it, for where all questions say the same.
    """
    padded = [*values, lowest, lowest, 1.0, 1.0]
    return 196 * stdev(padded) / math.sqrt(len(padded))


def make_table(pairs: Sequence[Pair]) -> Table:
    """The table of all pairs. Best and worst in the last row are whole members: the best and the worst average."""
    contenders = list(dict.fromkeys(pair.contender for pair in pairs))
    members = [each.name for each in contenders if each.is_member]
    rows: dict[str, dict[str, float | None]] = {}
    questions: dict[str, int | None] = {}
    answers: dict[str, dict[str, list[float]]] = {}
    for pair in pairs:
        result = pair.result
        rows.setdefault(pair.benchmark, {})[pair.contender.name] = 100 * result["score"] if result else None
        questions[pair.benchmark] = result["questions"] if result else questions.get(pair.benchmark)
        if result and result.get("by_question"):
            answers.setdefault(pair.benchmark, {})[pair.contender.name] = result["by_question"]
    for given in answers.values():
        if all(name in given for name in members):
            given["mean"] = [fmean(each) for each in zip(*(given[name] for name in members), strict=True)]
    rows[AVERAGE] = {each.name: _mean([row[each.name] for row in rows.values()]) for each in contenders}
    for row in rows.values():
        known = [score for name in members if (score := row[name]) is not None]
        row["mean"] = _mean([row[name] for name in members])
        row["best"], row["worst"] = (max(known), min(known)) if len(known) == len(members) else (None, None)
    return Table(contenders, rows, questions, answers)


def _mean(scores: Sequence[float | None]) -> float | None:
    """Of all or of none: a mean over what happens to be there would be compared with others."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else None


def _text(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"


def _title(row: str) -> str:
    return BENCHMARKS[row].title if row in BENCHMARKS else row


def as_markdown(table: Table) -> str:
    """The table as GitHub shows it, and below it the gains."""
    lines: list[str] = []
    for title, columns, rows in table.sheets():
        lines += ["", f"{title[0].upper()}{title[1:]}:", ""] if lines else []
        lines += [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
        lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def show(table: Table, title: str) -> None:
    """Prints the table, and the gains."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    # Into a file or a log, where rich assumes 80 columns, eight members would not fit.
    console = console if console.is_terminal else Console(width=180)
    for what, (first, *columns), rows in table.sheets():
        shown = RichTable(title=f"{title}: {what}", show_lines=True)
        shown.add_column(first, no_wrap=True)
        for column in columns:
            shown.add_column(column.replace("_", "\n"), justify="right", style="bold" if column in SUMMARY else None)
        for cells in rows:
            shown.add_row(*cells)
        console.print(shown)


def save(table: Table, directory: Path, details: dict[str, Any]) -> None:
    """Writes `evaluation.json`, `evaluation.md` and `evaluation.png`."""
    scores = {name: {column: row[column] for column in table.columns} for name, row in table.rows.items()}
    columns = [{"name": each.name, "role": each.role} for each in table.contenders]
    found: dict[str, Any] = {"columns": columns, "questions": table.questions, "scores": scores}
    found["margins"] = {name: {each: table.margin(name, each) for each in table.columns} for name in table.answers}
    found["over_base"] = {name: {each: table.gain(name, each) for each in table.columns} for name in table.answers}
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
