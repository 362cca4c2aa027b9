"""The notebook runs from top to bottom, shortened: two steps, few held-out tasks, small cross-play."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.without_extras import without_extras


NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "arms_race.ipynb"
COLAB = NOTEBOOK.with_name("colab_t4.ipynb")
README = NOTEBOOK.parent.parent / "README.md"
SHORTEST = {
    '"HuggingFaceTB/SmolLM2-135M-Instruct"': '"tiny"',
    "attempts_per_task=4": "attempts_per_task=2",
    "ROWS = 8": "ROWS = 12",
    "max_completion_length=32": "max_completion_length=8",
}
SHORTER = {
    "STEPS = 24": "STEPS = 2",
    "EVOLVE_EVERY, BURN_IN = 10, 5": "EVOLVE_EVERY, BURN_IN = 1, 1",
    "HELD_OUT = 312": "HELD_OUT = 2",
    '"disable_tqdm": True': '"disable_tqdm": True, "proposals_per_teacher": 4, "per_device_train_batch_size": 12',
    "proposals=12, attempts=4": "proposals=2, attempts=1",
}


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_it_is_committed_without_outputs():
    assert [cell.id for cell in code_cells(NOTEBOOK) if cell.outputs or cell.execution_count] == []


def test_the_one_for_colab_is_committed_as_it_ran_with_what_it_printed():
    cells = code_cells(COLAB)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = "\n".join(output["text"] for output in outputs if "text" in output)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in shown
    assert "step 1/1 | reward" in shown, "the swapped class"
    assert "step 1/1 | valid" in shown, "self-play"
    assert not re.findall(r"/(?:home|work|root)/", shown), "a path of the machine that ran it"


def test_the_one_for_colab_swaps_the_class_as_the_readme_does():
    example = re.search(r"```python\n(.+?)^trainer = ", README.read_text(), re.MULTILINE | re.DOTALL)[1]
    assert any(cell.source.startswith(example) for cell in code_cells(COLAB))


def execute(path: Path, shorter: dict[str, str], place: Path) -> tuple[nbformat.NotebookNode, str]:
    """A notebook that was run with some of its text changed, and what it printed."""
    text = path.read_text()
    for long, short in shorter.items():
        long, short = json.dumps(long)[1:-1], json.dumps(short)[1:-1]
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    client = NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": place}})
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    client.execute(env=without_extras() | {"PATH": commands})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return notebook, "\n".join(output["text"] for output in outputs if "text" in output)


@pytest.mark.slow
def test_the_one_for_colab_runs_from_top_to_bottom(tmp_path):
    notebook, shown = execute(COLAB, SHORTEST, tmp_path)
    assert re.search(r"step 1/1 \| reward .* generate", shown), "the swapped class"
    adapters = [tmp_path / f"runs/colors/members/student_{place}/adapter_model.safetensors" for place in range(4)]
    assert all(adapter.exists() for adapter in adapters)
    assert "step 1/1 | valid" in shown, "self-play"
    assert "student_1" in shown
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == 1
    assert (tmp_path / "runs/colab/adapter_model.safetensors").exists()


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path):
    notebook, shown = execute(NOTEBOOK, SHORTER, tmp_path)
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2, "curves and cross-play"
    assert re.search(r"^    student_\d@1  \(step 1, ", shown, re.MULTILINE), "a child in the family tree"
    assert "attempt 4: " in shown
    assert (tmp_path / "runs/arms_race/adapter_model.safetensors").exists()
