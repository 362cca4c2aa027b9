"""
The command line: what it prints, what it refuses; `push` is tested in `test_hub.py`, `train` in `test_recipes.py`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset
from safetensors import SafetensorError
from trl import TrlParser

import trl_populora
from tests.launching import launch, run_script
from tests.without_extras import without_extras
from trl_populora import cli
from trl_populora.assets import tiny_base_path
from trl_populora.config import MemberConfig, PopuLoRAConfig, member_lora
from trl_populora.evaluate.cross_play import Payoff, write_payoff
from trl_populora.start import make_kinds
from trl_populora.tasks.archive import TaskArchive, save_archive
from trl_populora.tasks.dataset import build_archive, read_tasks


ROOT = Path(__file__).parent.parent
MEMBER = {"mu": 25.0, "sigma": 8.0, "age": 3, "born": 0, "version": 0, "operator": "init", "parents": []}


def member(name: str) -> dict:
    """A member as `population.json` lists it."""
    return MEMBER | {"name": name, "role": name[:7], "adapter": f"members/{name}"}


@pytest.fixture
def saved(tmp_path):
    # Older files have mu - 3 sigma as `fitness`, by which the students would come the other way round.
    members = [
        member(name) | {"adapter": f"members/{name}"} | {"mu": mu, "sigma": sigma, "fitness": mu - 3 * sigma}
        for name, mu, sigma in (("teacher_0", 26.0, 8.0), ("student_0", 23.0, 2.0), ("student_1", 28.0, 8.0))
    ]
    state = {"format": 1, "step": 7, "base_model": "tiny", "members": members}
    Path(tmp_path, "population.json").write_text(json.dumps(state))
    return str(tmp_path)


@pytest.mark.parametrize("command", ["recipes", "info"])
def test_a_command_whose_reader_has_gone_ends_without_a_word(saved, command):
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has its lines
    words = [sys.executable, "-m", "trl_populora", command, *([saved] if command == "info" else [])]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"  {command} " in printed for command in cli.COMMANDS)


def test_every_command_helps_without_the_extras():
    """What the extras bring cannot be imported, nor what training alone needs until `train` has refused a config."""
    program = """
import contextlib, io, json, sys
for name in ("vllm", "matplotlib", "rich", "deepspeed"):
    sys.modules[name] = None
from trl_populora.cli import COMMANDS, main
sys.modules["trl.trainer.grpo_trainer"] = None
try:
    main(["train", "--config", "recipes/tiny/quickstart.yaml", "--teachers", "0"])
except SystemExit as error:
    refusal = str(error)
del sys.modules["trl.trainer.grpo_trainer"]
said = {}
for command in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([command, "--help"])
    said[command] = printed.getvalue()
print(json.dumps([refusal, said]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=without_extras(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refusal, said = json.loads(done.stdout)
    assert "`teacher_baseline=group` needs teachers" in refusal
    assert said.keys() == set(cli.COMMANDS)
    assert all(text.startswith("usage: populora") for text in said.values()), said


def test_a_run_is_looked_at_without_torch(saved, tmp_path):
    """Importing it takes ten times as long as the rest."""
    block = "import sys; sys.modules['torch'] = None; from trl_populora.cli import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", block, "info", saved], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Population after 7 steps on tiny" in done.stdout


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("info", "populora info RUN [--option value ...]"),
        ("report", "populora report RUN [--option value ...]"),
        ("push", "populora push RUN [--option value ...]"),
        ("crossplay", "populora crossplay RUN ... [--option value ...]"),
        ("recipes", "populora recipes [OUT] [--option value ...]"),
    ],
)
def test_help_shows_what_is_given_by_position(command, usage, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {usage}\n")
    assert cli.COMMANDS[command].__doc__ in printed


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"populora {trl_populora.__version__}\n"


@pytest.mark.slow
def test_a_checkout_that_is_not_installed_knows_its_version(tmp_path):
    """As the benchmarks run from one on a machine that has the other packages."""
    others = [path for path in Path(sysconfig.get_path("purelib")).iterdir() if "trl_populora" not in path.name]
    for path in (*others, Path(trl_populora.__file__).parent):
        (tmp_path / path.name).symlink_to(path)
    program = (
        "from trl_populora.run.saved_population import collect_versions; print(collect_versions()['trl-populora'])"
    )
    for arguments in (["-m", "trl_populora", "--version"], ["-c", program]):
        command = [sys.executable, "-S", *arguments]  # -S: of the installed packages only those in `tmp_path`
        told = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
        assert told.stdout.split()[-1:] == [trl_populora.__version__], told.stderr


def test_recipes_are_listed_with_their_first_line(capsys):
    cli.main(["recipes"])
    *listed, last = capsys.readouterr().out.splitlines()
    root = Path(__file__).parent.parent / "recipes"
    assert [line.split()[0] for line in listed] == sorted(str(path.relative_to(root)) for path in root.rglob("*.yaml"))
    assert "tiny/quickstart.yaml" + " " * 27 + "2 teachers + 2 students on the embedded base" in "\n".join(listed)
    assert (
        last == "`populora recipes DIRECTORY` copies them; start one there: `populora train --config recipes/<name>`."
    )


def test_recipes_are_copied_beside_nothing_of_their_name(tmp_path):
    (tmp_path / "accelerate_configs").mkdir()
    with pytest.raises(SystemExit, match="^populora recipes: .*accelerate_configs is there already; name another"):
        cli.main(["recipes", str(tmp_path)])
    assert not (tmp_path / "recipes").exists()


def test_an_unknown_command_is_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit):
        cli.main(["trian"])
    assert "invalid choice: 'trian' (choose from" in capsys.readouterr().err


def test_info_prints_the_best_first(saved, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    cli.main(["info", saved])
    printed = capsys.readouterr().out
    assert "after 7 steps on tiny" in printed
    assert printed.index("teacher_0") < printed.index("student_1") < printed.index("student_0")


def test_info_separates_the_roles_also_where_members_are_equal(tmp_path, capsys):
    names = ("teacher_0", "teacher_1", "student_0", "student_1")
    members = [member(name) | {"fitness": 1.0} for name in names]
    state = {"format": 1, "step": 7, "base_model": "tiny", "members": members}
    Path(tmp_path, "population.json").write_text(json.dumps(state))
    cli.main(["info", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "_" in line or "├" in line]
    assert [next((name for name in names if name in line), "rule") for line in lines][-5:] == [
        *names[:2],
        "rule",
        *names[2:],
    ]


@pytest.fixture
def plain_install(monkeypatch):
    """What the `report` extra brings cannot be imported."""
    importlib.import_module("trl.trainer.grpo_trainer")  # TRL asks for rich by its metadata, which stays
    for name in ("rich", "rich.console", "rich.table", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


class TestPlainInstall:
    def test_info_is_plain_text(self, saved, capsys, plain_install):
        cli.main(["info", saved])
        title, header, *members = capsys.readouterr().out.splitlines()
        assert title == "Population after 7 steps on tiny"
        columns = ["member", "rating", "held out", "matches", "born", "made by", "parents"]
        assert re.split(r"\s{2,}", header) == columns
        assert [line.split()[0] for line in members] == ["teacher_0", "student_1", "student_0"]
        assert members[0].index("26.0 ± 8.0") == header.index("rating")

    def test_training_shows_the_population_and_names_the_extra(self, random_base, make_args, capsys, plain_install):
        args = make_args(max_steps=1)
        cli.run_training(cli.TrainArguments(), args, MemberConfig(random_base, dtype="float32", lora_r=4))
        printed = capsys.readouterr().out
        assert "Population after 1 steps on" in printed
        assert printed.endswith(
            f"Population saved to {args.output_dir}.\n"
            "Cannot be told: 1 of the 10 steps that a verdict needs are logged.\n"
            'There is no picture: matplotlib is not installed; run `pip install "trl-populora[report]"`.\n'
        )
        assert Path(args.output_dir, "population.json").exists()
        with pytest.raises(SystemExit, match="^populora report: matplotlib is not installed; run `pip install"):
            cli.main(["report", args.output_dir])

    def test_a_cross_play_is_kept(self, tmp_path, plain_install):
        with pytest.raises(ModuleNotFoundError):
            write_payoff(Payoff(["t"], ["a", "b"], [0.5], [[0.25, math.nan]]), tmp_path)
        assert json.loads((tmp_path / "crossplay.json").read_text())["solved"] == [[0.25, None]]

    def test_other_modules_that_are_missing_are_errors(self, monkeypatch, saved):
        monkeypatch.setitem(sys.modules, "trl_populora.report.table", None)
        with pytest.raises(ModuleNotFoundError):
            cli.main(["info", saved])


def test_a_push_to_nowhere_is_refused(saved):
    with pytest.raises(SystemExit, match="^populora push: nothing to push to; give `--repo"):
        cli.main(["push", saved])


@pytest.mark.parametrize("words", [["--config", "nowhere.yaml"], ["--config=nowhere.yaml"]])
def test_a_recipe_may_follow_an_equals_sign(words):
    with pytest.raises(SystemExit, match=r"^populora train: .*No such file.*nowhere\.yaml"):
        cli.main(["train", *words])


def test_training_without_a_recipe_is_no_training(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["train"])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {cli.USAGE}\n")
    assert "Give a recipe, `--config" in said


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "130"),
        (OSError(errno.ENOSPC, "No space left on device"), "^populora train: disk full .* go on with `--resume`"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "^populora train: disk full .* go on with `--resume`",
        ),
    ],
)
def test_the_end_of_a_run_from_outside_is_no_traceback(error, told, monkeypatch):
    def run(arguments):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", run)
    with pytest.raises(SystemExit, match=told):
        cli.main(["train"])


@pytest.mark.parametrize("command", ["info", "report"])
def test_what_the_user_can_mend_is_one_line(command, tmp_path):
    with pytest.raises(SystemExit, match=rf"^populora {command}: .*holds no (population|metrics).json"):
        cli.main([command, str(tmp_path)])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--students", "0"], "`students` must be at least 1, got 0."),
        (["--output_dir", "/proc/nowhere"], "`output_dir='/proc/nowhere'` is not writable .* Choose a directory"),
        (["--seed_tasks", "nowhere.jsonl"], "The tasks 'nowhere.jsonl' cannot be read"),
        (["--task_kinds", "nowhere:Kind"], "No module named 'nowhere'"),
        (["--lora_dropout", "0.1"], "`lora_dropout=0.1` is not supported"),
        (["--load_best_model_at_end", "true"], "requires the save and eval strategy to match"),
        (["--teecher", "3"], "there is no option `--teecher 3`. Did you mean `teachers`. `populora train --help`"),
        (["--lora_target_modules", "q_proj", "k_porj"], "names 'k_porj', which the base has not. .* are .*q_proj"),
        (["--resume_from_checkpoint", "nowhere"], "nowhere"),
        (["--model_name_or_path", "nowhere"], "huggingface.co"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_training_command_refuses_is_one_line(options, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = ["--config", str(ROOT / "recipes" / "tiny" / "quickstart.yaml")]
    # `quickstart` is `train` with this recipe, under another name in its errors.
    for command in ("train", "quickstart") if options[0] in ("--students", "--teecher") else ("train",):
        with pytest.raises(SystemExit) as end:
            cli.main([command, *(recipe if command == "train" else []), *options])
        assert re.search(f"^populora {command}: .*{told}", end.value.code)
        assert "\n" not in end.value.code


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("taechers: 4", "recipe.yaml, line 2: there is no option `taechers`. Did you mean `teachers`. `populora"),
        ("  'nothing_like_it' : 4", "recipe.yaml, line 2: there is no option `nothing_like_it`. `populora"),
        ("lora_r: [8, 16]", r"`peft_config` is a list of 2 configs, .*on a command line, one `lora_r` and one"),
    ],
)
def test_a_wrong_line_of_a_recipe_is_named(line, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(f"students: 2\n{line}\n".replace("\n  '", "\n'"))
    with pytest.raises(SystemExit, match=f"^populora train: {told}"):
        cli.main(["train", "--config", "recipe.yaml"])


def test_a_word_that_is_no_option_is_named_with_the_page_of_options():
    told = "populora push: there is no option `me/mine`. `populora push --help` lists all."
    with pytest.raises(SystemExit, match=f"^{told}$"):
        cli.main(["push", "runs/mine", "me/mine"])


@pytest.mark.slow
def test_a_refusal_is_all_that_a_training_command_says(tmp_path):
    command = [sys.executable, "-m", "trl_populora", "quickstart", "--students", "0", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "populora quickstart: `students` must be at least 1, got 0.\n"


# In a process of its own: W&B reads its settings once in a process.
WITHOUT_A_KEY = """
import os, sys
import wandb
from trl_populora import PopuLoRAConfig, __main__ as cli
from trl_populora.start import check_wandb

output = sys.argv[1] + "/run"
for way_out in ["mode", "a run"]:
    try:
        cli.main(["quickstart", "--report_to", "wandb", "--output_dir", output])
    except SystemExit as refusal:
        print(refusal)
    if way_out == "mode":
        os.environ["WANDB_MODE"] = "offline"
    else:
        run = wandb.init(mode="offline", dir=sys.argv[1])
    check_wandb(PopuLoRAConfig(output, report_to="wandb"))
    if way_out == "mode":
        del os.environ["WANDB_MODE"]
        wandb.teardown()
run.finish()
"""


@pytest.mark.slow
def test_wandb_without_a_key_is_told_before_anything_is_loaded_and_each_way_out_is_one(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", WITHOUT_A_KEY, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, stdin=subprocess.DEVNULL, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("populora quickstart: `report_to` names wandb, which has no key") == 2
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="^populora train: .* No such file or directory: 'nowhere.yaml'$"):
        cli.main(["train", "--config", "nowhere.yaml"])


@pytest.mark.parametrize("text", ["teachers: 2: 3", "[", "- teachers", "teechers: 2"])
def test_a_recipe_that_is_none_is_told_in_one_line(text, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(SystemExit, match="^populora train: .+$"):
        cli.main(["train", "--config", str(tmp_path / "recipe.yaml")])


def test_a_config_without_a_name_is_told(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--max_steps", "3", "--config"])
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("populora train: error: argument --config: expected one argument\n")


def refuse(arguments):
    raise ValueError("`lines` must be few,\n  got many.")


@pytest.mark.parametrize(
    ("run", "error"),
    [(lambda arguments: len(3), TypeError), (lambda arguments: int("x"), ValueError), (lambda a: a[7], IndexError)],
)
@pytest.mark.parametrize("command", ["train", "info"])
def test_a_bug_keeps_its_traceback(command, run, error, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, command, run)
    with pytest.raises(error):
        cli.main([command])


def test_the_traceback_of_a_refusal_is_shown_on_request(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "info", refuse)
    with pytest.raises(SystemExit, match="^populora info: `lines` must be few, got many.$"):
        cli.main(["info"])
    monkeypatch.setenv("POPULORA_TRACEBACK", "1")
    with pytest.raises(ValueError, match="few"):
        cli.main(["info"])


def test_an_error_in_the_midst_of_training_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "late_kind.py").write_text(
        "from trl_populora.tasks import CodeO\n\n\nclass Late(CodeO):\n"
        "    def parse_proposal(self, text, references):\n        raise ValueError('no text is good enough')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = "--model_name_or_path tiny --dtype float32 --use_cpu true --bf16 false --max_completion_length 16"
    options += " --task_kinds late_kind:Late --proposals_per_teacher 2 --attempts_per_task 2"
    with pytest.raises(ValueError, match="no text is good enough"):
        cli.main(["train", *options.split(), "--per_device_train_batch_size", "2", "--output_dir", str(tmp_path)])


def test_of_processes_that_a_launcher_started_only_the_first_says_the_error(tmp_path, monkeypatch):
    """As torchrun does, each rank is told a file that the launcher's page quotes."""
    monkeypatch.setitem(cli.COMMANDS, "train", refuse)
    codes = []
    for rank in ("1", "0"):
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        with pytest.raises(SystemExit) as end:
            cli.main(["train"])
        codes.append(end.value.code)
    sentence = "populora train: `lines` must be few, got many."
    assert codes == [sentence, 1]
    assert [json.loads((tmp_path / rank / "error.json").read_text())["message"] for rank in "01"] == [sentence] * 2
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    with pytest.raises(SystemExit, match=sentence):
        cli.main(["train"])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_that_are_refused_say_it_once_before_the_launchers_page(tmp_path):
    recipe = str(ROOT / "recipes" / "tiny" / "quickstart.yaml")
    command = [*launch("cpu_ddp.yaml"), str(ROOT / "recipes" / "train_populora.py"), "--config", recipe]
    said = run_script([*command, "--students", "0"], tmp_path / "log", fails=True).splitlines()
    sentence = "populora train: `students` must be at least 1, got 0."
    assert said[0] == sentence
    assert said.count(sentence) == 1
    assert said[-2] == f"  traceback : {sentence}", "the launcher's last word"
    assert len(said) < 45


def test_training_options_are_listed_in_the_order_of_the_config_each_with_its_entry_in_the_docstring(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    order = [
        "This command:",
        "--resume",
        "Training: the options",
        "--max_steps",
        "--teachers",
        "--warm_start",
        "--task_kinds",
    ]
    order += [
        "--pfsp_kappa",
        "--student_baseline",
        "--sandbox_seconds",
        "--cull_fraction",
        "--own_metrics",
        "Base and",
    ]
    positions = [text.index(part + " ") for part in order]
    assert positions == sorted(positions)
    assert "Tasks that each teacher proposes in a step, spread over the kinds" in text


@pytest.mark.parametrize("model", [[], ["--model_name_or_path", tiny_base_path()]])
def test_the_embedded_base_is_not_asked_the_held_out_tasks_of_other_bases(model, tmp_path):
    given = ["train", "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--eval_tasks", "real"]
    with pytest.raises(SystemExit, match="`eval_tasks=real` are in ordinary Python.*compact.* Take `eval_tasks=tiny`"):
        cli.main([*given, *model])


def test_a_saved_archive_seeds_another_run_from_its_yaml(seed_tasks, make_args, tmp_path):
    earlier, path = TaskArchive(), tmp_path / "archive.parquet"
    for task in seed_tasks:
        earlier.add(task)
    earlier.note(seed_tasks[0], solve_rate=0.5)
    fresh = replace(seed_tasks[0], program="def f(x):\n    return [x, 5]", author="teacher_1", step=7)
    earlier.add(fresh)
    save_archive(earlier, path)
    (tmp_path / "config.yaml").write_text(f"output_dir: {tmp_path}\nseed_tasks: {path}\nuse_cpu: true\nbf16: false\n")
    parser = TrlParser((cli.TrainArguments, PopuLoRAConfig, MemberConfig))
    recipe, _, _ = parser.parse_args_and_config(["--config", str(tmp_path / "config.yaml")])
    args = make_args()
    archive = build_archive(
        read_tasks(recipe.seed_tasks),
        make_kinds(args),
        args.prompt_style,
        args.archive_size,
        args.references_per_proposal,
    )
    seeds = [replace(task, author="seed", step=0) for task in earlier]
    assert [*archive] == seeds != [*earlier], "its authors are no members of this run"


@pytest.mark.parametrize(
    ("given", "settings", "told"),
    [
        (["code_o"], {"references_per_proposal": 2}, ["code_i"]),
        (["code_o"], {"references_per_proposal": 0}, []),
        (["code_o", "code_f"], {"inputs_per_function": 4}, []),
        (["code_o", "code_f"], {"inputs_per_function": 5}, ["code_f"]),
        (["code_o", "code_f"], {"inputs_per_function": 5, "prompt_style": "chat"}, []),
    ],
    ids=["no task", "none is shown", "enough inputs", "too few inputs", "no proposal is shown"],
)
def test_a_kind_whose_teachers_see_no_example_is_told(given, settings, told, seed_tasks, make_args, caplog):
    kinds = ["code_o", "code_f" if "code_f" in given else "code_i"]
    args = make_args(task_kinds=kinds, **{"prompt_style": "turns"} | settings)
    table = Dataset.from_list([task.to_record() for task in seed_tasks if task.kind in given])
    build_archive(table, make_kinds(args), args.prompt_style, args.archive_size, args.references_per_proposal)
    lines = [line for line in caplog.messages if line.startswith("No task")]
    said = "No task to start from could be shown to teachers who propose for "
    assert [line.removeprefix(said).partition(".")[0] for line in lines] == told


def test_yaml_and_overrides_reach_the_config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nteachers: 2\nstudents: 3\nuse_cpu: true\nbf16: false\nresume: true\n")
    parser = TrlParser((cli.TrainArguments, PopuLoRAConfig, MemberConfig))
    recipe, args, _ = parser.parse_args_and_config(["--config", str(path), "--students", "4"])
    assert (args.teachers, args.students, recipe.resume) == (2, 4, "newest")


MEMBER_OPTIONS = [
    ("lora_r", 8, "r", 8),
    ("lora_alpha", 12, "lora_alpha", 12),
    ("lora_target_modules", ["q_proj", "v_proj"], "target_modules", {"q_proj", "v_proj"}),
    ("use_rslora", True, "use_rslora", True),
]


def test_model_options_that_are_honoured_reach_the_adapters(random_base, make_args):
    members = build(random_base, make_args(), **{option: value for option, value, *_ in MEMBER_OPTIONS}).model
    for config in members.peft_config.values():
        assert {field: getattr(config, field) for *_, field, _ in MEMBER_OPTIONS} == {
            field: expected for *_, field, expected in MEMBER_OPTIONS
        }


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        ({"load_in_8bit": True}, {"load_in_8bit": True}),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
        (
            {"load_in_4bit": True, "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "bfloat16"},
            {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "bfloat16"},
        ),
    ],
)
def test_a_model_option_that_quantises_reaches_the_base(random_base, make_args, options, reached):
    pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
    config = build(random_base, make_args(), **options).model.config.quantization_config.to_dict()
    assert {name: config[name] for name in reached} == reached


REFUSED = [
    ({"use_peft": False}, "`use_peft=False` is not supported: every member is a LoRA adapter"),
    ({"use_dora": True}, "`use_dora=True` is not supported"),
    ({"lora_dropout": 0.05}, "`lora_dropout=0.05` is not supported"),
    ({"lora_modules_to_save": ["lm_head"]}, "`modules_to_save=.'lm_head'.` is not supported"),
    ({"lora_target_parameters": ["experts.w"]}, "`target_parameters=.'experts.w'.` is not supported"),
    ({"lora_task_type": "SEQ_CLS"}, "`task_type` must be 'CAUSAL_LM'"),
]


def test_every_model_option_that_the_page_calls_refused_is_tried():
    page = Path(__file__).parent.parent.joinpath("docs", "options.md").read_text().rpartition("\n## `ModelConfig`")[2]
    assert set(re.findall(r"^\| `(\w+)` \| refused", page, re.M)) == {
        name for options, _ in REFUSED for name in options
    }


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_model_option_that_members_cannot_have_is_refused_by_name(random_base, make_args, options, message):
    with pytest.raises(ValueError, match=message):
        build(random_base, make_args(), **options)


def build(base, args, **options):
    return cli.build_trainer(cli.TrainArguments(), args, MemberConfig(base, dtype="float32", **options))


def test_the_adapters_of_a_command_line_without_model_options_are_on_all_linear_layers():
    lora = member_lora(MemberConfig("base"))
    assert (lora.r, lora.lora_alpha, lora.target_modules, lora.lora_dropout) == (16, 32, "all-linear", 0.0)


RESUMED = [
    (["--resume"], "newest"),
    (["--resume", "runs/a/checkpoint-2"], "runs/a/checkpoint-2"),
    (["--resume_from_checkpoint", "runs/a/checkpoint-2"], "runs/a/checkpoint-2"),
    (["--resume", "true"], "newest"),
    ([], None),
]


@pytest.mark.parametrize(("options", "checkpoint"), RESUMED)
def test_training_goes_on_from_the_checkpoint_that_is_named(tmp_path, monkeypatch, options, checkpoint):
    class Trained(Exception):
        pass

    class Trainer:
        directory = contextlib.nullcontext()

        def train(self, resume_from_checkpoint):
            raise Trained(resume_from_checkpoint)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "build_trainer", lambda *_: Trainer())
    with pytest.raises(Trained) as done:
        cli.quickstart(options)
    assert done.value.args == (checkpoint,)


def test_a_command_refuses_a_directory_with_a_run_before_it_loads_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs", "mine", "members").mkdir(parents=True)
    recipe = str(ROOT / "recipes" / "tiny" / "quickstart.yaml")
    told = r"^populora train: runs/mine holds a run. `--resume`, .* goes on .* needs another `output_dir`.$"
    with pytest.raises(SystemExit, match=told):
        cli.main(["train", "--config", recipe, "--output_dir", "runs/mine", "--model_name_or_path", "nowhere"])


def test_quickstart_names_no_directory_where_the_user_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(cli, "train", asked.append)
    for options in (["--output_dir", "runs/mine"], ["--output-dir=runs/mine"]):
        cli.quickstart(options)
    assert [arguments[2:] for arguments in asked] == [["--output_dir", "runs/mine"], ["--output-dir=runs/mine"]]


def test_quickstart_takes_the_next_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(cli, "run_training", lambda recipe, args, *_: asked.append(args.output_dir))
    for options in ([], ["--resume"], ["--output_dir", "runs/mine"]):
        cli.quickstart(options)
    for name in ("quickstart", "quickstart-2"):
        Path("runs", name).mkdir(parents=True)
        cli.quickstart([])
    cli.quickstart(["--resume"])
    names = ("quickstart", "quickstart", "mine", "quickstart-2", "quickstart-3", "quickstart")
    assert asked == [f"runs/{name}" for name in names]
