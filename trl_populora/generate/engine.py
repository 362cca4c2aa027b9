"""The colocated engine: vLLM's `LLM`, answering each row with the row's own adapter. Imports vLLM."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from vllm import LLM, SamplingParams
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from .publish import Published, StaleAdapterError, merge_asks


class RoutedLLM(LLM):
    """
    [`vllm.LLM`] whose `generate` sends every prompt to the adapter set in `routes`.

    Args:
        routed_arguments: Engine arguments added to those that TRL passes; they win where both name one.
        **kwargs: What TRL passes.

    Attributes:
        routes (`Sequence[Published]`): Who answers each prompt of the next `generate`.
        seeds (`Sequence[int | None]`, *optional*): Of each row's samples; the engine's own generator when `None`.
    """

    seeds: Sequence[int | None] | None = None

    def __init__(self, *, routed_arguments: dict[str, Any], **kwargs: Any):
        super().__init__(**(kwargs | routed_arguments))
        self.routes: Sequence[Published] = ()
        self._loaded: dict[int, LoRAModel] = {}

    @property
    def lora_dtype(self) -> torch.dtype:
        """In which adapters are kept."""
        return self.llm_engine.vllm_config.lora_config.lora_dtype

    def load(self, adapter: Published, factors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
        """
        Loads an adapter from memory, and probes it.

        Args:
            adapter: Its name and id.
            factors: By PEFT state-dict key. The engine keeps them and scales them in place: they must be nobody
                else's.
            config: One rank and one scaling for all modules; see [`~trl_populora.lora.convert.fold`].

        Raises:
            `ValueError`: If the rank is above the engine's `max_lora_rank`, or vLLM has no LoRA layer for a module.
            `StaleAdapterError`: If the engine does not take it up.
        """
        install = partial(_install, adapter=adapter, factors=factors, config=config)
        (self._loaded[adapter.id],) = self.apply_model(install)
        self._probe(adapter, layers=1)

    def probe(self, adapters: Iterable[Published]) -> None:
        """
        Compares, bit by bit, what the engine's kernels read for each adapter with what was loaded. Samples nothing.

        A sampled token would tell less: one optimizer step moves log-probabilities by less than the difference between
        the trainer's arithmetic and the engine's, and during a wake-up there is no cache to sample with yet.

        Raises:
            `StaleAdapterError`: If they differ; names member and version.
        """
        for adapter in adapters:
            self._probe(adapter)

    def _probe(self, adapter: Published, layers: int | None = None) -> None:
        """One layer tells whether an adapter that was just loaded is in use; a sleep can damage any."""
        in_use = partial(_in_use, adapter=adapter, lora=self._loaded[adapter.id], layers=layers)
        if not all(self.apply_model(in_use)):
            raise StaleAdapterError(
                f"vLLM does not sample from {adapter.name!r}, the last published version of {adapter.member!r}: its "
                "own tensors for that adapter are others. Resume from the last checkpoint; if the engine sleeps "
                "(`vllm_enable_sleep_mode`), without that."
            )

    def unload(self, adapter: Published) -> None:
        """Forgets an adapter, on the device and in host memory."""
        self.llm_engine.remove_lora(adapter.id)
        self._loaded.pop(adapter.id, None)

    def generate(self, prompts, sampling_params: SamplingParams, **kwargs):
        """
        One output per prompt, in order. Equal prompts to one member become one request for several samples.

        Greedy requests stay apart, because vLLM refuses several samples of one greedy request.
        """
        asks = merge_asks([prompt["prompt_token_ids"] for prompt in prompts], self.routes, self.seeds)
        if sampling_params.temperature == 0:
            asks = [replace(ask, rows=(row,)) for ask in asks for row in ask.rows]
        requests, params = [], []
        for ask in asks:
            requests.append({"prompt_token_ids": list(ask.prompt), "cache_salt": ask.route.cache_salt})
            own = sampling_params.clone()
            own.n = len(ask.rows)
            own.seed = ask.seed
            own.detokenize = bool(own.stop)  # TRL reads token ids; the text is only needed to find stop strings
            params.append(own)
        adapters = [_request(ask.route) for ask in asks]
        answers = super().generate(requests, params, lora_request=adapters, **kwargs)
        outputs: list[Any] = [None] * len(prompts)
        for ask, answer in zip(asks, answers, strict=True):
            for row, completion in zip(ask.rows, answer.outputs, strict=True):
                outputs[row] = copy.copy(answer)
                outputs[row].outputs = [completion]
        return outputs

    def sleep(self, level: int = 1, **kwargs: Any) -> None:
        """
        Sleeps at level 1 at most. Level 2, which TRL asks for, drops the weights because TRL sends all of them again
        before the next generation; here the base is never sent, and adapters do not survive level 2 (vLLM issue
        39934). Level 1 keeps both in host memory.
        """
        super().sleep(level=min(level, 1), **kwargs)


def _request(adapter: Published) -> LoRARequest:
    # No `load_inplace`: left on a request it makes vLLM read the directory again at every engine step. A request needs
    # a path even where there is nothing to read; under this one vLLM finds nothing if it ever lost the adapter.
    return LoRARequest(adapter.name, adapter.id, adapter.path or f"/dev/null/{adapter.name}")


def _install(
    model: nn.Module, adapter: Published, factors: Mapping[str, torch.Tensor], config: LoraConfig
) -> LoRAModel:
    """Puts an adapter into the LoRA manager of vLLM's model, as its own loader does with what it has read."""
    manager = model.lora_manager
    helper = PEFTHelper(config.r, config.lora_alpha, target_modules=[], use_rslora=config.use_rslora)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # not every class of vLLM's renames
    lora = LoRAModel.from_lora_tensors(
        adapter.id,
        factors,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    if manager.add_adapter(lora) and (unknown := lora.loras.keys() - manager.modules.keys()):
        raise ValueError(f"vLLM has no LoRA layer for {', '.join(sorted(unknown))}: choose other `target_modules`.")
    manager.activate_adapter(adapter.id)
    return lora


def _in_use(model: nn.Module, adapter: Published, lora: LoRAModel, layers: int | None) -> bool:
    """
    Whether the kernels read this adapter under its id, seen in the first `layers` or all: writing it to its slot once
    more, by vLLM's own code, which knows how a layer packs and shards, changes nothing there.
    """
    manager = model.lora_manager
    if manager.get_adapter(adapter.id) is not lora:
        return False
    if adapter.id not in manager.lora_index_to_id:  # it waits in host memory until a row asks for it
        return True
    slot = manager.lora_index_to_id.index(adapter.id)
    for name, weights in islice(lora.loras.items(), layers):
        module = manager.modules[name]
        # One tensor for the head of a model, a tuple of them for every other layer.
        both = [s if isinstance(s, tuple) else (s,) for s in (module.lora_a_stacked, module.lora_b_stacked)]
        stacks = [stack[slot] for stack in (*both[0], *both[1])]
        before = [stack.clone() for stack in stacks]
        module.set_lora(slot, weights.lora_a, weights.lora_b)
        # As bytes: a member that diverged holds NaN, which equals nothing.
        if not all(torch.equal(*(t.view(torch.uint8) for t in pair)) for pair in zip(stacks, before, strict=True)):
            return False
    return True
