"""The comparison recipe: runs of it on the embedded base, its figures, and the page of small runs."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.populora_run import EVALUATED, make_trainer
from trl_populora.assets import tiny_eval_tasks
from trl_populora.report.load import load_evaluations, load_history
from trl_populora.run.read import PLAYED


sys.path.insert(0, str(Path(__file__).parents[1]))

import arms_race  # noqa: E402
import tiny_headroom  # noqa: E402


pages, runs = arms_race.pages, arms_race.runs
PUBLISHED = Path(arms_race.__file__).parent / "tiny"


@pytest.fixture
def few_tasks(monkeypatch):
    """Six tasks for transfer, two of each kind."""
    tasks = arms_race.untrained_tasks(6)
    assert {task.kind for task in tasks} == {"code_o", "code_i", "code_f"}
    monkeypatch.setattr(arms_race, "untrained_tasks", lambda: tasks)


@pytest.fixture(scope="module")
def output(random_base, seed_tasks, tmp_path_factory):
    """Two variants with one finished run each, and one run that has only begun."""
    root = tmp_path_factory.mktemp("race")
    Path(random_base, "tasks.json").write_text(json.dumps([task.to_record() for task in seed_tasks]))
    agent = {"single_agent": True, "per_device_train_batch_size": 6}
    common = EVALUATED | {"task_kinds": ["tests.populora_run:Letters", "code_o", "code_i", "code_f"], "max_steps": 2}
    for name, settings in {"4t4s/seed_0": {}, "single_agent/seed_0": agent, "single_agent/seed_1": agent}.items():
        trainer = make_trainer(random_base, str(root / name), common | {"save_strategy": "no"} | settings)
        trainer.train()
        if name != "single_agent/seed_1":
            trainer.save_state()
            trainer.save_model()
    return root


@pytest.mark.parametrize("variant", arms_race.VARIANTS)
def test_every_variant_is_a_recipe_with_the_papers_pay(variant, tmp_path):
    recipe = yaml.safe_load(arms_race.CONFIG.read_text())
    assert float(arms_race.RATE) == float(recipe["learning_rate"])
    options = arms_race.options_of(variant, 75)
    _, args, *_ = tiny_headroom.parse(tmp_path / "run", 0, options, arms_race.CONFIG)
    assert (args.max_steps, args.teacher_reward, args.replay) == (75, "guarded", 0)
    pairs = 1 if args.single_agent else max(args.teachers, args.students)
    rows = pairs * args.proposals_per_teacher * (1 + args.attempts_per_task)
    assert args.rows_per_step == (rows if args.teachers else 4 * 9 * args.attempts_per_task)


@pytest.fixture
def no_curves(monkeypatch):
    """Of a page whose tables are looked at: its eleven panels take seconds."""
    monkeypatch.setattr(pages, "draw_curves", lambda runs, path: path.write_bytes(b""))


@pytest.fixture
def race_twice(few_tasks, no_curves, tmp_path, monkeypatch):
    """Gives the command for one step of a variant twice; returns the run."""

    def race(variant: str) -> Path:
        tasks = Path(tiny_eval_tasks()).read_text(encoding="utf-8").splitlines()[:3]
        (tmp_path / "tasks.jsonl").write_text("\n".join(tasks) + "\n", encoding="utf-8")
        options = f"--variants {variant} --seeds 0 --steps 1 --output {tmp_path} --eval_tasks {tmp_path}/tasks.jsonl"
        options += " --students 1 --evolve_every 0 --proposals_per_teacher 3 --attempts_per_task 3"
        options += "" if variant == "seed_tasks" else " --teachers 1"
        options += " --per_device_train_batch_size 3 --max_completion_length 64 --eval_attempts 1 --eval_steps 1"
        monkeypatch.syspath_prepend(str(arms_race.CONFIG.parents[1]))
        monkeypatch.setattr(sys, "argv", ["arms_race.py", *options.split()])
        for _ in range(2):
            arms_race.main()
        return tmp_path / variant / "seed_0"

    return race


@pytest.mark.parametrize("variant", ["seed_tasks", pytest.param("coin", marks=pytest.mark.slow)])
def test_a_variant_is_trained_once(variant, race_twice, tmp_path, capsys):
    run = race_twice(variant)
    assert arms_race.steps_done(run) == 1
    assert capsys.readouterr().out.count("step 1/1 | valid") == 1
    (valid,) = runs.measure(run).curves["valid proposals"]
    assert math.isnan(valid) == (variant == "seed_tasks"), "there nobody proposes"
    text = (tmp_path / "table.md").read_text()
    assert "1 x 1" in text
    assert "levels never trained" in text


@pytest.mark.slow
def test_rejection_fine_tuning_is_compared_by_the_adapter_that_it_makes(race_twice):
    run = race_twice("rejection")
    tuned, kept = (load_file(run / path / "adapter_model.safetensors") for path in ("sft", "members/agent"))
    assert all(torch.equal(kept[key], value) for key, value in tuned.items())
    assert sum(value.abs().sum() for key, value in tuned.items() if "lora_B" in key) > 0
    (entry,) = load_evaluations(run)
    assert entry["step"] == 1


def test_the_page_compares_what_has_been_run(output, few_tasks):
    page = arms_race.compare(output, ["4t4s", "single_agent", "uniform"], [0, 1], 2).read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page
    text = (output / "table.md").read_text()
    assert "| steps x seeds | 2 x 1 | 2 x 2 |" in text
    assert "uniform" not in text
    members = json.loads((output / "members.json").read_text())
    assert len(members["teachers"]) == len(members["students"]) == 3, "an unfinished run does not play"
    rows = [line for line in text.splitlines() if line.startswith("| teachers of")]
    assert [row.split(" |")[0] for row in rows] == ["| teachers of 4t4s", "| teachers of single_agent"]
    transfer = json.loads((output / "4t4s" / "seed_0" / "untrained.json").read_text())
    assert set(transfer) == {"base", "student_0", "student_1"}
    (row,) = [line for line in text.splitlines() if line.startswith("| gain over the base, mean |")]
    gains = [runs.measure(output / name / "seed_0").gain() for name in ("4t4s", "single_agent")]
    assert f"{gains[0] - gains[1]:+.3f}, one seed" in row


def test_runs_whose_files_are_gone_are_compared_by_their_figures(output, few_tasks, tmp_path):
    variants = ["4t4s", "single_agent"]
    arms_race.compare(output, variants, [0, 1], 2)
    (tmp_path / runs.RESULTS).write_text((output / runs.RESULTS).read_text())
    page = arms_race.compare(tmp_path, variants, [0, 1], 2).read_text()
    assert page.count("data:image/png;base64,") == 2, "members that are gone do not play"
    before, after = ((path / "table.md").read_text().split("**Cross-play")[0] for path in (output, tmp_path))
    assert after.strip() == before.strip()
    assert (tmp_path / runs.RESULTS).read_text() == (output / runs.RESULTS).read_text()


@pytest.fixture
def tables_of(no_curves, tmp_path):
    """Gives the tables that the page makes of the runs in a published file."""

    def compare(results: Path, variants: list[str], seeds: list[int], steps: int, against: str) -> list[str]:
        (tmp_path / runs.RESULTS).write_text(results.read_text())
        arms_race.compare(tmp_path, variants, seeds, steps, against)
        return [table.strip() for table in (tmp_path / "table.md").read_text().split("\n\n")[1::2]]

    return compare


def row(table: str, start: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_says_what_the_published_figures_say(tables_of):
    said = (arms_race.CONFIG.parent / "README.md").read_text()
    claims, *_ = tables_of(PUBLISHED / runs.RESULTS, ["single_agent", "4t4s"], [0, 1, 2, 3, 4], 150, "single_agent")
    assert claims.strip() in said
    variants = [*runs.load(PUBLISHED / runs.RESULTS)]
    _, _, held_out, _ = tables_of(PUBLISHED / runs.RESULTS, variants, [0, 1, 2], 75, "4t4s")
    gains = dict(zip(row(held_out, "at the last evaluation"), row(held_out, "gain over the base"), strict=True))
    tuned, reinforced = (100 * float(gains[name].split()[0]) for name in ("rejection", "single_agent"))
    assert f"the single agent solves {reinforced:.0f} points more of the held-out tasks than the base" in said
    assert f"from as many samples, solves {tuned:.0f} points more" in said
    variants = ["no_evolution", "4t4s"]
    _, paired, *_ = tables_of(PUBLISHED / "evolution.json", variants, [1, 2, 3, 4, 5], 40, "no_evolution")
    for student in ("mean", "worst student", "best student"):
        assert "**" not in row(paired, f"gain over the base, {student}")[1], "the page says neither better nor worse"


SAID = re.compile(r"(\d+\.\d+)[^\[\]|]*? \[([^\]]*\d[^\]]*)\](?!\()")  # a mean and its interval, on a page
NUMBER = re.compile(r"\d+\.\d+")


def sizes(told: str, factor: int, digits: int) -> list[str]:
    """Mean and interval of a claim without their signs, the ends by size; a factor of 100 makes points of rates."""
    mean, *ends = [f"{factor * float(number):.{digits}f}" for number in NUMBER.findall(told)]
    return [mean, *sorted(ends, key=float)]


def test_the_figures_beside_the_papers_statements_are_those_of_the_claims():
    race = runs.load(PUBLISHED / runs.RESULTS)
    rows = pages.claims_table({name: race[name] for name in ("single_agent", "4t4s")})
    found = (arms_race.CONFIG.parents[2] / "docs" / "paper.md").read_text().partition("## What it found")[2]
    for number, row in re.findall(r"^\| (R\d) \| (.+)$", found, re.MULTILINE):
        told = [cells[3] for cells in rows if cells[0] in (number, "ours")]
        measured = [sizes(each, *form) for each in told for form in ((1, 3), (100, 1))]
        said = [[mean, *sorted(NUMBER.findall(ends), key=float)] for mean, ends in SAID.findall(row)]
        assert [each for each in said if each not in measured] == [], number
        assert bool(said) == (number not in ("R4", "R5")), number
    ends = [round(run.fifths("solve rate of fresh tasks")[1], 3) for run in race["single_agent"].values()]
    assert f"it ends at {100 * fmean(ends):.0f} %." in found
    assert sum(len(run.back) for run in race["4t4s"].values()) == 70


@pytest.mark.slow
def test_the_smallest_published_figure_comes_back(few_tasks, tmp_path, monkeypatch):
    options = f"--variants single_agent --seeds 0 --steps 1 --output {tmp_path} --eval_steps 1000"
    monkeypatch.setattr(sys, "argv", ["arms_race.py", *options.split()])
    arms_race.main()
    seen, *_ = runs.measure(tmp_path / "single_agent" / "seed_0").evaluations
    published = runs.load(PUBLISHED / runs.RESULTS)["single_agent"][0].evaluations[0]
    assert seen == pytest.approx(published, abs=0.02), "the base's rates; another machine rounds and samples otherwise"


def test_the_first_steps_of_longer_runs_are_compared(output):
    page = arms_race.compare(output, ["4t4s", "single_agent"], [0, 1], 1).read_text()
    assert "| steps x seeds | 1 x 1 | 1 x 2 |" in (output / "table.md").read_text()
    assert page.count("data:image/png;base64,") == 2, "members of another step do not play"
    assert [entry["step"] for entry in runs.measure(output / "4t4s" / "seed_0").first(1).evaluations] == [0]


def test_a_measure_is_a_mean_over_the_seeds(output):
    begun = {"single_agent": {seed: runs.measure(output / "single_agent" / f"seed_{seed}") for seed in (0, 1)}}
    histories = [load_history(output / "single_agent" / f"seed_{seed}") for seed in (0, 1)]
    rates = [fmean(entry["propose/valid_rate"] for entry in played if PLAYED in entry) for played in histories]
    (row,) = [row for row in pages.table(begun) if row[0].startswith("valid proposals (")]
    assert row[1].split(" to ")[0] == pages.spread([round(rate, 4) for rate in rates])


def test_curves_are_means_of_five_steps():
    assert runs.blocks([1.0, 2.0, 3.0, 4.0, math.nan, 7.0]) == [2.5, 7.0]
    run = runs.Run(steps=30, curves={"x": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]})
    assert (run.fifths("x"), run.rise("x")) == ((1.0, 6.0), 5.0)
    assert run.first(10).curves == {"x": [1.0, 2.0]}


def attempts(member: str, version: int, step: int, right: int, of: int = 10) -> list[dict]:
    row = {"role": "student", "member": member, "version": version, "step": step, "archived": False}
    return [row | {"correct": index < right} for index in range(of)]


def test_a_newborn_student_is_back_when_it_solves_what_the_others_do():
    birth = {"step": 10, "role": "student", "child": "student_1@1"}
    peer = [row for step in range(11, 21) for row in attempts("student_0", 0, step, 8)]
    own = {11: 0, 12: 4, 13: 6, 14: 8, 15: 9}  # over three steps .33, .6, .77: back with the fifth
    rows = peer + [row for step, right in own.items() for row in attempts("student_1", 1, step, right)]
    assert runs.recoveries([birth], rows) == [4]
    assert runs.recoveries([birth], peer + attempts("student_1", 1, 11, 9)) == [None], "replaced after a step"
    assert runs.Run(steps=20, back=[4, None, 21]).share_back() == pytest.approx(1 / 3)


def test_an_interval_is_students_over_the_seeds():
    assert pages.interval([0.0, 0.1]) == "+0.050 [-0.585, +0.685]", "two seeds: 12.7 standard errors"
    assert pages.told([0.1, 0.1, 0.1, 0.1, 0.1]).startswith("**+0.100 [+0.100, +0.100], 5 of 5 above")
    assert not pages.told([-0.1, 0.1, 0.2, 0.1, -0.3]).startswith("**"), "zero lies within"
    assert not pages.told([0.1, 0.1, 0.2]).startswith("**"), "three seeds are no claim"
    assert pages.told([]) == "-"


def test_a_claim_is_told_by_five_seeds_and_an_interval_without_zero():
    assert pages.verdict([0.1, 0.2, 0.1, 0.1, 0.3]) == pages.verdict([0.1, 0.2, 0.1, 0.1, 0.3], ours=True) == "agrees"
    assert pages.verdict([-0.1, -0.2, -0.1, -0.1, -0.3]) == "disagrees"
    assert pages.verdict([-0.1, -0.2, -0.1, -0.1, -0.3], ours=True) == "our threshold was not met"
    assert pages.verdict([-0.1, 0.1, 0.2, 0.1, -0.3]) == "cannot be told"
    assert pages.verdict([0.1, 0.2, 0.1, 0.1]) == "cannot be told: too few seeds"
    longer = {seed: runs.Run(steps=25, curves={"lines of code": [4, 4, 4, 4, 5 + seed]}) for seed in range(5)}
    measures = {name: [0.5, 0.4, 0.6, 0.5, 0.5] for name in ("valid proposals", "solve rate of fresh tasks")}
    measures["new structures per valid proposal"] = [0.5] * 5
    for run in longer.values():
        run.curves |= measures
        run.rows = 288
    table = pages.claims_table({"4t4s": longer})
    (row,) = [row for row in table if row[1] == "its lines rise"]
    assert (row[0], *row[4:]) == ("R2", "5", "agrees")
    assert {row[-1] for row in table[1:]} <= {
        *("agrees", "disagrees", "cannot be told", "our threshold was not met", "cannot be told: too few seeds")
    }


def test_coverage_is_counted_in_all_and_by_the_step():
    """A population writes four times the proposals of a single agent."""
    race = runs.load(PUBLISHED / runs.RESULTS)
    counted = {
        name: [round(runs.BLOCK * sum(race[name][seed].new_shapes())) for seed in range(5)]
        for name in ("4t4s", "single_agent")
    }
    assert counted == {"4t4s": [1994, 1848, 1282, 1302, 1833], "single_agent": [643, 568, 637, 652, 631]}


def test_a_rise_and_fall_does_not_swing_and_a_wave_does():
    def swing(rates):
        curves = {"solve rate of fresh tasks": rates, "valid proposals": [1.0] * 30}
        return runs.Run(steps=150, rows=288, curves=curves).swing()

    sampling = 0.5 / math.sqrt(5 * 32)
    for hill in (lambda x: 0.3 + 0.01 * x, lambda x: 0.4 + 0.03 * x - 0.001 * x * x):
        assert swing([hill(place) for place in range(30)]) == pytest.approx(-sampling)
    assert math.isnan(swing([0.5, math.nan, 0.7, 0.6])), "three known blocks lie on a parabola"
    assert swing([0.5 + 0.2 * math.sin(place) for place in range(30)]) == pytest.approx(0.14 - sampling, abs=0.01)
