"""The word that a run comes to: each on its shortest example, what is looked for first, and where it is shown."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from trl_populora.report import plots
from trl_populora.report.load import Run, load_run
from trl_populora.report.verdict import FEWEST_STEPS, judge


STEPS = 20
GOOD = {"propose/valid_rate": 0.9, "solve/well_formed": 0.95, "completions/clipped_ratio": 0.01}
GOOD |= {"frac_reward_zero_std": 0.5, "propose/novel_rate": 0.8, "curriculum/features": 20.0}
TOLD = {
    "solve_rate_margin": 0.02,
    "thinking_rate": 0.1,
    "mean_length": 20.0,
    "gain_equal_effort": 0.0,
    "like_base": 1.0,
}


def game(gain: float | None = 0.0, end: dict | None = None, **last) -> Run:
    """A run whose metrics end at `end`, and whose second evaluation is `gain` above the first."""
    late = GOOD | (end or {})
    history = [{"step": step + 1} | (GOOD if step < STEPS // 2 else late) for step in range(STEPS)]
    first = {"eval/" + name: value for name, value in (TOLD | {"solve_rate_mean": 0.4}).items()}
    rates = TOLD | {"solve_rate_mean": 0.4 + (gain or 0), "gain_equal_effort": gain or 0} | last
    second = {"eval/" + name: value for name, value in rates.items()}
    evaluations = [{"step": 0} | first] + ([] if gain is None else [{"step": STEPS} | second])
    return Run("run", history, evaluations=evaluations)


def prompts(start: float, end: float, flat: float = 0.3, steps: int = STEPS) -> Run:
    """A dataset run whose reward goes from `start` to `end`, give or take."""
    history = []
    for step in range(steps):
        reward = (start if step < steps // 2 else end) + 0.01 * (step % 3)
        row = {"step": step + 1, "member/member_0/reward": reward, "reward": reward, "frac_reward_zero_std": flat}
        history.append(row | {"completions/clipped_ratio": 0.0, "time/generate": 1.0})
    return Run("run", history)


@pytest.mark.parametrize(
    ("run", "word", "why"),
    [
        (game(0.1), "learning", "The students solve 50 % of the held-out tasks, +10 points [+7 to +13] since step 0."),
        (game(0.02), "flat", "solve 42 % of the held-out tasks, +2 points [-1 to +5]"),
        (game(-0.1), "broken", "solve 30 % of the held-out tasks, -10 points [-13 to -7]"),
        (game(None), "cannot be told", "no two evaluations on held-out tasks"),
        (
            game(0.1, {"propose/valid_rate": 0.1}),
            "broken",
            "10 % of the proposals became tasks in the last fifth of the steps (in the first fifth: 90 %).",
        ),
        (game(0.1, {"solve/well_formed": 0.2}), "broken", "20 % of the answers could be read"),
        (game(0.1, {"completions/clipped_ratio": 0.8}), "broken", "80 % of the completions were cut"),
        (game(0.0, {"frac_reward_zero_std": 1.0}), "broken", "100 % of the groups of attempts had equal rewards"),
        (game(None, {"frac_reward_zero_std": 1.0}), "broken", "100 % of the groups of attempts had equal rewards"),
        (game(0.1, {"frac_reward_zero_std": 1.0}), "learning", "50 %"),
        (game(0.1, {"propose/novel_rate": 0.3}), "narrowing", "30 % of the programs had a new form"),
        (game(0.1, {"curriculum/features": 9.0}), "narrowing", "9 different features"),
        (game(None, {"propose/novel_rate": 0.3}), "narrowing", "30 % of the programs had a new form"),
        (game(-0.1, {"propose/novel_rate": 0.3}), "broken", "-10 points"),
        (game(0.1, {"propose/novel_rate": 0.6}), "learning", "50 %"),
        (prompts(0.2, 0.5), "learning", "The reward rose from 0.21 to 0.51 in training."),
        (prompts(0.5, 0.2), "broken", "The reward fell from"),
        (prompts(0.2, 0.2), "flat", "The reward went from"),
        (prompts(0.2, 0.2, flat=1.0), "broken", "100 % of the groups of attempts had equal rewards"),
        (prompts(0.2, 0.9, flat=1.0), "learning", "The reward rose"),
        (
            prompts(0.2, 0.9, steps=FEWEST_STEPS - 1),
            "cannot be told",
            "9 of the 10 steps that a verdict needs are logged.",
        ),
    ],
)
def test_the_word_is_the_first_that_fits(run, word, why):
    verdict = judge(run)
    assert (verdict.word, verdict.remark) == (word, "")
    assert why in verdict.why
    assert str(verdict).startswith(f"{word.capitalize()}: ")


@pytest.mark.parametrize(("left", "told"), [(-0.04, True), (0.0, True), (0.14, True), (0.16, False), (0.3, False)])
def test_a_gain_of_which_less_than_half_is_left_at_equal_effort_is_longer_reasoning(left, told):
    verdict = judge(game(0.3, gain_equal_effort=left, thinking_rate=0.9, mean_length=80.0))
    assert verdict.word == "learning"
    expected = (
        "Most of it is longer reasoning: 90 % of the answers are worked out instead of 10 %, an answer has 80 tokens "
        f"instead of 20, and among answers like the base's {100 * left:+.0f} points are left."
    )
    assert verdict.remark == (expected if told else "")


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ({"thinking_rate": 0.05, "mean_length": 15.0}, False),
        ({"thinking_rate": 0.1, "mean_length": 40.0}, True),  # as often, but longer
        ({"thinking_rate": 0.9, "mean_length": 80.0, "like_base": None}, False),
    ],
)
def test_only_more_or_longer_reasoning_is_longer_reasoning_and_only_where_it_was_measured(last, told):
    verdict = judge(game(0.1, **({"gain_equal_effort": 0.0} | last)))
    assert verdict.word == "learning"
    assert bool(verdict.remark) == told


@pytest.mark.parametrize("gain", [{}, {"gain_equal_effort": None}])
def test_where_hardly_any_answers_are_like_the_bases_longer_reasoning_cannot_be_told(gain):
    remark = judge(game(0.1, **{"thinking_rate": 1.0, "mean_length": 60.0, "like_base": 0.18} | gain)).remark
    assert remark.startswith("How much of it is longer reasoning cannot be told: 100 % of the answers are worked out")
    assert remark.endswith("only 18 % of the base's answers have their like.")


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """
    The records of seven real runs, without rollouts: `recipes/tiny/quickstart.yaml` as it is (`longer_reasoning`) and
    with rates of 3e-2 (`collapsed`), dataset runs whose reward is always 0 (`dead_reward`), pays answers that were
    worked out (`good`), or has two functions, of which one is always 0 (`idle_reward`), a sweep
    of ten steps (`ten_steps`), and 25 steps of `studies/screen.py --candidates rarity_slow_replay` (`learning`).
    """
    root = tmp_path_factory.mktemp("kept")
    with tarfile.open(Path(__file__).parent / "kept_runs.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.mark.parametrize(
    ("run", "word", "told"),
    [
        ("good", "learning", "The reward rose from 0.11 to 0.52"),
        (
            "learning",
            "learning",
            "How much of it is longer reasoning cannot be told: 100 % of the answers are worked out",
        ),
        ("longer_reasoning", "learning", "Most of it is longer reasoning"),
        ("collapsed", "broken", "0 % of the proposals became tasks"),
        ("dead_reward", "broken", "100 % of the groups of attempts had equal rewards"),
        ("ten_steps", "cannot be told", "The reward went from 0.13 to 0.72 in training, and so few steps"),
        ("idle_reward", "learning", "Reward functions that were 0 in every step: `right`."),
    ],
)
def test_real_runs_are_called_what_they_were(kept, run, word, told):
    verdict = judge(load_run(kept / run))
    assert verdict.word == word
    assert told in str(verdict)
    assert bool(verdict.remark) == (run in ("learning", "longer_reasoning", "idle_reward"))


def test_the_longest_verdict_fits_into_the_picture(tmp_path, monkeypatch):
    """The widest line of the title ends within the picture."""
    drawn, said = [], []
    told = game(0.32, gain_equal_effort=-0.1, thinking_rate=0.9, mean_length=1234.0)

    def keep(path, size, paint, *arguments, **options):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure, *arguments)
        figure.draw_without_rendering()
        said.append(figure.get_suptitle())
        drawn.append((figure._suptitle.get_window_extent(), figure.bbox))
        return path

    monkeypatch.setattr(plots, "save_picture", keep)
    monkeypatch.setattr(plots, "load_run", lambda run, name: told)
    plots.plot_run(tmp_path)
    ((title, picture),) = drawn
    assert 0 < title.x0 < title.x1 < picture.width
    assert said[0].count("\n") > 2
    assert "Learning: The students solve" in said[0]


def test_rewards_that_nobody_or_few_steps_have_say_nothing():
    run = prompts(0.2, 0.9)
    for entry in run.history:
        entry["reward"] = None
    assert judge(run).word == "cannot be told"
    for place in (0, STEPS - 1):
        run.history[place]["reward"] = float(place)
    assert judge(run).word == "cannot be told"


def test_equal_rewards_in_groups_break_no_run_that_compares_with_all_attempts_of_a_student():
    run = game(0.0, {"frac_reward_zero_std": 1.0})
    run.population["settings"] = {"student_baseline": "member"}
    assert judge(run).word == "flat"


def test_the_page_begins_with_it(finished, tmp_path):
    """So does what `populora train` prints at its end: see `test_recipes.py`."""
    from trl_populora.report.page import write_report

    page = write_report(finished, tmp_path).read_text()
    assert judge(load_run(finished)).word == "cannot be told", "four steps"
    assert page.index("Cannot be told.") < page.index("base model")


@pytest.mark.parametrize(("operator", "reward"), [("leave", 0.1), ("join", 0.9)])
def test_members_that_come_or_leave_make_no_gain(operator, reward):
    """The mean over those who are present changes although nobody learns."""
    run = prompts(0.5, 0.5)
    early = operator == "leave"
    for entry in run.history:
        stays = entry["reward"]
        if (entry["step"] <= STEPS // 2) == early:
            entry |= {"member/b/reward": reward, "reward": (stays + reward) / 2}
    assert judge(run).word == "learning"
    run.lineage.append({"step": STEPS // 2, "operator": operator, "seat": "b", "child": None, "replaced": None})
    assert judge(run).word == "flat"
