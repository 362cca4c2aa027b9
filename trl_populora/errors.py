"""How a command ends that fails: in one line where its user can mend what is wrong, else with a traceback."""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from pathlib import Path
from typing import NoReturn

import yaml


# What checks raise: ours, and those of TRL, transformers and others that the settings pass through.
REFUSALS = (ValueError, TypeError, RuntimeError, ImportError, yaml.YAMLError)
TRAINING = {"training_step", "_maybe_log_save_evaluate"}  # the two halves of a turn of transformers' loop


def sentence_of(error: Exception) -> str | None:
    """
    What a command says of an error in one line; `None` where a traceback is due.

    The line is for what the user can mend: what the system refuses (`OSError`), and what some check does. An error
    that no `raise` made, as the `TypeError` of a wrong call, is a bug, and one in the midst of training may have cost
    days: both keep the whole story. The variable `POPULORA_TRACEBACK` shows it of every error.
    """
    if os.environ.get("POPULORA_TRACEBACK"):
        return None
    told = " ".join(str(error).split())
    full = errno.ENOSPC, errno.EDQUOT
    # safetensors tells in its own words what the system said.
    if getattr(error, "errno", None) in full or any(os.strerror(number) in told for number in full):
        return f"disk full ({told}). Make room; training can go on with `--resume`."
    if isinstance(error, ModuleNotFoundError):
        return way_to_install(error)
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name in TRAINING for frame in frames):
        return None
    refused = isinstance(error, REFUSALS) and (frames[-1].line or "").startswith("raise ")
    return told if refused or isinstance(error, OSError) else None


def way_to_install(error: ModuleNotFoundError) -> str | None:
    """How to get a module of the `report` extra; others are for a traceback."""
    if (error.name or "").partition(".")[0] not in ("matplotlib", "rich"):
        return None
    return f'{error.name} is not installed; run `pip install "trl-populora[report]"`.'


def printable(text: str, keep: str = "", instead: str = " ") -> str:
    """A text of somebody else's that commands no terminal: `instead` stands for what cannot be printed, but `keep`."""
    return "".join(each if each.isprintable() or each in keep else instead for each in text)


def end_with(sentence: str) -> NoReturn:
    """
    Ends this process with a line on stderr, which may quote files of others, and exit code 1.

    Of the processes that torchrun or Accelerate started on a node, the first that fails says it; the launcher's page
    quotes each.
    """
    sentence = printable(sentence)
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            Path(error_file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
            Path(error_file).parent.with_name("told").touch(exist_ok=False)
        except FileExistsError:
            raise SystemExit(1) from None
        except OSError:  # a full disk: rather too often than not at all
            pass
    raise SystemExit(sentence)
