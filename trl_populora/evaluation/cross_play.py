"""How good members are outside the step: solve rates on given tasks, and cross-play of saved populations.

Nothing here touches ratings, archives or adapters of a run. Benchmarks that people quote are `populora evaluate`'s.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from peft import LoraConfig
from tqdm import tqdm

from trl_populora.hub.publishing import fetch
from trl_populora.population.members import read_population
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.populora_trainer import PopuLoRATrainer
from trl_populora.report.payoff import Payoff
from trl_populora.runs.checkpoint import write_member_file
from trl_populora.runs.saved_population import SAMPLING, check_same_shape
from trl_populora.step.held_out import attempt
from trl_populora.step.rollout import Game
from trl_populora.tasks import TASK_KINDS, load_seed_tasks, resolve_kind
from trl_populora.tasks.archive import read_task
from trl_populora.tasks.base import Task


logger = logging.getLogger(__name__)


def solve_rates(game: Game, member: str, tasks: Sequence[Task], attempts: int = 1, batch: int = 64) -> list[float]:
    """
    Lets one member attempt every task, sampled as in training.

    Args:
        game (`Game`): The trainer's `game`.
        member (`str`): Name of the member.
        tasks (`Sequence[Task]`): What to solve.
        attempts (`int`, *optional*, defaults to `1`): Attempts per task.
        batch (`int`, *optional*, defaults to `64`): Rows generated at once.

    Returns:
        `list[float]`: Fraction of right attempts per task, in the order of the tasks.
    """
    tried = attempt(game, [member], tasks, attempts, batch)[member]
    return [fmean(outcome.correct for outcome in group) for group in tried]


def score_members(game: Game, members: Sequence[str], tasks: Sequence[Task], attempts: int = 4) -> dict[str, float]:
    """
    Each member's mean solve rate on the same tasks, teachers included: what it can do outside its matches.

    Raises:
        `ValueError`: If no task is of a kind that the game plays; others are left out.
    """
    known = [task for task in tasks if task.kind in game.referee.kinds]
    if not known:
        kinds = ", ".join(sorted({task.kind for task in tasks})) or "no kind"
        raise ValueError(f"The given tasks are of {kinds}; these members play {', '.join(game.referee.kinds)}.")
    bar = tqdm(members, desc="given tasks", unit="member")
    return {member: fmean(solve_rates(game, member, known, attempts)) for member in bar}


def cross_play(
    game: Game,
    teachers: Sequence[str],
    students: Sequence[str],
    proposals: int = 12,
    attempts: int = 4,
    seed: int = 0,
) -> Payoff:
    """
    Every student attempts fresh proposals of every teacher.

    All teachers are shown the same references, drawn from the game's archive, and all students attempt the same tasks.

    Args:
        game (`Game`): The trainer's `game`.
        teachers, students (`Sequence[str]`): Members to play, by name.
        proposals (`int`, *optional*, defaults to `12`): Proposals per teacher, the game's kinds in rotation.
        attempts (`int`, *optional*, defaults to `4`): Attempts of each student at each valid task.
        seed (`int`, *optional*, defaults to `0`): Chooses the references.

    Returns:
        [`Payoff`]: Its matrix is `[T][S]`.
    """
    rng = random.Random(f"cross-play/{seed}")
    names = list(game.referee.kinds)
    kinds = [names[slot % len(names)] for slot in range(proposals)]
    prompts, references = [], []
    for kind in map(game.referee.kinds.__getitem__, kinds):
        drawn = game.archive.sample(kind.reference_kinds, kind.reference_count(game.references), rng)
        prompt, shown = game.referee.proposal_prompt(kind, drawn)
        prompts.append(prompt)
        references.append(shown)
    payoff = Payoff(list(teachers), list(students))
    for teacher in tqdm(teachers, desc="cross-play", unit="teacher"):
        texts = [completion.text for completion in game.player.generate(prompts, [teacher] * proposals)]
        tasks = [task for task in game.referee.judge(kinds, texts, references, rng) if isinstance(task, Task)]
        payoff.valid.append(len(tasks) / proposals)
        payoff.solved.append(
            [fmean(solve_rates(game, student, tasks, attempts)) if tasks else math.nan for student in students]
        )
    return payoff


def assemble(
    runs: Sequence[str], output_dir: str, tasks: Dataset | None = None, **settings
) -> tuple[PopuLoRATrainer, dict[str, str]]:
    """
    Loads the members of several saved populations on one base, side by side.

    Args:
        runs (`Sequence[str]`): Directories (runs or their checkpoints) or Hub names of saved populations. They share
            base and adapter shape; kinds, prompt style, lengths and sampling are the first one's. A warning tells where
            the kinds differ.
        output_dir (`str`): A directory for what a trainer needs to write.
        tasks ([`~datasets.Dataset`], *optional*): Tasks to draw references from; by default the package's own and,
            for a user's own kinds, those in the archives of the runs.
        settings: Further settings of [`PopuLoRAConfig`].

    Returns:
        A trainer that is not to be trained, and the contestants: for each of its members a readable name.

    Raises:
        `ValueError`: If a population is given twice, cannot be read, or does not fit the first one; names file and
            field.
    """
    roots = [fetch(run) for run in runs]
    if len({root.resolve() for root in roots}) < len(roots):
        raise ValueError(f"A population plays once, but `runs` names one twice: {', '.join(runs)}.")
    prefixes = told_apart(runs)
    saved = [read_population(root) for root in roots]
    entries = {
        role: [(i, m) for i, population in enumerate(saved) for m in population["members"] if m["role"] == role]
        for role in ("teacher", "student")
    }
    first, shape = saved[0]["settings"], saved[0]["lora"]
    on_cpu = not torch.cuda.is_available()
    defaults = {
        "task_kinds": first["task_kinds"],
        "prompt_style": saved[0]["prompt_style"],
        "references_per_proposal": first["references_per_proposal"],
        "inputs_per_function": first["inputs_per_function"],
        "max_completion_length": first.get("max_completion_length", PopuLoRAConfig.max_completion_length),
        "model_init_kwargs": {"dtype": "float32" if on_cpu else "bfloat16"},
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "report_to": [],
    }
    defaults |= {name: first[name] for name in SAMPLING if name in first}  # older files lack them
    kinds = settings.get("task_kinds", first["task_kinds"])
    others = {run: population["settings"]["task_kinds"] for run, population in zip(runs, saved, strict=True)}
    if any(set(theirs) != set(kinds) for theirs in others.values()):
        trained = "; ".join(f"{run} was trained on {', '.join(theirs)}" for run, theirs in others.items())
        logger.warning("The kinds of task differ: %s. All play %s.", trained, ", ".join(kinds))
    if tasks is None:
        tasks = references_of(kinds, roots)
    # The batch is never played: the smallest that the arithmetic allows.
    batch = {"proposals_per_teacher": 2, "attempts_per_task": 2, "per_device_train_batch_size": 1, "evolve_every": 0}
    given = {"teacher_baseline": "group"} | settings  # nor are advantages taken
    counts = {"teachers": len(entries["teacher"]), "students": len(entries["student"])}
    trainer = PopuLoRATrainer(
        saved[0]["base_model"],
        args=PopuLoRAConfig(output_dir, **(defaults | batch | counts | given)),
        train_dataset=tasks,
        peft_config=LoraConfig(**shape),
    )
    for root in roots:
        check_same_shape(root, trainer.shape)
    names = {}
    for role, contestants in entries.items():
        for slot, (index, member) in zip(trainer.population.role(role), contestants, strict=True):
            path = roots[index] / member["adapter"] / "adapter_model.safetensors"
            write_member_file(trainer.model_wrapped, slot.name, path)
            names[slot.name] = prefixes[index] + member["name"]
    return trainer, names


def references_of(kinds: Sequence[str], roots: Sequence[Path]) -> Dataset | None:
    """
    Tasks that teachers of these kinds can be shown: the package's, and what the runs' archives hold of a user's own kinds.

    Args:
        kinds (`Sequence[str]`): As in `task_kinds`.
        roots (`Sequence[Path]`): Directories of saved populations.

    Returns:
        [`~datasets.Dataset`] or `None`: `None` where no kind is a user's own.

    Raises:
        `ValueError`: If there is no archive, or a broken one.
    """
    own = [kind.name for kind in map(resolve_kind, kinds) if kind.name not in TASK_KINDS]
    if not own:
        return None
    archives = [path for root in roots if (path := root / "archive.parquet").exists()]
    if not archives:
        raise ValueError(
            f"No archive.parquet in {', '.join(map(str, roots))}: teachers are shown tasks of the kind {', '.join(own)} from it. "
            "Give a run or a checkpoint that was saved whole."
        )
    records = [row for path in archives for row in pq.read_table(path, filters=[("kind", "in", own)]).to_pylist()]
    tasks = [*load_seed_tasks(), *(read_task(record, "archive.parquet") for record in records)]
    return Dataset.from_list([task.to_record() for task in tasks])


def told_apart(runs: Sequence[str]) -> list[str]:
    """What to put before a member's name so that members of different runs differ; nothing for a single run."""
    if len(runs) == 1:
        return [""]
    paths = [Path(run) for run in runs]
    one_sort = len({path.is_absolute() for path in paths}) == 1
    common = os.path.commonpath(paths) if one_sort else ""
    if not common or Path(common) in paths:
        return [f"{run} " for run in runs]
    return [f"{path.relative_to(common)} " for path in paths]
