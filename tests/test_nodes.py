"""Two nodes on one machine, each with a directory of its own or both with one: checkpoints are whole or refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.without_vllm import without_vllm
from trl_populora.runs.checkpoint import newest


pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def base(random_base, seed_tasks):
    Path(random_base, "tasks.json").write_text(json.dumps([task.to_record() for task in seed_tasks]))
    return random_base


def run_nodes(base: str, directories: list[Path], **settings) -> list[tuple[int, str]]:
    """Runs one process per node; exit code and output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment = without_vllm(inherited | variables)
    nodes = []
    for rank, directory in enumerate(directories):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank)]
        command += ["--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port]
        command += ["-m", "tests.node_worker", base, str(directory), json.dumps(settings)]
        nodes.append(
            subprocess.Popen(
                ["timeout", "400", *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [node.communicate()[0] for node in nodes]
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


def results(ran: list[tuple[int, str]]) -> list[dict]:
    for code, output in ran:
        assert code == 0, output[-5000:]
    lines = [next(line for line in output.splitlines() if line.startswith("RESULT ")) for _, output in ran]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


SAVING = {"save_steps": 2, "max_steps": 4}


class TestOwnDirectories:
    @pytest.fixture(scope="class")
    def straight(self, base, tmp_path_factory):
        """A run of four steps, and what it left on both nodes."""
        directories = [tmp_path_factory.mktemp(f"node_{rank}") / "run" for rank in range(2)]
        found = results(run_nodes(base, directories, save_on_each_node=True, **SAVING))
        assert [node["step"] for node in found] == [4, 4]
        assert found[0] == found[1]
        return found, directories

    def test_every_node_has_a_sandbox_of_its_own(self, straight):
        assert [node["pool"] for node in straight[0]] == ["Sandbox", "Sandbox"]

    def test_a_node_keeps_its_own_rows_and_the_first_one_all_metrics(self, straight):
        for rank, directory in enumerate(straight[1]):
            rows = sorted(path.name for path in (directory / "rollouts").iterdir())
            assert rows == [f"step_{step:05}-rank{rank}.parquet" for step in range(1, 5)]
            assert (directory / "metrics.jsonl").exists() == (rank == 0)

    def test_every_node_has_whole_checkpoints_and_nothing_unfinished(self, straight):
        for directory in straight[1]:
            assert newest(str(directory)) == str(directory / "checkpoint-4")
            assert not (directory / "_unfinished").exists()

    def test_the_nodes_go_on_from_the_newest_that_all_of_them_have(self, base, straight, tmp_path):
        """Killed when one node had moved its checkpoint into place and the other had not."""
        wanted, directories = straight
        copies = [Path(shutil.copytree(path, tmp_path / f"node_{rank}")) for rank, path in enumerate(directories)]
        shutil.rmtree(copies[1] / "checkpoint-4")
        ran = run_nodes(base, copies, save_on_each_node=True, resume=True, **SAVING)
        assert results(ran) == wanted, "the steps from 2 to 4 are played again"

    def test_an_earlier_run_is_moved_aside_on_every_node(self, base, straight, tmp_path):
        copies = [Path(shutil.copytree(path, tmp_path / f"node_{rank}")) for rank, path in enumerate(straight[1])]
        results(run_nodes(base, copies, save_on_each_node=True, save_steps=1, max_steps=1))
        for copy in copies:
            assert newest(str(copy)) == str(copy / "checkpoint-1")
            assert newest(str(copy / "_previous-1")) == str(copy / "_previous-1" / "checkpoint-4")

    def test_without_a_checkpoint_each_they_are_refused_at_the_start(self, base, tmp_path):
        for code, output in run_nodes(base, [tmp_path / "0", tmp_path / "1"], **SAVING):
            assert code != 0
            assert "The 2 nodes do not see one" in output
            assert "or set `save_on_each_node=True`" in output
            assert "RESULT" not in output


class TestOneDirectory:
    def test_a_checkpoint_each_is_refused(self, base, tmp_path):
        for code, output in run_nodes(base, [tmp_path, tmp_path], save_on_each_node=True, **SAVING):
            assert code != 0
            assert "all 2 nodes see one" in output
            assert "Leave it off" in output

    def test_one_checkpoint_is_whole(self, base, tmp_path):
        found = results(run_nodes(base, [tmp_path, tmp_path], save_steps=1, max_steps=1))
        assert [node["step"] for node in found] == [1, 1]
        assert found[0] == found[1]
        assert newest(str(tmp_path)) == str(tmp_path / "checkpoint-1")
        assert not list(tmp_path.glob(".*")), "what the nodes looked for is gone"


def test_a_node_that_does_not_come_to_the_start_is_named(base, tmp_path):
    (code, output), _ = run_nodes(base, [tmp_path / "0", tmp_path / "1"], absent=1, save_strategy="no")
    assert code != 0
    assert "Of 2 processes, rank 1 (node 1) did not start to train within `ddp_timeout=3` seconds" in output
