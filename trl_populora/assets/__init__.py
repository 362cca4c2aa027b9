"""What ships with the package: the embedded tiny base, seed tasks for it and others, its held-out tasks, recipes."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path


TINY = "tiny"


def tiny_base_path() -> str:
    """Directory of the embedded tiny base model, made by `recipes/make_tiny_base.py`."""
    return str(files("trl_populora").joinpath("assets", "tiny"))


def tiny_eval_tasks() -> str:
    """File of the held-out tasks for the embedded base: combinations of operations that it was never trained on."""
    return str(files("trl_populora").joinpath("assets", "eval_tasks.jsonl"))


def real_seed_tasks() -> str:
    """File of ordinary Python seed tasks, for bases that can read more than the embedded one."""
    return str(files("trl_populora").joinpath("assets", "real_seed_tasks.jsonl"))


def resolve_model_path(model: str) -> str:
    """The embedded base for `"tiny"`; any other name or path is left to transformers."""
    return tiny_base_path() if model == TINY else model


def find_shipped(folder: str) -> Path:
    """Where `recipes` or `accelerate_configs` lies: in a wheel inside the package, in a clone beside it."""
    package = Path(__file__).parent.parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def recipe_titles() -> dict[str, str]:
    """The first line of every YAML recipe by its path in `recipes/`."""
    root = find_shipped("recipes")
    paths = sorted(root.rglob("*.yaml"))
    return {str(path.relative_to(root)): path.read_text().partition("\n")[0].lstrip("# ") for path in paths}


def copy_recipes(directory: str | Path) -> None:
    """
    Copies `recipes/` and `accelerate_configs/` into a directory; run from there, the commands of the recipes hold.

    Raises:
        `ValueError`: If one of them is there already.
    """
    targets = {folder: Path(directory, folder) for folder in ("recipes", "accelerate_configs")}
    for target in targets.values():
        if target.exists():
            raise ValueError(f"{target} is there already; name another directory.")
    for folder, target in targets.items():
        shutil.copytree(find_shipped(folder), target, ignore=shutil.ignore_patterns("__pycache__"))
