"""Which releases of TRL this package runs on: the seam tests and one step of the quick start on each.

    python benchmarks/trl_versions.py                  # writes docs/trl_versions.md
    python benchmarks/trl_versions.py --only 1.16.0    # one release; prints the table and writes nothing

The releases are those of pip's index inside the window of pyproject.toml, the two before it and all after it: what
moves there is what a wider window would have to bridge. Each is installed into a directory of its own, without what it
depends on, and stands before this environment's TRL on the path. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from datetime import date
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "trl_versions.md"
TESTS = ["tests/test_trl_seams.py", "tests/test_other_seams.py"]
NEIGHBOURS = 2  # releases before the window
BEGIN, END = "<!-- benchmarks/trl_versions.py -->\n", "<!-- end -->\n"


def window() -> Requirement:
    """TRL in the dependencies of pyproject.toml."""
    return Requirement(re.search(r'^    "(trl[>=<].*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1])


def releases() -> list[str]:
    """What can be installed, as pip lists it, oldest first; no pre-releases."""
    command = [sys.executable, "-m", "pip", "index", "versions", "trl"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)[1].split(", ")
    return sorted(found, key=Version)


def chosen(found: list[str]) -> list[str]:
    """Those of the window, `NEIGHBOURS` before it, and all after it."""
    inside = [i for i, release in enumerate(found) if release in window().specifier]
    return found[max(0, inside[0] - NEIGHBOURS) :] if inside else found[-NEIGHBOURS:]


def run(command: list[str], directory: Path, seconds: int = 900) -> subprocess.CompletedProcess:
    """Runs a command with the release in `directory` before all others."""
    path = os.pathsep.join([str(directory), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )


def try_release(release: str, directory: Path) -> dict:
    """What the seam tests and a step say about a release."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(directory),
        f"trl=={release}",
    ]
    subprocess.run(pip, check=True)
    seen = run([sys.executable, "-c", "import trl; print(trl.__version__)"], directory).stdout.split()
    if seen[-1:] != [release]:
        raise RuntimeError(f"{release} was installed into {directory}, but what is imported is {seen}.")
    report = directory / "seams.xml"
    # That a release is outside the window is known; what is asked is whether its seams are where they were.
    only = ["-k", "not in_the_window and not lies_in_a_window"]
    run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *only, f"--junitxml={report}", *TESTS],
        directory,
    )
    cases = list(ET.parse(report).iter("testcase"))
    moved = [case.get("name") for case in cases if any(case.find(kind) is not None for kind in ("failure", "error"))]
    skipped = sum(case.find("skipped") is not None for case in cases)
    quickstart = ["train", "--config", "recipes/tiny/quickstart.yaml", "--output_dir", str(directory / "run")]
    small = ["--max_steps", "1", "--eval_strategy", "no", "--eval_on_start", "false", "--proposals_per_teacher", "4"]
    small += ["--per_device_train_batch_size", "12"]
    step = run([sys.executable, "-m", "trl_populora", *quickstart, *small], directory)
    reason = "" if step.returncode == 0 else (step.stderr.strip().splitlines() or ["no message"])[-1]
    return {
        "release": release,
        "in_window": release in window().specifier,
        "seams": len(cases) - skipped,
        "moved": moved,
        "step": reason or "works",
    }


def short(name: str) -> str:
    """A test's name without its function, where it has a seam's."""
    return re.sub(r"^test_\w+\[(.*)\]$", r"\1", name).removeprefix("test_")


def table(results: list[dict]) -> str:
    """The rows of the page."""
    lines = ["| TRL | in the window | seams that hold | seams that moved | one step |", "|---|---|---|---|---|"]
    for result in results:
        held = f"{result['seams'] - len(result['moved'])} of {result['seams']}"
        moved = "; ".join(f"`{short(name)}`" for name in result["moved"]) or "none"
        inside = "yes" if result["in_window"] else "no"
        lines.append(
            f"| {result['release']} | {inside} | {held} | {moved} | {result['step'].replace('|', '/')[:200]} |"
        )
    others = ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft", "accelerate", "torch"))
    python = ".".join(map(str, sys.version_info[:2]))
    return "\n".join(lines) + f"\n\n{date.today():%d %B %Y}, Python {python}, {others}; window `{window()}`.\n"


def write(text: str) -> None:
    """Puts the table into the page, between its marks."""
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + text + page[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="RELEASE", help="these releases")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for release in options.only or chosen(releases()):
            results.append(try_release(release, Path(scratch, release)))
            print(f"{release}: {len(results[-1]['moved'])} of {results[-1]['seams']} seams moved", flush=True)
    print(table(results))
    if not options.only:
        write(table(results))
    print(json.dumps({"releases": {result.pop("release"): result for result in results}}))


if __name__ == "__main__":
    main()
