"""Who may know whom, and which rooms live without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "trl_populora"

# A room may import rooms of lower floors, for running or for type checking, and none of its own floor. A file that is
# named here is a room of its own.
FLOORS = [
    {"sandbox", "assets", "files", "errors", "options", "evaluate.intervals", "__version__"},
    {"tasks", "lora"},
    {"population"},
    {"step"},
    {"config", "evaluate.held_out"},
    {"generate", "run"},
    {"report"},
    {"hub"},
    {"start"},
    {"trainer"},
    {"evaluate"},
    {"cli"},
    {"__main__"},
]
TORCH_FREE = ["tasks", "sandbox", "population.members", "population.ratings", "step.pay", "step.rows"]
TORCH_FREE += ["report.page", "report.table", "run.read", "hub.download"]


def room_of(module: str) -> str:
    """The room of a module named below the package, such as `step.pay`."""
    named = [room for level in FLOORS for room in level if f"{module}.".startswith(f"{room}.")]
    return max(named, key=len, default=module.split(".")[0])


def rooms_imported(path: Path) -> set[str]:
    """Rooms that a module names in an import, imports for type checking included."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = path.relative_to(PACKAGE.parent).with_suffix("").parts[: -node.level]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = {room_of(name.removeprefix("trl_populora.")) for name in names if name.startswith("trl_populora.")}
    return ours | ({"the package root"} if "trl_populora" in names else set())


def modules() -> list[Path]:
    found = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
    assert len(found) > 20
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    floor = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
    room = room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    assert room in floor, f"room {room} has no floor: name it in FLOORS"
    for other in rooms_imported(path) - {room}:
        assert other in floor, f"{path.name} imports {other}, which has no floor"
        assert floor[other] < floor[room], f"{room} must not know {other}"


def test_the_house_has_few_floors_and_a_short_top_level():
    assert len(FLOORS) <= 13
    assert len([path for path in PACKAGE.glob("*.py") if not path.name.startswith("_")]) <= 8


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_cited_that_the_repository_does_not_hold(path):
    assert not re.search(r"\bcontracts? \d|\bDESIGN\b|\bissue #?\d", path.read_text())


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_raises_has_one_form(path):
    for block in re.findall(r"^ +Raises:\n(.+?)(?:\n\n|\n *\"\"\")", path.read_text(), re.MULTILINE | re.DOTALL):
        indents = [len(line) - len(line.lstrip()) for line in block.split("\n")]
        for line, indent in zip(block.split("\n"), indents, strict=True):
            named = re.match(r" +(`\w+`: |\[`[~\w.]*\w+`\]: )", line)
            assert named or indent > min(indents), f"write the error in backticks: {line.strip()}"


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.rglob("test_*.py")), ids=lambda path: path.name)
def test_no_test_imports_a_test(path):
    """What several need stands in a module of its own; a fixture that is imported runs twice."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(part.startswith("test_") for name in names for part in name.split("."))


def test_rooms_import_without_torch():
    rooms = "; ".join(f"import trl_populora.{room}" for room in TORCH_FREE)
    code = f"import sys; sys.modules['torch'] = None; {rooms}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert done.returncode == 0, done.stderr


def test_blocking_torch_is_noticed():
    """The check above can fail: a room that needs torch does not import under the same block."""
    code = "import sys; sys.modules['torch'] = None; import trl_populora.population.operators"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert done.returncode != 0
    assert "torch" in done.stderr
