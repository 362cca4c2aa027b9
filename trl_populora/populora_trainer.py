"""`PopuLoRATrainer`: the population step on the seams of TRL's `GRPOTrainer` (phase 5 and the glue to phases 1 to 4).

Shape key: R rows of this rank, W processes, M members, G attempts per task, T completion tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from trl import GRPOTrainer

from trl_populora import preparation as loading
from trl_populora.adapters import optim, weights, zero
from trl_populora.adapters.checks import check_is_base
from trl_populora.adapters.layers import add_members
from trl_populora.adapters.routing import BASE, BASE_NAME, Router
from trl_populora.generation.checks import check_vllm
from trl_populora.generation.sampling import seeded
from trl_populora.generation.stops import use_end_tokens
from trl_populora.hub.publishing import PublishingTrainer, warm_start
from trl_populora.population.evolution import EvolutionCallback
from trl_populora.population.matchmaking import Matchmaker
from trl_populora.population.members import PRIOR_MU, PRIOR_SIGMA, Population
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.runs import records
from trl_populora.runs.alarms import Alarms
from trl_populora.runs.progress import PHASES, use_step_line
from trl_populora.runs.saved_population import describe
from trl_populora.sandbox import Runner
from trl_populora.step import batching
from trl_populora.step.advantages import flat_fraction, member_factors, step_advantages
from trl_populora.step.played import Played
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.referee import Referee
from trl_populora.step.rollout import Game, play_step
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.base import TaskKind
from trl_populora.tasks.control import control_texts


# Rank 32 is the paper's; alpha = 2r and all linear layers are PEFT's and TRL's usual advice for LoRA with RL.
DEFAULT_LORA = {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"}


class PopuLoRATrainer(PublishingTrainer):
    """
    Trains a population of LoRA teachers and students on one frozen base, from PopuLoRA (arXiv 2605.16727).

    In every step each teacher writes small tasks, the student it is matched with solves them, a sandbox decides what
    is true, and all adapters learn in one joint policy-gradient step that equals training each of them alone.

    What differs from [`~trl.GRPOTrainer`]:

    - `__init__`: builds the population, its game and its adapters; two reward functions stand before the user's.
    - `rollout_func` (set here): plays phases 1 to 4 and returns one row per slot of the generation batch.
    - `_calculate_rewards`: shows reward functions the prompts that were really asked, and keeps the rewards.
    - `_generate_and_score_completions`: adds each row's member, and replaces TRL's advantages by the population's.
    - `_prepare_inputs`: deals the rows into micro-batches of equal member segments with little padding.
    - `_get_per_token_logps_and_entropies`, `_compute_loss`, `training_step`: set and clear the route of the rows.
    - `predict`: refused; `member` gives a member's own model.
    - `evaluate`, `_evaluate`: members attempt held-out tasks; see [`~trl_populora.evaluation.held_out.HeldOut`].
    - `create_optimizer`, `_clip_grad_norm`: one parameter group and one gradient norm per member.
    - checkpoints and uploads: see [`~trl_populora.runs.checkpoint.ResumableTrainer`] and
      [`~trl_populora.hub.publishing.PublishingTrainer`].

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            Base model: `"tiny"` for the embedded one, a Hub id, a path, or a loaded model without adapters.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Further reward functions in TRL's signature, added to the two built in. They receive the columns `role`,
            `member`, `kind`, `match`, `task_id`, `valid`, `reject_reason`, `solve_rate`, `correct` and `well_formed`;
            return `None` for rows that do not concern you. `args.reward_weights`, if set, weighs these alone.
        args ([`PopuLoRAConfig`], *optional*):
            Settings of the run.
        train_dataset ([`~datasets.Dataset`], *optional*):
            Table of seed tasks (columns `kind`, `program`, `inputs`, `outputs`; see
            [`~trl_populora.tasks.archive.TaskArchive`]). The 256 tasks of the package when `None`.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Table of held-out tasks, or several by name, in the same format. Students attempt them when `eval_strategy`
            says so and in [`evaluate`]; nobody trains on them.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer with a chat template; loaded with the base when `None`.
        callbacks (`list` of [`~transformers.TrainerCallback`], *optional*):
            Added to the usual ones.
        optimizers (`tuple`, *optional*):
            Optimizer and scheduler of your own, as in `Trainer`; the optimizer must cover every member.
        peft_config ([`~peft.LoraConfig`], *optional*):
            Adapter of every member; rank 32, alpha 64, all linear layers when `None`.

    Raises:
        `TypeError`: If `args` is no [`PopuLoRAConfig`] or `peft_config` no `LoraConfig`.
        `ValueError`: If the base, the dataset, the adapters or the output directory cannot be used; the message names
            the value and the way out.
    """

    _tag_names = ["trl", "populora", "lora"]
    _name = "PopuLoRA"

    # Set by the classes above, which carry no annotations.
    args: PopuLoRAConfig
    optimizer: Any
    _buffered_inputs: Any
    log_completions: bool
    control: TrainerControl

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: PopuLoRAConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
        peft_config: LoraConfig | None = None,
        **unsupported: Any,
    ):
        args = PopuLoRAConfig("populora") if args is None else args
        loading.refuse_unsupported(args, unsupported)
        loading.check_output_dir(args.output_dir)
        source = loading.resolve_model_path(model) if isinstance(model, str) else model
        check_is_base(source, (args.model_init_kwargs or {}).get("revision"))
        lora_config = peft_config or LoraConfig(**DEFAULT_LORA)
        if args.use_vllm:
            check_vllm(source, args, lora_config)
        kinds = loading.make_kinds(args)
        archive = loading.load_archive(train_dataset, kinds, args)
        held_out = loading.load_held_out(eval_dataset, kinds, archive, args)

        set_seed(args.seed)
        base = loading.load_base(model, args)
        tokenizer = loading.load_tokenizer(base, processing_class, args)
        self.population = Population(args.teachers, args.students, args.single_agent)
        self.router = Router()
        self.base_name = model if isinstance(model, str) else base.config.name_or_path
        autocast = not loading.is_zero3(args)
        members = add_members(
            base, self.population.adapters, lora_config, self.router, args.seed, autocast_adapter_dtype=autocast
        )
        extra_classes = reward_processing_classes
        if extra_classes is not None and not isinstance(extra_classes, list):
            extra_classes = [extra_classes]

        # TRL would copy an adapter named "default" as reference, which here is the frozen base; warn that arguments of a
        # loaded model are ignored, which were heeded above; and start an engine without adapters: ours comes below.
        hidden = {"beta": 0.0, "model_init_kwargs": None, "use_vllm": False}
        given = {name: getattr(args, name) for name in hidden}
        try:
            args.__dict__.update(hidden)
            super().__init__(
                model=members,
                reward_funcs=loading.reward_functions(args, reward_funcs),
                args=args,
                train_dataset=loading.placeholder_dataset(args),
                eval_dataset=None if held_out is None else loading.placeholder_dataset(args),
                processing_class=tokenizer,
                reward_processing_classes=None if extra_classes is None else [None, None, *extra_classes],
                callbacks=callbacks,
                optimizers=optimizers,
            )
        finally:
            args.__dict__.update(given)
        self.beta = args.beta
        self.skips_blank_rows = args.beta == 0  # a KL term reaches every row; entropy terms are refused
        use_end_tokens(self)
        if self.is_deepspeed_enabled:
            zero.keep_adapters_whole(self.accelerator.state.deepspeed_plugin, self.model)

        self.rollout_func = self._play
        self.held_out = held_out
        self.game = self._make_game(kinds, archive, loading.prompt_style(args, base))
        self._closed = False
        loading.check_outputs(loading.given_tables(train_dataset, held_out), self.game)
        self.played = Played([], [])
        self._loss_rows: torch.Tensor | None = None  # of the micro-batch in the loss, those that are computed
        self._deepspeed_norms: dict[str, float] = {}
        self._clips_inside_deepspeed = False
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.evolution = EvolutionCallback(self) if args.evolve_every else None
        if self.evolution is not None:
            self.add_callback(self.evolution)
        use_step_line(self.callback_handler)
        self.callback_handler.callbacks.insert(0, records.OnlyKnown())  # before the trackers of `report_to`
        self.add_callback(records.Records(self.describe))
        self.add_callback(Alarms())
        if args.warm_start:
            warm_start(self, args.warm_start)
        if args.use_vllm:
            from trl_populora.generation import vllm  # needs packages that come with vLLM

            vllm.attach(self)
        self._fit_into_context()

    def _fit_into_context(self) -> None:
        """Given tasks that have no room in the context are left out where there are others, and refused if held out."""
        referee = self.game.referee
        config = self.model.get_base_model().config.get_text_config()
        trained_on = getattr(config, "max_position_embeddings", None)
        context = self.vllm_generation.context_length() if self.use_vllm else trained_on
        referee.room = loading.prompt_room(context, self.args, lambda prompt: self._tokenize_prompts([prompt])[0][0])
        referee.leave_out_long(self.archive)
        loading.check_archive(self.archive, referee.kinds)
        for tasks in self.held_out.tables.values() if self.held_out else ():
            for task in tasks:
                referee.solving_prompt(task)

    def _make_game(self, kinds: dict[str, TaskKind], archive: TaskArchive, style: str) -> Game:
        """What the steps are played with."""
        args = self.args
        return Game(
            population=self.population,
            matchmaker=Matchmaker(args.matchmaking, args.pfsp_kappa, args.pfsp_floor, args.seed),
            archive=archive,
            referee=Referee(
                kinds, loading.make_sandbox(args), style, control_texts(self.processing_class), self.held_out or ()
            ),
            player=Player(
                self._generate_rows,
                lambda value: gather_object([value]),
                self.accelerator.process_index,
                self.accelerator.num_processes,
            ),
            proposals=args.proposals_per_teacher,
            attempts=args.attempts_per_task,
            references=args.references_per_proposal,
            seed=args.seed,
            iterations=args.num_iterations,
        )

    @property
    def archive(self):
        """Tasks that were verified so far, newest kept."""
        return self.game.archive

    @property
    def matchmaker(self) -> Matchmaker:
        """Pairs teachers with students and keeps the ratings."""
        return self.game.matchmaker

    @property
    def sandbox(self) -> Runner:
        """Runs every program that a model wrote; one pool per node. Set `game.referee.sandbox` to use another."""
        return self.game.referee.sandbox

    def close(self) -> None:
        """Ends the sandbox's processes, unpublishes the adapters. Training ends so too; a second call does nothing."""
        self.sandbox.close()
        self._closed = True
        if self.use_vllm:
            self.vllm_generation.close()
            self._last_loaded_step = -1

    def train(self, *args, **kwargs):
        """Trains as `Trainer.train` does; the sandbox's processes are gone when it returns or raises."""
        self._open()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.close()

    def _open(self) -> None:
        if self._closed:
            self.game.referee.sandbox, self._closed = loading.make_sandbox(self.args), False

    def member(self, name: str) -> AbstractContextManager:
        """
        Context in which `trainer.model` is one member, or `"base"`: for `generate` and forwards of your own.

        Raises:
            `KeyError`: If there is no such member.
        """
        return self.router.only(BASE if name == BASE_NAME else self.population[name].index)

    def describe(self) -> dict[str, Any]:
        """The population for people and other programs: the contents of `population.json`."""
        return describe(self)

    def predict(self, *args, **kwargs):
        raise RuntimeError(
            "`predict` has no meaning here: members solve tasks. `trainer.evaluate(tasks)` scores them; for texts use "
            "`with trainer.member('student_0'): trainer.model.generate(...)`."
        )

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Lets every student attempt every held-out task `eval_attempts` times, and teachers with `eval_teachers`.

        Ratings, archive and the run's random numbers stay as they are. Collective.

        Args:
            eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*): Other tasks than the trainer's.
            ignore_keys (`list[str]`, *optional*): Without meaning here.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`): Starts every key, with the table's name if
                there are several.

        Returns:
            `dict[str, float]`: `eval_solve_rate_mean`, `_best` and `_worst` over the students,
            `eval_student_0/solve_rate` and `/thinking_rate`, `eval_code_o/solve_rate`, `eval_pass_at_4`, the base's as
            `eval_base/solve_rate`, and `eval_runtime` in seconds. Trackers and `metrics.jsonl` write `eval/`.

        Raises:
            `ValueError`: If there are no tasks, or the given ones cannot be used.
            `RuntimeError`: Before training under DeepSpeed, whose engine does not exist yet.
        """
        if self.is_deepspeed_enabled and self.model_wrapped is self.model:
            raise RuntimeError("Under DeepSpeed `evaluate` works from the start of training: set `eval_on_start`.")
        start, was_closed, was_training = time.perf_counter(), self._closed, self.model.training
        self._open()
        held_out = self.held_out
        if eval_dataset is not None:
            held_out = loading.load_held_out(eval_dataset, self.game.referee.kinds, None, self.args)
        if held_out is None:
            raise ValueError("`evaluate` needs tasks: give `eval_dataset` to it or to the trainer.")
        if held_out is not self.held_out:
            loading.check_outputs(loading.given_tables(None, held_out), self.game)
        members = [*self.population] if self.args.eval_teachers else self.population.students
        untrained = {
            m.name for m in members if weights.adds_nothing(self.model_wrapped, self.population.adapter(m.name))
        }
        self.model.eval()
        log_completions, self.log_completions = self.log_completions, False  # they are the training's
        try:
            metrics: dict[str, float] = {}
            for name in held_out.tables:
                prefix = f"{metric_key_prefix}_{name}_" if name else f"{metric_key_prefix}_"
                figures = held_out.measure(self.game, members, name, not self.args.disable_tqdm, untrained)
                metrics |= {prefix + key: value for key, value in figures.items()}
            metrics[f"{metric_key_prefix}_runtime"] = round(time.perf_counter() - start, 4)
            self.log(metrics)
        finally:
            self.log_completions = log_completions
            self.model.train(was_training)
            if was_closed:
                self.close()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        if skip_scheduler and self.state.global_step:  # `eval_on_start` of a resumed run, whose start was long ago
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    # Phases 1 to 4

    def _play(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: plays one step; the placeholder prompts only say how many rows are expected."""
        played = play_step(self.game, self.state.global_step)
        if len(played.rows) != len(prompts):
            raise RuntimeError(f"The step played {len(played.rows)} rows, TRL expects {len(prompts)}.")
        self.played = played
        for phase, spent in played.seconds.items():
            self._phase_seconds[phase] += spent
        metrics = played.metrics | self.matchmaker.metrics() | self.population.metrics() | self.archive.metrics()
        self._log_values(metrics)
        completions = [row.completion for row in played.rows]
        return played.columns | {
            "prompt_ids": [c.prompt_ids for c in completions],
            "completion_ids": [c.completion_ids for c in completions],
            "logprobs": None if completions[0].logprobs is None else [c.logprobs for c in completions],
        }

    def _generate_rows(
        self, prompts: list[Messages], members: Sequence[str], seed: int | None = None
    ) -> list[Completion]:
        """One completion per prompt, each sampled from its own member."""
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        if self.use_vllm:
            self.vllm_generation.seed = seed
        rows = [BASE if name == BASE_NAME else self.population[name].index for name in members]
        with self.router.rows_of(rows), seeded(seed):
            completion_ids, logprobs = self._generate_single_turn(prompt_ids, None, {}, 1)
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        each_logprobs = [None] * len(texts) if logprobs is None else logprobs
        return [Completion(*row) for row in zip(prompt_ids, completion_ids, texts, each_logprobs, strict=True)]

    # Phase 5: rewards, advantages, micro-batches

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # In place: TRL logs this very list, and reward functions should see what was asked, not the placeholder.
        prompts[:] = [row.prompt for row in self.played.rows]
        for column in ("role", "member", "kind"):  # of `log_completions`' tables
            self._log_completion_extra(column, self.played.columns[column])
        self.played.rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self.played.rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        played, device = self.played, output["advantages"].device
        members = torch.tensor([self.population[record["member"]].index for record in played.records], device=device)
        rewards = (played.rewards * self.reward_weights.to(device)).nansum(dim=1)
        baselines = {"teacher": self.args.teacher_baseline, "student": self.args.student_baseline}
        advantages = step_advantages(played.records, rewards, members, baselines, self.args.scale_rewards)
        tokens = self.accelerator.gather(output["completion_mask"].sum(1))
        factors = member_factors(members, tokens, self.loss_type)
        # TRL counts groups in the order of rows, proposals included; only a student's attempts are such groups.
        self._metrics["train"]["frac_reward_zero_std"][-1] = flat_fraction(played.records, rewards)

        start = self.accelerator.process_index * len(played.rows)
        mine = slice(start, start + len(played.rows))
        output |= {"advantages": advantages[mine], "member": members[mine], "member_factor": factors[mine]}
        self._logs["advantages"].extend(advantages.tolist())  # a full deque: TRL's own advantages drop out
        if self.args.save_rollouts:
            records.write_rollouts(
                self.args.output_dir,
                self.state.global_step + 1,
                self.game,
                played.rows,
                rewards[mine].tolist(),
                advantages[mine].tolist(),
            )
        return output

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = batching.reorder(
            self._buffered_inputs, self.args.teachers, self.pad_to_multiple_of or 1, self.skips_blank_rows
        )
        shares = [batching.padding_fraction(self._buffered_inputs), batching.live_fraction(self._buffered_inputs)]
        padding, live = self.accelerator.reduce(torch.tensor(shares, device=self.accelerator.device), "mean").tolist()
        self._log_values({"batch/padding": padding, "batch/live_rows": live})
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    # Phase 5: the joint update

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        computed = super()._get_per_token_logps_and_entropies
        if self._loss_rows is None:  # log-probabilities of the whole step, before its first update
            members = torch.tensor([self.population[row.member].index for row in self.played.rows])
            parts = []
            for ids, mask, rows in zip(
                *(whole.split(batch_size) for whole in (input_ids, attention_mask, members)), strict=True
            ):
                with self.router.rows_of(rows):
                    parts.append(computed(model, ids, mask, logits_to_keep, **kwargs))
            logps, entropies, aux_losses = zip(*parts, strict=True)
            return torch.cat(logps), _joined(entropies, torch.cat), _joined(aux_losses, torch.stack)
        rows, size = self._loss_rows, len(attention_mask)
        mask = attention_mask[rows]
        mask = mask if mask.any() else torch.ones_like(mask)  # attention to nothing is not a number
        logps, entropies, aux_loss = computed(model, input_ids[rows], mask, logits_to_keep, batch_size, **kwargs)
        return _spread(logps, rows, size), _spread(entropies, rows, size), aux_loss

    def _compute_loss(self, model, inputs):
        rows = batching.live_rows(torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1))
        self.router.set(inputs["member"][rows], inputs["member_factor"][rows])  # outlives the backward
        self._loss_rows = rows
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._loss_rows = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.is_deepspeed_enabled and not self._clips_inside_deepspeed:
            self._deepspeed_norms = optim.clip_inside_deepspeed(
                self.model_wrapped, self.population.adapters, self.args.max_grad_norm
            )
            self._clips_inside_deepspeed = True
        start, played = time.perf_counter(), sum(self._phase_seconds.values())
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:  # only now: gradient checkpointing runs the forward again, under the same route, during the backward
            self.router.clear()
        spent = time.perf_counter() - start
        self._phase_seconds["update"] += spent - (sum(self._phase_seconds.values()) - played)
        if self.accelerator.sync_gradients:
            self._log_values({f"time/{phase}": seconds for phase, seconds in self._phase_seconds.items()})
            self._phase_seconds = dict.fromkeys(PHASES, 0.0)
        return loss

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = optim.member_param_groups(
                self.model, self.population.adapters, self.args.learning_rate, self.args.weight_decay
            )
            self.optimizer = optimizer_class(groups, **kwargs)
        return super().create_optimizer(model)

    def _clip_grad_norm(self, model):
        idle = self.played.idle(self.population.adapters)
        if self.is_deepspeed_enabled:  # already clipped, between DeepSpeed's backward and its step
            if idle:
                optim.withhold_gradients(self.model, idle)
            norms = self._deepspeed_norms
        else:
            self.accelerator.unscale_gradients()
            norms = optim.clip_member_grad_norms(model, self.population.adapters, self.args.max_grad_norm)
            optim.withhold_gradients(self.model, idle)
        self._log_values({f"member/{name}/grad_norm": norms.get(name, 0.0) for name in self.population.adapters})
        return torch.tensor(list(norms.values())).norm()

    def _get_grad_norm(self, model, grad_norm=None):
        return float(self._clip_grad_norm(model) if grad_norm is None else grad_norm)

    # Evolution, records, checkpoints

    def replace_member(
        self,
        name: str,
        factors: Mapping[str, torch.Tensor],
        *,
        step: int,
        parents: Sequence[str] = (),
        operator: str = "written",
        mu: float = PRIOR_MU,
        sigma: float = PRIOR_SIGMA,
        optimizer_from: str | None = None,
    ) -> None:
        """
        Replaces all of a member: weights, optimizer state, rating, age and version. Call it on every rank.

        Args:
            name (`str`): The slot.
            factors (`Mapping[str, torch.Tensor]`): LoRA factors as [`~trl_populora.adapters.weights.read_member`]
                returns them, the same on every rank.
            step (`int`): Optimizer step of the replacement.
            parents (`Sequence[str]`, *optional*): Identities of the parents.
            operator (`str`, *optional*, defaults to `"written"`): What made the child.
            mu, sigma (`float`, *optional*): TrueSkill rating to start from, the prior by default.
            optimizer_from (`str`, *optional*): Member whose Adam moments the child inherits; zeros by default.

        Raises:
            KeyError: If there is no such member.
            ValueError: If keys or shapes of the factors differ from the member's.
        """
        adapter = self.population.adapter(name)
        weights.write_member(self.model_wrapped, adapter, factors)
        self._last_loaded_step = -1  # vLLM may have generated earlier in this step
        if self.optimizer is not None and optimizer_from is None:
            weights.reset_optimizer_state(self.optimizer, self.model_wrapped, adapter)
        elif self.optimizer is not None and optimizer_from is not None:
            giver = self.population.adapter(optimizer_from)
            weights.transplant_optimizer_state(self.optimizer, self.model_wrapped, giver, adapter)
        self.population.replace(name, step=step, parents=tuple(parents), operator=operator, mu=mu, sigma=sigma)

    def _log_values(self, values: Mapping[str, float]) -> None:
        """Adds to TRL's metrics of this step."""
        for name, value in values.items():
            self._metrics["train"][name].append(value)


def _spread(values: torch.Tensor | None, rows: torch.Tensor, size: int) -> torch.Tensor | None:
    """The values of some rows, `[len(rows), C]`, among `size` rows; the others get 0."""
    return None if values is None else values.new_zeros(size, values.shape[1]).index_copy(0, rows, values)


def _joined(parts: Sequence[torch.Tensor | None], join) -> torch.Tensor | None:
    return None if parts[0] is None else join(list(parts))
