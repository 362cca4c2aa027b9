"""What is logged of the loss: over the tokens in it, however they are dealt, and nothing where there are none."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from tests.fixed_rows import POPULATION, play_fixed_rows, rows_of_step
from trl_populora.config import PopuLoRAConfig
from trl_populora.step.rows import Row
from trl_populora.trainer import PopuLoRATrainer


CLIPPED = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}


def worth_the_same(row: Row) -> Row:
    rate = {"solve_rate": 0.5} if row.role == "teacher" else {"correct": True, "well_formed": True}
    return dataclasses.replace(row, **rate)


@pytest.fixture
def logged(random_base, lora, tmp_path):
    """Trains on the fixed rows, but those of some steps are all worth the same; what was logged of each step."""
    runs = itertools.count()

    def train(blank: set[int] = frozenset(), **options) -> list[dict]:
        args = PopuLoRAConfig(str(tmp_path / f"run-{next(runs)}"), **(POPULATION | {"evolve_every": 0} | options))
        trainer = PopuLoRATrainer(random_base, args=args, peft_config=lora)

        def rows_of(step: int) -> list[Row]:
            rows = rows_of_step(step)
            return [worth_the_same(row) for row in rows] if step in blank else rows

        play_fixed_rows(trainer, rows_of)
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    return train


def test_of_a_step_without_a_row_in_the_loss_nothing_is_logged(logged):
    blank, live, *_ = logged({0})
    assert {blank[key] for key in (*CLIPPED, "entropy")} == {None}
    assert {type(live[key]) for key in (*CLIPPED, "entropy")} == {float}


def test_steps_without_a_row_in_the_loss_are_left_out_of_the_mean_of_several(logged):
    (first, *_), (both, *_) = logged({1}, max_steps=2), logged({1}, max_steps=2, logging_steps=2)
    assert both["entropy"] == pytest.approx(first["entropy"])


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo"},
        {"loss_type": "cispo", "epsilon_high": 1.001},
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    ],
    ids=lambda options: options["loss_type"],
)
def test_means_do_not_depend_on_how_rows_are_dealt(logged, options):
    """Some rows are blank, and the second step of two on the same rows has ratios beyond `epsilon`."""
    options |= {"num_iterations": 2, "max_steps": 2, "epsilon": 0.01}
    *_, whole = logged(per_device_train_batch_size=48, **options)
    *_, dealt = logged(per_device_train_batch_size=3, **options)
    means = {"entropy", "cispo_clip_ratio", *CLIPPED} & whole.keys()
    for key in means - {"clip_ratio/low_min"}:  # of a row, also a blank one
        assert dealt[key] == pytest.approx(whole[key], rel=1e-3), key
    assert any(0 < whole[key] < 1 for key in means if key.endswith(("mean", "cispo_clip_ratio")))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_figures_of_the_sampling_engine_are_over_the_rows_that_are_computed(mode, random_base, lora, tmp_path):
    """An engine that held every token for far less likely than the trainer: each weight is cut at TRL's cap."""
    options = POPULATION | {"evolve_every": 0, "max_steps": 2, "vllm_importance_sampling_mode": mode}
    args = PopuLoRAConfig(str(tmp_path), vllm_importance_sampling_clip_max=3.0, **options)
    trainer = PopuLoRATrainer(random_base, args=args, peft_config=lora)

    def rows_of(step: int) -> list[Row]:
        rows = [worth_the_same(row) if step or row.role == "teacher" else row for row in rows_of_step(step)]
        said = [row.completion for row in rows]
        told = [dataclasses.replace(each, logprobs=[-30.0] * len(each.completion_ids)) for each in said]
        return [dataclasses.replace(row, completion=each) for row, each in zip(rows, told, strict=True)]

    play_fixed_rows(trainer, rows_of)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=int, close=int)
    trainer.train()
    live, blank = (entry for entry in trainer.state.log_history if "loss" in entry)
    ratios = [f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")]
    differences = [f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")]
    assert [live[key] for key in ratios] == [3, 3, 3], "a row that is not computed is no row with the weight 1"
    assert 20 < live[differences[0]] < live[differences[1]]
    assert {blank[key] for key in (*ratios, *differences)} == {None}
