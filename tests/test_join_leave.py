"""Members join and leave a live run on a dataset, and the others do not notice. Successive halving shares rows."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerState
from trl.trainer.utils import RepeatSampler

from tests import join_worker
from tests.fixed_rows import GradientLog
from tests.launching import launch, run_script
from tests.prompt_runs import QUESTIONS, SETTINGS, brief, population_trainer
from tests.small_run import scale_gradients, small_lora
from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.hub.card import _write_lineage
from trl_populora.lora.members import member_param_groups, member_parameters, read_member
from trl_populora.population.halving import Halving
from trl_populora.population.members import Population
from trl_populora.report.callbacks import list_family
from trl_populora.report.charts import draw_lineage
from trl_populora.report.load import load_run
from trl_populora.report.page import write_report
from trl_populora.report.table import print_population
from trl_populora.run.read import read_lines, read_population
from trl_populora.tasks.prompts import HalvingSampler


WRITERS = ["a", "b", "c"]
LOSSES = {
    "by rows": {"loss_type": "grpo"},
    "by tokens": {"loss_type": "dapo"},
    "two optimizer steps a generation, twice": {"loss_type": "grpo", "steps_per_generation": 4, "num_iterations": 2},
}


class At(TrainerCallback):
    """Calls a function of the trainer before the step after so many optimizer steps."""

    def __init__(self, trainer, **actions) -> None:
        self.trainer, self.actions = trainer, {int(name.removeprefix("after_")): act for name, act in actions.items()}

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step in self.actions:
            self.actions[state.global_step](self.trainer)


def run(base, directory, writers=WRITERS, resume=None, **options):
    """
    Trains a population. Options such as `after_2=` are called with the trainer after so many steps. With `samples`
    members write what they sample instead of what is recorded.
    """
    actions = {name: options.pop(name) for name in [*options] if name.startswith("after_")}
    samples = options.pop("samples", False)
    trainer, judge = population_trainer(base, directory, writers, **options)
    if samples:
        del trainer._generate_rows  # which records
    trainer.add_callback(At(trainer, **actions))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, judge


def read_all(trainer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: read_member(trainer.model, trainer.population.adapter(name)) for name in trainer.population.names}


def list_prompts(judge, member: str) -> list[str]:
    """The prompts of all of a member's rows, in order."""
    told = []
    for call in judge.calls:
        told += [prompt for prompt, name in zip(call["prompts"], call["member"], strict=True) if name == member]
    return told


def check_close(found, expected) -> None:
    for key, value in expected.items():
        assert (found[key] - value).norm() / value.norm() < 1e-5, key


def check_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, factors in expected.items():
        for key, value in factors.items():
            assert torch.equal(found[name][key], value), f"{name} {key}"


@pytest.mark.parametrize("case", LOSSES)
def test_who_stays_trains_as_if_nobody_had_left(random_base, tmp_path, case):
    options = LOSSES[case] | {"max_steps": 8, "max_grad_norm": 0.0}  # clipping would hide a wrong factor
    whole, all_calls = run(random_base, tmp_path / "whole", **options)
    left, calls = run(
        random_base, tmp_path / "left", after_4=lambda trainer: trainer.remove_member("student_1"), **options
    )
    assert left.population.names == ["student_0", "student_2"]
    for name in left.population.names:
        assert list_prompts(calls, name) == list_prompts(all_calls, name)
        check_close(read_all(left)[name], read_all(whole)[name])
    assert len(list_prompts(calls, "student_1")) == len(list_prompts(all_calls, "student_1")) // 2


@pytest.mark.parametrize(
    "with_what", ["an optimizer of the user's own", "rates that are tensors", "a scale of gradients"]
)
def test_the_members_that_come_and_go_do_not_notice(random_base, tmp_path, monkeypatch, with_what):
    """The optimizer and the scaler are PyTorch's. They meet a seat that is empty, and then one that is taken again."""
    options = {"max_steps": 4, "learning_rate": [1e-2, 3e-3, 2e-2]}
    trainers = [population_trainer(random_base, tmp_path / name, WRITERS, **options)[0] for name in ("plain", "own")]
    plain, own = trainers
    if with_what == "a scale of gradients":
        scale_gradients(own, monkeypatch)
    else:
        own.optimizer = torch.optim.AdamW([p for p in own.model.parameters() if p.requires_grad])
        with pytest.raises(ValueError, match="has a parameter group of student_0 and student_1") as refused:
            own.train()
        (call,) = re.findall(r"`trainer.optimizer = AdamW\((.*?)\)`,", str(refused.value))
        groups = eval(call, {"trainer": own, "member_param_groups": member_param_groups})
        if with_what == "rates that are tensors":  # as torchao makes them
            groups = [group | {"lr": torch.tensor(group["lr"])} for group in groups]
        own.optimizer = torch.optim.AdamW(groups, eps=plain.args.adam_epsilon, fused=True)
    changes = {
        "after_1": lambda trainer: trainer.remove_member("student_1"),
        "after_2": lambda trainer: trainer.add_member("late", learning_rate=5e-3),
    }
    for trainer in trainers:
        trainer.add_callback(At(trainer, **changes))
        trainer.train()
    if with_what == "a scale of gradients":
        assert own.accelerator.scaler.state_dict()["_growth_tracker"] == 4, "all steps took scaled gradients"
    if with_what == "rates that are tensors":
        assert all(torch.is_tensor(group["lr"]) for group in own.optimizer.param_groups)
    assert own.population.names == ["student_0", "late", "student_2"]
    for name, factors in read_all(plain).items():
        check_close(read_all(own)[name], factors)


def test_a_leaver_and_a_resume_without_it_give_the_same_bits(random_base, tmp_path):
    def leave(trainer) -> None:
        trainer.remove_member("student_1")

    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "max_members": 4, "samples": True}
    first, calls = run(random_base, tmp_path / "first", after_3=leave, **options)
    checkpoint = str(tmp_path / "first" / "checkpoint-3")
    again, more_calls = run(random_base, tmp_path / "again", resume=checkpoint, after_3=leave, **options)
    check_equal(read_all(again), read_all(first))
    for name in first.population.names:
        assert list_prompts(calls, name)[-len(list_prompts(more_calls, name)) :] == list_prompts(more_calls, name)


def test_who_leaves_is_kept_as_last_seen(random_base, tmp_path):
    seen = {}

    def leave(trainer) -> None:
        seen.update(read_member(trainer.model, "student_1"))
        trainer.remove_member("student_1")

    trainer, _ = run(random_base, tmp_path, after_2=leave, max_steps=3)
    trainer.save_model()
    told = read_population(tmp_path)
    assert [member["name"] for member in told["members"]] == ["student_0", "student_2"]
    assert sorted(path.name for path in (tmp_path / "members").iterdir()) == ["student_0", "student_2"]
    (gone,) = told["left"]
    assert (gone["name"], gone["version"], gone["step"], gone["adapter"]) == ("student_1", 0, 2, "left/student_1-0")
    saved = load_file(tmp_path / gone["adapter"] / "adapter_model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in seen.items())


def test_who_joins_trains_like_a_new_run(random_base, tmp_path):
    # Three generations are an epoch, and nobody shuffles, so from step 3 on prompts are those of the first steps.
    options = {"shuffle_dataset": False, "lr_scheduler_type": "constant", "loss_type": "grpo"}

    def join(trainer) -> None:
        trainer.remove_member("student_1")
        trainer.add_member("late")  # in the seat that has been used

    trainer, calls = run(random_base, tmp_path / "joint", after_3=join, max_steps=8, **options)
    solo, solo_calls = run(random_base, tmp_path / "solo", ["late"], first=3, max_steps=5, **options)
    assert list_prompts(calls, "late") == list_prompts(solo_calls, "student_0")
    check_close(read_all(trainer)["late"], read_all(solo)["student_0"])
    late = trainer.population["late"]
    assert (late.operator, late.born, late.age, late.index, late.version) == ("join", 3, 5, 1, 0)


def test_like_copies_weights_and_no_optimizer_state(random_base, tmp_path):
    found = {}

    def join(trainer) -> None:
        trainer.remove_member("student_0")
        trainer.add_member("copy", like="student_2")  # in the seat that has been used
        found.update(read_all(trainer), rating=trainer.population["copy"].mu, model=trainer.population["student_2"].mu)
        states = [trainer.optimizer.state.get(p, {}) for p in member_parameters(trainer.model, "student_0").values()]
        found["moments"] = any(bool(torch.as_tensor(v).any()) for state in states for v in state.values())

    trainer, _ = run(random_base, tmp_path, after_2=join, max_steps=3)
    check_equal({"it": found["copy"]}, {"it": found["student_2"]})
    assert found["rating"] == found["model"]
    assert not found["moments"]
    event = read_lines(tmp_path / "lineage.jsonl")[-1]
    assert (event["child"], event["parents"][0]["member"], event["seat"]) == ("copy@0", "student_2@0", "student_0")
    assert trainer.population["copy"].parents == ("student_2@0",)


def test_a_rate_of_its_own_follows_the_schedule_and_survives_a_resume(random_base, tmp_path):
    def join(trainer) -> None:
        trainer.add_member("fast", learning_rate=0.05)

    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "max_members": 4}
    trainer, _ = run(random_base, tmp_path / "first", after_2=join, **options)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    again, _ = run(random_base, tmp_path / "again", resume=checkpoint, **options)
    assert [group["lr"] for group in again.optimizer.param_groups] == rates
    assert [group["initial_lr"] for group in again.optimizer.param_groups] == [0.01, 0.01, 0.01, 0.05]
    check_equal(read_all(again), read_all(trainer))
    half = {}

    def note(trainer) -> None:
        half.update(enumerate(group["lr"] for group in trainer.optimizer.param_groups))

    run(random_base, tmp_path / "third", after_2=join, after_3=note, **(options | {"save_strategy": "no"}))
    assert half[3] == pytest.approx(0.05 / 2)
    assert half[0] == pytest.approx(0.01 / 2)


def test_a_resume_across_a_join_and_a_leave_gives_the_same_bits(random_base, tmp_path):
    actions = {
        "after_2": lambda trainer: trainer.remove_member("student_0"),
        "after_3": lambda trainer: trainer.add_member("late", like="student_1"),
        "after_5": lambda trainer: trainer.remove_member("student_1"),
        "after_6": lambda trainer: trainer.add_member("later"),
    }
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    first, _ = run(random_base, tmp_path / "first", **actions, **options)
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    again, _ = run(random_base, tmp_path / "again", resume=checkpoint, **actions, **options)
    assert again.population.names == first.population.names == ["late", "later", "student_2"]
    check_equal(read_all(again), read_all(first))
    assert again.population.state_dict() == first.population.state_dict()
    lines = [read_lines(tmp_path / name / "lineage.jsonl") for name in ("first", "again")]
    assert lines[0] == lines[1]
    assert [line["operator"] for line in lines[0]] == ["leave", "join", "leave", "join"]
    left = [sorted(path.name for path in (tmp_path / name / "left").iterdir()) for name in ("first", "again")]
    assert left[0] == left[1] == ["student_0-0", "student_1-0"]


def test_a_resume_in_place_takes_back_who_left_later(random_base, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run(random_base, tmp_path, after_3=lambda trainer: trainer.remove_member("student_0"), **options)
    (tmp_path / "checkpoint-4" / "whole.json").unlink()
    trainer, _ = run(random_base, tmp_path, resume=True, **options)
    assert trainer.population.names == ["student_0", "student_1", "student_2"]
    assert not any((tmp_path / "left").iterdir())


def test_metrics_of_every_seat_exist_from_the_start(random_base, tmp_path):
    def join(trainer) -> None:
        trainer.add_member("late")

    run(random_base, tmp_path, ["a", "b"], after_2=join, max_steps=3, max_members=3, eval_strategy="no")
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "loss" in line]
    assert len({tuple(sorted(line)) for line in lines}) == 1
    for key in ("reward", "rewards/brief", "length", "grad_norm", "mu", "sigma"):
        values = [line[f"member/student_2/{key}"] for line in lines]
        assert values[:2] == [None, None], key
        assert values[2] is not None, key


def test_evaluation_asks_those_that_are_there(random_base, tmp_path):
    trainer, judge = population_trainer(random_base, tmp_path, WRITERS, max_steps=3, max_members=4)
    trainer.add_callback(At(trainer, after_2=lambda trainer: trainer.remove_member("student_1")))
    trainer.train()
    judge.calls.clear()
    trainer.evaluate(QUESTIONS.select(range(4)))
    asked = Counter(name for call in judge.calls for name in call["member"])
    assert asked == {"student_0": 16, "student_2": 16}
    told = trainer.state.log_history[-1]
    empty = [seat for seat in trainer.population.adapters if told[f"eval_member/{seat}/reward"] is None]
    assert empty == ["student_1", "student_3"]


def by_writer(completion_ids, member, **columns) -> list[float]:
    """Pays most to student_2, then student_3, student_0, student_1, and a little by length."""
    order = {"student_2": 3.0, "student_3": 2.0, "student_0": 1.0, "student_1": 0.0}
    return [order[name] * 10 + len(ids) / 12 for name, ids in zip(member, completion_ids, strict=True)]


HALVING = {"halve_every": 2, "max_steps": 7, "rewards": [by_writer], "num_generations": 4}


def test_halving_keeps_the_better_half_and_all_rows(random_base, tmp_path):
    trainer, judge = run(random_base, tmp_path, ["a", "b", "c", "d"], **HALVING)
    assert trainer.population.names == ["student_2"]
    rows = [Counter(call["member"]) for call in judge.calls]
    four = {f"student_{place}": 8 for place in range(4)}
    assert rows == [four] * 2 + [{"student_2": 16, "student_3": 16}] * 2 + [{"student_2": 32}] * 3
    for call in judge.calls:  # at TRL's group size: more prompts, not more attempts
        groups = Counter(zip(call["prompts"], call["member"], strict=True))
        assert all(count % 4 == 0 for count in groups.values())
    assert len(set(judge.calls[2]["prompts"])) == 4
    told = read_population(tmp_path)
    assert [(each["name"], each["step"]) for each in told["left"]] == [
        ("student_1", 2),
        ("student_0", 2),
        ("student_3", 4),
    ]
    steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, 8))


def test_halving_tells_who_leaves_by_what_and_who_stays(random_base, tmp_path, capsys):
    run(random_base, tmp_path, ["a", "b", "c", "d"], **HALVING)
    lines = [line for line in capsys.readouterr().out.splitlines() if "halving" in line]
    number = r"[+-]\d+\.\d{3}"
    first = (
        rf"step 2/7 \| halving by mean training reward so far: student_0 {number}, student_1 {number} leave; "
        rf"student_2 {number}, student_3 {number} stay"
    )
    second = (
        rf"step 4/7 \| halving by mean training reward since the last halving: student_3 {number} leave; "
        rf"student_2 {number} stay"
    )
    assert len(lines) == 2
    assert re.fullmatch(first, lines[0])
    assert re.fullmatch(second, lines[1])


def test_a_member_that_leaves_by_hand_is_told(random_base, tmp_path, capsys):
    run(random_base, tmp_path, after_1=lambda trainer: trainer.remove_member("student_1"), max_steps=2)
    assert "step 1/2 | student_1 leaves; student_0, student_2 stay" in capsys.readouterr().out


def halve(rewards: dict[str, float], evaluated: dict[str, float]) -> Population:
    """Halves members with these mean rewards once."""
    population = Population(0, len(rewards))
    halving = Halving(
        1,
        len(rewards),
        population,
        leave=lambda name: population.leave(name, 1, f"left/{name}-0"),
        tell=lambda line: None,
        evaluated=lambda: {f"{name}@0": reward for name, reward in evaluated.items()},
    )
    halving.note(rewards)
    halving.on_step_begin(None, TrainerState(global_step=1), None)
    return population


def test_a_halving_that_cuts_between_equals_is_warned_of(caplog):
    population = halve({"student_0": 0.5, "student_1": 0.5, "student_2": 0.5, "student_3": 0.9}, {})
    assert population.names == ["student_0", "student_3"]
    (told,) = caplog.messages
    assert "student_0, student_1, student_2 have equal mean training rewards" in told
    assert "the halving after step 1" in told


def test_a_halving_against_the_evaluation_is_warned_of(caplog):
    halve({"student_0": 0.5, "student_1": 0.9}, {"student_0": 0.7, "student_1": 0.7})
    assert not caplog.messages  # one of the best stays
    halve({"student_0": 0.5, "student_1": 0.9}, {"student_0": 0.8, "student_1": 0.7})
    (told,) = caplog.messages
    assert "lets student_0 leave, which had the highest reward in the last evaluation (+0.800)" in told


def test_who_left_is_recorded_and_shown_with_settings_and_rewards(random_base, tmp_path, capsys):
    options = {"learning_rate": [1e-2, 3e-3], "halve_every": 1, "max_steps": 2, "rewards": [by_writer]}
    trainer, _ = run(random_base, tmp_path, ["a", "b"], **options)
    trainer.save_model()
    saved = read_population(tmp_path)
    (gone,) = saved["left"]
    assert gone["settings"] == {"learning_rate": 3e-3}
    assert isinstance(gone["reward"], float)
    assert (gone["eval_reward"], gone["learned"]) == (None, True)
    print_population(tmp_path)
    shown = capsys.readouterr().out
    for text in ("learning_rate", "0.01", "0.003", "student_1, left after step 1", f"{gone['reward']:+.3f}"):
        assert text in shown


def test_before_the_first_halving_rows_are_those_of_a_plain_sweep(random_base, tmp_path):
    plain = run(random_base, tmp_path / "plain", ["a", "b"], max_steps=5)[1]
    halved = run(random_base, tmp_path / "halved", ["a", "b"], max_steps=5, halve_every=4)[1]
    assert [call["prompts"] for call in halved.calls[:4]] == [call["prompts"] for call in plain.calls[:4]]
    assert [call["member"] for call in halved.calls[:4]] == [call["member"] for call in plain.calls[:4]]


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_after_a_halving_the_update_is_that_of_a_run_with_twice_the_rows(random_base, tmp_path, loss):
    # With a rate of 0 all members keep their first weights, so that gradients of any step can be compared.
    options = {"learning_rate": 0.0, "loss_type": loss, "shuffle_dataset": False, "rewards": [by_writer]}
    two, four = QUESTIONS.select([0, 1]), QUESTIONS.select([0, 1, 0, 1])
    gradients = []
    for directory, table, writers, more in (
        ("halved", two, ["a", "b"], {"halve_every": 2, "max_steps": 3}),
        ("alone", four, ["a"], {"gradient_accumulation_steps": 4, "max_steps": 1, "first": 2}),
    ):
        trainer, _ = population_trainer(random_base, tmp_path / directory, writers, table=table, **options, **more)
        log = GradientLog(member_parameters(trainer.model, "student_0"))
        trainer.add_callback(log)
        trainer.train()
        gradients.append(log.steps[-1])
    for key, expected in gradients[1].items():
        atol = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(gradients[0][key], expected, rtol=0, atol=atol)


def test_a_resume_across_a_halving_gives_the_same_bits(random_base, tmp_path):
    options = HALVING | {"save_strategy": "steps", "save_steps": 1}
    first, calls = run(random_base, tmp_path / "first", ["a", "b", "c", "d"], **options)
    for step in (1, 2, 3):  # amid the figures of a halving, just before it, and after it
        checkpoint, directory = str(tmp_path / "first" / f"checkpoint-{step}"), tmp_path / f"from_{step}"
        again, more_calls = run(random_base, directory, ["a", "b", "c", "d"], resume=checkpoint, **options)
        assert [call["prompts"] for call in more_calls.calls] == [call["prompts"] for call in calls.calls[step:]]
        check_equal(read_all(again), read_all(first))
        assert again.population.left == first.population.left


@pytest.mark.parametrize("ranks", [1, 2])
def test_halving_deals_the_same_part_of_every_members_rows_to_each_rank(ranks):
    stream = RepeatSampler(range(7), mini_repeat_count=4, batch_size=2, repeat_count=1, seed=3)
    sampler = HalvingSampler(stream, members=4, rows=8 // ranks, generations=1)
    assert len(sampler) == 4 * len(stream) == len(list(sampler))
    generations = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        rows = list(sampler)
        generations += [rows[start : start + 32] for start in range(0, len(rows), 32)]
    one_rank = HalvingSampler(stream, members=4, rows=8, generations=1)
    one_rank.set_epoch(0)
    for number, generation in enumerate(generations):
        shares = sampler.count_shares(number)
        assert shares == [1, 2, 4, 4, 4, 4][number]
        parts = [generation[start : start + 32 // ranks] for start in range(0, 32, 32 // ranks)]
        own = [
            [index % 7 for part in parts for index in part[m * len(part) * shares // 4 :][: 8 * shares // ranks]]
            for m in range(4 // shares)
        ]
        assert all(each == own[0] for each in own)
        assert all(count % 4 == 0 for count in Counter(own[0]).values())


def test_seats_with_prompts_of_their_own_have_orders_of_their_own(random_base, tmp_path):
    trainer, _ = population_trainer(
        random_base, tmp_path, ["a", "b"], member_prompts="own", max_members=4, seed=[44, 42]
    )
    seeds = [stream.seed for stream in trainer._get_train_sampler().streams]
    assert seeds == [44, 42, 46, 47], "the third would have 46 and the fourth 47 without a list, too"
    trainer, _ = population_trainer(
        random_base, tmp_path / "other", ["a", "b"], member_prompts="own", max_members=3, seed=[42, 44]
    )
    assert [stream.seed for stream in trainer._get_train_sampler().streams] == [42, 44, 45], "44 is taken"


REFUSED = {
    "fewer seats than members": ({"max_members": 2}, "`max_members=2` is below `students=3`"),
    "a number of members that halves badly": (
        {"halve_every": 2, "max_steps": 8},
        "`students=3` cannot be halved .* power of two, such as 2",
    ),
    "halving without an end": (
        {"halve_every": 2, "students": 4},
        "`halve_every=2` needs a larger `max_steps`, got -1",
    ),
    "halving beside evolution": (
        {"halve_every": 2, "students": 4, "max_steps": 8, "evolve_every": 2},
        "`evolve_every=2` clashes with `halve_every=2`",
    ),
    "halving with prompts of their own": (
        {"halve_every": 2, "students": 4, "max_steps": 8, "member_prompts": "own"},
        "`member_prompts='own'` clashes",
    ),
    "halving with empty seats": (
        {"halve_every": 2, "students": 4, "max_steps": 8, "max_members": 6},
        "`max_members=6` clashes .* Set it to 4",
    ),
    "halving within a generation": (
        {"halve_every": 3, "students": 4, "max_steps": 8, "num_iterations": 2},
        "`halve_every=3` must be a multiple of the 2 optimizer steps",
    ),
    "halving with several generations a step": (
        {"halve_every": 2, "students": 4, "max_steps": 8, "steps_per_generation": 1},
        "`halve_every=2`: an optimizer step takes the rows of several generations",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_clash_are_refused(tmp_path, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        PopuLoRAConfig(str(tmp_path), **(SETTINGS | {"students": 3} | options))


@pytest.mark.parametrize(("name", "value"), [("max_members", 9), ("halve_every", 2)])
def test_the_game_has_no_seats_and_no_halving(name, value):
    args = PopuLoRAConfig("run", max_steps=9, **{name: value})
    with pytest.raises(ValueError, match=f"`{name}={value}` needs a `train_dataset` with a column `prompt`"):
        args.for_game()


def test_names_are_refused_that_are_paths_or_taken():
    population = Population(0, 2, seats=3)
    for name in ("../out", "a/b", "", "-x"):
        with pytest.raises(ValueError, match="must have only letters"):
            population.join(name, step=1)
    with pytest.raises(ValueError, match="'student_0' is taken"):
        population.join("student_0", step=1)
    assert population.join("student_2", step=1).index == 2
    with pytest.raises(ValueError, match="No seat is empty for 'more'.*larger `max_members`"):
        population.join("more", step=1)
    population.leave("student_0", 2, "left/student_0-0")
    assert population.join("more", step=2).index == 0
    population.leave("student_1", 2, "left/student_1-0")
    with pytest.raises(ValueError, match="'student_0' is taken"):  # it is the name of the seat of `more`
        population.join("student_0", step=3)
    assert population.join("student_1", step=3).version == 1
    with pytest.raises(KeyError, match="No member is called 'nobody'"):
        population.leave("nobody", 3, "left/nobody-0")


def test_the_last_member_stays():
    population = Population(0, 2)
    population.leave("student_0", 1, "left/student_0-0")
    with pytest.raises(ValueError, match="'student_1' is the last member"):
        population.leave("student_1", 1, "left/student_1-0")


def test_changes_at_the_wrong_time_or_with_unknown_settings_are_refused(random_base, tmp_path):
    errors = {}

    def attempt(key, method, *args, **settings):
        def act(trainer) -> None:
            try:
                getattr(trainer, method)(*args, **settings)
            except (RuntimeError, TypeError, ValueError, KeyError) as error:
                errors[key] = f"{type(error).__name__}: {error}"

        return act

    def both(*acts):
        return lambda trainer: [act(trainer) for act in acts]

    actions = {
        "after_1": attempt("amid", "remove_member", "student_0"),
        "after_2": attempt("unknown", "add_member", "new", colour=1),
        "after_4": attempt("range", "add_member", "new", learning_rate=-1.0),
        "after_6": both(attempt("like", "add_member", "new", like="nobody"), attempt("base", "add_member", "base")),
    }
    trainer, _ = run(random_base, tmp_path, num_iterations=2, max_steps=7, max_members=4, **actions)
    assert "RuntimeError: `remove_member` after optimizer step 1: rows of this generation" in errors["amid"]
    assert "multiple of 2 optimizer steps" in errors["amid"]
    assert (
        errors["unknown"]
        == "TypeError: A member has no settings colour of its own, only learning_rate, beta, epsilon, temperature."
    )
    assert "`learning_rate` must be" in errors["range"]
    assert "nobody" in errors["like"]
    assert errors["base"] == "ValueError: The name 'base' is taken: rows of 'base' are the base's own. Choose another."
    assert trainer.population.names == ["student_0", "student_1", "student_2"]
    assert not (tmp_path / "lineage.jsonl").exists()
    with pytest.raises(RuntimeError, match="`add_member` changes a run that trains"):
        trainer.add_member("new")


def test_a_resume_with_other_seats_is_refused(random_base, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run(random_base, tmp_path, max_members=4, **options)
    with pytest.raises(ValueError, match="has 4 seats, this trainer has 3.*`max_members`"):
        run(random_base, tmp_path / "again", resume=str(tmp_path / "checkpoint-2"), **options)


def test_halving_and_changes_do_not_mix(random_base, tmp_path):
    def leave(trainer) -> None:
        with pytest.raises(ValueError, match="`remove_member` does not work with `halve_every`"):
            trainer.remove_member("student_0")

    run(random_base, tmp_path, ["a", "b"], after_1=leave, halve_every=2, max_steps=3)


def test_who_cannot_be_pooled_does_not_join(random_base, tmp_path):
    def join(trainer) -> None:
        for settings in ({}, {"like": "student_0", "learning_rate": 0.0}):
            with pytest.raises(ValueError, match="`pool_every=2`: a member that joins must learn, and begin as "):
                trainer.add_member("late", **settings)
        trainer.add_member("late", like="student_0")

    first, _ = run(random_base, tmp_path / "first", ["a"], max_steps=1)
    first.save_model()
    options = {"pool_every": 2, "max_members": 3, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    options["warm_start"] = str(tmp_path / "first")
    trainer, _ = run(random_base, tmp_path / "second", ["a", "b"], after_1=join, **options)
    assert trainer.population.names == ["student_0", "student_1", "late"]

    def go_on(trainer) -> None:
        with pytest.raises(ValueError, match="`pool_every=2`: a member that joins must learn, and begin as "):
            trainer.add_member("late")

    del options["warm_start"]  # the members began with it all the same
    checkpoint = str(tmp_path / "second" / "checkpoint-1")
    run(random_base, tmp_path / "third", ["a", "b"], resume=checkpoint, after_2=go_on, **options)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "config"),
    [
        ("change", "cpu_ddp.yaml"),
        ("halve", "cpu_ddp.yaml"),
        ("groups across ranks", "cpu_ddp.yaml"),
        ("groups across ranks", "cpu_zero2.yaml"),
    ],
)
def test_two_processes_train_as_one(random_base, tmp_path, which, config):
    if "zero" in config:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    command = [*launch(config), "-m", "tests.join_worker", random_base, which]
    run_script(command, tmp_path / "two")
    two = torch.load(tmp_path / "two" / "found.pt", weights_only=True)
    one = join_worker.train(random_base, which, str(tmp_path / "one"), **join_worker.WHOLE)
    assert two["names"] == one["names"]
    assert [each["adapter"] for each in two["left"]] == [each["adapter"] for each in one["left"]]
    assert two["sums"][0] == two["sums"][1]
    assert [two[name] for name in ("rates", "settings", "lineage")] == [
        one[name] for name in ("rates", "settings", "lineage")
    ]
    for name, factors in one["factors"].items():
        check_close(two["factors"][name], factors)
    assert two["evaluated"] == pytest.approx(one["evaluated"])
    if "again" in two:  # from the middle of a later epoch
        assert two["again"]["prompts"] == two["prompts"][3:]
        check_equal(two["again"]["factors"], two["factors"])
        assert two["again"]["rates"] == two["rates"]
        assert two["again"]["lineage"] == two["lineage"]
        assert len(two["lineage"]) == 2, "a birth on both sides of the checkpoint"


def test_the_guide_does_what_it_says(random_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs/guides/members.md").read_text()
    by_hand, halving = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)

    def sized(directory, **given):
        return PopuLoRAConfig(directory, **(SETTINGS | {"max_steps": 3, "save_rollouts": False} | given))

    names = {"PopuLoRAConfig": sized, "TrainerCallback": TrainerCallback, "model": random_base, "reward_funcs": brief}
    names |= {"dataset": QUESTIONS, "PopuLoRATrainer": partial(PopuLoRATrainer, peft_config=small_lora())}
    exec(by_hand.replace("== 100", "== 1"), names)
    assert names["trainer"].population.names == ["student_0", "student_1", "student_2", "calm"]
    exec(halving, names)
    assert names["args"].for_prompts().seats == 8


def test_reports_tell_who_joined_and_left(random_base, tmp_path):
    def change(trainer) -> None:
        trainer.remove_member("student_0")
        trainer.add_member("late", like="student_1")

    trainer, _ = run(random_base, tmp_path, after_2=change, max_steps=3, max_members=4)
    trainer.save_model()
    page = write_report(tmp_path).read_text()
    for text in ("late@0", "join", "Births, and members that joined"):
        assert text in page
    assert "student_0, left after step 2" in page.partition("<h2>Members that left</h2>")[2]
    table = page.partition("<h2>Births, and members that joined</h2>")[2].partition("</table>")[0]
    assert "late@0" in table
    assert "leave" not in table
    members, lines = read_population(tmp_path)["members"], read_lines(tmp_path / "lineage.jsonl")
    family = {each["member"]: each for each in list_family(members, lines)}
    assert family["student_0@0"]["replaced"] == 2
    assert (family["late@0"]["born"], family["late@0"]["generation"]) == (2, 1)
    assert "none: student_0@0 left" in _write_lineage(lines)
    figure = Figure()
    draw_lineage(figure, load_run(tmp_path))
    bars = [line.get_xdata().tolist() for line in figure.axes[0].lines if line.get_linewidth() == 5]
    assert [bar for bar in bars if len(bar) == 2] == [[0, 2], [2, 3], [0, 3], [0, 3]]
