"""A directory belongs to one run: it is locked while it trains, and nothing that a run left is written over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.populora_run import EVALUATED, ON_PROMPTS, assert_equal, make_trainer, state_of
from tests.without_extras import without_extras
from trl_populora.report.load import load_run
from trl_populora.run.checkpoint import find_newest
from trl_populora.run.directory import set_aside
from trl_populora.run.read import PLAYED, read_lines


OLD = ["metrics.jsonl", "times.jsonl", "lineage.jsonl", "rollouts/step_00007-rank1.parquet", "archive.parquet"]
OLD += ["checkpoint-7/whole.json", "members/student_0/adapter_model.safetensors", "population.json", "run.png"]
OLD += ["tokenizer.json", "chat_template.jinja", "README.md"]
OLD += ["completions/completions_00007.parquet", "_evaluation/gsm8k/base-0/result.json"]
FOREIGN = ["notes.md", "runs/today/events", "checkpoints/mine", "completions/notes.md"]
SAVING = {"save_steps": 1, "evolve_every": 1, "evolve_burn_in": 1}


def contents(root: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    paths = [path for path in root.rglob("*") if path.is_file() and path.name != "_lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.fixture(
    scope="module", params=[SAVING, ON_PROMPTS | SAVING | {"lr_scheduler_type": "constant"}], ids=["game", "prompts"]
)
def four(request, base, tmp_path_factory) -> tuple[Path, dict, dict]:
    """A finished run of four steps, which nobody changes, its state and its settings."""
    root = tmp_path_factory.mktemp("four") / "run"
    trainer = make_trainer(base, str(root), request.param | {"max_steps": 4})
    trainer.train()
    trainer.save_model()
    return root, state_of(trainer), request.param


class TestRecords:
    def test_all_that_an_earlier_run_left_moves_aside_and_nothing_else(self, tmp_path):
        for name in (*OLD, *FOREIGN):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"step": 7, "files": {}}\n')
        set_aside(tmp_path)
        assert contents(tmp_path).keys() == {*FOREIGN, *(f"_previous-1/{name}" for name in OLD)}
        (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
        set_aside(tmp_path)
        assert (tmp_path / "_previous-2" / "metrics.jsonl").read_text() == '{"step": 2}\n'
        assert set_aside(tmp_path) is None

    def test_an_evaluation_before_training_belongs_to_the_run(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/solve_rate_mean": 0.5}\n')
        assert set_aside(tmp_path) is None

    def test_a_start_where_a_run_lies_is_refused_and_changes_nothing(self, base, four):
        root, before = four[0], contents(four[0])
        told = r"run holds a run. `--resume`, or `train\(resume_from_checkpoint=True\)`, .* another `output_dir`"
        trainer = make_trainer(base, str(root), four[2] | {"max_steps": 1})
        for checkpoint in (None, False):
            with pytest.raises(ValueError, match=told):
                trainer.train(resume_from_checkpoint=checkpoint)
        assert contents(root) == before

    def test_a_trainer_that_trains_again_moves_its_earlier_records_aside(self, base, tmp_path):
        trainer = make_trainer(base, str(tmp_path), {"max_steps": 1, "save_steps": 1})
        trainer.train()
        first = contents(tmp_path)
        trainer.train()
        aside = tmp_path / "_previous-1"
        assert contents(aside) == first
        assert find_newest(str(aside)) == str(aside / "checkpoint-1")
        assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl") if PLAYED in line] == [1]

    def test_a_refused_resume_gives_no_right_to_begin(self, base, four):
        before = contents(four[0])
        trainer = make_trainer(base, str(four[0]), four[2] | {"max_steps": 5, "seed": 7})
        with pytest.raises(ValueError, match="`seed` was 42, is 7"):
            trainer.train(resume_from_checkpoint=True)
        with pytest.raises(ValueError, match="holds a run"):
            trainer.train()
        assert contents(four[0]) == before

    def test_a_save_of_a_trainer_that_did_not_train_here_is_refused_and_changes_nothing(self, base, four, tmp_path):
        before = contents(four[0])
        trainer = make_trainer(base, str(four[0]), four[2] | {"max_steps": 1, "seed": 7})
        for act in (trainer.save_model, trainer.train, trainer.save_model):
            with pytest.raises(ValueError, match="holds a run"):
                act()
        trainer.save_model(str(tmp_path))
        assert (tmp_path / "population.json").exists()
        assert contents(four[0]) == before

    def test_what_a_trainer_has_saved_itself_is_no_other_run(self, base, tmp_path):
        trainer = make_trainer(base, str(tmp_path), {"max_steps": 1, "save_strategy": "no"})
        trainer.save_model()
        first = contents(tmp_path)
        trainer.save_model()
        trainer.train()
        assert trainer.state.global_step == 1
        assert contents(tmp_path / "_previous-1").keys() == first.keys()

    def test_an_earlier_checkpoint_is_resumed_in_another_directory_alone(self, base, four, tmp_path):
        root, before = four[0], contents(four[0])
        earlier = str(root / "checkpoint-2")
        trainer = make_trainer(base, str(root), four[2] | {"max_steps": 4})
        with pytest.raises(
            ValueError, match=r"went on after .*checkpoint-2, to .*checkpoint-4. .* another `output_dir`"
        ):
            trainer.train(resume_from_checkpoint=earlier)
        branch = make_trainer(base, str(tmp_path), four[2] | {"max_steps": 3})
        branch.train(resume_from_checkpoint=earlier)
        assert contents(root) == before
        branch = make_trainer(base, str(tmp_path), four[2] | {"max_steps": 4})
        branch.train(resume_from_checkpoint=True)
        assert_equal(four[1], state_of(branch))
        branched = contents(tmp_path)
        assert {name: before[name] for name in before if "checkpoint-2/" in name}.items() <= branched.items()
        assert not any("_previous" in name for name in branched)

    def test_an_end_that_lies_before_the_checkpoint_is_refused(self, base, four, tmp_path, caplog):
        run = tmp_path / "run"
        shutil.copytree(four[0], run)
        before = contents(run)
        with pytest.raises(
            ValueError, match="`max_steps=3`, but .*checkpoint-4 has reached step 4. Raise `max_steps`"
        ):
            make_trainer(base, str(run), four[2] | {"max_steps": 3}).train(resume_from_checkpoint=True)
        assert contents(run) == before
        trainer = make_trainer(base, str(run), four[2] | {"max_steps": 4})
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 4
        assert "has reached the last step, 4: nothing is trained. Raise `max_steps`." in caplog.text

    def test_what_came_after_the_newest_whole_checkpoint_is_cut_back(self, base, four, tmp_path):
        run = Path(shutil.copytree(four[0], tmp_path / "run"))
        for step in (3, 4):
            (run / f"checkpoint-{step}" / "game.json").unlink()
        broken = contents(run / "checkpoint-4")
        trainer = make_trainer(base, str(run), four[2] | {"max_steps": 3})
        trainer.train(resume_from_checkpoint=True)
        assert [path.name for path in sorted(run.glob("rollouts/*"))] == [f"step_0000{n}.parquet" for n in (1, 2, 3)]
        assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3]
        assert find_newest(str(run)) == str(run / "checkpoint-3")
        assert contents(run / "_previous-1" / "checkpoint-4") == broken, "a member may still be wanted"

    def test_without_a_checkpoint_the_newest_is_a_start_afresh(self, base, tmp_path):
        settings = {"max_steps": 1, "save_strategy": "no"}
        make_trainer(base, str(tmp_path), settings).train()
        first = contents(tmp_path)
        make_trainer(base, str(tmp_path), settings).train(resume_from_checkpoint="newest")
        assert contents(tmp_path / "_previous-1") == first


def test_a_branch_ends_with_the_best_population_of_the_run_that_it_left(base, tmp_path, caplog):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "solve_rate_mean", "eval_steps": 1}
    settings = EVALUATED | best | {"save_steps": 1, "learning_rate": 0.0}  # all scores are equal: the first is best
    make_trainer(base, str(tmp_path / "run"), settings | {"max_steps": 2}).train()
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    shutil.copytree(tmp_path / "run" / "checkpoint-2", alone / "checkpoint-2")
    for root, step in ((tmp_path / "run", 1), (moved, 1), (alone, 3)):
        if root == moved:  # the state of the run knows the former path
            (tmp_path / "run").rename(moved)
        where = tmp_path / f"branch_of_{root.name}"
        branch = make_trainer(base, str(where), settings | {"max_steps": 3})
        branch.train(resume_from_checkpoint=str(root / "checkpoint-2"))
        assert branch.state.best_model_checkpoint == str(where / f"checkpoint-{step}")
        assert branch.describe()["step"] == step
        assert ("The best checkpoint so far, checkpoint-1, is gone" in caplog.text) == (step == 3)


class Hold(TrainerCallback):
    """Says that the second step begins, and stays there until the process is killed."""

    def __init__(self, told: Any):
        self.told = told

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.told.send("training")
            time.sleep(600)


def train(base: str, run: str, sort: dict, told: Any, hold: bool, rank: int, world: int, port: int) -> None:
    """A process of a run, which says how it ended."""
    if world > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    settings = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 12 // world}
    trainer = make_trainer(base, run, settings | sort)
    if hold:
        trainer.add_callback(Hold(told))
    try:
        trainer.train(resume_from_checkpoint="newest")
    except ValueError as refusal:
        told.send(str(refusal))
    else:
        told.send(trainer.state.global_step)
    trainer.accelerator.end_training()


class TestLock:
    @pytest.mark.multiprocess
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("world", "sort"),
        [
            pytest.param(1, {}, id="game"),
            pytest.param(2, {}, id="two ranks"),
            pytest.param(1, ON_PROMPTS, id="prompts"),
        ],
    )
    def test_a_run_keeps_others_out_until_it_is_killed(self, base, tmp_path, monkeypatch, world, sort):
        for name, value in without_extras().items():
            monkeypatch.setenv(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.populora_run", "trl_populora.trainer"])
        run = tmp_path / "run"

        def start(hold: bool = False) -> tuple[list, list]:
            """Processes of one run, and what each says first."""
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            ends = [context.Pipe(duplex=False) for _ in range(world)]
            processes = [
                context.Process(target=train, args=(base, str(run), sort, told, hold, rank, world, port))
                for rank, (_, told) in enumerate(ends)
            ]
            for process in processes:
                process.start()
            assert all(heard.poll(400) for heard, _ in ends)
            return processes, [heard.recv() for heard, _ in ends]

        holders, said = start(hold=True)
        try:
            assert said == ["training"] * world
            before = contents(run)
            refused, said = start()
            assert [sentence.partition(" on ")[0] for sentence in said] == [
                f"{run} is in use by process {holders[0].pid}"
            ] * world
            assert {"Wait for its end, or choose another `output_dir`" in sentence for sentence in said} == {True}
            for process in refused:
                process.join()
            assert contents(run) == before
            if world == 1:
                self.check_readers(base, run, tmp_path, sort)
        finally:
            for process in holders:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        later, said = start()
        assert said == [2] * world
        for process in later:
            process.join()
        assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2]

    @staticmethod
    def check_readers(base: str, run: Path, tmp_path: Path, sort: dict) -> None:
        """Who reads a run that goes on, or evaluates and saves beside it, is not kept out."""
        assert load_run(run).step == 1
        before = contents(run)
        settings = {"max_steps": 1, "save_strategy": "no", "warm_start": str(run / "checkpoint-1")}
        beside = make_trainer(base, str(run), sort | settings | {"evaluated": True})
        beside.evaluate()
        beside.save_model(str(tmp_path / "elsewhere"))
        assert (tmp_path / "elsewhere" / "population.json").exists()
        assert contents(run) == before

    def test_the_lock_is_free_after_an_end_of_any_kind(self, base, tmp_path):
        class Fail(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                raise ConnectionError

        trainer = make_trainer(base, str(tmp_path), {"max_steps": 1})
        trainer.add_callback(Fail)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                trainer.train()
            assert not (tmp_path / "_lock").read_text()
            with (tmp_path / "_lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_a_save_after_training_keeps_to_the_lock(self, base, tmp_path):
        """As scripts save: another run may have begun there since `train` ended."""
        trainer = make_trainer(base, str(tmp_path / "run"), {"max_steps": 1})
        trainer.train()
        with (tmp_path / "run" / "_lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = contents(tmp_path / "run")
            with pytest.raises(ValueError, match="is in use by"):
                trainer.save_model()
            trainer.save_model(str(tmp_path / "elsewhere"))
            assert contents(tmp_path / "run") == before
        trainer.save_model()
        assert (tmp_path / "run" / "members").is_dir()

    def test_a_file_system_without_locks_is_told_and_trained_on(self, base, tmp_path, caplog, monkeypatch):
        def refuse(file, how):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
        trainer = make_trainer(base, str(tmp_path), {"max_steps": 1})
        with trainer.directory:
            assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text
        trainer.train()
        assert trainer.state.global_step == 1


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
