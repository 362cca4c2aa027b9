"""`PopuLoRAConfig`: every setting of a population run. Groups stand in the order of the step (population, tasks,
matchmaking, rewards, sandbox, evolution); each default names its source.

"paper" is PopuLoRA (arXiv 2605.16727), "AZR" is Absolute Zero Reasoner (arXiv 2505.03335).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from trl import GRPOConfig

from trl_populora.population.evolution import Breeding, learning_roles
from trl_populora.population.matchmaking import STRATEGIES
from trl_populora.sandbox.pool import SandboxSettings
from trl_populora.step.advantages import BASELINES, COUPLE_MEMBERS, LOSS_NORMALISERS
from trl_populora.step.rules import PAY, STUDENT_PAY, check_choice
from trl_populora.step.scoring import Scoring
from trl_populora.step.sizes import StepSize, check_no_teachers, check_rivals
from trl_populora.tasks import check_names
from trl_populora.tasks.base import KindSettings
from trl_populora.tasks.bounds import check_choices, check_least, check_shares
from trl_populora.tasks.own import find_function
from trl_populora.tasks.templates import check_texts


Settings = TypeVar("Settings")


def _option(default: Any, text: str) -> Any:
    """A field, with its line of `--help`."""
    return field(default=default, metadata={"help": text})


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
            Number of adapters of each role (paper: 4). With `teachers=0` all students attempt the same
            `proposals_per_teacher` given tasks in a step, and no others (`docs/guides/curriculum.md`).
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
            Archived tasks shown to a teacher when it proposes code_i or code_o (AZR: 6). code_f shows one
            program, in `turns` solved examples, too.
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
            `"pfsp"` prefers near-balanced pairs by TrueSkill win probability p; `"uniform"` pairs at random; or a
            function of your own, the weight of a student and a teacher, `"module:function"`.
        pfsp_kappa (`float`, *optional*, defaults to `2.0`):
            Exponent of the weight (p(1-p))^kappa (paper, second hand: 1; 2 by `benchmarks/ratings.py`).

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
            (AZR's task-relative REINFORCE++). `"group"`: the whole match. Or a function of your own,
            `"module:function"`: the advantages from the role's rewards, members, kinds and groups, row by row.
        student_baseline (`str`, *optional*, defaults to `"group"`):
            `"group"`: mean over the attempts at one task (GRPO). `"member"`: the student's attempts of the same kind.
            Or a function of your own, likewise.
        teacher_scale (`str`, *optional*, defaults to `"step"`):
            Teachers' advantages are divided by this step's deviation (GRPO), or by each one's own `"running"` one.
        teacher_beta (`float`, *optional*): `beta` for teachers alone, whose pull to the base keeps them readable.
        teacher_learning_rate (`float`, *optional*):
            The teachers' own, which TRL then logs as `learning_rate`; as the students' when `None`. Where it is given,
            a role whose rate is `0` is frozen: neither updates nor evolution change its members.

        sandbox_workers (`int`, *optional*):
            Programs that a node runs at a time, shared out among its processes; its usable cores when `None`.
        sandbox_seconds (`float`, *optional*, defaults to `2.0`):
            CPU time that one program run may use, in seconds. A proposal may use half of it, because the same program
            may need more in the attempts, which run beside other work. Programs are small; AZR waits 10 by the clock.
        sandbox_memory_mb (`int`, *optional*, defaults to `512`): Memory limit of one program run, in MiB.
        determinism_runs (`int`, *optional*, defaults to `2`):
            Runs of a proposal under different hash seeds that must agree (AZR: 2).
        sandbox_allow_weak (`bool`, *optional*, defaults to `False`):
            Train although this host offers no kernel confinement. Only for hosts that hold nothing of value.

        evolve_every (`int`, *optional*, defaults to `10`):
            Optimizer steps between two evolution events (paper, second hand: 10). `0` switches evolution off.
        evolve_burn_in (`int`, *optional*, defaults to `5`): Matches a member must have played to be replaced.
        cull_fraction (`float`, *optional*, defaults to `0.25`):
            Share of each role replaced per event, at least one member (paper, second hand).
        crossover_rate (`float`, *optional*, defaults to `0.5`): Probability of two parents (paper, second hand).
        tournament_size (`int`, *optional*, defaults to `2`): Survivors drawn per parent; the highest mu wins.
        mutations, crossovers (`dict[str, float]` or `str`, *optional*):
            Weights of the operators by name, your own as `"module:function"`. The paper's four, evenly, when `None`.
        mutation_strength (`float`, *optional*, defaults to `1.0`):
            Factor on the mutation operators' own strengths: 1 is each as published, 0.5 half as far from the parent.

        eval_attempts (`int`, *optional*, defaults to `4`):
            Attempts of every student at every task of `eval_dataset`, sampled as in training. `eval_strategy` and
            `eval_on_start` say when; `per_device_eval_batch_size` rows are generated at once.

        generation_tokens (`int`, *optional*):
            Tokens, prompts included, that the cache of a process holds at once where transformers generates.
        vllm_engine_kwargs (`dict` or `str`, *optional*):
            Further arguments of vLLM's `LLM` in colocate mode, for example `{"enforce_eager": true}`. TRL's own
            `vllm_*` settings hold too; the engine computes in the trainer's precision unless `dtype` is given.
        vllm_adapter_dir (`str`, *optional*):
            Directory that the trainer and every vLLM server see, for published adapters. Shared memory, or
            `output_dir` when a server sits on another host or memory is short, when `None`. Not for colocated engines.

        save_rollouts (`bool`, *optional*, defaults to `True`): Write every row to `rollouts/step_*.parquet`.
        own_metrics (`list[str]`, *optional*):
            Functions of your own, `"module:function"`, from a step's rows, a `dict` each, to further metrics by name.

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
    max_steps: int = _option(200, "Optimizer steps = population steps. The paper runs 200.")
    learning_rate: float = _option(1e-5, "AZR's 1e-6 for full weights, times 10 for LoRA.")
    lr_scheduler_type: str = _option("constant", "AZR: constant; children need it flat.")
    logging_steps: float = _option(1, "Log every population step.")
    max_completion_length: int | None = _option(2048, "Tokens per proposal or attempt.")
    router_aux_loss_coef: float | None = _option(0.0, "0: it couples members. Fixed here.")

    # Population
    teachers: int = _option(4, "Number of teacher adapters; 0: given tasks alone.")
    students: int = _option(4, "Number of student adapters.")
    single_agent: bool = _option(False, "One adapter is teacher and student, as in AZR.")
    warm_start: dict[str, Any] | str | None = _option(None, "Saved population or adapter; JSON for several.")

    # Tasks
    task_kinds: list[str] = field(
        default_factory=lambda: ["code_i", "code_o", "code_f"],
        metadata={"help": "Kinds of task proposed in rotation."},
    )
    proposals_per_teacher: int = _option(12, "Tasks proposed per teacher and step.")
    attempts_per_task: int = _option(8, "Attempts of the matched student at each task.")
    references_per_proposal: int = _option(6, "Archived tasks shown to a proposing teacher.")
    inputs_per_function: int = _option(KindSettings.inputs_per_function, "Inputs a code_f proposal must give.")
    prompt_style: str | None = _option(None, "'turns', 'chat', 'compact'; else by the model.")
    shots: int | None = _option(None, "Solved tasks shown to students; else by the model.")
    reading: str | None = _option(None, "'tolerant' or 'strict'; else by the style.")
    prompt_texts: dict[str, Any] | str | None = _option(None, "Instructions of your own.")
    archive_size: int = _option(16384, "Tasks kept per kind, newest first.")
    students_per_task: int = _option(1, "2: another student makes half of the attempts.")
    replay: float = _option(0.0, "Share of archived tasks among those students attempt.")

    # Matchmaking
    matchmaking: str = _option("pfsp", "'pfsp', 'uniform' or 'module:function'.")
    pfsp_kappa: float = _option(2.0, "Exponent of the weight (p(1-p))^kappa.")

    # Rewards and baselines
    teacher_reward: str = _option("paper", "A named pay, or 'module:function'.")
    teacher_reward_invalid: float = _option(-1.0, "Reward of an invalid proposal.")
    teacher_reward_unsolved: float = _option(0.0, "Reward of a task nobody solves.")
    student_reward: str = _option("azr", "'azr' or 'module:function'.")
    student_reward_correct: float = _option(1.0, "Reward of a right answer.")
    student_reward_wrong: float = _option(-0.5, "Reward of a well-formed wrong answer.")
    student_reward_malformed: float = _option(-1.0, "Reward of an unreadable answer.")
    teacher_baseline: str = _option(Scoring.teacher_baseline, "'member', 'group' or 'module:function'.")
    student_baseline: str = _option(Scoring.student_baseline, "'group', 'member' or 'module:function'.")
    teacher_scale: str = _option(Scoring.teacher_scale, "'step' or 'running'.")
    teacher_beta: float | None = _option(None, "KL coefficient for teachers alone.")
    teacher_learning_rate: float | None = _option(None, "The teachers' own rate; 0: frozen.")

    # Sandbox
    sandbox_workers: int | None = _option(SandboxSettings.sandbox_workers, "Programs at a time, per node.")
    sandbox_seconds: float = _option(SandboxSettings.sandbox_seconds, "CPU time that one run may use, in seconds.")
    sandbox_memory_mb: int = _option(SandboxSettings.sandbox_memory_mb, "Memory limit of one run, in MiB.")
    determinism_runs: int = _option(KindSettings.determinism_runs, "Runs of a proposal that must agree.")
    sandbox_allow_weak: bool = _option(SandboxSettings.sandbox_allow_weak, "Train without kernel confinement.")

    # Evolution
    evolve_every: int = _option(Breeding.evolve_every, "Optimizer steps between evolution events; 0 is off.")
    evolve_burn_in: int = _option(Breeding.evolve_burn_in, "Matches before a member can be replaced.")
    cull_fraction: float = _option(Breeding.cull_fraction, "Share of each role replaced per event.")
    crossover_rate: float = _option(Breeding.crossover_rate, "Probability that a child has two parents.")
    tournament_size: int = _option(Breeding.tournament_size, "Survivors drawn per parent.")
    mutations: dict[str, Any] | str | None = _option(None, "Weights of mutation operators.")
    crossovers: dict[str, Any] | str | None = _option(None, "Weights of crossover operators.")
    mutation_strength: float = _option(Breeding.mutation_strength, "Factor on the mutations' own strengths.")

    # Evaluation
    eval_attempts: int = _option(4, "Attempts of a student at each held-out task.")

    # Generation
    generation_tokens: int | None = _option(None, "Tokens in the cache at once, no vLLM.")
    vllm_engine_kwargs: dict[str, Any] | str | None = _option(None, "Arguments of `LLM`.")
    vllm_adapter_dir: str | None = _option(None, "Directory that trainer and servers see.")

    # Records
    save_rollouts: bool = _option(True, "Write rollouts/step_*.parquet.")
    own_metrics: list[str] | None = _option(None, "Further metrics, 'module:function'.")

    def __post_init__(self):
        if self.single_agent:
            for name in ("teacher_learning_rate", "teacher_beta"):
                if getattr(self, name) is not None:
                    raise ValueError(f"`{name}` needs teachers of their own, and `single_agent` has none.")
            self.teachers = self.students = 1
        self._check_rooms()
        self._check_population()
        self._check_choices()
        self._check_rewards()
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

    def build(self, room: type[Settings], **further: Any) -> Settings:
        """The settings of a room, a dataclass whose fields have the names of options; raises what it checks."""
        names = {each.name for each in fields(room)} - set(further)  # type: ignore[arg-type]
        return room(**{name: getattr(self, name) for name in names}, **further)

    def _check_rooms(self) -> list[object]:
        """Builds the settings of all rooms, which check themselves."""
        return [*map(self.build, (KindSettings, Scoring, SandboxSettings)), self.breeding]

    @property
    def breeding(self) -> Breeding:
        """When and how members are replaced."""
        return self.build(Breeding, roles=learning_roles(self.learning_rate, self.teacher_learning_rate))

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
        return StepSize(self.teachers, self.students, *sizes, self.replay, least)

    def _check_population(self):
        """Refuse counts with which no step can be played."""
        at_least = {
            0: "teachers references_per_proposal shots pfsp_kappa teacher_learning_rate teacher_beta",
            1: "students archive_size eval_attempts num_iterations generation_tokens",
            2: "proposals_per_teacher attempts_per_task",  # one alone is compared with nothing
        }
        check_least(self, {name: least for least, names in at_least.items() for name in names.split()})
        if self.evolve_every % self.num_iterations:
            raise ValueError(
                f"`evolve_every={self.evolve_every}` must be a multiple of `num_iterations={self.num_iterations}`, "
                "or a child would be trained on the rows of the member it replaced."
            )
        check_shares(self, "replay")
        if not self.teachers:
            check_no_teachers(vars(self), self.__dataclass_fields__)
        self._size.check_groups(_launched_processes())

    def _check_choices(self):
        """Refuse names that nothing in the package answers to, and loss options that couple members."""
        choices = {
            "loss_type": LOSS_NORMALISERS,
            "scale_rewards": ("group", "none", True, False),
        }
        check_choices(self, choices)
        check_names(self.task_kinds)
        for name, allowed_value, reason in COUPLE_MEMBERS:
            if getattr(self, name) != allowed_value:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` is not supported: {reason}, which couples members. Leave it at "
                    f"{allowed_value!r}."
                )
        if self.teacher_beta and self.beta:
            raise ValueError(f"`teacher_beta={self.teacher_beta}` is for teachers alone: leave `beta` at 0.")
        if self.max_steps <= 0:
            raise ValueError(
                f"`max_steps` must be positive, got {self.max_steps}: the population writes its own tasks, so there "
                "is no dataset that an epoch could count."
            )

    def _check_rewards(self):
        check_rivals(self.students_per_task, self.students, self.attempts_per_task, self.teacher_reward)
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
        """Micro-batches of one step per process, with `world` processes; refuses a size that does not fit."""
        return self._size.count_micro_batches(world)


def _launched_processes() -> int:
    """`TrainingArguments.world_size` exists only once the devices are set up; every launcher sets WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE", "1"))
