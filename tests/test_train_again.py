"""`train()` again on one trainer: members, ratings, archive and optimizer go on, and nothing of an unfinished step."""

from __future__ import annotations

import contextlib

import pytest
from transformers import TrainerCallback

from tests.populora_run import make_trainer
from trl_populora.runs.lines import PLAYED


class Cut(TrainerCallback):
    """Raises after the first of a step's two micro-batches, once."""

    done = False

    def on_substep_end(self, args, state, control, **kwargs):
        if not self.done:
            self.done = True
            raise ConnectionError


@pytest.mark.parametrize(
    ("settings", "cut", "first", "second"),
    [
        ({"num_iterations": 2}, [], "play train train", "play train train train train"),
        ({}, [Cut], "play train", "play train train play train train"),
    ],
    ids=["two updates a play", "stopped amid a step"],
)
def test_a_training_begins_with_a_play_whatever_the_one_before_left(base, tmp_path, settings, cut, first, second):
    shape = {"max_steps": 1, "save_strategy": "no", "evolve_every": 0}
    trainer, did, plays = make_trainer(base, str(tmp_path), shape | settings), [], []
    play, train = trainer._play, trainer.training_step

    def watched_play(*given):
        rows = play(*given)
        did.append("play")
        plays.append(len(trainer._metrics["train"][PLAYED]))
        return rows

    def watched_train(*given):
        loss = train(*given)
        did.append("train")
        return loss

    trainer.rollout_func, trainer.training_step = watched_play, watched_train
    for callback in cut:
        trainer.add_callback(callback)
    with contextlib.suppress(ConnectionError):
        trainer.train()
    assert did == first.split()
    trainer.args.max_steps = 2
    did.clear()
    trainer.train()
    assert did == second.split()
    assert set(plays) == {1}, "figures of the play before are in no line of this training"
