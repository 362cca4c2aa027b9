"""The sandbox as its users see it: verdicts, batches, threads, closing."""

import threading

import pytest

from trl_populora.sandbox import Job, Limits, Sandbox, Status, Verdict
from trl_populora.sandbox.values import encode


ADD = "def f(x, y=1):\n    return x + y\n"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(cpu_seconds=5.0)) as box:
        yield box


def arguments(*values):
    return encode(values)


def test_outputs_are_canonical_texts_in_the_order_of_the_inputs(sandbox):
    (verdict,) = sandbox.run([Job(ADD, (arguments(1), arguments(2, 3), arguments([1], [2])), runs=2)])
    assert verdict.status is Status.OK
    assert verdict.reason == ""
    assert verdict.outputs == ("2", "5", '["l",1,2]')
    assert verdict.cpu_seconds > 0
    assert verdict.wall_seconds > 0
    assert verdict.peak_bytes > 1 << 20


def test_text_of_a_subclass_of_str_is_text(sandbox):
    class Text(str):
        __slots__ = ()

    (verdict,) = sandbox.run([Job(Text(ADD), (Text(arguments(1)),), function=Text("f"))])
    assert verdict.outputs == ("2",)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import os", "import of 'os'"),
        ("from os import path", "import of 'os'"),
        ("import math, random as r", "import of 'random'"),
        ("import xml.etree.ElementTree", "import of 'xml.etree.ElementTree'"),
        ("__import__('ctypes')", "import of 'ctypes'"),
        ("open('x')", "open()"),
        ("input()", "input()"),
    ],
)
def test_a_verdict_names_the_module_or_call_that_is_not_allowed(sandbox, line, named):
    (verdict,) = sandbox.run([Job(f"def f(x):\n    {line}\n    return x", (arguments(1),))])
    assert (verdict.status, verdict.reason) == (Status.POLICY, f"{named} is not allowed")


@pytest.mark.parametrize("part", ["html.parser", "html.entities", "json.decoder", "collections.abc", "urllib.parse"])
def test_parts_of_packages_may_be_imported(sandbox, part):
    (verdict,) = sandbox.run([Job(f"import {part} as part\ndef f(x):\n    return part.__name__", (arguments(1),))])
    assert verdict.outputs == (encode(part),), verdict.reason


@pytest.mark.parametrize(
    "read",
    [
        *("operator.index(a)", "math.gcd(a, 0)", "struct.pack('Q', a)", "hex(a)", "'%x' % a", "json.dumps(a)"),
        *("len(range(a))", "next(itertools.count(a))", "int.__add__(a, 0)", "int.real.__get__(a)", "math.log(a)"),
        *("decimal.Decimal(a) % 64", "list(enumerate('a', a))", "int.__repr__(a)"),
    ],
)
def test_what_c_reads_inside_an_address_differs_from_run_to_run(sandbox, read):
    """None of these asks a method of the address, so no guard could stop the program."""
    program = "import decimal, itertools, json, math, operator, struct\n"
    program += f"def f(x):\n    b, a = id(f), id(object())\n    return str({read})"
    (verdict,) = sandbox.run([Job(program, (arguments(1),), runs=6)])
    assert verdict.status is Status.NONDETERMINISTIC, verdict.reason


@pytest.mark.parametrize(
    ("program", "given"),
    [
        ("def f(s):\n    return '-'.join(s)", ({"cat", "sun"},)),
        ("def f(s, t):\n    return list(s | t)", (frozenset({"cat"}), frozenset({"sun"}))),
        ("def f(a, b):\n    return list(a.keys() & b.keys())", ({"cat": 1, "sun": 2}, {"sun": 3, "cat": 4})),
        ("def f(a, b):\n    k = a.keys()\n    k -= b.keys()\n    return list(k)", ({"cat": 1, "sun": 2}, {})),
        ("def k(d):\n    return d.keys()\n\n\ndef f(a, b):\n    return list(k(a) | k(b))", ({"cat": 1}, {"sun": 2})),
        ("def f(a, b):\n    g = lambda k, l: k ^ l\n    return list(g(a.keys(), b.keys()))", ({"cat": 1}, {"sun": 2})),
        ("from operator import or_\ndef f(a, b):\n    return list(or_(a.keys(), b.keys()))", ({"cat": 1}, {"sun": 2})),
        ("def f(a, b):\n    return list(a.keys().__or__(b.keys()))", ({"cat": 1}, {"sun": 2})),
    ],
)
def test_the_order_of_a_set_of_two_is_found_out_wherever_the_set_is_from(sandbox, program, given):
    """The first two runs have it alike by luck."""
    (verdict,) = sandbox.run([Job(program, (encode(given, ordered=True),), runs=2)])
    assert verdict.status is Status.NONDETERMINISTIC, verdict.outputs


DATES = """
import abc
import datetime
from datetime import date, datetime as stamp, timedelta


class Due(date):
    pass


class Moment(stamp):
    pass


class Day(date, abc.ABC):
    pass


def f(x):
    day, due, now = date(2020, 1, 1), Due(2020, 1, 1), stamp(2020, 1, 1, 2)
    return {expression}
"""


@pytest.mark.parametrize(
    "expression",
    [
        "isinstance(day, Due), isinstance(due, Due), isinstance(due, date), isinstance(now, date)",
        "issubclass(date, Due), issubclass(Due, date), issubclass(stamp, date), issubclass(Moment, Due)",
        "type(now.date()) is date, type(Moment(2020, 1, 1).date()) is date, now.date() == day",
        "type(date.min) is date, type(stamp.max) is stamp, str(date.max), str(stamp.min)",
        "type(due + timedelta(1)) is Due, type(day + timedelta(1)) is date",
        "[repr(each) for each in (day, due, now, now.date(), Moment(2020, 1, 1), date.min)]",
        "isinstance(day, Day), isinstance(Day(2020, 1, 1), Day), Day(2020, 1, 1).isoformat()",
    ],
)
def test_dates_and_classes_of_dates_do_what_they_do_in_python(sandbox, expression):
    program = DATES.replace("{expression}", expression)
    (verdict,) = sandbox.run([Job(program, (arguments(1),))])
    own = {"__name__": "program"}
    exec(program, own)
    assert verdict.outputs == (encode(own["f"](1)),), verdict.reason


def test_an_object_has_one_address_within_its_hash_and_outside(sandbox):
    program = "class K:\n    def __hash__(self):\n        self.seen = id(self)\n        return 1\n\n\n"
    program += "def f(x):\n    k = K()\n    hash(k)\n    return k.seen == id(k) and {id(k): x}[id(k)] == x"
    (verdict,) = sandbox.run([Job(program, (arguments(1),), runs=6)])
    assert (verdict.status, verdict.outputs) == (Status.OK, ("true",)), verdict.reason


@pytest.mark.parametrize(
    "combined", ["tuple(hash(q) for q in s.a)", "[hash(q) for q in s.a][0]", "(lambda: hash(s.a[0]))()"]
)
def test_a_hash_method_may_combine_hashes_in_an_inner_expression(sandbox, combined):
    program = f"class P:\n    def __init__(s, *a): s.a = a\n    def __hash__(s): return hash({combined})\n"
    program += "    def __eq__(s, o): return s.a == o.a\n"
    program += "def f(x): return len({P('a', x), P('a', x), P('b', x)})"
    (verdict,) = sandbox.run([Job(program, (arguments(1),), runs=6)])
    assert (verdict.status, verdict.outputs) == (Status.OK, ("2",)), verdict.reason


@pytest.mark.parametrize(("letter", "status"), [("e", Status.OK), ("é", Status.POLICY), ("\ud800", Status.POLICY)])
def test_a_program_is_measured_in_bytes_and_not_in_characters(sandbox, letter, status):
    program = f"{ADD}# {letter * 60}"
    (verdict,) = sandbox.run([Job(program, (arguments(1),), limits=Limits(program_bytes=100))])
    assert verdict.status is status, verdict.reason
    if status is Status.POLICY:
        size = len(program.encode("utf-8", "surrogatepass"))
        assert verdict.reason == f"a program of {size} bytes, more than 100"


def test_an_answer_larger_than_a_socket_holds_arrives():
    limits = Limits(output_bytes=3 << 20)
    with Sandbox(workers=1, limits=limits) as sandbox:
        (verdict,) = sandbox.run([Job("def f(x):\n    return 'a' * x", (arguments(2_000_000),))])
    assert verdict.ok, verdict
    assert len(verdict.outputs[0]) == 2_000_002


def test_no_inputs_means_compile_and_look_for_f(sandbox):
    verdicts = sandbox.run([Job(ADD), Job("g = 1"), Job("def f(:"), Job("f = 3"), Job("1 / 0")])
    assert [verdict.status for verdict in verdicts] == ["ok", "error", "error", "error", "error"]
    assert "'f'" in verdicts[1].reason
    assert "SyntaxError" in verdicts[2].reason


def test_batches_keep_their_order(sandbox):
    jobs = [Job(f"{ADD}# {i}", (arguments(i),)) for i in range(60)]
    assert [verdict.outputs for verdict in sandbox.run(jobs)] == [(str(i + 1),) for i in range(60)]


def test_threads_share_one_sandbox(sandbox):
    results = {}

    def work(name):
        results[name] = sandbox.run([Job(f"def f(x): return x * {name}", (arguments(3),))] * 10)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: {verdict.outputs for verdict in each} for name, each in results.items()} == {
        name: {(str(3 * name),)} for name in range(6)
    }


def test_a_closed_sandbox_says_so():
    box = Sandbox(workers=1)
    future = box.submit(Job("while True: pass"))
    box.close()
    box.close()
    with pytest.raises(RuntimeError, match="closed"):
        future.result(10)
    with pytest.raises(RuntimeError, match="closed"):
        box.submit(Job(ADD))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"runs": 0}, ValueError), ({"inputs": ["1"]}, TypeError), ({"function": "f()"}, ValueError)],
)
def test_wrong_jobs_are_refused(arguments, error):
    with pytest.raises(error):
        Job(ADD, **arguments)


def test_wrong_limits_are_refused():
    for wrong in ({"cpu_seconds": 0}, {"memory_bytes": 1 << 20}, {"output_bytes": 0}, {"cpu_seconds": float("nan")}):
        with pytest.raises(ValueError, match="must"):
            Limits(**wrong)
    with pytest.raises(ValueError, match="workers"):
        Sandbox(workers=0)


@pytest.mark.parametrize(("workers", "processes", "share"), [(5, 2, 2), (1, 4, 1)])
def test_processes_of_a_host_share_its_workers(workers, processes, share):
    with Sandbox(workers) as whole, Sandbox(workers, processes=processes) as part:
        assert (whole.workers, part.workers) == (workers, share)
        assert part.run([Job("def f(x): return x", (encode((1,)),))])[0].ok


def test_verdict_knows_whether_it_is_ok():
    assert Verdict(Status.OK).ok
    assert not Verdict(Status.ERROR).ok
    assert str(Status.BAD_OUTPUT) == "bad_output" == Status.BAD_OUTPUT


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ValueError, match="`packages` names 'no_such_package', which is not installed"):
        Sandbox(packages=("no_such_package",))
