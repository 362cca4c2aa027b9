"""What one population step leaves: the one object that advantages, metrics, records, ratings and the update read."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trl_populora.errors import printable
from trl_populora.step.player import Completion, Messages
from trl_populora.step.rules import Answer, Outcome
from trl_populora.tasks.base import Task
from trl_populora.tasks.fences import has_thinking


if TYPE_CHECKING:
    import torch


DETAIL_CHARS = 300


def in_a_line(text: str) -> str:
    """A sentence that may quote what a model wrote, so that it neither breaks a table nor commands a terminal."""
    return printable(text[:DETAIL_CHARS])


@dataclass
class Row:
    """
    One training row. The fields up to `program` are the columns that reward functions and records see. What the rules
    make of it is `pay`, and of a proposal `share`, the student's. `program` is the task's, proposed or attempted.
    `dropped` counts references that a proposal prompt had no room for; `reject_detail` is `reject_reason` in a
    sentence; `features` are words for what the proposed task uses.
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
    progress: float = 0.0
    rival: float = float("nan")
    pay: float = 0.0
    program: str = ""
    share: float = float("nan")
    attempts: int = 0
    archived: bool = False
    dropped: int = 0
    reject_detail: str = ""
    features: tuple[str, ...] = ()
    prompt: Messages = field(default_factory=list)
    completion: Completion = Completion([], [], "")
    group: str = ""

    TOLD = (  # to other ranks, too
        *("role", "member", "kind", "match", "task_id", "valid", "reject_reason", "solve_rate", "correct"),
        *("well_formed", "chance", "rarity", "progress", "rival", "pay"),
    )
    COLUMNS = (*TOLD, "program")

    @property
    def outcome(self) -> Outcome:
        """Of a proposal, what its price may depend on."""
        names = ("kind", "valid", "solve_rate", "attempts", "chance", "rarity", "progress", "program")
        rival = None if math.isnan(self.rival) else self.rival
        return Outcome(reason=self.reject_reason, rival=rival, **{name: getattr(self, name) for name in names})

    @property
    def answer(self) -> Answer:
        """Of an attempt, likewise."""
        return Answer(self.kind, self.correct, self.well_formed)

    def record(self) -> dict[str, Any]:
        """What the other ranks need to know of it."""
        further = ("share", "archived", "dropped", "reject_detail", "group")
        return {name: getattr(self, name) for name in (*self.TOLD, *further)} | {
            "thinking": has_thinking(self.completion.text),
            "solved": self.role == "teacher" and self.outcome.solved,
        }


@dataclass(frozen=True)
class Worth:
    """
    What the rows of a step are worth.

    Args:
        rewards, advantages, members, factors (`torch.Tensor`): Of shape `[R]`; the last as
            [`~trl_populora.step.advantages.member_factors`] returns them.
        flat (`float`): Share of the groups of attempts in which all were worth the same.
    """

    rewards: torch.Tensor
    advantages: torch.Tensor
    members: torch.Tensor
    factors: torch.Tensor
    flat: float

    def part(self, rows: slice) -> Worth:
        """The same of some rows."""
        columns = {name: getattr(self, name)[rows] for name in ("rewards", "advantages", "members", "factors")}
        return replace(self, **columns)


@dataclass
class Played:
    """
    One step as it was played.

    Args:
        rows (`list[Row]`): This rank's: the attempts, group by group, then the proposals.
        records (`list[dict]`): All ranks' rows in the order of ranks, as [`Row.record`] tells them.
        tasks (`list[Task]`): All ranks' accepted proposals.
        seconds (`dict[str, float]`): Per phase.
        metrics (`dict[str, float]`): Over all ranks.
        rewards (`torch.Tensor`): Of all ranks' rows and every reward function, `[W * R, functions]`.
        worth, own_worth ([`Worth`]): What this makes of all ranks' rows, and of this rank's.
        plan (`list`): Which of this rank's rows are computed together:
            [`~trl_populora.step.batching.plan_micro_batches`].

    The last four are known once the step is scored, before any of its rows enters the model.
    """

    rows: list[Row]
    records: list[dict[str, Any]]
    tasks: list[Task] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: torch.Tensor = field(init=False)
    worth: Worth = field(init=False)
    own_worth: Worth = field(init=False)
    plan: list[list[list[int]]] = field(init=False)

    @property
    def for_reward_functions(self) -> tuple[list[dict], list[Messages], list[Messages], list[list[int]]]:
        """This rank's rows as reward functions are shown them: columns, prompts, completions and their ids."""
        columns = [{name: getattr(row, name) for name in Row.COLUMNS} for row in self.rows]
        said = [[{"role": "assistant", "content": row.completion.text}] for row in self.rows]
        return columns, [row.prompt for row in self.rows], said, [row.completion.completion_ids for row in self.rows]

    def count_tokens(self, ends: Collection[int] | None = None) -> list[int]:
        """Completion tokens of this rank's rows that count in the loss: none of one that lacks an end of `ends`."""
        ids = [row.completion.completion_ids for row in self.rows]
        return [len(each) if ends is None or each[-1] in ends else 0 for each in ids]

    @property
    def prompts(self) -> list[int]:
        """A number for each of this rank's rows; rows with the same number have one member and one prompt."""
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        keys = [(row.member, tuple(row.completion.prompt_ids)) for row in self.rows]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @property
    def tokens(self) -> dict[str, list | None]:
        """What was sampled for this rank's rows, as TRL's `rollout_func` returns it."""
        parts = ("prompt_ids", "completion_ids", "logprobs")
        found = {name: [getattr(row.completion, name) for row in self.rows] for name in parts}
        return {name: None if values[0] is None else values for name, values in found.items()}

    @property
    def members(self) -> set[str]:
        """Who has a row on any rank."""
        return {record["member"] for record in self.records}

    def state_dict(self) -> dict[str, Any]:
        """Plain data: what a run needs that is resumed before the last optimizer step on these rows."""
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "records": self.records, "seconds": {**self.seconds}, "metrics": {**self.metrics}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Played:
        """What `state_dict` returned, as an object."""
        rows = [Row(**row | {"completion": Completion(**row["completion"])}) for row in state["rows"]]
        return cls(rows, state["records"], seconds=state["seconds"], metrics=state["metrics"])
