"""What ships with the package: the embedded tiny base, its seed tasks and its held-out tasks."""

from __future__ import annotations

from importlib.resources import files


TINY = "tiny"


def tiny_base_path() -> str:
    """Directory of the embedded tiny base model, made by `recipes/make_tiny_base.py`."""
    return str(files("trl_populora").joinpath("assets", "tiny"))


def tiny_eval_tasks() -> str:
    """File of the held-out tasks for the embedded base: combinations of operations that it was never trained on."""
    return str(files("trl_populora").joinpath("assets", "eval_tasks.jsonl"))


def resolve_model_path(model: str) -> str:
    """The embedded base for `"tiny"`; any other name or path is left to transformers."""
    return tiny_base_path() if model == TINY else model
