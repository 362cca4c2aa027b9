"""The report reads what a real run leaves, whole or in progress, and is one safe page."""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import matplotlib.image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.unfinished import as_it_was
from trl_populora import cli
from trl_populora.evaluate.cross_play import Payoff, choose_payoff_size, write_payoff
from trl_populora.report import plots
from trl_populora.report.charts import (
    COLORS,
    CURRICULUM,
    STYLE,
    draw_coverage,
    draw_curriculum,
    draw_functions,
    draw_held_out,
    draw_kinds,
    draw_payoff,
    draw_ratings,
    draw_rejects,
    draw_rewards,
    draw_thinking,
    draw_times,
    smooth,
)
from trl_populora.report.load import Run, load_history, load_run, load_samples
from trl_populora.report.page import _write_members, build_page, write_report
from trl_populora.report.plots import PLOTS as ALL_PLOTS
from trl_populora.report.plots import plot_run
from trl_populora.report.table import compare_fifths, print_population
from trl_populora.run.read import ANSWERED, read_lines
from trl_populora.tasks import Reject


PLOTS = [plot for plot in ALL_PLOTS if "game" in plot.sorts]


@pytest.fixture(scope="module")
def written(finished, tmp_path_factory):
    """Its page with all its pictures, elsewhere."""
    return write_report(finished, tmp_path_factory.mktemp("page"))


def page_of(run: Path) -> str:
    """Its page without pictures, which take seconds."""
    return build_page(load_run(run), [], load_samples(run))


def visible_text(page: str) -> str:
    shown = re.sub(r"<style>.*?</style>|src=\"[^\"]*\"", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown))


class TestPage:
    def test_is_self_contained_and_has_every_picture(self, written):
        page = written.read_text()
        # A random base works nothing out, and writes no task that could be measured.
        drawn = {plot.name for plot in PLOTS} - {"thinking", "curriculum"}
        assert page.count("data:image/png;base64,") == len(drawn)
        assert {path.stem for path in written.parent.glob("plots/*.png")} == drawn
        assert not re.search(r"src=\"(?!data:)|<link|url\(|@import", page), "nothing is loaded from elsewhere"
        assert "<script" not in page
        text = visible_text(page)
        assert "4 of 4" in text
        for name in ("teacher_0", "student_1", "step 4"):
            assert name in text

    def test_samples_name_the_rows_that_they_are(self, finished, written):
        page = written.read_text()
        links = re.findall(r'<a href="([^"]+)">(rollouts/[^<]+)</a>, row (\d+)(?:, task <code>(\w+)</code>)?', page)
        assert len(links) == len(load_samples(finished)) > 0
        for link, name, number, task in links:
            assert (written.parent / link).resolve() == (finished / name).resolve()
            row = pq.read_table(written.parent / link).to_pylist()[int(number)]
            assert (row["role"], row["task_id"]) == ("teacher", task)

    def test_tells_seed_versions_duration_and_every_setting(self, finished):
        text = visible_text(page_of(finished))
        times = read_lines(finished / "times.jsonl")
        seconds = [sum(entry.get(key, 0) for entry in times) for key in ("step_time", "eval/runtime")]
        assert f"duration: {round(seconds[0])} s of steps, {round(seconds[1])} s of evaluations" in text
        assert f"trl {version('trl')}" in text
        assert "seed: 42" in text
        population = json.loads((finished / "population.json").read_text())
        assert [name for name in (*population["settings"], *population["lora"]) if name not in text] == []

    def test_tells_what_a_step_was_like_and_the_settings_that_matter(self, finished):
        run = load_run(finished)
        run.history[-1] |= {"step_time": 12.4, "completions/mean_length": 48.2, "completions/clipped_ratio": 0.031}
        run.history[-1] |= {"frac_reward_zero_std": 0.65}
        run.population["settings"] |= {"learning_rate": 2e-3, "teacher_learning_rate": 1e-3, "beta": 0.04}
        text = visible_text(build_page(run, [], []))
        told = "a step at the end: 12 s a completion at the end: 48 tokens, 3 % cut "
        told += "groups with equal rewards at the end: 65 % learning rate: 0.002, teachers 0.001 beta: 0.04 "
        told += "teachers&#x27; pay: guarded students&#x27; pay: azr"
        assert told in text

    def test_members_are_those_of_the_saved_population_alone(self, finished):
        """As after `load_best_model_at_end`, which ends with the population of an earlier step."""
        run = load_run(finished)
        assert "Members of step" not in visible_text(build_page(run, [], []))
        best = run.population | {"step": 2, "members": [{**each, "mu": 31.4} for each in run.population["members"]]}
        run.population = best
        text = visible_text(build_page(run, [], []))
        assert "Members of step 2." in text
        assert text.count("31.4 ±") == len(best["members"])

    def test_a_birth_tells_the_childs_rating_and_that_of_whom_it_replaced(self, finished):
        text = visible_text(page_of(finished))
        for birth in read_lines(finished / "lineage.jsonl"):
            replaced = birth["replaced"]
            told = f"{birth['child']} {birth['step']} {birth['mu']:.2f} {replaced['member']} {replaced['mu']:.2f}"
            assert told in text

    def test_what_a_model_wrote_is_escaped(self, finished, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        path = sorted(run.glob("rollouts/*.parquet"))[-1]
        table = pq.read_table(path)
        evil = ["</pre><script>alert(1)</script><img src=x onerror=alert(2)>"] * len(table)
        pq.write_table(table.set_column(table.column_names.index("completion"), "completion", pa.array(evil)), path)
        page = page_of(run)
        assert "&lt;script&gt;alert(1)" in page
        assert "<script" not in page
        assert "<img src=x" not in page

    def test_a_run_in_progress(self, finished, tmp_path):
        """
        Two of four steps logged, an evaluation being written, rollouts one step ahead of the metrics, no members yet.
        """
        run = tmp_path / "run"
        shutil.copytree(finished, run, ignore=shutil.ignore_patterns("members", "population.json", "archive.parquet"))
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:50])
        found = load_run(run)
        assert [entry["step"] for entry in found.evaluations] == [0]
        assert [entry["step"] for entry in found.history] == [1, 2]
        assert {row["step"] for row in found.rows} == {1, 2}
        assert "births: 2" in visible_text(page_of(run))

    def test_steps_of_six_digits_come_after_those_of_five(self, finished, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        (run / "rollouts" / "step_00004.parquet").rename(run / "rollouts" / "step_100000.parquet")
        (run / "rollouts" / "step_00003.parquet").rename(run / "rollouts" / "step_99999.parquet")
        assert [row["step"] for row in load_run(run).rows][-1] == 4

    def test_a_run_without_rollouts(self, finished, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(finished, run, ignore=shutil.ignore_patterns("rollouts"))
        assert "kept no rollouts" in page_of(run)
        assert [plot.name for plot in PLOTS if not plot.can_be_drawn(load_run(run))] == [
            "thinking",
            "curriculum",
            "mastery",
            "matches",
            "difference",
        ]


class TestReading:
    def test_samples_hold_their_own_attempts(self, finished):
        samples = load_samples(finished)
        assert any(attempts for _, attempts in samples)
        for proposal, attempts in samples:
            assert proposal["role"] == "teacher"
            assert {a["task_id"] for a in attempts} <= {proposal["task_id"]}
            if attempts:
                assert sum(a["correct"] for a in attempts) / len(attempts) == proposal["solve_rate"]

    def test_proposals_of_one_task_have_their_own_attempts(self, tmp_path):
        """Without guards a teacher may propose a task twice in a match: two right of two, then none."""
        (tmp_path / "rollouts").mkdir()
        task = {"step": 1, "match": 0, "task_id": "same", "valid": True, "archived": False}
        rows = [
            task | {"role": "student", "correct": correct, "solve_rate": 0.5} for correct in (True, True, False, False)
        ]
        rows += [task | {"role": "teacher", "correct": None, "solve_rate": rate} for rate in (1.0, 0.0)]
        rows.append(task | {"role": "teacher", "valid": False, "solve_rate": 0.0})
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts" / "step_1.parquet")
        told = [
            (row["valid"], row["solve_rate"], [each["correct"] for each in tries])
            for row, tries in load_samples(tmp_path)
        ]
        assert told == [(True, 0.0, [False, False]), (True, 1.0, [True, True]), (False, 0.0, [])]

    def test_samples_reach_from_the_hardest_to_the_easiest(self, tmp_path):
        (tmp_path / "rollouts").mkdir()
        rates = [place / 10 for place in range(11)]
        rows = [
            {"step": 1, "role": "teacher", "match": 0, "task_id": str(rate), "valid": True, "solve_rate": rate}
            for rate in rates
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts" / "step_1.parquet")
        assert [row["solve_rate"] for row, _ in load_samples(tmp_path)] == [0, 0.2, 0.4, 0.6, 0.8, 1]
        assert [row["solve_rate"] for row, _ in load_samples(tmp_path, number=2)] == [0]
        assert len(load_samples(tmp_path, number=40)) == len(rates)

    def test_a_step_that_was_evaluated_keeps_its_times(self, finished):
        assert [entry["step"] for entry in load_run(finished).evaluations] == [0, 2, 4]
        assert all(entry["time/propose"] > 0 for entry in load_history(finished))

    def test_an_evaluation_on_other_tasks_after_training_does_not_replace_the_runs_own(self, finished, tmp_path):
        run = shutil.copytree(finished, tmp_path / "run")
        last = load_run(run).evaluations[-1]
        later = {"step": last["step"], "eval/solve_rate_mean": 1.0, "eval/other_figure": 2.0}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(later) + "\n")
        assert load_run(run).evaluations[-1] == last | {"eval/other_figure": 2.0}

    def test_tables_come_in_the_order_in_which_they_were_given(self):
        rates = {"eval/main_solve_rate_mean": 0.6, "eval/extra_solve_rate_mean": 0.2}
        assert Run("r", [], evaluations=[{"step": 0} | rates]).tables == ["eval/main_", "eval/extra_"]

    def test_all_tables_of_a_dataset_run_count_in_its_seconds(self):
        took = {"eval/easy_runtime": 2.0, "eval/hard_runtime": 3.0, "eval/member/a/rewards/code_runtime": 7.0}
        assert Run("r", [{"step": 1, "step_time": 4.0}], evaluations=[{"step": 1} | took]).seconds == (4.0, 5.0)

    def test_a_metric_that_ends_in_reward_makes_no_member(self):
        entry = {"step": 1, ANSWERED: 1.0, "member/a/reward": 0.5, "env/maze/reward": 0.1}
        run = Run("r", [entry])
        assert run.members("student") == ["a"]

    def test_a_dataset_run_without_its_times_is_no_game(self, tmp_path):
        entry = {"step": 1, "loss": 0.0, "member/student_0/reward": None}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
        run = load_run(tmp_path)
        assert not run.game
        assert run.members("student") == ["student_0"]
        assert Run("r", [{"step": 1, "loss": 0.0, "member/student_0/mu": 25.0}]).game

    def test_a_run_that_ends_by_epochs_has_no_planned_steps(self):
        run = Run("r", [{"step": 1}], population={"settings": {"max_steps": -1}})
        assert run.planned is None
        assert not run.finished

    def test_a_directory_that_is_no_run(self, tmp_path):
        with pytest.raises(ValueError, match="holds no metrics.jsonl"):
            load_run(tmp_path)

    def test_broken_metrics_are_named(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text("{half\n")
        with pytest.raises(ValueError, match=r"metrics.jsonl is broken"):
            load_run(tmp_path)

    def test_a_long_run_is_smoothed_over_its_own_past(self):
        run = Run("long", [{"step": step} for step in range(150)])
        assert smooth([0.0, 4.0, 8.0, 0.0, 0.0], run) == [0.0, 2.0, 4.0, 3.0, 2.4]
        assert smooth([1.0] * 13 + [14.0], run)[-2:] == [1.0, 2.0], "thirteen steps, a twelfth of the run"


def test_the_overview_picture(finished, tmp_path):
    assert plot_run(finished, tmp_path / "run.png").stat().st_size > 10_000


def test_the_overview_has_no_panels_of_what_the_run_did_not_measure(finished, tmp_path, monkeypatch):
    """Held-out tasks and worked answers would stand above the ratings."""
    monkeypatch.setattr(plots, "OVERVIEW", plots.OVERVIEW[:4])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "propose/valid_rate": 0.5}) + "\n")
    heights = [matplotlib.image.imread(plot_run(run, tmp_path / "run.png")).shape[0] for run in (finished, tmp_path)]
    assert heights[1] < 0.6 * heights[0]


def test_rewards_of_any_size_are_in_the_picture():
    run = Run("rich", [{"step": s, "rewards/teacher_reward/mean": -3.0 * s} for s in (1, 2)])
    figure = Figure()
    draw_rewards(figure, run)
    low, high = figure.axes[0].get_ylim()
    assert low < -6 < 0 < high


@pytest.mark.parametrize("name", ["", "quickstart/", "runs/quickstart/"])
def test_nothing_of_a_cross_play_is_clipped(name):
    """As `write_payoff` sizes it for two runs; longer names stand upright and leave less height to the colour bar."""
    teachers, students = ([f"{name}{role}_{n}" for n in range(2)] for role in ("teacher", "student"))
    with rc_context(STYLE):
        figure = Figure(figsize=choose_payoff_size(teachers, students), layout="constrained")
        draw_payoff(figure, [[0.5, 0.25]] * 2, teachers, students)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
        boxes = {text.get_text(): text.get_window_extent(canvas.get_renderer()) for text in texts}
    assert "solved (fraction)" in boxes
    page = figure.bbox
    outside = [t for t, b in boxes.items() if min(b.x0, b.y0) < 0 or b.x1 > page.x1 or b.y1 > page.y1]
    assert outside == []


@pytest.mark.parametrize(
    ("measures", "titles"),
    [
        (["numbers"], ["numbers"]),
        (["lines", "ast_depth"], ["AST depth", "Lines of code"]),
        ([*CURRICULUM, "open_ends", "atoms"], [*(title for title, _ in CURRICULUM.values()), "atoms", "open ends"]),
    ],
)
def test_every_measure_that_a_run_logs_is_drawn(measures, titles):
    of_code = dict.fromkeys(f"curriculum/{name}" for name in CURRICULUM)  # logged without a value
    known = {f"curriculum/{name}": 3.0 for name in [*measures, "coverage", "entropy"]}
    figure = Figure()
    draw_curriculum(figure, Run("r", [{"step": 1} | of_code | known, {"step": 2} | of_code]))
    drawn = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in drawn] == titles
    assert [list(axis.lines[0].get_ydata()) for axis in drawn] == [[3.0]] * len(titles)


def test_a_count_over_the_tasks_of_several_steps_is_no_measure_of_a_task():
    entries = [{"step": step, "curriculum/words": 3.0, "curriculum/features": 9.0 + step} for step in (1, 2)]
    run = Run("r", entries)
    assert run.measures == ["words"]
    figure = Figure()
    draw_coverage(figure, run)
    assert [list(axis.lines[0].get_ydata()) for axis in figure.axes] == [[10.0, 11.0]]
    assert [change.name for change in compare_fifths(run)] == ["tasks: words", "different features in recent tasks"]


def test_a_run_whose_kinds_measure_nothing_has_no_picture_of_it():
    run = Run("r", [{"step": 1, "curriculum/ast_depth": None, "curriculum/coverage": 0.0}])
    drawn = {plot.name for plot in PLOTS if plot.can_be_drawn(run)}
    assert not drawn & {"curriculum", "coverage", "matches", "lineage", "held_out", "thinking"}


def test_measured_values_stand_behind_their_running_mean():
    values = [float(n % 2) for n in range(24)]
    run = Run("r", [{"step": n + 1, "rewards/student_reward/mean": value} for n, value in enumerate(values)])
    figure = Figure()
    draw_rewards(figure, run)
    lines = [(list(line.get_ydata()), line.get_linewidth(), line.get_alpha()) for line in figure.axes[0].lines]
    assert (values, 0.7, 0.35) in lines
    assert (smooth(values, run), 2.0, None) in lines


@pytest.mark.parametrize("draw", [draw_rewards, draw_ratings("teacher"), draw_coverage])
def test_a_first_step_is_seen(draw):
    """A line through one point has no length."""
    known = {"rewards/teacher_reward/mean": 0.1, "rewards/student_reward/mean": -0.5, "curriculum/coverage": 4.0}
    figure = Figure()
    draw(figure, Run("run", [{"step": 1, "member/teacher_0/mu": 24.0, **known}], []))
    lines = [line for axis in figure.axes for line in axis.lines if len(line.get_xdata()) == 1]
    assert lines
    assert all(line.get_marker() == "o" for line in lines)


def test_a_legend_names_only_what_was_measured():
    figure = Figure()
    draw_thinking(figure, Run("run", [{"step": step, "solve/thinking_rate": 0.5} for step in (1, 2)], []))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["training tasks"]


@pytest.mark.parametrize("measures", [["words"], ["words", "letters", "signs"]])
def test_the_legend_of_what_tasks_demand_shows_the_line_that_it_names(measures):
    """With births marked, too: these are dotted lines, and drawn last. A third measure leaves a fourth place empty."""
    known = {f"curriculum/{name}": 3.0 for name in measures}
    figure = Figure()
    draw_curriculum(figure, Run("r", [{"step": n} | known for n in (1, 2)], lineage=[{"step": 1}]))
    (legend,) = figure.legends
    named = dict(zip([text.get_text() for text in legend.get_texts()], legend.get_lines(), strict=True))
    assert {name: line.get_linestyle() for name, line in named.items()} == {
        "mean over the step's valid tasks": "-",
        "evolution": ":",
    }
    assert named["mean over the step's valid tasks"].get_color() == COLORS["teacher"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.004, "< 0.01"), (0.77, "0.77"), (50.4, "50"), (231.0, "231"), (9.96, "10")]
)
def test_seconds_are_written_as_people_write_them(seconds, shown):
    figure = Figure()
    draw_times(figure, Run("r", [{"step": 1, "time/solve": seconds}]))
    assert f"solve ({shown} s)" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_captions_are_plain_sentences():
    """Page and terminal show them as they are."""
    assert not [plot.name for plot in PLOTS if "`" in plot.title + plot.caption]


@pytest.mark.parametrize(("members", "bands"), [(2, 0), (3, 0), (4, 1)])
def test_a_band_over_members_needs_four(members, bands):
    keys = {f"member/teacher_{n}/mu": 25.0 + n for n in range(members)}
    ends = {"population/teacher/mu_mean": 26.0, "population/teacher/mu_std": 1.0}
    figure = Figure()
    draw_ratings("teacher")(figure, Run("r", [{"step": 1} | keys | ends]))
    assert len(figure.axes[0].collections) == bands


def test_held_out_tables_of_their_own_names_are_drawn():
    rates = {"eval/easy_solve_rate_mean": 0.6, "eval/hard_solve_rate_mean": 0.2, "eval/hard_base/solve_rate": 0.1}
    rates |= {"eval/easy_solve_rate_margin": 0.1, "eval/hard_solve_rate_margin": 0.1}
    figure = Figure()
    draw_held_out(figure, Run("r", [], evaluations=[{"step": 0} | rates, {"step": 2} | rates]))
    curves = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert curves == {"easy, mean": [0.6, 0.6], "hard, mean": [0.2, 0.2], "_": [0.1, 0.1]}


def test_rejects_are_means_over_the_run():
    """As logged with `logging_steps=10`: each entry is the mean of ten steps."""
    reasons = [{"verify/reject/format": 3.0, "verify/reject/timeout": 0.0}, {"verify/reject/format": 2.0}]
    figure = Figure()
    draw_rejects(figure, Run("r", [{"step": 10 * (n + 1), **entry} for n, entry in enumerate(reasons)]))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["format (2.5)"]
    assert {bar.get_width() for bar in figure.axes[0].patches} == {10}, "no gaps between logs"
    (caption,) = [plot.caption for plot in PLOTS if plot.name == "rejects"]
    assert "in brackets the mean" in caption


@pytest.mark.parametrize(
    ("picture", "key"),
    [
        ("ratings_teachers", "member/teacher_{}/mu"),
        ("kinds", "propose/{}/valid_rate"),
        ("rejects", "verify/reject/{}"),
        ("curriculum", "curriculum/{}"),
    ],
)
def test_a_name_that_reads_as_a_formula_is_drawn_as_text(picture, key, tmp_path):
    """Somebody else may have written the run's files. As a formula this name would be an error."""
    name = r"$\frac{a}{$"
    run = Run(name, [{"step": 1, key.format(name): 1.0}])
    assert len(plots.draw_plots(run, tmp_path, [picture])) == 1


def test_no_two_reasons_of_rejection_look_alike():
    figure = Figure()
    draw_rejects(figure, Run("r", [{"step": 1} | {f"verify/reject/{reason}": 1.0 for reason in Reject}]))
    looks = {(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in figure.axes[0].containers}
    assert len(looks) == len(Reject)


def test_a_name_with_a_leading_underscore_is_in_the_legend():
    history = [
        {"step": step, ANSWERED: 1.0, "rewards/_length/mean": 0.5, "rewards/right/mean": 0.5} for step in (1, 2)
    ]
    figure = Figure()
    draw_functions(figure, Run("r", history))
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == ["_length", "right"]


def test_every_kind_of_task_is_drawn_of_however_many():
    kinds = [f"kind_{number}" for number in range(10)]
    rates = {f"solve/{kind}/rate": 0.5 for kind in kinds} | {f"propose/{kind}/valid_rate": 0.5 for kind in kinds}
    figure = Figure()
    draw_kinds(figure, Run("r", [{"step": 1} | rates, {"step": 2} | rates]))
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {f"{kind}: solved" for kind in kinds} <= labels


@pytest.mark.usefixtures("two_plots")
def test_the_command_writes_the_report_at_any_time_after_the_first_step(finished, tmp_path, capsys):
    as_it_was(finished, tmp_path, 1)
    with pytest.raises(SystemExit, match="has not logged a population step yet; try again after its first one"):
        cli.main(["report", str(tmp_path)])
    for lines, told in ((3, "2 of 4 (in progress or stopped)"), (9, "4 of 4")):
        as_it_was(finished, tmp_path, lines)
        cli.main(["report", str(tmp_path)])
        assert f"steps: <b>{told}</b>" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out == 2 * (
        f"Report written to {tmp_path}/report.html, its picture to {tmp_path}/run.png.\n"
    )
    assert (tmp_path / "run.png").exists()


@pytest.mark.usefixtures("two_plots")
def test_a_downloaded_population_is_called_by_its_name(finished, hub, tmp_path, monkeypatch):
    hub.repos["me/pushed"] = {
        str(path.relative_to(finished)): path.read_bytes() for path in finished.rglob("*.json*") if path.is_file()
    }
    monkeypatch.chdir(tmp_path)
    cli.main(["report", "me/pushed"])
    assert "<h1>me/pushed</h1>" in (tmp_path / "pushed" / "report.html").read_text()


def test_a_cross_play_without_teachers_and_with_odd_names_is_told(tmp_path, capsys):
    students = ["lr[low] student_0", "lr[/b] student_0"]
    payoff = Payoff([], students, [], [], given=dict.fromkeys(students, 0.5))
    write_payoff(payoff, tmp_path)
    told = capsys.readouterr().out
    assert all(name.split()[0] in told for name in students)
    assert "50" in told
    assert not (tmp_path / "crossplay.png").exists()
    write_payoff(Payoff(["lr[low] teacher_0"], students, [1.0], [[0.25, 0.75]]), tmp_path)
    assert "lr[low] teacher_0" in capsys.readouterr().out


def test_the_table_of_members_is_not_cut_where_it_is_wider_than_the_output(finished, tmp_path, capsys):
    name = "student_" + "x" * 150
    saved = (finished / "population.json").read_text()
    (tmp_path / "population.json").write_text(saved.replace("student_0", name))
    print_population(tmp_path)
    told = capsys.readouterr().out
    assert "…" not in told
    assert name in told


def test_a_newcomer_is_not_told_with_the_figures_of_whose_seat_it_has():
    entry = {"step": 5, ANSWERED: 1.0, "member/student_0/reward": 6.125, "member/student_0/mu": 33.25}
    entry["member/student_0/sigma"] = 4.0
    member = {"name": "zed", "seat": "student_0", "role": "student", "mu": 26.5, "sigma": 5.5, "version": 0}
    member |= {"born": 5, "operator": "join", "parents": [], "reward": None}
    shared = {"member_prompts": "shared"}
    for step in (5, 4):
        run = Run("r", [entry], population={"step": step, "members": [member], "settings": shared})
        table = visible_text(_write_members(run))
        assert "zed" in table
        assert "26.5" in table
        assert "6.125" not in table
        assert ("Members of step 4." in table) == (step == 4)
