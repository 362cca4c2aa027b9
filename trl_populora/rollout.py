"""Phases 1 to 4 of a population step: match, propose, verify, solve.

[`play_step`] is the whole game of one step, read top to bottom. It knows nothing of TRL: the trainer hands in a
`generate` callable that routes every row to its member, and turns the rows that come back into a training batch.

Shapes: R rows of this rank, P proposals per teacher on this rank, G attempts per task.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trl_populora.matchmaking import Match, Matchmaker, student_share
from trl_populora.population import Population
from trl_populora.room import is_too_long, proposal_prompt, solving_prompt
from trl_populora.sandbox import Job, Runner, Verdict
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.base import Attempt, Proposal, Reject, Task, TaskKind, checked
from trl_populora.tasks.control import THINK_TAGS, screen
from trl_populora.tasks.fences import has_thinking


Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Completion:
    """One sampled completion: token ids as the trainer needs them, and the text without the end-of-turn token."""

    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    logprobs: list[float] | None = None


@dataclass
class Row:
    """
    One training row. The fields up to `chance` are the columns that reward functions and records see; `dropped` counts
    references that a proposal prompt had no room for.
    """

    role: str
    member: str
    kind: str
    match: int
    task_id: str = ""
    valid: bool = False
    reject_reason: str = ""
    solve_rate: float = float("nan")
    correct: bool = False
    well_formed: bool = False
    chance: float = 0.0
    archived: bool = False
    dropped: int = 0
    prompt: Messages = field(default_factory=list)
    completion: Completion = Completion([], [], "")
    group: str = ""

    COLUMNS = (
        "role",
        "member",
        "kind",
        "match",
        "task_id",
        "valid",
        "reject_reason",
        "solve_rate",
        "correct",
        "well_formed",
        "chance",
    )


@dataclass
class Game:
    """
    What a step is played with.

    Args:
        population, matchmaker, archive: The nouns that carry over from step to step, identical on every rank.
        kinds (`Mapping[str, TaskKind]`): The run's task kinds, in rotation order.
        sandbox (`Runner`): Runs every program that a model wrote.
        generate (`Callable`): `(prompts, members, seen=None, seed=None) -> completions`, one completion per prompt, in
            order. An engine that answers some rows before others may call `seen(row, text)` for them, from this thread.
            With a `seed` the samples depend on it and the rows alone, and no other generator moves.
        gather (`Callable`): Collects one picklable object per rank into a list in rank order.
        proposals (`int`): Proposals per teacher over all ranks.
        attempts (`int`): Attempts per task, G.
        references (`int`): Archived tasks shown to a proposing teacher, K.
        style (`str`): Prompt style, `"chat"` or `"compact"`.
        seed (`int`): With the step and the rank it decides every random choice, so that a resumed run repeats them.
        forbidden (`tuple[str, ...]`): Texts that no task may contain, see `tasks/control.py`.
        iterations (`int`): Optimizer steps from one play to the next.
        held_out (`Container[Task]`): Tasks that nobody may train on.
        room (`Callable`): How many tokens of the context a prompt leaves free beside the longest completion; below 0
            it does not fit.
        rank, world (`int`): This process and their number.
    """

    population: Population
    matchmaker: Matchmaker
    archive: TaskArchive
    kinds: Mapping[str, TaskKind]
    sandbox: Runner
    generate: Callable[..., list[Completion]]
    gather: Callable[[Any], list[Any]]
    proposals: int
    attempts: int
    references: int
    style: str
    seed: int
    forbidden: tuple[str, ...] = THINK_TAGS
    iterations: int = 1
    held_out: Container[Task] = ()
    room: Callable[[Messages], int] = lambda prompt: 0
    rank: int = 0
    world: int = 1
    queued: dict[Job, Future[Verdict]] = field(default_factory=dict)

    def queue(self, job: Job | None) -> Future[Verdict] | None:
        """Gives a job to the sandbox, once however often it is queued until `forget_queued`."""
        if job is not None and job not in self.queued:
            self.queued[job] = self.sandbox.submit(job)
        return None if job is None else self.queued[job]

    def forget_queued(self) -> None:
        """After a phase: the same job is run again in the next."""
        for future in self.queued.values():
            future.cancel()
        self.queued.clear()


@dataclass
class Played:
    """Rows of this rank (the attempts, group by group, then the proposals), metrics over all ranks, seconds a phase."""

    rows: list[Row]
    metrics: dict[str, float]
    seconds: dict[str, float]


def play_step(game: Game, step: int) -> Played:
    """
    Plays one step: pairs the members, lets teachers propose and students solve, and updates ratings and archive.

    Every rank plays its share of every match. Ratings and archive are updated from what all ranks saw, in rank order,
    so they stay identical everywhere.

    Args:
        game (`Game`): The players and the rules.
        step (`int`): Number of the step, from 0.

    Returns:
        `Played`: `teachers * P * (1 + G)` rows of this rank, with `P` its share of the proposals.
    """
    rng = random.Random(f"{game.seed}/{step}/{game.rank}")
    seconds: dict[str, float] = {}
    with _timed(seconds, "match"):
        matches = game.matchmaker.pair(game.population)
    with _timed(seconds, "propose"):
        proposals, references = _propose(game, matches, step, rng)
    with _timed(seconds, "verify"):
        fillers = _fillers(game, proposals, rng)
        known = game.archive.programs
        outcomes = _verify(game, proposals, references, step, rng)
    with _timed(seconds, "solve"):
        tasks = [o if isinstance(o, Task) else filler for o, filler in zip(outcomes, fillers, strict=True)]
        attempts = _solve(game, matches, proposals, tasks)
    with _timed(seconds, "verify"):
        _grade_attempts(game, proposals, tasks, attempts)
    rows = attempts + proposals
    records = [record for part in game.gather([_record(row) for row in rows]) for record in part]
    game.matchmaker.update(game.population, _shares(matches, records))
    fresh = [task for part in game.gather(outcomes) for task in part if isinstance(task, Task)]
    _note_results(game, fresh, records)
    return Played(rows, step_metrics(game, records, fresh, game.archive.programs - known), seconds)


def _propose(
    game: Game, matches: Sequence[Match], step: int, rng: random.Random
) -> tuple[list[Row], list[list[Task]]]:
    """Phase 2: every teacher writes its proposals, the kinds in rotation (shifted each step, so all get their turn)."""
    kinds = list(game.kinds.values())
    share = game.proposals // game.world
    rows, references = [], []
    for match in matches:
        for slot in range(game.rank * share, (game.rank + 1) * share):
            kind = kinds[(slot + step // game.iterations) % len(kinds)]
            drawn = game.archive.sample(kind.reference_kinds, kind.reference_count(game.references), rng)
            prompt, shown = proposal_prompt(game, kind, drawn)
            group, dropped = f"match {match.index}", len(drawn) - len(shown)
            rows.append(
                Row("teacher", match.teacher, kind.name, match.index, dropped=dropped, prompt=prompt, group=group)
            )
            references.append(shown)

    def seen(number: int, text: str) -> None:
        _begin_check(game, rows[number].kind, text, references[number])

    _complete(game, rows, seen)
    return rows, references


def _complete(game: Game, rows: Sequence[Row], seen: Callable[[int, str], None]) -> None:
    """Generates the rows' completions; what `seen` queues runs meanwhile."""
    completions = game.generate([row.prompt for row in rows], [row.member for row in rows], seen)
    for row, completion in zip(rows, completions, strict=True):
        row.completion = completion


def _verify(
    game: Game, rows: Sequence[Row], references: Sequence[Sequence[Task]], step: int, rng: random.Random
) -> list[Task | Reject]:
    """Phase 3: the sandbox decides which proposals are tasks; a task that anyone proposed before is a duplicate."""
    judged = judge(game, [row.kind for row in rows], [row.completion.text for row in rows], references, rng)
    outcomes: list[Task | Reject] = [
        outcome
        if isinstance(outcome, Reject)
        else Reject.HELD_OUT
        if outcome in game.held_out
        else replace(outcome, author=row.member, step=step)
        for row, outcome in zip(rows, judged, strict=True)
    ]
    for rank, part in enumerate(game.gather(outcomes)):
        for index, outcome in enumerate(part):
            if isinstance(outcome, Task) and not game.archive.add(outcome) and rank == game.rank:
                outcomes[index] = Reject.DUPLICATE
    for row, outcome in zip(rows, outcomes, strict=True):
        row.valid = isinstance(outcome, Task)
        row.task_id = outcome.task_id if isinstance(outcome, Task) else ""
        row.reject_reason = "" if isinstance(outcome, Task) else outcome.value
        row.well_formed = outcome is not Reject.FORMAT
    return outcomes


def judge(
    game: Game, kinds: Sequence[str], texts: Sequence[str], references: Sequence[Sequence[Task]], rng: random.Random
) -> list[Task | Reject]:
    """What the proposals are, each on its own: a task, or the reason why not. Duplicates are not looked for."""
    begun = [_begin_check(game, *each) for each in zip(kinds, texts, references, strict=True)]
    outcomes = [_accept(game, kind, *each, rng) for kind, each in zip(kinds, begun, strict=True)]
    game.forget_queued()
    return outcomes


def _begin_check(
    game: Game, kind: str, text: str, shown: Sequence[Task]
) -> tuple[Proposal | Reject, Future[Verdict] | None]:
    """Reads a proposal and queues what the sandbox has to run for it."""
    parsed = checked(kind, "parse_proposal", game.kinds[kind].parse_proposal(text, shown), (Proposal, Reject))
    proposal = screen(parsed, game.forbidden)
    job = game.kinds[kind].check(proposal) if isinstance(proposal, Proposal) else None
    return proposal, game.queue(job)


def _accept(
    game: Game, kind: str, proposal: Proposal | Reject, run: Future[Verdict] | None, rng: random.Random
) -> Task | Reject:
    """What became of a proposal; its outputs are known only now."""
    if isinstance(proposal, Reject):
        return proposal
    accepted = checked(kind, "accept", game.kinds[kind].accept(proposal, _verdict(run), rng), (Task, Reject))
    outcome = screen(accepted, game.forbidden)
    return Reject.TOO_LONG if isinstance(outcome, Task) and is_too_long(game, outcome) else outcome


def _fillers(game: Game, rows: Sequence[Row], rng: random.Random) -> list[Task]:
    """One archived task per proposal, of its kind where there is one: it takes the student's time if that is invalid."""
    names = list(game.kinds)
    return [(game.archive.sample([row.kind], 1, rng) or game.archive.sample(names, 1, rng))[0] for row in rows]


def _solve(game: Game, matches: Sequence[Match], proposals: Sequence[Row], tasks: Sequence[Task]) -> list[Row]:
    """Phase 4: the matched student attempts each task G times."""
    student = {match.index: match.student for match in matches}
    rows: list[Row] = []
    for slot, (proposal, task) in enumerate(zip(proposals, tasks, strict=True)):
        prompt = solving_prompt(game, task)
        name = student[proposal.match]
        rows += [
            Row(
                "student",
                name,
                task.kind,
                proposal.match,
                task.task_id,
                valid=True,
                archived=not proposal.valid,
                prompt=prompt,
                group=f"rank {game.rank} task {slot}",
            )
            for _ in range(game.attempts)
        ]

    def seen(number: int, text: str) -> None:
        task = tasks[number // game.attempts]
        kind = game.kinds[task.kind]
        game.queue(kind.trial(task, kind.parse_attempt(text, task)))

    _complete(game, rows, seen)
    return rows


def _grade_attempts(game: Game, proposals: Sequence[Row], tasks: Sequence[Task], rows: Sequence[Row]) -> None:
    """Phase 4: the sandbox grades; the share of right answers is the proposal's rho."""
    owners = [task for task in tasks for _ in range(game.attempts)]
    answers = [
        game.kinds[task.kind].parse_attempt(row.completion.text, task) for task, row in zip(owners, rows, strict=True)
    ]
    for row, answer, is_right in zip(rows, answers, grade(game, owners, answers), strict=True):
        row.well_formed, row.correct, row.reject_reason = answer.well_formed, is_right, answer.reason
    for slot, proposal in enumerate(proposals):
        group = rows[slot * game.attempts : (slot + 1) * game.attempts]
        rho = sum(row.correct for row in group) / game.attempts
        for row in group:
            row.solve_rate = rho
        if proposal.valid:
            task = tasks[slot]
            proposal.solve_rate, proposal.chance = rho, game.kinds[task.kind].chance(task)


def grade(game: Game, tasks: Sequence[Task], answers: Sequence[Attempt]) -> list[bool]:
    """Which answers are right; equal answers to one task run once."""
    distinct = {(task.task_id, task.kind, answer): task for task, answer in zip(tasks, answers, strict=True)}
    runs = [game.queue(game.kinds[kind].trial(task, answer)) for (_, kind, answer), task in distinct.items()]
    right = {
        key: key[2].well_formed
        and checked(key[1], "correct", game.kinds[key[1]].correct(task, key[2], _verdict(run)), (bool,))
        for (key, task), run in zip(distinct.items(), runs, strict=True)
    }
    game.forget_queued()
    return [right[task.task_id, task.kind, answer] for task, answer in zip(tasks, answers, strict=True)]


def _verdict(run: Future[Verdict] | None) -> Verdict | None:
    return None if run is None else run.result()


def _record(row: Row) -> dict[str, Any]:
    """What the other ranks need to know of a row."""
    return {name: getattr(row, name) for name in (*Row.COLUMNS, "archived", "dropped", "group")} | {
        "thinking": has_thinking(row.completion.text)
    }


def _note_results(game: Game, tasks: Sequence[Task], records: Sequence[dict[str, Any]]) -> None:
    """Writes into the archive how this step's tasks fared and how complex they are."""
    results = {r["task_id"]: r for r in records if r["role"] == "teacher" and r["valid"]}
    for task in tasks:
        result, complexity = results[task.task_id], game.kinds[task.kind].complexity(task)
        game.archive.note(task, match=result["match"], solve_rate=result["solve_rate"], **complexity)


def _shares(matches: Sequence[Match], records: Sequence[dict[str, Any]]) -> dict[Match, list[float]]:
    """The student's share of each of the teacher's proposals, per match (archived tasks do not count)."""
    shares: dict[int, list[float]] = {match.index: [] for match in matches}
    for record in records:
        if record["role"] == "teacher":
            share = student_share(record["valid"], record["solve_rate"], record["chance"])
            shares[record["match"]].append(share)
    return {match: shares[match.index] for match in matches}


def step_metrics(
    game: Game, records: Sequence[dict[str, Any]], tasks: Sequence[Task], new_programs: int
) -> dict[str, float]:
    """
    Metrics of one step over all ranks; every key is present at every step, NaN where nothing was seen.

    Args:
        game (`Game`): Names the kinds.
        records (`Sequence[dict]`): All ranks' rows, as their columns.
        tasks (`Sequence[Task]`): All ranks' valid tasks of this step.
        new_programs (`int`): How many programs, constants apart, no earlier task had.
    """
    proposals = [r for r in records if r["role"] == "teacher"]
    valid = [r for r in proposals if r["valid"]]
    attempts = [r for r in records if r["role"] == "student"]
    fresh = [r for r in attempts if not r["archived"]]
    written = sum(game.kinds[task.kind].writes_program for task in tasks)
    metrics = {
        "propose/valid_rate": _mean([r["valid"] for r in proposals]),
        "propose/novel_rate": new_programs / written if written else float("nan"),
        "propose/dropped_references": float(sum(r["dropped"] for r in proposals)),
        "solve/rate": _mean([r["correct"] for r in fresh]),
        "solve/archive_rate": _mean([r["correct"] for r in attempts if r["archived"]]),
        "solve/thinking_rate": _mean([r["thinking"] for r in attempts]),
        "solve/well_formed": _mean([r["well_formed"] for r in attempts]),
        "solve/frac_none": _mean([r["solve_rate"] == 0 for r in valid]),
        "solve/frac_chance": _mean([0 < r["solve_rate"] <= r["chance"] for r in valid]),
        "solve/frac_all": _mean([r["solve_rate"] == 1 for r in valid]),
    }
    for kind in game.kinds:
        metrics[f"propose/{kind}/valid_rate"] = _mean([r["valid"] for r in proposals if r["kind"] == kind])
        metrics[f"solve/{kind}/rate"] = _mean([r["correct"] for r in fresh if r["kind"] == kind])
    for reason in Reject:
        metrics[f"verify/reject/{reason.value}"] = float(sum(r["reject_reason"] == reason.value for r in proposals))
    complexities = [game.kinds[task.kind].complexity(task) for task in tasks]
    declared = {name for kind in game.kinds.values() for name in kind.measures}
    for name in sorted({key for complexity in complexities for key in complexity} | declared | set(CURRICULUM)):
        metrics[f"curriculum/{name}"] = _mean([c[name] for c in complexities if name in c])
    return metrics


CURRICULUM = ("ast_depth", "cyclomatic", "lines", "variables")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds to the wall time of a phase."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
