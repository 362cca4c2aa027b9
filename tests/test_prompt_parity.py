"""Against stock TRL on a dataset of prompts: a population of one is TRL's run, and one of four is four of them."""

from __future__ import annotations

import pytest
import torch

from tests.prompt_runs import population_run, population_trainer, stock_run
from trl_populora.lora.members import save_member


pytestmark = pytest.mark.early

CASES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "scale_rewards": "batch"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "two iterations": {"loss_type": "grpo", "num_iterations": 2},
    "a pull to the base": {"loss_type": "dapo", "beta": 0.04},
    "two optimizer steps a generation": {"loss_type": "dapo", "steps_per_generation": 4},
    "two optimizer steps a generation, twice": {"loss_type": "grpo", "steps_per_generation": 4, "num_iterations": 2},
    "two generations an optimizer step": {
        "loss_type": "dapo",
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
    },
    "weights of rewards": {"loss_type": "dapo", "reward_weights": [2.0, 0.5]},
}
SLOW = {"dr_grpo", "cispo", "two optimizer steps a generation", "two generations an optimizer step"}
SLOW |= {"two iterations", "a pull to the base", "weights of rewards"}
STEPS = 6
STEPS_OF_FOUR = 4


@pytest.fixture(scope="module")
def start(random_base, tmp_path_factory):
    """Directory of the members' common start, as stock PEFT sees it."""
    directory = tmp_path_factory.mktemp("start")
    trainer, _ = population_trainer(random_base, directory / "run", ["a"], max_steps=1)
    save_member(trainer.model, "student_0", directory / "adapter")
    return directory / "adapter"


def check_equal(trainer, judge, gradients, factors, stock, exact: bool = True) -> None:
    stock_trainer, stock_judge, stock_gradients, stock_factors = stock
    assert len(judge.calls) == len(stock_judge.calls)
    for mine, theirs in zip(judge.calls, stock_judge.calls, strict=True):
        assert {name: value for name, value in mine.items() if name != "member"} == theirs
    if exact:
        for column in ("advantages", "prompt", "completion"):
            assert list(trainer._logs[column]) == list(stock_trainer._logs[column]), column
        assert str(dict(trainer._logs["rewards"])) == str(
            dict(stock_trainer._logs["rewards"])
        )  # as text, because NaN is not NaN
    assert len(gradients) == len(stock_gradients) == STEPS
    for key, gradient in stock_gradients[0].items():
        torch.testing.assert_close(gradients[0][key], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())
    for key, expected in stock_factors.items():
        assert (factors[key] - expected).norm() / expected.norm() < 1e-5, key


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_a_population_of_one_is_trls_own_run(random_base, start, tmp_path, case):
    options = CASES[case] | {"max_steps": STEPS}
    stock = stock_run(random_base, start, tmp_path / "stock", "a", **options)
    trainer, judge, gradients, factors = population_run(random_base, tmp_path / "ours", ["a"], **options)
    assert trainer.state.epoch == stock[0].state.epoch
    check_equal(trainer, judge, [step["student_0"] for step in gradients], factors["student_0"], stock)


def test_a_population_of_four_is_four_runs(random_base, start, tmp_path):
    """What else holds for four, `test_members_that_differ.py` says."""
    options = CASES["two optimizer steps a generation, twice"] | {"max_steps": STEPS_OF_FOUR}
    writers = ["a", "b", "c", "d"]
    trainer, judge, gradients, factors = population_run(random_base, tmp_path / "ours", writers, **options)
    for place, (member, writer) in enumerate(zip(trainer.population.names, writers, strict=True)):
        stock = stock_run(random_base, start, tmp_path / writer, writer, **options)
        for mine, theirs in zip(judge.calls, stock[1].calls, strict=True):
            rows = len(theirs["prompts"])
            own = slice(place * rows, (place + 1) * rows)
            assert {name: each[own] for name, each in mine.items() if name != "member"} == theirs
            assert mine["member"][own] == [member] * rows
        assert len(gradients) == len(stock[2]) == STEPS_OF_FOUR
        for key, gradient in stock[2][0].items():
            atol = 1e-5 * gradient.abs().max().item()
            torch.testing.assert_close(gradients[0][member][key], gradient, rtol=0, atol=atol)
        for key, expected in stock[3].items():
            assert (factors[member][key] - expected).norm() / expected.norm() < 1e-5, f"{member} {key}"
