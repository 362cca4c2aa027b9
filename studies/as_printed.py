"""
What the paper's rules and ours make of one recipe: `recipes/paper.yaml` as printed, beside it with our defaults.

    python studies/as_printed.py                                  # both, 5 seeds of 60 steps: some 3 hours of one core
    python studies/as_printed.py --variants guarded --seeds 0 1   # the printed rules, and only our guards beside them
    python studies/as_printed.py --compare_only

Runs lie in `<output>/<variant>/seed_<n>`, are saved every 20 steps, and go on where they stopped when the command is
given again. `<output>/comparison.html` has held-out scores, curves, differences paired by seed, and how the members of
a run differ (Q1 of docs/paper.md). The figures of all runs are kept in `<output>/as_printed.json` and `members.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import arms_race_page as pages
import arms_race_runs as runs
import beside_recipes  # noqa: F401
import numpy as np
import torch
from trl import TrlParser

from trl_populora.cli import TrainArguments, build_trainer
from trl_populora.config import MemberConfig, PopuLoRAConfig
from trl_populora.files import write_json
from trl_populora.population.evolution import DEFAULT_CROSSOVERS, DEFAULT_MUTATIONS
from trl_populora.report.difference import compare_members, count_forms, count_right, read_forms
from trl_populora.report.load import load_run


CONFIG = Path(__file__).resolve().parents[1] / "recipes" / "paper.yaml"
RESULTS, MEMBERS = "as_printed.json", "members.json"
PRINTED, DEFAULT = "paper", "default"
VARIANTS: dict[str, dict[str, str]] = {
    PRINTED: {},
    DEFAULT: {
        "teacher_reward": "guarded",
        "ratings": "scores",
        "pfsp_kappa": "2",
        "student_baseline": "group",
        "mutations": ",".join(DEFAULT_MUTATIONS),
        "crossovers": ",".join(DEFAULT_CROSSOVERS),
    },
    "guarded": {"teacher_reward": "guarded"},
}


def parse(
    run: Path, variant: str, seed: int, options: Sequence[str]
) -> tuple[TrainArguments, PopuLoRAConfig, MemberConfig]:
    given = {"seed": seed, "output_dir": run, "save_strategy": "steps", "save_steps": 20, "save_total_limit": 1}
    words = [word for name, value in (given | VARIANTS[variant]).items() for word in (f"--{name}", str(value))]
    parser = TrlParser((TrainArguments, PopuLoRAConfig, MemberConfig))
    return parser.parse_args_and_config(["--config", str(CONFIG), *words, *options])


def train(run: Path, variant: str, seed: int, options: Sequence[str]) -> None:
    """Trains one run to its end, from its newest checkpoint if there is one; a finished one stays as it is."""
    if not (run / "trainer_state.json").exists():  # written at the very end
        trainer = build_trainer(*parse(run, variant, seed, options))
        trainer.train(resume_from_checkpoint="newest")
        trainer.save_state()
        trainer.save_model()


def measure_members(path: Path) -> dict[str, float]:
    """Measures in the last fifth of a run how its members differ, and which share of the proposals was refused why."""
    run = load_run(path)
    since, students = run.step - max(1, run.step // 5), run.members("student")
    figures = {}
    for role in ("teacher", "student"):
        if cosines := compare_members(run, role):
            figures[f"cosine of two {role}s"] = float(np.array(cosines)[np.triu_indices(len(cosines), 1)].mean())
    attempts = [row for row in run.rows if row["role"] == "student" and row["step"] > since]
    shares = np.array(count_right(attempts, students, run.kinds))
    for place, kind in enumerate(run.kinds):
        figures[f"{kind}: best student less worst"] = float(np.ptp(shares[:, place]))
    halves = [[row for row in attempts if row["step"] % 2 == part] for part in (0, 1)]
    specialities = correlate_specialities([np.array(count_right(half, students, run.kinds)) for half in halves])
    if not math.isnan(specialities):  # all students attempted all kinds
        figures["specialities: correlation of odd and even steps"] = specialities
    forms = read_forms(run, since)
    _, number = count_forms(forms)
    if number:
        share = number // len(students)
        mixed = {form for each in forms.values() for form in each[-share:]}
        each = [len(set(of[-share * len(students) :])) for of in forms.values()]
        figures["forms per code_f answer of one student"] = fmean(each) / (share * len(students))
        figures["more of them if all students' are mixed"] = (len(mixed) - fmean(each)) / (share * len(students))
    proposals = sum(row["role"] == "teacher" and row["step"] > since for row in run.rows)
    refused: Counter[str] = Counter()
    for entry in run.history:
        if entry["step"] > since:
            refused.update({key: number for key, number in entry.items() if key.startswith("verify/reject/")})
    figures |= {key.replace("verify/reject/", "refused: "): number / proposals for key, number in refused.items()}
    return figures


def correlate_specialities(halves: Sequence[np.ndarray]) -> float:
    """
    Says whether students have kinds of their own: in how far a student's share of right attempts at a kind, less its
    mean and less the kind's, goes together in two halves of the attempts. 0 is chance, 1 a speciality of each.

    Args:
        halves: Two arrays of shares, `[students, kinds]`.
    """
    first, second = (half - half.mean(0, keepdims=True) - half.mean(1, keepdims=True) + half.mean() for half in halves)
    norm = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / norm) if norm else math.nan


def compare(output: Path) -> Path:
    """Writes the comparison page of all runs that have begun."""
    kept = runs.load(output / RESULTS)
    members = json.loads((output / MEMBERS).read_text()) if (output / MEMBERS).exists() else {}
    for name in VARIANTS:
        for path in sorted(output.glob(f"{name}/seed_*/metrics.jsonl")):
            seed = int(path.parent.name.removeprefix("seed_"))
            kept.setdefault(name, {})[seed] = runs.measure(path.parent)
            if (path.parent / "members").exists():  # written at the end
                members.setdefault(name, {})[str(seed)] = measure_members(path.parent)
    kept = {name: dict(sorted(kept[name].items())) for name in VARIANTS if name in kept}
    runs.save(kept, output / RESULTS)
    write_json(output / MEMBERS, members)
    tables = [
        ("Held-out tasks, mean ± std over seeds", pages.held_out_table(kept)),
        ("First and last fifth of the steps, mean ± std over seeds", pages.table(kept)),
    ]
    if DEFAULT in kept and len(kept) > 1:
        tables.insert(0, (f"Against {DEFAULT}, paired by seed", pages.paired_table(kept, DEFAULT)))
    if members:
        tables.append(("How members differ, and what is refused: mean over seeds [95 %]", tell_members(members)))
    pages.draw_held_out(kept, output / "held_out.png")
    pages.draw_curves(kept, output / "curves.png")
    return pages.write_page(output, tables, [output / "held_out.png", output / "curves.png"])


def tell_members(members: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """Makes a table with a row for each figure of `measure_members`, and a column for each variant."""
    names = {figure: None for of in members.values() for figures in of.values() for figure in figures}
    rows = [["last fifth of the steps", *members]]
    for name in names:
        known = [[figures[name] for figures in of.values() if name in figures] for of in members.values()]
        if any(map(any, known)):  # most reasons to refuse a proposal never come up
            rows.append([name, *(pages.interval(numbers) for numbers in known)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=[PRINTED, DEFAULT], choices=[*VARIANTS], metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("runs/as_printed"))
    parser.add_argument("--compare_only", action="store_true", help="train nothing")
    options, settings = parser.parse_known_args()
    torch.set_num_threads(1)  # two threads beside any other process are slower than one
    for seed in [] if options.compare_only else options.seeds:
        for variant in options.variants:
            train(options.output / variant / f"seed_{seed}", variant, seed, settings)
    print(f"Comparison written to {compare(options.output)}.")


if __name__ == "__main__":
    main()
