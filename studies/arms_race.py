"""
The arms race: what population, matching and evolution each buy, over seeds and against controls, on one page.

    python studies/arms_race.py                                   # 4T+4S against the single agent, 5 seeds, 150 steps
    python studies/arms_race.py --variants 4t4s uniform no_evolution --against 4t4s --seeds 0 1 2 --steps 75
    python studies/arms_race.py --variants 4t4s --seeds 3 &       # several commands can share the work

A variant is `recipes/tiny/config_4t4s.yaml` with the pay and rates of `PAPERS` (`tiny_headroom.py`) and the settings
that `VARIANTS` lists; the others are compared with `single_agent`, or with what `--against` names. Runs lie in
`<output>/<variant>/seed_<n>`, use one thread, are saved every 25 steps, and go on where they stopped when the command
is given again. Then the students of all finished runs solve tasks of levels that nobody was trained on, members of all
runs play each other, and `<output>/comparison.html` compares everything; `--compare_only` does just this, for the
first `--steps` of runs that may have gone on. The figures of all runs are kept in `<output>/arms_race.json`; with that
file in a new `<output>`, its runs are compared with those made there.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

import arms_race_page as pages
import arms_race_runs as runs
import beside_recipes  # noqa: F401
import torch
from rejection import fine_tune
from tiny_documents import DialogueWriter, random_task
from tiny_headroom import pay_by_coin, train
from tqdm import tqdm

from trl_populora.evaluate.cross_play import assemble, write_payoff
from trl_populora.lora.layers import BASE_NAME
from trl_populora.report.load import load_evaluations
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.kind import Task


CONFIG = Path(__file__).resolve().parents[1] / "recipes" / "tiny" / "config_4t4s.yaml"
RATE = "2.0e-3"  # of CONFIG
REFERENCE = pages.AGENT
COIN = "coin"
REJECTION = "rejection"  # the base's samples; `rejection.py` makes an adapter of those that were right
UNEVALUATED = {"eval_strategy": "no", "eval_on_start": "false"}
VARIANTS: dict[str, dict[str, str]] = {
    REFERENCE: {"single_agent": "true", "evolve_every": "0"},  # with the rows of one pair: as many per adapter
    "4t4s": {},
    "single_agent_all_rows": {"single_agent": "true", "evolve_every": "0", "proposals_per_teacher": "32"},
    "1t1s": {"teachers": "1", "students": "1", "evolve_every": "0"},  # nobody to breed from
    "no_evolution": {"evolve_every": "0"},
    "uniform": {"matchmaking": "uniform"},
    "base_teachers": {"teacher_learning_rate": "0"},
    # As many rows as `4t4s`. The recipe's baseline is for teachers.
    "seed_tasks": {"teachers": "0", "proposals_per_teacher": "9", "teacher_baseline": "member"},
    "base_students": {"learning_rate": "0", "teacher_learning_rate": RATE},
    COIN: {},  # students are paid by a coin
    REJECTION: {"single_agent": "true", "learning_rate": "0", "evolve_every": "0", **UNEVALUATED},
}
KINDS = ("code_o", "code_i", "code_f")
UNTRAINED_LEVELS = (5, 6)  # six and eight operations


def options_of(variant: str, steps: int) -> list[str]:
    """The command-line options that make a variant of `CONFIG`."""
    given = VARIANTS[variant] | {"max_steps": str(steps), "save_steps": "25"}
    return [word for name, value in given.items() for word in (f"--{name}", *value.split())]


def steps_done(run: Path) -> int:
    """Population steps that a run has finished and saved; 0 before that."""
    path = run / "trainer_state.json"  # written at the very end
    return json.loads(path.read_text())["global_step"] if path.exists() else 0


def train_variant(run: Path, variant: str, seed: int, steps: int, settings: list[str]) -> None:
    """Trains one run to its end, from where it stopped if it has begun; a finished one stays as it is."""
    options = [*options_of(variant, steps), *settings]
    if steps_done(run) < steps:
        train(run, seed, options, CONFIG, pay_by_coin if variant == COIN else None)
    if variant == REJECTION and not load_evaluations(run):
        fine_tune(run, seed, options, CONFIG)


def untrained_tasks(count: int = 96) -> list[Task]:
    """Tasks of all kinds and of levels that neither the base nor any run was trained on."""
    writer, archive = DialogueWriter(random.Random("arms race"), held_out=True), TaskArchive()
    while len(archive) < count:
        level = UNTRAINED_LEVELS[len(archive) // len(KINDS) % len(UNTRAINED_LEVELS)]
        archive.add(random_task(KINDS[len(archive) % len(KINDS)], level, writer))
    return list(archive)


def transfer(run: Path) -> dict[str, float]:
    """Solve rates of a finished run's students, and of the base, on the untrained levels; measured once."""
    path = run / "untrained.json"
    if not path.exists():
        with assemble([str(run)], task_kinds=KINDS, seed=0) as contest:
            rates = contest.score([BASE_NAME, *contest.students], untrained_tasks(), attempts=3)
        path.write_text(json.dumps(rates, indent=1) + "\n")
    return json.loads(path.read_text())


def play(paths: list[Path], output: Path) -> list[list[str]]:
    """Cross-play of the members of all runs, as a picture, a file and a table."""
    with assemble([str(path) for path in paths], task_kinds=KINDS, seed=0) as contest:
        payoff = contest.play(proposals=9, attempts=3, seed=0).rename(contest.names)
    (output / "members.json").write_text(json.dumps(asdict(payoff)) + "\n")
    payoff = pages.by_run(payoff)
    write_payoff(payoff, output)
    return pages.crossplay_table(payoff)


def gather(output: Path, variants: list[str], seeds: list[int]) -> dict[str, dict[int, runs.Run]]:
    """
    The runs of a comparison: those that lie in `output`, and those of which `arms_race.json` there kept the figures.
    The file is brought up to date.
    """
    kept = runs.load(output / runs.RESULTS)
    for name in variants:
        for seed in seeds:
            if (output / name / f"seed_{seed}" / "metrics.jsonl").exists():
                kept.setdefault(name, {})[seed] = runs.measure(output / name / f"seed_{seed}")
    kept = {name: dict(sorted(kept[name].items())) for name in VARIANTS if name in kept}
    runs.save(kept, output / runs.RESULTS)
    asked = {name: {seed: run for seed, run in of.items() if seed in seeds} for name, of in kept.items()}
    return {name: asked[name] for name in variants if asked.get(name)}


def compare(output: Path, variants: list[str], seeds: list[int], steps: int, against: str = REFERENCE) -> Path:
    """
    Writes the comparison page of the first `steps` of all runs, seed by seed with those of the variant `against`;
    those that ended there also transfer and play.
    """
    paths = [output / name / f"seed_{seed}" for name in variants for seed in seeds]
    ended = [path for path in paths if steps_done(path) == steps]
    for path in tqdm(ended, desc="levels never trained", unit="run"):
        transfer(path)
    begun = {
        name: {seed: run.first(steps) for seed, run in of.items()}
        for name, of in gather(output, variants, seeds).items()
    }
    tables = [
        ("The paper's claims", pages.claims_table(begun)),
        ("Held-out tasks, mean ± std over seeds", pages.held_out_table(begun)),
        ("First and last fifth of the steps, mean ± std over seeds", pages.table(begun)),
    ]
    if against in begun and len(begun) > 1:
        tables.insert(1, (f"Against {against}, paired by seed", pages.paired_table(begun, against)))
    pages.draw_held_out(begun, output / "held_out.png")
    pages.draw_curves(begun, output / "curves.png")
    pictures = [output / "held_out.png", output / "curves.png"]
    if len({path.parent for path in ended}) > 1:
        tables.append(("Cross-play: share of attempts solved", play(ended, output)))
        pictures.append(output / "crossplay.png")
    return pages.write_page(output, tables, pictures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=[REFERENCE, "4t4s"], choices=[*VARIANTS], metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--against", default=REFERENCE, choices=VARIANTS, help="what the others are compared with")
    parser.add_argument("--output", type=Path, default=Path("runs/arms_race"))
    parser.add_argument("--compare_only", action="store_true", help="train nothing")
    options, settings = parser.parse_known_args()
    torch.set_num_threads(1)  # two threads beside any other process are slower than one
    for seed in [] if options.compare_only else options.seeds:
        for name in options.variants:
            run = options.output / name / f"seed_{seed}"
            train_variant(run, name, seed, options.steps, settings)
            print(f"{run}: {steps_done(run)} steps", flush=True)
    page = compare(options.output, options.variants, options.seeds, options.steps, options.against)
    print(f"Comparison written to {page}.")


if __name__ == "__main__":
    main()
