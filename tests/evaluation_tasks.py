"""Questions that the tiny base can answer, in files of the shape that published benchmarks have, and a population."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trl_populora.assets import tiny_base_path
from trl_populora.sandbox.values import decode
from trl_populora.tasks import CodeF, CodeO, load_seed_tasks


SCALE = 0.7  # changes most of what a member says, and leaves some of it right


def write_gsm8k(root: Path, number: int) -> dict:
    """Writes questions with a number as their answer; EvalScope's settings for them."""
    tasks = [task for task in load_seed_tasks() if task.kind == "code_o" and isinstance(decode(task.outputs[0]), int)]
    rows = [
        {
            "question": CodeO().solving_prompt(task, "compact")[0]["content"],
            "answer": f"Worked out by hand.\n#### {decode(task.outputs[0])}",
        }
        for task in _spread(tasks, number)
    ]
    _write(root, "main", "test", rows)
    return {"local_path": str(root), "few_shot_num": 0, "prompt_template": "{question}"}


def write_mbpp_plus(root: Path, number: int) -> dict:
    """Writes questions with a program as their answer, which `assert`s judge; EvalScope's settings for them."""
    rows = []
    tasks = [task for task in load_seed_tasks() if task.kind == "code_f"]
    for index, task in enumerate(_spread(tasks, number)):
        pairs = [(decode(given), decode(wanted)) for given, wanted in zip(task.inputs, task.outputs, strict=True)]
        asserts = [f"assert f(*{given!r}) == {wanted!r}" for given, wanted in pairs]
        rows.append(
            {
                "task_id": index,
                "prompt": CodeF().solving_prompt(task, "compact")[0]["content"],
                "code": task.program,
                "source_file": "none",
                "test_imports": ["import math"],
                "test_list": asserts[: task.visible],
                "test": "import numpy as np\n" + "\n".join(asserts[task.visible :]) + "\nassert np.allclose(1, 1)",
            }
        )
    _write(root, "default", "test", rows)
    return {"local_path": str(root), "prompt_template": "{question}"}


def _write(folder: Path, config: str, split: str, rows: list[dict]) -> None:
    """A dataset repository with one configuration."""
    (folder / config).mkdir(parents=True)
    name = f"{config}/{split}.parquet"
    Dataset.from_list(rows).to_parquet(folder / name)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {name}\n---\n"
    )


def _spread(tasks: list, number: int) -> list:
    """Easy and hard ones."""
    return tasks[:: len(tasks) // number][:number]


def save_population(root: Path, members: dict[str, int], **settings) -> None:
    """Members with random factors, by name and seed, on the tiny base; the first has modules of other ranks."""
    for name, seed in members.items():
        torch.manual_seed(seed)
        patterns = {"rank_pattern": {"q_proj": 12}, "alpha_pattern": {"o_proj": 3}} if seed == 0 else {}
        model = AutoModelForCausalLM.from_pretrained(tiny_base_path(), dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **patterns))
        with torch.no_grad():
            for key, factor in model.named_parameters():
                if "lora_B" in key:
                    factor.normal_(std=SCALE)
        model.save_pretrained(root / "members" / name)
    state = {
        "format": 1,
        "base_model": "tiny",
        "step": 0,
        "best_student": "student_0",
        "members": [{"name": name, "role": name[:7], "adapter": f"members/{name}"} for name in members],
        "settings": settings,
    }
    (root / "population.json").write_text(json.dumps(state))
