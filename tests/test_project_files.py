"""Files around the package that have to agree: versions, Pythons, the hosted checks' commands, links of the pages."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import trl_populora


ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "trl_populora" / "sandbox" / "README.md"]


def test_the_version_is_the_same_everywhere():
    version = trl_populora.__version__
    assert f'\nversion = "{version}"\n' in PYPROJECT
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## [{version}]" in changelog or f"this becomes {version}" in changelog


def test_the_oldest_python_is_one_that_bounded_dependencies_install_on():
    """Without an upper bound pip takes an older version; with one it finds none."""
    oldest = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]
    (listed,) = re.findall(r"^dependencies = \[\n(.+?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    bounded = re.findall(r'^    "(\w+)>=[^"]*<', listed, re.MULTILINE)
    assert "trl" in bounded
    needed = {name: metadata(name)["Requires-Python"] for name in bounded}
    assert {name: pythons for name, pythons in needed.items() if oldest not in SpecifierSet(pythons)} == {}


def test_hosted_tests_begin_with_the_oldest_python():
    oldest = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    for job in ("tests", "wheel"):
        assert checks["jobs"][job]["strategy"]["matrix"]["python"][0] == oldest


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_hosted_checks_make_targets_that_exist_and_write_nothing_by_default(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^make ([\w-]+)", "\n".join(commands), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if f"\n{target}: " not in makefile] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_project_lead_somewhere(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{target}#{anchor}"
