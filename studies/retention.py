"""
What does a child keep of parents that have drifted apart, and does crossover combine what they are good at?

    python studies/retention.py                      # all operators, seeds 0 1 2; ten minutes a seed
    python studies/retention.py --seeds 3            # one more seed; finished ones are read, not run again

Two students learn on the embedded base for `--steps` updates, each with a teacher of its own: one code_o alone, one
code_i alone (`tiny/config_4t4s.yaml` with 1T+1S). Every operator breeds a child from them, the better parent first;
base, parents and children attempt the held-out tasks of both kinds. A child combines if it solves more of the mixture
than the better parent does. `dare@0.5` is an operator at half its strength; the default crossovers are tried so, too.

Runs go on where they stopped; `<output>/seed_<n>.json` holds a seed's figures so far, `retention.md` the table,
`retention.png` the picture. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import beside_recipes  # noqa: F401
import torch
from arms_race import CONFIG, steps_done
from arms_race_page import interval
from score_held_out import markdown
from tiny_headroom import train
from tqdm import tqdm

from trl_populora.assets import tiny_eval_tasks
from trl_populora.evaluate.cross_play import Contest, assemble
from trl_populora.files import write_json
from trl_populora.lora.layers import BASE_NAME
from trl_populora.lora.members import read_member, write_member
from trl_populora.population.evolution import DEFAULT_CROSSOVERS
from trl_populora.population.factors import Factors, compare
from trl_populora.population.operators import CROSSOVERS, MUTATIONS
from trl_populora.tasks import load_seed_tasks


KINDS = ("code_o", "code_i")
PARENTS = ("code_o parent", "code_i parent")
OPERATORS = (*MUTATIONS, *CROSSOVERS, *(f"{name}@0.5" for name in DEFAULT_CROSSOVERS))
APART = 1000  # between the seeds of two parents: members of a population start from different factors, too
ONE_PAIR = ("--teachers", "1", "--students", "1", "--evolve_every", "0", "--eval_strategy", "no")
ONE_PAIR += ("--eval_on_start", "false")


def operator(text: str) -> str:
    """
    An operator's name, or `name@strength`, as an argument.

    Raises:
        ArgumentTypeError, ValueError: If there is no such operator, or the strength is no number.
    """
    name, _, strength = text.partition("@")
    if name not in MUTATIONS | CROSSOVERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(MUTATIONS | CROSSOVERS)}")
    float(strength or 1)
    return text


def breed(operator: str, better: Factors, worse: Factors, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    name, _, given = operator.partition("@")
    strength = float(given or 1)
    if name in MUTATIONS:
        return MUTATIONS[name](better, generator, strength=strength)
    return CROSSOVERS[name](better, worse, generator, strength=strength)


def rates(contest: Contest, member: str, attempts: int, tasks: int | None) -> dict[str, float]:
    """Held-out solve rates of a member by kind, and their mean as `mixture`; the same random numbers for everybody."""
    held_out, found = load_seed_tasks(tiny_eval_tasks()), {}
    for kind in KINDS:
        torch.manual_seed(0)
        own = [task for task in held_out if task.kind == kind][:tasks]
        found[kind] = contest.score([member], own, attempts)[member]
    return found | {"mixture": fmean(found.values())}


def parents(seed: int, options: argparse.Namespace, settings: Sequence[str]) -> list[Path]:
    """The two parents' runs, trained unless they are there."""
    paths = [options.output / kind / f"seed_{seed}" for kind in KINDS]
    for index, (kind, path) in enumerate(zip(KINDS, paths, strict=True)):
        if steps_done(path) < options.steps:
            held_out = options.output / f"{kind}.jsonl"
            lines = Path(tiny_eval_tasks()).read_text(encoding="utf-8").splitlines()
            held_out.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["kind"] == kind))
            given = ["--task_kinds", kind, "--eval_tasks", str(held_out), "--max_steps", str(options.steps), *ONE_PAIR]
            train(path, seed + index * APART, [*given, *settings], CONFIG)
    return paths


def run(seed: int, options: argparse.Namespace, settings: Sequence[str], path: Path) -> None:
    """
    One seed: rates of the base, of both parents, and of a child per operator. Writes what is not in the file yet.

    Raises:
        ValueError: If the file is of another study.
    """
    asked = {name: getattr(options, name) for name in ("steps", "attempts", "tasks")}
    kept = json.loads(path.read_text()) if path.exists() else {"asked": asked, "result": {}}
    if kept["asked"] != asked:
        raise ValueError(f"{path} holds a run with {kept['asked']}, not {asked}. Give another `--output`.")
    result = kept["result"]
    missing = [name for name in options.operators if name not in result]
    if not missing:
        return
    paths = parents(seed, options, settings)
    with assemble([str(path) for path in paths], seed=seed, task_kinds=list(KINDS)) as contest:
        rates_of = partial(rates, contest, attempts=options.attempts, tasks=options.tasks)
        factors = [read_member(contest.model, name) for name in contest.students]
        if not result:
            result[BASE_NAME] = rates_of(BASE_NAME)
            result |= {parent: rates_of(name) for parent, name in zip(PARENTS, contest.students, strict=True)}
        first = int(result[PARENTS[1]]["mixture"] > result[PARENTS[0]]["mixture"])
        better, worse = factors[first], factors[1 - first]
        for parent, own in zip(PARENTS, factors, strict=True):
            result[parent]["cosine"] = compare(own, better)["cosine"]
        slot = contest.teachers[0]  # as good as any
        for name in tqdm(missing, desc=f"children of seed {seed}", unit="child"):
            child = breed(name, better, worse, seed)
            write_member(contest.model, slot, child)
            result[name] = rates_of(slot) | {"cosine": compare(child, better)["cosine"]}
            write_json(path, kept)


def finished(options: argparse.Namespace, settings: Sequence[str]) -> list[dict[str, dict[str, float]]]:
    """What the seeds have come to, each from a file of its own under the output directory."""
    results = []
    for seed in options.seeds:
        path = options.output / f"seed_{seed}.json"
        run(seed, options, settings, path)  # so that a study may be split over several calls
        result = json.loads(path.read_text())["result"]
        results.append({name: result[name] for name in (BASE_NAME, *PARENTS, *options.operators)})
    return results


def above_better_parent(result: dict[str, dict[str, float]], name: str) -> float:
    return result[name]["mixture"] - max(result[parent]["mixture"] for parent in PARENTS)


def table(results: list[dict[str, dict[str, float]]]) -> list[list[str]]:
    """A row for base, parents and each operator: cosine to the better parent, rates, and what it has over that one."""
    rows = [["", "cosine", *KINDS, "mixture", "above the better parent [95 %]"]]
    for name in results[0]:
        cosine = "" if name == BASE_NAME else f"{fmean(result[name]['cosine'] for result in results):.3f}"
        means = [f"{fmean(result[name][key] for result in results):.3f}" for key in (*KINDS, "mixture")]
        rows.append([name, cosine, *means, interval([above_better_parent(result, name) for result in results])])
    return rows


def plot(results: list[dict[str, dict[str, float]]], seeds: Sequence[int], path: Path) -> None:
    """One row per child: what it solves of the mixture above the better parent, a point per seed."""
    from matplotlib.figure import Figure

    names = [name for name in results[0] if "cosine" in results[0][name]]
    figure = Figure(figsize=(6.2, 1.2 + 0.36 * len(names)), layout="constrained")
    axis = figure.subplots()
    for marker, (seed, result) in zip("osD^v", zip(seeds, results, strict=True), strict=False):
        above = [above_better_parent(result, name) for name in names]
        axis.plot(above, range(len(names)), marker, color="#0072B2", alpha=0.7, label=f"seed {seed}")
    axis.axvline(0, color="0.35", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(names)), names, fontsize=11)
    axis.invert_yaxis()
    axis.set_xlabel("held-out tasks solved, above the better parent", fontsize=11)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(seeds), frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=operator, nargs="+", default=OPERATORS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="updates of each parent")
    parser.add_argument("--attempts", type=int, default=3, help="at each held-out task")
    parser.add_argument("--tasks", type=int, help="held-out tasks of each kind; all by default")
    parser.add_argument("--output", type=Path, default=Path("runs/retention"))
    options, settings = parser.parse_known_args()
    torch.set_num_threads(1)  # two threads beside any other process are slower than one
    options.output.mkdir(parents=True, exist_ok=True)
    results = finished(options, settings)
    plot(results, options.seeds, options.output / "retention.png")
    rows = table(results)
    (options.output / "retention.md").write_text(markdown(rows) + "\n")
    print(markdown(rows))
    above = {name: [round(above_better_parent(result, name), 4) for result in results] for name in options.operators}
    print(json.dumps({"seeds": options.seeds, "above_better_parent": above}))


if __name__ == "__main__":
    main()
