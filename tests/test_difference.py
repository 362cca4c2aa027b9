"""How members differ: cosines against dense updates, and shares and forms counted by hand."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from trl_populora.population import factors as linear_algebra
from trl_populora.report.difference import (
    FEWEST,
    compare_members,
    count_forms,
    count_right,
    measure_difference,
    read_forms,
)
from trl_populora.report.load import Run, load_run


def update_of(adapter: Path) -> torch.Tensor:
    """All products B A of an adapter, one after the other."""
    factors = load_file(adapter / "adapter_model.safetensors")
    down = {key: value.double() for key, value in factors.items() if ".lora_A." in key}
    return torch.cat(
        [(factors[key.replace("lora_A", "lora_B")].double() @ value).flatten() for key, value in down.items()]
    )


def test_cosines_are_those_of_the_updates(finished):
    run = load_run(finished)
    for role in ("teacher", "student"):
        updates = [update_of(finished / "members" / name) for name in run.members(role)]
        wanted = [[float(torch.cosine_similarity(one, other, 0)) for other in updates] for one in updates]
        for row, expected in zip(compare_members(run, role), wanted, strict=True):
            assert row == pytest.approx(expected, abs=1e-6)
    assert measure_difference(run).cosines.keys() == {"teacher", "student"}


def test_each_product_of_two_members_is_computed_once(finished, monkeypatch):
    pairs, multiply = [], linear_algebra._multiply_products
    monkeypatch.setattr(linear_algebra, "_multiply_products", lambda *pair: pairs.append(pair) or multiply(*pair))
    assert len(compare_members(load_run(finished), "student")) == 2
    assert len(pairs) == 3


def test_members_that_are_not_saved_are_not_compared(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "members" / "student_1" / "adapter_model.safetensors").unlink()
    assert measure_difference(load_run(run)).cosines.keys() == {"teacher"}


def test_right_attempts_are_counted_by_student_and_kind():
    rows = [("student_0", "code_o", True), ("student_0", "code_o", False), ("student_1", "code_i", True)]
    attempts = [{"member": member, "kind": kind, "correct": correct} for member, kind, correct in rows]
    (half, none), (unseen, whole) = count_right(attempts, ["student_0", "student_1"], ["code_o", "code_i"])
    assert (half, whole) == (0.5, 1)
    assert math.isnan(none)
    assert math.isnan(unseen)


# The newest answers of student_0 have one form, those of student_1 four.
ALIKE = ["x * x", "x // 3", "{x}", *(f"x + {number}" for number in range(FEWEST))]
OTHERS = [["x * 2", "x - 1", "[x]", "x + 1"][place % 4] for place in range(FEWEST)]


def write_answers(root: Path, answers: dict[str, list[str]]) -> Run:
    """
    Writes code_f answers as the rollouts of step 5, with four rows that do not count. Steps 4 and 6 have a right
    answer of each student; step 6 is not logged yet.
    """
    (root / "rollouts").mkdir()
    rows = [
        {"member": student, "completion": f"```python\ndef f(x):\n    return {answer}\n```"}
        for student, written in answers.items()
        for answer in written
    ]
    right = [row | {"role": "student", "kind": "code_f", "correct": True, "step": 5} for row in rows]
    stranger = {"member": "student_0", "completion": "```python\ndef f(x):\n    return {x: x}\n```"}
    stranger |= {"role": "student", "kind": "code_f", "correct": True, "step": 5}
    others = [{"correct": False}, {"kind": "code_o"}, {"role": "teacher"}, {"completion": "no block"}]
    right += [stranger | other for other in others]
    around = {step: [stranger | {"step": step, "member": student} for student in answers] for step in (4, 6)}
    for number, rows in (around | {5: right}).items():
        pq.write_table(pa.Table.from_pylist(rows), root / "rollouts" / f"step_{number:05}.parquet")
    history = [
        {"step": step, "propose/code_f/valid_rate": 1.0} | {f"member/{s}/mu": 1.0 for s in answers} for step in (4, 5)
    ]
    seen = [{"step": step, "file": f"rollouts/step_{step:05}.parquet"} for step in (4, 5)]
    return Run("answers", history, seen, root=root)


def test_forms_are_counted_among_equally_many_right_answers_of_the_last_steps(tmp_path):
    run = write_answers(tmp_path, {"student_0": ALIKE, "student_1": OTHERS})
    assert count_forms(read_forms(run, since=4)) == ({"student_0": 1, "student_1": 4}, FEWEST)


def test_forms_of_few_answers_are_not_counted(tmp_path):
    run = write_answers(tmp_path, {"student_0": ALIKE, "student_1": OTHERS[1:]})
    assert count_forms(read_forms(run, since=4)) == ({}, 0)
