"""
A Python as `make quickstart` installs it, without vLLM. TRL imports vLLM wherever there is one, which takes 4 s in
each process that a test starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def without_vllm(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that finds no vLLM: Python runs the `sitecustomize.py` in this folder."""
    path = filter(None, [os.path.dirname(__file__), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}
