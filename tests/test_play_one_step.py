"""
A step without TRL, as documentation: two scripted teachers, two scripted students, the real sandbox.

Read it from top to bottom. It says what goes into a step, and what every slot and every row holds afterwards.
"""

from __future__ import annotations

import pytest
import torch

from trl_populora.population.members import Population
from trl_populora.population.ratings import Matchmaker
from trl_populora.sandbox import Limits, Sandbox
from trl_populora.sandbox.values import decode, encode
from trl_populora.step.play import Game, play_step
from trl_populora.step.player import Completion, Player
from trl_populora.step.referee import Referee
from trl_populora.tasks import CodeO, Reject, Task
from trl_populora.tasks.archive import TaskArchive


# The archive holds one task. Teachers are shown it, and it takes the place of a proposal that is refused.
KNOWN = Task("code_o", "def f(a):\n    return a[::-1]", (encode(("ab",), ordered=True),), (encode("ba"),))

# What the teachers write: in turn a good task, and a program that does not run.
PROPOSALS = {
    "teacher_0": [
        "```python\ndef f(a):\n    return a * 2\n```\n```input\n21\n```",
        "```python\ndef f(:\n```\n```input\n1\n```",
    ],
    "teacher_1": ["```python\ndef f(a):\n    return a + 'x'\n```\n```input\n'y'\n```", "I would rather not."],
}

# What the students answer, whatever they are asked: one is right about the first teacher's task, the other never.
ANSWERS = {"student_0": "```output\n42\n```", "student_1": "```output\n0\n```"}


def generate(prompts, members, seeds=None):
    """Stands for the models: one completion per prompt, by the member that is asked."""
    written = {name: iter(texts) for name, texts in PROPOSALS.items()}
    texts = [next(written[name]) if name in written else ANSWERS[name] for name in members]
    return [Completion(prompt_ids=[1, 2], completion_ids=[3], text=text) for text in texts]


def reward(played):
    """Stands for TRL's reward functions. One column, for the rows of all ranks: what the rules pay."""
    return torch.tensor([[record["pay"]] for record in played.records])


@pytest.fixture(scope="module")
def game():
    archive = TaskArchive()
    archive.add(KNOWN)
    with Sandbox(workers=1, limits=Limits(cpu_seconds=1.0)) as sandbox:
        yield Game(
            population=Population(teachers=2, students=2),
            matchmaker=Matchmaker(seed=0),
            archive=archive,
            referee=Referee({"code_o": CodeO()}, sandbox, style="compact"),
            player=Player(generate),
            proposals=2,  # per teacher
            attempts=2,  # per task
            references=1,  # shown to a teacher
            seed=0,
        )


@pytest.fixture(scope="module")
def played(game):
    return play_step(game, done=0, reward=reward)


def test_match_pairs_each_teacher_with_a_student(played):
    pairs = [(slot.match.teacher, slot.match.student) for slot in played.slots]
    assert pairs[0] == pairs[1]
    assert pairs[2] == pairs[3]
    assert {teacher for teacher, _ in pairs} == {"teacher_0", "teacher_1"}
    assert {student for _, student in pairs} == {"student_0", "student_1"}


def test_propose_opens_a_slot_for_each_proposal(played):
    assert len(played.slots) == 4, "two teachers with two proposals each"
    assert [slot.proposal.member for slot in played.slots] == ["teacher_0", "teacher_0", "teacher_1", "teacher_1"]
    assert all(slot.kind == "code_o" and slot.references == [KNOWN] for slot in played.slots)


def test_verify_lets_the_sandbox_decide_what_is_a_task(played):
    reasons = [slot.refusal and slot.refusal.reason for slot in played.slots]
    assert reasons == [None, Reject.SYNTAX, None, Reject.FORMAT]
    first, second, third, fourth = (slot.task for slot in played.slots)
    assert (decode(first.outputs[0]), decode(third.outputs[0])) == (42, "yx"), "what the programs return"
    assert second == fourth == KNOWN, "an archived task takes the place of a refused proposal"
    assert [slot.archived for slot in played.slots] == [False, True, False, True]


def test_solve_asks_the_matched_student_twice(played):
    for slot in played.slots:
        assert [attempt.member for attempt in slot.attempts] == [slot.match.student] * 2


def test_grade_compares_the_answers_as_values(played):
    for slot in played.slots:
        knows = slot.match.student == "student_0" and slot is played.slots[0]
        assert [attempt.right for attempt in slot.attempts] == [knows] * 2
        assert slot.solve_rate == float(knows)
        assert all(attempt.grade.attempt.well_formed for attempt in slot.attempts), "wrong answers can be read, too"


def test_price_pays_members_and_shares_the_match(played):
    for slot in played.slots:
        assert all(attempt.pay == (1.0 if attempt.right else -0.5) for attempt in slot.attempts)
    # A refused proposal costs 1. A task pays 0 if all attempts solve it, and if none does.
    assert [slot.proposal.pay for slot in played.slots] == [0.0, -1.0, 0.0, -1.0]
    # The student's share: 1 for a refused proposal, .5 for a task that nobody solves, else the solve rate.
    assert [slot.share for slot in played.slots] == [played.slots[0].solve_rate or 0.5, 1.0, 0.5, 1.0]


def test_rate_moves_both_sides_of_a_match(game, played):
    assert all(student.mu > 25.0 for student in game.population.students), "refused proposals are the students' points"
    assert all(teacher.mu < 25.0 for teacher in game.population.teachers)


def test_rows_are_the_attempts_and_then_the_proposals(played):
    assert [row.role for row in played.rows] == ["student"] * 8 + ["teacher"] * 4
    assert [row.pay for row in played.rows[:2]] == [attempt.pay for attempt in played.slots[0].attempts]
    assert [row.task_id for row in played.rows[8:]] == [played.tasks[0].task_id, "", played.tasks[1].task_id, ""]
    assert played.rewards.squeeze(1).tolist() == [row.pay for row in played.rows], "asked once, about all rows"


def test_the_archive_keeps_accepted_tasks_with_their_author(game, played):
    assert sorted(task.author for task in game.archive) == ["seed", "teacher_0", "teacher_1"]
    assert played.metrics["propose/valid_rate"] == 0.5
