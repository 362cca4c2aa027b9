"""Finds a saved population or adapter in a local directory or on the Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from trl_populora.run.read import POPULATION_FILE


# Members, archive, metrics and the chat template. Rollouts, plots and pages stay on the Hub: a run's rollouts may be
# larger than its members.
POPULATION = (
    POPULATION_FILE,
    "lineage.jsonl",
    "members/*",
    "metrics.jsonl",
    "times.jsonl",
    "archive.parquet",
    "chat_template*",
)


def fetch(path_or_repo: str, wanted: Sequence[str] = POPULATION) -> Path:
    """
    Returns the directory of a saved population or adapter, and downloads it first if it is a repository.

    Args:
        path_or_repo: A local directory, or `user/name` of a repository on the Hub.
        wanted: Patterns of the files to download; by default members, archive and metrics.

    Raises:
        `ValueError`: If there is no such directory and nothing could be downloaded.
    """
    if (path := Path(os.path.expanduser(path_or_repo))).is_dir():
        return path
    try:
        return Path(snapshot_download(path_or_repo, allow_patterns=list(wanted)))
    except Exception as error:
        # No network, no such repository, or a path that is no valid repository name: for the user all of these mean
        # that the name is wrong or out of reach. Other errors pass through.
        if not (isinstance(error, (LocalEntryNotFoundError, ValueError)) or is_connection_error(error)):
            raise
        raise ValueError(
            f"{path_or_repo!r} is no directory, and nothing could be downloaded from {constants.ENDPOINT} under that "
            f"name ({error!s:.200})."
        ) from error


def is_connection_error(error: Exception) -> bool:
    """Says whether an error comes from the network or the Hub."""
    # The client wraps the error of a file that it could not upload.
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        return is_connection_error(error.__cause__)
    # The client connects with `httpx`, whose errors share no base class with the other two.
    return isinstance(error, (ConnectionError, HfHubHTTPError)) or type(error).__module__.startswith("httpx")
