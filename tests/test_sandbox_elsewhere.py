"""The same programs under other Pythons, and as uid 1000 in a process shut in like a default container."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .sandbox_support import check, run_elsewhere


ROOT = Path(__file__).parent.parent
VERSIONS = ["3.11", "3.12", "3.13"]
NONE = [pytest.param("", marks=pytest.mark.skip("no other Python"))]


def interpreter(version):
    """A Python of this version other than the running one, or None."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return None  # covered by `test_sandbox_hostile.py`
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


@pytest.mark.slow
@pytest.mark.parametrize("version", [each for each in VERSIONS if interpreter(each)] or NONE)
def test_other_pythons(version):
    found = run_elsewhere(interpreter(version))
    assert found["python"] == [int(part) for part in version.split(".")]
    check(found)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the container's filter is written for x86-64")
def test_a_container_like_process_reaches_level_b():
    found = run_elsewhere(sys.executable, "container")
    assert found["uid"] != 0
    assert found["level"] == "B"
    assert found["layers"]["seccomp"] == ""
    assert found["layers"]["uid"] == ""
    assert all(found["layers"][name] for name in ("namespaces", "chroot", "landlock"))
    check(found)


@pytest.mark.slow
def test_an_ordinary_user_gets_what_the_host_offers():
    found = run_elsewhere(sys.executable, "user")
    assert found["uid"] != 0
    user = {"user": 1000, "group": 1000, "extra_groups": []} if os.geteuid() == 0 else {}
    command = [shutil.which("unshare") or "false", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    offered = subprocess.run(command, cwd="/", check=False, timeout=30, **user).returncode == 0
    assert found["level"] == ("A" if offered and found["layers"]["landlock"] == "" else "B")
    check(found)
