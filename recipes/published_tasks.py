"""
Makes held-out tasks of programs that nobody here wrote: the seed tasks published with Absolute Zero Reasoner.

    python recipes/published_tasks.py azr_seed_3b_coder.jsonl azr_seed_3b_coder_code_f.jsonl --size 200
    populora train --config my.yaml --eval_tasks held_out.jsonl --eval_strategy steps --eval_steps 20

A language model wrote these 512 programs (github.com/LeapLabTHU/Absolute-Zero-Reasoner, MIT licence). What their files
say of outputs is not believed: long ones are cut there and some are missing. Every program runs twice in the sandbox,
and is left out as a teacher's proposal would be. Each gives a code_o and a code_i task, in an order that depends on
nothing but the tasks, so that a table of one size is a part of every larger one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trl_populora.sandbox import Sandbox
from trl_populora.tasks import CodeI, CodeO, Task, TaskArchive
from trl_populora.tasks.kind import Proposal, Refusal, Reject
from trl_populora.tasks.python.kinds import refuse
from trl_populora.tasks.python.programs import ProgramError


KINDS = (CodeO(), CodeI())


def read_rows(source: str) -> list[dict[str, Any]]:
    """The rows of a published file, JSON lines at a path or URL."""
    if source.startswith(("https://", "http://")):
        with urllib.request.urlopen(source, timeout=60) as answer:  # noqa: S310
            text = answer.read().decode()
    else:
        text = Path(source).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def proposals_of(row: dict[str, Any]) -> Iterator[Proposal | Refusal]:
    """A program with its input, or the first of several, as a proposal of each kind; or why it is none."""
    given = row["input"] if "input" in row else row["inputs"][0]
    for kind in KINDS:
        try:
            arguments = kind.read_arguments(given, kind.max_value_chars)
            yield Proposal(kind.name, kind.read_program(row["snippet"]), (arguments,))
        except ProgramError as error:
            yield refuse(error)


def make_tasks(rows: Iterable[dict[str, Any]], sandbox: Sandbox) -> tuple[list[Task], Counter[str]]:
    """
    All tasks that can be made, the two kinds in turn, and how often others were left out for which reason.

    Args:
        rows (`Iterable[dict]`): With `snippet`, and `input` or `inputs`.
        sandbox ([`Sandbox`]): Runs the programs.
    """
    kinds = {kind.name: kind for kind in KINDS}
    archive, left_out = TaskArchive(), Counter[str]()
    read = [each for row in rows for each in proposals_of(row)]
    # Sorted first, because of programs that are the same but for names the archive keeps the first.
    proposals = sorted((each for each in read if isinstance(each, Proposal)), key=_place)
    verdicts = sandbox.run([kinds[each.kind].check(each) for each in proposals])
    found = [
        kinds[each.kind].accept(each, verdict, random.Random(0))
        for each, verdict in zip(proposals, verdicts, strict=True)
    ]
    for each in [*(each for each in read if isinstance(each, Refusal)), *found]:
        if isinstance(each, Refusal):
            left_out[str(each.reason)] += 1
        elif not archive.add(each):
            left_out[str(Reject.DUPLICATE)] += 1
    ordered = [[task for task in archive if task.kind == kind] for kind in kinds]
    return [task for turn in zip(*ordered, strict=False) for task in turn], left_out


def _place(proposal: Proposal) -> str:
    return hashlib.sha256(json.dumps([proposal.program, proposal.inputs]).encode()).hexdigest()


def as_text(tasks: Sequence[Task]) -> str:
    """The table as `--eval_tasks` reads it, JSON lines."""
    records = [task.to_record() for task in tasks]
    return "".join(
        json.dumps({name: record[name] for name in ("kind", "program", "inputs", "outputs")}) + "\n"
        for record in records
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("files", nargs="+", help="published files, paths or URLs")
    parser.add_argument("--size", type=int, help="how many tasks, half of them of each kind; all by default")
    parser.add_argument("--out", type=Path, default=Path("held_out.jsonl"))
    arguments = parser.parse_args()
    with Sandbox() as sandbox:
        tasks, left_out = make_tasks([row for file in arguments.files for row in read_rows(file)], sandbox)
    size = arguments.size or len(tasks)
    if size > len(tasks):
        parser.error(f"`--size {size}` is more than the {len(tasks)} tasks that could be made of these files.")
    text = as_text(tasks[:size])
    arguments.out.write_text(text, encoding="utf-8")
    print(f"{size} of {len(tasks)} tasks in {arguments.out}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}")
    print("left out: " + (", ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "none"))


if __name__ == "__main__":
    main()
