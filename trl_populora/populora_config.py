"""`PopuLoRAConfig`: every setting of a population run. Groups stand in the order of the step (population, tasks,
matchmaking, rewards, sandbox, evolution); each default names its source.

"paper" is PopuLoRA (arXiv 2605.16727), "AZR" is Absolute Zero Reasoner (arXiv 2505.03335).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOConfig

from trl_populora.population.evolution import RATING_RESETS
from trl_populora.population.matchmaking import STRATEGIES
from trl_populora.step.advantages import BASELINES, COUPLE_MEMBERS, LOSS_NORMALISERS
from trl_populora.step.ahead import check_play_ahead
from trl_populora.step.rules import PAY, STUDENT_PAY, check_choice
from trl_populora.step.sizes import StepSize, check_rivals
from trl_populora.tasks import check_names
from trl_populora.tasks.base import READINGS, STYLES
from trl_populora.tasks.templates import check_texts


@dataclass
class PopuLoRAConfig(GRPOConfig):
    r"""
    Configuration of [`PopuLoRATrainer`].

    Everything of [`~trl.GRPOConfig`] is inherited. The batch follows from the population: one population step has
    `teachers * proposals_per_teacher * (1 + attempts_per_task)` rows, so `generation_batch_size`,
    `steps_per_generation`, `gradient_accumulation_steps` and `num_generations` are derived here and need not be set.
    Only `per_device_train_batch_size` is yours: times the number of processes it must divide those rows.

    Args:
        teachers, students (`int`, *optional*, default to `4`):
            Number of adapters of each role (paper: 4).
        single_agent (`bool`, *optional*, defaults to `False`):
            One adapter plays the only teacher and the only student (AZR): `teachers` and `students` become 1. It sees
            as many rows a step as one pair of a population does, so compute per adapter is matched.
        warm_start (`str`, `list[str]` or `dict[str, str]`, *optional*):
            Directory or Hub name of a saved population on the same base, with the same adapter shape and any number of
            members. Or of ordinary LoRA adapters of a rank not above the members': one for all, a list of one for each
            (teachers first), or one for a role, `{"student": "runs/sft"}`.

        task_kinds (`list[str]`, *optional*, defaults to `["code_i", "code_o", "code_f"]`):
            Kinds of task the teachers propose, in rotation (AZR's three). A kind of your own is named as
            `"package.module:Class"`.
        proposals_per_teacher (`int`, *optional*, defaults to `12`):
            Tasks proposed per teacher and step, spread over the kinds: 4 teachers make 48 per step. AZR proposes 64
            per kind with one agent.
        attempts_per_task (`int`, *optional*, defaults to `8`):
            Attempts of the matched student at each task, the group of the GRPO baseline (AZR: 8).
        references_per_proposal (`int`, *optional*, defaults to `6`):
            Archived tasks shown to a teacher when it proposes code_i or code_o (AZR: 6). code_f shows one program.
        inputs_per_function (`int`, *optional*, defaults to `10`):
            Inputs a code_f proposal must give; half are shown to the student (AZR: 10).
        prompt_style (`str`, *optional*):
            `"turns"`: short instructions, references as turns before. `"chat"`: all in one turn, for large models.
            `"compact"`: what the embedded base knows. When `None`, that for the embedded base, else `"turns"`.
        shots (`int`, *optional*):
            Solved tasks shown to students, as turns before. When `None`, 3 for bases below a billion parameters.
        reading (`str`, *optional*): How answers may be fenced: `"tolerant"`, but for `"compact"`, or `"strict"`.
        prompt_texts (`dict[str, str]`, *optional*):
            Instructions of your own for the built-in kinds, by `"code_o/propose"`, `"code_o/solve"` and so on.
        archive_size (`int`, *optional*, defaults to `16384`):
            Tasks kept per kind, newest first (AZR's buffer size; AZR keeps the oldest).
        students_per_task (`int`, *optional*, defaults to `1`): With `2` another one makes half of the attempts.
        replay (`float`, *optional*, defaults to `0.0`):
            Share of archived tasks among those a student attempts, beside the proposals; neither paid for nor rated.

        matchmaking (`str`, *optional*, defaults to `"pfsp"`):
            `"pfsp"` prefers near-balanced pairs by TrueSkill win probability p; `"uniform"` pairs at random.
        pfsp_kappa (`float`, *optional*, defaults to `2.0`):
            Exponent of the weight (p(1-p))^kappa (paper, second hand: 1; 2 by `benchmarks/ratings.py`).
        pfsp_floor (`float`, *optional*, defaults to `0.0`):
            Added to the weight. Every pair can meet without it, and it flattens what `pfsp_kappa` sharpens.

        teacher_reward (`str`, *optional*, defaults to `"paper"`):
            Pay for a solved task (`docs/guides/reward.md`): `"paper"` (1 - solve rate), `"learnability"`,
            `"confirmed"`, `"rarity"`, `"progress"`, `"regret"`, or a function of your own, `"module:function"`.
        teacher_reward_invalid (`float`, *optional*, defaults to `-1.0`): Of a proposal that is no task (paper).
        teacher_reward_unsolved (`float`, *optional*, defaults to `0.0`): Of a task that no attempt solves (paper).
        student_reward (`str`, *optional*, defaults to `"azr"`): `"azr"`, or a function of your own for all attempts.
        student_reward_correct (`float`, *optional*, defaults to `1.0`): Of a right answer (AZR; paper, second hand).
        student_reward_wrong (`float`, *optional*, defaults to `-0.5`): Of a well-formed wrong answer (AZR).
        student_reward_malformed (`float`, *optional*, defaults to `-1.0`): Of an answer that cannot be read (AZR).
        teacher_baseline (`str`, *optional*, defaults to `"member"`):
            `"member"`: mean over the teacher's proposals of the same kind, each of which has its own references
            (AZR's task-relative REINFORCE++). `"group"`: the whole match.
        student_baseline (`str`, *optional*, defaults to `"group"`):
            `"group"`: mean over the attempts at one task (GRPO). `"member"`: the student's attempts of the same kind.
        teacher_scale (`str`, *optional*, defaults to `"step"`):
            Teachers' advantages are divided by this step's deviation (GRPO), or by each one's own `"running"` one.
        teacher_beta (`float`, *optional*): `beta` for teachers alone, whose pull to the base keeps them readable.
        teacher_learning_rate (`float`, *optional*):
            The teachers' own, which TRL then logs as `learning_rate`; as the students' when `None`. Where it is given,
            a role whose rate is `0` is frozen: neither updates nor evolution change its members.

        sandbox_workers (`int`, *optional*):
            Programs that a node runs at a time, for all of its ranks together; its usable cores when `None`.
        sandbox_seconds (`float`, *optional*, defaults to `2.0`):
            CPU time that one program run may use, in seconds. A proposal may use half of it, because the same program
            may need more in the attempts, which run beside other work. Programs are small; AZR waits 10 by the clock.
        sandbox_memory_mb (`int`, *optional*, defaults to `512`): Memory limit of one program run, in MiB.
        determinism_runs (`int`, *optional*, defaults to `2`):
            Runs of a proposal under different hash seeds that must agree (AZR: 2).
        sandbox_allow_weak (`bool`, *optional*, defaults to `False`):
            Train although this host offers no kernel confinement. Only for hosts that hold nothing of value.
        sandbox_bubblewrap (`bool`, *optional*, defaults to `False`): Wrap its processes in bubblewrap (`bwrap`), too.

        evolve_every (`int`, *optional*, defaults to `10`):
            Optimizer steps between two evolution events (paper, second hand: 10). `0` switches evolution off.
        evolve_burn_in (`int`, *optional*, defaults to `5`): Matches a member must have played to be replaced.
        cull_fraction (`float`, *optional*, defaults to `0.25`):
            Share of each role replaced per event, at least one member (paper, second hand).
        crossover_rate (`float`, *optional*, defaults to `0.5`): Probability of two parents (paper, second hand).
        tournament_size (`int`, *optional*, defaults to `2`): Survivors drawn per parent; the highest mu wins.
        mutations, crossovers (`dict[str, float]` or `str`, *optional*):
            Weights of the operators by name. The paper's four of each, evenly, when `None`.
        mutation_strength (`float`, *optional*, defaults to `1.0`):
            Factor on the mutation operators' own strengths: 1 is each as published, 0.5 half as far from the parent.
        inherit_optimizer (`bool`, *optional*, defaults to `False`): Give a child its first parent's Adam moments.
        rating_reset (`str`, *optional*, defaults to `"parents"`):
            `"parents"`: the child starts at its parents' mean mu, since it is like them (`benchmarks/ratings.py`).
            `"prior"`: at 25 / 8.333 (paper, second hand).
        retention_tolerance (`float`, *optional*):
            Switches the retention gate on: nats per token that a child may lose against its (better) parent on what
            its role got right in the last step. A child that loses more is bred again at half the strength, at last
            cloned. For example `0.1`.
        retention_rows (`int`, *optional*, defaults to `16`): Completions per rank that the gate looks at.
        learning_rate_perturbation (`float`, *optional*, defaults to `0.0`):
            A child's rate is its first parent's times one plus or minus this (Jaderberg et al., 2017: 0.2; 0 is off).

        eval_attempts (`int`, *optional*, defaults to `4`):
            Attempts of every student at every task of `eval_dataset`, sampled as in training. `eval_strategy` and
            `eval_on_start` say when; `per_device_eval_batch_size` rows are generated at once.
        eval_teachers (`bool`, *optional*, defaults to `False`): Teachers attempt the held-out tasks as well.

        generation_tokens (`int`, *optional*):
            Tokens, prompts included, that the cache of a process holds at once where transformers generates.
        vllm_engine_kwargs (`dict` or `str`, *optional*):
            Further arguments of vLLM's `LLM` in colocate mode, for example `{"enforce_eager": true}`. TRL's own
            `vllm_*` settings hold too; the engine computes in the trainer's precision unless `dtype` is given.
        vllm_adapter_dir (`str`, *optional*):
            Directory that the trainer and every vLLM server see, for published adapters. Shared memory, or
            `output_dir` when a server sits on another host or memory is short, when `None`. Not for colocated engines.
        vllm_request_timeout (`float`, *optional*, defaults to `1200.0`): Seconds a vLLM server may take to answer.
        play_ahead (`bool`, *optional*, defaults to `False`):
            Play the next step's game on the vLLM server while this step's update runs. Its rows are at most one
            version of a member behind (`ahead/staleness`), newborns play after their birth, and ratings and archive
            are one game ahead of the step. For one process.

        save_rollouts (`bool`, *optional*, defaults to `True`): Write every row to `rollouts/step_*.parquet`.

    Raises:
        `ValueError`: A value is out of range, names nothing known, or the population does not fit the batch.
    """

    if TYPE_CHECKING:  # fields of GRPOConfig that are set here, too
        generation_batch_size: int | None
        num_generations: int | None
        num_generations_eval: int | None
        gradient_accumulation_steps: int
        ddp_find_unused_parameters: bool | None

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs", "prompt_texts"]  # may be given as JSON

    # Defaults that differ from GRPOConfig.
    max_steps: int = field(default=200, metadata={"help": "Optimizer steps = population steps. The paper runs 200."})
    learning_rate: float = field(default=1e-5, metadata={"help": "AZR's 1e-6 for full weights, times 10 for LoRA."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "AZR: constant; children need it flat."})
    logging_steps: float = field(default=1, metadata={"help": "Log every population step."})
    max_completion_length: int | None = field(default=2048, metadata={"help": "Tokens per proposal or attempt."})
    router_aux_loss_coef: float | None = field(default=0.0, metadata={"help": "0: it couples members. Fixed here."})

    # Population
    teachers: int = field(default=4, metadata={"help": "Number of teacher adapters."})
    students: int = field(default=4, metadata={"help": "Number of student adapters."})
    single_agent: bool = field(default=False, metadata={"help": "One adapter is teacher and student, as in AZR."})
    warm_start: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Directory or Hub name of a saved population or adapter; JSON for several."}
    )

    # Tasks
    task_kinds: list[str] = field(
        default_factory=lambda: ["code_i", "code_o", "code_f"],
        metadata={"help": "Kinds of task proposed in rotation."},
    )
    proposals_per_teacher: int = field(default=12, metadata={"help": "Tasks proposed per teacher and step."})
    attempts_per_task: int = field(default=8, metadata={"help": "Attempts of the matched student at each task."})
    references_per_proposal: int = field(default=6, metadata={"help": "Archived tasks shown to a proposing teacher."})
    inputs_per_function: int = field(default=10, metadata={"help": "Inputs a code_f proposal must give."})
    prompt_style: str | None = field(default=None, metadata={"help": "'turns', 'chat', 'compact'; else by the model."})
    shots: int | None = field(default=None, metadata={"help": "Solved tasks shown to students; else by the model."})
    reading: str | None = field(default=None, metadata={"help": "'tolerant' or 'strict'; else by the style."})
    prompt_texts: dict[str, Any] | str | None = field(default=None, metadata={"help": "Instructions of your own."})
    archive_size: int = field(default=16384, metadata={"help": "Tasks kept per kind, newest first."})
    students_per_task: int = field(default=1, metadata={"help": "2: another student makes half of the attempts."})
    replay: float = field(default=0.0, metadata={"help": "Share of archived tasks among those students attempt."})

    # Matchmaking
    matchmaking: str = field(default="pfsp", metadata={"help": "'pfsp' or 'uniform'."})
    pfsp_kappa: float = field(default=2.0, metadata={"help": "Exponent of the weight (p(1-p))^kappa."})
    pfsp_floor: float = field(default=0.0, metadata={"help": "Added to the PFSP weight."})

    # Rewards and baselines
    teacher_reward: str = field(default="paper", metadata={"help": "A named pay, or 'module:function'."})
    teacher_reward_invalid: float = field(default=-1.0, metadata={"help": "Reward of an invalid proposal."})
    teacher_reward_unsolved: float = field(default=0.0, metadata={"help": "Reward of a task nobody solves."})
    student_reward: str = field(default="azr", metadata={"help": "'azr' or 'module:function'."})
    student_reward_correct: float = field(default=1.0, metadata={"help": "Reward of a right answer."})
    student_reward_wrong: float = field(default=-0.5, metadata={"help": "Reward of a well-formed wrong answer."})
    student_reward_malformed: float = field(default=-1.0, metadata={"help": "Reward of an unreadable answer."})
    teacher_baseline: str = field(default="member", metadata={"help": "'member' or 'group'."})
    student_baseline: str = field(default="group", metadata={"help": "'group' or 'member'."})
    teacher_scale: str = field(default="step", metadata={"help": "'step' or 'running'."})
    teacher_beta: float | None = field(default=None, metadata={"help": "KL coefficient for teachers alone."})
    teacher_learning_rate: float | None = field(default=None, metadata={"help": "The teachers' own rate; 0: frozen."})

    # Sandbox
    sandbox_workers: int | None = field(default=None, metadata={"help": "Programs at a time, per node."})
    sandbox_seconds: float = field(default=2.0, metadata={"help": "CPU time that one run may use, in seconds."})
    sandbox_memory_mb: int = field(default=512, metadata={"help": "Memory limit of one run, in MiB."})
    determinism_runs: int = field(default=2, metadata={"help": "Runs of a proposal that must agree."})
    sandbox_allow_weak: bool = field(default=False, metadata={"help": "Train without kernel confinement."})
    sandbox_bubblewrap: bool = field(default=False, metadata={"help": "Wrap the sandbox in bubblewrap as well."})

    # Evolution
    evolve_every: int = field(default=10, metadata={"help": "Optimizer steps between evolution events; 0 is off."})
    evolve_burn_in: int = field(default=5, metadata={"help": "Matches before a member can be replaced."})
    cull_fraction: float = field(default=0.25, metadata={"help": "Share of each role replaced per event."})
    crossover_rate: float = field(default=0.5, metadata={"help": "Probability that a child has two parents."})
    tournament_size: int = field(default=2, metadata={"help": "Survivors drawn per parent."})
    mutations: dict[str, Any] | str | None = field(default=None, metadata={"help": "Weights of mutation operators."})
    crossovers: dict[str, Any] | str | None = field(default=None, metadata={"help": "Weights of crossover operators."})
    mutation_strength: float = field(default=1.0, metadata={"help": "Factor on the mutations' own strengths."})
    inherit_optimizer: bool = field(default=False, metadata={"help": "A child keeps its first parent's moments."})
    rating_reset: str = field(default="parents", metadata={"help": "'parents' or 'prior'."})
    retention_tolerance: float | None = field(default=None, metadata={"help": "Nats a child may lose; None is off."})
    retention_rows: int = field(default=16, metadata={"help": "Completions per rank that the gate looks at."})
    learning_rate_perturbation: float = field(default=0.0, metadata={"help": "PBT's factor on a child's rate."})

    # Evaluation
    eval_attempts: int = field(default=4, metadata={"help": "Attempts of a student at each held-out task."})
    eval_teachers: bool = field(default=False, metadata={"help": "Teachers attempt held-out tasks, too."})

    # Generation
    generation_tokens: int | None = field(default=None, metadata={"help": "Tokens in the cache at once, no vLLM."})
    vllm_engine_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Arguments of `LLM`."})
    vllm_adapter_dir: str | None = field(default=None, metadata={"help": "Directory that trainer and servers see."})
    vllm_request_timeout: float = field(default=1200.0, metadata={"help": "Seconds a vLLM server may take to answer."})
    play_ahead: bool = field(default=False, metadata={"help": "Play the next game while this step's update runs."})

    # Records
    save_rollouts: bool = field(default=True, metadata={"help": "Write rollouts/step_*.parquet."})

    def __post_init__(self):
        if self.single_agent:
            for name in ("teacher_learning_rate", "teacher_beta"):
                if getattr(self, name) is not None:
                    raise ValueError(f"`{name}` needs teachers of their own, and `single_agent` has none.")
            self.teachers = self.students = 1
        self._check_population()
        self._check_choices()
        self._check_rewards()
        check_play_ahead(self, _launched_processes())
        rows = self.rows_per_step
        if self.generation_batch_size not in (None, rows) or self.steps_per_generation is not None:
            raise ValueError(
                f"`generation_batch_size={self.generation_batch_size}`, `steps_per_generation="
                f"{self.steps_per_generation}`: both follow from the population ({rows} rows per step here). Leave "
                "them unset and choose `per_device_train_batch_size`."
            )
        for theirs, default, ours in (
            ("num_generations", 8, "attempts_per_task"),
            ("num_generations_eval", None, "eval_attempts"),
        ):
            if getattr(self, theirs) not in (default, getattr(self, ours)):
                raise ValueError(
                    f"`{theirs}={getattr(self, theirs)}` and `{ours}={getattr(self, ours)}` are the same thing here. "
                    f"Set only `{ours}`."
                )
        self.num_generations = self.attempts_per_task
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every member takes part in every backward
        self.generation_batch_size = rows
        wanted_accumulation = self.gradient_accumulation_steps
        self.gradient_accumulation_steps = self.micro_batches(_launched_processes())
        if wanted_accumulation not in (1, self.gradient_accumulation_steps):
            raise ValueError(
                f"`gradient_accumulation_steps={wanted_accumulation}`: one population step is one optimizer step, so "
                f"it must be {self.gradient_accumulation_steps} here. Leave it unset; it is derived."
            )
        if self.bf16 is None and not torch.accelerator.is_available():  # type: ignore[has-type]
            self.bf16 = False  # TRL's default, which a machine without accelerator refuses
        self.num_generations_eval = 1  # TRL would want it to divide the evaluation batch, which holds single rows here
        super().__post_init__()
        check_texts(self.prompt_texts or {})
        self.num_generations_eval = self.eval_attempts

    @property
    def rows_per_step(self) -> int:
        """Rows of one population step over all processes: the proposals, and every attempt at them and at replays."""
        return self._size.rows

    @property
    def replays_per_match(self) -> int:
        """Archived tasks that a match's student attempts beside the proposals, over all processes."""
        return self._size.replays

    @property
    def _size(self) -> StepSize:
        least = 2 * len(self.task_kinds) if self.teacher_baseline == "member" else 0
        sizes = self.proposals_per_teacher, self.attempts_per_task, self.per_device_train_batch_size
        return StepSize(self.teachers, *sizes, self.replay, least)

    def _check_population(self):
        """Refuse counts with which no step can be played."""
        at_least = {
            0: "references_per_proposal shots evolve_every evolve_burn_in mutation_strength retention_tolerance"
            " pfsp_kappa pfsp_floor teacher_learning_rate teacher_beta",
            1: "teachers students archive_size determinism_runs eval_attempts tournament_size retention_rows"
            " num_iterations sandbox_workers sandbox_memory_mb generation_tokens",
            2: "proposals_per_teacher attempts_per_task inputs_per_function",  # one alone is compared with nothing
        }
        for name, least in ((name, least) for least, names in at_least.items() for name in names.split()):
            if getattr(self, name) is not None and not getattr(self, name) >= least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if not self.sandbox_seconds > 0:
            raise ValueError(f"`sandbox_seconds` must be positive, got {self.sandbox_seconds}.")
        if self.evolve_every % self.num_iterations:
            raise ValueError(
                f"`evolve_every={self.evolve_every}` must be a multiple of `num_iterations={self.num_iterations}`, "
                "or a child would be trained on the rows of the member it replaced."
            )
        for name in ("cull_fraction", "learning_rate_perturbation", "replay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {getattr(self, name)}.")
        if not 0 <= self.crossover_rate <= 1:
            raise ValueError(f"`crossover_rate` must be in [0, 1], got {self.crossover_rate}.")
        self._size.check_groups(_launched_processes())

    def _check_choices(self):
        """Refuse names that nothing in the package answers to, and loss options that couple members."""
        choices = {
            "matchmaking": STRATEGIES,
            "rating_reset": RATING_RESETS,
            "teacher_baseline": BASELINES,
            "student_baseline": BASELINES,
            "teacher_scale": ("step", "running"),
            "loss_type": LOSS_NORMALISERS,
            "prompt_style": (*STYLES, None),
            "reading": (*READINGS, None),
            "scale_rewards": ("group", "none", True, False),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(map(str, allowed))}, got {getattr(self, name)!r}."
                )
        check_names(self.task_kinds)
        for name, allowed_value, reason in COUPLE_MEMBERS:
            if getattr(self, name) != allowed_value:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` is not supported: {reason}, which couples members. Leave it at "
                    f"{allowed_value!r}."
                )
        if self.teacher_scale == "running" and self.scale_rewards not in ("group", True):
            raise ValueError(f"`teacher_scale=running` scales, `scale_rewards={self.scale_rewards}` does not.")
        if self.teacher_beta and self.beta:
            raise ValueError(f"`teacher_beta={self.teacher_beta}` is for teachers alone: leave `beta` at 0.")
        if self.max_steps <= 0:
            raise ValueError(
                f"`max_steps` must be positive, got {self.max_steps}: the population writes its own tasks, so there "
                "is no dataset that an epoch could count."
            )

    def _check_rewards(self):
        check_rivals(self.students_per_task, self.students, self.attempts_per_task, self.teacher_reward)
        for option, named in (("teacher_reward", PAY), ("student_reward", STUDENT_PAY)):
            prices = {each.name: each.default for each in fields(self) if each.name.startswith(f"{option}_")}
            given = {name: getattr(self, name) for name in prices if getattr(self, name) != prices[name]}
            check_choice(option, getattr(self, option), named, given)

    def micro_batches(self, world: int) -> int:
        """
        Micro-batches of one step per process, with `world` processes.

        Raises:
            `ValueError`: If the population does not fit; the message names a size that does.
        """
        return self._size.count_micro_batches(world)


def _launched_processes() -> int:
    """`TrainingArguments.world_size` exists only once the devices are set up; every launcher sets WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE", "1"))
