"""Which members changed, where they lie, which rows are merged: without vLLM."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from trl_populora.generate.publish import (
    PREFIX,
    AdapterShelf,
    ChangeDetector,
    Published,
    choose_parent,
    merge_asks,
    sweep_shelves,
)
from trl_populora.generate.server import LoRAServers
from trl_populora.lora.members import member_parameters, save_member

from .adapter_models import make_population
from .without_extras import without_extras


NAMES = ["member_0", "member_1", "member_2"]


@pytest.fixture
def model():
    return make_population(3)[0]


def parameters_of(model, name: str) -> list[torch.nn.Parameter]:
    return list(member_parameters(model, name).values())


def test_everything_is_new_at_first_and_nothing_afterwards(model):
    detector = ChangeDetector()
    assert detector.detect_changes(model, NAMES) == [True, True, True]
    assert detector.detect_changes(model, NAMES) == [False, False, False]
    detector.forget()
    assert detector.detect_changes(model, NAMES) == [True, True, True]


@torch.no_grad()
def one_ulp(parameter):
    parameter.view(-1)[3] = torch.nextafter(parameter.view(-1)[3], torch.tensor(9.0))


@torch.no_grad()
def opposite_ulps(parameter):
    bits = parameter.view(-1).view(torch.int32)
    bits[1] += 1
    bits[2] -= 1


@torch.no_grad()
def sign(parameter):
    """One bit, the highest of eight bytes."""
    parameter.view(-1)[5] *= -1


@torch.no_grad()
def swap(parameter):
    parameter.view(-1)[:2] = parameter.view(-1)[:2].flip(0)


@torch.no_grad()
def behind_autograd(parameter):
    parameter.data.add_(1)  # does not count in the tensor's own version, as under ZeRO


@pytest.mark.parametrize("change", [one_ulp, opposite_ulps, sign, swap, behind_autograd])
def test_any_change_of_a_member_is_seen_and_only_there(model, change):
    detector = ChangeDetector()
    detector.detect_changes(model, NAMES)
    change(parameters_of(model, "member_1")[-1])
    assert detector.detect_changes(model, NAMES) == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_changes_are_seen_in_every_precision(model, dtype):
    model.to(dtype)
    detector = ChangeDetector()
    detector.detect_changes(model, NAMES)
    with torch.no_grad():
        parameters_of(model, "member_2")[0].view(-1)[0] += 0.5
    assert detector.detect_changes(model, NAMES) == [False, False, True]


def test_a_directory_appears_only_when_complete(tmp_path):
    shelf = AdapterShelf(str(tmp_path))
    seen = []

    def save(directory: Path) -> None:
        directory.mkdir()
        seen.append((shelf.root / "a-1").exists())
        (directory / "adapter_config.json").write_text("{}")

    path = shelf.put("a-1", save)
    assert seen == [False]
    assert os.listdir(path) == ["adapter_config.json"]
    shelf.close()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_written_to_its_end_leaves_nothing(tmp_path):
    shelf = AdapterShelf(str(tmp_path))

    def save(directory: Path) -> None:
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        shelf.put("a-1", save)
    assert os.listdir(shelf.root) == [".lock"]


def test_a_shelf_lies_also_where_files_cannot_be_locked(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    shelf = AdapterShelf(str(tmp_path))
    os.utime(shelf.root, (0, 0))
    sweep_shelves(str(tmp_path))
    assert shelf.root.is_dir(), "nobody knows whether its owner lives"
    assert not (shelf.root / ".lock").exists(), "a later run could lock it, and take the owner for dead"
    assert f"{shelf.root} cannot be locked (Function not implemented)" in caplog.text
    shelf.close()
    assert not shelf.root.exists()


PROGRAM = """
import os, sys
from trl_populora.generate.publish import AdapterShelf
if os.fork() == 0:
    AdapterShelf(sys.argv[1])
    1 / 0
os.wait()
shelf = AdapterShelf(sys.argv[2])
print(shelf.root, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_shelf_that_the_next_run_removes_and_an_ending_one_none(tmp_path):
    ending, killed = tmp_path / "ending", tmp_path / "killed"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(ending), str(killed)],
        env=without_extras(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        root = Path(process.stdout.readline().strip())
        assert list(ending.iterdir()) == [], "it was made and removed"
        os.utime(root, (0, 0))  # older than the minute of grace for a shelf that is being made
        sweep_shelves(str(killed))
        assert root.is_dir(), "its owner lives"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        assert "ZeroDivisionError" in process.stderr.read()
    assert root.is_dir()
    sweep_shelves(str(killed))
    assert not root.exists()


def test_a_directory_that_never_had_a_lock_is_not_swept(tmp_path):
    left, other = tmp_path / f"{PREFIX}abc", tmp_path / f"{PREFIX}7b-run"
    for path, content in ((left, ".lock"), (other, "notes.txt")):
        path.mkdir()
        (path / content).touch()
        os.utime(path, (0, 0))
    sweep_shelves(str(tmp_path))
    assert list(tmp_path.rglob("*")) == [other, other / "notes.txt"]


def test_servers_get_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shelf = AdapterShelf("adapters")
    assert shelf.root.parent == tmp_path / "adapters"
    shelf.close()


def test_a_server_of_another_user_may_read_adapters_in_a_folder_that_this_user_may_read(tmp_path, model):
    old = os.umask(0o022)
    try:
        for mode, expected in ((0o750, 0o750), (0o777, 0o755), (0o700, 0o700)):
            folder = tmp_path / oct(mode)
            folder.mkdir()
            folder.chmod(mode)
            shelf = AdapterShelf(str(folder))
            assert shelf.root.stat().st_mode & 0o777 == expected
            adapter = Path(shelf.put("a-1", partial(save_member, model, NAMES[0])))
            readable = [path.stat().st_mode & 0o044 for path in adapter.iterdir()]
            assert readable == [0o044] * 2
            assert adapter.stat().st_mode & 0o055 == 0o055
            shelf.close()
    finally:
        os.umask(old)
    shelf = AdapterShelf("/dev/shm")
    assert shelf.root.stat().st_mode & 0o777 == 0o700, "weights in shared memory are this user's alone"
    shelf.close()


def test_shared_memory_is_used_when_it_has_room_and_every_reader_sees_it(tmp_path):
    assert choose_parent(str(tmp_path), 1 << 10, remote=False) == "/dev/shm"
    assert choose_parent(str(tmp_path), 1 << 50, remote=False) == str(tmp_path)
    free = shutil.disk_usage("/dev/shm").free
    assert choose_parent(str(tmp_path), free // 5, remote=False) == "/dev/shm", "two versions of each take 2/5"
    assert choose_parent(str(tmp_path), free // 3, remote=False) == str(tmp_path), "two versions would take 2/3"
    assert choose_parent(str(tmp_path), 1 << 10, remote=True) == str(tmp_path)


def test_equal_prompts_of_one_member_are_one_ask():
    first, second = (Published(name, f"{name}-1", i, f"/{name}") for i, name in enumerate(("a", "b"), 1))
    prompts = [[1, 2], [1, 2], [3], [1, 2], [1, 2], [3]]
    asks = merge_asks(prompts, [first, second, first, first, second, first])
    assert [(ask.prompt, ask.version, ask.rows) for ask in asks] == [
        ((1, 2), first, (0, 3)),
        ((1, 2), second, (1, 4)),
        ((3,), first, (2, 5)),
    ]
    with pytest.raises(RuntimeError, match="2 rows are routed, but 6 prompts"):
        merge_asks(prompts, [first, second])


def test_servers_asked_for_nothing_answer_nothing():
    keys = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")
    assert LoRAServers([]).generate([]) == {key: [] for key in keys}


def test_versions_share_nothing_that_a_cache_could_key_on():
    one, two = Published("a", "a-x-1", 1, "/s/a-x-1"), Published("a", "a-x-2", 2, "/s/a-x-2")
    assert not {one.name, one.id, one.path} & {two.name, two.id, two.path}
