"""What several nodes send each other in a step, and what their cores and memory do; `budget.py --nodes` prints it.

Worked out, not measured: nothing was tried between two machines. `benchmarks/scaling.py` measures in small, on one,
what processes cost beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl_populora.config import PopuLoRAConfig


if TYPE_CHECKING:
    from budget import Rows


# Assumed.
NETWORK = 25e9  # bytes/s in and out of a node: InfiniBand of 200 Gb/s
CHARS_PER_TOKEN = 3.0  # Python source under Qwen's tokenizer; every digit is a token of its own
SLOW_PROGRAMS = 0.05  # share of programs that use all of `sandbox_seconds`
SHARE_OF_STEP = 0.1  # of a step's seconds that the sandbox may take

# Measured (benchmarks/RESULTS.md): 1294 isolated programs a second on two cores; 1,158 MB for a million tasks.
PROGRAM_SECONDS = 2 / 1294
TASK_BYTES = 1158
RECORD_BYTES = 250  # of a row as the other processes need to know it, pickled (tests compare it)


@dataclass(frozen=True)
class Nodes:
    """
    Args:
        nodes (`int`): How many train.
        processes (`int`): Of each.
        parts (`int`): Micro-batches of a step, per process.
        servers (`int`): vLLM servers; none where every process has its engine.
    """

    nodes: int
    processes: int
    parts: int
    servers: int

    @property
    def world(self) -> int:
        return self.nodes * self.processes


def traffic(args: PopuLoRAConfig, adapters: int, nodes: Nodes, like: Rows) -> dict[str, float]:
    """
    Bytes through the busiest node's network in a step.

    ZeRO-2 all-reduces gradients after every micro-batch (a ring passes each node twice) and gathers the weights
    once (a ring passes each node once), both in bf16. Servers read the members' files, which rank 0 writes in fp32.
    Every process is sent all rows: their records, and through TRL's log prompts and completions as text.
    """
    ring = 2 * adapters * (nodes.world - 1) / nodes.world
    text = CHARS_PER_TOKEN * (like.prompt + like.completion)
    others = args.rows_per_step * (nodes.nodes - 1) / nodes.nodes
    return {
        "gradients": 2 * args.num_iterations * nodes.parts * ring,
        "weights": args.num_iterations * ring,
        "publishing": 4 * adapters * (1 + nodes.servers) if nodes.servers else 0.0,
        "rows, as Python objects": nodes.processes * others * (RECORD_BYTES + text),
    }


def sandbox_cores(args: PopuLoRAConfig, nodes: Nodes, step_seconds: float) -> float:
    """Cores of a node that verify and grade its share of a step's programs within `SHARE_OF_STEP` of its time."""
    proposals = args.teachers * args.proposals_per_teacher
    programs = (2 * proposals + args.rows_per_step - proposals) / nodes.nodes  # a proposal runs forth and back
    seconds = programs * (PROGRAM_SECONDS + SLOW_PROGRAMS * args.sandbox_seconds)
    return seconds / (SHARE_OF_STEP * step_seconds)


def archive_bytes(args: PopuLoRAConfig, nodes: Nodes) -> float:
    """Of a full archive on a node: each of its processes has one of its own."""
    return nodes.processes * len(args.task_kinds) * args.archive_size * TASK_BYTES


def print_nodes(args: PopuLoRAConfig, adapters: int, nodes: Nodes, like: Rows, step_seconds: float | None) -> None:
    """The table of what is sent, memory, and what depends on a step's seconds where they are known."""
    print(f"\n{args.teachers + args.students} adapters on {nodes.nodes} nodes of {nodes.processes} GPUs, ", end="")
    print(f"{NETWORK / 1e9:.0f} GB/s between nodes\n")
    print("| through the busiest node, a step | GB | seconds |\n|---|---|---|")
    sent = traffic(args, adapters, nodes, like)
    for name, size in (sent | {"all": sum(sent.values())}).items():
        print(f"| {name} | {size / 1e9:.3f} | {size / NETWORK:.3f} |")
    print(f"\nArchives when full: {archive_bytes(args, nodes) / 2**20:.0f} MiB a node")
    if step_seconds is None:
        return
    share = sum(sent.values()) / NETWORK / step_seconds
    print(f"The network takes {100 * share:.0f} % of a step, if nothing of it is hidden behind the arithmetic.")
    print(f"Sandbox: {sandbox_cores(args, nodes, step_seconds):.1f} cores a node, for a tenth of the step")
