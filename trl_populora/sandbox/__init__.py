"""The executor: untrusted programs in processes of their own, judged from outside (verify, solve).

    trainer: supervisor and judge, knows the golden answers
       |  control socket: orders and events            one private socket pair per job
    zygote: exec'd fresh, warm, confined, own hash seed ---- forks ---->  child: one program

Read in this order: `jobs.py` (what is asked and answered), `protocol.py` (the three messages), `confine.py` and
`seccomp.py` (the walls), `zygote.py` and `child.py` (the inside), `judge.py` (the verdict), `supervisor.py`,
`listener.py`, `worker.py`, `pending.py`, `pool.py` and `starting.py` (the outside), `health.py` (are the
walls real?), `values.py` and `literals.py` (the only data that crosses), `soft.py`, `entropy.py`, `interpreter.py` and
`modules.py` (quality of data, not safety).

What is covered, and by what:

* *Attribution.* A job's source, inputs and answer travel on a socket pair that no other job's process ever holds. The
  zygote passes it on and reads nothing.
* *Golden answers* never leave the trainer. A child that forges its answer says no more than "f returned this".
* *Status is observed*: exit status, signal, resource use and the clock come from the kernel through the zygote.
* *Data only.* One frame of printable ASCII under a size limit, then end of file, then exit 0; else `tampered`. Nothing
  from a child is unpickled or evaluated, and the program is never even parsed in the trainer.
* *Files, network, processes, signals, other memory*: refused by seccomp alone, whatever else the host offers; where it
  can, the zygote also lives in namespaces of its own, in a deleted empty folder, as a user of its own, under Landlock.
  At start every zygote tries its walls from inside; `Sandbox.level` is what was seen to hold.
* *Time and memory*: SIGKILL when the CPU time is used up, whatever the load, and by the clock for who does not use it;
  an address-space limit, at most one process per program.
* *Determinism*: runs under different hash seeds in separate zygotes, in the second with another heap layout, reversed
  inputs and other limits of recursion and integers; clocks, hashes, addresses and interpreters' insides are guarded.
* *Coins*: modules that exist to scramble (digests, checksums, random generators) cannot be imported, see `modules.py`.
* *The end of the trainer*, also by SIGKILL: zygotes see their socket close, and with them goes every child.

What is not covered: holes in the kernel or the processor (side channels included); a program that returns wrong
answers on purpose, which is what rewards are for; randomness that hides from both the guards and the repetitions, a
rare flip over the order of a set above all; another process of the trainer's own user attacking the zygotes. The soft
layer can be bypassed by a program that tries; it then meets the walls. Measured on x86-64 only.

In a container: no root, daemon or capability is needed; `README.md` beside this file has the settings for Docker and
Kubernetes. Set a memory limit on the container: three programs per worker may hold their whole memory at a time. The
processes of a node have a pool each, of their share of the cores.
"""

from .jobs import Job, Limits, Status, Verdict
from .pool import Sandbox


__all__ = ["Job", "Limits", "Sandbox", "Status", "Verdict"]
