"""What each weight-space operator costs and keeps, against the same operator of PyPI's `populora`.

Both packages breed from the same parents at the same strength, in turn, in rounds; the table shows medians over the
rounds. Parents are a random pair shaped like rank-32 adapters on all linear layers of Qwen2.5-7B (196 modules, 80.7 M
numbers each; one seeded A for both, as in this package), and a pair trained on the embedded base, one on code_o and
one on code_i. Every child is compared with its parents: cosine and norm ratio of the products B A over all modules.

    pip install populora                             # the peer, for this benchmark only; without it ours runs alone
    python benchmarks/operators.py                   # two cores, about five minutes
    python benchmarks/operators.py --layers 4 --rounds 1

Wall clock and processor time are both taken: on a busy machine only the second means anything, and with `--threads 1`
it bounds the first on a quiet one.

The last line is one JSON object: `slowest_seconds_7b` and `slowest_cpu_seconds_7b` (ours), and per operator
`time_ratio` and `cpu_ratio` (theirs over ours; above 1 is faster), `cosine_gain_random` and `cosine_gain_trained`
(ours minus theirs, mean over the parents).

The peer's `svd_structured` (0.4.5) looks milder than its first-order rotation is: on a CPU it seeds every draw with
the sum of torch's generator state, which one draw leaves as it was, so both bases get the same noise and most of it
cancels where the singular values are alike.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_populora.assets import tiny_base_path
from trl_populora.population.factors import Factors, compare, pair_factors
from trl_populora.population.operators import CROSSOVERS, MUTATIONS
from trl_populora.tasks import resolve_kind
from trl_populora.tasks.archive import load_seed_tasks
from trl_populora.tasks.python.prompts import fence, show_input, show_output


try:
    from populora.operators import CROSSOVER_REGISTRY, MUTATION_REGISTRY
except ImportError:
    CROSSOVER_REGISTRY = MUTATION_REGISTRY = None

# Linear layers of one block of Qwen2.5-7B: (out, in).
BLOCK_7B = {
    "self_attn.q_proj": (3584, 3584),
    "self_attn.k_proj": (512, 3584),
    "self_attn.v_proj": (512, 3584),
    "self_attn.o_proj": (3584, 3584),
    "mlp.gate_proj": (18944, 3584),
    "mlp.up_proj": (18944, 3584),
    "mlp.down_proj": (3584, 18944),
}

# Our operator, its options here, the peer's name for it, and the peer's options for the same strength.
PAIRS = [
    ("svd_perturb", {"scale": 0.1}, "svd_structured", {"epsilon": 0.1}),
    ("layer_gaussian", {"scale": 0.15}, "layer_selective_gaussian", {"epsilon": 0.15}),
    ("component_mask", {"fraction": 0.3}, "component_masking", {"rho": 0.3}),
    ("full_gaussian", {"scale": 0.15}, "full_gaussian", {"epsilon": 0.15}),
    ("dare", {"drop": 0.7}, "dare", {"p": 0.7}),
    ("module_swap", {}, "layer_wise", {}),
    ("svd_subspace", {}, "svd_subspace", {}),
    ("extrapolate", {}, "extrapolative", {}),
    ("average", {}, "average", {}),
    ("clone", {}, "clone", {}),
    ("ties", {}, None, {}),
    ("slerp", {}, None, {}),
]


def random_pair(layers: int, rank: int = 32) -> list[Factors]:
    """Two adapters with one A between them, moved by a tenth of its size as training would, and independent B."""
    pair = []
    for seed in (1, 2):
        shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        factors = {}
        for layer in range(layers):
            for name, (out, inputs) in BLOCK_7B.items():
                key = f"base_model.model.model.layers.{layer}.{name}"
                start = torch.randn(rank, inputs, generator=shared) / inputs**0.5
                moved = 0.1 * torch.randn(rank, inputs, generator=own) / inputs**0.5
                factors[f"{key}.lora_A.weight"] = start + moved
                factors[f"{key}.lora_B.weight"] = 0.01 * torch.randn(out, rank, generator=own)
        pair.append(factors)
    return pair


def trained_pair(steps: int) -> list[Factors]:
    """Two adapters of one initialisation, taught the package's seed tasks of one kind each."""
    return [train_adapter(name, steps) for name in ("code_o", "code_i")]


def train_adapter(kind_name: str, steps: int) -> Factors:
    """Supervised steps on the answers of one kind, 16 tasks each."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_path())
    base = AutoModelForCausalLM.from_pretrained(tiny_base_path(), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    kind = resolve_kind(kind_name)
    texts = []
    for task in load_seed_tasks():
        if task.kind == kind_name:
            prompt = kind.solving_prompt(task, "compact")
            answer = fence(show_output(task.outputs[0]) if kind_name == "code_o" else show_input(task.inputs[0]))
            turns = [*prompt, {"role": "assistant", "content": answer}]
            texts.append(tokenizer.apply_chat_template(turns, tokenize=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(texts), (16,), generator=order).tolist()
        batch = tokenizer([texts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in get_peft_model_state_dict(model).items()}


class Clock:
    """Wall-clock and processor seconds since it was made."""

    def __init__(self):
        self.started = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.started[0], time.process_time() - self.started[1]


class Peer:
    """A peer population of two parents and a child slot, in the shape that the peer's operators take."""

    def __init__(self, parents: list[Factors]):
        self.keys = pair_factors(parents[0])
        downs, ups = {}, {}  # [3, in, r] and [3, out, r]
        for down, up in self.keys:
            downs[down] = torch.stack([*(parent[down].T for parent in parents), torch.zeros_like(parents[0][down].T)])
            ups[down] = torch.stack([*(parent[up] for parent in parents), torch.zeros_like(parents[0][up])])
        self.population = SimpleNamespace(device=torch.device("cpu"), weight_down=downs, weight_up=ups)

    def breed(self, name: str, options: dict) -> tuple[float, float]:
        """Overwrite the child slot; returns the operator's wall and processor seconds."""
        population, child = self.population, torch.tensor([2])
        if name in CROSSOVER_REGISTRY:
            # The first of our parents is the better one: fitness orders theirs alike.
            order = {"fitnesses": torch.tensor([1.0, 0.0, 0.0])} if name == "extrapolative" else {}
            parents = torch.tensor([[0, 1]])
            clock = Clock()
            CROSSOVER_REGISTRY[name](population, parents, child, **order, **options)
            return clock.read()
        for stack in (population.weight_down, population.weight_up):
            for value in stack.values():
                value[2] = value[0]
        clock = Clock()
        MUTATION_REGISTRY[name](population, child, **options)
        return clock.read()

    def child(self) -> Factors:
        factors = {}
        for down, up in self.keys:
            factors[down] = self.population.weight_down[down][2].T
            factors[up] = self.population.weight_up[down][2]
        return factors


def ours(name: str, parents: list[Factors], options: dict, seed: int):
    """Wall and processor seconds, and the child, of one call."""
    operator: Callable[..., Factors] = (MUTATIONS | CROSSOVERS)[name]
    given = parents[:1] if name in MUTATIONS else parents
    generator = torch.Generator().manual_seed(seed)
    clock = Clock()
    child = operator(*given, generator, **options)
    return clock.read(), child


def likeness(child: Factors, parents: list[Factors], name: str) -> dict[str, float]:
    """Cosine to each parent that the operator has, and the norm over the parents' mean."""
    given = parents[:1] if name in MUTATIONS else parents
    pairs = [compare(child, parent) for parent in given]
    return {
        "cosines": [pair["cosine"] for pair in pairs],
        "norm": len(pairs) / sum(1 / pair["norm_ratio"] for pair in pairs),
    }


def measure(parents: list[Factors], rounds: int) -> dict[str, dict]:
    """Medians over the rounds of the times, means of cosines and norm ratios, of both packages."""
    peer = Peer(parents) if CROSSOVER_REGISTRY else None
    samples: dict[str, dict[str, list]] = {name: {"ours": [], "theirs": []} for name, *_ in PAIRS}
    for seed in range(rounds + 1):
        for name, options, peer_name, peer_options in PAIRS:
            seconds, child = ours(name, parents, options, 1000 + seed)  # the parents were drawn from small seeds
            found = {"ours": (seconds, likeness(child, parents, name))}
            del child
            if peer and peer_name:
                torch.manual_seed(1000 + seed)
                seconds = peer.breed(peer_name, peer_options)
                found["theirs"] = (seconds, likeness(peer.child(), parents, name))
            for side, sample in found.items() if seed else ():  # the first round warms up
                samples[name][side].append(sample)
    return {name: {side: summary(found) for side, found in sides.items() if found} for name, sides in samples.items()}


def summary(samples: list[tuple[tuple[float, float], dict]]) -> dict:
    clocks, kept = zip(*samples, strict=True)
    wall, cpu = (statistics.median(values) for values in zip(*clocks, strict=True))
    return {
        "seconds": wall,
        "cpu": cpu,
        "cosines": [statistics.fmean(values) for values in zip(*(sample["cosines"] for sample in kept), strict=True)],
        "norm": statistics.fmean(sample["norm"] for sample in kept),
    }


def report(title: str, results: dict[str, dict]) -> None:
    print(f"\n{title}")
    times = "".join(f"{title:>9}" for title in ("seconds", "peer", "cpu s", "peer"))
    print(f"{'':16}{times}   {'cosine to parents':20}{'peer':20}{'norm':>6}{'peer':>6}")
    for name, sides in results.items():
        mine, theirs = sides["ours"], sides.get("theirs", {"seconds": math.nan, "cpu": math.nan, "norm": math.nan})
        times = "".join(f"{side[key]:9.3f}" for key in ("seconds", "cpu") for side in (mine, theirs))
        cosines = "".join(f"{' '.join(f'{c:+.3f}' for c in side.get('cosines', [])):20}" for side in (mine, theirs))
        print(f"{name:16}{times}   {cosines}{mine['norm']:6.2f}{theirs['norm']:6.2f}")
    sys.stdout.flush()


def ratio(sides: dict[str, dict], key: str) -> float | None:
    return round(sides["theirs"][key] / sides["ours"][key], 3) if "theirs" in sides else None


def gain(sides: dict[str, dict]) -> float | None:
    if "theirs" not in sides:
        return None
    return round(statistics.fmean(sides["ours"]["cosines"]) - statistics.fmean(sides["theirs"]["cosines"]), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28, help="Blocks of the 7B shape; 28 is the whole model.")
    parser.add_argument("--rounds", type=int, default=3, help="Timed rounds after one to warm up.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="Updates of each parent of the trained pair.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if CROSSOVER_REGISTRY is None:
        print("populora is not installed (`pip install populora`): no comparison, ours alone.")

    random_results = measure(random_pair(options.layers), options.rounds)
    report(f"Random pair, 7B shape, rank 32, {options.layers} blocks, {options.threads} threads", random_results)
    trained_results = measure(trained_pair(options.steps), 5 * options.rounds)
    report("Pair trained on the embedded base, rank 16", trained_results)

    operators = {}
    for name, sides in random_results.items():
        operators[name] = {
            "seconds": round(sides["ours"]["seconds"], 4),
            "cpu_seconds": round(sides["ours"]["cpu"], 4),
            "time_ratio": ratio(sides, "seconds"),
            "cpu_ratio": ratio(sides, "cpu"),
            "cosine_gain_random": gain(sides),
            "cosine_gain_trained": gain(trained_results[name]),
        }
    slowest = {key: round(max(side["ours"][key] for side in random_results.values()), 3) for key in ("seconds", "cpu")}
    print()
    print(
        json.dumps(
            {
                "slowest_seconds_7b": slowest["seconds"],
                "slowest_cpu_seconds_7b": slowest["cpu"],
                "layers": options.layers,
                "threads": options.threads,
                "operators": operators,
            }
        )
    )


if __name__ == "__main__":
    main()
