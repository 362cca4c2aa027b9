"""
`docs/metrics.md` and `docs/files.md` against the files of a run: each explains all that is there, and nothing else.

The keys that vLLM adds are held by its own runs (`vllm_processes.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests import glossary
from tests.glossary import table
from tests.populora_run import EVALUATED, HELD_OUT, Letters, make_trainer
from trl_populora.run.read import LINEAGE, METRICS, TIMES, read_lines
from trl_populora.sandbox.values import encode
from trl_populora.tasks import make_task
from trl_populora.tasks.archive import read_task
from trl_populora.tasks.kind import COLUMNS, Reject


FILES = (Path(__file__).parent.parent / "docs" / "files.md").read_text()


class Measured(Letters):
    """Tells something of its tasks that becomes a metric."""

    measures = ("letters",)

    def complexity(self, task):
        return {"letters": float(len(task.message))}


KINDS = {"task_kinds": ["tests.test_run_pages:Measured", "code_o"]}
CLIPPED, EVOLVED, POOLED, VLLM = (
    {row for row in glossary.SOME_SETTINGS if row.startswith(start)}
    for start in ("clip_ratio/", "evolve/", "pool/", ("sampling/", "time/"))
)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """Two steps with what adds keys and files, evaluations before and after, and one by hand on two tables."""
    path = tmp_path_factory.mktemp("run")
    settings = {"max_steps": 2, "evolve_every": 1, "pool_every": 1, "beta": 0.04}
    trainer = make_trainer(base, str(path), EVALUATED | KINDS | settings)
    trainer.train()
    trainer.save_state()
    trainer.save_model()
    trainer.evaluate({"one": Dataset.from_list(HELD_OUT[:2]), "two": Dataset.from_list(HELD_OUT[2:])})
    return path


def evaluations(run) -> list[dict]:
    return [entry for entry in read_lines(run / METRICS) if any(key.startswith("eval/") for key in entry)]


class TestMetrics:
    def test_every_step_has_the_keys_of_the_page_and_no_other(self, run):
        steps = [entry for entry in read_lines(run / METRICS) if "loss" in entry]
        assert len(steps) == 2
        for entry in steps:
            assert glossary.explained(entry) == {
                *glossary.STEP,
                *EVOLVED,
                *POOLED,
                *CLIPPED,
                "kl",
                "curriculum/{measure}",
            }

    def test_a_step_with_cispo_has_its_own_clip_ratio(self, base, tmp_path):
        make_trainer(base, str(tmp_path), {"max_steps": 1, "loss_type": "cispo", "save_strategy": "no"}).train()
        (entry,) = read_lines(tmp_path / METRICS)
        assert glossary.explained(entry) == {*glossary.STEP, *EVOLVED, "cispo_clip_ratio"}

    def test_no_other_setting_has_keys_of_its_own(self):
        tested = {
            *EVOLVED,
            *POOLED,
            *CLIPPED,
            "kl",
            "curriculum/{measure}",
            "cispo_clip_ratio",
            "eval/other_tasks",
        }
        assert set(glossary.SOME_SETTINGS) == tested | VLLM

    def test_every_evaluation_has_the_keys_of_the_page_and_no_other(self, run):
        before, after, _ = evaluations(run)
        for entry in (before, after):
            assert glossary.explained(entry.keys() - {"step", "epoch"}) == set(glossary.EVALUATION)

    def test_several_tables_stand_before_the_keys_of_one(self, run):
        *_, by_hand = evaluations(run)
        assert by_hand["eval/other_tasks"] == 1
        for name in ("one", "two"):
            start = f"eval/{name}_"
            keys = {"eval/" + key.removeprefix(start) for key in by_hand if key.startswith(start)}
            assert glossary.explained(keys) == set(glossary.EVALUATION)

    def test_seconds_have_the_keys_of_the_page_and_no_other(self, run):
        lines = read_lines(run / TIMES)
        found = set.union(*(glossary.explained(entry.keys() - {"step"}) for entry in lines))
        assert found == set(glossary.SECONDS)
        assert all(value is None or value >= 0 for entry in lines for value in entry.values())

    def test_shares_are_shares(self, run):
        """The column that says so is no decoration."""
        shares = {row for row, unit in glossary.UNITS.items() if unit == "share"}
        assert len(shares) > 20
        entries = [entry for entry in read_lines(run / METRICS) if "loss" in entry] + evaluations(run)[:2]
        values = [
            (key, v) for e in entries for key, v in e.items() if v is not None and glossary.explained([key]) & shares
        ]
        assert [(key, v) for key, v in values if not (v != v or 0 <= v <= 1)] == []

    def test_a_key_that_the_page_does_not_have_is_told(self):
        with pytest.raises(AssertionError, match=r"does not explain \['solve/luck'\]"):
            glossary.explained(["solve/rate", "solve/luck"])

    def test_every_reason_is_explained(self):
        assert [reason.value for reason in Reject] == glossary.REASONS


def paths(section: str) -> list[str]:
    """The paths in the first column of a table of files; a row may name several."""
    return [path for cells in table(FILES, section) for path in re.findall("`([^`]+)`", cells[0])]


def matching(path: str, names: set[str]) -> set[str]:
    """The files that a path of the page means: `{member}` is part of a name, `...` anything below."""
    pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)).replace(r"\.\.\.", ".+")
    return {name for name in names if re.fullmatch(pattern, name)}


def names_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def first_cells(section: str) -> list[str]:
    return [cells[0].strip("`") for cells in table(FILES, section)]


def columns(section: str) -> list[tuple[str, str]]:
    return [(cells[0].strip("`"), cells[1]) for cells in table(FILES, section)]


def columns_of(path: Path) -> list[tuple[str, str]]:
    types = {"list<element: string>": "list of string"}
    return [(field.name, types.get(str(field.type), str(field.type))) for field in pq.read_schema(path)]


class TestFiles:
    def test_every_file_is_on_the_page(self, run):
        named = [*paths("Files of every run"), *paths("Files of some runs")]
        names = names_below(run)
        assert names - set.union(*(matching(path, names) for path in named)) == set()

    def test_files_of_every_run_are_there(self, run):
        names = names_below(run)
        assert [path for path in paths("Files of every run") if not matching(path, names)] == []

    def test_a_checkpoint_holds_what_the_page_says(self, run):
        names, named = names_below(run / "checkpoint-2"), paths("Checkpoints")
        assert names - set.union(*(matching(path, names) for path in named)) == set()
        assert [path for path in named if not matching(path, names)] == []

    def test_rollouts_have_the_columns_of_the_page(self, run):
        for path in run.glob("rollouts/*.parquet"):
            assert columns_of(path) == columns("Rollouts")

    def test_the_archive_has_the_columns_of_the_page_and_own_measures_before_the_key(self, run):
        *task, key = columns("archive.parquet")
        assert columns_of(run / "archive.parquet") == [*task, ("letters", "double"), key]

    def test_a_replacement_has_the_fields_of_the_page(self, run):
        events = read_lines(run / LINEAGE)
        assert events
        for event in events:
            assert list(event) == first_cells("lineage.jsonl")
            assert list(event["replaced"]) == ["member", "mu", "sigma", "age"] == list(event["parents"][0])

    def test_the_population_has_the_fields_of_the_page(self, run):
        saved = json.loads((run / "population.json").read_text())
        assert list(saved) == first_cells("population.json")
        cells = {field.strip("`"): re.findall(r"`(\w+)`", text) for field, text in table(FILES, "population.json")}
        assert list(saved["lora"]) == cells["lora"]
        assert all(list(member) == cells["members"] for member in saved["members"])

    def test_seed_tasks_have_the_columns_that_are_read(self):
        assert columns("Seed tasks") == [
            (name, "required" if needed else "optional") for name, (_, needed) in COLUMNS.items()
        ]

    def test_the_row_that_the_page_shows_is_a_task_and_is_what_its_program_writes(self):
        row, program = (re.search(rf"```{kind}\n(.+?)```", FILES, re.DOTALL)[1] for kind in ("json", "python"))
        scope: dict = {}
        exec(program, scope)
        assert read_task(json.loads(row), "the page") == scope["task"] == read_task(scope["row"], "its program")
        assert scope["make_task"] is make_task

    def test_canonical_texts_are_those_of_the_values_beside_them(self):
        lines = re.findall(r"^\| (`.+`) \| (`.+`) \|$", FILES.rpartition("canonical text")[2], re.MULTILINE)
        pairs = [
            pair for line in lines for pair in zip(*(re.findall("`([^`]+)`", cell) for cell in line), strict=True)
        ]
        assert len(pairs) > 10
        assert [(value, encode(eval(value))) for value, _ in pairs] == pairs
