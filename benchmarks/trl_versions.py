"""On which releases of its neighbours this package runs: the seam tests and one step of the quick start on each.

    python benchmarks/trl_versions.py                     # all four packages; writes docs/trl_versions.md
    python benchmarks/trl_versions.py --only vllm==0.32.0 # one release; prints the table and writes nothing

Of each package that a window in pyproject.toml bounds: the last release before it, its first and last, and the first
after it, as pip's index lists them. What moved there is what a wider window would have to bridge. Each release is
installed into a directory of its own, without what it depends on, and stands before this environment's on the path. Of
vLLM it is the build that is installed here, and the step is one with a colocated engine. The last line is one JSON
object.
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
from importlib.metadata import distributions, version
from itertools import pairwise
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "trl_versions.md"
TESTS = ["tests/test_trl_seams.py", "tests/test_other_seams.py"]
PACKAGES = ("trl", "vllm", "peft", "transformers")
BEGIN, END = "<!-- benchmarks/trl_versions.py -->\n", "<!-- end -->\n"
STEP = ["train", "--config", "recipes/tiny/quickstart.yaml", "--max_steps", "1", "--eval_strategy", "no"]
STEP += ["--eval_on_start", "false", "--proposals_per_teacher", "4", "--per_device_train_batch_size", "12"]
COLOCATED = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.1"]
# A small cache, an engine in the step's own process, and nothing compiled for one step.
ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}


def window(package: str) -> Requirement:
    """The package's line in pyproject.toml."""
    line = re.search(rf'"({package}[>=<][^"]*)"', (ROOT / "pyproject.toml").read_text())
    return Requirement(line[1])


def distribution(package: str) -> str:
    """The package's name on the index: of vLLM, that of the build installed here."""
    builds = {found.name for found in distributions() if found.name.startswith("vllm")}
    return builds.pop() if package == "vllm" and builds else package


def releases(package: str) -> list[str]:
    """What can be installed, as pip lists it, oldest first; no pre-releases."""
    command = [sys.executable, "-m", "pip", "index", "versions", distribution(package)]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)[1].split(", ")
    return sorted(found, key=Version)


def choose(found: list[str], package: str) -> list[str]:
    """The last before the window, its first and its last, and the first after it; the newest where none is inside."""
    held = [release in window(package).specifier for release in found]
    if not any(held):
        return found[-1:]
    edges = {index + step for index, (one, next_) in enumerate(pairwise(held)) if one != next_ for step in (0, 1)}
    edges |= {held.index(True), len(held) - 1 - held[::-1].index(True)}
    return [found[index] for index in sorted(edges)]


def run(command: list[str], directory: Path, seconds: int = 900) -> subprocess.CompletedProcess:
    """Runs a command with the release in `directory` before all others."""
    path = os.pathsep.join([str(directory), str(ROOT)])
    environment = os.environ | ENGINE | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )


def try_release(package: str, release: str, directory: Path) -> dict:
    """What the seam tests and a step say about a release."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
    subprocess.run([*install, f"{distribution(package)}=={release}"], check=True)
    asked = f"import importlib.metadata as m; print(m.version({distribution(package)!r}))"
    seen = run([sys.executable, "-c", asked], directory).stdout.split()
    if seen[-1:] != [release]:
        raise RuntimeError(f"{package} {release} was installed into {directory}, but what is imported is {seen}.")
    report = directory / "seams.xml"
    # That a release is outside the window is known; what is asked is whether its seams are where they were.
    only = ["-k", "not in_the_window and not lies_in_a_window"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *only, f"--junitxml={report}"]
    run([*pytest, *TESTS], directory)
    cases = list(ET.parse(report).iter("testcase"))
    moved = [case.get("name") for case in cases if any(case.find(kind) is not None for kind in ("failure", "error"))]
    skipped = sum(case.find("skipped") is not None for case in cases)
    small = [*STEP, "--output_dir", str(directory / "run"), *(COLOCATED if package == "vllm" else [])]
    step = run([sys.executable, "-m", "trl_populora", *small], directory)
    reason = "" if step.returncode == 0 else (step.stderr.strip().splitlines() or ["no message"])[-1]
    return {
        "package": package,
        "release": release,
        "in_window": release in window(package).specifier,
        "seams": len(cases) - skipped,
        "moved": moved,
        "step": reason or "works",
    }


def short(name: str) -> str:
    """A test's name without its function, where it has a seam's."""
    return re.sub(r"^test_\w+\[(.*)\]$", r"\1", name).removeprefix("test_")


def table(results: list[dict]) -> str:
    """The rows of the page."""
    lines = ["| release | in the window | seams that hold | seams that moved | one step |", "|---|---|---|---|---|"]
    for result in results:
        held = f"{result['seams'] - len(result['moved'])} of {result['seams']}"
        moved = "; ".join(f"`{short(name)}`" for name in result["moved"]) or "none"
        inside = "yes" if result["in_window"] else "no"
        step = result["step"].replace("|", "/")[:200]
        lines.append(f"| {result['package']} {result['release']} | {inside} | {held} | {moved} | {step} |")
    names = [*map(distribution, PACKAGES), "accelerate", "torch"]
    installed = ", ".join(f"{name} {version(name)}" for name in names)
    python = ".".join(map(str, sys.version_info[:2]))
    windows = ", ".join(f"`{window(package)}`" for package in PACKAGES)
    return "\n".join(lines) + (
        f"\n\n{date.today():%d %B %Y}, Python {python}. Where a row does not say otherwise: {installed}. "
        f"Windows: {windows}.\n"
    )


def write(text: str) -> None:
    """Puts the table into the page, between its marks."""
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + text + page[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PACKAGE==RELEASE", help="these releases")
    options = parser.parse_args()
    if options.only:
        chosen = [tuple(pair.split("==")) for pair in options.only]
    else:
        chosen = [(package, release) for package in PACKAGES for release in choose(releases(package), package)]
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for package, release in chosen:
            results.append(try_release(package, release, Path(scratch, package, release)))
            moved, seams, step = results[-1]["moved"], results[-1]["seams"], results[-1]["step"]
            print(f"{package} {release}: {len(moved)} of {seams} seams moved; one step: {step}", flush=True)
    print(table(results))
    if not options.only:
        write(table(results))
    print(json.dumps({"releases": results}))


if __name__ == "__main__":
    main()
