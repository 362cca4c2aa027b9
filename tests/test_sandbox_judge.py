"""The verdict from bytes and observations, the messages, and the tables behind the walls."""

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_populora.sandbox import Limits, Status, protocol, seccomp, soft
from trl_populora.sandbox.child import read_payload
from trl_populora.sandbox.confine import PROBES, find_level
from trl_populora.sandbox.judge import Observation, combine, judge_run, largest_frame
from trl_populora.sandbox.values import decode, encode


LIMITS = Limits(output_bytes=1000)
FINE = Observation(False, 0, 0.001, 0.002, 10 << 20)


def died_of(number, peak=10 << 20, cpu=0.1):
    return Observation(False, int(number), cpu, 0.1, peak)


def frame(body):
    return protocol.LENGTH.pack(len(body)) + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (frame(b"ok\n42"), "ok"),
        (frame(b"ok, with sets\n42"), "ok"),
        (frame(b"error\nValueError: x"), "error"),
        (frame(b"memory\nx"), "memory"),
        (frame(b"bad_output\nx"), "bad_output"),
        (frame(b"policy\nx"), "policy"),
        (frame(b"entropy\nx"), "nondeterministic"),
        (b"", "tampered"),
        (b"\x05", "tampered"),
        (frame(b""), "tampered"),
        (frame(b"ok"), "tampered"),
        (frame(b"ok\n42\n43"), "tampered"),
        (frame(b"ok\n42") * 2, "tampered"),
        (frame(b"ok\n42")[:-1], "tampered"),
        (frame(b"ok\n42") + b" ", "tampered"),
        (frame(b"ok\n 42"), "tampered"),
        (frame(b"ok\n042"), "tampered"),
        (frame(b"ok\n"), "tampered"),
        (frame(b"ok\n__import__('os')"), "tampered"),
        (frame(b'ok\n["q"]'), "tampered"),
        (frame(b'ok\n{"a": 1}'), "tampered"),
        (frame('ok\n"é"'.encode()), "tampered"),
        (frame(b"timeout\nx"), "tampered"),
        (frame(b"tampered\nx"), "tampered"),
        (frame(b"nondeterministic\nx"), "tampered"),
        (frame(b"error"), "tampered"),
        (frame(b"error\na\nb"), "tampered"),
        (frame(b"tier\nos"), "tampered"),
        (frame(b'ok\n"' + b"a" * 999 + b'"'), "tampered"),
        (frame(b'ok\n"' + b"a" * 100000 + b'"'), "tampered"),
        (b"\xff\xff\xff\xffok\n42", "tampered"),
        (b"\x80\x04\x95cposix\nsystem\n", "tampered"),
    ],
)
def test_what_a_child_says(data, status):
    found, reason, outputs = judge_run(data, 1, LIMITS, FINE)
    assert found == status
    assert outputs == (("42",) if status == "ok" else ())
    assert reason or status == "ok"


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (Observation(True, signal.SIGKILL, 0.1, 2.0, 0), "timeout"),
        (Observation(True, 0, 0.1, 2.0, 0), "timeout"),
        (died_of(signal.SIGXCPU), "timeout"),
        (died_of(signal.SIGKILL, cpu=11.0), "timeout"),
        (died_of(signal.SIGKILL, peak=400 << 20), "memory"),
        (died_of(signal.SIGKILL), "tampered"),
        (died_of(signal.SIGTERM), "tampered"),
        (died_of(signal.SIGSEGV), "error"),
        (died_of(signal.SIGABRT), "error"),
        (died_of(signal.SIGSYS), "tampered"),
        (died_of(62), "tampered"),
        (Observation(False, 1 << 8, 0.1, 0.1, 0), "tampered"),
        (Observation(False, 70 << 8, 0.1, 0.1, 0), "tampered"),
    ],
)
def test_how_a_child_ended_counts_more_than_what_it_said(seen, status):
    found, reason, outputs = judge_run(frame(b"ok\n42"), 1, LIMITS, seen)
    assert found == status
    assert reason.isprintable()
    assert outputs == ()


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.integers(0, 3), st.integers(0, 0xFFFF))
def test_any_bytes_are_judged(noise, framed, inputs, wait_status):
    seen = Observation(False, wait_status if os.WIFEXITED(wait_status) or os.WIFSIGNALED(wait_status) else 0, 0, 0, 0)
    status, reason, outputs = judge_run(frame(noise) if framed else noise, inputs, LIMITS, seen)
    assert isinstance(status, Status)
    assert len(outputs) == (inputs if status is Status.OK else 0)
    assert all(encode(decode(text)) == text for text in outputs)
    assert reason.isprintable()


@settings(max_examples=300, deadline=None)
@given(st.text('okertyplims,\n[]"{}:0123456789-.eltdszbufcx\\', max_size=80), st.integers(0, 2))
def test_almost_right_frames_are_judged(body, inputs):
    status, _, outputs = judge_run(frame(b"ok\n" + body.encode()), inputs, LIMITS, FINE)
    assert status in (Status.OK, Status.TAMPERED)
    assert all(encode(decode(text)) == text for text in outputs)


def test_no_answer_is_longer_than_the_largest_frame():
    assert largest_frame(LIMITS, 10) < 2000


@pytest.mark.parametrize(
    ("runs", "status"),
    [
        ([("ok", ("1",)), ("ok", ("1",))], "ok"),
        ([("ok", ("1",)), ("ok", ("2",))], "nondeterministic"),
        ([("ok", ("1",)), ("error", ())], "nondeterministic"),
        ([("ok", ("1",)), ("bad_output", ())], "nondeterministic"),
        ([("ok", ("1",)), ("timeout", ())], "timeout"),
        ([("ok", ("1",)), ("memory", ())], "memory"),
        ([("ok", ("1",)), ("tampered", ())], "tampered"),
        ([("error", ())], "error"),
        ([("ok", ('["f","nan"]',)), ("ok", ('["f","nan"]',))], "ok"),
        ([("ok", ("0.0",)), ("ok", ("-0.0",))], "nondeterministic"),
        ([("ok", ("1", "2"))] * 5 + [("ok", ("1", "3"))], "nondeterministic"),
    ],
)
def test_runs_are_combined(runs, status):
    triples = [(Status(name), "" if name == "ok" else "why", outputs) for name, outputs in runs]
    verdict = combine(triples, [FINE] * len(runs))
    assert verdict.status == status
    assert bool(verdict.outputs) == (status == "ok")
    assert bool(verdict.reason) == (status != "ok")
    assert verdict.cpu_seconds == pytest.approx(0.001 * len(runs))


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters()), st.lists(st.text(st.characters()), max_size=4), st.integers(0, 5))
def test_payloads_arrive_as_they_were_sent(program, inputs, run):
    payload = (run, 65536, "f", program, tuple(inputs))
    reader, writer = os.pipe()
    os.write(writer, protocol.pack_payload(payload))
    assert read_payload(reader) == payload
    os.close(reader)
    os.close(writer)


@given(st.text(max_size=1000))
def test_reasons_are_one_printable_line(text):
    line = protocol.make_line(text)
    assert line.isascii()
    assert len(line) <= protocol.MAX_REASON
    assert line.isprintable()


def test_no_allowed_module_hands_out_the_system():
    assert not soft.ALLOWED & set(soft.HOSTILE)


class _Machine:
    """Interprets the few BPF instructions that the filters use, for one system call."""

    def __init__(self, number, arch=0xC000003E, arguments=()):
        self.words = {0: number, 4: arch}
        for index, value in enumerate(arguments):
            self.words[16 + 8 * index], self.words[20 + 8 * index] = value & 0xFFFFFFFF, value >> 32

    def run(self, instructions):
        position = accumulator = 0
        while True:
            code, yes, no, k = instructions[position]
            position += 1
            if code == 0x20:
                accumulator = self.words.get(k, 0)
            elif code == 0x06:
                return k
            else:
                holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x25: accumulator > k}[code]
                position += yes if holds else no


@pytest.fixture(params=["x86_64", "aarch64"])
def filters(request, monkeypatch):
    """The instructions of both filters for one architecture, and its column of the table."""
    taken = []

    class Recorder:
        def __init__(self, instructions):
            taken.append(instructions)

    monkeypatch.setattr(seccomp, "_MACHINE", request.param)
    monkeypatch.setattr(seccomp, "Filter", Recorder)
    seccomp.zygote_filter()
    seccomp.child_filter()
    column, arch = seccomp._MACHINES[request.param]
    return (*taken, column, arch)


ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


def test_every_number_is_filtered_as_the_tables_say(filters):
    zygote, child, column, arch = filters
    compute = {each[column] for each in seccomp.COMPUTE.values()}
    only = {each[column]: name for name, each in seccomp.ZYGOTE_ONLY.items()}
    for number in [*range(600), 0x40000000 + 57, 0xFFFFFFFF]:
        machine = _Machine(number, arch)
        if number == seccomp.PRLIMIT[column]:
            continue
        if number == seccomp.CLONE3[column]:
            assert machine.run(zygote) == ABSENT
            continue
        assert machine.run(zygote) == (ALLOW if number in compute or number in only else REFUSE), number
        refused = number in only and only[number] != "getrlimit"
        assert machine.run(child) == (REFUSE if refused else ALLOW), number
    assert _Machine(0, arch ^ 1).run(zygote) == KILL
    assert _Machine(0, arch ^ 1).run(child) == KILL


@pytest.mark.parametrize(
    ("process", "new", "in_zygote", "in_child"),
    [(0, 0, ALLOW, ALLOW), (0, 1, ALLOW, REFUSE), (0, 1 << 40, ALLOW, REFUSE), (7, 0, REFUSE, ALLOW)]
    + [(1 << 40, 0, REFUSE, ALLOW), (7, 1, REFUSE, REFUSE)],
)
def test_limits_of_oneself_only(filters, process, new, in_zygote, in_child):
    zygote, child, column, arch = filters
    machine = _Machine(seccomp.PRLIMIT[column], arch, (process, 0, new))
    assert machine.run(zygote) == in_zygote
    assert machine.run(child) == in_child


def test_unknown_machines_have_no_filter(monkeypatch):
    monkeypatch.setattr(seccomp, "_MACHINE", "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        seccomp.zygote_filter()


ALL = dict.fromkeys(("namespaces", "chroot", "uid", "landlock", "seccomp"), "")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [((), "A"), (("namespaces",), "B"), (("chroot", "landlock"), "B"), (("uid",), "B"), (("uid", "landlock"), "C")]
    + [(("seccomp",), "C")],
)
def test_levels(missing, expected):
    layers = {**ALL, **dict.fromkeys(missing, "not here")}
    assert find_level(layers, dict.fromkeys(PROBES, True)) == expected


@pytest.mark.parametrize("hole", PROBES)
def test_one_open_door_means_level_c(hole):
    assert find_level(ALL, {**dict.fromkeys(PROBES, True), hole: False}) == "C"
    assert find_level(ALL, {}) == "C"
