"""The recipe of a task kind of one's own: what it accepts, and that a population plays it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from trl_populora.tasks.dataset import read_tasks
from trl_populora.tasks.kind import Proposal, Reject, Task
from trl_populora.trainer import PopuLoRATrainer


RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

from arithmetic_kind import Arithmetic, evaluate, reachable  # noqa: E402


class TestArithmetic:
    kind = Arithmetic()

    def task(self, text: str) -> Task | Reject:
        proposal = self.kind.parse_proposal(text, [])
        return self.kind.accept(proposal, None, random.Random(0)) if isinstance(proposal, Proposal) else proposal

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("numbers: 3 5\ntarget: 99", Reject.ERROR),
            ("numbers: 3 5\ntarget: 5", Reject.ARGUMENTS),
            ("numbers: 0 5\ntarget: 5", Reject.ARGUMENTS),
            ("numbers: 3\ntarget: 3", Reject.FORMAT),
            ("numbers: 3 5\ntarget: 8\ntarget: 9", Reject.FORMAT),
            ("__import__('os')", Reject.FORMAT),
        ],
    )
    def test_bad_proposals(self, text, reason):
        assert self.task(text) is reason

    @pytest.mark.parametrize(
        ("answer", "well_formed", "correct"),
        [
            ("(3 + 4) * 2", True, True),
            ("2*3 + 2*4", True, False),  # uses 2 twice
            ("3 + 4 + 7", True, False),  # 7 is not there
            ("3 + 4", True, False),
            ("3 +", False, False),
            ("2 ** 3", False, False),
            ("__import__('os').system('true')", False, False),
            ("(" * 200, False, False),
            ("+".join("1" * 50), True, False),  # nearly the longest there is
        ],
    )
    def test_answers(self, answer, well_formed, correct):
        task = self.task("numbers: 2 3 4\ntarget: 14")
        attempt = self.kind.parse_attempt(answer, task)
        assert attempt.well_formed is well_formed
        assert (well_formed and self.kind.correct(task, attempt, None)) is correct

    def test_evaluation_agrees_with_python(self):
        rng = random.Random(0)
        for _ in range(200):
            text = str(rng.randint(0, 20))
            for _ in range(rng.randint(0, 5)):
                text = f"({text}) {rng.choice('+-*')} {rng.randint(0, 20)}"
            assert evaluate(text)[0] == eval(text)

    def test_reachable_by_hand(self):
        assert reachable((2, 3)) == {2, 3, 5, 1, -1, 6}

    def test_a_population_plays_it_without_any_change_to_the_package(self, random_base, make_args, lora, tmp_path):
        seeds = read_tasks(str(RECIPES / "arithmetic_seeds.jsonl"))
        args = make_args(task_kinds=["arithmetic_kind:Arithmetic"], max_steps=1)
        trainer = PopuLoRATrainer(random_base, args=args, train_dataset=seeds, peft_config=lora)
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "propose/arithmetic/valid_rate" in entry)
        assert logged["propose/arithmetic/valid_rate"] == 0.0, "a random base writes no puzzle"
        assert logged["solve/archive_rate"] == 0.0
        assert "curriculum/numbers" in logged, "without a valid task, too"
