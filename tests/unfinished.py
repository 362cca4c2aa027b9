"""A finished run as it was earlier."""

from __future__ import annotations

import shutil
from pathlib import Path


def as_it_was(finished: Path, run: Path, lines: int) -> None:
    """Copies the run as it was when it had logged so many lines, the first of which is an evaluation."""
    shutil.copytree(finished, run, dirs_exist_ok=True)
    for name in ("metrics.jsonl", "times.jsonl"):
        text = (finished / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(text[:lines]))
