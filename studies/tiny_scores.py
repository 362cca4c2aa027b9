"""
Scores a tiny base against its gate, with the package's own task kinds and sandbox, on held-out programs.

    python studies/tiny_scores.py --model trl_populora/assets/tiny --tasks 60

writes the figures to `scores.json` beside the model, part by part; started again it goes on where it was.
`--card` writes the model card from that file and, if `--headroom FILE` names them, the results of `tiny_headroom.py`;
nothing is scored then. Per level and kind: pass@1 and any of 8 at
temperature 1, the share of groups of 8 without spread, how many answers are worked, and how often an answer is right
when it has to be worked or has to be direct (its first token is given). Per kind of proposal: validity, distinctness,
and how the base solves its own valid proposals, which is what self-play starts from. Also home of the seed tasks and
of the held-out tasks, which are made of the same pieces.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import beside_recipes  # noqa: F401
import numpy as np
import torch
from tiny_card import model_card
from tiny_documents import (
    INPUTS_PER_CODE_F,
    PROPOSED_LEVEL_WEIGHTS,
    DialogueWriter,
    random_task,
)
from tiny_programs import OPERATIONS_AT_LEVEL, TRAINED_LEVELS
from tiny_traces import OPEN
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_populora.generate.transformers import complete
from trl_populora.sandbox import Sandbox
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.kind import Refusal, Task, TaskKind
from trl_populora.tasks.python.kinds import CodeF, CodeI, CodeO
from trl_populora.tasks.python.reading import has_thinking


SAMPLES = 8
FORCED_SAMPLES = 4  # of answers that must be worked, and of such that must be direct
OPENINGS = {"code_o": "```output\n", "code_i": "```input\n", "code_f": "```python\n"}  # of a direct answer
REFERENCES = 2  # shown in proposal prompts, as in the quick start
MAX_NEW_TOKENS = 256
EVAL_LEVELS = (2, 3, 4, 5)


def kinds() -> dict[str, TaskKind]:
    return {"code_o": CodeO(), "code_i": CodeI(), "code_f": CodeF(inputs_per_task=INPUTS_PER_CODE_F)}


def write_tasks(path: Path, count: int, levels: Sequence[int], held_out: bool, seed: int = 0) -> None:
    """
    Writes `count` different tasks, kinds and levels in turn, each with its `level`: such as training may start from,
    or such as nothing was trained on.
    """
    name = "held-out tasks" if held_out else "seed tasks"
    writer, archive, lines = DialogueWriter(random.Random(f"{seed}:{name}"), held_out), TaskArchive(), []
    combinations = [(kind, level) for level in levels for kind in kinds()]
    while len(lines) < count:
        kind, level = combinations[len(lines) % len(combinations)]
        task = random_task(kind, level, writer)
        if archive.add(task):
            record = task.to_record()
            del record["author"], record["step"]
            lines.append(json.dumps({**record, "level": level}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Solved:
    """
    Results on a list of tasks; each array holds whether an answer is right.

    Args:
        samples (`np.ndarray`): bool `[tasks, SAMPLES]`, at temperature 1.
        thinking (`np.ndarray`): bool, likewise: whether the answer is worked.
        worked, direct (`np.ndarray`): bool `[tasks, FORCED_SAMPLES]`, answers that had to be so.
    """

    samples: np.ndarray
    thinking: np.ndarray
    worked: np.ndarray
    direct: np.ndarray

    def figures(self) -> dict[str, float]:
        """The figures of the gate; a group without spread is all right or all wrong."""
        rate = self.samples.mean(axis=1)
        return {
            "pass@1": float(rate.mean()),
            "any of 8": float((rate > 0).mean()),
            "no spread": float(((rate == 0) | (rate == 1)).mean()),
            "none right": float((rate == 0).mean()),
            "worked share": float(self.thinking.mean()),
            "worked": float(self.worked.mean()),
            "direct": float(self.direct.mean()),
        }


class Scorer:
    """
    Generates with a model and grades with the real kinds and the real sandbox.

    Args:
        directory (`Path`): Model directory.
        sandbox (`Sandbox`): Runs proposals and trials.
        batch (`int`, *optional*, defaults to `320`): Completions generated at a time.
    """

    def __init__(self, directory: Path, sandbox: Sandbox, batch: int = 320):
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.sandbox = sandbox
        self.kinds = kinds()
        self.batch = batch
        self.sampling = copy.copy(self.model.generation_config)
        self.sampling.update(max_new_tokens=MAX_NEW_TOKENS, do_sample=True, temperature=1.0)

    def complete(self, prompts: Sequence[list[dict[str, str]]], opening: str = "") -> list[str]:
        """One sampled completion per prompt, without its end of turn, each starting with `opening`."""
        texts = [
            self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) + opening
            for prompt in prompts
        ]
        asked = self.tokenizer(texts)["input_ids"]
        order = sorted(range(len(texts)), key=lambda index: len(asked[index]))  # similar lengths share a batch
        completions = [""] * len(texts)
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            rows = [asked[index] for index in chosen]
            found = complete(self.model, rows, [0] * len(rows), lambda _: nullcontext(), self.sampling)
            for index, text in zip(chosen, self.tokenizer.batch_decode(found, skip_special_tokens=True), strict=True):
                completions[index] = opening + text
        return completions

    def solve(self, kind: TaskKind, tasks: Sequence[Task]) -> Solved:
        """`SAMPLES` attempts at each task as the model likes, and some in each of the two ways."""
        texts = self.attempts(kind, tasks, SAMPLES)
        right = self.grade(kind, tasks, texts, SAMPLES)
        thinking = np.array([has_thinking(text) for text in texts], dtype=bool).reshape(right.shape)
        forced = [
            self.grade(kind, tasks, self.attempts(kind, tasks, FORCED_SAMPLES, opening), FORCED_SAMPLES)
            for opening in (f"{OPEN}\n", OPENINGS[kind.name])
        ]
        return Solved(right, thinking, *forced)

    def attempts(self, kind: TaskKind, tasks: Sequence[Task], samples: int, opening: str = "") -> list[str]:
        prompts = [kind.solving_prompt(task, "compact") for task in tasks]
        return self.complete([prompt for prompt in prompts for _ in range(samples)], opening)

    def grade(self, kind: TaskKind, tasks: Sequence[Task], texts: Sequence[str], samples: int) -> np.ndarray:
        """Which of each task's answers are right, bool `[tasks, samples]`."""
        owners = [task for task in tasks for _ in range(samples)]
        attempts = [kind.parse_attempt(text, task) for text, task in zip(texts, owners, strict=True)]
        verdicts = self.run([kind.trial(task, attempt) for task, attempt in zip(owners, attempts, strict=True)])
        return np.array(list(map(kind.correct, owners, attempts, verdicts)), dtype=bool).reshape(-1, samples)

    def run(self, jobs: Sequence) -> list:
        """Verdicts of the jobs that are not `None`; equal jobs run once."""
        different = list(dict.fromkeys(job for job in jobs if job is not None))
        verdicts = dict(zip(different, self.sandbox.run(different), strict=True))
        return [None if job is None else verdicts[job] for job in jobs]

    def propose(self, kind: TaskKind, count: int, writer: DialogueWriter) -> list[Task | Refusal]:
        """What becomes of `count` proposals with fresh references of mixed levels by `writer`."""
        references = [
            [
                random_task("code_o", writer.level(PROPOSED_LEVEL_WEIGHTS), writer)
                for _ in range(kind.reference_count(REFERENCES))
            ]
            for _ in range(count)
        ]
        prompts = [kind.proposal_prompt(shown, "compact") for shown in references]
        texts = self.complete(prompts)
        parsed = [kind.parse_proposal(text, shown) for text, shown in zip(texts, references, strict=True)]
        verdicts = self.run([None if isinstance(item, Refusal) else kind.check(item) for item in parsed])
        return [
            item if isinstance(item, Refusal) else kind.accept(item, verdict, writer.rng)
            for item, verdict in zip(parsed, verdicts, strict=True)
        ]


def score(directory: Path, tasks: int, seed: int = 0) -> None:
    """
    Writes all figures of the model card to `scores.json`: `tasks` per kind and level, twice as many proposals a kind.

    The file is written after every part, and a part that it has already is left out.
    """
    path = directory / "scores.json"
    weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()[:12]
    key = {"tasks": tasks, "seed": seed, "weights": weights}
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if {name: found.get(name) for name in key} != key:
        found = {**key, "solve": {}, "propose": {}}
    parts = [(name, level) for name in kinds() for level in (None, *OPERATIONS_AT_LEVEL)]
    with Sandbox() as sandbox, tqdm(parts, desc="scoring") as bar:
        scorer = Scorer(directory, sandbox)
        for name, level in bar:
            section, part = ("propose", name) if level is None else ("solve", f"{name} {level}")
            bar.set_postfix_str(f"{section} {part}")
            if part in found[section]:
                continue
            rng = random.Random(f"{seed}:{name}:{level}")
            torch.manual_seed(rng.getrandbits(32))
            kind = scorer.kinds[name]
            if level is None:
                found[section][part] = own_proposals(scorer, kind, tasks, rng)
            else:
                writer = DialogueWriter(rng, held_out=True)
                held_out = [random_task(name, level, writer) for _ in range(tasks)]
                found[section][part] = scorer.solve(kind, held_out).figures()
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(path)


def own_proposals(scorer: Scorer, kind: TaskKind, tasks: int, rng: random.Random) -> dict:
    """How good `2 * tasks` proposals are, and how the model solves up to `tasks` of them."""
    outcomes = scorer.propose(kind, 2 * tasks, DialogueWriter(rng, held_out=True))
    valid = [outcome for outcome in outcomes if isinstance(outcome, Task)]
    rejects = [str(outcome.reason) for outcome in outcomes if isinstance(outcome, Refusal)]
    archive = TaskArchive()
    return {
        "valid": len(valid) / len(outcomes),
        "distinct": sum(map(archive.add, valid)) / max(1, len(valid)),
        "rejects": {reason: rejects.count(reason) for reason in sorted(set(rejects))},
        **(scorer.solve(kind, valid[:tasks]).figures() if valid else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory")
    parser.add_argument("--tasks", type=int, default=60, help="per kind and level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--card", action="store_true", help="write the model card, `README.md`, from earlier scores")
    parser.add_argument("--headroom", type=Path, help="what tiny_headroom.py wrote, for the card")
    parser.add_argument(
        "--write-tasks", type=Path, help="directory for seed_tasks.jsonl and eval_tasks.jsonl; no scores"
    )
    arguments = parser.parse_args()
    if arguments.write_tasks:
        write_tasks(arguments.write_tasks / "seed_tasks.jsonl", 256, TRAINED_LEVELS, held_out=False)
        write_tasks(arguments.write_tasks / "eval_tasks.jsonl", 312, EVAL_LEVELS, held_out=True)
        return
    torch.set_num_threads(1)  # at these sizes a second thread costs more than it brings
    if arguments.model is None or not (arguments.model / "training.json").is_file():
        parser.error(f"--model {arguments.model} was not written by make_tiny_base.py: it has no training.json")
    if not arguments.card:
        score(arguments.model, arguments.tasks, arguments.seed)
        return
    figures = json.loads((arguments.model / "scores.json").read_text(encoding="utf-8"))
    made = json.loads((arguments.model / "training.json").read_text(encoding="utf-8"))["made"]
    headroom = json.loads(arguments.headroom.read_text(encoding="utf-8")) if arguments.headroom else None
    card = model_card(figures, figures["tasks"], made, headroom)
    (arguments.model / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
