"""The command `populora`, also as `python -m trl_populora`: one function for each of the `COMMANDS`.

    arguments --main--> one command --_parse--> its dataclass of options --> what it does, in lines on stdout

`quickstart`, `train` and `sandbox-check` parse their options themselves.

`populora train` trains in one process. For several, start `recipes/train_populora.py` with `accelerate launch`; it
takes the same options.

The functions import what they need themselves, because torch takes longer to import than some commands take to run.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import logging
import os
import select
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path

from trl_populora import __version__
from trl_populora.errors import describe_error, end_with, say_how_to_install


@dataclass
class TrainArguments:
    """Options of a training command: its tasks, and the checkpoint to go on from."""

    _argument_group_name = "This command"
    seed_tasks: str | None = field(
        default=None, metadata={"help": "Tasks to begin with: a JSON-lines or parquet file, or a Hub dataset."}
    )
    eval_tasks: str | None = field(
        default=None,
        metadata={
            "help": "Held-out tasks: as seed_tasks, or 'tiny' (of the embedded base), 'real' (of others), 'none'."
        },
    )
    resume: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "newest",
            "metavar": "CHECKPOINT",
            "help": "Go on from this checkpoint; without a value, from the newest whole one in output_dir.",
        },
    )

    def __post_init__(self) -> None:
        # A recipe in YAML may say `resume: true` or `resume: false`.
        self.resume = {"true": "newest", "false": None}.get(str(self.resume).lower(), self.resume)


@dataclass
class RecipesArguments:
    """Options of `populora recipes`."""

    out: str | None = field(
        default=None,
        metadata={"help": "Directory to copy recipes/ and accelerate_configs/ to. Without it the recipes are listed."},
    )


@dataclass
class PushArguments:
    """Options of `populora push`."""

    run: str = field(metadata={"help": "Directory of a finished run."})
    repo: str | None = field(
        default=None, metadata={"help": "Model repository for the run, user/name; made if absent."}
    )
    archive_repo: str | None = field(default=None, metadata={"help": "Dataset repository for the run's task archive."})
    space: str | None = field(default=None, metadata={"help": "Static Space that shows the run's report."})
    token: str | None = field(default=None, metadata={"help": "Write token; by default the one of `hf auth login`."})
    private: bool = field(default=False, metadata={"help": "Make a new repository private."})


@dataclass
class InfoArguments:
    """Options of `populora info`."""

    run: str = field(metadata={"help": "Directory of a run, finished or not, or the Hub name of a population."})


@dataclass
class ReportArguments:
    """Options of `populora report`."""

    run: str = field(metadata={"help": "Directory of a run, finished or not, or the Hub name of a population."})
    out: str | None = field(
        default=None,
        metadata={
            "help": "Directory for report.html and plots/. By default the run's own directory or, for a Hub name, a "
            "directory of the population's name in the current one."
        },
    )


@dataclass
class CheckKindArguments:
    """Options of `populora check-kind`."""

    kind: str = field(metadata={"help": "A class as package.module:Class, or the name of one of the package's kinds."})
    tasks: str | None = field(
        default=None, metadata={"help": "Tasks to show and to run: a file or a Hub dataset; by default the package's."}
    )


def quickstart(arguments: Sequence[str]) -> None:
    """Trains 2 teachers and 2 students on the embedded base: 3 to 5 minutes on two CPU cores."""
    from trl_populora.assets import find_shipped

    given = ["--config", str(find_shipped("recipes") / "tiny" / "quickstart.yaml")]
    # A directory belongs to one run, so each quick start takes the next free name: quickstart, quickstart-2, ...
    if not any(option.startswith(("--resume", "--output_dir", "--output-dir")) for option in arguments):
        names = itertools.chain(["quickstart"], map("quickstart-{}".format, itertools.count(2)))
        given += ["--output_dir", next(f"runs/{name}" for name in names if not Path("runs", name).exists())]
    train([*given, *arguments])


def train(arguments: Sequence[str]) -> None:
    """Trains a population."""
    from trl import TrlParser

    from trl_populora.config import MemberConfig, PopuLoRAConfig
    from trl_populora.tasks.script import PromptArguments

    # transformers warns callers of coming changes. Users of this command cannot change how we call transformers.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    parser = TrlParser(
        (TrainArguments, PopuLoRAConfig, MemberConfig, PromptArguments), prog="populora train", usage=USAGE
    )
    if arguments[-1:] == ["--config"]:  # TRL's parser would pop the missing value from an empty list: an IndexError
        parser.error("argument --config: expected one argument")
    if not arguments:
        parser.error("what to train? Give a recipe, `--config recipes/tiny/quickstart.yaml`, or options; see --help.")
    run_training(*_parse_known(parser, "train", arguments))


# Without this line argparse's own usage would list all options a second time.
USAGE = "populora train --config FILE.yaml [--option value ...]"


def build_trainer(recipe, args, model, prompts=None):
    """
    Builds the trainer that the options of a training command describe: of a dataset run if `prompts` names a dataset,
    else of the game.

    Args:
        recipe: [`TrainArguments`].
        args: [`~trl_populora.config.PopuLoRAConfig`].
        model: [`~trl_populora.config.MemberConfig`].
        prompts: [`~trl_populora.tasks.script.PromptArguments`], which may name no dataset; `None` means the same.
    """
    from trl import get_quantization_config

    from trl_populora.assets import TINY
    from trl_populora.config import base_options, list_member_loras
    from trl_populora.start import choose_style
    from trl_populora.tasks.dataset import read_given_tasks
    from trl_populora.tasks.script import find_reward_functions, read_prompts, refuse_both
    from trl_populora.trainer import PopuLoRATrainer

    name, rewards = model.model_name_or_path or TINY, None
    args.model_init_kwargs = base_options(model, args.model_init_kwargs)
    if prompts is not None:
        refuse_both(prompts, {"seed_tasks": recipe.seed_tasks, "eval_tasks": recipe.eval_tasks})
        rewards = find_reward_functions(prompts) or None
    if prompts is not None and prompts.dataset_names:
        train_dataset, eval_dataset = read_prompts(prompts, args.eval_strategy != "no" or args.eval_on_start)
    else:
        style = choose_style(args.prompt_style, name, args.model_init_kwargs)
        train_dataset, eval_dataset = read_given_tasks(recipe.seed_tasks, recipe.eval_tasks, args.task_kinds, style)
    trainer = PopuLoRATrainer(
        model=name,
        reward_funcs=rewards,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model),
        peft_config=list_member_loras(model),
    )
    if prompts is not None:
        trainer.dataset_names = prompts.dataset_names
    return trainer


def run_training(recipe, args, model, prompts=None) -> None:
    """Trains, saves, and shows the population: what `populora train` and `recipes/train_populora.py` do."""
    from trl_populora.report.table import print_population
    from trl_populora.run.directory import find_earlier_run

    checkpoint = args.resume_from_checkpoint or recipe.resume
    # `trainer.train` refuses a directory with another run, too, but only after a large model is loaded.
    if not checkpoint and (taken := find_earlier_run(args.output_dir)):
        raise ValueError(taken)
    args.resume_from_checkpoint = checkpoint
    trainer = build_trainer(recipe, args, model, prompts)
    # Holds the lock on the directory until all files are written; `train` alone would release it when it returns.
    with trainer.directory:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_state()
        trainer.save_model()
        if trainer.is_world_process_zero():
            print_population(args.output_dir)
            _say(f"Population saved to {args.output_dir}.")
            _tell_story(args)
    if args.use_vllm:
        trainer.vllm_generation.end()
    # A process that ends without leaving its process group may be aborted by the threads for collectives. The launcher
    # then calls a finished run failed (pytorch#190489).
    trainer.accelerator.end_training()


def _tell_story(args) -> None:
    """Says what a run that has ended came to, draws its picture and writes its report, or says why there is none."""
    from trl_populora.report.load import load_run
    from trl_populora.report.page import write_report
    from trl_populora.report.plots import plot_run
    from trl_populora.report.verdict import judge
    from trl_populora.run.read import METRICS, STEP, classify_log, read_lines

    if not any(classify_log(entry) == STEP for entry in read_lines(Path(args.output_dir, METRICS))):
        _say("There is no picture: no step was logged (`logging_strategy=no`).")
        return
    _say(str(judge(load_run(args.output_dir))))
    try:
        _say(f"The run's story is in {plot_run(args.output_dir)} and {write_report(args.output_dir)}.")
    except ModuleNotFoundError as error:
        if not (way_out := say_how_to_install(error)):
            raise
        _say(f"There is no picture: {way_out}")


def try_model(arguments: Sequence[str]) -> None:
    """Shows how well a base proposes and solves in each prompt style, before you train it."""
    from trl_populora.evaluate.tryout import TryArguments, show
    from trl_populora.evaluate.tryout import try_model as run_tryout

    (options,) = _parse(TryArguments, "try", arguments)
    found = run_tryout(options)
    for line in show(found, options):
        _say(line)
    if found.find_obstacles():
        raise SystemExit(1)


def recipes(arguments: Sequence[str]) -> None:
    """Lists the recipes of the package, or copies them and the accelerate configs."""
    from trl_populora.assets import copy_recipes, list_recipes

    (options,) = _parse(RecipesArguments, "recipes", arguments)
    if options.out is None:
        for name, title in list_recipes().items():
            _say(f"{name:<46} {title}")
        _say("`populora recipes DIRECTORY` copies them; start one there: `populora train --config recipes/<name>`.")
    else:
        copy_recipes(options.out)
        _say(f"Recipes and accelerate configs copied to {options.out}; recipes/README.md explains them.")


def report(arguments: Sequence[str]) -> None:
    """Draws the pictures of a run, finished or in progress, and writes report.html."""
    from trl_populora.report.page import write_report
    from trl_populora.report.plots import plot_run

    (options,) = _parse(ReportArguments, "report", arguments)
    # The report of a downloaded population has the population's name as title, not the name of a folder in a cache.
    beside = _choose_report_directory(options.run)
    run = _find_run(options.run)
    target = options.out or beside or run
    page = write_report(run, target, beside and options.run)
    # `populora train` draws this picture at its end. A script's run lacks it, and so does one that still trains.
    picture = plot_run(run, Path(target, "run.png"), beside and options.run)
    _say(f"Report written to {page}, its picture to {picture}.")


def push(arguments: Sequence[str]) -> None:
    """Uploads a run, its archive or its report to the Hub, or several of these."""
    from trl_populora.hub.push import push_archive, push_run, push_space
    from trl_populora.run.read import read_population
    from trl_populora.run.saved_population import check_plays

    (options,) = _parse(PushArguments, "push", arguments)
    if options.archive_repo is not None:  # refused before anything is uploaded
        check_plays(options.run, read_population(options.run))
    push_page = partial(push_space, model=options.repo)
    uploads = (push_run, options.repo), (push_archive, options.archive_repo), (push_page, options.space)
    if not any(repo for _, repo in uploads):
        raise ValueError(
            "nothing to push to; give `--repo user/name`, `--archive_repo user/tasks` or `--space user/page`."
        )
    for upload, repo in uploads:
        if repo is not None:
            _say(f"Pushed to {upload(options.run, repo, options.token, options.private or None)}.")


def export(arguments: Sequence[str]) -> None:
    """Writes one member, or the mean of all students, as an ordinary PEFT adapter or merged into the base."""
    from trl_populora.hub.export import ExportArguments, export_member

    (options,) = _parse(ExportArguments, "export", arguments)
    name = export_member(options.run, options.out, options.member, options.merge, options.merge_students)
    _say(f"{name} is in {options.out}.")


def info(arguments: Sequence[str]) -> None:
    """Shows the members of a run with their ratings."""
    from trl_populora.report.table import print_population

    (options,) = _parse(InfoArguments, "info", arguments)
    print_population(_find_run(options.run))


def crossplay(arguments: Sequence[str]) -> None:
    """Lets every student of some runs attempt fresh tasks of every teacher."""
    from trl_populora.evaluate.cross_play import CrossPlayArguments, assemble, keep_known, write_payoff
    from trl_populora.start import check_outputs
    from trl_populora.tasks.archive import TaskArchive, read_task
    from trl_populora.tasks.dataset import read_tasks

    (options,) = _parse(CrossPlayArguments, "crossplay", arguments)
    rows = [read_task(row, f"row {n}") for n, row in enumerate(read_tasks(options.tasks) or ())]
    Path(options.out).mkdir(parents=True, exist_ok=True)  # sampling takes long, so this fails first
    with assemble(options.runs, task_kinds=options.task_kinds, seed=options.seed) as contest:
        check_outputs({"tasks": rows}, contest.referee, contest.player)
        if not contest.teachers and not rows:
            raise ValueError(f"No teacher in {', '.join(options.runs)}: give the students `--tasks`.")
        if options.tasks is not None:
            for task in keep_known(contest.referee, rows):
                contest.referee.solving_prompt(task)  # raises if it does not fit into the context
        payoff = contest.play(options.proposals, options.attempts, options.seed)
        if options.tasks is not None:
            # An archive of the tasks is made, because it drops duplicates.
            given = list(TaskArchive.from_dataset(task.to_record() for task in rows))
            payoff.given = contest.score([*contest.teachers, *contest.students], given, options.attempts)
    _say(f"Cross-play written to {write_payoff(payoff.rename(contest.names), options.out)}.")


def check_kind(arguments: Sequence[str]) -> None:
    """Tests a task kind of your own before you train with it."""
    from trl_populora.config import PopuLoRAConfig
    from trl_populora.evaluate.check_kind import check_kind as check
    from trl_populora.start import make_kinds
    from trl_populora.tasks import load_seed_tasks
    from trl_populora.tasks.archive import TaskArchive
    from trl_populora.tasks.dataset import read_tasks

    (options,) = _parse(CheckKindArguments, "check-kind", arguments)
    # With teachers a kind whose tasks are only given would be refused.
    (kind,) = make_kinds(PopuLoRAConfig("unused", task_kinds=[options.kind], teachers=0)).values()
    rows = read_tasks(options.tasks)
    given = load_seed_tasks() if rows is None else TaskArchive.from_dataset(rows)
    problems = check(kind, list(given), _say)
    for problem in problems:
        _say(problem)
    if problems:
        raise ValueError(f"{len(problems)} problem(s) in the task kind {kind.name!r}, as told above.")
    _say(f"No problem found in the task kind {kind.name!r}.")


def sandbox_check(arguments: Sequence[str]) -> None:
    """Says how well this host can confine untrusted programs."""
    from trl_populora.sandbox.pool import main as check

    raise SystemExit(check(arguments))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "quickstart": quickstart,
    "train": train,
    "try": try_model,
    "recipes": recipes,
    "report": report,
    "push": push,
    "export": export,
    "info": info,
    "crossplay": crossplay,
    "check-kind": check_kind,
    "sandbox-check": sandbox_check,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. An error that the user can mend ends it with one line, any other with a traceback."""
    parser = argparse.ArgumentParser(
        prog="populora",
        description="Trains populations of LoRA adapters that teach and solve each other's verifiable tasks.",
        epilog="\n".join(["commands:"] + [f"  {name:<14} {run.__doc__}" for name, run in COMMANDS.items()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"populora {__version__}")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="command", help="one of the commands below; each has --help"
    )
    # On some CPUs bitsandbytes logs at every import that another package has a faster kernel.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # TRL's parser knows `--config FILE` alone.
    given = [word for each in given for word in (each.split("=", 1) if each.startswith("--config=") else [each])]
    command = parser.parse_args(given[:1]).command
    try:
        # The module of a user's own `module:function` may lie in the current directory. If this directory is not on
        # the path yet, it comes last, so that no file in it hides a library.
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
        COMMANDS[command](given[1:])
        sys.stdout.flush()
    except KeyboardInterrupt as stop:  # a training has already said how to resume it
        raise SystemExit(128 + signal.SIGINT) from stop
    except Exception as error:
        sentence = describe_error(error)
        if sentence is None:
            raise
        if isinstance(error, BrokenPipeError) and _has_lost_reader():
            # `head`, for example, has read what it wants. Python writes the rest of the output when it exits, and must
            # not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from error  # as Rich ends where it prints a table
        end_with(f"populora {command}: {sentence}")


def _parse(options: type, command: str, arguments: Sequence[str]) -> tuple:
    """
    Parses the options of a command: by name, from a YAML file with `--config`, and the first one also by position.

    TRL's parser knows names and YAML files, but its import loads torch. A command that has only texts as options, such
    as `info`, gets a plain parser instead and starts at once, unless `--config` is given.

    Args:
        options: Dataclass of the options.
        command: Name of the command.
        arguments: The command line after the name.

    Returns:
        One filled dataclass, in a tuple.
    """
    first, default = fields(options)[0].name, fields(options)[0].default
    many = typing.get_origin(typing.get_type_hints(options)[first]) is list
    # What the usage shows for the option by position: `RUN`, `[OUT]` where it can be left out, `RUN ...` for a list.
    place = first.upper().removesuffix("S") + (" ..." if many else "")
    place = f"[{place}]" if default is None else place
    given = list(arguments)
    if given and not given[0].startswith("-"):  # the first option stands without its name
        given[:0] = ["--" + first]
    usage = f"populora {command} {place} [--option value ...]"
    about: dict[str, typing.Any] = {
        "prog": f"populora {command}",
        "usage": usage,
        "description": COMMANDS[command].__doc__,
    }
    if set(typing.get_type_hints(options).values()) <= {str, str | None} and "--config" not in given:
        plain = argparse.ArgumentParser(**about)
        for option in fields(options):
            needed = option.default is MISSING
            plain.add_argument(
                f"--{option.name}", required=needed, default=option.default, help=option.metadata["help"]
            )
        return (options(**vars(plain.parse_args(given))),)
    from trl import TrlParser

    return _parse_known(TrlParser((options,), **about), command, given)


def _parse_known(parser: typing.Any, command: str, arguments: Sequence[str]) -> tuple:
    """Parses with TRL's parser. Refuses an unknown option with an error that names the option most like it."""
    *options, unknown = parser.parse_args_and_config(list(arguments), return_remaining_strings=True)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        raise ValueError(f"{_describe_unknown(unknown, known, arguments)} `populora {command} --help` lists all.")
    return tuple(options)


def _describe_unknown(unknown: Sequence[str], known: Sequence[str], arguments: Sequence[str]) -> str:
    """
    Says which words are no option, which option was probably meant, and, if the first of them comes from a recipe, on
    which line.
    """
    name = unknown[0].lstrip("-").partition("=")[0]
    near = difflib.get_close_matches(f"--{name}", known, n=1)
    hint = f" Did you mean `{near[0][2:]}`?" if near else ""
    config = list(arguments)[1:][list(arguments).index("--config")] if "--config" in arguments else None
    if not any(each.split("=")[0] == unknown[0] for each in arguments) and config:
        for number, line in enumerate(Path(config).read_text(encoding="utf-8").splitlines(), start=1):
            if line.partition(":")[0].strip(" \t\"'") == name:
                return f"{config}, line {number}: there is no option `{name}`.{hint}"
    return f"there is no option `{' '.join(unknown)}`.{hint}"


def _find_run(run: str) -> str:
    """Returns the directory of a run; downloads it if `run` is a name on the Hub."""
    if Path(local := os.path.expanduser(run)).is_dir():
        return local
    from trl_populora.hub.download import fetch

    return str(fetch(run))


def _choose_report_directory(run: str) -> str | None:
    """Names a directory for the report of a population on the Hub; `None` for a local run, which has its own."""
    return None if Path(os.path.expanduser(run)).is_dir() else run.rpartition("/")[2]


def _has_lost_reader() -> bool:
    """Says whether stdout is a pipe from which nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
