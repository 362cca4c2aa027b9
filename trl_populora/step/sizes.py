"""How many rows a step has, and whether they part evenly into groups, ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, replace
from typing import Any


def check_no_teachers(given: Mapping[str, Any], known: Mapping[str, Field]) -> None:
    """
    Args:
        given: Settings by name.
        known: Their fields, which have the defaults.

    Raises:
        `ValueError`: If a run without teachers is asked for what only they could do.
    """
    for name in (
        *("replay", "teacher_reward", "teacher_reward_invalid", "teacher_reward_unsolved"),
        *("teacher_beta", "teacher_learning_rate"),
    ):
        default = known[name].default
        if (value := given[name]) != default:
            raise ValueError(
                f"`{name}={value}` needs teachers, and with `teachers=0` students train on given tasks alone. Set it "
                f"to {default} (`none` for None on a command line)."
            )


@dataclass(frozen=True)
class StepSize:
    """
    The size of one population step over all processes.

    Args:
        teachers: Number of teachers, each with one match.
        students: Number of students, each with one match where there are no teachers.
        proposals: Proposals per teacher.
        attempts: Attempts per task.
        per_device: Rows of a micro-batch, for a process.
        replay: Share of archived tasks among those that students attempt, in [0, 1), beside the ones that fill in for
            invalid proposals.
        least: Fewest proposals that a way out may suggest.
    """

    teachers: int
    students: int
    proposals: int
    attempts: int
    per_device: int
    replay: float = 0.0
    least: int = 0

    @property
    def replays(self) -> int:
        """Archived tasks that a match's student attempts beside the proposals; at least one if there is a share."""
        return max(round(self.proposals * self.replay / (1 - self.replay)), math.ceil(self.replay))

    @property
    def rows(self) -> int:
        """The proposals, and every attempt at them and at archived tasks."""
        if not self.teachers:
            return self.students * self.proposals * self.attempts
        return self.teachers * (self.proposals + (self.proposals + self.replays) * self.attempts)

    def check_groups(self, world: int) -> None:
        """
        Raises:
            `ValueError`: If TRL's generation batch would not hold whole groups; names sizes for `world` processes.
        """
        proposals = self.teachers * self.proposals
        if proposals % self.attempts:
            raise ValueError(
                f"`teachers * proposals_per_teacher` = {self.teachers} * {self.proposals} = {proposals} must be a "
                f"multiple of `attempts_per_task={self.attempts}`, because TRL's generation batch holds whole groups. "
                f"{self.find_way_out(world)}"
            )

    def count_micro_batches(self, world: int) -> int:
        """
        Micro-batches of one step per process, with `world` processes.

        Raises:
            `ValueError`: If the population does not fit; the message names a size that does.
        """
        if self.proposals % world or self.replays % world:
            replays = f" and the {self.replays} tasks of `replay={self.replay}`" if self.replays else ""
            raise ValueError(
                f"`proposals_per_teacher={self.proposals}`{replays} must be a multiple of the {world} processes, "
                f"so that each holds an equal share of every match. {self.find_way_out(world)}"
            )
        if self.rows % (self.per_device * world):
            replays = f" + teachers * {self.replays} replays * attempts_per_task" if self.replays else ""
            parts = "students * proposals_per_teacher * attempts_per_task"
            if self.teachers:
                parts = f"teachers * proposals_per_teacher * (1 + attempts_per_task){replays}"
            raise ValueError(
                f"One population step has {self.rows} rows ({parts}), which `per_device_train_batch_size="
                f"{self.per_device}` times {world} process(es) does not divide. {self.find_way_out(world)}"
            )
        return self.rows // (self.per_device * world)

    def find_way_out(self, world: int) -> str:
        """The sizes nearest to the wanted ones that satisfy everything that is asked of them."""
        multiple = math.lcm(world, self.attempts // math.gcd(self.teachers, self.attempts))
        size, changed = self, []
        if self.proposals % multiple:
            # Two of each kind, where a proposal is compared with its teacher's others of the same kind.
            proposals = -(-max(self.proposals, self.least) // multiple) * multiple
            size = replace(size, proposals=proposals)
            changed.append(f"`proposals_per_teacher={proposals}`")
        if size.replays % world:
            replays = -(-size.replays // world) * world
            size = replace(size, replay=round(replays / (size.proposals + replays), 6))
            changed.append(f"`replay={size.replay}`")
        local = size.rows // world
        per_device = next(rows for rows in range(min(size.per_device, local), 0, -1) if local % rows == 0)
        if per_device != self.per_device:
            changed.append(f"`per_device_train_batch_size={per_device}`")
        return f"{' with '.join(changed)} works."
