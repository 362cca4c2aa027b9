"""Writes files that appear whole or not at all, whatever ends the writing process. Drops secrets from settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


FORMAT = 1  # version of the JSON files that this package writes and reads again

# Fits names that end in one of these words. Names are compared in lower case, without `_` and `-`.
_SECRET = re.compile(
    r".*(token|secret|passw(or)?d|passphrase|credentials?|authorization|(api|access|secret|private)key)"
)
# A tokenizer's `eos_token` and its relatives are text, and no secret.
_SPECIAL_TOKEN = re.compile(r"(bos|eos|pad|unk|sep|cls|mask)token")


def is_file_name(name: Any) -> bool:
    """
    Says whether a name consists of ASCII letters, digits, `_` and `-`, and does not start with `-`. As a path such a
    name cannot lead out of a directory.
    """
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) is not None


def drop_secrets(value: Any) -> Any:
    """Copies settings, at any depth, without the entries that are named like a token, a password or a secret key."""
    if isinstance(value, Mapping):
        return {name: drop_secrets(each) for name, each in value.items() if not _is_secret(name)}
    if isinstance(value, (list, tuple)):
        return type(value)(map(drop_secrets, value))
    return value


def drop_secret_flags(words: Sequence[str]) -> list[str]:
    """Copies the words of a command without the options that are named like a secret, and without their values."""
    kept, secret = [], False
    for word in words:
        option = word.startswith("-")
        if secret and not option:  # the value of the option before
            secret = False
            continue
        name, equals, _ = word.partition("=")
        hidden = option and _is_secret(name)
        secret = hidden and not equals
        if not hidden:
            kept.append(word)
    return kept


def _is_secret(name: object) -> bool:
    plain = str(name).lower().replace("_", "").replace("-", "")
    return bool(_SECRET.fullmatch(plain)) and not _SPECIAL_TOKEN.fullmatch(plain)


@contextmanager
def write_whole(path: str | Path) -> Iterator[Path]:
    """
    Gives the block a temporary path, to which the block writes a file or directory. If the block ends without an
    error, that file or directory is renamed to `path`.
    """
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.tmp")  # readers pass over names that end in `.tmp`
    yield unfinished
    unfinished.replace(path)


def write_json(path: str | Path, value: Any, indent: int | None = 2) -> None:
    """Writes a JSON file, whole or not at all."""
    with write_whole(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=indent) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """
    Reads a JSON object that this package has written.

    Raises:
        `ValueError`: If the file cannot be read, is no JSON object, or its field `format` is not [`FORMAT`].
    """
    try:
        state = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(state).__name__}.")
    if state.get("format") != FORMAT:
        raise ValueError(f"{path}: field `format` is {state.get('format')!r}, this version reads {FORMAT}.")
    return state
