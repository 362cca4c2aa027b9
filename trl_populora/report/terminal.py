"""The members of a run as a table on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from trl_populora.errors import printable
from trl_populora.population.members import POPULATION_FILE, read_population
from trl_populora.report.members import HEADER, WORDS, list_members, percent


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
    title = printable(title)
    roles = {
        role: [tuple(map(printable, row)) for row in rows]
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
