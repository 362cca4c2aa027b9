"""Eight adapters into a colocated vLLM engine from memory, as the trainer publishes them, and by way of files.

    python benchmarks/publishing.py [--layers 24] [--rank 16] [--repeats 5] [--clock cpu]

Both sides find out which members moved, read them, load the new versions and unload the old ones; files lie in shared
memory. From memory every version is probed as well (`RoutedLLM.probe`). The sides alternate after a warm-up; medians.
The base has the shapes of Qwen2.5-0.5B, but a vocabulary of 512, which no adapter touches, and weights never set.

Needs vLLM (on a machine without GPU: `VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1`); no network. Last line: one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path


# The script runs from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from trl_populora.generate.publish import SHARED_MEMORY, AdapterShelf  # noqa: E402
from trl_populora.generate.vllm import PopulationGeneration  # noqa: E402
from trl_populora.lora.layers import (
    Router,  # noqa: E402
    add_members,  # noqa: E402
)
from trl_populora.lora.members import member_parameters, save_member  # noqa: E402


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


class ByFiles:
    """What a colocated engine was given before it took tensors: a PEFT directory per version, unloaded one later."""

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
        """Leaves the engine to the other side; not timed."""
        for loaded in self.loaded.values():
            self.generation.llm.llm_engine.remove_lora(loaded)
        self.loaded = {}
        self.shelf.sweep_retired()


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
    now = CLOCKS[arguments.clock]

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
        probe, probing = generation.llm._probe, [0.0]

        def timed_probe(*adapter, **layers) -> None:
            start = now()
            probe(*adapter, **layers)
            probing[-1] += now() - start

        generation.llm._probe = timed_probe
        by_files = ByFiles(generation)
        seconds: dict[str, list[float]] = {"files": [], "memory": [], "nothing": []}
        ways = {"files": by_files.publish, "memory": generation.sync_weights, "nothing": generation.sync_weights}
        for _ in range(arguments.repeats + 1):
            probing.append(0.0)
            for way, publish in ways.items():
                if way != "nothing":
                    move(model, names)
                start = now()
                publish()
                seconds[way].append(now() - start)
                by_files.clear()
        generation.close()
    # The first is a warm-up.
    medians = {way: statistics.median(values[1:]) for way, values in seconds.items()}
    runs = list(zip(*seconds.values(), strict=True))[1:]
    ratio = statistics.median(files / memory for files, memory, _ in runs)
    without = statistics.median((files - nothing) / (memory - nothing) for files, memory, nothing in runs)
    probed = statistics.median(probing[2:])
    size = sum(p.numel() for p in member_parameters(model, names[0]).values())
    print(f"{MEMBERS} adapters of {size:,} numbers, {arguments.layers} layers, {arguments.clock} clock")
    print(f"  by files        {medians['files']:8.3f} s")
    print(f"  from memory     {medians['memory']:8.3f} s, the probe's {probed:.3f} s among them")
    print(f"  nothing moved   {medians['nothing']:8.3f} s, to find that out, which is in all three")
    print(f"  files over memory: {ratio:.2f}; {without:.2f} without finding out what moved")
    print(
        json.dumps(
            {
                "memory_vs_files": round(ratio, 2),
                "memory_vs_files_without_detection": round(without, 2),
                "seconds_files": round(medians["files"], 3),
                "seconds_memory": round(medians["memory"], 3),
                "seconds_probe": round(probed, 3),
                "seconds_nothing": round(medians["nothing"], 3),
                "layers": arguments.layers,
                "rank": arguments.rank,
            }
        )
    )


if __name__ == "__main__":
    main()
