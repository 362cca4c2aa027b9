"""The seams of TRL and transformers that the trainer hangs on. One of these failing names what moved."""

from __future__ import annotations

import importlib
import inspect

import pytest
import trl
from packaging.version import Version
from transformers import Trainer
from trl import GRPOTrainer


# Seam: its parameters, `self` first, as TRL 1.16 and transformers 5.17-5.23 have them.
METHODS = {
    (GRPOTrainer, "get_train_dataloader"): "self",
    (GRPOTrainer, "_prepare_inputs"): "self generation_batch",
    (GRPOTrainer, "_calculate_rewards"): "self inputs prompts completions completion_ids_list",
    (GRPOTrainer, "_generate_and_score_completions"): "self inputs",
    (GRPOTrainer, "_generate_single_turn"): "self prompt_ids images multimodal_fields num_generations has_tool_images",
    (GRPOTrainer, "_tokenize_prompts"): "self prompts",
    (GRPOTrainer, "_compute_loss"): "self model inputs",
    (GRPOTrainer, "training_step"): "self model inputs num_items_in_batch",
    (GRPOTrainer, "log"): "self logs start_time",
    (Trainer, "create_optimizer"): "self model",
    (Trainer, "get_optimizer_cls_and_kwargs"): "args model",
    (Trainer, "_clip_grad_norm"): "self model",
    (Trainer, "_get_grad_norm"): "self model grad_norm",
    (Trainer, "save_model"): "self output_dir _internal_call",
    (Trainer, "_save"): "self output_dir state_dict",
    (Trainer, "_load_from_checkpoint"): "self resume_from_checkpoint model",
    (Trainer, "_save_checkpoint"): "self model trial",
    (Trainer, "_get_output_dir"): "self trial",
    (Trainer, "_load_optimizer_and_scheduler"): "self checkpoint",
    (Trainer, "_load_rng_state"): "self checkpoint",
    (Trainer, "init_hf_repo"): "self token",
    (Trainer, "push_to_hub"): "self commit_message blocking token revision kwargs",
    (Trainer, "_push_from_checkpoint"): "self checkpoint_folder",
    (Trainer, "_finish_current_push"): "self",
    (Trainer, "set_initial_training_values"): "self args dataloader",
    (Trainer, "pop_callback"): "self callback",
}

# Seam: text that must stand in the method that the seam lives in.
PROMISES = {
    "rollout_func receives prompts and trainer": ("_generate", "self.rollout_func(prompts, self)"),
    "rollout_func returns ids and logprobs": ("_generate", '{"prompt_ids", "completion_ids", "logprobs"}'),
    "columns reach reward functions through inputs": ("_generate_and_score_completions", "inp[key] = values[i]"),
    "reward functions are called by name": (
        "_calculate_rewards",
        "completion_ids=completion_ids_list, **reward_kwargs",
    ),
    "reward functions are handed three things of TRL's": ("_calculate_rewards", 'reward_kwargs["log_metric"] ='),
    "None rewards become NaN": ("_calculate_rewards", "torch.nan for reward in output_reward_func"),
    "micro-batches are buffered": ("_prepare_inputs", "self._buffered_inputs = ["),
    "the step selects the micro-batch": ("_prepare_inputs", "self._step % self.args.steps_per_generation"),
    "loss calls the log-probs with the whole micro-batch": (
        "_compute_loss",
        "self._get_per_token_logps_and_entropies(",
    ),
    "log-probs call the model by keywords with labels for the fused head": (
        "_get_per_token_logps_and_entropies",
        "model(**model_inputs, labels=labels, fused_lm_head=True)",
    ),
    "log-probs that are not known are left out of the sampling difference": (
        "_generate_and_score_completions",
        "delta = delta[mask & ~torch.isnan(delta)]",
    ),
    "log-probs that are not known have the ratio 1": (
        "_generate_and_score_completions",
        "per_token_logps_diff = torch.nan_to_num(per_token_logps_diff, nan=0.0)",
    ),
    "loss reads advantages of the rows": ("_compute_loss", 'advantages = inputs["advantages"]'),
    "beta 0 needs no reference adapter": ("__init__", "elif is_peft_model(model) and args.beta != 0.0:"),
    "reference log-probs disable the adapters": ("_generate_and_score_completions", "use_adapter(model"),
    "advantages are logged": ("_generate_and_score_completions", 'self._logs["advantages"].extend'),
    "metrics are lists by mode and name": ("__init__", 'self._metrics = {"train": defaultdict(list)'),
    "vLLM is built by name": ("__init__", "self.vllm_generation = VLLMGeneration("),
}


def test_trl_version_is_in_the_window():
    assert Version("1.16") <= Version(trl.__version__) < Version("1.17"), "widen the pin only with this file green"


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_signature(owner, name):
    found = " ".join(inspect.signature(getattr(owner, name)).parameters)
    found = found.replace(" private", "")  # an option that 5.23 added at the end; it is not used here
    assert found == METHODS[owner, name], f"seam {owner.__name__}.{name} has parameters ({found})"


def test_log_probs_keep_their_leading_parameters():
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    wanted = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    assert parameters[:7] == wanted, f"seam GRPOTrainer._get_per_token_logps_and_entropies has {parameters}"


@pytest.mark.parametrize("seam", PROMISES)
def test_promise(seam):
    method, text = PROMISES[seam]
    assert text in inspect.getsource(getattr(GRPOTrainer, method)), f"seam moved in GRPOTrainer.{method}: {seam}"


def test_a_checkpoint_goes_where_get_output_dir_says():
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "run_dir = self._get_output_dir(trial=trial)" in source
    assert source.index("_save_rng_state(output_dir)") < source.index("rotate_checkpoints(")


def test_the_fused_head_takes_labels_that_are_shifted_already():
    source = inspect.getsource(importlib.import_module("trl.trainer.utils").add_fused_lm_head)
    assert "labels = shift_labels" in source


def test_helpers_are_where_they_were():
    assert callable(importlib.import_module("trl.trainer.utils").create_model_from_path)


def test_the_model_is_unwrapped_for_generation_with_these_options():
    unwrap = importlib.import_module("trl.models").unwrap_model_for_generation
    assert {"generation_kwargs", "gradient_checkpointing_kwargs"} <= set(inspect.signature(unwrap).parameters)
