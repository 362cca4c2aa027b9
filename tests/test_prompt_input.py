"""What a dataset run refuses, and that evaluations change nothing that trains."""

from __future__ import annotations

import functools
from dataclasses import fields

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.populora_run import ON_PROMPTS, assert_equal, make_trainer, state_of
from tests.prompt_runs import QUESTIONS, brief
from tests.small_run import QUIET, small_lora
from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.config import settle_for_prompts


OPTIONS = {name: value for name, value in ON_PROMPTS.items() if name != "on_prompts"}


def build(output_dir, table=QUESTIONS, functions=brief, held_out=None, model="nowhere", arguments=(), **options):
    """The model does not exist: whatever is refused is refused before a model is looked for."""
    args = PopuLoRAConfig(str(output_dir), **(OPTIONS | options))
    return PopuLoRATrainer(model, functions, args, table, held_out, peft_config=small_lora(), **dict(arguments))


def needs_level(level, **columns):
    return [float(each) for each in level]


def needs_levels(levels, **columns):
    return [float(each) for each in levels]


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"table": QUESTIONS.rename_column("prompt", "text")}, ValueError, "columns text, answer, level.*`program`"),
        ({"table": QUESTIONS.add_column("program", [""] * 7)}, ValueError, "`prompt` and `program`: give one"),
        ({"table": QUESTIONS.to_iterable_dataset()}, TypeError, "`IterableDataset`.*without `streaming=True`"),
        ({"table": DatasetDict(train=QUESTIONS)}, ValueError, r"splits train. Give one of them: `dataset\['train'\]`"),
        ({"table": QUESTIONS.select([])}, ValueError, "`train_dataset` is empty"),
        ({"table": QUESTIONS.select([0])}, ValueError, "has 1 prompts, and one generation takes 2 for each member"),
        ({"table": QUESTIONS.add_column("member", [0] * 7)}, ValueError, "column `member`.*Rename it"),
        ({"table": QUESTIONS.add_column("image", [""] * 7)}, ValueError, "column `image`.*Remove it"),
        ({"table": QUESTIONS.remove_columns("level"), "functions": needs_level}, TypeError, "asks for `level`"),
        ({"held_out": QUESTIONS.remove_columns("level"), "functions": needs_level}, TypeError, "`eval_dataset`: The"),
        ({"held_out": {"a": QUESTIONS, "b": [1]}}, TypeError, r"`eval_dataset\['b'\]` must be a `datasets.Dataset`"),
        ({"functions": None}, ValueError, "needs `reward_funcs`"),
        ({"functions": []}, ValueError, "needs `reward_funcs`"),
        ({"functions": [5]}, TypeError, "`reward_funcs` holds 5"),
        ({"num_generations": 3}, ValueError, "`num_generations=3` does not divide"),
        ({"teachers": 2}, ValueError, "nobody knows the answer of a variation"),
        ({"shots": 2}, ValueError, "`shots=2`: only the game has this"),
        ({"loss_type": "bnpo"}, ValueError, "bnpo"),
        ({"arguments": {"tools": [print]}}, ValueError, "`tools` is not supported: members answer in one turn"),
        ({"arguments": {"environment_factory": print}}, ValueError, "`environment_factory` is not supported"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_loaded(tmp_path, given, error, told):
    with pytest.raises(error, match=told) as found:
        build(tmp_path, **given)
    assert "\n" not in str(found.value)


def test_a_column_with_another_spelling_is_named_and_nothing_else_is_shown(tmp_path):
    with pytest.raises(TypeError, match="asks for `levels`, which nothing gives. Did you mean `level`?") as found:
        build(tmp_path, functions=needs_levels)
    assert found.value.__suppress_context__
    assert found.value.__cause__ is None


def test_a_directory_that_holds_a_run_is_told_before_a_model_is_looked_for(tmp_path, caplog):
    (tmp_path / "lineage.jsonl").touch()
    with pytest.raises(OSError, match="cached files|nowhere"):
        build(tmp_path)
    assert f"`output_dir={str(tmp_path)!r}` holds a run" in caplog.text
    caplog.clear()
    with pytest.raises(OSError, match="cached files|nowhere"):
        build(tmp_path, resume_from_checkpoint=True)
    assert "holds a run" not in caplog.text


def test_programs_need_the_populations_config(tmp_path):
    table = Dataset.from_dict({"kind": ["code_o"], "program": [""], "inputs": [[""]], "outputs": [[""]]})
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="`args` must be a `PopuLoRAConfig`.*got `GRPOConfig`"):
        PopuLoRATrainer("nowhere", brief, args, table)


def test_rewards_that_are_all_none_end_the_first_step(random_base, tmp_path):
    def silent(completions, **columns):
        return [None] * len(completions)

    trainer = build(tmp_path, functions=silent, model=random_base, max_steps=2)
    with pytest.raises(ValueError, match="judged none of the 16 completions"):
        trainer.train()


def test_rewards_that_are_all_none_do_not_end_a_resumed_run(random_base, tmp_path):
    """As they do not end a run that is not interrupted, once a function has judged."""

    def falls_silent(completions, trainer_state, **columns):
        return [None if trainer_state.global_step > 1 else float(place % 2) for place in range(len(completions))]

    options = {"functions": falls_silent, "model": random_base, "save_strategy": "steps", "save_steps": 2}
    build(tmp_path, max_steps=2, **options).train()
    resumed = build(tmp_path, max_steps=3, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_async_and_partial_functions_reward(random_base, tmp_path):
    async def later(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    def scaled(completion_ids, factor, **columns):
        return [None if place % 2 else factor * len(ids) for place, ids in enumerate(completion_ids)]

    functions = [later, functools.partial(scaled, factor=2.0)]
    trainer = build(tmp_path, functions=functions, model=random_base, max_steps=1, reward_weights=[1.0, 0.5])
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/scaled/mean"] > log["rewards/later/mean"] > 0


def test_a_reward_model_rewards_as_in_trl(random_base, tmp_path):
    judge, seen = str(tmp_path / "judge"), []
    AutoModelForSequenceClassification.from_pretrained(random_base, num_labels=1).save_pretrained(judge)
    AutoTokenizer.from_pretrained(random_base).save_pretrained(judge)

    def watch(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completions, completion_ids))
        return [None] * len(completions)

    args = GRPOConfig(str(tmp_path / "run"), **(QUIET | {"max_steps": 1, "max_completion_length": 8}))
    trainer = PopuLoRATrainer(random_base, [judge, watch], args, QUESTIONS, peft_config=small_lora())
    trainer.train()
    stock = GRPOTrainer(random_base, [judge, watch], args, QUESTIONS)
    wanted = stock._calculate_rewards([{"prompt": prompt} for prompt in seen[0][0]], *seen[0])
    assert torch.equal(trainer.played.rewards[:, 0], wanted[:, 0])
    assert "eval_rewards/judge/mean" in trainer.evaluate(QUESTIONS.select(range(2)))


def test_a_config_of_trl_keeps_its_values(tmp_path):
    given = GRPOConfig(
        str(tmp_path),
        **{"use_cpu": True, "bf16": False, "learning_rate": 3e-5, "lr_scheduler_type": "cosine", "warmup_steps": 0.1},
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
        **{"num_generations": 4, "num_iterations": 2, "beta": 0.01, "epsilon_high": 0.28, "temperature": 0.7},
        **{"scale_rewards": False, "loss_type": "dr_grpo", "max_completion_length": 77, "optim": "adafactor"},
        **{"eval_strategy": "steps", "eval_steps": 7, "num_generations_eval": 2, "per_device_eval_batch_size": 4},
        **{"generation_kwargs": {"top_k": 3}, "seed": 3, "num_train_epochs": 2.5, "reward_weights": [0.5]},
        **{"save_steps": 0.25, "run_name": "mine", "shuffle_dataset": False, "max_grad_norm": 0.3, "top_k": 5},
    )
    settled = settle_for_prompts(given)
    times_members = ("gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
    assert [getattr(settled, name) for name in times_members] == [4 * getattr(given, name) for name in times_members]
    ours = {*times_members, "ddp_find_unused_parameters", "router_aux_loss_coef"}
    names = [each.name for each in fields(GRPOConfig) if each.name not in ours]
    assert [name for name in names if getattr(settled, name) != getattr(given, name)] == []


def test_an_evaluation_does_not_change_training(base, tmp_path):
    settings = ON_PROMPTS | {"max_steps": 5, "save_strategy": "no"}
    evaluated = {"evaluated": True, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    states = []
    for name, further in (("plain", {}), ("evaluated", evaluated)):
        trainer = make_trainer(base, str(tmp_path / name), settings | further)
        trainer.train()
        states.append({key: state_of(trainer)[key] for key in ("members", "lineage", "optimizer")})
    assert_equal(*states)
    first = trainer.evaluate(QUESTIONS.select(range(2)))
    means = [first[f"eval_member/student_{n}/reward"] for n in range(4)]
    assert first["eval_reward"] == pytest.approx(sum(means) / 4)
    assert (first["eval_reward_best"], first["eval_reward_worst"]) == (max(means), min(means))
    several = trainer.evaluate({"a": QUESTIONS.select(range(2)), "b": QUESTIONS})
    assert {"eval_a_runtime", "eval_b_runtime"} <= several.keys()
    with pytest.raises(ValueError, match="column `member`"):
        trainer.evaluate(QUESTIONS.add_column("member", [0] * 7))


def test_a_resume_on_other_prompts_is_refused(base, tmp_path):
    make_trainer(base, str(tmp_path), ON_PROMPTS | {"max_steps": 1, "save_steps": 1}).train()
    trainer = build(tmp_path, QUESTIONS.select(range(6)), model=base, max_steps=2)
    with pytest.raises(ValueError, match=r"trained on 7 prompts .*`train_dataset` has 6 prompts"):
        trainer.train(resume_from_checkpoint=True)
    trainer = build(tmp_path, model=base, max_steps=2, num_generations=4)
    with pytest.raises(ValueError, match="`attempts_per_task` was 2, is 4"):
        trainer.train(resume_from_checkpoint=True)
