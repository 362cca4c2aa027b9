# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-populora[report]"]
#
# [tool.uv.sources]
# trl-populora = { path = ".." }
# ///
"""A population from one file: `uv run recipes/start.py`, with `--model Qwen/Qwen2.5-0.5B-Instruct` on another base.

uv makes the environment that the head of this file asks for. In a clone the package is the folder above; elsewhere
name a wheel there, `trl-populora = { url = "https://.../trl_populora-0.2.0-py3-none-any.whl" }`. With that it runs on
a machine of the Hub, too (not tried):

    hf jobs uv run --flavor a10g-small --secrets HF_TOKEN start.py --model Qwen/Qwen2.5-0.5B-Instruct --repo me/them

What it leaves out: vLLM, several processes, held-out tasks of your own. `populora train --config` has all of it.
"""

from __future__ import annotations

import argparse

import torch

from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.hub.push import push_run
from trl_populora.report.page import write_report
from trl_populora.report.table import print_population


# What the embedded base was trained on; others take the defaults.
EMBEDDED = {
    "references_per_proposal": 2,
    "inputs_per_function": 6,
    "max_completion_length": 200,
    "learning_rate": 3e-3,
    "gradient_checkpointing": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="name on the Hub, or directory; `tiny` is the embedded base")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output_dir", default="runs/start")
    parser.add_argument("--repo", help="where on the Hub the population goes in the end")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    settings = EMBEDDED if options.model == "tiny" else {"max_completion_length": 512}
    args = PopuLoRAConfig(
        options.output_dir,
        teachers=2,
        students=2,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        bf16=gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        use_cpu=not gpu,
        report_to="none",
        **settings,
    )
    trainer = PopuLoRATrainer(options.model, args=args)
    trainer.train()
    trainer.save_model()
    print_population(options.output_dir)
    print(f"Report: {write_report(options.output_dir)}")
    if options.repo:
        print(f"Pushed to {push_run(options.output_dir, options.repo)}")


if __name__ == "__main__":
    main()
