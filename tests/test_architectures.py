"""Two steps on a random tiny base of each architecture: `docs/architectures.md` says what came of it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from tests.models import CHATML, make_tokenizer, save_base
from tests.populora_run import SETTINGS, letters
from trl_populora.config import PopuLoRAConfig
from trl_populora.lora.members import adds_nothing
from trl_populora.step.microbatch import why_not_shared
from trl_populora.trainer import PopuLoRATrainer


ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architectures.md"
# As these models' own: Qwen3 leaves an empty thought where it is not to think; Gemma knows no system turn.
QWEN3 = CHATML.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROWS = [  # label, architecture, options of its config, chat template, `target_modules`
    ("Llama", LlamaForCausalLM, {}, CHATML, "all-linear"),
    ("Qwen2 and 2.5", Qwen2ForCausalLM, {}, CHATML, "all-linear"),
    ("Qwen3, told not to think", Qwen3ForCausalLM, {"head_dim": 16}, QWEN3, "all-linear"),
    ("Gemma 2", Gemma2ForCausalLM, {"head_dim": 16, "sliding_window": 64}, GEMMA, "all-linear"),
    ("Gemma 3, text", Gemma3ForCausalLM, {"head_dim": 16, "sliding_window": 64}, GEMMA, "all-linear"),
    ("Mistral, with a window", MistralForCausalLM, {"head_dim": 16, "sliding_window": 64}, CHATML, "all-linear"),
    ("Phi-3", Phi3ForCausalLM, {}, CHATML, "all-linear"),
    ("Qwen3-MoE", Qwen3MoeForCausalLM, {"head_dim": 16} | EXPERTS, CHATML, "all-linear"),
    ("Qwen3-MoE, attention alone", Qwen3MoeForCausalLM, {"head_dim": 16} | EXPERTS, CHATML, ATTENTION),
    ("GPT-2", GPT2LMHeadModel, {}, CHATML, "all-linear"),
]


def row_of(label: str, architecture: type, targets: str | list[str], came: str, shared: str) -> str:
    named = targets if isinstance(targets, str) else ", ".join(targets)
    return f"| {label} | `{architecture.__name__}` | {named} | {came} | {shared} |"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_page_says_what_came_of_two_steps(row, seed_tasks, tmp_path):
    label, architecture, options, template, targets = row
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    sizes = {"max_position_embeddings": 1024, "tie_word_embeddings": True}
    base = save_base(tmp_path / "base", architecture, tokenizer, 32, **(sizes | options))
    args = PopuLoRAConfig(
        str(tmp_path / "run"),
        **SETTINGS | {"evolve_every": 0, "save_strategy": "no"},
        chat_template_kwargs={"enable_thinking": False} if template is QWEN3 else None,
    )
    tasks = Dataset.from_list([task.to_record() for task in seed_tasks])
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    try:
        trainer = PopuLoRATrainer(base, letters, args, tasks, peft_config=lora)
    except ValueError as error:
        came, shared = f"refused: {str(error).partition('. ')[0]}", ""
    else:
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 2
        assert all(map(math.isfinite, losses))
        assert not [name for name in trainer.population.adapters if adds_nothing(trainer.model, name)]
        came, shared = (
            "works",
            f"no: {reason}" if (reason := why_not_shared(trainer.model.get_base_model())) else "yes",
        )
    assert row_of(label, architecture, targets, came, shared) in PAGE.read_text().splitlines()


def test_the_page_has_no_other_rows():
    listed = re.findall(r"^\| ([^|]+) \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == [(label, architecture.__name__) for label, architecture, *_ in ROWS]
