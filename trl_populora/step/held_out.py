"""
Held-out evaluation: how often members solve tasks that nobody trains on.

[`HeldOut`] is what `eval_dataset` becomes. Measuring changes nothing that is trained: samples have seeds of their own,
and ratings, archive and weights stay as they are, so a run with and without evaluation trains the same weights. It
keeps the rates, by which the best student is chosen.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from trl_populora.adapters.routing import BASE_NAME
from trl_populora.population.members import Member
from trl_populora.step.player import Player
from trl_populora.step.referee import Referee
from trl_populora.tasks.base import Task
from trl_populora.tasks.fences import has_thinking
from trl_populora.tasks.normal_form import normal_forms
from trl_populora.tasks.programs import function_tree


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tried:
    """One attempt: whether it is right, and whether it worked the task out inside `<think>` first."""

    correct: bool
    thinking: bool


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
    Lets members attempt tasks, sampled as in training; the ranks share the rows in equal parts. Collective.

    With a `seed` the outcome depends neither on the number of ranks nor on what was sampled before, and what is
    sampled afterwards does not depend on the outcome: every batch has a seed of its own or, without `batch`, every
    task. vLLM keeps to it but for rounding, which may turn a token where other rows are computed beside it.

    Args:
        referee ([`Referee`]): Poses the tasks and grades.
        player ([`Player`]): Generates.
        members (`Sequence[str]`): Names of members, or `base`.
        tasks (`Sequence[Task]`): What to solve.
        attempts (`int`): Attempts of each member at each task.
        batch (`int` or `None`): Most rows that a rank generates at once. `None` for vLLM, which schedules rows by
            itself: all that the rank has.
        seed (`int`, *optional*): Of the samples; the training's own generators are used when `None`.
        describe (`str`, *optional*): Name of the progress bar; no bar without one.

    Returns:
        `dict[str, list[list[Tried]]]`: Per member and task, in order, the attempts.
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
        # Where rows run out the last one is asked again and thrown away: all ranks have to ask as many.
        places = [min(place, len(rows) - 1) for place in range(start, start + share)]
        completions = player.generate(
            [prompts[tasks[rows[place][1]]] for place in places],
            [rows[place][0] for place in places],
            seeds=None if seed is None else [seed + numbers[place] for place in places],
        )
        mine = range(start, min(start + share, len(rows)))
        texts = [completion.text for completion in completions[: len(mine)]]
        grades = referee.grade([tasks[rows[place][1]] for place in mine], texts)
        found |= {
            place: Tried(grade.right, has_thinking(text))
            for place, text, grade in zip(mine, texts, grades, strict=True)
        }
    outcomes = {place: outcome for part in player.gather(found) for place, outcome in part.items()}
    tried: dict[str, list[list[Tried]]] = {member: [[] for _ in tasks] for member in members}
    for place, (member, index) in enumerate(rows):
        tried[member][index].append(outcomes[place])
    return tried


def _choose_part(rows: int, most: int) -> int:
    """Size of as few parts of like size as hold at most so many rows each."""
    parts = max(1, -(-rows // most))
    return max(1, -(-rows // parts))


def scores(tried: Mapping[str, Sequence[Sequence[Tried]]], tasks: Sequence[Task]) -> dict[str, float]:
    """
    Figures of some members on the same tasks, each a mean over tasks.

    Args:
        tried (`Mapping`): What [`attempt`] returns, for the members that count.
        tasks (`Sequence[Task]`): The tasks, in the same order.

    Returns:
        `dict[str, float]`: `{member}/solve_rate`, `{member}/thinking_rate`; over members `solve_rate_mean`,
        `solve_rate_best`, `solve_rate_worst`, `thinking_rate`, `{kind}/solve_rate` and `pass_at_{k}`, the share of
        tasks that one of the k attempts solves.
    """
    figures: dict[str, float] = {}
    rates = {member: [fmean(t.correct for t in group) for group in groups] for member, groups in tried.items()}
    for member, groups in tried.items():
        figures[f"{member}/solve_rate"] = fmean(rates[member])
        figures[f"{member}/thinking_rate"] = fmean(t.thinking for group in groups for t in group)
    means = [figures[f"{member}/solve_rate"] for member in tried]
    figures |= {"solve_rate_mean": fmean(means), "solve_rate_best": max(means), "solve_rate_worst": min(means)}
    figures["thinking_rate"] = fmean(figures[f"{member}/thinking_rate"] for member in tried)
    for kind in dict.fromkeys(task.kind for task in tasks):
        of_kind = [i for i, task in enumerate(tasks) if task.kind == kind]
        figures[f"{kind}/solve_rate"] = fmean(rates[member][i] for member in tried for i in of_kind)
    count = len(next(iter(tried.values()))[0])
    figures[f"pass_at_{count}"] = fmean(any(t.correct for t in group) for groups in tried.values() for group in groups)
    return figures


@dataclass
class HeldOut:
    """
    The held-out tasks of a run, and what is known of its members on them.

    Args:
        tables (`dict[str, list[Task]]`): The tasks; several tables have names, a single one is called `""`.
        attempts (`int`): Attempts per member and task.
        batch (`int` or `None`): Rows that a rank generates at once; its whole share when `None`.
        seed (`int`): Of the samples, the same in every evaluation: two evaluations differ by the weights alone.
        base (`dict[str, dict[str, float]]`, *optional*): Scores of the base per table, measured once.
        rates (`dict[str, float]`, *optional*): Last solve rate on the first table by `name@version`.
        step (`int`, *optional*): Optimizer steps that the members had had when `rates` were measured.
    """

    tables: dict[str, list[Task]]
    attempts: int
    batch: int | None
    seed: int
    base: dict[str, dict[str, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    step: int | None = None

    def __post_init__(self):
        self._questions = {_question(task) for tasks in self.tables.values() for task in tasks}

    def __contains__(self, task: object) -> bool:
        """Whether a task asks about the same program and inputs as a held-out one, whatever its kind."""
        return isinstance(task, Task) and _question(task) in self._questions

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
        Scores students on every table and, the first time, the base. Collective.

        Args:
            referee ([`Referee`]): Poses the tasks and grades.
            player ([`Player`]): Generates.
            students (`Sequence[Member]`): Whom to ask.
            prefix (`str`): Starts every key, with the table's name if it has one.
            step (`int`): Optimizer steps behind them.
            progress (`bool`, *optional*, defaults to `False`): Whether to show a bar.
            untrained (`Container[str]`, *optional*): Students that are still the base; they share its attempts.

        Returns:
            `dict[str, float]`: The figures of [`scores`] over the students, the base's own as `base/...`, and
            `eval_runtime` in seconds (`eval` being the prefix). Trackers and `metrics.jsonl` write `eval/`.
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
        """Of one table."""
        tasks = self.tables[name]

        def tries_of(names: Sequence[str]) -> dict[str, list[list[Tried]]]:
            return attempt(referee, player, names, tasks, self.attempts, self.batch, self.seed, bar) if names else {}

        known = name in self.base
        base = {} if known and not any(student.name in untrained for student in students) else tries_of([BASE_NAME])
        names = [student.name for student in students]
        trained = tries_of([each for each in names if each not in untrained])
        figures = scores({each: trained.get(each) or base[BASE_NAME] for each in names}, tasks)
        if name == next(iter(self.tables)):
            self.rates = {student.identity: figures[f"{student.name}/solve_rate"] for student in students}
        if not known:
            self.base[name] = {
                key if key.startswith(f"{BASE_NAME}/") else f"{BASE_NAME}/{key}": value
                for key, value in scores(base, tasks).items()
                if key != "thinking_rate" and not key.startswith("solve_rate_")  # of one: said already
            }
        return figures | self.base[name]

    @property
    def base_rate(self) -> float | None:
        """Solve rate of the base on the first table; `None` before it was measured."""
        return self.base.get(next(iter(self.tables)), {}).get(f"{BASE_NAME}/solve_rate")

    def describe_tasks(self) -> dict[str, Any]:
        """Which tasks `rates` are of, the first table: `digest` of their ids, `tasks` and `attempts` at each."""
        tasks = next(iter(self.tables.values()))
        return {"digest": _digest(tasks), "tasks": len(tasks), "attempts": self.attempts}

    def state_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; of the tasks, which are the config's, a digest by table."""
        tasks = {name: _digest(table) for name, table in self.tables.items()}
        return {"base": self.base, "rates": self.rates, "step": self.step, "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, as far as the tasks are still the same."""
        asked = state.get("tasks")  # version 0.1 did not say
        same = [name for name, tasks in self.tables.items() if asked is None or asked.get(name) == _digest(tasks)]
        if len(same) < len(self.tables):
            logger.warning(
                "The held-out tasks are not those of the checkpoint. The base is scored on them anew; a "
                "`metric_for_best_model` goes on comparing with scores on the former ones."
            )
        self.base = {name: figures for name, figures in state["base"].items() if name in same}
        self.rates = dict(state["rates"]) if next(iter(self.tables)) in same else {}
        self.step = state.get("step")


def _digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256(" ".join(task.task_id for task in tasks).encode()).hexdigest()[:16]


def _question(task: Task) -> tuple:
    """What a task asks about: program and inputs, whatever the kind; of other kinds than code everything."""
    tree = function_tree(task.program)
    if tree is None:
        return task.kind, task.program, task.inputs, task.message
    return normal_forms(tree)[0], tuple(sorted(task.inputs))
