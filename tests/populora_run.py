"""One small run for tests that launch it on two ranks, kill it, or cut it in two: see `test_checkpoint.py`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.small_run import QUIET, SMALL, small_lora, small_trainer
from trl_populora.sandbox.values import encode
from trl_populora.tasks.kind import Attempt, Proposal, Reject, Task, TaskKind


def letters(completions, **kwargs) -> list[float]:
    """A reward that a random base earns by chance; by the built-in ones all its rows are worth the same."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [sum(c.isalpha() for c in text) / 10 for text in texts]


class Letters(TaskKind):
    """A task that a random base writes and solves by chance: the answer must share a letter with the proposal."""

    name = "letters"
    reference_kinds = ("letters",)

    def proposal_prompt(self, references, style):
        return [{"role": "user", "content": "propose " + " ".join(task.message for task in references)[:40]}]

    def parse_proposal(self, text, references):
        found = "".join(sorted({c for c in text if c.isascii() and c.isalpha()}))
        return Proposal(self.name, "", (), found) if len(found) > 1 else Reject.FORMAT

    def check(self, proposal):
        return None

    def accept(self, proposal, verdict, rng):
        return Task(self.name, "", (), (), proposal.message)

    def solving_prompt(self, task, style):
        return [{"role": "user", "content": f"solve {task.message}"}]

    def parse_attempt(self, text, task):
        return Attempt(True, text) if any(c.isalpha() for c in text) else Attempt(False, "", "format")

    def trial(self, task, attempt):
        return None

    def correct(self, task, attempt, verdict):
        return bool(set(task.message) & set(attempt.answer))

    def features(self, task):
        return tuple(task.message)


SETTINGS = SMALL | {
    "task_kinds": ["tests.populora_run:Letters", "code_o"],
    "per_device_train_batch_size": 12,
    "max_completion_length": 8,
    "determinism_runs": 1,
    "sandbox_allow_weak": True,  # nothing is run here: a random base writes no program
    "evolve_every": 3,
    "evolve_burn_in": 1,
    "save_strategy": "steps",
    "ddp_timeout": 180,  # seconds that ranks wait for one that went another way
}


# One task of code, which a random base never solves, and nine that it solves by chance.
HELD_OUT = [
    {
        "kind": "code_o",
        "program": "def f(a):\n    return a - 1",
        "inputs": [encode((7,))],
        "outputs": ["6"],
        "message": "",
    },
    *({"kind": "letters", "program": "", "inputs": [], "outputs": [], "message": word} for word in "abcdefghi"),
]
EVALUATED = {"evaluated": True, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "eval_attempts": 3}


# A run on a dataset: 4 members, 3 generations an epoch, each with 2 prompts of 7 and 2 attempts at a prompt.
ON_PROMPTS = QUIET | {
    "on_prompts": True,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "linear",
    "logging_steps": 1,
    "evolve_every": 3,
    "evolve_burn_in": 1,
    "save_strategy": "steps",
    "ddp_timeout": 180,
}


def make_trainer(base: str, output_dir: str, settings: dict):
    """
    A trainer of the shared shape: 2T+2S, 24 rows a step, an evolution event every 3 steps. With `ON_PROMPTS` one of a
    dataset run.
    """
    import torch

    torch.set_num_threads(1)
    if settings.get("on_prompts"):
        return prompt_trainer(base, output_dir, settings)
    tasks = json.loads(Path(base, "tasks.json").read_text())
    settings = SETTINGS | {"output_dir": output_dir} | settings
    held_out = settings.pop("evaluated", None)
    return small_trainer(base, tasks, letters, HELD_OUT if held_out is True else held_out, **settings)


def prompt_trainer(base: str, output_dir: str, settings: dict):
    """A trainer of a dataset run: four students and two reward functions."""
    from tests.prompt_runs import QUESTIONS, brief
    from trl_populora import PopuLoRAConfig, PopuLoRATrainer

    settings = {name: value for name, value in settings.items() if name != "on_prompts"}
    held_out = QUESTIONS.select(range(3)) if settings.pop("evaluated", False) else None
    args = PopuLoRAConfig(output_dir, **settings)
    return PopuLoRATrainer(base, [letters, brief], args, QUESTIONS, held_out, peft_config=small_lora())


def run(base: str, output_dir: str, settings: dict, resume: bool = False) -> None:
    """Trains to the end, from the newest whole checkpoint if `resume`."""
    trainer = make_trainer(base, output_dir, settings)
    trainer.train(resume_from_checkpoint="newest" if resume else None)
    trainer.save_state()
    trainer.save_model()


def cut_run(base: str, output_dir: str, settings: dict, cut: int, then: dict | None = None):
    """Stops a run after `cut` steps. Another trainer resumes it, with the changes in `then`, and is returned."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = control.should_save = state.global_step == cut

    trainer = make_trainer(base, output_dir, settings)
    trainer.add_callback(Stop)
    trainer.train()
    assert trainer.state.global_step == cut
    trainer = make_trainer(base, output_dir, settings | (then or {}))
    trainer.train(resume_from_checkpoint=True)
    return trainer


def find_optimizer(trainer):
    """The optimizer itself, without the wrappers of accelerate and DeepSpeed."""
    found = trainer.optimizer
    while hasattr(found, "optimizer"):
        found = found.optimizer
    return found


def state_of(trainer) -> dict:
    """Everything that must be equal after equal runs: adapters, state, records; times left out."""
    import torch

    from trl_populora.lora.members import read_member
    from trl_populora.run.checkpoint import collect_game_state
    from trl_populora.run.read import read_lines

    run = Path(trainer.args.output_dir)
    members = {name: read_member(trainer.model_wrapped, name) for name in trainer.population.adapters}
    return {
        "members": {f"{m}/{k}": v.numpy().tobytes() for m, factors in members.items() for k, v in factors.items()},
        "game": json.dumps(collect_game_state(trainer._stateful, trainer.archive)),
        "archive": [] if trainer.archive is None else list(trainer.archive.entries()),
        "optimizer": [
            value.tolist() if isinstance(value, torch.Tensor) else value
            for state in find_optimizer(trainer).state.values()  # ZeRO-3 keys it by no parameter of the optimizer
            for value in state.values()
        ],
        "lineage": read_lines(lineage) if (lineage := run / "lineage.jsonl").exists() else [],
        "history": [timeless(entry) for entry in trainer.state.log_history if "train_loss" not in entry],
        "metrics": [timeless(entry) for entry in read_lines(run / "metrics.jsonl")],
        "rollouts": {p.name: p.read_bytes() for p in sorted(run.glob("rollouts/*.parquet"))},
    }


def assert_equal(wanted: dict, found: dict) -> None:
    assert [key for key in wanted if wanted[key] != found[key]] == []


def assert_files_equal(wanted: Path, found: Path) -> None:
    """Byte for byte, except files that hold times or pickles of paths."""
    names = [p.relative_to(wanted) for p in sorted(wanted.rglob("*")) if p.suffix in (".safetensors", ".parquet")]
    names += [Path("population.json"), Path("lineage.jsonl")]
    names += [p.relative_to(wanted) for p in sorted(wanted.glob("checkpoint-*/game.json"))]
    assert len(names) > 15
    assert [str(name) for name in names if (wanted / name).read_bytes() != (found / name).read_bytes()] == []


def timeless(entry: dict) -> str:
    """Metrics without wall-clock times, as text: NaN equals NaN there."""
    return json.dumps({key: value for key, value in entry.items() if "time" not in key}, sort_keys=True)
