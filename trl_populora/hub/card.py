"""Writes two cards for the Hub: the model card of a population, and the dataset card of its archive.

population.json, lineage.jsonl, evaluation.json, plots/*.png --write_card--> README.md, .eval_results/
archive.parquet, population.json              --format_archive_card--> text of a dataset's README.md
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CardData, DatasetCardData, ModelCardData, RepoCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from yaml import YAMLError

from trl_populora.assets import TINY
from trl_populora.files import write_whole
from trl_populora.hub.eval_results import (
    drop_our_results,
    format_results,
    make_model_index,
    read_figures,
    write_results,
)
from trl_populora.report.plots import PLOTS
from trl_populora.report.table import WORDS, list_members
from trl_populora.run.read import read_lines, read_population
from trl_populora.tasks.archive import make_schema
from trl_populora.tasks.python.complexity import PROGRAM_MEASURES


if TYPE_CHECKING:
    import pyarrow as pa


logger = logging.getLogger(__name__)

TAGS = ("trl", "trl-populora", "populora", "lora", "peft", "reinforcement-learning")

ROOT_ADAPTER = "The adapter at the root of this repository is"
# The last line of a card. A text that has another digest was edited, and so was one that goes on below this line.
MARK = "<!-- trl-populora wrote this text, and writes it anew unless you change it. Digest: {} -->\n"
_MARKED = re.compile(rf"{re.escape(MARK).replace(re.escape('{}'), '([0-9a-f]+)')}")

CARD = """
# {name}

{story}

{root_adapter} **{best}**, the {role} with the highest {best_by}.

## Members

{ratings}

{columns}
{evaluation}{plots}
## Load it

The best {role}:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM
{base_import}
base = AutoModelForCausalLM.from_pretrained({base_code})
model = PeftModel.from_pretrained(base, "{repo}")
```

Any member: `PeftModel.from_pretrained(base, "{repo}", subfolder="{member}")`.
{quantization}
Continue the population, also with {others}:

```python
from peft import LoraConfig
from trl_populora import PopuLoRAConfig, PopuLoRATrainer

args = PopuLoRAConfig("runs/more", {numbers}, warm_start="{repo}")
PopuLoRATrainer("{base}"{given}, args=args, peft_config={lora}).train()
```

{serving}

{lineage}## Training

```json
{settings}
```

## Citation

{citation}
"""

# The paper, as CITATION.cff has it.
CITATION = """\
```bibtex
@misc{populora,
    title         = {{PopuLoRA: Co-Evolving LLM Populations for Reasoning Self-Play}},
    author        = {Creus Castanyer, Roger and Bradway, Geoffrey and Wolf, Lorenz and Lin, Maxwill and
                     Mavor-Parker, Augustine N. and Sargent, Matthew James},
    eprint        = {2605.16727},
    archivePrefix = {arXiv},
    year          = {2026}
}
```"""

# The parts of the card that differ between a game and a dataset run.
GAME = {
    "story": """\
A population of {teachers} teachers and {students} students, LoRA adapters of rank {rank} on one frozen base
({base}), after {step} steps of [PopuLoRA](https://arxiv.org/abs/2605.16727) with
trl-populora on [TRL](https://github.com/huggingface/trl). Teachers write tasks
of the kinds {kinds}, students solve them, and programs decide which answers are right.""",
    "columns": """\
`held out` is the solve rate on held-out tasks{held_out_base}; `rating` is TrueSkill's mu ± sigma from
the matches of the run; `born` is the optimizer step of birth.""",
    "role": "student",
    "others": "other numbers of teachers and students",
    "numbers": "teachers=4, students=4",
    "given": "",
}
# A game without teachers, in which students attempt given tasks.
CURRICULUM = GAME | {
    "story": """\
{students} students, LoRA adapters of rank {rank} on one frozen base ({base}), after
{step} steps of trl-populora on [TRL](https://github.com/huggingface/trl). They solve given tasks
of the kinds {kinds}, and programs decide which answers are right.""",
    "others": "another number of students",
    "numbers": "teachers=0, students=4",
    "given": ", train_dataset=...",
}
PROMPTS = {
    "story": """\
{members} LoRA adapters of rank {rank} on one frozen base ({base}), trained side by side with
[GRPO](https://arxiv.org/abs/2402.03300) for {step} optimizer steps by trl-populora on
[TRL](https://github.com/huggingface/trl): {stream}{datasets}. Reward functions: {functions}.""",
    "columns": "`reward` is the mean reward of the last answers in training{explained}.",
    "role": "member",
    "others": "another number of members",
    "numbers": "students=4",
    "given": ", reward_funcs=..., train_dataset=...",
}
STREAMS = {"shared": "all members on the same prompts", "own": "each member on prompts of its own"}

# vLLM takes only these values as `--max-lora-rank`. An adapter of another rank runs under the next higher one.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
SERVING = """\
All members in one vLLM server{folding}:

```bash
hf download {repo} --local-dir population
vllm serve {base_shell} --enable-lora --max-loras {members} --max-lora-rank {vllm_rank} \\
    --lora-modules {modules}
```"""
NO_SERVING = """\
vLLM serves adapters up to rank {highest}, and these have {rank}. `populora export --merge` writes a member as a \
whole model, which vLLM serves."""
FOLDING = (
    ". vLLM scales every module by `r` and `lora_alpha` and ignores the patterns that these members have: first call "
    "`trl_populora.lora.convert.fold_patterns(directory)`, which rewrites a member as an equal one without patterns"
)
_LINEAGE_ROWS = 40
# A card shows only these of the report's pictures. They are drawn at each upload.
PICTURES = (
    "member_rewards",
    "evaluations",
    "lengths",
    "ratings_members",
    "held_out",
    "ratings_teachers",
    "ratings_students",
    "solve_rate",
    "curriculum",
    "coverage",
)


def write_card(root: Path, name: str, tags: Sequence[str] | str | None = None, details: dict | None = None) -> None:
    """
    Writes the model card into the directory of a saved population: `README.md`, and `.eval_results/` with scores.

    If there is a card, its metadata stay, unless `details` has other values, and its tags are added. Its text stays,
    too, if somebody else has written or edited it.

    Args:
        root: The directory. It holds `population.json`, and may hold `lineage.jsonl`, `evaluation.json` and
            `plots/*.png`.
        name: Name of the repository, preferably `user/name`. The part after the slash becomes the title.
        tags: Added to the package's tags.
        details: Further metadata. Only `license`, `language` and `datasets` are used.
    """
    population = read_population(root)
    base, members = population["base_model"], population["members"]
    patterns = [population["lora"].get(f"{name}_pattern") or {} for name in ("rank", "alpha")]
    # `rank_pattern` may give some modules a higher rank than `r`, and vLLM needs the highest.
    largest = max([population["lora"]["r"], *patterns[0].values()])
    # On the Hub a card links to the pages of its base and its datasets. The embedded base has no page, and neither has
    # a file or a directory.
    names = [base, *population.get("datasets", ())]
    without_page = [name for name in names if name in (TINY, *population.get("local", ())) or not _has_page(name)]
    linked = [name for name in names[1:] if name not in without_page]
    repo = name if "/" in name else f"<user>/{name}"
    best, best_by = population["best_student"], population.get("best_student_by", "rating")
    figures = read_figures(root, population, repo)
    write_results(root, figures, best, repo)
    known = ({"datasets": linked} if linked else {}) | (details or {})
    metadata = ModelCardData(
        library_name="peft",
        tags=sorted({*TAGS, *([tags] if isinstance(tags, str) else tags or ())}),
        **({} if base in without_page else {"base_model": base, "base_model_relation": "adapter"}),
        pipeline_tag="text-generation",
        model_name=name.split("/")[-1] if figures else None,
        eval_results=make_model_index(figures) or None,
        # With this option the Hub's client warns of faulty scores instead of raising, and the card keeps the scores.
        ignore_metadata_errors=True,
        **{key: value for key, value in known.items() if key in ("license", "language", "datasets")},
    )
    plays, lineage = "reward_functions" not in population, read_lines(root / "lineage.jsonl")
    teachers = sum(member["role"] == "teacher" for member in members)
    parts = (GAME if teachers else CURRICULUM) if plays else PROMPTS
    facts = {
        "teachers": teachers,
        "students": sum(member["role"] == "student" for member in members),
        "members": len(members),
        "rank": population["lora"]["r"],
        "base": base,
        "step": population["step"],
        **(_tell_game(population) if plays else _tell_prompts(population)),
    }
    code = _write_base_code(base, population.get("settings", {}).get("base_revision", "main"))
    text = CARD.format(
        name=name.split("/")[-1],
        **{part: text.format(**facts) for part, text in parts.items()},
        base=base,
        root_adapter=ROOT_ADAPTER,
        **code,
        best=best,
        best_by=best_by,
        evaluation=format_results(figures, best, best_by),
        ratings=_write_ratings(population),
        plots=_embed_pictures(root),
        repo=repo,
        lora=_write_lora(population["lora"]),
        member=members[0]["adapter"],
        quantization=_describe_quantization(population.get("base_quantization")),
        serving=(SERVING if largest <= VLLM_RANKS[-1] else NO_SERVING).format(
            folding=FOLDING if any(patterns) else "",
            repo=repo,
            base_shell=code["base_shell"],
            members=len(members),
            vllm_rank=min((rank for rank in VLLM_RANKS if rank >= largest), default=None),
            modules=" ".join(f"{member['name']}=population/{member['adapter']}" for member in members),
            highest=VLLM_RANKS[-1],
            rank=largest,
        ),
        lineage=f"## Lineage\n\n{_write_lineage(lineage)}\n\n" if plays or lineage else "",
        settings=json.dumps(population.get("settings", {}), indent=2),
        citation=CITATION,
    )
    _write(root / "README.md", metadata.to_dict(), text, details or {}, without_page)


def _has_page(name: str) -> bool:
    """Says whether a model or a dataset of this name may be on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)


def _write(
    path: Path, metadata: dict[str, Any], text: str, details: Mapping[str, Any], without_page: Collection[str]
) -> None:
    """
    Writes a card whole, and keeps what somebody else has written into an earlier one. It drops the earlier card's
    links to a base or dataset that has no page, because the Hub refuses a card with a path in them.
    """
    text += MARK.format(_compute_digest(text))
    if path.exists():
        try:
            earlier = RepoCard(path.read_text(encoding="utf-8-sig"), ignore_metadata_errors=True)
        except (ValueError, TypeError, YAMLError) as error:  # `TypeError` for the key `2024:`
            logger.warning("%s stays as it is, because its metadata cannot be read (%s).", path, error)
            return
        kept, mark = earlier.data.to_dict(), _MARKED.search(earlier.text)
        if kept.get("base_model") in without_page:
            del kept["base_model"]
            kept.pop("base_model_relation", None)
        if isinstance(kept.get("datasets"), list):
            kept["datasets"] = [each for each in kept["datasets"] if each not in without_page]
        ours = mark is not None or ROOT_ADAPTER in earlier.text  # version 0.2.0 wrote no mark
        others, scores = drop_our_results(kept.pop("model-index", [])), metadata.pop("model-index", [])
        if others or scores:
            metadata["model-index"] = others + scores if isinstance(others, list) else scores or others
        below = mark and earlier.text[mark.end() :].strip()
        if not ours or (mark and (below or mark[1] != _compute_digest(earlier.text[: mark.start()]))):
            logger.warning("%s keeps the text that you gave it. To get a new text, remove the file.", path)
            text = earlier.text
        own = kept.get("tags")
        given = own if isinstance(own, list) else [own]
        tags = {*metadata["tags"], *(str(tag) for tag in given if tag is not None)}
        metadata |= kept | {key: metadata[key] for key in details if key in metadata} | {"tags": sorted(tags)}
    with write_whole(path) as unfinished:
        unfinished.write_text(f"---\n{CardData(**metadata).to_yaml()}\n---\n{text}", encoding="utf-8")


def _compute_digest(text: str) -> str:
    """Computes a digest of a text, without the blank lines before and after it."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def _tell_game(population: Mapping[str, Any]) -> dict[str, str]:
    return {
        "kinds": ", ".join(population["task_kinds"]),
        "held_out_base": _describe_held_out_base(population),
    }


def _tell_prompts(population: Mapping[str, Any]) -> dict[str, str]:
    prompts, explained = population.get("settings", {}).get("member_prompts", "shared"), ""
    if any(member.get("eval_reward") is not None for member in population["members"]):
        explained += ", `eval reward` on prompts that nobody trained on"
    if prompts == "shared":
        explained += ". `rating` is TrueSkill's mu ± sigma: members answer the same prompts, and each step ranks them "
        explained += "by mean reward"
    return {
        "stream": STREAMS[prompts],
        "datasets": "".join(f", dataset `{name}`" for name in population.get("datasets", ())),
        "functions": ", ".join(f"`{name}`" for name in population["reward_functions"]),
        "explained": explained,
    }


def _describe_quantization(config: dict | None) -> str:
    """Says how to load a base that was quantised; empty for one that was not."""
    if config is None:
        return ""
    bits = 4 if config.get("load_in_4bit") else 8
    return (
        f"The members were trained on the base in {bits} bits. Load it with `quantization_config="
        f"BitsAndBytesConfig(load_in_{bits}bit=True, ...)`; `base_quantization` in `population.json` has all values.\n"
    )


def _write_base_code(base: str, revision: str) -> dict[str, str]:
    """Writes those parts of the card's Python and shell code that name the base."""
    # The embedded base lies inside the installed package, so code has to ask the package for its path.
    if base != TINY:
        if revision == "main":
            return {"base_import": "", "base_code": json.dumps(base), "base_shell": shlex.quote(base)}
        code = f"{json.dumps(base)}, revision={json.dumps(revision)}"
        return {"base_import": "", "base_code": code, "base_shell": shlex.join([base, "--revision", revision])}
    line, code = "from trl_populora.assets import tiny_base_path", "tiny_base_path()"
    return {
        "base_import": f"{line}\n",
        "base_code": code,
        "base_shell": f"\"$(python -c '{line}; print({code})')\"",
    }


def _write_ratings(population: Mapping[str, Any]) -> str:
    """Writes the table of members, the best first in each role, and below them those that left."""
    found = list_members(population)
    rule = ("---" if column in WORDS else "---:" for column in found.header)
    rows = [row for rows in (*found.roles.values(), found.left) for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (found.header, tuple(rule), *rows))


def _describe_held_out_base(population: Mapping[str, Any]) -> str:
    """Writes the base's solve rate on held-out tasks. If training went on after that evaluation, adds its step."""
    rate, step = population.get("held_out_base"), population.get("held_out_step")
    earlier = "" if step in (None, population["step"]) else f", measured after step {step}"
    return earlier if rate is None else f" (the base without an adapter: {100 * rate:.0f} %){earlier}"


def _embed_pictures(root: Path) -> str:
    """Writes the card's section with the pictures that were drawn; empty without any."""
    names = [name for name in PICTURES if (root / "plots" / f"{name}.png").exists()]
    if not names:
        return ""
    titles = {plot.name: plot.title for plot in PLOTS}
    images = [f'<img alt="{titles[name]}" src="plots/{name}.png" width="400">' for name in names]
    return "\n".join(["", "## The run in pictures", "", *images, ""])


def _write_lora(lora: dict[str, Any]) -> str:
    return f"LoraConfig({', '.join(f'{name}={value!r}' for name, value in lora.items())})"


def _write_lineage(events: Sequence[Mapping[str, Any]]) -> str:
    """Writes the table of the last changes: births, and members that left without a child in their place."""
    if not events:
        return "Nobody has been replaced yet."
    rows = ["| step | child | parents | operator |", "|---:|---|---|---|"]
    for event in events[-_LINEAGE_ROWS:]:
        parents = ", ".join(parent["member"] for parent in event["parents"])
        child = event["child"] or f"none: {event['replaced']['member']} left"
        rows.append(f"| {event['step']} | {child} | {parents} | {event['operator']} |")
    if len(events) > _LINEAGE_ROWS:
        rows.append(f"\nThe last {_LINEAGE_ROWS} of {len(events)} changes; all are in `lineage.jsonl`.")
    return "\n".join(rows)


# The dataset card of a task archive.


ARCHIVE_CARD = """---
{metadata}
---

# {name}

{count} verified tasks, the archive of a [PopuLoRA](https://arxiv.org/abs/2605.16727) run: LoRA teachers
on {base} wrote them over {step} steps (`author` is `seed` for those that the run started with), a sandbox ran their
programs and refused what failed, depended on chance or was a duplicate.

| kind | tasks |
|---|---:|
{kinds}

```python
from datasets import load_dataset

tasks = load_dataset("{repo}", split="train")
```

They seed another run: `PopuLoRATrainer(..., train_dataset=tasks)`, or `seed_tasks: {repo}` in its YAML.

| column | |
|---|---|
| `kind` | `code_o`: predict the output; `code_i`: find an input; `code_f`: write the program |
| `program` | defines `f` |
| `inputs`, `outputs` | canonical texts (`trl_populora.sandbox.values.decode`); an input is the tuple of arguments |
| `message`, `visible` | code_f alone: the hint, and how many pairs the solver sees |
| `author`, `step`, `match` | who wrote it and when |
| `solve_rate` | share of attempts that solved it; empty if nobody has tried |
| {complexity} | complexity of the program |{measures}
| `key` | hash by which duplicates are recognised |

## Citation

{citation}
"""


def format_archive_card(path: Path, population: Mapping[str, Any], repo: str) -> str:
    """
    Writes the text of an archive's dataset card.

    Args:
        path: `archive.parquet` of a run.
        population: Contents of `population.json` of the same run.
        repo: Dataset repository that the archive goes to, `user/name`.

    Raises:
        `ValueError`: If the archive is missing or broken.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        kinds = Counter(pq.read_table(path, columns=["kind"])["kind"].to_pylist())
        columns, file = pq.read_schema(path), pq.read_metadata(path)
        # A user's kinds may measure more of a task than the built-in ones. Each measure is a column.
        own = [name for name in columns.names if name not in make_schema().names]
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read ({error}). Is it missing or cut off?") from error
    name = repo.split("/")[-1]
    metadata = DatasetCardData(
        pretty_name=name,
        tags=["populora", "trl-populora", "trl", "code", "self-play"],
        task_categories=["text-generation"],
        size_categories=[_name_size(kinds.total())],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": path.name}], "default": True}],
        dataset_info=_describe_columns(columns, kinds.total(), _count_bytes(file), path.stat().st_size),
    )
    return ARCHIVE_CARD.format(
        metadata=metadata.to_yaml(),
        name=name,
        repo=repo,
        count=f"{kinds.total():,}",
        base=population["base_model"],
        step=population["step"],
        complexity=", ".join(f"`{name}`" for name in PROGRAM_MEASURES),
        measures=f"\n| {', '.join(f'`{name}`' for name in own)} | measures of kinds the run added |" if own else "",
        kinds="\n".join(f"| {kind} | {count:,} |" for kind, count in sorted(kinds.items())),
        citation=CITATION,
    )


# Arrow's names of column types, each with the name that the Hub's viewer has for it.
_TYPES = {"string": "string", "int64": "int64", "double": "float64"}


def _describe_columns(columns: pa.Schema, tasks: int, size: int, download: int) -> dict[str, Any]:
    """
    Describes the columns and sizes of an archive, so that the Hub's viewer shows them without reading the file.

    Args:
        columns: The archive's columns: numbers, texts and lists of texts.
        tasks: Number of rows.
        size, download: Bytes before and after compression.
    """
    features = []
    for column in columns:
        if str(column.type).startswith("list"):
            features.append({"name": column.name, "list": _TYPES[str(column.type.value_type)]})
        else:
            features.append({"name": column.name, "dtype": _TYPES[str(column.type)]})
    splits = [{"name": "train", "num_bytes": size, "num_examples": tasks}]
    return {"features": features, "splits": splits, "download_size": download, "dataset_size": size}


def _count_bytes(file: Any) -> int:
    """Counts the bytes of a parquet file before compression."""
    return sum(file.row_group(group).total_byte_size for group in range(file.num_row_groups))


def _name_size(tasks: int) -> str:
    """Names the Hub's size category for a number of rows."""
    sizes = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
    return sizes[min(max(len(str(tasks)) - 3, 0), len(sizes) - 1)]
