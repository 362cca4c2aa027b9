"""A dataset of prompts and a reward function for the embedded base, as `recipes/tiny/prompts.yaml` uses them.

The prompts are tasks of one kind that the base was trained on: what does this program return? They come from the
package's held-out tasks, and `answer` is the right one. `python recipes/tiny_prompts.py` writes the two tables again,
48 prompts to train on and 24 others to evaluate on.
"""

from __future__ import annotations

import json
import re
from ast import literal_eval
from pathlib import Path


TABLES = Path(__file__).parent / "tiny" / "prompts"
BLOCK = re.compile(r"```output\n(.*?)\n```", re.DOTALL)


def right(completions, answer, **columns) -> list[float]:
    """Pays 1 for the right answer, 0 for a wrong one, and -0.5 where no answer can be read."""
    rewards = []
    for (message,), wanted in zip(completions, answer, strict=True):
        found = BLOCK.findall(message["content"])
        try:
            rewards.append(float(literal_eval(found[-1]) == literal_eval(wanted)) if found else -0.5)
        except (SyntaxError, TypeError, ValueError):  # TypeError: `{[1]}`
            rewards.append(-0.5)
    return rewards


def main() -> None:
    """Writes the tables."""
    from trl_populora.assets import tiny_eval_tasks
    from trl_populora.config import PopuLoRAConfig
    from trl_populora.sandbox.values import decode
    from trl_populora.start import make_kinds
    from trl_populora.tasks.archive import read_task
    from trl_populora.tasks.dataset import read_tasks

    kind = make_kinds(PopuLoRAConfig("unused", prompt_style="compact"))["code_o"]
    tasks = [read_task(row, "a task") for row in read_tasks(tiny_eval_tasks()) if row["kind"] == "code_o"]
    rows = [
        {"prompt": kind.solving_prompt(task, "compact"), "answer": repr(decode(task.outputs[0]))} for task in tasks
    ]
    # Every third of 72 tasks is held out, so that both tables have all levels.
    for name, own in (("train", [0, 1]), ("test", [2])):
        lines = [json.dumps(row) + "\n" for place, row in enumerate(rows[:72]) if place % 3 in own]
        TABLES.mkdir(exist_ok=True)
        (TABLES / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
