"""Settings travel down: a room below the config has settings of its own, with types, defaults and checks."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import trl_populora
from trl_populora.config import GAME_DEFAULTS, PopuLoRAConfig
from trl_populora.population.evolution import Breeding
from trl_populora.sandbox.jobs import Limits
from trl_populora.sandbox.pool import SandboxSettings
from trl_populora.step.advantages import Scoring
from trl_populora.tasks.kind import KindSettings


PACKAGE = Path(trl_populora.__file__).parent
BELOW = ("sandbox", "tasks", "lora", "population", "step")
SETTINGS = {"args", "settings", "config", "options"}


def untyped_settings(source: str) -> list[str]:
    """Functions that take settings of which nothing is said."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                said = parameter.annotation and ast.unparse(parameter.annotation)
                if parameter.arg in SETTINGS and said in (None, "Any", "PopuLoRAConfig"):
                    found.append(f"{node.name}({parameter.arg}: {said})")
    return found


@pytest.mark.parametrize("room", BELOW)
def test_a_room_below_the_config_knows_its_settings_and_not_the_config(room):
    callbacks = {"on_step_begin(args: None)"}  # transformers' own
    for path in (PACKAGE / room).rglob("*.py"):
        assert set(untyped_settings(path.read_text())) <= callbacks, path


ABOVE = {  # what still needs many options of our own
    *("__init__", "cli", "start", "trainer"),
    *("evaluate/cross_play", "evaluate/tryout"),
}


def test_few_know_the_config():
    """Where options of TRL and transformers are enough, their config is."""
    named = {
        path for path in PACKAGE.rglob("*.py") if re.search(r"(trl_populora|from )\.config import", path.read_text())
    }
    assert {str(path.relative_to(PACKAGE).with_suffix("")) for path in named} == ABOVE


def test_a_function_that_takes_anything_is_found():
    assert untyped_settings("def f(args: Any, options: dict): ...") == ["f(args: Any)"]


@pytest.mark.parametrize("room", [KindSettings, Breeding, Scoring, SandboxSettings])
def test_the_defaults_of_a_room_are_the_options(room):
    options = {each.name: each.default for each in fields(PopuLoRAConfig)} | GAME_DEFAULTS
    for each in fields(room):
        if each.name not in ("seed", "roles") and each.default is not MISSING:
            assert options[each.name] == each.default, each.name


def test_a_sandbox_that_is_set_to_nothing_has_the_limits_of_a_run():
    assert SandboxSettings().limits == Limits()


@pytest.mark.parametrize(
    ("room", "wrong", "told"),
    [
        (Breeding, {"evolve_every": -1}, "`evolve_every` must be at least 0, got -1"),
        (Breeding, {"cull_fraction": 1.0}, "`cull_fraction` must be below 1, got 1.0"),
        (Breeding, {"crossover_rate": float("nan")}, "`crossover_rate` must be a finite number, got nan"),
        (Breeding, {"crossover_rate": 1.5}, "`crossover_rate` must be at most 1, got 1.5"),
        (Breeding, {"mutation_strength": float("inf")}, "`mutation_strength` must be a finite number, got inf"),
        (Breeding, {"mutations": "shuffle"}, "`mutations` names no operator 'shuffle'"),
        (KindSettings, {"inputs_per_function": 1}, "`inputs_per_function` must be at least 2, got 1"),
        (KindSettings, {"reading": "kind"}, "`reading` must be one of tolerant, strict, None, got 'kind'"),
    ],
)
def test_a_room_checks_its_settings_itself_and_the_config_by_it(room, wrong, told, make_args):
    for make in (room, make_args):
        with pytest.raises(ValueError, match=told):
            make(**wrong)
