"""`PopuLoRATrainer`: the population step as overrides of TRL's `GRPOTrainer`.

    _play or _answer (TRL's `rollout_func`) -> Played -> _prepare_inputs -> micro-batches -> _compute_loss ->
    optimizer

The game itself is in `step/play.py`, a step of a dataset run in `step/prompts.py`. The overrides for a step stand in
the order of its phases.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer, is_conversational
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler

from trl_populora import start
from trl_populora.config import PopuLoRAConfig
from trl_populora.evaluate.held_out import HeldOut, list_given_tables
from trl_populora.generate import transformers as decoding
from trl_populora.generate.player import (
    find_end_tokens,
    make_completions,
    pause_training,
    seed_samples,
    warn_of_unknown,
)
from trl_populora.hub import push
from trl_populora.hub.push import HubTrainer
from trl_populora.hub.warm_start import warm_start
from trl_populora.lora import members as lora_members
from trl_populora.lora.checks import is_quantised
from trl_populora.lora.convert import find_widest
from trl_populora.lora.layers import BASE, BASE_NAME, Router, add_members
from trl_populora.population.evolution import EvolutionCallback, rate_newborn
from trl_populora.population.halving import Halving
from trl_populora.population.members import PRIOR_MU, PRIOR_SIGMA, Population
from trl_populora.population.pooling import PoolingCallback
from trl_populora.population.ratings import rate_by_rewards
from trl_populora.run import checkpoint, directory, records
from trl_populora.run.callbacks import PHASES, PROMPT_PHASES, PhaseClock, StopAtSignals, tell, use_step_line
from trl_populora.run.read import LEFT, LINEAGE, read_population
from trl_populora.run.saved_population import Shape, describe
from trl_populora.step import microbatch
from trl_populora.step.advantages import LOSS_NORMALISERS, Scorer, Scoring, average_by_role
from trl_populora.step.by_row import PerRow, divide_scores
from trl_populora.step.microbatch import LossMetrics, MemberMetrics
from trl_populora.step.play import Game, play_step
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.prompts import (
    Judged,
    MemberScores,
    PromptRow,
    PromptScorer,
    measure_evaluation,
    measure_members,
    sum_rewards,
)
from trl_populora.step.referee import Referee, count_free_tokens, trained_context
from trl_populora.step.rows import LOG_METRIC, Played, Row, name_own_metrics
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.prompts import (
    MEMBER,
    HalvingSampler,
    MemberSampler,
    expand_by_member,
    has_prompts,
    identify_prompts,
)


logger = logging.getLogger(__name__)


class PopuLoRATrainer(HubTrainer):
    """
    Trains a population of LoRA teachers and students on one frozen base, from PopuLoRA (arXiv 2605.16727).

    In every step each teacher writes small tasks, the student that it is matched with attempts them, a sandbox decides
    what is right, and all adapters that played learn in one joint policy-gradient step. This step equals training each
    of them alone.

    If `train_dataset` has a column `prompt`, the run is a *dataset run* instead: there are no teachers, all members
    answer the dataset's prompts, and your reward functions are the only rewards.

    What differs from [`~trl.GRPOTrainer`]:

    - `__init__` builds the population and its adapters. For self-play it also builds the game, whose two reward
      functions stand before the user's.
    - `rollout_func` (set here) plays a step, or lets the members answer the dataset's prompts, and returns the rows.
      `_calculate_rewards` returns the rewards that `_reward` or `_judge` has got before.
    - `get_train_dataloader`, `_get_train_sampler` and `_get_eval_sampler` deal the rows of a dataset to the members.
      In a dataset run `_generate` asks the reward functions as soon as the completions are written.
    - `set_initial_training_values` lets a resumed run train nothing if its checkpoint is from the last step.
    - `_generate_and_score_completions` adds each row's member, and replaces TRL's advantages by the population's.
    - `_prepare_inputs` cuts the micro-batches that were planned together with the advantages. TRL's own method would
      shuffle and split the rows.
    - `_get_per_token_logps_and_entropies`, `_compute_loss` and `training_step` set and clear the route of the rows.
      Without a KL term they skip rows without advantage. Where the base allows, attempts at one task share a prompt.
    - `create_optimizer`, `_clip_grad_norm` and `_get_grad_norm` give each member a parameter group and a gradient
      norm.
    - `evaluate` and `_evaluate` let students attempt held-out tasks, or a dataset run's prompts, and
      `_determine_best_metric` expects no reward of an empty seat. `predict` is refused. With `member` the model
      answers as one member.
    - `add_member` and `remove_member` change the members of a dataset run while it trains.
    - `train` locks `output_dir`, which belongs to one run. After Ctrl-C or SIGTERM it finishes the step and saves.
    - `_log_metric` and `log` keep a user's own metrics under marked names until a log, when all names are known. A
      name that another metric has is refused then.
    - `_get_output_dir` and `_save_checkpoint` write a checkpoint aside, and move it into place when it is whole.
    - `save_model` and `_save` write an ordinary PEFT directory per member, and outside of checkpoints the best student
      at the root, and the run's card.
    - `_load_best_model`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler` and `_load_rng_state` restore the
      members (DeepSpeed restores them itself), the state of the game, and the loss that is not logged yet.
    - [`~trl_populora.hub.push.HubTrainer`], the base class between this one and TRL's, writes the population's card
      and uploads checkpoints during training.

    Args:
        model: The base model: `"tiny"` for the embedded one, a Hub id, a path, or a loaded model without adapters.
        reward_funcs: In a dataset run, the reward functions as TRL takes them; they get all columns of the dataset and
            `member`. In the game, further ones, added to the two built-in ones; they get the columns of
            [`~trl_populora.step.rows.Row`] up to `program`. A function returns `None` for a row that it does not
            judge. `args.reward_weights`, if set, has one weight for each function given here.
        args: Settings of the run; in a dataset run it may be TRL's `GRPOConfig`. The trainer works on a copy,
            `trainer.args`, and does not change the caller's object.
        train_dataset: Prompts in TRL's formats, which make it a dataset run. Or seed tasks, with the columns `kind`,
            `program`, `inputs` and `outputs`. When `None`, the package's: ordinary Python or, for
            `prompt_style="compact"`, the language of the embedded base.
        eval_dataset: Held-out tasks in the same format, or several tables by name, for [`evaluate`] and
            `eval_strategy`.
        processing_class: Tokenizer with a chat template; loaded with the base when `None`.
        reward_processing_classes, callbacks: As in TRL.
        quantization_config: Loads the base in 4 or 8 bits (`pip install -e ".[quantization]"`).
        peft_config: Adapter of every member; rank 32, alpha 64, all linear layers when `None`. In a dataset run a list
            has one for each member; they may differ in `r` and `lora_alpha`. If `args.students` is `None`, there are
            as many members.

    Raises:
        `TypeError`: If `args` is no [`PopuLoRAConfig`] (in a dataset run, no `GRPOConfig`), a reward function cannot
            be called with the columns there are, `peft_config` is no `LoraConfig`, or an argument is unknown.
        `ValueError`: If base, dataset, adapters or output directory cannot be used.
        `RuntimeError`: If the sandbox does not start, as on a host that cannot confine programs.
        `ImportError`: If vLLM is wanted and is not installed, or not in a version that fits.
    """

    _tag_names = ["trl", "populora", "lora"]
    _name = "PopuLoRA"

    # Attributes that the base classes set. `HubTrainer` gives `args` a wider type, and the others have no annotation.
    args: PopuLoRAConfig
    optimizer: Any
    _buffered_inputs: Any
    _signature_columns: Any
    log_completions: bool
    eos_token_ids: list[int]

    # Names of the datasets that `train_dataset` was read from. `populora train` sets them, `population.json` keeps
    # them, and model cards name them.
    dataset_names: Sequence[str] = ()

    # What one method leaves here for another method.
    evolution: EvolutionCallback | None = None
    game: Game | None = None  # of teachers and students; `None` in a dataset run
    held_out: HeldOut | None = None  # tasks of the game's `eval_dataset`
    scores: MemberScores | None = None  # of a dataset run
    halving: Halving | None = None  # with `halve_every`
    _fresh: dict[str, torch.Tensor]  # in a dataset run, the weights that members begin with
    _table = ""  # name of the table of `eval_dataset` that is evaluated, where there are several
    _asked: list[dict[str, Any]]  # the rows of the dataset that TRL's loop has given last
    _closed = False
    _reached = 0  # optimizer steps of the checkpoint that training goes on from
    _resumed: checkpoint.RankState | None = None  # from a checkpoint; kept until its loss is taken over
    _best_step: int | None = None  # step of the best checkpoint, once it is loaded at the end
    _rolled_out: int | None = None  # the optimizer step to whose rollouts rows were written last

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: LoraConfig | list[LoraConfig] | None = None,
        **unsupported: Any,
    ):
        args = start.settle(PopuLoRAConfig("populora") if args is None else args, train_dataset, peft_config)
        prompts = has_prompts(train_dataset)
        model = os.path.expanduser(model) if isinstance(model, str) else model
        lora_configs = start.list_lora_configs(peft_config, args, prompts)
        widest = find_widest(lora_configs)
        start.check_setup(args, unsupported, model, widest)
        args = start.copy_settings(args)
        parts = None  # of the game; a dataset run has none
        if prompts:
            inputs = start.make_prompt_inputs(
                args, train_dataset, eval_dataset, reward_funcs, reward_processing_classes
            )
        else:
            args.prompt_style = start.choose_style(args.prompt_style, model, args.model_init_kwargs)
            parts = start.make_parts(args, train_dataset, eval_dataset)
            evaluates = parts.held_out is not None
            inputs = start.make_game_inputs(args, reward_funcs, reward_processing_classes, evaluates)
        self._prompts = None if parts is not None else identify_prompts(train_dataset)
        self._converses = parts is not None or is_conversational(inputs["train_dataset"][0])

        if isinstance(model, str):
            start.warn_of_earlier_run(args)
        set_seed(args.seed)
        base = start.load_base(model, args, quantization_config)
        tokenizer = start.load_tokenizer(base, processing_class, args, converses=self._converses)
        self.population = Population(args.teachers, args.students, args.single_agent, args.seats)
        start.give_settings(self.population, args, lora_configs, prompts=parts is None)
        # `Trainer.__init__` makes the Hub repository, and needs `uploads` to explain the Hub's errors.
        self.router, self.uploads = Router(), push.Uploads(args)
        in_fp32 = not start.is_zero3(args)
        members = add_members(base, self.population.adapters, widest, self.router, args.seed, in_fp32)
        for member in self.population if parts is None else ():
            lora_members.set_rank(members, member.name, member.settings)
            # Reading keeps what belongs to the member's own rank, and writing sets the rest to 0.
            factors = lora_members.read_member(members, member.name)
            lora_members.write_member(members, member.name, factors)
        # Three settings are hidden from TRL's constructor. With `beta` it would copy an adapter as reference, although
        # here the frozen base is the reference. With `model_init_kwargs` it would warn that they are ignored. With
        # `use_vllm` it would start an engine without adapters.
        hidden = start.replace_attributes(args, beta=0.0, model_init_kwargs=None, use_vllm=False)
        with hidden, directory.remove_folders_left_empty(args):
            super().__init__(model=members, args=args, processing_class=tokenizer, callbacks=callbacks, **inputs)
        start.check_reward_names(self.reward_func_names)
        self._choose_generation(base)
        self._choose_update(base, plays=parts is not None)

        self.played = Played([], [])
        name = model if isinstance(model, str) else base.config.name_or_path
        self.shape = Shape.of(members, name, (args.model_init_kwargs or {}).get("revision"))
        self.staging = checkpoint.Staging(args, self.accelerator)
        self.directory = directory.RunDirectory(args, self.accelerator)
        with ExitStack() as failed:  # a start that fails below leaves no process
            self._evaluated: defaultdict[str, list[Judged]] = defaultdict(list)
            if parts is None:
                self.rollout_func, self.scores = self._answer, MemberScores()
            else:
                self.rollout_func, self.held_out = self._play, parts.held_out
                referee = start.make_referee(args, parts.kinds, base, tokenizer, parts.held_out)
                failed.callback(referee.sandbox.close)
                self.game = self._make_game(parts, referee)
                start.check_outputs(
                    list_given_tables(train_dataset, self.held_out), self.game.referee, self.game.player
                )
            self._add_callbacks()
            if parts is None:  # before a warm start: a member that joins later begins without it
                self._fresh = lora_members.read_member(self.model, self.population.adapters[0])
            if args.warm_start:
                warm_start(args.warm_start, self.model_wrapped, self.population, self.shape, args.pooled_roles)
            if args.use_vllm:
                self._start_vllm()
                failed.callback(self.vllm_generation.close)
            if self.game is not None and parts is not None:
                self.game.player.overlaps = self.use_vllm and self.vllm_generation.overlaps
                context = self.vllm_generation.find_context_length() if self.use_vllm else trained_context(base)
                self._fit_into_context(self.game, parts.references, context)
            failed.pop_all()
        directory.make_folders(args)

    def _make_game(self, parts: start.GameParts, referee: Referee) -> Game:
        self.args.shots = referee.shots  # for `population.json`
        player = Player(
            generate=self._generate_rows,
            gather=lambda value: gather_object([value]),
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )
        return start.make_game(self.args, self.population, parts.archive, referee, player, parts.rules)

    def _fit_into_context(self, game: Game, references: int | None, context: int | None) -> None:
        """
        Drops archived tasks that leave no room for an answer in the context. Refuses the run if a held-out task or a
        proposal's prompt leaves none.
        """
        longest, tokenize = self.args.max_completion_length, lambda prompt: self._tokenize_prompts([prompt])[0][0]
        free_tokens = count_free_tokens(context, longest, tokenize, self.processing_class)
        proposing = bool(self.args.teachers)
        start.fit_into_context(game.referee, game.archive, self.held_out, free_tokens, proposing)
        start.check_prompts(game.referee, game.archive, references, self.held_out, self.processing_class, longest)

    def _choose_update(self, base: PreTrainedModel, plays: bool) -> None:
        """Settles which rows an update computes, and how members are clipped."""
        args = self.args
        if is_quantised(base):
            lora_members.keep_fp32(self.model)
        self.beta = max(start.choose_betas(args, self.population))
        scoring = {
            "settings": args.build(Scoring),
            "population": self.population,
            "reward_weights": self.reward_weights,
            "ends": [*self.eos_token_ids, self.processing_class.pad_token_id],
            "rank": self.accelerator.process_index,
            "sharing": start.make_sharing(base, args),
            "skips_blank_rows": self.beta == 0,  # a KL term reaches every token that counts; entropy terms are refused
        }
        if not plays:
            optimizer_steps = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
            self.scorer: Scorer = PromptScorer(
                attempts=self.num_generations,
                optimizer_steps=optimizer_steps,
                rows_of_all=args.generation_batch_size,
                micro_batches_of_all=args.steps_per_generation // optimizer_steps,
                **scoring,
            )
        else:
            self.scorer = Scorer(**scoring)
        self._phases = PhaseClock(PHASES if plays else PROMPT_PHASES)
        main = args.process_index == 0
        self._clipper = lora_members.MemberClipper(self.population.adapters, args.max_grad_norm, warns=main)
        by_row = args.importance_sampling_level == "sequence"
        self._loss_metrics = LossMetrics(by_row)
        self._member_metrics = MemberMetrics(by_row, one_sided=args.loss_type == "cispo")
        if self.is_deepspeed_enabled:
            lora_members.keep_adapters_whole(self.accelerator.state.deepspeed_plugin, self.model)

    def _choose_generation(self, base: PreTrainedModel) -> None:
        """Settles where completions end, and whether ended rows may leave a batch."""
        known, given = self.eos_token_ids, self.args.generation_kwargs
        template_kwargs = self.chat_template_kwargs
        self.eos_token_ids = find_end_tokens(self.processing_class, known, given, template_kwargs, self._converses)
        self._sharded = start.is_zero3(self.args) or self.is_fsdp_enabled  # no rank can run a forward alone
        self.generation_config.update(eos_token_id=self.eos_token_ids, stop_strings=None)
        if not self.args.use_vllm:
            warn_of_unknown(given)
            decoding.check_parts(self.args.generation_tokens, self._sharded)
            sampling = decoding.add_defaults(self.generation_config, base.generation_config)
            spread = decoding.is_spread(base)
            self._generates_whole = decoding.why_no_rounds(base.config, sampling, self._sharded, spread)

    def _start_vllm(self) -> None:
        from trl_populora.generate.vllm import make_vllm_generation  # needs packages that come with vLLM

        self.vllm_generation = make_vllm_generation(
            self.args,
            model=self.model,
            members=self.population.adapters,
            router=self.router,
            accelerator=self.accelerator,
            tokenizer=self.processing_class,
            ends=self.eos_token_ids,
        )
        self.use_vllm, self._last_loaded_step = True, -1

    def _add_callbacks(self) -> None:
        if self.args.evolve_every:
            self.evolution = EvolutionCallback(
                self.args.breeding,
                self.population,
                read=self._read_member,
                replace=self.replace_member,
                note=self._note_lineage,
                log=self._log_values,
            )
            self.add_callback(self.evolution)
        if self.args.pool_every:
            pooling = PoolingCallback(
                self.args.pool_every,
                self.args.pooled_roles,
                self.population,
                read=self._read_member,
                write=self._write_member,
                log=self._log_values,
            )
            self.add_callback(pooling)
        if self.args.halve_every:
            scores = self.scores
            assert scores is not None, "only a dataset run halves"
            self.halving = Halving(
                self.args.halve_every,
                self.args.students,
                self.population,
                leave=self._leave,
                tell=self._tell,
                evaluated=lambda: scores.evaluated,
            )
            self.add_callback(self.halving)
        use_step_line(self.callback_handler)
        self.callback_handler.callbacks.insert(0, records.OnlyKnown())  # before the trackers of `report_to`
        functions = self.reward_func_names if self.game is None else None
        for callback in start.make_callbacks(self.describe, lambda: self.played, functions):
            self.add_callback(callback)

    @property
    def archive(self) -> TaskArchive | None:
        """The seed tasks and all accepted proposals, the newest of each kind; `None` in a dataset run."""
        return None if self.game is None else self.game.archive

    def close(self) -> None:
        """Ends the sandbox's processes, and with vLLM unpublishes the adapters, as `train` does at its end."""
        if self.game is not None:
            self.game.referee.sandbox.close()
        self._closed = True
        if self.use_vllm:
            self.vllm_generation.close()
            self._last_loaded_step = -1

    def train(self, resume_from_checkpoint=None, **kwargs):
        """
        Trains as `Trainer.train` does. The sandbox's processes are gone when it returns or raises. Collective.

        Args:
            resume_from_checkpoint: A checkpoint's path, as in `Trainer`. `True` takes the newest whole checkpoint;
                `"newest"` takes it, too, but starts afresh if there is none.

        Raises:
            `ValueError`: If another process trains in `output_dir`, if a run lies there that is not resumed, or if the
                checkpoint cannot be resumed or is from a later step than `max_steps`; under DeepSpeed, if
                `trainer.optimizer` is set.
            `RuntimeError`: If this trainer has trained before, under DeepSpeed.
        """
        try:
            self._check_deepspeed()
            self._open()
            self._best_step, self._rolled_out = None, None
            self._forget_unfinished_step()
            if self.state.global_step:  # steps are counted anew, so an old figure would pass for one of this training
                if self.held_out is not None:
                    self.held_out.forget_rates()
                if self.scores is not None:
                    self.scores.forget_evaluation()
            with self.directory, StopAtSignals(self):
                found = self.directory.claim(resume_from_checkpoint)
                self._reached = 0 if found is None else read_population(found)["step"]
                if found is not None:
                    checkpoint.check_steps_left(found, self._reached, self.args.max_steps)
                    checkpoint.check_fit(found, self.population, self.shape, self.args, self._prompts)
                return super().train(resume_from_checkpoint=found, **kwargs)
        finally:
            self.close()

    def _check_deepspeed(self) -> None:
        """Refuses a second training, and an optimizer of the caller's, under DeepSpeed."""
        if self.is_deepspeed_enabled and self.model_wrapped is not self.model:
            raise RuntimeError(
                "Under DeepSpeed a trainer trains once, because its engine ends with the training: make another "
                "trainer, and give it `resume_from_checkpoint` or `warm_start`."
            )
        if self.is_deepspeed_enabled and self.optimizer is not None:
            raise ValueError(
                f"`trainer.optimizer` is set ({type(self.optimizer).__name__}). Under DeepSpeed transformers drops it "
                "and makes one of its own. Leave it at None and choose `optim`, or train under DDP."
            )

    def set_initial_training_values(self, args, dataloader):
        epochs, *others, last_step = super().set_initial_training_values(args, dataloader)
        # transformers asks only after a step whether training is over. So a run that ended in the middle of an epoch
        # would train one step more when it is resumed.
        return (epochs if self._reached < last_step else 0, *others, last_step)

    def _forget_unfinished_step(self) -> None:
        """Drops the rows and figures of a training that ended within a step."""
        self._step, self._buffered_inputs, self._resumed = 0, None, None
        self._metrics["train"].clear()
        self._phases.take()
        self._loss_metrics.take()
        self._member_metrics.forget()

    def _open(self) -> None:
        if self._closed and self.game is not None:
            self.game.referee.sandbox = start.make_sandbox(self.args)
        self._closed = False

    def member(self, name: str) -> AbstractContextManager:
        """
        Lends one member: inside this context `trainer.model` computes all rows with the member's adapter, or with none
        for `"base"`. Use it for `generate` and forwards of your own.

        Raises:
            `KeyError`: If there is no such member.
        """
        return self.router.only(BASE if name == BASE_NAME else self.population[name].index)

    def describe(self) -> dict[str, Any]:
        """Describes the population for people and other programs: the contents of `population.json`."""
        referee = None if self.game is None else self.game.referee
        step = self._members_step
        found = describe(
            self.population, referee, self.shape, self.args, step, self.held_out, self.scores, self._prompts
        )
        if self.game is None:
            found |= {"reward_functions": self.reward_func_names, "datasets": self.dataset_names}
        # Another machine cannot find out whether a name was a path here.
        names = [self.shape.base_model, *found.get("datasets", ())]
        return found | {"local": [name for name in names if os.path.exists(os.path.expanduser(name))]}

    @property
    def _members_step(self) -> int:
        """
        Number of the optimizer steps that made the present members: `global_step`, or, after
        `load_best_model_at_end` has loaded the best members, the step of their checkpoint.
        """
        return self.state.global_step if self._best_step is None else self._best_step

    def predict(self, *args, **kwargs):
        raise RuntimeError(
            "`predict` has no meaning here. `trainer.evaluate(...)` scores the members; for texts use "
            "`with trainer.member('student_0'): trainer.model.generate(...)`."
        )

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Lets every student attempt each held-out task `eval_attempts` times. Nothing that trains changes. Collective.

        Args:
            eval_dataset: Tasks to attempt; the trainer's when `None`.
            ignore_keys: As in TRL in a dataset run; without meaning in the game.
            metric_key_prefix: Starts every key.

        Returns:
            `dict[str, float]`: In a dataset run TRL's figures, and figures of each member. In the game the figures of
            [`~trl_populora.evaluate.held_out.HeldOut.measure`].

        Raises:
            `TypeError`: If a given table is no `datasets.Dataset`.
            `ValueError`: If there are no tasks, or the given ones cannot be used.
            `RuntimeError`: Before training under DeepSpeed, whose engine does not exist yet.
        """
        was_closed = self._closed
        try:
            self._open()
            if self.game is None:
                return self._evaluate_prompts(eval_dataset, ignore_keys, metric_key_prefix)
            metrics = self._evaluate_tasks(self.game, eval_dataset, metric_key_prefix)
        finally:
            if was_closed:
                self.close()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate_tasks(self, game: Game, eval_dataset: Any, prefix: str) -> dict[str, float]:
        """Lets every student attempt the held-out tasks, and logs the metrics."""
        if self.is_deepspeed_enabled and self.model_wrapped is self.model:
            raise RuntimeError("Under DeepSpeed `evaluate` works from the start of training: set `eval_on_start`.")
        students, adapter = self.population.students, self.population.adapter
        untrained = {
            each.name
            for each in students
            if lora_members.adds_nothing(self.model_wrapped, adapter(each.name))
            and each.settings.get("temperature", self.temperature) == self.temperature  # the base's
        }
        held_out = start.choose_held_out(eval_dataset, self.held_out, game.referee, game.player, self.args)
        # TRL's completion tables are for rows that train, so `log` writes none here. Outside of `pause_training`,
        # `log` would report training's metrics of this moment as the evaluation's, and clear them.
        with pause_training(self.model), start.replace_attributes(self, log_completions=False):
            metrics = held_out.measure(
                game.referee,
                game.player,
                students,
                prefix=prefix,
                step=self._members_step,
                progress=not self.args.disable_tqdm,
                untrained=untrained,
            )
            if self.held_out is not None and not held_out.asks_the_same_as(self.held_out):
                metrics[f"{prefix}_other_tasks"] = 1.0  # reports compare the run's own
            self.log(metrics)
        return metrics

    def _evaluate_prompts(self, tables: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        """Lets every member answer the prompts of `eval_dataset`, as TRL evaluates, and adds figures by member."""
        if isinstance(tables, dict):
            found: dict[str, float] = {}
            for name, table in tables.items():
                found |= self._evaluate_prompts(table, ignore_keys, f"{prefix}_{name}")
            return found
        if tables is not None and not isinstance(tables, str):  # a text names one of the trainer's tables
            start.check_reward_arguments(self.reward_funcs, {"eval_dataset": tables})
            tables = expand_by_member(tables, self.population.adapters)
        start.check_eval_batch(self.args, self.num_generations_eval)
        # With `dataloader_persistent_workers` transformers keeps a loader, and with it the members that there were.
        self._eval_dataloaders: dict[str, Any] = {}
        self._evaluated.clear()
        self._table = prefix.removeprefix("eval").removeprefix("_")
        # Seeded apart, so that training draws the same numbers with and without evaluations. As in TRL, each process
        # has a seed of its own: several may hold attempts at one prompt.
        seeded = seed_samples([self.args.seed + self.accelerator.process_index])
        with pause_training(self.model), seeded, self._keep_completion_logs():
            return super().evaluate(tables, ignore_keys, prefix)

    def _note_evaluated(self, inputs: list[dict[str, Any]], rewards: torch.Tensor) -> None:
        """Keeps the rewards of an evaluation's rows, `[W * R, functions]`, by member."""
        total = sum_rewards(rewards, self.reward_weights)
        asked = gather_object([(row[MEMBER], zlib.crc32(repr(row["prompt"]).encode())) for row in inputs])
        # On several processes, accelerate fills the last batch up with the first rows of the table once more.
        rows = len(self.callback_handler.eval_dataloader.dataset) // len(self.population.adapters)
        for (name, prompt), of_row in zip(asked, torch.cat([total[:, None], rewards], 1).tolist(), strict=True):
            if len(self._evaluated[name]) < rows * self.num_generations_eval:
                self._evaluated[name].append(Judged(prompt, of_row))

    def _log_evaluated(self) -> None:
        """
        Adds to the metrics of the evaluation each member's mean rewards, and how far the best is ahead. With several
        evaluation datasets every key begins with the dataset's name.
        """
        seats = self.population.seats
        figures = measure_evaluation(seats, self._evaluated, self.reward_func_names)
        self._evaluated.clear()
        if not math.isnan(figures["reward_best"]):
            assert self.scores is not None, "only a dataset run has rewards to evaluate"
            means = {member.identity: figures[f"member/{seat}/reward"] for seat, member in seats.items() if member}
            self.scores.note_evaluation(self._members_step, means)
        table = f"{self._table}_" if self._table else ""
        self._metrics["eval"].update({f"{table}{name}": [value] for name, value in figures.items()})

    def _determine_best_metric(self, metrics, trial):
        # A figure without a value, as of an empty seat or of a gain that no answers show, is left out of the log.
        # `Trainer` would end the run for it.
        wanted = f"eval_{(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        named: Any = self.eval_dataset if self.game is None else self.held_out and self.held_out.tables
        tables = [f"{name}_" if name else "" for name in named] if isinstance(named, dict) else [""]
        names = ["gain_equal_effort"]
        if self.game is None:
            of_seat = ["reward", *map("rewards/{}".format, self.reward_func_names)]
            names = ["reward_lead", "reward_lead_margin", "reward_best", "reward_worst"]
            names += [f"member/{seat}/{name}" for seat in self.population.seats for name in of_seat]
        if wanted not in metrics and wanted in {f"eval_{table}{name}" for table in tables for name in names}:
            return False
        return super()._determine_best_metric(metrics, trial)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        if skip_scheduler and self.state.global_step:  # `eval_on_start` of a resumed run: its start is long over
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    # A dataset run: every member's rows of the dataset

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if MEMBER not in self._signature_columns:  # `remove_unused_columns` would remove the column
            self._signature_columns = [*self._signature_columns, MEMBER]

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        if isinstance(shard := loader.batch_sampler, BatchSamplerShard):  # on several processes
            # A resume wraps another sampler around this one, to skip batches. accelerate then finds samplers with
            # `set_epoch` one level deep at most, and the dataset's is two levels deep.
            shard.sampler = shard.batch_sampler.sampler
        return loader

    def _get_train_sampler(self, dataset=None):
        if self.game is not None:
            return super()._get_train_sampler(dataset)
        args, members = self.args, len(self.population.adapters)
        assert args.generation_batch_size is not None, "TRL sets it"
        own = args.generation_batch_size // members
        # A seat's seed decides the order of its prompts. With shared prompts all seats have the run's seed. With
        # `member_prompts="own"` a seat without a listed seed gets the run's seed plus its index, or the next free one.
        seeds = [args.seed] * members
        if args.member_prompts == "own":
            given = args.member_values.get("seed", [])
            seeds = [*given]
            for place in range(len(given), members):
                seeds.append(next(seed for seed in itertools.count(args.seed + place) if seed not in seeds))
        table = range(len(self.train_dataset) // members)
        streams = [
            RepeatSampler(
                data_source=table,
                mini_repeat_count=self.num_generations,
                batch_size=own // self.num_generations,
                repeat_count=self.num_iterations * args.steps_per_generation,
                shuffle=self.shuffle_dataset,
                seed=seed,
            )
            for seed in seeds
        ]
        rows = own // self.accelerator.num_processes
        if args.halve_every:
            return HalvingSampler(streams[0], members, rows, args.halve_every // args.optimizer_steps_per_generation)
        return MemberSampler(streams, rows)

    def _get_eval_sampler(self, eval_dataset):
        if self.game is not None:
            return super()._get_eval_sampler(eval_dataset)
        held = [member.index for member in self.population]
        rows = len(eval_dataset) // len(self.population.adapters)
        streams = [
            RepeatSampler(range(rows), mini_repeat_count=self.num_generations_eval, seed=self.args.seed) for _ in held
        ]
        return MemberSampler(streams, rows * self.num_generations_eval, held)

    def _name_members(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replaces the seat's name in each row by its member's name, and drops the rows of empty seats."""
        if self.halving is not None and self.model.training:
            # The members that remain share all rows, in the order in which `HalvingSampler` deals them.
            names = self.population.names
            return [row | {MEMBER: names[place * len(names) // len(rows)]} for place, row in enumerate(rows)]
        seats = self.population.seats
        return [row | {MEMBER: member.name} for row in rows if (member := seats[row[MEMBER]]) is not None]

    def _answer(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func` in a dataset run: the members write, each to the prompts of its rows."""
        names = [row[MEMBER] for row in self._asked]
        with self._phases.time("generate") if self.model.training else nullcontext():
            completions = self._generate_rows(prompts, names, self._seed_rows(names))
        rows = [PromptRow(*row) for row in zip(names, prompts, completions, strict=True)]
        answered = Played(rows, [])
        if self.model.training:
            self.played = answered
        return answered.tokens

    def _seed_rows(self, names: Sequence[str]) -> list[int] | None:
        """Draws a seed for each row's samples from its member's seed; `None` where members have one seed."""
        seeds = self.args.member_values.get("seed")
        if seeds is None:
            return None
        # transformers samples all rows with one generator, which the list of all seeds decides. vLLM takes a seed for
        # each row: that of the member's seat, which a child keeps. A seat without a seed uses the whole list instead.
        by_seat = dict(enumerate(seeds)) if self.use_vllm else {}
        own = {member.name: by_seat.get(member.index, seeds) for member in self.population}
        moment = self._step if self.model.training else "evaluation"
        return [zlib.crc32(f"{own[name]} {moment} {self.accelerator.process_index}".encode()) for name in names]

    def _generate(self, prompts):
        found = super()._generate(prompts)
        if self.game is None and self.model.training:
            # TRL asks for rewards later. Here they are needed now, because they decide which rows are computed.
            _, completion_ids, _, completions, *_ = found
            self._judge(prompts, completions, completion_ids)
        return found

    def _judge(self, prompts: list, completions: list, completion_ids: list[list[int]]) -> None:
        """
        Has TRL compute the rewards of a dataset run's completions, and notes each member's mean. Members that share
        their prompts are rated, too.
        """
        played = self.played
        members = gather_object([[row.member for row in played.rows]])
        played.records = [{"member": name} for part in members for name in part]
        with self._phases.time("reward"):
            played.rewards = super()._calculate_rewards(self._asked, prompts, completions, completion_ids)
        self.scorer.score(played)
        lengths = gather_object([len(row.completion.completion_ids) for row in played.rows])
        seats = self.population.seats
        figures = measure_members(
            seats, played.records, played.worth.rewards, played.rewards, self.reward_func_names, lengths
        )
        means = {member.name: figures[f"member/{seat}/reward"] for seat, member in seats.items() if member}
        assert self.scores is not None, "a dataset run has them"
        advantages = played.worth.advantages.tolist()
        learning = {row["member"] for row, each in zip(played.records, advantages, strict=True) if each}
        self.scores.note_generation(
            {self.population[name].identity: mean for name, mean in means.items()},
            {self.population[name].identity for name in learning},
        )
        if self.args.member_prompts == "shared":
            rate_by_rewards(self.population, means)
            figures |= self.population.metrics(("student",))
        if self.halving is not None:
            self.halving.note(means)
        self._log_values(figures)

    # Match, propose, verify, solve: the game

    def _play(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: plays one step. The placeholder prompts only say how many rows TRL expects."""
        assert self.game is not None, "a dataset run has `_answer` in this place"
        played = play_step(self.game, self.state.global_step, self._reward)
        if len(played.rows) != len(prompts):
            raise RuntimeError(f"The step played {len(played.rows)} rows, TRL expects {len(prompts)}.")
        self.played = played
        self._phases.add(played.seconds)
        self._log_values(played.metrics)
        self.scorer.score(played)
        self._log_values(average_by_role(played.records, played.worth.rewards))
        return played.tokens

    def _generate_rows(
        self,
        prompts: list[Messages],
        members: Sequence[str],
        seeds: Sequence[int] | None = None,
        follow: Callable | None = None,
    ) -> list[Completion]:
        """
        Samples one completion per prompt, each from the member at the same place of `members`. With `follow`, which
        needs vLLM, further prompts are taken up (see [`~trl_populora.step.player.Player`]).
        """
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        rows = self._index(members)
        if self.use_vllm:
            self.vllm_generation.seeds = seeds
            self.vllm_generation.follow = follow and partial(self._follow, follow, prompt_ids)
            self.vllm_generation.temperatures = self._temperatures
        most, longest = None if self.use_vllm else self.args.generation_tokens, self.args.max_completion_length
        with seed_samples(seeds):
            completion_ids, logprobs = decoding.complete_in_parts(self._complete, prompt_ids, rows, most, longest)
        return make_completions(self.processing_class, prompt_ids, completion_ids, logprobs)

    def _index(self, members: Sequence[str]) -> list[int]:
        return [BASE if name == BASE_NAME else self.population[name].index for name in members]

    def _follow(
        self, follow: Callable, prompt_ids: list[list[int]], ended: dict[int, list[int]]
    ) -> tuple[list[list[int]], list[int]]:
        """Tells `follow` which completions have ended, and adds the prompts that it returns to `prompt_ids`."""
        asked = [prompt_ids[row] for row in ended]
        completions = make_completions(self.processing_class, asked, list(ended.values()))
        prompts, members = follow(dict(zip(ended, completions, strict=True)))
        further = self._tokenize_prompts(prompts)[0] if prompts else []
        prompt_ids += further
        return further, self._index(members)

    def _complete(self, prompt_ids: list[list[int]], members: list[int]) -> tuple[list, list | None]:
        if self.use_vllm:
            with self.router.route_to(members):
                return self._generate_single_turn(prompt_ids, None, {}, 1)
        each = self._temperatures
        temperatures = [self.temperature if member == BASE else each[member] for member in members] if each else None
        if self._generates_whole:
            return self._complete_whole(prompt_ids, members, temperatures), None
        kwargs = {"generation_kwargs": self.generation_kwargs}
        kwargs["gradient_checkpointing_kwargs"] = self.args.gradient_checkpointing_kwargs
        unwrapped = unwrap_model_for_generation(self.model_wrapped, self.accelerator, **kwargs)
        with profiling_context(self, "transformers.generate"), unwrapped as model:
            sampling, most = self.generation_config, self.args.generation_tokens
            route = self.router.route_to
            return decoding.complete(model, prompt_ids, members, route, sampling, most, temperatures), None

    def _complete_whole(
        self, prompt_ids: list[list[int]], members: list[int], temperatures: list[float] | None
    ) -> list[list[int]]:
        """Lets TRL complete the rows, in one call for each temperature, because TRL's call takes one temperature."""
        if temperatures is None:
            with self.router.route_to(members):
                return self._generate_single_turn(prompt_ids, None, {}, 1)[0]
        completions: list[list[int]] = [[]] * len(members)
        # Processes that share the base generate together, so each makes a call for every temperature. In an evaluation
        # a process may have no row of a temperature. Then its first row is completed for nothing.
        every = {*self._temperatures, self.temperature} if self._sharded else {*temperatures}
        for temperature in sorted(every):
            own = [row for row, each in enumerate(temperatures) if each == temperature]
            asked = own or [0]
            sampling = start.replace_attributes(self.generation_config, temperature=temperature)
            with sampling, self.router.route_to([members[row] for row in asked]):
                found = self._generate_single_turn([prompt_ids[row] for row in asked], None, {}, 1)[0]
            for row, completion in zip(own, found, strict=False):
                completions[row] = completion
        return completions

    @property
    def _temperatures(self) -> list[float]:
        """The temperature of each seat, by index; empty if all have TRL's."""
        temperatures = self.population.list_values("temperature", self.temperature)
        return [] if {*temperatures} == {self.temperature} else temperatures

    def _score_by_member(self, model: Any, members: torch.Tensor) -> Any:
        """Makes the model divide each row's scores by its member's temperature, if members differ in temperature."""
        temperatures = self._temperatures
        if not temperatures:
            return model
        return divide_scores(model, [temperatures[member] for member in members.tolist()])

    # Update: rewards, advantages, micro-batches

    def _reward(self, played: Played) -> torch.Tensor:
        """
        Lets TRL call the reward functions with this rank's rows. Returns the rewards of all ranks, `[W * R,
        functions]`. Collective.
        """
        return super()._calculate_rewards(*played.for_reward_functions)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self.game is None and not self.model.training:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            self._note_evaluated(inputs, rewards)
            return rewards
        # TRL asks for rewards here. `_reward` or `_judge` has got them earlier, where they were needed.
        prompts[:] = [row.prompt for row in self.played.rows]  # in place, because TRL logs this very list
        # Columns for the tables of `log_completions`.
        for column in ("member",) if self.game is None else ("role", "member", "kind"):
            self._log_completion_extra(column, [getattr(row, column) for row in self.played.rows])
        return self.played.rewards

    def _generate_and_score_completions(self, inputs):
        if self.game is None:
            inputs = self._name_members(inputs)
            if self.model.training:
                self._clear_completion_logs()
        self._asked = inputs
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            members = [self.population[row[MEMBER]].index for row in inputs]
            return output | {"member": torch.tensor(members, device=self.accelerator.device)}
        played, mine = self.played, self.played.local_worth
        # For this metric TRL cuts all rows into groups of equal size, proposals too. Proposals form no such groups.
        figures = {"frac_reward_zero_std": played.worth.flat}
        # TRL would count a row that is not computed as one on which vLLM and the trainer agree exactly.
        figures |= microbatch.measure_sampling(output)
        for name, value in figures.items():
            self._metrics["train"][name][-1] = value
        texts = {  # because trackio shows messages as "[object Object]"
            column: [
                told if isinstance(told, str) else told[-1]["content"] if told else "" for told in self._logs[column]
            ]
            for column in ("prompt", "completion")
        }
        for column, values in ({"advantages": played.worth.advantages.tolist()} | texts).items():
            self._logs[column].clear()  # TRL has just put its own values in
            self._logs[column].extend(values)
        if self.args.save_rollouts:
            step = self.state.global_step + 1
            records.write_rollouts(
                self.args.output_dir,
                step=step,
                append=step == self._rolled_out,  # an optimizer step may take the rows of several generations
                rank=(self.accelerator.process_index, self.accelerator.num_processes),
                population=self.population,
                rows=played.rows,
                rewards=mine.rewards.tolist(),
                advantages=mine.advantages.tolist(),
                by_function=self._list_rewards() if self.game is None else None,
            )
            self._rolled_out = step
        return output | {"advantages": mine.advantages, "member": mine.members, "member_factor": mine.factors}

    @contextmanager
    def _keep_completion_logs(self) -> Iterator[None]:
        """
        Keeps the rows of an evaluation out of TRL's tables of completions. They would stand there beside the members
        and the advantages of training's rows.
        """
        kept = copy.deepcopy(self._logs)
        try:
            with start.replace_attributes(self, log_completions=False):
                yield
        finally:
            self._logs.update(kept)

    def _clear_completion_logs(self) -> None:
        """
        Empties TRL's queues of completions. With empty seats a step has too few rows to push those of the step before
        out of the queues.
        """
        for log in self._logs.values():
            for queue in log.values() if isinstance(log, dict) else [log]:
                queue.clear()

    def _list_rewards(self) -> dict[str, list[float]]:
        """Lists the rewards of this rank's rows by reward function."""
        rank, rows = self.accelerator.process_index, len(self.played.rows)
        mine = self.played.rewards[rank * rows : (rank + 1) * rows]
        return {name: mine[:, place].tolist() for place, name in enumerate(self.reward_func_names)}

    def _prepare_inputs(self, generation_batch):
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        # TRL would shuffle the rows and cut them into equal numbers. Here micro-batches follow the plan.
        steps = self.args.steps_per_generation
        if self._buffered_inputs is None or self._step % (steps * self.num_iterations) == 0:
            rows = self._generate_and_score_completions(generation_batch)
            batches = microbatch.cut(rows, self.played.plan, self.args.pad_to_multiple_of or 1)
            self._buffered_inputs, metrics = microbatch.match_ranks(batches, len(self.played.rows))
            self._log_values(metrics)
        return self._buffered_inputs[self._step % steps]

    # Update: the joint optimizer step

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        # TRL calls this for the old and reference log-probabilities of a whole step. For the loss, `_compute_loss`
        # puts a function of its own in this place.
        if not self.model.training:
            members = torch.tensor([self.population[row[MEMBER]].index for row in self._asked])
            with self.router.route_to(members):
                return super()._get_per_token_logps_and_entropies(
                    self._score_by_member(model, members),
                    input_ids,
                    attention_mask,
                    logits_to_keep,
                    batch_size,
                    **kwargs,
                )
        compute = partial(super()._get_per_token_logps_and_entropies, **kwargs)

        def forward(batch: microbatch.Batch) -> torch.Tensor:
            layout = microbatch.read_layout(batch)
            heads = batch["member"][layout.heads]
            scored = self._score_by_member(model, heads)
            with self.router.route_to(heads):
                return layout.log_probs(compute, scored, *microbatch.join(batch), self.scorer.sharing)[0]

        rows = microbatch.part(input_ids, attention_mask, logits_to_keep, self.played.local_worth.members)
        batches = microbatch.cut(rows, self.played.plan, self.args.pad_to_multiple_of or 1)
        return (
            microbatch.compute_by_micro_batch(forward, batches, len(input_ids), logits_to_keep, self._sharded),
            None,
            None,
        )

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            with self.router.route_to(inputs["member"]), self._weigh_by_member(inputs["member"]):
                return super()._compute_loss(model, inputs)
        # Skip a micro-batch in which no rank has a live row, unless it is the last one before the optimizer step (DDP
        # synchronises there) or DeepSpeed runs.
        if not (inputs["live"] or self.accelerator.sync_gradients or self.is_deepspeed_enabled):
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        layout = microbatch.read_layout(inputs)
        heads = inputs["member"][layout.heads]
        self.router.set(heads, inputs["member_factor"][layout.heads])  # the backward needs this route
        compute = super()._get_per_token_logps_and_entropies
        scored = self._score_by_member(model, heads)
        betas = start.choose_betas(self.args, self.population)

        def log_probs(model, ids, mask, length, **kwargs):
            found = layout.log_probs(partial(compute, **kwargs), scored, ids, mask, length, self.scorer.sharing)
            # TRL has the column as long as any member began with a KL term, also when none has one any more.
            if "ref_per_token_logps" in inputs:
                # Rows of members without a KL term become their own reference, so that their KL term and its gradient
                # are 0. So do all filler rows: their prompt is masked, and their KL might be infinite.
                free = torch.tensor([beta == 0 for beta in betas], device=inputs["member"].device)
                own = (inputs["pack"] < 0) | free[inputs["member"]]
                inputs["ref_per_token_logps"][own] = found[0].detach()[own]
            if self.game is None:
                bounds = self.epsilon_low, self.epsilon_high
                self._member_metrics.add(inputs, found, bounds, len(self.population.adapters))
            return found

        told: defaultdict[str, list[float]] = defaultdict(list)
        replaced = start.replace_attributes(
            self, _metrics={"train": told}, _get_per_token_logps_and_entropies=log_probs
        )
        with replaced, self._weigh_by_member(inputs["member"]):
            loss = super()._compute_loss(model, inputs)
        on_all_ranks = len(inputs["member"]) * self.accelerator.num_processes
        self._loss_metrics.add(told, on_all_ranks, int(inputs["live"]), int(inputs["tokens"]))
        # Where TRL divides by rows, it assumes `per_device_train_batch_size` rows in every micro-batch. This one may
        # have more or fewer.
        by_rows = LOSS_NORMALISERS[self.loss_type] == "rows"
        return loss * (len(inputs["member"]) / self.args.per_device_train_batch_size if by_rows else 1.0)

    def _weigh_by_member(self, members: torch.Tensor) -> AbstractContextManager:
        """Lets TRL's loss inside the block have the `beta` and `epsilon` of each row's member; `members` is `[B]`."""
        epsilons = self.population.list_values("epsilon", self.args.epsilon)
        betas = start.choose_betas(self.args, self.population)
        found: dict[str, Any] = {}
        # All members may have one value that differs from TRL's: children inherit, and a member may be replaced.
        if {*betas} != {self.beta}:
            found["beta"] = PerRow(torch.tensor(betas, device=members.device)[members])
        if {*epsilons} != {self.epsilon_low}:
            low = found["epsilon_low"] = torch.tensor(epsilons, device=members.device)[members][:, None]
            # Without `epsilon_high` TRL takes `epsilon` for both. Its `clamp` wants two tensors or two numbers.
            high = self.args.epsilon_high
            found["epsilon_high"] = low if high is None else torch.full_like(low, high)
        return start.replace_attributes(self, **found)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.is_deepspeed_enabled:
            self._clipper.clip_inside(self.model_wrapped)
        with self._phases.time_update():
            try:
                loss = super().training_step(model, inputs, num_items_in_batch)
            finally:  # not before: gradient checkpointing runs the forward again during the backward
                self.router.clear()
        if self.accelerator.sync_gradients:
            self._log_values(self._phases.take() | self._loss_metrics.take())
            if self.game is None:
                self._log_values(self._member_metrics.take(self.population.adapters))
        return loss

    def create_optimizer(self, model=None):
        rates = start.choose_learning_rates(self.args, self.population)
        if self.optimizer is None:
            optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = lora_members.member_param_groups(self.model, rates, self.args.weight_decay)
            self.optimizer = optimizer_class(groups, **kwargs)
        elif not isinstance(self.optimizer, AcceleratedOptimizer):  # it is the user's, not of an earlier training
            lora_members.check_groups(self.optimizer, self.model, rates)
        return super().create_optimizer(model)

    def _clip_grad_norm(self, model):
        if not self.is_deepspeed_enabled:
            self.accelerator.unscale_gradients()
        # A rate may be a tensor, as in torchao's optimizers.
        rates = {each["member"]: float(each["lr"]) for each in self.optimizer.param_groups if "member" in each}
        busy = {self.population.adapter(name) for name in self.played.members}
        norms = self._clipper.clip(model, busy, still=[name for name, rate in rates.items() if not rate])
        if self.accelerator.scaler is not None and not all(map(math.isfinite, norms.values())):
            lower = self._clipper.is_scale_in_doubt(norms)
            lora_members.step_in_spite_of_overflow(self.accelerator.scaler, self.optimizer.optimizer, lower)
        # A member without rows has the norm 0, and an empty seat has none. Only a dataset run logs members' rates.
        empty = {seat: math.nan for seat, member in self.population.seats.items() if member is None}
        figures = {"grad_norm": dict.fromkeys(self.population.adapters, 0.0) | norms | empty}
        if self.game is None:
            figures["learning_rate"] = rates | empty
        self._log_values(
            {f"member/{seat}/{name}": value for name, of in figures.items() for seat, value in of.items()}
        )
        return torch.tensor(list(norms.values())).norm()

    def _get_grad_norm(self, model, grad_norm=None):
        return float(self._clip_grad_norm(model) if grad_norm is None else grad_norm)

    # Evolution, pooling, records, checkpoints

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
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Replaces all of a member: weights, optimizer state, rating, age and version. Rows that still wait for an update
        (`num_iterations`) are dropped, and the next optimizer step generates new ones. Call it on every rank.

        Args:
            name: The member's name, which the new one takes over.
            factors: As [`~trl_populora.lora.members.read_member`] returns them, the same on every rank.
            step: Optimizer step at which the new one is born.
            parents: Identities of its parents, `name@version`.
            operator: What made it.
            mu, sigma: Its TrueSkill rating.
            settings: Values of the options in which members differ. When `None`, the new member takes those of the
                old one.

        Raises:
            `KeyError`: If there is no such member.
            `ValueError`: If keys or shapes of the factors differ from the member's, or if `sigma` is not positive.
        """
        if not sigma > 0:  # refused before anything is replaced
            raise ValueError(f"`sigma` must be positive, got {sigma}.")
        adapter, member = self.population.adapter(name), self.population[name]
        settings = member.settings if settings is None else settings
        try:
            self._renew(adapter, factors, settings)
        except ValueError:
            lora_members.set_rank(self.model_wrapped, adapter, member.settings)  # the old weights are still there
            raise
        self._buffered_inputs = None
        self.population.replace(
            name, step=step, parents=tuple(parents), operator=operator, mu=mu, sigma=sigma, settings=settings
        )

    def _renew(self, adapter: str, factors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        """Gives an adapter to another individual: its rank, weights and learning rate, and new optimizer state."""
        if settings:
            lora_members.set_rank(self.model_wrapped, adapter, settings)
        self._write_adapter(adapter, factors)
        if self.optimizer is not None:
            lora_members.reset_optimizer_state(self.optimizer, self.model_wrapped, adapter)
            if (rate := settings.get("learning_rate")) is not None:
                lora_members.set_learning_rate(self.optimizer, self.lr_scheduler, adapter, rate)

    def _write_adapter(self, adapter: str, factors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites the weights of an adapter, also for vLLM. Collective."""
        lora_members.write_member(self.model_wrapped, adapter, factors)
        self._last_loaded_step = -1  # makes TRL call `sync_weights` before it generates, also within this step

    def _write_member(self, name: str, factors: Mapping[str, torch.Tensor]) -> None:
        self._write_adapter(self.population.adapter(name), factors)

    def _read_member(self, name: str) -> dict[str, torch.Tensor]:
        return lora_members.read_member(self.model_wrapped, self.population.adapter(name))

    def add_member(self, name: str, *, like: str | None = None, **settings: Any) -> None:
        """
        Lets a member join a dataset run, in a seat that is empty. Call it on every rank, from a callback, between two
        generations: when a step begins, ends or is saved.

        Its optimizer state is new, and it has the schedule that the others have by now. It gets the prompts of its
        seat from the next generation on.

        Args:
            name: Its name. Where a seat has this name, the member takes that seat, else the first that is empty.
            like: The member whose weights and settings it copies. Its rating has that member's mu and a larger sigma.
                When `None`, it begins as a member does in a run without `warm_start`.
            settings: Values of its own: `learning_rate`, `epsilon`, `temperature`, and `beta` if members had one when
                the run began. A setting that is left out is copied from `like`; without `like` it is the one with
                which the first member began.

        Raises:
            `KeyError`: If there is no member `like`.
            `RuntimeError`: If no training is under way, or rows of the last generation still wait for an update.
            `TypeError`: If a setting is unknown or no number.
            `ValueError`: If the name is no file name or is taken, or no seat is empty, or a setting is out of range;
                in the game, with `halve_every`, and under DeepSpeed or FSDP; where members are pooled, without a
                learning rate, or after a `warm_start` without `like`.
        """
        self._check_membership("add_member")
        if name == BASE_NAME:
            raise ValueError(f"The name {name!r} is taken: rows of {name!r} are the base's own. Choose another.")
        parents = [] if like is None else [self.population[like]]
        settings = start.read_member_settings(self.args, settings, parents[0] if parents else None, self.beta != 0)
        # A resumed run may be without the `warm_start` with which it began.
        warm = self.args.warm_start or any(member.operator == "warm_start" for member in self.population)
        if self.args.pool_every and not (settings["learning_rate"] and (parents or not warm)):
            raise ValueError(
                f"`pool_every={self.args.pool_every}`: a member that joins must learn, and begin as others did, got "
                f"`learning_rate={settings['learning_rate']}` and `like={like!r}`. Set both."
            )
        factors = self._fresh if like is None else lora_members.read_member(self.model, self.population.adapter(like))
        rating = dict(zip(("mu", "sigma"), rate_newborn(parents), strict=True)) if parents else {}
        step, identities = self.state.global_step, tuple(parent.identity for parent in parents)
        member = self.population.join(name, step=step, parents=identities, **rating)
        adapter, member.settings = self.population.adapter(name), settings
        self._renew(adapter, factors, settings)
        event = {"step": step, "role": "student", "child": member.identity, "replaced": None, "operator": "join"}
        event |= {"parents": [parent.record for parent in parents], "mu": member.mu, "sigma": member.sigma}
        self._note_lineage(event | {"seat": adapter, "settings": settings})
        self._tell(f"{name} joins{f' as a copy of {like}' if like else ''}")

    def remove_member(self, name: str) -> None:
        """
        Lets a member leave a dataset run. Its adapter stays in `left/<name>-<version>/` of the run's directory. The
        others train on as if nothing had happened. Call it as [`add_member`].

        Raises:
            `KeyError`: If there is no such member.
            `RuntimeError`: As in [`add_member`].
            `ValueError`: As in [`add_member`], and for the last member.
        """
        self._check_membership("remove_member")
        self._leave(name)
        self._tell(f"{name} leaves; {', '.join(self.population.names)} stay")

    def _tell(self, event: str) -> None:
        """Tells the user of an event, on one rank."""
        if self.is_world_process_zero():
            tell(self.state.global_step, self.state.max_steps, event)

    def _leave(self, name: str) -> None:
        """Lets a member leave. Collective."""
        adapter, step = self.population.adapter(name), self.state.global_step
        place = f"{LEFT}/{name}-{self.population[name].version}"
        assert self.scores is not None, "only members of a dataset run leave"
        member = self.population.leave(name, step, place, self.scores.describe(self.population[name]))
        lora_members.save_member(
            self.model_wrapped, adapter, Path(self.args.output_dir, place), self.args.should_save, step
        )
        event = {"step": step, "role": "student", "child": None, "replaced": member.record, "operator": "leave"}
        self._note_lineage(event | {"parents": [], "seat": adapter})

    def _check_membership(self, method: str) -> None:
        """Refuses to add or remove a member if this run, or the present moment, does not allow it."""
        sharded = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else ""
        if self.game is not None or self.halving is not None or sharded:
            why = f"with {sharded}, which updates and shards all adapters together"
            if not sharded:
                why = "with `halve_every`, which alone decides who leaves"
            if self.game is not None:
                why = "in the game: only a dataset run may gain or lose members while it trains"
            raise ValueError(f"`{method}` does not work {why}.")
        if not self.is_in_train:
            raise RuntimeError(f"`{method}` changes a run that trains: call it from a callback (`on_step_begin`).")
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            raise RuntimeError(
                f"`{method}` after optimizer step {self.state.global_step}: rows of this generation still wait for an "
                f"update. Call it after a multiple of {self.args.optimizer_steps_per_generation} optimizer steps."
            )

    def _note_lineage(self, event: Mapping[str, Any]) -> None:
        """Adds a line to `lineage.jsonl`."""
        if self.is_world_process_zero():
            with Path(self.args.output_dir, LINEAGE).open("a") as file:
                file.write(json.dumps(event) + "\n")

    @property
    def _stateful(self) -> dict[str, Any]:
        """The objects whose `state_dict` goes into `game.json`, by their names there."""
        found: dict[str, Any] = {"population": self.population, "held_out": self.held_out, "scores": self.scores}
        found["halving"] = self.halving
        if self.game is not None:
            found |= {"matchmaker": self.game.matchmaker, "features": self.game.features}
        return {name: each for name, each in found.items() if each is not None}

    def _get_output_dir(self, trial=None):
        return self.staging.directory or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial):
        root = Path(self._get_output_dir(trial))
        with self.staging.checkpoint(root, self.state) as unfinished:
            super()._save_checkpoint(model, trial)
            checkpoint.save_game(unfinished, self._stateful, self.archive, self._rank_state(), self.args)
        if self.args.push_to_hub:
            # `super()._save_checkpoint` has called this method already. That call did nothing, because the checkpoint
            # was not yet in place.
            self._push_from_checkpoint(str(root / unfinished.name))

    def _rank_state(self) -> checkpoint.RankState:
        between = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        return checkpoint.RankState(
            step=self._step,
            buffered=self._buffered_inputs if between else None,
            played=self.played.state_dict() if between else None,
            metrics={name: list(map(float, values)) for name, values in self._metrics["train"].items()},
            loss=float(self._tr_loss),
            logged=self._globalstep_last_logged,
        )

    def save_model(self, output_dir=None, _internal_call=False):
        # Files of the run itself need the lock, which `train` gives back at its end.
        own = output_dir is None or Path(output_dir).resolve() == Path(self.args.output_dir).resolve()
        # The overridden method calls `_save` only on ranks that write (transformers 5.17), but under ZeRO and FSDP all
        # ranks read the members together.
        with self.directory if own else nullcontext():
            if own:
                self.directory.check_own()
            self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir=None, state_dict=None):
        where, write = output_dir or self.args.output_dir, self.args.should_save
        tokenizer, about = self.processing_class, self.describe()
        checkpoint.save(where, self.model_wrapped, self.population, self.archive, tokenizer, about, write)
        if write and self.staging.directory is None:
            push.place_best_student(Path(where))
            if Path(where).resolve() == Path(self.args.output_dir).resolve():
                self.create_model_card()  # it names the student whose adapter lies beside it

    def _load_best_model(self):
        best = Path(self.state.best_model_checkpoint)
        logger.info("Taking the population of %s (%s).", best, self.state.best_metric)
        self._load_from_checkpoint(best)
        checkpoint.load_stateful(best, self._stateful, self.archive)
        if self.args.should_save:
            directory.restore_lineage(Path(self.args.output_dir), best / LINEAGE)
        self._best_step = read_population(best)["step"]

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        checkpoint.load_members(resume_from_checkpoint, self.model_wrapped, self.population)
        self._last_loaded_step = -1  # makes TRL call `sync_weights` before it generates, also within this step

    def _load_optimizer_and_scheduler(self, checkpoint):
        if self.args.device.type == "cpu":  # with several processes it says "cpu:0", to which torch cannot load
            self.args.__dict__["_setup_devices"] = torch.device("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_game(checkpoint)

    def _load_game(self, saved: str) -> None:
        device = self.accelerator.device
        state = checkpoint.load_game(saved, self.game, self._stateful, self.args, device)
        if self.is_deepspeed_enabled:  # DeepSpeed has restored the weights, and knows of no ranks and alphas
            for member in self.population:
                lora_members.set_rank(self.model, self.population.adapter(member.name), member.settings)
        self.directory.go_on_from(Path(saved), self.state.global_step)
        # transformers has dropped the path of the best checkpoint where nothing lies there, as in a copied run.
        if TrainerState.load_from_json(str(Path(saved, TRAINER_STATE_NAME))).best_model_checkpoint is not None:
            name = f"{checkpoint.PREFIX}{self.state.best_global_step}"
            self.state.best_model_checkpoint = self.directory.bring_best(Path(saved), name)
            if self.state.best_model_checkpoint is None:
                logger.warning("The best checkpoint so far, %s, is gone: the best is sought from here on.", name)
                self.state.best_metric = self.state.best_global_step = None
        self._step, self._buffered_inputs = state.step, state.buffered
        row_class = PromptRow if self.game is None else Row
        self.played = Played([], []) if state.played is None else Played.from_state(state.played, row_class)
        self._metrics["train"].update(state.metrics)
        if isinstance(self.scorer, PromptScorer):
            self.scorer.judges = True  # a run whose first rewards are all missing has no checkpoint
        self._resumed = state

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        if self._resumed is not None:
            self._tr_loss += self._resumed.loss
            self._globalstep_last_logged = self._resumed.logged
            self._resumed = None

    def _log_metric(self, name, value):
        super()._log_metric(LOG_METRIC + name, value)

    def log(self, logs, start_time=None):
        training = self.model.training  # an evaluation amid training logs nothing of training
        name_own_metrics(self._metrics["train" if training else "eval"], logs)
        if not training and self._evaluated:
            self._log_evaluated()
        super().log(logs, start_time)

    def _log_values(self, values: Mapping[str, float]) -> None:
        """Adds values to TRL's metrics of this step."""
        for name, value in values.items():
            self._metrics["train"][name].append(value)
