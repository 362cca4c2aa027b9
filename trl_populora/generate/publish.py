"""What is published for vLLM: which members changed, where their weights lie, and which row asks for which."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trl_populora.lora import members as lora_members


SHARED_MEMORY = "/dev/shm"
PREFIX = "populora-"

# Current, previous and next version of every member lie there at once.
VERSIONS_KEPT = 3


class ChangeDetector:
    """
    Tells which members changed since they were last published, by a checksum of this rank's part of their tensors.

    A counter of steps would publish members that did not move and miss writes from outside the optimizer; tensors'
    own version counters miss the writes that ZeRO makes behind autograd.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}
        self._weights = torch.empty(0, dtype=torch.long)

    def detect_changes(self, model: nn.Module, names: Sequence[str]) -> list[bool]:
        """For each member, whether this rank's part of it differs from what the last call saw; remembers it."""
        flags = []
        for name in names:
            checksum = self._checksum(lora_members.member_parameters(model, name).values())
            flags.append(self._seen.get(name) != checksum)
            self._seen[name] = checksum
        return flags

    def forget(self) -> None:
        """Makes every member count as changed."""
        self._seen.clear()

    @torch.no_grad()
    def _checksum(self, parameters) -> list[int]:
        """
        Per tensor, the sum modulo 2^64 of its bit patterns, eight bytes at a time where they are so aligned, times
        fixed random factors, which tell places apart and are odd, so that no bit is lost.
        """
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = []
        for parameter in parameters:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            flat, size = local.contiguous().view(-1), local.element_size()
            aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
            bits = flat.view(integers[8 if aligned else size])
            sums.append((bits * self._factors(bits.numel(), bits.device)).sum())
        return torch.stack(sums).tolist()

    def _factors(self, count: int, device: torch.device) -> torch.Tensor:
        if self._weights.numel() < count or self._weights.device != device:
            generator = torch.Generator().manual_seed(0)
            largest = torch.iinfo(torch.long)
            self._weights = torch.randint(largest.min, largest.max, (count,), generator=generator).to(device) | 1
        return self._weights[:count]


class AdapterShelf:
    """
    Directory in which published adapters lie, each an ordinary PEFT adapter directory, until one version later.

    Args:
        parent: Where the shelf is made; see [`choose_parent`].

    Attributes:
        root (`Path`): The shelf's own directory, removed at `close`, at the end of the process or with the object.
    """

    def __init__(self, parent: str):
        parent = os.path.abspath(parent)  # before Python 3.12 `mkdtemp` returns a relative path under a relative one
        sweep_shelves(parent)
        os.makedirs(parent, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = _lock_shelf(self.root, os.O_CREAT)
        self._retired: deque[str] = deque()
        self.close = weakref.finalize(self, _remove_shelf, str(self.root), self._lock, os.getpid())

    def put(self, name: str, save: Callable[[Path], None]) -> str:
        """Lets `save` write a directory and returns its final path, under which it appears only when complete."""
        unfinished, path = self.root / f".{name}", self.root / name
        save(unfinished)
        unfinished.rename(path)
        return str(path)

    def retire(self, path: str) -> None:
        """Marks a directory as replaced: it goes when [`sweep_retired`] is called after the next publishing."""
        self._retired.append(path)

    def sweep_retired(self) -> None:
        """Removes the directories that were replaced before the versions now in use were loaded."""
        while self._retired:
            shutil.rmtree(self._retired.popleft())


def choose_parent(output_dir: str, wanted_bytes: int, remote: bool) -> str:
    """
    Shared memory when it is there and has room, else `output_dir`.

    Args:
        output_dir: The run's directory; on several hosts, on a file system that all of them see.
        wanted_bytes: Bytes of one version of all members.
        remote: Whether a reader sits on another host, which never sees this host's memory.
    """
    # Room for twice what is needed: data loaders and NCCL use the same memory.
    needed = 2 * VERSIONS_KEPT * wanted_bytes
    if not remote and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > needed:
        return SHARED_MEMORY
    return os.path.abspath(output_dir)


def sweep_shelves(parent: str) -> None:
    """Removes shelves that a killed process left behind: those whose lock nobody holds."""
    for root in Path(parent).glob(f"{PREFIX}*"):
        try:
            if time.time() - root.stat().st_mtime < 60:  # perhaps just made and not locked yet
                continue
            lock = _lock_shelf(root)
        except OSError:  # held by a living run, another user's, gone meanwhile, or without a lock: no shelf
            continue
        _remove_shelf(str(root), lock, os.getpid())


def _lock_shelf(root: Path, create: int = 0) -> int:
    descriptor = os.open(root / ".lock", create | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_shelf(root: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child runs its parent's exit handlers
        return
    shutil.rmtree(root, ignore_errors=True)
    os.close(lock)


# What is published and which row asks for it: plain data that the colocated engine and the server client share.


class StaleAdapterError(RuntimeError):
    """vLLM does not sample from the version of a member that was published last."""


@dataclass(frozen=True)
class Published:
    """
    One version of one member as vLLM knows it.

    Every version has a name, an id and a path of its own. With any of them kept, some vLLM version serves the old
    weights: an id that is loaded already is not read again, and prefix-cache keys have held the name, or the name and
    the path, depending on the version. `cache_salt` keeps the keys apart whatever they hold.

    Args:
        member: The member.
        name: Adapter name, unique over all runs that a server may have seen.
        id: Adapter id, counted from 1.
        path: Its PEFT directory, for a server to read.
    """

    member: str
    name: str
    id: int
    path: str = ""

    @property
    def cache_salt(self) -> str:
        return self.name


@dataclass(frozen=True)
class Ask:
    """
    One distinct question: a prompt, the member that it is put to (`route`), the rows that asked it and the seed of its
    samples: different for every prompt and member, the same wherever it is answered.
    """

    prompt: tuple[int, ...]
    route: Published
    rows: tuple[int, ...]
    seed: int | None = None


def merge_asks(
    prompts: Sequence[Sequence[int]], routes: Sequence[Published], seeds: Sequence[int | None] | None = None
) -> list[Ask]:
    """
    Merges rows that put the same prompt to the same member with the same seed, as the G attempts at a task do.

    Args:
        prompts: Token ids per row, length R.
        routes: Who answers each row, length R.
        seeds: Of the rows' samples, length R; no seeds when `None`.

    Returns:
        `list[Ask]`: In order of first appearance; their `rows` together are 0 to R - 1.

    Raises:
        `RuntimeError`: If the lengths differ.
    """
    if len(prompts) != len(routes):
        raise RuntimeError(f"{len(routes)} rows are routed, but {len(prompts)} prompts are to be answered.")
    rows: dict[tuple, list[int]] = {}
    for row, (prompt, route, seed) in enumerate(zip(prompts, routes, seeds or [None] * len(prompts), strict=True)):
        rows.setdefault((tuple(prompt), route, seed), []).append(row)
    return [
        Ask(prompt, route, tuple(positions), None if seed is None else _derive_seed(prompt, route, seed))
        for (prompt, route, seed), positions in rows.items()
    ]


def _derive_seed(prompt: tuple[int, ...], route: Published, seed: int) -> int:
    """vLLM counts on from it for every further sample, so neighbouring seeds must not give neighbouring ones."""
    return zlib.crc32(f"{seed} {route.member} {prompt}".encode()) % 2**31
