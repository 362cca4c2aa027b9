"""Pictures of the pages: the files are what `docs/draw.py` draws, and what they show is what the data says."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.browser import PHONE, chromium, opened
from trl_populora.report.charts import PHASE_COLORS, PROMPT_PHASE_COLORS


ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"

sys.path.insert(0, str(ROOT / "docs"))
import draw  # noqa: E402


def read(name: str) -> ET.Element:
    return ET.parse(ROOT / name).getroot()


def texts(name: str) -> list[str]:
    return [each.text or "" for each in read(name).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_what_the_script_draws(name):
    assert (ROOT / name).read_text() == draw.PICTURES[name](), "run `python docs/draw.py`"


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.svg")))
def test_every_picture_of_the_pages_has_a_dark_form(name):
    assert name in draw.PICTURES
    assert "prefers-color-scheme: dark" in (ROOT / name).read_text()


@pytest.mark.parametrize("name", draw.PICTURES)
def test_no_element_keeps_a_colour_that_a_dark_page_hides(name):
    """Colours are classes, which the style changes. Cells of a map have light colours on both grounds."""
    colored = [
        each
        for each in read(name).iter()
        if {"fill", "stroke"} & set(each.attrib) and each.tag != f"{SVG}svg" and not name.endswith("features.svg")
    ]
    assert colored == []


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


# Texts that leave the picture or run into each other, and those too near the colour of what is under them.
MISPLACED = """() => {
  const svg = document.querySelector("svg"), whole = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(each => [each, each.getBoundingClientRect()]);
  const cut = texts.filter(([_, box]) => box.left < whole.left + 4 || box.right > whole.right - 4
    || box.top < whole.top || box.bottom > whole.bottom);
  const common = (a, b, low, high) => Math.min(a[high], b[high]) - Math.max(a[low], b[low]);
  const meet = texts.filter(([_, a], i) => texts.slice(i + 1).some(([_, b]) =>
    common(a, b, "left", "right") > 0 && common(a, b, "top", "bottom") > 4));
  return [...cut, ...meet].map(([each]) => each.textContent);
}"""
FAINT = """() => {
  const light = color => color.match(/\\d+/g).slice(0, 3).map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const fill = each => light(getComputedStyle(each).fill), ground = document.querySelector(".ground");
  return [...document.querySelectorAll("text")].filter(each => {
    const under = each.matches(".c") ? each.previousElementSibling : ground;
    const [a, b] = [fill(each), fill(under)];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5;
  }).map(each => each.textContent);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", draw.PICTURES)
def test_texts_can_be_read(browser, name, dark):
    with opened(browser, (ROOT / name).as_uri(), PHONE, dark) as page:
        assert page.evaluate(MISPLACED) == []
        assert page.evaluate(FAINT) == []
        ground = page.evaluate("() => getComputedStyle(document.querySelector('.ground')).fill")
        assert (ground == "rgb(255, 255, 255)") is not dark


def test_a_step_has_the_phases_that_runs_are_timed_by():
    shown = {re.sub(r"[^a-z ].*", "", re.sub(r"^\d ", "", text)) for text in texts("docs/how/step.svg")}
    assert set(PHASE_COLORS) | set(PROMPT_PHASE_COLORS) <= shown


def test_the_page_of_a_step_has_the_numbers_of_its_picture():
    page = (ROOT / "docs" / "how" / "index.md").read_text()
    numbered = re.findall(r"^\| (\d \w+) \|", page, re.MULTILINE)
    assert numbered == [text.partition(":")[0] for text in texts("docs/how/step.svg") if re.match(r"\d ", text)]


def test_the_seconds_of_the_cost_are_those_of_the_file():
    seconds, shown = draw.load_cost()["seconds"], texts("benchmarks/cost.svg")
    for side, name in draw.SIDES.items():
        assert f"{name}: {draw.tell_range(seconds[side]['step'])} s" in shown
    for phase, name in draw.PHASES.items():
        row = shown.index(name)
        assert shown[row + 1 : row + 3] == [draw.tell_range(seconds[side][phase]) for side in ("ours", "trl")]


def test_bars_of_the_cost_are_as_long_as_the_seconds():
    """Phase by phase, and within a twentieth as long together as the step that was measured as a whole."""
    seconds = draw.load_cost()["seconds"]
    axis = {each.text: float(each.get("x")) for each in read("benchmarks/cost.svg").iter(f"{SVG}text")}
    second = (axis["40"] - axis["0"]) / 40
    bars = [each for each in read("benchmarks/cost.svg").iter(f"{SVG}rect") if each.get("height") == "28"]
    assert [each.get("class") for each in bars] == [*draw.PHASES, *draw.PHASES]
    widths = [float(each.get("width")) / second for each in bars]
    middles = [sum(seconds[side][phase]) / 2 for side in draw.SIDES for phase in draw.PHASES]
    assert widths == pytest.approx(middles, abs=0.01)
    steps = [sum(seconds[side]["step"]) / 2 for side in draw.SIDES]
    assert [sum(widths[:3]), sum(widths[3:])] == pytest.approx(steps, rel=0.05)


def test_the_map_has_the_counts_of_the_runs_in_their_order():
    counts = [int(text) for text in texts("studies/tiny/features.svg") if text.isdigit()]
    runs = [run["features"] for seeds in draw.load_features().values() for run in seeds.values()]
    assert len(runs) == 15
    assert counts[:120] == [count for run in runs for count in run]
    assert counts[120:] == [20, 40, 60, 80, 100, 120, 140, 150]


def test_the_agent_with_the_rows_of_a_pair_writes_a_quarter_of_the_programs():
    page = (ROOT / "recipes" / "tiny" / "README.md").read_text()
    rows = {name: int(re.search(rf"^\| `{name}`[^|]*\| (\d+) \|", page, re.MULTILINE)[1]) for name in draw.RACERS}
    assert [*rows.values()] == [416, 416 // 4, 416]
    assert "The agent in the middle writes a quarter of the programs." in texts("studies/tiny/features.svg")


def test_fewer_features_are_redder():
    cells = [each.get("fill") for each in read("studies/tiny/features.svg").iter(f"{SVG}rect") if each.get("fill")]
    runs = [run["features"] for seeds in draw.load_features().values() for run in seeds.values()]
    counts = [count for run in runs for count in run]
    blue = [int(color[5:], 16) - int(color[1:3], 16) for color in cells]
    ordered = [less for _, less in sorted(zip(counts, blue, strict=True))]
    assert ordered == sorted(ordered)
    assert ordered[0] < 0 < ordered[-1]
