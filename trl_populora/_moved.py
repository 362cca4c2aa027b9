"""Keeps earlier module names importable for one release, because users' scripts import them.

The first import of an old name in a process warns, and names the modules that hold its content. The table `MOVED` is
the only list.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


PACKAGE = __name__.rpartition(".")[0]

# Old name: the modules that hold its content, in the order in which they are searched.
MOVED = {
    "adapters": ["lora"],
    "adapters.checks": ["lora.checks"],
    "adapters.folding": ["lora.convert"],
    "adapters.layers": ["lora.layers"],
    "adapters.routing": ["lora.layers"],
    "adapters.weights": ["lora.members"],
    "build": ["start"],
    "evaluation": ["evaluate"],
    "evaluation.cross_play": ["evaluate.cross_play"],
    "evaluation.tryout": ["evaluate.tryout"],
    "generation": ["generate"],
    "generation.decoding": ["generate.transformers"],
    "generation.plain": ["generate.player"],
    "generation.prompting": ["start"],
    "generation.vllm": ["generate.vllm"],
    "given_tasks": ["tasks.dataset", "evaluate.held_out", "start"],
    "hub.uploads": ["hub.push"],
    "model_options": ["config"],
    "population.matchmaking": ["population.ratings"],
    "populora_config": ["config"],
    "populora_trainer": ["trainer"],
    "report.payoff": ["evaluate.cross_play"],
    "report.terminal": ["report.table"],
    "runs": ["run"],
    "runs.checkpoint": ["run.checkpoint"],
    "runs.lines": ["run.read"],
    "runs.records": ["run.records", "run.read"],
    "runs.saved_population": ["run.saved_population"],
    "step.forwards": ["step.microbatch"],
    "step.held_out": ["evaluate.held_out"],
    "step.played": ["step.rows"],
    "step.rollout": ["step.play"],
    "step.rules": ["step.pay"],
    "tasks.archive_table": ["tasks.archive"],
    "tasks.base": ["tasks.kind"],
    "tasks.code": ["tasks.python.kinds"],
    "tasks.code_f": ["tasks.python.kinds"],
    "tasks.code_i": ["tasks.python.kinds"],
    "tasks.code_o": ["tasks.python.kinds"],
    "tasks.fences": ["tasks.python.reading"],
    "tasks.forms": ["tasks.python.normal_form"],
    "tasks.programs": ["tasks.python.programs"],
    "tasks.templates": ["tasks.python.prompts"],
}


class _Moved(MetaPathFinder, Loader):
    """An import hook that makes an empty module for an old name. The module looks attributes up in the new modules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.removeprefix(f"{PACKAGE}.") not in MOVED:
            return None
        return ModuleSpec(name, self, is_package=True)  # a package, because some old names hold others

    def exec_module(self, module: ModuleType) -> None:
        homes = [f"{PACKAGE}.{home}" for home in MOVED[module.__name__.removeprefix(f"{PACKAGE}.")]]
        # Python skips the frames of its import machinery, so level 2 is the line of the user's import.
        message = f"`{module.__name__}` is `{'`, `'.join(homes)}` now; release 0.2 removes the old name."
        warnings.warn(message, DeprecationWarning, stacklevel=2)

        def look_up(name: str) -> Any:
            if not name.startswith("__"):  # the import system asks for such names itself
                for home in homes:
                    if hasattr(found := importlib.import_module(home), name):
                        return getattr(found, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = look_up  # type: ignore[method-assign]


def keep_old_names() -> None:
    """Installs the hook. Python asks the hook before it looks for files."""
    sys.meta_path.insert(0, _Moved())
