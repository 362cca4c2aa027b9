"""Two nodes on one machine, each with a directory of its own or both with one: checkpoints are whole or refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.without_extras import without_extras
from trl_populora.run.checkpoint import find_newest


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Holds the directories `node_0` and `node_1` of the two nodes, and `common`, which both see."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def nodes(base, root) -> list[dict]:
    """What both nodes printed of all their runs; they are started once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment = without_extras(inherited | variables)
    (root / "common").mkdir()
    started = []
    for rank in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank)]
        command += ["--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port]
        command += ["-m", "tests.node_worker", base, str(root / f"node_{rank}"), str(root / "common")]
        started.append(
            subprocess.Popen(
                ["timeout", "550", *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [node.communicate()[0] for node in started]
    assert [node.returncode for node in started] == [0, 0], [output[-5000:] for output in outputs]
    lines = [next(line for line in output.splitlines() if line.startswith("RESULT ")) for output in outputs]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


class TestOwnDirectories:
    def test_every_node_has_whole_checkpoints_and_nothing_unfinished(self, nodes, root):
        assert [node["straight"]["step"] for node in nodes] == [4, 4]
        assert nodes[0]["straight"] == nodes[1]["straight"]
        for rank in range(2):
            directory = root / f"node_{rank}" / "straight"
            assert find_newest(str(directory)) == str(directory / "checkpoint-4")
            assert not (directory / "_unfinished").exists()

    def test_every_node_runs_programs_on_all_of_its_cores(self, nodes):
        cores = len(os.sched_getaffinity(0))
        assert [node["straight"]["workers"] for node in nodes] == [cores, cores]

    def test_a_node_keeps_its_own_rows_and_the_first_one_all_metrics(self, nodes, root):
        for rank in range(2):
            directory = root / f"node_{rank}" / "straight"
            rows = sorted(path.name for path in (directory / "rollouts").iterdir())
            assert rows == [f"step_{step:05}-rank{rank}.parquet" for step in range(1, 5)]
            assert (directory / "metrics.jsonl").exists() == (rank == 0)

    def test_the_nodes_go_on_from_the_newest_that_all_of_them_have(self, nodes):
        for node in nodes:
            assert node["resumed"] == node["straight"], "the steps from 2 to 4 are played again"

    def test_an_earlier_run_on_one_node_is_refused_on_both(self, nodes, root):
        for node in nodes:
            assert node["again"]["refused"].startswith(f"{root}/node_1/again holds a run.")

    def test_without_a_checkpoint_each_they_are_refused_at_the_start(self, nodes):
        for node in nodes:
            assert node["apart"]["step"] == 0
            assert "The 2 nodes do not see one" in node["apart"]["refused"]
            assert "or set `save_on_each_node=True`" in node["apart"]["refused"]


class TestOneDirectory:
    def test_a_checkpoint_each_is_refused(self, nodes):
        for node in nodes:
            assert node["twice"]["step"] == 0
            assert "all 2 nodes see one" in node["twice"]["refused"]
            assert "Leave it off" in node["twice"]["refused"]

    def test_one_checkpoint_is_whole(self, nodes, root):
        directory = root / "common" / "run"
        assert [node["common"]["step"] for node in nodes] == [1, 1]
        assert nodes[0]["common"] == nodes[1]["common"]
        assert find_newest(str(directory)) == str(directory / "checkpoint-1")
        assert not list(directory.glob(".*")), "what the nodes looked for is gone"


def test_a_node_that_does_not_come_to_the_start_is_named(nodes):
    refused = nodes[0]["alone"]["refused"]
    assert "Of 2 processes, rank 1 (node 1) did not start to train within `ddp_timeout=3` seconds" in refused
