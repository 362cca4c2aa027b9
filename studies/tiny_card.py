"""The model card of the tiny base: what it is, how it was made, its gate line by line. Used by `tiny_scores.py`."""

from __future__ import annotations

from statistics import fmean


KINDS = ("code_o", "code_i", "code_f")
WORKED_KINDS = ("code_o", "code_i")

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
  level is the number of operations: 1 to 4 in training; levels 5 and 6 have six and eight and were never trained.
* **Two ways to answer** code_o and code_i under one and the same prompt: mostly directly, seldom *worked*, that is with
  one executed statement a line in `<think>...</think>` first, the values put in: `t = 'hqq'.replace('z', 'h') = 'hqq'`.
  code_o is worked forwards, code_i backwards from the output (`d + 3 = -8: d = -11`). Worked answers are right far more
  often, so this is what reinforcement learning can find here. code_f is answered directly: constants tried on two
  visible pairs, with a second guess after a wrong one, were no better halfway through the training (.44, .18, .24 at
  levels 2 to 4 against .38, .25, .19), and neither was guessing and checking for code_i (.24, .12, .17 against .76, .59,
  .39 by working back), so that both were dropped. These are small samples: 20 programs a level, 4 answers each.
* **Tokenizer**: byte-level BPE, 512 entries; fences and first lines are single tokens; ChatML; end of turn
  `<|im_end|>`, padding `<|endoftext|>`.
* **Held out**: one pair of successive operations in sixteen, and one program in sixteen by a hash of its text. No
  training document has either. Levels 2 and up are measured on programs with such a pair, so that held out means more
  than other constants; level 1 on such texts; and proposals on the model's own, with the package's task kinds and
  sandbox.
"""

COLUMNS = ("pass@1", "any of 8", "no spread", "none right", "worked share", "worked", "direct")
GATE_LEVELS = (3, 4)  # where worked answers must be better than direct ones
LEAST_GAIN, LEAST_GAIN_CODE_O = 0.08, 0.12


def gate(figures: dict, gains: dict[str, dict[str, float]]) -> list[tuple[str, str, float, bool]]:
    """The lines of the gate as (what, wanted, measured, met); `gains` are those of `tiny_headroom.py` by seed."""
    own, lines = figures["propose"], []

    def line(what: str, wanted: str, measured: float, met: bool) -> None:
        lines.append((what, wanted, measured, met))

    for kind in WORKED_KINDS:
        line(f"valid proposals, {kind}", ">= 0.95", own[kind]["valid"], own[kind]["valid"] >= 0.95)
    for kind in WORKED_KINDS:
        for level in GATE_LEVELS:
            at = figures["solve"][f"{kind} {level}"]
            room, share = at["worked"] - at["direct"], at["worked share"]
            line(f"worked above direct, {kind} level {level}", ">= 0.20", room, room >= 0.20)
            line(f"worked share, {kind} level {level}", "0.10 to 0.25", share, 0.10 <= share <= 0.25)
    room = fmean(own[kind]["any of 8"] - own[kind]["pass@1"] for kind in WORKED_KINDS)
    line("any of 8 above pass@1, own proposals", ">= 0.25", room, room >= 0.25)
    flat = fmean(own[kind]["no spread"] for kind in WORKED_KINDS)
    line("groups of 8 without spread, own proposals", "<= 0.45", flat, flat <= 0.45)
    for seed, gain in gains.items():
        all_kinds, code_o = gain["solve_rate"], gain["code_o/solve_rate"]
        line(f"60 steps of 2T+2S, seed {seed}: held-out gain", f">= {LEAST_GAIN}", all_kinds, all_kinds >= LEAST_GAIN)
        wanted = f">= {LEAST_GAIN_CODE_O}"
        line(f"60 steps of 2T+2S, seed {seed}: gain, code_o", wanted, code_o, code_o >= LEAST_GAIN_CODE_O)
    return lines


def gains_of(found: dict) -> dict[str, float]:
    """How far the students' mean at the end of a run lies above the base, by measure."""
    return {measure: found["students"][-1][measure] - base for measure, base in found["base"].items()}


def table(header: tuple[str, ...], rows: list[tuple]) -> str:
    cells = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row) + " |" for row in cells
    )


def model_card(figures: dict, tasks: int, made: str, headroom: dict[str, dict] | None = None) -> str:
    """The text of `README.md`; `made` says how the weights came about, `headroom` is what `tiny_headroom.py` found."""
    headroom, own_f = headroom or {}, figures["propose"]["code_f"]
    gains = {seed: gains_of(found) for seed, found in headroom.items()}
    gate_rows = [
        (what, wanted, measured, "yes" if met else "**no**") for what, wanted, measured, met in gate(figures, gains)
    ]
    headroom_rows = [
        (seed, kind or "all", found["base"][key], found["students"][-1][key], gains[seed][key])
        for seed, found in headroom.items()
        for kind in ("", *KINDS)
        for key in (f"{kind}/solve_rate".lstrip("/"),)
    ]
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
        "## The gate\n",
        table(("what", "wanted", "measured", "met"), gate_rows),
        "\nThe gate is about the kinds that are worked. code_f, which has no headroom that we found, stands in the tables "
        f"below:\n{own_f['valid']:.2f} of its proposals are valid, any of 8 is {own_f['any of 8'] - own_f['pass@1']:.2f} "
        f"above pass@1, and {own_f['no spread']:.2f} of its groups are without spread.",
        "\n## Headroom under self-play\n\n60 steps of `recipes/tiny/config_2t2s.yaml`, then the 312 tasks of "
        "`eval_tasks.jsonl` (levels 2 to 5, 26 per kind and\nlevel, held-out combinations), 2 attempts of each of "
        "the 2 "
        "students and of the base:\n`python studies/tiny_headroom.py --seeds 0 1 2`.\n",
        table(("seed", "kind", "base", "students", "gain"), headroom_rows),
        f"\n## Proposing and solving its own proposals\n\n{2 * tasks} proposals per kind with two held-out references "
        f"(code_f: one);\nup to {tasks} of the valid ones solved 8 times at temperature 1.\n",
        table(("kind", "valid", "distinct", *COLUMNS, "rejects"), propose_rows),
        f"\n## Solving held-out programs by level\n\n{tasks} tasks per kind and level; levels 5 and 6 were never trained.\n",
        table(("kind", "level", *COLUMNS), solve_rows),
        "\n`no spread`: share of groups of 8 that are all right or all wrong; `none right`: all wrong; `worked`, "
        "`direct`: how\noften an answer is right that has to be so, its first token given. Made by\n"
        f"`python studies/tiny_scores.py --model trl_populora/assets/tiny --tasks {tasks}`, then `--card --headroom FILE`.\n",
    )
    return "\n".join(sections)
