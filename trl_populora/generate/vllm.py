"""`PopulationGeneration`: TRL's vLLM generation with one adapter per row, colocated or on servers.

The base is frozen, so it is loaded once and never sent again. What changes are the adapters: `sync_weights` publishes
those that moved: it loads each new version into vLLM under a name and id of its own, and probes it (checks that vLLM
uses the new weights). A colocated engine gets tensors; servers get directories, because vLLM loads adapters over HTTP
by path only. These lie in shared memory where all servers are on this host.

TRL calls `sync_weights` before the first `generate` of an optimizer step (`_last_loaded_step` in the trainer).
"""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.other import get_free_port
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_populora.lora import members as lora_members
from trl_populora.lora.convert import fold
from trl_populora.lora.layers import BASE, BASE_NAME, Router

from . import publish
from .checks import find_permitted_rank
from .player import make_vllm_kwargs
from .publish import Published
from .server import LoRAServers, VLLMServerError


# If a member's B changed by more than this root mean square, its log-probabilities change in any precision: a server
# that answers with the former ones, bit by bit, still has the former version. Adam changes B by about the learning
# rate a step, so newborns exceed this, and single steps at low rates do not.
SEEN_IN_ANY_PRECISION = 1e-4


class PopulationGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] for a population of LoRA adapters on one frozen base.

    What differs:

    - `_init_vllm`: the engine serves LoRA ([`~trl_populora.generate.engine.RoutedLLM`]), or the client speaks to
      servers that do ([`~trl_populora.generate.server.LoRAServers`]); no weight-transfer group is opened.
    - `sync_weights`: publishes the members that changed, as tensors or as PEFT directories, and probes them; nothing
      is merged.
    - `generate`: every prompt goes to the member that the router names for its row.

    Args:
        model: The population's model.
        members: Member names in route order.
        router: Holds the member of each row while `generate` runs.
        output_dir: The run's directory.
        adapter_dir: Where adapters published to servers lie. Shared memory when `None` and it has room.
        engine_kwargs: Further arguments of vLLM's `LLM`, colocate mode only.
        request_timeout: Seconds, server mode only.
        **kwargs: Arguments of `VLLMGeneration`. `server_base_url` may list several URLs, separated by commas.

    Attributes:
        seeds (`Sequence[int]`, *optional*):
            Sampling seeds, one per row, for the next `generate`.
    """

    seeds: Sequence[int] | None = None
    _llm_weights_sleeping: bool

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        members: Sequence[str],
        router: Router,
        output_dir: str,
        adapter_dir: str | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        request_timeout: float = 1200.0,
        **kwargs: Any,
    ):
        self.members, self.router = list(members), router
        self.output_dir, self.adapter_dir = output_dir, adapter_dir
        self.engine_kwargs, self.request_timeout = engine_kwargs or {}, request_timeout
        self.published: dict[str, Published] = {}
        self._detector = publish.ChangeDetector()
        self._shelf: publish.AdapterShelf | None = None
        self._probed: dict[str, torch.Tensor] = {}
        self._count = 0
        super().__init__(model, **kwargs)
        self._run = gather_object([uuid.uuid4().hex[:8]])[0]

    @property
    def backend(self) -> Any:
        """What adapters are loaded into: the engine, the client of the main process, or `None`."""
        return self.llm if self.mode == "colocate" else getattr(self, "vllm_client", None)

    def _init_vllm(self) -> None:
        names = {"VLLMClient": self._connect}
        if self.mode == "colocate":
            from .engine import RoutedLLM

            names = {"LLM": partial(RoutedLLM, routed_arguments=self._choose_engine_arguments())}
            # TRL's choice is the same for all runs of a machine that start at once.
            os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT") or str(get_free_port())
        with _replace_in_trl(names):
            super()._init_vllm()

    def _choose_engine_arguments(self) -> dict[str, Any]:
        """Engine arguments that TRL does not pass: for adapters, and the precision that the trainer computes in."""
        count, config = len(self.members), self.model.peft_config[self.members[0]]
        computed_in = {"bf16": "bfloat16", "fp16": "float16"}
        base_dtype = str(self.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
        return (
            {
                "enable_lora": True,
                "max_loras": count,
                "max_cpu_loras": 2 * count + 1,  # two versions of each while they are published, and the base's
                "max_lora_rank": find_permitted_rank(config),
                # vLLM's own choice turns an fp32 base into bf16, and its log-probabilities drift from the trainer's.
                "dtype": computed_in.get(self.accelerator.mixed_precision, base_dtype),
                "quantization": None,  # for a base in 4 bits TRL asks for bitsandbytes, which vLLM 0.31 has not
            }
            | (self._forbid_chunked_prefill() if self.accelerator.device.type == "cpu" else {})
            | self.engine_kwargs
        )

    def _forbid_chunked_prefill(self) -> dict[str, Any]:
        """No chunked prefill: after part of a prompt vLLM rewinds a row's generator, which on a CPU torch cannot."""
        trained_on = self.model.get_base_model().config.get_text_config().max_position_embeddings
        longest = self.max_model_length or trained_on
        return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, longest)}  # 4096 is TRL's

    def find_context_length(self) -> int:
        """Tokens that a prompt and its completion may have together. Collective."""
        if self.mode == "colocate":
            return int(self.llm.model_config.max_model_len)
        lengths = [
            int(server.get_server_info()["model_config"]["max_model_len"])
            for server in (self.vllm_client.servers if self.backend is not None else ())
        ]
        return min(length for part in gather_object([lengths]) for length in part)

    def _connect(self, base_url: str, group_port: int, connection_timeout: float) -> LoRAServers:
        """Called by TRL in the place of `VLLMClient`."""
        servers = LoRAServers(
            [url.strip().rstrip("/") for url in base_url.split(",")],
            connection_timeout=connection_timeout,
            request_timeout=self.request_timeout,
            advice=partial(_advise, self.output_dir),
        )
        config = self.model.peft_config[self.members[0]]
        for server in servers.servers:
            server.check_serves(len(self.members), find_permitted_rank(config))
        return servers

    def sync_weights(self) -> None:
        """
        Publishes every member whose weights changed since it was last published. Collective.

        The new version is loaded and probed before the old one is unloaded. A replaced directory stays until the next
        publishing. After sleep mode every adapter of the engine is probed.

        Raises:
            `StaleAdapterError`: If vLLM does not sample from what was published.
        """
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
            self.llm.probe(self.published.values())
        flags = gather_object([self._detector.detect_changes(self.model, self.members)])
        changed = [name for name, *moved in zip(self.members, *flags, strict=True) if any(moved)]
        if changed:
            self._publish(changed)

    def _publish(self, members: Sequence[str]) -> None:
        """Loads new versions into engine or servers. Every rank takes part, because reading a member is collective."""
        retired = [self.published[member].path for member in members if member in self.published]
        for member in members:
            self._count += 1
            adapter = Published(member, f"{member}-{self._run}-{self._count}", self._count)
            factors = self._read_factors(member)
            config = self.model.peft_config[self.members[0]]
            if self.mode == "colocate":
                self.llm.load(adapter, *fold(factors, config))
            elif self.backend is not None:
                adapter = self._serve(adapter, *fold(factors, config))
            if self.backend is not None and member in self.published:
                self.backend.unload(self.published[member])
            self.published[member] = adapter
        if self._shelf is not None:
            self._shelf.sweep_retired()
            for path in retired:
                self._shelf.retire(path)

    def _read_factors(self, member: str) -> dict[str, torch.Tensor]:
        """A member's factors; for the base zeros in the shapes of the first member's, which add nothing."""
        if member == BASE_NAME:
            return {key: value.zero_() for key, value in self._read_factors(self.members[0]).items()}
        dtype = self.llm.lora_dtype if self.mode == "colocate" else torch.float32
        return lora_members.read_member(self.model, member, dtype)

    def _serve(self, adapter: Published, factors: Mapping[str, torch.Tensor], config: LoraConfig) -> Published:
        """Writes an adapter for the servers, lets them load it, and probes it."""
        save = partial(lora_members.save_factors, factors, config)
        adapter = replace(adapter, path=self._open_shelf().put(adapter.name, save))
        self.backend.load(adapter)
        self.backend.probe(adapter, self._has_moved(adapter.member, factors))
        return adapter

    def _has_moved(self, member: str, factors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a member's first B differs from its former version's by more than `SEEN_IN_ANY_PRECISION`."""
        b = next(value for key, value in factors.items() if "lora_B" in key)
        former, self._probed[member] = self._probed.get(member), b
        return former is not None and float((b - former).square().mean().sqrt()) > SEEN_IN_ANY_PRECISION

    def _open_shelf(self) -> publish.AdapterShelf:
        if self._shelf is None:
            size = sum(
                4 * parameter.numel()
                for name in self.members
                for parameter in lora_members.member_parameters(self.model, name).values()
            )
            parent = self.adapter_dir or publish.choose_parent(self.output_dir, size, self.vllm_client.remote)
            self._shelf = publish.AdapterShelf(parent)
        return self._shelf

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """
        One completion per prompt, by the member that the router names for its row; as in TRL otherwise. Collective.

        Raises:
            `RuntimeError`: If no rows are routed, or not as many as there are prompts.
            `ValueError`: If `num_generations` is not 1: attempts at one task are rows of their own, and equal ones are
                merged into one request here. If ranks that ask together ask for different numbers of rows.
        """
        rows = self.router.rows
        if rows is None or len(rows) != len(prompts):
            raise RuntimeError(
                f"{len(prompts)} prompts are to be answered, but the router names "
                f"{'no rows' if rows is None else f'{len(rows)} rows'}. Generate inside `with router.rows_of(rows):`."
            )
        if num_generations != 1:
            raise ValueError(f"`num_generations` must be 1, got {num_generations}: repeat the prompts and the rows.")
        all_rows, seeds = self._gather_rows(list(rows))
        # vLLM's CPU kernels read the index of the base, -1, as the last adapter: so it is published, as zeros.
        if BASE in all_rows and BASE_NAME not in self.published:
            self._publish([BASE_NAME])
        if self.backend is not None:
            names = [BASE_NAME if row == BASE else self.members[row] for row in all_rows]
            self.backend.routes = [self.published[name] for name in names]
            self.backend.seeds = seeds
        return super().generate(prompts, images, num_generations, profiler)

    def _gather_rows(self, rows: list[int]) -> tuple[list[int], list[int | None]]:
        """
        Rows and seeds of all ranks whose prompts TRL gathers into one call, in the order in which it gathers them. It
        slices the completions as if all ranks had as many rows, so they must.
        """
        mine: tuple[list[int], Sequence[int | None]] = rows, self.seeds or [None] * len(rows)
        gathered: list[Any] = [mine]
        if self.mode == "server":
            gathered = gather_object([mine])
        elif self.tensor_parallel_size > 1:
            gathered = [None] * self.tensor_parallel_size
            torch.distributed.all_gather_object(gathered, mine, group=self.tp_group)
        counts = [len(part) for part, _ in gathered]
        if len(set(counts)) > 1:
            raise ValueError(
                f"Ranks that ask vLLM together must ask for as many rows each, got {', '.join(map(str, counts))} rows "
                "(in rank order). Fill up the shorter ones by repeating rows, and drop the extra completions."
            )
        all_rows, seeds = zip(*gathered, strict=True)
        return [row for part in all_rows for row in part], [seed for part in seeds for seed in part]

    def close(self) -> None:
        """
        Unloads what is published and removes its directories; the next `sync_weights` publishes all members again.

        Does not wait for a server that failed: what it holds goes when it is restarted.
        """
        try:
            if self.backend is not None:
                for adapter in self.published.values():
                    self.backend.unload(adapter)
        except VLLMServerError as error:
            vllm_generation.logger.warning("Adapters were left on the server: %s", error)
        self.published = {}
        self._detector.forget()
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def end(self) -> None:
        """Shuts a colocated engine down for good. Call it before the process group ends: vLLM looks for it at exit."""
        if self.mode == "colocate":
            self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def _replace_in_trl(names: dict[str, Callable]) -> Iterator[None]:
    """Lets TRL's `_init_vllm` find other callables under the names it calls, in this block only."""
    originals = {name: getattr(vllm_generation, name) for name in names}
    vars(vllm_generation).update(names)
    try:
        yield
    finally:
        vars(vllm_generation).update(originals)


def _advise(output_dir: str) -> str:
    """How to go on after a server failed."""
    checkpoint = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    if checkpoint is None:
        return f"Restart it (`recipes/serve.sh`) and start again: {output_dir} holds no checkpoint (`save_steps`)."
    return f"Restart it (`recipes/serve.sh`) and resume from the last checkpoint, {checkpoint}."


def make_vllm_generation(
    args: GRPOConfig,
    model: torch.nn.Module,
    members: Sequence[str],
    router: Router,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    adapter_dir: str | None = None,
    engine_kwargs: Any = None,
) -> PopulationGeneration:
    """
    The vLLM generation of a trainer. TRL's constructor must have run with `use_vllm` off: it would start an engine
    without adapters.

    Args:
        args: All `vllm_*` settings, and those of sampling.
        model: The population's model.
        members: Adapter names in route order.
        router: Holds the member of each row.
        accelerator: The trainer's.
        tokenizer: The trainer's.
        ends: Token ids that end a completion.
        adapter_dir, engine_kwargs: As in [`PopulationGeneration`].
    """
    # What TRL's class takes from an option is named as the option, or as the option without `vllm_`.
    options, taken = {each.name for each in fields(args)}, inspect.signature(VLLMGeneration.__init__).parameters
    named = {name: f"vllm_{name}" if f"vllm_{name}" in options else name for name in taken}
    settings = {name: getattr(args, option) for name, option in named.items() if option in options}
    settings |= {
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        "logprobs": 0,  # the sampled token's, for the importance sampling correction
        "generation_kwargs": make_vllm_kwargs(args.generation_kwargs, ends),
    }
    return PopulationGeneration(
        model,
        members=members,
        router=router,
        output_dir=args.output_dir,
        adapter_dir=adapter_dir,
        engine_kwargs=_add_engine_defaults(args, engine_kwargs or {}),
        accelerator=accelerator,
        processing_class=tokenizer,
        **settings,
    )


def _add_engine_defaults(args: GRPOConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The user's engine arguments, over a seed that follows the run's and the revision that the trainer loads."""
    group = args.process_index // args.vllm_tensor_parallel_size
    revision = (args.model_init_kwargs or {}).get("revision")
    return {"seed": args.seed + group, "revision": revision, **given}
