"""Scripted players in the place of models: real parsing, sandbox, rewards and ratings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trl_populora.population.members import Population
from trl_populora.population.ratings import Matchmaker
from trl_populora.step.play import Game, play_step
from trl_populora.step.player import Completion, Player
from trl_populora.step.referee import Referee
from trl_populora.step.rows import Played
from trl_populora.tasks import CodeO
from trl_populora.tasks.archive import TaskArchive


G = 4


def proposal(program: str, arguments: str) -> str:
    return f"```python\n{program}\n```\n```input\n{arguments}\n```"


def reward_with_pay(played: Played) -> torch.Tensor:
    """The reward function of a step without TRL: one column, what the rules pay for each row."""
    return torch.tensor([[record["pay"]] for record in played.records])


def play(game: Game, done: int) -> Played:
    return play_step(game, done, reward_with_pay)


def make_game(
    sandbox,
    seed_tasks,
    teach,
    solve,
    kinds=None,
    teachers=1,
    students=1,
    proposals=4,
    generate=None,
    ranks=None,
    rules=None,
    **settings,
) -> Game:
    """A game whose teachers say `teach(i)` to their i-th prompt and whose students say `solve(prompt, i)`."""
    archive = TaskArchive()
    for task in seed_tasks:
        archive.add(task)

    def by_script(prompts, members, seeds=None):
        counts: dict[str, int] = {}
        completions = []
        for prompt, member in zip(prompts, members, strict=True):
            content = prompt[0]["content"]
            index = counts[content] = counts.get(content, -1) + 1
            number = sum(counts.values()) + len(counts) - 1
            text = teach(number) if member.startswith("teacher") else solve(content, index)
            completions.append(Completion([1], [2], text))
        return completions

    defaults = {
        "population": Population(teachers, students),
        "matchmaker": Matchmaker(seed=0),
        "archive": archive,
        "referee": Referee({kind.name: kind for kind in kinds or [CodeO()]}, sandbox, "compact", **(rules or {})),
        "player": Player(generate or by_script, **(ranks or {})),
        "proposals": proposals,
        "attempts": G,
        "references": 1,
        "seed": 0,
    }
    return Game(**(defaults | settings))


class Ranks:
    """
    Threads in the place of processes, which ask one server together as TRL's ranks do.

    What it says to a prompt is `say(prompt, member, seed, before)`: `before` of these three were asked before in the
    same call. `parts` has for each call how many rows each rank asked for.
    """

    def __init__(self, world: int, say: Callable[..., str]):
        self.world, self.say = world, say
        self.given, self.met = [None] * world, threading.Barrier(world, timeout=30)
        self.parts: set[tuple[int, ...]] = set()

    def gather(self, rank: int, value: Any) -> list:
        self.given[rank] = value
        self.met.wait()
        values = list(self.given)
        self.met.wait()
        return values

    def player(self, rank: int) -> Player:
        def generate(prompts, members, seeds=None):
            asked = [prompt[0]["content"] for prompt in prompts], members, seeds or [None] * len(prompts)
            parts = self.gather(rank, [*zip(*asked, strict=True)])
            self.parts.add(tuple(map(len, parts)))
            rows = [row for part in parts for row in part]
            said = [self.say(*row, rows[:place].count(row)) for place, row in enumerate(rows)]
            mine = said[rank * len(prompts) : (rank + 1) * len(prompts)]  # as TRL cuts what comes back
            return [Completion([1], [2], text) for text in mine]

        return Player(generate, lambda value: self.gather(rank, value), rank, self.world)

    def run(self, work: Callable[[Player], Any]) -> list:
        """What every rank returns of some work."""
        with ThreadPoolExecutor(self.world) as pool:
            return [*pool.map(work, map(self.player, range(self.world)))]


# Four proposals, in order: solved by all, by half, by none, and one that does not run.
PROPOSALS = [
    proposal("def f(a):\n    return a * 10 + 1", "1"),
    proposal("def f(a):\n    return a * 10 + 2", "2"),
    proposal("def f(a):\n    return a * 10 + 3", "3"),
    proposal("def f(a):\n    return a / 0", "4"),
]


def solve_by_plan(content: str, index: int) -> str:
    """Right always, right for two of four (one malformed, one wrong), wrong always."""
    if "+ 1" in content:
        return "```output\n11\n```"
    if "+ 2" in content:
        return ["```output\n22\n```", "```output\n22\n```", "twenty-two", "```output\n0\n```"][index]
    return "```output\n0\n```"
