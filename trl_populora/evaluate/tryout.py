"""`populora try`: how well a base proposes and solves in each prompt style, before hours of training.

    options --try_model--> Tryout: a question, a completion and a finding per row --show--> lines of text

The base answers as members would at the first step: sampled as in training, and verified by the sandbox. Nothing is
trained, and no file is written.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import fmean

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import PeftModel
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedTokenizerBase

from trl_populora import start
from trl_populora.assets import TINY, resolve_model_path
from trl_populora.config import PopuLoRAConfig
from trl_populora.errors import make_printable
from trl_populora.evaluate.intervals import find_share
from trl_populora.generate.player import (
    make_completions,
    make_free_token_counter,
    make_player,
    make_sampling_config,
    tokenize,
)
from trl_populora.lora.layers import BASE_NAME, Router
from trl_populora.options import check_bounds, check_numbers
from trl_populora.start import SHOTS, choose_style
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import STYLES, TASK_KINDS, Proposal, Refusal, Reject, Task, TaskArchive
from trl_populora.tasks.archive import read_task
from trl_populora.tasks.dataset import build_archive, read_tasks
from trl_populora.tasks.python.prompts import check_style


ATTEMPTS = 4  # number of attempts at each task; only a group whose attempts differ has something to teach
REFERENCES = 4  # number of archived tasks that a teacher is shown for a proposal
BATCH = 48  # most rows that are generated at once
ROUNDING = 32  # the advised completion length is a multiple of so many tokens


@dataclass
class TryArguments:
    """Options of `populora try`."""

    model: str = field(metadata={"help": "Hub id or directory of a base, or 'tiny'."})
    adapter: str | None = field(default=None, metadata={"help": "A LoRA adapter on the base; not with vllm."})
    task_kinds: list[str] = field(
        default_factory=lambda: ["code_o", "code_i", "code_f"], metadata={"help": "Kinds of task to try."}
    )
    tasks: str | None = field(
        default=None, metadata={"help": "A file or a Hub dataset of tasks; a kind of your own needs some."}
    )
    prompt_style: str | None = field(default=None, metadata={"help": "Try only this prompt style."})
    samples: int = field(
        default=8, metadata={"help": "Attempts per kind and form, and proposals per kind and style; a multiple of 4."}
    )
    max_completion_length: int = field(default=160, metadata={"help": "Most tokens of a completion."})
    inputs_per_function: int | None = field(
        default=None,
        metadata={"help": "Inputs that a code_f proposal must give; when unset 4, or 6 with the model 'tiny'."},
    )
    temperature: float = field(default=1.0, metadata={"help": "Temperature of the samples."})
    vllm: bool = field(default=False, metadata={"help": "Generate with vLLM, in this process."})
    dtype: str | None = field(default=None, metadata={"help": "Type of the weights."})
    seed: int = field(default=0, metadata={"help": "Seed of references, tasks and samples."})

    def __post_init__(self):
        check_numbers(self)
        check_bounds(self, {">= 1": "max_completion_length", ">= 2": "inputs_per_function", "> 0": "temperature"})
        if self.samples < ATTEMPTS or self.samples % ATTEMPTS:
            raise ValueError(f"`samples` must be a multiple of {ATTEMPTS} above 0, got {self.samples}.")
        if self.vllm and self.adapter:
            raise ValueError("`adapter` is tried with transformers; leave `vllm` out.")
        if self.prompt_style is not None:
            check_style(self.prompt_style)

    @property
    def inputs(self) -> int:
        """Number of inputs that a code_f proposal must give."""
        if self.inputs_per_function is None:
            return 6 if self.model == TINY else 4
        return self.inputs_per_function


@dataclass(frozen=True)
class Form:
    """How tasks are put to the base: a prompt style, and the number of solved tasks that a student is shown."""

    style: str
    shots: int = 0

    def __str__(self) -> str:
        return f"{self.style} + {self.shots} shots" if self.shots else self.style


@dataclass(frozen=True)
class Question:
    """One prompt. `about` holds the references of a teacher, or the one task of a student."""

    form: Form
    role: str
    kind: str
    prompt: Messages
    about: list[Task]


@dataclass(frozen=True)
class Finding:
    """
    What became of a completion.

    Args:
        readable: Whether it could be read.
        good: Whether a proposal is a valid task, or an attempt right.
        reason: Why it is not good, in a word.
        detail: More about the reason, for a person.
    """

    readable: bool
    good: bool
    reason: str = ""
    detail: str = ""


@dataclass
class Tryout:
    """
    What was asked, answered and found.

    Args:
        questions, completions, findings: One of each per row, in the same order.
        ends: Tokens that end a completion. A completion whose last token is another one was cut.
        seconds: Duration of the whole generation, without the start of vLLM.
        left_out: Forms that could not be tried, with the reason.
    """

    questions: list[Question]
    completions: list[Completion]
    findings: list[Finding]
    ends: set[int]
    seconds: float
    left_out: dict[Form, str]

    def select(self, role: str, form: Form, kind: str = "") -> list[Finding]:
        """Selects the findings of one role in one form, of one kind of task or of all."""
        # Only students are shown solved tasks. So teachers have one set of rows per style, whatever number of solved
        # tasks a form shows.
        form = form if role == "student" else Form(form.style)
        rows = zip(self.questions, self.findings, strict=True)
        return [o for q, o in rows if (q.role, q.form) == (role, form) and kind in ("", q.kind)]

    def measure_mixed(self, form: Form) -> float:
        """Computes the share of groups in which some attempts are right and some wrong. Only these teach students."""
        right = [finding.good for finding in self.select("student", form)]
        groups = [right[start : start + ATTEMPTS] for start in range(0, len(right), ATTEMPTS)]
        return fmean(0 < sum(group) < len(group) for group in groups)

    def choose(self) -> Form:
        """
        Chooses the form in which both roles do best, by their shares of readable and of good completions.

        A form that one role cannot use is worth nothing. Of equal forms the one with the fewest solved tasks wins,
        because its prompts are the shortest.
        """

        def weigh(form: Form) -> tuple[float, float, int]:
            roles = self.select("teacher", form), self.select("student", form)
            # If no kind can be proposed, teachers have no findings. Their part is then 1 in every form.
            proposing, solving = (fmean([f.readable + f.good for f in findings] or [1]) for findings in roles)
            # The product is 0 if one role cannot use the form; the sum then still tells such forms apart.
            return proposing * solving, proposing + solving, -form.shots

        return max(dict.fromkeys(question.form for question in self.questions), key=weigh)

    def find_obstacles(self) -> list[str]:
        """Finds the reasons why nothing can be learned in the chosen form; empty if something can be learned."""
        form = self.choose()
        solving, proposing = self.select("student", form), self.select("teacher", form)
        right = fmean(finding.good for finding in solving)
        found = {
            "no proposal is a valid task": bool(proposing) and not any(finding.good for finding in proposing),
            "no answer can be read": not any(finding.readable for finding in solving),
            "no answer is right": right == 0,
            "every answer is right": right == 1,
        }
        return [what for what, holds in found.items() if holds]

    @property
    def cut(self) -> list[bool]:
        """For each completion, whether it was cut at the longest length."""
        return [not self.ends.intersection(completion.completion_ids[-1:]) for completion in self.completions]

    def advise_length(self) -> int:
        """
        Computes a `max_completion_length`: 1.5 times the 95th percentile of lengths in the chosen style, rounded up to
        a multiple of `ROUNDING`.

        Completions that were cut do not count, because nobody knows how long they would have been. If all
        completions in this style were cut, the longest completion in any style takes the place of the percentile.
        """
        style = self.choose().style
        rows = zip(self.questions, self.completions, self.cut, strict=True)
        lengths = sorted(len(c.completion_ids) for q, c, cut in rows if q.form.style == style and not cut)
        needed = lengths[math.ceil(0.95 * len(lengths)) - 1] if lengths else max(map(len, self._ids()))
        return math.ceil(1.5 * needed / ROUNDING) * ROUNDING

    def _ids(self) -> Iterator[list[int]]:
        """Yields the token ids of each completion."""
        return (completion.completion_ids for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated, divided by `seconds`."""
        return sum(map(len, self._ids())) / self.seconds


@dataclass(frozen=True)
class Setup:
    """What one prompt style is tried with: a referee that writes prompts in that style, and an archive of tasks."""

    referee: Referee
    archive: TaskArchive


def try_model(options: TryArguments) -> Tryout:
    """
    Lets a base propose and solve in every form, and judges what it writes.

    Raises:
        `ValueError`: If the base or a kind cannot be used, or no prompt style can be tried.
    """
    start.refuse_gguf(options.model)
    given = read_tasks(options.tasks)
    args = _make_settings(options)
    _check_tasks(start.make_kinds(args), given)
    set_seed(options.seed)
    base = start.load_base(options.model, args)
    tokenizer = start.load_tokenizer(base, None, args)
    if options.adapter:
        base = PeftModel.from_pretrained(base, os.path.expanduser(options.adapter)).merge_and_unload()
    free_tokens = make_free_token_counter(base, tokenizer, args)
    ends = make_sampling_config(base.generation_config, tokenizer, args).eos_token_id
    # Only bases that were trained on the compact style can read it.
    known = [style for style in STYLES if style != "compact" or args.prompt_style == "compact"]
    styles = [options.prompt_style] if options.prompt_style else known
    with closing(start.make_sandbox(args)) as sandbox:
        setups = {}
        for style in styles:
            args.prompt_style = style
            kinds = start.make_kinds(args)
            referee = start.make_referee(args, kinds, base, tokenizer, sandbox=sandbox)
            referee.free_tokens = free_tokens
            setups[style] = Setup(referee, build_archive(given, kinds, style, args.archive_size, REFERENCES))
        questions, left_out = _pose_all(setups, options)
        if options.vllm:
            player = _make_vllm_player(options, tokenizer, args, ends)
        else:
            player = make_player(base, tokenizer, Router(), [], args)
        began = time.perf_counter()
        completions = _answer(player, questions)
        seconds = time.perf_counter() - began
        # All styles were generated together, which is faster. Each is judged by its own referee.
        findings: dict[int, Finding] = {}
        for style, setup in setups.items():
            rows = [number for number, question in enumerate(questions) if question.form.style == style]
            texts = [completions[number].text for number in rows]
            findings |= zip(rows, _judge(setup, [questions[number] for number in rows], texts), strict=True)
    return Tryout(questions, completions, [findings[n] for n in range(len(questions))], set(ends), seconds, left_out)


def _check_tasks(kinds: Iterable[str], given: Dataset | None) -> None:
    """
    Checks that there is a task of each kind.

    Raises:
        `ValueError`: If not.
    """
    rows = enumerate(given or ())
    held = set(TASK_KINDS) if given is None else {read_task(row, f"row {number}").kind for number, row in rows}
    if missing := [kind for kind in kinds if kind not in held]:
        raise ValueError(
            f"There is no task of the kind {', '.join(missing)} to try. Name a table with tasks of each kind as "
            "`tasks` (`make_task` writes tasks of the built-in kinds, and a run's `archive.parquet` has some)."
        )


def _make_settings(options: TryArguments) -> PopuLoRAConfig:
    """Makes the settings of a run that would ask the base the same questions."""
    on_cpu = not torch.accelerator.is_available()
    args = PopuLoRAConfig(
        "unused",
        task_kinds=options.task_kinds,
        # A run with teachers refuses kinds without proposals. Without teachers no kind is refused, and this file asks
        # for proposals nevertheless.
        teachers=0,
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
    if options.vllm:
        # vLLM loads the base itself, and fills the GPU. Here only the config and the number of weights are needed.
        # transformers cannot load a quantised base without its weights, so that goes to the CPU.
        config = AutoConfig.from_pretrained(resolve_model_path(options.model))
        args.model_init_kwargs["device_map"] = "cpu" if hasattr(config, "quantization_config") else "meta"
    return args


def _pose_all(setups: Mapping[str, Setup], options: TryArguments) -> tuple[list[Question], dict[Form, str]]:
    """Writes the questions of all forms. Returns the questions, and the reason for each form that cannot be tried."""
    questions, left_out = [], {}
    for form in [*([Form("turns", SHOTS)] if "turns" in setups else []), *map(Form, setups)]:
        try:
            questions += list(_pose(setups[form.style], form, options))
        except ValueError as error:  # a prompt does not fit into the context, or the chat template refuses it
            left_out[form] = str(error)
    # Teachers are asked in the plain form of a style. If this form cannot be tried, the whole style is left out.
    questions = [question for question in questions if Form(question.form.style) not in left_out]
    if not questions:
        raise ValueError(f"No prompt style can be tried. {next(iter(left_out.values()))}")
    return questions, left_out


def _pose(setup: Setup, form: Form, options: TryArguments) -> Iterator[Question]:
    """Writes the questions of one form. Forms with equal archives get the same references and tasks."""
    referee, archive = setup.referee, setup.archive
    referee.shots = form.shots
    for kind in referee.kinds.values():
        rng = random.Random(f"{options.seed}/{kind.name}")
        tasks = archive.sample([kind.name], options.samples // ATTEMPTS, rng)
        for task in tasks if kind.shots or not form.shots else ():
            prompt = referee.solving_prompt(task)
            # Each shown solution is two turns, and the referee leaves out what does not fit. One solution may be
            # missing for another reason: nobody is shown the solution of the task itself.
            if len(prompt) < 2 * min(form.shots, len(kind.shots)) - 1:
                raise ValueError("The solved tasks do not fit into the context.")
            for _ in range(ATTEMPTS):
                yield Question(form, "student", kind.name, prompt, [task])
        # Teachers are never shown solved tasks.
        for _ in range(0 if form.shots or kind.missing_for_proposals() else options.samples):
            drawn = referee.draw_references(kind, archive, REFERENCES, rng)
            prompt, shown = referee.proposal_prompt(kind, drawn)
            yield Question(form, "teacher", kind.name, prompt, shown)


def _make_vllm_player(
    options: TryArguments, tokenizer: PreTrainedTokenizerBase, args: PopuLoRAConfig, ends: Sequence[int]
) -> Player:
    """Makes a player that generates with a vLLM engine in this process."""
    from vllm import LLM, SamplingParams

    engine = LLM(resolve_model_path(options.model), dtype=args.model_init_kwargs["dtype"], seed=options.seed)
    sampling = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_completion_length, stop_token_ids=list(ends)
    )

    def generate(prompts: list[Messages], names: Sequence[str], seeds: None = None) -> list[Completion]:
        ids = tokenize(tokenizer, prompts, args)
        outputs = engine.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        written = [list(output.outputs[0].token_ids) for output in outputs]
        return make_completions(tokenizer, ids, written)

    return Player(generate)


def _answer(player: Player, questions: Sequence[Question]) -> list[Completion]:
    """Generates the completions and returns them in the order of the questions."""
    # From short prompts to long ones: rows of similar length waste little padding in a batch.
    order = sorted(range(len(questions)), key=lambda n: sum(len(turn["content"]) for turn in questions[n].prompt))
    answers: dict[int, Completion] = {}
    with tqdm(total=len(order), desc="generate", unit="row") as bar:
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            prompts = [questions[number].prompt for number in part]
            answers |= zip(part, player.generate(prompts, [BASE_NAME] * len(part)), strict=True)
            bar.update(len(part))
    return [answers[number] for number in range(len(questions))]


def _judge(setup: Setup, questions: Sequence[Question], texts: Sequence[str]) -> Iterator[Finding]:
    """Judges the proposals and grades the attempts of one style; yields the findings in the order of the questions."""
    referee = setup.referee
    asked = list(zip(questions, texts, strict=True))
    proposed = [(q, text) for q, text in asked if q.role == "teacher"]
    solved = [(q, text) for q, text in asked if q.role == "student"]
    judged = iter(referee.judge([Written(q.kind, text, q.about) for q, text in proposed], random.Random(0)))
    graded = iter(referee.grade([q.about[0] for q, _ in solved], [t for _, t in solved]))
    for question, text in asked:
        if question.role == "student":
            grade = next(graded)
            reason = grade.attempt.reason or ("" if grade.right else "wrong")
            yield Finding(grade.attempt.well_formed, grade.right, reason, grade.attempt.detail)
            continue
        verdict = next(judged)
        # The archive refuses a task that it holds. What the base proposes is added, so that a repeat is refused, too.
        if isinstance(verdict, Task) and not setup.archive.add(verdict):
            verdict = Refusal(Reject.DUPLICATE, "such a task was proposed or given before")
        readable = isinstance(referee.kinds[question.kind].parse_proposal(text, question.about), Proposal)
        if isinstance(verdict, Task):
            yield Finding(readable, True)
        else:
            yield Finding(readable, False, verdict.reason.value, verdict.detail)


# What `populora try` prints: a table of shares, the first completion of each sort of failure, and settings that fit.


EXCERPT = 12  # most lines that are shown of a completion that failed
LINE = 200  # most characters that are shown of a completion's line, or of a reason
COOLER = 0.7  # temperature at which more answers of small bases can be read, see benchmarks/RESULTS.md


def show(found: Tryout, options: TryArguments) -> Iterator[str]:
    """
    Writes the findings as lines of text for a person.

    Args:
        found: The questions, completions and findings.
        options: The options of the command.
    """
    form = found.choose()
    forms = list(dict.fromkeys(question.form for question in found.questions))
    width = max(len(str(each)) for each in [*forms, *found.left_out])
    yield f"{'form':<{width}}  kind      {'proposals':^33}  {'answers':^33}"
    yield f"{'':<{width}}            {'readable':<16} {'valid':<16}  {'readable':<16} right"
    for each in forms:
        for kind in dict.fromkeys(question.kind for question in found.questions):
            sides = [side for side in [found.select("teacher", each, kind)] if side and not each.shots]
            cells = [
                f"{_format_share(o.readable for o in side):<16} {_format_share(o.good for o in side):<16}"
                for side in sides
            ]
            answers = found.select("student", each, kind)
            if answers:
                cells = cells or [" " * 33]
                readable = _format_share((o.readable for o in answers), ATTEMPTS)
                cells.append(f"{readable:<16} {_format_share((o.good for o in answers), ATTEMPTS)}")
            if cells:
                yield f"{str(each):<{width}}  {kind:<8}  {'  '.join(cells)}"
    for each, why in found.left_out.items():
        yield f"{str(each):<{width}}  not tried: {make_printable(why[:LINE])}"
    if any(each.shots for each in forms):
        yield "Teachers are asked without shots (solved tasks), which are for students alone."
    yield ""
    yield from _quote_failures(found, form)
    yield f"{found.tokens_per_second:.0f} tokens a second; {100 * fmean(found.cut):.0f} % of the completions were cut."
    yield f"Groups of attempts that differ, which teach students: {100 * found.measure_mixed(form):.0f} %."
    # A wrong end token can be why nothing is learned, so the tokens are told in either case.
    yield f"Completions end at the tokens {', '.join(map(str, sorted(found.ends)))}, which the trainer finds itself."
    yield ""
    if obstacles := found.find_obstacles():
        yield f"Nothing can be learned yet with {form}: {', and '.join(obstacles)}."
        yield from _suggest_ways_out(obstacles, options)
        return
    yield "Settings that fit:"
    yield f"  task_kinds: [{', '.join(options.task_kinds)}]"
    if not found.select("teacher", form):
        yield "  teachers: 0"
    yield f"  prompt_style: {form.style}"
    yield f"  shots: {form.shots}"
    yield f"  max_completion_length: {found.advise_length()}"
    yield f"  inputs_per_function: {options.inputs}"
    yield f"  temperature: {options.temperature}"


def _suggest_ways_out(obstacles: Sequence[str], options: TryArguments) -> Iterator[str]:
    """Says what the user can do about the obstacles."""
    if obstacles == ["every answer is right"]:
        yield "The tasks are too easy for this base: train on harder ones (`--seed_tasks`), or on these all the same."
        return
    cooler = f"with `--temperature {COOLER}` a base makes fewer mistakes; " if options.temperature > COOLER else ""
    yield (
        "Ways out: a cold start (`recipes/cold_start.py`) teaches the format; a larger or instruction-tuned base "
        f"knows it; {cooler}a larger `--max_completion_length` cuts fewer answers; `--samples 64` tells small shares "
        "from none."
    )


def _quote_failures(found: Tryout, form: Form) -> Iterator[str]:
    """Quotes texts of one form that failed: for each role and each reason the first."""
    seen = set()
    for question, completion, finding in zip(found.questions, found.completions, found.findings, strict=True):
        # Teachers have no rows in a form with solved tasks; their rows are those of the plain style.
        mine = question.form == (form if question.role == "student" else Form(form.style))
        if not mine or finding.good or (question.role, finding.reason) in seen:
            continue
        seen.add((question.role, finding.reason))
        count = sum(each.reason == finding.reason for each in found.select(question.role, form))
        why = f": {make_printable(finding.detail[:LINE])}" if finding.detail else ""
        yield f"--- {question.role}, {question.kind}, {finding.reason} ({count} times){why}"
        lines = completion.text.splitlines()
        yield from (make_printable(line[:LINE], keep="\t", instead="?") for line in lines[:EXCERPT])
        if len(lines) > EXCERPT:
            yield f"(and {len(lines) - EXCERPT} more lines)"
        yield ""


def _format_share(flags: Iterable[bool], attempts: int = 1) -> str:
    """Formats a share in percent with its 95 % interval over tasks. Each task has `attempts` of the flags."""
    flags = list(flags)
    share = fmean(flags)
    # Attempts at one task mostly end alike. So the interval counts each task as one value.
    low, high = find_share(share, len(flags) // attempts)
    return f"{100 * share:3.0f} % [{100 * low:.0f}, {100 * high:.0f}]"
