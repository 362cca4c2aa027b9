"""Recipes run as their README says: YAML parses, commands end with the files they promise."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_dataset
from trl import ModelConfig, TrlParser

from trl_populora.__main__ import TrainArguments, read_seed_tasks
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.populora_trainer import PopuLoRATrainer
from trl_populora.tasks.base import Proposal, Reject, Task


ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
sys.path.insert(0, str(RECIPES))

from arithmetic_kind import Arithmetic, evaluate, reachable  # noqa: E402


CONFIGS = sorted(path for path in RECIPES.rglob("*.yaml"))


def launch(*arguments: str) -> str:
    """Runs `accelerate launch` on the CPU as the README does, and returns all it printed; fails with that."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/single.yaml"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's child outlives it otherwise
    assert process.returncode == 0, output[-5000:]
    return output


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(RECIPES)))
def test_yaml_parses_and_its_batch_fits(path, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    parser = TrlParser((TrainArguments, PopuLoRAConfig, ModelConfig))
    overrides = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--use_vllm", "false"]
    recipe, args, model = parser.parse_args_and_config(["--config", str(path), *overrides])
    assert args.rows_per_step % args.per_device_train_batch_size == 0
    assert model.model_name_or_path
    assert recipe.seed_tasks is None or (ROOT / recipe.seed_tasks).is_file()


def test_quick_start_leaves_what_the_readme_lists(tmp_path):
    run = tmp_path / "run"
    settings = {"output_dir": run, "max_steps": 4, "evolve_every": 2, "evolve_burn_in": 1, "proposals_per_teacher": 4}
    overrides = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    overrides += ["--attempts_per_task", "2", "--per_device_train_batch_size", "8"]
    output = launch("recipes/train_populora.py", "--config", "recipes/tiny/quickstart.yaml", *overrides)
    assert output.count("| valid") == 4, "one line per step"
    for word in ("match", "propose", "verify", "solve", "update"):
        assert f"{word} " in output
    assert "Population after 4 steps" in output
    members = {path.parent.name for path in run.glob("members/*/adapter_model.safetensors")}
    assert members == {"teacher_0", "teacher_1", "student_0", "student_1"}
    assert len(json.loads((run / "population.json").read_text())["members"]) == 4
    lineage = [json.loads(line) for line in (run / "lineage.jsonl").read_text().splitlines()]
    assert {event["role"] for event in lineage} == {"teacher", "student"}
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")
    rows = load_dataset("parquet", data_files=str(run / "rollouts" / "*.parquet"), split="train", cache_dir=tmp_path)
    assert len(rows) == 4 * 2 * 4 * (1 + 2)
    assert all(row["reject_reason"] for row in rows if row["role"] == "teacher" and not row["valid"])


class TestArithmetic:
    kind = Arithmetic()

    def task(self, text: str) -> Task | Reject:
        proposal = self.kind.parse_proposal(text, [])
        return self.kind.accept(proposal, None, random.Random(0)) if isinstance(proposal, Proposal) else proposal

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("numbers: 3 5\ntarget: 99", Reject.ERROR),
            ("numbers: 3 5\ntarget: 5", Reject.ARGUMENTS),
            ("numbers: 0 5\ntarget: 5", Reject.ARGUMENTS),
            ("numbers: 3\ntarget: 3", Reject.FORMAT),
            ("numbers: 3 5\ntarget: 8\ntarget: 9", Reject.FORMAT),
            ("__import__('os')", Reject.FORMAT),
        ],
    )
    def test_bad_proposals(self, text, reason):
        assert self.task(text) is reason

    @pytest.mark.parametrize(
        ("answer", "well_formed", "correct"),
        [
            ("(3 + 4) * 2", True, True),
            ("2*3 + 2*4", True, False),  # uses 2 twice
            ("3 + 4 + 7", True, False),  # 7 is not there
            ("3 + 4", True, False),
            ("3 +", False, False),
            ("2 ** 3", False, False),
            ("__import__('os').system('true')", False, False),
            ("(" * 200, False, False),
        ],
    )
    def test_answers(self, answer, well_formed, correct):
        task = self.task("numbers: 2 3 4\ntarget: 14")
        attempt = self.kind.parse_attempt(answer, task)
        assert attempt.well_formed is well_formed
        assert (well_formed and self.kind.correct(task, attempt, None)) is correct

    def test_evaluation_agrees_with_python(self):
        rng = random.Random(0)
        for _ in range(200):
            text = str(rng.randint(0, 20))
            for _ in range(rng.randint(0, 5)):
                text = f"({text}) {rng.choice('+-*')} {rng.randint(0, 20)}"
            assert evaluate(text)[0] == eval(text)

    def test_reachable_by_hand(self):
        assert reachable((2, 3)) == {2, 3, 5, 1, -1, 6}

    def test_a_population_plays_it_without_any_change_to_the_package(self, random_base, make_args, lora, tmp_path):
        seeds = read_seed_tasks(str(RECIPES / "arithmetic_seeds.jsonl"))
        args = make_args(task_kinds=["arithmetic_kind:Arithmetic"], max_steps=1)
        trainer = PopuLoRATrainer(random_base, args=args, train_dataset=seeds, peft_config=lora)
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "propose/arithmetic/valid_rate" in entry)
        assert logged["propose/arithmetic/valid_rate"] == 0.0, "a random base writes no puzzle"
        assert logged["solve/archive_rate"] == 0.0
