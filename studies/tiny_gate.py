"""
Judges a base of half-known operations: does it take them for what it should, and can asking it twice tell the truth?

    python studies/tiny_gate.py --model runs/tiny_base/model

writes `gate.json` and a model card beside the model, and prints its tables; `--card` makes the card of an earlier
`gate.json`. Every half-known operation has *probes*: one-line programs
with inputs and outputs on which its mistake shows. Probes and held-out tasks are answered 32 times at temperature 1
and once greedily; a majority is the most frequent of the 32 answers. Where greedy answers or majorities are righter
than samples, a gain of reinforcement learning may be merely elicited. Leaves out: self-play, which `tiny_headroom.py`
runs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from statistics import fmean

import beside_recipes  # noqa: F401
import numpy as np
import torch
from tiny_card import WORKED_KINDS, table
from tiny_documents import DialogueWriter, Example, as_task, random_task
from tiny_programs import HALF_KNOWN_OPERATIONS, OPERATIONS, Operation, Program, ProgramWriter, is_small, run
from tiny_scores import EVAL_LEVELS, Scorer
from tiny_traces import OPEN
from tqdm import tqdm

from trl_populora.sandbox import Sandbox
from trl_populora.tasks.kind import Task, TaskKind


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [trl-populora, self-play, code, from-scratch]
---

# A base that half-knows

The embedded base (`trl_populora/assets/tiny`), trained further on 64 operations instead of 32. The new ones it *half-knows*: each has one
natural mistake (`xs[:-1]` taken for `xs[1:]`, `find` counted from 1, `sorted(reverse=True)` for reversal), and the answers that it
was trained on make it in more than half of the cases. So in code_o neither a greedy answer nor a majority says which reading is right: what
students gain there is learned from the verifier, while on the embedded base everything that they gain is elicited. Four are hard to compute for a model of
this size (`^`, `&`, `%`, `//`): a lure that a good teacher resists.

`python studies/screen.py` and `--model_name_or_path studies/tiny/half_known` in every recipe of `recipes/tiny` train on it.

{made}

## The gate

*Probes* are one-line programs with inputs on which the mistake shows; held-out tasks have levels 2 to 5. All are answered 32 times at
temperature 1 and once greedily, held-out ones also made to work them out first. *Trained*: how often the answers that it was trained on were right.

{tables}
"""
ATTEMPTS = 32
INPUTS_TRIED = 300
PROGRAMS_TRIED = 40
WAYS = ("sampled", "greedy", "majority")
LEAST_VALID, RIGHT_BETWEEN, MOST_ELICITED = 0.95, (0.05, 0.6), 0.05


def one_line_programs(rng: random.Random, count: int) -> dict[Operation, list[Program]]:
    """`count` one-line programs for each half-known operation."""
    writer = ProgramWriter(rng)
    found: dict[Operation, list[Program]] = {operation: [] for operation in HALF_KNOWN_OPERATIONS}
    while any(len(programs) < count for programs in found.values()):
        program = writer.program(1)
        own = found.get(program.steps[0].operation)
        if own is not None and len(own) < count:
            own.append(program)
    return found


def probe(kind: str, program: Program, rng: random.Random) -> Task | None:
    """
    A task about a one-line program on which the mistake shows, if chance finds one: for code_o an input that the
    mistake takes elsewhere; for code_i an output to which it leads from a wrong input; for code_f six pairs of which
    at least one hidden one differs.
    """
    writer = ProgramWriter(rng)
    drawn = [tuple(map(writer.argument, program.parameters)) for _ in range(INPUTS_TRIED)]
    inputs = list({repr(given): given for given in drawn}.values())
    (step,) = program.steps
    truth, mistaken = (run(Program(program.parameters, (each,)).text, inputs) for each in (step, step.mistaken))
    small = [number for number, output in enumerate(truth) if is_small(output)]
    shown = [number for number in small if truth[number] != mistaken[number]]
    if kind == "code_i":
        led_to = {repr(mistaken[number]) for number in shown}
        shown = [number for number in small if repr(truth[number]) in led_to]
    wanted, others = (4, 2) if kind == "code_f" else (1, 0)
    if len(shown) < wanted or len(small) < wanted + others:
        return None
    chosen = rng.sample(shown, wanted)
    chosen += rng.sample(sorted(set(small) - set(chosen)), others)
    example = Example(program, tuple(inputs[number] for number in chosen), tuple(truth[number] for number in chosen))
    return as_task(kind, example, rng)


def probes(
    kind: str, programs: dict[Operation, list[Program]], count: int, rng: random.Random
) -> dict[str, list[Task]]:
    """Up to `count` for each half-known operation; none where an output gives the mistake away."""
    found = {}
    for operation, own in programs.items():
        tasks = (probe(kind, program, rng) for program in own)
        found[name_of(operation)] = [task for task in tasks if task is not None][:count]
    return found


def name_of(operation: Operation) -> str:
    return f"{operation.source}: {operation.text}"


def answer(scorer: Scorer, kind: TaskKind, tasks: list[Task], opening: str = "") -> dict[str, np.ndarray]:
    """How often each task is answered rightly, `[tasks]`, in each of the `WAYS`."""
    texts = scorer.attempts(kind, tasks, ATTEMPTS, opening)
    right = scorer.grade(kind, tasks, texts, ATTEMPTS)
    scorer.sampling.do_sample = False
    greedy = scorer.grade(kind, tasks, scorer.attempts(kind, tasks, 1, opening), 1)[:, 0]
    scorer.sampling.do_sample = True
    majority = []
    for number, task in enumerate(tasks):
        answers = [
            kind.parse_attempt(text, task).answer for text in texts[number * ATTEMPTS : (number + 1) * ATTEMPTS]
        ]
        ((most, _),) = Counter(answers).most_common(1)
        majority.append(right[number, answers.index(most)])
    return {"sampled": right.mean(axis=1), "greedy": greedy, "majority": np.array(majority)}


def measure(directory: Path, tasks: int, count: int, seed: int) -> dict:
    """All figures a kind: over `count` probes of each half-known operation, `tasks` held-out tasks and proposals."""
    found: dict = {"probes": {}, "held out": {}, "held out, worked": {}, "valid": {}}
    programs = one_line_programs(random.Random(f"{seed}:probes"), PROGRAMS_TRIED)
    torch.manual_seed(seed)
    with Sandbox() as sandbox:
        scorer = Scorer(directory, sandbox)
        for name, kind in tqdm(scorer.kinds.items(), desc="judging"):
            rng = random.Random(f"{seed}:{name}")
            asked = probes(name, programs, count, rng)
            rates = answer(scorer, kind, [task for own in asked.values() for task in own])
            ends = np.cumsum([len(own) for own in asked.values()])[:-1]
            parts = zip(*(np.split(rates[way], ends) for way in WAYS), strict=True)
            found["probes"][name] = {
                operation: dict(zip(WAYS, (float(part.mean()) for part in own), strict=True))
                for operation, own in zip(asked, parts, strict=True)
                if len(own[0])
            }
            writer = DialogueWriter(rng, held_out=True, operations=OPERATIONS)
            unseen = [random_task(name, EVAL_LEVELS[n % len(EVAL_LEVELS)], writer) for n in range(tasks)]
            ways = {"held out": ""} | ({"held out, worked": f"{OPEN}\n"} if name in WORKED_KINDS else {})
            for section, opening in ways.items():
                rates = answer(scorer, kind, unseen, opening)
                found[section][name] = {way: float(rates[way].mean()) for way in WAYS}
            found["valid"][name] = fmean(isinstance(task, Task) for task in scorer.propose(kind, tasks, writer))
    return found


def lines_of(found: dict) -> list[tuple[str, str, float, bool]]:
    """The lines of the gate as (what, wanted, measured, met)."""
    least, most = RIGHT_BETWEEN
    lines = [
        (f"valid proposals, {kind}", f">= {LEAST_VALID}", v, v >= LEAST_VALID) for kind, v in found["valid"].items()
    ]
    for operation in map(name_of, HALF_KNOWN_OPERATIONS):
        right = fmean(own[operation]["sampled"] for own in found["probes"].values() if operation in own)
        lines.append((f"`{operation}` right", f"{least} to {most}", right, least <= right <= most))
    all_probes = [rates for own in found["probes"].values() for rates in own.values()]
    sections = {
        "probes": all_probes,
        **{name: list(found[name].values()) for name in ("held out", "held out, worked")},
    }
    for section, rates in sections.items():
        sampled = fmean(each["sampled"] for each in rates)
        for way in WAYS[1:]:
            gain = fmean(each[way] for each in rates) - sampled
            lines.append((f"{section}: {way} above sampled", f"<= {MOST_ELICITED}", gain, gain <= MOST_ELICITED))
    return lines


def show(found: dict) -> str:
    """The tables: operations by kind, held-out tasks, and the gate."""
    kinds = list(found["probes"])
    header = ("half-known operation", "hard", "trained", *(f"{kind} {way}" for kind in kinds for way in WAYS))
    rows = [
        (
            f"`{name_of(operation)}`",
            "yes" if operation.is_hard else "",
            operation.certainty,
            *(found["probes"][kind].get(name_of(operation), {}).get(way, "-") for kind in kinds for way in WAYS),
        )
        for operation in HALF_KNOWN_OPERATIONS
    ]
    means = [fmean(own[way] for own in found["probes"][kind].values()) for kind in kinds for way in WAYS]
    rows.append(("all", "", fmean(operation.certainty for operation in HALF_KNOWN_OPERATIONS), *means))
    unseen = [
        (section, kind, *(rates[way] for way in WAYS))
        for section in ("held out", "held out, worked")
        for kind, rates in found[section].items()
    ]
    gate = [(*line[:3], "yes" if line[3] else "**no**") for line in lines_of(found)]
    return "\n\n".join(
        (
            table(header, rows),
            table(("tasks", "kind", *WAYS), unseen),
            table(("what", "wanted", "measured", "met"), gate),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--tasks", type=int, default=80, help="held-out tasks, and proposals, a kind")
    parser.add_argument("--probes", type=int, default=5, help="for each half-known operation and kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--card", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # at these sizes a second thread costs more than it brings
    gate = arguments.model / "gate.json"
    if not arguments.card:
        found = measure(arguments.model, arguments.tasks, arguments.probes, arguments.seed)
        gate.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    tables = show(json.loads(gate.read_text()))
    made = json.loads((arguments.model / "training.json").read_text())["made"]
    (arguments.model / "README.md").write_text(CARD.format(made=made, tables=tables))
    print(tables)


if __name__ == "__main__":
    main()
