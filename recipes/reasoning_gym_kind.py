"""A task kind from a library of verifiable puzzles: the generators of reasoning-gym, set up by the teachers.

A teacher writes one line, the name of a generator with its settings and a seed:

    gcd max_numbers=4 max_value=600 seed=17

The library makes the puzzle of it, which a student is asked; the library's own scorer decides. So a teacher cannot
write a puzzle without a solution, and its choice is how hard the puzzle is. Play it with

    pip install "trl-populora[gym]"
    accelerate launch recipes/train_populora.py --config recipes/reasoning_gym.yaml

Only generators are listed that compare an answer as text. Others read it first, some with sympy, whose parser runs
what it reads; scorers work in the trainer's own process, where nothing that a model wrote may run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym

from trl_populora.tasks.kind import Attempt, Proposal, Reject, Task, TaskKind


# Generator -> its settings, each from ... to. A number of things is exact, so its `min_` follows the `max_`.
GENERATORS: dict[str, dict[str, tuple[int, int]]] = {
    "gcd": {"max_numbers": (2, 6), "max_value": (10, 10_000)},
    "lcm": {"max_numbers": (2, 4), "max_value": (5, 100)},
    "leg_counting": {"max_animals": (2, 15), "max_instances": (1, 30)},
    "letter_counting": {"max_words": (3, 40)},
    "base_conversion": {"max_base": (3, 16), "max_value": (10, 100_000)},
    "caesar_cipher": {"max_words": (3, 12), "max_rotation": (1, 25)},
    "simple_equations": {"max_terms": (2, 8), "max_value": (5, 1000)},
}
GUESSES = 8  # as many as attempts: a share that is told as finely
COUNTS = ("numbers", "animals", "words", "terms")

LINE = re.compile(r"([a-z_]{1,30})((?: [a-z_]{1,30}=[0-9]{1,6}){1,4}) seed=([0-9]{1,6})")


class ReasoningGym(TaskKind):
    """
    Puzzles of some generators of reasoning-gym.

    A task keeps the proposal's line as its program; the puzzle follows from it.
    """

    name = "reasoning_gym"
    reference_kinds = ("reasoning_gym",)
    measures = ("difficulty",)

    def proposal_prompt(self, references: Sequence[Task], style: str) -> list[dict[str, str]]:
        table = "\n".join(
            f"{name} " + " ".join(f"{setting}={low}..{high}" for setting, (low, high) in settings.items())
            for name, settings in GENERATORS.items()
        )
        shown = "\n".join(task.program for task in references)
        text = (
            "You set up puzzles for a student. Choose a generator of this table, a value for each of its settings and "
            f"a seed below a million. Make the puzzle hard but solvable.\n\n{table}\n\nAnswer with exactly one line, "
            f"settings in the order of the table, like these examples:\n\n{shown}"
        )
        return [{"role": "user", "content": text}]

    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Reject:
        match = LINE.fullmatch(text.strip())
        if match is None or match[1] not in GENERATORS:
            return Reject.FORMAT
        ranges = GENERATORS[match[1]]
        given = {name: int(value) for name, value in (pair.split("=") for pair in match[2].split())}
        if list(given) != list(ranges):
            return Reject.ARGUMENTS
        if any(not ranges[name][0] <= value <= ranges[name][1] for name, value in given.items()):
            return Reject.ARGUMENTS
        # Written again, so that `017` and `17` are one task.
        settings = " ".join(f"{name}={value}" for name, value in given.items())
        return Proposal(self.name, f"{match[1]} {settings} seed={int(match[3])}", ())

    def check(self, proposal: Proposal) -> None:
        return None

    def accept(self, proposal: Proposal, verdict: None, rng: random.Random) -> Task | Reject:
        return Task(self.name, proposal.program, (), ())

    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        text = f"{puzzle(task.program)[1]['question'].strip()}\n\nAnswer with the solution alone, on one line."
        return [{"role": "user", "content": text}]

    def parse_attempt(self, text: str, task: Task) -> Attempt:
        answer = text.rpartition("</think>")[2].strip()
        if not 0 < len(answer) <= 500 or "\n" in answer:
            return Attempt(False, "", Reject.FORMAT.value)
        return Attempt(True, answer)

    def trial(self, task: Task, attempt: Attempt) -> None:
        return None

    def correct(self, task: Task, attempt: Attempt, verdict: None) -> bool:
        dataset, entry = puzzle(task.program)
        return dataset.score_answer(attempt.answer, entry) == 1.0

    def guesses(self, task: Task) -> list[Attempt]:
        """Answers to the same settings under other seeds: of six large numbers the greatest common divisor is 1."""
        line, _, seed = task.program.rpartition("=")
        others = [f"{line}={(int(seed) + shift) % 1_000_000}" for shift in range(1, GUESSES + 1)]
        return [Attempt(True, puzzle(other)[1]["answer"]) for other in others]

    def complexity(self, task: Task) -> dict[str, float]:
        """Where the settings lie between the easiest and the hardest, from 0 to 1."""
        name, *pairs = task.program.split()[:-1]
        places = []
        for setting, value in (pair.split("=") for pair in pairs):
            low, high = GENERATORS[name][setting]
            places.append((int(value) - low) / (high - low))
        return {"difficulty": sum(places) / len(places)}


@lru_cache(maxsize=4096)
def puzzle(line: str) -> tuple[Any, dict[str, Any]]:
    """The generator that a line sets up, which scores, and its one puzzle."""
    name, *pairs = line.split()
    settings = {setting: int(value) for setting, value in (pair.split("=") for pair in pairs)}
    settings |= {f"min_{count}": settings[f"max_{count}"] for count in COUNTS if f"max_{count}" in settings}
    dataset = reasoning_gym.create_dataset(name, size=1, **settings)
    return dataset, dataset[0]
