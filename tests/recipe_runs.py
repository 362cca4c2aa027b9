"""Recipes as smoke runs: two steps of one as it stands, small, and what they have to leave."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer, Qwen2ForCausalLM

from tests import glossary
from tests.launching import launch, run_script
from tests.models import save_base
from trl_populora.assets import tiny_base_path
from trl_populora.run.read import read_lines


ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
ALL = {str(path.relative_to(RECIPES)): path for path in sorted(RECIPES.rglob("*.yaml"))}
PROMPTS = {name: path for name, path in ALL.items() if "\ndataset_name:" in path.read_text()}  # dataset runs
CONFIGS = {name: path for name, path in ALL.items() if name not in PROMPTS}  # games

# What a smoke run changes: sizes, and what a CPU cannot do. Population, kinds, references, rank, losses, gradient
# checkpointing and the rest are the recipe's.
SMALL = {
    "max_steps": 2,
    "proposals_per_teacher": 2,
    "attempts_per_task": 2,
    "per_device_train_batch_size": 6,
    "max_completion_length": 8,
    "evolve_burn_in": 1,
    "sandbox_workers": 1,
    "use_cpu": "true",
    "bf16": "false",
    "dtype": "float32",
    "use_vllm": "false",
    "generation_kwargs": "{}",
    "save_steps": 2,
    "eval_attempts": 1,
    "shots": 0,  # their answers are longer than a smoke run's completions
    "warm_start": "",  # what a recipe starts from is made by another command
}


def save_qwen(path: Path) -> str:
    """
    Saves a random Qwen2 of two narrow layers with the tiny base's tokenizer and template; it is asked in the chat
    style.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_path())
    options = {"num_key_value_heads": 1, "max_position_embeddings": 2048}
    # Heads of 32 are the smallest that vLLM's CPU attention knows.
    return save_base(path, Qwen2ForCausalLM, tokenizer, width=64, **options)


def arguments_of(name: str, output_dir: Path, **overrides) -> list[str]:
    """Arguments of `train_populora.py` for a smoke run of a recipe."""
    settings = SMALL | {"output_dir": output_dir} | overrides
    recipe = yaml.safe_load(CONFIGS[name].read_text())
    if recipe.get("evolve_every", True):  # on by default
        settings["evolve_every"] = 1
    if recipe.get("replay"):
        settings["per_device_train_batch_size"] = 8  # of 16 rows for two pairs, archived tasks included
    overrides = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return ["--config", str(CONFIGS[name]), *overrides]


def check_run(name: str, run: Path, vllm: bool = False) -> list[dict]:
    """Both steps were taken, sampled as they are trained, what a run promises is there; returns their metrics."""
    recipe = yaml.safe_load(CONFIGS[name].read_text())
    steps = [entry for entry in read_lines(run / "metrics.jsonl") if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    assert all(glossary.explained(entry) >= set(glossary.STEP) for entry in steps)
    members = 1 if recipe.get("single_agent") else recipe["teachers"] + recipe["students"]
    assert len(list(run.glob("members/*/adapter_model.safetensors"))) == members
    evolves = bool(recipe.get("evolve_every", True)) and members > 2
    assert bool(read_lines(run / "lineage.jsonl")) == evolves
    assert (run / "run.png").exists()
    if vllm:
        # A step in which no row has an advantage computes none, and tells no difference.
        told = [entry["sampling/sampling_logp_difference/mean"] for entry in steps]
        assert max(difference for difference in told if difference is not None) < 1e-3
        told = set.intersection(*map(glossary.explained, steps))
        assert {row for row in glossary.SOME_SETTINGS if row.startswith("sampling/")} <= told
    return steps


def check_zero2(name: str, directory: Path, **overrides) -> None:
    """A smoke run through `accelerate launch` with the CPU twin of `zero2.yaml`; DeepSpeed must really be there."""
    pytest.importorskip("deepspeed", reason="needs the `deepspeed` extra")
    arguments = arguments_of(name, directory / "run", **overrides)
    arguments += ["--reward_funcs", "tests.populora_run:letters"]  # a random base is worth the same in all its rows
    script = [str(ROOT / "tests" / "recipe_worker.py"), str(directory / "result.json"), *arguments]
    vllm = "use_vllm" in overrides
    run_script([*launch("cpu_zero2.yaml"), *script], directory / "log", extras=["vllm"] if vllm else ())
    assert json.loads((directory / "result.json").read_text()) == {"world": 2, "stage": 2, "connected": False}
    check_run(name, directory / "run", vllm)
