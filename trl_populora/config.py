"""
`PopuLoRAConfig`: every setting of a run. Behind it the sizes of a step, and the model's options of a command line.

"paper" is PopuLoRA (arXiv 2605.16727), "AZR" is Absolute Zero Reasoner (arXiv 2505.03335).
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from peft import LoraConfig
from trl import GRPOConfig, ModelConfig, get_peft_config

from trl_populora.files import drop_secrets
from trl_populora.options import check_bounds, check_choices, check_numbers, find_function
from trl_populora.population.evolution import Breeding, learning_roles
from trl_populora.population.ratings import STRATEGIES
from trl_populora.sandbox.pool import SandboxSettings
from trl_populora.step.advantages import BASELINES, COUPLE_MEMBERS, LOSS_NORMALISERS, Scoring
from trl_populora.step.pay import PAY, STUDENT_PAY, check_choice
from trl_populora.tasks import check_names
from trl_populora.tasks.kind import KindSettings
from trl_populora.tasks.python.prompts import check_texts


Settings = TypeVar("Settings")

# What the numbers may be that no room below checks. TRL and transformers would train, or load a model first, with any.
BOUNDS = {
    ">= 0": "teachers references_per_proposal shots replay pfsp_kappa teacher_beta beta top_k min_p "
    "teacher_learning_rate learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon epsilon epsilon_high "
    "vllm_importance_sampling_clip_min logging_steps eval_steps eval_delay save_steps",
    "> 0": "temperature top_p repetition_penalty delta vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_cap vllm_gpu_memory_utilization",
    ">= 1": "students archive_size eval_attempts generation_tokens num_iterations max_completion_length "
    "per_device_train_batch_size per_device_eval_batch_size vllm_max_model_length vllm_tensor_parallel_size",
    ">= 2": "proposals_per_teacher attempts_per_task",  # one alone is compared with nothing
    "< 1": "replay adam_beta1 adam_beta2",
    "<= 1": "top_p min_p vllm_gpu_memory_utilization",
}


def _option(default: Any, text: str) -> Any:
    """An inherited field with another default, and the reason as its line of `--help`."""
    return field(default=default, metadata={"help": text})


def _describe(config: type[Settings]) -> type[Settings]:
    """Makes each option's entry in the docstring its line of `--help` and of `docs/reference/settings.md`."""
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

    Everything of [`~trl.GRPOConfig`] is inherited. The batch follows from the population: one population step has
    `teachers * proposals_per_teacher * (1 + attempts_per_task)` rows, so `generation_batch_size`,
    `steps_per_generation`, `gradient_accumulation_steps` and `num_generations` are derived here and need not be set.
    Only `per_device_train_batch_size` is yours: times the number of processes it must divide those rows.

    Args:
        teachers, students: Number of adapters of each role (paper: 4). With `teachers=0` all students attempt the same
            `proposals_per_teacher` given tasks in a step, and no others (`docs/guides/curriculum.md`).
        single_agent: One adapter plays the only teacher and the only student (AZR): `teachers` and `students` become
            1. It sees as many rows a step as one pair of a population does, so compute per adapter is matched.
        warm_start: Directory or Hub name of a saved population on the same base, with the same adapter shape and any
            number of members. Or of ordinary LoRA adapters of a rank not above the members': one for all, a list of
            one for each (teachers first), or one for a role, `{"student": "runs/sft"}`.

        task_kinds: Kinds of task the teachers propose, in rotation (AZR's three). A kind of your own is named as
            `"package.module:Class"`.
        proposals_per_teacher: Tasks proposed per teacher and step, spread over the kinds: 4 teachers make 48 per step.
            AZR proposes 64 per kind with one agent.
        attempts_per_task: Attempts of the matched student at each task, the group of the GRPO baseline (AZR: 8).
        references_per_proposal: Archived tasks shown to a teacher when it proposes code_i or code_o (AZR: 6). code_f
            shows one program, in `turns` solved examples, too.
        inputs_per_function: Inputs a code_f proposal must give; half are shown to the student (AZR: 10).
        prompt_style: `"turns"`: short instructions, references as turns before. `"chat"`: all in one turn, for large
            models. `"compact"`: what the embedded base knows. When `None`, that for the embedded base, else `"turns"`.
        shots: Solved tasks shown to students, as turns before. When `None`, 3 for bases below a billion parameters.
        reading: How answers may be fenced: `"tolerant"`, but for `"compact"`, or `"strict"`.
        prompt_texts: Instructions of your own for the built-in kinds, by `"code_o/propose"`, `"code_o/solve"` and so
            on.
        archive_size: Tasks kept per kind, newest first (AZR's buffer size; AZR keeps the oldest).
        replay: Share of archived tasks among those a student attempts, beside the proposals; neither paid for nor
            rated.

        matchmaking: `"pfsp"` prefers near-balanced pairs by TrueSkill win probability p; `"uniform"` pairs at random;
            or a function of your own, the weight of a student and a teacher, `"module:function"`.
        pfsp_kappa: Exponent of the weight (p(1-p))^kappa (paper, second hand: 1; 2 by `benchmarks/ratings.py`).

        teacher_reward: Pay for a solved task (`docs/guides/reward.md`): `"paper"` (1 - solve rate), `"learnability"`,
            `"rarity"`, or a function of your own, `"module:function"`.
        teacher_reward_invalid: Of a proposal that is no task (paper).
        teacher_reward_unsolved: Of a task that no attempt solves (paper).
        student_reward: `"azr"`, or a function of your own for all attempts.
        student_reward_correct: Of a right answer (AZR; paper, second hand).
        student_reward_wrong: Of a well-formed wrong answer (AZR).
        student_reward_malformed: Of an answer that cannot be read (AZR).
        teacher_baseline: `"member"`: mean over the teacher's proposals of the same kind, each of which has its own
            references (AZR's task-relative REINFORCE++). `"group"`: the whole match. Or a function of your own,
            `"module:function"`: the advantages from the role's rewards, members, kinds and groups, row by row.
        student_baseline: `"group"`: mean over the attempts at one task (GRPO). `"member"`: the student's attempts of
            the same kind. Or a function of your own, likewise.
        teacher_beta: `beta` for teachers alone, whose pull to the base keeps them readable.
        teacher_learning_rate: The teachers' own, which TRL then logs as `learning_rate`; as the students' when `None`.
            Where it is given, a role whose rate is `0` is frozen: neither updates nor evolution change its members.

        sandbox_workers: Programs that a node runs at a time, shared out among its processes; its usable cores when
            `None`.
        sandbox_seconds: CPU time that one program run may use, in seconds. A proposal may use half of it, because the
            same program may need more in the attempts, which run beside other work. Programs are small; AZR waits 10
            by the clock.
        sandbox_memory_mb: Memory limit of one program run, in MiB.
        determinism_runs: Runs of a proposal under different hash seeds that must agree (AZR: 2).
        sandbox_allow_weak: Train although this host offers no kernel confinement. Only for hosts that hold nothing of
            value.

        evolve_every: Optimizer steps between two evolution events (paper, second hand: 10). `0` switches evolution
            off.
        evolve_burn_in: Matches a member must have played to be replaced.
        cull_fraction: Share of each role replaced per event, at least one member (paper, second hand).
        crossover_rate: Probability of two parents (paper, second hand).
        tournament_size: Survivors drawn per parent; the highest mu wins.
        mutations, crossovers: Weights of the operators by name, your own as `"module:function"`. The paper's four,
            evenly, when `None`.
        mutation_strength: Factor on the mutation operators' own strengths: 1 is each as published, 0.5 half as far
            from the parent.

        eval_attempts: Attempts of every student at every task of `eval_dataset`, sampled as in training.
            `eval_strategy` and `eval_on_start` say when; `per_device_eval_batch_size` rows are generated at once.

        generation_tokens: Tokens, prompts included, that the cache of a process holds at once where transformers
            generates.
        vllm_engine_kwargs: Further arguments of vLLM's `LLM` in colocate mode, for example `{"enforce_eager": true}`.
            TRL's own `vllm_*` settings hold too; the engine computes in the trainer's precision unless `dtype` is
            given.
        vllm_adapter_dir: Directory that the trainer and every vLLM server see, for published adapters. Shared memory,
            or `output_dir` when a server sits on another host or memory is short, when `None`. Not for colocated
            engines.

        save_rollouts: Write every row to `rollouts/step_*.parquet`.
        own_metrics: Functions of your own, `"module:function"`, from a step's rows, a `dict` each, to further metrics
            by name.

    Raises:
        `ValueError`: A value is out of range, names nothing known, or the population does not fit the batch.
    """

    if TYPE_CHECKING:  # fields of GRPOConfig that are set here, too
        generation_batch_size: int | None
        num_generations: int | None
        num_generations_eval: int | None
        gradient_accumulation_steps: int
        ddp_find_unused_parameters: bool | None
        max_grad_norm: float

    _argument_group_name = "Training, as in TRL and transformers, and at the end what a population has beside"
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs", "prompt_texts"]  # may be given as JSON

    # Defaults that differ from GRPOConfig.
    max_steps: int = _option(200, "Optimizer steps = population steps. The paper runs 200.")
    learning_rate: float = _option(1e-5, "AZR's 1e-6 for full weights, times 10 for LoRA.")
    lr_scheduler_type: str = _option("constant", "AZR: constant; children need it flat.")
    logging_steps: float = _option(1, "Log every population step.")
    max_completion_length: int | None = _option(2048, "Tokens per proposal or attempt.")
    router_aux_loss_coef: float | None = _option(0.0, "0: it couples members. Fixed here.")

    # Population
    teachers: int = 4
    students: int = 4
    single_agent: bool = False
    warm_start: dict[str, Any] | str | None = None

    # Tasks
    task_kinds: list[str] = field(default_factory=lambda: ["code_i", "code_o", "code_f"])
    proposals_per_teacher: int = 12
    attempts_per_task: int = 8
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

    # Rewards and baselines
    teacher_reward: str = "paper"
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
    evolve_every: int = Breeding.evolve_every
    evolve_burn_in: int = Breeding.evolve_burn_in
    cull_fraction: float = Breeding.cull_fraction
    crossover_rate: float = Breeding.crossover_rate
    tournament_size: int = Breeding.tournament_size
    mutations: dict[str, Any] | str | None = None
    crossovers: dict[str, Any] | str | None = None
    mutation_strength: float = Breeding.mutation_strength

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
        self._check_numbers()
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

    def to_dict(self):
        # Trackers get this. transformers hides tokens among the settings themselves, and none inside of one.
        return {name: drop_secrets(value) for name, value in super().to_dict().items()}

    def build(self, room: type[Settings], **further: Any) -> Settings:
        """The settings of a room, a dataclass whose fields have the names of options; raises what it checks."""
        names = {each.name for each in fields(room)} - set(further)  # type: ignore[arg-type]
        return room(**{name: getattr(self, name) for name in names}, **further)

    def _check_numbers(self):
        """Refuse what is no number where one belongs, and numbers that make no sense."""
        if self.max_grad_norm is None:
            self.max_grad_norm = 0.0  # off as well, and transformers compares it with 0
        check_numbers(self)
        check_bounds(self, BOUNDS)

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
        """Refuse counts with which no step can be played."""
        if self.evolve_every % self.num_iterations:
            raise ValueError(
                f"`evolve_every={self.evolve_every}` must be a multiple of `num_iterations={self.num_iterations}`, "
                "or a child would be trained on the rows of the member it replaced."
            )
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


# How many rows a step has, and whether they part evenly into groups, ranks and micro-batches.


def check_no_teachers(given: Mapping[str, Any], known: Mapping[str, Field]) -> None:
    """
    Args:
        given: Settings by name.
        known: Their fields, which have the defaults.

    Raises:
        `ValueError`: If a run without teachers is asked for what only they could do.
    """
    for name in (
        *("replay", "teacher_reward", "teacher_reward_invalid", "teacher_reward_unsolved"),
        *("teacher_beta", "teacher_learning_rate"),
    ):
        default = known[name].default
        if (value := given[name]) != default:
            raise ValueError(
                f"`{name}={value}` needs teachers, and with `teachers=0` students train on given tasks alone. Set it "
                f"to {default} (`none` for None on a command line)."
            )


@dataclass(frozen=True)
class StepSize:
    """
    The size of one population step over all processes.

    Args:
        teachers: Number of teachers, each with one match.
        students: Number of students, each with one match where there are no teachers.
        proposals: Proposals per teacher.
        attempts: Attempts per task.
        per_device: Rows of a micro-batch, for a process.
        replay: Share of archived tasks among those that students attempt, in [0, 1), beside the ones that fill in for
            invalid proposals.
        least: Fewest proposals that a way out may suggest.
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
        """Archived tasks that a match's student attempts beside the proposals; at least one if there is a share."""
        return max(round(self.proposals * self.replay / (1 - self.replay)), math.ceil(self.replay))

    @property
    def rows(self) -> int:
        """The proposals, and every attempt at them and at archived tasks."""
        if not self.teachers:
            return self.students * self.proposals * self.attempts
        return self.teachers * (self.proposals + (self.proposals + self.replays) * self.attempts)

    def check_groups(self, world: int) -> None:
        """
        Raises:
            `ValueError`: If TRL's generation batch would not hold whole groups; names sizes for `world` processes.
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
        Micro-batches of one step per process, with `world` processes.

        Raises:
            `ValueError`: If the population does not fit; the message names a size that does.
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
        """The sizes nearest to the wanted ones that satisfy everything that is asked of them."""
        multiple = math.lcm(world, self.attempts // math.gcd(self.teachers, self.attempts))
        size, changed = self, []
        if self.proposals % multiple:
            # Two of each kind, where a proposal is compared with its teacher's others of the same kind.
            proposals = -(-max(self.proposals, self.least) // multiple) * multiple
            size = replace(size, proposals=proposals)
            changed.append(f"`proposals_per_teacher={proposals}`")
        if size.replays % world:
            replays = -(-size.replays // world) * world
            size = replace(size, replay=round(replays / (size.proposals + replays), 6))
            changed.append(f"`replay={size.replay}`")
        local = size.rows // world
        per_device = next(rows for rows in range(min(size.per_device, local), 0, -1) if local % rows == 0)
        if per_device != self.per_device:
            changed.append(f"`per_device_train_batch_size={per_device}`")
        return f"{' with '.join(changed)} works."


# What a command line says about base and members: TRL's `ModelConfig`, honoured or refused.


@dataclass
class MemberConfig(ModelConfig):
    """
    TRL's [`~trl.ModelConfig`], whose `lora_*` options describe the adapter of every member.

    Two defaults differ: members are always LoRA adapters, and they have no dropout. What members cannot be is refused
    when the trainer is built; `docs/options.md` lists all options.
    """

    _argument_group_name = "Base and adapters"
    use_peft: bool = field(default=True, metadata={"help": "Always true: members are LoRA adapters."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Always 0: dropout is not supported."})


def member_lora(model: ModelConfig) -> LoraConfig:
    """
    The adapter of every member, as TRL builds it; all linear layers where no target is named.

    Raises:
        `ValueError`: If an option asks for training without adapters. What else members cannot be is refused by
            [`~trl_populora.lora.checks.check_lora_config`].
    """
    lora = get_peft_config(model)
    if lora is None:
        raise ValueError("`use_peft=False` is not supported: every member is a LoRA adapter. Leave it at True.")
    if lora.target_modules is None and lora.target_parameters is None:
        lora.target_modules = "all-linear"
    return lora


def base_options(model: ModelConfig, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `from_pretrained` is told about the base; options `given` as `model_init_kwargs` go first."""
    told = {
        "dtype": model.dtype,
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
    }
    return told | dict(given or {})
