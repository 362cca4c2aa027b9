"""EvalScope as anybody would use it, nothing of this package in it: one merged model at a time, run by transformers.

python tests/evaluation_alone.py <dataset_args.json> <out> <benchmark,...> <model directory> ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evalscope import TaskConfig, run_task


def main(arguments: str, out: str, benchmarks: str, models: list[str]) -> None:
    given = json.loads(Path(arguments).read_text())
    for settings in given.values():
        settings["local_path"] = str(Path(arguments).parent / settings["local_path"])
    for model in models:
        run_task(
            TaskConfig(
                model=model,
                model_id=Path(model).name,
                model_args={"precision": "float32", "device_map": "cpu"},
                eval_type="llm_ckpt",
                datasets=benchmarks.split(","),
                dataset_args=given,
                generation_config={"do_sample": False, "max_tokens": 200},
                work_dir=f"{out}/{Path(model).name}",
                no_timestamp=True,
            )
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
