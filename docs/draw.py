"""Draws the pictures that follow from data: `python docs/draw.py`. `tests/test_pictures.py` holds the files to it.

Each is one SVG file for a light and a dark page: a browser chooses by `prefers-color-scheme`, also in an `<img>`. The
ground is part of the picture, so that it can be read where the page and the browser disagree. A picture is 420 units
wide. A phone then shows letters of 10 pixels. The file says its width, because GitHub would otherwise draw it as wide
as the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from html import escape
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
WIDTH = 420
# Classes: t teachers, s students, w who decides what is right, n everything else; g small letters, c cells of a map.
STYLE = """\
  <style>
    svg { fill: #222 } .ground, .t, .s, .w, .n { fill: #fff } .t, .s, .w { stroke-width: 2.5 } .n { stroke-width: 1.5 }
    .t { stroke: #d55e00 } .s { stroke: #0072b2 } .w { stroke: #009e73 } .n { stroke: #555 } .l { stroke: #ccc }
    .a { fill: none; stroke: #555; stroke-width: 2; marker-end: url(#tip) } .tip { fill: #555 } .dot { fill: #d55e00 }
    .g { fill: #555; font-size: 13px } .h { stroke: #fff; stroke-width: 5; paint-order: stroke } .c { fill: #111 }
    .m { text-anchor: middle } .e { text-anchor: end } .d { stroke-dasharray: 5 4 }
    .curve { fill: none; stroke-width: 3 }
    .generate { fill: #0072b2 } .publish { fill: #e69f00 } .update { fill: #009e73 }
    @media (prefers-color-scheme: dark) {
      svg { fill: #e8eaed } .ground, .t, .s, .w, .n { fill: #16191f }
      .t { stroke: #f08a4b } .s { stroke: #56b4e9 } .w { stroke: #2fc79a } .n { stroke: #a5abb5 } .g { fill: #b4bac4 }
      .h { stroke: #16191f } .a { stroke: #a5abb5 } .tip { fill: #a5abb5 } .l { stroke: #3c424c }
      .curve { fill: none } .dot { fill: #f08a4b } .generate { fill: #56b4e9 } .update { fill: #2fc79a }
    }
  </style>
"""
TIP = """\
  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">\
<path d="M0 0 8 4 0 8z" class="tip"/></marker>
"""


def make_picture(height: int, title: str, parts: Sequence[str]) -> str:
    """Puts the elements of a picture on a ground. `title` is what a screen reader says."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="15">\n  <title>{escape(title)}</title>\n'
    )
    ground = f'  <rect width="{WIDTH}" height="{height}" rx="6" class="ground"/>\n'
    return head + STYLE + TIP + ground + "".join(f"  {part}\n" for part in parts) + "</svg>\n"


def write(x: float, y: float, text: str, classes: str = "", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" class="{classes}"{weight}>{escape(text)}</text>'


def measure_height(*lines: str) -> int:
    """Tells how high a box with these lines is."""
    return 16 + 20 * len(lines)


def draw_box(x: float, y: float, width: float, classes: str, name: str, *lines: str) -> str:
    """Draws a box with a name, and in small letters the lines below it."""
    height = measure_height(name, *lines)
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="8" class="{classes}"/>'
    middle = x + width / 2
    texts = [write(middle, y + 44 + 18 * index, line, "m g") for index, line in enumerate(lines)]
    return box + write(middle, y + 24, name, "m") + "".join(texts)


def draw_arrow(*points: float) -> str:
    return f'<path d="M{" ".join(f"{point:g}" for point in points)}" class="a"/>'


# A step. The names are those of its phases in `times.jsonl`.
LEFT, RIGHT, COLUMN, WHOLE = 24, 216, 180, 372  # where the columns begin, and how wide they and both together are
TOP, GAP = 42, 22  # where the first boxes begin, and what is between two
SELF_PLAY = (
    ("n", "1 match", "one student per teacher"),
    ("t", "2 propose", "teachers write tasks"),
    ("w", "3 verify", "the sandbox runs them"),
    ("s", "4 solve", "the matched student", "tries each task G times"),
    ("w", "reward", "the sandbox decides", "what is right"),
)
DATASET = (
    ("n", "prompts", "from your dataset"),
    ("s", "generate", "every member answers", "each prompt G times"),
    ("w", "reward", "your functions say", "what an answer is worth"),
)
BOTH = (
    ("n", "5 update: one joint step", "each adapter learns from its own rows alone"),
    ("n d", "evolve, now and then", "children take the seats of the lowest rated"),
    ("n", "publish", "vLLM loads the adapters that have changed"),
)


def draw_step() -> str:
    """Draws a step of self-play beside one of a dataset run, and below them what both have."""
    parts = [
        write(LEFT + COLUMN / 2, 28, "Self-play", "m", bold=True),
        write(RIGHT + COLUMN / 2, 28, "On your dataset", "m", bold=True),
    ]
    tops = [TOP]
    for _, *lines in (*SELF_PLAY, *BOTH):
        tops.append(tops[-1] + measure_height(*lines) + GAP)
    *own, first, second, third, end = tops
    # A phase of the dataset run lies beside the one of self-play whose place it takes.
    columns = (
        (LEFT, COLUMN, SELF_PLAY, [*own, first]),
        (RIGHT, COLUMN, DATASET, [own[0], *own[-2:], first]),
        (LEFT, WHOLE, BOTH, [first, second, third, end]),
    )
    for x, width, phases, places in columns:
        middle = x + width / 2
        for (classes, *lines), y, below in zip(phases, places[:-1], places[1:], strict=True):
            parts.append(draw_box(x, y, width, classes, *lines))
            if below < end:
                parts.append(draw_arrow(middle, y + measure_height(*lines) + 2, middle, below - 3))
    # After the last phase the next step begins above.
    for edge, side, outside in ((LEFT, -1, 10), (LEFT + WHOLE, 1, WIDTH - 10)):
        start, goal = third + 28, TOP + 28
        parts.append(draw_arrow(edge + 2 * side, start, outside, start, outside, goal, edge + 3 * side, goal))
    parts.append(write(WIDTH / 2, end + 2, "all adapters lie on one frozen base", "m g"))
    return make_picture(end + 16, "A step of self-play and a step of a dataset run, phase by phase", parts)


# What a step costs, from `benchmarks/figures.json`.
PHASES = {"generate": "generate", "publish": "publish", "update": "update and rest"}
SIDES = {"ours": "8 adapters here", "trl": "1 adapter, stock TRL"}


def load_cost() -> dict:
    return json.loads((ROOT / "benchmarks" / "figures.json").read_text())["step_at_7b"]


def tell_range(ends: Sequence[float]) -> str:
    """Says a range as `14.8 to 15.0`, or as one number where its ends are equal."""
    return " to ".join(dict.fromkeys(f"{end:.1f}" for end in ends))


def draw_cost() -> str:
    """Draws the seconds of a step by phase, eight adapters here above one of stock TRL, and a table of them."""
    cost = load_cost()
    seconds = cost["seconds"]
    left, unit = 20, 8.4  # of a second
    parts = [write(WIDTH / 2, 28, "Seconds of a step at the shape of a 7B", "m", bold=True)]
    for tick in range(0, 50, 10):
        x = left + unit * tick
        parts += [f'<path d="M{x:g} 44V164" class="l"/>', write(x, 180, f"{tick}", "m g" if tick else "g")]
    for (side, name), y in zip(SIDES.items(), (44, 106), strict=True):
        parts.append(write(left + 4, y + 18, f"{name}: {tell_range(seconds[side]['step'])} s", "h"))
        start = float(left)
        for phase in PHASES:
            width = unit * sum(seconds[side][phase]) / 2
            parts.append(f'<rect x="{start:.2f}" y="{y + 26}" width="{width:.2f}" height="28" class="{phase}"/>')
            start += width
    parts += [write(270, 210, "8 here", "e g"), write(400, 210, "1 in TRL", "e g")]
    for index, (phase, name) in enumerate(PHASES.items()):
        y = 234 + 24 * index
        parts.append(f'<rect x="20" y="{y - 12}" width="14" height="14" rx="2" class="{phase}"/>{write(42, y, name)}')
        parts += [write(x, y, tell_range(seconds[side][phase]), "e") for x, side in ((270, "ours"), (400, "trl"))]
    day = date.fromisoformat(cost["date"])
    half, many = f"{100 * cost['live_rows']:.0f} %", cost["attempts"]
    notes = (
        f"One H200, {day.day} {day:%B %Y}, random weights in bf16.",
        f"{cost['rows']} rows a step, completions of {cost['completion']} tokens.",
        f"{half} of the rows had an advantage, {many} attempts shared",
        "a prompt: both favour ours. Other mixes: not measured.",
        "Our adapters were published through host memory.",
        "Bars show the middle of each range.",
    )
    parts += [write(20, 320 + 19 * index, note, "g") for index, note in enumerate(notes)]
    return make_picture(432, "Seconds of a step by phase: eight adapters here, and one adapter in stock TRL", parts)


# The race's map of features, from `studies/tiny/screen.json`.
RACERS = {
    "race_4t4s": "4 teachers, 4 students",
    "single_agent_replay": "one agent, rows of a pair",
    "single_agent_all_rows": "one agent, all rows",
}
BLOCK = 20  # steps
FEW, MIDDLE, MANY = (0xE6, 0x7A, 0x2E), (0xF4, 0xEF, 0xE6), (0x8E, 0xC7, 0xEE)


def load_features() -> dict[str, dict[str, dict]]:
    kept = json.loads((ROOT / "studies" / "tiny" / "screen.json").read_text())
    return {name: kept[name] for name in RACERS}


def choose_color(share: float) -> str:
    """Chooses a colour between orange, for 0, and blue, for 1. Black letters can be read on each."""
    start, end, part = (FEW, MIDDLE, 2 * share) if share < 0.5 else (MIDDLE, MANY, 2 * share - 1)
    mixed = (round(a + (b - a) * part) for a, b in zip(start, end, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def draw_features() -> str:
    """Draws how many features the valid programs of each 20 steps used: a table of seeds and steps per candidate."""
    runs = load_features()
    counts = [count for seeds in runs.values() for run in seeds.values() for count in run["features"]]
    low, high = min(counts), max(counts)
    steps = {run["steps"] for seeds in runs.values() for run in seeds.values()}.pop()
    ends = [*range(BLOCK, steps, BLOCK), steps]
    left, cell, line = 60, 43, 24
    parts = [write(WIDTH / 2, 28, "Different features in the valid programs", "m", bold=True)]
    y = 44
    for name, seeds in runs.items():
        parts.append(write(16, y + 16, f"{name}: {RACERS[name]}"))
        y += 26
        for seed, run in seeds.items():
            parts.append(write(left - 8, y + 17, f"seed {seed}", "e g"))
            for index, count in enumerate(run["features"]):
                x, color = left + cell * index, choose_color((count - low) / (high - low))
                parts.append(f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{line - 2}" rx="2" fill="{color}"/>')
                parts.append(write(x + cell / 2 - 1, y + 16, str(count), "m c"))
            y += line
        y += 12
    parts += [write(left + cell * (index + 1) - 2, y + 6, str(end), "e g") for index, end in enumerate(ends)]
    parts.append(write(left - 8, y + 6, "step", "e g"))
    notes = (
        f"A column: the {BLOCK} steps up to its number; the last: {ends[-1] - ends[-2]}.",
        "The agent in the middle writes a quarter of the programs.",
    )
    parts += [write(16, y + 32 + 19 * index, note, "g") for index, note in enumerate(notes)]
    return make_picture(
        y + 64, "Different features in the valid programs, by seed and step, for three candidates", parts
    )


def restyle(name: str) -> str:
    """Gives a picture that is drawn by hand the colours of the others."""
    return re.sub(r"  <style>.*?</style>\n", STYLE, (ROOT / name).read_text(), flags=re.DOTALL)


BY_HAND = tuple(f"docs/how/{phase}.svg" for phase in ("match", "propose", "verify", "solve", "update", "evolve"))
PICTURES: dict[str, Callable[[], str]] = {
    "docs/how/step.svg": draw_step,
    "benchmarks/cost.svg": draw_cost,
    "studies/tiny/features.svg": draw_features,
    **{name: partial(restyle, name) for name in BY_HAND},
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / name).write_text(draw(), encoding="utf-8")
