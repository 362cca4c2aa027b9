"""
Asks whether what students learn can be read from log-probabilities, without sampling: the first screen of a fitness
for teachers.

    python studies/screen.py --candidates separate --seeds 0 --steps 75 --save_steps 5 --save_total_limit 100
    python studies/likelihood.py runs/screen/separate/seed_0

*Targets* are code_o tasks of held-out programs, each with a worked answer that the referee calls right. Of each
student in each checkpoint the script measures the mean log-probability of that answer's block, given prompt and worked
lines, and of the whole answer; every 25 steps also the share of right answers to as many other tasks, sampled. It
prints how the gains in the three go together over students and intervals, and how far two halves of the targets agree
on a student's gain between those steps and between all. A teacher's gain is the weighted mean of its students' gains;
a student's weight is the part of its attempts at new tasks that were at this teacher's. Figures are kept in the run's
`likelihood.json`, checkpoint by checkpoint; started again, the script goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from pathlib import Path
from statistics import correlation, fmean, variance
from typing import Any

import beside_recipes  # noqa: F401
import tiny_traces
import torch
from merging import Student, read_students
from score_held_out import markdown
from screen import HALF_KNOWN, KIND, draw_held_out
from tiny_documents import DialogueWriter, as_task, fence
from tiny_programs import OPERATIONS
from tiny_scores import EVAL_LEVELS, Scorer
from tqdm import tqdm

from trl_populora.lora.layers import BASE_NAME
from trl_populora.report.load import load_run
from trl_populora.sandbox import Sandbox, values
from trl_populora.tasks import Task


TARGETS, EVERY = 300, 25  # targets; steps from one sampled rate to the next
BATCH = 50  # answers of one forward


Taught = dict[str, dict[str, dict[str, int]]]  # attempts by step, teacher and student


@dataclass(frozen=True)
class Target:
    """A task with the worked lines and the block of a right answer."""

    task: Task
    thinking: str
    block: str


def write_targets(count: int) -> list[Target]:
    """Targets of levels 2 to 5 in turn, all of different tasks."""
    writer = DialogueWriter(random.Random("targets"), held_out=True, operations=OPERATIONS)
    found: dict[str, Target] = {}
    while len(found) < count:
        example = writer.varied_example(EVAL_LEVELS[len(found) % len(EVAL_LEVELS)])
        task = as_task(KIND, example, writer.rng)
        given = example.inputs[[values.encode(each) for each in example.inputs].index(task.inputs[0])]
        thinking = tiny_traces.forwards(example.program, example.program, given)
        found.setdefault(task.task_id, Target(task, thinking, fence("output", repr(values.decode(task.outputs[0])))))
    return [*found.values()]


@torch.no_grad()
def likelihood(scorer: Scorer, targets: Sequence[Target]) -> list[list[float]]:
    """Log-probability of each target's block, given what stands before it, and of its whole answer, `[targets, 2]`."""
    kind, tokenizer = scorer.kinds[KIND], scorer.tokenizer
    rows, starts = [], []
    for target in targets:
        prompt = kind.solving_prompt(target.task, "compact")
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        read = tokenizer(before + target.thinking + target.block, return_offsets_mapping=True)
        places = [start for start, _ in read["offset_mapping"]]
        rows.append(torch.tensor(read["input_ids"]))
        worked = len(before) + len(target.thinking)
        starts.append([sum(place < edge for place in places) for edge in (worked, len(before))])
    found = torch.zeros(len(rows), 2)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        ids = torch.nn.utils.rnn.pad_sequence([rows[index] for index in chosen], batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(rows[index]) for index in chosen], batch_first=True)
        logits = scorer.model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        of_token = logits.gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
        for row, index in zip(of_token, chosen, strict=True):
            found[index] = torch.stack([row[start - 1 :].sum() for start in starts[index]])
    return found.tolist()


def measure(
    scorer: Scorer, student: Student | None, targets: Sequence[Target], tasks: Sequence[Task], attempts: int
) -> dict[str, Any]:
    """Log-probabilities of all targets, and the sampled rate if there are tasks; of the base without a student."""
    base = {name: weight.clone() for name, weight in scorer.model.state_dict().items()}
    with torch.no_grad():
        for module in student.modules if student else ():
            scorer.model.get_submodule(module.removeprefix("base_model.model.")).weight += student.added(module)
    found: dict[str, Any] = {"targets": [[round(each, 4) for each in row] for row in likelihood(scorer, targets)]}
    if tasks:
        torch.manual_seed(0)
        kind = scorer.kinds[KIND]
        found["rate"] = float(scorer.grade(kind, tasks, scorer.attempts(kind, tasks, attempts), attempts).mean())
    scorer.model.load_state_dict(base)
    return found


def count_taught(run: Path) -> Taught:
    """Counts attempts since the checkpoint before. Attempts at archived tasks are nobody's."""
    rows = load_run(run).rows
    teachers = {(row["step"], row["match"]): row["member"] for row in rows if row["role"] == "teacher"}
    taught: Taught = {}
    for before, step in pairwise([0, *checkpoints(run)]):
        counts = taught[str(step)] = {name: {} for name in sorted({*teachers.values()})}
        for row in rows:
            if row["role"] == "student" and not row["archived"] and before < row["step"] <= step:
                own = counts[teachers[row["step"], row["match"]]]
                own[row["member"]] = own.get(row["member"], 0) + 1
    return taught


def checkpoints(run: Path) -> list[int]:
    """Steps of a run's checkpoints."""
    return sorted(int(each.name.removeprefix("checkpoint-")) for each in run.glob("checkpoint-*"))


def score(run: Path, attempts: int) -> dict[str, dict[str, Any]]:
    """Figures by step and student; step 0 is the base."""
    path = run / "likelihood.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    targets, tasks = write_targets(TARGETS), draw_held_out("likelihood", TARGETS)
    with Sandbox() as sandbox:
        scorer = Scorer(HALF_KNOWN, sandbox)
        for step in tqdm([0, *checkpoints(run)], desc=str(run)):
            if str(step) not in found:
                asked = [] if step % EVERY else tasks
                students = read_students(run / f"checkpoint-{step}") if step else {BASE_NAME: None}
                found[str(step)] = {
                    name: measure(scorer, student, targets, asked, attempts) for name, student in students.items()
                }
                path.write_text(json.dumps(found) + "\n")
    return found


Gains = list[list[tuple[float, ...]]]  # a list per interval, with two gains of each member


def compare(found: Mapping[str, Mapping[str, Any]], taught: Taught | None = None) -> list[list[str]]:
    """
    Correlations of gains: in log-probability and in the sampled rate, between the steps whose rate is known; and in
    log-probability on two halves of the targets, between these steps and between all. The last one is also told of
    teachers, if `taught` says whom they taught and there are two or more. Each is over members and intervals, and
    again less the interval's mean, as a choice among members at one time sees them.

    Raises:
        `ValueError`: If the rate is known of fewer than two steps.
    """
    steps, names, sampled = sorted(found, key=int), list(found[max(found, key=int)]), sampled_steps(found)
    if len(sampled) < 2:
        raise ValueError(
            f"The sampled rate is known of the steps {sampled} alone; two are needed. Train with `--save_steps 5 "
            f"--save_total_limit 100`, so that a checkpoint stays every {EVERY} steps."
        )

    def mean(step: str, name: str, column: int, half: slice) -> float:
        of = found[step].get(name) or found[step][BASE_NAME]
        return of["rate"] if column < 0 else fmean(row[column] for row in of["targets"][half])

    def gains(steps: Sequence[str], *kinds: tuple[int, slice]) -> Gains:
        return [
            [tuple(mean(after, name, *kind) - mean(before, name, *kind) for kind in kinds) for name in names]
            for before, after in pairwise(steps)
        ]

    def of_teachers(*kinds: tuple[int, slice]) -> Gains:
        teachers = []
        for step, own in zip(steps[1:], gains(steps, *kinds), strict=True):
            asked = {name: sum(of.get(name, 0) for of in taught[step].values()) for name in names}
            weights = [[of.get(name, 0) / max(1, asked[name]) for name in names] for of in taught[step].values()]
            teachers.append([weigh(own, row) for row in weights if any(row)])
        return teachers

    rivals = taught and len(next(iter(taught.values()))) > 1
    whole, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    rows = [["gain in the log-probability of", "with", "points", "correlation", "less the interval's mean"]]
    for column, told in enumerate(("the block", "the whole answer")):
        for other, points in {
            "the gain in the sampled rate": gains(sampled, (column, whole), (-1, whole)),
            "itself, on the other half of the targets": gains(sampled, (column, even), (column, odd)),
            "likewise, between all checkpoints": gains(steps, (column, even), (column, odd)),
            **({"likewise, of teachers": of_teachers((column, even), (column, odd))} if rivals else {}),
        }.items():
            rows.append([told, other, str(sum(map(len, points))), *(f"{each:.2f}" for each in correlate(points))])
    return rows


def sampled_steps(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [step for step in sorted(found, key=int) if "rate" in next(iter(found[step].values()))]


def measure_spread(found: Mapping[str, Mapping[str, Any]], attempts: int) -> tuple[float, float]:
    """
    Standard deviation of the gains in the sampled rate among the students of one interval, pooled over intervals; and
    the one that sampling would give at most if all students of an interval gained alike: `attempts` at each task, and
    no task easier than another.
    """
    seen, drawn = [], []
    for steps in pairwise(sampled_steps(found)):
        before, after = ([each["rate"] for each in found[step].values()] for step in steps)
        # The base of step 0 is measured once, so that its error is in all gains alike.
        noisy = [after] if len(before) < len(after) else [before, after]
        apart = before * len(after) if len(before) < len(after) else before
        seen.append(variance([late - early for early, late in zip(apart, after, strict=True)]))
        drawn.append(sum(fmean(rate * (1 - rate) for rate in rates) for rates in noisy) / (TARGETS * attempts))
    return math.sqrt(fmean(seen)), math.sqrt(fmean(drawn))


def weigh(gains: Sequence[tuple[float, ...]], weights: Sequence[float]) -> tuple[float, ...]:
    """Weighted means of gains."""
    return tuple(sum(map(mul, each, weights)) / sum(weights) for each in zip(*gains, strict=True))


def correlate(gains: Gains) -> tuple[float, float]:
    """Correlation of the two gains over all intervals, and of what they are more than their interval's means."""
    centred = []
    for own in gains:
        middle = [fmean(each) for each in zip(*own, strict=True)]
        centred += [tuple(value - mean for value, mean in zip(pair, middle, strict=True)) for pair in own]
    together = [pair for own in gains for pair in own]
    over_all, within = (correlation(*map(list, zip(*pairs, strict=True))) for pairs in (together, centred))
    return over_all, within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a finished run with its checkpoints")
    parser.add_argument("--attempts", type=int, default=16, help="at each task, for the sampled rate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = score(options.run, options.attempts)
    print(markdown(compare(found, count_taught(options.run))))
    seen, drawn = measure_spread(found, options.attempts)
    print(f"Within an interval students' sampled gains differ by {seen:.4f}; sampling alone gives up to {drawn:.4f}.")


if __name__ == "__main__":
    main()
