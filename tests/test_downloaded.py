"""A population that somebody else made runs no code here, reaches no file outside it and commands no terminal."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.populora_run import make_trainer
from tests.recipe_runs import RECIPES
from trl_populora import cli
from trl_populora.evaluate.cross_play import assemble
from trl_populora.hub.export import export_member
from trl_populora.hub.push import push_run
from trl_populora.report.page import write_report
from trl_populora.report.table import print_population
from trl_populora.run.read import read_population


ESCAPE = "\x1b]0;owned\x07\u202e"
OWN_CODE = {  # every setting that may name a function or class
    "task_kinds": ["kind:Kind"],
    "teacher_reward": "kind:pay",
    "student_reward": "kind:pay",
    "matchmaking": "kind:pay",
    "teacher_baseline": "kind:pay",
    "student_baseline": "kind:pay",
    "own_metrics": ["kind:pay"],
    "mutations": {"kind:pay": 1},
    "crossovers": {"kind:pay": 1},
}


@pytest.fixture
def downloaded(finished, tmp_path):
    """A copy of a finished run, and a function that changes its `population.json`."""
    run = tmp_path / "downloaded"
    shutil.copytree(finished, run)

    def change(spoil) -> Path:
        saved = json.loads((run / "population.json").read_text())
        spoil(saved)
        (run / "population.json").write_text(json.dumps(saved))
        return run

    return change


def cross_play(run: Path, out: Path, base: str) -> None:
    with assemble([str(run)], task_kinds=["code_o"]):
        pass


def warm_start(run: Path, out: Path, base: str) -> None:
    make_trainer(base, str(out / "run"), {"warm_start": str(run)}).close()


READERS = {
    "crossplay": cross_play,
    "warm_start": warm_start,
    "export": lambda run, out, base: export_member(str(run), out / "member"),
    "push": lambda run, out, base: push_run(run, "me/read"),
    "report": lambda run, out, base: write_report(run, out),
    "info": lambda run, out, base: print_population(run),
}


class TestCode:
    @pytest.fixture
    def run(self, downloaded, monkeypatch):
        """A run whose every setting names the file `kind.py`, which lies in its folder, where the command runs."""
        run = downloaded(lambda saved: saved["settings"].update(OWN_CODE))
        (run / "kind.py").write_text(f"open({str(run / 'it ran')!r}, 'w')\n")
        monkeypatch.syspath_prepend(run)
        monkeypatch.chdir(run)
        monkeypatch.delitem(sys.modules, "kind", raising=False)
        return run

    @pytest.mark.parametrize("read", READERS.values(), ids=READERS)
    def test_nothing_that_its_settings_name_is_imported(self, run, base, tmp_path, read, hub, two_plots):
        read(run, tmp_path, base)
        assert not (run / "it ran").exists()

    def test_crossplay_imports_a_kind_only_when_the_command_names_it(self, run, capsys):
        told = r"crossplay: .*downloaded was trained on the task kind 'kind:Kind'.* --task_kinds kind:Kind"
        with pytest.raises(SystemExit, match=told):
            cli.main(["crossplay", str(run)])
        assert not (run / "it ran").exists()
        with pytest.raises(SystemExit, match="Unknown task kind 'kind:Kind'"):
            cli.main(["crossplay", str(run), "--task_kinds", "kind:Kind"])
        assert (run / "it ran").exists()

    def test_scoring_imports_a_kind_only_when_the_command_names_it(self, run, seed_tasks, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(RECIPES)
        import score_held_out

        (tmp_path / "tasks.jsonl").write_text(json.dumps(seed_tasks[0].to_record()) + "\n")
        words = ["score_held_out.py", str(run), "--tasks", str(tmp_path / "tasks.jsonl")]
        for further, told in (([], r"the task kind 'kind:Kind'.*--task_kinds"), (["kind:Kind"], "Unknown task kind")):
            assert not (run / "it ran").exists()
            monkeypatch.setattr(sys, "argv", words + (["--task_kinds", *further] if further else []))
            with pytest.raises(ValueError, match=told):
                score_held_out.main()

    def test_only_a_lora_of_a_members_own_shape_is_made(self, downloaded):
        def spoil(saved):
            saved["lora"] |= {"megatron_config": {}, "megatron_core": "kind", "modules_to_save": ["lm_head"]}

        with assemble([str(downloaded(spoil))], task_kinds=["code_o"]) as contest:
            lora = next(iter(contest.model.peft_config.values()))
        assert (lora.megatron_config, lora.modules_to_save) == (None, None)


class TestPaths:
    @pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "a\\b", "", ".", "..", "a\n", None, 3])
    def test_a_member_whose_name_is_no_files_name_is_refused(self, downloaded, name):
        def spoil(saved):
            saved["members"][0] |= {"name": name, "adapter": f"members/{name}"}

        with pytest.raises(ValueError, match=r"population.json: field `members.name` is .*only letters, digits"):
            read_population(downloaded(spoil))

    @pytest.mark.parametrize("adapter", ["members/../../x", "../x", "/tmp/x", "members/", "members//x", "x", None])
    def test_an_adapter_outside_members_is_refused(self, downloaded, adapter):
        run = downloaded(lambda saved: saved["members"][-1].update(adapter=adapter))
        with pytest.raises(ValueError, match=r"population.json: field `members.adapter` is .*members/<name>"):
            read_population(run)

    @pytest.mark.parametrize("read", READERS.values(), ids=READERS)
    def test_every_reader_refuses_it_before_it_writes(self, downloaded, base, tmp_path, read, hub):
        run = downloaded(lambda saved: saved["members"][-1].update(adapter="members/../../x"))
        shutil.copytree(run / "members" / "student_1", tmp_path / "x")
        before = sorted(run.parent.rglob("*"))
        with pytest.raises(ValueError, match=r"population.json: field `members.adapter` is"):
            read(run, tmp_path, base)
        assert [path for path in sorted(run.parent.rglob("*")) if path not in before] == []

    def test_a_best_student_who_is_no_member_is_refused(self, downloaded):
        run = downloaded(lambda saved: saved.update(best_student="../x"))
        with pytest.raises(ValueError, match=r"population.json: field `best_student` is '../x', and `members` lists"):
            read_population(run)

    def test_a_measured_task_whose_name_is_no_files_name_is_refused(self, downloaded, hub):
        run = downloaded(lambda saved: None)
        evaluation = {"step": read_population(run)["step"], "benchmarks": {"x/../../../out": {}}}
        (run / "evaluation.json").write_text(json.dumps(evaluation))
        (run / ".eval_results" / "populora_x").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"evaluation.json: field `benchmarks` names 'x/../../../out'"):
            push_run(run, "me/read")


class TestTerminal:
    @pytest.fixture
    def run(self, downloaded):
        def spoil(saved):
            saved["base_model"] += ESCAPE
            saved["members"][0] |= {"operator": f"[bold]{ESCAPE}", "parents": [f"[/x]{ESCAPE}"]}
            saved["settings"]["task_kinds"] = [f"os:{ESCAPE}"]

        return downloaded(spoil)

    @pytest.mark.parametrize("without_rich", [False, True])
    def test_the_table_shows_what_a_run_says_and_obeys_none_of_it(self, run, capsys, monkeypatch, without_rich):
        if without_rich:
            monkeypatch.setitem(sys.modules, "rich.console", None)
        cli.main(["info", str(run)])
        shown = capsys.readouterr().out
        assert not {"\x1b", "\x07", "\u202e"} & set(shown)
        assert "[bold]" in shown
        assert "[/x]" in shown

    def test_an_error_that_quotes_a_run_does_neither(self, run):
        with pytest.raises(SystemExit) as ended:
            cli.main(["crossplay", str(run)])
        assert str(ended.value).isprintable()

    def test_a_warning_that_quotes_a_run_does_neither(self, run, finished, caplog):
        (run / "population.json").write_text(
            json.dumps(json.loads((run / "population.json").read_text()) | {"base_model": str(finished)})
        )
        with assemble([str(finished), str(run)], task_kinds=["code_o"]):
            pass
        (told,) = [line for line in caplog.messages if "kinds of task differ" in line]
        assert told.isprintable()
