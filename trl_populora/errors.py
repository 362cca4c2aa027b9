"""How a failing command ends: with one line where its user can mend the fault, else with a traceback."""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from pathlib import Path
from typing import NoReturn

import yaml


# The types of error that checks raise: this package's checks, and those of TRL, transformers and other libraries.
REFUSALS = (ValueError, TypeError, RuntimeError, ImportError, yaml.YAMLError)
# Two methods of transformers' `Trainer`: one computes a micro-batch, the other logs, evaluates and saves after a step.
# An error inside them has stopped a running training.
TRAINING = {"training_step", "_maybe_log_save_evaluate"}


def describe_error(error: Exception) -> str | None:
    """
    Puts an error into one line for the user, or returns `None` where a traceback is due.

    A full disk, and a missing package of the extra `report`, get one line wherever they happen. Outside of training an
    `OSError` gets one line, too, and so does an error in `REFUSALS` that a `raise` statement made. All other errors
    keep their traceback:

    - A bug: no `raise` statement made the error. A wrong call, for example, makes a `TypeError` by itself.
    - Another package that is missing.
    - Any other error in the midst of training, because days of computing may hang on its cause.

    With `POPULORA_TRACEBACK` in the environment every error keeps its traceback.
    """
    if os.environ.get("POPULORA_TRACEBACK"):
        return None
    told = " ".join(str(error).split())
    full = errno.ENOSPC, errno.EDQUOT
    # safetensors raises an error of its own without `errno`, so its text is searched for the system's words.
    if getattr(error, "errno", None) in full or any(os.strerror(number) in told for number in full):
        return f"disk full ({told}). Make room. A training can then go on with `--resume`."
    if isinstance(error, ModuleNotFoundError):
        return say_how_to_install(error)
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name in TRAINING for frame in frames):
        return None
    # The last frame is the line that failed. It is a `raise` only if the error was made on purpose.
    refused = isinstance(error, REFUSALS) and (frames[-1].line or "").startswith("raise ")
    return told if refused or isinstance(error, OSError) else None


def say_how_to_install(error: ModuleNotFoundError) -> str | None:
    """Tells how to install a missing package of the extra `report`; returns `None` for any other package."""
    if (error.name or "").partition(".")[0] not in ("matplotlib", "rich"):
        return None
    return f'{error.name} is not installed; run `pip install "trl-populora[report]"`.'


def make_printable(text: str, keep: str = "", instead: str = " ") -> str:
    """
    Replaces the characters of a text that are not printable. A terminal would obey some of them, as in escape
    sequences.

    Args:
        text: The text.
        keep: Characters that stay although they are not printable.
        instead: Takes the place of each other character that is not printable.
    """
    return "".join(each if each.isprintable() or each in keep else instead for each in text)


def end_with(sentence: str) -> NoReturn:
    """
    Ends this process with exit code 1 and a sentence on stderr.

    torchrun and Accelerate start several processes on a node, which often fail for the same reason. Only the first
    process of a node that fails writes the sentence to stderr. But every process that fails writes the sentence to an
    error file of its own, which the launcher quotes.
    """
    sentence = make_printable(sentence)  # the sentence may quote a file from a stranger
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            Path(error_file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
            # `touch` succeeds in one process only, so one process of the node prints.
            Path(error_file).parent.with_name("told").touch(exist_ok=False)
        except FileExistsError:
            raise SystemExit(1) from None
        except OSError:  # on a full disk every process prints, which is better than none
            pass
    raise SystemExit(sentence)
