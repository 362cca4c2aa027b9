"""Members with settings of their own: each trains as stock TRL trains one adapter with these settings."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict

import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, TrlParser

from tests.populora_run import HELD_OUT, letters
from tests.prompt_runs import QUESTIONS, SETTINGS, Judge, brief, population_trainer, stock_run, train_and_watch
from tests.small_run import small_lora, small_trainer
from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.cli import TrainArguments
from trl_populora.config import MemberConfig, list_member_loras, settle_for_prompts
from trl_populora.evaluate.cross_play import assemble
from trl_populora.generate.player import seed_samples
from trl_populora.generate.transformers import _divide_by_row
from trl_populora.hub.export import export_member
from trl_populora.lora.members import member_parameters, member_ranks, read_member, save_member
from trl_populora.report.table import list_members
from trl_populora.run.read import read_lines
from trl_populora.start import list_lora_configs


WRITERS = ["a", "b", "c", "d"]
STEPS = 4  # of each of 40 runs
CASES = {
    "rates": {"learning_rate": [1e-2, 3e-3, 2e-2, 1e-3]},
    # The ratios to the old policy differ from 1 in the second iteration only.
    "clipping": {"epsilon": [0.2, 0.003, 0.0, 0.05], "num_iterations": 2},
    "clipping with one upper bound": {"epsilon": [0.2, 0.003, 0.0, 0.05], "epsilon_high": 0.004, "num_iterations": 2},
    "clipping of cispo": {"epsilon": [0.2, 0.003, 0.0, 0.05], "num_iterations": 2, "loss_type": "cispo"},
    "temperatures": {"temperature": [1.0, 0.5, 2.0, 0.5], "num_iterations": 2},
    "temperatures and pulls": {"temperature": [1.0, 0.5, 2.0, 0.5], "beta": [0.04, 0.1, 0.3, 0.0]},
    "prompts by seed": {"seed": [5, 3, 9, 5], "member_prompts": "own"},
    "ranks, alphas and pulls": {
        "lora_r": [4, 2, 8, 1],
        "lora_alpha": [8, 2, 32, 5],
        "beta": [0.04, 0.0, 0.3, 0.04],
        "weight_decay": 0.1,
    },
}
SLOW = {"clipping with one upper bound", "clipping of cispo", "temperatures"}


def list_loras(ranks, alphas) -> list[LoraConfig]:
    return [LoraConfig(r=r, lora_alpha=a, target_modules="all-linear") for r, a in zip(ranks, alphas, strict=True)]


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_four_members_that_differ_are_four_runs_of_trl(random_base, tmp_path, case):
    options = {"loss_type": "dapo", "max_steps": STEPS} | CASES[case]
    lora = list_loras(options.pop("lora_r", [4] * 4), options.pop("lora_alpha", [8] * 4))
    trainer, judge = population_trainer(random_base, tmp_path / "ours", WRITERS, lora=lora, **options)
    names = trainer.population.names
    for name in names:
        save_member(trainer.model, name, tmp_path / name)
    gradients, factors = train_and_watch(trainer)
    options.pop("member_prompts", None)
    for place, (member, writer) in enumerate(zip(names, WRITERS, strict=True)):
        own = {name: value[place] if isinstance(value, list) else value for name, value in options.items()}
        _, stock_judge, stock_gradients, stock_factors = stock_run(
            random_base, tmp_path / member, tmp_path / writer, writer, **own
        )
        for mine, theirs in zip(judge.calls, stock_judge.calls, strict=True):
            rows = len(theirs["prompts"])
            part = slice(place * rows, (place + 1) * rows)
            assert {name: each[part] for name, each in mine.items() if name != "member"} == theirs
        assert len(gradients) == len(stock_gradients) == STEPS
        ranks = member_ranks(trainer.model, member)
        for key, expected in stock_gradients[0].items():
            found = gradients[0][member][key]
            axis = 0 if "lora_A" in key else 1
            kept, beyond = found.split([ranks[key], found.shape[axis] - ranks[key]], axis)
            assert (kept - expected).abs().max() <= 1e-5 * expected.abs().max(), f"{member} {key}"
            assert not beyond.any(), f"{member} {key}: the zeros beyond its rank have a gradient"
        for key, value in member_parameters(trainer.model, member).items():
            beyond = value[ranks[key] :] if "lora_A" in key else value[:, ranks[key] :]
            assert not beyond.any(), f"{member} {key}: it has grown beyond its rank"
        for key, expected in stock_factors.items():
            assert factors[member][key].shape == expected.shape
            assert (factors[member][key] - expected).norm() <= 1e-5 * expected.norm(), f"{member} {key}"


def test_an_evaluation_of_members_that_differ_is_trls_of_each_alone(random_base, tmp_path):
    # A batch of the evaluation has the rows of one member, and only the first member's samples are left to chance: its
    # rows are drawn first, with TRL's own call, from the generator that starts at `seed`.
    table, temperatures = QUESTIONS.select(range(3)), [1.5, 1e-5, 1e-4, 1e-5]
    own = {"lora_r": [4, 2, 8, 1], "lora_alpha": [8, 2, 32, 5], "beta": [0.0, 0.3, 0.04, 0.0]}
    options = {"per_device_eval_batch_size": 12, "generation_kwargs": {"min_new_tokens": 2}, "max_steps": 2}
    lora = list_loras(own["lora_r"], own["lora_alpha"])
    trainer, _ = population_trainer(
        random_base, tmp_path, WRITERS, lora=lora, beta=own["beta"], temperature=temperatures, **options
    )
    trainer.train()
    del trainer._generate_rows  # which records
    found = trainer.evaluate(table)
    for place, name in enumerate(trainer.population.names):
        save_member(trainer.model, name, tmp_path / name)
        alone = {"beta": own["beta"][place], "temperature": temperatures[place]}
        stock = GRPOTrainer(
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(random_base), tmp_path / name),
            [Judge(), brief],
            GRPOConfig(str(tmp_path / "stock"), **(SETTINGS | options | alone)),
            QUESTIONS,
            table,
            processing_class=AutoTokenizer.from_pretrained(random_base),
        )
        with seed_samples([trainer.args.seed]):
            assert stock.evaluate()["eval_reward"] == pytest.approx(found[f"eval_member/{name}/reward"]), name


@pytest.fixture(scope="module")
def unequal_run(random_base, tmp_path_factory):
    """A run with births: rates with noise, ranks, alphas and pulls of their own. Returns trainer and directory."""
    output_dir = tmp_path_factory.mktemp("unequal")
    trainer = start_unequal(random_base, output_dir)
    trainer.train()
    trainer.save_model()
    return trainer, output_dir


def start_unequal(base, output_dir, ranks=(4, 2, 8, 1), alphas=(8, 2, 32, 5), betas=(0.04, 0.0, 0.3, 0.04)):
    trainer, _ = population_trainer(
        base,
        output_dir,
        WRITERS,
        lora=list_loras(ranks, alphas),
        learning_rate=[1e-2, 3e-3, 2e-2, 1e-3],
        beta=list(betas),
        evolve_every=2,
        evolve_burn_in=0,
        crossover_rate=0.0,
        hyperparameter_noise=0.5,
        max_steps=7,
        save_strategy="steps",
        save_steps=3,
    )
    return trainer


def test_a_child_has_its_parents_settings_and_a_rate_beside_its_parents(unequal_run):
    trainer, output_dir = unequal_run
    settings = {f"{m.name}@0": s for m, s in zip(trainer.population, first_settings(), strict=True)}
    births = read_lines(output_dir / "lineage.jsonl")
    assert len(births) == 3
    for birth in births:
        (parent,) = (settings[each["member"]] for each in birth["parents"])
        settings[birth["child"]] = birth["settings"]
        assert {**birth["settings"], "learning_rate": 0} == {**parent, "learning_rate": 0}
        assert 0 < abs(math.log(birth["settings"]["learning_rate"] / parent["learning_rate"])) < 3
    for member in trainer.population:
        assert member.settings == settings[member.identity]
        assert set(member_ranks(trainer.model, member.name).values()) == {member.settings["lora_r"]}
        assert trainer.model.peft_config[member.name].lora_alpha == member.settings["lora_alpha"]
    assert max(m.version for m in trainer.population) > 0
    saved = json.loads((output_dir / "population.json").read_text())
    assert [each["settings"] for each in saved["members"]] == [m.settings for m in trainer.population]
    assert saved["settings"]["learning_rate"] == [1e-2, 3e-3, 2e-2, 1e-3]
    assert saved["settings"]["lora_r"] == [4, 2, 8, 1]


def first_settings() -> list[dict]:
    columns = {
        "learning_rate": [1e-2, 3e-3, 2e-2, 1e-3],
        "beta": [0.04, 0.0, 0.3, 0.04],
        "lora_r": [4, 2, 8, 1],
        "lora_alpha": [8, 2, 32, 5],
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_the_schedule_goes_on_at_a_childs_rate(unequal_run):
    trainer, _ = unequal_run
    rates = {m.name: m.settings["learning_rate"] for m in trainer.population}
    groups = trainer.optimizer.param_groups
    assert [group["initial_lr"] for group in groups] == [*rates.values()]
    assert trainer.lr_scheduler.base_lrs == [*rates.values()]
    step = trainer.state.log_history[0]
    assert [step[f"member/{name}/learning_rate"] for name in rates] == [1e-2, 3e-3, 2e-2, 1e-3]
    # The last step of seven, on a linear schedule. The last birth was after step 6.
    last = trainer.state.log_history[6]
    for name, rate in rates.items():
        assert last[f"member/{name}/learning_rate"] == pytest.approx(rate / 7)


def test_a_resumed_run_has_the_same_children_rates_and_ranks(random_base, unequal_run, tmp_path):
    trainer, output_dir = unequal_run
    shutil.copytree(output_dir / "checkpoint-3", tmp_path / "checkpoint-3")
    resumed = start_unequal(random_base, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.population.state_dict() == trainer.population.state_dict()
    for name in trainer.population.names:
        expected = read_member(trainer.model, name)
        for key, value in read_member(resumed.model, name).items():
            assert torch.equal(value, expected[key]), f"{name} {key}"
    assert resumed.lr_scheduler.base_lrs == trainer.lr_scheduler.base_lrs


def test_a_resume_with_other_values_for_members_is_refused(random_base, unequal_run, tmp_path):
    _, output_dir = unequal_run
    shutil.copytree(output_dir / "checkpoint-3", tmp_path / "checkpoint-3")
    trainer = start_unequal(random_base, tmp_path, [8] * 4, [32] * 4, [0.04, 0.0, 0.3, 0.05])
    with pytest.raises(ValueError, match=r"`beta` was \[0.04, 0.0, 0.3, 0.04\], is .*`lora_r` was \[4, 2, 8, 1\], is"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_stock_peft_computes_what_a_member_of_its_own_rank_computes(random_base, unequal_run):
    trainer, output_dir = unequal_run
    ids = torch.tensor([[5, 9, 30, 4, 17]])
    for member in trainer.population:
        base = AutoModelForCausalLM.from_pretrained(random_base)
        stock = PeftModel.from_pretrained(base, output_dir / "members" / member.name)
        config = stock.peft_config["default"]
        assert (config.r, config.lora_alpha) == (member.settings["lora_r"], member.settings["lora_alpha"])
        with torch.no_grad(), trainer.member(member.name):
            torch.testing.assert_close(trainer.model(ids).logits, stock(ids).logits, rtol=0, atol=1e-5)


def test_members_of_unequal_rank_compute_in_one_forward_what_each_computes_alone(unequal_run):
    trainer, _ = unequal_run
    ids = torch.tensor([[5, 9, 30, 4, 17]])
    for rows in ([0, 1, 2, 3], [0, 0, 1, 3, 3]):  # equally many rows per member, and not
        with torch.no_grad(), trainer.router.route_to(rows):
            together = trainer.model(ids.repeat(len(rows), 1)).logits
        for row, member in enumerate(rows):
            with torch.no_grad(), trainer.member(f"student_{member}"):
                torch.testing.assert_close(together[row], trainer.model(ids).logits[0], rtol=0, atol=1e-5)


def test_the_mean_of_members_of_unequal_rank_is_exact(random_base, unequal_run, tmp_path):
    trainer, output_dir = unequal_run
    export_member(str(output_dir), tmp_path / "mean", merge_students=True)
    mean = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(random_base), tmp_path / "mean")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    layer, ours = mean.get_submodule(name), trainer.model.get_submodule(name)
    expected = torch.stack(
        [ours.scaling[m] * ours.lora_B[m].weight @ ours.lora_A[m].weight for m in trainer.population.names]
    ).mean(0)
    torch.testing.assert_close(layer.get_delta_weight("default"), expected, rtol=0, atol=1e-6)


def test_a_population_of_unequal_ranks_starts_another(random_base, unequal_run, tmp_path):
    trainer, output_dir = unequal_run
    warm, _ = population_trainer(
        random_base, tmp_path, ["a", "b"], lora=list_loras([8, 8], [32, 16]), warm_start=str(output_dir)
    )
    ranked = sorted(trainer.population, key=lambda m: -m.mu)
    ids = torch.tensor([[5, 9, 30, 4, 17]])
    for mine, source in zip(warm.population, ranked, strict=False):
        with torch.no_grad(), warm.member(mine.name), trainer.member(source.name):
            torch.testing.assert_close(warm.model(ids).logits, trainer.model(ids).logits, rtol=0, atol=1e-5)


# What may be listed.


def settle(**options):
    return settle_for_prompts(PopuLoRAConfig("unused", use_cpu=True, bf16=False, **options))


def test_trls_fields_keep_the_first_members_value(tmp_path):
    args = settle(students=2, learning_rate=[1e-6, 3e-6], seed=[7, 8], beta=(0.0, 0.1))
    assert (args.learning_rate, args.seed, args.beta) == (1e-6, 7, 0.0)
    assert args.member_values == {"learning_rate": [1e-6, 3e-6], "seed": [7, 8], "beta": [0.0, 0.1]}
    assert args.to_dict()["learning_rate"] == [1e-6, 3e-6]


def test_equal_values_are_one_value():
    args = settle(students=3, temperature=[0.7, 0.7, 0.7])
    assert (args.temperature, args.member_values) == (0.7, {})


def parse(*given: str):
    parser = TrlParser((TrainArguments, PopuLoRAConfig, MemberConfig))
    _, args, model = parser.parse_args_and_config(["--output_dir", "unused", "--use_cpu", "--bf16", "false", *given])
    return settle_for_prompts(args), list_member_loras(model)


def test_the_command_line_takes_one_value_or_a_list():
    args, lora = parse("--students", "2", "--learning_rate", "1e-6", "3e-6", "--lora_r", "4", "8", "--epsilon", "0.1")
    assert args.member_values == {"learning_rate": [1e-6, 3e-6]}
    assert args.epsilon == 0.1
    assert [(each.r, each.lora_alpha) for each in lora] == [(4, 32), (8, 32)]
    args, _ = parse("--learning_rate", "1e-6", "3e-6", "1e-5")
    assert args.member_values == {"learning_rate": [1e-6, 3e-6, 1e-5]}
    args, lora = parse("--learning_rate", "1e-6", "--lora_alpha", "64")
    assert (args.learning_rate, args.member_values, lora.lora_alpha) == (1e-6, {}, 64)


def test_yaml_takes_numbers_without_a_point(tmp_path):
    recipe = tmp_path / "sweep.yaml"
    recipe.write_text("learning_rate: [1e-6, 3e-6]\nseed: [1, 2]\nlora_r: [4, 8]\nlora_alpha: [8, 16]\n")
    args, lora = parse("--config", str(recipe))
    assert args.member_values == {"learning_rate": [1e-6, 3e-6], "seed": [1, 2]}
    assert [(each.r, each.lora_alpha) for each in lora] == [(4, 8), (8, 16)]


@pytest.mark.parametrize(
    ("options", "members"),
    [
        ({"learning_rate": [1e-6, 3e-6, 1e-5]}, 3),
        ({"learning_rate": 1e-5, "seed": (1, 2), "beta": [0.0, 0.1]}, 2),
        ({"temperature": [0.7] * 8, "halve_every": 2, "max_steps": 9}, 8),
        ({"learning_rate": [1e-5]}, 1),
        ({"learning_rate": 1e-5}, 4),
        ({"learning_rate": [1e-6, 3e-6], "students": None}, 2),
    ],
)
def test_without_students_there_are_as_many_members_as_a_list_has_values(options, members):
    config = PopuLoRAConfig("unused", use_cpu=True, bf16=False, **options)
    assert (config.students, settle_for_prompts(config).students) == (members, members)
    stock = {name: value for name, value in options.items() if name in ("learning_rate", "seed", "beta")}
    if stock == options:
        assert settle_for_prompts(GRPOConfig("unused", use_cpu=True, bf16=False, **stock)).students == members


def test_a_list_set_on_the_finished_config_counts_too():
    config = PopuLoRAConfig("unused", use_cpu=True, bf16=False)
    config.learning_rate = [1e-6, 3e-6]
    assert settle_for_prompts(config).member_values == {"learning_rate": [1e-6, 3e-6]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": [1e-6, 3e-6, 1e-5], "beta": [0.0, 0.1]}, r"`beta=.*` lists 2 value\(s\) for 3 member\(s\)"),
        ({"learning_rate": []}, r"`learning_rate=\[\]` lists 0 value\(s\) for 4 member\(s\)"),
    ],
)
def test_lists_that_do_not_tell_how_many_members_there_are_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        settle(**options)


def test_a_list_of_adapters_tells_it_too(random_base, tmp_path):
    for config in (PopuLoRAConfig, GRPOConfig):
        args = config(str(tmp_path), **SETTINGS)
        trainer = PopuLoRATrainer(random_base, brief, args, QUESTIONS, peft_config=list_loras([4, 2], [8, 8]))
        assert [member.settings["lora_r"] for member in trainer.population] == [4, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": [1e-6, 3e-6]}, r"`learning_rate=\[1e-06, 3e-06\]` lists 2 value\(s\) for 4 member\(s\)"),
        ({"beta": [0.1, 0.1, 0.1, "much"]}, "`beta` must be a finite number, got 'much'"),
        ({"temperature": [1.0, 1.0, 0.0, 1.0]}, "`temperature` must be above 0, got 0.0"),
        ({"epsilon": [0.1, 0.1, 0.1, True]}, "`epsilon` must be a finite number, got True"),
        ({"seed": [1, 2, 3, 4.5]}, "`seed` must be a whole number, got 4.5"),
        ({"hyperparameter_noise": -1.0}, "`hyperparameter_noise` must be at least 0"),
        (
            {"learning_rate": [0.0, 1e-5, 1e-5, 1e-6], "lr_scheduler_type": "polynomial"},
            "`lr_end=1e-07` with `lr_scheduler_type='polynomial'`: .* members have 0.0, 1e-05, 1e-06.* `min_lr_rate`",
        ),
    ],
)
def test_bad_lists_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        settle(students=4, **options)


COSINE = {"lr_scheduler_type": "cosine_with_min_lr"}


def test_a_floor_of_the_schedule_is_a_share_of_the_rate_where_rates_differ():
    absolute, share = ({"lr_scheduler_kwargs": {name: 0.1}} for name in ("min_lr", "min_lr_rate"))
    settle(students=2, learning_rate=[1e-3, 1e-3], **COSINE, **absolute)
    settle(students=2, learning_rate=[0.0, 1e-3], **COSINE, **share)
    settle(students=2, learning_rate=[1e-2, 1e-3], lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 0})
    with pytest.raises(ValueError, match="`min_lr=0.1` with `lr_scheduler_type='cosine_with_min_lr'`"):
        settle(students=2, learning_rate=[1e-2, 1e-3], **COSINE, **absolute)
    game(learning_rate=0.0, teacher_learning_rate=1e-5, **COSINE, **share)
    with pytest.raises(ValueError, match="members have 0.0, 1e-05"):
        game(learning_rate=0.0, teacher_learning_rate=1e-5, **COSINE, **absolute)
    with pytest.raises(ValueError, match="and members that join may get other rates"):
        settle(students=2, max_members=3, **COSINE, **absolute)
    with pytest.raises(ValueError, match="and children may get other rates"):
        settle(students=2, evolve_every=4, hyperparameter_noise=0.2, **COSINE, **absolute)


def test_a_bad_list_is_told_without_what_the_game_says_of_it():
    with pytest.raises(ValueError, match=r"lists 3 value\(s\) for 4 member\(s\)") as told:
        PopuLoRAConfig("run", students=4, learning_rate=[1e-6, 3e-6, 1e-5])
    assert told.value.__suppress_context__


def game(**options) -> PopuLoRAConfig:
    return PopuLoRAConfig("unused", use_cpu=True, bf16=False, proposals_per_teacher=16, **options).for_game()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": [1e-6, 3e-6] * 2}, "`learning_rate=.*` lists a value for each member, which needs a"),
        ({"hyperparameter_noise": 0.1}, "`hyperparameter_noise=0.1` needs a `train_dataset`"),
    ],
)
def test_the_game_has_one_value_for_all_of_most_options(options, said):
    with pytest.raises(ValueError, match=said):
        game(**options)


def test_the_game_takes_a_list_of_temperatures_with_teachers_first():
    args = game(teachers=1, students=2, temperature=[1.0, 0.7, 1.3])
    assert (args.temperature, args.member_values) == (1.0, {"temperature": [1.0, 0.7, 1.3]})
    assert args.to_dict()["temperature"] == [1.0, 0.7, 1.3]
    assert game(teachers=2, temperature=["1", "8e-1", 0.7, 0.7, 1.3]).students == 3, "as many as the list has for them"
    assert game(teachers=0, students=2, temperature=(0.7, 1.3)).member_values == {"temperature": [0.7, 1.3]}
    assert game(temperature=[0.7] * 8).member_values == {}
    assert game(temperature=[1.0] * 5 + [1.3]).students == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"teachers": 4},
            r"`temperature=.*` lists 3 value\(s\) for 4 teacher\(s\) and 4 student\(s\). List one for each,",
        ),
        ({}, r"lists 3 value\(s\) for 4 teacher\(s\) and 4 student\(s\)"),
        ({"teachers": 3}, r"lists 3 value\(s\) for 3 teacher\(s\) and 4 student\(s\)"),
        ({"teachers": "two"}, "`teachers` must be a whole number, got 'two'"),
        ({"teachers": 1, "students": "2"}, "`students` must be a whole number, got '2'"),
        ({"single_agent": True}, "lists a value for each member, and the `single_agent` has one adapter for both"),
        ({"teachers": 1, "temperature": [1.0, 0.0]}, "`temperature` must be above 0, got 0.0"),
        ({"teachers": 1, "temperature": [1.0, "hot"]}, "`temperature` must be a finite number, got 'hot'"),
        ({"teachers": 1, "students": "2", "temperature": []}, "lists 0 value"),
        ({"students": 4, "temperature": [1.0] * 7 + [1.3], "beta": -1.0}, "`beta` must be at least 0, got -1.0"),
        ({"teachers": 1, "temperature": []}, r"lists 0 value\(s\) for 1 teacher\(s\) and 4 student\(s\)"),
    ],
)
def test_a_list_of_temperatures_that_does_not_fit_a_game_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        game(**({"temperature": [1.0, 0.7, 1.3]} | options))


@pytest.mark.parametrize(
    ("lora", "options", "said"),
    [
        ([4, 8], {}, "a list of 2 configs for 3 member"),
        ([4, 8, 8], {"evolve_every": 2}, "`crossover_rate=0.5`: members of unequal rank or alpha cannot be crossed"),
        (["q_proj", "v_proj", "v_proj"], {}, "differ in `target_modules`"),
        ([None, 4, 4], {}, "must hold `LoraConfig`s, got `NoneType`"),
    ],
)
def test_adapters_that_cannot_be_trained_together_are_refused(lora, options, said):
    made = {int: lambda r: LoraConfig(r=r), str: lambda name: LoraConfig(target_modules=[name])}
    configs = [made.get(type(each), lambda _: None)(each) for each in lora]
    with pytest.raises((ValueError, TypeError), match=said):
        list_lora_configs(configs, settle(students=3, **options), prompts=True)


def test_the_game_has_one_adapter_config():
    args = PopuLoRAConfig("unused", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="is a list of 2 configs, and members differ in rank and alpha only on"):
        list_lora_configs([small_lora()] * 2, args, prompts=False)


# Samples.


def sample(base, output_dir, **options) -> list[list[int]]:
    """Token ids of what two members write to two prompts, four times each, at temperatures of their own."""
    args = PopuLoRAConfig(str(output_dir), **(SETTINGS | {"students": 2, "save_rollouts": False} | options))
    trainer = PopuLoRATrainer(base, [brief], args, QUESTIONS, peft_config=small_lora())
    prompts = [QUESTIONS[n]["prompt"] for n in (0, 0, 0, 0, 1, 1, 1, 1)] * 2
    names = [name for name in trainer.population.names for _ in range(8)]
    trainer._forget_unfinished_step()
    found = trainer._generate_rows(prompts, names, trainer._seed_rows(names))
    return [each.completion_ids for each in found]


@pytest.mark.parametrize("way", ["in rounds", "as a whole"])
def test_each_row_is_sampled_at_its_members_temperature(random_base, tmp_path, way):
    whole = {"generation_kwargs": {"min_new_tokens": 2}} if way == "as a whole" else {}
    found = sample(random_base, tmp_path, temperature=[1e-5, 1.0], **whole)
    cold, warm = found[:8], found[8:]
    assert len({*map(tuple, cold[:4])}) == len({*map(tuple, cold[4:])}) == 1
    assert len({*map(tuple, warm)}) == 8
    greedy = sample(
        random_base, tmp_path, generation_kwargs={"do_sample": False, **whole.get("generation_kwargs", {})}
    )
    assert cold == greedy[:8]


def test_a_cuda_graphs_scores_are_divided_row_by_row():
    scores = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    (divide,) = _divide_by_row([0.5, 2.0], torch.device("cpu"))
    assert divide(None, scores).tolist() == [[2.0, 4.0], [0.5, 1.0]]
    (divide,) = _divide_by_row([0.5, 0.5], torch.device("cpu"))
    assert divide(None, scores).tolist() == [[2.0, 4.0], [2.0, 4.0]]
    assert not _divide_by_row(None, torch.device("cpu"))


def test_members_that_have_come_to_one_value_have_that_one_and_not_the_first(random_base, tmp_path):
    """As where a child inherits, or a member is replaced: TRL's own value is the first of the list."""
    lists = {"temperature": [0.5, 1.0], "epsilon": [0.1, 0.3], "beta": [0.04, 0.01]}
    trainer, _ = population_trainer(random_base, tmp_path, ["a", "b"], **lists)
    for member in trainer.population:
        member.settings |= {"temperature": 1.0, "epsilon": 0.3, "beta": 0.01}
    assert trainer._temperatures == [1.0, 1.0]
    with trainer._weigh_by_member(torch.tensor([0, 1])):
        for found, wanted in ((trainer.epsilon_low, 0.3), (trainer.epsilon_high, 0.3), (trainer.beta.values, 0.01)):
            assert found.flatten().tolist() == [pytest.approx(wanted)] * 2


def test_a_members_seed_changes_samples_and_not_the_first_adapters(random_base, tmp_path):
    one, same, other = (sample(random_base, tmp_path, seed=seeds) for seeds in ([1, 2], [1, 2], [1, 3]))
    assert one == same != other
    starts = []
    for seeds in ([1, 2], [1, 3]):
        trainer, _ = population_trainer(random_base, tmp_path, ["a", "b"], seed=seeds)
        starts += [read_member(trainer.model, name) for name in trainer.population.names]
    for start in starts[1:]:
        assert all(torch.equal(start[key], value) for key, value in starts[0].items())


class TestGame:
    """2T+2S: one student always gives the likeliest answer, the other hardly ever. Children inherit temperatures."""

    TEMPERATURES = (0.9, 1.1, 1e-5, 1.2)

    @pytest.fixture(scope="class")
    def run(self, random_base, tmp_path_factory):
        output_dir = tmp_path_factory.mktemp("game")
        trainer = small_trainer(
            random_base,
            HELD_OUT,
            letters,
            output_dir=str(output_dir),
            task_kinds=["tests.populora_run:Letters"],
            attempts_per_task=4,
            per_device_train_batch_size=8,
            max_completion_length=8,
            sandbox_allow_weak=True,
            temperature=list(self.TEMPERATURES),
            evolve_every=3,
            evolve_burn_in=0,
            max_steps=4,
            seed=2,
        )
        trainer.train()
        trainer.save_model()
        return trainer, output_dir

    def test_each_student_samples_at_its_temperature(self, run):
        rows = [
            row for path in sorted(run[1].glob("rollouts/*.parquet"))[:3] for row in pq.read_table(path).to_pylist()
        ]
        answers = defaultdict(set)
        for row in rows:
            if row["role"] == "student":
                answers[row["member"], row["step"], row["prompt"]].add(row["completion"])
        assert {len(each) for (member, *_), each in answers.items() if member == "student_0"} == {1}
        assert min(len(each) for (member, *_), each in answers.items() if member == "student_1") > 1

    def test_an_untrained_student_at_another_temperature_does_not_share_the_attempts_of_the_base(
        self, random_base, tmp_path
    ):
        trainer = small_trainer(
            random_base,
            HELD_OUT[:5],
            letters,
            HELD_OUT[5:],
            output_dir=str(tmp_path),
            task_kinds=["tests.populora_run:Letters", "code_o"],
            sandbox_allow_weak=True,
            temperature=[1.0, 1.0, 1e-5, 1.0],
        )
        generate, asked = trainer.game.player.generate, set()

        def note(prompts, names, *args, **kwargs):
            asked.update(names)
            return generate(prompts, names, *args, **kwargs)

        trainer.game.player.generate = note
        trainer.evaluate()
        trainer.close()
        assert asked == {"base", "student_0"}, "student_1 shares them"

    def test_a_child_has_the_temperature_of_its_parent(self, run):
        trainer, output_dir = run
        began = dict(zip(trainer.population.names, self.TEMPERATURES, strict=True))
        events = read_lines(output_dir / "lineage.jsonl")
        born = {each["child"].split("@")[0]: each for each in events if each["child"]}
        assert {name[:7] for name in born} == {"teacher", "student"}
        for name, event in born.items():
            parent = event["parents"][0]["member"].split("@")[0]
            assert event["settings"] == {"temperature": began[parent]} == trainer.population[name].settings

    def test_records_have_each_members_temperature(self, run):
        trainer, output_dir = run
        saved = json.loads((output_dir / "population.json").read_text())
        assert saved["settings"]["temperature"] == list(self.TEMPERATURES)
        assert {each["name"]: each["settings"] for each in saved["members"]} == {
            member.name: member.settings for member in trainer.population
        }
        assert "temperature" in list_members(saved).header
        assert "temperature" not in list_members({**saved, "members": saved["members"][:1]}).header

    def test_in_cross_play_all_sample_at_the_first_members(self, run):
        with assemble([str(run[1])], task_kinds=["code_o"]) as contest:
            assert contest.args.temperature == 0.9
