"""PopuLoRA for TRL: populations of LoRA adapters that teach and solve each other's verifiable tasks.

The public names load on first use, so that the torch-free rooms (`trl_populora.tasks`, `trl_populora.sandbox`, ...)
stay importable without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .config import PopuLoRAConfig
    from .population.evolution import EvolutionCallback
    from .population.members import Member, Population
    from .tasks.kind import TaskKind
    from .trainer import PopuLoRATrainer

__version__ = "0.2.0"
__all__ = ["EvolutionCallback", "Member", "PopuLoRAConfig", "PopuLoRATrainer", "Population", "TaskKind"]

# Public name: the module that defines it.
_HOMES = {
    "EvolutionCallback": "population.evolution",
    "Member": "population.members",
    "PopuLoRAConfig": "config",
    "PopuLoRATrainer": "trainer",
    "Population": "population.members",
    "TaskKind": "tasks.kind",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
