"""What ships with the package: the embedded tiny base, seed tasks, held-out tasks, and the recipes."""

from __future__ import annotations

import os
import shutil
from importlib.resources import files
from pathlib import Path


TINY = "tiny"  # the embedded base as users name it
REAL = "real"  # the held-out part of `real_seed_tasks` as users name it


def tiny_base_path() -> str:
    """Returns the directory of the embedded tiny base, a model that `studies/make_tiny_base.py` has made."""
    return str(files("trl_populora").joinpath("assets", "tiny"))


def tiny_eval_tasks() -> str:
    """
    Returns the file of held-out tasks for the embedded base.

    The programs of these tasks have pairs of successive operations that no program of the base's training has.
    """
    return str(files("trl_populora").joinpath("assets", "eval_tasks.jsonl"))


def real_seed_tasks() -> str:
    """
    Returns the file of seed tasks in ordinary Python, for every base but the embedded one.

    In its rows, `held_out` marks the tasks of 70 programs: `--eval_tasks real` takes them, and leaves the run the
    others to begin with.
    """
    return str(files("trl_populora").joinpath("assets", "real_seed_tasks.jsonl"))


def resolve_model_path(model: str) -> str:
    """Replaces `"tiny"` by the directory of the embedded base, and `~` by the user's directory."""
    return tiny_base_path() if model == TINY else os.path.expanduser(model)


def find_shipped(folder: str) -> Path:
    """Finds `recipes` or `accelerate_configs`. A wheel has them inside the package, a clone beside it."""
    package = Path(__file__).parent.parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def list_recipes() -> dict[str, str]:
    """Lists all YAML recipes: the path in `recipes/`, and the recipe's first line as its title."""
    root = find_shipped("recipes")
    paths = sorted(root.rglob("*.yaml"))
    return {str(path.relative_to(root)): path.read_text().partition("\n")[0].lstrip("# ") for path in paths}


def copy_recipes(directory: str | Path) -> None:
    """
    Copies `recipes/` and `accelerate_configs/` into a directory, in which the commands of the recipes then work.

    Raises:
        `ValueError`: If the directory has one of these folders already.
    """
    targets = {folder: Path(directory, folder) for folder in ("recipes", "accelerate_configs")}
    # Both are checked before either is copied, so that a refusal leaves nothing behind.
    for target in targets.values():
        if target.exists():
            raise ValueError(f"{target} is there already; name another directory.")
    for folder, target in targets.items():
        shutil.copytree(find_shipped(folder), target, ignore=shutil.ignore_patterns("__pycache__"))
