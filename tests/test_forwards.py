"""Layouts of a micro-batch: the same log-probabilities and gradients, with each prompt computed once."""

from __future__ import annotations

import random

import pytest
import torch
from peft import LoraConfig
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from trl.trainer import utils

from tests.models import random_model
from trl_populora.lora.layers import Route, Router, add_members
from trl_populora.step.microbatch import Layout, Sharing, lay_out, why_not_shared


VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
PROMPTS = [3, 3, 3, 5, 5, 8, 8]  # the last row is blank
MEMBERS = [0, 0, 0, 0, 0, 1, 1]
PROMPT_LENGTHS = [5, 5, 5, 9, 9, 3, 0]
COMPLETION_LENGTHS = [3, 12, 5, 7, 1, 4, 0]
LENGTH = 12


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of the rows above, `[7, 9 + 12]`."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(VOCABULARY, (9, 9), generator=generator)
    ids = torch.randint(VOCABULARY, (7, 9 + LENGTH), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (prompt, before, after) in enumerate(zip(PROMPTS, PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)):
        mask[row, 9 - before : 9 + after] = 1
        ids[row, 9 - before : 9] = texts[prompt, :before]
    return ids, mask


def compute(model, ids, mask, keep):
    """What TRL's method does with a model that has its fused head."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-keep] = -100
    found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return found.log_probs[:, -keep:], found.entropy[:, -keep:], None


def base_of(architecture: type[PreTrainedModel], attention: str, **options) -> PreTrainedModel:
    base = random_model(architecture, **(SIZES | options))
    base.set_attn_implementation(attention)
    return base


CASES = {
    "sdpa": (Qwen3ForCausalLM, "sdpa", {}),
    "eager": (Qwen3ForCausalLM, "eager", {}),
    "grouped queries": (Qwen3ForCausalLM, "sdpa", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
    "Qwen2": (Qwen2ForCausalLM, "sdpa", {}),
    "Llama": (LlamaForCausalLM, "eager", {}),
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_entropies_and_gradients_of_members_are_those_of_single_rows(case, checkpointing):
    architecture, attention, options = CASES[case]
    base = base_of(architecture, attention, **options)
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    router = Router()
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = add_members(base, ["teacher_0", "student_0"], lora, router, seed=0).train()
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    parameters = [p for p in model.parameters() if p.requires_grad]
    for index, parameter in enumerate(parameters):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(index))
    ids, mask = rows()
    weights = torch.randn(mask.shape[0], LENGTH, generator=torch.Generator().manual_seed(2))
    sharing = Sharing(attention == "eager", pair_cost=0.0)
    found = []
    for how in (None, sharing, Sharing(sharing.additive, 0.0, multiple=16)):
        layout = lay_out(PROMPTS, PROMPT_LENGTHS, COMPLETION_LENGTHS, how)
        assert layout.branches == (how is not None)
        router.set([MEMBERS[row] for row in layout.heads])
        logps, entropies, _ = layout.log_probs(compute, model, ids, mask, LENGTH, how)
        (logps * weights).sum().backward()
        router.clear()
        gradients = [
            torch.cat([p.grad.flatten() for name, p in model.named_parameters() if member in name])
            for member in ("teacher_0", "student_0")
        ]
        found.append((logps, entropies, *gradients))
        for parameter in parameters:
            parameter.grad = None
    answered = mask[:, -LENGTH:].bool()
    assert found[0][0][answered].all()
    assert not found[0][0][~answered].any()
    for other in found[1:]:
        for value, expected in zip(other, found[0], strict=True):
            assert (value - expected).norm() <= 1e-5 * expected.norm()


def test_a_prompt_is_computed_once_and_nothing_beside_it():
    layout = lay_out(PROMPTS, PROMPT_LENGTHS, COMPLETION_LENGTHS, Sharing(False, pair_cost=0.0))
    assert sorted(sorted(pack) for pack in layout.packs) == [[0, 1, 2], [3, 4], [5]]
    assert layout.used == (4 + 3 + 12 + 5) + (8 + 7 + 1) + (2 + 4)
    calls = []

    def note(model, ids, mask, keep):
        model(input_ids=ids, attention_mask=mask, labels=ids)
        return torch.zeros(ids.shape), None, None

    layout.log_probs(note, lambda **inputs: calls.append(inputs), *rows(), LENGTH, Sharing(False, 0.0))
    assert calls[0]["input_ids"].shape == (3, layout.width)
    assert int(calls[0]["attention_mask"][0].sum()) == sum(  # of the branches of 12, 5 and 3 tokens
        (step + 1 for step in range(4)), sum(4 * length + length * (length + 1) // 2 for length in (12, 5, 3))
    ) + (layout.width - 24) * 4 + sum(range(1, layout.width - 23))


def test_the_head_is_asked_about_tokens_of_completions_alone(monkeypatch):
    base = base_of(Qwen3ForCausalLM, "sdpa")
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    asked = []
    head = utils._ChunkedLogProbFunction
    monkeypatch.setattr(
        utils,
        "_ChunkedLogProbFunction",
        type("Counting", (), {"apply": lambda hidden, *rest: asked.append(len(hidden)) or head.apply(hidden, *rest)}),
    )
    for how in (None, Sharing(False, pair_cost=0.0)):
        lay_out(PROMPTS, PROMPT_LENGTHS, COMPLETION_LENGTHS, how).log_probs(compute, base, *rows(), LENGTH, how)
    assert asked == [sum(COMPLETION_LENGTHS)] * 2
    compute(base, *rows(), LENGTH)
    assert asked[-1] > sum(COMPLETION_LENGTHS), "TRL scores labels alone now: `score_labels_alone` can go"


@pytest.mark.parametrize("seed", range(5))
def test_every_live_row_is_in_one_pack_with_rows_of_its_prompt_and_members_stay_together(seed):
    rng = random.Random(seed)
    prompts = sorted(rng.choice(range(6)) for _ in range(24))
    before = [rng.choice([0, 40 + prompt]) for prompt in prompts]
    after = [rng.randint(1, 30) if length else 0 for length in before]
    members = [prompt // 2 for prompt in prompts]
    for sharing in (None, Sharing(False, 0.0), Sharing(False, 0.05)):
        layout = lay_out(prompts, before, after, sharing)
        packed = sorted(row for pack in layout.packs for row in pack)
        assert packed == [row for row in range(24) if before[row]]
        assert all(len({prompts[row] for row in pack}) == 1 for pack in layout.packs)
        assert Route([members[row] for row in layout.heads]).ordered


@pytest.mark.parametrize(
    ("prompt", "completion", "pair_cost", "most"), [(700, 50, 1e-4, 8), (700, 600, 1e-4, 4), (4, 60, 1e-3, 1)]
)
def test_prompts_are_shared_as_far_as_that_costs_less(prompt, completion, pair_cost, most):
    layout = lay_out([0] * 8, [prompt] * 8, [completion] * 8, Sharing(False, pair_cost))
    assert {len(pack) for pack in layout.packs} == {most}


def test_a_micro_batch_of_blank_rows_computes_two_tokens():
    layout = lay_out([1, 1], [0, 0], [0, 0], Sharing(False, 0.0))
    assert (layout.heads, layout.width, layout.used) == ([0], 2, 0)
    seen = []

    def note(model, ids, mask, keep):
        seen.append((ids, mask))
        return torch.ones(len(ids), keep), None, None

    logps, _, _ = layout.log_probs(note, lambda: None, torch.zeros(2, 2).long(), torch.zeros(2, 2).long(), 1)
    assert seen[0][1].tolist() == [[1, 1]]
    assert logps.shape == (2, 1)


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (lambda: base_of(Qwen3ForCausalLM, "sdpa"), ""),
        (lambda: base_of(MistralForCausalLM, "sdpa", sliding_window=None), ""),
        (lambda: base_of(MistralForCausalLM, "sdpa", sliding_window=8), "layers of sliding_attention"),
        (
            lambda: base_of(Qwen3ForCausalLM, "sdpa", use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "layers of sliding_attention",
        ),
        (lambda: base_of(Qwen3ForCausalLM, "flex_attention"), "attn_implementation='flex_attention'"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=97)), "no rotary positions"),
    ],
)
def test_models_that_cannot_share_say_why(base, reason):
    found = why_not_shared(base())
    assert reason in found if reason else found == ""


def test_a_token_of_attention_costs_less_the_wider_the_model():
    narrow = Sharing.of(base_of(Qwen3ForCausalLM, "sdpa"))
    wide = Sharing.of(base_of(Qwen3ForCausalLM, "eager", hidden_size=64, intermediate_size=128))
    assert not narrow.additive
    assert wide.additive
    assert wide.pair_cost < narrow.pair_cost


def test_a_layout_of_one_pack_per_row_has_no_branches():
    assert not Layout([[0], [1]], [3, 3], [2, 2]).branches
