"""
What was measured of the adapter at a population's root, as the Hub reads it.

Twice: `model-index` in the card takes any task and with it the held-out ones; `.eval_results/*.yaml` takes benchmarks
that are datasets on the Hub, whose leaderboards read it. Every figure has the revision of its task and its command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, constants, eval_result_entries_to_yaml

from trl_populora.files import is_file_name, write_whole


RESULTS = ".eval_results"
OURS = f"{RESULTS}/populora_*.yaml"  # others may put files of their own beside these
EVALUATION = "evaluation.json"
METRIC = "pass@1"  # the share of right answers, where a question has several samples their mean


@dataclass(frozen=True)
class Figure:
    """
    One score of the best student.

    Args:
        name: Key of the task; names the file.
        title: For people.
        value, base: In percent; `base` without an adapter, `None` where it is not known.
        margin: Half of the 95 % interval.
        questions: How many.
        revision: Of the questions; empty where it is not known.
        how: Command or settings that measure it again.
        date: ISO 8601.
        dataset, task: On the Hub.
    """

    name: str
    title: str
    value: float
    base: float | None
    margin: float | None
    questions: int
    revision: str
    how: str
    date: str | None = None
    dataset: str | None = None
    task: str | None = None

    @property
    def asked(self) -> str:
        """Which questions: their revision, or from which day they are where the Hub's own were asked."""
        return self.revision or f"as of {self.date}"


def read_figures(root: Path, population: dict[str, Any], repo: str) -> list[Figure]:
    """
    What is known of the weights that are saved; figures of earlier ones are left out.

    Args:
        root: Directory of a saved population, with `evaluation.json` if `recipes/evaluate.py` has run there.
        population: Its `population.json`.
        repo: Where it goes; commands name it.
    """
    best = next(member for member in population["members"] if member["name"] == population["best_student"])
    figures = [_read_held_out(population, best)] if _is_measured(population, best) else []
    if (root / EVALUATION).exists():
        found = json.loads((root / EVALUATION).read_text())
        if found.get("step") == population["step"]:
            figures += _read_published(found, best["name"], repo)
    return figures


def _is_measured(population: dict[str, Any], best: dict[str, Any]) -> bool:
    known = population.get("held_out_tasks") and best.get("held_out") is not None
    return bool(known) and population["held_out_step"] == population["step"]


def _read_held_out(population: dict[str, Any], best: dict[str, Any]) -> Figure:
    tasks, base = population["held_out_tasks"], population["held_out_base"]
    settings = population.get("settings", {})
    how = f"`trainer.evaluate()` with `eval_attempts={tasks['attempts']}`, `seed={settings.get('seed')}`"
    return Figure(
        "held_out",
        "Held-out tasks of the run",
        100 * best["held_out"],
        None if base is None else 100 * base,
        None,
        tasks["tasks"],
        tasks["digest"],
        how,
    )


def _read_published(found: dict[str, Any], best: str, repo: str) -> list[Figure]:
    """Of `recipes/evaluate.py`: every benchmark on which the best student has a score."""
    figures = []
    for name, about in found["benchmarks"].items():
        if not is_file_name(name):
            raise ValueError(
                f"{EVALUATION}: field `benchmarks` names {name!r}, of which a file's name cannot be made."
            )
        scores, margins = found["scores"][name], found["margins"].get(name, {})
        if (value := scores.get(best)) is None:
            continue
        figures.append(
            Figure(
                name,
                about["title"],
                value,
                scores.get("base"),
                margins.get(best),
                found["questions"][name],
                about["revision"] or "",
                f"`python recipes/evaluate.py {repo} {found['options']}`",
                found["date"],
                about["dataset"],
                about["task"],
            )
        )
    return figures


def make_model_index(figures: Sequence[Figure]) -> list[EvalResult]:
    """For the card's metadata."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=figure.dataset or f"populora/{figure.name}",
            dataset_name=figure.title,
            dataset_revision=figure.revision or None,
            dataset_args={"questions": figure.questions, "how": figure.how.replace("`", "")},
            metric_type=METRIC,
            metric_value=round(figure.value, 1),
            metric_name=f"{figure.title}, {METRIC} in percent",
        )
        for figure in figures
    ]


def write_results(root: Path, figures: Sequence[Figure], best: str, repo: str) -> None:
    """Writes `.eval_results/` in the place of what an earlier call wrote: a file for each benchmark of the Hub."""
    for path in root.glob(OURS):
        path.unlink()
    for figure in figures:
        if figure.dataset is None or figure.task is None:
            continue
        (root / RESULTS).mkdir(exist_ok=True)
        entry = EvalResultEntry(
            dataset_id=figure.dataset,
            task_id=figure.task,
            value=round(figure.value, 1),
            date=figure.date,
            source_url=f"{constants.ENDPOINT}/{repo}",
            source_name="recipes/evaluate.py of trl-populora",
            notes=f"{METRIC} of {best}; {figure.how.replace('`', '')}; questions {figure.asked}",
        )
        with write_whole(root / RESULTS / f"populora_{figure.name}.yaml") as unfinished:
            unfinished.write_text(yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False))


def format_results(figures: Sequence[Figure], best: str, chosen_by: str) -> str:
    """The card's section; empty where nothing was measured."""
    if not figures:
        return ""
    rows = [f"| {METRIC} in percent | {best} | base | questions | their revision | how |"]
    rows += ["|---|---:|---:|---:|---|---|"]
    for each in figures:
        value = f"{each.value:.1f}" + ("" if each.margin is None else f" ± {each.margin:.1f}")
        base = "" if each.base is None else f"{each.base:.1f}"
        rows.append(f"| {each.title} | {value} | {base} | {each.questions} | {each.asked} | {each.how} |")
    picked = chosen_by != "rating" and any(each.name == "held_out" for each in figures)
    note = f"{best} was chosen by its held-out tasks, which makes that figure a little high." if picked else ""
    return "\n".join(["", "## Evaluation", "", *rows, *(["", note] if note else []), ""])
