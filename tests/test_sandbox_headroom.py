"""A task is admitted only well inside the limit in CPU time, so that its attempts do not fail by load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import encode
from trl_populora.tasks import CodeI, CodeO, Proposal


ONE = (encode((1,)),)
SLOW = "def f(x):\n    n = 0\n    for i in range({}): n += i & 3\n    return n"


def cpu_seconds(program):
    with Sandbox(workers=1, limits=Limits(cpu_seconds=60)) as box:
        return min(verdict.cpu_seconds for verdict in box.run([Job(program, ONE)] * 3))


@pytest.mark.parametrize("kind", [CodeO(), CodeI()], ids=["code_o", "code_i"])
def test_a_task_is_admitted_only_well_inside_the_limit(kind):
    program = SLOW.format(2_000_000)
    needed = cpu_seconds(program)
    job = kind.check(Proposal(kind.name, program, ONE))
    assert (job.runs, job.headroom) == (2, kind.cpu_headroom)
    strict = replace(job, headroom=4 * job.headroom)  # far enough from the limit that no other work decides
    for times, asked, status in ((6, job, "ok"), (3, strict, "timeout")):
        with Sandbox(workers=1, limits=Limits(cpu_seconds=times * needed)) as box:
            (checked,) = box.run([asked])
            (tried,) = box.run([Job(program, ONE)])
        assert (checked.status, tried.status) == (status, "ok"), checked


def test_headroom_below_one_is_refused():
    with pytest.raises(ValueError, match="`headroom` must be at least 1, got 0.5"):
        Job(SLOW, headroom=0.5)
