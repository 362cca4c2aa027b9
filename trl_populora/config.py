"""Every setting of a run.

There are two sorts of run. In the *game* teachers propose tasks. In a *dataset run* all members train on the prompts
of a dataset. The dataset decides the sort of run, and a config does not know the dataset. So a new config is settled
for the game, and if the trainer then finds prompts, [`settle_for_prompts`] settles it for a dataset run.

In the order of reading:

1. `PopuLoRAConfig`: the options, and the checks of each option and of options together.
2. `settle_for_prompts`: what a dataset run takes from a config, and from TRL's own `GRPOConfig`.
3. `StepSize`: how many rows a step has, and whether groups, processes and micro-batches divide them.
4. `MemberConfig`: what a command line says about base and adapters.

Three words name the source of a default: "paper" is the PopuLoRA paper (arXiv 2605.16727), "second hand" is what
summaries by others say of that paper, and "AZR" is Absolute Zero Reasoner (arXiv 2505.03335). `docs/paper.md` goes
through the paper statement by statement.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from peft import LoraConfig
from transformers.trainer_utils import SchedulerType
from trl import GRPOConfig, ModelConfig, get_peft_config

from trl_populora.files import drop_secrets
from trl_populora.options import (
    OneOrMore,
    check_bounds,
    check_choices,
    check_numbers,
    find_function,
    read_list,
    read_sources,
)
from trl_populora.population.evolution import Breeding, find_learning_roles
from trl_populora.population.members import ROLES
from trl_populora.population.pooling import POOLS, find_pooled_roles
from trl_populora.population.ratings import RATINGS, STRATEGIES
from trl_populora.sandbox.pool import SandboxSettings
from trl_populora.step.advantages import BASELINES, COUPLE_MEMBERS, LOSS_NORMALISERS, Scoring
from trl_populora.step.pay import PAY, STUDENT_PAY, check_choice
from trl_populora.tasks import check_names
from trl_populora.tasks.kind import KindSettings
from trl_populora.tasks.python.prompts import check_texts


Settings = TypeVar("Settings")

# Bounds of the options below. `Breeding`, `KindSettings` and the like check their own options. Without these bounds, a
# run would train with a wrong number, or refuse it only after a model is loaded.
BOUNDS = {
    ">= 0": "teachers references_per_proposal shots replay pfsp_kappa teacher_beta beta top_k min_p "
    "teacher_learning_rate learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon epsilon epsilon_high "
    "vllm_importance_sampling_clip_min logging_steps eval_steps eval_delay save_steps halve_every pool_every",
    "> 0": "temperature top_p repetition_penalty delta vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_cap vllm_gpu_memory_utilization",
    ">= 1": "students max_members archive_size eval_attempts generation_tokens num_iterations max_completion_length "
    "per_device_train_batch_size per_device_eval_batch_size vllm_max_model_length vllm_tensor_parallel_size",
    ">= 2": "proposals_per_teacher attempts_per_task",  # a baseline compares a row with others
    "< 1": "replay adam_beta1 adam_beta2",
    "<= 1": "top_p min_p vllm_gpu_memory_utilization",
}

# Options that are `None` until it is known whether the run is a game or a dataset run, with their values in the game.
# In a dataset run `PROMPT_DEFAULTS` has the values of three of them; the others have TRL's defaults.
GAME_DEFAULTS = {
    "max_steps": 200,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "max_completion_length": 2048,
    "router_aux_loss_coef": 0.0,
    "teachers": 4,
    "evolve_every": Breeding.evolve_every,
}
PROMPT_DEFAULTS = {"router_aux_loss_coef": 0.0, "teachers": 0, "evolve_every": 0}
# The argument of a schedule that is a learning rate at which it ends, and its default.
_FLOORS = {
    "polynomial": ("lr_end", 1e-7),
    "cosine_with_min_lr": ("min_lr", None),
    "cosine_warmup_with_min_lr": ("min_lr", None),
}
MEMBER_PROMPTS = ("shared", "own")
# TRL's options that a dataset run may give as a list with one value for each member. `GAME_MEMBER_OPTIONS` are those
# that may be lists in the game, too.
MEMBER_OPTIONS = ("learning_rate", "beta", "epsilon", "temperature", "seed")
GAME_MEMBER_OPTIONS = ("temperature",)
# Options of dataset runs alone, with their defaults. The game refuses any other value.
PROMPT_OPTIONS = {"member_prompts": "shared", "max_members": None, "halve_every": 0, "hyperparameter_noise": 0.0}

# The options of this package that a dataset run reads. All others belong to the game.
_SHARED_OPTIONS = {
    *("teachers", "students", "warm_start", "attempts_per_task", "member_prompts", "max_members", "halve_every"),
    *("evolve_every", "evolve_burn_in", "cull_fraction", "crossover_rate", "tournament_size"),
    *("mutations", "crossovers", "mutation_strength", "hyperparameter_noise", "pool_every", "pool"),
    *("generation_tokens", "vllm_engine_kwargs", "vllm_adapter_dir", "save_rollouts"),
}


def _option(default: Any, text: str) -> Any:
    """Makes an inherited field with another default. The text is its line of `--help`."""
    return field(default=default, metadata={"help": text})


_SEVERAL = {"nargs": "+", "action": OneOrMore}  # for argparse: one value, or one for each member


def _as_python(value: Any) -> Any:
    """Turns numbers, arrays and tensors of NumPy and torch, also inside others, into Python's, which JSON can hold."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(_as_python, value))
    if type(value) is dict:
        return {key: _as_python(each) for key, each in value.items()}
    return value


def _member_option(name: str) -> Any:
    """Makes TRL's field of this name, which may also be a list with one value for each member."""
    inherited = GRPOConfig.__dataclass_fields__[name]
    where = "It" if name in GAME_MEMBER_OPTIONS else "In a dataset run it"
    order = ", teachers first" if name in GAME_MEMBER_OPTIONS else ""
    text = f"{inherited.metadata.get('help', '')} {where} may be a list, with one value for each member{order}."
    return field(default=inherited.default, metadata={"help": text, **_SEVERAL})


def _describe(config: type[Settings]) -> type[Settings]:
    """Copies each option's entry in the docstring to its field, for `--help` and `docs/reference/settings.md`."""
    # An entry starts after four spaces with one name or several; lines that are indented further continue it.
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): (.+\n(?: {8}.+\n)*)", f"{inspect.getdoc(config)}\n", re.MULTILINE)
    texts = {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
    for option in fields(config):  # type: ignore[arg-type]
        if option.name in texts:
            option.metadata = MappingProxyType({"help": texts[option.name]})
    return config


@_describe
@dataclass
class PopuLoRAConfig(GRPOConfig):
    r"""
    Configuration of [`PopuLoRATrainer`].

    It has all options of [`~trl.GRPOConfig`]. If `train_dataset` has a column `prompt`, the run is a *dataset run*.
    There TRL's options mean for each member what they mean in TRL, and options that you do not set have TRL's
    defaults. Of the options that this class adds, a dataset run reads those of members, evolution, generation and
    records (`docs/guides/prompts.md` lists them).

    Every other run is the *game*. There the number of rows follows from the population: with teachers and without
    `replay` one population step has `teachers * proposals_per_teacher * (1 + attempts_per_task)` rows. So the config
    derives `generation_batch_size`, `steps_per_generation` and `gradient_accumulation_steps`; leave them unset. Choose
    only `per_device_train_batch_size`: times the number of processes it must divide the number of rows.

    Args:
        teachers, students: Number of adapters of each role. When `teachers` is `None`, 4 in the game (paper) and none
            in a dataset run. When `students` is `None`, the length of a listed option less `teachers`; without a list,
            4. With `teachers=0` and a dataset of tasks all students attempt the same `proposals_per_teacher`
            given tasks in a step, and no others (`docs/guides/curriculum.md`).
        member_prompts: Which prompts of a dataset the members train on. `"shared"`: all on the same ones, so that
            they can be compared. `"own"`: each on a stream of its own, in an order of its own.
        max_members: Most members that a dataset run may have at a time (`trainer.add_member`). Adapters and metrics
            for this many members are there from the start; optimizer state comes with a member's first update. When
            `None`, the number of `students`.
        halve_every: Optimizer steps between two halvings of a dataset run (successive halving, arXiv 1502.07943): the
            half with the lower mean rewards since the last halving leaves. Each member that stays then gets twice as
            many prompts in a generation. `0` for none.
        single_agent: One adapter plays both roles (AZR); `teachers` and `students` become 1. A step then has the rows
            of one match.
        warm_start: Directory or Hub name of a saved population to start from, of any number of members and with the
            same base and adapter shape. Or ordinary LoRA adapters of at most the members' rank: one for all members, a
            list with one for each (teachers first), or one for a role, `{"student": "runs/sft"}`.

        task_kinds: Kinds of task that teachers propose, in rotation (AZR's three). Name a kind of your own as
            `"package.module:Class"`.
        proposals_per_teacher: Tasks that each teacher proposes in a step, spread over the kinds. AZR proposes 64 per
            kind with one agent.
        attempts_per_task: Attempts of the matched student at each task: the group of the GRPO baseline. TRL's name
            `num_generations` sets it, too. When both are `None`, 8 (AZR).
        references_per_proposal: Archived tasks that a teacher is shown when it proposes code_i or code_o (AZR: 6). For
            code_f it is shown one program and, in the style `"turns"`, this many code_f tasks as earlier turns.
        inputs_per_function: Inputs that a code_f proposal must give (AZR: 10). The student is shown half of the pairs.
        prompt_style: `"turns"`: short instructions, with references as earlier chat turns. `"chat"`: everything in one
            turn, for large models. `"compact"`: the language of the embedded base. When `None`, `"compact"` for the
            embedded base, else `"turns"`.
        shots: Most solved tasks that a student is shown, as earlier chat turns. When `None`, 3 for bases below a
            billion parameters, else 0. In the style `"compact"` always 0.
        reading: How strictly the fenced blocks of proposals and attempts are read, `"tolerant"` or `"strict"`. When
            `None`, `"strict"` for the style `"compact"`, else `"tolerant"`.
        prompt_texts: Instructions of your own for the built-in kinds, by `"code_o/propose"`, `"code_o/solve"` and so
            on.
        archive_size: Tasks kept of each kind. The newest stay (AZR's buffer size; AZR keeps the oldest).
        replay: Share of replayed archived tasks among the tasks that a student attempts. No teacher is paid for a
            replayed task, and ratings ignore replayed tasks.

        matchmaking: `"pfsp"` prefers pairs whose TrueSkill win probability p is near one half. `"uniform"` pairs at
            random. Or a function of your own, `"module:function"`, from a student and a teacher to the pair's weight.
        pfsp_kappa: Exponent of the weight (p(1-p))^kappa (second hand: 1; ours: 2, by `benchmarks/ratings.py`).
        ratings: What ratings follow: the `"scores"` of matches (ours, by `benchmarks/ratings.py`); or who won them, by
            TrueSkill's own update, `"trueskill"` (paper). Ours is the rule that a student wins if it gets more than
            half of the points of a match.

        teacher_reward: Pay for a solved task (`docs/guides/reward.md`): `"guarded"` (the paper's 1 - solve rate, with
            guards of ours), `"paper"` (the printed formula without them), `"learnability"`, `"rarity"`, or a function
            of your own, `"module:function"`.
        teacher_reward_invalid: Pay for a proposal that is no task (paper).
        teacher_reward_unsolved: Pay for a task that no attempt solves (paper). The built-in pays other than `"paper"`
            give it also for a task that attempts solve no more often than guessing would.
        student_reward: Pay for attempts: `"azr"`, or a function of your own, `"module:function"`.
        student_reward_correct: Pay for a right answer (AZR; second hand).
        student_reward_wrong: Pay for a well-formed wrong answer (AZR; second hand).
        student_reward_malformed: Pay for an answer that cannot be read (AZR; second hand).
        teacher_baseline: What a proposal's reward is compared with. `"member"`: the mean of the teacher's proposals of
            the same kind (AZR's task-relative REINFORCE++). `"group"`: the mean of the match's proposals. Or a
            function of your own, `"module:function"`. The function gets the rewards, members, kinds and groups of all
            teachers' rows, and returns the advantages of these rows.
        student_baseline: What an attempt's reward is compared with. `"group"`: the mean of the attempts at one task
            (GRPO). `"member"`: the mean of the student's attempts at tasks of the same kind. Or a function of your
            own, as for `teacher_baseline`.
        teacher_beta: `beta` for teachers alone. The KL term pulls them to the base, to keep their texts readable.
        teacher_learning_rate: Learning rate of the teachers; the students' when `None`. The logged `learning_rate` is
            the teachers'. If this option is set, `0` here freezes the teachers and `learning_rate=0` the students:
            neither updates nor evolution change them.

        sandbox_workers: Cores that programs may fill on a node, shared out among its processes; all usable ones when
            `None`.
        sandbox_seconds: CPU seconds that one run of a program may use. A proposal of a built-in kind may use half of
            them: its program runs again when attempts are checked, and other work may then make it slower. AZR allows
            10 seconds by the clock.
        sandbox_memory_mb: Memory limit of one run of a program, in MiB.
        determinism_runs: How often a proposal runs, each time with another hash seed. All runs must give the same
            outputs (AZR: 2).
        sandbox_allow_weak: Train although this host offers no kernel confinement. Only for hosts that hold nothing of
            value.

        evolve_every: Optimizer steps between two evolution events. `0` switches evolution off. When `None`, 10 in the
            game (second hand) and 0 in a dataset run; also 0 if pooling leaves no role that can evolve.
        evolve_burn_in: Matches that a member must have played before it may be replaced; in a dataset run, generations
            that must have rated it.
        cull_fraction: Share of each role that an event may replace, but at least one member; `0` replaces nobody
            (second hand).
        crossover_rate: Probability that a child has two parents, if its role has several survivors (second hand).
        tournament_size: Survivors drawn for each parent; the one with the highest mu becomes the parent.
        mutations, crossovers: Weights of the operators by name; name your own as `"module:function"`. When `None`, the
            four mutations and four crossovers that summaries of the paper list (second hand), with equal weights.
        mutation_strength: Factor on the strength of every mutation operator: 1 as published; with 0.5 children are
            nearer to the parent.
        hyperparameter_noise: In a dataset run a child's learning rate is its parent's times exp(s * z), where s is
            this number and z is drawn from a normal distribution (population-based training, arXiv 1711.09846).
        pool_every: Optimizer steps between two poolings, which set the members of a role to the mean of their weights
            (`docs/how/evolve.md`). `0` switches pooling off.
        pool: Which roles are pooled, each by itself: `"students"`, `"teachers"` or `"both"`. Members of a
            pooled role do not evolve.

        eval_attempts: Attempts of every student at every task of `eval_dataset`, sampled as in training.
            `eval_strategy` and `eval_on_start` say when. Without vLLM a process generates at most
            `per_device_eval_batch_size` rows at once.

        generation_tokens: Most tokens, prompts included, that a process holds in the cache of keys and values at
            once. vLLM does not read it.
        vllm_engine_kwargs: Further arguments of vLLM's `LLM` in colocate mode, for example `{"enforce_eager": true}`.
            TRL's `vllm_*` settings hold too. The engine computes in the trainer's precision unless `dtype` is
            given, and records CUDA graphs up to the rows of a step unless `cudagraph_capture_sizes` is.
        vllm_adapter_dir: Directory for published adapters; the trainer and every vLLM server must see it. When `None`,
            shared memory, or `output_dir` if a server runs on another host or shared memory is too small. Colocated
            engines do not use it.

        save_rollouts: Write every row to `rollouts/step_*.parquet`.
        own_metrics: Functions of your own, `"module:function"`, that compute further metrics. Each gets the
            records of a step's rows, a `dict` each, and returns numbers by name.

    Raises:
        `ValueError`: If a value is out of range or names nothing known, or the population does not fit the batch.
    """

    if TYPE_CHECKING:  # fields of GRPOConfig that `__post_init__` assigns
        generation_batch_size: int | None
        num_generations_eval: int | None
        steps_per_generation: int  # `None` until then
        gradient_accumulation_steps: int
        ddp_find_unused_parameters: bool | None
        max_grad_norm: float

    _argument_group_name = "Training: the options of TRL and transformers, then those of a population"
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs", "prompt_texts"]  # may be given as JSON

    # Defaults that differ from GRPOConfig's. `None` stands for a value of `GAME_DEFAULTS` or `PROMPT_DEFAULTS`, or for
    # TRL's default.
    max_steps: int = _option(
        None,
        "Optimizer steps. When None, 200 in the game (second hand), where `num_iterations` of them are a population "
        "step; in a dataset run `num_train_epochs` decides the length.",
    )
    learning_rate: float = field(
        default=None,  # type: ignore[assignment]
        metadata={
            "help": "When None, 1e-5 in the game (AZR's 1e-6 for full weights, times 10 for LoRA), else TRL's 1e-6. "
            "In a dataset run it may be a list, with one value for each member.",
            **_SEVERAL,
        },
    )
    beta: float = _member_option("beta")
    epsilon: float = _member_option("epsilon")
    temperature: float = _member_option("temperature")
    seed: int = _member_option("seed")
    lr_scheduler_type: str = _option(
        None,
        "When None, 'constant' in the game (as AZR; a child born late needs a rate that has not decayed), else TRL's "
        "'linear'.",
    )
    logging_steps: float = _option(
        None, "Optimizer steps from one log to the next. When None, 1 in the game, else TRL's 10."
    )
    max_completion_length: int | None = _option(
        None, "Most tokens of a proposal or attempt. When None, 2048 in the game, else TRL's 512."
    )
    num_generations: int | None = _option(None, "Another name for `attempts_per_task`. When None, 8.")
    router_aux_loss_coef: float | None = _option(
        None, "Must be 0 or None (which means 0): this loss balances experts over all members' tokens."
    )

    # Population
    teachers: int = None  # type: ignore[assignment]  # a number once the config is settled
    students: int = None  # type: ignore[assignment]  # a number once `__post_init__` has run
    member_prompts: str = "shared"
    max_members: int | None = None
    halve_every: int = 0
    single_agent: bool = False
    warm_start: dict[str, Any] | str | None = None

    # Tasks
    task_kinds: list[str] = field(default_factory=lambda: ["code_i", "code_o", "code_f"])
    proposals_per_teacher: int = 12
    attempts_per_task: int = None  # type: ignore[assignment]  # a number once `__post_init__` has run
    references_per_proposal: int = 6
    inputs_per_function: int = KindSettings.inputs_per_function
    prompt_style: str | None = None
    shots: int | None = None
    reading: str | None = None
    prompt_texts: dict[str, Any] | str | None = None
    archive_size: int = 16384
    replay: float = 0.0

    # Matchmaking
    matchmaking: str = "pfsp"
    pfsp_kappa: float = 2.0
    ratings: str = "scores"

    # Rewards and baselines
    teacher_reward: str = KindSettings.teacher_reward
    teacher_reward_invalid: float = -1.0
    teacher_reward_unsolved: float = 0.0
    student_reward: str = "azr"
    student_reward_correct: float = 1.0
    student_reward_wrong: float = -0.5
    student_reward_malformed: float = -1.0
    teacher_baseline: str = Scoring.teacher_baseline
    student_baseline: str = Scoring.student_baseline
    teacher_beta: float | None = None
    teacher_learning_rate: float | None = None

    # Sandbox
    sandbox_workers: int | None = SandboxSettings.sandbox_workers
    sandbox_seconds: float = SandboxSettings.sandbox_seconds
    sandbox_memory_mb: int = SandboxSettings.sandbox_memory_mb
    determinism_runs: int = KindSettings.determinism_runs
    sandbox_allow_weak: bool = SandboxSettings.sandbox_allow_weak

    # Evolution
    evolve_every: int = None  # type: ignore[assignment]  # a number once the config is settled
    evolve_burn_in: int = Breeding.evolve_burn_in
    cull_fraction: float = Breeding.cull_fraction
    crossover_rate: float = Breeding.crossover_rate
    tournament_size: int = Breeding.tournament_size
    mutations: dict[str, Any] | str | None = None
    crossovers: dict[str, Any] | str | None = None
    mutation_strength: float = Breeding.mutation_strength
    hyperparameter_noise: float = Breeding.hyperparameter_noise
    pool_every: int = 0
    pool: str = "students"

    # Evaluation
    eval_attempts: int = 4

    # Generation
    generation_tokens: int | None = None
    vllm_engine_kwargs: dict[str, Any] | str | None = None
    vllm_adapter_dir: str | None = None

    # Records
    save_rollouts: bool = True
    own_metrics: list[str] | None = None

    def __post_init__(self):
        if self.warm_start is not None:
            self.warm_start = read_sources(self.warm_start)  # type: ignore[assignment]  # a list, too
        self._given = dict(vars(self))  # what `for_prompts` starts from
        # The options in which members differ, each with one value per member. The options themselves keep the first
        # member's value, because TRL reads one.
        self.member_values: dict[str, list[Any]] = {}
        self._no_game: ValueError | None = None
        self._changed: frozenset[str] | None = None
        try:
            self._settle_for_game()
        except ValueError as error:
            # These settings make no game, but they may make a dataset run, and only the trainer knows the dataset. If
            # they make a dataset run and set no option of the game, `for_game` raises this error, if it is ever asked.
            if self._list_game_options():
                raise
            refused: ValueError | None = None
            try:
                settled = self.for_prompts()
            except ValueError as wrong:
                refused = wrong
            lists = any(
                isinstance(getattr(self, name), (list, tuple)) for name in MEMBER_OPTIONS
            )  # untaken by the game
            if refused and (lists or any(self._given[name] != value for name, value in PROMPT_OPTIONS.items())):
                raise refused from None  # the error of the game would mislead
            if refused:
                raise
            # A command reads these before there is a trainer.
            for name in ("students", "output_dir", "model_init_kwargs"):
                setattr(self, name, getattr(settled, name))
            self._no_game = error
        # An option that a user sets on the finished config counts as given in `for_prompts`, too, also if its value is
        # the one that the game has by default.
        self._changed = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _as_python(value))
        changed = self.__dict__.get("_changed")
        if changed is not None and name in self.__dataclass_fields__:
            self.__dict__["_changed"] = changed | {name}

    def _settle_for_game(self) -> None:
        """Checks all settings, and derives those that follow from the population."""
        for name, value in GAME_DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._count_students()
        for name in MEMBER_OPTIONS:
            if not isinstance(value := getattr(self, name), (list, tuple)):
                continue
            told = f"`{name}={value!r:.120}` lists a value for each member"
            if name not in GAME_MEMBER_OPTIONS:
                raise ValueError(f"{told}, which needs a `train_dataset` with a column `prompt`. Give one number.")
            if self.single_agent:
                raise ValueError(f"{told}, and the `single_agent` has one adapter for both roles. Give one number.")
        lists = self._take_lists()
        # Types and bounds come first: everything below computes with the numbers.
        self._check_numbers()
        self._check_lists(lists)
        if self.single_agent:
            for name in ("teacher_learning_rate", "teacher_beta"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` is set, and so is `single_agent`. A single agent has one adapter for both roles, "
                        f"so its teacher cannot have a value of its own. Leave `{name}` out."
                    )
            self.teachers = self.students = 1
        self._check_rooms()
        self._check_population()
        self._check_choices(("group", "none", True, False))
        self._check_game()
        self._check_rewards()
        self._derive_game_batch()
        # TRL demands that `num_generations_eval` divides the evaluation batch. Here an evaluation batch of any size is
        # fine, so TRL sees 1 while it checks.
        self.num_generations_eval = 1
        self._settle_with_trl()
        check_texts(self.prompt_texts or {})
        self.num_generations_eval = self.eval_attempts

    def _check_game(self) -> None:
        """Refuses what only a dataset run has."""
        if self.max_steps <= 0:
            raise ValueError(
                f"`max_steps` must be positive, got {self.max_steps}: a population trains for a number of steps, and "
                "counts no epochs."
            )
        for name, default in PROMPT_OPTIONS.items():
            if (value := getattr(self, name)) != default:
                raise ValueError(f"`{name}={value}` needs a `train_dataset` with a column `prompt`.")

    def _derive_game_batch(self) -> None:
        """Derives the numbers of rows and micro-batches of a step of the game."""
        # These options follow from the population. A user's value is refused unless it equals the default or the
        # derived value; for `steps_per_generation` every value is refused.
        rows = self.rows_per_step
        if self.generation_batch_size not in (None, rows) or self.steps_per_generation is not None:
            raise ValueError(
                f"`generation_batch_size={self.generation_batch_size}`, `steps_per_generation="
                f"{self.steps_per_generation}`: both follow from the population ({rows} rows per step here). Leave "
                "them unset and choose `per_device_train_batch_size`."
            )
        if self.num_generations_eval not in (None, self.eval_attempts):
            raise ValueError(
                f"`num_generations_eval={self.num_generations_eval}` and `eval_attempts={self.eval_attempts}` are the "
                "same thing here. Set only `eval_attempts`."
            )
        self.generation_batch_size = rows
        wanted_accumulation = self.gradient_accumulation_steps
        self.gradient_accumulation_steps = self.micro_batches(_count_processes())
        if wanted_accumulation not in (1, self.gradient_accumulation_steps):
            raise ValueError(
                f"`gradient_accumulation_steps={wanted_accumulation}`: an optimizer step takes all rows of a step, so "
                f"it must be {self.gradient_accumulation_steps} here. Leave it unset; it is derived."
            )

    def _settle_with_trl(self) -> None:
        """Lets TRL check and derive the rest."""
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # no parameter is unused: every member is in every backward
        if self.bf16 is None and not torch.accelerator.is_available():  # type: ignore[has-type]
            self.bf16 = False  # TRL's default is True, which transformers refuses on a machine without accelerator
        super().__post_init__()
        for name in ("dispatch_batches", "split_batches"):
            if getattr(self.accelerator_config, name):
                raise ValueError(
                    f"`accelerator_config` has `{name}`: each process finds its rows by their place in the batch, and "
                    "accelerate would deal the rows to the processes in another way. Leave it out."
                )
        if self.optim.startswith("schedule_free"):
            raise ValueError(
                f"`optim={self.optim.value!r}` is not supported in a population: it sums up all steps of a parameter "
                "group, so that a newborn's first updates would be too large. Choose another, such as 'adamw_torch'."
            )
        self._check_floor()

    def _check_floor(self) -> None:
        """Refuses a schedule that ends at a rate given as such, if members' rates differ or may come to differ."""
        kind = SchedulerType(self.lr_scheduler_type).value
        name, default = _FLOORS.get(kind, ("", None))
        floor = (self.lr_scheduler_kwargs or {}).get(name, default)
        rates = [*self.member_values.get("learning_rate", [self.learning_rate])]
        if self.teacher_learning_rate is not None:
            rates.append(self.teacher_learning_rate)
        members = f"members have {', '.join(map(str, dict.fromkeys(rates)))}"
        differ = len({*rates}) > 1
        if not differ and self.hyperparameter_noise and self.evolve_every:
            members, differ = "children may get other rates (`hyperparameter_noise`)", True
        if not differ and self.max_members and self.max_members > self.students:
            members, differ = "members that join may get other rates (`max_members`)", True
        # transformers divides the floor by `learning_rate`, which is the first member's.
        if differ and floor is not None and (floor or not self.learning_rate):
            raise ValueError(
                f"`{name}={floor}` with `lr_scheduler_type={kind!r}`: transformers would make it a share of "
                f"`learning_rate`, and {members}. Set 'cosine_with_min_lr' and, in `lr_scheduler_kwargs`, "
                "`min_lr_rate`: a share of each member's rate."
            )

    def _list_game_options(self) -> list[str]:
        """Lists the options that only the game has, and that differ from their defaults."""
        inherited = {each.name for each in fields(GRPOConfig)}
        own = [each for each in fields(self) if each.name not in inherited | _SHARED_OPTIONS]
        changed = [each.name for each in own if self._given[each.name] != _make_default(each)]
        return changed + (["teachers"] if self._given["teachers"] else [])

    def for_game(self) -> PopuLoRAConfig:
        """
        Returns the config of a game.

        Raises:
            `ValueError`: If these settings do not make one.
        """
        if not self._changed:
            if self._no_game is not None:
                raise self._no_game
            return self
        settled = self._start_again()
        settled._settle_for_game()
        settled._changed = frozenset()
        return settled

    def _start_again(self) -> PopuLoRAConfig:
        """Returns a config that is not settled yet, with the options as they were given or set later."""
        given = self._given | {name: getattr(self, name) for name in self._changed or ()}
        begun = object.__new__(type(self))
        begun.__dict__.update(given, _given=given, _changed=None, _no_game=None, member_values={})
        return begun

    def for_prompts(self, adapters: int | None = None) -> PopuLoRAConfig:
        """
        Returns the config of a dataset run that has the settings given here.

        Args:
            adapters: As in [`settle_for_prompts`].

        Raises:
            `ValueError`: If these settings do not make one.
        """
        settled = self._start_again()
        settled._settle_for_prompts(adapters)
        return settled

    def _settle_for_prompts(self, adapters: int | None = None) -> None:
        """Checks the settings of a dataset run, and multiplies TRL's numbers of rows by the number of members."""
        if self._given["teachers"]:
            raise ValueError(
                f"`teachers={self.teachers}` with a dataset of prompts: a teacher would vary prompts, and nobody "
                "knows the answer of a variation. Set `teachers` to 0, or give a dataset of programs and name "
                "`task_kinds`, whose tasks a sandbox can check."
            )
        if names := self._list_game_options():
            told = ", ".join(f"`{name}={self._given[name]!r:.80}`" for name in names)
            raise ValueError(f"{told}: only the game has this, and `train_dataset` has prompts. Leave it out.")
        trl_defaults = {each.name: each.default for each in fields(GRPOConfig)}
        for name in GAME_DEFAULTS:
            if getattr(self, name) is None:
                setattr(self, name, PROMPT_DEFAULTS.get(name, trl_defaults.get(name)))
        self._count_students(adapters)
        lists = self._take_lists()
        self._check_numbers()
        self._check_lists(lists)
        self.build(Breeding, roles=("student",))
        self._check_choices(("group", "batch", "none", True, False))
        if self.member_prompts == "own" and self.evolve_every:
            raise ValueError(
                f"`evolve_every={self.evolve_every}` with `member_prompts='own'`: members with prompts of their own "
                "cannot be compared, so they have no rating to select by. Set `evolve_every` to 0, or share prompts."
            )
        self._settle_seats()
        self._settle_pooling()
        self._multiply_by_members()
        self._settle_with_trl()
        for name in ("evolve_every", "halve_every", "pool_every"):
            if getattr(self, name) % self.optimizer_steps_per_generation:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` must be a multiple of the {self.optimizer_steps_per_generation} "
                    "optimizer steps of a generation. Otherwise members would change while rows that they wrote "
                    "before still wait for an update."
                )
        computed, accumulated = self.steps_per_generation * self.num_iterations, self.gradient_accumulation_steps
        if self.pool_every and computed % accumulated and accumulated % computed:
            # transformers ends an optimizer step at the end of an epoch, too, and no generation ends with a step then.
            raise ValueError(
                f"`pool_every={self.pool_every}`: a generation has {computed // self.seats} micro-batches of each "
                f"member (`steps_per_generation * num_iterations`) and an optimizer step {accumulated // self.seats} "
                "(`gradient_accumulation_steps`). One must be a multiple of the other, so that members are pooled "
                "between two generations."
            )
        if self.halve_every and self.gradient_accumulation_steps > self.steps_per_generation:
            raise ValueError(
                f"`halve_every={self.halve_every}`: an optimizer step takes the rows of several generations here, and "
                "a halving must come between two generations. Lower `gradient_accumulation_steps` or raise "
                "`steps_per_generation`."
            )

    def _settle_seats(self) -> None:
        """Settles `max_members`, and refuses a halving that cannot work."""
        if self.max_members is None:
            self.max_members = self.students
        if self.max_members < self.students:
            raise ValueError(
                f"`max_members={self.max_members}` is below `students={self.students}`, which all train from the "
                "start. Raise it or leave it out."
            )
        if not self.halve_every:
            return
        clashes: dict[str, Any] = {"max_members": self.students, "member_prompts": MEMBER_PROMPTS[0]}
        clashes |= {"evolve_every": 0, "pool_every": 0}
        for name, needed in clashes.items():
            if (value := getattr(self, name)) != needed:
                raise ValueError(
                    f"`{name}={value!r}` clashes with `halve_every={self.halve_every}`: halving alone decides who "
                    f"leaves, by rewards on the same prompts. Set it to {needed!r}."
                )
        if self.students < 2 or self.students & (self.students - 1):
            raise ValueError(
                f"`students={self.students}` cannot be halved down to one. With `halve_every` it must be a power of "
                f"two, such as {max(2, 2 ** (self.students.bit_length() - 1))}."
            )
        if not 0 < self.halve_every < self.max_steps:
            raise ValueError(
                f"`halve_every={self.halve_every}` needs a larger `max_steps`, got {self.max_steps}: the first "
                f"halving comes after {self.halve_every} optimizer steps, and the run must go on after it. Epochs "
                "cannot replace `max_steps`, because members that stay get twice as many rows. "
                f"{self.students} members are down to one after "
                f"{(self.students.bit_length() - 1) * self.halve_every} optimizer steps."
            )

    def _count_students(self, adapters: int | None = None) -> None:
        """Sets `students` where it is `None`: as many as a list has values, less `teachers`; or `adapters`; or 4."""
        if self.students is None:
            lists = [value for name in MEMBER_OPTIONS if isinstance(value := getattr(self, name), (list, tuple))]
            teachers = self.teachers if isinstance(self.teachers, int) else 0
            counts = [len(values) - teachers for values in lists if len(values) > teachers]
            self.students = next(iter(counts), adapters or min(4, self.max_members or 4))

    def _take_lists(self) -> dict[str, list[Any]]:
        """Returns the options given as lists, and sets each of them to the first value of its list."""
        lists = {}
        for name in MEMBER_OPTIONS:
            if isinstance(value := getattr(self, name), (list, tuple)):
                lists[name] = read_list(name, value, self.teachers, self.students)
                setattr(self, name, lists[name][0])
        return lists

    def _check_lists(self, lists: Mapping[str, list[Any]]) -> None:
        """Checks all values of the lists, and keeps those lists in which members differ."""
        for name, values in lists.items():
            for value in (*values, values[0]):  # the first value comes again at the end, so that it stays set
                setattr(self, name, value)
                check_numbers(self)
                check_bounds(self, BOUNDS)
        self.member_values = {name: values for name, values in lists.items() if len({*values}) > 1}

    def _multiply_by_members(self) -> None:
        """
        Makes a generation and an optimizer step hold the rows of all seats. Each seat has as many rows in them as TRL
        would have with its one adapter.

        A micro-batch keeps `per_device_train_batch_size` rows.

        Raises:
            `ValueError`: If TRL would refuse the numbers, or if neither a generation is a multiple of an optimizer
                step nor an optimizer step a multiple of a generation.
        """
        assert self.num_generations is not None, "`_check_numbers` sets it"
        size, accumulation = self.per_device_train_batch_size * _count_processes(), self.gradient_accumulation_steps
        rows = self.generation_batch_size
        if rows is not None and self.steps_per_generation is not None:
            raise ValueError(
                f"`generation_batch_size={rows}` and `steps_per_generation={self.steps_per_generation}` say the same "
                "thing. Set one."
            )
        if rows is not None and rows % size:
            raise ValueError(
                f"`generation_batch_size={rows}` must be a multiple of {size}: `per_device_train_batch_size` times "
                "the number of processes."
            )
        micro_batches = self.steps_per_generation or (accumulation if rows is None else rows // size)
        if micro_batches * size % self.num_generations:
            raise ValueError(
                f"A generation has {micro_batches * size} rows of each member (`per_device_train_batch_size` times "
                f"the number of processes times {micro_batches}), which `num_generations={self.num_generations}` does "
                f"not divide. `num_generations={math.gcd(micro_batches * size, self.num_generations)}` would."
            )
        if micro_batches % accumulation and accumulation % micro_batches:
            raise ValueError(
                f"A generation has {micro_batches} micro-batches of each member and an optimizer step has "
                f"{accumulation} (`gradient_accumulation_steps`). One must be a multiple of the other, because rows "
                "of a generation are dealt to its optimizer steps."
            )
        self.gradient_accumulation_steps = accumulation * self.seats
        self.steps_per_generation, self.generation_batch_size = micro_batches * self.seats, None

    @property
    def seats(self) -> int:
        """Number of the adapters that the run has from its start to its end."""
        return 1 if self.single_agent else self.max_members or self.teachers + self.students

    @property
    def optimizer_steps_per_generation(self) -> int:
        """Optimizer steps after which a generation of rows and an optimizer step end together."""
        micro_batches = self.steps_per_generation * self.num_iterations
        return micro_batches // math.gcd(micro_batches, self.gradient_accumulation_steps)

    def to_dict(self):
        # Trackers get this. transformers hides settings that are tokens, but no token inside a setting that is a dict.
        return {name: drop_secrets(value) for name, value in (super().to_dict() | self.member_values).items()}

    def list_idle_options(self, max_steps: int) -> list[str]:
        """Lists the options that were set and do nothing, because the first event would come after the last step."""
        every = {name: getattr(self, name) for name in ("evolve_every", "pool_every") if self._given[name]}
        return [f"{name}={steps}" for name, steps in every.items() if steps >= max_steps]

    def list_idle_breeding(self) -> list[str]:
        """Lists the options of evolution that were set and do nothing: `evolve_every` was left unset, and is 0."""
        if self.evolve_every or self._given["evolve_every"] is not None or "evolve_every" in (self._changed or ()):
            return []
        own = {each.name: each.default for each in fields(Breeding) if each.name in self.__dataclass_fields__}
        return [name for name in own if name not in ("seed", "evolve_every") and self._given[name] != own[name]]

    def build(self, room: type[Settings], **further: Any) -> Settings:
        """
        Builds the settings of a room from the options of the same names.

        Args:
            room: Dataclass of the room's settings, which checks them.
            further: Fields that are no options.

        Raises:
            `ValueError`: If the dataclass refuses a value.
        """
        names = {each.name for each in fields(room)} - set(further)  # type: ignore[arg-type]
        return room(**{name: getattr(self, name) for name in names}, **further)

    def _check_numbers(self):
        """
        Refuses values that are no numbers where numbers belong, and numbers out of bounds. Sets `attempts_per_task`.
        """
        if self.max_grad_norm is None:
            self.max_grad_norm = 0.0  # means "do not clip" like None, which transformers could not compare with 0
        if self.attempts_per_task is None:  # TRL's name for it may be given instead
            self.attempts_per_task = 8 if self.num_generations is None else self.num_generations
        check_numbers(self)
        check_bounds(self, BOUNDS)
        if self.num_generations not in (None, self.attempts_per_task):
            raise ValueError(
                f"`num_generations={self.num_generations}` and `attempts_per_task={self.attempts_per_task}` are the "
                "same thing here. Set only `attempts_per_task`."
            )
        self.num_generations = self.attempts_per_task

    def _check_rooms(self) -> list[object]:
        """Builds the settings of the rooms below, because each checks its values when it is built."""
        return [*map(self.build, (KindSettings, Scoring, SandboxSettings)), self.breeding]

    @property
    def breeding(self) -> Breeding:
        """The settings of evolution: when and how members are replaced."""
        return self.build(Breeding, roles=self._evolving_roles)

    @property
    def pooled_roles(self) -> tuple[str, ...]:
        """Roles whose members are pooled."""
        return find_pooled_roles(self.pool) if self.pool_every else ()

    @property
    def _evolving_roles(self) -> tuple[str, ...]:
        learning = find_learning_roles(self.learning_rate, self.teacher_learning_rate)
        return tuple(role for role in learning if role not in self.pooled_roles)

    @property
    def rows_per_step(self) -> int:
        """Rows of one population step over all processes: the proposals and all attempts."""
        return self._size.rows

    @property
    def replays_per_match(self) -> int:
        """Archived tasks that a match's student attempts beside the proposals, over all processes."""
        return self._size.replays

    @property
    def _size(self) -> StepSize:
        # With the baseline "member" a proposal needs a second one of its kind to be compared with.
        least = 2 * len(self.task_kinds) if self.teacher_baseline == "member" else 0
        return StepSize(
            teachers=self.teachers,
            students=self.students,
            proposals=self.proposals_per_teacher,
            attempts=self.attempts_per_task,
            per_device=self.per_device_train_batch_size,
            replay=self.replay,
            least=least,
        )

    def _check_population(self):
        """
        Refuses numbers of members, proposals, attempts and steps that do not fit together. In a run without teachers
        it also refuses options that only teachers use.
        """
        self._settle_pooling()
        for name in ("evolve_every", "pool_every"):
            if getattr(self, name) % self.num_iterations:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` must be a multiple of `num_iterations={self.num_iterations}`. "
                    "Otherwise members would change while rows that they wrote before still wait for an update."
                )
        if not self.teachers:
            check_no_teachers(vars(self), self.__dataclass_fields__)
        self._size.check_groups(_count_processes())

    def _settle_pooling(self) -> None:
        """
        Refuses a role that cannot be pooled. Where pooling leaves nobody to evolve, sets `evolve_every` to 0, or
        refuses the number that was given.
        """
        check_choices(self, {"pool": POOLS})
        if not self.pool_every:
            if self.pool != POOLS[0]:
                raise ValueError(
                    f"`pool={self.pool!r}` pools nobody without `pool_every`. Set `pool_every` to a number of "
                    "optimizer steps, or leave `pool` out."
                )
            return
        counts = {role: getattr(self, f"{role}s") for role in ROLES}
        rates = {"student": min(self.member_values.get("learning_rate", [self.learning_rate]))}
        rates["teacher"] = self.learning_rate if self.teacher_learning_rate is None else self.teacher_learning_rate
        told = f"`pool_every={self.pool_every}` with `pool={self.pool!r}`"
        for role in self.pooled_roles:
            if counts[role] < 2 or not rates[role]:
                raise ValueError(
                    f"{told} needs two or more {role}s at the start that learn, each with an adapter of its own and a "
                    "learning rate above 0. Let `pool` name another role, or set `pool_every` to 0."
                )
        if self.evolve_every and not any(counts[role] > 1 for role in self._evolving_roles):
            if self._given["evolve_every"] is not None:
                raise ValueError(
                    f"{told} and `evolve_every={self.evolve_every}`: members of a pooled role do not evolve, so "
                    "nobody is left to evolve. Set one of the two to 0."
                )
            self.evolve_every = 0

    def _check_choices(self, scales: Collection[str | bool]):
        """Refuses unknown names, options that couple members, and `beta` with `teacher_beta`."""
        choices: dict[str, Collection[object]] = {
            "loss_type": LOSS_NORMALISERS,
            "scale_rewards": scales,
            "member_prompts": MEMBER_PROMPTS,
            "ratings": RATINGS,
        }
        check_choices(self, choices)
        check_names(self.task_kinds)
        for name, allowed_value, reason in COUPLE_MEMBERS:
            if getattr(self, name) != allowed_value:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` is not supported in a population: {reason}. Leave it at "
                    f"{allowed_value!r}."
                )
        if self.teacher_beta and self.beta:
            raise ValueError(f"`teacher_beta={self.teacher_beta}` is for teachers alone: leave `beta` at 0.")

    def _check_rewards(self):
        """Refuses rules that do not exist, and numbers that a user's own rule would not read."""
        # Only the package's own rules read the options whose names begin with the third text. No option is read by
        # baselines alone, and no name begins with "-".
        for option, named, numbers in (
            ("teacher_reward", PAY, "teacher_reward_"),
            ("student_reward", STUDENT_PAY, "student_reward_"),
            ("matchmaking", STRATEGIES, "pfsp_"),
            ("teacher_baseline", BASELINES, "-"),
            ("student_baseline", BASELINES, "-"),
        ):
            defaults = {each.name: each.default for each in fields(self) if each.name.startswith(numbers)}
            given = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
            check_choice(option, path := getattr(self, option), named, given)
            if path not in named:
                find_function(path, option, named)

    def micro_batches(self, world: int) -> int:
        """
        Counts the micro-batches of one step on each of `world` processes.

        Raises:
            `ValueError`: If the rows of a step do not divide evenly; the message names sizes that do.
        """
        return self._size.count_micro_batches(world)


def _make_default(option: Field) -> Any:
    """Makes the default value of an option."""
    return option.default_factory() if option.default is MISSING else option.default  # type: ignore[operator]


def settle_for_prompts(args: GRPOConfig, adapters: int | None = None) -> PopuLoRAConfig:
    """
    Returns the config of a dataset run.

    Args:
        args: A [`PopuLoRAConfig`], or TRL's own config. Values of TRL's config stay, and the options that only a
            `PopuLoRAConfig` has get their defaults.
        adapters: Number of the adapter configs, if they are a list. It is the number of members if `students` is
            `None` and no option is a list.

    Raises:
        `ValueError`: If these settings do not make a dataset run.
    """
    if isinstance(args, PopuLoRAConfig):
        return args.for_prompts(adapters)
    given = {each.name: getattr(args, each.name) for each in fields(args) if each.init}
    known = {each.name: each for each in fields(PopuLoRAConfig)}
    settled = object.__new__(PopuLoRAConfig)
    own = {name: _make_default(each) for name, each in known.items() if name not in given and each.init}
    # TRL's config has derived `generation_batch_size` from `steps_per_generation` or the other way round, and a
    # config that sets both is refused.
    given["generation_batch_size"] = None
    settled.__dict__.update(own, **{name: _as_python(value) for name, value in given.items() if name in known})
    settled.__dict__.update(_given=dict(vars(settled)), _changed=None, _no_game=None, member_values={})
    settled._settle_for_prompts(adapters)
    return settled


def _count_processes() -> int:
    """Reads the number of processes from WORLD_SIZE, which every launcher sets; 1 without a launcher."""
    # `TrainingArguments.world_size` would set up the devices, for which it is too early here.
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_no_teachers(given: Mapping[str, Any], known: Mapping[str, Field]) -> None:
    """
    Refuses, in a run without teachers, `replay` and the options for teachers' pay, KL term and learning rate.

    Args:
        given: The value of each option, by name.
        known: The dataclass field of each option, by name. Its default is read from it.

    Raises:
        `ValueError`: If one of these options differs from its default.
    """
    for name in (
        *("replay", "teacher_reward", "teacher_reward_invalid", "teacher_reward_unsolved"),
        *("teacher_baseline", "teacher_beta", "teacher_learning_rate"),
    ):
        default = known[name].default
        if (value := given[name]) != default:
            raise ValueError(
                f"`{name}={value}` needs teachers, and with `teachers=0` students train on given tasks alone. Set it "
                f"to {default} (`none` for None on a command line)."
            )


# Whether the rows of a step divide evenly into groups, processes and micro-batches.


@dataclass(frozen=True)
class StepSize:
    """
    The size of one population step over all processes.

    Args:
        teachers: Number of teachers, each with one match.
        students: Number of students. Without teachers each student has one match.
        proposals: Proposals per teacher; without teachers, given tasks that each student attempts.
        attempts: Attempts per task.
        per_device: Rows of a micro-batch on one process.
        replay: Share of replayed archived tasks among the tasks that students attempt, in [0, 1). Archived tasks that
            take the place of refused proposals do not count.
        least: Fewest proposals per teacher that an error may suggest.
    """

    teachers: int
    students: int
    proposals: int
    attempts: int
    per_device: int
    replay: float = 0.0
    least: int = 0

    @property
    def replays(self) -> int:
        """Archived tasks that a match's student attempts beside the proposals; at least 1 if `replay` is above 0."""
        # With P proposals and r replays the share is r / (P + r).
        return max(round(self.proposals * self.replay / (1 - self.replay)), math.ceil(self.replay))

    @property
    def rows(self) -> int:
        """Number of the rows: the proposals, and all attempts."""
        if not self.teachers:
            return self.students * self.proposals * self.attempts
        return self.teachers * (self.proposals + (self.proposals + self.replays) * self.attempts)

    def check_groups(self, world: int) -> None:
        """
        Checks that TRL can cut its generation batch into groups of `attempts_per_task` rows. The attempts at a task
        are such a group, so only the number of the proposals can fail to fit.

        Raises:
            `ValueError`: If it cannot; the message names settings that work with `world` processes.
        """
        proposals = self.teachers * self.proposals
        if proposals % self.attempts:
            raise ValueError(
                f"`teachers * proposals_per_teacher` = {self.teachers} * {self.proposals} = {proposals} must be a "
                f"multiple of `attempts_per_task={self.attempts}`, because TRL's generation batch holds whole groups. "
                f"{self.find_way_out(world)}"
            )

    def count_micro_batches(self, world: int) -> int:
        """
        Counts the micro-batches of one step on each of `world` processes.

        Raises:
            `ValueError`: If processes or micro-batches do not divide the rows; the message names sizes that do.
        """
        if self.proposals % world or self.replays % world:
            replays = f" and the {self.replays} tasks of `replay={self.replay}`" if self.replays else ""
            raise ValueError(
                f"`proposals_per_teacher={self.proposals}`{replays} must be a multiple of the {world} processes, "
                f"so that each holds an equal share of every match. {self.find_way_out(world)}"
            )
        if self.rows % (self.per_device * world):
            replays = f" + teachers * {self.replays} replays * attempts_per_task" if self.replays else ""
            parts = "students * proposals_per_teacher * attempts_per_task"
            if self.teachers:
                parts = f"teachers * proposals_per_teacher * (1 + attempts_per_task){replays}"
            raise ValueError(
                f"One population step has {self.rows} rows ({parts}), which `per_device_train_batch_size="
                f"{self.per_device}` times {world} process(es) does not divide. {self.find_way_out(world)}"
            )
        return self.rows // (self.per_device * world)

    def find_way_out(self, world: int) -> str:
        """Finds sizes close to the given ones that satisfy every check, as a sentence for an error."""
        # Proposals per teacher must be a multiple of `world`, and all teachers' proposals a multiple of `attempts`.
        multiple = math.lcm(world, self.attempts // math.gcd(self.teachers, self.attempts))
        size, changed = self, []
        if self.proposals % multiple:
            proposals = -(-max(self.proposals, self.least) // multiple) * multiple
            size = replace(size, proposals=proposals)
            changed.append(f"`proposals_per_teacher={proposals}`")
        if size.replays % world:
            replays = -(-size.replays // world) * world
            size = replace(size, replay=round(replays / (size.proposals + replays), 6))
            changed.append(f"`replay={size.replay}`")
        # The largest micro-batch up to the wanted one that divides the rows of a process.
        local = size.rows // world
        per_device = next(rows for rows in range(min(size.per_device, local), 0, -1) if local % rows == 0)
        if per_device != self.per_device:
            changed.append(f"`per_device_train_batch_size={per_device}`")
        return f"{' with '.join(changed)} works."


# What a command line says about base and adapters. Every option of TRL's `ModelConfig` is honoured or refused.


@dataclass
class MemberConfig(ModelConfig):
    """
    TRL's [`~trl.ModelConfig`]. Its options `lora_*` describe the adapter of every member.

    Two defaults differ, because members are always LoRA adapters and have no dropout. The trainer refuses adapters of
    other sorts when it is built. `docs/options.md` lists all options.
    """

    _argument_group_name = "Base and adapters"
    use_peft: bool = field(default=True, metadata={"help": "Always true: members are LoRA adapters."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Always 0: dropout is not supported."})
    lora_r: int = field(
        default=16,
        metadata={"help": "LoRA rank. In a dataset run it may be a list, one value for each member.", **_SEVERAL},
    )
    lora_alpha: int = field(
        default=32,
        metadata={"help": "LoRA alpha. In a dataset run it may be a list, one value for each member.", **_SEVERAL},
    )

    def __post_init__(self):
        super().__post_init__()
        lists = {name: getattr(self, name) for name in ("lora_r", "lora_alpha")}
        self.member_values = {name: values for name, values in lists.items() if isinstance(values, list)}
        for name, values in self.member_values.items():
            if not values:
                raise ValueError(f"`{name}` is an empty list: list one value for each member, or give one for all.")
            setattr(self, name, values[0])
        check_numbers(self)  # TRL's parser accepts a list in a recipe for any option
        for name, values in self.member_values.items():
            for value in (*values, values[0]):  # the first value comes again at the end, so that it stays set
                setattr(self, name, value)
                check_numbers(self)


def member_lora(model: ModelConfig) -> LoraConfig:
    """
    Builds the adapter config of every member as TRL does. Where no target is named it covers all linear layers.

    [`~trl_populora.lora.checks.check_lora_config`] refuses other sorts of adapter later.

    Raises:
        `ValueError`: If `use_peft` is false, which would train without adapters.
    """
    lora = get_peft_config(model)
    if lora is None:
        raise ValueError("`use_peft=False` is not supported: every member is a LoRA adapter. Leave it at True.")
    if lora.target_modules is None and lora.target_parameters is None:
        lora.target_modules = "all-linear"
    # TRL turns a list with one name into a text, and PEFT reads a text as a pattern that must match a module's whole
    # path.
    if isinstance(lora.target_modules, str) and lora.target_modules.isidentifier():
        lora.target_modules = {lora.target_modules}
    return lora


def list_member_loras(model: MemberConfig) -> LoraConfig | list[LoraConfig]:
    """
    Builds the `peft_config` of a trainer: one for all members, or a list if `lora_r` or `lora_alpha` is one.

    Raises:
        `ValueError`: As [`member_lora`]; also if `lora_r` and `lora_alpha` are lists of unequal length.
    """
    lora, lists = member_lora(model), model.member_values
    lengths = {len(values) for values in lists.values()}
    if not lists:
        return lora
    if len(lengths) > 1:
        told = " and ".join(f"`{name}={values}`" for name, values in lists.items())
        raise ValueError(f"{told} have unequal lengths. List one value for each member in both.")
    ranks = lists.get("lora_r", [lora.r] * max(lengths))
    alphas = lists.get("lora_alpha", [lora.lora_alpha] * max(lengths))
    configs = [copy.copy(lora) for _ in ranks]
    for config, r, alpha in zip(configs, ranks, alphas, strict=True):
        config.r, config.lora_alpha = r, alpha
    return configs


def base_options(model: ModelConfig, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    Collects the arguments with which `from_pretrained` loads the base.

    Args:
        model: Options of the command line.
        given: `model_init_kwargs`, which win over the options.
    """
    told = {
        "dtype": model.dtype,
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
    }
    return told | dict(given or {})
