"""The paper's rules beside ours, on the recipe that plays them: what differs, and a comparison of two short runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from trl_populora.assets import tiny_eval_tasks
from trl_populora.config import PopuLoRAConfig
from trl_populora.report.load import load_run


sys.path.insert(0, str(Path(__file__).parents[1]))

import arms_race_page as pages  # noqa: E402
import arms_race_runs as runs  # noqa: E402
import as_printed  # noqa: E402


@pytest.mark.parametrize("variant", as_printed.VARIANTS)
def test_a_variant_is_the_recipe_with_what_it_names(variant, tmp_path):
    _, args, _ = as_printed.parse(tmp_path / "run", variant, 3, [])
    assert (args.max_steps, args.seed, args.rows_per_step) == (60, 3, 4 * 12 * (1 + runs.ATTEMPTS))
    assert args.teacher_reward == ("paper" if variant == "paper" else "guarded")


def test_the_default_has_the_packages_defaults(tmp_path):
    _, args, _ = as_printed.parse(tmp_path / "run", as_printed.DEFAULT, 0, [])
    plain = PopuLoRAConfig(str(tmp_path), use_cpu=True)
    for name in ("teacher_reward", "ratings", "pfsp_kappa", "student_baseline", "teacher_baseline", "cull_fraction"):
        assert getattr(args, name) == getattr(plain, name), name
    assert args.breeding.mutations.split(",") == list(as_printed.DEFAULT_MUTATIONS)


def test_runs_are_trained_once_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "draw_curves", lambda kept, path: path.write_bytes(b""))
    tasks = Path(tiny_eval_tasks()).read_text(encoding="utf-8").splitlines()[:3]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks) + "\n", encoding="utf-8")
    options = f"--seeds 0 --output {tmp_path} --max_steps 1 --eval_steps 1 --eval_attempts 1 --teachers 1 --students 1"
    options += f" --eval_tasks {tmp_path}/tasks.jsonl --evolve_every 0 --proposals_per_teacher 3 --attempts_per_task 3"
    options += " --per_device_train_batch_size 3 --max_completion_length 64"
    monkeypatch.syspath_prepend(str(as_printed.CONFIG.parents[1]))
    monkeypatch.setattr(sys, "argv", ["as_printed.py", *options.split()])
    for _ in range(2):
        as_printed.main()
    assert capsys.readouterr().out.count("step 1/1 | valid") == 2, "one step of each"
    assert runs.load(tmp_path / as_printed.RESULTS).keys() == {"paper", "default"}
    table = (tmp_path / "table.md").read_text()
    assert "Against default, paired by seed" in table
    assert "How members differ" in table


def test_specialities_are_what_students_do_better_than_their_level_and_the_kinds_explain():
    level, kind, own = (
        np.array([[0.2], [0.3]]),
        np.array([[0.1, 0.3, 0.2]]),
        np.array([[0.1, 0, -0.1], [-0.1, 0, 0.1]]),
    )
    assert as_printed.correlate_specialities([level + kind + own, 2 * level + kind + own]) == pytest.approx(1)
    assert as_printed.correlate_specialities([level + kind + own, level + kind - own]) == pytest.approx(-1)


def test_members_are_measured_in_the_last_fifth(finished):
    figures = as_printed.measure_members(finished)
    cosines = [figures[f"cosine of two {role}s"] for role in ("teacher", "student")]
    assert all(-1 <= cosine < 1 for cosine in cosines)
    refused = sum(number for name, number in figures.items() if name.startswith("refused"))
    rows = [row for row in load_run(finished).rows if row["role"] == "teacher" and row["step"] == 4]
    assert refused == pytest.approx(sum(not row["valid"] for row in rows) / len(rows))
