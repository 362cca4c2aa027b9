"""What a user wrote and a setting names: `"package.module:attribute"`."""

from __future__ import annotations

import importlib
from typing import Any


def find_own(path: str, what: str, choices: str) -> Any:
    """
    Imports what `package.module:attribute` names.

    Args:
        path (`str`): The name.
        what (`str`): What is looked for, for the error: `"task kind"`.
        choices (`str`): What may be named, likewise.

    Raises:
        `ValueError`: If there is no such module or attribute.
    """
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        missing = isinstance(error, ImportError)
        way_out = " A module that is not installed needs its folder in `PYTHONPATH`." if missing else ""
        raise ValueError(f"Unknown {what} {path!r} ({error}); it must be {choices}.{way_out}") from error
