"""The vLLM engine in the trainer's process, where every row is answered by the adapter of its member. Imports vLLM.

    factors of a member --load--> a slot of the engine; StaleAdapterError if the kernels read other weights
    slots after a sleep --find_damaged--> the adapters to be written again

    prompts_R, versions_R, seeds_R --merge_asks--> requests of n samples --vLLM--> one output per prompt, R outputs
                        completions that have ended --follow--> further prompts and versions, while vLLM goes on

Shapes: R rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from .publish import Ask, Checksums, Follow, Published, StaleAdapterError, merge_asks


# Engine steps between two looks at what has ended. On an H200 a step takes some 12 ms at 7B's shape. The sandbox
# judges a proposal in some 30 ms.
STEPS_TO_FOLLOW = 4


class RoutedLLM(LLM):
    """
    A [`vllm.LLM`] that sends each prompt to the adapter that `versions` names for it.

    Args:
        routed_arguments: Engine arguments that are added to TRL's. If both have an argument, this value counts.
        **kwargs: Engine arguments that TRL passes.

    Attributes:
        versions (`Sequence[Published]`): The adapter that answers each prompt of the next `generate`, length R.
        seeds (`Sequence[int | None]`, *optional*): Sampling seed of each row, length R. Without seeds, the engine's
            own generator draws the samples.
        temperatures (`Mapping[str, float]`): Temperature by member, for members that have their own.
        follow (`Follow`, *optional*): Asks for further rows when some of the first R have ended. `generate` then
            returns their outputs, too.
    """

    seeds: Sequence[int | None] | None = None
    follow: Follow | None = None
    temperatures: Mapping[str, float] = MappingProxyType({})

    def __init__(self, *, routed_arguments: dict[str, Any], **kwargs: Any):
        super().__init__(**(kwargs | routed_arguments))
        self.versions: Sequence[Published] = ()
        self._written: dict[int, list[int] | None] = {}
        self._checksums = Checksums()

    @property
    def lora_dtype(self) -> torch.dtype:
        """Type in which the engine keeps adapters."""
        return self.llm_engine.vllm_config.lora_config.lora_dtype

    @property
    def slots(self) -> int:
        """How many adapters the kernels can read at a time."""
        return self.llm_engine.vllm_config.lora_config.max_loras

    @property
    def device(self) -> torch.device:
        """The device on which the slots lie."""
        (device,) = self.apply_model(_find_device)
        return device

    def check_idle(self) -> None:
        """
        Checks that no requests run. If a member were published during a request, two versions of it would answer.

        Raises:
            `RuntimeError`: If requests run.
        """
        if count := self.llm_engine.get_num_unfinished_requests():
            raise RuntimeError(f"Nothing can be published while {count} request(s) run: finish or abort them first.")

    def load(
        self,
        adapter: Published,
        factors: Mapping[str, torch.Tensor],
        config: LoraConfig,
        *,
        keeps_copy: bool = True,
        checks_sleep: bool = False,
    ) -> None:
        """
        Writes an adapter into a free slot, and checks that the engine uses it.

        Args:
            adapter: Name and id under which the engine knows the adapter.
            factors: Factors by PEFT state-dict key. They are scaled in place, so nobody else may use them.
            config: The adapter's configuration, with one rank and one scaling for all modules (see
                [`~trl_populora.lora.convert.fold`]).
            keeps_copy: Whether the engine keeps `factors`, so that it may take the adapter's slot for another adapter
                and write this one again later. Without a copy the adapter holds its slot until it is unloaded.
            checks_sleep: Whether checksums of the slot are taken, which [`find_damaged`] needs.

        Raises:
            `ValueError`: If the rank is above the engine's `max_lora_rank`, or if vLLM has no LoRA layer for a module.
            `StaleAdapterError`: If the engine does not use the new weights.
        """
        install = partial(_install, adapter=adapter, factors=factors, config=config)
        (lora,) = self.apply_model(install)
        (used,) = self.apply_model(partial(_is_used, lora=lora))
        if not used:
            raise StaleAdapterError(
                f"vLLM does not sample from {adapter.name!r}, the last published version of {adapter.member!r}: the "
                "tensors that its kernels read are not those of this version. Resume from the last checkpoint."
            )
        if checks_sleep:
            self._written[adapter.id] = self._compute_checksums(adapter)
        if not keeps_copy:
            self.apply_model(partial(_hold, lora=lora))

    def find_damaged(self, adapters: Iterable[Published]) -> list[Published]:
        """
        Finds adapters whose slots no longer hold what [`load`] has written. Compares the checksums of each slot with
        those that [`load`] took.

        An adapter that waits in host memory is not compared: the kernels do not read it yet. Sampling a token instead
        would show less: the log-probabilities of engine and trainer always differ a little, and an optimizer step may
        change them by less than that. Sampling would also need a cache, which the engine lacks while it wakes up.

        Args:
            adapters: Adapters that were loaded with `checks_sleep`.
        """
        return [a for a in adapters if self._compute_checksums(a) not in (None, self._written[a.id])]

    def _compute_checksums(self, adapter: Published) -> list[int] | None:
        """Computes the checksums of all tensors in an adapter's slot; `None` if it has no slot now."""
        (tensors,) = self.apply_model(partial(_list_slot, adapter_id=adapter.id))
        return None if tensors is None else self._checksums.compute(tensors)

    def unload(self, adapter: Published) -> None:
        """Removes an adapter from the device and from host memory."""
        self.llm_engine.remove_lora(adapter.id)
        self._written.pop(adapter.id, None)

    def generate(self, prompts, sampling_params: SamplingParams, **kwargs):
        """
        Answers each prompt with the adapter that `versions` names for it, and returns one output per prompt, in order.

        Rows with the same prompt, version and seed become one request for several samples, so vLLM reads the prompt
        once. At temperature 0 each row is a request of its own.
        """
        asks = merge_asks([prompt["prompt_token_ids"] for prompt in prompts], self.versions, self.seeds)
        if self.follow is not None:
            outputs = self._generate_on(self.follow, asks, sampling_params)
            return [outputs[row] for row in range(len(outputs))]
        requests = self._make_requests(asks, sampling_params)
        inputs, params, adapters = ([request[part] for request in requests] for part in (1, 2, 3))
        try:
            answers = super().generate(inputs, params, lora_request=adapters, **kwargs)
        except BaseException:  # also Ctrl-C in a notebook, whose next cell publishes
            engine = self.llm_engine
            engine.abort_request([*engine.output_processor.request_states], internal=True)
            raise
        outputs = {}
        for (ask, *_), answer in zip(requests, answers, strict=True):
            outputs |= _take_apart(ask, answer)
        return [outputs[row] for row in range(len(outputs))]

    def _generate_on(self, follow: Follow, asks: Sequence[Ask], sampling_params: SamplingParams) -> dict[int, Any]:
        """Answers asks, and those that `follow` adds when some of them have ended. Returns the output of each row."""
        engine, running, outputs = self.llm_engine, dict[str, Ask](), dict[int, Any]()
        first = count = sum(len(ask.rows) for ask in asks)

        def add(asks: Sequence[Ask]) -> None:
            for ask, request, params, adapter in self._make_requests(asks, sampling_params):
                params.output_kind = RequestOutputKind.FINAL_ONLY
                name = str(next(self.request_counter))
                running[name] = ask
                engine.add_request(name, tokens_input(**request), params, lora_request=adapter)

        ended: dict[int, list[int]] = {}  # what `follow` has not been told yet
        told: Future | None = None
        try:
            add(asks)
            with ThreadPoolExecutor(1, "follow") as thread:
                while running or told is not None:
                    # `follow` works while the engine takes some steps, and is waited for then. Their number is fixed.
                    # So where rows join does not depend on the machine's speed, and neither do the samples.
                    for _ in range(STEPS_TO_FOLLOW):
                        for answer in engine.step() if running else ():
                            found = _take_apart(running.pop(answer.request_id), answer)
                            outputs |= found
                            ended |= {row: [*each.outputs[0].token_ids] for row, each in found.items() if row < first}
                    if told is not None:
                        prompts, versions = told.result()
                        add(merge_asks(prompts, versions, first=count))
                        count, told = count + len(prompts), None
                    if ended:
                        ended, told = {}, thread.submit(follow, ended)
        finally:
            engine.abort_request(list(running))
        return outputs

    def _make_requests(self, asks: Sequence[Ask], sampling_params: SamplingParams) -> list[tuple]:
        """Makes of each ask what vLLM needs: `(ask, prompt, sampling parameters, adapter)`."""
        # vLLM refuses several samples of a greedy request.
        if sampling_params.temperature == 0:
            asks = [replace(ask, rows=(row,)) for ask in asks for row in ask.rows]
        requests = []
        for ask in asks:
            # The salt keeps a version of a member away from cached prefixes that an earlier version has computed.
            prompt = {"prompt_token_ids": list(ask.prompt), "cache_salt": ask.version.name}
            params = sampling_params.clone()
            params.n = len(ask.rows)
            params.seed = ask.seed
            params.temperature = self.temperatures.get(ask.version.member, params.temperature)
            params.detokenize = bool(params.stop)  # TRL reads token ids; text is only needed to find stop strings
            requests.append((ask, prompt, params, _make_lora_request(ask.version)))
        return requests

    def sleep(self, level: int = 1, **kwargs: Any) -> None:
        """
        Lets the engine sleep at level 1 at most.

        TRL asks for level 2, which drops all weights, because TRL sends all weights again before the next generation.
        Here the base is never sent again, and adapters are lost at level 2
        (github.com/vllm-project/vllm/issues/39934). Level 1 keeps base and adapters in host memory.
        """
        super().sleep(level=min(level, 1), **kwargs)


def _take_apart(ask: Ask, answer: RequestOutput) -> dict[int, RequestOutput]:
    """Makes an output for each row of an ask, because TRL expects one per prompt."""
    outputs = {row: copy.copy(answer) for row in ask.rows}
    for output, completion in zip(outputs.values(), answer.outputs, strict=True):
        output.outputs = [completion]
    return outputs


def _make_lora_request(adapter: Published) -> LoRARequest:
    """Makes the part of a request that names the adapter."""
    # `load_inplace` stays off: with it vLLM reads the directory again at every engine step. A path is required even
    # for an adapter in memory. At the path made here lies nothing, so vLLM fails if it has lost the adapter.
    return LoRARequest(adapter.name, adapter.id, adapter.path or f"/dev/null/{adapter.name}")


def _install(
    model: nn.Module, adapter: Published, factors: Mapping[str, torch.Tensor], config: LoraConfig
) -> LoRAModel:
    """Puts an adapter into the LoRA manager of vLLM's model, as vLLM's loader does with an adapter from a file."""
    manager = model.lora_manager
    helper = PEFTHelper(config.r, config.lora_alpha, target_modules=[], use_rslora=config.use_rslora)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # only some of vLLM's model classes rename modules
    lora = LoRAModel.from_lora_tensors(
        adapter.id,
        factors,
        helper,
        # The factors stay on their device. Factors on the GPU make no detour through host memory.
        device=next(iter(factors.values())).device,
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    # vLLM would silently leave out the weights of a module without a LoRA layer.
    if manager.add_adapter(lora) and (unknown := lora.loras.keys() - manager.modules.keys()):
        raise ValueError(
            f"vLLM has no LoRA layer for {', '.join(sorted(unknown))}: choose other `target_modules`. If the base is "
            "the text part of a larger model, save it alone with `save_pretrained`, and pass that path."
        )
    manager.activate_adapter(adapter.id)
    return lora


def _hold(model: nn.Module, lora: LoRAModel) -> None:
    """Pins an adapter, so that vLLM gives its slot to no other adapter. Then drops the copy outside of the slot."""
    model.lora_manager.pin_adapter(lora.id)
    lora.loras.clear()


def _find_device(model: nn.Module) -> torch.device:
    """Finds the device of the slots."""
    return model.lora_manager.device


def _list_slot(model: nn.Module, adapter_id: int) -> list[torch.Tensor] | None:
    """Lists the tensors of all modules that the kernels read for an adapter; `None` if it has no slot."""
    manager = model.lora_manager
    if adapter_id not in manager.lora_index_to_id:
        return None
    place = manager.lora_index_to_id.index(adapter_id)
    return [stack[place] for module in manager.modules.values() for stack in _list_stacks(module)]


def _list_stacks(module: nn.Module) -> list[torch.Tensor]:
    """Lists the tensors in which a layer keeps the weights of all slots."""
    # In vLLM's linear layers each of the two attributes is a tuple of tensors, in its output head a single tensor.
    both = [s if isinstance(s, tuple) else (s,) for s in (module.lora_a_stacked, module.lora_b_stacked)]
    return [*both[0], *both[1]]


def _is_used(model: nn.Module, lora: LoRAModel) -> bool:
    """
    Says whether the kernels read the weights of an adapter that was just loaded. Looks at one of its modules.

    vLLM's own code, which knows how a layer packs and shards weights, writes the module's weights once more to the
    place that the kernels read. If this changes no bit there, the weights were there already.
    """
    manager = model.lora_manager
    if manager.get_adapter(lora.id) is not lora or lora.id not in manager.lora_index_to_id:
        return False
    place = manager.lora_index_to_id.index(lora.id)
    name, weights = next(iter(lora.loras.items()))
    module = manager.modules[name]
    stacks = [stack[place] for stack in _list_stacks(module)]
    before = [stack.clone() for stack in stacks]
    module.set_lora(place, weights.lora_a, weights.lora_b)
    # Bytes are compared, not numbers: a member that diverged holds NaN, and NaN differs from itself.
    return all(torch.equal(*(t.view(torch.uint8) for t in pair)) for pair in zip(stacks, before, strict=True))
