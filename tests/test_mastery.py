"""The map of features by steps: what is proposed, what is mastered."""

from __future__ import annotations

import math

from trl_populora.report.plots import FEW, map_mastery, map_use, order_features


def row(step: int, *features: str, correct: bool = False) -> dict:
    return {"step": step, "features": list(features), "correct": correct}


def test_features_come_in_the_order_in_which_they_were_proposed():
    proposals = [row(1, "Add"), row(1, "Add", ".find"), row(9, "If"), row(10, "If"), row(5, ".find")]
    assert order_features(proposals) == ["Add", ".find", "If"]


def test_only_the_most_used_features_are_shown():
    proposals = [row(1, f"word {n}", *(["common"] * 1)) for n in range(50)]
    shown = order_features(proposals)
    assert len(shown) == 20
    assert "common" in shown


def test_use_is_a_share_of_each_block_s_proposals():
    proposals = [row(1, "Add"), row(2, "Add", "If"), row(3), row(4, "If")]
    assert map_use(proposals, ["Add", "If"], width=2) == [[1.0, 0.0], [0.5, 0.5]]


def test_a_block_without_proposals_is_unknown_and_not_zero():
    (shares,) = map_use([row(1, "Add"), row(5, "Add")], ["Add"], width=2)
    assert shares[0] == shares[2] == 1.0
    assert math.isnan(shares[1])


def test_mastery_is_the_share_of_right_attempts_where_there_are_enough():
    attempts = [row(1, "Add", correct=n % 2 == 0) for n in range(FEW)] + [row(3, "Add", correct=True)] * (FEW - 1)
    (shares,) = map_mastery(attempts, ["Add"], width=2)
    assert shares[0] == 0.5
    assert math.isnan(shares[1])
