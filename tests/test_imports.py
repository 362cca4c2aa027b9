"""Who may know whom (DESIGN: the rooms), and which rooms live without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "trl_populora"

# A room may import rooms of lower floors, and of its own floor only what is named in `NEIGHBOURS`.
FLOORS = [
    {"factors", "model_options"},
    {"sandbox", "population", "operators"},
    {"tasks"},
    {"matchmaking", "rewards", "advantages", "adapters", "populora_config", "retention", "room", "nodes"},
    {"batching", "rollout", "generation", "saved_population", "report_plots"},
    {"held_out", "report_page", "records"},
    {"evolution", "loading", "progress", "archive_card", "report", "alarms", "interrupts"},
    {"checkpoint", "model_card"},
    {"hub"},
    {"populora_trainer", "evaluate"},
    {"evaluation"},
    {"__main__"},
]
NEIGHBOURS: set[tuple[str, str]] = set()
TORCH_FREE = ["tasks", "sandbox", "population", "matchmaking", "rewards"]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    """Rooms that a module imports when it runs; imports under TYPE_CHECKING are for readers only."""
    tree = ast.parse(path.read_text())
    unused = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = path.relative_to(PACKAGE.parent).with_suffix("").parts[: -node.level]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" if base.count(".") == 0 else base for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("trl_populora.")} | (
        {"the package root"} if "trl_populora" in names else set()
    )


def modules() -> list[Path]:
    found = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
    assert len(found) > 20
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    floor = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
    room = room_of(path)
    assert room in floor, f"room {room} has no floor: name it in FLOORS"
    for other in rooms_imported(path) - {room}:
        assert other in floor, f"{path.name} imports {other}, which has no floor"
        assert floor[other] < floor[room] or (room, other) in NEIGHBOURS, f"{room} must not know {other}"


@pytest.mark.parametrize("room", TORCH_FREE)
def test_room_imports_without_torch(room):
    code = f"import sys; sys.modules['torch'] = None; import trl_populora.{room}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert done.returncode == 0, done.stderr


def test_blocking_torch_is_noticed():
    """The check above can fail: a room that needs torch does not import under the same block."""
    code = "import sys; sys.modules['torch'] = None; import trl_populora.operators"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert done.returncode != 0
    assert "torch" in done.stderr
