"""The dataset card of a task archive that is pushed to the Hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import DatasetCardData

from trl_populora.tasks.archive_table import schema
from trl_populora.tasks.complexity import PROGRAM_MEASURES


if TYPE_CHECKING:
    import pyarrow as pa


CARD = """---
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
"""


def archive_card(path: Path, population: Mapping[str, Any], repo: str) -> str:
    """
    The card's text.

    Args:
        path: `archive.parquet` of a run.
        population: `population.json` of the same run.
        repo: Where it goes, `user/name`.

    Raises:
        `ValueError`: If the file is missing or broken.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        kinds = Counter(pq.read_table(path, columns=["kind"])["kind"].to_pylist())
        columns, file = pq.read_schema(path), pq.read_metadata(path)
        own = [name for name in columns.names if name not in schema().names]
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read ({error}); it is missing or was cut off.") from error
    name = repo.split("/")[-1]
    metadata = DatasetCardData(
        pretty_name=name,
        tags=["populora", "trl", "code", "self-play"],
        task_categories=["text-generation"],
        size_categories=[_size(kinds.total())],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": path.name}], "default": True}],
        dataset_info=_info(columns, kinds.total(), _whole_size(file), path.stat().st_size),
    )
    return CARD.format(
        metadata=metadata.to_yaml(),
        name=name,
        repo=repo,
        count=f"{kinds.total():,}",
        base=population["base_model"],
        step=population["step"],
        complexity=", ".join(f"`{name}`" for name in PROGRAM_MEASURES),
        measures=f"\n| {', '.join(f'`{name}`' for name in own)} | what tasks of other kinds measure |" if own else "",
        kinds="\n".join(f"| {kind} | {count:,} |" for kind, count in sorted(kinds.items())),
    )


# As the Hub's viewer names them.
_TYPES = {"string": "string", "int64": "int64", "double": "float64"}


def _info(columns: pa.Schema, tasks: int, size: int, download: int) -> dict[str, Any]:
    """Columns and size, which the viewer shows without reading the file: numbers, texts and lists of texts."""
    features = []
    for column in columns:
        if str(column.type).startswith("list"):
            features.append({"name": column.name, "list": _TYPES[str(column.type.value_type)]})
        else:
            features.append({"name": column.name, "dtype": _TYPES[str(column.type)]})
    splits = [{"name": "train", "num_bytes": size, "num_examples": tasks}]
    return {"features": features, "splits": splits, "download_size": download, "dataset_size": size}


def _whole_size(file: Any) -> int:
    """Bytes of a parquet file before compression."""
    return sum(file.row_group(group).total_byte_size for group in range(file.num_row_groups))


def _size(tasks: int) -> str:
    """The Hub's word for so many rows."""
    bounds = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}
    return next((word for bound, word in bounds.items() if tasks < bound), "1M<n<10M")
