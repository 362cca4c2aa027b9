"""What a run writes down while it goes on; taking it back at a resume is tested in `test_checkpoint.py`."""

from types import SimpleNamespace

import pytest

from trl_populora.records import Records


@pytest.mark.parametrize(("step", "kept"), [(0, {"archive.parquet", "rollouts"}), (3, None)])
def test_only_a_run_from_the_start_removes_an_earlier_runs_records(tmp_path, step, kept):
    names = ["metrics.jsonl", "times.jsonl", "lineage.jsonl", "rollouts/step_00007-rank1.parquet", "archive.parquet"]
    (tmp_path / "rollouts").mkdir()
    for name in names:
        (tmp_path / name).write_text("{}\n")
    state = SimpleNamespace(is_world_process_zero=True, global_step=step)
    Records(None).on_train_begin(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == (kept or {*names, "rollouts"})
