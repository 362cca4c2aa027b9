"""
Writes a page of what teachers and students are shown in each prompt style, with what a base answers.

    python studies/show_forms.py models/SmolLM2-135M-Instruct --out docs/guides/forms.md

Every answer is the first that the base gave at temperature .7; none is chosen. Below it stands what came of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from trl_populora.evaluate.tryout import Finding, Form, Question, TryArguments, Tryout, try_model


OPENING = """\
# What the models are shown

You want to know what stands in a prompt before you spend hours on it. Here is every text of the two prompt styles for
chat models, made by `studies/show_forms.py`, each with the first answer of {model} (temperature .7, nothing trained,
none chosen). [Your model](model.md) tells which of them fits, and how to replace a text.

In `turns`, teachers see archived tasks as turns before, and students of small models see solved tasks (`shots`). In
`chat`, all is in one turn. A task of code_o hides the output, one of code_i the input, one of code_f the program.
"""
CLOSING = """\
What to look at next: `populora try` counts these answers [for your model](model.md); `rollouts` keep them
[for each step](../files.md#rollouts).
"""
TITLES = {"teacher": "a teacher proposes", "student": "a student solves"}
LINES = 24  # of an answer


def section(question: Question, text: str, finding: Finding) -> Iterator[str]:
    """One prompt, the answer, and what came of it."""
    yield f"\n### {question.kind}: {TITLES[question.role]}\n"
    yield "````text"
    for turn in question.prompt:
        yield f"[{turn['role']}]\n{turn['content'].rstrip()}\n"
    yield "[assistant]\n````\n"
    lines = text.rstrip().splitlines() or ["(nothing)"]
    yield "The answer:\n"
    yield "\n".join(["````text", *lines[:LINES], *(["..."] if len(lines) > LINES else []), "````"])
    good = "a valid task" if question.role == "teacher" else "right"
    refused = f"{finding.reason} ({finding.detail})" if finding.detail else finding.reason
    yield f"\nWhat came of it: {good if finding.good else refused}."


def page(found: Tryout, model: str) -> str:
    """The page in Markdown: of each style, role and kind the first question with its answer."""
    parts = [OPENING.format(model=model)]
    rows = list(zip(found.questions, found.completions, found.findings, strict=True))
    shots = max(question.form.shots for question in found.questions)
    for style, shown in {"turns": shots, "chat": 0}.items():
        parts.append(f"\n## `prompt_style: {style}`" + (f", `shots: {shown}`" if shown else ""))
        for role, form in {"teacher": Form(style), "student": Form(style, shown)}.items():
            for kind in dict.fromkeys(question.kind for question in found.questions):
                question, completion, finding = next(
                    row for row in rows if (row[0].role, row[0].kind, row[0].form) == (role, kind, form)
                )
                parts += section(question, completion.text, finding)
    return "\n".join([*parts, "", CLOSING])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or Hub id of a chat model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = TryArguments(args.model, samples=4, temperature=0.7, seed=args.seed)
    args.out.write_text(page(try_model(options), Path(args.model).name))
    print(args.out)


if __name__ == "__main__":
    main()
