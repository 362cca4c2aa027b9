"""A finished run as it was earlier, and how it went on."""

from __future__ import annotations

import shutil
from pathlib import Path


def as_it_was(finished: Path, run: Path, lines: int) -> None:
    """The run when it had logged so many lines, the first of which is an evaluation."""
    shutil.copytree(finished, run, dirs_exist_ok=True)
    for name in ("metrics.jsonl", "times.jsonl"):
        text = (finished / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(text[:lines]))


def ends(finished: Path, run: Path) -> None:
    """The rest of its lines, each file's in one piece and none shortened in between, as a run writes."""
    for name in ("times.jsonl", "metrics.jsonl"):
        rest = (finished / name).read_bytes()[(run / name).stat().st_size :]
        with (run / name).open("ab", buffering=0) as file:
            file.write(rest)
