"""CONTRIBUTING.md says where things are; what it names has to be there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
STATIONS = re.findall(r"^ \d  ([\w.]+)  +\S", TEXT, flags=re.M)


def find(path: str) -> object:
    """What a dotted path below the package names."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["trl_populora", *parts[:end]]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def test_a_row_passes_eight_stations():
    assert len(STATIONS) == 8


@pytest.mark.parametrize("station", STATIONS)
def test_a_station_is_one_function_or_class(station):
    assert callable(find(station))


def test_files_and_tests_that_it_names_are_there():
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md))`", TEXT))
    assert len(named) > 8
    missing = [path for path in named if not any((root / path).exists() for root in (ROOT, ROOT / "trl_populora"))]
    assert missing == []


def test_every_room_stands_in_the_house():
    house = TEXT.split("```")[1]
    package = ROOT / "trl_populora"
    rooms = [path.name for path in package.iterdir() if path.is_dir() and path.name not in ("__pycache__",)]
    modules = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    assert [name for name in rooms if f"{name}/" not in house] == []
    assert [name for name in modules if name not in house] == []
