"""A run that is cut, killed, or out of disk goes on as if nothing had happened, or says what is wrong."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.populora_run import ON_PROMPTS, assert_equal, assert_files_equal, cut_run, make_trainer, run, state_of
from tests.without_extras import without_extras
from trl_populora.lora.members import read_member
from trl_populora.population.members import Population
from trl_populora.run.checkpoint import MANIFEST, find_flaw, find_newest, load_members
from trl_populora.run.read import PLAYED, read_lines


# 20 for the acceptance figure; a few show the same in seconds.
KILLS = int(os.environ.get("POPULORA_KILLS", "3"))


class TestExactResume:
    @pytest.mark.parametrize(
        "settings",
        [
            pytest.param(
                {"evolve_every": 2, "lr_scheduler_type": "linear", "max_steps": 5, "cut": 3},
                id="evolution on both sides",
            ),
            # An odd cut leaves half of the buffered rows.
            pytest.param(
                {"evolve_every": 2, "num_iterations": 2, "beta": 0.01, "max_steps": 6, "cut": 3}, id="buffered rows"
            ),
            pytest.param({"evolve_every": 7, "max_steps": 8}, id="before an event", marks=pytest.mark.slow),
            pytest.param(
                {"logging_steps": 3, "max_steps": 9, "evolve_every": 4},
                id="metrics not logged yet",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {
                    "teacher_reward": "rarity",
                    "teacher_beta": 0.01,
                    "replay": 0.2,
                    "per_device_train_batch_size": 7,
                    "evolve_every": 4,
                    "max_steps": 9,
                },
                id="what teachers are paid for",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"single_agent": True, "max_steps": 9, "per_device_train_batch_size": 6},
                id="single agent",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"teacher_reward": "paper", "ratings": "trueskill", "evolve_every": 7, "max_steps": 9},
                id="as printed",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"pool_every": 3, "evolve_every": 2, "max_steps": 6, "cut": 3}, id="students that are pooled"
            ),
            pytest.param(
                {"temperature": [1.0, 0.5, 0.7, 2.0], "evolve_every": 2, "max_steps": 5, "cut": 3},
                id="temperatures that are inherited",
            ),
        ],
    )
    def test_a_cut_run_equals_a_straight_one(self, base, tmp_path, settings):
        settings = {"max_steps": 12, "cut": 7} | settings
        cut = settings.pop("cut")
        straight = make_trainer(base, str(tmp_path / "straight"), settings | {"save_strategy": "no"})
        straight.train()
        wanted = state_of(straight)
        events = {event["step"] for event in wanted["lineage"]}
        assert "single_agent" in settings or max(events) >= cut > min(events) or settings["evolve_every"] == cut
        assert len(wanted["archive"]) > 12, "the archive grew"
        assert_equal(wanted, state_of(cut_run(base, str(tmp_path / "cut"), settings, cut)))

    @pytest.mark.parametrize(
        ("settings", "cut"),
        [
            pytest.param({"max_steps": 8, "save_steps": 9}, 2, id="in the first epoch"),
            pytest.param({"max_steps": 8}, 3, id="at an epoch's end", marks=pytest.mark.slow),
            pytest.param({"num_train_epochs": 3}, 5, id="in a later epoch, counted in epochs"),
            pytest.param(
                {"max_steps": 9, "steps_per_generation": 2, "evolve_every": 4},
                5,
                id="within a generation",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"max_steps": 10, "num_iterations": 2, "steps_per_generation": 2, "evolve_every": 4, "beta": 0.04},
                7,
                id="within a generation that trains twice",
            ),
            pytest.param(
                {"member_prompts": "own", "evolve_every": 0, "pool_every": 2, "max_steps": 8},
                4,
                id="prompts of their own, pooled",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"students": 1, "evolve_every": 0, "max_steps": 8, "logging_steps": 3},
                5,
                id="one member",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"shuffle_dataset": False, "max_steps": 8}, 5, id="without shuffling", marks=pytest.mark.slow
            ),
        ],
    )
    def test_a_cut_run_on_prompts_equals_a_straight_one(self, base, tmp_path, settings, cut):
        settings = ON_PROMPTS | settings
        straight = make_trainer(base, str(tmp_path / "straight"), settings | {"save_strategy": "no"})
        straight.train()
        wanted = state_of(straight)
        assert not settings["evolve_every"] or len({event["step"] for event in wanted["lineage"]}) > 1
        assert_equal(wanted, state_of(cut_run(base, str(tmp_path / "cut"), settings, cut)))

    def test_a_run_that_is_extended_equals_one_that_was_planned_as_long(self, base, tmp_path):
        settings = {"evolve_every": 3}
        straight = make_trainer(base, str(tmp_path / "straight"), settings | {"max_steps": 5, "save_strategy": "no"})
        straight.train()
        make_trainer(base, str(tmp_path / "longer"), settings | {"max_steps": 3}).train()
        longer = make_trainer(base, str(tmp_path / "longer"), settings | {"max_steps": 5})
        longer.train(resume_from_checkpoint=True)
        assert_equal(state_of(straight), state_of(longer))

    def test_a_run_on_prompts_goes_on_with_smaller_micro_batches_as_if_it_had_begun_with_them(self, base, tmp_path):
        settings = ON_PROMPTS | {"max_steps": 4, "evolve_every": 0}
        smaller = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        straight = make_trainer(base, str(tmp_path / "straight"), settings)
        straight.train()
        cut = cut_run(base, str(tmp_path / "cut"), settings, 2, then=smaller)
        assert cut._step == 2 * straight._step
        files = [sorted(root.glob("rollouts/*.parquet")) for root in (tmp_path / "straight", tmp_path / "cut")]
        asked = [[pq.read_table(path).column("prompt").to_pylist() for path in paths] for paths in files]
        assert len(asked[0]) == 4
        assert asked[0] == asked[1]
        for name in straight.population.names:
            found = read_member(cut.model, name)
            for key, wanted in read_member(straight.model, name).items():
                torch.testing.assert_close(found[key], wanted, rtol=1e-3, atol=1e-5)

    def test_a_run_on_prompts_keeps_the_rows_of_an_optimizer_step(self, base, tmp_path):
        make_trainer(base, str(tmp_path), ON_PROMPTS | {"max_steps": 1}).train()
        other = {"max_steps": 2, "per_device_train_batch_size": 2, "generation_batch_size": 4, "evolve_every": 0}
        with pytest.raises(ValueError, match=r"was 4 \* 1 \* 1 = 4, is 2 \* 1 \* 1 = 2 .*steps=2. keeps it"):
            make_trainer(base, str(tmp_path), ON_PROMPTS | other).train(resume_from_checkpoint=True)


class TestRowsOfTheReplaced:
    """Two optimizer steps train on a game's rows. A child born amid them has none."""

    ITERATIONS = {"num_iterations": 2, "lr_scheduler_type": "constant"}

    def test_a_run_that_goes_on_with_another_replay_plays_once_a_step(self, base, tmp_path):
        """A step has 28 rows with it, and 24 without."""
        settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3, "evolve_every": 0}
        make_trainer(base, str(tmp_path), settings | {"max_steps": 3}).train()
        trainer, played = make_trainer(base, str(tmp_path), settings | {"max_steps": 6, "replay": 0.2}), []
        assert trainer.args.rows_per_step == 28
        play = trainer.rollout_func

        def note(*given, **further):
            played.append(trainer.state.global_step)
            return play(*given, **further)

        trainer.rollout_func = note
        trainer.train(resume_from_checkpoint=True)
        assert played == [3, 4, 5]
        assert trainer._step == 6 * trainer.args.steps_per_generation

    def test_a_run_that_goes_on_with_another_number_of_processes_plays_after_every_event(self, base, tmp_path):
        class Resave(TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                manifest = tmp_path / f"checkpoint-{state.global_step}" / MANIFEST
                manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"processes": 2}))

        settings = self.ITERATIONS | {"evolve_every": 2, "evolve_burn_in": 0}
        trainer = make_trainer(base, str(tmp_path), settings | {"max_steps": 3, "save_steps": 3})
        trainer.add_callback(Resave)
        trainer.train()
        trainer = make_trainer(base, str(tmp_path), settings | {"max_steps": 6, "save_strategy": "no"})
        trainer.train(resume_from_checkpoint=True)
        assert {event["step"] for event in read_lines(tmp_path / "lineage.jsonl")} == {2, 4}
        assert steps_played(tmp_path) == [1, 3, 4, 5], "the rows of step 3 are lost, and step 5 has newborns"

    @pytest.mark.parametrize(
        ("begun", "changed"),
        [
            (ON_PROMPTS, {"beta": 0.04}),
            (ON_PROMPTS, {"loss_type": "grpo"}),
            (ON_PROMPTS, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
            ({}, {"per_device_train_batch_size": 6}),
            pytest.param({}, {"teacher_beta": 0.04}, marks=pytest.mark.slow),
        ],
        ids=["a KL term", "another loss", "smaller micro-batches", "smaller in a game", "a KL term of teachers"],
    )
    def test_a_run_that_goes_on_with_another_loss_or_micro_batch_samples_before_it_trains(
        self, base, tmp_path, begun, changed, caplog
    ):
        settings = begun | self.ITERATIONS | {"evolve_every": 0, "save_steps": 1, "loss_type": "dapo"}
        make_trainer(base, str(tmp_path), settings | {"max_steps": 1}).train()
        trainer, sampled = make_trainer(base, str(tmp_path), settings | changed | {"max_steps": 3}), []
        sample = trainer._generate_and_score_completions

        def note(batch):
            sampled.append(trainer.state.global_step)
            return sample(batch)

        trainer._generate_and_score_completions = note
        trainer.train(resume_from_checkpoint=True)
        assert sampled == [1, 2]
        (told,) = [line for line in caplog.messages if "dropped" in line]
        assert f"another `{[*changed][0]}`" in told

    def test_a_member_that_is_replaced_by_hand_plays_before_it_is_trained(self, base, tmp_path):
        class Replace(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    other = read_member(trainer.model, "student_1")
                    trainer.replace_member("student_0", other, step=1, operator="clone")

        settings = self.ITERATIONS | {"evolve_every": 0, "save_strategy": "no", "max_steps": 4}
        trainer = make_trainer(base, str(tmp_path), settings)
        trainer.add_callback(Replace)
        trainer.train()
        assert steps_played(tmp_path) == [1, 2, 3]


def steps_played(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "metrics.jsonl") if PLAYED in line]


class TestKill:
    @pytest.mark.slow
    @pytest.mark.parametrize("sort", [{}, ON_PROMPTS], ids=["game", "prompts"])
    def test_killed_at_random_moments(self, base, tmp_path, monkeypatch, sort):
        """Saves take a good part of the time here, so that kills fall into them."""
        for name, value in without_extras().items():
            monkeypatch.setenv(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.populora_run", "trl_populora.trainer"])
        settings = sort | {"max_steps": 6, "save_steps": 1, "save_total_limit": 2}
        rng = random.Random(0)
        warm_up = context.Process(target=len, args=("",))  # the first process waits for the server's imports
        warm_up.start()
        warm_up.join()
        start = time.perf_counter()
        one = context.Process(target=run, args=(base, str(tmp_path / "unbroken"), settings))
        one.start()
        one.join()
        seconds = time.perf_counter() - start
        assert one.exitcode == 0

        seen, kills = [], 0
        while True:
            process = context.Process(target=run, args=(base, str(tmp_path / "killed"), settings, True))
            process.start()
            process.join(rng.uniform(0.15, 0.6) * seconds if kills < KILLS else 500)
            if process.exitcode is None:
                kills += 1
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                seen.append(find_newest(str(tmp_path / "killed")))
                unfinished = [path.name for path in (tmp_path / "killed").glob("_unfinished/*")]
                print(f"kill {kills}: newest whole {seen[-1]}, cut off {unfinished}", flush=True)
                if len(seen) > 2 and seen[-1] == seen[-3]:  # make headway on a loaded machine
                    seconds *= 1.3
                continue
            assert process.exitcode == 0
            assert_files_equal(tmp_path / "unbroken", tmp_path / "killed")
            if kills >= KILLS:
                break
            shutil.rmtree(tmp_path / "killed")  # a run that is done cannot be killed: start over, and kill earlier
            seconds *= 0.7


@contextlib.contextmanager
def small_disk(path: Path, megabytes: float):
    """A full disk: a tmpfs of this size, or a limit on the size of files where mounting is not allowed."""
    path.mkdir()
    size = int(megabytes * 2**20)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


class TestFullDisk:
    def test_the_checkpoint_before_stays_usable_and_the_error_names_it(self, base, tmp_path):
        output_dir = tmp_path / "small"
        settings = {"max_steps": 3, "save_steps": 1, "save_rollouts": False}
        with small_disk(output_dir, megabytes=0.9):  # not enough for three checkpoints
            trainer = make_trainer(base, str(output_dir), settings)
            with pytest.raises(RuntimeError, match=r"checkpoint-(2|3) could not be saved.*checkpoint-(1|2) is whole"):
                trainer.train()
            assert not list(output_dir.glob("_unfinished/*"))
            assert find_newest(str(output_dir)) == str(max(output_dir.glob("checkpoint-*")))
            shutil.copytree(output_dir, tmp_path / "roomy")
        resumed = make_trainer(base, str(tmp_path / "roomy"), settings)
        resumed.train(resume_from_checkpoint=True)
        straight = make_trainer(base, str(tmp_path / "straight"), settings)
        straight.train()
        assert_equal(state_of(straight), state_of(resumed))


def test_what_a_killed_save_left_behind_is_in_nobodys_way(base, tmp_path):
    """Killed while it wrote checkpoint 20, or between the renames that put one in the place of another."""
    for leftover in ("_unfinished/checkpoint-20", "_unfinished/replaced", "checkpoint-1"):
        (tmp_path / leftover).mkdir(parents=True)
        (tmp_path / leftover / "optimizer.pt").touch()
    trainer = make_trainer(base, str(tmp_path), {"max_steps": 1, "save_steps": 1})
    trainer.train(resume_from_checkpoint="newest")
    assert find_newest(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    assert not (tmp_path / "_unfinished").exists()


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """A checkpoint after one step, and a trainer that could continue it."""
    path = str(tmp_path_factory.mktemp("saved") / "run")
    trainer = make_trainer(base, path, {"max_steps": 1, "save_steps": 1})
    trainer.train()
    # Elsewhere: the trainer's own directory holds what its last training has left.
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "checkpoint-1"
    return trainer, Path(shutil.copytree(Path(path, "checkpoint-1"), checkpoint))


def rewrite(file: str, change):
    """Damage that keeps the listing right: edits a JSON file, and its size in the listing."""

    def damage(root: Path) -> None:
        path = root / file
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))
        enlist(root, file)

    return damage


def enlist(root: Path, file: str) -> None:
    listing = json.loads((root / MANIFEST).read_text())
    listing["files"][file] = (root / file).stat().st_size
    (root / MANIFEST).write_text(json.dumps(listing))


def listed(**facts):
    """A checkpoint whose listing says other things of its run."""

    def damage(root: Path) -> None:
        (root / MANIFEST).write_text(json.dumps(json.loads((root / MANIFEST).read_text()) | facts))

    return damage


def cut_off(file: str, listed: bool = False):
    def damage(root: Path) -> None:
        content = (root / file).read_bytes()
        (root / file).write_bytes(content[: len(content) // 2])
        if listed:
            enlist(root, file)

    return damage


def unlisted(file: str):
    """A file that is neither there nor listed, as on a node that did not write it."""

    def damage(root: Path) -> None:
        (root / file).unlink()
        listing = json.loads((root / MANIFEST).read_text())
        del listing["files"][file]
        (root / MANIFEST).write_text(json.dumps(listing))

    return damage


def older_archive(root: Path) -> None:
    path = root / "archive.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({"populora_archive": "0"}), path)
    enlist(root, path.name)


def archive_without_a_column(root: Path) -> None:
    path = root / "archive.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["outputs"]), path)
    enlist(root, path.name)


def other_rank(root: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = root / "members/student_1/adapter_model.safetensors"
    save_file({key: torch.zeros(2, 2) for key in load_file(path)}, path)
    enlist(root, str(path.relative_to(root)))


def of_an_earlier_version(root: Path) -> None:
    """Rows stood by themselves in early checkpoints."""
    path = root / "rank_state_0.pt"
    state = torch.load(path)
    torch.save({name: value for name, value in state.items() if name != "played"} | {"rows": [], "idle": []}, path)
    sizes = json.loads((root / MANIFEST).read_text())
    sizes["files"][path.name] = path.stat().st_size
    (root / MANIFEST).write_text(json.dumps(sizes))


class TestDamage:
    @pytest.mark.parametrize(
        ("damage", "complaint"),
        [
            (cut_off("optimizer.pt"), r"the file optimizer.pt has \d+ bytes instead of \d+"),
            (lambda root: (root / "members/student_0/adapter_model.safetensors").unlink(), "student_0.*is missing"),
            (lambda root: (root / MANIFEST).unlink(), "it lacks whole.json, which is written last"),
            (cut_off(MANIFEST), "whole.json is broken"),
            (cut_off("game.json", listed=True), r"game.json cannot be read"),
            (
                cut_off("members/teacher_1/adapter_model.safetensors", listed=True),
                r"teacher_1/adapter_model.safetensors",
            ),
            (cut_off("archive.parquet", listed=True), r"archive.parquet cannot be read"),
            (
                rewrite("game.json", lambda s: s.pop("population")),
                "game.json: field `population` is missing or broken",
            ),
            (
                rewrite("game.json", lambda s: s.update(format=7)),
                "game.json: field `format` is 7, this version reads 1",
            ),
            (rewrite("population.json", lambda s: s.update(base_model="Qwen/Other")), None),
            (
                rewrite("population.json", lambda s: s["base_config"].update(hidden_size=64)),
                r"population.json: field `base_config.hidden_size` is 64, this trainer has 32. Use the population's",
            ),
            (rewrite("population.json", lambda s: s["lora"].update(r=8)), "field `lora.r` is 8, this trainer has 4"),
            (
                rewrite("population.json", lambda s: s["lora"].update(alpha_pattern={"q_proj": 3})),
                "field `lora.alpha_pattern` is {'q_proj': 3}, this trainer has {}",
            ),
            (
                rewrite("population.json", lambda s: s["members"].pop()),
                "field `members` lists teacher_0, teacher_1, st",
            ),
            (other_rank, r"student_1/adapter_model.safetensors cannot be read into member.*must have shape"),
            (older_archive, "archive.parquet: field `populora_archive` of the schema is 0, this version reads 5"),
            (archive_without_a_column, "archive.parquet: column `outputs` is missing"),
            (
                cut_off("rank_state_0.pt", listed=True),
                r"rank_state_0.pt is missing or cannot be read \(.*`warm_start='",
            ),
            (unlisted("rank_state_0.pt"), r"rank_state_0.pt is missing or cannot be read \(.*No such file"),
            (of_an_earlier_version, "rank_state_0.pt is of another version of this package"),
            (listed(backend="ZeRO-2"), "was saved under ZeRO-2, and this run uses DDP .one process.*`warm_start='/"),
        ],
    )
    def test_is_refused_by_file_and_field(self, saved, tmp_path, damage, complaint):
        trainer, checkpoint = saved
        copy = tmp_path / "checkpoint-1"
        shutil.copytree(checkpoint, copy)
        damage(copy)
        if complaint is None:  # a directory may have moved
            trainer.train(resume_from_checkpoint=str(copy))
            return
        with pytest.raises(ValueError, match=complaint):
            trainer.train(resume_from_checkpoint=str(copy))

    def test_a_hub_base_of_another_name_is_refused(self, saved, tmp_path, monkeypatch):
        trainer, checkpoint = saved
        monkeypatch.setattr(trainer, "shape", replace(trainer.shape, base_model="Qwen/Qwen3-0.6B"))
        copy = tmp_path / "checkpoint-1"
        shutil.copytree(checkpoint, copy)
        rewrite("population.json", lambda state: state.update(base_model="Qwen/Qwen3-0.6B-Base"))(copy)
        with pytest.raises(ValueError, match="field `base_model` is 'Qwen/Qwen3-0.6B-Base', this trainer trains on"):
            trainer.train(resume_from_checkpoint=str(copy))

    def test_damaged_checkpoints_are_passed_over_with_a_warning(self, saved, tmp_path, caplog):
        _, checkpoint = saved
        for step in (3, 5, 8):
            shutil.copytree(checkpoint, tmp_path / f"checkpoint-{step}")
        cut_off("rng_state.pth")(tmp_path / "checkpoint-8")
        (tmp_path / "_unfinished" / "checkpoint-9").mkdir(parents=True)
        assert find_newest(str(tmp_path)) == str(tmp_path / "checkpoint-5")
        assert "_unfinished/checkpoint-9: the run ended while it was being written" in caplog.text
        assert "checkpoint-8: the file rng_state.pth has" in caplog.text
        assert find_flaw(tmp_path / "checkpoint-5") is None

    def test_a_checkpoint_without_optimizer_state_is_refused_and_starts_another_run(self, base, tmp_path):
        once = {"max_steps": 1, "save_steps": 1}
        make_trainer(base, str(tmp_path / "run"), once | {"save_only_model": True}).train()
        saved, settings = str(tmp_path / "run" / "checkpoint-1"), {"max_steps": 2, "save_strategy": "no"}
        trainer = make_trainer(base, str(tmp_path / "run"), settings)
        with pytest.raises(
            ValueError, match=f"{saved} was saved with `save_only_model`.*`warm_start='{saved}'` begins"
        ):
            trainer.train(resume_from_checkpoint=True)
        warm = make_trainer(base, str(tmp_path / "warm"), settings | {"warm_start": saved})
        wanted = load_file(f"{saved}/members/student_0/adapter_model.safetensors")
        assert all(torch.equal(value, wanted[key]) for key, value in read_member(warm.model, "student_0").items())
        warm.close()

    def test_nothing_to_resume_from(self, base, tmp_path):
        assert find_newest(str(tmp_path)) is None
        trainer = make_trainer(base, str(tmp_path), {"max_steps": 1})
        with pytest.raises(ValueError, match='holds no checkpoint that is whole on all nodes. `"newest"` instead'):
            trainer.train(resume_from_checkpoint=True)
        trainer.close()


class TestOtherSettings:
    @pytest.mark.parametrize(
        ("settings", "complaint"),
        [
            (
                {"learning_rate": 1e-3},
                "cannot change these settings: `learning_rate` was 0.01, is 0.001. Resume with the saved",
            ),
            ({"teacher_learning_rate": 1e-3}, "`teacher_learning_rate` was None, is 0.001"),
            ({"seed": 7}, "`seed` was 42, is 7"),
            ({"task_kinds": ["code_o"]}, r"`task_kinds` was \['tests.populora_run:Letters', 'code_o'\], is"),
            ({"seed": 7, "learning_rate": 1.0}, "`learning_rate` was 0.01, is 1.0; `seed` was 42, is 7"),
            ({"adam_beta1": 0.5, "weight_decay": 0.1}, "`weight_decay` was 0.0, is 0.1; `adam_beta1` was 0.9, is 0.5"),
            ({"model_init_kwargs": {"revision": "v1"}}, "`base_revision` was 'main', is 'v1'"),
            ({"optim": "sgd"}, "`optim` was 'adamw_torch.*', is 'sgd'"),
            ({"temperature": [1.0, 1.0, 0.7, 1.3]}, r"`temperature` was 1.0, is \[1.0, 1.0, 0.7, 1.3\]"),
        ],
    )
    def test_what_would_be_taken_by_halves_is_refused(self, base, saved, tmp_path, settings, complaint):
        trainer = make_trainer(base, str(tmp_path), {"max_steps": 2} | settings)
        with pytest.raises(ValueError, match=complaint):
            trainer.train(resume_from_checkpoint=str(saved[1]))

    def test_a_refused_resume_leaves_the_trainer_as_it_was(self, base, saved, tmp_path):
        trainer = make_trainer(base, str(tmp_path), {"max_steps": 1, "learning_rate": 1e-3, "save_strategy": "no"})
        before = {name: read_member(trainer.model, name) for name in trainer.population.names}
        with pytest.raises(ValueError, match="`learning_rate` was 0.01, is 0.001"):
            trainer.train(resume_from_checkpoint=str(saved[1]))
        for name, member in before.items():
            found = read_member(trainer.model, name)
            assert all(torch.equal(value, found[key]) for key, value in member.items()), name
        assert trainer.optimizer is None
        assert trainer.state.global_step == 0

    def test_what_is_taken_is_said(self, base, saved, tmp_path, caplog):
        settings = {"max_steps": 2, "evolve_every": 2, "save_strategy": "no", "max_grad_norm": 0.5}
        trainer = make_trainer(base, str(tmp_path), settings)
        trainer.train(resume_from_checkpoint=str(saved[1]))
        (line,) = [line for line in caplog.messages if "other settings" in line]
        assert line.endswith(
            "which hold from here on: `evolve_every` was 3, is 2; `max_steps` was 1, is 2; "
            "`max_grad_norm` was 1.0, is 0.5."
        )

    def test_older_checkpoints_are_not_asked_for_what_they_lack(self, saved, tmp_path, caplog):
        trainer, checkpoint = saved
        copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-1"))
        rewrite("population.json", lambda state: state.pop("settings"))(copy)
        trainer.train(resume_from_checkpoint=str(copy))
        assert "other settings" not in caplog.text


def test_a_checkpoint_without_its_members_is_told_by_the_field(tmp_path):
    (tmp_path / "game.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="game.json: field `population.seats` is missing"):
        load_members(str(tmp_path), None, Population(0, 2))


def test_the_archive_of_a_run_opens_as_a_dataset(saved, tmp_path):
    from datasets import load_dataset

    trainer, checkpoint = saved
    table = load_dataset(
        "parquet", data_files=str(checkpoint / "archive.parquet"), split="train", cache_dir=str(tmp_path)
    )
    fresh = [row for row in table if row["author"] != "seed"]
    assert fresh
    assert all(0 <= row["solve_rate"] <= 1 and row["match"] in (0, 1) for row in fresh)
    assert {row["kind"] for row in table} == {"letters", "code_o", "code_i", "code_f"}
    assert len(table) == len(trainer.archive)
