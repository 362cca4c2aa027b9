"""Eight adapters into a colocated vLLM engine: on the device, through host memory, and by way of files.

    python benchmarks/publishing.py [--layers 24] [--rank 16] [--repeats 5] [--clock cpu]

* device: as the trainer publishes them. The old version's slot is freed, and vLLM writes the new tensors into it.
* host: copies in host memory, which the engine keeps; the old version is unloaded after the new one is loaded.
* files: a PEFT directory of each version in shared memory, loaded beside the old version, too. Without a probe.

All find out which members moved. The ways alternate, and each replaces versions that it has loaded; medians after a
warm-up. `parts` says where the time on the device goes, and `host_mib` how many MiB of weights the engine then keeps
in host memory. On a GPU every part waits for the device. The base has the shapes of Qwen2.5-0.5B, but a vocabulary of
512, which no adapter touches, and weights never set.

Needs vLLM (on a machine without GPU: `VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1`); no network. Last line: one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_populora.generate.publish import SHARED_MEMORY, AdapterShelf, Published
from trl_populora.generate.vllm import PopulationGeneration
from trl_populora.lora.convert import fold
from trl_populora.lora.layers import Router, add_members
from trl_populora.lora.members import member_parameters, read_member, save_member


MEMBERS = 8
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def make_base(directory: str, layers: int) -> Qwen2ForCausalLM:
    """A model of the shapes; its configuration in `directory`, for the engine."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.name_or_path = directory
    return model


class OnDevice:
    """As the trainer publishes."""

    def __init__(self, generation: PopulationGeneration):
        self.generation = generation

    def publish(self) -> None:
        self.generation.sync_weights()

    def clear(self) -> None:
        """Leaves the engine to the next way; not timed."""
        self.generation.close()


class ThroughHost:
    """What the trainer did before: every new version is copied to the CPU, and loaded before the old one goes."""

    def __init__(self, generation: PopulationGeneration):
        self.generation, self.count = generation, 10**5
        self.loaded: dict[str, Published] = {}

    def publish(self) -> None:
        model, names, llm = self.generation.model, self.generation.members, self.generation.llm
        self.generation._detector.detect_changes(model, names)
        for name in names:
            self.count += 1
            adapter = Published(name, f"{name}-{self.count}", self.count)
            llm.load(adapter, *fold(read_member(model, name, llm.lora_dtype), model.peft_config[name]))
            if name in self.loaded:
                llm.unload(self.loaded[name])
            self.loaded[name] = adapter

    def clear(self) -> None:
        for adapter in self.loaded.values():
            self.generation.llm.unload(adapter)
        self.loaded = {}


class ByFiles:
    """What a colocated engine was given at first: a PEFT directory per version, unloaded one later."""

    def __init__(self, generation: PopulationGeneration):
        self.generation, self.shelf = generation, AdapterShelf(SHARED_MEMORY)
        self.count, self.loaded = 10**6, {}

    def publish(self) -> None:
        from vllm.lora.request import LoRARequest

        model, names = self.generation.model, self.generation.members
        engine = self.generation.llm.llm_engine
        self.generation._detector.detect_changes(model, names)
        for name in names:
            self.count += 1
            path = self.shelf.put(
                f"{name}-{self.count}", lambda directory, name=name: save_member(model, name, directory)
            )
            engine.add_lora(LoRARequest(f"{name}-{self.count}", self.count, path))
            if name in self.loaded:
                engine.remove_lora(self.loaded[name])
            self.loaded[name] = self.count
            self.shelf.retire(path)

    def clear(self) -> None:
        for loaded in self.loaded.values():
            self.generation.llm.llm_engine.remove_lora(loaded)
        self.loaded = {}
        self.shelf.sweep_retired()


class Parts:
    """Seconds of some methods, by the name of the part of publishing that each is."""

    def __init__(self, now: Callable[[], float]):
        self.now = now
        self.seconds: dict[str, float] = {}

    def watch(self, owner: object, method: str, part: str) -> None:
        """Adds the time of a method to a part from now on."""
        inner = getattr(owner, method)

        def timed(*args, **kwargs):
            start = self.now()
            result = inner(*args, **kwargs)
            self.seconds[part] = self.seconds.get(part, 0.0) + self.now() - start
            return result

        setattr(owner, method, timed)


def count_host_bytes(model: torch.nn.Module) -> int:
    """Counts the bytes in host memory of the adapters that vLLM's manager keeps beside its slots."""
    manager = model.lora_manager
    sides = [
        side
        for adapter in manager.list_adapters()
        for weights in manager.get_adapter(adapter).loras.values()
        for side in (weights.lora_a, weights.lora_b)
    ]
    tensors = [tensor for side in sides for tensor in (side if isinstance(side, list) else [side])]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None and t.device.type == "cpu")


@torch.no_grad()
def move(model: torch.nn.Module, names: list[str]) -> None:
    """Changes every tensor of every member, as an optimizer step does."""
    for name in names:
        for parameter in member_parameters(model, name).values():
            parameter += 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of the base; Qwen2.5-0.5B has 24")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that has other work")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as directory:
        names, router = [f"member_{i}" for i in range(MEMBERS)], Router()
        config = LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules="all-linear")
        model = add_members(make_base(directory, arguments.layers), names, config, router, seed=0)
        generation = PopulationGeneration(
            model,
            members=names,
            router=router,
            output_dir=directory,
            accelerator=Accelerator(cpu=not torch.cuda.is_available()),
            processing_class=None,
            max_model_length=512,
            max_num_seqs=64,
            gpu_memory_utilization=0.3,
            engine_kwargs={"enforce_eager": True, "load_format": "dummy", "skip_tokenizer_init": True},
        )

        def now() -> float:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return CLOCKS[arguments.clock]()

        parts = Parts(now)
        parts.watch(generation._detector, "detect_changes", "find")
        parts.watch(generation, "_read_factors", "read")
        parts.watch(generation.llm, "unload", "free")
        parts.watch(generation.llm, "load", "write")
        ways = {"device": OnDevice(generation), "host": ThroughHost(generation), "files": ByFiles(generation)}
        seconds: dict[str, list[float]] = {way: [] for way in [*ways, "nothing"]}
        by_part: dict[str, list[float]] = {}
        host_mib: dict[str, float] = {}
        for _ in range(arguments.repeats + 1):
            for way, publisher in ways.items():
                move(model, names)
                publisher.publish()
                move(model, names)
                parts.seconds = {}
                start = now()
                publisher.publish()
                seconds[way].append(now() - start)
                (kept,) = generation.llm.apply_model(count_host_bytes)
                host_mib[way] = round(kept / 2**20, 1)
                if way == "device":
                    for part, value in parts.seconds.items():
                        by_part.setdefault(part, []).append(value)
                    start = now()
                    publisher.publish()
                    seconds["nothing"].append(now() - start)
                publisher.clear()
    # The first is a warm-up.
    medians = {way: statistics.median(values[1:]) for way, values in seconds.items()}
    parts_of_device = {part: round(statistics.median(values[1:]), 4) for part, values in by_part.items()}

    def compare(way: str, free: bool = False) -> float:
        """The median ratio of a way to the device; `free` leaves out what finding out takes."""
        runs = list(zip(seconds[way], seconds["device"], seconds["nothing"], strict=True))[1:]
        return round(statistics.median((a - free * none) / (b - free * none) for a, b, none in runs), 2)

    size = sum(p.numel() for p in member_parameters(model, names[0]).values())
    print(f"{MEMBERS} adapters of {size:,} numbers, {arguments.layers} layers, {arguments.clock} clock")
    print("  on the device   {device:8.3f} s\n  through host    {host:8.3f} s".format(**medians))
    print("  by files        {files:8.3f} s\n  nothing moved   {nothing:8.3f} s".format(**medians))
    print("  parts on the device: " + ", ".join(f"{part} {value:.3f} s" for part, value in parts_of_device.items()))
    print("  MiB kept in host memory: " + ", ".join(f"{way} {value}" for way, value in host_mib.items()))
    print(
        json.dumps(
            {
                "memory_vs_files": compare("files"),
                "memory_vs_files_without_detection": compare("files", free=True),
                "device_vs_host": compare("host"),
                "device_vs_host_without_detection": compare("host", free=True),
                **{f"seconds_{way}": round(value, 4) for way, value in medians.items()},
                "parts": parts_of_device,
                "host_mib": host_mib,
                "layers": arguments.layers,
                "rank": arguments.rank,
            }
        )
    )


if __name__ == "__main__":
    main()
