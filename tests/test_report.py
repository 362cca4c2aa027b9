"""The report reads what a real run leaves, whole or in progress, and is one safe page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.populora_run import EVALUATED, make_trainer
from trl_populora import __main__ as cli
from trl_populora.report.canvas import STYLE, draw_payoff, smooth
from trl_populora.report.load import Run, load_history, load_run, load_samples
from trl_populora.report.page import write_report
from trl_populora.report.payoff import payoff_size
from trl_populora.report.plots import (
    CURRICULUM,
    PLOTS,
    draw_curriculum,
    draw_rejects,
    draw_rewards,
    plot_run,
)


@pytest.fixture(scope="module")
def finished(random_base, seed_tasks, tmp_path_factory):
    """A run of four steps with births after the second."""
    Path(random_base, "tasks.json").write_text(json.dumps([task.to_record() for task in seed_tasks]))
    path = str(tmp_path_factory.mktemp("report") / "run")
    settings = {"max_steps": 4, "evolve_every": 2, "save_strategy": "no"}
    trainer = make_trainer(random_base, path, EVALUATED | settings)
    trainer.train()
    trainer.save_model()
    return Path(path)


def visible_text(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>|src=\"[^\"]*\"", "", page, flags=re.S))


class TestPage:
    def test_is_self_contained_and_has_every_picture(self, finished, tmp_path):
        page = write_report(finished, tmp_path).read_text()
        assert page.count("data:image/png;base64,") == len(PLOTS)
        assert sorted(path.stem for path in tmp_path.glob("plots/*.png")) == sorted(plot.name for plot in PLOTS)
        assert not re.search(r"(src|href)=\"(?!data:)", page), "nothing is loaded from elsewhere"
        assert "<script" not in page
        text = visible_text(page)
        assert "4 of 4" in text
        for name in ("teacher_0", "student_1", "step 4"):
            assert name in text

    def test_what_a_model_wrote_is_escaped(self, finished, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        path = sorted(run.glob("rollouts/*.parquet"))[-1]
        table = pq.read_table(path)
        evil = ["</pre><script>alert(1)</script><img src=x onerror=alert(2)>"] * len(table)
        pq.write_table(table.set_column(table.column_names.index("completion"), "completion", pa.array(evil)), path)
        page = write_report(run).read_text()
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
        assert "births: 2" in re.sub(r"\s+", " ", visible_text(write_report(run).read_text()))

    def test_a_run_without_rollouts(self, finished, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(finished, run, ignore=shutil.ignore_patterns("rollouts"))
        page = write_report(run).read_text()
        assert "kept no rollouts" in page
        assert page.count("data:image/png") == len([plot for plot in PLOTS if plot.needs != "rows"])


class TestReading:
    def test_samples_hold_their_own_attempts(self, finished):
        samples = load_samples(finished)
        assert any(attempts for _, attempts in samples)
        for proposal, attempts in samples:
            assert proposal["role"] == "teacher"
            assert {a["task_id"] for a in attempts} <= {proposal["task_id"]}
            if attempts:
                assert sum(a["correct"] for a in attempts) / len(attempts) == proposal["solve_rate"]

    def test_a_step_that_was_evaluated_keeps_its_times(self, finished):
        assert [entry["step"] for entry in load_run(finished).evaluations] == [0, 2, 4]
        assert all(entry["time/propose"] > 0 for entry in load_history(finished))

    def test_a_directory_that_is_no_run(self, tmp_path):
        with pytest.raises(ValueError, match="holds no metrics.jsonl"):
            load_run(tmp_path)

    def test_broken_metrics_are_named(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text("{half\n")
        with pytest.raises(ValueError, match=r"metrics.jsonl is broken"):
            load_run(tmp_path)

    def test_a_long_run_is_smoothed_over_its_own_past(self):
        run = Run("long", [{"step": step} for step in range(150)])
        assert smooth([0.0, 4.0, 8.0, 0.0, 0.0], run) == [0.0, 2.0, 4.0, 3.0, 3.0]


def test_the_overview_picture(finished, tmp_path):
    assert plot_run(finished, tmp_path / "run.png").stat().st_size > 10_000


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
        figure = Figure(figsize=payoff_size(teachers, students), layout="constrained")
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
        ([], [title for title, _ in CURRICULUM.values()]),
    ],
)
def test_every_measure_that_a_run_logs_is_drawn(measures, titles):
    of_code = dict.fromkeys(f"curriculum/{name}" for name in CURRICULUM)  # logged without a value
    known = {f"curriculum/{name}": 3.0 for name in [*measures, "coverage", "entropy"]}
    figure = Figure()
    draw_curriculum(figure, Run("r", [{"step": 1} | of_code | known, {"step": 2} | of_code]))
    drawn = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in drawn] == titles
    assert [list(axis.lines[0].get_ydata()) for axis in drawn] == [[3.0] if measures else []] * len(titles)


def test_rejects_are_means_over_the_run():
    """As logged with `logging_steps=10`: each entry is the mean of ten steps."""
    reasons = [{"verify/reject/format": 3.0, "verify/reject/timeout": 0.0}, {"verify/reject/format": 2.0}]
    figure = Figure()
    draw_rejects(figure, Run("r", [{"step": 10 * (n + 1), **entry} for n, entry in enumerate(reasons)]))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["format (2.5)"]
    (caption,) = [plot.caption for plot in PLOTS if plot.name == "rejects"]
    assert "in brackets the mean" in caption


def test_a_downloaded_population_is_called_by_its_name(finished, hub, tmp_path, monkeypatch):
    hub.repos["me/pushed"] = {
        str(path.relative_to(finished)): path.read_bytes() for path in finished.rglob("*.json*") if path.is_file()
    }
    monkeypatch.chdir(tmp_path)
    cli.main(["report", "me/pushed"])
    assert "<h1>me/pushed</h1>" in (tmp_path / "pushed" / "report.html").read_text()
