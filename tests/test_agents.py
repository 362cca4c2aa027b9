"""What coding agents are told: every command, option, file and make target of it exists."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests.command_options import OPTIONS
from trl_populora import cli as program
from trl_populora.config import MemberConfig, PopuLoRAConfig


ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / name).read_text() for name in ("AGENTS.md", "skills/populora/SKILL.md")}
LINES = [
    shlex.split(line, comments=True)
    for text in PAGES.values()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("words", [words for words in LINES if words[0] == "populora"], ids=" ".join)
def test_a_command_and_its_options_exist(words):
    _, command, *rest = words
    assert command in program.COMMANDS
    known = {field.name for field in fields(OPTIONS[command])} if OPTIONS[command] else set()
    if command == "train":
        known |= {"config"} | {field.name for each in (PopuLoRAConfig, MemberConfig) for field in fields(each)}
    assert {word.removeprefix("--") for word in rest if word.startswith("--")} <= known


def test_every_command_but_one_is_told():
    """`check-kind` is for who writes a kind, and stands in the guide."""
    assert {words[1] for words in LINES if words[0] == "populora"} == set(program.COMMANDS) - {"check-kind"}


@pytest.mark.parametrize("words", [words for words in LINES if words[0] == "make"], ids=" ".join)
def test_a_make_target_exists(words):
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    assert f"\n{words[1]}:" in makefile


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page):
    named = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md))`|`(\w+\.md)`", PAGES[page])
    missing = [path or other for path, other in named if not (ROOT / (path or other)).exists()]
    assert missing == []


def test_the_skill_has_the_head_that_agents_read():
    head = yaml.safe_load(PAGES["skills/populora/SKILL.md"].split("---")[1])
    assert head["name"] == "populora"
    assert 40 < len(head["description"]) < 1024
    assert all(len(text.splitlines()) < 100 for text in PAGES.values())
