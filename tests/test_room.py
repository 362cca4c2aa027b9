"""What does not fit into the base's context: references are dropped, tasks rejected, settings refused."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from datasets import Dataset

from tests.games import PROPOSALS, make_game, play, proposal, solve_by_plan
from tests.models import make_tokenizer
from trl_populora.evaluate.cross_play import cross_play
from trl_populora.sandbox import Limits, Sandbox
from trl_populora.step.rows import Row, teacher_reward
from trl_populora.tasks import CodeF, CodeI, CodeO
from trl_populora.tasks.python.kinds import make_task


TOKENIZER = make_tokenizer()  # a token is a byte
LONG = "def f(a):\n    total = 0\n" + "".join(f"    total += a * {n}\n" for n in range(20)) + "    return total"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1, limits=Limits(cpu_seconds=1.0)) as sandbox:
        yield sandbox


def tokens(prompt) -> int:
    ids = TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(ids["input_ids"])


def room_of(budget: int):
    """As in a trainer whose context has so many tokens beside the longest completion."""
    return lambda prompt: budget - tokens(prompt)


class TestReferences:
    def play(self, sandbox, seed_tasks, budget, references=4, **settings):
        tasks = [task for task in seed_tasks if task.kind == "code_o"]
        tasks.append(replace(tasks[0], program=LONG))
        game = make_game(sandbox, tasks, lambda i: PROPOSALS[i], solve_by_plan, references=references, **settings)
        game.referee.free_tokens = room_of(budget)
        played = play(game, 0)
        return played, [row for row in played.rows if row.role == "teacher"]

    def test_references_are_dropped_until_the_prompt_fits_the_longest_first(self, sandbox, seed_tasks):
        _, whole = self.play(sandbox, seed_tasks, budget=10**6, references=5)
        assert all(LONG in row.prompt[0]["content"] for row in whole)
        budget = max(tokens(row.prompt) for row in whole) - 1
        played, rows = self.play(sandbox, seed_tasks, budget, references=5)
        assert [row.dropped for row in rows] == [1] * 4
        for before, after in zip(whole, rows, strict=True):
            assert tokens(after.prompt) <= budget
            assert LONG not in after.prompt[0]["content"]
            others = [part for part in before.prompt[0]["content"].split("```python") if LONG not in part]
            assert all(part.strip() in after.prompt[0]["content"] for part in others[1:-1]), "in the same order"
        assert played.metrics["propose/dropped_references"] == 4

    def test_without_room_for_any_reference_none_is_shown(self, sandbox, seed_tasks):
        bare = tokens(CodeO().proposal_prompt([], "compact"))
        # The archive's tasks are longer than that; its students are given the room that they need.
        game = make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i], solve_by_plan, references=3)
        game.referee.free_tokens = lambda prompt: (
            (bare if "propose" in prompt[0]["content"] else 10**6) - tokens(prompt)
        )
        played = play(game, 0)
        assert played.metrics["propose/dropped_references"] == 12
        assert {tokens(row.prompt) for row in played.rows if row.role == "teacher"} == {bare}

    def test_a_context_without_room_for_a_bare_proposal_is_refused(self, sandbox, seed_tasks):
        bare = tokens(CodeO().proposal_prompt([], "compact"))
        with pytest.raises(
            ValueError, match="prompt of code_o is 1 tokens longer than .*Lower `max_completion_length`"
        ):
            self.play(sandbox, seed_tasks, bare - 1)

    def test_cross_play_drops_them_too(self, sandbox, seed_tasks):
        game = make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i % 4], solve_by_plan, references=4)
        seen = []
        generate = game.player.generate
        game.player.generate = lambda prompts, *rest, **seed: seen.extend(prompts) or generate(prompts, *rest, **seed)
        budget = max(tokens(kind_prompt(game, task)) for task in game.archive if task.kind == "code_o") + 40
        game.referee.free_tokens = room_of(budget)
        cross_play(game.referee, game.player, game.archive, ["teacher_0"], ["student_0"], 4, references=4)
        assert max(map(tokens, seen)) <= budget

    def test_the_key_is_there_in_every_step(self, sandbox, seed_tasks):
        played, _ = self.play(sandbox, seed_tasks, budget=10**6)
        assert played.metrics["propose/dropped_references"] == 0
        assert played.metrics["verify/reject/too_long"] == 0


def kind_prompt(game, task):
    return game.referee.kinds[task.kind].solving_prompt(task, "compact")


class TestTasks:
    def test_a_task_that_cannot_be_put_to_a_student_is_rejected_as_too_long(self, sandbox, seed_tasks):
        game = make_game(sandbox, seed_tasks, lambda i: [proposal(LONG, "1"), *PROPOSALS][i], solve_by_plan)
        long = CodeO().solving_prompt(make_task("code_o", LONG, [(1,)]), "compact")
        game.referee.free_tokens = room_of(tokens(long) - 1)
        played = play(game, 0)
        rows = [row for row in played.rows if row.role == "teacher"]
        assert [row.reject_reason for row in rows] == ["too_long", "", "", ""]
        assert rows[0].well_formed
        assert played.metrics["verify/reject/too_long"] == 1
        columns = {name: [getattr(row, name) for row in rows] for name in Row.COLUMNS}
        assert teacher_reward(**columns)[0] == -1
        assert all(task.program != LONG for task in game.archive)
        assert all(tokens(row.prompt) < tokens(long) for row in played.rows)
        game.referee.free_tokens = room_of(tokens(long))
        assert play(game, 1).metrics["verify/reject/too_long"] == 0, "exactly the context"

    def test_so_is_a_program_that_no_teacher_could_be_shown_who_needs_one(self, sandbox, seed_tasks):
        task = make_task("code_o", LONG, [(1,)])
        solving, showing = CodeO().solving_prompt(task, "chat"), CodeF(4).proposal_prompt([task], "chat")
        assert tokens(solving) < tokens(showing)
        settings = {"references": 0, "proposals": 1}
        for kinds, reason in (((CodeO(), CodeF(4)), "too_long"), ((CodeO(),), "")):
            game = make_game(
                sandbox, seed_tasks, lambda i: proposal(LONG, "1"), solve_by_plan, kinds=kinds, **settings
            )
            game.referee.style = "chat"
            game.referee.free_tokens = lambda prompt: (
                tokens(showing) - 1 - tokens(prompt) if LONG in prompt[0]["content"] else 0
            )
            (row,) = [row for row in play(game, 0).rows if row.role == "teacher"]
            assert (row.kind, row.reject_reason) == ("code_o", reason)


@pytest.fixture
def make_trainer(random_base, make_args, lora):
    from trl_populora.trainer import PopuLoRATrainer

    trainers = []

    def make(tasks, eval_tasks=None, **settings):
        table, held_out = (rows and Dataset.from_list([t.to_record() for t in rows]) for rows in (tasks, eval_tasks))
        args = make_args(**({"task_kinds": ["code_o"]} | settings))
        trainers.append(PopuLoRATrainer(random_base, None, args, table, held_out, peft_config=lora))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


class TestTrainer:
    def length(self, task) -> int:
        return tokens(CodeO().solving_prompt(task, "compact"))

    def test_room_is_the_context_without_prompt_and_longest_completion(self, make_trainer, seed_tasks):
        trainer = make_trainer(seed_tasks, max_completion_length=100)
        prompt = CodeI().solving_prompt(seed_tasks[1], "compact")
        assert trainer.game.referee.free_tokens(prompt) == 1024 - 100 - len(trainer._tokenize_prompts([prompt])[0][0])
        assert tokens(prompt) == len(trainer._tokenize_prompts([prompt])[0][0])

    def test_given_tasks_that_do_not_fit_are_left_out_and_counted(self, make_trainer, seed_tasks, caplog):
        tasks = [make_task("code_o", LONG, [(1,)]), *(task for task in seed_tasks if task.kind == "code_o")]
        room = self.length(tasks[0])
        fits = make_trainer(tasks, max_completion_length=1024 - room)
        assert len(fits.archive) == len(tasks)
        assert not [line for line in caplog.messages if "left out" in line]
        trainer = make_trainer(tasks, max_completion_length=1024 - room + 1)
        assert LONG not in {task.program for task in trainer.archive}
        assert len(trainer.archive) == len(tasks) - 1
        (line,) = [line for line in caplog.messages if "left out" in line]
        assert line.startswith(f"1 of {len(tasks)} tasks of the archive are left out: they do not fit")
        with pytest.raises(ValueError, match="no task of the kinds code_o to start from"):
            make_trainer(tasks[:1], max_completion_length=1024 - room + 1)

    def test_held_out_tasks_that_do_not_fit_are_refused(self, make_trainer, seed_tasks):
        long = make_task("code_o", LONG, [(1,)])
        with pytest.raises(ValueError, match=r"prompt of a code_o task is 1 tokens longer than .*total \+= a"):
            make_trainer(seed_tasks, [long], max_completion_length=1024 - self.length(long) + 1)

    def test_a_completion_as_long_as_the_context_is_refused(self, make_trainer, seed_tasks):
        with pytest.raises(
            ValueError, match="`max_completion_length=1024` leaves no room for a prompt in .* 1024 tokens"
        ):
            make_trainer(seed_tasks, max_completion_length=1024)

    @pytest.mark.parametrize("style", ["compact", "chat"])
    def test_a_run_resumed_with_longer_completions_or_prompts_leaves_out_what_no_longer_fits(
        self, make_trainer, seed_tasks, caplog, style
    ):
        caplog.set_level(logging.WARNING)
        long = make_task("code_o", LONG, [(1,)])
        tasks = [long, *(task for task in seed_tasks if task.kind == "code_o")]
        answer = 1024 - tokens(CodeO().solving_prompt(long, style)) + 1
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "shots": 0}
        if style == "chat":
            saving |= {"teachers": 0}  # this base has no room for what would be asked of them
        begun = {"max_completion_length": answer if style == "chat" else 24, "prompt_style": "compact"}
        trainer = make_trainer(tasks, **begun, **saving)
        trainer.train()
        assert LONG in {task.program for task in trainer.archive}
        then = {"max_completion_length": answer, "prompt_style": style}
        resumed = make_trainer(tasks[1:], **then, **(saving | {"max_steps": 2}))
        resumed._play = lambda *_: pytest.fail("the step is not what is tested")
        resumed.args.max_steps = 1
        resumed.train(resume_from_checkpoint=True)
        assert LONG not in {task.program for task in resumed.archive}
        assert any("left out" in line for line in caplog.messages)

    def test_a_run_of_whose_archive_nothing_fits_any_more_does_not_resume(self, make_trainer, seed_tasks):
        long, saving = make_task("code_o", LONG, [(1,)]), {"save_strategy": "steps", "save_steps": 1}
        make_trainer([long], max_completion_length=24, max_steps=1, **saving).train()
        answer = 1024 - self.length(long) + 1
        resumed = make_trainer(seed_tasks, max_completion_length=answer, max_steps=2, **saving)
        with pytest.raises(
            ValueError, match="checkpoint-1: too few of its archived tasks fit .*`max_completion_length"
        ):
            resumed.train(resume_from_checkpoint=True)
