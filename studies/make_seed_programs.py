"""
Makes the tasks that populations on chat models start from, out of the programs in `seed_programs.txt`.

    python studies/make_seed_programs.py

Every program runs twice in the sandbox on each of its inputs, and what it returns is the output. Of each level some
programs are *held out*: a run with `--eval_tasks real` is scored on their tasks and begins with the others. To change
a task or add one, edit the text and run this again.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from trl_populora.assets import real_seed_tasks
from trl_populora.sandbox import Sandbox
from trl_populora.tasks import CodeI, CodeO, Task, TaskKind, make_task
from trl_populora.tasks.kind import KindSettings
from trl_populora.tasks.python.normal_form import normal_forms


KINDS: tuple[TaskKind, ...] = (CodeO(), CodeI())
for _kind in KINDS:
    _kind.configure(KindSettings(prompt_style="turns"))
SOURCE = Path(__file__).with_name("seed_programs.txt")
_HEADING = re.compile(r"# (?P<level>[123]) (?P<topic>[a-z]+)(?:: (?P<hint>.+))?\n")


HELD_OUT = {1: 21, 2: 24, 3: 25}  # programs by level


@dataclass(frozen=True)
class SeedProgram:
    """
    A program, the calls written below it, and how hard it is.

    Args:
        level (`int`): 1 to 3, from a statement to several steps.
        topic (`str`): What it is about.
        hint (`str`): The message of its code_f task; empty where it has none.
        program (`str`): Source with a top-level `f`.
        calls (`list[tuple]`): The arguments of each call.
    """

    level: int
    topic: str
    hint: str
    program: str
    calls: list[tuple[Any, ...]]


def read_programs(text: str) -> list[SeedProgram]:
    """
    The programs of a text in the form of `seed_programs.txt`.

    Raises:
        `ValueError`: If a program has no two calls to make tasks of, or is another one under other names.
    """
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    programs, forms = [], set()
    for heading, end in zip(headings, ends, strict=True):
        source = text[heading.end() : end]
        tree = ast.parse(source)
        calls = [each for each in tree.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
        if len(calls) < 2:
            raise ValueError(f"code_o and code_i need a call of `f` each, got {len(calls)} in {source!r:.200}.")
        program = "\n".join(source.splitlines()[: calls[0].lineno - 1])
        form, _ = normal_forms(ast.parse(program))
        if form in forms:
            raise ValueError(f"Another program is the same but for names and layout: {program!r:.200}.")
        forms.add(form)
        arguments = [tuple(map(ast.literal_eval, call.value.args)) for call in calls]  # type: ignore[attr-defined]
        programs.append(
            SeedProgram(int(heading["level"]), heading["topic"], heading["hint"] or "", program, arguments)
        )
    return programs


def tasks_of(program: SeedProgram, sandbox: Sandbox) -> Iterator[Task]:
    """
    A code_o and a code_i task on different inputs, and a code_f task on all of them where there is a hint. None that
    copying solves: of some programs every output is an input as well.
    """
    calls = list(program.calls)
    for kind in KINDS:
        for call in calls:
            task = make_task(kind.name, program.program, [call], sandbox=sandbox)
            if not is_copied(kind, task, sandbox):
                calls.remove(call)
                yield task
                break
    if program.hint:
        yield make_task("code_f", program.program, program.calls, message=program.hint, sandbox=sandbox)


def is_copied(kind: TaskKind, task: Task, sandbox: Sandbox) -> bool:
    """Whether giving back what is shown solves a task."""
    answers = kind.copies(task)
    jobs = [kind.trial(task, answer) for answer in answers]
    verdicts = [sandbox.run([job])[0] if job else None for job in jobs]
    return any(kind.correct(task, *each) for each in zip(answers, verdicts, strict=True))


def choose_held_out(programs: Sequence[SeedProgram]) -> list[SeedProgram]:
    """The programs that are held out, by their digests: a new program moves at most one other."""
    found = []
    for level, count in HELD_OUT.items():
        own = [each for each in programs if each.level == level]
        found += sorted(own, key=lambda each: sha256(each.program.encode()).hexdigest())[:count]
    return found


def write_tasks(path: Path) -> int:
    """Writes the tasks with their `level` and `topic`, and whether they are held out; returns how many there are."""
    with Sandbox() as sandbox:
        programs = read_programs(SOURCE.read_text(encoding="utf-8"))
        made = [(program, tasks) for program in programs if (tasks := [*tasks_of(program, sandbox)])]
    held_out, lines = choose_held_out([program for program, _ in made]), []
    for program, tasks in made:
        about = {"level": program.level, "topic": program.topic, "held_out": program in held_out}
        for task in tasks:
            record = task.to_record()
            del record["author"], record["step"]
            lines.append(json.dumps(record | about))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--out", type=Path, default=Path(real_seed_tasks()), help="the package's own by default")
    out = parser.parse_args().out
    print(f"{write_tasks(out)} tasks in {out}")


if __name__ == "__main__":
    main()
