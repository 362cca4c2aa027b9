"""
Scores a tiny base against its gate, with the package's own task kinds and sandbox, on held-out programs.

    python recipes/tiny_scores.py --model trl_populora/assets/tiny --tasks 40

takes about five minutes on one quiet core and prints the figures; `--card` writes the model card. Per level and
kind: pass@1 and any of 8 at temperature 1, greedy, and the share of groups of 8 without spread. Per kind of proposal:
validity, distinctness, and how the base solves its own valid proposals, which is what self-play starts from.
Also home of the seed tasks, which are made of the same pieces.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tiny_card import model_card
from tiny_documents import (
    INPUTS_PER_CODE_F,
    PROPOSED_LEVEL_WEIGHTS,
    DialogueWriter,
    Example,
)
from tiny_programs import OPERATIONS_AT_LEVEL, TRAINED_LEVELS
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_populora.sandbox import Sandbox, values
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.base import Reject, Task, TaskKind
from trl_populora.tasks.code_f import CodeF
from trl_populora.tasks.code_i import CodeI
from trl_populora.tasks.code_o import CodeO


SAMPLES = 8
REFERENCES = 2  # shown in proposal prompts, as in the quick start
MAX_NEW_TOKENS = {"solve code_o": 48, "solve code_i": 48, "solve code_f": 128, "propose": 192}


def kinds() -> dict[str, TaskKind]:
    return {"code_o": CodeO(), "code_i": CodeI(), "code_f": CodeF(inputs_per_task=INPUTS_PER_CODE_F)}


def as_task(kind: str, example: Example, rng: random.Random) -> Task:
    """The task of `kind` about an example; code_f takes all its pairs in random order and shows the first half."""
    pairs = list(zip(example.inputs, example.outputs, strict=True))
    rng.shuffle(pairs)
    is_f = kind == "code_f"
    inputs, outputs = zip(*(pairs if is_f else pairs[:1]), strict=True)
    return Task(
        kind,
        example.program.text,
        tuple(map(values.encode, inputs)),
        tuple(map(values.encode, outputs)),
        example.program.message if is_f else "",
        len(pairs) // 2 if is_f else 0,
    )


def random_task(kind: str, level: int, writer: DialogueWriter) -> Task:
    return as_task(kind, writer.varied_example(level), writer.rng)


def write_seed_tasks(path: Path, count: int = 256, seed: int = 0) -> None:
    """Writes `count` different tasks, kinds and levels 1 to 4 in turn, each with its `level`."""
    writer, archive, lines = DialogueWriter(random.Random(f"{seed}:seed tasks")), TaskArchive(), []
    combinations = [(kind, level) for level in TRAINED_LEVELS for kind in kinds()]
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
    Results on a list of tasks.

    Args:
        samples (`np.ndarray`): bool `[tasks, SAMPLES]`, right at temperature 1.
        greedy (`np.ndarray`): bool `[tasks]`.
    """

    samples: np.ndarray
    greedy: np.ndarray

    def figures(self) -> dict[str, float]:
        """The figures of the gate; a group without spread is all right or all wrong."""
        rate = self.samples.mean(axis=1)
        return {
            "pass@1": float(rate.mean()),
            "any of 8": float((rate > 0).mean()),
            "greedy": float(self.greedy.mean()),
            "no spread": float(((rate == 0) | (rate == 1)).mean()),
            "none right": float((rate == 0).mean()),
        }


class Scorer:
    """
    Generates with a model and grades with the real kinds and the real sandbox.

    Args:
        directory (`Path`): Model directory.
        sandbox (`Sandbox`): Runs proposals and trials.
        seed (`int`): Fixes tasks and samples.
        batch (`int`, *optional*, defaults to `320`): Completions generated at a time.
    """

    def __init__(self, directory: Path, sandbox: Sandbox, seed: int, batch: int = 320):
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.sandbox = sandbox
        self.kinds = kinds()
        self.rng = random.Random(f"{seed}:scores")
        self.batch = batch
        torch.manual_seed(seed)

    def complete(self, prompts: Sequence[list[dict[str, str]]], limit: int, sample: bool) -> list[str]:
        """One completion per prompt, without its end of turn; similar lengths share a batch."""
        texts = [
            self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in prompts
        ]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        completions = [""] * len(texts)
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            inputs = self.tokenizer([texts[index] for index in chosen], return_tensors="pt", padding=True)
            with torch.no_grad():
                output = self.model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=limit,
                    do_sample=sample,
                    temperature=1.0 if sample else None,
                )
            decoded = self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for index, text in zip(chosen, decoded, strict=True):
                completions[index] = text
        return completions

    def solve(self, kind: TaskKind, tasks: Sequence[Task]) -> Solved:
        """`SAMPLES` attempts and a greedy one at each task."""
        limit = MAX_NEW_TOKENS[f"solve {kind.name}"]
        prompts = [kind.solving_prompt(task, "compact") for task in tasks]
        sampled = self.complete([prompt for prompt in prompts for _ in range(SAMPLES)], limit, sample=True)
        greedy = self.complete(prompts, limit, sample=False)
        right = self.grade(kind, [task for task in tasks for _ in range(SAMPLES)] + list(tasks), sampled + greedy)
        cut = len(tasks) * SAMPLES
        return Solved(right[:cut].reshape(len(tasks), SAMPLES), right[cut:])

    def grade(self, kind: TaskKind, tasks: Sequence[Task], texts: Sequence[str]) -> np.ndarray:
        attempts = [kind.parse_attempt(text, task) for text, task in zip(texts, tasks, strict=True)]
        jobs = [kind.trial(task, attempt) for task, attempt in zip(tasks, attempts, strict=True)]
        verdicts = self.run(jobs)
        return np.array(list(map(kind.correct, tasks, attempts, verdicts)), dtype=bool)

    def run(self, jobs: Sequence) -> list:
        """Verdicts of the jobs that are not `None`; equal jobs run once."""
        different = list(dict.fromkeys(job for job in jobs if job is not None))
        verdicts = dict(zip(different, self.sandbox.run(different), strict=True))
        return [None if job is None else verdicts[job] for job in jobs]

    def propose(self, kind: TaskKind, count: int) -> list[Task | Reject]:
        """What becomes of `count` proposals with fresh references of mixed levels."""
        writer = DialogueWriter(self.rng, held_out=True)
        references = [
            [
                random_task("code_o", writer.level(PROPOSED_LEVEL_WEIGHTS), writer)
                for _ in range(kind.reference_count(REFERENCES))
            ]
            for _ in range(count)
        ]
        prompts = [kind.proposal_prompt(shown, "compact") for shown in references]
        texts = self.complete(prompts, MAX_NEW_TOKENS["propose"], sample=True)
        parsed = [kind.parse_proposal(text, shown) for text, shown in zip(texts, references, strict=True)]
        verdicts = self.run([None if isinstance(item, Reject) else kind.check(item) for item in parsed])
        return [
            item if isinstance(item, Reject) else kind.accept(item, verdict, self.rng)
            for item, verdict in zip(parsed, verdicts, strict=True)
        ]


def score(directory: Path, tasks: int, seed: int = 0) -> dict:
    """All figures of the model card; `tasks` per kind and level, twice as many proposals per kind."""
    figures: dict = {"solve": {}, "propose": {}}
    began = time.perf_counter()
    with Sandbox() as sandbox:
        scorer = Scorer(directory, sandbox, seed)
        for name, kind in scorer.kinds.items():
            outcomes = scorer.propose(kind, 2 * tasks)
            valid = [outcome for outcome in outcomes if isinstance(outcome, Task)]
            rejects = [str(outcome) for outcome in outcomes if isinstance(outcome, Reject)]
            archive = TaskArchive()
            figures["propose"][name] = {
                "valid": len(valid) / len(outcomes),
                "distinct": sum(map(archive.add, valid)) / max(1, len(valid)),
                "rejects": {reason: rejects.count(reason) for reason in sorted(set(rejects))},
                **(scorer.solve(kind, valid[:tasks]).figures() if valid else {}),
            }
            print(f"{time.perf_counter() - began:5.0f} s | propose {name}: {figures['propose'][name]}", flush=True)
            for level in OPERATIONS_AT_LEVEL:
                writer = DialogueWriter(random.Random(f"{seed}:{name}:{level}"), held_out=True)
                solved = scorer.solve(kind, [random_task(name, level, writer) for _ in range(tasks)])
                figures["solve"][f"{name} {level}"] = solved.figures()
                rounded = {key: round(value, 3) for key, value in solved.figures().items()}
                print(f"{time.perf_counter() - began:5.0f} s | solve {name} level {level}: {rounded}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--tasks", type=int, default=40, help="per kind and level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--card", action="store_true", help="write the model card, `README.md`, into --model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # at these sizes a second thread costs more than it brings
    if not (arguments.model / "training.json").is_file():
        parser.error(f"{arguments.model} was not written by make_tiny_base.py: it has no training.json")
    figures = score(arguments.model, arguments.tasks, arguments.seed)
    if arguments.card:
        made = json.loads((arguments.model / "training.json").read_text(encoding="utf-8"))["made"]
        (arguments.model / "README.md").write_text(model_card(figures, arguments.tasks, made), encoding="utf-8")


if __name__ == "__main__":
    main()
