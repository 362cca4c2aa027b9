"""The arms race: the same game played by populations and by a single agent, over several seeds, on one page.

    python recipes/arms_race.py                              # 4T+4S against the single agent, 3 seeds, 150 steps
    python recipes/arms_race.py --configs 1t1s no_evolution uniform --seeds 0 --steps 75

Each name is a recipe `recipes/tiny/config_<name>.yaml`; its runs lie in `<output>/<name>/seed_<n>`, are saved every 25
steps, and are continued where they stopped when the command is given again. Then the saved members of all runs play
each other and solve held-out tasks, and `<output>/comparison.html` compares everything; `--compare_only` does just
this, for the first `--steps` of runs that may have gone on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import arms_race_page as pages
from tiny_documents import DialogueWriter
from tiny_programs import TRAINED_LEVELS
from tiny_scores import random_task

from trl_populora.adapters.routing import BASE_NAME
from trl_populora.evaluation.cross_play import assemble
from trl_populora.report.payoff import Payoff, write_payoff
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.base import Task


ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes" / "tiny"


def steps_done(run: Path) -> int:
    """Population steps that a run has finished and saved; 0 before that."""
    path = run / "trainer_state.json"  # written at the very end
    return json.loads(path.read_text())["global_step"] if path.exists() else 0


def train(name: str, seed: int, steps: int, run: Path) -> None:
    """Trains one run to its end in a process of its own, from its newest checkpoint if there is one."""
    command = [sys.executable, str(ROOT / "recipes" / "train_populora.py")]
    command += ["--config", str(RECIPES / f"config_{name}.yaml"), "--seed", str(seed), "--max_steps", str(steps)]
    command += ["--output_dir", str(run), "--resume", "true", "--disable_tqdm", "true"]
    command += ["--save_strategy", "steps", "--save_steps", "25", "--save_total_limit", "1"]
    run.mkdir(parents=True, exist_ok=True)
    with (run / "log.txt").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def held_out_tasks(count: int = 96) -> list[Task]:
    """
    Tasks of all kinds and of the levels that the base knows, from programs that neither it nor any run was shown.
    """
    writer, archive = DialogueWriter(random.Random("arms race"), held_out=True), TaskArchive()
    kinds = ("code_o", "code_i", "code_f")
    while len(archive) < count:
        level = TRAINED_LEVELS[len(archive) // len(kinds) % len(TRAINED_LEVELS)]
        archive.add(random_task(kinds[len(archive) % len(kinds)], level, writer))
    return list(archive)


def play(runs: list[Path], seed: int = 0) -> tuple[Payoff, float]:
    """Cross-play of the members of all runs, and the base's score on the held-out tasks."""
    tasks = held_out_tasks()
    with assemble([str(run) for run in runs], seed=seed) as contest:
        payoff = contest.play(proposals=9, attempts=3, seed=seed)
        payoff.given = contest.score(contest.students, tasks, attempts=3)
        base = contest.score([BASE_NAME], tasks, attempts=3)[BASE_NAME]
    return payoff.renamed(contest.names), base


def compare(output: Path, configs: list[str], seeds: list[int], steps: int) -> Path:
    """
    Writes the comparison page of the first `steps` of all runs; those that were saved there also play each other.
    """
    paths = {name: {seed: output / name / f"seed_{seed}" for seed in seeds} for name in configs}
    begun = {
        name: {seed: pages.load(run)[:steps] for seed, run in of.items() if (run / "metrics.jsonl").exists()}
        for name, of in paths.items()
    }
    begun = {name: of for name, of in begun.items() if of}
    tables = [("First and last fifth of the steps, mean ± std over seeds", pages.table(begun))]
    pages.draw_curves(begun, output / "curves.png")
    pictures = [output / "curves.png"]
    saved = [run for of in paths.values() for run in of.values() if steps_done(run) == steps]
    if len(saved) > 1:
        payoff, base = play(saved)
        (output / "members.json").write_text(json.dumps(asdict(payoff) | {"base": base}) + "\n")
        payoff = pages.by_run(payoff)
        write_payoff(payoff, output)
        tables.append(("Cross-play: share of attempts solved", pages.crossplay_table(payoff, base)))
        pictures.append(output / "crossplay.png")
    return pages.write_page(output, tables, pictures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=["single_agent", "4t4s"], help="config_<name>.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("runs/arms_race"))
    parser.add_argument("--compare_only", action="store_true", help="train nothing")
    options = parser.parse_args()
    for seed in [] if options.compare_only else options.seeds:
        for name in options.configs:
            run = options.output / name / f"seed_{seed}"
            if steps_done(run) < options.steps:
                train(name, seed, options.steps, run)
            print(f"{run}: {steps_done(run)} steps", flush=True)
    print(f"Comparison written to {compare(options.output, options.configs, options.seeds, options.steps)}.")


if __name__ == "__main__":
    main()
