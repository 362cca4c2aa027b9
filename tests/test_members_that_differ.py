"""Members with settings of their own: each trains as stock TRL trains one adapter with these settings."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from tests.prompt_runs import population_trainer, stock_run, train_and_watch
from tests.small_run import small_lora
from trl_populora.lora.members import member_parameters, member_ranks, save_member


WRITERS = ["a", "b", "c", "d"]
STEPS = 10
CASES = {
    "rates": {"learning_rate": [1e-2, 3e-3, 2e-2, 1e-3]},
    "pulls to the base": {"beta": [0.04, 0.0, 0.3, 0.04]},
    # The ratios to the old policy differ from 1 in the second iteration only.
    "clipping": {"epsilon": [0.2, 0.003, 0.0, 0.05], "num_iterations": 2},
    "clipping of cispo": {"epsilon": [0.2, 0.003, 0.0, 0.05], "num_iterations": 2, "loss_type": "cispo"},
    "temperatures": {"temperature": [1.0, 0.5, 2.0, 0.5], "num_iterations": 2},
    "temperatures and pulls": {"temperature": [1.0, 0.5, 2.0, 0.5], "beta": [0.04, 0.1, 0.3, 0.0]},
    "prompts by seed": {"seed": [5, 3, 9, 5], "member_prompts": "own"},
    "ranks": {"lora_r": [4, 2, 8, 1], "weight_decay": 0.1},
    "alphas": {"lora_alpha": [8, 2, 32, 8]},
    "ranks and alphas": {"lora_r": [4, 2, 8, 3], "lora_alpha": [8, 2, 32, 5], "beta": [0.04, 0.0, 0.3, 0.04]},
}


def list_loras(r=None, alpha=None) -> LoraConfig | list[LoraConfig]:
    if r is None and alpha is None:
        return small_lora()
    ranks, alphas = r or [4] * len(alpha), alpha or [8] * len(r)
    return [LoraConfig(r=r, lora_alpha=a, target_modules="all-linear") for r, a in zip(ranks, alphas, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_four_members_that_differ_are_four_runs_of_trl(random_base, tmp_path, case):
    options = {"loss_type": "dapo", "max_steps": STEPS} | CASES[case]
    lora = list_loras(options.pop("lora_r", None), options.pop("lora_alpha", None))
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
