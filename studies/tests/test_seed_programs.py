"""The Python programs that chat models start from: true, distinct, and chosen by the style of the prompts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from trl_populora.assets import real_seed_tasks, tiny_eval_tasks
from trl_populora.sandbox import Job, Sandbox
from trl_populora.sandbox.values import decode, key
from trl_populora.start import make_kinds
from trl_populora.tasks import TASK_KINDS, CodeF, TaskArchive, load_seed_tasks, make_task, resolve_kind
from trl_populora.tasks.dataset import build_archive, load_built_in_tasks
from trl_populora.tasks.kind import Proposal, Task
from trl_populora.tasks.python.normal_form import normal_forms
from trl_populora.tasks.python.programs import parse_function
from trl_populora.tasks.python.prompts import write_literal
from trl_populora.trainer import PopuLoRATrainer


ROOT = Path(__file__).parents[2]
PUBLISHED = sorted((ROOT.parent / "shared" / "data").glob("azr_*.jsonl"))
sys.path.insert(0, str(ROOT / "studies"))
import make_seed_programs  # noqa: E402


@pytest.fixture(scope="module")
def tasks():
    return load_seed_tasks(real_seed_tasks())


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as sandbox:
        yield sandbox


def form_of(program: str) -> str | None:
    tree = parse_function(program)
    return None if tree is None else normal_forms(tree)[0]


def test_they_are_what_the_recipe_writes(tmp_path):
    make_seed_programs.write_tasks(tmp_path / "tasks.jsonl")
    assert (tmp_path / "tasks.jsonl").read_text() == Path(real_seed_tasks()).read_text()


def test_kinds_and_levels_are_all_there_in_like_shares():
    rows = [json.loads(line) for line in Path(real_seed_tasks()).read_text().splitlines()]
    for kind, least in (("code_o", 70), ("code_i", 60), ("code_f", 12)):
        levels = Counter(row["level"] for row in rows if row["kind"] == kind)
        assert set(levels) == {1, 2, 3}
        assert min(levels.values()) >= least


def test_every_task_passes_as_a_proposal_of_its_kind_would(tasks, sandbox):
    """Run again under other hash seeds than those they were made with."""
    assert {task.kind for task in tasks} == set(TASK_KINDS)
    archive = TaskArchive()
    assert all(archive.add(task) for task in tasks)
    verdicts = sandbox.run([Job(task.program, task.inputs, runs=2) for task in tasks])
    assert [verdict.outputs for verdict in verdicts] == [task.outputs for task in tasks]
    for task, verdict in zip(tasks, verdicts, strict=True):
        kind = resolve_kind(task.kind)
        proposal = Proposal(task.kind, task.program, task.inputs, task.message)
        assert kind.read_program(task.program) == task.program
        assert isinstance(kind.accept(proposal, verdict, _Unmoved()), Task)
        if isinstance(kind, CodeF):
            assert len({key(decode(text)) for text in task.inputs}) == kind.inputs_per_task
            assert len({key(decode(text)) for text in task.outputs[task.visible :]}) > 2
        else:
            assert kind.chance(task) == 0


def test_no_task_is_solved_by_giving_back_what_is_shown(tasks, sandbox):
    kinds = {kind.name: kind for kind in make_seed_programs.KINDS}
    assert not [
        task for task in tasks if task.kind in kinds and make_seed_programs.is_copied(kinds[task.kind], task, sandbox)
    ]
    evens = "def f(a):\n    return [x for x in a if x % 2 == 0]"
    assert make_seed_programs.is_copied(kinds["code_i"], make_task("code_i", evens, [([3, 4],)]), sandbox)


class _Unmoved:
    """A generator that leaves a list in its order."""

    def shuffle(self, pairs: list) -> None: ...


def test_they_are_short(tasks):
    assert max(len(write_literal(text)) for task in tasks for text in (*task.inputs, *task.outputs)) <= 100
    assert max(len(task.program.splitlines()) for task in tasks) <= 15


def test_no_two_programs_and_none_that_is_held_out_are_the_same(tasks):
    programs = {task.program for task in tasks}
    forms = {form_of(program) for program in programs}
    assert len(forms) == len(programs)
    assert not forms & {form_of(task.program) for task in load_seed_tasks(tiny_eval_tasks())}


@pytest.mark.skipif(not PUBLISHED, reason="the published programs are not beside the clone")
def test_none_is_one_of_the_published_programs(tasks):
    published = {form_of(json.loads(line)["snippet"]) for path in PUBLISHED for line in path.read_text().splitlines()}
    assert not published & {form_of(task.program) for task in tasks}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# 1 lists\ndef f(x):\n    return x\nf(1)\n", "code_o and code_i need a call of `f` each, got 1"),
        ("# 1 lists\ndef f(x):\n    return x\nf(1); f(2)\n" * 2, "Another program is the same but for names"),
    ],
)
def test_a_program_that_makes_no_tasks_of_its_own_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        make_seed_programs.read_programs(text)


STARTS = {"turns": real_seed_tasks(), "chat": real_seed_tasks(), "compact": None}


@pytest.mark.parametrize(("style", "path"), STARTS.items())
def test_the_style_of_the_prompts_decides_what_a_run_starts_from(make_args, style, path):
    args = make_args(prompt_style=style)
    assert set(build_archive(None, make_kinds(args), args.prompt_style, args.archive_size, 6)) == set(
        load_seed_tasks(path)
    )


@pytest.mark.parametrize("style", ["turns", "compact"])
def test_a_trainer_without_tasks_starts_from_those_of_its_style(make_args, random_base, lora, style):
    args = make_args(prompt_style=style, shots=0, max_completion_length=8)
    trainer = PopuLoRATrainer(random_base, args=args, peft_config=lora)
    assert set() < set(trainer.game.archive) <= set(load_built_in_tasks(style))
