"""The model card of a population, written from the files of its run (so that a finished run can be pushed later)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from trl_populora.assets import TINY
from trl_populora.files import write_whole
from trl_populora.hub.eval_results import model_index, read_figures, results_table, write_results
from trl_populora.population.members import read_population
from trl_populora.report.members import HEADER, WORDS, list_members
from trl_populora.report.plots import PLOTS
from trl_populora.runs.lines import read_lines


TAGS = ("trl", "populora", "lora", "peft", "reinforcement-learning")

CARD = """---
{metadata}
---

# {name}

A population of {teachers} teachers and {students} students, LoRA adapters of rank {rank} on one frozen base
({base}), after {step} steps of [PopuLoRA](https://arxiv.org/abs/2605.16727) with
trl-populora on [TRL](https://github.com/huggingface/trl). Teachers write tasks
of the kinds {kinds}, students solve them, and programs decide which answers are right.

The adapter at the root of this repository is **{best}**, the student with the highest {best_by}.

## Members

{ratings}

`held out` is the solve rate on held-out tasks{held_out_base}; `rating` is TrueSkill's mu ± sigma from
the matches of the run; `born` is the step.
{evaluation}{plots}
## Load it

The best student:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM
{base_import}
base = AutoModelForCausalLM.from_pretrained({base_code})
model = PeftModel.from_pretrained(base, "{repo}")
```

Any member: `PeftModel.from_pretrained(base, "{repo}", subfolder="{member}")`.
{quantization}
Continue the population, also with other numbers of teachers and students:

```python
from peft import LoraConfig
from trl_populora import PopuLoRAConfig, PopuLoRATrainer

args = PopuLoRAConfig("runs/more", teachers=4, students=4, warm_start="{repo}")
PopuLoRATrainer("{base}", args=args, peft_config={lora}).train()
```

All members in one vLLM server{folding}:

```bash
hf download {repo} --local-dir population
vllm serve {base_shell} --enable-lora --max-loras {members} --max-lora-rank {vllm_rank} \\
    --lora-modules {modules}
```

## Lineage

{lineage}

## Training

```json
{settings}
```

## Citation

```bibtex
@misc{{populora,
    title        = {{PopuLoRA}},
    eprint       = {{2605.16727}},
    archivePrefix = {{arXiv}},
    year         = {{2026}}
}}
```
"""

# vLLM knows these ranks only; a smaller adapter runs under the next one.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
FOLDING = (
    ". It scales every module by `r` and `lora_alpha` alone, and these members have patterns of both: "
    "`trl_populora.adapters.folding.fold_patterns(directory)` first turns a member into an equal one without"
)
_LINEAGE_ROWS = 40
PICTURES = (
    "held_out",
    "ratings_teachers",
    "ratings_students",
    "solve_rate",
    "curriculum",
    "coverage",
)  # drawn when pushing


def write_card(root: Path, name: str, tags: Sequence[str] | str | None = None, details: dict | None = None) -> None:
    """
    Writes `README.md` into the directory of a saved population, and `.eval_results/` where benchmarks were measured.

    Args:
        root: Holds `population.json`, and `lineage.jsonl`, `evaluation.json` and `plots/*.png` where there are any.
        name: Name of the repository, best with its user; the title.
        tags: Added to the package's own.
        details: Further metadata, for example `license` and `language`.
    """
    population = read_population(root)
    base, members = population["base_model"], population["members"]
    patterns = [population["lora"].get(f"{name}_pattern") or {} for name in ("rank", "alpha")]
    largest = max([population["lora"]["r"], *patterns[0].values()])
    published = not os.path.isdir(base) and base != TINY
    repo = name if "/" in name else f"<user>/{name}"
    best, best_by = population["best_student"], population.get("best_student_by", "rating")
    figures = read_figures(root, population, repo)
    write_results(root, figures, best, repo)
    metadata = ModelCardData(
        library_name="peft",
        tags=sorted({*TAGS, *([tags] if isinstance(tags, str) else tags or ())}),
        **({"base_model": base, "base_model_relation": "adapter"} if published else {}),
        pipeline_tag="text-generation",
        model_name=name.split("/")[-1] if figures else None,
        eval_results=model_index(figures) or None,
        ignore_metadata_errors=True,
        **{key: value for key, value in (details or {}).items() if key in ("license", "language", "datasets")},
    )
    text = CARD.format(
        metadata=metadata.to_yaml(),
        name=name.split("/")[-1],
        teachers=sum(member["role"] == "teacher" for member in members),
        students=sum(member["role"] == "student" for member in members),
        rank=population["lora"]["r"],
        base=base,
        **_base_code(base, population.get("settings", {}).get("base_revision", "main")),
        step=population["step"],
        kinds=", ".join(population["task_kinds"]),
        best=best,
        best_by=best_by,
        evaluation=results_table(figures, best, best_by),
        ratings=_ratings(members),
        held_out_base=_held_out_base(population),
        plots=_plots(root),
        repo=repo,
        lora=_lora(population["lora"]),
        members=len(members),
        member=members[0]["adapter"],
        quantization=_quantization(population.get("base_quantization")),
        folding=FOLDING if any(patterns) else "",
        vllm_rank=next((rank for rank in VLLM_RANKS if rank >= largest), VLLM_RANKS[-1]),
        modules=" ".join(f"{member['name']}=population/{member['adapter']}" for member in members),
        lineage=_lineage(root / "lineage.jsonl"),
        settings=json.dumps(population.get("settings", {}), indent=2),
    )
    with write_whole(root / "README.md") as unfinished:
        unfinished.write_text(text)


def _quantization(config: dict | None) -> str:
    if config is None:
        return ""
    bits = 4 if config.get("load_in_4bit") else 8
    return (
        f"The base was held in {bits} bits while they were trained; load it with `quantization_config="
        f"BitsAndBytesConfig(load_in_{bits}bit=True, ...)`, as `base_quantization` of `population.json` says.\n"
    )


def _base_code(base: str, revision: str) -> dict[str, str]:
    """How Python and a shell name the base; the embedded one lies inside the installed package."""
    if base != TINY:
        if revision == "main":
            return {"base_import": "", "base_code": f'"{base}"', "base_shell": base}
        code = f'"{base}", revision="{revision}"'
        return {"base_import": "", "base_code": code, "base_shell": f"{base} --revision {revision}"}
    line, code = "from trl_populora.assets import tiny_base_path", "tiny_base_path()"
    return {
        "base_import": f"{line}\n",
        "base_code": code,
        "base_shell": f"\"$(python -c '{line}; print({code})')\"",
    }


def _ratings(members: list[dict[str, Any]]) -> str:
    rule = ("---" if column in WORDS else "---:" for column in HEADER)
    rows = [row for rows in list_members(members).values() for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADER, tuple(rule), *rows))


def _held_out_base(population: dict[str, Any]) -> str:
    rate, step = population.get("held_out_base"), population.get("held_out_step")
    earlier = "" if step in (None, population["step"]) else f", measured after step {step}"
    return earlier if rate is None else f" (the base without an adapter: {rate:.3f}){earlier}"


def _plots(root: Path) -> str:
    names = [name for name in PICTURES if (root / "plots" / f"{name}.png").exists()]
    if not names:
        return ""
    titles = {plot.name: plot.title for plot in PLOTS}
    images = [f'<img alt="{titles[name]}" src="plots/{name}.png" width="400">' for name in names]
    return "\n".join(["", "## The run in pictures", "", *images, ""])


def _lora(lora: dict[str, Any]) -> str:
    return f"LoraConfig({', '.join(f'{name}={value!r}' for name, value in lora.items())})"


def _lineage(path: Path) -> str:
    events = read_lines(path)
    if not events:
        return "Nobody has been replaced yet."
    rows = ["| step | child | parents | operator |", "|---:|---|---|---|"]
    for event in events[-_LINEAGE_ROWS:]:
        parents = ", ".join(parent["member"] for parent in event["parents"])
        rows.append(f"| {event['step']} | {event['child']} | {parents} | {event['operator']} |")
    if len(events) > _LINEAGE_ROWS:
        rows.append(f"\nThe last {_LINEAGE_ROWS} of {len(events)} births; all are in `lineage.jsonl`.")
    return "\n".join(rows)
