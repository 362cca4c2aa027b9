"""Truth around the three code kinds: what is accepted, what is right, and what hostile text gets. Real sandbox."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.code_tasks import DOUBLE, block, grade, inputs_text, propose
from tests.written import write_answer, write_proposal
from trl_populora.sandbox import Sandbox, Status, Verdict
from trl_populora.sandbox.values import decode, encode, equal
from trl_populora.tasks import TASK_KINDS, CodeF, CodeI, CodeO, Proposal, Refusal, Reject, Task, resolve_kind
from trl_populora.tasks.python.prompts import fence


ADD = "def f(x, y):\n    return [x + y, 1.0]"
ADD_TASK = Task("code_o", ADD + "\n", (encode((3, 4)),), (encode([7, 1.0]),))
ADD_BLOCK = "```python\ndef f(x, y):\n    return [x + y, 1.0]\n```\n"
SQUARE = "def f(n):\n    while n < 0:\n        n -= 1\n    return n * n % 7"
SQUARE_TASK = Task("code_i", SQUARE, (encode((3,)),), (encode(2),))
DOUBLE_TASK = Task("code_o", DOUBLE, (encode((1,)),), (encode(2),))
HIDDEN_TASK = Task(
    "code_f",
    DOUBLE,
    tuple(encode((n,)) for n in (1, "ab", [2], 3.5, -4, 1e300)),
    tuple(encode(v) for v in (2, "abab", [2, 2], 7.0, -8, 2e300)),
    "twice the argument",
    visible=3,
)
KINDS = [resolve_kind(name) for name in TASK_KINDS]
OK = Verdict(Status.OK, "", ("1",), 0.0, 0.0, 0)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, allow_weak=True) as box:
        yield box


# Prompts


def test_compact_prompts_are_the_bytes_that_the_tiny_base_was_trained_on():
    code_o, code_i, code_f = KINDS
    shown = ADD_BLOCK + "```input\n3, 4\n```\n```output\n[7, 1.0]\n```\n"
    expected = {
        "propose code_o\n" + shown * 2: code_o.proposal_prompt([ADD_TASK] * 2, "compact"),
        "propose code_i\n" + shown: code_i.proposal_prompt([ADD_TASK], "compact"),
        "propose code_f 10\n" + ADD_BLOCK: code_f.proposal_prompt([ADD_TASK], "compact"),
        "solve code_o\n" + ADD_BLOCK + "```input\n3, 4\n```\n": code_o.solving_prompt(ADD_TASK, "compact"),
        "solve code_i\n" + ADD_BLOCK + "```output\n[7, 1.0]\n```\n": code_i.solving_prompt(ADD_TASK, "compact"),
        "solve code_f\n```message\ntwice the argument\n```\n"
        "```examples\nf(1) -> 2\nf('ab') -> 'abab'\nf([2]) -> [2, 2]\n"
        "```\n": code_f.solving_prompt(HIDDEN_TASK, "compact"),
    }
    for content, messages in expected.items():
        assert messages == [{"role": "user", "content": content}]


def test_what_the_tests_write_are_the_bytes_that_the_tiny_base_was_trained_on():
    assert write_answer("code_o", encode([7, 1.0])) == "```output\n[7, 1.0]\n```"
    assert write_answer("code_i", encode((3, [4]))) == "```input\n3, [4]\n```"
    assert write_answer("code_f", DOUBLE + "\n") == block("python", DOUBLE)
    proposal = Proposal("code_o", DOUBLE, (encode((3,)),))
    assert write_proposal(proposal) == block("python", DOUBLE) + "\n" + block("input", "3")
    proposal = Proposal("code_f", DOUBLE, (encode((3,)), encode(("a",))), "a hint")
    assert write_proposal(proposal) == block("inputs", "3\n'a'") + "\n" + block("message", "a hint")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_chat_prompts_state_the_format_that_the_parsers_enforce(kind):
    """An answer made of the very fences that the prompt shows, with real contents, is read."""
    contents = {
        "python": DOUBLE,
        "input": "3",
        "output": "6",
        "inputs": "\n".join("0123456789"),
        "message": "twice it",
    }

    def answer_to(prompt):
        stated = prompt[-1]["content"].partition("Answer format.")[2].partition("The program:")[0]
        return fence(*((name, contents[name]) for name in re.findall(r"^```(\w+)$", stated, re.MULTILINE)))

    text = answer_to(kind.proposal_prompt([DOUBLE_TASK], "chat"))
    assert isinstance(kind.parse_proposal(text, [DOUBLE_TASK]), Proposal)
    assert isinstance(kind.parse_proposal(f"<think>\n{text}\n</think>\nHere:\n{text}\nDone.", [DOUBLE_TASK]), Proposal)
    text = answer_to(kind.solving_prompt(HIDDEN_TASK, "chat"))
    assert kind.parse_attempt(text, HIDDEN_TASK).well_formed
    assert kind.parse_attempt(f"<think>{text}</think>{text}", HIDDEN_TASK).well_formed


@pytest.mark.parametrize("style", ["chat", "compact"])
def test_solving_prompts_keep_the_answer_to_themselves(style):
    code_o, code_i, code_f = KINDS
    assert "[7, 1.0]" not in code_o.solving_prompt(ADD_TASK, style)[-1]["content"]
    assert "3, 4" not in code_i.solving_prompt(ADD_TASK, style)[-1]["content"]
    shown = code_f.solving_prompt(HIDDEN_TASK, style)[-1]["content"]
    assert "total" not in shown
    assert "1e+300" not in shown
    assert "3.5" not in shown


def test_prompts_survive_braces_and_an_empty_archive():
    task = Task("code_o", "def f(x):\n    return {'{a}': x}.get('{0}')", (encode(({"{b}": 1},)),), (encode(None),))
    for kind in KINDS:
        references = [task] if kind.name == "code_f" else []
        assert kind.proposal_prompt(references, "chat")[-1]["content"]
    assert "{'{a}': x}" in KINDS[0].proposal_prompt([task], "chat")[-1]["content"]
    assert "{'{b}': 1}" in KINDS[0].solving_prompt(task, "chat")[-1]["content"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_unknown_style_is_named(kind):
    with pytest.raises(ValueError, match="chat, compact, got 'verbose'"):
        kind.proposal_prompt([DOUBLE_TASK], "verbose")
    with pytest.raises(ValueError, match="'verbose'"):
        kind.solving_prompt(HIDDEN_TASK, "verbose")


# Proposals


@pytest.mark.parametrize("kind", [CodeO(), CodeI()], ids=["code_o", "code_i"])
def test_a_valid_program_becomes_a_task_with_its_true_output(kind, sandbox):
    text = block("python", "import math\n\n" + ADD) + "\n" + block("input", "3, 4")
    task = propose(kind, sandbox, text)
    assert task == Task(kind.name, "import math\n\n" + ADD, (encode((3, 4)),), (encode([7, 1.0]),))


@pytest.mark.parametrize(
    ("program", "given", "reason"),
    [
        (DOUBLE, "3) or (4", Reject.ARGUMENTS),
        (DOUBLE, "open('x')", Reject.ARGUMENTS),
        (DOUBLE, "x=3", Reject.ARGUMENTS),
        (DOUBLE, "9**9**9**9", Reject.ARGUMENTS),
        (DOUBLE, "[" * 300 + "]" * 300, Reject.OVERSIZED),
        (DOUBLE, "[" * 190 + "]" * 190, Reject.ARGUMENTS),
        (DOUBLE, repr("x" * 500), Reject.OVERSIZED),
        (DOUBLE + "\n#" + "x" * 3000, "3", Reject.OVERSIZED),
        ("def g(x):\n    return x", "3", Reject.NO_FUNCTION),
        ("def f(x):\nreturn x", "3", Reject.SYNTAX),
        ("def f(x):\n    return x / 0", "3", Reject.ERROR),
        ("def f(x):\n    return x", "3, 4", Reject.ERROR),
        ("def f(x):\n    break", "3", Reject.ERROR),
        ("def f(x):\n    raise SystemExit(0)", "3", Reject.ERROR),
        ("def f(x):\n    return 'ab' * 300", "3", Reject.OVERSIZED),
        ("def f(x):\n    return list(range(10 ** 6))", "3", Reject.BAD_OUTPUT),
        ("def f(x):\n    return (i for i in range(3))", "3", Reject.BAD_OUTPUT),
        ("def f(x):\n    return object()", "3", Reject.BAD_OUTPUT),
        ("def f(x):\n    return f", "3", Reject.BAD_OUTPUT),
        ("def f(x):\n    return list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})", "3", Reject.NONDETERMINISTIC),
        ("import random\n\ndef f(x):\n    return random.random()", "3", Reject.POLICY),
        ("def f(x):\n    while True:\n        pass", "3", Reject.TIMEOUT),
        ("def f(x):\n    return len(bytearray(8 << 30))", "3", Reject.MEMORY),
        ("import socket\n\ndef f(x):\n    return 1", "3", Reject.POLICY),
    ],
)
def test_an_invalid_program_is_rejected_with_its_reason(program, given, reason, sandbox):
    assert propose(CodeO(), sandbox, block("python", program) + "\n" + block("input", given)) is reason


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK], ids=str)
def test_every_status_of_the_sandbox_is_a_reason(kind, status):
    proposal = Proposal(kind.name, DOUBLE, (encode((1,)), encode((2,))), "hint")
    refusal = kind.accept(proposal, Verdict(status, "it said so", (), 0.0, 0.0, 0), random.Random(0))
    assert (refusal.reason.value, refusal.detail) == (status.value, "it said so")


def test_a_long_output_is_refused_and_never_cut(sandbox):
    def text(size):
        return block("python", f"def f(x):\n    return 'a' * {size}") + "\n" + block("input", "0")

    assert decode(propose(CodeO(), sandbox, text(398)).outputs[0]) == "a" * 398
    assert propose(CodeO(), sandbox, text(399)) is Reject.OVERSIZED


TEN = [repr(value) for value in (1, 2, -3, 4.5, "a", "bc", [], [1], (2,), "")]


def test_code_f_pairs_stay_true_through_the_shuffle(sandbox):
    task = propose(CodeF(), sandbox, inputs_text(TEN), [DOUBLE_TASK])
    assert (task.kind, task.program, task.message, task.visible) == ("code_f", DOUBLE, "twice the argument", 5)
    pairs = {
        (repr(decode(given)[0]), repr(decode(returned)))
        for given, returned in zip(task.inputs, task.outputs, strict=True)
    }
    assert pairs == {(text, repr(eval(text) * 2)) for text in TEN}


def test_code_f_hides_what_the_generator_says_and_not_what_the_teacher_wrote_last(sandbox):
    tasks = [propose(CodeF(), sandbox, inputs_text(TEN), [DOUBLE_TASK], seed) for seed in (0, 0, 1, 2, 3)]
    assert tasks[0] == tasks[1]
    assert len({task.inputs for task in tasks}) == 4
    assert len({frozenset(task.inputs[5:]) for task in tasks}) > 1


@pytest.mark.parametrize(
    ("lines", "message", "reason"),
    [
        (TEN[:9], "hint", Reject.FORMAT),
        ([*TEN, "7"], "hint", Reject.FORMAT),
        ([*TEN[:9], " "], "hint", Reject.FORMAT),
        (TEN, " \n ", Reject.FORMAT),
        (TEN, "one\ntwo\nthree", Reject.OVERSIZED),
        (TEN, "x" * 401, Reject.OVERSIZED),
        ([*TEN[:9], "[" * 190 + "]" * 190], "hint", Reject.ARGUMENTS),
        ([*TEN[:9], repr("x" * 500)], "hint", Reject.OVERSIZED),
        ([*TEN[:9], "1) or (1"], "hint", Reject.ARGUMENTS),
        ([*TEN[:9], "1"], "hint", Reject.DUPLICATE_INPUTS),
        ([*TEN[:9], "True"], "hint", Reject.DUPLICATE_INPUTS),
        ([*TEN[:9], "1.0"], "hint", Reject.DUPLICATE_INPUTS),
        ([*TEN[:9], "f(1)"], "hint", Reject.DUPLICATE_INPUTS),
        ([*TEN[:8], "nan", "nan"], "hint", Reject.DUPLICATE_INPUTS),
        (TEN, "`def f(x): total = x+x; return total`", Reject.LEAKED_PROGRAM),
        (TEN, "total = x + x\nreturn total", Reject.LEAKED_PROGRAM),
        ([*TEN[:9], "None"], "hint", Reject.ERROR),
        ([*TEN[:9], "1, 2"], "hint", Reject.ERROR),
    ],
)
def test_an_invalid_set_of_inputs_is_rejected_with_its_reason(lines, message, reason, sandbox):
    assert propose(CodeF(), sandbox, inputs_text(lines, message), [DOUBLE_TASK]) is reason


def test_constant_outputs_are_rejected(sandbox):
    constant = Task("code_o", "def f(x):\n    return 1.0 if x else True", (encode((1,)),), (encode(1.0),))
    assert propose(CodeF(), sandbox, inputs_text(TEN), [constant]) is Reject.CONSTANT_OUTPUT
    nan = Task("code_o", "def f(x):\n    return float('nan')", (encode((1,)),), (encode(1.0),))
    assert propose(CodeF(), sandbox, inputs_text(TEN), [nan]) is Reject.CONSTANT_OUTPUT


@pytest.mark.parametrize("seed", range(12))
def test_no_constant_meets_all_hidden_pairs(seed, sandbox):
    """One output of ten differs; wherever the shuffle puts it, a program without it is wrong."""
    known = Task("code_o", "def f(x):\n    return x == 3", (encode((1,)),), (encode(False),))
    task = propose(CodeF(), sandbox, inputs_text("0123456789"), [known], seed)
    assert sorted(task.outputs[5:]) == ["false"] * 4 + ["true"]
    assert {(decode(i)[0] == 3, decode(o)) for i, o in zip(task.inputs, task.outputs, strict=True)} == {
        (True,) * 2,
        (False,) * 2,
    }
    for constant in (True, False):
        answer = block("python", f"def f(x):\n    return {constant}")
        assert grade(CodeF(), sandbox, task, answer) == "wrong"


def test_code_f_says_what_it_needs():
    assert CodeF().reference_count(6) == 1
    assert [kind.reference_count(6) for kind in (CodeO(), CodeI())] == [6, 6]
    with pytest.raises(ValueError, match="at least 2, one visible and one hidden pair, got 1"):
        CodeF(inputs_per_task=1)
    with pytest.raises(ValueError, match="code_f proposes for a known program, got no reference"):
        CodeF().proposal_prompt([], "compact")
    assert (
        CodeF(inputs_per_task=4)
        .proposal_prompt([DOUBLE_TASK], "compact")[0]["content"]
        .startswith("propose code_f 4\n")
    )


# Attempts


HOSTILE_VALUES = [
    "7] or [True",
    "[7, 1.0]) or (True",
    "9**9**9**9",
    "[7, 1.0][:]",
    "[7, 1.0] if True else 0",
    "f(3, 4)",
    "__import__('os').getpid()",
    "[x for x in (7, 1.0)]",
    "lambda: 7",
    "'a' * 10**9",
    "(" * 5000 + ")" * 5000,
    "[" * 100 + "]" * 100,
    "-" * 3000 + "1",
    "1 + " * 900 + "1",
    "set" + "()" * 1900,
    "[1]" * 1300,
    "9" * 4001,
    "object()",
    "globals()",
    "f'{7}'",
    "[7,\x00 1.0]",
    "[7, 1.0]\n[7, 1.0]",
    "[7, 1.0], # \n)or(True",
    "",
]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (block("output", "[7, 1.0]"), "right"),
        (block("output", " [ 7,\n1.0 ] "), "right"),
        ("<think>7?\n```output\n[8]\n```\n</think>" + block("output", "[7, 1.0]"), "right"),
        ("The output:\n" + block("output", "[7, 1.0]") + "\nI am sure.", "right"),
        (block("output", "[7.0, True]"), "right"),  # Python's ==
        (block("output", "[7, 1.5]"), "wrong"),
        (block("output", "(7, 1.0)"), "wrong"),
        (block("output", "[7, 1.0], 0"), "wrong"),
        (block("output", "'[7, 1.0]'"), "wrong"),
        (block("output", "nan"), "wrong"),
        (block("output", "9" * 3999), "wrong"),
        ("[7, 1.0]", "malformed"),
        (block("input", "[7, 1.0]"), "malformed"),
        (block("output", "[7, 1.0]") + "\n" + block("output", "[7, 1.0]"), "malformed"),
        (block("output", "[7, 1.0]\n```\n```output\n8"), "malformed"),
        (block("output", "[7, 1.0]") + "\n" + block("python", "pass"), "malformed"),
        ("````output\n[7, 1.0]\n````", "malformed"),
        ("<think>" + block("output", "[7, 1.0]"), "malformed"),
        (block("output", "[7, 1.0]")[:-4], "malformed"),  # cut off before the closing fence
        *((block("output", value), "malformed") for value in HOSTILE_VALUES),
    ],
)
def test_code_o_truth(text, verdict, sandbox):
    assert grade(CodeO(), sandbox, ADD_TASK, text) == verdict


def test_code_o_needs_no_run():
    attempt = CodeO().parse_attempt(block("output", "1"), ADD_TASK)
    assert CodeO().trial(ADD_TASK, attempt) is None


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (block("input", "3"), "right"),
        (block("input", "f(3)"), "right"),
        (block("input", "10"), "right"),  # another preimage
        (block("input", "3.0"), "right"),
        (block("input", "4"), "right"),  # 16 % 7 == 2
        (block("input", "5"), "wrong"),
        (block("input", "'a'"), "wrong"),  # raises
        (block("input", "3, 3"), "wrong"),  # wrong arity
        (block("input", ""), "wrong"),
        (block("input", "-1"), "wrong"),  # never returns
        (block("input", "float('nan')"), "wrong"),
        (block("input", "3) or f(3"), "malformed"),
        (block("input", "f(3), f(3)"), "malformed"),
        (block("input", "f(f(3))"), "malformed"),
        (block("input", "g(3)"), "malformed"),
        (block("input", "n=3"), "malformed"),
        (block("input", "*[3]"), "malformed"),
        (block("input", "**{'n': 3}"), "malformed"),
        (block("input", "exit()"), "malformed"),
        (block("input", "3 for n in [3]"), "malformed"),
        (block("input", "f(3)\nf(4)"), "malformed"),
        (block("input", "2**10**9"), "malformed"),
        (block("input", "[" * 2000), "malformed"),
        (block("output", "3"), "malformed"),
        (block("input", "3") + block("input", "3"), "malformed"),
    ],
)
def test_code_i_truth(text, verdict, sandbox):
    assert grade(CodeI(), sandbox, SQUARE_TASK, text) == verdict


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (DOUBLE, "right"),
        (
            "class A:\n    def __init__(self, x):\n        self.x = x\n\ndef twice(a):\n    return a.x * 2\n\n"
            "def f(x):\n    return twice(A(x))",
            "right",
        ),
        ("def f(x):\n    print('right', x)\n    return x * 2", "right"),
        ("def f(x):\n    return x", "wrong"),
        ("def f(x):\n    return x * 2 if x != 1e300 else None", "wrong"),  # one hidden pair
        (
            "def f(x):\n    return {'1': 2, \"'ab'\": 'abab', '[2]': [2, 2]}[repr(x)]",
            "wrong",
        ),  # the visible pairs by heart
        ("def f(x):\n    return x * 2 if x not in (1, 'ab', [2]) else x", "wrong"),  # the hidden ones alone
        ("def f(x):\n    return x * 2 if x != 1 else x", "wrong"),  # all but one that it was shown
        ("def f(x):\n    raise ValueError(x)", "wrong"),
        ("def f(x):\n    while True:\n        pass", "wrong"),
        ("class E:\n    def __eq__(self, other):\n        return True\n\ndef f(x):\n    return E()", "wrong"),
        ("class E(float):\n    def __eq__(self, other):\n        return True\n\ndef f(x):\n    return E(1)", "wrong"),
        ("def f(x):\n    raise SystemExit(0)", "wrong"),
        ("import os\n\ndef f(x):\n    os._exit(0)", "wrong"),
        ("import sys\n\ndef f(x):\n    return sys._getframe(1).f_locals", "wrong"),
        ("def f(x):\n    return 'ok'\n\nf.outputs = [2]", "wrong"),
        ("def f(x, y):\n    return x * 2", "wrong"),
        ("", "malformed"),
        ("x * 2", "malformed"),
        ("def g(x):\n    return x * 2", "malformed"),
        ("def f(x) return x * 2", "malformed"),
        ("def f(x):\n    return x * 2" + "\n# x" * 1000, "malformed"),
        ("def f(x):\n    return " + "(" * 300 + "x" + ")" * 300, "malformed"),
    ],
)
def test_code_f_truth(program, verdict, sandbox):
    assert grade(CodeF(), sandbox, HIDDEN_TASK, block("python", program)) == verdict


def test_code_f_runs_on_all_inputs():
    attempt = CodeF().parse_attempt(block("python", DOUBLE), HIDDEN_TASK)
    trial = CodeF().trial(HIDDEN_TASK, attempt)
    assert trial.inputs == HIDDEN_TASK.inputs


@pytest.mark.parametrize(
    ("output", "chance"),
    [
        (True, 0.5),
        ([True, False], 0.25),
        ((False,), 0.5),
        ([], 0.0),
        (1, 0.0),
        (None, 0.0),
        ([True, 1], 0.0),
        ("a", 0.0),
    ],
)
def test_guessing_is_told_by_the_form_of_the_output_alone(output, chance):
    task = replace(ADD_TASK, outputs=(encode(output),))
    assert [kind.chance(task) for kind in KINDS] == [chance, chance, 0.0]


def test_the_same_mistake_in_another_notation_is_one(sandbox):
    """Else guesses look like mistakes of many kinds, and nobody like a guesser."""

    def said(kind, task, text):
        attempt = kind.parse_attempt(text, task)
        job = kind.trial(task, attempt)
        return kind.identify_mistake(task, attempt, None if job is None else sandbox.run([job])[0])

    assert (
        len({said(CodeO(), ADD_TASK, block("output", text)) for text in ("[7, 0]", "[7.0, False]", "[7, -0.0]")}) == 1
    )
    half = Task("code_i", "def f(a):\n    return a / 2 if a % 2 else a // 2", (encode((3,)),), ("1.5",))
    assert len({said(CodeI(), half, block("input", text)) for text in ("4", "4.0", "5")}) == 2
    # The second differs from the first in outputs that come after the first wrong one.
    bodies = ("return 0", "# none\n    return 0.0 if x == 1 else x", "return 1")
    programs = [block("python", f"def f(x):\n    {body}") for body in bodies]
    assert len({said(CodeF(), HIDDEN_TASK, program) for program in programs}) == 2


def test_a_missing_verdict_is_never_right():
    for kind, task, text in (
        (CodeI(), SQUARE_TASK, block("input", "3")),
        (CodeF(), HIDDEN_TASK, block("python", DOUBLE)),
    ):
        attempt = kind.parse_attempt(text, task)
        assert not kind.correct(task, attempt, None)
        assert not kind.correct(task, attempt, Verdict(Status.TIMEOUT, "", (), 0.0, 0.0, 0))
    with pytest.raises(ValueError, match="needs a verdict, got None: run the job of `check"):
        CodeO().accept(Proposal("code_o", DOUBLE, (encode((1,)),)), None, random.Random(0))


# Whatever a model may write


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.sets(st.integers() | st.text(max_size=4), max_size=4)
        | st.frozensets(st.integers() | st.binary(max_size=4), max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(PLAIN)
def test_every_value_survives_as_an_output(value):
    attempt = CodeO().parse_attempt(write_answer("code_o", encode(value)), ADD_TASK)
    assert attempt.well_formed
    assert attempt.answer == encode(value)


@settings(deadline=None)
@given(st.lists(PLAIN, max_size=3).map(tuple))
def test_every_argument_tuple_survives_as_an_input(values):
    written = encode(values, ordered=True)
    attempt = CodeI().parse_attempt(write_answer("code_i", written), SQUARE_TASK)
    assert attempt.well_formed
    assert attempt.answer == written


STATEMENTS = st.sampled_from(
    [
        "x += 1",
        "if x:\n        x = [x]",
        "s = '```'",
        "# ```python",
        "for i in range(3):\n        x = x, i",
        "t = '''\n ``` \n'''",
    ]
)


@settings(deadline=None)
@given(st.lists(STATEMENTS, max_size=6), st.lists(PLAIN, min_size=1, max_size=2).map(tuple))
def test_a_rendered_proposal_is_read_back(statements, values):
    program = "\n    ".join(["def f(x, y=0):", *statements, "return x"])
    proposal = Proposal("code_o", program, (encode(values, ordered=True),))
    if len(write_proposal(proposal).partition("```input\n")[2]) < 400:
        assert CodeO().parse_proposal(write_proposal(proposal), []) == proposal


@settings(deadline=None)
@given(
    st.lists(
        PLAIN.filter(lambda value: len(encode(value)) < 60), min_size=3, max_size=3, unique_by=lambda v: encode(v)
    ),
    st.text(alphabet="abc +=`'\"()<>.,", min_size=1, max_size=40),
)
def test_a_rendered_set_of_inputs_is_read_back_or_has_equal_inputs(given_values, message):
    kind, message = CodeF(inputs_per_task=3), message.strip()
    proposal = Proposal("code_f", DOUBLE, tuple(encode((value,), ordered=True) for value in given_values), message)
    parsed = kind.parse_proposal(write_proposal(proposal), [DOUBLE_TASK])
    if isinstance(parsed, Refusal) and parsed.reason is Reject.DUPLICATE_INPUTS:
        assert any(equal(a, b) for i, a in enumerate(given_values) for b in given_values[:i])
    elif not message or message.startswith("```"):
        assert parsed.reason is Reject.FORMAT
    else:
        assert parsed == proposal


ANYTHING = st.lists(
    st.sampled_from(
        [
            "```python\n",
            "```input\n",
            "```inputs\n",
            "```output\n",
            "```message\n",
            "\n```\n",
            "def f(x):\n    return x",
            "3, 4",
        ]
        + ["<think>", "</think>", "\r\n", "\x00", "\ud800", "(" * 50, "f(1)", "1\n2", "hint", "'", "\\", "{", "f'{"]
    )
    | st.text(max_size=10),
    max_size=12,
).map("".join)


@settings(deadline=None)
@given(ANYTHING)
def test_no_text_makes_a_parser_raise(text):
    for kind in (CodeO(), CodeI(), CodeF(inputs_per_task=2)):
        proposal = kind.parse_proposal(text, [DOUBLE_TASK])
        assert (
            isinstance(proposal, Refusal) or kind.parse_proposal(write_proposal(proposal), [DOUBLE_TASK]) == proposal
        )
        attempt = kind.parse_attempt(text, HIDDEN_TASK)
        assert attempt.well_formed == (attempt.reason == "")
        assert attempt.reason in {"", *(reason.value for reason in Reject)}
