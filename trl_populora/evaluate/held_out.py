"""Reads held-out tasks from tables, checks them, and measures how often members solve them.

    members x tasks x attempts --attempt--> Tried --scores--> solve rates --HeldOut--> metrics, the best student

[`HeldOut`] is what `eval_dataset` becomes. Measuring changes nothing that trains: its samples have seeds of their own,
and it leaves ratings, archive and weights as they are. So a run with an `eval_dataset` trains the same weights,
whether it evaluates or not. (Teachers may not propose held-out tasks in either case.)
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm
from trl import GRPOConfig

from trl_populora.evaluate.intervals import measure_mean
from trl_populora.lora.layers import BASE_NAME
from trl_populora.population.members import Member
from trl_populora.step.player import Player
from trl_populora.step.referee import Referee
from trl_populora.tasks.archive import TaskArchive, read_task, sort_dictionaries
from trl_populora.tasks.kind import Task, TaskKind
from trl_populora.tasks.python.kinds import CodeI
from trl_populora.tasks.python.normal_form import normal_forms
from trl_populora.tasks.python.programs import parse_function
from trl_populora.tasks.python.reading import has_thinking


logger = logging.getLogger(__name__)

FEWEST_ALIKE = 10  # attempts of like effort of which a solve rate is told


@dataclass(frozen=True)
class Tried:
    """One attempt: whether it is right, whether the member thought first, and the number of tokens of its answer."""

    correct: bool
    thinking: bool
    length: int

    @property
    def effort(self) -> str:
        """`thinks` or `plain`, and how many bits the length has: answers of like effort differ twofold in length."""
        return f"{'thinks' if self.thinking else 'plain'} {self.length.bit_length()}"


def attempt(
    referee: Referee,
    player: Player,
    members: Sequence[str],
    tasks: Sequence[Task],
    attempts: int,
    batch: int | None,
    seed: int | None = None,
    describe: str = "",
) -> dict[str, list[list[Tried]]]:
    """
    Lets members attempt tasks, sampled as in training. The ranks share the rows in equal parts. Collective.

    With a `seed` the attempts depend neither on the number of ranks nor on what was sampled before, and what is
    sampled later does not depend on the attempts. With a `batch` each batch has a seed of its own, without `batch`
    each task has one. One difference remains: vLLM rounds a row differently beside other rows, which may change a
    token.

    Args:
        referee: Poses the tasks and grades.
        player: Generates.
        members: Names of members, or `base`.
        tasks: What to solve.
        attempts: Attempts of each member at each task.
        batch: Most rows that a rank generates at once. With `None` a rank generates all its rows at once: vLLM
            schedules them itself.
        seed: Seed of the samples. With `None` they come from the training's own generators.
        describe: Name of the progress bar; no bar without one.

    Returns:
        Per member, and per task in order, the attempts.
    """
    prompts = {task: referee.solving_prompt(task) for task in tasks}
    # Prompts of like length share a batch, which spares padding; the sort is stable, so the order is always the same.
    ordered = sorted(range(len(tasks)), key=lambda index: len(prompts[tasks[index]][-1]["content"]))
    rows = [(member, index) for member in members for index in ordered for _ in range(attempts)]
    if batch is None:
        share = attempts * -(-len(members) * len(tasks) // player.world)
        numbers = [index for _, index in rows]
    else:
        share = _choose_part(len(rows), batch)
        numbers = [place // share for place in range(len(rows))]
    found: dict[int, Tried] = {}
    first, quiet = player.rank * share, not describe or player.rank > 0
    starts = range(first, first + len(rows), share * player.world)
    for start in tqdm(starts, desc=describe, unit="batch", leave=False, disable=quiet):
        # All ranks have to ask for equally many rows. One that has run out asks for the last row again, and drops it.
        places = [min(place, len(rows) - 1) for place in range(start, start + share)]
        completions = player.generate(
            [prompts[tasks[rows[place][1]]] for place in places],
            [rows[place][0] for place in places],
            seeds=None if seed is None else [seed + numbers[place] for place in places],
        )
        mine = range(start, min(start + share, len(rows)))
        completions = completions[: len(mine)]
        grades = referee.grade([tasks[rows[place][1]] for place in mine], [each.text for each in completions])
        found |= {
            place: Tried(grade.right, has_thinking(completion.text), len(completion.completion_ids))
            for place, completion, grade in zip(mine, completions, grades, strict=True)
        }
    outcomes = {place: outcome for part in player.gather(found) for place, outcome in part.items()}
    tried: dict[str, list[list[Tried]]] = {member: [[] for _ in tasks] for member in members}
    for place, (member, index) in enumerate(rows):
        tried[member][index].append(outcomes[place])
    return tried


def _choose_part(rows: int, most: int) -> int:
    """Splits `rows` rows into the fewest equal parts of at most `most` rows each. Returns how many rows a part has."""
    parts = max(1, -(-rows // most))
    return max(1, -(-rows // parts))


def scores(tried: Mapping[str, Sequence[Sequence[Tried]]], tasks: Sequence[Task]) -> dict[str, float]:
    """
    Computes the figures of some members on the same tasks. Each is a mean over tasks.

    Args:
        tried: What [`attempt`] returns, for the members that count.
        tasks: The tasks, in the same order.

    Returns:
        `{member}/solve_rate` and `{member}/thinking_rate`. Over the members: `solve_rate_mean`, `solve_rate_best`,
        `solve_rate_worst`, `thinking_rate`, `{kind}/solve_rate`, and `pass_at_{k}`, the share of tasks that a member
        solves in at least one of its k attempts. `solve_rate_margin` is half of the 95 % interval of
        `solve_rate_mean` over tasks. `mean_length` is the mean number of tokens of an answer.
    """
    figures: dict[str, float] = {}
    rates = {member: [fmean(t.correct for t in group) for group in groups] for member, groups in tried.items()}
    for member, groups in tried.items():
        figures[f"{member}/solve_rate"] = fmean(rates[member])
        figures[f"{member}/thinking_rate"] = fmean(t.thinking for group in groups for t in group)
    means = [figures[f"{member}/solve_rate"] for member in tried]
    figures |= {"solve_rate_mean": fmean(means), "solve_rate_best": max(means), "solve_rate_worst": min(means)}
    by_task = [fmean(each) for each in zip(*rates.values(), strict=True)]
    # Two more tasks of 0 and two of 1, as Agresti and Coull have it, for where all tasks say the same.
    figures["solve_rate_margin"] = measure_mean([*by_task, 0.0, 0.0, 1.0, 1.0])[1]
    figures["thinking_rate"] = fmean(figures[f"{member}/thinking_rate"] for member in tried)
    every = _list_attempts(tried)
    figures["mean_length"] = fmean(t.length for t in every)
    for kind in dict.fromkeys(task.kind for task in tasks):
        of_kind = [i for i, task in enumerate(tasks) if task.kind == kind]
        figures[f"{kind}/solve_rate"] = fmean(rates[member][i] for member in tried for i in of_kind)
    count = len(next(iter(tried.values()))[0])
    figures[f"pass_at_{count}"] = fmean(any(t.correct for t in group) for groups in tried.values() for group in groups)
    return figures


def _list_attempts(tried: Mapping[str, Sequence[Sequence[Tried]]]) -> list[Tried]:
    return [each for groups in tried.values() for group in groups for each in group]


def rate_efforts(attempts: Sequence[Tried]) -> dict[str, tuple[int, float]]:
    """Counts the attempts of each effort, and computes their solve rate."""
    marks: dict[str, list[bool]] = {}
    for each in attempts:
        marks.setdefault(each.effort, []).append(each.correct)
    return {effort: (len(of), fmean(of)) for effort, of in marks.items()}


def compare_efforts(
    efforts: Mapping[str, tuple[int, float]], base: Mapping[str, tuple[int, float]]
) -> tuple[float, float] | None:
    """
    Compares the solve rates of answers of like effort.

    Args:
        efforts: What [`rate_efforts`] returns for the attempts of students.
        base: The same for the base. The more of the base's attempts are of an effort, the more the effort counts. For
            an effort of which the students have fewer than `FEWEST_ALIKE`, those of the next shorter and longer
            answers stand in that think likewise. If there are none, the effort does not count.

    Returns:
        What the students solve more than the base, and the share of the base's attempts that this is about; `None` if
        none of the base's attempts has its like.
    """
    found = [(effort.split(), rate) for effort, (number, rate) in efforts.items() if number >= FEWEST_ALIKE]
    gain, count = 0.0, 0
    for effort, (number, rate) in base.items():
        way, bits = effort.split()
        likewise = {int(size): now for (other, size), now in found if other == way}
        near = [likewise[size] for size in (int(bits) - 1, int(bits) + 1) if size in likewise]
        if alike := [likewise[int(bits)]] if int(bits) in likewise else near:
            gain, count = gain + number * (fmean(alike) - rate), count + number
    return (gain / count, count / sum(number for number, _ in base.values())) if count else None


@dataclass
class HeldOut:
    """
    The held-out tasks of a run, and how its members last did on them.

    Args:
        tables: The tasks, by the name of their table; `""` for a table that was given alone, without a name.
        attempts: Attempts per member and task.
        batch: Most rows that a rank generates at once; all its rows when `None`.
        seed: Seed of the samples. It is the same in every evaluation, so two evaluations differ only by the weights.
        base: The base's figures per table, measured once.
        efforts: What [`rate_efforts`] says of the base's attempts at each table.
        rates: The last solve rate on the first table, by `name@version`.
        step: Optimizer steps that the members had done when `rates` were measured.
    """

    tables: dict[str, list[Task]]
    attempts: int
    batch: int | None
    seed: int
    base: dict[str, dict[str, float]] = field(default_factory=dict)
    efforts: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    step: int | None = None

    def __post_init__(self):
        self._questions = {key for tasks in self.tables.values() for task in tasks for key in _key_questions(task)}

    def __contains__(self, task: object) -> bool:
        """Whether a held-out task asks the same as `task`; `_key_questions` says what counts as the same."""
        return isinstance(task, Task) and not self._questions.isdisjoint(_key_questions(task))

    def asks_the_same_as(self, other: HeldOut) -> bool:
        """Says whether both have the same tables of the same tasks."""
        return [*map(_digest, self.tables.values())] == [*map(_digest, other.tables.values())]

    def measure(
        self,
        referee: Referee,
        player: Player,
        students: Sequence[Member],
        prefix: str,
        step: int,
        progress: bool = False,
        untrained: Container[str] = (),
    ) -> dict[str, float]:
        """
        Scores the students on every table and, the first time, the base too. Collective.

        Args:
            referee: Poses the tasks and grades.
            player: Generates.
            students: Whom to ask.
            prefix: Starts every key, followed by the table's name if it has one.
            step: Optimizer steps that the students have done.
            progress: Whether to show a bar.
            untrained: Students whose adapter still adds nothing, and who sample at the base's temperature. They share
                the base's attempts.

        Returns:
            The figures of [`scores`] over the students, the base's as `base/...`, and `{prefix}_runtime` in seconds.
            `gain_equal_effort` is what the students solve more than the base where both think or both do not, with
            answers of like length, and `like_base` the share of the base's answers that have their like. The first is
            missing where none has.
        """
        start, metrics = time.perf_counter(), dict[str, float]()
        for name in self.tables:
            bar = f"evaluate {name}".strip() if progress else ""
            named = f"{prefix}_{name}_" if name else f"{prefix}_"
            figures = self._figures(referee, player, students, name, bar, untrained)
            metrics |= {named + key: value for key, value in figures.items()}
        self.step = step
        return metrics | {f"{prefix}_runtime": round(time.perf_counter() - start, 4)}

    def _figures(
        self,
        referee: Referee,
        player: Player,
        students: Sequence[Member],
        name: str,
        bar: str,
        untrained: Container[str],
    ) -> dict[str, float]:
        """Scores the students on one table, and the base if it has no scores yet or a student is untrained."""
        tasks = self.tables[name]

        def tries_of(names: Sequence[str]) -> dict[str, list[list[Tried]]]:
            return attempt(referee, player, names, tasks, self.attempts, self.batch, self.seed, bar) if names else {}

        known = name in self.base
        base = {} if known and not any(student.name in untrained for student in students) else tries_of([BASE_NAME])
        names = [student.name for student in students]
        trained = tries_of([each for each in names if each not in untrained])
        tried = {each: trained.get(each) or base[BASE_NAME] for each in names}
        figures = scores(tried, tasks)
        if name == next(iter(self.tables)):
            self.rates = {student.identity: figures[f"{student.name}/solve_rate"] for student in students}
        if not known:
            self.base[name] = {
                key if key.startswith(f"{BASE_NAME}/") else f"{BASE_NAME}/{key}": value
                for key, value in scores(base, tasks).items()
                # Figures over all members would repeat the figures of the only member here, the base.
                if key not in ("thinking_rate", "mean_length") and not key.startswith("solve_rate_")
            }
            self.efforts[name] = rate_efforts(_list_attempts(base))
        found = compare_efforts(rate_efforts(_list_attempts(tried)), self.efforts[name])
        figures |= {"gain_equal_effort": found[0], "like_base": found[1]} if found else {"like_base": 0.0}
        return figures | self.base[name]

    def forget_rates(self) -> None:
        """Forgets the last solve rates and their step, because a second training counts its steps from 0 again."""
        self.rates, self.step = {}, None

    @property
    def base_rate(self) -> float | None:
        """Solve rate of the base on the first table; `None` until it is measured."""
        return self.base.get(next(iter(self.tables)), {}).get(f"{BASE_NAME}/solve_rate")

    def describe_tasks(self) -> dict[str, Any]:
        """Describes the first table, whose tasks `rates` are about: digest, number of tasks, attempts at each."""
        tasks = next(iter(self.tables.values()))
        return {"digest": _digest(tasks), "tasks": len(tasks), "attempts": self.attempts}

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data, ready for JSON, with a digest of each table in place of the tasks."""
        tasks = {name: _digest(table) for name, table in self.tables.items()}
        return {"base": self.base, "efforts": self.efforts, "rates": self.rates, "step": self.step, "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, for the tables whose tasks are still the same."""
        same = [name for name, tasks in self.tables.items() if state["tasks"].get(name) == _digest(tasks)]
        if len(same) < len(self.tables):
            logger.warning(
                "Some or all held-out tasks are not those of the checkpoint. The base is scored anew on each table "
                "that differs; a `metric_for_best_model` goes on comparing with scores on the former tasks."
            )
        # Version 0.2.0 saved a share for each effort, without the solve rate: then the base is scored anew.
        rated = {
            name for name in same if not any(isinstance(e, float) for e in state["efforts"].get(name, {}).values())
        }
        self.base = {name: figures for name, figures in state["base"].items() if name in rated}
        self.efforts = {name: efforts for name, efforts in state["efforts"].items() if name in rated}
        self.rates = dict(state["rates"]) if next(iter(self.tables)) in same else {}
        self.step = state["step"]


def _digest(tasks: Sequence[Task]) -> str:
    """Computes a short text that depends on the tasks' kinds, programs, inputs and messages, and on their order."""
    return hashlib.sha256(" ".join(task.task_id for task in tasks).encode()).hexdigest()[:16]


def _key_questions(task: Task) -> list[tuple]:
    """Makes keys for what a task asks. Tasks that have a key in common ask the same."""
    # Programs that differ only in names or layout have one normal form. Two tasks with one normal form and the same
    # inputs ask the same, whatever their kinds and messages. A text that is no program with an `f` has no normal form:
    # two such tasks ask the same only if their kinds and all their texts are equal.
    tree = parse_function(task.program)
    if tree is None:
        return [(task.kind, task.program, task.inputs, task.message)]
    form = normal_forms(tree)[0]
    keys: list[tuple] = [(form, tuple(sorted(map(sort_dictionaries, task.inputs))))]
    # code_i shows the output and asks for an input, so tasks with one output ask the same, whatever their inputs.
    return [*keys, (task.kind, form, task.outputs)] if task.kind == CodeI.name else keys


def load_held_out(
    eval_dataset: Any, kinds: Mapping[str, TaskKind], archive: TaskArchive | None, args: GRPOConfig
) -> HeldOut | None:
    """
    Builds the held-out tasks from one table or several; the training's archive may hold none of them.

    Raises:
        `TypeError`: If a table is not a `datasets.Dataset`.
        `ValueError`: If evaluation is wanted without tasks, if a dict has no table, or if a table is empty, holds
            prompts, a broken cell, a kind that is not played, or a task of the archive.
    """
    if eval_dataset is None:
        for name, wanted in {
            "eval_strategy": str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no",
            "eval_steps": args.eval_steps is not None,
            "eval_on_start": args.eval_on_start,
        }.items():
            if wanted:
                raise ValueError(
                    f"`{name}={getattr(args, name)!s}` needs held-out tasks: pass `eval_dataset=` (on the command "
                    "line `--eval_tasks`), a table with the columns of seed tasks, or leave "
                    f"`{name}` out."
                )
        return None
    named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    tables = {name: _read_table(_name_field(name), table, kinds) for name, table in named.items()}
    if not tables:
        raise ValueError("`eval_dataset` is an empty dict; name at least one table.")
    batch = None if args.use_vllm else args.per_device_eval_batch_size  # vLLM forms its own batches
    held_out = HeldOut(tables, args.num_generations_eval, batch, args.seed)
    if shared := [task for task in archive or () if task in held_out]:
        raise ValueError(
            f"{len(shared)} of the {len(archive or ())} tasks to start from ask what `eval_dataset` holds out, so "
            "a high score on these would prove nothing. Take them out of `train_dataset` or `eval_dataset`. The "
            f"first is {shared[0].program!r:.200}."
        )
    return held_out


def _read_table(field: str, table: Any, kinds: Mapping[str, TaskKind]) -> list[Task]:
    """Reads one table of held-out tasks and checks its rows."""
    if not isinstance(table, Dataset):
        raise TypeError(f"`{field}` must be a `datasets.Dataset` of tasks, got `{type(table).__name__}`.")
    if "prompt" in table.column_names and "kind" not in table.column_names:
        raise ValueError(
            f"`{field}` holds prompts; held-out tasks are rows with `kind`, `program`, `inputs` and `outputs`, as "
            "seed tasks are."
        )
    tasks = [read_task(row, f"`{field}`, row {number}") for number, row in enumerate(table)]
    if not tasks:
        raise ValueError(f"`{field}` is empty; give at least one task, or leave it unset.")
    for number, task in enumerate(tasks):
        if task.kind not in kinds:
            raise ValueError(
                f"`{field}`, row {number}: column `kind` is {task.kind!r}, this run plays {', '.join(kinds)}. Leave "
                "such rows out, or add the kind to `task_kinds`."
            )
    return tasks


def list_given_tables(train_dataset: Dataset | None, held_out: HeldOut | None) -> dict[str, list[Task]]:
    """Lists the tasks that the user gave, under the names that messages have for their datasets. Checks no outputs."""
    tables = {} if held_out is None else {_name_field(name): tasks for name, tasks in held_out.tables.items()}
    if train_dataset is not None:
        tables["train_dataset"] = [read_task(row, f"row {number}") for number, row in enumerate(train_dataset)]
    return tables


def _name_field(name: str) -> str:
    return f"eval_dataset[{name!r}]" if name else "eval_dataset"
