"""Trains a population: `accelerate launch recipes/train_populora.py --config recipes/tiny/quickstart.yaml`.

Every key of the YAML can be overridden on the command line (`--max_steps 60`); `--help` lists them in the order
population, tasks, matchmaking, rewards, sandbox, evolution. `--resume` continues from the newest whole checkpoint.
The code is `run_training` in `trl_populora/cli.py`, some thirty lines; `populora train` is the same in one
process. The run directory holds, at the end:

    members/<name>/          one ordinary PEFT adapter directory per member; the best student's lies at the root, too
    population.json          ratings, ages and parents of the members
    lineage.jsonl            every replacement
    archive.parquet          every task that was verified and kept
    rollouts/step_*.parquet  every proposal, verdict, attempt and reward
    metrics.jsonl            one line per step; times.jsonl: the seconds of its phases
    run.png                  ratings, solve rates and rewards over the steps

What it leaves out: evaluation on benchmarks, pushing to the Hub (`populora push`), the long report (`populora
report`).
"""

import sys

from trl_populora.cli import main


if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
