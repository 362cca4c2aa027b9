"""Cross-play: members of saved populations attempt given tasks, and students attempt the tasks of every teacher.

    runs --assemble--> Contest --cross_play--> Payoff [T teachers, S students] --write_payoff--> numbers and a picture

Only saved files are read: ratings, archives and adapters of a run stay the same, and no trainer is needed. Published
benchmarks are run by `recipes/evaluate.py`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from transformers import PreTrainedTokenizerBase

from trl_populora import start
from trl_populora.config import PopuLoRAConfig
from trl_populora.errors import make_printable
from trl_populora.evaluate.held_out import attempt
from trl_populora.files import write_json
from trl_populora.generate.player import make_free_token_counter, make_player
from trl_populora.hub.download import fetch
from trl_populora.lora.layers import BASE_NAME, Router, add_members
from trl_populora.options import check_bounds
from trl_populora.population.members import Population
from trl_populora.report.charts import WIDTH, draw_payoff, save_picture
from trl_populora.report.table import format_percent
from trl_populora.run.checkpoint import write_member_file
from trl_populora.run.read import read_chat_template, read_population
from trl_populora.run.saved_population import (
    Shape,
    check_one_moment,
    check_plays,
    check_same_shape,
    read_lora,
    read_sampling,
)
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import TASK_KINDS, choose_kinds, resolve_kind
from trl_populora.tasks.archive import TaskArchive, read_task
from trl_populora.tasks.dataset import build_archive, load_built_in_tasks
from trl_populora.tasks.kind import Task


logger = logging.getLogger(__name__)


@dataclass
class CrossPlayArguments:
    """Options of `populora crossplay`."""

    runs: list[str] = field(metadata={"help": "Directories of runs or of their checkpoints, or Hub names, or both."})
    proposals: int = field(default=12, metadata={"help": "Number of proposals per teacher; the kinds take turns."})
    attempts: int = field(default=4, metadata={"help": "Attempts of every student at every fresh valid proposal."})
    tasks: str | None = field(
        default=None, metadata={"help": "More tasks, which every member attempts, in a form that seed_tasks takes."}
    )
    task_kinds: list[str] | None = field(
        default=None, metadata={"help": "Kinds that all play; default: the first run's, if all are built in."}
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
        referee, player: Those of a trainer (`trainer.game.referee`, `trainer.game.player`) or of a [`Contest`].
        member: Name of the member, or `base`.
        tasks: What to solve.
        attempts: Attempts per task.
        batch: Most rows that a rank generates at once.

    Returns:
        `list[float]`: The solve rate of each task: the share of right attempts, in the order of the tasks.
    """
    tried = attempt(referee, player, [member], tasks, attempts, batch)[member]
    return [fmean(outcome.correct for outcome in group) for group in tried]


def keep_known(referee: Referee, tasks: Sequence[Task]) -> list[Task]:
    """
    Keeps the tasks whose kind the referee knows.

    Raises:
        `ValueError`: If there is none.
    """
    known = [task for task in tasks if task.kind in referee.kinds]
    if not known:
        kinds = ", ".join(sorted({task.kind for task in tasks})) or "no kind"
        raise ValueError(f"The given tasks are of {kinds}; these members play {', '.join(referee.kinds)}.")
    return known


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
    Lets every teacher propose tasks, and every student attempt the fresh tasks of every teacher.

    All teachers are shown the same references, and all students attempt the same tasks. A task is *fresh* if the
    archive does not hold it and its teacher has not proposed it before: copying is no skill.

    Args:
        referee: Writes the prompts, judges and grades.
        player: Generates.
        archive: References are drawn from it.
        teachers, students: Names of the members that play.
        proposals: Number of proposals per teacher. The referee's kinds take turns.
        attempts: Number of attempts of each student at each fresh task.
        references: Number of tasks that a teacher is shown for each proposal.
        seed: Seed of the references, and of what kinds draw when they accept a proposal.

    Returns:
        [`Payoff`]: The share of fresh tasks per teacher, `[T]`, and the solve rates, `[T][S]`.

    Raises:
        `ValueError`: If the referee has no kind for which a teacher can propose.
    """
    rng = random.Random(f"cross-play/{seed}")
    names = [name for name, kind in referee.kinds.items() if not kind.missing_for_proposals()]
    if not teachers:
        return Payoff([], list(students))
    if not names:
        raise ValueError(f"Nobody can propose: {', '.join(referee.kinds)} only read and grade attempts.")
    kinds = [names[place % len(names)] for place in range(proposals)]
    asked = []  # the prompt and the references of each proposal, the same for all teachers
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
        tasks, *_ = player.gather(fresh)  # each rank has sampled its own proposals; all ranks go on with rank 0's
        payoff.valid.append(len(tasks) / proposals)
        payoff.solved.append(
            [fmean(solve_rates(referee, player, name, tasks, attempts)) if tasks else math.nan for name in students]
        )
    return payoff


@dataclass
class Contest:
    """
    Members of several saved populations on one base, ready to play. Leaving the context (`with`) closes the sandbox.

    Args:
        args: Settings: kinds, lengths and sampling.
        model: The base with the adapters of all members.
        names: For each member's name here, its name in its own run. If there are several runs, the run stands before
            the name: `"a student_0"`.
        referee, player, archive: What [`cross_play`] takes.
        teachers, students: Names of the members of each role.
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
        """Plays all teachers of the contest against all its students, as [`cross_play`] does."""
        return cross_play(
            self.referee,
            self.player,
            self.archive,
            teachers=self.teachers,
            students=self.students,
            proposals=proposals,
            attempts=attempts,
            references=self.args.references_per_proposal,
            seed=seed,
        )

    def score(self, members: Sequence[str], tasks: Sequence[Task], attempts: int) -> dict[str, float]:
        """
        Measures the mean solve rates of some members, or `base`, on the same tasks. Teachers solve, too.

        Tasks of a kind that the contest does not play are left out.

        Raises:
            `ValueError`: If the contest plays the kind of none of the tasks.
        """
        known = keep_known(self.referee, tasks)
        bar = tqdm(members, desc="given tasks", unit="member")
        return {each: fmean(solve_rates(self.referee, self.player, each, known, attempts)) for each in bar}

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
        runs: Directories (runs or their checkpoints) or Hub names of saved populations, with the same base and the
            same adapter shape. The first one decides the base's revision and quantisation, the kinds, the prompt
            style, the lengths, the sampling, and whether copies and duplicates are refused (`teacher_reward`). If
            `temperature` is a list there, all members sample at its first value. Each member is asked with the chat
            template of its own population, the base with that of the first one. If a population was trained on other
            kinds than those that play, a warning says so.
        tasks: Tasks to draw references from. By default the package's tasks and, for a user's own kinds, the tasks in
            the archives of the runs.
        task_kinds: Kinds that all play. By default those of the first run, if the package has them all.
        settings: Further settings of [`PopuLoRAConfig`]. `model_init_kwargs` are added to those that the first
            population needs.

    Raises:
        `ValueError`: If a population is given twice, cannot be read, is a dataset run, or does not fit the first one;
            if the first one was trained on a user's own kind and `task_kinds` is not given; or if tasks to draw
            references from are missing.
    """
    roots = [fetch(run) for run in runs]
    # 1. What the files say: settings, kinds, and the tasks that teachers are shown.
    if len({root.resolve() for root in roots}) < len(roots):
        raise ValueError(f"A population plays once, but `runs` names one twice: {', '.join(runs)}.")
    saved = [read_population(root) for root in roots]
    for run, theirs in zip(runs, saved, strict=True):
        check_plays(run, theirs)
    kinds_played = choose_kinds(runs[0], saved[0]["settings"]["task_kinds"], task_kinds)
    proposing = any(member["role"] == "teacher" for theirs in saved for member in theirs["members"])
    args = _settings_of(saved[0], settings | {"task_kinds": kinds_played}, proposing)
    others = {run: theirs["settings"]["task_kinds"] for run, theirs in zip(runs, saved, strict=True)}
    if any(set(kinds) != set(args.task_kinds) for kinds in others.values()):
        trained = "; ".join(f"{run} was trained on {', '.join(kinds)}" for run, kinds in others.items())
        logger.warning(make_printable(f"The kinds of task differ: {trained}. All play {', '.join(args.task_kinds)}."))
    kinds = start.make_kinds(args)
    archive = TaskArchive()
    if proposing:  # students alone are shown no references
        given = gather_references(args.task_kinds, roots, saved[0]["prompt_style"]) if tasks is None else tasks
        archive = build_archive(given, kinds, args.prompt_style, args.archive_size, args.references_per_proposal)

    # 2. One base with an adapter for every member of every run. Each member gets a new name, by its place
    # among all members of its role.
    set_seed(args.seed)
    base = start.load_base(saved[0]["base_model"], args)
    tokenizer = start.load_tokenizer(base, None, args, read_chat_template(roots[0]))
    templates = [read_chat_template(root) or tokenizer.chat_template for root in roots]
    entries = {
        role: [(i, m) for i, theirs in enumerate(saved) for m in theirs["members"] if m["role"] == role]
        for role in ("teacher", "student")
    }
    population, router = Population(len(entries["teacher"]), len(entries["student"])), Router()
    model = add_members(base, population.names, read_lora(saved[0]), router, args.seed)
    for root, theirs in zip(roots, saved, strict=True):
        check_same_shape(root, Shape.of(model, saved[0]["base_model"], (args.model_init_kwargs or {}).get("revision")))
        check_one_moment(root, theirs)
    prefixes, names, template_of = choose_prefixes(runs), {}, {BASE_NAME: templates[0]}
    for role, contestants in entries.items():
        for place, (index, member) in zip(population.role(role), contestants, strict=True):
            write_member_file(model, place.name, roots[index] / member["adapter"] / "adapter_model.safetensors")
            names[place.name] = prefixes[index] + member["name"]
            template_of[place.name] = templates[index]
    # 3. The referee, whose sandbox is started here, and the player.
    referee = start.make_referee(args, kinds, base, tokenizer)
    with ExitStack() as failed:  # if the start fails here, the sandbox is closed
        failed.callback(referee.sandbox.close)
        asking = {template: copy.deepcopy(tokenizer) for template in dict.fromkeys(templates)}
        for template, own in asking.items():
            own.chat_template = template
        counters = [make_free_token_counter(base, own, args) for own in asking.values()]
        referee.free_tokens = lambda prompt: min(count(prompt) for count in counters)
        if proposing:
            start.fit_into_context(referee, archive, None, referee.free_tokens)
        player = _make_player_of_runs(model, asking, router, population.names, args, template_of)
        teachers, students = ([member.name for member in population.role(role)] for role in entries)
        failed.pop_all()
    return Contest(args, model, names, referee, player, archive, teachers, students)


def _make_player_of_runs(
    model: PeftModel,
    asking: Mapping[str, PreTrainedTokenizerBase],
    router: Router,
    members: Sequence[str],
    args: PopuLoRAConfig,
    template_of: Mapping[str, str],
) -> Player:
    """
    Makes one player for all members and the base. It asks each with the chat template that `template_of` has, by the
    tokenizer that `asking` has for this template.
    """
    players, base = {}, model.get_base_model()
    # A template also decides which tokens end an answer. So each template has a tokenizer and a player of its own, and
    # each player finds the base's generation config as it was.
    given = base.generation_config
    for template, tokenizer in asking.items():
        base.generation_config = given
        players[template] = make_player(model, tokenizer, router, members, args)
    if len(players) == 1:
        return next(iter(players.values()))

    def generate(
        prompts: list[Messages], names: Sequence[str], seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        found: dict[int, Completion] = {}
        for template, player in players.items():
            rows = [row for row, name in enumerate(names) if template_of[name] == template]
            if rows:
                their_seeds = None if seeds is None else [seeds[row] for row in rows]
                asked = [prompts[row] for row in rows], [names[row] for row in rows]
                found |= zip(rows, player.generate(*asked, seeds=their_seeds), strict=True)
        return [found[row] for row in range(len(names))]

    return Player(generate)


def _settings_of(saved: dict[str, Any], settings: dict[str, Any], proposing: bool) -> PopuLoRAConfig:
    """
    Makes the settings of a contest from those of a saved population.

    Takes over what decides how members are prompted, how they answer, and which proposals are refused.

    Args:
        saved: Contents of `population.json`.
        settings: Settings that replace the saved ones.
        proposing: Whether any population has teachers. Without them kinds need no methods for proposals.
    """
    first, on_cpu = saved["settings"], not torch.cuda.is_available()
    asked = (
        "references_per_proposal",
        "inputs_per_function",
        "max_completion_length",
        "shots",
        "reading",
        "prompt_texts",
    )
    theirs = {name: first[name] for name in asked} | read_sampling(first)
    if first.get("teacher_reward") == "paper":  # other pays change no refusal, and nobody is paid here
        theirs["teacher_reward"] = "paper"
    return PopuLoRAConfig(
        "unused",
        **theirs
        | {
            "prompt_style": saved["prompt_style"],
            "model_init_kwargs": {
                "dtype": "float32" if on_cpu else "bfloat16",
                "revision": first["base_revision"],
                "quantization_config": saved.get("base_quantization"),
            }
            | settings.get("model_init_kwargs", {}),
            "use_cpu": on_cpu,
            "bf16": not on_cpu,
            "report_to": [],
        }
        # The baseline "member" would warn of few proposals, although nothing is trained here.
        | ({"teacher_baseline": "group"} if proposing else {"teachers": 0})
        | {name: value for name, value in settings.items() if name != "model_init_kwargs"},
    )


def gather_references(kinds: Sequence[str], roots: Sequence[Path], style: str) -> Dataset | None:
    """
    Gathers the tasks that teachers can be shown: the package's, and those of a user's own kinds from the archives.

    Args:
        kinds: Kinds of task as the option `task_kinds` names them.
        roots: Directories of saved populations.
        style: The prompt style, which decides among the package's tasks.

    Returns:
        [`~datasets.Dataset`] or `None`: `None` if no kind is a user's own; then the package's tasks suffice.

    Raises:
        `ValueError`: If a kind is a user's own and no population has an archive, or an archive is broken.
    """
    own = [kind.name for kind in map(resolve_kind, kinds) if kind.name not in TASK_KINDS]
    if not own:
        return None
    archives = [path for root in roots if (path := root / "archive.parquet").exists()]
    if not archives:
        raise ValueError(
            f"No archive.parquet in {', '.join(map(str, roots))}: teachers are shown tasks of the kind "
            f"{', '.join(own)} from this file. Give a run or a checkpoint that was saved whole."
        )
    records = [row for path in archives for row in pq.read_table(path, filters=[("kind", "in", own)]).to_pylist()]
    tasks = [*load_built_in_tasks(style), *(read_task(record, "archive.parquet") for record in records)]
    return Dataset.from_list([task.to_record() for task in tasks])


def choose_prefixes(runs: Sequence[str]) -> list[str]:
    """
    Chooses what stands before the names of each run's members, so that members of different runs have different names.

    It is empty for a single run, else the run's path without the folder that all runs share. It is the whole path if
    they share none, or if this folder is itself one of the runs.
    """
    if len(runs) == 1:
        return [""]
    paths = [Path(run) for run in runs]
    one_sort = len({path.is_absolute() for path in paths}) == 1
    common = os.path.commonpath(paths) if one_sort else ""
    if not common or Path(common) in paths:  # the runs share no folder, or the shared one is itself a run
        return [f"{run} " for run in runs]
    return [f"{path.relative_to(common)} " for path in paths]


# The results: numbers, a table and a picture.


@dataclass
class Payoff:
    """
    The results of cross-play. Shapes: T teachers, S students.

    Args:
        teachers, students: Names, in the order of rows and columns.
        valid: Share of each teacher's proposals that are fresh tasks, `[T]`.
        solved: Solve rate of each student on the fresh tasks of each teacher, `[T][S]`. A teacher without a fresh task
            has NaN in its row.
        given: Each member's solve rate on the given tasks; empty if no tasks are given.
    """

    teachers: list[str]
    students: list[str]
    valid: list[float] = field(default_factory=list)
    solved: list[list[float]] = field(default_factory=list)
    given: dict[str, float] = field(default_factory=dict)

    @property
    def by_teacher(self) -> list[float]:
        """Mean solve rate on each teacher's tasks over the students. A low one means hard tasks."""
        return [fmean(row) for row in self.solved]

    @property
    def by_student(self) -> list[float]:
        """Mean solve rate of each student over the teachers that have a fresh task."""
        rows = [row for row in self.solved if not math.isnan(row[0])]
        return [fmean(column) if column else math.nan for column in (zip(*rows, strict=True) if rows else [])]

    def rename(self, names: Mapping[str, str]) -> Payoff:
        """Copies the results under other names of the members."""
        return replace(
            self,
            teachers=[names[name] for name in self.teachers],
            students=[names[name] for name in self.students],
            given={names[name]: rate for name, rate in self.given.items()},
        )


def choose_payoff_size(teachers: Sequence[str], students: Sequence[str]) -> tuple[float, float]:
    """Chooses width and height of the picture in inches, by the number of cells and the length of the names."""
    letters = 0.08 * max(map(len, (*teachers, *students)))
    return max(WIDTH, 1.8 + letters + 0.55 * len(students)), max(3.7, 0.9 + letters + 0.5 * len(teachers))


def write_payoff(payoff: Payoff, directory: str | Path) -> Path:
    """
    Prints the results as a table, and writes `crossplay.json` and `crossplay.png`.

    The JSON file has the fields of [`Payoff`] and the means per row and column.

    Returns:
        `Path`: The JSON file.
    """
    path = Path(directory, "crossplay.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    values = json.dumps(asdict(payoff) | {"by_teacher": payoff.by_teacher, "by_student": payoff.by_student})
    write_json(path, json.loads(values, parse_constant=lambda _: None))  # NaN, which JSON lacks, becomes null

    # rich belongs to the extra `report`. The JSON file is written even where rich is missing.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if payoff.teachers:
        size = choose_payoff_size(payoff.teachers, payoff.students)
        save_picture(path.with_suffix(".png"), size, draw_payoff, payoff.solved, payoff.teachers, payoff.students)
    table = Table(title="Attempts solved at fresh tasks", caption="rows: teachers, columns: students")
    for column in ("teacher", "valid", *payoff.students, "mean"):
        table.add_column(Text(column), justify="left" if column == "teacher" else "right")  # a `str` would be markup
    for name, valid, row, mean in zip(payoff.teachers, payoff.valid, payoff.solved, payoff.by_teacher, strict=True):
        table.add_row(Text(name), *(format_percent(value) for value in (valid, *row, mean)))
    table.add_section()
    if payoff.teachers:
        table.add_row("mean", "", *map(format_percent, payoff.by_student), "")
    if payoff.given:
        table.add_row("given tasks", "", *(format_percent(payoff.given[name]) for name in payoff.students), "")
    Console(width=max(120, 24 + 14 * len(payoff.students))).print(table)
    return path
