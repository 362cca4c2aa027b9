"""The interface is enough: a user's own kind outside code, kinds found by name, and an import without torch."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.countdown import Countdown
from tests.written import write_answer, write_proposal
from trl_populora.sandbox import Job, Sandbox, Status
from trl_populora.tasks import (
    TASK_KINDS,
    Attempt,
    CodeF,
    CodeI,
    CodeO,
    Proposal,
    Refusal,
    Reject,
    Task,
    TaskArchive,
    TaskKind,
    load_seed_tasks,
    resolve_kind,
)
from trl_populora.tasks.kind import KindSettings


class NoKind:
    name = "no_kind"


class Nameless(Countdown):
    name = None


def play(kind, archive, sandbox, proposal_text, answers, rng):
    """One proposal and its attempts through the interface alone, as the rollout drives it."""

    def run(job):
        return None if job is None else sandbox.run([job])[0]

    references = archive.sample(kind.reference_kinds, kind.reference_count(2), rng)
    assert kind.proposal_prompt(references, "compact")[-1]["role"] == "user"
    proposal = kind.parse_proposal(proposal_text, references)
    if not isinstance(proposal, Proposal):
        return Refusal.of(proposal).reason, []
    task = kind.accept(proposal, run(kind.check(proposal)), rng)
    if not isinstance(task, Task):
        return Refusal.of(task).reason, []
    if not archive.add(task):
        return Reject.DUPLICATE, []
    assert kind.solving_prompt(task, "compact")
    graded = []
    for text in answers:
        attempt = kind.parse_attempt(text, task)
        right = attempt.well_formed and kind.correct(task, attempt, run(kind.trial(task, attempt)))
        graded.append("right" if right else "wrong" if attempt.well_formed else "malformed")
    return task, graded


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, allow_weak=True) as box:
        yield box


def test_a_kind_outside_code_plays_through_the_same_interface(sandbox):
    kind, archive, rng = resolve_kind("tests.countdown:Countdown"), TaskArchive(), random.Random(0)
    answers = ["(3 * 4) + 5", "3 * 5 + 4", "3 * 4 + 5 + 0", "3 * 4 ++", "f(3)", "5 / (4 - 4) + 3"]
    task, graded = play(kind, archive, sandbox, "3 4 5 -> 17\n", answers, rng)
    assert task.program == "3 4 5 -> 17"
    assert graded == ["right", "wrong", "wrong", "wrong", "malformed", "wrong"]
    assert play(kind, archive, sandbox, "3 4 5 -> 17", [], rng)[0] is Reject.DUPLICATE
    assert play(kind, archive, sandbox, "three", [], rng)[0] is Reject.FORMAT
    assert play(kind, archive, sandbox, "3 4 5 -> 23", ["3 + 4 * 5"], rng)[1] == ["right"]
    assert kind.proposal_prompt(archive.sample(["countdown"], 9, rng), "chat")[0]["content"].count("->") == 2
    assert kind.complexity(task) == {"numbers": 3.0}
    assert archive.metrics()["archive/size"] == 2
    again = TaskArchive()
    again.restore(archive.entries(), archive.coverage.state_dict())
    assert list(again) == list(archive)


def test_a_kind_of_code_plays_through_the_same_helper(sandbox):
    archive, rng = TaskArchive(), random.Random(0)
    text = "```python\ndef f(x):\n    return x * x\n```\n```input\n-3\n```"
    answers = ["```input\n3\n```", "```input\n4\n```", "3"]
    assert play(CodeI(), archive, sandbox, text, answers, rng)[1] == ["right", "wrong", "malformed"]
    assert play(CodeI(), archive, sandbox, text.replace("x", "n"), [], rng)[0] is Reject.DUPLICATE
    assert play(CodeO(), archive, sandbox, text, ["```output\n9\n```"], rng)[1] == ["right"]


def test_every_kind_is_found_by_its_name():
    assert [type(resolve_kind(name)) for name in TASK_KINDS] == [CodeO, CodeI, CodeF]
    assert all(resolve_kind(name).name == name for name in TASK_KINDS)
    kind = CodeF(inputs_per_task=4)
    assert resolve_kind(kind) is kind


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("code_x", "Unknown task kind 'code_x'; it must be one of code_o, code_i, code_f, `package.module:Class`"),
        ("", "Unknown task kind ''"),
        (None, "Unknown task kind None"),
        (CodeO, "Unknown task kind <class"),
        ("no.such.package:Kind", "Unknown task kind 'no.such.package:Kind' .No module named 'no'"),
        (f"{__name__}:Missing", "has no attribute 'Missing'"),
        (":", "Unknown task kind ':'"),
        (f"{__name__}:NoKind", "is no TaskKind but NoKind"),
        (f"{__name__}:Nameless", "has no `name`"),
        (type("Slashed", (CodeO,), {"name": "code/o"})(), "has the `name` 'code/o'; a name has letters, digits"),
        (type("Base", (CodeO,), {"name": "base"})(), "has the `name` 'base', as the base or a member has"),
        (type("Member", (CodeO,), {"name": "student_0"})(), "has the `name` 'student_0', as the base or a member"),
        (type("Taken", (CodeO,), {"measures": ("step",)})(), "`measures` calls a measure 'step', which has a meaning"),
        (type("Split", (CodeO,), {"measures": ("a/b",)})(), "`measures` calls a measure 'a/b'; a name has letters"),
    ],
)
def test_an_unknown_kind_is_refused_with_the_choices(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        resolve_kind(name)


def test_a_kind_lacks_no_method():
    class Unfinished(TaskKind):
        name = "unfinished"

    with pytest.raises(TypeError, match="abstract"):
        Unfinished()
    assert Countdown().reference_count(6) == 6
    assert TaskKind.complexity(Countdown(), Task("countdown", "", (), ())) == {}


def test_reject_reasons_make_metric_keys_on_every_python():
    assert f"verify/reject/{Reject.NO_FUNCTION}" == "verify/reject/no_function"
    assert Reject("leaked_program") is Reject.LEAKED_PROGRAM
    assert {status.value for status in Status} - {"ok"} <= {reason.value for reason in Reject}


def test_the_seed_tasks_that_ship_are_true_distinct_and_solvable(sandbox):
    """Run again under other hash seeds than those they were made with, and solved with their own gold answers."""
    tasks = load_seed_tasks()
    assert len(tasks) == 256
    assert {task.kind for task in tasks} == set(TASK_KINDS)
    archive = TaskArchive()
    assert all(archive.add(task) for task in tasks)
    verdicts = sandbox.run([Job(task.program, task.inputs, runs=2) for task in tasks])
    assert [verdict.outputs for verdict in verdicts] == [task.outputs for task in tasks]
    for task in tasks:
        kind = CodeF(len(task.inputs)) if task.kind == "code_f" else resolve_kind(task.kind)
        gold = {"code_o": task.outputs[0], "code_i": task.inputs[0], "code_f": task.program}[task.kind]
        attempt = kind.parse_attempt(write_answer(kind.name, gold), task)
        assert attempt == Attempt(True, gold)
        known = [task] if task.kind == "code_f" else []
        proposal = Proposal(task.kind, task.program, task.inputs, task.message)
        assert kind.parse_proposal(write_proposal(proposal), known) == proposal


TORCH_FREE = """
import sys
from types import SimpleNamespace

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "trl", "peft", "numpy", "datasets"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import trl_populora.tasks as tasks
from trl_populora.tasks import archive
from trl_populora.tasks.python import kinds as code, complexity, reading as fences, programs, prompts as templates

kind = tasks.resolve_kind("code_o")
(first, *_) = tasks.load_seed_tasks()
assert kind.proposal_prompt([first], "chat") and kind.complexity(first)
assert tasks.TaskArchive().add(first)
assert "torch" not in sys.modules
"""


def test_the_room_imports_and_works_without_torch():
    done = subprocess.run([sys.executable, "-c", TORCH_FREE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


SMALL_STACK = """
import threading
from trl_populora.tasks import CodeF, CodeI, CodeO, Task

task = Task("code_f", "def f(x): return x", (), ())
units = ["-", "not ", "x.", "f()", "()", "[0]", "(", "[", "{1:", "lambda:", "lambda a, b:", "1+", "1j+", "await ",
         "a:=", "x if y else ", "elif 1: 0\\n", "f'{", "-" * 190 + "(1, ", "not " * 90 + "[1, ", "if 1:\\n ", "@a\\n",
         "'a' "]

def feed():
    for unit in units:
        for end in ("", "1"):
            for size in (300, 2900, 3990, 7900):
                text = (unit * size)[:size] + end
                closed = text + "".join({"(": ")", "[": "]", "{": "}"}[c] for c in reversed(text) if c in "([{")
                for body in (text, closed, "def f(x):\\n    return " + text, "if 1: 0\\n" + text):
                    for kind, name in ((CodeO(), "output"), (CodeI(), "input"), (CodeF(), "python")):
                        kind.parse_attempt(f"```{name}\\n{body}\\n```", task)
    print("alive")

threading.stack_size(1 << 19)  # what other platforms give a thread
thread = threading.Thread(target=feed)
thread.start()
thread.join()
"""


def test_no_answer_kills_the_interpreter_even_on_a_small_stack():
    """In a process of its own: the failure that this guards against is a segmentation fault, not an exception."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


class Careful(CodeO):
    """A kind that wants more runs than the run's settings say."""

    determinism_runs = 4


class Settled(CodeO):
    """A kind that insists on what happens to be the default."""

    determinism_runs = CodeO.determinism_runs


class Heir(Settled):
    """A kind whose parent has set it."""


@pytest.mark.parametrize("kind", [Settled, Heir])
def test_a_kind_keeps_a_number_of_runs_that_equals_the_default(kind):
    own = kind()
    own.configure(KindSettings(determinism_runs=CodeO.determinism_runs + 1))
    assert own.determinism_runs == CodeO.determinism_runs


@pytest.mark.parametrize("style", ["turns", "chat", "compact"])
@pytest.mark.parametrize("built_in", [CodeO, CodeI, CodeF])
def test_a_subclass_with_a_name_of_its_own_has_the_texts_of_its_parent(built_in, style, seed_tasks):
    kind, parent = type("Short", (built_in,), {"name": "short", "max_value_chars": 100})(), built_in()
    task = next(each for each in seed_tasks if each.kind == parent.name)
    text = {f"{parent.name}/solve": "What is it?"}
    for one in (kind, parent):
        one.configure(KindSettings(prompt_style=style, prompt_texts=None if style == "compact" else text))
    asked, of_parent = (one.solving_prompt(task, style)[0]["content"] for one in (kind, parent))
    assert asked == of_parent.replace(f"solve {parent.name}", "solve short")
    assert kind.proposal_prompt([task], style)[0]["content"]


def test_a_task_without_inputs_is_no_example_of_a_proposal():
    assert CodeF().write_proposal(Task("code_f", "def f(a):\n    return a", (), (), "say it")) == ""


def test_a_kind_takes_its_settings_itself_and_keeps_its_own():
    settings = KindSettings(determinism_runs=3, inputs_per_function=6, prompt_style="turns")
    kinds = [CodeO(), CodeF(), Careful(), Countdown()]
    for kind in kinds:
        kind.configure(settings)
    assert [kind.determinism_runs for kind in kinds[:3]] == [3, 3, 4]
    assert kinds[1].inputs_per_task == 6
