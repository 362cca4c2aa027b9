"""Files appear whole or not at all."""

from __future__ import annotations

import pytest

from trl_populora.files import read_json, write_json, write_whole


def test_a_list_is_no_object(tmp_path):
    (tmp_path / "found.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"found.json holds no JSON object but a list\.$"):
        read_json(tmp_path / "found.json")


def test_a_file_that_is_not_finished_leaves_the_one_before(tmp_path):
    path = tmp_path / "found.json"
    write_json(path, {"step": 1})

    def fail(text):
        with write_whole(path) as unfinished:
            unfinished.write_text(text)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail("{")
    assert path.read_text() == '{\n  "step": 1\n}\n'
    write_json(path, {"step": 2}, indent=None)
    assert path.read_text() == '{"step": 2}\n'
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"], "what was cut off is written over"
