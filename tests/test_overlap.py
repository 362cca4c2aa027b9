"""Attempts that begin while other proposals are being written: nothing depends on the order in which proposals end."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from trl_populora.sandbox import Limits, Sandbox
from trl_populora.step.player import Completion, Player
from trl_populora.tasks import CodeF, CodeO

from .games import G, Ranks, make_game, play, proposal


# The second teacher writes two of the first one's tasks again. A task without a number is known from the seeds.
NUMBERS = [1, 2, 1, None, 4, 2, 6, 1, 8, 4, "refused", 9]
ORDERS = {
    "forward": lambda places: [[place] for place in places],
    "backward": lambda places: [[place] for place in reversed(places)],
    "in pairs": lambda places: [places[at : at + 2] for at in range(0, len(places), 2)],
    "at once": lambda places: [places],
    **{f"shuffled {seed}": lambda places, seed=seed: shuffled(places, seed) for seed in range(3)},
}


def shuffled(places: list[int], seed: int) -> list[list[int]]:
    return [[place] for place in random.Random(seed).sample(places, len(places))]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1, limits=Limits(cpu_seconds=1.0)) as sandbox:
        yield sandbox


def write(place: int, code_f: bool, known: str) -> str:
    """What a teacher writes into a slot."""
    number = NUMBERS[place]
    if number == "refused":
        return "I would rather not."
    if code_f:
        inputs = "\n".join(str((number or 0) + shift) for shift in range(4, 10))
        return f"```inputs\n{inputs}\n```\n```message\nwhat it does\n```"
    return proposal(f"def f(a):\n    return a * 10 + {number}", str(number)) if number else known


def solve(content: str, index: int) -> str:
    """Of the attempts at task `number`, as many are right as the number says, up to all G."""
    found = re.search(r"a \* 10 \+ (\d+)", content)
    number = int(found[1]) if found else 0
    return f"```output\n{11 * number if index < number else 'none'}\n```"


class Scripted:
    """A player that takes up prompts. `begun` has how many it had taken up when each of the proposals ended."""

    def __init__(self, order, known: str, code_f: bool = False):
        self.order, self.known, self.code_f = order, known, code_f
        self.begun: list[int] = []

    def generate(self, prompts, members, seeds=None, follow=None):
        prompts, members, counts = list(prompts), list(members), Counter()

        def complete(row: int) -> Completion:
            if members[row].startswith("teacher"):
                text = write(row, self.code_f and row % 2 == 1, self.known)
            else:
                content = f"{members[row]} {prompts[row]}"
                text = solve(content, counts[content] % G)
                counts[content] += 1
            return Completion([1], [2], text)

        first = [complete(row) for row in range(len(prompts))]
        if follow is not None:
            for places in self.order(list(range(len(NUMBERS)))):
                self.begun += [len(prompts) - len(first)] * len(places)
                asked = follow({place: first[place] for place in places})
                prompts, members = prompts + asked[0], members + asked[1]
        return first + [complete(row) for row in range(len(first), len(prompts))]


def step(sandbox, seed_tasks, order, kinds=None, **settings):
    """Plays a step, in two waves if `order` is `None`. Returns the player and all that the step leaves."""
    known = next(task for task in seed_tasks if task.kind == "code_o")
    scripted = Scripted(order, proposal(known.program, "1"), kinds is not None)
    player = Player(scripted.generate, overlaps=order is not None)
    settings = {"teachers": 2, "students": 2, "proposals": len(NUMBERS) // 2, "replays": 2} | settings
    game = make_game(sandbox, seed_tasks, None, None, kinds, player=player, **settings)
    return scripted, played_out(game)


def played_out(game) -> dict:
    played = play(game, 0)
    return {
        "tasks": played.tasks,
        "slots": [[slot.task, slot.refusal, slot.features, slot.outcome, slot.share] for slot in played.slots],
        "samples": [[slot.proposal, *slot.attempts] for slot in played.slots],
        "records": played.records,
        "metrics": played.metrics,
        "archive": list(game.archive.entries()),
        "population": game.population.state_dict(),
        "features": game.features.state_dict(),
    }


@pytest.fixture(scope="module", params=[True, False], ids=["guarded", "paper"])
def in_two_waves(request, sandbox, seed_tasks):
    rules = {"guarded": request.param}
    return rules, step(sandbox, seed_tasks, None, rules=rules)[1]


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_is_as_in_two_waves_in_whatever_order_proposals_end(sandbox, seed_tasks, in_two_waves, order):
    rules, expected = in_two_waves
    scripted, found = step(sandbox, seed_tasks, ORDERS[order], rules=rules)
    for part, value in expected.items():
        assert str(found[part]) == str(value), part
    assert scripted.begun[-1] == 0 if order == "at once" else scripted.begun[-1] >= (len(NUMBERS) - 2) * G
    refused = [slot[1] and slot[1].reason.value for slot in found["slots"][: len(NUMBERS)]]
    assert refused.count("duplicate") == (5 if rules["guarded"] else 0)
    assert refused.count("format") == 1


def test_random_draws_of_a_task_do_not_depend_on_the_order_either(sandbox, seed_tasks):
    kinds = [CodeO(), CodeF(6)]
    (_, expected), *others = [step(sandbox, seed_tasks, order, kinds) for order in ORDERS.values()]
    assert {slot[0].kind for slot in expected["slots"] if slot[1] is None and slot[3]} == {"code_o", "code_f"}
    for _, found in others:
        for part, value in expected.items():
            assert str(found[part]) == str(value), part


def test_a_task_of_two_ranks_goes_to_the_first_rank_also_if_it_ends_last(sandbox, seed_tasks):
    def play_on_two_ranks(overlaps: bool) -> list[dict]:
        ranks = Ranks(2, lambda *_: "")

        def work(player: Player) -> dict:
            number = 3 + player.rank

            def generate(prompts, members, seeds=None, follow=None):
                texts = [
                    proposal(f"def f(a):\n    return a * 10 + {number + place}", "3")
                    if members[place].startswith("teacher")
                    else "```output\n33\n```"
                    for place in range(len(prompts))
                ]
                found = [Completion([1], [2], text) for text in texts]
                if follow is None:
                    return found
                asked = [follow({place: found[place]})[1] for place in (1, 0)]
                return found + [Completion([1], [2], "```output\n33\n```") for part in asked for _ in part]

            player = replace(player, generate=generate, overlaps=overlaps)
            return played_out(make_game(sandbox, seed_tasks, None, None, proposals=4, player=player))

        return ranks.run(work)

    waves, overlapping = (play_on_two_ranks(overlaps) for overlaps in (False, True))
    assert str(overlapping) == str(waves)
    refusals = [[slot[1] for slot in found["slots"]] for found in waves]
    assert refusals[0] == [None, None]
    assert [bool(refusal) for refusal in refusals[1]] == [True, False]
