"""The site: Python on its pages runs, every page is in the navigation, and every command and option is explained."""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import re
import shlex
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, TrlParser

import trl_populora
from tests.command_options import OPTIONS
from tests.populora_run import make_trainer
from tests.small_run import QUIET, small_args
from trl_populora import cli as program
from trl_populora.config import MemberConfig, PopuLoRAConfig
from trl_populora.sandbox import Sandbox
from trl_populora.tasks import TASK_KINDS
from trl_populora.tasks.script import PromptArguments
from trl_populora.trainer import PopuLoRATrainer


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
QUOTED = re.compile(r"^````.*?^````$", re.MULTILINE | re.DOTALL)  # what models are shown and say
GUIDES = [
    name for name in PAGES if name.startswith("guides/") and "```python" in QUOTED.sub("", PAGES[name].read_text())
]

sys.path.insert(0, str(DOCS))
import generate  # noqa: E402


# Sizes for a random base. A page's own settings win, but for the steps, and none that it shows is among these.
SIZES = {
    "proposals_per_teacher": 4,
    "attempts_per_task": 2,
    "per_device_train_batch_size": 4,
    "max_completion_length": 24,
    "max_steps": 1,
    "evolve_every": 10,
    "save_strategy": "steps",
}
# The same of pages with a dataset of prompts, whose population has no teachers.
OF_PROMPTS = ("guides/prompts.md", "guides/sweep.md")
PROMPT_SIZES = QUIET | {
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "max_completion_length": 8,
    "gradient_checkpointing": False,
    "max_steps": 1,
}
REFERENCE, CODE = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]"), r"`\1`"  # a name in a docstring, and on a page
OWN_FILE = re.compile(r"^# (?!my_)\w+\.py$", re.MULTILINE)  # the first line of a block


def script(page: str) -> str:
    """All Python of a page, one block after the other; blocks in lists are indented."""
    text = QUOTED.sub("", PAGES[page].read_text())
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return "\n\n".join(re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks)


@pytest.fixture
def play(base, tmp_path, monkeypatch):
    """
    Runs a page's script on a random base, in a directory of its own, as the module `my_kinds`, `my_rules` or
    `my_operators`; what the page has in files beside that one can use nothing of it without an import.
    """
    monkeypatch.chdir(tmp_path)
    sized = lambda output_dir, **given: small_args(output_dir=output_dir, **(SIZES | given))  # noqa: E731
    monkeypatch.setattr(trl_populora, "PopuLoRAConfig", sized, raising=False)
    module = types.ModuleType("my_kinds")
    for name in ("my_kinds", "my_rules", "my_operators"):
        monkeypatch.setitem(sys.modules, name, module)

    def run(page: str) -> dict:
        if page in OF_PROMPTS:
            of_prompts = lambda directory, **given: PopuLoRAConfig(directory, **(PROMPT_SIZES | given))  # noqa: E731
            monkeypatch.setattr(trl_populora, "PopuLoRAConfig", of_prompts, raising=False)
        text = script(page).replace("Qwen/Qwen2.5-0.5B-Instruct", base)
        text = text.replace("max_steps=200", "max_steps=1").replace("eval_steps=50", "eval_steps=1")
        module_text, *others = re.split(OWN_FILE, text)
        exec(compile(module_text, page, "exec"), module.__dict__)
        for other in others:
            exec(compile(other, page, "exec"), {"__name__": "__main__"})
        return module.__dict__

    return run


@pytest.mark.parametrize("page", GUIDES)
def test_python_of_a_guide_runs(page, play):
    if "BitsAndBytesConfig" in script(page):
        pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
    play(page)


@pytest.mark.slow
def test_the_settings_for_the_embedded_base_let_it_write_tasks_of_every_kind(tmp_path):
    """A step as the page has it, of every kind; that most proposals are valid is what the base was trained for."""
    (settings,) = re.findall(r'`model="tiny"`.*?in the config `(.*?)`', PAGES["guides/grpo.md"].read_text(), re.DOTALL)
    given = eval(f"dict({settings})") | {"save_strategy": "no", "attempts_per_task": 2}
    args = PopuLoRAConfig(str(tmp_path), teachers=2, students=2, max_steps=1, **given)
    trainer = PopuLoRATrainer("tiny", args=args)
    trainer.train()
    rates = {kind: trainer.state.log_history[0][f"propose/{kind}/valid_rate"] for kind in TASK_KINDS}
    assert all(rate > 0.5 for rate in rates.values()), rates


def test_the_settings_for_a_small_base_are_those_of_its_cold_start():
    (settings,) = re.findall(r"PopuLoRAConfig\(([^()]*warm_start[^()]*)\)", PAGES["guides/grpo.md"].read_text())
    given = eval(f"(lambda _, **given: given)({settings})")
    recipe = yaml.safe_load((ROOT / "recipes/SmolLM2-135M-Instruct/config_2t2s.yaml").read_text())
    own = {name: value for name, value in given.items() if name != "max_steps"}
    assert own == {name: recipe[name] for name in own}


def test_the_first_run_is_read_as_the_page_says(play, base, capsys):
    sizes = {"proposals_per_teacher": 8, "attempts_per_task": 4, "per_device_train_batch_size": 16}
    make_trainer(base, "runs/quickstart", sizes | {"max_steps": 1, "save_strategy": "no"}).train()
    task = play("start.md")["task"]
    shown = capsys.readouterr().out
    assert task.prompt in shown
    assert re.findall(r"^(True|False) ", shown, re.MULTILINE)


def test_the_kind_with_the_sandbox_takes_and_refuses_what_it_should():
    names: dict = {"__name__": "my_kinds"}
    exec(re.split(OWN_FILE, script("guides/kinds.md"))[0], names)
    kind = names["LongestLoop"]()
    with Sandbox(workers=1) as sandbox:
        proposals = [kind.parse_proposal(f"def f(n):\n    return {body}", []) for body in ("n * n % 97", "1", "n / 0")]
        verdicts = sandbox.run([kind.check(proposal) for proposal in proposals])
    task, flat, broken = [kind.accept(p, v, None) for p, v in zip(proposals, verdicts, strict=True)]
    assert [flat.value, broken.value] == ["constant_output", "error"]
    best = max(range(100), key=lambda n: n * n % 97)
    assert kind.correct(task, kind.parse_attempt(str(best), task), None)
    assert not kind.correct(task, kind.parse_attempt("0", task), None)
    assert kind.chance(task) == 0.02  # 96 is the square of two numbers


def test_what_a_script_uses_is_listed_for_who_reads_the_page_in_a_clone():
    """With the first sentences of the docstrings that the site shows whole."""
    page, rows = PAGES["reference/api.md"].read_text(), []
    for path in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE):
        text = inspect.getdoc(pkgutil.resolve_name(path)).partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{path}` | {REFERENCE.sub(CODE, text)} |")
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize("page", generate.PAGES)
def test_a_generated_page_is_up_to_date(page):
    assert PAGES[page].read_text() == generate.PAGES[page](), "run `python docs/generate.py`"


def test_every_setting_of_the_population_is_on_its_page():
    own = {each.name for each in fields(PopuLoRAConfig)} - {each.name for each in fields(GRPOConfig)}
    assert own <= set(re.findall(r"^\| `(\w+)` \|", PAGES["reference/settings.md"].read_text(), re.MULTILINE))


@pytest.mark.parametrize("guide", sorted(DOCS.glob("guides/*.md")), ids=lambda path: path.stem)
def test_a_guide_begins_with_what_the_reader_has_and_ends_with_what_to_look_at(guide):
    text = guide.read_text()
    first = text.split("\n\n")[1]
    assert re.match(r"You (have|know|want)", first), first
    last = re.findall(r"^## (.+)$", text, re.MULTILINE)[-1]
    assert last == "What to look at" or text.split("\n\n")[-1].startswith("What to look at")


def nav_paths(nav: list) -> list[str]:
    """The files that a navigation names."""
    found = []
    for entry in nav:
        entry = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += nav_paths(entry) if isinstance(entry, list) else [entry]
    return found


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_every_page_is_in_the_navigation_once():
    paths = nav_paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(paths) == sorted(set(paths))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {f"docs/{name}" for name in PAGES} - set(paths) == set()


PARSED = (program.TrainArguments, PromptArguments, PopuLoRAConfig, MemberConfig)
SECTIONS = dict(re.findall(r"^## populora ([\w-]+)\n(.*?)(?=^## |\Z)", PAGES["commands.md"].read_text(), re.M | re.S))


QUICKSTARTS = [
    line.replace("\\\n", " ").split("#")[0].split()[2:]
    for line in re.findall(r"^populora quickstart(?:.*\\\n)*.*$", PAGES["start.md"].read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("options", QUICKSTARTS, ids=" ".join)
def test_every_quick_start_of_the_first_page_is_a_valid_one(options):
    parser = TrlParser((program.TrainArguments, PopuLoRAConfig, MemberConfig))
    recipe = ["--config", str(ROOT / "recipes" / "tiny" / "quickstart.yaml")]
    _, args, _ = parser.parse_args_and_config([*recipe, *options])
    assert args.output_dir == options[options.index("--output_dir") + 1]


def test_the_first_page_changes_the_quick_start_in_four_ways():
    assert len(QUICKSTARTS) == 4


def test_every_command_is_explained():
    assert set(SECTIONS) == set(program.COMMANDS) == set(OPTIONS)


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_of_a_command_is_explained_and_no_other(command):
    wanted = [field.name for field in fields(OPTIONS[command])] if OPTIONS[command] else []
    wanted += ["config"] if command == "train" else []
    assert sorted(re.findall(r"^\| `--(\w+)` \|", SECTIONS[command], re.MULTILINE)) == sorted(wanted)


SHELL = {**PAGES, "README.md": ROOT / "README.md"}
SHELL |= {str(path.relative_to(ROOT)): path for path in ROOT.glob("recipes/**/README.md")}


def commands(page: str) -> list[list[str]]:
    """The words of every command of a page's shell blocks that the project has; none of them is run."""
    blocks = re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", SHELL[page].read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    split = [
        shlex.split(line, comments=True) for line in lines if re.match(r"(?:\w+=\S+ )*(?:populora|python|make) ", line)
    ]
    return [list(itertools.dropwhile(lambda word: "=" in word, words)) for words in split]


@pytest.mark.parametrize("page", [page for page in SHELL if commands(page)])
def test_every_command_of_a_shell_block_exists_with_its_options(page):
    recipe = {"config"} | {field.name for each in PARSED for field in fields(each)}
    for program_name, first, *rest in commands(page):
        if program_name == "make":
            assert f"\n{first}:" in (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
        elif program_name == "populora":
            assert first in program.COMMANDS
            known = {field.name for field in fields(OPTIONS[first])} if OPTIONS[first] else set()
            known |= recipe if first in ("train", "quickstart") else set()
            assert {word.removeprefix("--").partition("=")[0] for word in rest if word.startswith("--")} <= known
        elif first.endswith(".py"):
            assert (ROOT / first).exists()


@pytest.mark.parametrize("page", PAGES)
def test_no_code_in_a_table_has_a_pipe_that_the_site_would_show_with_its_backslash(page):
    assert not re.findall(r"`[^`\n]*\\\|[^`\n]*`", PAGES[page].read_text())


def test_no_page_loads_anything_from_elsewhere():
    """Pictures and styles lie beside the pages."""
    for page in PAGES.values():
        assert not re.findall(r"!\[[^\]]*\]\(https?:|<(?:script|link|img)\b[^>]*https?:", page.read_text()), page
