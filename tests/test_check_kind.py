"""A task kind is tried before a run: what is wrong with it is told with kind, method and text."""

from __future__ import annotations

import random
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trl_populora import __main__ as cli
from trl_populora.evaluation import check_kind as module
from trl_populora.evaluation.check_kind import check_kind
from trl_populora.sandbox import Sandbox
from trl_populora.tasks import TASK_KINDS, load_seed_tasks, resolve_kind
from trl_populora.tasks.base import Attempt, Proposal, Reject


RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

from arithmetic_kind import Arithmetic  # noqa: E402


SEEDS = load_seed_tasks(RECIPES / "arithmetic_seeds.jsonl")


GIVEN = r"--- (\d+) tasks given; (\d+) texts as proposals: (\d+) well-formed, of the first (\d+) (\d+) became tasks"
ANSWERED = (
    r"--- (\d+) texts as answers to (\d+) of the (\d+) tasks, given and made: (\d+) well-formed, of the first (\d+) "
    r"(\d+) right"
)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2) as sandbox:
        yield sandbox


def test_the_command_shows_prompts_and_finds_nothing_wrong_with_the_recipe(capsys):
    cli.main(["check-kind", "arithmetic_kind:Arithmetic", "--tasks", str(RECIPES / "arithmetic_seeds.jsonl")])
    shown = capsys.readouterr().out
    assert "Write a new arithmetic puzzle" in shown
    assert "numbers: 7 1 5\ntarget: 28" in shown
    assert "Reach the target with" in shown
    given, texts, formed, ran, became = map(int, re.search(GIVEN, shown).groups())
    assert given == len(SEEDS), "those of the file"
    assert re.search(r"became tasks \(\w+ \d+", shown), "why the others did not"
    assert texts >= formed >= ran >= became > 5, "the texts nearly have the kind's form"
    attempts, to, tasks, well_formed, graded, right = map(int, re.search(ANSWERED, shown).groups())
    assert (attempts, tasks) == (texts * to, given + became), "each is an answer to each, given or proposed"
    assert well_formed >= graded >= right
    assert shown.endswith("No problem found in the task kind 'arithmetic'.\n")


@pytest.mark.parametrize("name", TASK_KINDS)
def test_the_packages_own_kinds_have_no_problem(sandbox, name):
    check = check_kind(resolve_kind(name), load_seed_tasks()[::16], sandbox, lambda line: None)
    assert check.problems == []
    assert check.counts["well-formed attempts"] > 0


def raise_on_odd_text(self, text, *_):
    int(text.isdigit() and text)  # `²` is a digit and no number
    return Reject.FORMAT


class Broken:
    """What each method answers in its turn, and what is said of it."""

    def hang(self, text, task):
        while len(text) > 1000:
            time.sleep(0.01)
        return Attempt(False, "")

    def moody(self, proposal, verdict, rng):
        return replace(SEEDS[0], message=str(random.random()))

    def other_kind(self, proposal, verdict, rng):
        return replace(SEEDS[0], kind="code_o")

    def broken_text(self, proposal, verdict, rng):
        return replace(SEEDS[0], inputs=("(3,)",))

    def leaves(self, text, references):
        raise SystemExit


@pytest.mark.parametrize(
    ("method", "broken", "told"),
    [
        ("reference_count", lambda *_: 2.5, "`reference_count` must return int, got 2.5 for 6"),
        ("write_proposal", lambda *_: None, "`write_proposal` must return str, got None for Task"),
        ("write_proposal", lambda *_: "text", "`parse_proposal` refuses what `write_proposal` wrote for 'text'"),
        ("proposal_prompt", lambda *_: "text", r"`proposal_prompt` must return list, got 'text' for \[Task"),
        ("solving_prompt", lambda *_: [{"content": "?"}], "`solving_prompt` must return messages with `role` and"),
        (
            "parse_proposal",
            raise_on_odd_text,
            r"`parse_proposal` raised ValueError.*test_check_kind.py, line \d+\) for",
        ),
        (
            "parse_proposal",
            lambda *_: None,
            "`parse_proposal` must return Proposal or Reject or Refusal, got None for ''",
        ),
        ("parse_proposal", Broken.leaves, r"`parse_proposal` raised SystemExit\(\)"),
        (
            "parse_proposal",
            lambda *_: random.choice([Proposal("arithmetic", "24", ()), Reject.FORMAT]),
            "`parse_proposal` gave .*, then .* for",
        ),
        ("check", lambda *_: "job", "`check` must return Job or NoneType, got 'job'"),
        ("accept", lambda *_: None, "`accept` must return Task or Reject or Refusal, got None"),
        ("accept", lambda *_: Reject.ERROR, "`accept` rejects given task 1 as `error`: '28'"),
        ("accept", Broken.moody, "`accept` gave Task.*, then Task"),
        ("accept", Broken.other_kind, "`accept` must return tasks of its own kind, got 'code_o'"),
        ("accept", Broken.broken_text, "`accept` returned a task that can seed no other run: .*no canonical text"),
        ("parse_attempt", lambda *_: "24", "`parse_attempt` must return Attempt, got '24' for ''"),
        ("parse_attempt", lambda *_: Attempt(True, 24), "`parse_attempt` must give an answer that is a text, got 24"),
        ("parse_attempt", Broken.hang, r"`parse_attempt` raised TimeoutError.'more than 0 seconds'.* for '"),
        ("trial", lambda *_: 1 / 0, r"`trial` raised ZeroDivisionError"),
        ("correct", lambda *_: 1, "`correct` must return bool, got 1 for Task"),
        ("chance", lambda *_: 2.0, "`chance` must lie between 0 and 1, got 2.0"),
        ("guesses", lambda *_: ["24"], "`guesses` must give attempts, got '24'"),
        ("features", lambda *_: ["sum"], r"`features` must return tuple, got \['sum'\] for Task"),
        ("features", lambda *_: (7,), "`features` must give words, got 7 for Task"),
        ("complexity", lambda *_: {"depth": 1.0}, "`complexity` measures depth, which `measures` lacks"),
        ("complexity", lambda *_: {"step": 1.0}, "`complexity` cannot be written down .*'step', which has a meaning"),
    ],
)
def test_what_is_wrong_is_told_with_kind_method_and_text(sandbox, monkeypatch, method, broken, told):
    monkeypatch.setattr(module, "TEXTS", 50)
    monkeypatch.setattr(module, "SECONDS", 0.3)
    kind = type("Own", (Arithmetic,), {method: broken})()
    problems = check_kind(kind, SEEDS, sandbox, lambda line: None).problems
    assert any(re.match(f"task kind 'arithmetic': {told}", problem) for problem in problems), problems
    assert len(problems) < 40, "the same trouble is told once"


def test_the_command_ends_with_the_problems(tmp_path, monkeypatch, capsys):
    (tmp_path / "odd_kind.py").write_text(
        "from arithmetic_kind import Arithmetic\n\n\n"
        "class Odd(Arithmetic):\n    measures = ()\n\n"
        "    def correct(self, task, attempt, verdict):\n        return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["check-kind", "odd_kind:Odd", "--tasks", str(RECIPES / "arithmetic_seeds.jsonl")])
    assert end.value.code == "populora check-kind: 2 problem(s) in the task kind 'arithmetic', as told above."
    *_, first, second = capsys.readouterr().out.splitlines()
    assert "`complexity` measures numbers" in first
    assert "`correct` must return bool, got None" in second


def test_a_command_finds_a_module_in_the_folder_where_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kind_of_this_folder.py").write_text(
        "from trl_populora.tasks import CodeO\n\n\nclass K(CodeO): pass\n"
    )
    cli.main(["check-kind", "kind_of_this_folder:K"])
    assert "def f" in capsys.readouterr().out
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1, "a file of the folder would hide a library"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("class K(TaskKind): name = 'k'", "cannot be made: Can't instantiate abstract class K"),
        ("class K(CodeO): reference_kinds = ('code_o')", "has the text 'code_o' as `reference_kinds`; it is a tuple"),
        ("K = 3", "cannot be made: 'int' object is not callable"),
    ],
)
def test_a_class_that_is_no_kind_is_told_in_one_line(tmp_path, monkeypatch, body, told):
    name = f"kind_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"from trl_populora.tasks import CodeO, TaskKind\n\n\n{body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match=f"^populora check-kind: Task kind '{name}:K' {told}"):
        cli.main(["check-kind", f"{name}:K"])
    with pytest.raises(SystemExit, match=r"No module named 'nowhere'.*needs its folder in `PYTHONPATH`"):
        cli.main(["check-kind", "nowhere:K"])
