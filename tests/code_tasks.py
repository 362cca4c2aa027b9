"""A proposal and an attempt through a code kind and the sandbox, as the rollout takes them."""

from __future__ import annotations

import random

from trl_populora.tasks import Refusal


DOUBLE = "def f(x):\n    total = x + x\n    return total"


def block(name, content):
    return f"```{name}\n{content}\n```"


def propose(kind, sandbox, text, references=(), seed=0):
    """Parse, check and accept, as the rollout does: the task, or the reason why there is none."""
    outcome = kind.parse_proposal(text, references)
    if not isinstance(outcome, Refusal):
        (verdict,) = sandbox.run([kind.check(outcome)])
        outcome = kind.accept(outcome, verdict, random.Random(seed))
    if isinstance(outcome, Refusal):
        assert outcome.detail, "people are told in a sentence"
        return outcome.reason
    return outcome


def grade(kind, sandbox, task, text):
    """`"right"`, `"wrong"` or `"malformed"`."""
    attempt = kind.parse_attempt(text, task)
    job = kind.trial(task, attempt)
    verdict = sandbox.run([job])[0] if job is not None else None
    right = kind.correct(task, attempt, verdict)
    assert attempt.well_formed or (not right and job is None and attempt.answer == "" and attempt.reason)
    return "right" if right else "wrong" if attempt.well_formed else "malformed"


def inputs_text(lines, message="twice the argument"):
    return block("inputs", "\n".join(lines)) + "\n" + block("message", message)
