"""Reads what a run has left so far from its files. The run may still be training.

metrics.jsonl, times.jsonl --> history (one dictionary per logged step), evaluations
rollouts/step_*.parquet    --> rows (one dictionary per proposal, attempt or answer), samples with their texts
lineage.jsonl              --> births, and who joined or left
population.json            --> settings and members
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_populora.run.read import (
    ANSWERED,
    EVALUATION,
    LINEAGE,
    METRICS,
    POPULATION_FILE,
    STEP,
    TIMES,
    classify_log,
    is_of_function,
    read_lines,
    read_population,
)
from trl_populora.tasks.python.complexity import PROGRAM_MEASURES


@dataclass
class Run:
    """
    The records of a run so far.

    Args:
        name: Title of the report; by default the name of the run's directory.
        history: Metrics and seconds per logged step, oldest first. With `num_iterations` above 1 some steps have no
            metrics of a game.
        rows: Proposals and attempts; empty in a dataset run. Each has `file`, `row` and those keys of `ROW_COLUMNS`
            that its file has.
        lineage: Births, and in a dataset run who joined or left; oldest first.
        population: Contents of `population.json`; empty while there is none.
        evaluations: Metrics and seconds of each evaluation on `eval_dataset`, oldest first.
        root: The run's directory. Pictures read from it what only they need: adapters and completions.
    """

    name: str
    history: list[dict[str, Any]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    population: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    root: Path | None = None

    @property
    def latest(self) -> dict[str, Any]:
        """The last known value of each metric."""
        return {key: value for entry in self.history for key, value in entry.items() if value is not None}

    @property
    def game(self) -> bool:
        """Whether the run is a game, and no dataset run."""
        # `ANSWERED` lies in `times.jsonl`, which may be missing or cut. The first step has rewards of members.
        rewarded = any(re.fullmatch(r"member/[^/]+/reward", key) for entry in self.history[:1] for key in entry)
        return not (rewarded or any(ANSWERED in entry for entry in self.history))

    @property
    def rated(self) -> bool:
        """Whether the members of a dataset run have ratings, and there are several to compare."""
        return len(self.members("student")) > 1 and any(
            key.endswith("/mu") and not is_of_function(key) for key in self.latest
        )

    @property
    def functions(self) -> list[str]:
        """Names of the reward functions."""
        keys = {key for entry in self.history for key in entry}
        return sorted(key[8:-5] for key in keys if key.startswith("rewards/") and key.endswith("/mean"))

    @property
    def several_functions(self) -> bool:
        """Whether there are several reward functions."""
        return len(self.functions) > 1

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds of task."""
        # The names stand in the keys `propose/<kind>/valid_rate`. Other keys of `propose/` have one slash.
        keys = {key for entry in self.history for key in entry}
        return sorted({key.split("/")[1] for key in keys if key.startswith("propose/") and key.count("/") == 2})

    @property
    def measures(self) -> list[str]:
        """Names of the measures that a task has: measures of programs first, then those of a user's kinds."""
        found = {key.removeprefix("curriculum/") for key in self.latest if key.startswith("curriculum/")}
        # `coverage`, `entropy` and `features` are no measures of one task: the first two belong to the archive, the
        # third to the tasks of several steps.
        rest = found - {"coverage", "entropy", "features", *PROGRAM_MEASURES}
        return [name for name in PROGRAM_MEASURES if name in found] + sorted(rest)

    def members(self, role: str) -> list[str]:
        """Lists the names of a role's members, sorted by number. All members of a dataset run are students."""
        if not self.game:
            found = {re.fullmatch(r"member/([^/]+)/reward", key) for entry in self.history for key in entry}
            return sorted({each[1] for each in found if each}, key=_order_name) if role == "student" else []
        names = {key.split("/")[1] for key in self.latest if key.startswith(f"member/{role}_")}
        return sorted(names, key=_order_name)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric has a value, and the values. Keys with `eval/` come from evaluations."""
        entries = self.evaluations if key.startswith("eval/") else self.history
        points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def step(self) -> int:
        """The last logged step; 0 before the first."""
        return self.history[-1]["step"] if self.history else 0

    @property
    def planned(self) -> int | None:
        """Steps that the run is set to make (`max_steps`); `None` if epochs decide, or without settings so far."""
        steps = self.population.get("settings", {}).get("max_steps")
        return steps if steps and steps > 0 else None

    @property
    def finished(self) -> bool:
        """Whether the last planned step was logged."""
        return self.planned is not None and self.step >= self.planned

    @property
    def seconds(self) -> tuple[float, float]:
        """Two sums: seconds of all steps, and seconds of all evaluations. A resume resets neither."""
        # A logged `step_time` is the mean over the steps since the log before it (`logging_steps`).
        before = [0, *(entry["step"] for entry in self.history)]
        steps = sum(
            (entry.get("step_time") or 0.0) * (entry["step"] - earlier)
            for entry, earlier in zip(self.history, before, strict=False)
        )
        took = [
            entry[key]
            for entry in self.evaluations
            for key in entry
            if key.startswith("eval/") and key.endswith("runtime") and not is_of_function(key)
        ]
        return steps, sum(filter(None, took))

    @property
    def tables(self) -> list[str]:
        """
        How the keys of each table of `eval_dataset` begin: `["eval/"]` for one table without a name,
        `["eval/easy_", "eval/hard_"]` for the tables `easy` and `hard`, in the order in which they were given.
        """
        keys = dict.fromkeys(key for entry in self.evaluations for key in entry)  # a set would lose the order
        end = "solve_rate_mean" if self.game else "reward_best"
        return [key.removesuffix(end) for key in keys if key.endswith(end) and not is_of_function(key)]

    @property
    def held_out_kinds(self) -> list[str]:
        """Kinds of task in the first held-out table; empty if the table has only one kind."""
        known = {key for entry in self.evaluations for key in entry}
        kinds = [kind for kind in self.kinds if self.tables and f"{self.tables[0]}{kind}/solve_rate" in known]
        return kinds if len(kinds) > 1 else []

    @property
    def thinks(self) -> bool:
        """Whether any attempt in training, or at a held-out table without a name, thought before its answer."""
        return any(any(self.series(key)[1]) for key in ("solve/thinking_rate", "eval/thinking_rate"))

    @property
    def holds_programs(self) -> bool:
        """Whether any task so far has a program. Tasks of a user's kind may have none."""
        return bool(self.latest.get("curriculum/coverage"))

    @property
    def breadth(self) -> list[str]:
        """Metrics of how wide the tasks range. Two exist if tasks have programs, one if a kind names features."""
        of_programs = ["curriculum/coverage", "curriculum/entropy"] if self.holds_programs else []
        return of_programs + ["curriculum/features"] * bool(self.latest.get("curriculum/features"))

    @property
    def pairs(self) -> bool:
        """Whether there are rollouts, and more than one pair of teacher and student."""
        return bool(self.rows) and len(self.members("teacher")) * len(self.members("student")) > 1

    @property
    def several_students(self) -> bool:
        """Whether there are rollouts of several students."""
        return bool(self.rows) and len(self.members("student")) > 1

    @property
    def names_features(self) -> bool:
        """Whether rollouts say which features tasks use. Some kinds name no features; early versions saved none."""
        return any(row.get("features") for row in self.rows)

    @property
    def marked(self) -> str:
        """What the dotted lines in the pictures mark."""
        changed = any(event["operator"] in ("join", "leave") for event in self.lineage)
        return "where members came or left" if changed else "evolution events"

    @property
    def births(self) -> list[int]:
        """Steps at which a member was replaced, or in a dataset run joined or left."""
        return sorted({event["step"] for event in self.lineage})


def _order_name(name: str) -> tuple[str, int]:
    """Orders names by the number at their end: as text `student_10` would come before `student_2`."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdigit() else (name, 0)


def name_table(table: str) -> str:
    """Names a held-out table, given the start of its keys; empty for a table without a name."""
    return table.removeprefix("eval/").rstrip("_")


def load_history(run: str | Path) -> list[dict[str, Any]]:
    """
    Reads the metrics of each logged step of a run, oldest first.

    Args:
        run: The run's `output_dir`. The run may still be training.

    Raises:
        `ValueError`: If the directory holds no metrics, or a file is broken.
    """
    root = Path(run)
    entries = _read_checked(root / METRICS)
    if not entries:
        raise ValueError(f"{root} holds no {METRICS}. Name a run's directory; a run in its first step has none yet.")
    history = _merge_by_step((entry for entry in entries if classify_log(entry) == STEP), last=True)
    times = {e["step"]: e for e in _read_checked(root / TIMES) if classify_log(e) != EVALUATION}
    return [entry | times.get(entry["step"], {}) for entry in history]


def load_evaluations(run: str | Path) -> list[dict[str, Any]]:
    """
    Reads metrics and seconds of each evaluation on `eval_dataset`, oldest first; empty without evaluations. Of several
    at one step the first counts: a later one is a call of `evaluate()`. Calls with other tasks are left out in a game.
    """
    figures, seconds = (
        _merge_by_step(
            (
                entry
                for entry in _read_checked(Path(run, name))
                if classify_log(entry) == EVALUATION and not entry.get("eval/other_tasks")
            ),
            last=False,
        )
        for name in (METRICS, TIMES)
    )
    took = {entry["step"]: entry for entry in seconds}
    return [took.get(entry["step"], {}) | entry for entry in figures]


def _merge_by_step(entries: Iterable[dict[str, Any]], last: bool) -> list[dict[str, Any]]:
    """
    Makes one entry per step, oldest first. If a step was logged several times, its entry has the keys of all; a key
    that several have is that of the last one, or of the first.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for entry in entries:
        known = by_step.setdefault(entry["step"], {})
        known |= entry if last else {key: value for key, value in entry.items() if key not in known}
    return [by_step[step] for step in sorted(by_step)]


def _read_checked(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file. The error for a broken one names the file."""
    try:
        return read_lines(path)
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}).") from error


# Pictures need `ROW_COLUMNS` of all rollouts. The samples on the page need more columns of a few rollouts.
ROW_COLUMNS = ["step", "role", "member", "match", "kind", "valid", "correct", "archived", "solve_rate", "features"]
ANSWER_COLUMNS = ["step", "member", "reward", "prompt", "completion"]
SAMPLE_COLUMNS = [
    *ROW_COLUMNS,
    "task_id",
    "reject_reason",
    "reject_detail",
    "well_formed",
    "reward",
    "prompt",
    "completion",
]


def load_run(run: str | Path, name: str | None = None) -> Run:
    """
    Reads all records that a report needs.

    Args:
        run: The run's `output_dir`. The run may still be training.
        name: Name of the run in the report; by default the name of its directory.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    root = Path(run)
    history = load_history(root)
    if not history:
        raise ValueError(f"{root} has not logged a population step yet; try again after its first one.")
    # A run writes rollouts and births of a step before its metrics. A report made in between leaves that step out.
    last = history[-1]["step"]
    lineage, evaluations = (
        [entry for entry in entries if entry["step"] <= last]
        for entries in (_read_checked(root / LINEAGE), load_evaluations(root))
    )
    population = read_population(root) if (root / POPULATION_FILE).exists() else {}
    found = Run(name or root.resolve().name, history, [], lineage, population, evaluations, root)
    if found.game:  # no picture of a dataset run needs its rows
        found.rows += [row for row in _read_rollouts(root, ROW_COLUMNS) if row["step"] <= last]
    return found


def _read_rollouts(root: Path, columns: Sequence[str], last: int = 0) -> list[dict[str, Any]]:
    """
    Reads the rows of rollouts in the order of steps.

    Args:
        root: The run's directory.
        columns: Columns to read.
        last: How many files to read, counted from the end; 0 for all.

    Returns:
        A dictionary per row, with its file and its number in that file as `file` and `row`.
    """
    return _read_files(sorted(root.glob("rollouts/step_*.parquet"), key=_order_file)[-last:], columns)


def _order_file(path: Path) -> list[int]:
    """Orders files of rollouts by the numbers in their names, step and rank. As texts, 100000 is before 99999."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _read_files(paths: Sequence[Path], columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    # Files of early versions lack some of the columns.
    present = {path: [name for name in columns if name in pq.read_schema(path).names] for path in paths}
    return [
        row | {"file": f"rollouts/{path.name}", "row": number}
        for path in paths
        for number, row in enumerate(pq.read_table(path, columns=present[path]).to_pylist())
    ]


Sample = tuple[dict[str, Any], list[dict[str, Any]]]  # a proposal and the attempts at it


Answers = list[dict[str, Any]]  # the members' answers to one prompt of a dataset, the best first


def read_completions(run: Run, since: int) -> list[dict[str, Any]]:
    """Reads role, member, kind, `correct` and completion of all rows of the steps after `since`, oldest first."""
    if run.root is None:
        return []
    wanted = {run.root / row["file"] for row in run.rows if row["step"] > since}
    return _read_files(sorted(wanted, key=_order_file), ["role", "member", "kind", "correct", "completion"])


def load_answers(run: str | Path, number: int = 8) -> list[Answers]:
    """
    Reads a dataset run's last file of rollouts, and chooses prompts to show. Each comes with the members' answers.

    Prompts whose answers differ most in reward come first.
    """
    by_prompt: dict[str, Answers] = {}
    for row in _read_rollouts(Path(run), ANSWER_COLUMNS, last=1):
        by_prompt.setdefault(row["prompt"], []).append(row)
    found = [sorted(rows, key=_rank_answer) for rows in by_prompt.values()]
    return sorted(found, key=lambda rows: _rank_answer(rows[0]) - _rank_answer(rows[-1]))[:number]


def _rank_answer(row: Mapping[str, Any]) -> float:
    reward = row["reward"]
    return -reward if reward == reward else 0.0  # a reward is NaN if no function judged the answer


def name_reject(proposal: Mapping[str, Any]) -> str:
    """Says in one line why a proposal was rejected."""
    detail = proposal.get("reject_detail", "")
    return f"rejected: {proposal['reject_reason'].replace('_', ' ')}" + (f", {detail:.120}" if detail else "")


def load_samples(run: str | Path, number: int = 8) -> list[Sample]:
    """
    Chooses `number` proposals from the last four files of rollouts to show, with the attempts at them.

    Up to three quarters of them are valid, ordered from hard to easy. Rejected proposals make up the rest.
    """
    samples = _collect_proposals(Path(run), last=4)
    valid = sorted((each for each in samples if each[0]["valid"]), key=lambda each: each[0]["solve_rate"])
    # The valid ones are spread evenly from the hardest task to the easiest.
    count = min(len(valid), number * 3 // 4)
    chosen = [valid[place * (len(valid) - 1) // max(1, count - 1)] for place in range(count)]
    return chosen + [each for each in samples if not each[0]["valid"]][: number - len(chosen)]


def _collect_proposals(root: Path, last: int) -> list[Sample]:
    """Collects the proposals of the last files, newest first, each with the attempts at its task."""
    rows = _read_rollouts(root, SAMPLE_COLUMNS, last)
    attempts: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        if row["role"] == "student" and not row["archived"]:
            attempts.setdefault(_identify_task(row), []).append(row)
    proposals = [row for row in rows if row["role"] == "teacher"]
    if not proposals:  # nobody proposes: each given task takes the place of a proposal
        return [(tries[0] | {"member": "given"}, tries) for tries in reversed(attempts.values())]
    samples: list[Sample] = []
    # With `teacher_reward: paper` a teacher may propose one task several times in a match. Each proposal has as many
    # of the attempts at it, in the order of the proposals.
    same, seen = Counter(_identify_task(row) for row in proposals if row["valid"]), Counter[tuple]()
    for row in proposals:
        task = _identify_task(row)
        tries = attempts.get(task, []) if row["valid"] else []
        each, place = len(tries) // max(1, same[task]), seen[task]
        seen[task] += row["valid"]
        samples.append((row, tries[each * place : each * (place + 1)]))
    return samples[::-1]


def _identify_task(row: dict[str, Any]) -> tuple:
    # `task_id` alone is not enough: without teachers a later step may give the same task again.
    return row["step"], row["match"], row["task_id"]
