"""The hard mode: `bwrap` around every zygote, a wall of somebody else's making outside of our own.

Inside it a zygote has namespaces of bubblewrap's, a root folder of its own with Python in it and nothing else, all
read only, and there it builds its walls as ever. That bubblewrap is really around it is checked from inside.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .health import namespaces


_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache")
_START_SECONDS = 30.0


def wrapping(room: Path) -> list[str]:
    """
    The beginning of a command that then runs inside.

    Args:
        room (`Path`): The folder with the zygote's files.

    Raises:
        RuntimeError: `bwrap` is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise RuntimeError(
            "`bubblewrap=True` needs the program `bwrap`, which is not on the path. Install it (`apt install"
            " bubblewrap`, `dnf install bubblewrap`), or leave `bubblewrap` off: the sandbox's own walls need nothing."
        )
    command = [program, "--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts", "--proc", "/proc"]
    command += ["--tmpfs", "/tmp"]  # before the folders below, one of which may lie in it
    folders = {*_SYSTEM, sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent), str(room)}
    for folder in sorted(folders, key=len):
        command += ["--ro-bind-try", folder, folder]
    return [*command, "--chdir", "/", "--"]


def prepare(room: Path) -> dict[str, str]:
    """
    Try it once; what the zygotes need for `health.check_wrapped`.

    Raises:
        RuntimeError: `bwrap` is not installed, or the host does not let it work.
    """
    command = [*wrapping(room), sys.executable, "-s", "-S", "-B", "-c", ""]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(
            f"`bubblewrap=True`, but `bwrap` does not work on this host: {done.stderr.strip()[-300:]}. It needs user"
            " namespaces (or root) and, in a container, a profile that lets it mount; README.md of the sandbox names"
            " the settings. Or leave `bubblewrap` off."
        )
    return namespaces()
