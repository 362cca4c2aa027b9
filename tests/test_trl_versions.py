"""What is known of other releases of TRL, and the road that stays open if its `rollout_func` goes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.populora_run import assert_equal, make_trainer, state_of
from trl_populora import trainer as populora_trainer
from trl_populora.trainer import PopuLoRATrainer


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import trl_versions  # noqa: E402


class WithoutRolloutFunc(PopuLoRATrainer):
    """The step on TRL's methods for generation: what to do once `rollout_func` is gone (`docs/trl_versions.md`)."""

    def __init__(self, *args, **kwargs):
        self.asked_by_trl, self.sampled = False, None
        super().__init__(*args, **kwargs)
        self.rollout_func = None

    def _generate(self, prompts):
        self.asked_by_trl = True
        return super()._generate(prompts)

    def _tokenize_prompts(self, prompts):
        if not self.asked_by_trl:  # but by the game itself
            return super()._tokenize_prompts(prompts)
        self.asked_by_trl = False
        self.sampled = self._play(prompts, self)
        return self.sampled["prompt_ids"], None, {}

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.sampled is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        sampled, self.sampled = self.sampled, None
        return sampled["completion_ids"], sampled["logprobs"]


def test_a_step_on_trls_methods_for_generation_equals_one_on_rollout_func(base, tmp_path, monkeypatch):
    states = []
    for name, trainer_class in (("with", PopuLoRATrainer), ("without", WithoutRolloutFunc)):
        monkeypatch.setattr(populora_trainer, "PopuLoRATrainer", trainer_class)
        trainer = make_trainer(base, str(tmp_path / name), {"save_strategy": "no"})
        assert type(trainer) is trainer_class
        trainer.train()
        states.append(state_of(trainer))
    assert trainer.rollout_func is None
    assert_equal(*states)


@pytest.mark.parametrize("package", trl_versions.PACKAGES)
def test_the_page_of_versions_is_about_this_window(package):
    page, window = trl_versions.PAGE.read_text(), trl_versions.window(package)
    assert f"`{window}`" in page, "run benchmarks/trl_versions.py"
    rows = dict(re.findall(rf"^\| {package} ([\d.]+) \| (\w+) \| .* \| none \| works \|$", page, re.MULTILINE))
    inside = [release for release, held in rows.items() if held == "yes"]
    assert inside, "all seams of a release in the window hold"
    assert all(release in window.specifier for release in inside)


def test_releases_at_both_edges_of_a_window_are_tried():
    window = trl_versions.window("vllm").specifier
    found = ["0.29.0", "0.30.0", "0.31.0", "0.31.1", "0.32.0", "0.33.0", "0.34.0"]
    chosen = trl_versions.choose(found, "vllm")
    assert chosen == ["0.30.0", "0.31.0", "0.32.0", "0.33.0"]
    assert [release in window for release in chosen] == [False, True, True, False]
    assert trl_versions.choose(found[:2], "vllm") == ["0.30.0"], "none is inside"
