"""Everything that reads what a program or a model wrote, under random input: no crash, no long time, no evaluation.

python -m tests.test_sandbox_fuzz 600       goes on for ten minutes and prints how many cases it tried
"""

import contextlib
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_populora.sandbox import Limits, Status, protocol
from trl_populora.sandbox.judge import Observation, judge_run
from trl_populora.sandbox.literals import LiteralError, read_arguments, read_literal
from trl_populora.sandbox.values import decode, encode, to_literal

from .plain_data import HOSTILE_ANSWERS, plain


SECONDS = 1.0  # of CPU time for one case; they take a millisecond
LIMITS = Limits(output_bytes=4096)
WORDS = [protocol.OK, protocol.OK_IN_ORDER, protocol.ERROR, protocol.MEMORY, protocol.BAD_OUTPUT, protocol.POLICY]
WORDS += [protocol.ENTROPY, "tier", "", "OK", "ok ", "timeout", "tampered"]
SNIPPETS = [
    *HOSTILE_ANSWERS,
    "f(",
    ")",
    "'",
    '"""',
    "\\",
    "0x",
    "1e999",
    "j",
    "{1:",
    "nan",
    "set(",
    "complex(",
    "\n",
    "#",
    "é",
]
CASES = {"count": 0}
_watching, _events = [False], []


def _note_events(event, arguments):
    # `compile` is what `ast.parse` says; running its result, importing and opening would be evaluation.
    if _watching[0] and event.split(".")[0] in ("exec", "import", "open", "os", "subprocess", "socket", "ctypes"):
        _events.append(event)


sys.addaudithook(_note_events)


@contextlib.contextmanager
def harmless():
    """Neither a long time nor anything that the interpreter reports as evaluation."""
    CASES["count"] += 1
    start, _watching[0] = time.process_time(), True
    try:
        yield
    finally:
        _watching[0] = False
    assert time.process_time() - start < SECONDS
    assert not _events


def mutated(valid):
    """Valid data with pieces cut out, doubled, swapped and overwritten."""

    def change(draw):
        data = draw(valid)
        for _ in range(draw(st.integers(0, 3))):
            a, b = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
            fresh = draw(st.binary(max_size=6)) if isinstance(data, bytes) else draw(st.sampled_from(SNIPPETS))
            data = draw(
                st.sampled_from(
                    [
                        data[:a] + data[b:],
                        data[:b] + data[a:],
                        data[:a] + fresh + data[b:],
                        data[:a] + fresh + data[a:],
                    ]
                )
            )
        return data

    return st.composite(change)()


lines = st.lists(plain.map(lambda value: encode(value, max_bytes=1 << 20)) | st.text(max_size=20), max_size=3)
frames = st.builds(protocol.pack_answer, st.sampled_from(WORDS), lines)
# What `wait4` says of a dead process: an exit status, or a signal with or without a core.
exits, signals = st.integers(0, 255).map(lambda code: code << 8), st.integers(1, 64)
statuses = st.just(0) | exits | signals | signals.map(lambda number: number | 128)
literals = plain.map(to_literal)
FUZZ = settings(
    max_examples=2000 if __name__ == "__main__" else 150,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@FUZZ
@given(mutated(frames) | st.binary(max_size=200), st.integers(0, 3), st.booleans(), statuses)
def test_the_judge_reads_any_frame(data, inputs, expired, status):
    with harmless():
        verdict, reason, outputs = judge_run(data, inputs, LIMITS, Observation(expired, status, 0.1, 0.1, 1 << 20))
    assert verdict in Status
    assert reason.isprintable()
    if verdict is Status.OK:
        assert not expired
        assert status == 0
        assert len(outputs) == inputs
        assert [encode(decode(text)) for text in outputs] == list(outputs)
        assert data in (protocol.pack_answer(word, list(outputs)) for word in (protocol.OK, protocol.OK_IN_ORDER))
    else:
        assert outputs == ()


@FUZZ
@given(mutated(literals) | st.text(max_size=60) | st.text("[]{}(),:\"'\\ 0123456789.eExf-+ntulsj#\n", max_size=60))
def test_the_reader_of_answers_reads_or_refuses(text):
    for reader in (read_literal, read_arguments):
        with harmless(), contextlib.suppress(LiteralError):
            value = reader(text)
            with contextlib.suppress(ValueError):  # over the encoder's budgets
                assert encode(read_literal(to_literal(value))) == encode(value)


@FUZZ
@given(mutated(plain.map(encode)) | st.text('[]",0123456789-lstdfcbuxnaie\\', max_size=60))
def test_canonical_text_is_the_only_text_read(text):
    with harmless(), contextlib.suppress(ValueError):
        assert encode(decode(text)) == text


@pytest.mark.parametrize(
    "evaluate", [lambda: eval("1"), lambda: __import__("colorsys"), lambda: open("/dev/null").close()]
)
def test_evaluation_would_be_noticed(evaluate, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # matplotlib imports it in other tests
    with pytest.raises(AssertionError), harmless():
        evaluate()
    _events.clear()


def main(seconds: float) -> None:
    """Fuzz until the time is over."""
    end, counts = time.monotonic() + seconds, {}
    tests = [value for _, value in sorted(globals().items()) if hasattr(value, "hypothesis")]
    while time.monotonic() < end:
        for test in tests:
            before = CASES["count"]
            test()
            counts[test.__name__] = counts.get(test.__name__, 0) + CASES["count"] - before
    print(counts, sum(counts.values()), "cases, no finding")


if __name__ == "__main__":
    main(float(sys.argv[1]))
