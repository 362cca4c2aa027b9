"""The game of one population step: [`play_step`], from top to bottom.

    match -> propose -> verify -> solve -> grade -> price -> rate

Where the player takes up further prompts while it generates, [`Begun`] lets attempts begin as soon as their own
proposal has ended. What is a task, and what is paid, does not depend on that.

A list of slots goes through the phases from `propose` to `price`, and each of them fills its part of the slots (see
`slot.py`). A [`Player`] answers prompts, a [`Referee`] decides what is true, [`Rules`] say what is paid. Nothing here
knows TRL.

On several processes each rank plays an equal part of each match: P of the teacher's proposals, and for each of its
tasks all G attempts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trl_populora.population.members import Population
from trl_populora.population.ratings import Match, Matchmaker
from trl_populora.step.pay import Answer, Outcome, Rules, count_guessed, student_share
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.referee import Referee, Written
from trl_populora.step.rows import Metrics, Played, add_own_metrics, make_rows, measure_step
from trl_populora.step.slot import Sample, Slot
from trl_populora.tasks.archive import TaskArchive, hash_task
from trl_populora.tasks.features import CANDIDATES, Features, draw_evenly, name_features
from trl_populora.tasks.kind import Refusal, Reject, Task, measure_complexity


if TYPE_CHECKING:
    import torch


# Returns the rewards of all ranks' rows by each reward function, `[W * R, functions]`. Collective.
Reward = Callable[[Played], "torch.Tensor"]


@dataclass
class Game:
    """
    What a step is played with.

    Args:
        population, matchmaker, archive: Their state carries over from step to step, and is the same on every rank. The
            archive must hold a task, because archived tasks take the place of refused proposals.
        referee: Decides what is a task and what is right.
        player: Generates for the members.
        proposals: How many proposals a teacher writes in a step, on all ranks together. In a run without teachers: how
            many given tasks each student gets in a step.
        attempts: Attempts per task, G.
        references: K, how many archived tasks a prompt for a proposal shows. A kind of task may choose another number.
        seed: Decides all random draws of a step, except who is paired with whom and which tokens are sampled.
        iterations: Optimizer steps from one play to the next.
        replays: How many archived tasks the student of each match attempts beside the proposals, on all ranks
            together.
        shuffle: In a run without teachers: whether each pass through the given tasks has an order of its own.
        rules: What a proposal and an attempt are worth.
        features: Counts what the last accepted tasks use. This state carries over from step to step, too.
        metrics: Further metrics, computed from the records of a step's rows.
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
    replays: int = 0
    shuffle: bool = True
    rules: Rules = Rules()
    features: Features = field(default_factory=Features)
    metrics: Sequence[Metrics] = ()


def play_step(game: Game, done: int, reward: Reward) -> Played:
    """
    Plays one step: pairs the members, lets teachers propose and students attempt, prices what they wrote, and updates
    the ratings.

    Every rank plays its part of every match. Ratings and archive are updated from what all ranks saw, in the order of
    ranks, so they stay the same everywhere.

    Args:
        game: The players and the rules.
        done: Optimizer steps so far. Files and metrics give this step the number `done + 1`.
        reward: Gives the rewards of the step's rows. The trainer's asks TRL's reward functions.

    Returns:
        The step, with `teachers * (P + (P + replays) * G)` rows of this rank, where P and replays are this rank's
        part: the totals divided by the number of processes. Without teachers there are `students * P * G` rows.
    """
    rng = random.Random(f"{game.seed}/{done}/{game.player.rank}")
    seconds: dict[str, float] = {}
    with _time(seconds, "match"):
        matches = game.matchmaker.pair(game.population, lambda weights: game.player.gather(weights)[0])
    with _time(seconds, "propose"):
        slots = _open(game, matches, done, rng)
        # Archived tasks are drawn before this step's proposals enter the archive. So none of these proposals is drawn.
        _fill(game, slots, rng)
        slots += _draw_replays(game, matches, rng) + _draw_given(game, matches, done)
        begun = Begun(game, slots, done)
        begun.generate()
    # What was generated after the last proposal had ended are attempts.
    seconds["propose"], seconds["solve"] = seconds["propose"] - begun.seconds, begun.seconds
    with _time(seconds, "verify"):
        known = game.archive.programs
        tasks = _verify(game, slots, begun, done + 1, rng)
    with _time(seconds, "solve"):
        _solve(game, slots, begun)
    with _time(seconds, "verify"):
        _grade(game, slots)
    # `_price` gathers the records of all ranks. Ratings, the archive's notes and metrics are computed from these
    # records, so they are the same on every rank.
    played = _price(game, slots, reward)
    game.matchmaker.update(game.population, _collect_shares(matches, played.records))
    complexities = _note_results(game, tasks, played.records)
    new_programs = game.archive.programs - known
    played.tasks, played.seconds = tasks, seconds
    played.metrics = measure_step(played.records, tasks, complexities, game.referee.kinds, new_programs)
    for noun in (game.matchmaker, game.population, game.archive, game.features):
        played.metrics |= noun.metrics()
    for tell in game.metrics:
        add_own_metrics(played.metrics, tell(played.records))
    return played


def _open(game: Game, matches: Sequence[Match], done: int, rng: random.Random) -> list[Slot]:
    """
    Opens a slot for each proposal of this rank. A teacher's proposals take the kinds of task in turn. Each step begins
    with the next kind.
    """
    kinds = list(game.referee.kinds.values())
    part = game.proposals // game.player.world
    slots = []
    for match in matches:
        if not match.teacher:
            continue
        for place in range(game.player.rank * part, (game.player.rank + 1) * part):
            # `done` counts optimizer steps, and `iterations` of them follow one play. So the quotient counts plays.
            kind = kinds[(place + done // game.iterations) % len(kinds)]
            drawn = game.referee.draw_references(kind, game.archive, game.references, rng)
            prompt, shown = game.referee.proposal_prompt(kind, drawn)
            proposal = Sample(match.teacher, prompt)
            slots.append(Slot(match, kind.name, shown, len(drawn) - len(shown), proposal))
    return slots


def _complete(game: Game, samples: Sequence[Sample], **options: Any) -> None:
    """
    Lets the members write the completions of the samples, which may grow in number meanwhile. Collective, unless no
    rank has a sample.
    """
    if not samples:
        return
    completions = game.player.generate(*_ask(samples), **options)
    for sample, completion in zip(samples, completions, strict=True):
        sample.completion = completion


def _ask(samples: Sequence[Sample]) -> tuple[list[Messages], list[str]]:
    return [each.prompt for each in samples], [each.member for each in samples]


def _fill(game: Game, slots: Sequence[Slot], rng: random.Random) -> None:
    """
    Draws an archived task for each slot, of the slot's kind if possible. If the slot's proposal is refused, students
    attempt this archived task instead.
    """
    names = list(game.referee.kinds)
    for slot in slots:
        slot.task = (game.archive.sample([slot.kind], 1, rng) or game.archive.sample(names, 1, rng))[0]


def _draw_replays(game: Game, matches: Sequence[Match], rng: random.Random) -> list[Slot]:
    """
    Opens slots with archived tasks beside the proposals. The tasks are drawn evenly over features, so that students
    keep practising what teachers no longer propose.
    """
    owners = [match for match in matches for _ in range(game.replays // game.player.world)]
    if not owners:
        return []
    candidates = game.archive.sample(list(game.referee.kinds), CANDIDATES, rng)
    named = [(task, name_features(game.referee.kinds[task.kind], task)) for task in candidates]
    drawn = draw_evenly(named, len(owners), rng)
    return [Slot(match, task.kind, task=task) for match, task in zip(owners, drawn, strict=True)]


def _draw_given(game: Game, matches: Sequence[Match], done: int) -> list[Slot]:
    """
    In a run without teachers, opens slots with this rank's part of the step's given tasks. Every student gets the same
    tasks. The run goes through all given tasks again and again. With `shuffle` each pass has another order.
    """
    students = [match for match in matches if not match.teacher]
    if not students:
        return []
    kinds, part = list(game.referee.kinds), game.proposals // game.player.world
    size = game.archive.count(kinds)
    first = done // game.iterations * game.proposals + game.player.rank * part
    # A step may run on into the next pass, so each position becomes a pair: the pass, and the place within it.
    places = [divmod(place, size) for place in range(first, first + part)]
    orders = {turn: list(range(size)) for turn, _ in places}
    if game.shuffle:
        for turn, order in orders.items():
            random.Random(f"{game.seed}/pass {turn}").shuffle(order)
    tasks = game.archive.pick(kinds, [orders[turn][place] for turn, place in places])
    return [Slot(match, task.kind, task=task) for match in students for task in tasks]


class Begun:
    """
    What is known of a step before all its proposals have ended, where the player takes up further prompts meanwhile.

    Each proposal is judged when it has ended, by random draws of its own. So the judgement is the same in whatever
    order proposals end. If it is a task, and none that ended before is equal, students attempt it at once, else the
    archived task of the slot. Of equal proposals [`_verify`] takes the first by place. So if that one ends late, what
    has begun at another one's task is thrown away.

    Args:
        game: The game. Nothing in it changes here.
        slots: All slots of the step, those with proposals first.
        done: Optimizer steps so far.

    Attributes:
        samples: What is asked for, in order: proposals, attempts of slots without proposals, further attempts.
        judged: By place of the slot, what the referee says of a proposal that has ended.
        posed: By place of the slot, the task that its attempts are at.
        seconds: From the end of the last proposal to the end of all that was asked for.
    """

    def __init__(self, game: Game, slots: Sequence[Slot], done: int):
        self.game, self.slots, self.done = game, slots, done
        self.samples = [slot.proposal for slot in slots if slot.proposal is not None]
        self.judged: dict[int, Task | Refusal] = {}
        self.posed: dict[int, Task] = {}
        self.seconds = 0.0
        self._proposals, self._first, self._over = len(self.samples), dict[bytes, int](), 0.0

    def generate(self) -> None:
        """Lets teachers write, and students attempt what teachers have written, if the player can do both at once."""
        if not (self.game.player.overlaps and self.samples):
            _complete(self.game, self.samples)
            return
        for place in range(self._proposals, len(self.slots)):
            self._pose(place, self.slots[place].task)
        _complete(self.game, self.samples, follow=self.follow)
        self.seconds = time.perf_counter() - self._over

    def follow(self, ended: Mapping[int, Completion]) -> tuple[list[Messages], list[str]]:
        """Takes what some samples of the first wave have become, and returns what is asked for next."""
        known = len(self.samples)
        places = sorted(place for place in ended if place < self._proposals)
        for place in places:
            self.samples[place].completion = ended[place]
        draws = [random.Random(f"{self.game.seed}/{self.done}/{self.game.player.rank}/{place}") for place in places]
        found = _judge(self.game, [self.slots[place] for place in places], self.done + 1, draws)
        for place, outcome in zip(places, found, strict=True):
            self.judged[place] = outcome
            self._begin(place, outcome)
        if places:
            self._over = time.perf_counter()
        return _ask(self.samples[known:])

    def _begin(self, place: int, outcome: Task | Refusal) -> None:
        """Lets students attempt the task of a proposal, or the archived task of its slot."""
        filler = self.slots[place].task
        if not self.game.referee.guarded and isinstance(outcome, Task):
            return self._pose(place, outcome)
        if isinstance(outcome, Refusal) or outcome in self.game.archive:
            return self._pose(place, filler)
        key = hash_task(outcome)
        rival = self._first.get(key, place)
        self._first[key] = min(place, rival)
        if rival < place:
            return self._pose(place, filler)
        self._pose(place, outcome)
        if rival > place:
            self._pose(rival, self.slots[rival].task)

    def _pose(self, place: int, task: Task) -> None:
        """Lets the student of a slot attempt a task. Attempts at another task are thrown away."""
        self.posed[place] = task
        self.samples += _attempt(self.game, self.slots[place], task)


def _judge(
    game: Game, slots: Sequence[Slot], step: int, rng: random.Random | Sequence[random.Random]
) -> list[Task | Refusal]:
    """Asks the referee which proposals are tasks, and notes who has written them."""
    written = [Written(slot.kind, slot.proposal.completion.text, slot.references) for slot in slots if slot.proposal]
    return [
        replace(outcome, author=slot.match.teacher, step=step) if isinstance(outcome, Task) else outcome
        for slot, outcome in zip(slots, game.referee.judge(written, rng), strict=True)
    ]


def _verify(game: Game, slots: Sequence[Slot], begun: Begun, step: int, rng: random.Random) -> list[Task]:
    """
    Decides which proposals are tasks. A proposal that is in the archive already is refused as a duplicate. A referee
    without guards accepts duplicates.

    Returns:
        The accepted tasks of all ranks.
    """
    proposed = [slot for slot in slots if slot.proposal is not None]
    found = [begun.judged[place] for place in sorted(begun.judged)] or _judge(game, proposed, step, rng)
    # A user's own kind might name other features on another rank. So only the rank that holds a proposal names its
    # features, and the other ranks get them from there.
    named = [
        (outcome, name_features(game.referee.kinds[outcome.kind], outcome) if isinstance(outcome, Task) else ())
        for outcome in found
    ]
    accepted: list[Task] = []
    words: dict[str, tuple[str, ...]] = {}
    # Every rank adds the tasks of all ranks in the same order, so all archives agree on who was first.
    for rank, part in enumerate(game.player.gather(named)):
        for place, (outcome, features) in enumerate(part):
            if isinstance(outcome, Task):
                if game.archive.add(outcome) or not game.referee.guarded:
                    accepted.append(outcome)
                    words[outcome.task_id] = features
                elif rank == game.player.rank:
                    found[place] = Refusal(Reject.DUPLICATE, "such a task was proposed or given before")
    for task in accepted:  # all tasks are counted before any is priced, so no rarity depends on their order
        game.features.add(words[task.task_id])
    for slot, outcome in zip(proposed, found, strict=True):
        if isinstance(outcome, Task):
            slot.task, slot.features = outcome, words[outcome.task_id]
        else:
            slot.refusal = outcome
    return accepted


def _solve(game: Game, slots: Sequence[Slot], begun: Begun) -> None:
    """Lets the student of each slot's match attempt the slot's task G times, where this has not happened yet."""
    left = [slot for place, slot in enumerate(slots) if begun.posed.get(place) is not slot.task]
    _complete(game, [attempt for slot in left for attempt in _attempt(game, slot, slot.task)])


def _attempt(game: Game, slot: Slot, task: Task) -> list[Sample]:
    """Makes the attempts of a slot."""
    prompt = game.referee.solving_prompt(task)
    slot.attempts = [Sample(slot.match.student, prompt) for _ in range(game.attempts)]
    return slot.attempts


def _grade(game: Game, slots: Sequence[Slot]) -> None:
    """Decides which attempts are right, and fills in the outcome of each proposal."""
    attempts = [(slot.task, attempt) for slot in slots for attempt in slot.attempts]
    grades = game.referee.grade([task for task, _ in attempts], [attempt.completion.text for _, attempt in attempts])
    for (_, attempt), grade in zip(attempts, grades, strict=True):
        attempt.grade = grade
    fresh = [slot for slot in slots if slot.fresh]
    # Blind guesses are tried in the sandbox, for fresh tasks only: no teacher is paid for archived ones.
    chances = game.referee.chances([slot.task for slot in fresh])
    for slot, chance in zip(fresh, chances, strict=True):
        slot.outcome = _conclude(game, slot, chance)
    for slot in slots:
        if slot.refusal is not None:
            slot.outcome = Outcome(slot.kind, False, slot.refusal.reason.value)


def _conclude(game: Game, slot: Slot, chance: float) -> Outcome:
    """Makes the outcome of an accepted proposal; `chance` is the referee's estimate of guessing."""
    grades = [attempt.grade for attempt in slot.attempts if attempt.grade is not None]
    mistakes = [grade.said for grade in grades if grade.said and not grade.right]
    return Outcome(
        slot.kind,
        True,
        solve_rate=slot.solve_rate,
        attempts=len(grades),
        chance=max(chance, count_guessed(mistakes) / len(grades)),
        rarity=game.features.rarity(slot.features),
        program=slot.task.program,
    )


def _price(game: Game, slots: Sequence[Slot], reward: Reward) -> Played:
    """
    Decides the pay of each proposal and attempt, and the student's share of each proposal. Then makes the rows, and
    asks for their rewards. No other function of the step decides what something is worth. Collective.
    """
    for slot in slots:
        if slot.proposal is not None and slot.outcome is not None:
            slot.proposal.pay = game.rules.teacher_reward(slot.outcome)
            slot.share = student_share(slot.outcome)
        for attempt in slot.attempts:
            assert attempt.grade is not None, "attempts are graded before they are priced"
            answer = Answer(slot.task.kind, attempt.right, attempt.grade.attempt.well_formed)
            attempt.pay = game.rules.student_reward(answer)
    rows = make_rows(slots, game.player.rank)
    parts = game.player.gather([row.record() for row in rows])
    played = Played(rows, [record for part in parts for record in part], list(slots))
    played.rewards = reward(played)
    return played


def _note_results(game: Game, tasks: Sequence[Task], records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Notes match, solve rate and complexity of this step's tasks in the archive, and returns the complexities."""
    results = {r["task_id"]: r for r in records if r["role"] == "teacher" and r["valid"]}
    complexities = [measure_complexity(game.referee.kinds[task.kind], task) for task in tasks]
    for task, complexity in zip(tasks, complexities, strict=True):
        result = results[task.task_id]
        game.archive.note(task, match=result["match"], solve_rate=result["solve_rate"], **complexity)
    return complexities


def _collect_shares(matches: Sequence[Match], records: Sequence[Mapping[str, Any]]) -> dict[Match, list[float]]:
    """
    Collects for each match the student's share of each proposal. Attempts at archived tasks do not count. In a run
    without teachers it collects the student's solve rate at each given task.
    """
    shares: dict[int, list[float]] = {match.index: [] for match in matches}
    seen = set()  # groups of attempts that are counted already
    for record in records:
        if record["role"] == "teacher":
            shares[record["match"]].append(record["share"])
    for record in records:
        if not matches[record["match"]].teacher and record["group"] not in seen:
            seen.add(record["group"])  # the solve rate is the same in all attempts of a group
            shares[record["match"]].append(record["solve_rate"])
    return {match: shares[match.index] for match in matches}


@contextmanager
def _time(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the wall time of the block to `seconds[phase]`."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
