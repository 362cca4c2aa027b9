"""
Members that differ, and an outer step: what `screen.py` adds to pooled students, one screen each.

    python studies/screen.py --candidates pooled_5_rates pooled_5_shares pooled_5_outer --seeds 0 1 --steps 75

`CHANGES` holds by candidate what is done to its trainer before it trains. No option of the game does these things:
they become options if their screen gains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import torch
from tiny_headroom import Change
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from trl_populora.population.pooling import PoolingCallback
from trl_populora.tasks import load_seed_tasks
from trl_populora.tasks.features import read_features
from trl_populora.trainer import PopuLoRATrainer


RATES = (0.5, 1.0, 1.0, 2.0)  # times the learning rate
TEACHERS = 4
OUTER_RATE, MOMENTUM = 0.7, 0.9  # DiLoCo's own (arXiv 2311.08105)


def give_rates(trainer: PopuLoRATrainer) -> None:
    """Gives each student a learning rate of its own."""
    for student, factor in zip(trainer.population.students, RATES, strict=True):
        student.settings["learning_rate"] = trainer.args.learning_rate * factor


@lru_cache
def deal_features(kind: str = "code_o") -> Mapping[str, int]:
    """
    Deals the features of the seed tasks to the teachers, the most common first, each to the teacher whose features are
    rarest so far. Returns the teacher's number by feature.
    """
    counts = Counter(word for task in load_seed_tasks() if task.kind == kind for word in read_features(task.program))
    held = [0] * TEACHERS
    owners = {}
    for word, count in counts.most_common():
        owners[word] = held.index(min(held))
        held[owners[word]] += count
    return owners


def keep_to_own(role: list[str], member: list[str], pay: list[float], program: list[str], **columns) -> list:
    """
    A reward function: takes from what a teacher is paid for a task the share of its features that are another
    teacher's. A feature that no seed task has belongs to a teacher by its name.
    """
    owners, taken = deal_features(), []
    for name, paid, text, part in zip(member, pay, program, role, strict=True):
        words = read_features(text) if part == "teacher" and paid > 0 else ()
        own = [owners.get(word, crc32(word.encode()) % TEACHERS) == int(name.split("_")[1]) for word in words]
        taken.append(-paid * own.count(False) / len(own) if own else 0.0 if part == "teacher" else None)
    return taken


class OuterStep(TrainerCallback):
    """
    After each pooling, moves the students on from their mean, as DiLoCo's outer step does: by SGD with Nesterov
    momentum, whose gradient is the way from the mean of one pooling to the next.

    Its two states are saved in each checkpoint, and read when a run goes on.
    """

    FILE = "outer.pt"

    def __init__(self, pooling: PoolingCallback):
        self.pooling = pooling
        self.before: dict[str, Tensor] = {}  # where the last outer step ended
        self.velocity: dict[str, Tensor] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step and (newest := get_last_checkpoint(args.output_dir)):
            self.before, self.velocity = torch.load(Path(newest) / self.FILE)
        else:
            self.before = {key: value.clone() for key, value in self._read().items()}

    def on_step_begin(self, args, state, control, **kwargs):
        if not state.global_step or state.global_step % self.pooling.every:
            return
        mean = self._read()  # pooling comes first, because its callback was added first
        for key, value in mean.items():
            way = value - self.before[key]
            self.velocity[key] = MOMENTUM * self.velocity.get(key, torch.zeros_like(way)) + way
            self.before[key] = self.before[key] + OUTER_RATE * (way + MOMENTUM * self.velocity[key])
        for student in self.pooling.population.students:
            self.pooling.write(student.name, self.before)

    def on_save(self, args, state, control, **kwargs):
        directory = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        torch.save((self.before, self.velocity), directory / self.FILE)

    def _read(self) -> dict[str, Tensor]:
        return dict(self.pooling.read(self.pooling.population.students[0].name))


def step_outside(trainer: PopuLoRATrainer) -> None:
    """Adds DiLoCo's outer step to pooling."""
    pooling = next(each for each in trainer.callback_handler.callbacks if isinstance(each, PoolingCallback))
    trainer.add_callback(OuterStep(pooling))


CHANGES: Mapping[str, Change] = {
    "pooled_5_rates": give_rates,
    "pooled_5_outer": step_outside,
}
