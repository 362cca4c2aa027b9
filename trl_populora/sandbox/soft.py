"""The soft layer: keeps honest programs inside what the project can use. It improves data, it protects nothing."""

from __future__ import annotations

import builtins


class Guard:
    """What the program did that it should not; `finding` is a status word and its lines."""

    def __init__(self, enabled: bool):
        self.finding: tuple[str, list[str]] | None = None
        self.builtins = vars(builtins)
