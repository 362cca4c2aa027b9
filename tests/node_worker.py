"""One of two nodes with a process each, which `test_nodes.py` starts: both have `LOCAL_RANK` 0.

torchrun --nnodes 2 --node_rank 0 --nproc_per_node 1 ... -m tests.node_worker <base> <directory> <settings>

Trains, from the newest checkpoint if the settings hold `resume`, and prints the last step with a digest of the run.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

from accelerate import PartialState

from tests.populora_run import make_trainer, state_of


def main(base: str, directory: str, settings: dict) -> None:
    resume, absent = settings.pop("resume", False), settings.pop("absent", None)
    trainer = make_trainer(base, directory, {"lr_scheduler_type": "constant"} | settings)
    assert trainer.accelerator.num_processes == 2, trainer.accelerator.num_processes
    assert trainer.args.local_process_index == 0, trainer.args.local_process_index
    if absent is not None:
        trainer.args.ddp_timeout = 3
    if trainer.args.process_index == absent:
        time.sleep(8)  # the other node has given up long before
        return
    trainer.train(resume_from_checkpoint=resume)
    state = state_of(trainer)
    lasting = json.dumps({key: repr(state[key]) for key in ("members", "game", "archive")})
    result = {
        "step": trainer.state.global_step,
        "digest": hashlib.sha256(lasting.encode()).hexdigest(),
        "pool": type(trainer.sandbox).__name__,
    }
    print("RESULT " + json.dumps(result), flush=True)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
