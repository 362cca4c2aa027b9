"""Files that appear whole or not at all, whatever ends the process that writes them: their names and contents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


FORMAT = 1  # of what this package writes as JSON and reads again

_SECRET = re.compile(
    r".*(token|secret|passw(or)?d|passphrase|credentials?|authorization|(api|access|secret|private)key)"
)
_OF_A_TEXT = re.compile(r"(bos|eos|pad|unk|sep|cls|mask)token")


def is_file_name(name: Any) -> bool:
    """Whether what a file gives as a name is one, and no way out of a directory."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None


def without_secrets(value: Any) -> Any:
    """The same settings, at any depth, without those whose names are known as names of tokens, passwords and keys."""
    if isinstance(value, Mapping):
        return {name: without_secrets(each) for name, each in value.items() if not _is_secret(name)}
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_secrets, value))
    return value


def _is_secret(name: object) -> bool:
    plain = str(name).lower().replace("_", "").replace("-", "")
    return bool(_SECRET.fullmatch(plain)) and not _OF_A_TEXT.fullmatch(plain)


@contextmanager
def write_whole(path: str | Path) -> Iterator[Path]:
    """Gives a place to write to; what is there takes the place of `path` when the block ends without an error."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.tmp")  # a name that uploads and readers pass over
    yield unfinished
    unfinished.replace(path)


@contextmanager
def without_empty_directories(path: str | Path) -> Iterator[None]:
    """Takes `path` and directories above it away again that were made inside the block and hold nothing."""
    whole = Path(path).absolute()
    absent = [part for part in (whole, *whole.parents) if not part.exists()]
    try:
        yield
    finally:
        for part in absent:
            with suppress(OSError):
                part.rmdir()


def write_json(path: str | Path, value: Any, indent: int | None = 2) -> None:
    """Writes a JSON file, whole or not at all."""
    with write_whole(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=indent) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """
    An object of this package's own format.

    Raises:
        `ValueError`: If the file is missing, no JSON, or of another format.
    """
    try:
        state = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"{path}: field `format` is {found!r}, this version reads {FORMAT}.")
    return state
