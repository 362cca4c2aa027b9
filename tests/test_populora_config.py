"""The config's arithmetic and its refusals, each with a way out that works."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
import torch
from trl import GRPOConfig, TrlParser

from trl_populora.config import MEMBER_OPTIONS, PopuLoRAConfig, settle_for_prompts
from trl_populora.tasks import CodeO


def test_batch_follows_from_the_population(make_args):
    args = make_args(
        teachers=2, students=2, proposals_per_teacher=8, attempts_per_task=4, per_device_train_batch_size=16
    )
    assert args.rows_per_step == 2 * 8 * (1 + 4) == args.generation_batch_size
    assert args.num_generations == 4
    assert args.steps_per_generation == args.gradient_accumulation_steps == 5


@pytest.mark.parametrize(
    ("given", "attempts"),
    [
        ({}, 8),
        ({"num_generations": 2}, 2),
        ({"attempts_per_task": 2}, 2),
        ({"attempts_per_task": 2, "num_generations": 2}, 2),
    ],
)
def test_trls_name_for_the_attempts_at_a_task_sets_them(tmp_path, given, attempts):
    args = PopuLoRAConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    assert (args.attempts_per_task, args.num_generations) == (attempts, attempts)


def test_two_different_numbers_of_attempts_are_refused_also_if_one_is_trls_default(make_args):
    with pytest.raises(ValueError, match="`num_generations=8` and `attempts_per_task=2` are the same thing here"):
        make_args(num_generations=8, attempts_per_task=2)


def test_defaults_make_a_legal_step(tmp_path):
    args = PopuLoRAConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert args.rows_per_step % args.per_device_train_batch_size == 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")
def test_bf16_is_off_where_nothing_can_do_it_unless_asked_for(tmp_path):
    assert PopuLoRAConfig(str(tmp_path)).bf16 is False
    with pytest.raises(ValueError, match="bf16"):
        PopuLoRAConfig(str(tmp_path), bf16=True)


def test_a_rank_count_that_does_not_divide_is_refused(make_args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"multiple of the 3 processes.*`proposals_per_teacher=6` with"):
        make_args(proposals_per_teacher=4)


def test_a_batch_larger_than_a_rank_has_rows_is_refused(make_args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"24 rows.*`per_device_train_batch_size=12` works"):
        make_args(per_device_train_batch_size=24)


@pytest.mark.parametrize("processes", ["1", "3"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"per_device_train_batch_size": 7},
        {"proposals_per_teacher": 5},
        {"proposals_per_teacher": 7, "per_device_train_batch_size": 11, "attempts_per_task": 5},
        {"per_device_train_batch_size": 1000},
    ],
)
def test_the_first_refusal_of_a_bad_batch_names_all_sizes_that_work(make_args, overrides, processes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    sizes = {"teachers": 3, "attempts_per_task": 4, "proposals_per_teacher": 4, **overrides}
    with pytest.raises(ValueError, match="works") as refusal:
        make_args(**sizes)
    found = re.findall(r"`(\w+)=(\d+)`(?= with| works)", str(refusal.value))
    monkeypatch.delenv("WORLD_SIZE")  # a whole config of three processes would wait for the other two
    assert make_args(**(sizes | {name: int(value) for name, value in found})).micro_batches(int(processes)) > 0


def test_what_a_refusal_suggests_passes_every_check_without_a_warning_of_lone_proposals(make_args, monkeypatch):
    """Random sizes, all of whose refusals are taken at their word."""
    rng = random.Random(0)
    suggested = 0
    for _ in range(200):
        sizes = {
            "teachers": rng.randint(1, 5),
            "proposals_per_teacher": rng.randint(2, 20),
            "attempts_per_task": rng.randint(2, 9),
            "per_device_train_batch_size": rng.choice([1, 7, 8, 16, 64, 1000]),
            "task_kinds": ["code_o", "code_i", "code_f"][: rng.randint(1, 3)],
            "teacher_baseline": rng.choice(["member", "group"]),
            "replay": rng.choice([0.0, 0.0, 0.1, 0.25, 0.6]),
        }
        processes = rng.randint(1, 6)
        proposals, attempts = sizes["proposals_per_teacher"], sizes["attempts_per_task"]
        replays = max(round(proposals * sizes["replay"] / (1 - sizes["replay"])), sizes["replay"] > 0)
        rows = sizes["teachers"] * (proposals + (proposals + replays) * attempts)
        divisors = [(proposals, processes), (sizes["teachers"] * proposals, attempts), (replays, processes)]
        if not any(n % by for n, by in [*divisors, (rows, sizes["per_device_train_batch_size"] * processes)]):
            continue  # it fits, and would wait for the other processes
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        with pytest.raises(ValueError, match="works") as refusal:
            make_args(**sizes)
        monkeypatch.delenv("WORLD_SIZE")
        suggestions = re.findall(r"`(\w+)=([\d.]+)`(?= with| works)", str(refusal.value))
        found = {name: float(value) if name == "replay" else int(value) for name, value in suggestions}
        suggested += 1
        args = make_args(**(sizes | found))
        assert args.micro_batches(processes) > 0
        if "proposals_per_teacher" in found and args.teacher_baseline == "member":
            assert args.proposals_per_teacher >= 2 * len(args.task_kinds), (sizes, found)
    assert suggested > 50


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"proposals_per_teacher": 1}, "`proposals_per_teacher` must be at least 2, got 1"),
        ({"teachers": -1}, "`teachers` must be at least 0, got -1"),
        ({"attempts_per_task": 1}, "`attempts_per_task` must be at least 2"),
        ({"matchmaking": "elo"}, "`matchmaking` must be one of pfsp, uniform, or `module:function` .*, got 'elo'"),
        ({"loss_type": "bnpo"}, "`loss_type` must be one of grpo, dr_grpo, dapo, cispo, got 'bnpo'"),
        ({"prompt_style": "haiku"}, "`prompt_style`"),
        ({"task_kinds": []}, "`task_kinds` is empty"),
        ({"cull_fraction": 1.0}, "`cull_fraction` must be below 1, got 1.0"),
        ({"top_entropy_quantile": 0.5}, "`top_entropy_quantile=0.5` is not supported in a population.*all members"),
        ({"use_transformers_continuous_batching": True}, "`use_transformers_continuous_batching=True` is not supp"),
        (
            {"use_transformers_paged": True},
            "`use_transformers_paged=True` is not supported in a population: it reorders rows",
        ),
        ({"optim_target_modules": "all-linear"}, "`optim_target_modules='all-linear'` is not supported"),
        ({"optim": "schedule_free_adamw"}, "`optim='schedule_free_adamw'` is not supported in a population"),
        ({"max_steps": -1}, "`max_steps` must be positive"),
        ({"eval_attempts": 0}, "`eval_attempts` must be at least 1, got 0"),
        ({"generation_batch_size": 12}, "`generation_batch_size=12`"),
        ({"num_generations": 4}, "Set only `attempts_per_task`"),
        ({"gradient_accumulation_steps": 2}, "must be 3 here"),
        ({"router_aux_loss_coef": 0.01}, "`router_aux_loss_coef=0.01` is not supported in a population.*all members"),
        ({"num_iterations": 4, "evolve_every": 10}, "`evolve_every=10` must be a multiple of `num_iterations=4`"),
        ({"sandbox_workers": 0}, "`sandbox_workers` must be at least 1"),
        ({"sandbox_seconds": -1.0}, "`sandbox_seconds` must be positive"),
        ({"sandbox_memory_mb": 63}, "`sandbox_memory_mb` must be at least 64, got 63"),
        ({"sandbox_seconds": 3601.0}, "`sandbox_seconds` must be positive and at most 3600, got 3601.0"),
        ({"pfsp_kappa": -1.0}, "`pfsp_kappa` must be at least 0"),
        ({"replay": 1.5}, "`replay` must be below 1, got 1.5"),
        ({"replay": -0.5}, "`replay` must be at least 0, got -0.5"),
        ({"teacher_reward": "rarities"}, "`teacher_reward` must be one of guarded, .*`module:function`.*, got 'rari"),
        ({"student_reward": "paper"}, "`student_reward` must be one of azr, or `module:function`"),
        ({"teacher_reward": len}, "`teacher_reward` must be one of guarded"),
        (
            {"teacher_reward": "my:pay", "teacher_reward_unsolved": 0.1},
            "it does not read `teacher_reward_unsolved=0.1`",
        ),
        (
            {"student_reward": "my:pay", "student_reward_wrong": 0.1},
            "it does not read `student_reward_wrong=0.1`",
        ),
        ({"teacher_beta": 0.1, "beta": 0.04}, "`teacher_beta=0.1` is for teachers alone: leave `beta` at 0"),
        ({"teacher_beta": -0.1}, "`teacher_beta` must be at least 0, got -0.1"),
        ({"beta": -0.1}, "`beta` must be at least 0, got -0.1"),
        ({"learning_rate": -1e-5}, "`learning_rate` must be at least 0, got -1e-05"),
        ({"adam_beta2": 1.0}, "`adam_beta2` must be below 1, got 1.0"),
        ({"max_completion_length": 0}, "`max_completion_length` must be at least 1, got 0"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` must be at least 1, got 0"),
        ({"temperature": 0.0}, "`temperature` must be above 0, got 0.0"),
        ({"temperature": -1.0}, "`temperature` must be above 0, got -1.0"),
        ({"top_p": 0.0}, "`top_p` must be above 0, got 0.0"),
        ({"top_p": 1.5}, "`top_p` must be at most 1, got 1.5"),
        ({"top_k": -1}, "`top_k` must be at least 0, got -1"),
        ({"min_p": 2.0}, "`min_p` must be at most 1, got 2.0"),
        ({"students": "2"}, "`students` must be a whole number, got '2'"),
        ({"archive_size": None}, "`archive_size` must be a whole number, got None"),
        ({"learning_rate": "1e-5"}, "`learning_rate` must be a finite number, got '1e-5'"),
        (
            {"learning_rate": [1e-5]},
            r"`learning_rate=\[1e-05\]` lists a value for each member, which needs a `train_dat",
        ),
        ({"reward_weights": [1.0, math.inf]}, r"`reward_weights` must be a list of finite numbers, got \[1.0, inf\]"),
    ],
)
def test_refusal(make_args, overrides, message):
    with pytest.raises(ValueError, match=message):
        make_args(**overrides)


NUMBERS = {
    kind: [
        each.name
        for each in fields(PopuLoRAConfig)
        if {kind, kind | None} & {get_type_hints(PopuLoRAConfig)[each.name]}
    ]
    for kind in (int, float)
}


def test_numbers_of_numpy_become_pythons(make_args):
    """Records in JSON refuse numbers of NumPy, and would do so at the first step only."""
    args = make_args(students=np.int64(2), learning_rate=np.float32(0.5))
    assert (type(args.students), type(args.learning_rate)) == (int, float)
    args = PopuLoRAConfig("unused", use_cpu=True, bf16=False, learning_rate=np.float32([0.5, 0.25])).for_prompts()
    assert (args.students, args.member_values) == (2, {"learning_rate": [0.5, 0.25]})
    args.seed = np.int64(3)
    args.vllm_engine_kwargs = {"max_num_seqs": np.int64(8)}
    json.dumps([args.students, args.learning_rate, args.member_values, args.seed, args.vllm_engine_kwargs])
    theirs = settle_for_prompts(GRPOConfig("unused", use_cpu=True, bf16=False, learning_rate=np.float32(0.5)))
    assert type(theirs.learning_rate) is float


def test_a_config_that_makes_no_game_has_what_a_command_reads(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    rates = {"learning_rate": [1e-5, 1e-4], "use_cpu": True, "bf16": False}
    args = PopuLoRAConfig("~/runs/sweep", model_init_kwargs='{"dtype": "bfloat16"}', **rates)
    assert (args.output_dir, args.model_init_kwargs) == (str(tmp_path / "runs/sweep"), {"dtype": "bfloat16"})
    assert PopuLoRAConfig(**rates).output_dir == PopuLoRAConfig(use_cpu=True, bf16=False).output_dir
    args.output_dir = "elsewhere"
    assert args.for_prompts().output_dir == "elsewhere"


def test_what_is_set_after_the_config_is_made_counts_in_a_game(make_args):
    args = make_args(teachers=2, students=2, proposals_per_teacher=4, attempts_per_task=2, eval_attempts=4)
    assert args.for_game() is args
    args.proposals_per_teacher, args.eval_attempts, args.per_device_train_batch_size = 8, 16, 12
    settled = args.for_game()
    assert (settled.generation_batch_size, settled.num_generations_eval) == (2 * 8 * (1 + 2), 16)
    assert settled.gradient_accumulation_steps == 4
    no_game = PopuLoRAConfig("unused", per_device_train_batch_size=64, use_cpu=True, bf16=False)
    no_game.per_device_train_batch_size = 48
    assert no_game.for_game().per_device_train_batch_size == 48
    args.per_device_train_batch_size = 7
    with pytest.raises(ValueError, match="which `per_device_train_batch_size=7` times 1 process"):
        args.for_game()


@pytest.mark.parametrize("name", NUMBERS[int])
def test_a_count_is_a_whole_number(make_args, name):
    for value in (2.5, 2.0, "2", True, math.nan):
        with pytest.raises(ValueError, match=f"`{name}` must be a whole number, got {value!r}"):
            make_args(**{name: value})


@pytest.mark.parametrize("name", NUMBERS[float])
def test_a_number_is_finite(make_args, name):
    for value in (math.nan, math.inf, -math.inf, "0.5", True):
        with pytest.raises(ValueError, match=f"`{name}` must be a finite number, got {value!r}"):
            make_args(**{name: value})


@pytest.mark.parametrize("name", sorted({*NUMBERS[int], *NUMBERS[float]} - {*MEMBER_OPTIONS}))
def test_a_list_is_no_number(make_args, name):
    with pytest.raises(ValueError, match=rf"`{name}` must be a (whole|finite) number, got \[1\]"):
        make_args(**{name: [1]})


def test_numbers_of_a_command_line_and_of_a_file_are_taken(tmp_path):
    """YAML reads `1e-5` as a text, which the parser makes a number of."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 1e-5\nstudents: '2'\nmax_grad_norm: null\nbeta: 0\nteacher_beta: 1\n")
    given = ["--config", str(recipe), "--output_dir", str(tmp_path), "--teachers", "2", "--temperature", "1"]
    (args,) = TrlParser(PopuLoRAConfig).parse_args_and_config([*given, "--shots", "3", "--save_steps", "0.5"])
    assert (args.learning_rate, args.students, args.max_grad_norm, args.teacher_beta) == (1e-5, 2, 0.0, 1)
    assert (args.teachers, args.temperature, args.shots, args.save_steps) == (2, 1.0, 3, 0.5)


def test_numbers_of_numpy_are_numbers(make_args):
    args = make_args(students=np.int64(2), learning_rate=np.float32(0.5))
    assert (args.students, args.learning_rate) == (2, 0.5)


@pytest.mark.parametrize("kinds", ["code_o", [CodeO()], [None]])
def test_task_kinds_are_a_list_of_names(kinds, tmp_path):
    with pytest.raises(TypeError, match=r"`task_kinds` must be a list of names, got .*package.module:Class"):
        PopuLoRAConfig(output_dir=str(tmp_path), task_kinds=kinds)


def test_a_single_agent_has_no_teachers_rate(make_args):
    with pytest.raises(ValueError, match="`teacher_learning_rate` is set, and so is `single_agent`"):
        make_args(single_agent=True, per_device_train_batch_size=6, teacher_learning_rate=1e-3)


@pytest.mark.parametrize("name", ["dispatch_batches", "split_batches"])
@pytest.mark.parametrize("sort", ["for_game", "for_prompts"])
def test_rows_that_accelerate_would_deal_anew_are_refused(tmp_path, name, sort):
    with pytest.raises(ValueError, match=f"`accelerator_config` has `{name}`: .*Leave it out"):
        getattr(PopuLoRAConfig(str(tmp_path), use_cpu=True, bf16=False, accelerator_config={name: True}), sort)()
