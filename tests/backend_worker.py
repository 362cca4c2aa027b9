"""One process of what tests/test_backends.py launches: `backend_worker.py BASE OUTPUT SCENARIO...`.

Every scenario trains on the fixed rows, so that no rating or sample depends on a member, and what this rank saw of it
goes to `OUTPUT/SCENARIO/rank_N.pt`:

- `replace` overwrites a member after the first step, gives another one the optimizer state of a third, and takes the
  second step with learning rate 0;
- `evolve` has an evolution event after the second of three steps;
- `pool` pools the students after the second step, and takes the third one with learning rate 0;
- `plain` is the same run without the event; for ZeRO-3 the user has everything partitioned;
- `broken` is a run in whose second step the loss of a member is NaN;
- `savings` is the first step of each loss, with and without blank rows and shared prompts;
- `resume`, `resume quantised` and `resume bf16` play a game straight, and again cut in two by a checkpoint;
- `groups` are runs in which one role stays or is not there, or one adapter plays both;
- `evaluate` is one evaluation on held-out tasks;
- `answers` are those of two members, at temperatures of their own, in an evaluation of a dataset run;
- `mends` is a trainer's way through faults that were mended;
- `own` is a game whose pairs and advantages are a user's own functions, which say something else on each rank;
- `shard` is FSDP2, which needs no trainer;
- `half` is one step in fp16 with a loss scale, which only DeepSpeed does on a CPU;
- `unwritable` fails to save, because a file stands where the main process wants a directory. It ends the process.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import TrainerCallback

from tests import fsdp_worker, held_out_worker, mends, populora_run
from tests.fixed_rows import POPULATION, TEACHERS, play_fixed_rows
from tests.launching import leave
from tests.mends import why_refused
from tests.prompt_runs import QUESTIONS, brief
from tests.small_run import QUIET, small_lora
from trl_populora.config import PopuLoRAConfig
from trl_populora.lora import members as lora_members
from trl_populora.lora.members import (
    _find_optimizer_entries,
    _offloads_gradients,
    adds_nothing,
    member_parameters,
    read_member,
    withhold_gradients,
)
from trl_populora.run.checkpoint import MANIFEST, UNFINISHED
from trl_populora.sandbox import Job
from trl_populora.start import check_quantised, refuse_unsupported
from trl_populora.trainer import PopuLoRATrainer


# About Adam's epsilon see test_solo_parity.py.
CLIPPED = {"lr_scheduler_type": "constant", "max_grad_norm": 0.02, "adam_epsilon": 1e-4}
LOSS_SCALE = 1024.0
QUANTISED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}
REPLACED = "teacher_1"
EVENT = 2  # the step of the evolution


def new_factors(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    return {key: 0.1 * torch.randn(value.shape, generator=generator) for key, value in factors.items()}


def live_member(model, name: str) -> dict[str, torch.Tensor]:
    """What the next forward computes with, as opposed to ZeRO's master copy."""
    return {key: p.detach().clone() for key, p in member_parameters(model, name).items()}


def optimizer_state(trainer, name: str) -> list[torch.Tensor]:
    """Moments and steps of a member, as far as this rank holds them."""
    entries = _find_optimizer_entries(trainer.optimizer, trainer.model_wrapped, name)
    return [torch.as_tensor(value).clone() for states, key, _ in entries for value in states[key].values()]


class Replacement(TrainerCallback):
    """Overwrites a member after the first step and notes what became of it."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, {}

    def note(self, moment: str) -> None:
        model = self.trainer.model_wrapped
        self.seen[moment] = {
            "live": live_member(model, REPLACED),
            "read": read_member(model, REPLACED),
            "state": optimizer_state(self.trainer, REPLACED),
            "other state": optimizer_state(self.trainer, "teacher_0"),
        }

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.note("before the write")
            factors = new_factors(read_member(self.trainer.model_wrapped, REPLACED))
            self.trainer.replace_member(REPLACED, factors, step=1)
            self.note("after the write")
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = 0.0
        if state.global_step == 2:
            self.note("after a step with learning rate 0")


def without_compiler() -> None:
    """
    Lets DeepSpeed talk over plain gloo. Its shared-memory operator is only faster, and compiling it takes 40 s on a
    quiet machine; a run that is stopped meanwhile leaves a lock on which all later ones wait for ever.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def why_idle_is_refused(trainer) -> tuple[str, str]:
    """The messages at construction and within a step that refuse an idle member; empty where one is possible."""
    crowded = copy.copy(trainer.args)
    crowded.students = TEACHERS + 1
    return (
        why_refused(ValueError, refuse_unsupported, crowded, {}),
        why_refused(RuntimeError, withhold_gradients, trainer.model_wrapped, ["teacher_0"]),
    )


def why_sections_are_refused(args: PopuLoRAConfig) -> list[str]:
    """The messages that refuse a DeepSpeed JSON file with these sections."""
    told = []
    for section in ("optimizer", "scheduler"):
        changed, plugin = copy.copy(args), copy.copy(args.deepspeed_plugin)
        plugin.deepspeed_config = plugin.deepspeed_config | {section: {"type": "Any"}}
        changed.deepspeed_plugin = plugin
        told.append(why_refused(ValueError, refuse_unsupported, changed, {}))
    return told


def make_trainer(base: str, output: str, **options) -> PopuLoRATrainer:
    args = PopuLoRAConfig(output, **(POPULATION | options))
    trainer = PopuLoRATrainer(base, args=args, peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    play_fixed_rows(trainer)
    return trainer


def identity(trainer) -> dict:
    """What the run really was, whatever the launcher was asked for."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    return {
        "world": trainer.accelerator.num_processes,
        "wrapper": type(trainer.model_wrapped).__name__,
        "stage": plugin.zero_stage if plugin else None,
    }


def replace(base: str, output: str) -> dict:
    """A run whose members are overwritten from outside."""
    trainer = make_trainer(base, output, evolve_every=0, max_steps=4, sandbox_workers=None, **CLIPPED)
    pool = (trainer.game.referee.sandbox.workers, trainer.game.referee.sandbox.run([Job("f = abs")])[0].status.value)
    replacement = Replacement(trainer)
    trainer.add_callback(replacement)
    trainer.train()
    wrapped, names, run = trainer.model_wrapped, trainer.population.names, identity(trainer)
    split = run["stage"] == 3 and any(getattr(p, "ds_tensor", p).numel() != p.ds_numel for p in wrapped.parameters())
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return run | {
        "members": {name: read_member(wrapped, name) for name in names},
        "live": {name: live_member(wrapped, name) for name in names},
        "base is split": split,
        "norms": [[entry[f"member/{name}/grad_norm"] for name in names] for entry in logged],
        "seen": replacement.seen,
        "pool": pool,
        "idle": why_idle_is_refused(trainer),
        "quantised": why_refused(ValueError, check_quantised, trainer.args),
    }


class Notes(TrainerCallback):
    """All members between the steps, as read and as live; added after the evolution callback, so it sees children."""

    def __init__(self, trainer: PopuLoRATrainer):
        self.trainer, self.steps, self.rates = trainer, [], []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.note()

    def on_train_end(self, args, state, control, **kwargs):
        self.note()

    def note(self) -> None:
        model, names = self.trainer.model_wrapped, self.trainer.population.names
        self.steps.append({name: (read_member(model, name), live_member(model, name)) for name in names})
        self.rates.append({group["member"]: group["lr"] for group in self.trainer.optimizer.param_groups})


def evolve(base: str, output: str, every: int = EVENT) -> dict:
    """A run with an evolution event."""
    trainer = make_trainer(
        base,
        output,
        evolve_every=every,
        num_iterations=2,  # the third step's rows need old log-probabilities: 11 on one rank, 18 on the other
        evolve_burn_in=0,
        crossovers=["average"],  # a crossover and no luck: what every rank must compute alike is the algebra
        crossover_rate=1.0,
        cull_fraction=0.5,
    )
    notes = Notes(trainer)
    trainer.add_callback(notes)
    trainer.train()
    return identity(trainer) | {
        "steps": notes.steps,
        "rates": notes.rates,
        "ratings": trainer.population.state_dict(),
        "live rows": [entry["batch/live_rows"] for entry in trainer.state.log_history if "batch/live_rows" in entry],
        "replaced": [entry.get("evolve/replaced") for entry in trainer.state.log_history if "loss" in entry],
    }


class Pooling(TrainerCallback):
    """Notes all members before the event, after it, and after a step with learning rate 0."""

    def __init__(self, trainer: PopuLoRATrainer):
        self.trainer, self.seen = trainer, {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= EVENT:
            self.note("before" if state.global_step == EVENT else "a step later")

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == EVENT:
            self.note("after")
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = 0.0

    def note(self, moment: str) -> None:
        model, names = self.trainer.model_wrapped, self.trainer.population.names
        self.seen[moment] = {
            name: {
                "read": read_member(model, name),
                "live": live_member(model, name),
                "state": optimizer_state(self.trainer, name),
            }
            for name in names
        }


def pool(base: str, output: str) -> dict:
    """A run whose students are pooled."""
    trainer = make_trainer(base, output, evolve_every=0, pool_every=EVENT, **CLIPPED)
    pooling = Pooling(trainer)
    trainer.add_callback(pooling)
    trainer.train()
    return identity(trainer) | {"seen": pooling.seen}


def plain(base: str, output: str) -> dict:
    """The same without the event."""
    if launched_by_deepspeed():
        zero_options()["stage3_param_persistence_threshold"] = 1
    seen = evolve(base, output, every=0)
    return seen | {"zero": zero_options() if launched_by_deepspeed() else {}}


BROKEN = (1, "student_1")


def note_calls(owner, name: str, did: list[str]) -> None:
    """Adds a function's name to the list at every call of it."""
    function = getattr(owner, name)

    def noted(*given, **named):
        did.append(name)
        return function(*given, **named)

    setattr(owner, name, noted)


class ClipOrder(TrainerCallback):
    """Notes the order in which DeepSpeed's backward ends, its device is waited for and members are clipped."""

    def __init__(self, trainer: PopuLoRATrainer):
        self.trainer, self.did = trainer, []

    def on_train_begin(self, args, state, control, **kwargs):
        from deepspeed.accelerator import get_accelerator

        note_calls(self.trainer.model_wrapped, "backward", self.did)
        note_calls(get_accelerator(), "synchronize", self.did)
        note_calls(lora_members, "clip_member_grad_norms", self.did)


def broken(base: str, output: str) -> dict:
    """A run of three steps, and the norms that it logs."""
    trainer = make_trainer(base, output, evolve_every=0, **CLIPPED)
    if launched_by_deepspeed():
        plugin = AcceleratorState().deepspeed_plugin
        plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False  # with offload DeepSpeed would compile its own
        trainer.add_callback(order := ClipOrder(trainer))
    play_fixed_rows(trainer, broken=BROKEN)
    trainer.train()
    names = trainer.population.names
    return identity(trainer) | {
        "order": order.did if launched_by_deepspeed() else [],
        "members": {name: read_member(trainer.model_wrapped, name) for name in names},
        "norms": [entry[f"member/{BROKEN[1]}/grad_norm"] for entry in trainer.state.log_history if "loss" in entry],
        "again": why_refused(RuntimeError, trainer.train) if launched_by_deepspeed() else "",
        "offloads": launched_by_deepspeed() and _offloads_gradients(trainer.model_wrapped.optimizer),
        "sections": why_sections_are_refused(trainer.args) if launched_by_deepspeed() else [],
    }


def launched_by_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"


def zero_options() -> dict:
    """What trainers are prepared with, once there was one."""
    return AcceleratorState().deepspeed_plugin.deepspeed_config["zero_optimization"]


# One loss that is divided by rows and one by tokens, with gradient checkpointing and without it;
# `POPULORA_SAVINGS=all` tries all four with both.
SAVINGS = {("grpo", True), ("dapo", False)}
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "cispo")


def savings(base: str, output: str) -> dict:
    """Members after one step, by loss and checkpointing: first with what saves forwards, then without."""
    every = {(loss, checkpointing) for loss in LOSS_TYPES for checkpointing in (False, True)}
    seen = {}
    for loss, checkpointing in sorted(every if os.environ.get("POPULORA_SAVINGS") == "all" else SAVINGS):
        options = {"loss_type": loss, "gradient_checkpointing": checkpointing, "per_device_train_batch_size": 2}
        for whole in (False, True):
            own = f"{output}/{loss}-{checkpointing}-{whole}"
            trainer = make_trainer(base, own, evolve_every=0, max_steps=1, **CLIPPED, **options)
            if whole:
                trainer.scorer.skips_blank_rows, trainer.scorer.sharing = False, None
            trainer.train()
            members = {name: read_member(trainer.model_wrapped, name) for name in trainer.population.names}
            logged = trainer.state.log_history[0]
            seen[loss, checkpointing, whole] = members, logged["batch/live_rows"], logged["batch/shared_tokens"]
    return identity(trainer) | {"savings": seen}


def resume(base: str, output: str, cut: int = 5, **settings) -> dict:
    """Eight steps straight, and others of five and three, cut amid the rows of a game; what of them differs."""
    settings = {"evolve_every": 2, "max_steps": 8, "num_iterations": 2} | settings
    straight = populora_run.make_trainer(base, f"{output}/straight", settings | {"save_strategy": "no"})
    straight.train()
    wanted = populora_run.state_of(straight)
    resumed = populora_run.cut_run(base, f"{output}/cut", settings, cut)
    resumed.accelerator.wait_for_everyone()
    found = populora_run.state_of(resumed)
    manifest = json.loads(Path(output, "cut", f"checkpoint-{cut}", MANIFEST).read_text())
    return identity(resumed) | {
        "backend": manifest["backend"],
        "moved": sorted(name for name in resumed.population.names if not adds_nothing(resumed.model_wrapped, name)),
        "differing": [key for key in wanted if wanted[key] != found[key]],
        "births": [event["step"] for event in wanted["lineage"]],
    }


def resume_quantised(base: str, output: str) -> dict:
    """The same on a base in 4 bits."""
    return resume(base, output, model_init_kwargs={"quantization_config": QUANTISED})


def resume_bf16(base: str, output: str) -> dict:
    """Four steps in bf16, of two games that are trained on twice, with a KL term; the cut is amid the second."""
    if launched_by_deepspeed():
        AcceleratorState._reset_state()  # it holds the precision of the first trainer
    seen = resume(base, output, cut=3, bf16=True, beta=0.01, max_steps=4)
    forget_precision()
    return seen


def forget_precision() -> None:
    """Lets later trainers choose theirs; transformers leaves that of the last one in the environment."""
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def groups(base: str, output: str) -> dict:
    """Which members a step of each run moves."""
    moved = {}
    for name, settings in GROUPS.items():
        own = settings | {"max_steps": 1, "evolve_every": 0, "save_strategy": "no", "weight_decay": 0.1}
        trainer = populora_run.make_trainer(base, f"{output}/{name}", own)
        before = {each: read_member(trainer.model, each) for each in trainer.population.adapters}
        trainer.train()
        after = {each: read_member(trainer.model_wrapped, each) for each in before}
        assert all(value.isfinite().all() for factors in after.values() for value in factors.values())
        moved[name] = [each for each in before if any((after[each][k] != v).any() for k, v in before[each].items())]
    return identity(trainer) | {"moved": moved}


GROUPS = {
    "without teachers": {"teachers": 0, "per_device_train_batch_size": 8},
    "teachers that stay": {"teacher_learning_rate": 0.0},
    "a single agent": {"single_agent": True, "per_device_train_batch_size": 6},
}


def evaluate(base: str, output: str) -> dict:
    """An evaluation of a run whose directories rank 0 makes slowly. Rank 1, if it removes one, does so in between."""
    make, remove = os.mkdir, os.rmdir

    def make_slowly(path, *given) -> None:
        make(path, *given)
        time.sleep(0.5)

    def remove_once_there(path, *given) -> None:
        deadline = time.monotonic() + 5
        while Path(path).parent.exists() and not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        remove(path, *given)

    if os.environ["RANK"] == "0":
        os.mkdir = make_slowly  # `os.makedirs` looks it up
    else:
        os.rmdir = remove_once_there
    try:
        return held_out_worker.ranks(base, f"{output}/run")
    finally:
        os.mkdir, os.rmdir = make, remove


def answers(base: str, output: str) -> dict:
    """
    The answers of an evaluation before the first step. Each process has two of the four attempts at a prompt; under
    ZeRO-3 the first batch of one has the first member's rows alone, and that of the other rows of both.
    """
    attempts, batch = (2, 4) if launched_by_deepspeed() else (4, 2)
    args = PopuLoRAConfig(
        output,
        **QUIET | {"max_steps": 1, "max_completion_length": 8, "gradient_checkpointing": False, "ddp_timeout": 180},
        temperature=[0.7, 1.3],
        per_device_train_batch_size=2,
        num_generations=2,
        num_generations_eval=attempts,
        per_device_eval_batch_size=batch,
        eval_strategy="steps",
        eval_on_start=True,
        save_rollouts=False,
    )
    trainer = PopuLoRATrainer(base, brief, args, QUESTIONS, QUESTIONS.select(range(3)), peft_config=small_lora())
    generate, seen = trainer._generate_rows, []

    def note(prompts: list, members: list, seeds=None) -> list:
        found = generate(prompts, members, seeds)
        if not trainer.model.training:
            seen.extend((*asked, each.completion_ids) for *asked, each in zip(prompts, members, found, strict=True))
        return found

    trainer._generate_rows = note
    trainer.train()
    return identity(trainer) | {"answers": seen}


def go_through_mends(base: str, output: str) -> dict:
    """A trainer's way through faults that were mended."""
    made = []

    def make(settings: dict, held_out: list[dict]) -> PopuLoRATrainer:
        own = settings | {"evaluated": held_out, "eval_attempts": 3}
        made.append(populora_run.make_trainer(base, output, own))
        return made[-1]

    seen = mends.go_through(make)
    return identity(made[0]) | seen


def choose_by_chance(student, teacher) -> float:
    """A weight of pairs, other on each rank."""
    return CHANCE.random()


def estimate_by_chance(rewards, members, kinds, groups) -> torch.Tensor:
    """Advantages, other on each rank."""
    return torch.tensor([CHANCE.uniform(-1, 1) for _ in rewards], dtype=torch.float64)


CHANCE = random.Random(os.environ.get("RANK"))


def own(base: str, output: str) -> dict:
    """A game with functions of a user's own that differ between ranks, then an event of ranks that have come apart."""
    settings = {"matchmaking": "choose_by_chance", "student_baseline": "estimate_by_chance"}
    settings = {option: f"tests.backend_worker:{name}" for option, name in settings.items()}
    trainer = populora_run.make_trainer(base, output, settings | {"max_steps": 2, "save_strategy": "no"})
    trainer.train()
    members = {name: read_member(trainer.model_wrapped, name) for name in trainer.population.names}
    state = {"population": trainer.population.state_dict(), "pairs": trainer.game.matchmaker.state_dict()}
    seen = {"members": members, "advantages": trainer.played.worth.advantages, "state": state}
    if trainer.accelerator.process_index:
        trainer.population["student_0"].mu = 7.0
    return identity(trainer) | seen | {"apart": why_refused(RuntimeError, trainer.evolution.evolve, 3)}


def shard(base: str, output: str) -> dict:
    return fsdp_worker.run(output)


def half(base: str, output: str) -> dict:
    """A step whose gradients are scaled and clipped."""
    import deepspeed

    AcceleratorState._reset_state()  # it holds the precision of the first trainer
    # Any CPU computes in fp16; DeepSpeed asks for one that is fast at it.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    trainer = make_trainer(base, output, evolve_every=0, max_steps=1, fp16=True, **CLIPPED)
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config["fp16"]["loss_scale"] = LOSS_SCALE
    trainer.train()
    logged, wrapped = trainer.state.log_history[0], trainer.model_wrapped
    seen = identity(trainer) | {
        "scale": wrapped.optimizer.loss_scale,
        "norms": [logged[f"member/{name}/grad_norm"] for name in trainer.population.names],
        "replaced": read_member(wrapped, REPLACED),
    }
    forget_precision()
    return seen


def unwritable(base: str, output: str) -> dict:
    """A run that ends at its first checkpoint."""

    class Block(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if args.should_save:
                Path(output, UNFINISHED).touch()

    trainer = make_trainer(base, output, evolve_every=0, save_strategy="steps", save_steps=1)
    trainer.add_callback(Block())
    trainer.train()
    return {}


SCENARIOS = {
    "replace": replace,
    "evolve": evolve,
    "pool": pool,
    "plain": plain,
    "broken": broken,
    "savings": savings,
    "resume": resume,
    "resume quantised": resume_quantised,
    "resume bf16": resume_bf16,
    "groups": groups,
    "evaluate": evaluate,
    "answers": answers,
    "mends": go_through_mends,
    "own": own,
    "shard": shard,
    "half": half,
    "unwritable": unwritable,
}


def main(base: str, output: str, *scenarios: str) -> None:
    gc.freeze()  # every training collects once, through all that was imported if it may
    if launched_by_deepspeed():
        without_compiler()
    for scenario in scenarios:
        seen = SCENARIOS[scenario](base, f"{output}/{scenario}")
        path = Path(output, scenario, f"rank_{os.environ['RANK']}.pt")
        path.parent.mkdir(exist_ok=True)
        torch.save(seen, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
