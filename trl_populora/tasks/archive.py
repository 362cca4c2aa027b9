"""The task archive (stub)."""

from __future__ import annotations


class TaskArchive:
    pass


def load_seed_tasks(path=None):
    raise NotImplementedError
