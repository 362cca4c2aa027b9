"""What is saved together carries one step, and nobody takes adapters of one moment under the metadata of another."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import TrainerCallback

from tests.populora_run import SETTINGS, make_trainer
from tests.recipe_runs import RECIPES
from trl_populora.evaluate.cross_play import assemble
from trl_populora.hub.export import export_member
from trl_populora.hub.push import push_archive, push_run
from trl_populora.lora.members import read_saved_step
from trl_populora.run.read import read_population
from trl_populora.tasks.archive import read_archive_step


sys.path.insert(0, str(RECIPES))


class Cut(TrainerCallback):
    """Ends the process, as it were, once a step is logged."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def extended(base, tmp_path_factory):
    """A run of two steps, saved, that went on and was cut after the third."""
    path = tmp_path_factory.mktemp("extended") / "run"
    trainer = make_trainer(base, str(path), {"max_steps": 2, "save_steps": 2})
    trainer.train()
    trainer.save_model()
    trainer = make_trainer(base, str(path), {"max_steps": 4, "save_steps": 4})
    trainer.add_callback(Cut())
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=True)
    return path


def warm_start(run: Path, out: Path, base: str) -> None:
    make_trainer(base, str(out), {"warm_start": str(run)}).close()


def cross_play(run: Path, out: Path, base: str) -> None:
    with assemble([str(run)], task_kinds=SETTINGS["task_kinds"], sandbox_allow_weak=True):
        pass


def evaluate(run: Path, out: Path, base: str) -> None:
    pytest.importorskip("evalscope", reason="EvalScope is not installed")
    import evaluate

    evaluate.find_members(run, None)
    evaluate.find_adapter(str(run))


READERS = {
    "push": lambda run, out, base: push_run(run, "me/moments"),
    "push the archive": lambda run, out, base: push_archive(run, "me/tasks"),
    "export": lambda run, out, base: export_member(str(run), out / "member"),
    "crossplay": cross_play,
    "evaluate": evaluate,
    "warm_start": warm_start,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
class TestReaders:
    def test_adapters_of_another_step_than_their_metadata_are_refused(self, extended, base, tmp_path, read, hub):
        assert read_population(extended)["step"] == 3
        told = r"run mixes two steps: population.json is from step 3, .* was saved after step 2.*use a checkpoint"
        with pytest.raises(ValueError, match=told):
            read(extended, tmp_path, base)

    def test_a_checkpoint_of_such_a_run_and_a_run_that_does_not_say_are_taken(
        self, extended, base, tmp_path, read, hub, two_plots
    ):
        early = tmp_path / "early"
        shutil.copytree(extended, early, ignore=shutil.ignore_patterns("plots"))
        shutil.copytree(extended / "checkpoint-2", early / "checkpoint-2", dirs_exist_ok=True)
        for path in early.glob("members/*/*.safetensors"):
            path.with_name("member.json").unlink(missing_ok=True)
        table = pq.read_table(early / "archive.parquet")
        marks = {key: value for key, value in table.schema.metadata.items() if key != b"populora_step"}
        pq.write_table(table.replace_schema_metadata(marks), early / "archive.parquet")
        assert (read_saved_step(early / "members" / "student_0"), read_archive_step(early / "archive.parquet")) == (
            None,
            None,
        )
        for run in (extended / "checkpoint-2", early):
            (tmp_path / run.name).mkdir(exist_ok=True)
            read(run, tmp_path / run.name, base)
