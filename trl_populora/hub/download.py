"""Saved populations, from a directory or from the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from trl_populora.run.read import POPULATION_FILE


POPULATION = (POPULATION_FILE, "lineage.jsonl", "members/*", "metrics.jsonl", "times.jsonl", "archive.parquet")


def fetch(path_or_repo: str, wanted: Sequence[str] = POPULATION) -> Path:
    """
    Directory of a saved population: a local one as it is, a repository after downloading the wanted files, by default
    members and tables.

    Raises:
        `ValueError`: If it is neither.
    """
    if Path(path_or_repo).is_dir():
        return Path(path_or_repo)
    try:
        return Path(snapshot_download(path_or_repo, allow_patterns=list(wanted)))
    except Exception as error:
        if not (isinstance(error, (LocalEntryNotFoundError, ValueError)) or is_connection_error(error)):
            raise
        raise ValueError(
            f"{path_or_repo!r} is no directory, and no population could be downloaded from {constants.ENDPOINT} under "
            f"that name ({error!s:.200})."
        ) from error


def is_connection_error(error: Exception) -> bool:
    """
    Whether an error comes from the network; the client changes its HTTP library, whose errors share no base class.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # a file that was not uploaded
        return is_connection_error(error.__cause__)
    return isinstance(error, (ConnectionError, HfHubHTTPError)) or type(error).__module__.startswith("httpx")
