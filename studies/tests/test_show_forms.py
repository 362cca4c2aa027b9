"""The page of everything that models are shown, and the recipe that makes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trl_populora.evaluate.tryout import Finding, Form, Question, Tryout
from trl_populora.step.player import Completion
from trl_populora.tasks.python import prompts


sys.path.insert(0, str(Path(__file__).parents[1]))

import show_forms  # noqa: E402


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "forms.md"
INPUTS = 4  # `populora try` asks for so many


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


@pytest.mark.parametrize("name", prompts.TURNS)
def test_every_text_of_the_turns_is_shown(page, name):
    assert prompts.TURNS[name].format(count=INPUTS) in page


@pytest.mark.parametrize("name", ["PROPOSE_PROGRAM", "PROPOSE_INPUTS", "SOLVE_OUTPUT", "SOLVE_INPUT", "SOLVE_PROGRAM"])
def test_every_text_of_the_long_form_is_shown(page, name):
    sentences = getattr(prompts, name).replace("{count}", str(INPUTS)).split("\n\n")[0]
    for part in sentences.split("{goal}"):
        assert part.strip() in page
    assert all(goal in page for goal in prompts.PROPOSE_GOAL.values())


def test_each_of_the_twelve_prompts_has_an_answer_and_what_came_of_it(page):
    assert page.count("\n### ") == page.count("\nThe answer:\n") == page.count("\nWhat came of it: ") == 12


def test_a_page_shows_the_first_answer_of_each_form_and_role():
    good, bad = Finding(True, True), Finding(False, False, "format", "there is no block")
    turns, shots, chat = Form("turns"), Form("turns", 3), Form("chat")
    asked = [
        (turns, "teacher", "first", bad),
        (turns, "teacher", "second", good),
        (shots, "student", "third", good),
        (turns, "student", "fourth", bad),
        (chat, "teacher", "fifth", good),
        (chat, "student", "sixth", bad),
    ]
    prompt = [{"role": "user", "content": "a question"}]
    found = Tryout(
        [Question(form, role, "code_o", prompt, []) for form, role, _, _ in asked],
        [Completion([1], [2], text) for _, _, text, _ in asked],
        [outcome for *_, outcome in asked],
        {2},
        1.0,
        {},
    )
    text = show_forms.page(found, "a model")
    assert [word for word in ("first", "second", "third", "fourth", "fifth", "sixth") if f"\n{word}\n" in text] == [
        "first",
        "third",
        "fifth",
        "sixth",
    ]
    assert "What came of it: format (there is no block)." in text
    assert "What came of it: right." in text
    assert "What came of it: a valid task." in text
