"""
Worked answers of the tiny base: what stands between `<think>` and `</think>`, one executed statement a line.

A line has the values put in and then the result: `t = 'hqq'.replace('z', 'h') = 'hqq'`. The lines are those of the
program, their results those of what it is believed to be. *Forwards*, for code_o, is every statement in turn, the
returned expression last. *Backwards*, for code_i, goes from the output to the first statement; each line ends with
what the operand must be. Guess and check (a guess, forwards, compared with what is
wanted, and a further guess) was tried for code_i and code_f halfway through the training: for code_i it solved .24,
.12 and .17 of the tasks of levels 2, 3 and 4 where working back solved .76, .59 and .39; for code_f, with constants
tried on two visible pairs, .44, .18 and .24 against .38, .25 and .19 of direct answers. Used by `tiny_documents.py`.
"""

from __future__ import annotations

from tiny_programs import Program, Step


OPEN, CLOSE = "<think>", "</think>"


def _value(expression: str, names: dict) -> object:
    return eval(expression, dict(names))  # noqa: S307 - of a program that `ProgramWriter` wrote


def _results(step: Step, names: dict) -> tuple[bool, object]:
    """Whether the step changes its operand, and its result."""
    takes_place = not step.operation.condition or bool(_value(step.write(step.operation.condition), names))
    return takes_place, _value(step.write(step.operation.text), names) if takes_place else names[step.operand]


def _walk(program: Program, believed: Program, given: tuple) -> list[tuple[Step, dict, bool, object]]:
    """Each step of `program` with the variables before it, whether it takes place, and its result by `believed`."""
    names, walked = dict(zip(program.parameters, given, strict=True)), []
    for written, step in zip(program.steps, believed.steps, strict=True):
        takes_place, result = _results(step, names)
        walked.append((written, names, takes_place, result))
        names = {**names, step.target or "": result}
    return walked


def forwards(program: Program, believed: Program, given: tuple) -> str:
    """The thinking of a worked code_o answer."""
    lines = []
    for step, names, takes_place, result in _walk(program, believed, given):
        put_in = {"operand": repr(names[step.operand]), "other": repr(names[step.other]) if step.other else ""}
        text = f"{step.write(step.operation.text, **put_in)} = {result!r}"
        if step.operation.condition:
            condition = step.write(step.operation.condition, **put_in)
            lines.append(f"if {condition}: {step.operand} = {text if takes_place else repr(result)}")
        else:
            lines.append(f"{step.target} = {text}" if step.target else text)
    return _thinking(lines)


def backwards(program: Program, believed: Program, given: tuple) -> str:
    """The thinking of a worked code_i answer; the further arguments are chosen first."""
    chosen = [f"{name} = {value!r}" for name, value in zip(program.parameters[1:], given[1:], strict=True)]
    lines = []
    for step, names, takes_place, result in reversed(_walk(program, believed, given)):
        other = repr(names[step.other]) if step.other else ""
        text = f"{step.write(step.operation.text, other=other)} = {result!r}"
        if step.operation.condition:
            text = f"if {step.write(step.operation.condition)}: {text if takes_place else f'no {result!r}'}"
        lines.append(f"{text}: {step.operand} = {names[step.operand]!r}")
    return _thinking([*chosen, *lines])


def _thinking(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in (OPEN, *lines, CLOSE))
