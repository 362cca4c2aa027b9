"""The arms race: the same game played by populations and by a single agent, over several seeds, on one page.

    python recipes/arms_race.py                              # 4T+4S against the single agent, 3 seeds, 150 steps
    python recipes/arms_race.py --configs 1t1s no_evolution uniform --seeds 0 --steps 75

Each name is a recipe `recipes/tiny/config_<name>.yaml`; its runs lie in `<output>/<name>/seed_<n>`, are saved every 25
steps, and are continued where they stopped when the command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=["single_agent", "4t4s"], help="config_<name>.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("runs/arms_race"))
    options = parser.parse_args()
    for seed in options.seeds:
        for name in options.configs:
            run = options.output / name / f"seed_{seed}"
            if steps_done(run) < options.steps:
                train(name, seed, options.steps, run)
            print(f"{run}: {steps_done(run)} steps", flush=True)


if __name__ == "__main__":
    main()
