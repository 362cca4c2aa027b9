"""EvalScope as anybody would use it, nothing of this package in it: one merged model at a time, run by transformers.

python tests/evaluation_alone.py <dataset_args.json> <out> <benchmark> <model directory>[,...] [<benchmark> ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evalscope import TaskConfig, run_task


def main(arguments: str, out: str, *asked: str) -> None:
    given = json.loads(Path(arguments).read_text())
    for settings in given.values():
        settings["local_path"] = str(Path(arguments).parent / settings["local_path"])
    pairs = zip(asked[::2], asked[1::2], strict=True)
    for benchmark, model in [(benchmark, model) for benchmark, models in pairs for model in models.split(",")]:
        run_task(
            TaskConfig(
                model=model,
                model_id=Path(model).name,
                model_args={"precision": "float32", "device_map": "cpu"},
                eval_type="llm_ckpt",
                datasets=[benchmark],
                dataset_args=given,
                generation_config={"do_sample": False, "max_tokens": 200},
                work_dir=f"{out}/{benchmark}/{Path(model).name}",
                no_timestamp=True,
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
