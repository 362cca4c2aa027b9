"""The sandbox runs each untrusted program in a process of its own, and judges it from outside (phases verify, solve).

    trainer: supervisor and judge, knows the golden answers
       |  control socket: orders and events            one private socket pair per run
    zygote: started by exec, warm, confined, one hash seed ---- forks ---->  child: one program

Read the files in this order:

1. `jobs.py`: what is asked and what is answered. `protocol.py`: the messages.
2. `confine.py` and `seccomp.py`: the walls, and the probes that test them.
3. `launch.py`, `zygote.py` and `child.py`: the inside.
4. `judge.py`: the verdict. `supervisor.py`, `worker.py` and `pool.py`: the outside.
5. `values.py`: the data that a program takes in and gives back. `literals.py`: how such data is read from a model's
   text.
6. `soft.py` and `entropy.py`: guards that keep chance out of tasks and protect nothing.

What is covered, and by what:

* *Attribution.* Each run of a job has a socket pair of its own, for the program, its inputs and its answer. No
  other job's process ever holds this pair. The zygote passes the child's end on and reads nothing from it.
* *Golden answers* never leave the trainer. A child that forges its answer says no more than "f returned this".
* *Status is observed.* Exit status, signal, CPU time and memory come from the kernel through the zygote, the wall time
  from the zygote's clock.
* *Data only.* A child may send one frame of ASCII lines under a size limit, then end of file, then exit 0. Another
  answer or another exit status is `tampered`. The trainer unpickles and evaluates nothing from a child, and no file
  of this folder parses the program in the trainer.
* *Files, network, processes, signals, other memory.* Seccomp alone refuses all of them. Where the host allows it, the
  zygote also lives in namespaces of its own, in a deleted empty folder, as an unprivileged user, under Landlock.
  Before a zygote serves, its first child tries the walls from inside; `Sandbox.level` sums up which of them hold.
* *Time and memory.* The zygote kills a program when its CPU time is used up, however busy the host is. The wall
  clock ends only a program that sleeps, or that has not ended after 120 times its CPU limit. The kernel limits the
  address space, and a program cannot start processes.
* *Determinism.* Each run of a job has another hash seed and another zygote. Every run after the first also has
  another heap layout and other limits of recursion and of the digits of integers. Every second run takes its inputs in
  reverse order. Clocks, hashes, addresses and the insides of the interpreter are guarded.
* *One face.* A program is not told what its run is for: to check a proposal, a blind guess or an attempt. `README.md`
  lists what a program sees of its run.
* *Coins.* Programs cannot import modules that exist to scramble: digests, checksums, random generators (`soft.py`).
* *The end of the trainer*, even by SIGKILL. Each zygote sees its socket close. Then it ends, and all its children with
  it.

What is not covered:

* holes in the kernel or the processor, side channels included;
* wrong answers that a program returns on purpose: rewards deal with them;
* randomness that the guards and the repeated runs miss, above all a result that only few orders of a set change;
* another process of the trainer's own user that attacks the zygotes;
* machines other than x86-64: nothing here was measured on them.

A program that tries can get past the soft layer; it then meets the walls.

In a container, no root, daemon or capability is needed; `README.md` beside this file has the settings for Docker and
Kubernetes. Set a memory limit on the container, because three programs per worker may hold their whole memory at the
same time. Each training process of a node has a `Sandbox` of its own, with its share of the workers.
"""

from .jobs import Job, Limits, Status, Verdict
from .pool import Sandbox


__all__ = ["Job", "Limits", "Sandbox", "Status", "Verdict"]
