"""
A Python as `make quickstart` installs it, without the extras. TRL and PEFT import vLLM, bitsandbytes and the trackers
wherever they are, which takes four tenths of the time that a process of a test needs to start.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping


EXTRAS = ("vllm", "bitsandbytes", "wandb", "trackio")


def without_extras(environment: Mapping[str, str] = os.environ, but: Collection[str] = ()) -> dict[str, str]:
    """The environment of a process that finds none of them but those: Python runs this folder's `sitecustomize.py`."""
    path = filter(None, [os.path.dirname(__file__), environment.get("PYTHONPATH")])
    missing = " ".join(name for name in EXTRAS if name not in but)
    return {**environment, "PYTHONPATH": os.pathsep.join(path), "POPULORA_TESTS_WITHOUT": missing}
