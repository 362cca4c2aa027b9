"""Whole runs with colocated engines; `test_vllm_server.py` has those with a server, `test_recipes.py` a recipe's."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback


pytest.importorskip("vllm", reason="vLLM is not installed")

from trl_populora.lora.members import read_member, save_member, write_member

from . import mends
from .populora_run import HELD_OUT
from .prompt_runs import population_trainer, stock_run, train_and_watch
from .vllm_models import (
    ENGINE_ENVIRONMENT,
    largest_difference,
    logprobs_of,
    make_population,
    make_served_base,
    randomise,
)
from .vllm_processes import PATIENCE, environment, finish, result_of, start_run
from .vllm_run import make_trainer, run


pytestmark = pytest.mark.vllm


def left_shelves() -> set[str]:
    """Shelves in shared memory whose owner is gone; those of tests beside this one are locked."""
    left = set()
    for path in Path("/dev/shm").glob("populora-*/.lock"):
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.add(path.parent.name)
            except OSError:
                pass
    return left


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_with_an_engine_each_agree_and_sample_from_newborn_members(tmp_path):
    before = left_shelves()
    settings = {
        "base": make_served_base(tmp_path / "base"),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 3,
        "save_strategy": "no",
        "evolve_every": 2,
        "evolve_burn_in": 0,
    }
    code, output = finish(start_run(settings, 2, tmp_path / "log"), tmp_path / "log")
    assert code == 0, output[-3000:]
    result = result_of(output)
    assert (result["steps"], result["world"]) == (3, 2)
    assert result["sums"][0] == result["sums"][1]
    assert max(result["logp_differences"]) < 1e-3
    print(f"newborns' log-probability differences to the child and to the member before it: {result['newborns']}")
    assert len(result["newborns"]) == 2 * 2, "a teacher and a student, on two ranks"
    for from_child, from_old in result["newborns"]:
        assert from_child < 1e-3
        assert from_old > 1e-2
    assert left_shelves() <= before


@pytest.fixture(scope="module")
def engines_here():
    """An environment in which this process may start engines."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENGINE_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def cramped(engines_here, tmp_path_factory):
    """Runs with an engine in which six references never have room: a function of a run's steps."""
    root = tmp_path_factory.mktemp("cramped")
    base = make_served_base(root / "base")

    def in_this_process(name: str, steps: int, **settings) -> dict:
        settings |= {"base": base, "output_dir": str(root / name), "max_steps": steps}
        settings |= {"references_per_proposal": 6, "vllm_max_model_length": 320, "lr_scheduler_type": "constant"}
        return run(settings)

    return in_this_process


@pytest.fixture(scope="module")
def straight(cramped):
    return cramped("straight", 4, save_strategy="no")


@pytest.mark.slow
def test_a_command_with_a_colocated_engine_ends_with_what_it_tells(tmp_path):
    options = "--dtype float32 --use_cpu true --bf16 false --evolve_every 0 --max_steps 1 --use_vllm true"
    options += " --proposals_per_teacher 2 --attempts_per_task 2 --per_device_train_batch_size 2 --save_strategy no"
    options += " --report_to none --max_completion_length 8 --vllm_max_model_length 1024"
    command = [sys.executable, "-m", "trl_populora", "train", *options.split(), "--output_dir", str(tmp_path / "run")]
    command += ["--model_name_or_path", "tiny", "--vllm_engine_kwargs", '{"enforce_eager": true}']
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Population saved" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_vllm_answers_when_a_base_is_tried():
    options = ["tiny", "--vllm", "--task_kinds", "code_o", "--samples", "8"]
    command = [sys.executable, "-m", "trl_populora", "try", *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Settings that fit:\n  task_kinds: [code_o]\n  prompt_style: compact\n" in done.stdout
    assert "Completions end at the tokens 2," in done.stdout


def test_references_that_the_engine_has_no_room_for_are_dropped(straight):
    assert straight["steps"] == 4
    assert len(straight["dropped"]) == 4
    assert min(straight["dropped"]) > 0


def test_a_resumed_run_with_a_colocated_engine_equals_a_straight_one(cramped, straight):
    """The engine draws from torch's generator, which a checkpoint holds."""
    cramped("cut", 2, save_strategy="steps", save_steps=2)
    resumed = cramped("cut", 4, save_strategy="no", resume=True)
    assert resumed["sums"] == straight["sums"]
    assert resumed["logp_differences"] == straight["logp_differences"]


def test_attempts_begin_before_the_last_proposal_has_ended(engines_here, tmp_path):
    settings = {"base": make_served_base(tmp_path / "base"), "output_dir": str(tmp_path / "run"), "max_steps": 2}
    stops = {"stop_token_ids": [*range(0, 256, 4)]}  # so that proposals end at different times
    trainer = make_trainer(settings | {"save_strategy": "no", "generation_kwargs": stops, "replay": 0.2})
    generate, seen = trainer.game.player.generate, []

    def watch(prompts, members, follow=None):
        told = []

        def follow_and_note(ended):
            asked = follow(ended)
            told.append(([members[row][:7] for row in ended].count("teacher"), len(asked[0])))
            return asked

        assert follow is not None, "there is no second wave"
        found = generate(prompts, members, follow=follow_and_note)
        seen.append((told, len(found)))
        return found

    trainer.game.player.generate = watch
    trainer.train()
    proposals, attempts = 2 * 4, 2
    for told, rows in seen:
        assert sum(ended for ended, _ in told) == proposals
        assert [asked for _, asked in told] == [attempts * ended for ended, _ in told], "nothing here is a task"
        assert sum(ended for ended, _ in told[:-1]) > proposals // 2
        assert rows == proposals + (proposals + 2) * attempts
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(seen) == 2
    assert max(entry["sampling/sampling_logp_difference/mean"] for entry in logged) < 1e-3
    assert all(entry["time/propose"] > 0 and entry["time/solve"] > 0 for entry in logged)


@pytest.mark.slow
def test_pooled_members_sample_from_their_mean_also_where_an_evaluation_has_published_what_they_were(
    engines_here, tmp_path
):
    settings = {"base": make_served_base(tmp_path / "base"), "output_dir": str(tmp_path / "run"), "max_steps": 3}
    settings |= {"save_strategy": "no", "pool_every": 2, "pool": "both", "lr_scheduler_type": "constant"}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "eval_attempts": 1, "sandbox_allow_weak": True}
    settings["task_kinds"] = ["tests.populora_run:Letters"]
    tasks = [HELD_OUT[-1] | {"message": message} for message in ("xyz", "uvw")]
    trainer = make_trainer(settings, tasks, HELD_OUT[1:])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["pool/student/distance"] is None for entry in logged] == [True, True, False]
    assert max(entry["sampling/sampling_logp_difference/mean"] for entry in logged) < 1e-3


@pytest.mark.slow
def test_beside_a_quantised_base_vllm_serves_it_unrounded_and_its_samples_are_weighted(engines_here, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
    base, options = make_served_base(tmp_path / "base"), {"load_in_4bit": True, "quant_method": "bitsandbytes"}
    settings = {"base": base, "output_dir": str(tmp_path / "run"), "max_steps": 1, "save_strategy": "no"}
    trainer = make_trainer(settings | {"model_init_kwargs": {"quantization_config": options}})
    whole, names, router = make_population(base, len(trainer.population.names))
    for seed, (name, twin) in enumerate(zip(trainer.population.names, names, strict=True)):
        randomise(trainer.model, name, seed)
        write_member(whole, twin, read_member(trainer.model, name))
    trainer.train()

    completions = [row.completion for row in trainer.played.rows]
    members = [trainer.population[row.member].index for row in trainer.played.rows]
    prompts, texts = ([getattr(c, f"{part}_ids") for c in completions] for part in ("prompt", "completion"))
    sampled = [completion.logprobs for completion in completions]
    assert largest_difference(sampled, logprobs_of(whole, router, members, prompts, texts)) < 1e-3
    told = trainer.state.log_history[0]
    assert told["sampling/sampling_logp_difference/mean"] > 1e-3, "four bits are not the base"
    assert told["sampling/importance_sampling_ratio/min"] < 1


@pytest.mark.slow
def test_mends_hold_with_an_engine(engines_here, seed_tasks, tmp_path):
    """See `test_mends_hold_on_several_processes`."""
    shared = {"base": make_served_base(tmp_path / "base"), "output_dir": str(tmp_path / "run"), "eval_attempts": 3}
    shared |= {"task_kinds": ["tests.populora_run:Letters", "code_o"], "sandbox_allow_weak": True}
    tasks = [task.to_record() for task in seed_tasks]
    seen = mends.go_through(lambda settings, held_out: make_trainer(shared | settings, tasks, held_out))
    mends.check_all(seen)
    differences = [entry[key] for entry in seen["log"] for key in entry if key.endswith("logp_difference/max")]
    assert max(differences) < 1e-3, "the second training samples from the members as the first has left them"


def start_prompts(base: str, output_dir: Path, **options):
    """A run of two members on a dataset, with an engine that writes what they sample, and what it will have asked."""
    engine = {"enforce_eager": True} | options.pop("vllm_engine_kwargs", {})
    options |= {"use_vllm": True, "vllm_engine_kwargs": engine, "vllm_max_model_length": 256}
    trainer, judge = population_trainer(base, output_dir, ["a", "b"], **options)
    del trainer._generate_rows  # which records
    generate, asked = trainer._generate_rows, []

    def generate_and_keep(prompts, members, seeds=None):
        found = generate(prompts, members, seeds)
        asked.append((list(members), found))
        return found

    trainer._generate_rows = generate_and_keep
    return trainer, judge, asked


@pytest.mark.slow
def test_two_members_with_an_engine_are_two_runs_of_trl(engines_here, tmp_path):
    base = make_served_base(tmp_path / "base")
    options, rates = {"loss_type": "dapo", "max_steps": 5}, [1e-2, 3e-3]
    # In bf16 the engine's log-probabilities are so far from the trainer's that weights of the samples matter.
    trainer, judge, asked = start_prompts(
        base, tmp_path / "ours", learning_rate=rates, vllm_engine_kwargs={"dtype": "bfloat16"}, **options
    )
    names = trainer.population.names
    for name in names:
        save_member(trainer.model, name, tmp_path / name)
    gradients, factors = train_and_watch(trainer)
    assert min(entry["sampling/importance_sampling_ratio/min"] for entry in trainer.state.log_history[:-1]) < 0.999
    for name, rate in zip(names, rates, strict=True):
        rows = [[each for owner, each in zip(*step, strict=True) if owner == name] for step in asked]
        sampled = [([row.completion_ids for row in step], [row.logprobs for row in step]) for step in rows]
        _, stock_judge, stock_gradients, stock_factors = stock_run(
            base, tmp_path / name, tmp_path / f"stock_{name}", name, sampled=sampled, learning_rate=rate, **options
        )
        for mine, theirs in zip(judge.calls, stock_judge.calls, strict=True):
            own = [place for place, owner in enumerate(mine["member"]) if owner == name]
            for column in theirs:
                assert [mine[column][place] for place in own] == theirs[column]
        for key, expected in stock_gradients[0].items():
            atol = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(gradients[0][name][key], expected, rtol=0, atol=atol)
        for key, expected in stock_factors.items():
            assert (factors[name][key] - expected).norm() / expected.norm() < 1e-5, f"{name} {key}"


@pytest.mark.slow
def test_a_member_that_joins_is_published_and_answers_with_its_own_weights(engines_here, tmp_path):
    base, differences = make_served_base(tmp_path / "base"), []
    trainer, _, asked = start_prompts(base, tmp_path / "run", max_members=3, max_steps=4)
    population = trainer.population

    def compare(writers) -> float:
        """How far the last samples are from what these members would have said."""
        completions = asked[-1][1]
        prompts, texts = ([getattr(c, f"{part}_ids") for c in completions] for part in ("prompt", "completion"))
        rows = [population[name].index for name in writers]
        expected = logprobs_of(trainer.model, trainer.router, rows, prompts, texts)
        return largest_difference([c.logprobs for c in completions], expected)

    class Change(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.remove_member("late")
            if state.global_step in (1, 2):  # the second newcomer takes the seat that the first has left
                name = {1: "late", 2: "later"}[state.global_step]
                trainer.add_member(name, like="student_0")
                randomise(trainer.model, population.adapter(name), seed=state.global_step)

    judge_rows = trainer._judge

    def compare_and_judge(*arguments):
        writers = asked[-1][0]
        others = ["student_0" if name.startswith("late") else name for name in writers]
        differences.append(([*dict.fromkeys(writers)], compare(writers), compare(others)))
        judge_rows(*arguments)

    trainer._judge = compare_and_judge
    trainer.add_callback(Change())
    trainer.train()
    print(f"log-probability differences, and to student_0 instead of a newcomer: {differences}")
    newcomers = [members[2:] for members, *_ in differences]
    assert newcomers == [[], ["late"], ["later"], ["later"]]
    assert max(own for _, own, _ in differences) < 1e-3
    assert min(other for members, _, other in differences if members[2:]) > 1e-2
