"""`populora try`: what a base makes of each prompt style, before hours of training.

The base proposes and solves as members would at the first step: sampled as in training, verified by the sandbox.
Nothing is trained, and nothing is written.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import fmean

import torch
from accelerate.utils import set_seed
from peft import PeftModel
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from trl_populora import start as build
from trl_populora.assets import TINY, resolve_model_path
from trl_populora.config import PopuLoRAConfig
from trl_populora.errors import make_printable
from trl_populora.generate.player import as_completions, plain_player, plain_room, sampling_config, tokenize
from trl_populora.lora.layers import BASE_NAME, Router
from trl_populora.options import check_bounds, check_numbers
from trl_populora.start import SHOTS, choose_style
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import STYLES, Proposal, Refusal, Reject, Task, TaskArchive
from trl_populora.tasks.dataset import load_archive
from trl_populora.tasks.python.prompts import check_style


ATTEMPTS = 4  # at each task, so that groups can be counted whose attempts differ
REFERENCES = 4  # archived tasks that a proposing teacher is shown
BATCH = 48  # rows that transformers generates at once
ROUNDING = 32  # of the completion length that is advised, in tokens


@dataclass
class TryArguments:
    """
    What `populora try` needs.

    Args:
        model: Hub id or directory of a base, or `tiny`.
        adapter: A LoRA adapter on it, for example of a cold start. Not with `vllm`.
        task_kinds: Kinds to try; the three built in by default.
        prompt_style: Tries this style alone; else all that the base may know.
        samples: Proposals and attempts per kind in each form, a multiple of 4.
        max_completion_length: Tokens; a longer completion is cut.
        inputs_per_function: Inputs that a code_f proposal must give; 4 by default, and for the embedded base the 6
            that it was trained on.
        temperature: Of the samples, as of a run's.
        vllm: Generate with vLLM, in this process.
        dtype: Of the weights; float32 for the embedded base, bfloat16 for others.
        seed: Of references, tasks and samples.
    """

    model: str = field(metadata={"help": "Hub id or directory of a base, or 'tiny'."})
    adapter: str | None = field(default=None, metadata={"help": "A LoRA adapter on it, for example of a cold start."})
    task_kinds: list[str] = field(
        default_factory=lambda: ["code_o", "code_i", "code_f"], metadata={"help": "Kinds of task to try."}
    )
    prompt_style: str | None = field(default=None, metadata={"help": "Try this style alone."})
    samples: int = field(default=8, metadata={"help": "Proposals and attempts per kind in each form."})
    max_completion_length: int = field(default=160, metadata={"help": "Tokens per completion."})
    inputs_per_function: int | None = field(
        default=None, metadata={"help": "Inputs that a code_f proposal must give; 4, and 6 for 'tiny', when unset."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Of the samples."})
    vllm: bool = field(default=False, metadata={"help": "Generate with vLLM, in this process."})
    dtype: str | None = field(default=None, metadata={"help": "Of the weights."})
    seed: int = field(default=0, metadata={"help": "Of references, tasks and samples."})

    def __post_init__(self):
        check_numbers(self)
        check_bounds(self, {">= 1": "max_completion_length", ">= 2": "inputs_per_function", "> 0": "temperature"})
        if self.samples < ATTEMPTS or self.samples % ATTEMPTS:
            raise ValueError(f"`samples` must be a multiple of {ATTEMPTS}, got {self.samples}.")
        if self.vllm and self.adapter:
            raise ValueError("`adapter` is tried with transformers; leave `vllm` out.")
        if self.prompt_style is not None:
            check_style(self.prompt_style)

    @property
    def inputs(self) -> int:
        """Inputs that a code_f proposal must give."""
        if self.inputs_per_function is None:
            return 6 if self.model == TINY else 4
        return self.inputs_per_function


@dataclass(frozen=True)
class Form:
    """How tasks are put: a prompt style, and the number of solved tasks before a student's own."""

    style: str
    shots: int = 0

    def __str__(self) -> str:
        return f"{self.style} + {self.shots} shots" if self.shots else self.style


@dataclass(frozen=True)
class Question:
    """One prompt; `about` are a teacher's references, or the student's task."""

    form: Form
    role: str
    kind: str
    prompt: Messages
    about: list[Task]


@dataclass(frozen=True)
class Outcome:
    """What came of a completion: whether it could be read, whether it is a valid task or right, and else why not."""

    readable: bool
    good: bool
    reason: str = ""
    detail: str = ""


@dataclass
class Tryout:
    """
    What was asked, said and found, in the same order.

    Args:
        questions, completions, outcomes: Row by row.
        ends: Tokens that end a completion; one without was cut.
        seconds: All of the generation.
        left_out: Forms that could not be asked, and why.
    """

    questions: list[Question]
    completions: list[Completion]
    outcomes: list[Outcome]
    ends: set[int]
    seconds: float
    left_out: dict[Form, str]

    def of(self, role: str, form: Form, kind: str = "") -> list[Outcome]:
        """Outcomes of one role in one form, of one kind or of all. Teachers are not shown solved tasks."""
        form = form if role == "student" else Form(form.style)
        rows = zip(self.questions, self.outcomes, strict=True)
        return [o for q, o in rows if (q.role, q.form) == (role, form) and kind in ("", q.kind)]

    def measure_mixed(self, form: Form) -> float:
        """Share of the groups of attempts in which some are right and some are not: those teach students."""
        right = [outcome.good for outcome in self.of("student", form)]
        groups = [right[start : start + ATTEMPTS] for start in range(0, len(right), ATTEMPTS)]
        return fmean(0 < sum(group) < len(group) for group in groups)

    def choose(self) -> Form:
        """
        The form in which both roles do best: most can be read, is valid and right. A form that one role cannot use is
        worth nothing; where forms are equal, the one with the shortest prompts is chosen.
        """

        def worth(form: Form) -> tuple[float, float, int]:
            sides = self.of("teacher", form), self.of("student", form)
            proposing, solving = (fmean(o.readable + o.good for o in outcomes) for outcomes in sides)
            return proposing * solving, proposing + solving, -form.shots

        return max(dict.fromkeys(question.form for question in self.questions), key=worth)

    def obstacles(self) -> list[str]:
        """Why nothing can be learned in the chosen form; empty if something can."""
        form = self.choose()
        solving = self.of("student", form)
        right = fmean(outcome.good for outcome in solving)
        found = {
            "no proposal is a valid task": not any(outcome.good for outcome in self.of("teacher", form)),
            "no answer can be read": not any(outcome.readable for outcome in solving),
            "no answer is right": right == 0,
            "every answer is right": right == 1,
        }
        return [what for what, holds in found.items() if holds]

    @property
    def cut(self) -> list[bool]:
        """Which completions were cut at the longest length."""
        return [not self.ends.intersection(completion.completion_ids[-1:]) for completion in self.completions]

    def advise_length(self) -> int:
        """Tokens that all but one in twenty finished completions of the chosen form need, and half as many again."""
        style = self.choose().style
        rows = zip(self.questions, self.completions, self.cut, strict=True)
        lengths = sorted(len(c.completion_ids) for q, c, cut in rows if q.form.style == style and not cut)
        needed = lengths[math.ceil(0.95 * len(lengths)) - 1] if lengths else max(map(len, self._ids()))
        return math.ceil(1.5 * needed / ROUNDING) * ROUNDING

    def _ids(self) -> Iterator[list[int]]:
        return (completion.completion_ids for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self._ids())) / self.seconds


def try_model(options: TryArguments) -> Tryout:
    """
    Lets a base propose and solve in every form.

    Raises:
        `ValueError`: If the base or a kind cannot be used.
    """
    args = _settings_for(options)
    set_seed(options.seed)
    base = build.load_base(options.model, args)
    tokenizer = build.load_tokenizer(base, None, args)
    if options.adapter:
        base = PeftModel.from_pretrained(base, options.adapter).merge_and_unload()
    room = plain_room(base, tokenizer, args)
    ends = sampling_config(base.generation_config, tokenizer, args).eos_token_id
    # Nobody knows the compact style who was not trained on it.
    known = [style for style in STYLES if style != "compact" or args.prompt_style == "compact"]
    styles = [options.prompt_style] if options.prompt_style else known
    with closing(build.make_sandbox(args)) as sandbox:
        sides = {}
        for style in styles:
            args.prompt_style = style
            kinds = build.make_kinds(args)
            referee = build.make_referee(args, kinds, base, tokenizer, sandbox=sandbox)
            referee.free_tokens = room
            sides[style] = referee, load_archive(None, kinds, style, args.archive_size, REFERENCES)
        questions, left_out = _pose_all(sides, options)
        start = time.perf_counter()
        if options.vllm:
            player = _vllm_player(options, tokenizer, args, ends)
        else:
            player = plain_player(base, tokenizer, Router(), [], args)
        completions = _answer(player, questions)
        seconds = time.perf_counter() - start
        outcomes: dict[int, Outcome] = {}
        for style, side in sides.items():
            rows = [number for number, question in enumerate(questions) if question.form.style == style]
            texts = [completions[number].text for number in rows]
            outcomes |= zip(rows, _judge(*side, [questions[number] for number in rows], texts), strict=True)
    return Tryout(questions, completions, [outcomes[n] for n in range(len(questions))], set(ends), seconds, left_out)


def _settings_for(options: TryArguments) -> PopuLoRAConfig:
    on_cpu = not torch.accelerator.is_available()
    args = PopuLoRAConfig(
        "unused",
        task_kinds=options.task_kinds,
        teacher_baseline="group",  # no advantages are taken
        inputs_per_function=options.inputs,
        max_completion_length=options.max_completion_length,
        temperature=options.temperature,
        report_to=[],
        use_cpu=on_cpu,
        bf16=not on_cpu,
        seed=options.seed,
    )
    args.prompt_style = choose_style(None, options.model)
    dtype = "float32" if args.prompt_style == "compact" else "bfloat16"
    args.model_init_kwargs = {"dtype": options.dtype or dtype}
    return args


def _pose_all(
    sides: Mapping[str, tuple[Referee, TaskArchive]], options: TryArguments
) -> tuple[list[Question], dict[Form, str]]:
    """The questions of all forms, and the forms that have none, with the reason."""
    questions, left_out = [], {}
    for form in [*([Form("turns", SHOTS)] if "turns" in sides else []), *map(Form, sides)]:
        try:
            questions += list(_pose(*sides[form.style], form, options))
        except ValueError as error:  # no room in the context, or the chat template refuses it
            left_out[form] = str(error)
    # Where teachers cannot be asked, students need not.
    questions = [question for question in questions if Form(question.form.style) not in left_out]
    if not questions:
        raise ValueError(f"No prompt style can be tried. {next(iter(left_out.values()))}")
    return questions, left_out


def _pose(referee: Referee, archive: TaskArchive, form: Form, options: TryArguments) -> Iterator[Question]:
    """The questions of one form; each has the same references and tasks, as far as the archives are the same."""
    referee.shots = form.shots
    for kind in referee.kinds.values():
        rng = random.Random(f"{options.seed}/{kind.name}")
        tasks = archive.sample([kind.name], options.samples // ATTEMPTS, rng)
        for task in tasks if kind.shots or not form.shots else ():
            prompt = referee.solving_prompt(task)
            if len(prompt) < 2 * min(form.shots, len(kind.shots)) - 1:  # a task is not shown its own solution
                raise ValueError("The context has no room for the solved tasks.")
            for _ in range(ATTEMPTS):
                yield Question(form, "student", kind.name, prompt, [task])
        for _ in range(0 if form.shots else options.samples):  # students alone are shown solved tasks
            drawn = referee.draw_references(kind, archive, REFERENCES, rng)
            prompt, shown = referee.proposal_prompt(kind, drawn)
            yield Question(form, "teacher", kind.name, prompt, shown)


def _vllm_player(
    options: TryArguments, tokenizer: PreTrainedTokenizerBase, args: PopuLoRAConfig, ends: Sequence[int]
) -> Player:
    from vllm import LLM, SamplingParams

    engine = LLM(resolve_model_path(options.model), dtype=args.model_init_kwargs["dtype"], seed=options.seed)
    sampling = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_completion_length, stop_token_ids=list(ends)
    )

    def generate(prompts: list[Messages], names: Sequence[str], seeds: None = None) -> list[Completion]:
        ids = tokenize(tokenizer, prompts, args)
        outputs = engine.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        written = [list(output.outputs[0].token_ids) for output in outputs]
        return as_completions(tokenizer, ids, written)

    return Player(generate)


def _answer(player: Player, questions: Sequence[Question]) -> list[Completion]:
    """Completions in the order of the questions, generated from short prompts to long ones."""
    order = sorted(range(len(questions)), key=lambda n: sum(len(turn["content"]) for turn in questions[n].prompt))
    answers: dict[int, Completion] = {}
    with tqdm(total=len(order), desc="generate", unit="row") as bar:
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            prompts = [questions[number].prompt for number in part]
            answers |= zip(part, player.generate(prompts, [BASE_NAME] * len(part)), strict=True)
            bar.update(len(part))
    return [answers[number] for number in range(len(questions))]


def _judge(
    referee: Referee, archive: TaskArchive, questions: Sequence[Question], texts: Sequence[str]
) -> Iterator[Outcome]:
    """What came of the answers in one style, in order."""
    asked = list(zip(questions, texts, strict=True))
    proposed = [(q, text) for q, text in asked if q.role == "teacher"]
    solved = [(q, text) for q, text in asked if q.role == "student"]
    judged = iter(referee.judge([Written(q.kind, text, q.about) for q, text in proposed], random.Random(0)))
    graded = iter(referee.grade([q.about[0] for q, _ in solved], [t for _, t in solved]))
    for question, text in asked:
        if question.role == "student":
            grade = next(graded)
            reason = grade.attempt.reason or ("" if grade.right else "wrong")
            yield Outcome(grade.attempt.well_formed, grade.right, reason, grade.attempt.detail)
            continue
        outcome = next(judged)
        if isinstance(outcome, Task) and not archive.add(outcome):
            outcome = Refusal(Reject.DUPLICATE, "such a task was proposed or given before")
        readable = isinstance(referee.kinds[question.kind].parse_proposal(text, question.about), Proposal)
        if isinstance(outcome, Task):
            yield Outcome(readable, True)
        else:
            yield Outcome(readable, False, outcome.reason.value, outcome.detail)


# What `populora try` prints: a table of shares, a text of each failure, and the settings that follow.


EXCERPT = 12  # lines of a failed text
LINE = 200  # characters of one
COOLER = 0.7  # at which small bases are read more often, see benchmarks/RESULTS.md
CERTAINTY = 1.96  # standard errors on both sides of a share


def show(found: Tryout, options: TryArguments) -> Iterator[str]:
    """The lines, in order."""
    form = found.choose()
    forms = list(dict.fromkeys(question.form for question in found.questions))
    width = max(len(str(each)) for each in [*forms, *found.left_out])
    yield f"{'form':<{width}}  kind      {'proposals':^33}  {'answers':^33}"
    yield f"{'':<{width}}            {'readable':<16} {'valid':<16}  {'readable':<16} right"
    for each in forms:
        for kind in dict.fromkeys(question.kind for question in found.questions):
            sides = [] if each.shots else [found.of("teacher", each, kind)]
            cells = [f"{_share(o.readable for o in side):<16} {_share(o.good for o in side):<16}" for side in sides]
            answers = found.of("student", each, kind)
            if answers:
                cells = cells or [" " * 33]
                cells.append(f"{_share(o.readable for o in answers):<16} {_share(o.good for o in answers)}")
            if cells:
                yield f"{str(each):<{width}}  {kind:<8}  {'  '.join(cells)}"
    for each, why in found.left_out.items():
        yield f"{str(each):<{width}}  not tried: {make_printable(why[:LINE])}"
    if any(each.shots for each in forms):
        yield "Teachers are asked without shots (solved tasks), which are for students alone."
    yield ""
    yield from _failures(found, form)
    yield f"{found.tokens_per_second:.0f} tokens a second; {_share(found.cut)} of the completions were cut."
    yield f"Groups of attempts that differ, which teach students: {100 * found.measure_mixed(form):.0f} %."
    yield ""
    if obstacles := found.obstacles():
        yield f"Nothing can be learned yet with {form}: {', and '.join(obstacles)}."
        yield from _ways_out(obstacles, options)
        return
    yield "Settings that fit:"
    yield f"  task_kinds: [{', '.join(options.task_kinds)}]"
    yield f"  prompt_style: {form.style}"
    yield f"  shots: {form.shots}"
    yield f"  max_completion_length: {found.advise_length()}"
    yield f"  inputs_per_function: {options.inputs}"
    yield f"  temperature: {options.temperature}"
    yield f"Completions end at the tokens {', '.join(map(str, sorted(found.ends)))}, which the trainer finds itself."


def _ways_out(obstacles: Sequence[str], options: TryArguments) -> Iterator[str]:
    if obstacles == ["every answer is right"]:
        yield "The tasks are too easy for this base: give harder ones with `--seed_tasks`, or train without a try."
        return
    cooler = f"`--temperature {COOLER}` makes fewer mistakes; " if options.temperature > COOLER else ""
    yield (
        "Ways out: a cold start (`recipes/cold_start.py`) teaches the format; a larger or instruction-tuned base "
        f"knows it; {cooler}`--max_completion_length` may cut answers; `--samples 64` tells small shares from none."
    )


def _failures(found: Tryout, form: Form) -> Iterator[str]:
    """For each role and reason the first text that failed so in a form."""
    seen = set()
    for question, completion, outcome in zip(found.questions, found.completions, found.outcomes, strict=True):
        mine = question.form == (form if question.role == "student" else Form(form.style))
        if not mine or outcome.good or (question.role, outcome.reason) in seen:
            continue
        seen.add((question.role, outcome.reason))
        count = sum(o.reason == outcome.reason for o in found.of(question.role, form))
        why = f": {make_printable(outcome.detail[:LINE])}" if outcome.detail else ""
        yield f"--- {question.role}, {question.kind}, {outcome.reason} ({count} times){why}"
        lines = completion.text.splitlines()
        yield from (make_printable(line[:LINE], keep="\t", instead="?") for line in lines[:EXCERPT])
        if len(lines) > EXCERPT:
            yield f"(and {len(lines) - EXCERPT} more lines)"
        yield ""


def _share(flags: Iterator[bool] | Sequence[bool]) -> str:
    """A share in percent with its 95 % interval (Wilson's, which holds near 0 and 1)."""
    flags = list(flags)
    n, p, z = len(flags), fmean(flags), CERTAINTY
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{100 * p:3.0f} % [{100 * max(0, middle - half):.0f}, {100 * min(1, middle + half):.0f}]"
