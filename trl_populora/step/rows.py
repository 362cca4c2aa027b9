"""Rows: what a step leaves for TRL, for reward functions, for metrics and for files.

    slots of this rank --make_rows--> Row [R] --gather--> records of all ranks --> metrics, ratings
                                        |
                                        `--> TRL: prompt_ids, completion_ids, logprobs

[`Played`] holds all of this: one object per step, which advantages, metrics, records and the update read.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from trl_populora.errors import make_printable
from trl_populora.options import find_function
from trl_populora.step.player import Completion, Messages
from trl_populora.step.slot import Sample, Slot
from trl_populora.tasks.kind import Reject, Task, TaskKind
from trl_populora.tasks.python.complexity import PROGRAM_MEASURES
from trl_populora.tasks.python.reading import has_thinking


if TYPE_CHECKING:
    import torch


DETAIL_CHARS = 300

Metrics = Callable[[Sequence[Mapping[str, Any]]], dict[str, float]]


def in_a_line(text: str) -> str:
    """Makes one line of a text that may quote a model: cuts it to 300 characters, and replaces unprintable ones."""
    return make_printable(text[:DETAIL_CHARS])


@dataclass(frozen=True)
class Row:
    """
    One training row: a proposal or an attempt.

    Reward functions see the fields of `COLUMNS`. Files hold these and more. Other ranks get [`record`].

    Args:
        pay: What the rules pay for the row's completion.
        program: The program of the task that was accepted or attempted.
        share: The student's part of a proposal.
        dropped: How many references did not fit into the proposal prompt.
        reject_detail: `reject_reason` in a sentence.
        features: Words for what the proposed task uses.
        group: A name that rows have in common if the baseline `"group"` compares them: the attempts of one slot, or
            the proposals of one match.

    docs/files.md explains the other columns.
    """

    role: str
    member: str
    kind: str
    match: int
    task_id: str = ""
    valid: bool = False
    reject_reason: str = ""
    solve_rate: float = float("nan")
    correct: bool = False
    well_formed: bool = False
    chance: float = 0.0
    rarity: float = 0.0
    pay: float = 0.0
    program: str = ""
    share: float = float("nan")
    solved: bool = False
    archived: bool = False
    dropped: int = 0
    reject_detail: str = ""
    features: tuple[str, ...] = ()
    prompt: Messages = field(default_factory=list)
    completion: Completion = Completion([], [], "")
    group: str = ""

    # The columns that other ranks, reward functions and files all get. Their names are public (docs/files.md).
    TOLD = (
        *("role", "member", "kind", "match", "task_id", "valid", "reject_reason", "solve_rate", "correct"),
        *("well_formed", "chance", "rarity", "pay"),
    )
    COLUMNS = (*TOLD, "program")

    def record(self) -> dict[str, Any]:
        """Returns what ratings, metrics and the other ranks need to know of this row."""
        further = ("share", "solved", "archived", "dropped", "reject_detail", "group")
        return {name: getattr(self, name) for name in (*self.TOLD, *further)} | {
            "thinking": has_thinking(self.completion.text)
        }


def make_rows(slots: Sequence[Slot], rank: int) -> list[Row]:
    """
    Makes the rows of a rank's slots: the attempts, slot by slot, then the proposals. The names of the attempts' groups
    hold `rank`, so no two ranks have the same.
    """
    attempts = [
        _row_of_attempt(slot, attempt, f"rank {rank} slot {number} {attempt.member}")
        for number, slot in enumerate(slots)
        for attempt in slot.attempts
    ]
    # Attempts come first, group by group: TRL cuts the rows into groups of G from the front.
    return attempts + [_row_of_proposal(slot, slot.proposal) for slot in slots if slot.proposal is not None]


def _row_of_attempt(slot: Slot, attempt: Sample, group: str) -> Row:
    assert attempt.grade is not None, "attempts are graded before rows are made"
    read = attempt.grade.attempt
    return Row(
        "student",
        attempt.member,
        slot.task.kind,
        slot.match.index,
        slot.task.task_id,
        valid=True,
        reject_reason=read.reason,
        solve_rate=slot.solve_rate,
        correct=attempt.right,
        well_formed=read.well_formed,
        pay=attempt.pay,
        program=slot.task.program,
        archived=slot.archived,
        reject_detail=in_a_line(read.detail),
        features=slot.features,
        prompt=attempt.prompt,
        completion=attempt.completion,
        group=group,
    )


def _row_of_proposal(slot: Slot, proposal: Sample) -> Row:
    outcome, task = slot.outcome, slot.task if slot.fresh else None
    assert outcome is not None, "proposals have an outcome before rows are made"
    return Row(
        "teacher",
        proposal.member,
        slot.kind,
        slot.match.index,
        task.task_id if task else "",
        valid=outcome.valid,
        reject_reason=outcome.reason,
        solve_rate=outcome.solve_rate,
        well_formed=outcome.reason != Reject.FORMAT.value,
        chance=outcome.chance,
        rarity=outcome.rarity,
        pay=proposal.pay,
        program=outcome.program,
        share=slot.share,
        solved=outcome.solved,
        dropped=slot.dropped,
        reject_detail=in_a_line(slot.refusal.detail) if slot.refusal else "",
        features=slot.features,
        prompt=proposal.prompt,
        completion=proposal.completion,
        group=f"match {slot.match.index}",
    )


@dataclass(frozen=True)
class Worth:
    """
    What the rows of a step are worth.

    Args:
        rewards, advantages, members: One entry per row; `members` are indices.
        factors: As [`~trl_populora.step.advantages.compute_member_factors`] returns them, one per row.
        flat: Share of the groups of attempts in which all rewards are equal.
    """

    rewards: torch.Tensor
    advantages: torch.Tensor
    members: torch.Tensor
    factors: torch.Tensor
    flat: float

    def part(self, rows: slice) -> Worth:
        """Returns the worth of some rows; `flat` stays that of all rows."""
        columns = {name: getattr(self, name)[rows] for name in ("rewards", "advantages", "members", "factors")}
        return replace(self, **columns)


@dataclass
class Played:
    """
    One step as it was played.

    Args:
        rows: This rank's, as [`make_rows`] orders them; in a dataset run
            [`~trl_populora.step.prompts.PromptRow`]s.
        records: The rows of all ranks in the order of ranks, as [`Row.record`] tells them; in a dataset run only the
            `member` of each.
        slots: This rank's slots, from which the rows were made; none after a resume.
        tasks: Accepted proposals of all ranks; none after a resume.
        seconds: Wall time per phase on this rank.
        metrics: The step's metrics over all ranks. Keys of a user's own metrics begin with `OWN_METRICS`.
        rewards: What every reward function gives for the rows of all ranks, `[W * R, functions]`, NaN for `None`.
        worth, local_worth: What the rows of all ranks are worth, and what this rank's are.
        plan: Which of this rank's rows are computed together, as
            [`~trl_populora.step.microbatch.plan_micro_batches`] returns it.

    `rewards`, `worth`, `local_worth` and `plan` are no arguments of the constructor.
    [`~trl_populora.step.play.play_step`] sets `rewards`, and [`~trl_populora.step.advantages.Scorer.score`] sets the
    other three. After a resume all four are absent.
    """

    rows: list[Any]
    records: list[dict[str, Any]]
    slots: list[Slot] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: torch.Tensor = field(init=False)
    worth: Worth = field(init=False)
    local_worth: Worth = field(init=False)
    plan: list[list[list[int]]] = field(init=False)

    @property
    def for_reward_functions(self) -> tuple[list[dict], list[Messages], list[Messages], list[list[int]]]:
        """This rank's rows as reward functions get them: columns, prompts, completions and ids of completions."""
        columns = [{name: getattr(row, name) for name in Row.COLUMNS} for row in self.rows]
        said = [[{"role": "assistant", "content": row.completion.text}] for row in self.rows]
        return columns, [row.prompt for row in self.rows], said, [row.completion.completion_ids for row in self.rows]

    def count_tokens(self, ends: Collection[int] | None = None) -> list[int]:
        """
        Counts the completion tokens that count in the loss, per row of this rank. With `ends`, a completion counts 0
        if its last token is none of `ends`, because it was cut off.
        """
        ids = [row.completion.completion_ids for row in self.rows]
        return [len(each) if ends is None or any(last in ends for last in each[-1:]) else 0 for each in ids]

    @property
    def prompts(self) -> list[int]:
        """A number for each of this rank's rows; rows with the same number have one member and one prompt."""
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        keys = [(row.member, tuple(row.completion.prompt_ids)) for row in self.rows]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @property
    def tokens(self) -> dict[str, list | None]:
        """Token ids of prompts and completions, and log-probabilities, of this rank: what `rollout_func` returns."""
        parts = ("prompt_ids", "completion_ids", "logprobs")
        found = {name: [getattr(row.completion, name) for row in self.rows] for name in parts}
        # Only vLLM gives log-probabilities of the sampled tokens. TRL takes `None` where they are not known.
        return {name: None if values[0] is None else values for name, values in found.items()}

    @property
    def members(self) -> set[str]:
        """Names of the members that have a row on any rank."""
        return {record["member"] for record in self.records}

    def state_dict(self) -> dict[str, Any]:
        """
        Returns plain data for a checkpoint. A resume needs it if the checkpoint was written before the last optimizer
        step on these rows.
        """
        return {"rows": [asdict(row) for row in self.rows], "records": self.records}

    @classmethod
    def from_state(cls, state: dict[str, Any], row_class: type[Any] = Row) -> Played:
        """Makes an object of what `state_dict` returned, with rows of `row_class`."""
        rows = [row_class(**row | {"completion": Completion(**row["completion"])}) for row in state["rows"]]
        return cls(rows, state["records"])


# Names of the arguments that TRL gives a reward function beside the columns.
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def teacher_reward(role: list[str], pay: list[float], **columns: list) -> list[float | None]:
    """Gives TRL the pay of each proposal as its reward, and `None` for attempts."""
    return [paid if name == "teacher" else None for name, paid in zip(role, pay, strict=True)]


def student_reward(role: list[str], pay: list[float], **columns: list) -> list[float | None]:
    """Gives TRL the pay of each attempt as its reward, and `None` for proposals."""
    return [paid if name == "student" else None for name, paid in zip(role, pay, strict=True)]


def check_arguments(function: Callable[..., Any], columns: Sequence[str]) -> None:
    """
    Checks that a user's reward function can be called with all columns by name, as TRL does.

    Args:
        function: The reward function; async and partial ones, too.
        columns: Names of the columns that it gets.

    Raises:
        `TypeError`: If it asks for an argument that nothing gives, or does not take all that are given.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    given = (*ARGUMENTS, *(name for name in columns if name not in ("prompt", "completion", "completion_ids")))
    called = getattr(
        getattr(function, "func", function), "__name__", type(function).__name__
    )  # a partial's name is in its `func`
    absent = [name for name in named if name not in given and named[name].default is inspect.Parameter.empty]
    if absent:
        asked = ", ".join(f"`{name}`" for name in absent)
        near = "".join(f"Did you mean `{name}`? " for name in difflib.get_close_matches(absent[0], given, n=1))
        raise TypeError(
            f"The reward function `{called}` asks for {asked}, which nothing gives. {near}It may ask for "
            f"{', '.join(given)}."
        )
    if not all(name in named for name in given) and all(each.kind is not each.VAR_KEYWORD for each in parameters):
        raise TypeError(
            f"The reward function `{called}` is called with more arguments by name than it takes. End its "
            "arguments with `**columns`."
        )


def measure_step(
    records: Sequence[Mapping[str, Any]],
    tasks: Sequence[Task],
    complexities: Sequence[Mapping[str, float]],
    kinds: Mapping[str, TaskKind],
    new_programs: int,
) -> dict[str, float]:
    """
    Computes the metrics of one step over all ranks. A mean of nothing is NaN, so that no key is absent.

    Args:
        records: The records of the rows of all ranks.
        tasks: The accepted proposals of all ranks.
        complexities: The measures of these tasks, by name.
        kinds: The run's kinds by name.
        new_programs: How many programs are new to the archive. A program that differs from an earlier one only in its
            constants is not new.
    """
    proposals = [r for r in records if r["role"] == "teacher"]
    valid = [r for r in proposals if r["valid"]]
    attempts = [r for r in records if r["role"] == "student"]
    fresh = [r for r in attempts if not r["archived"]]
    # One record per proposed task, for figures of its solve rate. Without teachers: one record per group of attempts.
    tried = valid if proposals else list({r["group"]: r for r in attempts}.values())
    written = sum(kinds[task.kind].writes_program for task in tasks)
    metrics = {
        "propose/valid_rate": _mean([r["valid"] for r in proposals]),
        "propose/novel_rate": new_programs / written if written else float("nan"),
        "propose/rarity": _mean([r["rarity"] for r in valid]),
        "propose/dropped_references": float(sum(r["dropped"] for r in proposals)),
        "solve/rate": _mean([r["correct"] for r in fresh]),
        "solve/archive_rate": _mean([r["correct"] for r in attempts if r["archived"]]),
        "solve/thinking_rate": _mean([r["thinking"] for r in attempts]),
        "solve/well_formed": _mean([r["well_formed"] for r in attempts]),
        "solve/frac_none": _mean([r["solve_rate"] == 0 for r in tried]),
        "solve/frac_chance": _mean([r["solve_rate"] > 0 and not r["solved"] for r in valid]),
        "solve/frac_all": _mean([r["solve_rate"] == 1 for r in tried]),
    }
    for kind in kinds:
        metrics[f"propose/{kind}/valid_rate"] = _mean([r["valid"] for r in proposals if r["kind"] == kind])
        metrics[f"solve/{kind}/rate"] = _mean([r["correct"] for r in fresh if r["kind"] == kind])
    for reason in Reject:
        metrics[f"verify/reject/{reason.value}"] = float(sum(r["reject_reason"] == reason.value for r in proposals))
    declared = {name for kind in kinds.values() for name in kind.measures}
    for name in sorted({key for complexity in complexities for key in complexity} | declared | {*PROGRAM_MEASURES}):
        metrics[f"curriculum/{name}"] = _mean([c[name] for c in complexities if name in c])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def find_metric(path: str) -> Metrics:
    """
    Finds a user's own metric, `module:function`: it takes the records of a step and gives numbers by name.

    Raises:
        `ValueError`: If there is no such function. The function that is returned raises it, too, if the user's
            function gives anything but numbers by name.
    """
    ask = find_function(path, "own_metrics")

    def tell(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        told = ask(records)
        if not isinstance(told, dict) or not all(
            isinstance(key, str) and isinstance(value, Real) for key, value in told.items()
        ):
            raise ValueError(
                f"`own_metrics={path}` must give numbers by name, NaN where there is none, got {told!r:.80}."
            )
        return {key: float(value) for key, value in told.items()}

    return tell


# Until a user's own metric is logged, its name has one of these prefixes. `name_own_metrics` takes the prefix away
# just before logging. Only then are all other names known, and a name given twice is noticed.
OWN_METRICS, LOG_METRIC = "`own_metrics`: ", "`log_metric`: "
# Names that no own metric may have. `Trainer` adds `epoch` and `step` to a log last of all. By `train_loss`
# `run/read.py` recognises the summary of a run.
_TAKEN = ("epoch", "step", "train_loss")


def add_own_metrics(metrics: dict[str, float], told: Mapping[str, float]) -> None:
    """Adds a user's own metrics to those of a step, each with `OWN_METRICS` before its name."""
    for name, value in told.items():
        if (key := OWN_METRICS + name) in metrics:
            raise ValueError(f"Two functions of `own_metrics` give {name!r}. Choose another name for one.")
        metrics[key] = value


def name_own_metrics(metrics: dict[str, list[float]], logs: Collection[str]) -> None:
    """
    Gives a user's own metrics their names, just before they are logged.

    Args:
        metrics: All metrics that TRL has collected since the last log. The keys of a user's own metrics are changed in
            place.
        logs: Further keys of this log.

    Raises:
        `ValueError`: If another metric has the name, or if it begins with `eval_` or `eval/`.
    """
    for key in [key for key in metrics if key.startswith((OWN_METRICS, LOG_METRIC))]:
        source, _, name = key.partition(": ")
        taken = name in metrics or name in logs or name in _TAKEN
        if taken or name.startswith(("eval_", "eval/")):
            reason = "is another metric's name" if taken else "begins like the metrics of an evaluation"
            raise ValueError(f"{source} gives {name!r}, which {reason}. Choose another one.")
        metrics[name] = metrics.pop(key)
