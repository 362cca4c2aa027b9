"""Targets that a fitness could be read from: right by the referee, and measured as the model computes them."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1]))

import likelihood  # noqa: E402
from likelihood import correlate, write_targets  # noqa: E402
from screen import HALF_KNOWN, KIND, draw_held_out  # noqa: E402
from tiny_scores import Scorer  # noqa: E402

from trl_populora.sandbox import Sandbox  # noqa: E402


@pytest.fixture(scope="module")
def scorer():
    with Sandbox() as sandbox:
        yield Scorer(HALF_KNOWN, sandbox)


def test_the_referee_calls_every_target_right_and_no_task_is_scored_too(scorer):
    targets = write_targets(60)
    answers = [target.thinking + target.block for target in targets]
    assert scorer.grade(scorer.kinds[KIND], [target.task for target in targets], answers, 1).all()
    scored = {task.task_id for seed in ("screen", "likelihood") for task in draw_held_out(seed, 120)}
    assert not scored & {target.task.task_id for target in targets}


def test_a_block_has_the_log_probability_of_its_tokens_alone_whatever_shares_its_batch(scorer):
    targets = write_targets(8)
    together = likelihood.likelihood(scorer, targets)
    for target, (block, whole) in zip(targets, together, strict=True):
        (alone,) = likelihood.likelihood(scorer, [target])
        assert alone == pytest.approx([block, whole], abs=1e-3)
        prompt = scorer.kinds[KIND].solving_prompt(target.task, "compact")
        before = scorer.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = scorer.tokenizer(before + target.thinking + target.block, return_tensors="pt")["input_ids"]
        worked = len(scorer.tokenizer(before + target.thinking)["input_ids"])
        with torch.no_grad():
            scores = scorer.model(ids).logits[0].log_softmax(-1)
        expected = sum(float(scores[place - 1, ids[0, place]]) for place in range(worked, ids.shape[1]))
        assert block == pytest.approx(expected, abs=1e-3)
        assert whole < block


def test_students_of_one_interval_are_compared_with_each_other():
    # Both gains fall from the first interval to the second, and within an interval one rises where the other falls.
    over_all, within = correlate([[(5.0, 5.0), (6.0, 4.5)], [(1.0, 1.0), (2.0, 0.5)]])
    assert over_all > 0.9
    assert within == pytest.approx(-1)


def test_a_teacher_gains_what_its_students_gain_each_by_the_part_of_its_attempts():
    # Student one learns on both halves of the targets, two unlearns on the first and learns on the second.
    before = {name: {"targets": [[-0.3, -3.0], [-0.2, -2.0]], "rate": 0.1} for name in ("one", "two")}
    after = {
        "one": {"targets": [[-0.1, -1.0], [-0.1, -1.0]], "rate": 0.3},
        "two": {"targets": [[-0.4, -4.0], [-0.05, -0.5]], "rate": 0.2},
    }
    found = {"0": before, "1": after}
    gains = [(2.0, 1.0), (-1.0, 1.5)]
    assert likelihood.weigh(gains, (0.75, 0.5)) == pytest.approx((0.8, 1.2))
    # Of one's 4 attempts 3 were at the first teacher's tasks, of two's 16 attempts 4; the third taught two alone.
    taught = {"1": {"first": {"one": 3, "two": 4}, "second": {"one": 1, "two": 8}, "third": {"two": 4}, "idle": {}}}
    weights = ((3 / 4, 4 / 16), (1 / 4, 8 / 16), (0, 4 / 16))
    over_all, within = correlate([[likelihood.weigh(gains, each) for each in weights]])
    told = likelihood.compare(found, taught)
    (teachers,) = [row for row in told if row[:2] == ["the whole answer", "likewise, of teachers"]]
    assert teachers[2:] == ["3", f"{over_all:.2f}", f"{within:.2f}"]
    alone = likelihood.compare(found, {"1": {"first": {"one": 3, "two": 4}}})
    assert not [row for row in alone if "teachers" in row[1]], "one teacher has no rival"


def test_gains_that_differ_as_sampling_makes_them_differ_are_told_beside_it():
    rng = random.Random(0)

    def sample(rate: float) -> float:
        return fmean(rng.random() < rate for _ in range(likelihood.TARGETS * 16))

    def run(*gains: float) -> dict:
        names = [f"student_{n}" for n in range(len(gains))]
        later = {
            str(step): {name: {"rate": sample(0.4 + step * each)} for name, each in zip(names, gains, strict=True)}
            for step in (1, 2, 3, 4, 5)
        }
        return {"0": {"base": {"rate": sample(0.4)}}, **later}

    seen, drawn = likelihood.measure_spread(run(*[0.02] * 8), 16)
    assert drawn == pytest.approx(math.sqrt(2 * 0.24 / 4800), rel=0.1)
    assert seen == pytest.approx(drawn, rel=0.35)
    seen, drawn = likelihood.measure_spread(run(*[0.0, 0.06] * 4), 16)
    assert seen > 3 * drawn


def test_the_page_tells_the_correlations_of_the_kept_runs():
    folder = Path(likelihood.__file__).parent
    found = json.loads((folder / "tiny" / "likelihood.json").read_text())
    taught = json.loads((folder / "tiny" / "taught.json").read_text())
    page = (folder / "README.md").read_text()
    over_all, within = [], []
    for seed, steps in found.items():
        told = {tuple(row[:2]): row[3:] for row in likelihood.compare(steps, taught.get(seed))[1:]}
        for kept, figure in zip(
            (over_all, within), told["the whole answer", "the gain in the sampled rate"], strict=True
        ):
            kept.append(figure)
        sure = [each[0] for each in steps["0"]["base"]["targets"]]
        assert sum(sure) / len(sure) > -0.01, "given the worked lines the base knows the block"
        assert float(told["the block", "the gain in the sampled rate"][0]) < 0.5, "so its gain says nothing"
    assert f"correlate by {over_all[0]}, {over_all[1]} and {over_all[2]}, but among" in page
    assert f"one interval by {within[0]}, {within[1]} and {within[2]}." in page
    # `told` is now the third seed's.
    of = {
        whose: told["the whole answer", f"likewise, {whose}"] for whose in ("between all checkpoints", "of teachers")
    }
    (students, alone), (_, teachers) = of.values()
    assert f"seed: {students}, among the students of one interval {alone}, among their teachers {teachers}." in page
    seen, drawn = likelihood.measure_spread(found["seed_5"], 16)
    assert f"a standard deviation of {seen:.3f}, and sampling alone gives up to {drawn:.3f}" in page


def test_rates_of_one_step_alone_are_refused():
    found = {step: {"student_0": {"targets": [[0.0, -1.0]] * 2}} for step in ("20", "75")}
    found["75"]["student_0"]["rate"] = 0.5
    with pytest.raises(ValueError, match="save_total_limit"):
        likelihood.compare(found)
