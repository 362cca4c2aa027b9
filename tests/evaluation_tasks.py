"""Questions that the tiny base can answer, in files of the shape that published benchmarks have, and a population."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trl_populora.assets import tiny_base_path
from trl_populora.sandbox.values import decode
from trl_populora.tasks import CodeF, CodeO, load_seed_tasks


QUESTIONS = {"gsm8k": 12, "live_code_bench": 4, "mbpp_plus": 4}
SCALE = 0.7  # changes most of what a member says, and leaves some of it right


def write_tasks(root: Path) -> Path:
    """Three benchmarks, and the file that `--dataset_args` names: questions as they are, nothing put around them."""
    _write(root / "gsm8k", "main", "test", _gsm8k())
    _write(root / "live_code_bench", "release_v5", "test", _live_code_bench())
    _write(root / "mbpp_plus", "default", "test", _mbpp_plus())
    settings = {
        "gsm8k": {"local_path": "gsm8k", "few_shot_num": 0, "prompt_template": "{question}"},
        "live_code_bench": {
            "local_path": "live_code_bench",
            "subset_list": ["release_v5"],
            "system_prompt": None,
            "prompt_template": "{question_content}",
        },
        "mbpp_plus": {"local_path": "mbpp_plus", "prompt_template": "{question}"},
    }
    path = root / "dataset_args.json"
    path.write_text(json.dumps(settings))
    return path


def _write(folder: Path, config: str, split: str, rows: list[dict]) -> None:
    """A dataset repository with one configuration."""
    (folder / config).mkdir(parents=True)
    name = f"{config}/{split}.parquet"
    Dataset.from_list(rows).to_parquet(folder / name)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {name}\n---\n"
    )


def _gsm8k() -> list[dict]:
    tasks = [task for task in load_seed_tasks() if task.kind == "code_o" and isinstance(decode(task.outputs[0]), int)]
    return [
        {
            "question": CodeO().solving_prompt(task, "compact")[0]["content"],
            "answer": f"Worked out by hand.\n#### {decode(task.outputs[0])}",
        }
        for task in _spread(tasks, QUESTIONS["gsm8k"])
    ]


def _programs() -> list:
    """Tasks whose inputs and outputs JSON can carry."""
    # In its sandbox EvalScope puts an answer between three apostrophes, which one more at its end would break.
    tasks = [task for task in load_seed_tasks() if task.kind == "code_f" and not task.program.endswith("'")]
    tasks = [task for task in tasks if all(_is_json(decode(text)) for text in (*task.inputs, *task.outputs))]
    return _spread(tasks, QUESTIONS["mbpp_plus"])


def _spread(tasks: list, number: int) -> list:
    """Easy and hard ones."""
    return tasks[:: len(tasks) // number][:number]


def _is_json(value) -> bool:
    try:
        return json.loads(json.dumps(value)) == (list(value) if isinstance(value, tuple) else value)
    except (TypeError, ValueError):
        return False


def _live_code_bench() -> list[dict]:
    rows = []
    for task in _programs():
        tests = [
            {
                "input": "\n".join(json.dumps(argument) for argument in decode(given)),
                "output": json.dumps(decode(wanted)),
                "testtype": "functional",
            }
            for given, wanted in zip(task.inputs, task.outputs, strict=True)
        ]
        rows.append(
            {
                "question_content": CodeF().solving_prompt(task, "compact")[0]["content"],
                "starter_code": "def f(x):",
                "public_test_cases": json.dumps(tests[: task.visible]),
                "private_test_cases": json.dumps(tests[task.visible :]),
                "metadata": json.dumps({"func_name": "f"}),
                "contest_date": "2024-01-01T00:00:00",
            }
        )
    return rows


def _mbpp_plus() -> list[dict]:
    rows = []
    for number, task in enumerate(_programs()):
        pairs = [(decode(given), decode(wanted)) for given, wanted in zip(task.inputs, task.outputs, strict=True)]
        asserts = [f"assert f(*{given!r}) == {wanted!r}" for given, wanted in pairs]
        rows.append(
            {
                "task_id": number,
                "prompt": CodeF().solving_prompt(task, "compact")[0]["content"],
                "code": task.program,
                "source_file": "none",
                "test_imports": ["import math"],
                "test_list": asserts[: task.visible],
                "test": "import numpy as np\n" + "\n".join(asserts[task.visible :]) + "\nassert np.allclose(1, 1)",
            }
        )
    return rows


def save_population(root: Path, members: dict[str, int]) -> None:
    """Members with random factors, by name and seed, on the tiny base, laid out as a finished run."""
    for name, seed in members.items():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny_base_path(), dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
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
    }
    (root / "population.json").write_text(json.dumps(state))


def merge(root: Path, name: str) -> str:
    """A contender as a model of its own, without adapters; returns its directory."""
    model = AutoModelForCausalLM.from_pretrained(tiny_base_path(), dtype=torch.float32)
    adapters = {"base": None, "single": root / "single" / "members" / "student_0"}
    if adapter := adapters.get(name, root / "run" / "members" / name):
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(root / "merged" / name)
    AutoTokenizer.from_pretrained(tiny_base_path()).save_pretrained(root / "merged" / name)
    return str(root / "merged" / name)
