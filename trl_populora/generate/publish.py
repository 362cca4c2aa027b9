"""Publishing members to vLLM: which members changed, where their weights lie, and which row asks which version.

    members [M] --ChangeDetector--> changed? [M] --> a new `Published` version of each changed member
    factors of a version --AdapterShelf.put--> a directory that vLLM servers read

    prompts_R, versions_R, seeds_R --merge_asks--> distinct `Ask`s, each with the rows that it answers

The engine in this process and the client of the servers both use this file, but only servers need directories.

Shapes: M members, R rows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trl_populora.lora import members as lora_members


logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
PREFIX = "populora-"  # the beginning of the name of every shelf's directory

# How many versions of every member a shelf holds at most. Members that are published go there beside their former
# versions; those before are removed first.
VERSIONS_KEPT = 2


def count_adapters(members: int) -> tuple[int, int]:
    """
    Counts the adapters for which vLLM needs room in host memory (`max_cpu_loras`). Returns two numbers, the least that
    works and a better one.

    The least has room for one version of each member, for the next version of the one member that is being published,
    and for the base's adapter of zeros. The better one has room for two versions of each member and for the base's
    adapter: a server keeps former versions until it needs their room.
    """
    return members + 2, 2 * members + 1


def count_slots(members: int) -> int:
    """
    Counts the adapters for which a colocated engine needs room on its device (`max_loras`): each member, and the
    base's adapter of zeros.
    """
    return members + 1


class ChangeDetector:
    """
    Finds the members that have changed since the last call, by checksums of this rank's part of their tensors.

    Two simpler ways do not work. Counting optimizer steps would publish members that have not moved, and miss what
    evolution writes. PyTorch's version counters of tensors miss what ZeRO writes.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}
        self._checksums = Checksums()

    def detect_changes(self, model: nn.Module, names: Sequence[str]) -> list[bool]:
        """Says for each member whether this rank's part of it has changed since the last call."""
        flags = []
        for name in names:
            checksum = self._checksums.compute(lora_members.member_parameters(model, name).values())
            flags.append(self._seen.get(name) != checksum)
            self._seen[name] = checksum
        return flags

    def forget(self) -> None:
        """Makes every member count as changed."""
        self._seen.clear()


class Checksums:
    """Computes checksums of tensors. If one bit of a tensor changes, the tensor's checksum changes."""

    def __init__(self) -> None:
        self._weights = torch.empty(0, dtype=torch.long)

    @torch.no_grad()
    def compute(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """
        Computes one number per tensor: reads the tensor's memory as integers, multiplies each by a fixed random
        factor, and adds the products up.

        Sums wrap around at 2^64. Each place has its own factor, so that swapped elements change the sum. All factors
        are odd, so that a change of a single element always changes the sum.
        """
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = []
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            flat, size = local.contiguous().view(-1), local.element_size()
            # A tensor whose size and place in memory are multiples of 8 bytes is read as 8-byte integers. With
            # elements of 2 bytes that needs a quarter of the multiplications.
            aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
            bits = flat.view(integers[8 if aligned else size])
            sums.append((bits * self._factors(bits.numel(), bits.device)).sum())
        # So that one copy from the GPU brings the sums of all tensors. A base may lie on several GPUs.
        return torch.stack([each.to(sums[0].device) for each in sums]).tolist()

    def _factors(self, count: int, device: torch.device) -> torch.Tensor:
        """
        Returns the first `count` factors, int64 and odd.

        Factors are kept from call to call. They are drawn anew if more are needed, or if the device is another one.
        """
        if self._weights.numel() < count or self._weights.device != device:
            generator = torch.Generator().manual_seed(0)
            largest = torch.iinfo(torch.long)
            self._weights = torch.randint(largest.min, largest.max, (count,), generator=generator).to(device) | 1
        return self._weights[:count]


class AdapterShelf:
    """
    A directory of published adapters. Each adapter is an ordinary PEFT adapter directory.

    In shared memory this user alone may read them, elsewhere everybody who may read `parent`. A version that has been
    replaced stays until members are published again.

    Args:
        parent: The directory in which the shelf makes its own directory; see [`choose_parent`].

    Attributes:
        root (`Path`): The shelf's own directory. Calling `close` removes it. Otherwise it goes when the object is
            collected or the process ends.
    """

    def __init__(self, parent: str):
        parent = os.path.abspath(parent)  # `mkdtemp` returns a relative path for a relative `dir` before Python 3.12
        sweep_shelves(parent)
        os.makedirs(parent, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        if parent != SHARED_MEMORY:
            # `mkdtemp` closes the directory to other users. A server's user is often another, and may read `parent`.
            self.root.chmod(stat.S_IMODE(os.stat(parent).st_mode) & 0o755)
        self._lock: int | None = None
        try:
            self._lock = _lock_shelf(self.root, os.O_CREAT)
        except OSError as error:
            logger.warning("%s cannot be locked (%s). If this run is killed, remove it.", self.root, error.strerror)
            (self.root / ".lock").unlink(missing_ok=True)  # a free lock would say that the owner is gone
        self._retired: deque[str] = deque()
        # `_remove_shelf` gets the process id, because a forked child must not remove its parent's directory.
        self.close = weakref.finalize(self, _remove_shelf, str(self.root), self._lock, os.getpid())

    def put(self, name: str, save: Callable[[Path], None]) -> str:
        """Lets `save` write a directory, and returns its path. No reader finds the path before all is written."""
        unfinished, path = self.root / f".{name}", self.root / name
        try:
            save(unfinished)
        except BaseException:  # the disk may be full
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        unfinished.rename(path)
        return str(path)

    def retire(self, path: str) -> None:
        """Marks a directory as no longer needed. The next [`sweep_retired`] removes it."""
        self._retired.append(path)

    def sweep_retired(self) -> None:
        """Removes the directories that [`retire`] has marked."""
        while self._retired:
            shutil.rmtree(self._retired.popleft())


def choose_parent(output_dir: str, wanted_bytes: int, remote: bool) -> str:
    """
    Chooses where a shelf lies: in shared memory if that has space and no server is remote, else in `output_dir`.

    Args:
        output_dir: The run's directory. With several hosts it has to lie on a file system that all of them see.
        wanted_bytes: Bytes of one version of all members.
        remote: Whether a server runs on another host. Another host does not see this host's memory.
    """
    # About half of the space stays free, because data loaders and NCCL use the same memory. The base's adapter, which
    # is as large as a member, takes some of that half.
    needed = 2 * VERSIONS_KEPT * wanted_bytes
    if not remote and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > needed:
        return SHARED_MEMORY
    return os.path.abspath(output_dir)


def sweep_shelves(parent: str) -> None:
    """Removes shelves that killed processes have left. No process holds the lock of such a shelf."""
    for root in Path(parent).glob(f"{PREFIX}*"):
        try:
            if time.time() - root.stat().st_mtime < 60:  # a new shelf's process may not have locked it yet
                continue
            lock = _lock_shelf(root)
        except OSError:
            # A running process holds the lock, another user owns the shelf, it has just gone, or it is no shelf.
            continue
        _remove_shelf(str(root), lock, os.getpid())


def _lock_shelf(root: Path, create: int = 0) -> int:
    """Locks a shelf and returns the file descriptor of the lock; raises `OSError` if another process holds it."""
    # The kernel frees the lock when the process ends, even after `kill -9`. So a free lock means a dead owner.
    descriptor = os.open(root / ".lock", create | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_shelf(root: str, lock: int | None, owner: int) -> None:
    """Removes a shelf and frees its lock, if this process owns the shelf."""
    # A forked child runs the exit handlers of its parent, too, and must not remove the parent's shelf.
    if os.getpid() != owner:
        return
    shutil.rmtree(root, ignore_errors=True)
    if lock is not None:
        os.close(lock)


class StaleAdapterError(RuntimeError):
    """vLLM does not sample from the last published version of a member."""


@dataclass(frozen=True)
class Published:
    """
    One version of one member, as vLLM knows it.

    Every version has its own name and id, and on servers its own path. If two versions shared one of the three, some
    release of vLLM would answer with the old weights: vLLM does not read a loaded id again, and keys of its prefix
    cache hold the name, or the name and the path, depending on the release. The name is also the cache salt, which
    keeps the keys of two versions apart in any release.

    Args:
        member: Name of the member.
        name: Name of the adapter, unique among all runs that a server may have seen.
        id: Id of the adapter, counted from 1.
        path: PEFT directory that a server reads; empty for an adapter that the engine in this process holds.
    """

    member: str
    name: str
    id: int
    path: str = ""


@dataclass(frozen=True)
class Ask:
    """
    One prompt to one member, and the rows that need an answer to it.

    Args:
        prompt: Token ids of the prompt.
        version: The version of the member that answers.
        rows: Positions of the rows. Each row gets a sample of its own.
        seed: Seed of the samples. It differs between prompts and between members, and does not depend on the engine
            or server that answers. `None` leaves the choice to vLLM.
    """

    prompt: tuple[int, ...]
    version: Published
    rows: tuple[int, ...]
    seed: int | None = None


def merge_asks(
    prompts: Sequence[Sequence[int]],
    versions: Sequence[Published],
    seeds: Sequence[int | None] | None = None,
    first: int = 0,
) -> list[Ask]:
    """
    Merges rows that have the same prompt, version and seed, such as the attempts of one member at one task.

    Args:
        prompts: Token ids of each row's prompt, length R.
        versions: The version of a member that answers each row, length R.
        seeds: Sampling seed of each row, length R; `None` for no seeds.
        first: Position of the first row.

    Returns:
        Asks in the order of their first rows. Every row from `first` to `first + R - 1` is in one ask.

    Raises:
        `RuntimeError`: If `prompts` and `versions` differ in length.
    """
    if len(prompts) != len(versions):
        raise RuntimeError(f"{len(versions)} rows are routed, but {len(prompts)} prompts are to be answered.")
    rows: dict[tuple, list[int]] = {}
    for row, (prompt, version, seed) in enumerate(
        zip(prompts, versions, seeds or [None] * len(prompts), strict=True), first
    ):
        rows.setdefault((tuple(prompt), version, seed), []).append(row)
    return [
        Ask(prompt, version, tuple(positions), None if seed is None else _derive_seed(prompt, version, seed))
        for (prompt, version, seed), positions in rows.items()
    ]


# Takes the token ids of completions that have ended, by row, and returns the prompts that are asked next, and the
# version that answers each. See `overlaps` of [`~trl_populora.step.player.Player`].
Follow = Callable[[dict[int, list[int]]], tuple[Sequence[Sequence[int]], Sequence[Published]]]


def _derive_seed(prompt: tuple[int, ...], version: Published, seed: int) -> int:
    """Derives the seed of an ask from a row's seed, the member and the prompt."""
    # vLLM gives the samples of a request the seeds s, s + 1, s + 2 and so on. With neighbouring seeds, samples of two
    # asks would draw the same random numbers. A hash keeps the seeds of asks far apart.
    return zlib.crc32(f"{seed} {version.member} {prompt}".encode()) % 2**31
