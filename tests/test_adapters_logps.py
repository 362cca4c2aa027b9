"""Old, reference and current log-probabilities of a row all come from its member, or from the base."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.fixed_rows import POPULATION, play_fixed_rows
from trl_populora.config import PopuLoRAConfig
from trl_populora.lora.members import read_member, save_member, write_member
from trl_populora.step.microbatch import Layout
from trl_populora.trainer import PopuLoRATrainer


class Observed(PopuLoRATrainer):
    """Notes the inputs of each loss and the log-probabilities computed in it, just as they are."""

    def _compute_loss(self, model, inputs):
        self.seen.append(dict(inputs))
        return super()._compute_loss(model, inputs)


@pytest.fixture
def trainer(random_base, tmp_path, lora, monkeypatch):
    settings = POPULATION | {"evolve_every": 0, "num_iterations": 2, "beta": 0.04, "max_steps": 2}
    args = PopuLoRAConfig(str(tmp_path / "run"), **settings)
    trainer = Observed(random_base, args=args, peft_config=lora)
    trainer.seen = []
    log_probs = Layout.log_probs

    def observed(*given, **further):
        result = log_probs(*given, **further)
        if torch.is_grad_enabled():
            trainer.seen[-1]["current"] = result[0].detach()
        return result

    monkeypatch.setattr(Layout, "log_probs", observed)
    play_fixed_rows(trainer)
    for index, name in enumerate(trainer.population.names):
        generator = torch.Generator().manual_seed(index)
        factors = read_member(trainer.model, name)
        write_member(
            trainer.model, name, {k: v + 0.3 * torch.randn(v.shape, generator=generator) for k, v in factors.items()}
        )
    return trainer


def logps_of_row(model, inputs: dict, row: int) -> torch.Tensor:
    """Log-probabilities of a row's completion tokens, from the row alone and without padding."""
    prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
    completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
    ids = torch.cat([prompt, completion])[None]
    with torch.no_grad():
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, ids[0, 1:, None])[-len(completion) :, 0]


def test_every_log_probability_of_a_row_comes_from_its_member(trainer, random_base, tmp_path):
    names = trainer.population.names
    models = {}
    for index, name in enumerate(names):
        save_member(trainer.model, name, tmp_path / name)
        base = AutoModelForCausalLM.from_pretrained(random_base)
        models[index] = PeftModel.from_pretrained(base, tmp_path / name).eval()
    models["base"] = AutoModelForCausalLM.from_pretrained(random_base).eval()
    trainer.train()

    micro_batches = trainer.args.gradient_accumulation_steps
    assert len(trainer.seen) == 2 * micro_batches
    first, second = trainer.seen[:micro_batches], trainer.seen[micro_batches:]
    checked = set()
    for inputs, again in zip(first, second, strict=True):
        for row, member in enumerate(inputs["member"].tolist()):
            if inputs["pack"][row] < 0:  # a blank row
                continue
            length = int(inputs["completion_mask"][row].sum())
            own = logps_of_row(models[member], inputs, row)
            base = logps_of_row(models["base"], inputs, row)
            assert (own - base).abs().max() > 0.05, "the member must differ visibly from the base"
            for key, expected in {"old_per_token_logps": own, "current": own, "ref_per_token_logps": base}.items():
                torch.testing.assert_close(inputs[key][row, :length], expected, rtol=1e-4, atol=1e-4)
            # In the second iteration the member has moved on, its old and reference values have not.
            assert torch.equal(again["old_per_token_logps"][row], inputs["old_per_token_logps"][row])
            assert torch.equal(again["ref_per_token_logps"][row], inputs["ref_per_token_logps"][row])
            checked.add(member)
    assert checked == set(range(len(names)))
    moved = [not torch.equal(one["current"], two["current"]) for one, two in zip(first, second, strict=True)]
    assert all(moved)
