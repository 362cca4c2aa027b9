"""Files around the package that have to agree: versions, Pythons, the hosted checks' commands, links of the pages."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import trl_populora
from trl_populora.cli import COMMANDS
from trl_populora.hub.card import CITATION


ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "trl_populora" / "sandbox" / "README.md"]


def test_the_version_is_the_same_everywhere():
    version = trl_populora.__version__
    assert f'\nversion = "{version}"\n' in PYPROJECT
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == version
    newest = re.search(r"^## \[(\d.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == f"{version}] - {cited['date-released']}"
    for page in (*PAGES, *ROOT.glob("recipes/*.py")):
        assert set(re.findall(r"trl_populora-([\d.]+)-py3", page.read_text())) <= {version}, page


@pytest.mark.parametrize("text", [(ROOT / "README.md").read_text(), CITATION], ids=["README", "cards"])
def test_the_paper_is_cited_as_the_citation_file_has_it(text):
    (paper,) = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    names = [name for author in paper["authors"] for name in author.values()]
    assert len(names) == 12
    listed = text[text.index("Creus") :]
    places = [listed.index(author["family-names"]) for author in paper["authors"]]
    assert places == sorted(places), "in the same order"
    for told in (paper["title"], *names, str(paper["year"]), paper["identifiers"][0]["value"].removeprefix("arXiv:")):
        assert told in text


def test_the_oldest_python_is_one_that_bounded_dependencies_install_on():
    """Without an upper bound pip takes an older version; with one it finds none."""
    oldest = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]
    (listed,) = re.findall(r"^dependencies = \[\n(.+?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    bounded = re.findall(r'^    "(\w+)>=[^"]*<', listed, re.MULTILINE)
    assert "trl" in bounded
    needed = {name: metadata(name)["Requires-Python"] for name in bounded}
    assert {name: pythons for name, pythons in needed.items() if oldest not in SpecifierSet(pythons)} == {}


def test_the_package_imports_only_what_it_asks_for():
    project = tomllib.loads(PYPROJECT)["project"]
    extras = [listed for name, listed in project["optional-dependencies"].items() if name not in ("dev", "docs")]
    asked = {Requirement(each).name for each in sum(extras, project["dependencies"])}
    imported = set()
    for path in (ROOT / "trl_populora").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    # The sandbox's processes know their own folder by this name. Type checkers bring `_typeshed`.
    imported -= {*sys.stdlib_module_names, "trl_populora", "sandbox_room", "_typeshed"}
    assert {"pyyaml" if name == "yaml" else name for name in imported} <= asked


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


def test_the_container_runs_a_command_that_exists_on_the_oldest_python():
    text = (ROOT / "Dockerfile").read_text()
    oldest = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]
    assert f"\nFROM python:{oldest}-" in text
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1]) == ["populora"]
    command, option, _ = json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    assert command in COMMANDS
    assert option == "--output_dir"
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"trl_populora", "recipes", "accelerate_configs", "pyproject.toml", "README.md"} & set(ignored)


@pytest.mark.slow
def test_the_container_is_built_and_confines_programs():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker")
    subprocess.run(["docker", "build", "-t", "populora-test", "."], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["docker", "run", "--rm", "populora-test", "sandbox-check"], check=True, capture_output=True)


def test_the_script_of_one_file_asks_for_what_there_is():
    text = (ROOT / "recipes" / "start.py").read_text()
    head = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)[1]
    asked = tomllib.loads(re.sub(r"^# ?", "", head, flags=re.MULTILINE))
    project = tomllib.loads(PYPROJECT)["project"]
    assert asked["requires-python"] == project["requires-python"]
    (package,) = asked["dependencies"]
    name, extra = re.fullmatch(r"([\w-]+)\[(\w+)\]", package).groups()
    assert name == project["name"]
    assert extra in project["optional-dependencies"]
    assert (ROOT / "recipes" / asked["tool"]["uv"]["sources"][name]["path"] / "pyproject.toml").exists()
