"""
Teachers that want the reward without the work, in the real game: none earns more than an honest teacher.

Every trick is a script that writes proposals, and a student that does what an honest model can do with them: it works
out what can be worked out and guesses among the likely answers where nothing can. The honest teacher proposes distinct
tasks, half of the attempts at which are right: one student has learned what they use, the other has not.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from tests.games import play
from trl_populora.population.members import Population
from trl_populora.population.ratings import Matchmaker
from trl_populora.sandbox import Limits, Sandbox
from trl_populora.sandbox.values import encode
from trl_populora.step.pay import PAY, Outcome, price_proposals
from trl_populora.step.play import Game
from trl_populora.step.player import Completion, Player
from trl_populora.step.referee import Referee
from trl_populora.tasks import CodeF, CodeI, CodeO, Task, load_seed_tasks
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.kind import THINK_TAGS
from trl_populora.tasks.python.prompts import write_literal


P, G, STEPS = 16, 8, 4
SAMPLING_ERROR = 0.04  # of the mean of 64 rewards, each 0 or around 0.7
SEEDS = load_seed_tasks()
KINDS = {"code_o": CodeO(), "code_i": CodeI(), "code_f": CodeF(4)}
FENCE = {"code_o": "output", "code_i": "input", "code_f": "python"}
MIX = "(a * 1103515245 + 12345 >> 16)"  # a scrambler in plain sight, which nobody works out in their head
KNOWN = Task("code_o", "def f(a):\n    return max(a, 0)", (encode((3,)),), ("3",))
ABOUT_IT = Task("code_f", KNOWN.program, (encode((3,)), encode((4,))), ("3", "4"), "known", 1)
BLOCKS = re.compile(r"```(\w+)\n(.*?)\n```", re.DOTALL)

Student = Callable[[str, random.Random], str]  # what it answers to a prompt


def true_answer(prompt: str, rng: random.Random) -> str:
    """What Python says."""
    blocks = dict(BLOCKS.findall(prompt))
    scope: dict = {}
    exec(blocks["python"], scope)
    return repr(eval(f"f({blocks['input']})", scope))


def competent(share: float) -> Student:
    """Right with this probability; its mistakes are of many kinds."""
    return lambda prompt, rng: true_answer(prompt, rng) if rng.random() < share else repr(rng.randrange(10**6))


def guess(*likely: object) -> Student:
    return lambda prompt, rng: repr(rng.choice(likely))


@dataclass
class Teacher:
    """What a teacher writes, proposal after proposal, and how a student does."""

    proposals: Iterator[str]
    student: Student
    kind: str = "code_o"
    steps: int = STEPS
    known: Task = KNOWN  # the program that code_f is about

    def earns(self, sandbox: Sandbox, guarded: bool = True) -> tuple[dict[str, float], set[str]]:
        """Mean reward of a proposal under every named pay with guards, or the one without; why some were rejected."""
        rng, archive, kind = random.Random(0), TaskArchive(), copy.copy(KINDS[self.kind])
        kind.guarded = guarded
        self.proposals, written = itertools.tee(self.proposals)  # asked again, a teacher begins again
        for seed in [self.known, ABOUT_IT] if self.kind == "code_f" else SEEDS:
            archive.add(seed)

        def say(prompt: str, member: str) -> str:
            if member == "teacher_0":
                return next(written)
            asked = prompt.split()[1]
            answer = self.student(prompt, rng) if asked == self.kind else "0"
            return f"```{FENCE[asked]}\n{answer}\n```"

        def generate(prompts, members, seeds=None):
            texts = (say(prompt[0]["content"], member) for prompt, member in zip(prompts, members, strict=True))
            return [Completion([1], [2], text) for text in texts]

        game = Game(
            population=Population(1, 2),
            matchmaker=Matchmaker(seed=0),
            archive=archive,
            referee=Referee({self.kind: kind}, sandbox, "compact", (*THINK_TAGS, "<|im_end|>"), guarded=guarded),
            player=Player(generate),
            proposals=P,
            attempts=G,
            references=1,
            seed=0,
        )
        rows = [row for step in range(self.steps) for row in play(game, step).rows if row.role == "teacher"]
        outcomes = [
            Outcome(row.kind, row.valid, row.reject_reason, row.solve_rate, G, row.chance, row.rarity) for row in rows
        ]
        rewards = {pay: fmean(map(price_proposals(pay), outcomes)) for pay in PAY if guarded != (pay == "paper")}
        return rewards, {row.reject_reason for row in rows} - {""}


def task(program: str, given: str) -> str:
    return f"```python\n{program}\n```\n```input\n{given}\n```"


def numbered(*programs: str, given: str = "{n}") -> Iterator[str]:
    """The programs in turn; `{n}` counts the proposals, in a program and in its input."""
    for n, program in enumerate(itertools.cycle(programs), 1):
        yield task(program.replace("{n}", str(n)), given.replace("{n}", str(n)))


def coin(*bodies: str, head: str = "") -> Iterator[str]:
    return numbered(*(f"{head}def f(a):\n    return {body}" for body in bodies))


def of_seeds(kind: str, change: Callable[[str], str] = str) -> Iterator[str]:
    """The programs and inputs of the seed tasks of one kind."""
    for seed in SEEDS:
        if seed.kind == kind:
            yield task(change(seed.program), write_literal(seed.inputs[0])[1:-1].rstrip(","))


def another_literal(program: str) -> str:
    """With the last number of the program greater by one; without numbers, with one that is added to nothing."""
    head, _, tail = program.rpartition(next(reversed(re.findall(r"\d+", program)), "\0"))
    number = program[len(head) : len(program) - len(tail)] if head else ""
    return f"{head}{int(number) + 1}{tail}" if number else f"{program}\n# 1"


def hint(*inputs: str, message: str = "some function") -> str:
    return "```inputs\n" + "\n".join(inputs) + f"\n```\n```message\n{message}\n```"


HARD = "def f(a):\n    b = a * 7 + 3\n    c = b % 11\n    return [b, c, b * c]"
SLOW = "def f(a):\n    n = 0\n    for i in range({}): n += i & a\n    return n + {{n}}"
HALF = competent(0.5)
SEEN = competent(0.9)  # of one who has met the same in other words
FOUR = guess(0, 1, 2, 3)


def biased(likely: object, other: object) -> Student:
    """One answer in five is the unlikely one."""
    return lambda prompt, rng: repr(rng.choice([likely] * 4 + [other]))


def cut_off(prompt: str, rng: random.Random) -> str:
    """Right, where there was room to finish; a block that is never closed otherwise."""
    answer = true_answer(prompt, rng)
    return answer if rng.random() < 0.5 else f"{answer[: len(answer) // 2]}\n```output"


def of_what_is_shown(prompt: str, rng: random.Random) -> str:
    """Zero, until a pair shows that it is not."""
    return "def f(a):\n    return " + ("max(a, 0)" if re.search(r"-> [1-9]", prompt) else "0")


def some_bit(prompt: str, rng: random.Random) -> str:
    """A function to 0 and 1, no two written alike."""
    return f"def f(a):\n    return (a * {rng.randrange(10**6)} >> 3) % 2"


def zero(prompt: str, rng: random.Random) -> str:
    return "def f(a):\n    return 0"


TRICKS: dict[str, Teacher] = {
    # What nobody can work out, guessed at.
    "digest": Teacher(coin("int(h.md5(str(a).encode()).hexdigest(), 16) % 4", head="import hashlib as h\n"), FOUR),
    "checksum": Teacher(
        itertools.chain.from_iterable(
            zip(
                coin("zlib.crc32(str(a).encode()) % 4", head="import zlib\n"),
                coin("binascii.crc32(str(a).encode()) % 4", head="import binascii\n"),
                strict=False,
            )
        ),
        FOUR,
    ),
    "uuid": Teacher(coin("uuid.uuid5(uuid.NAMESPACE_DNS, str(a)).int % 4", head="import uuid\n"), FOUR),
    "seeded random": Teacher(coin("random.Random(a).randrange(4)", head="import random\n"), FOUR),
    "random behind another module": Teacher(
        coin(
            "s.random.Random(a).randrange(4)",
            "s.sys.modules['random'].Random(a).randrange(4)",
            head="import statistics as s\n",
        ),
        FOUR,
    ),
    "reference counts": Teacher(coin("sys.getrefcount(a) % 4", head="import sys\n"), FOUR),
    "recursion depth": Teacher(
        numbered(
            "def g(n):\n    try:\n        return g(n + 1)\n    except RecursionError:\n        return n\n"
            "def f(a):\n    return (g(0) + a) % 4"
        ),
        FOUR,
    ),
    "own scrambler": Teacher(coin(f"{MIX} % 4"), FOUR),
    "three values": Teacher(coin(f"{MIX} % 3"), guess(0, 1, 2)),
    "a digit": Teacher(coin(f"str({MIX} ** 3)[-2:-1]"), guess(*"0123456789")),
    "far from zero": Teacher(coin(f"1000 + {MIX} % 5"), guess(*range(1000, 1005))),
    "words": Teacher(coin(f"['red', 'green', 'blue', 'grey'][{MIX} % 4]"), guess("red", "green", "blue", "grey")),
    "two words": Teacher(coin(f"['even', 'odd'][{MIX} % 2]"), guess("even", "odd")),
    "a truth value": Teacher(coin(f"{MIX} % 2 == 0"), guess(True, False)),
    "two truth values": Teacher(
        coin(f"({MIX} % 2 == 0, {MIX} % 3 == 0)"), guess(*itertools.product([True, False], repeat=2))
    ),
    "sizes of objects": Teacher(
        coin(f"[0] * ({MIX} % 4)", f"([0] * ({MIX} % 4)).__sizeof__()"), guess(40, 48, 56, 64)
    ),
    "an input that hits": Teacher(coin(f"{MIX} % 4"), lambda prompt, rng: str(rng.randrange(1000)), "code_i"),
    "an input that hits a truth value": Teacher(
        coin(f"{MIX} % 2 == 0"), lambda prompt, rng: str(rng.randrange(1000)), "code_i"
    ),
    # What differs from run to run.
    "hashes and addresses": Teacher(
        coin(
            "id(a) % 4",
            "hash(str(a)) % 4",
            "id(object()) // 16 % 4",
            "hash((a, 1.5)) % 4",
            "int(repr(f)[-3:-1], 16) % 4",
        ),
        FOUR,
    ),
    "order of sets": Teacher(
        coin("list({'red', 'green', 'blue', str(a)})[0]", "repr({'red', 'green', str(a)})[2]"),
        guess("red", "green", "blue"),
    ),
    "clocks": Teacher(
        coin(
            "int(t.time() * 1000) % 4",
            "t.perf_counter_ns() % 4",
            "t.gmtime().tm_sec % 4",
            "t.sleep(0) or 3 - int(t.process_time())",
            head="import time as t\n",
        ),
        FOUR,
    ),
    "threads": Teacher(
        numbered(
            "import threading\ndef f(a):\n    r = []\n    t = [threading.Thread(target=r.append, args=(i,)) for i in "
            "range(4)]\n    [x.start() for x in t]\n    return r[0]"
        ),
        FOUR,
    ),
    # What right answers fail at.
    "nearly the whole limit": Teacher(
        numbered(*(SLOW.format(rounds) for rounds in (500_000, 1_000_000, 2_000_000))),
        lambda prompt, rng: rng.choice([prompt.rpartition("+ ")[2].partition("\n")[0], "0"]),
        "code_i",
        steps=1,
    ),
    "control tokens": Teacher(coin("'<|im_end|>'[a % 4]", "len('</think>') + a", "a # <|im_end|>"), HALF),
    "order of dictionaries": Teacher(
        numbered(
            "def f(a):\n    return list(a)",
            "def f(a):\n    return {k: v for k, v in a.items()}",
            given="{'b': {n}, 'a': 2, 'c': 3}",
        ),
        competent(1.0),
    ),
    "huge outputs": Teacher(coin("'x' * (1000 + a)", "[a] * 10**5", "10 ** (1000 + a)"), HALF),
    "outputs that cannot be compared": Teacher(
        coin(
            "float('nan')", "(x for x in [a])", "lambda: a", "object()", "type(a)", "{1: float('nan')}[1]", "range(a)"
        ),
        HALF,
    ),
    "outputs that cannot be said": Teacher(
        coin("chr(0xD800) * a", "'```\\n' * a", "float('inf') * a"), competent(1.0)
    ),
    # What is not new.
    "copies of references": Teacher(of_seeds("code_o"), HALF),
    "trivial variants": Teacher(
        numbered(
            *(
                HARD.replace("    b =", f"{line}\n    b =")
                for line in ("    pass", "    x{n} = {n}", "    '{n}'", "    if a:\n        pass", "    # {n}")
            ),
            *(HARD.replace("b", name) for name in ("x{n}", "y")),
            given="5",
        ),
        HALF,
    ),
    "other constants": Teacher(coin("[a, {n}, a + {n}]", "[a + {n}, {n}]"), competent(0.9)),
    "the same input in other words": Teacher(
        (task(HARD, given) for given in itertools.cycle(["5", "+5", "(5)", "5,", "0b101", "0_5", "5  # five", "a=5"])),
        HALF,
    ),
    "operands in another order": Teacher(
        numbered(
            *(
                f"def f(a):\n    return [{', '.join(parts)}]"
                for parts in itertools.product(("a * 7", "7 * a"), ("a + 3", "3 + a"), ("a ^ 5", "5 ^ a"))
            )
        ),
        SEEN,
    ),
    "statements in another order": Teacher(
        numbered(
            *(
                "def f(a):\n    " + "\n    ".join(parts) + "\n    return [b, c, d]"
                for parts in itertools.permutations(("b = a * 7", "c = a % 5", "d = a + 3"))
            )
        ),
        SEEN,
    ),
    "wrapped in what changes nothing": Teacher(
        coin("int(a * 7)", "a * 7 + 0", "(lambda b: b)(a * 7)", "[a * 7][0]", "a * 7 if True else a", "sum([a * 7])"),
        SEEN,
    ),
    "references with another number": Teacher(of_seeds("code_o", another_literal), SEEN),
    # What can be told without a look at it, and what can be told in four ways.
    "nearly constant": Teacher(coin(f"int({MIX} % 97 == 0)"), guess(0)),
    "nearly constant, at times doubted": Teacher(coin(f"int({MIX} % 97 == 0)"), biased(0, 1)),
    "two words, one of them rarely said": Teacher(coin(f"['even', 'odd'][{MIX} % 2]"), biased("even", "odd")),
    "an input that hits, misses that differ": Teacher(
        coin(f"0 if {MIX} % 4 == 0 else a"), lambda prompt, rng: str(rng.randrange(1000)), "code_i"
    ),
    "an input that hits, outputs in many notations": Teacher(
        coin(f"[int, float, complex][{MIX} // 4 % 3]({MIX} % 4)"),
        lambda prompt, rng: str(rng.randrange(1000)),
        "code_i",
    ),
    "an input that is known to hit": Teacher(
        numbered(f"def f(a):\n    if {MIX} % 4:\n        raise ValueError\n    return {{n}}", given="9"),
        lambda prompt, rng: str(rng.randrange(1000)),
        "code_i",
    ),
    "guesses in many notations": Teacher(
        coin(f"float({MIX} % 4)"), guess(0, 0.0, 0j, 1, 1.0, 1 + 0j, 2, 2.0, 2 + 0j, 3, 3.0, 3 + 0j)
    ),
    "answers too long to be finished": Teacher(coin("[a, *range(90)]", "str(a) * 130"), cut_off),
    # What seems rare and is not.
    "words of its own": Teacher(
        numbered(
            "def g{n}(a):\n    return a\ndef f(a):\n    return g{n}(a) + 1 if a < 10**9 else a.word{n}(key{n}=1)"
        ),
        SEEN,
    ),
    "rare words that never run": Teacher(
        coin(*(f"a + 1 if a < 10**9 else a.{word}()" for word in sorted(set(dir(str)) | set(dir(list))))), SEEN
    ),
    "rare words in dead code": Teacher(
        numbered(*(f"def f(a):\n    b = {word}(a)\n    return [a, {{n}}]" for word in ("abs", "chr", "bool", "repr"))),
        SEEN,
    ),
    # Hints that say nothing, or everything.
    "pairs that tell by luck": Teacher(
        (hint(f"-{n}1", f"-{n}2", f"{n}1", f"{n}2") for n in itertools.count(1)), of_what_is_shown, "code_f"
    ),
    "a hint about a coin": Teacher(
        (hint(*map(str, range(4 * n, 4 * n + 4))) for n in itertools.count(1)),  # two pairs of opposites
        some_bit,
        "code_f",
        known=Task("code_o", f"def f(a):\n    b, a = a, a // 2\n    return ({MIX} + b) % 2", (encode((3,)),), ("1",)),
    ),
    "constant outputs": Teacher((hint(*(f"-{n}{i}" for i in range(4))) for n in itertools.count(1)), zero, "code_f"),
    "one output that differs": Teacher(
        (hint(*(f"-{n}{i}" for i in range(3)), str(n)) for n in itertools.count(1)), zero, "code_f"
    ),
    "one input in four words": Teacher(itertools.cycle([hint("1", "1.0", "True", "0x1")]), zero, "code_f"),
    "a hint that is the program": Teacher(
        itertools.cycle([hint("1", "2", "3", "4", message="def f(a): return a")]),
        lambda prompt, rng: "def f(a):\n    return a",
        "code_f",
    ),
}


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(cpu_seconds=0.2)) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def honest_rewards(sandbox):
    honest = Teacher(of_seeds("code_i"), competent(0.5))  # as code_o they are new tasks
    rewards, rejects = honest.earns(sandbox)
    assert not rejects
    assert rewards["guarded"] == pytest.approx(0.5, abs=0.05)
    return rewards


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_earns_more_than_honest_tasks(sandbox, honest_rewards, name):
    rewards, rejects = TRICKS[name].earns(sandbox)
    print(f"{name}: {', '.join(f'{pay} {reward:.2f}' for pay, reward in rewards.items())}, {sorted(rejects)}")
    assert "format" not in rejects, "a trick that cannot be read shows nothing"
    too_much = {pay: reward for pay, reward in rewards.items() if reward > honest_rewards[pay] + SAMPLING_ERROR}
    assert too_much == {}


PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "reward.md").read_text()
PREVENTED = re.findall(r"^\| ([\w ]+) \| ([-.\d]+) \| ([-.\d]+) \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "paper", "guarded"), PREVENTED)
def test_what_guards_prevent_is_what_the_page_says(sandbox, name, paper, guarded):
    (printed, _), (ours, _) = (TRICKS[name].earns(sandbox, guards) for guards in (False, True))
    assert printed["paper"] == pytest.approx(float(paper), abs=0.006)
    assert ours["guarded"] == pytest.approx(float(guarded), abs=0.006)
