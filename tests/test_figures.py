"""Figures of README and of the recipes' pages, computed from the JSON files of the runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import pytest

from trl_populora.evaluate.intervals import measure_mean
from trl_populora.hub.export import STUDENTS


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
TINY = (ROOT / "recipes" / "tiny" / "README.md").read_text()
SMOLLM2 = (ROOT / "recipes" / "SmolLM2-135M-Instruct" / "README.md").read_text()
MEASURED = json.loads((ROOT / "benchmarks" / "figures.json").read_text())
SCREEN = json.loads((ROOT / "studies" / "tiny" / "screen.json").read_text())
RACE = json.loads((ROOT / "studies" / "tiny" / "race.json").read_text())
HEADROOM = json.loads((ROOT / "studies" / "tiny" / "headroom.json").read_text())
CHILDREN = [json.loads(path.read_text())["result"] for path in sorted(ROOT.glob("studies/tiny/retention/seed_*.json"))]
PUBLISHED = json.loads((ROOT / "studies" / "smollm2" / "held_out.json").read_text())

Run = dict  # of `screen.json`
FIGURE = re.compile(
    r"\d[\d.]*(?: %| times)|\d[\d.]* points? (?:better|worse)|\[[^\]]*\d[^\]]*\](?!\()|\d+ (?:of \d+ )?seeds"
)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def bracket(low: float, high: float, digits: int = 0) -> str:
    """The ends of an interval, as in `[1 to 5]` or, where it holds zero, `[1 worse to 5 better]`."""
    ends = [f"{abs(100 * end):.{digits}f}" for end in (low, high)]
    if low < 0 < high:
        return f"[{ends[0]} worse to {ends[1]} better]"
    return f"[{' to '.join(sorted(ends, key=float))}]"


def points(mean: float, low: float, high: float, digits: int = 0) -> str:
    """A difference as pages write it: `3 points better [1 to 5]`."""
    size = f"{abs(100 * mean):.{digits}f}"
    side = "" if float(size) == 0 else " better" if mean > 0 else " worse"
    return f"{size} point{'' if size == '1' else 's'}{side} {bracket(low, high, digits)}"


def over(values: Sequence[float]) -> str:
    """A difference over runs with several seeds."""
    mean, half = measure_mean(values)
    return points(mean, mean - half, mean + half)


def cells(page: str, start: str) -> list[str]:
    """The other cells of the row whose first cell begins so, without bold."""
    (row,) = [line for line in page.replace("**", "").splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


# What `screen.json` says of a run.


def held_out(run: Run) -> float:
    return run["held_out"][-1]["mean"]


def worst(run: Run) -> float:
    return run["held_out"][-1]["worst"]


def probes(run: Run) -> float:
    return fmean(rate for name, rate in run["probes"].items() if name != "base")


def as_one_model(asked: str) -> Callable[[Run], float]:
    """Of the mean of the students, or of the one adapter that there is."""
    return lambda run: (run["merged"].get("mean of the students") or run["merged"]["student_0"])[asked]


def pooled_against_agent() -> list[float]:
    """What pooled students as one model have more than the race's agent, by seed; seeds 0 and 1 chose settings."""
    pooled, agent = RACE["pooled"], RACE["agent_104_slow"]
    both = [seed for seed, run in pooled.items() if seed in agent and int(seed) >= 5 and run["rows"] == 62_400]
    return [
        pooled[seed]["judged"]["one model"]["judged"] - agent[seed]["judged"]["one model"]["judged"] for seed in both
    ]


def race(of: Callable[[Run], float], against: str) -> list[float]:
    """What a population is above a single agent, seed by seed."""
    return [of(run) - of(SCREEN[against][seed]) for seed, run in SCREEN["race_4t4s"].items()]


def learned() -> list[float]:
    return [probes(run) - run["probes"]["base"] for run in SCREEN["rarity_slow_replay"].values()]


def find_published(who: str) -> dict:
    """The first row of its name: of the recipe's commands, where several ways of sampling were measured."""
    return next(row for row in PUBLISHED["rows"] if row["who"] == who)


POPULATION = find_published("2T+2S, mean of the seeds")

# The figures that each row of README's table has, in their order.
AGAINST_AGENT = pooled_against_agent()
ROWS = {
    "What does it cost on a GPU?": [percent(MEASURED["step_at_7b"]["step"], 1)],
    "A sweep in one run?": [
        f"{MEASURED['sweep']['trl_over_ours']} times",
        percent(MEASURED["sweep"]["live_rows"]),
        f"{MEASURED['sweep_learns']['seeds']} of {MEASURED['sweep_learns']['seeds']} seeds",
        *(percent(fmean(MEASURED["sweep_learns"][name])) for name in ("best", "base")),
    ],
    "What is learned?": [
        percent(fmean(run["probes"]["base"] for run in SCREEN["rarity_slow_replay"].values())),
        percent(fmean(map(probes, SCREEN["rarity_slow_replay"].values()))),
        *over(learned()).partition(" [")[::2],
        f"{len(learned())} seeds",
    ],
    "A population against one agent, at equal rows?": [
        *over(race(held_out, "single_agent_all_rows")).partition(" [")[::2],
        f"{len(SCREEN['race_4t4s'])} seeds",
        *over(race(as_one_model("held_out"), "single_agent_all_rows")).partition(" [")[::2],
        *over(AGAINST_AGENT).partition(" [")[::2],
        f"{len(AGAINST_AGENT)} seeds",
    ],
    "A pretrained model?": [
        percent(find_published("cold start")["right"], 1),
        percent(POPULATION["right"], 1),
        *points(*POPULATION["above_cold_start"], 1).partition(" [")[::2],
        bracket(*PUBLISHED["over_three_seeds"]["above_cold_start"][1:], 1).removeprefix("["),
        "3 seeds",
    ],
}


def test_readme_has_a_row_for_each_of_five_questions():
    section = README.partition("\n## What was measured\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.+?) \|", section, re.MULTILINE) == ["question", *ROWS]


@pytest.mark.parametrize("question", ROWS)
def test_every_figure_of_a_row_is_that_of_a_json_file(question):
    (cell,) = cells(README, question)
    shown = re.sub(r"`[^`]*`|\]\([^)]*\)", "]", cell)
    assert [figure.removeprefix("[") for figure in FIGURE.findall(shown)] == ROWS[question]


def test_a_third_of_the_time_is_a_third():
    assert "took a third of the time" in README
    assert MEASURED["step_at_7b"]["step"] == pytest.approx(1 / 3, abs=0.02)


def test_the_benchmarks_page_has_the_figures_of_readme_with_their_commands():
    for name, shown in {"step_at_7b": "x .345", "sweep": "5.1"}.items():
        section = RESULTS.partition(f"\n## {name}.py\n")[2].partition("\n## ")[0]
        assert f"**{shown}**" in section
        assert MEASURED[name]["command"] in section
    section = RESULTS.partition("\n## sweep_learns.py\n")[2].partition("\n## ")[0]
    for name in ("base", "best"):
        rates = MEASURED["sweep_learns"][name]
        assert f"{percent(fmean(rates))}" in section
        assert ", ".join(f"{100 * rate:.0f}" for rate in rates) in section


def test_pages_have_the_seconds_of_a_step_at_7b_that_are_kept():
    kept = MEASURED["step_at_7b"]
    told = {
        side: {phase: " to ".join(dict.fromkeys(map(str, ends))) for phase, ends in seconds.items()}
        for side, seconds in kept["seconds"].items()
    }
    section = RESULTS.partition("\n## step_at_7b.py\n")[2].partition("\n## ")[0]
    for phase in told["ours"]:
        row = "update and rest" if phase == "update" else phase
        shown = [re.sub(r"(?<!\d)\.", "0.", cell) for cell in cells(section, f"{row}, seconds")]
        assert shown[:2] == [told[side][phase] for side in ("ours", "trl")]
    text = " ".join(section.split())
    assert f"{kept['rows']} rows a step, completions of {kept['completion']}," in text
    assert "Half of the rows have an advantage, and eight attempts share a prompt" in text
    assert (kept["live_rows"], kept["attempts"]) == (0.5, 8)
    gpu = (ROOT / "docs" / "guides" / "gpu.md").read_text()
    assert f"({told['ours']['step']} s against {told['trl']['step']})" in gpu
    assert f"{told['ours']['publish']} s through host memory (TRL's sync of one: {told['trl']['publish']} s)" in gpu


@pytest.mark.parametrize("candidate", [name for name in SCREEN if name != "rarity"])
def test_the_page_of_the_tiny_base_has_the_means_of_a_candidate(candidate):
    runs = list(SCREEN[candidate].values())
    at_start = [fmean(run["held_out"][0]["base"] for run in runs), fmean(run["probes"]["base"] for run in runs)]
    at_end = [fmean(map(held_out, runs)), fmean(map(probes, runs))]
    pairs = [f"{100 * start:.0f}, {percent(end)}" for start, end in zip(at_start, at_end, strict=True)]
    least, width = min(min(run["valid"]) for run in runs), fmean(run["features"][-1] for run in runs)
    assert cells(TINY, f"`{candidate}`")[1:] == [str(len(runs)), *pairs, percent(least), f"{width:.0f}"]


@pytest.mark.parametrize(
    ("start", "of"),
    [
        ("students in the mean, held-out", held_out),
        ("the worst student", worst),
        ("students in the mean, probes", probes),
        ("the mean of the students as one model", as_one_model("held_out")),
        ("the same, probes", as_one_model("probes")),
    ],
)
def test_a_population_is_compared_with_each_agent_as_the_runs_say(start, of):
    assert cells(TINY, start) == [over(race(of, agent)) for agent in ("single_agent_replay", "single_agent_all_rows")]


def test_what_is_learned_and_forgotten_is_said_as_the_runs_say():
    assert f"solve {over(learned()).replace(' better', ' more of the probes than the base')}" in TINY
    ours, agents = (
        fmean(run["forgotten"] for run in SCREEN[name].values()) for name in ("race_4t4s", "single_agent_replay")
    )
    assert f"its students forgot {ours:.0f} mastered features on average" in TINY
    assert f"the agent with the rows of one pair forgot {agents:.0f}." in TINY


def test_what_is_elicited_is_said_as_the_runs_say():
    runs = list(HEADROOM.values())
    base = [percent(fmean(run["base"][key] for run in runs)) for key in ("solve_rate", "thinking_rate")]
    ends = [percent(fmean(run["students"][-1][key] for run in runs)) for key in ("solve_rate", "thinking_rate")]
    assert cells(TINY, "base | 39 %") == ["39 %", "9 %"] == base
    assert cells(TINY, "students after 60 steps") == ends


@pytest.mark.parametrize("name", [name for name in CHILDREN[0] if "@" not in name and name != "clone"])
def test_a_child_keeps_what_the_page_says(name):
    kinds = [percent(fmean(result[name][kind] for result in CHILDREN)) for kind in ("code_o", "code_i")]
    better = [max(result[f"{kind} parent"]["mixture"] for kind in ("code_o", "code_i")) for result in CHILDREN]
    above = [result[name]["mixture"] - best for result, best in zip(CHILDREN, better, strict=True)]
    first = name if name.endswith("parent") else "base | 41" if name == "base" else f"`{name}`"
    compared = "" if name == "code_o parent" else over(above)
    assert cells(TINY, first) == [*kinds, compared]


@pytest.mark.parametrize(
    ("start", "who"),
    [
        ("base", "base"),
        ("cold start", "cold start"),
        ("2 teachers and 2 students, mean", "2T+2S, mean of the seeds"),
        ("single agent, mean", "single agent, mean of the seeds"),
    ],
)
def test_the_page_of_the_135m_has_the_figures_of_its_runs(start, who):
    row = find_published(who)
    compared = [points(*row[key], 1) if row[key] else "" for key in ("above_cold_start", "without_copying")]
    assert cells(SMOLLM2, f"{start}")[:4] == [percent(row["right"], 1), *compared, percent(row["readable"])]
    over_runs = PUBLISHED["over_nine_populations"]["above_cold_start"]
    assert points(*over_runs, 1) in SMOLLM2


POOLINGS = {
    "never": "separate",
    "every 20 steps": "pooled_20",
    "every 5 steps": "pooled_5",
    "every step": "pooled_1",
    "every 20 steps, at twice the rate": "pooled_20_fast",
    "every 5 steps, at twice the rate": "pooled_5_fast",
    "every step, at twice the rate": "pooled_1_fast",
    "every 5 steps, at twice the rate; teachers paid for features of their own": "pooled_5_shares",
    "every 5 steps, at twice the rate; students at temperatures 0.7, 1, 1 and 1.3": "pooled_5_temperatures",
    "every 5 steps, at twice the rate; students at 0.5, 1, 1 and 2 times this rate": "pooled_5_rates",
    "every 5 steps, then moved on with momentum (DiLoCo's outer step)": "pooled_5_outer",
}


def test_what_pooling_gave_is_told_as_measured():
    page = (ROOT / "docs" / "how" / "evolve.md").read_text()
    kept = json.loads((ROOT / "studies" / "tiny" / "pooling.json").read_text())
    assert kept.keys() == set(POOLINGS.values())
    for label, name in POOLINGS.items():
        runs = [run["merged"] for run in kept[name].values()]
        alone = [fmean(rates["held_out"] for who, rates in run.items() if who != STUDENTS) for run in runs]
        together = [run[STUDENTS]["held_out"] for run in runs]
        told = [", ".join(f"{100 * rate:.1f}" for rate in rates) + " %" for rates in (alone, together)]
        assert f"| {label} | {' | '.join(told)} |" in page
        assert {run["steps"] for run in kept[name].values()} == {75}
    merged = json.loads((ROOT / "studies" / "tiny" / "merging.json").read_text())["separate"]["0"].values()
    ways = [f"{100 * rates['held out']:.1f}" for rates in merged]
    assert f"mean of factors {ways[1]} %, weighted by Fisher information {ways[2]} %, TIES {ways[3]} %" in page
