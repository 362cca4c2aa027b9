"""What a dataset run logs of each member is what TRL logs of a run of that member alone."""

from __future__ import annotations

import pytest

from tests.prompt_runs import population_run


CASES = {
    "two iterations": {"loss_type": "grpo", "num_iterations": 2, "epsilon": 0.01},
    "cispo": {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 1.0},
    "a pull to the base": {"loss_type": "dapo", "beta": 0.04},
    "a ratio per row": {"num_iterations": 2, "importance_sampling_level": "sequence", "epsilon": 0.001},
}


def logged(base: str, output_dir, writers: list[str], **options) -> list[dict]:
    trainer, *_ = population_run(base, output_dir, writers, max_steps=4, **options)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("case", CASES)
def test_figures_of_one_member_are_those_of_all_rows(random_base, tmp_path, case):
    entries = logged(random_base, tmp_path, ["a"], **CASES[case])
    clip_ratio = "cispo_clip_ratio" if case == "cispo" else "clip_ratio/region_mean"
    theirs = {"entropy": "entropy", "clip_ratio": clip_ratio} | ({"kl": "kl"} if "beta" in CASES[case] else {})
    for entry in entries:
        for mine, other in theirs.items():
            if case == "a ratio per row" and mine == "clip_ratio":  # TRL's mean is over rows, ours over tokens
                assert (entry["member/student_0/clip_ratio"] > 0) == (entry[other] > 0)
            else:
                assert entry[f"member/student_0/{mine}"] == pytest.approx(entry[other], rel=1e-5, abs=1e-9), mine
    assert any(entry[clip_ratio] for entry in entries) == ("num_iterations" in CASES[case])
    assert ("member/student_0/kl" in entries[0]) == ("beta" in CASES[case])


def test_figures_of_four_members_are_those_of_four_runs(random_base, tmp_path):
    options = {"loss_type": "dapo", "num_iterations": 2, "epsilon": 0.01, "beta": 0.04}
    writers = ["a", "b", "c", "d"]
    joint = logged(random_base, tmp_path / "joint", writers, **options)
    for place, writer in enumerate(writers):
        alone = logged(random_base, tmp_path / writer, [writer], **options)
        for step, (mine, own) in enumerate(zip(joint, alone, strict=True)):
            judged = ("reward", "length", "rewards/judge", "rewards/brief")
            for figure in ("entropy", "kl", "clip_ratio", *judged):
                both = mine.get(f"member/student_{place}/{figure}"), own.get(f"member/student_0/{figure}")
                if step % 2 and figure in judged:
                    assert both == (None, None), "at a step without new rows nothing is judged"
                else:
                    assert None not in both, figure
                    assert both[0] == pytest.approx(both[1], rel=1e-4, abs=1e-6), figure


def test_nothing_is_logged_of_teachers(random_base, tmp_path):
    (first, *_) = logged(random_base, tmp_path, ["a", "b"])
    assert [key for key in first if "teacher" in key] == []
    assert {"population/student/mu_mean", "member/student_1/mu"} <= set(first)
