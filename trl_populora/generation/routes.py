"""What is published and which row asks for it: plain data that the colocated engine and the server client share."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass


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


def distinct_asks(
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
        Ask(prompt, route, tuple(positions), None if seed is None else _seed_of(prompt, route, seed))
        for (prompt, route, seed), positions in rows.items()
    ]


def _seed_of(prompt: tuple[int, ...], route: Published, seed: int) -> int:
    """vLLM counts on from it for every further sample, so neighbouring seeds must not give neighbouring ones."""
    return zlib.crc32(f"{seed} {route.member} {prompt}".encode()) % 2**31
