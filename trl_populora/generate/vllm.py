"""TRL's vLLM generation with one adapter per row, in this process (*colocated*) or on servers.

    sync_weights: changed members --> factors --fold--> [A [r, in], B [out, r]] --load, probe--> vLLM
    generate:     prompts_R, router.members [R] --versions_R, seeds_R--> vLLM --> completions_R, logprobs_R

The base is frozen, so vLLM loads it once and it is never sent again. Only adapters change. `sync_weights` *publishes*
every member that has changed: it loads the new version under a new name and id, and *probes* it, which means that it
checks whether vLLM uses the new weights. Members are published one after the other. A colocated engine gets a member's
tensors themselves, and vLLM writes them into the slot that the old version leaves. Servers get directories, because
vLLM's HTTP interface loads an adapter by its path. The directories lie where `adapter_dir` says. Without it they lie
in shared memory, if that has space and all servers run on this host, or else in `output_dir`.

TRL calls `sync_weights` before the first `generate` of an optimizer step (`_last_loaded_step` in the trainer).

Shapes: R rows, r LoRA rank.
"""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from itertools import islice
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
from trl_populora.lora.convert import find_widest, fold
from trl_populora.lora.layers import BASE, BASE_NAME, Router

from . import publish
from .checks import find_commit, find_permitted_rank, resolve_base
from .player import make_vllm_kwargs
from .publish import Published
from .server import LoRAServers, VLLMServerError


GRAPH_SIZES = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}  # engine arguments that say for which sizes


class PopulationGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] for a population of LoRA adapters on one frozen base.

    It overrides three methods:

    - `_init_vllm`: Starts an engine that serves LoRA ([`~trl_populora.generate.engine.RoutedLLM`]), or connects to
      servers that do ([`~trl_populora.generate.server.LoRAServers`]). It opens no connection for base weights.
    - `sync_weights`: Publishes the members that have changed, as tensors or as PEFT directories, and probes them. TRL
      would merge adapters into the base and send the base.
    - `generate`: Sends every prompt to the member that the router names for its row.

    Args:
        model: The population's model.
        members: Names of the members. The position of a name is the member's index in routes.
        router: Names the member of each row while `generate` runs.
        output_dir: The run's directory.
        adapter_dir: Directory of adapters that are published to servers. With `None`
            [`~trl_populora.generate.publish.choose_parent`] chooses it.
        engine_kwargs: Further arguments of vLLM's `LLM`. Only a colocated engine reads them.
        request_timeout: Seconds to wait for a server's answer. Only servers need it.
        **kwargs: Arguments of `VLLMGeneration`. `server_base_url` may list several URLs, separated by commas.

    Attributes:
        seeds (`Sequence[int]`, *optional*): Sampling seeds of the next `generate`, one per row, length R.
        temperatures (`Sequence[float]`): Temperature of each member, in the order of `members`. If it is empty, all
            members have TRL's temperature.
        follow (`Callable`, *optional*): Where [`overlaps`] is true, asks for further rows while `generate` runs:
            `follow({row: completion_ids}) -> (prompts, rows)`. It extends the prompts that `generate` was given, too.
    """

    seeds: Sequence[int] | None = None
    temperatures: Sequence[float] = ()
    follow: Callable[[dict[int, list[int]]], tuple[list[list[int]], list[int]]] | None = None
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
        self._modules_checked = False
        self._count = 0
        super().__init__(model, **kwargs)
        # A random id of the run: all ranks take the one that the main process has drawn. It is part of adapter names,
        # because one server may serve several runs.
        self._run = gather_object([uuid.uuid4().hex[:8]])[0]

    @property
    def backend(self) -> Any:
        """The engine, or the client of the servers. Only the main process has a client; others get `None`."""
        return self.llm if self.mode == "colocate" else getattr(self, "vllm_client", None)

    @property
    def overlaps(self) -> bool:
        """Whether `generate` can take up further rows while it runs, and without the other ranks."""
        alone = self.accelerator.num_processes == 1
        if self.mode == "server":
            return alone
        # An engine that sleeps between two calls is woken by all ranks together.
        return self.tensor_parallel_size == 1 and (alone or not self.enable_sleep_mode)

    def _init_vllm(self) -> None:
        names = {"VLLMClient": self._connect}
        if self.mode == "colocate":
            from .engine import RoutedLLM

            names = {"LLM": partial(RoutedLLM, routed_arguments=self._choose_engine_arguments())}
            # TRL would choose the same `MASTER_PORT` for all runs that start on a machine at once.
            os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT") or str(get_free_port())
        with _replace_in_trl(names):
            super()._init_vllm()

    def _choose_engine_arguments(self) -> dict[str, Any]:
        """Chooses engine arguments that TRL lacks or gets wrong. The user's own override them."""
        count, config = len(self.members), self._widest
        computed_in = {"bf16": "bfloat16", "fp16": "float16"}
        base_dtype = str(self.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
        return (
            {
                "enable_lora": True,
                # With a slot for each member and one for the base, vLLM never takes a member's slot for another
                # adapter, and needs no copies of members (see `_keeps_copies`).
                "max_loras": publish.count_slots(count),
                # vLLM refuses room for fewer adapters in host memory than on the device.
                "max_cpu_loras": max(publish.count_adapters(count)[1], self.engine_kwargs.get("max_loras") or 0),
                "max_lora_rank": find_permitted_rank(config),
                # By itself vLLM casts an fp32 base to bf16. Then vLLM's log-probabilities would differ from the
                # trainer's.
                "dtype": computed_in.get(self.accelerator.mixed_precision, base_dtype),
                # For a 4-bit base TRL asks vLLM to quantise with bitsandbytes. vLLM 0.31 cannot.
                "quantization": None,
            }
            | (self._forbid_chunked_prefill() if self.accelerator.device.type == "cpu" else {})
            | ({} if "lora_target_modules" in self.engine_kwargs else {"lora_target_modules": self._list_targets()})
            | self.engine_kwargs
            | self._choose_graphs()
        )

    def _list_targets(self) -> list[str]:
        """
        Lists the names of vLLM's modules that members adapt.

        By itself vLLM also keeps slots for embeddings and output head, which members seldom adapt. With a large
        vocabulary these slots are as large as half of a member, and each token would pass through them.
        """
        _, served = resolve_base(
            self.model.name_or_path,
            self.engine_kwargs,
            model_impl=self.model_impl,
            trust_remote_code=self.trust_remote_code,
        )
        modules = {
            _name_module(key) for name in self.members for key in lora_members.member_parameters(self.model, name)
        }
        # Some of vLLM's model classes rename modules.
        if (mapper := getattr(served, "hf_to_vllm_mapper", None)) is not None:
            rename = mapper.get_rename_mapper()
            modules = {rename.map_name(module) or module for module in modules}
        return sorted({module.rpartition(".")[2] for module in modules})

    def _choose_graphs(self) -> dict[str, Any]:
        """
        Chooses for how many rows vLLM records CUDA graphs. What the user says of it counts.

        By itself vLLM records graphs for twice as many rows as a step has, for many sizes below, and all of them
        once more without adapters. But here every row has an adapter.
        """
        given = self.engine_kwargs.get("compilation_config")
        if not isinstance(given, dict | None):  # vLLM also takes a number or an object
            return {}
        chosen: dict[str, Any] = {"cudagraph_specialize_lora": False}
        rows = self.engine_kwargs.get("max_num_seqs") or self.max_num_seqs
        if rows and GRAPH_SIZES.isdisjoint([*(given or ()), *self.engine_kwargs]):
            chosen["cudagraph_capture_sizes"] = list_graph_sizes(rows)
        return {"compilation_config": chosen | (given or {})}

    @property
    def _keeps_copies(self) -> bool:
        """Whether a colocated engine needs copies of the members in host memory, because it has too few slots."""
        return self.llm.slots <= len(self.members)

    @property
    def _widest(self) -> LoraConfig:
        """The configuration of the member with the largest rank."""
        return find_widest([self.model.peft_config[name] for name in self.members])

    def _forbid_chunked_prefill(self) -> dict[str, Any]:
        """Chooses engine arguments with which vLLM reads every prompt in one piece."""
        # After a piece of a prompt vLLM moves the row's random generator back. On a CPU torch cannot do that.
        trained_on = self.model.get_base_model().config.get_text_config().max_position_embeddings
        longest = self.max_model_length or trained_on
        return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, longest)}  # 4096 as in TRL

    def find_context_length(self) -> int:
        """Asks vLLM how many tokens a prompt and its completion may have together. Collective."""
        if self.mode == "colocate":
            return int(self.llm.model_config.max_model_len)
        lengths = [
            int(server.get_server_info()["model_config"]["max_model_len"])
            for server in (self.vllm_client.servers if self.backend is not None else ())
        ]
        # Only the main process has servers to ask. The shortest context of all servers counts.
        return min(length for part in gather_object([lengths]) for length in part)

    def _connect(self, base_url: str, group_port: int, connection_timeout: float) -> LoRAServers:
        """Connects to the servers and checks them. TRL calls this method where it would make a `VLLMClient`."""
        servers = LoRAServers(
            [url.strip().rstrip("/") for url in base_url.split(",")],
            connection_timeout=connection_timeout,
            request_timeout=self.request_timeout,
            advice=partial(_advise, self.output_dir),
        )
        config = self._widest
        keys = lora_members.member_parameters(self.model, self.members[0])
        modules = {_name_module(key) for key in keys}
        for server in servers.servers:
            server.check_serves(len(self.members), find_permitted_rank(config), modules)
        return servers

    def sync_weights(self) -> None:
        """
        Publishes every member that has changed since it was published last. Collective.

        A colocated engine gives the old version's slot to the new version, which is then probed. If the engine has
        slept, members whose slots its sleep has damaged are published again, too. Servers load and probe the new
        version before they unload the old one, whose directory stays until members are published again.

        Raises:
            `StaleAdapterError`: If vLLM does not use the published weights.
            `VLLMServerError`: If a server fails.
        """
        damaged: set[str] = set()
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
            damaged = {adapter.member for adapter in self.llm.find_damaged(self.published.values())}
        # A member is published if any rank's part of it has changed, or if any rank's engine has damaged it. All ranks
        # must agree, because publishing is collective, and the ranks of one engine must know an adapter by one name.
        names = [*self.members, BASE_NAME]
        moved = [*self._detector.detect_changes(self.model, self.members), False]
        flags = gather_object([[flag or name in damaged for flag, name in zip(moved, names, strict=True)]])
        changed = [name for name, *wanted in zip(names, *flags, strict=True) if any(wanted)]
        if BASE_NAME in changed:  # `generate` publishes it again for the next row of the base
            changed.remove(BASE_NAME)
            if (base := self.published.pop(BASE_NAME, None)) is not None:
                self.llm.unload(base)
        if changed:
            try:
                self._publish(changed)
            except BaseException:  # Ctrl-C, too
                # If the caller goes on, the next call publishes and probes all members again.
                self._detector.forget()
                raise

    def _publish(self, members: Sequence[str]) -> None:
        """Publishes members. Every rank takes part, because reading a member is collective."""
        # Here go the directories that an earlier publication has replaced. So each stays for one publication more.
        if self._shelf is not None:
            self._shelf.sweep_retired()
        for member in members:
            self._count += 1
            adapter = Published(member, f"{member}-{self._run}-{self._count}", self._count)
            factors = self._read_factors(member)
            # The base's adapter of zeros has the shapes of the first member, see `_read_factors`.
            config = self.model.peft_config[self.members[0] if member == BASE_NAME else member]
            if self.mode == "colocate":
                self._write(adapter, *fold(factors, config))
            elif self.backend is not None:
                adapter = self._serve(adapter, *fold(factors, config))
            former = self.published.get(member)
            self.published[member] = adapter
            if former is not None and self._shelf is not None:
                self._withdraw(former)

    def _read_factors(self, member: str) -> dict[str, torch.Tensor]:
        """Reads a member's factors. For the base it makes zeros in a member's shapes: they add nothing."""
        if member == BASE_NAME:
            zeros = {key: value.zero_() for key, value in self._read_factors(self.members[0]).items()}
            # An adapter needs at least one module. For modules that it leaves out, a colocated engine writes zeros.
            return dict(islice(zeros.items(), 2)) if self.mode == "colocate" else zeros
        if self.mode == "server":
            return lora_members.read_member(self.model, member)
        device = "cpu" if self._keeps_copies else self.llm.device
        return lora_members.read_member(self.model, member, self.llm.lora_dtype, device)

    def _write(self, adapter: Published, factors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
        """Lets the colocated engine write an adapter into the slot of the member's old version."""
        self.llm.check_idle()
        # The old version goes first, so that vLLM finds a free slot and need not take that of another member.
        if (old := self.published.pop(adapter.member, None)) is not None:
            self.llm.unload(old)
        self.llm.load(
            adapter,
            factors,
            config,
            keeps_copy=self._keeps_copies or adapter.member == BASE_NAME,
            checks_sleep=self.enable_sleep_mode,
        )

    def _serve(self, adapter: Published, factors: Mapping[str, torch.Tensor], config: LoraConfig) -> Published:
        """Lets all servers load an adapter, and probes them. The first time it checks the modules, too."""
        if not self._modules_checked:
            self._check_modules(factors, config)
            self._modules_checked = True
        adapter = self._load(adapter, factors, config)
        try:
            self.backend.probe(adapter, next(value for key, value in factors.items() if "lora_B" in key))
        except BaseException:
            with suppress(VLLMServerError):  # the first error tells why
                self._withdraw(adapter)
            raise
        return adapter

    def _withdraw(self, adapter: Published) -> None:
        """Unloads an adapter from all servers. Its directory goes with the next publication."""
        self._open_shelf().retire(adapter.path)
        self.backend.unload(adapter)

    def _load(self, adapter: Published, factors: Mapping[str, torch.Tensor], config: LoraConfig) -> Published:
        """Writes an adapter's directory, and lets all servers load it."""
        save = partial(lora_members.save_factors, factors, config)
        adapter = replace(adapter, path=self._open_shelf().put(adapter.name, save))
        try:
            self.backend.load(adapter)
        except BaseException:
            self._open_shelf().retire(adapter.path)
            raise
        return adapter

    def _check_modules(self, factors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
        """
        Checks that the servers use what adapters add to every module. Makes one adapter for all modules of one name,
        such as `q_proj`, and one adapter that adds nothing. The servers must answer differently with the two.
        """
        generator = torch.Generator().manual_seed(0)
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in factors.items():
            # The factors are large enough to be seen in any precision, and small enough to leave the answer finite.
            size = 0.1 if ".lora_B." in key else value.shape[1] ** -0.5
            drawn = size * torch.randn(value.shape, generator=generator)
            kinds.setdefault(_name_module(key).rpartition(".")[2], {})[key] = drawn
        first = next(iter(kinds.values()))
        nothing = {key: torch.zeros_like(value) for key, value in first.items()}
        self._count += 1  # if the check fails and is made again, its adapters need new names
        probes: list[Published] = []
        try:
            for name, values in {"nothing": nothing, **kinds}.items():
                probe = Published(name, f"{name}-{self._run}-{self._count}", self._count)
                probes.append(self._load(probe, values, config))
            self.backend.check_modules(probes[0], dict(zip(kinds, probes[1:], strict=True)))
        finally:
            for probe in probes:
                # A server that fails here fails again when it is to load the first member.
                with suppress(VLLMServerError):
                    self._withdraw(probe)

    def _open_shelf(self) -> publish.AdapterShelf:
        """Makes the shelf when it is needed for the first time."""
        if self._shelf is None:
            size = sum(
                4 * parameter.numel()  # a parameter has 4 bytes in fp32
                for name in self.members
                for parameter in lora_members.member_parameters(self.model, name).values()
            )
            parent = self.adapter_dir or publish.choose_parent(self.output_dir, size, self.vllm_client.remote)
            self._shelf = publish.AdapterShelf(os.path.expanduser(parent))
        return self._shelf

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """
        Generates one completion per prompt, with the member that the router names for the prompt's row. Collective.

        Arguments and results are TRL's. `num_generations` has to be 1: each attempt at a task is a row. The backend
        merges equal rows into one request.

        Raises:
            `RuntimeError`: If the router names no rows, or another number of rows than there are prompts.
            `ValueError`: If `num_generations` is not 1, or if ranks that ask together have different numbers of rows.
        """
        rows = self.router.members
        if rows is None or len(rows) != len(prompts):
            raise RuntimeError(
                f"{len(prompts)} prompts are to be answered, but the router names "
                f"{'no rows' if rows is None else f'{len(rows)} rows'}. Generate inside `with "
                "router.route_to(members):`."
            )
        if num_generations != 1:
            raise ValueError(f"`num_generations` must be 1, got {num_generations}: repeat the prompts and the rows.")
        # TRL wakes the engine's weights later. But the base must not be written while they sleep, and versions that
        # the sleep has damaged must not be asked for.
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()
        all_rows, seeds = self._gather_rows(list(rows))
        # vLLM's CPU kernels take -1, its index of rows without adapter, for the last adapter. So the base is published
        # as an adapter of zeros.
        if BASE in all_rows and BASE_NAME not in self.published:
            self._publish([BASE_NAME])
        if self.backend is not None:
            names = [BASE_NAME if row == BASE else self.members[row] for row in all_rows]
            self.backend.versions = [self.published[name] for name in names]
            self.backend.seeds = seeds
            self.backend.temperatures = dict(zip(self.members, self.temperatures, strict=False))
            self.backend.follow = None if self.follow is None else self._take_up
        return super().generate(prompts, images, num_generations, profiler)

    def _take_up(self, ended: dict[int, list[int]]) -> tuple[list[list[int]], list[Published]]:
        """Asks for further rows, each with the version that its member has."""
        assert self.follow is not None
        prompts, rows = self.follow(ended)
        return prompts, [self.published[self.members[row]] for row in rows]

    def _gather_rows(self, rows: list[int]) -> tuple[list[int], list[int | None]]:
        """
        Gathers rows and seeds of all ranks that ask vLLM together, in the order in which TRL gathers their prompts.

        TRL deals the completions out in slices of equal size, so all these ranks must have equally many rows.
        """
        # In server mode all ranks ask the same servers. In colocate mode the ranks of one tensor-parallel group ask
        # the engine that they share.
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
                f"Ranks that ask vLLM together must ask for equally many rows, got {', '.join(map(str, counts))} rows "
                "(in rank order). Where a rank has fewer, repeat some of its rows, and drop the extra completions."
            )
        all_rows, seeds = zip(*gathered, strict=True)
        return [row for part in all_rows for row in part], [seed for part in seeds for seed in part]

    def close(self) -> None:
        """
        Unloads all published adapters and removes their directories. The next `sync_weights` publishes all members
        again.

        A server that has failed is not waited for. It loses its adapters when it is restarted.
        """
        errors = []
        for adapter in self.published.values() if self.backend is not None else ():
            try:
                self.backend.unload(adapter)
            except VLLMServerError as error:
                errors.append(error)
        if errors:
            vllm_generation.logger.warning("Adapters were left on the server: %s", errors[0])
        self.published = {}
        self._detector.forget()
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def end(self) -> None:
        """Shuts down a colocated engine. Call it before the process group ends: vLLM needs the group."""
        if self.mode == "colocate":
            self.llm.llm_engine.engine_core.shutdown()


def list_graph_sizes(rows: int) -> list[int]:
    """
    Lists the numbers of rows for which a CUDA graph is worth recording, if at most `rows` run at once. vLLM rounds up
    to the next of them: about 32 numbers at most, because recording one takes a fraction of a second.
    """
    apart = max(32, -(-rows // 256) * 8)  # a multiple of 8
    sizes = [size for size in (8, 16, *range(apart, rows, apart)) if size < rows]
    return [*sizes, rows]


def _name_module(key: str) -> str:
    """Returns the name of the base's module that a factor belongs to, by the factor's PEFT state-dict key."""
    return key.removeprefix("base_model.model.").partition(".lora_")[0]


@contextmanager
def _replace_in_trl(names: dict[str, Callable]) -> Iterator[None]:
    """Replaces `VLLMClient` or `LLM` in TRL's module inside the block. TRL's `_init_vllm` calls the replacement."""
    # TRL offers no option to choose these classes.
    originals = {name: getattr(vllm_generation, name) for name in names}
    vars(vllm_generation).update(names)
    try:
        yield
    finally:
        vars(vllm_generation).update(originals)


def _advise(output_dir: str) -> str:
    """Says how to go on after a server has failed."""
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
) -> PopulationGeneration:
    """
    Makes a trainer's vLLM generation.

    Before this call, the constructor of TRL's trainer has to run with `use_vllm` switched off: else it would start an
    engine without adapters.

    Args:
        args: The run's settings. Each argument of `VLLMGeneration` that is an option gets the option's value.
        accelerator: The trainer's accelerator.
        tokenizer: The trainer's tokenizer.
        ends: Token ids that end a completion.
        model, members, router: As in [`PopulationGeneration`].
    """
    # Each argument of TRL's class that comes from an option has the option's name, with or without `vllm_`.
    options, taken = {each.name for each in fields(args)}, inspect.signature(VLLMGeneration.__init__).parameters
    named = {name: f"vllm_{name}" if f"vllm_{name}" in options else name for name in taken}
    settings = {name: getattr(args, option) for name, option in named.items() if option in options}
    settings |= {
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        "logprobs": 0,  # that of the sampled token: the importance sampling correction needs no other
        "generation_kwargs": make_vllm_kwargs(args.generation_kwargs, ends),
    }
    return PopulationGeneration(
        model,
        members=members,
        router=router,
        output_dir=args.output_dir,
        adapter_dir=args.vllm_adapter_dir,
        engine_kwargs=_add_engine_defaults(args, model, args.vllm_engine_kwargs or {}),
        accelerator=accelerator,
        processing_class=tokenizer,
        **settings,
    )


def _add_engine_defaults(args: GRPOConfig, model: torch.nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a seed, different for each engine of a run, and the base's revision to the user's engine arguments."""
    group = args.process_index // args.vllm_tensor_parallel_size
    revision = find_commit(model) or (args.model_init_kwargs or {}).get("revision")
    return {"seed": args.seed + group, "revision": revision, **given}
