"""
What the paper's rules and ours make of one recipe: `recipes/paper.yaml` as printed, beside it with our defaults.

    python studies/as_printed.py                                  # both, 5 seeds of 60 steps: some 3 hours of one core
    python studies/as_printed.py --variants guarded --seeds 0 1   # the printed rules, and only our guards beside them
    python studies/as_printed.py --compare_only

Runs lie in `<output>/<variant>/seed_<n>`, are saved every 20 steps, and go on where they stopped when the command is
given again. `<output>/comparison.html` has held-out scores, curves, and differences paired by seed; the figures of all
runs are kept in `<output>/as_printed.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import arms_race_page as pages
import arms_race_runs as runs
import beside_recipes  # noqa: F401
import torch
from trl import TrlParser

from trl_populora.cli import TrainArguments, build_trainer
from trl_populora.config import MemberConfig, PopuLoRAConfig
from trl_populora.population.evolution import DEFAULT_CROSSOVERS, DEFAULT_MUTATIONS


CONFIG = Path(__file__).resolve().parents[1] / "recipes" / "paper.yaml"
RESULTS = "as_printed.json"
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


def compare(output: Path) -> Path:
    """Writes the comparison page of all runs that have begun."""
    kept = runs.load(output / RESULTS)
    for name in VARIANTS:
        for path in sorted(output.glob(f"{name}/seed_*/metrics.jsonl")):
            seed = int(path.parent.name.removeprefix("seed_"))
            kept.setdefault(name, {})[seed] = runs.measure(path.parent)
    kept = {name: dict(sorted(kept[name].items())) for name in VARIANTS if name in kept}
    runs.save(kept, output / RESULTS)
    tables = [
        ("Held-out tasks, mean ± std over seeds", pages.held_out_table(kept)),
        ("First and last fifth of the steps, mean ± std over seeds", pages.table(kept)),
    ]
    if DEFAULT in kept and len(kept) > 1:
        tables.insert(0, (f"Against {DEFAULT}, paired by seed", pages.paired_table(kept, DEFAULT)))
    pages.draw_held_out(kept, output / "held_out.png")
    pages.draw_curves(kept, output / "curves.png")
    return pages.write_page(output, tables, [output / "held_out.png", output / "curves.png"])


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
