"""Students that are merged at the end: each way against its definition, and the files of a real run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from trl_populora.hub.export import export_member


sys.path.insert(0, str(Path(__file__).parents[1]))

import merging  # noqa: E402
import screen  # noqa: E402
from merging import WAYS, Student, elected, fisher, mean_added, mean_factors  # noqa: E402


def student(seed: int, moment: float = 1.0) -> Student:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"m.lora_A.weight": (2, 5), "m.lora_B.weight": (3, 2)}
    factors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return Student(factors, {key: torch.full(shape, moment) for key, shape in shapes.items()}, scaling=2.0)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_equal_students_stay_what_they_are(way, monkeypatch):
    monkeypatch.setattr(merging, "DENSITY", 1.0)
    assert torch.allclose(way([student(0)] * 3, "m"), student(0).added("m"), atol=1e-6)


def test_equal_moments_give_the_mean_of_factors_and_a_dominant_student_itself():
    two = [student(0), student(1)]
    assert torch.allclose(fisher(two, "m"), mean_factors(two, "m"), atol=1e-6)
    assert torch.allclose(fisher([student(0, 1e-8), student(1, 1.0)], "m"), student(1).added("m"), atol=1e-5)
    assert not torch.allclose(mean_added(two, "m"), mean_factors(two, "m"), atol=1e-2)


def test_ties_keeps_the_largest_entries_and_the_elected_sign():
    def adds(*entries: float) -> Student:
        factors = {
            "m.lora_A.weight": torch.tensor([entries], dtype=torch.float32),
            "m.lora_B.weight": torch.tensor([[1.0]]),
        }
        return Student(factors, factors, scaling=1.0)

    # Of five entries each student keeps its largest; the second place has both signs, and the larger sum wins.
    assert elected([adds(5, 1, 1, 1, 1), adds(1, 1, 1, 1, 3)], "m").tolist() == [[5, 0, 0, 0, 3]]
    assert elected([adds(0, 4, 0, 0, 0), adds(0, -1, 0, 0, 0)], "m").tolist() == [[0, 4, 0, 0, 0]]


@pytest.mark.slow
def test_a_run_is_merged_in_every_way_once(tmp_path, monkeypatch):
    for name, value in {"HELD_OUT": 4, "PROBES": 1, "ATTEMPTS": 1}.items():
        monkeypatch.setattr(screen, name, value)
    run = tmp_path / "separate" / "seed_0"
    small = ["--proposals_per_teacher", "2", "--attempts_per_task", "2", "--replay", "0"]
    small += ["--per_device_train_batch_size", "12", "--max_completion_length", "48", "--students", "2"]
    given = screen.options_of(screen.CANDIDATES["separate"], tmp_path, 2, screen.HALF_KNOWN)
    screen.train(run, 0, [*given, *small])
    rates = merging.score(run)
    assert [*rates] == [*WAYS]
    assert all(0 <= rate <= 1 for each in rates.values() for rate in each.values())

    checkpoint = Path(get_last_checkpoint(str(run)))
    students = list(merging.read_students(checkpoint).values())
    merging.write_merged(checkpoint, "mean of what they add", students, tmp_path / "mean")
    export_member(str(run), tmp_path / "exported", merge=True, merge_students=True)
    ours, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("mean", "exported"))
    assert all(torch.allclose(ours[key].float(), exported[key].float(), atol=1e-2) for key in exported)
    assert (run / "merging.json").exists()
