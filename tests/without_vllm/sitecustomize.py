"""Hides vLLM from the Python that has this folder on its path."""

import importlib.util


_find_spec = importlib.util.find_spec


def _find_all_but_vllm(name, package=None):
    return None if name.partition(".")[0] == "vllm" else _find_spec(name, package)


importlib.util.find_spec = _find_all_but_vllm
