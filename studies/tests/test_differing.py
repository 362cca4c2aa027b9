"""Members that differ, and the outer step: what is done to a real tiny trainer, against its definition."""

from __future__ import annotations

import pytest
import torch
from differing import (
    MOMENTUM,
    OUTER_RATE,
    RATES,
    deal_features,
    give_rates,
    keep_to_own,
    step_outside,
)
from transformers import TrainerCallback

from tests.populora_run import letters
from tests.small_run import small_trainer
from trl_populora.lora.members import read_member


SMALL = {"teachers": 4, "students": 4, "evolve_every": 0, "per_device_train_batch_size": 6}
POOLED = {"pool_every": 1, "save_strategy": "steps", "save_steps": 2}


def make(base, tasks, output, change, **settings):
    records = [task.to_record() for task in tasks]
    trainer = small_trainer(base, records, letters, output_dir=str(output), **SMALL | settings)
    change(trainer)
    return trainer


def students(trainer) -> list[dict[str, torch.Tensor]]:
    return [dict(read_member(trainer.model, each.name)) for each in trainer.population.students]


def test_each_student_learns_at_its_rate(random_base, seed_tasks, tmp_path):
    trainer = make(random_base, seed_tasks, tmp_path, give_rates, max_steps=1)
    trainer.train()
    rates = {group["member"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert [rates[each.name] / trainer.args.learning_rate for each in trainer.population.students] == [*RATES]
    assert rates["teacher_0"] == trainer.args.learning_rate


def test_a_teacher_is_paid_for_the_share_of_features_that_is_its_own():
    owners = deal_features()
    own = [word for word, owner in owners.items() if owner == 0]
    assert {*owners.values()} == {0, 1, 2, 3}
    assert "Add" in own
    assert owners["max"] != 0
    program = "def f(a, b):\n    return max(a + b, b)"
    roles, members = ["teacher", "teacher", "student"], ["teacher_0", "teacher_0", "student_0"]
    assert keep_to_own(roles, members, [0.8, -1.0, 1.0], [program] * 3) == [pytest.approx(-0.4), 0.0, None]


class Watch(TrainerCallback):
    """The students at the end of each step, and after what is done before the next."""

    def __init__(self, trainer):
        self.trainer, self.ended, self.begun = trainer, {}, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.ended[state.global_step] = students(self.trainer)

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun[state.global_step] = students(self.trainer)


@pytest.mark.slow
def test_the_outer_step_follows_nesterovs_rule_and_goes_on_after_a_resume(random_base, seed_tasks, tmp_path):
    trainer = make(random_base, seed_tasks, tmp_path / "run", step_outside, max_steps=3, **POOLED)
    watch = Watch(trainer)
    trainer.add_callback(watch)
    trainer.train()
    before, velocity = watch.begun[0][0], {}
    for step in (1, 2):
        ended, begun = watch.ended[step], watch.begun[step]
        for key, start in before.items():
            way = torch.stack([each[key] for each in ended]).mean(0) - start
            velocity[key] = MOMENTUM * velocity.get(key, 0) + way
            expected = start + OUTER_RATE * (way + MOMENTUM * velocity[key])
            assert all(torch.allclose(each[key], expected, atol=1e-6) for each in begun)
        before = begun[0]
    assert sum(float((before[key] - watch.begun[0][0][key]).abs().sum()) for key in before) > 0

    for last in (2, 3):
        again = make(random_base, seed_tasks, tmp_path / "again", step_outside, max_steps=last, **POOLED)
        again.train(resume_from_checkpoint="newest")
    for one, other in zip(students(trainer), students(again), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
