"""The package without a clone: built as a wheel, installed into an environment of its own, used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.without_extras import without_extras


ROOT = Path(__file__).parent.parent
PACKED = {  # folders of a clone, and where they lie in a wheel
    "trl_populora": "trl_populora",
    "recipes": "trl_populora/recipes",
    "accelerate_configs": "trl_populora/accelerate_configs",
}
NO_CACHES = shutil.ignore_patterns("__pycache__")


def files_below(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path in it."""
    paths = [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools leaves a folder `build` behind, from which it would take files again."""
    clone = tmp_path_factory.mktemp("clone")
    for folder in PACKED:
        shutil.copytree(ROOT / folder, clone / folder, ignore=NO_CACHES)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", clone / "dist", clone)
    (wheel,) = (clone / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def populora(wheel, tmp_path_factory) -> str:
    """The command of an environment that holds this wheel and sees what it depends on, and not the clone."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    run(sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "-q", "--no-deps", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Named like this, the folder is searched, and its own .pth files (an editable install) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(environment / "bin" / "populora")


def run(*command: str | Path, **options) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = without_extras(inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout


def test_the_wheel_holds_every_file_and_nothing_else(wheel):
    """Also a room that is new and not in the list of `pyproject.toml` yet."""
    with zipfile.ZipFile(wheel) as packed:
        held = {name: packed.read(name) for name in packed.namelist() if ".dist-info/" not in name}
    wanted = {
        f"{inside}/{name}": data
        for folder, inside in PACKED.items()
        for name, data in files_below(ROOT / folder).items()
    }
    assert held.keys() == wanted.keys()
    assert [name for name in wanted if held[name] != wanted[name]] == []


def test_the_wheel_is_below_8_megabytes(wheel):
    """Most of it is the embedded base. Studies and their tables stay in the clone."""
    assert wheel.stat().st_size < 8e6


@pytest.mark.slow
def test_the_quick_start_needs_no_clone(populora, tmp_path):
    small = {"max_steps": 1, "proposals_per_teacher": 4, "attempts_per_task": 2, "per_device_train_batch_size": 8}
    small |= {"eval_strategy": "no", "eval_on_start": "false", "evolve_burn_in": 0}
    options = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    printed = run(populora, "quickstart", *options, cwd=tmp_path)
    assert "Population after 1 steps on tiny" in printed
    saved = json.loads((tmp_path / "runs" / "quickstart" / "population.json").read_text())
    assert {member["name"] for member in saved["members"]} == {"teacher_0", "teacher_1", "student_0", "student_1"}
    run(populora, "report", "runs/quickstart", cwd=tmp_path)
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()


def test_the_recipes_are_copied_as_they_are_in_the_clone(populora, tmp_path):
    run(populora, "recipes", "here", cwd=tmp_path)
    for folder in ("recipes", "accelerate_configs"):
        assert files_below(tmp_path / "here" / folder) == files_below(ROOT / folder)
    assert os.access(tmp_path / "here" / "recipes" / "serve.sh", os.X_OK)
