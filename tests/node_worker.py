"""One of two nodes with a process each, which `test_nodes.py` starts: both have `LOCAL_RANK` 0.

torchrun --nnodes 2 --node_rank 0 --nproc_per_node 1 ... -m tests.node_worker <base> <own directory> <common directory>

Goes through the runs of `main` and prints what came of each: the last step with a digest of the run, or the refusal.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback

from tests.launching import leave
from tests.populora_run import make_trainer, state_of


SAVING = {"save_steps": 2, "max_steps": 4}
EACH = {"save_on_each_node": True}


class NotRefused(TrainerCallback):
    """Ends a run that should have been refused before the nodes part over their files and wait for each other."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise RuntimeError("the run was not refused")


def run(
    base: str, directory: Path, resume: bool = False, absent: int | None = None, wrong: bool = False, **settings
) -> dict:
    """Trains, from the newest checkpoint if `resume`; the rank `absent` does not come; a `wrong` run is refused."""
    trainer = make_trainer(base, str(directory), {"lr_scheduler_type": "constant", "sandbox_workers": None} | settings)
    assert trainer.accelerator.num_processes == 2, trainer.accelerator.num_processes
    assert trainer.args.local_process_index == 0, trainer.args.local_process_index
    if wrong:
        trainer.add_callback(NotRefused())
    if absent is not None:
        trainer.args.ddp_timeout = 3
    if trainer.args.process_index == absent:
        trainer.close()
        time.sleep(8)  # the other node has given up long before
        return {}
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (RuntimeError, ValueError) as error:
        trainer.close()
        return {"refused": str(error), "step": trainer.state.global_step}
    state = state_of(trainer)
    lasting = json.dumps({key: repr(state[key]) for key in ("members", "game", "archive")})
    digest = hashlib.sha256(lasting.encode()).hexdigest()
    return {"step": trainer.state.global_step, "digest": digest, "workers": trainer.game.referee.sandbox.workers}


def copy_of(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.parent / name))


def main(base: str, own: Path, common: Path) -> None:
    gc.freeze()  # every training collects once, through all that was imported if it may
    told = {"apart": run(base, own / "apart", wrong=True, **SAVING)}
    told["straight"] = run(base, own / "straight", **EACH, **SAVING)

    # As if killed when one node had moved its checkpoint into place and the other had not.
    cut = copy_of(own / "straight", "cut")
    if PartialState().process_index == 1:
        shutil.rmtree(cut / "checkpoint-4")
    told["resumed"] = run(base, cut, resume=True, **EACH, **SAVING)
    again = own / "again"
    if PartialState().process_index == 1:
        copy_of(own / "straight", again.name)
    told["again"] = run(base, again, wrong=True, **EACH, **SAVING)

    told["twice"] = run(base, common / "twice", wrong=True, **EACH, **SAVING)
    told["common"] = run(base, common / "run", save_steps=1, max_steps=1)
    told["alone"] = run(base, own / "alone", absent=1, save_strategy="no")
    print("RESULT " + json.dumps(told), flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
