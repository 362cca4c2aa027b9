"""The page of the paper's statements: it has every one, and what it names is there."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from trl_populora.config import MemberConfig, PopuLoRAConfig
from trl_populora.evaluate.intervals import measure_mean
from trl_populora.population.operators import CROSSOVERS, MUTATIONS
from trl_populora.step.pay import PAY


ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "paper.md").read_text()
OPTIONS = {each.name for config in (PopuLoRAConfig, MemberConfig) for each in fields(config)}
ROWS = {
    name: cells.split(" | ") for name, cells in re.findall(r"^\| ([MRQF]\d) \| (.+) \|$", PAGE, re.MULTILINE)
}  # the paper, here, options and files

# The statements, and the options that each must name.
STATEMENTS = {
    "M1": {"teachers", "students"},
    "M2": {"task_kinds", "prompt_style"},
    "M3": {"matchmaking", "pfsp_kappa", "ratings", "determinism_runs", "attempts_per_task", "replay"},
    "M4": {"teacher_reward", "teacher_reward_invalid", "teacher_reward_unsolved", "student_reward"},
    "M5": {"evolve_every", "cull_fraction", "crossover_rate", "mutations", "crossovers", "mutation_strength"}
    | {"evolve_burn_in", "tournament_size"},
    "M6": {"single_agent"},
    "R1": {"single_agent"},
    "R2": set(),
    "R3": {"ratings"},
    "R4": {"mutations", "crossovers"},
    "R5": set(),
    "R6": set(),
    "Q1": set(),
    "F1": set(),
}
VERDICTS = ("the same", "different on purpose", "not tested here", "agree", "disagree", "cannot be told")
VERDICTS += ("our threshold was not met", "depends on what is held fixed")


def test_every_statement_of_the_paper_stands_on_the_page_once():
    assert re.findall(r"^\| ([MRQF]\d) \|", PAGE, re.MULTILINE) == list(STATEMENTS)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_has_a_verdict_and_names_options_and_files_that_exist(statement):
    _, here, where = ROWS[statement]
    assert any(verdict in here.lower() for verdict in VERDICTS)
    named = set(re.findall(r"`([^`]+)`", where))
    files = {name for name in named if "/" in name}
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert named - files == STATEMENTS[statement]
    assert named - files <= OPTIONS
    assert named


def test_the_options_that_the_statements_name_have_the_values_that_the_page_says():
    said = dict(re.findall(r"`(teacher_reward|ratings): (\w+)`", PAGE))
    assert said == {"teacher_reward": "paper", "ratings": "trueskill"}
    recipe = yaml.safe_load((ROOT / "recipes" / "paper.yaml").read_text())
    assert said.items() <= recipe.items()
    assert "paper" in PAY
    assert {"svd_perturb", "module_swap", "average", "slerp"} <= MUTATIONS.keys() | CROSSOVERS.keys()
    defaults = {each.name: each.default for each in fields(PopuLoRAConfig)}
    assert (defaults["teacher_reward"], defaults["ratings"], defaults["pfsp_kappa"]) == ("guarded", "scores", 2.0)


def test_values_at_second_hand_name_options_and_files():
    section = PAGE.partition("\n## Second hand\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| [^|]+ \| (.+) \|$", section, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} - {"peft_config", "member"}
    files = {name for name in named if "/" in name}
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert len(named - files) >= 10
    assert named - files <= OPTIONS


# What `paper` may stand beside: the rest is second hand or ours.
OF_THE_PAPER = {"teachers", "students", "task_kinds", "matchmaking", "ratings", "teacher_reward", "single_agent"}
OF_THE_PAPER |= {"mutations", "crossovers", "teacher_reward_invalid", "teacher_reward_unsolved"}


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/**/*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_says_paper_only_of_what_the_paper_says(path):
    said = re.findall(r"^(\w+):[^#\n]*# .*\bpaper(?:'s)?\b", path.read_text(), re.MULTILINE)
    assert set(said) <= OF_THE_PAPER


def test_a_setting_says_paper_only_of_what_the_paper_says():
    helps = {each.name: each.metadata.get("help", "") for each in fields(PopuLoRAConfig)}
    said = {name for name, text in helps.items() if re.search(r"\(paper\b", text)}
    assert said <= OF_THE_PAPER
    assert {"teacher_reward_invalid", "teachers", "ratings"} <= said
    for name in ("max_steps", "evolve_every", "cull_fraction", "crossover_rate", "pfsp_kappa", "student_reward_wrong"):
        assert "second hand" in helps[name].lower(), name


STUDY = ROOT / "studies" / "tiny"
OPERATORS = (ROOT / "docs" / "guides" / "operators.md").read_text()
RUNS, MEMBERS = (json.loads((STUDY / name).read_text()) for name in ("as_printed.json", "as_printed_members.json"))
SEEDS = [str(seed) for seed in range(5)]


def last(run: dict, key: str) -> float:
    return run["evaluations"][-1][key]


def gain(run: dict, which: str) -> float:
    return last(run, f"solve_rate_{which}") - last(run, "base/solve_rate")


def last_fifth(run: dict, name: str) -> float:
    curve = run["curves"][name]
    return fmean(curve[-(len(curve) // 5) :])


# Rows of the table "As printed", and what each is computed from: a scale, and a figure of a run.
AS_PRINTED = {
    "held-out tasks, students' mean less the base, points": (100, lambda run: gain(run, "mean")),
    "the same, worst student": (100, lambda run: gain(run, "worst")),
    "proposals that became tasks, of 100": (100, lambda run: last_fifth(run, "valid proposals")),
    "tasks that nobody solves, of 100": (100, lambda run: last_fifth(run, "valid proposals nobody solves")),
    "new structures, per 100 tasks": (100, lambda run: last_fifth(run, "new structures per valid proposal")),
    "deviation of a role's ratings, in sigmas": (1, lambda run: last_fifth(run, "rating spread in a role")),
}
REFUSED = {
    "refused because the inputs are equal, of 100": "refused: duplicate_inputs",
    "refused because the output is constant, of 100": "refused: constant_output",
}


def tell(numbers: list[float], scale: int = 1) -> str:
    """`3.6 [-3.0 to 10.3]`, a t interval; two digits for what is not in hundredths."""
    mean, half = measure_mean(numbers)
    form = "{:.2f}" if scale == 1 else "{:.1f}"
    low, high = (form.format(scale * value) for value in (mean - half, mean + half))
    return f"{form.format(scale * mean)} [{low} to {high}]"


def cells(section: str, row: str) -> list[str]:
    (found,) = re.findall(rf"^\| {re.escape(row)} \| (.+) \|$", section, re.MULTILINE)
    return found.split(" | ")


@pytest.mark.parametrize("row", [*AS_PRINTED, *REFUSED])
def test_the_runs_as_printed_stand_beside_those_of_the_default(row):
    section = PAGE.partition("\n## As printed\n")[2].partition("\n## ")[0]
    if row in REFUSED:
        scale, both = 100, [[MEMBERS[v][seed][REFUSED[row]] for seed in SEEDS] for v in ("paper", "default")]
    else:
        scale, figure = AS_PRINTED[row]
        both = [[figure(RUNS[variant][seed]) for seed in SEEDS] for variant in ("paper", "default")]
    form = "{:.2f}" if scale == 1 else "{:.1f}"
    means = [form.format(scale * fmean(numbers)) for numbers in both]
    assert cells(section, row) == [*means, tell([one - other for one, other in zip(*both, strict=True)], scale)]


MEMBERS_DIFFER = {
    "cosine of two students' updates": ("cosine of two students", 1),
    "cosine of two teachers' updates": ("cosine of two teachers", 1),
    "right code_o answers of the best student, points above the worst": ("code_o: best student less worst", 100),
    "the same, code_i": ("code_i: best student less worst", 100),
    "the same, code_f": ("code_f: best student less worst", 100),
    "correlation of specialities in odd and in even steps": ("specialities: correlation of odd and even steps", 1),
    "different forms in 100 right code_f answers of one student": ("forms per code_f answer of one student", 100),
    "how many more if the answers are of all students": ("more of them if all students' are mixed", 100),
}


@pytest.mark.parametrize("row", MEMBERS_DIFFER)
def test_how_members_differ_is_told_of_the_same_runs(row):
    section = PAGE.partition("\n## How members differ\n")[2].partition("\n## ")[0]
    name, scale = MEMBERS_DIFFER[row]
    told = [tell([MEMBERS[variant][seed][name] for seed in SEEDS], scale) for variant in ("paper", "default")]
    assert cells(section, row) == told


RECOVERY = json.loads((STUDY / "recovery.json").read_text())  # by seed, role and entrant: reward by play
WINDOW, TOLERANCE = 3, 0.05  # plays of a mean, and what a child may be behind its parent to be back


def gaps(rewards: dict[str, list[float | None]], entrant: str) -> list[float]:
    """After each number of updates: mean reward over the next plays, less the parent's over the same."""
    both = list(zip(rewards[entrant], rewards["parent"], strict=True))
    windows = [both[start : start + WINDOW] for start in range(len(both) - WINDOW + 1)]
    known = [[own - parent for own, parent in each if None not in (own, parent)] for each in windows]
    return [fmean(each) if each else math.nan for each in known]


@pytest.mark.parametrize("entrant", list(RECOVERY["0"]["student"])[1:])
def test_how_long_children_need_is_told_operator_by_operator(entrant):
    section = OPERATORS.partition("\n## How long children need\n")[2].partition("\n## ")[0]
    expected = []
    for role in ("student", "teacher"):
        of_seeds = [gaps(RECOVERY[seed][role], entrant) for seed in SEEDS]
        back = [next((n for n, gap in enumerate(each) if gap >= -TOLERANCE), "never") for each in of_seeds]
        expected += [tell([each[0] for each in of_seeds]), ", ".join(map(str, back))]
    name = entrant if " " in entrant or entrant == "clone" else f"`{entrant}`"
    assert cells(section, name.replace("clone", "unchanged copy")) == expected
