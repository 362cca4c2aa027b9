"""
Cross-play: students of saved populations on given tasks and on each other's proposals, as numbers and a picture.

Nothing here touches ratings, archives or adapters of a run, and nothing needs a trainer. Benchmarks that people quote
are `recipes/evaluate.py`'s.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import PeftModel
from tqdm import tqdm

from trl_populora import start
from trl_populora.config import PopuLoRAConfig
from trl_populora.errors import make_printable
from trl_populora.evaluate.held_out import attempt
from trl_populora.files import write_json
from trl_populora.generate.player import plain_player, plain_room
from trl_populora.hub.download import fetch
from trl_populora.lora.layers import Router, add_members
from trl_populora.options import check_bounds
from trl_populora.population.members import Population
from trl_populora.report.charts import WIDTH, draw_payoff, picture
from trl_populora.report.table import percent
from trl_populora.run.checkpoint import write_member_file
from trl_populora.run.read import read_population
from trl_populora.run.saved_population import SAMPLING, Shape, check_one_moment, check_same_shape, saved_lora
from trl_populora.step.player import Player
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import TASK_KINDS, kinds_to_import, resolve_kind
from trl_populora.tasks.archive import TaskArchive, read_task
from trl_populora.tasks.dataset import built_in_tasks, load_archive
from trl_populora.tasks.kind import Task


logger = logging.getLogger(__name__)


@dataclass
class CrossPlayArguments:
    """What `populora crossplay` needs."""

    runs: list[str] = field(metadata={"help": "Directories of runs or of their checkpoints, or Hub names, or both."})
    proposals: int = field(default=12, metadata={"help": "Proposals per teacher, the kinds in rotation."})
    attempts: int = field(default=4, metadata={"help": "Attempts of every student at every fresh valid proposal."})
    tasks: str | None = field(default=None, metadata={"help": "Tasks that every member solves beside, as seed_tasks."})
    task_kinds: list[str] | None = field(
        default=None, metadata={"help": "Kinds that all play; those of the first run by default, if built in."}
    )
    seed: int = field(default=0, metadata={"help": "Chooses references and samples."})
    out: str = field(default="crossplay", metadata={"help": "Directory for crossplay.json and crossplay.png."})

    def __post_init__(self):
        check_bounds(self, {">= 1": "proposals attempts"})


def solve_rates(
    referee: Referee, player: Player, member: str, tasks: Sequence[Task], attempts: int = 1, batch: int = 64
) -> list[float]:
    """
    Lets one member attempt every task, sampled as in training.

    Args:
        referee, player: A trainer's (`trainer.game.referee`), or those of [`assemble`].
        member: Name of the member.
        tasks: What to solve.
        attempts: Attempts per task.
        batch: Rows generated at once.

    Returns:
        `list[float]`: Fraction of right attempts per task, in the order of the tasks.
    """
    tried = attempt(referee, player, [member], tasks, attempts, batch)[member]
    return [fmean(outcome.correct for outcome in group) for group in tried]


def score_members(
    referee: Referee, player: Player, members: Sequence[str], tasks: Sequence[Task], attempts: int = 4
) -> dict[str, float]:
    """
    Each member's mean solve rate on the same tasks, teachers included: what it can do outside its matches.

    Raises:
        `ValueError`: If no task is of a kind that the referee knows; others are left out.
    """
    known = [task for task in tasks if task.kind in referee.kinds]
    if not known:
        kinds = ", ".join(sorted({task.kind for task in tasks})) or "no kind"
        raise ValueError(f"The given tasks are of {kinds}; these members play {', '.join(referee.kinds)}.")
    bar = tqdm(members, desc="given tasks", unit="member")
    return {member: fmean(solve_rates(referee, player, member, known, attempts)) for member in bar}


def cross_play(
    referee: Referee,
    player: Player,
    archive: TaskArchive,
    teachers: Sequence[str],
    students: Sequence[str],
    proposals: int = 12,
    attempts: int = 4,
    references: int = 6,
    seed: int = 0,
) -> Payoff:
    """
    Every student attempts fresh proposals of every teacher.

    All teachers are shown the same references, and all students attempt the same tasks. A task of the archive, where
    the references are from, and one that its teacher has proposed before are none: copying is no skill.

    Args:
        referee, player: Who judges and who generates.
        archive: References are drawn from it.
        teachers, students: Members to play, by name.
        proposals: Proposals per teacher, the referee's kinds in rotation.
        attempts: Attempts of each student at each fresh task.
        references: Tasks that a proposing teacher is shown.
        seed: Chooses the references.

    Returns:
        [`Payoff`]: Its matrix is `[T][S]`.
    """
    rng = random.Random(f"cross-play/{seed}")
    names = list(referee.kinds)
    kinds = [names[slot % len(names)] for slot in range(proposals)]
    asked = []
    for kind in map(referee.kinds.__getitem__, kinds):
        asked.append(referee.proposal_prompt(kind, referee.draw_references(kind, archive, references, rng)))
    payoff = Payoff(list(teachers), list(students))
    for teacher in tqdm(teachers, desc="cross-play", unit="teacher"):
        completions = player.generate([prompt for prompt, _ in asked], [teacher] * proposals)
        written = [
            Written(kind, completion.text, shown)
            for kind, completion, (_, shown) in zip(kinds, completions, asked, strict=True)
        ]
        valid = [task for task in referee.judge(written, rng) if isinstance(task, Task)]
        own = TaskArchive()
        fresh = [task for task in valid if task not in archive and own.add(task)]
        tasks, *_ = player.gather(fresh)  # other ranks have other proposals
        payoff.valid.append(len(tasks) / proposals)
        payoff.solved.append(
            [fmean(solve_rates(referee, player, name, tasks, attempts)) if tasks else math.nan for name in students]
        )
    return payoff


@dataclass
class Contest:
    """
    Members of several saved populations on one base, ready to play. A context that ends the sandbox.

    Args:
        args: Kinds, lengths and sampling.
        model: The base with all members.
        names: For each member a readable name.
        referee, player, archive: What [`cross_play`] takes.
        teachers, students: Members by role.
    """

    args: PopuLoRAConfig
    model: PeftModel
    names: dict[str, str]
    referee: Referee
    player: Player
    archive: TaskArchive
    teachers: list[str]
    students: list[str]

    def play(self, proposals: int, attempts: int, seed: int = 0) -> Payoff:
        """[`cross_play`] of all members."""
        references = self.args.references_per_proposal
        given = (self.teachers, self.students, proposals, attempts, references, seed)
        return cross_play(self.referee, self.player, self.archive, *given)

    def score(self, members: Sequence[str], tasks: Sequence[Task], attempts: int) -> dict[str, float]:
        """[`score_members`] of some, or of `base`."""
        return score_members(self.referee, self.player, members, tasks, attempts)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        self.referee.sandbox.close()


def assemble(
    runs: Sequence[str], tasks: Dataset | None = None, task_kinds: Sequence[str] | None = None, **settings: Any
) -> Contest:
    """
    Loads the members of several saved populations on one base, side by side.

    Args:
        runs: Directories (runs or their checkpoints) or Hub names of saved populations. They share base and adapter
            shape; the base's revision and quantisation, kinds, prompt style, lengths and sampling are the first one's.
            A warning tells where the kinds differ.
        tasks: Tasks to draw references from; by default the package's own and, for a user's own kinds, those in the
            archives of the runs.
        task_kinds: Kinds that all play; by default the first run's, if the package has them all.
        settings: Further settings of [`PopuLoRAConfig`].

    Raises:
        `ValueError`: If a population is given twice, cannot be read, or does not fit the first one; names file and
            field. If the first one was trained on a kind that is not the package's, and `task_kinds` does not name it.
    """
    roots = [fetch(run) for run in runs]
    if len({root.resolve() for root in roots}) < len(roots):
        raise ValueError(f"A population plays once, but `runs` names one twice: {', '.join(runs)}.")
    saved = [read_population(root) for root in roots]
    kinds_played = kinds_to_import(runs[0], saved[0]["settings"]["task_kinds"], task_kinds)
    args = _settings_of(saved[0], settings | {"task_kinds": kinds_played})
    others = {run: theirs["settings"]["task_kinds"] for run, theirs in zip(runs, saved, strict=True)}
    if any(set(kinds) != set(args.task_kinds) for kinds in others.values()):
        trained = "; ".join(f"{run} was trained on {', '.join(kinds)}" for run, kinds in others.items())
        logger.warning(make_printable(f"The kinds of task differ: {trained}. All play {', '.join(args.task_kinds)}."))
    kinds = start.make_kinds(args)
    given = gather_references(args.task_kinds, roots, saved[0]["prompt_style"]) if tasks is None else tasks
    archive = load_archive(given, kinds, args.prompt_style, args.archive_size, args.references_per_proposal)

    set_seed(args.seed)
    base = start.load_base(saved[0]["base_model"], args)
    tokenizer = start.load_tokenizer(base, None, args)
    entries = {
        role: [(i, m) for i, theirs in enumerate(saved) for m in theirs["members"] if m["role"] == role]
        for role in ("teacher", "student")
    }
    population, router = Population(len(entries["teacher"]), len(entries["student"])), Router()
    model = add_members(base, population.names, saved_lora(saved[0]), router, args.seed)
    for root, theirs in zip(roots, saved, strict=True):
        check_same_shape(root, Shape.of(model, saved[0]["base_model"]))
        check_one_moment(root, theirs)
    prefixes, names = choose_prefixes(runs), {}
    for role, contestants in entries.items():
        for slot, (index, member) in zip(population.role(role), contestants, strict=True):
            write_member_file(model, slot.name, roots[index] / member["adapter"] / "adapter_model.safetensors")
            names[slot.name] = prefixes[index] + member["name"]
    referee = start.make_referee(args, kinds, base, tokenizer)
    try:
        start.fit_into_context(referee, archive, None, plain_room(base, tokenizer, args))
    except ValueError:
        referee.sandbox.close()
        raise
    player = plain_player(model, tokenizer, router, population.names, args)
    teachers, students = ([member.name for member in population.role(role)] for role in entries)
    return Contest(args, model, names, referee, player, archive, teachers, students)


def _settings_of(saved: dict[str, Any], settings: dict[str, Any]) -> PopuLoRAConfig:
    """Settings of a saved population that decide what its members are asked and say, under those given."""
    first, on_cpu = saved["settings"], not torch.cuda.is_available()
    theirs = {name: first[name] for name in ("references_per_proposal", "inputs_per_function")}
    # Older files lack some of these.
    theirs |= {name: first[name] for name in ("max_completion_length", *SAMPLING) if name in first}
    asked = {"shots": 0, "reading": "strict", "prompt_texts": None}
    theirs |= {name: first.get(name, before) for name, before in asked.items()}
    return PopuLoRAConfig(
        "unused",
        **theirs
        | {
            "prompt_style": saved["prompt_style"],
            "model_init_kwargs": {
                "dtype": "float32" if on_cpu else "bfloat16",
                "revision": first.get("base_revision", "main"),
                "quantization_config": saved.get("base_quantization"),
            },
            "use_cpu": on_cpu,
            "bf16": not on_cpu,
            "report_to": [],
            "teacher_baseline": "group",  # no advantages are taken
        }
        | settings,
    )


def gather_references(kinds: Sequence[str], roots: Sequence[Path], style: str) -> Dataset | None:
    """
    Tasks that teachers of these kinds can be shown: the package's, and what the runs' archives hold of a user's own
    kinds.

    Args:
        kinds: As in `task_kinds`.
        roots: Directories of saved populations.
        style: Of the prompts.

    Returns:
        [`~datasets.Dataset`] or `None`: `None` where no kind is a user's own.

    Raises:
        `ValueError`: If there is no archive, or a broken one.
    """
    own = [kind.name for kind in map(resolve_kind, kinds) if kind.name not in TASK_KINDS]
    if not own:
        return None
    archives = [path for root in roots if (path := root / "archive.parquet").exists()]
    if not archives:
        raise ValueError(
            f"No archive.parquet in {', '.join(map(str, roots))}: teachers are shown tasks of the kind "
            f"{', '.join(own)} from it. Give a run or a checkpoint that was saved whole."
        )
    records = [row for path in archives for row in pq.read_table(path, filters=[("kind", "in", own)]).to_pylist()]
    tasks = [*built_in_tasks(style), *(read_task(record, "archive.parquet") for record in records)]
    return Dataset.from_list([task.to_record() for task in tasks])


def choose_prefixes(runs: Sequence[str]) -> list[str]:
    """What to put before a member's name so that members of different runs differ; nothing for a single run."""
    if len(runs) == 1:
        return [""]
    paths = [Path(run) for run in runs]
    one_sort = len({path.is_absolute() for path in paths}) == 1
    common = os.path.commonpath(paths) if one_sort else ""
    if not common or Path(common) in paths:
        return [f"{run} " for run in runs]
    return [f"{path.relative_to(common)} " for path in paths]


# What cross-play found: numbers, a table and a picture.


@dataclass
class Payoff:
    """
    What cross-play found. Shapes: T teachers, S students.

    Args:
        teachers, students: Names, in the order of rows and columns.
        valid: Share of each teacher's proposals that were fresh tasks: accepted by the sandbox, and neither in the
            archive nor proposed before by the same teacher, `[T]`.
        solved: Share of the attempts at the teacher's tasks that the student solved, `[T][S]`; NaN in the row of a
            teacher without a fresh task.
        given: Each member's solve rate on the given tasks; empty without any.
    """

    teachers: list[str]
    students: list[str]
    valid: list[float] = field(default_factory=list)
    solved: list[list[float]] = field(default_factory=list)
    given: dict[str, float] = field(default_factory=dict)

    @property
    def by_teacher(self) -> list[float]:
        """Mean over the students per teacher: low is a teacher whose tasks are hard for everybody."""
        return [fmean(row) for row in self.solved]

    @property
    def by_student(self) -> list[float]:
        """Mean over the teachers per student, teachers without a valid task left out."""
        rows = [row for row in self.solved if not math.isnan(row[0])]
        return [fmean(column) if column else math.nan for column in (zip(*rows, strict=True) if rows else [])]

    def rename(self, names: Mapping[str, str]) -> Payoff:
        """The same under other names."""
        return replace(
            self,
            teachers=[names[name] for name in self.teachers],
            students=[names[name] for name in self.students],
            given={names[name]: rate for name, rate in self.given.items()},
        )


def choose_payoff_size(teachers: Sequence[str], students: Sequence[str]) -> tuple[float, float]:
    """Inches of a cross-play's picture: room for every cell, and for names, which stand upright when they are long."""
    letters = 0.08 * max(map(len, (*teachers, *students)))
    return max(WIDTH, 1.8 + letters + 0.55 * len(students)), max(3.7, 0.9 + letters + 0.5 * len(teachers))


def write_payoff(payoff: Payoff, directory: str | Path) -> Path:
    """
    Prints a cross-play and writes it as `crossplay.json` (the fields of [`~trl_populora.evaluate.cross_play.Payoff`]
    and the means per row and column) and `crossplay.png`.

    Returns:
        `Path`: The JSON file.
    """
    path = Path(directory, "crossplay.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    values = json.dumps(asdict(payoff) | {"by_teacher": payoff.by_teacher, "by_student": payoff.by_student})
    write_json(path, json.loads(values, parse_constant=lambda _: None))  # NaN is no JSON

    from rich.console import Console
    from rich.table import Table

    size = choose_payoff_size(payoff.teachers, payoff.students)
    picture(path.with_suffix(".png"), size, draw_payoff, payoff.solved, payoff.teachers, payoff.students)
    table = Table(title="Attempts solved at fresh tasks", caption="rows: teachers, columns: students")
    for column in ("teacher", "valid", *payoff.students, "mean"):
        table.add_column(column, justify="left" if column == "teacher" else "right")
    for name, valid, row, mean in zip(payoff.teachers, payoff.valid, payoff.solved, payoff.by_teacher, strict=True):
        table.add_row(name, *(percent(value) for value in (valid, *row, mean)))
    table.add_section()
    table.add_row("mean", "", *map(percent, payoff.by_student), "")
    if payoff.given:
        table.add_row("given tasks", "", *(percent(payoff.given[name]) for name in payoff.students), "")
    Console(width=max(120, 24 + 14 * len(payoff.students))).print(table)
    return path
