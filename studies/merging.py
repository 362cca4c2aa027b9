"""
Merges the students of finished runs once, at the end, in four ways, and scores each merged model.

    python studies/screen.py --candidates separate --seeds 0 --steps 75   # students that were not pooled
    python studies/merging.py runs/screen/separate/seed_0

The ways: the mean of what the students add to the base (as `populora export --merge_students`), the mean of their
factors (as pooling), that mean weighted by each student's squared gradients, which its optimizer's second moments
estimate (Fisher), and TIES of what they add. Tasks are those of `screen.py`. Each run keeps its figures in
`merging.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import beside_recipes  # noqa: F401
import torch
from peft import LoraConfig, PeftModel
from peft.utils.merge_utils import ties
from safetensors.torch import load_file
from score_held_out import markdown
from screen import KIND, held_out_tasks, probe_tasks, rate_of
from tiny_scores import Scorer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from trl_populora.assets import resolve_model_path
from trl_populora.run.read import read_population
from trl_populora.sandbox import Sandbox


DENSITY = 0.2  # share of each student's entries that TIES keeps, as in its paper (arXiv 2306.01708)
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass
class Student:
    """Factors of one student, the scaling of their product, and their second moments in the same form."""

    factors: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    scaling: float

    @property
    def modules(self) -> list[str]:
        return [key.removesuffix(A) for key in self.factors if key.endswith(A)]

    def added(self, module: str) -> Tensor:
        return self.scaling * self.factors[module + B] @ self.factors[module + A]


def read_students(checkpoint: Path) -> dict[str, Student]:
    """The students of a checkpoint by name, with their optimizer's second moments."""
    saved = read_population(checkpoint)
    base = AutoModelForCausalLM.from_pretrained(resolve_model_path(saved["base_model"]))
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    places = {group["member"]: group["params"] for group in optimizer["param_groups"]}
    students: dict[str, Student] = {}
    model = None
    for member in saved["members"]:
        if member["role"] != "student":
            continue
        directory = checkpoint / member["adapter"]
        factors = load_file(directory / "adapter_model.safetensors")
        # The optimizer numbers parameters in the model's order, which is not the file's. Its groups are named after
        # adapters: a single agent is two members with one.
        model = model or PeftModel.from_pretrained(base, directory)
        names = [name.replace(".default.", ".") for name, _ in model.named_parameters() if "lora_" in name]
        moments = {
            name: optimizer["state"][place]["exp_avg_sq"]
            for name, place in zip(names, places[directory.name], strict=True)
        }
        assert moments.keys() == factors.keys()
        assert all(moments[key].shape == factors[key].shape for key in factors)
        config = LoraConfig.from_pretrained(directory)
        students[member["name"]] = Student(factors, moments, config.lora_alpha / config.r)
    return students


def mean_added(students: Sequence[Student], module: str) -> Tensor:
    return torch.stack([student.added(module) for student in students]).mean(0)


def mean_factors(students: Sequence[Student], module: str) -> Tensor:
    a, b = (torch.stack([student.factors[module + side] for student in students]).mean(0) for side in (A, B))
    return students[0].scaling * b @ a


def fisher(students: Sequence[Student], module: str) -> Tensor:
    sides = []
    for side in (A, B):
        weights = torch.stack([student.moments[module + side] for student in students]) + 1e-20
        factors = torch.stack([student.factors[module + side] for student in students])
        sides.append((weights * factors).sum(0) / weights.sum(0))
    return students[0].scaling * sides[1] @ sides[0]


def elected(students: Sequence[Student], module: str) -> Tensor:
    return ties([student.added(module) for student in students], torch.ones(len(students)), DENSITY)


WAYS: dict[str, Callable[[Sequence[Student], str], Tensor]] = {
    "mean of what they add": mean_added,
    "mean of factors": mean_factors,
    "Fisher-weighted mean of factors": fisher,
    f"TIES, density {DENSITY}": elected,
}


def write_merged(checkpoint: Path, way: str, students: Sequence[Student], directory: Path) -> None:
    """Writes the base with what the merged students add to it, as a whole model."""
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model_path(read_population(checkpoint)["base_model"]), dtype=torch.float32
    )
    with torch.no_grad():
        for module in students[0].modules:
            model.get_submodule(module.removeprefix("base_model.model.")).weight += WAYS[way](students, module)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)


def score(run: Path) -> dict[str, dict[str, float]]:
    """Shares of right answers to held-out tasks and probes by way of merging; measured once."""
    path = run / "merging.json"
    if not path.exists():
        checkpoint = Path(get_last_checkpoint(str(run)))
        students, rates = list(read_students(checkpoint).values()), {}
        with Sandbox() as sandbox:
            for way in tqdm(WAYS, desc=str(run)):
                with tempfile.TemporaryDirectory() as directory:
                    write_merged(checkpoint, way, students, Path(directory))
                    scorer = Scorer(Path(directory), sandbox)
                torch.manual_seed(0)
                rates[way] = {name: rate_of(scorer, tasks()) for name, tasks in TASKS.items()}
        path.write_text(json.dumps(rates, indent=1) + "\n")
    return json.loads(path.read_text())


TASKS = {"held out": held_out_tasks, "probes": probe_tasks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="directories of finished runs")
    torch.set_num_threads(1)
    rows = [["run", "merged", *TASKS]]
    for run in parser.parse_args().runs:
        rows += [[str(run), way, *(f"{rate:.3f}" for rate in rates.values())] for way, rates in score(run).items()]
    print(f"{KIND}\n{markdown(rows)}")


if __name__ == "__main__":
    main()
