"""The model card of the tiny base: what it is, how it was made, its gate line by line. Used by `tiny_scores.py`."""

from __future__ import annotations


KINDS = ("code_o", "code_i", "code_f")

HEADER = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [trl-populora, self-play, code, from-scratch]
---

# tiny: the embedded base of trl_populora

A causal language model of 2.8M parameters (Qwen3: 6 layers of width 192, 3 heads of 64, tied embeddings, 1024
positions, fp16) that writes and solves small Python programs in the compact formats of `trl_populora.tasks`. It makes
quick starts, tests and CPU experiments of population self-play possible offline. It knows nothing else: no English, no
Python beyond its grammar. Trained from scratch on programs that its recipe wrote and executed; no downloaded data.

* **Programs**: chains of operations on digits, lists of digits and strings over `hkqxz`. Integers: `+`, `-`, `* 2`,
  `max`, `min`, `if`. Lists: reverse, sort, drop the first, append, add to each, keep the large ones, length, sum,
  first, largest. Strings: reverse, append, prepend, upper case, repeat, drop the first, replace, length, count. The
  level is the number of operations: 1 to 4 in training; level 5 has six and was never trained.
* **Tokenizer**: byte-level BPE, 512 entries; fences and first lines are single tokens; ChatML; end of turn
  `<|im_end|>`, padding `<|endoftext|>`.
* **Held out**: one program in sixteen, by a hash of its text. Everything below is measured on those, and on the
  model's own proposals, with the package's task kinds and sandbox.
"""

COLUMNS = ("pass@1", "any of 8", "greedy", "no spread", "none right")


def gate(figures: dict) -> list[tuple[str, str, float, bool]]:
    """The lines of the gate as (what, wanted, measured, met); solving is measured on the model's own proposals."""
    own = figures["propose"]
    lines: list[tuple[str, str, float, bool]] = []
    for kind in KINDS:
        lines.append((f"valid proposals, {kind}", ">= 0.9", own[kind]["valid"], own[kind]["valid"] >= 0.9))
    lines.append(("pass@1, code_o", "0.4 to 0.6", own["code_o"]["pass@1"], 0.4 <= own["code_o"]["pass@1"] <= 0.6))
    for kind, least in (("code_i", 0.3), ("code_f", 0.15)):
        lines.append((f"pass@1, {kind}", f">= {least}", own[kind]["pass@1"], own[kind]["pass@1"] >= least))
    for kind in KINDS:
        room = own[kind]["any of 8"] - own[kind]["pass@1"]
        lines.append((f"any of 8 above pass@1, {kind}", ">= 0.25", room, room >= 0.25))
    for kind in KINDS:
        edge = own[kind]["greedy"] - own[kind]["pass@1"]
        lines.append((f"greedy above pass@1, {kind}", ">= 0.1", edge, edge >= 0.1))
    for kind in KINDS:
        flat = own[kind]["no spread"]
        lines.append((f"groups of 8 without spread, {kind}", "< 0.4", flat, flat < 0.4))
    return lines


def table(header: tuple[str, ...], rows: list[tuple]) -> str:
    cells = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row) + " |" for row in cells
    )


def model_card(figures: dict, tasks: int, made: str) -> str:
    """The text of `README.md`; `made` says how the weights came about (command, minutes, tokens)."""
    gate_rows = [(what, wanted, measured, "yes" if met else "**no**") for what, wanted, measured, met in gate(figures)]
    propose_rows = [
        (
            kind,
            *(figures["propose"][kind][key] for key in ("valid", "distinct", *COLUMNS)),
            ", ".join(f"{reason} {count}" for reason, count in figures["propose"][kind]["rejects"].items()) or "none",
        )
        for kind in KINDS
    ]
    solve_rows = [(*name.split(), *(values[key] for key in COLUMNS)) for name, values in figures["solve"].items()]
    sections = (
        HEADER,
        f"## How it was made\n\n{made}\n",
        "## The gate\n\nSolving is measured on the model's own valid proposals: that is where self-play starts.\n",
        table(("what", "wanted", "measured", "met"), gate_rows),
        f"\n## Proposing and solving its own proposals\n\n{2 * tasks} proposals per kind with two held-out references "
        f"(code_f: one);\nup to {tasks} of the valid ones solved 8 times at temperature 1 and once greedily.\n",
        table(("kind", "valid", "distinct", *COLUMNS, "rejects"), propose_rows),
        f"\n## Solving held-out programs by level\n\n{tasks} tasks per kind and level; level 5 was never trained.\n",
        table(("kind", "level", *COLUMNS), solve_rows),
        "\n`no spread`: share of groups of 8 that are all right or all wrong; `none right`: all wrong. Made by\n"
        f"`python recipes/tiny_scores.py --model trl_populora/assets/tiny --tasks {tasks} --card`.\n",
    )
    return "\n".join(sections)
