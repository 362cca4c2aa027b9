"""A task kind is tried before a run: what is wrong with it is told with kind, method and text."""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.countdown import GivenCountdown
from trl_populora import cli
from trl_populora.evaluate import check_kind as module
from trl_populora.evaluate.check_kind import check_kind
from trl_populora.tasks import TASK_KINDS, CodeF, Task, load_seed_tasks, resolve_kind
from trl_populora.tasks.kind import Attempt, Refusal, Reject


RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

from arithmetic_kind import Arithmetic  # noqa: E402


SEEDS = load_seed_tasks(RECIPES / "arithmetic_seeds.jsonl")


def test_the_command_shows_prompts_and_finds_nothing_wrong_with_the_recipe(capsys):
    cli.main(["check-kind", "arithmetic_kind:Arithmetic", "--tasks", str(RECIPES / "arithmetic_seeds.jsonl")])
    shown = capsys.readouterr().out
    assert "Write a new arithmetic puzzle" in shown
    assert "numbers: 7 1 5\ntarget: 28" in shown
    assert "Reach the target with" in shown
    read, became = map(int, re.search(r"(\d+) were read as proposals; (\d+) of the first 100 became", shown).groups())
    assert read >= became > 5, "the texts nearly have the kind's form"
    assert shown.endswith("No problem found in the task kind 'arithmetic'.\n")


@pytest.mark.parametrize("name", TASK_KINDS)
def test_the_packages_own_kinds_have_no_problem(name, monkeypatch):
    monkeypatch.setattr(module, "TEXTS", 200)
    assert check_kind(resolve_kind(name), load_seed_tasks()[::16]) == []


def test_references_are_those_of_the_style_that_is_shown(monkeypatch):
    shown = []

    class About(CodeF):
        def proposal_prompt(self, references, style):
            shown.append((style, len(references)))
            return super().proposal_prompt(references, style)

    monkeypatch.setattr(module, "TEXTS", 20)
    check_kind(About(), load_seed_tasks()[::16])
    assert max(count for style, count in shown if style == "chat") == 1, "the program that the proposal is about"


GIVEN = Task("countdown", "3 4 5 -> 17", (), ())


def test_the_command_takes_a_kind_whose_tasks_are_only_given(tmp_path, capsys):
    (tmp_path / "given.jsonl").write_text(json.dumps(GIVEN.to_record()) + "\n")
    cli.main(["check-kind", "tests.countdown:GivenCountdown", "--tasks", str(tmp_path / "given.jsonl")])
    assert capsys.readouterr().out.endswith("No problem found in the task kind 'countdown'.\n")


def test_a_kind_that_is_solved_only_needs_no_method_of_a_proposal(monkeypatch):
    monkeypatch.setattr(module, "TEXTS", 50)
    said = []
    assert check_kind(GivenCountdown(), [GIVEN], said.append) == []
    assert "solve countdown" in said[0]
    assert said[-1].endswith("read as attempts alone")


@pytest.mark.parametrize(
    ("methods", "tasks", "told"),
    [
        ({}, [], "no task of the kind 'countdown' was given"),
        ({"check": lambda *_: None}, [GIVEN], "`proposal_prompt`, `parse_proposal`, `accept` missing"),
    ],
)
def test_a_kind_that_proposes_nothing_is_told_what_it_lacks(methods, tasks, told):
    (problem,) = check_kind(type("Own", (GivenCountdown,), methods)(), tasks)
    assert told in problem


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_callers_alarm_handler_is_put_back(monkeypatch, error):
    def parse_attempt(self, text, task):
        if error:
            raise error
        return Attempt(False, "")

    monkeypatch.setattr(module, "TEXTS", 5)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(error) if error else nullcontext():
        check_kind(type("Own", (GivenCountdown,), {"parse_attempt": parse_attempt})(), [GIVEN])
    assert signal.getsignal(signal.SIGALRM) is before


def raise_on_odd_text(self, text, *_):
    int(text.isdigit() and text)  # `²` is a digit and no number
    return Reject.FORMAT


def hang_on_long_text(self, text, task):
    while text == module.HOSTILE[-1]:
        time.sleep(0.01)
    return Attempt(False, "")


def hang_and_catch(self, text, task):
    try:
        return hang_on_long_text(self, text, task)
    except Exception:
        return Attempt(False, "", Reject.FORMAT.value)


def leave(self, text, references):
    raise SystemExit


@pytest.mark.parametrize(
    ("method", "broken", "told"),
    [
        ("reference_count", lambda *_: 2.5, "`reference_count` must return int, got 2.5"),
        (
            "write_proposal",
            lambda *_: "text",
            "`parse_proposal` must read what `write_proposal` wrote, got 'text', for T",
        ),
        ("solving_prompt", lambda *_: [{"content": "?"}], "`.*` raised KeyError .*, got 'role'"),
        ("parse_proposal", raise_on_odd_text, r"`raise_on_odd_text` raised ValueError .*, got .*, for '²'"),
        (
            "parse_proposal",
            lambda *_: None,
            "`parse_proposal` must return Proposal or Reject or Refusal, got None, for ''",
        ),
        ("parse_proposal", leave, "`leave` raised SystemExit"),
        (
            "parse_proposal",
            lambda *_: Refusal(Reject.FORMAT, str(random.random())),
            "`parse_proposal` must read a text the same",
        ),
        ("check", lambda *_: "job", "`check` must return Job or NoneType, got 'job'"),
        (
            "accept",
            lambda *_: Reject.ERROR,
            "`accept` must return a task with the outputs of the given task, got Refusal",
        ),
        (
            "accept",
            lambda *_: replace(SEEDS[0], kind="code_o"),
            "`accept` must return tasks of its own kind, got 'code_o'",
        ),
        (
            "parse_attempt",
            hang_on_long_text,
            "`hang_on_long_text` raised TooSlow .*, got more than 1 seconds, for '",
        ),
        (
            "parse_attempt",
            hang_and_catch,
            "`hang_and_catch` raised TooSlow .*, got more than 1 seconds, for '",
        ),
        ("parse_attempt", lambda *_: "24", "`parse_attempt` must return Attempt, got '24'"),
        ("correct", lambda *_: 1, "`correct` must return bool, got 1"),
        ("chance", lambda *_: 2.0, "`chance` must lie between 0 and 1, got 2.0, for Task"),
        ("copies", lambda *_: 1 / 0, "`<lambda>` raised ZeroDivisionError"),
        ("features", lambda *_: ["Add"], "`features` must return tuple, got"),
        ("complexity", lambda *_: {"depth": 1.0}, r"`measures` must name what `complexity` measures, got \['depth'\]"),
    ],
)
def test_what_is_wrong_is_told_with_method_and_text(monkeypatch, method, broken, told):
    monkeypatch.setattr(module, "TEXTS", 50)
    monkeypatch.setattr(module, "SECONDS", 1)
    kind = type("Own", (Arithmetic,), {method: broken, "__module__": __name__})()
    problems = check_kind(kind, SEEDS[:4])
    assert any(re.match(told, problem) for problem in problems), problems
    assert len(problems) < 9, "the same trouble is told once"


def test_the_command_ends_with_the_problems(tmp_path, monkeypatch, capsys):
    (tmp_path / "odd_kind.py").write_text(
        "from arithmetic_kind import Arithmetic\n\n\nclass Odd(Arithmetic):\n    measures = ()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["check-kind", "odd_kind:Odd", "--tasks", str(RECIPES / "arithmetic_seeds.jsonl")])
    assert end.value.code == "populora check-kind: 1 problem(s) in the task kind 'arithmetic', as told above."
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("`measures` must name what `complexity` measures, got [")
    )


def test_a_command_finds_a_module_in_the_folder_where_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kind_of_this_folder.py").write_text(
        "from trl_populora.tasks import CodeO\n\n\nclass K(CodeO): pass\n"
    )
    cli.main(["check-kind", "kind_of_this_folder:K", "--tasks", "none"])  # as if the option were not given
    assert "def f" in capsys.readouterr().out
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1, "a file of the folder would hide a library"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("class K(TaskKind): name = 'k'", "cannot be made: Can't instantiate abstract class K"),
        (
            "class K(CodeO): reference_kinds = ('code_o')",
            "has the text 'code_o' as `reference_kinds`; it must be a tuple of names",
        ),
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


def test_the_problems_of_a_kind_without_a_file_are_told():
    kind = type("Own", (Arithmetic,), {"check": lambda *_: "job", "__module__": "of_a_notebook"})()
    assert any("`check` must return" in problem for problem in check_kind(kind, SEEDS[:2]))
