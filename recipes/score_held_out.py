"""
Scores the students of finished runs, their base and the adapter that they started from on held-out tasks.

    python recipes/score_held_out.py runs/smollm2-2t2s runs/smollm2-2t2s-1 \
        --tasks held_out.jsonl --start runs/smollm2-cold

Every contender attempts every task `--attempts` times, sampled as its run samples; base and start as the first run.
What a contender got right lies in `<output>/<contender>.json` as soon as it is known, and the same weights are not
asked the same again. The table, also in `<output>/table.md`:

    right      share of the attempts that are right, and half of its 95 % interval over tasks; then the same by kind
    over it    what that is above the adapter that the students started from (without `--start` above the base), paired
               by task: mean and 95 % interval
    uncopied   the same over the tasks that giving back the given block does not solve
    over runs  of several runs: mean and 95 % interval of what their means are above it
    any, all   share of the tasks that one attempt or every attempt got right; the others are mixed
    majority   share of the tasks that the most frequent answer gets right; a tie counts in parts
    readable   share of the attempts that hold an answer; the others are cut off, or break the format
    worked     share of the attempts that work the task out before they answer

Kinds of your own are code, which a run's files may not choose: name them, `--task_kinds my_kinds:Factors`.

`copying` is what giving back the given block reaches: a student that is no better may have learned just that, and one
whose gain is gone in `uncopied` has. In the compact style there are neither. A run of several students has a row for
their mean, and several runs have one for all. The intervals are over tasks; whether self-play helps is told by several
seeds: `over runs`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from trl_populora.evaluate.cross_play import Contest, assemble
from trl_populora.evaluate.intervals import measure_mean
from trl_populora.files import write_json
from trl_populora.hub.warm_start import write_adapter
from trl_populora.lora.layers import BASE_NAME
from trl_populora.lora.members import read_member, write_member
from trl_populora.run.read import read_chat_template, read_population
from trl_populora.run.saved_population import SAMPLING, Shape, check_one_moment, check_plays, read_sampling
from trl_populora.tasks import Task, choose_kinds, resolve_kind
from trl_populora.tasks.archive import read_task
from trl_populora.tasks.dataset import read_tasks
from trl_populora.tasks.python.reading import has_thinking


START, COPYING, OVER_RUNS = "start", "copying", "over runs"
SIGNED = ("over it", "uncopied", OVER_RUNS)
ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"
AS_TRAINED = {"model_init_kwargs": {"dtype": "bfloat16"}, "bf16": True}
# Settings of a run that decide what a contender is asked and how it answers.
ASKED_AS = ("max_completion_length", "shots", "reading", "prompt_texts", *SAMPLING)
Try = tuple[bool, str, bool]  # right, the answer (empty if unreadable), worked


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def try_tasks(
    contest: Contest, member: str, name: str, tasks: Sequence[Task], options: argparse.Namespace
) -> list[list[Try]]:
    """A contender's attempts at each task; every contender has the same random numbers."""
    torch.manual_seed(0)
    prompts = {task: contest.referee.solving_prompt(task) for task in tasks}
    order = sorted(range(len(tasks)), key=lambda index: len(prompts[tasks[index]][-1]["content"]))
    rows = [index for index in order for _ in range(options.attempts)]
    found: list[list[Try]] = [[] for _ in tasks]
    for first in tqdm(range(0, len(rows), options.batch), desc=name, unit="batch"):
        places = rows[first : first + options.batch]
        part = [tasks[index] for index in places]
        texts = [each.text for each in contest.player.generate([prompts[task] for task in part], [member] * len(part))]
        grades = contest.referee.grade(part, texts)
        for index, text, grade in zip(places, texts, grades, strict=True):
            found[index].append((grade.right, grade.attempt.answer, has_thinking(text)))
    return found


def find_contenders(options: argparse.Namespace, tasks: Sequence[Task]) -> dict[str, dict[str, str]]:
    """
    The name of each contender, and what decides its answers: where it comes from (a directory, or `base`), the
    adapter's weights, the base, and how it is asked.

    Raises:
        ValueError: If a run cannot be read, was not saved to its end, was trained on prompts or does not play a task's
            kind, if two runs have one name or other bases, if there is no adapter in `--start`.
    """
    for file in ADAPTER_FILES if options.start else ():
        if not (options.start / file).is_file():
            raise ValueError(f"{options.start} holds no {file}; `--start` is the directory given as `warm_start`.")
    found: dict[str, dict[str, str]] = {}
    for run in map(Path, options.runs):
        saved = read_population(run)
        check_one_moment(run, saved)
        check_plays(run, saved)
        played = choose_kinds(str(run), saved["settings"]["task_kinds"], options.task_kinds)
        kinds = [resolve_kind(kind).name for kind in played]
        if strange := ", ".join(sorted({task.kind for task in tasks} - set(kinds))):
            raise ValueError(f"{options.tasks} has tasks of {strange}; {run} plays {', '.join(kinds)}.")
        base, asked_as = describe_base(saved), describe_asking(run, saved)
        if not found:
            found[BASE_NAME] = {"of": BASE_NAME, "weights": "", "base": base, "asked_as": asked_as}
            if options.start:
                found[START] = describe_adapter(options.start, options.start) | {"base": base, "asked_as": asked_as}
        elif base != found[BASE_NAME]["base"]:
            raise ValueError(f"{run} is on another base ({base}) than {options.runs[0]} ({found[BASE_NAME]['base']}).")
        students = {student_name(run, each["name"]): each for each in saved["members"] if each["role"] == "student"}
        if taken := found.keys() & students.keys():
            raise ValueError(f"Two runs have a {min(taken)}; give runs whose directories have different names.")
        for name, each in students.items():
            found[name] = describe_adapter(run, run / each["adapter"]) | {"base": base, "asked_as": asked_as}
    return found


def describe_adapter(source: Path, adapter: Path) -> dict[str, str]:
    """Where an adapter comes from, and a digest that changes with its weights."""
    weights = digest_of(*((adapter / file).read_bytes() for file in ADAPTER_FILES))
    return {"of": str(source.resolve()), "weights": weights}


def describe_base(saved: Mapping[str, Any]) -> str:
    """Name, revision and quantisation of the base of a run."""
    quantization = saved.get("base_quantization")
    quantised = f", quantised ({digest_of(json.dumps(quantization).encode())})" if quantization else ""
    return f"{saved['base_model']} at {saved['settings'].get('base_revision', 'main')}{quantised}"


def describe_asking(run: Path, saved: Mapping[str, Any]) -> str:
    """A digest of how a run's members are asked."""
    settings = {name: saved["settings"].get(name) for name in ASKED_AS} | read_sampling(saved["settings"])
    return digest_of(json.dumps([saved["prompt_style"], settings, read_chat_template(run)]).encode())


def digest_of(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def student_name(run: Path, member: str) -> str:
    place = run.resolve()
    # Checkpoints of two runs may be of one step.
    name = f"{place.parent.name}-{place.name}" if place.name.startswith("checkpoint-") else place.name
    return f"{name} {member}"


class Scores:
    """
    Every contender's attempts, each in a file of its own.

    Raises:
        ValueError: If a file is of another source, other weights, other tasks or another number of attempts, or was
            asked in another way. All are read first: attempts take long.
    """

    def __init__(self, contenders: Mapping[str, dict[str, str]], tasks: Sequence[Task], options: argparse.Namespace):
        self.tasks, self.options = tasks, options
        about = {"attempts": options.attempts, "tasks": digest(tasks)}
        self.asked: dict[str, dict[str, Any]] = {name: each | about for name, each in contenders.items()}
        self.known: dict[str, list[list[Try]]] = {}
        for name, asked in self.asked.items():
            if (path := self.path(name)).exists():
                kept = json.loads(path.read_text())
                differs = [key for key in asked if kept["asked"].get(key) != asked[key]]
                if differs:
                    words = ", ".join(f"{key} {kept['asked'].get(key)}, here {asked[key]}" for key in differs)
                    raise ValueError(f"{path} answers another question ({words}); give another `--output`.")
                self.known[name] = kept["tries"]

    def path(self, name: str) -> Path:
        return self.options.output / f"{name.replace(' ', '-')}.json"

    def of(self, contest: Contest, member: str, name: str) -> list[list[Try]]:
        """The contender's attempts from its file, or anew."""
        if name not in self.known:
            self.known[name] = try_tasks(contest, member, name, self.tasks, self.options)
            self.options.output.mkdir(parents=True, exist_ok=True)
            write_json(self.path(name), {"asked": self.asked[name], "tries": self.known[name]})
        return self.known[name]


def digest(tasks: Sequence[Task]) -> str:
    return digest_of("".join(task.task_id for task in tasks).encode())


def majority(tries: Sequence[Try]) -> float:
    """Whether the most frequent answer is right; of several that are as frequent, the share that is."""
    counts = Counter(answer for _, answer, _ in tries if answer)
    most = max(counts.values(), default=0)
    right = {answer: correct for correct, answer, _ in tries}
    return fmean(right[answer] for answer, count in counts.items() if count == most) if most else 0.0


def rates(tries: Sequence[Sequence[Try]]) -> list[float]:
    return [fmean(right for right, *_ in group) for group in tries]


def figures(
    tries: Sequence[Sequence[Try]],
    start: Sequence[Sequence[Try]] | None,
    tasks: Sequence[Task],
    copied: Sequence[bool] = (),
) -> dict[str, Any]:
    """
    A contender's columns of the table: numbers, or pairs of a mean and half of its interval.

    Args:
        tries (`Sequence`): The contender's attempts at each task.
        start (`Sequence`, *optional*): Those of what it is compared with.
        tasks (`Sequence[Task]`): The tasks.
        copied (`Sequence[bool]`): Which tasks giving back the given block solves; empty if that is not tried.
    """
    own = rates(tries)
    found: dict[str, Any] = {"right": list(measure_mean(own))}
    for kind in sorted({task.kind for task in tasks}):
        found[kind] = fmean(rate for rate, task in zip(own, tasks, strict=True) if task.kind == kind)
    if start is not None:
        above = [mine - theirs for mine, theirs in zip(own, rates(start), strict=True)]
        found["over it"] = list(measure_mean(above))
        rest = [gain for gain, is_copied in zip(above, copied, strict=True) if not is_copied] if copied else []
        if len(rest) > 1:
            found["uncopied"] = list(measure_mean(rest))
    return found | {
        "any": fmean(rate > 0 for rate in own),
        "all": fmean(rate == 1 for rate in own),
        "majority": fmean(map(majority, tries)),
        "readable": fmean(bool(answer) for group in tries for _, answer, _ in group),
        "worked": fmean(worked for group in tries for *_, worked in group),
    }


def mean_figures(
    contenders: Sequence[Sequence[Sequence[Try]]],
    start: Sequence[Sequence[Try]],
    tasks: Sequence[Task],
    copied: Sequence[bool] = (),
) -> dict[str, Any]:
    """Those columns that mean something for several contenders' attempts together."""
    together = [[each for tries in of_a_task for each in tries] for of_a_task in zip(*contenders, strict=True)]
    found = figures(together, start, tasks, copied)
    return {column: figure for column, figure in found.items() if column not in ("any", "all", "majority")}


def gain_over_runs(runs: Sequence[Sequence[Sequence[Sequence[Try]]]], start: Sequence[Sequence[Try]]) -> list[float]:
    """What the mean student of each run has above the start: the mean over runs, and half of its interval."""
    return list(measure_mean([fmean(fmean(rates(tries)) for tries in run) - fmean(rates(start)) for run in runs]))


def table(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each contender; what one starts from has nothing to be above."""
    longest = max(found.values(), key=len)
    columns = [*longest, *({OVER_RUNS} - longest.keys() if any(OVER_RUNS in each for each in found.values()) else ())]
    return [["", *columns]] + [
        [name, *(cell(figure.get(column), signed=column in SIGNED) for column in columns)]
        for name, figure in found.items()
    ]


def cell(value: float | Sequence[float] | None, signed: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}"
    mean, half = value
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]" if signed else f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="directories of runs or of their checkpoints, on one base")
    parser.add_argument("--tasks", required=True, help="a file, as recipes/published_tasks.py makes, or a Hub dataset")
    parser.add_argument("--start", type=Path, help="the adapter that all members started from (warm_start)")
    parser.add_argument("--task_kinds", nargs="+", help="kinds that the runs play; needed where one is your own")
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="answers sampled at once")
    parser.add_argument("--output", type=Path, default=Path("runs/held_out"))
    options = parser.parse_args()
    tasks = [read_task(row, f"row {number}") for number, row in enumerate(read_tasks(options.tasks) or ())]
    scores = Scores(find_contenders(options, tasks), tasks, options)
    tries: dict[str, list[list[Try]]] = {}
    copied: list[bool] = []
    students: dict[str, list[str]] = {}
    for run in map(Path, options.runs):
        with assemble([str(run)], task_kinds=options.task_kinds, **AS_TRAINED) as contest:
            if BASE_NAME not in tries:
                tries[BASE_NAME] = scores.of(contest, BASE_NAME, BASE_NAME)
                copies = contest.referee.try_answers("copies", tasks)
                if any(copies):  # none is tried in the compact style
                    copied = [any(right) for right in copies]
                    tries[COPYING] = [[(right, "copied", False)] for right in copied]
            if options.start and START not in tries:
                slot = contest.students[0]
                own = read_member(contest.model, slot)
                # A run that starts from the adapter folds its rank and alpha into the members' own.
                revision = contest.args.model_init_kwargs["revision"]
                shape = Shape.of(contest.model, read_population(run)["base_model"], revision)
                write_adapter(contest.model, slot, options.start, shape)
                tries[START] = scores.of(contest, slot, START)
                write_member(contest.model, slot, own)
            for slot in contest.students:
                name = student_name(run, contest.names[slot])
                tries[name] = scores.of(contest, slot, name)
                students.setdefault(student_name(run, "mean"), []).append(name)
    first = START if options.start else BASE_NAME
    before = tries.pop(first)
    found = {first: figures(before, None, tasks)}
    found |= {name: figures(each, before, tasks, copied) for name, each in tries.items()}
    means = {"mean": [name for names in students.values() for name in names]} if len(students) > 1 else {}
    for name, names in (students | means).items():
        if len(names) > 1:
            found[name] = mean_figures([tries[each] for each in names], before, tasks, copied)
    if means:
        found["mean"][OVER_RUNS] = gain_over_runs([[tries[each] for each in own] for own in students.values()], before)
    text = markdown(table(found)) + "\n"
    (options.output / "table.md").write_text(text)
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
