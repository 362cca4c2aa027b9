"""CONTRIBUTING.md says where things are; what it names has to be there."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize("station", STATIONS)
def test_a_station_is_one_function_or_class(station):
    assert callable(find(station))


def test_files_and_tests_that_it_names_are_there():
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md))`", TEXT))
    assert len(named) > 8
    missing = [path for path in named if not any((root / path).exists() for root in (ROOT, ROOT / "trl_populora"))]
    assert missing == []


def names_in(file: str) -> set[str]:
    """Functions, classes, their methods and constants of a file of the package, methods as `Class.method`."""
    found = set()
    for node in ast.parse((ROOT / "trl_populora" / file).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def missing_names(cell: str) -> list[str]:
    """Names of a cell that do not stand in the file before them."""
    missing, file = [], ""
    for word in re.findall(r"`([^`]+)`", cell):
        if word.endswith(".py"):
            file = word
        elif not file or word not in names_in(file):
            missing.append(f"{file}: {word}")
    return missing


DECIDED = re.findall(
    r"^\| (.+?) \| (.+) \|$", TEXT.partition("## Where is it decided")[2].partition("##")[0], flags=re.M
)[1:]


@pytest.mark.parametrize(("question", "cell"), DECIDED, ids=[question for question, _ in DECIDED])
def test_what_decides_stands_in_the_file_before_it(question, cell):
    assert missing_names(cell) == []


def test_a_name_that_is_not_there_is_found():
    cell = "`step/pay.py`: `PAY`, `choose_price`; `evaluate/held_out.py`: `HeldOut.measure`, `HeldOut.guess`, `PAY`"
    assert missing_names(cell) == [
        "step/pay.py: choose_price",
        "evaluate/held_out.py: HeldOut.guess",
        "evaluate/held_out.py: PAY",
    ]


def test_every_room_stands_in_the_house():
    house = TEXT.split("```")[1]
    package = ROOT / "trl_populora"
    rooms = [path.name for path in package.iterdir() if path.is_dir() and path.name not in ("__pycache__",)]
    modules = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    assert [name for name in rooms if f"{name}/" not in house] == []
    assert [name for name in modules if name not in house] == []
