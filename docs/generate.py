"""Writes the pages that follow from the code: `python docs/generate.py`. `tests/test_docs.py` holds them to it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from trl import GRPOConfig

from trl_populora.config import PopuLoRAConfig
from trl_populora.hub.card import write_card
from trl_populora.sandbox.soft import MODULES as IMPORTABLE
from trl_populora.sandbox.soft import SCRAMBLING


ROOT = Path(__file__).resolve().parent
# Heading in the table: the field of `PopuLoRAConfig` that its group starts with.
GROUPS = {
    "Population": "teachers",
    "Tasks": "task_kinds",
    "Matchmaking": "matchmaking",
    "Rewards and baselines": "teacher_reward",
    "Sandbox": "sandbox_workers",
    "Evolution": "evolve_every",
    "Evaluation": "eval_attempts",
    "Generation": "generation_tokens",
    "Records": "save_rollouts",
}

SETTINGS = """\
# Settings of a population

Every field of `PopuLoRAConfig` that TRL's `GRPOConfig` lacks or has another default for, subject by subject. A
recipe in YAML, the command line (`--teachers 2`) and a script (`PopuLoRAConfig(teachers=2)`) know the same names.
*paper* is PopuLoRA itself (arXiv 2605.16727), *second hand* what summaries of it say, *AZR* Absolute Zero Reasoner
(arXiv 2505.03335); [statement by statement](../paper.md). Inherited options are in [another table](../options.md),
LoRA and the base in TRL's `ModelConfig` (`--lora_r 32`).

`docs/generate.py` writes this page.
"""
MODULES = """\
# What a program may import

Programs that teachers write, or that you give as tasks, may import these modules of Python's library and no others.
The line is drawn at what computes: nobody works out a digest or a seeded draw by thinking, so {scrambling}
stay out, as do files, processes and the network. Any other import is rejected as `policy`.

{modules}

Parts of these packages count as they do. `open`, `input` and `breakpoint` are refused, and clocks, `hash` and `id` as
numbers are `nondeterministic` ([what becomes of a proposal](../how/verify.md)). Packages that are not part of Python
are not there.

`docs/generate.py` writes this page.
"""

CARD = """\
# A population's card

The card that [`populora push`](../guides/share.md#push) writes for a population, here for that of a quick start (seed
0, on two CPU cores, 2026-11-28). The Hub reads the YAML, for its search and its tables of scores. A pushed card also
has pictures, below the scores; here they are left out.

`docs/generate.py` writes this page with the code that writes every card, from that run's
[`population.json`](../quickstart_run/population.json) and [`lineage.jsonl`](../quickstart_run/lineage.jsonl).

```yaml
{metadata}```
{body}"""


def write_default(setting: Field) -> str:
    value = setting.default if setting.default is not MISSING else setting.default_factory()
    return "" if value is None else f"`{value}`"


def settings_page() -> str:
    inherited = {each.name: each for each in fields(GRPOConfig)}
    headings = {start: heading for heading, start in GROUPS.items()}
    lines, changed = [SETTINGS], []
    for setting in fields(PopuLoRAConfig):
        if setting.name in inherited:
            if write_default(setting) != write_default(inherited[setting.name]):
                changed.append(setting)
            continue
        if setting.name in headings:
            lines.append(f"\n## {headings[setting.name]}\n\n| setting | type | default | |\n|---|---|---|---|")
        text = re.sub(r"`docs/(\S+?)\.md`", r"[more](../\1.md)", setting.metadata["help"].replace("|", "\\|"))
        type_ = PopuLoRAConfig.__annotations__[setting.name].removesuffix(" | None").replace(" | ", "` or `")
        cells = f"`{setting.name}`", f"`{type_}`", write_default(setting), text
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("\n## Inherited, with another default\n\n| setting | TRL's | here | |\n|---|---|---|---|")
    for setting in changed:
        theirs = write_default(inherited[setting.name])
        lines.append(
            f"| `{setting.name}` | {theirs} | {write_default(setting)} | {setting.metadata.get('help', '')} |"
        )
    return "\n".join(lines) + "\n"


def modules_page() -> str:
    scrambling = ", ".join(f"`{name}`" for name in SCRAMBLING)
    return MODULES.format(scrambling=scrambling, modules="\n".join(f"* `{name}`" for name in IMPORTABLE))


def card_page() -> str:
    with TemporaryDirectory() as place:
        shutil.copytree(ROOT / "quickstart_run", place, dirs_exist_ok=True)
        write_card(Path(place), "me/quickstart")
        _, metadata, body = Path(place, "README.md").read_text(encoding="utf-8").split("---\n", 2)
    # The card's headings stand one level lower: a page has one title.
    return CARD.format(metadata=metadata, body=re.sub("^#", "##", body, flags=re.MULTILINE))


PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/modules.md": modules_page,
    "reference/card.md": card_page,
}


if __name__ == "__main__":
    for name, write in PAGES.items():
        (ROOT / name).write_text(write(), encoding="utf-8")
