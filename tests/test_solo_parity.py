"""Against stock TRL: training the population jointly is training each member alone.

The reference is TRL's own `GRPOTrainer` with a stock PEFT adapter, fed one member's rows. Nothing of this package is
in it: TRL computes its advantages, its normaliser, its KL term and its clipping.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.fixed_rows import (
    ATTEMPTS,
    PROPOSALS,
    SETTINGS,
    STUDENTS,
    TEACHERS,
    VOCABULARY,
    GradientLog,
    play_fixed_rows,
    rows_of_step,
    solo_run,
)
from trl_populora.config import PopuLoRAConfig
from trl_populora.lora.members import member_parameters, read_member, save_member
from trl_populora.step.rows import Row
from trl_populora.trainer import PopuLoRATrainer


pytestmark = pytest.mark.early

# Clipping has to bite, otherwise it is not tested: most gradient norms here are between 0.03 and 0.5. Adam's own
# epsilon of 1e-8 turns the rounding of near-zero gradients into whole steps: stock TRL against stock TRL with another
# batch split then differs by 6e-5 already. 1e-4 keeps the step smooth; one case below has Adam's own.
OPTIONS = {"max_grad_norm": 0.02, "adam_epsilon": 1e-4}
LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "grpo with KL": {"loss_type": "grpo", "beta": 0.04},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo"},
    "dapo with KL": {"loss_type": "dapo", "beta": 0.04},
    "cispo with KL": {"loss_type": "cispo", "beta": 0.04},
    "two iterations per generation": {"loss_type": "grpo", "num_iterations": 2, "beta": 0.04},
    "Adam's own epsilon": {"loss_type": "dapo", "adam_epsilon": 1e-8},
}
SLOW = {*LOSSES} - {"grpo"}


def joint_trainer(base: str, output_dir, lora, rows_of=rows_of_step, broken=None, **options) -> PopuLoRATrainer:
    settings = {
        "teachers": TEACHERS,
        "students": STUDENTS,
        "proposals_per_teacher": PROPOSALS,
        "attempts_per_task": ATTEMPTS,
        "task_kinds": ["code_o"],
        "prompt_style": "compact",
        "per_device_train_batch_size": 12,
        "evolve_every": 0,
        "save_rollouts": False,
        "sandbox_workers": 1,
    }
    args = PopuLoRAConfig(str(output_dir), **(settings | SETTINGS | options))
    trainer = PopuLoRATrainer(base, args=args, peft_config=lora)
    play_fixed_rows(trainer, rows_of, broken)
    return trainer


@pytest.fixture(scope="module")
def start(random_base, tmp_path_factory):
    """Directories of the members' common start, as stock PEFT sees it."""
    from peft import LoraConfig

    directory = tmp_path_factory.mktemp("start")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    trainer = joint_trainer(random_base, directory / "run", lora)
    for name in trainer.population.names:
        save_member(trainer.model, name, directory / name)
    trainer.close()
    return directory


CHECKPOINTING = {
    "off": {"gradient_checkpointing": False},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


def joint_run(base: str, output_dir, lora, names: list[str], all_rows: bool = False, **options):
    """Final factors per member, and the gradients of each step by member and key."""
    trainer = joint_trainer(base, output_dir, lora, **options)
    if all_rows:
        trainer.scorer.skips_blank_rows, trainer.scorer.sharing = False, None
    log = GradientLog({(n, key): p for n in names for key, p in member_parameters(trainer.model, n).items()})
    trainer.add_callback(log)
    trainer.train()
    return {name: read_member(trainer.model, name) for name in names}, log.steps


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LOSSES]
)
def test_joint_training_is_solo_training(random_base, start, tmp_path, lora, loss):
    options = OPTIONS | LOSSES[loss]
    names = sorted({row.member for row in rows_of_step(0)})
    assert len(names) == 8
    joint = {
        mode: joint_run(random_base, tmp_path / mode, lora, names, **options, **checkpointing)
        for mode, checkpointing in CHECKPOINTING.items()
    }
    smooth = options["adam_epsilon"] == 1e-4
    for name in names:
        factors, gradients, norms = solo_run(random_base, start / name, name, tmp_path / name, **options)
        assert max(norms) > options["max_grad_norm"], "clipping must bite"
        for mode, (members, steps) in joint.items():
            for key, expected in factors.items():
                difference = (members[name][key] - expected).norm() / expected.norm()
                assert difference < (1e-5 if smooth else 1e-3), f"{name} {key}, checkpointing {mode}: {difference:.1e}"
            # Later steps start from weights that already differ by rounding.
            tolerances = [1e-5, 1e-4, 1e-4] if smooth else [1e-5]
            for tolerance, seen, reference in zip(tolerances, steps, gradients, strict=smooth):
                for key, gradient in reference.items():
                    atol = tolerance * gradient.abs().max().item()
                    torch.testing.assert_close(seen[name, key], gradient, rtol=1e-4, atol=atol)


def test_a_member_whose_loss_is_nan_leaves_the_others_to_train_as_if_alone(random_base, start, tmp_path, lora, caplog):
    options, names = OPTIONS | {"loss_type": "dapo"}, sorted({row.member for row in rows_of_step(0)})
    members, steps = joint_run(random_base, tmp_path / "joint", lora, names, **options, broken=(1, "student_1"))
    for name in names:
        gradients = [gradient for (member, _), gradient in steps[1].items() if member == name]
        if name == "student_1":
            assert not any(gradient.any() for gradient in gradients)
            assert all(value.isfinite().all() for value in members[name].values())
            continue
        factors, _, _ = solo_run(random_base, start / name, name, tmp_path / name, **options)
        for key, expected in factors.items():
            assert (members[name][key] - expected).norm() / expected.norm() < 1e-5, f"{name} {key}"
    assert [line for line in caplog.messages if "The gradient norm of student_1 is nan" in line]


def test_a_pull_on_teachers_alone_is_solo_training_with_it_and_students_are_trained_without(
    random_base, start, tmp_path, lora
):
    options = OPTIONS | {"loss_type": "dapo"}
    alone = {"teacher_1": {"beta": 0.3}, "student_1": {"beta": 0.0}}
    joint = joint_run(random_base, tmp_path / "joint", lora, [*alone], **options, teacher_beta=0.3)
    compare_with_runs_alone(joint, random_base, start, tmp_path, options, alone)


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_a_member_with_a_temperature_of_its_own_is_trained_as_alone_at_this_temperature(
    random_base, start, tmp_path, lora, num_iterations
):
    options = OPTIONS | {"loss_type": "dapo", "num_iterations": num_iterations}
    temperatures = [1.0, 1.0, 0.8, 1.0, 0.7, 1.0, 1.0, 1.3]  # teachers first
    chosen = {"teacher_2": 2, "teacher_3": 3, "student_0": 4, "student_3": 7}  # with their places in the list
    alone = {name: {"temperature": temperatures[place]} for name, place in chosen.items()}
    joint = joint_run(random_base, tmp_path / "joint", lora, [*alone], **options, temperature=temperatures)
    compare_with_runs_alone(joint, random_base, start, tmp_path, options, alone)


def compare_with_runs_alone(joint, base: str, start, tmp_path, options: dict, alone: dict[str, dict]) -> None:
    """Compares what `joint_run` returned with stock TRL's runs of the members in `alone`, with their own options."""
    members, steps = joint
    for name, own in alone.items():
        factors, gradients, _ = solo_run(base, start / name, name, tmp_path / name, **options, **own)
        for key, expected in factors.items():
            assert (members[name][key] - expected).norm() / expected.norm() < 1e-5, f"{name} {key}"
        for tolerance, seen, reference in zip([1e-5, 1e-4, 1e-4], steps, gradients, strict=True):
            for key, gradient in reference.items():
                atol = tolerance * gradient.abs().max().item()
                torch.testing.assert_close(seen[name, key], gradient, rtol=1e-4, atol=atol)


def equal_rewards_for(name: str):
    """The fixed rows with one reward for all rows of a member, so that its advantages are zero."""

    def rows_of(step: int) -> list[Row]:
        changes = {"solve_rate": 0.5, "correct": True}
        return [dataclasses.replace(row, **changes) if row.member == name else row for row in rows_of_step(step)]

    return rows_of


def other_rows_for(name: str):
    """The fixed rows with other tokens and rewards of one member, of the same lengths."""

    def rows_of(step: int) -> list[Row]:
        return [_other(row) if row.member == name else row for row in rows_of_step(step)]

    return rows_of


def _other(row: Row) -> Row:
    turned = [(token + 1) % VOCABULARY for token in row.completion.completion_ids]
    completion = dataclasses.replace(row.completion, completion_ids=turned)
    return dataclasses.replace(row, solve_rate=1 - row.solve_rate, correct=not row.correct, completion=completion)


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("teacher_1", "off"), ("student_1", "reentrant"), ("student_1", "non-reentrant")]
)
def test_zero_advantages_leave_a_member_bit_identical_and_the_base_too(
    random_base, tmp_path, lora, name, checkpointing
):
    trainer = joint_trainer(random_base, tmp_path, lora, equal_rewards_for(name), **CHECKPOINTING[checkpointing])
    frozen = {path: p.clone() for path, p in trainer.model.named_parameters() if "lora_" not in path}
    before = {member: read_member(trainer.model, member) for member in trainer.population.names}
    trainer.train()
    for member in trainer.population.names:
        after = read_member(trainer.model, member)
        same = [torch.equal(value, before[member][key]) for key, value in after.items()]
        assert all(same) if member == name else not any(same)
    parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameters[path], value) for path, value in frozen.items())


@pytest.mark.parametrize(
    "loss",
    ["dapo", "two iterations", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "dr_grpo", "cispo"))],
)
@pytest.mark.parametrize("checkpointing", ["off", pytest.param("non-reentrant", marks=pytest.mark.slow)])
def test_blank_rows_and_shared_prompts_change_no_gradient(random_base, tmp_path, lora, loss, checkpointing):
    names = sorted({row.member for row in rows_of_step(0)})
    kind = LOSSES.get(loss, {"loss_type": "grpo", "num_iterations": 2})
    options = OPTIONS | kind | CHECKPOINTING[checkpointing] | {"per_device_train_batch_size": 6}
    members, steps = joint_run(random_base, tmp_path / "live", lora, names, **options)
    expected, reference = joint_run(random_base, tmp_path / "all", lora, names, all_rows=True, **options)
    for tolerance, seen, wanted in zip([1e-5, 1e-4, 1e-4], steps, reference, strict=True):
        for key, gradient in wanted.items():
            assert (seen[key] - gradient).norm() <= tolerance * gradient.norm(), key
    for name in names:
        for key, value in expected[name].items():
            assert (members[name][key] - value).norm() / value.norm() < 1e-5


def test_only_live_rows_are_computed(random_base, tmp_path, lora):
    trainer = joint_trainer(random_base, tmp_path, lora, max_steps=1, per_device_train_batch_size=6)
    trainer.scorer.sharing = None
    computed = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "batch/live_rows" in entry)
    live = round(logged["batch/live_rows"] * 48)
    assert 0 < live < 40
    assert len(computed) < trainer.args.gradient_accumulation_steps, "a blank micro-batch was computed"
    assert sum(computed) == live + 1, "of the blank micro-batches only the last is computed: one row of two tokens"


def test_a_kl_term_reaches_every_row(random_base, tmp_path, lora):
    trainer = joint_trainer(random_base, tmp_path, lora, beta=0.04, max_steps=1)
    trainer.train()
    assert [entry["batch/live_rows"] for entry in trainer.state.log_history if "batch/live_rows" in entry] == [1.0]


def test_the_rows_of_a_member_change_no_other_member_by_a_bit(random_base, tmp_path, lora):
    """
    Rows of equal length: another length would change the others' padding, and with it the order of sums. All rows are
    computed, for the same reason: a row that becomes blank moves the others to other micro-batches.
    """
    names = sorted({row.member for row in rows_of_step(0)})
    options = OPTIONS | {"all_rows": True}  # every member's gradients are clipped
    one, _ = joint_run(random_base, tmp_path / "one", lora, names, **options)
    for name in ("teacher_1", "student_1"):
        other, _ = joint_run(random_base, tmp_path / name, lora, names, rows_of=other_rows_for(name), **options)
        for member in names:
            same = [torch.equal(value, other[member][key]) for key, value in one[member].items()]
            assert all(same) if member != name else not any(same)
