"""The notebook runs from top to bottom, shortened: two steps, few held-out tasks, small cross-play."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.without_extras import without_extras


NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "arms_race.ipynb"
SHORTER = {
    "STEPS = 24": "STEPS = 2",
    "EVOLVE_EVERY, BURN_IN = 10, 5": "EVOLVE_EVERY, BURN_IN = 1, 1",
    "HELD_OUT = 312": "HELD_OUT = 2",
    '"disable_tqdm": True': '"disable_tqdm": True, "proposals_per_teacher": 4, "per_device_train_batch_size": 12',
    "proposals=12, attempts=4": "proposals=2, attempts=1",
}


def test_it_is_committed_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [cell.id for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path):
    text = NOTEBOOK.read_text()
    for long, short in SHORTER.items():
        long, short = json.dumps(long)[1:-1], json.dumps(short)[1:-1]
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    client = NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute(env=without_extras())
    shown = "\n".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2, "curves and cross-play"
    assert re.search(r"^    student_\d@1  \(step 1, ", shown, re.MULTILINE), "a child in the family tree"
    assert "attempt 4: " in shown
    assert (tmp_path / "runs/arms_race/adapter_model.safetensors").exists()
