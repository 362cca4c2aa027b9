"""The game of a population step, [`play_step`] from top to bottom: match, propose, verify and solve.

It knows nothing of TRL: a [`Player`] answers prompts, a [`Referee`] decides what is true, and [`Played`] holds all
that the step leaves. Shapes: R rows of this rank, P proposals per teacher on this rank, G attempts per task.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trl_populora.population.matchmaking import Match, Matchmaker
from trl_populora.population.members import Population
from trl_populora.step.own import Metrics, add_metrics
from trl_populora.step.played import Played, Row, in_a_line
from trl_populora.step.player import Player
from trl_populora.step.referee import Referee
from trl_populora.step.rules import Rules, count_guessed
from trl_populora.tasks.answers import measure_complexity
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.base import Refusal, Reject, Task
from trl_populora.tasks.complexity import PROGRAM_MEASURES
from trl_populora.tasks.features import CANDIDATES, Features, draw_evenly, name_features


@dataclass
class Game:
    """
    What a step is played with.

    Args:
        population, matchmaker, archive: Their state carries over from step to step; it is the same on every rank.
        referee ([`Referee`]): What is a task and what is right.
        player ([`Player`]): Generates for the members.
        proposals (`int`): Proposals per teacher over all ranks.
        attempts (`int`): Attempts per task, G.
        references (`int`): Archived tasks shown to a proposing teacher, K.
        students_per_task (`int`): 1: the match's student makes all attempts at a proposal. 2: it makes half of them,
            and a second student makes the others.
        replays (`int`): Archived tasks per match that its student attempts beside the proposals, over all ranks.
        shuffle (`bool`): Where there are no teachers: whether a pass through the given tasks is in a new order.
        rules ([`Rules`]): What a proposal and an attempt are worth.
        features ([`Features`]): What the last tasks use; carries over from step to step, too.
        metrics (`Sequence[Callable]`): Further metrics, of the records of a step's rows.
        seed (`int`): Seeds, with step and rank, what a step draws; pairs and tokens have generators of their own.
        iterations (`int`): Optimizer steps from one play to the next.
    """

    population: Population
    matchmaker: Matchmaker
    archive: TaskArchive
    referee: Referee
    player: Player
    proposals: int
    attempts: int
    references: int
    seed: int
    iterations: int = 1
    students_per_task: int = 1
    replays: int = 0
    shuffle: bool = True
    rules: Rules = Rules()
    features: Features = field(default_factory=Features)
    metrics: Sequence[Metrics] = ()


def play_step(game: Game, done: int) -> Played:
    """
    Plays one step: pairs the members, lets teachers propose and students solve, and updates ratings and archive.

    Every rank plays its share of every match. Ratings and archive are updated from what all ranks saw, in rank order,
    so they stay identical everywhere.

    Args:
        game (`Game`): The players and the rules.
        done (`int`): Optimizer steps before this one, which is step `done + 1` wherever steps are written down.

    Returns:
        `Played`: With `teachers * (P + (P + replays) * G)` rows of this rank, where P and replays are this rank's
            part, the totals divided by the number of processes; without teachers `students * P * G`.
    """
    rng = random.Random(f"{game.seed}/{done}/{game.player.rank}")
    seconds: dict[str, float] = {}
    with _time(seconds, "match"):
        matches = game.matchmaker.pair(game.population)
    with _time(seconds, "propose"):
        taught = [match for match in matches if match.teacher]
        proposals, references = _propose(game, taught, done, rng)
    with _time(seconds, "verify"):
        fillers, further = _fillers(game, proposals, rng), _draw_replays(game, matches, rng)
        further += [(match, task) for match in matches if not match.teacher for task in _next_given(game, done)]
        known = game.archive.programs
        outcomes, fresh = _verify(game, proposals, references, done + 1, rng)
        words = _count_features(game, fresh)
    with _time(seconds, "solve"):
        tasks = [o if isinstance(o, Task) else filler for o, filler in zip(outcomes, fillers, strict=True)]
        attempts = _solve(game, matches, proposals, tasks, further)
    with _time(seconds, "verify"):
        _grade(game, proposals, [*tasks, *(task for _, task in further)], attempts)
        _price(game, proposals, attempts, words)
    rows = attempts + proposals
    records = [record for part in game.player.gather([row.record() for row in rows]) for record in part]
    game.matchmaker.update(game.population, _shares(matches, records))
    complexities = _note_results(game, fresh, records)
    played = Played(rows, records, fresh, seconds)
    played.metrics = step_metrics(game, played, complexities, game.archive.programs - known)
    for noun in (game.matchmaker, game.population, game.archive, game.features):
        played.metrics |= noun.metrics()
    for tell in game.metrics:
        add_metrics(played.metrics, tell(records))
    return played


def _propose(
    game: Game, matches: Sequence[Match], done: int, rng: random.Random
) -> tuple[list[Row], list[list[Task]]]:
    """
    Lets every teacher write its proposals, the kinds in rotation (shifted each step, so all get their turn).
    """
    kinds = list(game.referee.kinds.values())
    share = game.proposals // game.player.world
    rows, references = [], []
    for match in matches:
        for slot in range(game.player.rank * share, (game.player.rank + 1) * share):
            kind = kinds[(slot + done // game.iterations) % len(kinds)]
            drawn = game.referee.draw_references(kind, game.archive, game.references, rng)
            prompt, shown = game.referee.proposal_prompt(kind, drawn)
            group, dropped = f"match {match.index}", len(drawn) - len(shown)
            rows.append(
                Row("teacher", match.teacher, kind.name, match.index, dropped=dropped, prompt=prompt, group=group)
            )
            references.append(shown)
    _complete(game, rows)
    return rows, references


def _complete(game: Game, rows: Sequence[Row]) -> None:
    if not rows:  # then no rank has any, and none has to take part in `generate`
        return
    completions = game.player.generate([row.prompt for row in rows], [row.member for row in rows])
    for row, completion in zip(rows, completions, strict=True):
        row.completion = completion


def _verify(
    game: Game, rows: Sequence[Row], references: Sequence[Sequence[Task]], step: int, rng: random.Random
) -> tuple[list[Task | Refusal], list[Task]]:
    """
    Lets the sandbox decide which proposals are tasks; a task that anyone proposed before is a duplicate.

    Returns:
        What became of this rank's proposals, and the accepted tasks of all ranks.
    """
    judged = game.referee.judge([row.kind for row in rows], [row.completion.text for row in rows], references, rng)
    outcomes: list[Task | Refusal] = [
        replace(outcome, author=row.member, step=step) if isinstance(outcome, Task) else outcome
        for row, outcome in zip(rows, judged, strict=True)
    ]
    fresh = []
    for rank, part in enumerate(game.player.gather(outcomes)):
        for index, outcome in enumerate(part):
            if isinstance(outcome, Task):
                if game.archive.add(outcome):
                    fresh.append(outcome)
                elif rank == game.player.rank:
                    outcomes[index] = Refusal(Reject.DUPLICATE, "such a task was proposed or given before")
    for row, outcome in zip(rows, outcomes, strict=True):
        if isinstance(outcome, Task):
            row.valid, row.task_id, row.program = True, outcome.task_id, outcome.program
        else:
            row.reject_reason, row.reject_detail = outcome.reason.value, in_a_line(outcome.detail)
        row.well_formed = row.reject_reason != Reject.FORMAT.value
    return outcomes, fresh


def _fillers(game: Game, rows: Sequence[Row], rng: random.Random) -> list[Task]:
    """
    One archived task per proposal, of its kind where there is one: the student attempts it if the proposal is invalid.
    Drawn before the step's own tasks enter the archive, so that nobody meets a task twice.
    """
    names = list(game.referee.kinds)
    return [(game.archive.sample([row.kind], 1, rng) or game.archive.sample(names, 1, rng))[0] for row in rows]


def _draw_replays(game: Game, matches: Sequence[Match], rng: random.Random) -> list[tuple[Match, Task]]:
    """
    Archived tasks that students attempt beside the proposals, so that they keep practising what teachers no longer
    propose; drawn evenly over features. Each with the match that it belongs to.
    """
    owners = [match for match in matches for _ in range(game.replays // game.player.world)]
    if not owners:
        return []
    drawn = game.archive.sample(list(game.referee.kinds), CANDIDATES, rng)
    named = [(task, name_features(game.referee.kinds[task.kind], task)) for task in drawn]
    return list(zip(owners, draw_evenly(named, len(owners), rng), strict=True))


def _next_given(game: Game, done: int) -> list[Task]:
    """
    This rank's share of the given tasks of this step. The run goes through all tasks pass after pass, each pass in an
    order of its own.
    """
    kinds, share = list(game.referee.kinds), game.proposals // game.player.world
    size = game.archive.count(kinds)
    first = done // game.iterations * game.proposals + game.player.rank * share
    places = [divmod(place, size) for place in range(first, first + share)]
    orders = {turn: list(range(size)) for turn, _ in places}
    for turn, order in orders.items() if game.shuffle else ():
        random.Random(f"{game.seed}/pass {turn}").shuffle(order)
    return game.archive.pick(kinds, [orders[turn][place] for turn, place in places])


def _count_features(game: Game, tasks: Sequence[Task]) -> dict[str, tuple[str, ...]]:
    """Features of this step's tasks by `task_id`; all are counted first, so rarity does not depend on the order."""
    words = {task.task_id: name_features(game.referee.kinds[task.kind], task) for task in tasks}
    for task in tasks:
        game.features.add(words[task.task_id])
    return words


def _solve(
    game: Game,
    matches: Sequence[Match],
    proposals: Sequence[Row],
    tasks: Sequence[Task],
    further: Sequence[tuple[Match, Task]],
) -> list[Row]:
    """
    Lets the matched student attempt each task G times: first the tasks of the proposals, then the further ones. Where
    two students attempt each valid proposal, the rival makes the second half of the attempts, a group of its own.
    """
    students, rivals = {match.index: match.student for match in matches}, _find_rivals(game, matches)
    slots = [(p.match, task, not p.valid) for p, task in zip(proposals, tasks, strict=True)]
    slots += [(match.index, task, bool(match.teacher)) for match, task in further]
    rows: list[Row] = []
    for slot, (match, task, archived) in enumerate(slots):
        prompt, own = game.referee.solving_prompt(task), students[match]
        members = [own] * game.attempts
        if rivals and not archived:
            members[game.attempts // 2 :] = [rivals[match]] * (game.attempts // 2)
        rows += [
            Row(
                "student",
                member,
                task.kind,
                match,
                task.task_id,
                valid=True,
                program=task.program,
                archived=archived,
                prompt=prompt,
                group=f"rank {game.player.rank} task {slot}{'' if member == own else ' rival'}",
            )
            for member in members
        ]
    _complete(game, rows)
    return rows


def _find_rivals(game: Game, matches: Sequence[Match]) -> dict[int, str]:
    """Each match's rival: the student of the next match with another one, so that all get about as many rows."""
    if game.students_per_task < 2:
        return {}
    everybody = [student.name for student in game.population.students]
    found = {}
    for place, match in enumerate(matches):
        after = [other.student for other in (*matches[place:], *matches[:place])] + everybody
        found[match.index] = next(name for name in after if name != match.student)
    return found


def _grade(game: Game, proposals: Sequence[Row], tasks: Sequence[Task], rows: Sequence[Row]) -> None:
    """Lets the sandbox grade the attempts; the share of right ones is the proposal's `solve_rate`."""
    owners = [task for task in tasks for _ in range(game.attempts)]
    graded = game.referee.grade(owners, [row.completion.text for row in rows])
    for row, grade in zip(rows, graded, strict=True):
        read = grade.attempt
        row.well_formed, row.correct, row.reject_reason = read.well_formed, grade.right, read.reason
        row.reject_detail = in_a_line(read.detail)
    valid = [slot for slot, proposal in enumerate(proposals) if proposal.valid]
    chances = dict(zip(valid, game.referee.chances([tasks[slot] for slot in valid]), strict=True))
    for slot in range(len(tasks)):
        tries = slice(slot * game.attempts, (slot + 1) * game.attempts)
        group = rows[tries]
        rho = sum(row.correct for row in group) / game.attempts
        for row in group:
            row.solve_rate = rho
        if slot in chances:
            mistakes = (grade.said for grade in graded[tries] if grade.said and not grade.right)
            luck, proposal = count_guessed(mistakes) / game.attempts, proposals[slot]
            if rivals := [row.correct for row in group if row.member != group[0].member]:
                proposal.rival = _mean(rivals)
            proposal.solve_rate, proposal.chance = rho, max(luck, chances[slot])


def _price(
    game: Game, proposals: Sequence[Row], attempts: Sequence[Row], words: Mapping[str, tuple[str, ...]]
) -> None:
    """What this rank's proposals and attempts are worth; the rules are asked once for each."""
    for row in proposals:
        if row.valid:
            row.features, row.attempts = words[row.task_id], game.attempts
            row.rarity, row.progress = game.features.rarity(row.features), game.features.progress(row.features)
        row.pay, row.share = game.rules.teacher_reward(row.outcome), game.rules.student_share(row.outcome)
    for row in attempts:
        row.pay = game.rules.student_reward(row.answer)
        row.features = words.get(row.task_id, ())


def _note_results(game: Game, tasks: Sequence[Task], records: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Writes into the archive how this step's tasks fared and how complex they are; returns the latter."""
    results = {r["task_id"]: r for r in records if r["role"] == "teacher" and r["valid"]}
    complexities = [measure_complexity(game.referee.kinds[task.kind], task) for task in tasks]
    for task, complexity in zip(tasks, complexities, strict=True):
        result = results[task.task_id]
        game.archive.note(task, match=result["match"], solve_rate=result["solve_rate"], **complexity)
    fared = [results[task.task_id] for task in tasks]
    game.features.note([result["solve_rate"] if result["solved"] else 0.0 for result in fared])
    return complexities


def _shares(matches: Sequence[Match], records: Sequence[dict[str, Any]]) -> dict[Match, list[float]]:
    """
    Per match the student's share of each proposal of the teacher (archived tasks do not count). Without teachers: the
    student's solve rate at each given task.
    """
    shares: dict[int, list[float]] = {match.index: [] for match in matches}
    given = {match.index for match in matches if not match.teacher}
    for record in records:
        if record["role"] == "teacher":
            shares[record["match"]].append(record["share"])
    for record in _one_of_each(record for record in records if record["match"] in given):
        shares[record["match"]].append(record["solve_rate"])
    return {match: shares[match.index] for match in matches}


def _one_of_each(attempts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One attempt of each group, for what is the same in all of them."""
    return list({record["group"]: record for record in attempts}.values())


def step_metrics(
    game: Game, played: Played, complexities: Sequence[dict[str, float]], new_programs: int
) -> dict[str, float]:
    """
    Metrics of one step over all ranks; every key is present at every step, NaN where nothing was seen.

    Args:
        game (`Game`): Names the kinds.
        played (`Played`): The step.
        complexities (`Sequence[dict]`): Of its tasks.
        new_programs (`int`): How many programs are new to the run; other constants alone make no program new.
    """
    kinds, records = game.referee.kinds, played.records
    proposals = [r for r in records if r["role"] == "teacher"]
    valid = [r for r in proposals if r["valid"]]
    attempts = [r for r in records if r["role"] == "student"]
    fresh = [r for r in attempts if not r["archived"]]
    tried = valid if game.population.teachers else _one_of_each(attempts)
    written = sum(kinds[task.kind].writes_program for task in played.tasks)
    metrics = {
        "propose/valid_rate": _mean([r["valid"] for r in proposals]),
        "propose/novel_rate": new_programs / written if written else float("nan"),
        "propose/rarity": _mean([r["rarity"] for r in valid]),
        "propose/progress": _mean([r["progress"] for r in valid]),
        "propose/dropped_references": float(sum(r["dropped"] for r in proposals)),
        "solve/rate": _mean([r["correct"] for r in fresh]),
        "solve/archive_rate": _mean([r["correct"] for r in attempts if r["archived"]]),
        "solve/thinking_rate": _mean([r["thinking"] for r in attempts]),
        "solve/well_formed": _mean([r["well_formed"] for r in attempts]),
        "solve/frac_none": _mean([r["solve_rate"] == 0 for r in tried]),
        "solve/frac_chance": _mean([r["solve_rate"] > 0 and not r["solved"] for r in valid]),
        "solve/frac_all": _mean([r["solve_rate"] == 1 for r in tried]),
    }
    for kind in kinds:
        metrics[f"propose/{kind}/valid_rate"] = _mean([r["valid"] for r in proposals if r["kind"] == kind])
        metrics[f"solve/{kind}/rate"] = _mean([r["correct"] for r in fresh if r["kind"] == kind])
    for reason in Reject:
        metrics[f"verify/reject/{reason.value}"] = float(sum(r["reject_reason"] == reason.value for r in proposals))
    declared = {name for kind in kinds.values() for name in kind.measures}
    for name in sorted({key for complexity in complexities for key in complexity} | declared | {*PROGRAM_MEASURES}):
        metrics[f"curriculum/{name}"] = _mean([c[name] for c in complexities if name in c])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


@contextmanager
def _time(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds to the wall time of a phase."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
