"""Writes the scores of the best student in the two formats that the Hub reads.

    population.json (held-out tasks), evaluation.json (benchmarks) --read_figures--> list of Figure
    list of Figure --make_model_index--> metadata of the model card: every score
                   --write_results-----> .eval_results/*.yaml: only scores of datasets on the Hub
                   --format_results----> a table in the model card

The Hub's leaderboards read `.eval_results/`. Every score says how to measure it again and, if known, which
revision of the questions was asked.
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
from trl_populora.run.read import digest_weights


RESULTS = ".eval_results"
OURS = f"{RESULTS}/populora_*.yaml"  # the package's own files; others in this folder stay
EVALUATION = "evaluation.json"
METRIC = "pass@1"  # share of right answers; a question with several samples counts with the mean of its samples


@dataclass(frozen=True)
class Figure:
    """
    One score of the best student, with the base's score beside it.

    Args:
        name: Key of the benchmark, and part of a file name.
        title: Name of the benchmark for people.
        value: Score of the student, in percent.
        base: Score of the base without an adapter, in percent; `None` if it is not known.
        margin: Half of the 95 % interval of `value`, in percentage points; `None` if it is not known.
        questions: Number of questions.
        revision: Revision of the questions, or a digest of held-out tasks; empty if it is not known.
        how: Command or settings that measure the score again.
        date: Day of the measurement, ISO 8601; `None` if it is not known.
        dataset, task: Dataset and task on the Hub; `None` if the questions have none there.
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
        """The revision of the questions; without one, the day of the measurement."""
        return self.revision or f"as of {self.date}"


def read_figures(root: Path, population: dict[str, Any], repo: str) -> list[Figure]:
    """
    Reads the scores that belong to the saved weights, and leaves out scores of earlier weights.

    Args:
        root: Directory of a saved population. `recipes/evaluate.py` may have left an `evaluation.json` there.
        population: Contents of its `population.json`.
        repo: Repository of the population, which the commands in [`Figure`] name.
    """
    best = next(member for member in population["members"] if member["name"] == population["best_student"])
    figures = [_read_held_out(population, best)] if _is_measured(population, best) else []
    if (root / EVALUATION).exists():
        found = json.loads((root / EVALUATION).read_text())
        if found.get("step") == population["step"] and _is_of(found, root, best):
            figures += _read_published(found, best["name"], repo)
    return figures


def _is_of(found: dict[str, Any], root: Path, best: dict[str, Any]) -> bool:
    """
    Says whether the benchmarks measured the best student's weights that lie in `root`. An equal step does not prove
    it: a second `train()` counts steps anew. Scores without a digest of the weights are accepted.
    """
    weights = found.get("weights", {}).get(best["name"])  # a digest; early versions wrote none
    return weights is None or ((root / best["adapter"]).exists() and digest_weights(root / best["adapter"]) == weights)


def _is_measured(population: dict[str, Any], best: dict[str, Any]) -> bool:
    """Says whether the best student has a held-out score of the last step."""
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
    """Reads the best student's scores from `evaluation.json`, and skips benchmarks on which it has none."""
    figures = []
    for name, about in found["benchmarks"].items():
        # The name becomes part of a path, and the file may come from a stranger on the Hub.
        if not is_file_name(name):
            raise ValueError(
                f"{EVALUATION}: field `benchmarks` names {name!r}; it must have only letters, digits, `_` and `-`, "
                "and not start with `-`."
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
                about.get("date", found["date"]),
                about["dataset"],
                about["task"],
            )
        )
    return figures


def make_model_index(figures: Sequence[Figure]) -> list[EvalResult]:
    """Puts the scores in the form of the card's metadata. The Hub shows them beside the card."""
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


def drop_our_results(model_index: Any) -> Any:
    """
    Removes the scores that [`make_model_index`] wrote from a card's `model-index`, because they may be of earlier
    weights. Keeps all that others wrote there, whatever its form.
    """
    if not isinstance(model_index, list):
        return model_index
    kept = []
    for model in model_index:
        results = model.get("results") if isinstance(model, dict) else None
        if not isinstance(results, list) or not results:
            kept.append(model)
        elif others := [each for each in results if not _is_ours(each)]:
            kept.append(model | {"results": others})
    return kept


def _is_ours(result: Any) -> bool:
    """Says whether [`make_model_index`] wrote a score; somebody else's may have any form."""
    for key in ("dataset", "args"):
        result = result.get(key) if isinstance(result, dict) else None
    return isinstance(result, dict) and "how" in result


def write_results(root: Path, figures: Sequence[Figure], best: str, repo: str) -> None:
    """Writes a file into `.eval_results/` for each score with a dataset and a task on the Hub. Deletes older files."""
    # Files of an earlier call may hold scores of other weights.
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
    """Writes the card's section with a table of the scores; empty without any."""
    if not figures:
        return ""
    rows = [f"| {METRIC} in percent | {best} | base | questions | their revision | how |"]
    rows += ["|---|---:|---:|---:|---|---|"]
    for each in figures:
        value = f"{each.value:.1f}" + ("" if each.margin is None else f" ± {each.margin:.1f}")
        base = "" if each.base is None else f"{each.base:.1f}"
        rows.append(f"| {each.title} | {value} | {base} | {each.questions} | {each.asked} | {each.how} |")
    # Choosing the best of several students by a score makes the chosen score look better than it is.
    picked = chosen_by != "rating" and any(each.name == "held_out" for each in figures)
    note = f"{best} was chosen by its score on held-out tasks, so that score is a little too high." if picked else ""
    return "\n".join(["", "## Evaluation", "", *rows, *(["", note] if note else []), ""])
