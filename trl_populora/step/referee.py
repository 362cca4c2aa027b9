"""The referee: what is a task and what is right. It knows the kinds of task and the sandbox, and no model.

    Written (a proposal) --judge--> Task or Refusal     parse, run, accept, check for copying
    Task, answer         --grade--> Grade               parse, run, compare

Proposals are judged when they have ended: all at once, or a few at a time if attempts at their tasks begin while other
proposals are being written. Attempts are graded when all have ended. Running each as soon as it ends would save .3 s
of a step of 16 s, and was not worth the code.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from trl_populora.sandbox import Job, Sandbox, Verdict
from trl_populora.step.player import Messages
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.kind import (
    THINK_TAGS,
    Attempt,
    Proposal,
    Refusal,
    Reject,
    Task,
    TaskKind,
    check_type,
    estimate,
    screen,
)
from trl_populora.tasks.python.prompts import show_before


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

WAY_OUT = (
    "Lower `max_completion_length`, raise vLLM's own limit if one is set (`vllm_max_model_length`; for a server its "
    "`--max-model-len`), or choose a base with a longer context."
)
_JOB = (Job, type(None))
_REFUSED = (Reject, Refusal)
# Divides the CPU limit of answers that no student wrote (`Referee.try_answers`). They may take a quarter of the CPU
# seconds, so that they cost little time.
GUESS_HEADROOM = 4.0


@dataclass(frozen=True)
class Grade:
    """
    What became of an answer.

    Args:
        attempt: The answer as its kind read it.
        right: Whether the answer is right.
        said: What `TaskKind.identify_mistake` returns: a text for the mistake. Equal texts are the same mistake.
    """

    attempt: Attempt
    right: bool
    said: str = ""


@dataclass(frozen=True)
class Written:
    """A proposal as it was written: the kind that was asked for, the text, and the tasks that the writer was shown."""

    kind: str
    text: str
    references: Sequence[Task] = ()


@dataclass
class Referee:
    """
    Poses tasks, judges proposals and grades attempts.

    No prompt is cut. A proposal prompt leaves out references, and a solving prompt leaves out solved tasks, until the
    prompt fits into the context. A proposed task is refused if its prompt alone does not fit. If a kind returns a
    wrong type, the error names the kind.

    Args:
        kinds: The run's kinds of task by name, in rotation order.
        sandbox: Runs every program that a model wrote.
        style: Prompt style, `"turns"`, `"chat"` or `"compact"`.
        forbidden: Texts that no task may contain, see `tasks/kind.py`.
        held_out: Tasks that are refused as proposals.
        free_tokens: Takes a prompt, and returns a number of tokens: the context, less the longest completion, less the
            prompt. Below 0 the prompt does not fit.
        shots: Most solved tasks that students are shown before the task to solve.
        guarded: Whether copies and duplicates are refused (`play.py` finds the duplicates). False with
            `teacher_reward: paper`.
    """

    kinds: Mapping[str, TaskKind]
    sandbox: Sandbox
    style: str
    forbidden: tuple[str, ...] = THINK_TAGS
    held_out: Container[Task] = ()
    free_tokens: Callable[[Messages], int] = lambda prompt: 0
    shots: int = 0
    guarded: bool = True

    def draw_references(self, kind: TaskKind, archive: TaskArchive, k: int, rng: random.Random) -> list[Task]:
        """
        Draws archived tasks to show to a teacher. If `kind` writes no program, the teacher proposes a task about the
        program of the first task drawn.
        """
        count = check_type(kind.name, "reference_count", kind.reference_count(k), (int,))
        drawn = archive.sample(kind.reference_kinds, count, rng)
        # If a kind writes no program, its proposals are about a task that is drawn from its `reference_kinds`. In a
        # style that shows references as earlier turns, further tasks are drawn for these turns: tasks of the kind
        # itself.
        if kind.shows_turns(self.style) and not kind.writes_program:
            drawn += archive.sample([kind.name], k, rng)
        return drawn

    def proposal_prompt(self, kind: TaskKind, shown: Sequence[Task]) -> tuple[Messages, list[Task]]:
        """
        Writes a proposal prompt that fits into the context. Returns it with the references that are left in it.

        Raises:
            `ValueError`: If the prompt does not fit even without the references that may be left out.
        """
        kept = list(shown)
        prompt = self._ask_for_task(kind, kept)
        if self.free_tokens(prompt) >= 0:
            return prompt, kept
        # The longest references are left out first, so that as many as possible stay. A kind that writes no program
        # keeps the first reference, because the proposal is about it.
        spare = shown if kind.writes_program else shown[1:]
        for longest in sorted(spare, key=lambda task: self.free_tokens(self._ask_for_task(kind, [task]))):
            kept.remove(longest)
            prompt = self._ask_for_task(kind, kept)
            if self.free_tokens(prompt) >= 0:
                return prompt, kept
        raise ValueError(
            f"The shortest proposal prompt of {kind.name} is {-self.free_tokens(prompt)} tokens longer than the "
            f"context has room for beside a completion. {WAY_OUT}"
        )

    def solving_prompt(self, task: Task) -> Messages:
        """
        Writes the prompt that puts a task to a student.

        Raises:
            `ValueError`: If the prompt does not fit into the context. This cannot happen to a task for which
                [`is_too_long`] is false.
        """
        prompt = self._pose(task)
        if (missing := -self.free_tokens(prompt)) > 0:
            raise ValueError(
                f"The prompt of a {task.kind} task is {missing} tokens longer than the context has room for beside a "
                f"completion. {WAY_OUT} Its program is {task.program!r:.200}."
            )
        return prompt

    def is_too_long(self, task: Task) -> bool:
        """
        Says whether a task is too long for the context, in one of two prompts: the one that puts the task to a
        student, or one that asks a teacher for a new task about this task's program.
        """
        prompts = [self._pose(task)] if task.kind in self.kinds else []
        prompts += [
            self._ask_for_task(kind, [task])
            for kind in self.kinds.values()
            if not kind.writes_program and task.kind in kind.reference_kinds and not kind.missing_for_proposals()
        ]
        return any(self.free_tokens(prompt) < 0 for prompt in prompts)

    def _ask_for_task(self, kind: TaskKind, shown: Sequence[Task]) -> Messages:
        def ask(references: Sequence[Task]) -> Messages:
            return check_type(kind.name, "proposal_prompt", kind.proposal_prompt(references, self.style), (list,))

        if not kind.shows_turns(self.style):
            return ask(shown)
        about, examples = ([], shown) if kind.writes_program else (shown[:1], shown[1:])
        texts = [check_type(kind.name, "write_proposal", kind.write_proposal(task), (str,)) for task in examples]
        written = [(task, text) for task, text in zip(examples, texts, strict=True) if text]
        subjects = [[] if kind.writes_program else [task] for task, _ in written]
        return show_before([ask(subject) for subject in (*subjects, about)], [text for _, text in written])

    def _pose(self, task: Task) -> Messages:
        """Writes the solving prompt. Solved tasks come before it: as many as fit, and at most `shots`."""
        kind = self.kinds[task.kind]

        def pose(posed: Task) -> Messages:
            return check_type(task.kind, "solving_prompt", kind.solving_prompt(posed, self.style), (list,))

        # A solved task with the same program could give the answer away.
        shots = [shot for shot in kind.shots[: self.shots] if shot.task.program != task.program]
        asked, own = [pose(shot.task) for shot in shots], pose(task)
        # The first shots are the most instructive. So shots are dropped one by one from the end, until the prompt
        # fits. If none does, the prompt without shots is returned.
        for kept in range(len(shots), -1, -1):
            prompt = show_before([*asked[:kept], own], [shot.answer for shot in shots[:kept]])
            if self.free_tokens(prompt) >= 0:
                break
        return prompt

    def leave_out_long(self, archive: TaskArchive) -> None:
        """Removes from an archive the tasks that [`is_too_long`] finds, and warns of their number."""
        entries = list(archive.entries())
        kept = [entry for entry in entries if not self.is_too_long(entry[0])]
        if left_out := len(entries) - len(kept):
            archive.restore(kept, archive.coverage.state_dict())
            logger.warning(
                "%d of %d tasks of the archive are left out: they do not fit into the context beside a completion. %s",
                left_out,
                len(entries),
                WAY_OUT,
            )

    def judge(
        self, proposals: Sequence[Written], rng: random.Random | Sequence[random.Random]
    ) -> list[Task | Refusal]:
        """
        Decides for each proposal whether it is a task. The first check that it fails is the reason of the refusal:

        1. Its kind can read it.
        2. It holds no control text. Without guards this is checked after the run.
        3. Its kind accepts it, given what the sandbox found.
        4. Its outputs hold no control text.
        5. It is not a held-out task.
        6. It fits into the context.
        7. It is not solved by copying what the student is shown. Without guards this is not checked.

        `play.py` finds duplicates later, where ranks meet.

        Args:
            proposals: What teachers wrote.
            rng: Decides what is random in a task. With a generator for each proposal, the judgement of a proposal does
                not depend on those beside it.
        """
        return self.verify([(each.kind, self._parse(each)) for each in proposals], rng)

    def verify(
        self,
        proposals: Sequence[tuple[str, Proposal | Refusal]],
        rng: random.Random | Sequence[random.Random],
    ) -> list[Task | Refusal]:
        """
        Runs those checks of [`judge`] that come after the first two. Each entry of `proposals` is the name of a kind,
        and what this kind has read: a proposal, or a refusal, which is returned as it is.
        """
        verdicts = self._run(
            check_type(kind, "check", self.kinds[kind].check(read), _JOB) if isinstance(read, Proposal) else None
            for kind, read in proposals
        )
        draws = [rng] * len(proposals) if isinstance(rng, random.Random) else rng
        found = [
            self._accept(kind, read, verdict, own)
            for (kind, read), verdict, own in zip(proposals, verdicts, draws, strict=True)
        ]
        tasks = [each for each in found if isinstance(each, Task)] if self.guarded else []
        copied = {task for task, right in zip(tasks, self.try_answers("copies", tasks), strict=True) if any(right)}
        refusal = Refusal(Reject.COPIED, "the student can copy a right answer from the task")
        return [refusal if each in copied else each for each in found]

    def _parse(self, written: Written) -> Proposal | Refusal:
        found = self.kinds[written.kind].parse_proposal(written.text, written.references)
        parsed = check_type(written.kind, "parse_proposal", found, (Proposal, *_REFUSED))
        read = parsed if isinstance(parsed, Proposal) else Refusal.of(parsed)
        # Without guards a failing program and a control text have different prices, and the failure counts. So the
        # program runs first, and control texts are looked for afterwards.
        return screen(read, self.forbidden) if self.guarded else read

    def _accept(
        self, kind: str, proposal: Proposal | Refusal, verdict: Verdict | None, rng: random.Random
    ) -> Task | Refusal:
        """Decides whether a proposal is a task once its program has run; copying is tried later."""
        if isinstance(proposal, Refusal):
            return proposal
        accepted = check_type(kind, "accept", self.kinds[kind].accept(proposal, verdict, rng), (Task, *_REFUSED))
        outcome: Task | Refusal = accepted if isinstance(accepted, Task) else Refusal.of(accepted)
        if isinstance(outcome, Task) and outcome.kind != kind:
            raise ValueError(f"task kind {kind!r}: `accept` must return tasks of its own kind, got {outcome.kind!r}")
        outcome = screen(outcome, self.forbidden)
        if isinstance(outcome, Refusal):
            return outcome
        if outcome in self.held_out:
            return Refusal(Reject.HELD_OUT, "it asks what a held-out task asks")
        if self.is_too_long(outcome):
            return Refusal(Reject.TOO_LONG, "its prompt leaves too little room for a completion")
        return outcome

    def grade(self, tasks: Sequence[Task], texts: Sequence[str]) -> list[Grade]:
        """Grades one answer per task, in order. Equal answers to one task run once."""
        attempts = [
            check_type(task.kind, "parse_attempt", self.kinds[task.kind].parse_attempt(text, task), (Attempt,))
            for task, text in zip(tasks, texts, strict=True)
        ]
        # Attempts at a task often give the same answer; one run decides for all of them.
        keys = [(task.task_id, task.kind, attempt) for task, attempt in zip(tasks, attempts, strict=True)]
        distinct = dict(zip(keys, tasks, strict=True))
        verdicts = self._run(
            check_type(task.kind, "trial", self.kinds[task.kind].trial(task, key[2]), _JOB)
            for key, task in distinct.items()
        )
        grades = {
            key: self._grade(task, key[2], verdict)
            for (key, task), verdict in zip(distinct.items(), verdicts, strict=True)
        }
        return [grades[key] for key in keys]

    def _grade(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> Grade:
        if not attempt.well_formed:
            reason = attempt.reason or Reject.FORMAT.value
            detail = attempt.detail or f"`parse_attempt` of {task.kind} could not read it"
            return Grade(replace(attempt, reason=reason, detail=detail), False)
        kind = self.kinds[task.kind]
        right = check_type(task.kind, "correct", kind.correct(task, attempt, verdict), (bool,))
        said = check_type(task.kind, "identify_mistake", kind.identify_mistake(task, attempt, verdict), (str,))
        if not right and verdict is not None and not verdict.ok:
            attempt = replace(attempt, reason=verdict.status.value, detail=verdict.reason)
        return Grade(attempt, right, said)

    def chances(self, tasks: Sequence[Task]) -> list[float]:
        """
        Estimates for each task the solve rate that guessing gives. One estimate is from the form of the answer, the
        other from blind answers; the higher one is returned.
        """
        right = self.try_answers("guesses", tasks)
        told = [  # as Python's numbers, because checkpoints hold no others
            float(check_type(t.kind, "chance", estimate(self.kinds[t.kind], "chance", 0.0, t), (float, int)))
            for t in tasks
        ]
        return [max(one, fmean(tried) if tried else 0.0) for one, tried in zip(told, right, strict=True)]

    def try_answers(self, method: str, tasks: Sequence[Task]) -> list[list[bool]]:
        """
        Asks each task's kind for answers to the task, and tries them in the sandbox.

        Args:
            method: Name of the kind's method that gives the answers: `"copies"` or `"guesses"`.
            tasks: The tasks.

        Returns:
            For each task a list that says of each answer whether it is right.
        """
        answers = [
            (number, task, attempt)
            for number, task in enumerate(tasks)
            for attempt in check_type(task.kind, method, estimate(self.kinds[task.kind], method, [], task), (list,))
        ]
        trials = [estimate(self.kinds[task.kind], "trial", None, task, attempt) for _, task, attempt in answers]
        verdicts = self._run(job and replace(job, headroom=GUESS_HEADROOM) for job in trials)
        right: list[list[bool]] = [[] for _ in tasks]
        for (number, task, attempt), verdict in zip(answers, verdicts, strict=True):
            hit = attempt.well_formed and estimate(self.kinds[task.kind], "correct", False, task, attempt, verdict)
            right[number].append(check_type(task.kind, "correct", hit, (bool,)))
        return right

    def _run(self, jobs: Iterable[Job | None]) -> list[Verdict | None]:
        """Runs the jobs in the sandbox; equal jobs run once. A job of `None` has the verdict `None`."""
        jobs = list(jobs)
        distinct = list(dict.fromkeys(job for job in jobs if job is not None))
        verdicts = dict(zip(distinct, self.sandbox.run(distinct), strict=True))
        return [None if job is None else verdicts[job] for job in jobs]


def trained_context(model: PreTrainedModel) -> int | None:
    """Reads from the config how many tokens of context a base was trained on; `None` if no limit stands there."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def count_free_tokens(
    context: int | None,
    longest: int | None,
    tokenize: Callable[[Messages], list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[Messages], int]:
    """
    Makes a function that takes a prompt and returns how many tokens of the context stay free: `context` less `longest`
    less the prompt's tokens. Below 0 the prompt does not fit.

    Args:
        context: Tokens of context. With vLLM it is the limit of the engine or server. With transformers it is the
            number of tokens that the base was trained on, because a base writes noise beyond them, without an error.
            `None` for a base without a limit, such as a state-space model: then the function returns 0 for every
            prompt, so every prompt fits.
        longest: Tokens of the longest completion, `max_completion_length`. `None` counts as 1.
        tokenize: Gives the token ids of a prompt.
        tokenizer: The tokenizer whose chat template is used.

    Raises:
        `ValueError`: If the longest completion alone fills the context. The function that is returned raises it if the
            chat template refuses a conversation.
    """
    if context is not None and context - (longest or 1) <= 0:
        raise ValueError(
            f"`max_completion_length={longest}` leaves no room for a prompt in a context of "
            f"{context} tokens. {WAY_OUT}"
        )

    def count(prompt: Messages) -> int:
        if context is None:
            return 0
        try:
            return context - (longest or 1) - len(tokenize(prompt))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in prompt)
            raise ValueError(
                f"The chat template of {tokenizer.name_or_path!r} refuses a conversation of {roles} ({error}). "
                "Set `prompt_style='chat'` and `shots=0`, which ask in a single user turn, or pass a tokenizer with "
                "another `chat_template`."
            ) from error

    return count
