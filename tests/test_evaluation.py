"""Solve rates and cross-play: scripted players for the arithmetic, saved populations of a random base for the rest."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.games import PROPOSALS, Ranks, make_game, proposal, solve_by_plan
from tests.populora_run import SETTINGS, make_trainer
from tests.small_run import small_args
from trl_populora import cli
from trl_populora.config import PopuLoRAConfig
from trl_populora.evaluate.cross_play import (
    Contest,
    Payoff,
    assemble,
    choose_prefixes,
    cross_play,
    solve_rates,
)
from trl_populora.generate.player import make_player, make_sampling_config
from trl_populora.lora.layers import BASE_NAME, Router
from trl_populora.lora.members import read_member, write_member
from trl_populora.sandbox import Limits, Sandbox
from trl_populora.start import load_base, load_tokenizer
from trl_populora.step.player import Completion
from trl_populora.tasks import Task, make_task
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.dataset import read_tasks
from trl_populora.trainer import PopuLoRATrainer


KINDS = SETTINGS["task_kinds"]  # one is the tests' own, which the caller has to name


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(cpu_seconds=1.0)) as sandbox:
        yield sandbox


def test_held_out_tasks_leave_no_trace(sandbox, seed_tasks):
    game = make_game(sandbox, seed_tasks, lambda i: "", lambda content, i: "```output\n2\n```")
    before = (game.population.state_dict(), len(game.archive))
    tasks = [task for task in seed_tasks if task.kind == "code_o"]
    sides = game.referee, game.player
    assert solve_rates(*sides, "student_0", tasks, attempts=2) == [1.0, 0.0, 0.0, 0.0]  # only a + 1 of 1 is 2
    contest = Contest(None, None, {}, *sides, game.archive, [], ["student_0"])
    assert contest.score(["student_0"], tasks, attempts=1) == {"student_0": 0.25}
    assert (game.population.state_dict(), len(game.archive)) == before
    with pytest.raises(ValueError, match="The given tasks are of code_i; these members play code_o"):
        contest.score(["student_0"], [task for task in seed_tasks if task.kind == "code_i"], attempts=1)


class TestCrossPlay:
    def test_every_student_meets_every_teachers_tasks(self, sandbox, seed_tasks):
        """teacher_0 writes the truth table's four; teacher_1 nothing valid; student_1 is always wrong."""

        def generate(prompts, members, seeds=None):
            answers, counts = [], {}
            for prompt, member in zip(prompts, members, strict=True):
                index = counts[prompt[0]["content"]] = counts.get(prompt[0]["content"], -1) + 1
                if member.startswith("teacher"):
                    text = PROPOSALS[len(answers) % 4] if member == "teacher_0" else "no idea"
                else:
                    text = solve_by_plan(prompt[0]["content"], index) if member == "student_0" else "```output\n0\n```"
                answers.append(Completion([1], [2], text))
            return answers

        game = make_game(sandbox, seed_tasks, None, None, teachers=2, students=2, generate=generate)
        before = (game.population.state_dict(), len(game.archive))
        teachers, students = ["teacher_0", "teacher_1"], ["student_0", "student_1"]
        payoff = cross_play(game.referee, game.player, game.archive, teachers, students, proposals=4, attempts=4)
        assert payoff.valid == [0.75, 0.0]
        assert payoff.solved[0] == [pytest.approx((1 + 0.5 + 0) / 3), 0.0]
        assert all(math.isnan(rate) for rate in payoff.solved[1])
        assert payoff.by_student == [pytest.approx(0.5), 0.0], "a teacher without a task says nothing about students"
        assert payoff.by_teacher[0] == pytest.approx(0.25)
        assert (game.population.state_dict(), len(game.archive)) == before

    def test_all_ranks_play_the_same_tasks(self, sandbox, seed_tasks):
        """The second rank's proposals are worth nothing."""

        def say(prompt, member, seed, before):
            if member == "student_0":
                return "```output\n0\n```"
            program = f"def f(a):\n    return a * {zlib.crc32(prompt.encode())}"
            return "no idea" if before else proposal(program, "0")

        game, ranks = make_game(sandbox, seed_tasks, None, None), Ranks(2, say)
        given = game.archive, ["teacher_0"], ["student_0"]
        first, second = ranks.run(lambda player: cross_play(game.referee, player, *given, proposals=4, attempts=3))
        assert first == second
        assert first.solved == [[1.0]]
        assert all(len(set(sizes)) == 1 for sizes in ranks.parts)

    def test_copies_of_references_and_repeats_are_no_fresh_tasks(self, sandbox, seed_tasks):
        """One repeats itself, one copies what it is shown; a third writes what the first wrote, for itself."""
        own, known = PROPOSALS[0], next(task for task in seed_tasks if task.kind == "code_o")
        said = {"teacher_0": own, "teacher_1": proposal(f"# new\n{known.program}", "1"), "teacher_2": own}
        given = iter(PROPOSALS[1:])

        def generate(prompts, members, seeds=None):
            texts = (said.get(member, "```output\n11\n```") for member in members)
            if members[0] == "teacher_2":
                texts = [own, *given]
            return [Completion([1], [2], text) for text in texts]

        game = make_game(sandbox, seed_tasks, None, None, teachers=3, generate=generate)
        teachers = ["teacher_0", "teacher_1", "teacher_2"]
        payoff = cross_play(game.referee, game.player, game.archive, teachers, ["student_0"], proposals=4, attempts=1)
        assert payoff.valid == [0.25, 0.0, 0.75]
        assert payoff.solved[0] == [1.0]
        assert math.isnan(payoff.solved[1][0])
        assert len(game.archive) == len(seed_tasks)

    def test_no_teacher_with_a_valid_task(self):
        payoff = Payoff(["t"], ["a", "b"], [0.0], [[math.nan, math.nan]])
        assert payoff.by_student == []
        assert math.isnan(payoff.by_teacher[0])


def test_a_base_whose_tokenizer_has_no_token_for_padding_plays(random_base, tmp_path):
    """As TRL's trainer pads it, with the end token."""
    args = small_args(output_dir=str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(random_base)
    tokenizer.pad_token = None
    base = load_base(random_base, args)
    player = make_player(base, load_tokenizer(base, tokenizer, args), Router(), [], args)
    prompts = [[{"role": "user", "content": text}] for text in ("short", "a longer one")]
    assert len(player.generate(prompts, [BASE_NAME] * 2)) == 2


@pytest.fixture(scope="module")
def runs(random_base, seed_tasks, tmp_path_factory):
    """A population of 2 + 2 and a single agent, trained for two steps."""
    root = tmp_path_factory.mktemp("runs")
    with open(f"{random_base}/tasks.json", "w") as file:
        json.dump([task.to_record() for task in seed_tasks], file)
    for name, settings in {"pair": {}, "agent": {"single_agent": True, "per_device_train_batch_size": 6}}.items():
        trainer = make_trainer(random_base, str(root / name), settings | {"max_steps": 2, "save_strategy": "no"})
        trainer.train()
        trainer.save_model()
    return root


class TestSavedPopulations:
    def test_contestants_are_the_saved_members(self, runs, tmp_path):
        with assemble([str(runs / "pair"), str(runs / "agent")], task_kinds=KINDS) as contest:
            pass
        assert list(contest.names.values()) == [
            *("pair teacher_0", "pair teacher_1", "agent teacher_0"),
            *("pair student_0", "pair student_1", "agent student_0"),
        ]
        for seat, name in contest.names.items():
            run, member = name.split()
            adapter = "agent" if run == "agent" else member
            saved = load_file(runs / run / "members" / adapter / "adapter_model.safetensors")
            live = read_member(contest.model, seat)
            assert saved.keys() == live.keys()
            assert all(torch.equal(saved[key], live[key]) for key in saved)

    def test_contestants_have_adapters_on_the_layers_of_their_run(self, random_base, tmp_path):
        lora = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1], exclude_modules=["v_proj"]
        )
        args = small_args(output_dir=str(tmp_path / "pair"), max_steps=1)
        trainer = PopuLoRATrainer(random_base, None, args, peft_config=lora)
        trainer.save_model()
        trainer.close()
        with assemble([str(tmp_path / "pair")], task_kinds=["code_o"]) as contest:
            keys = read_member(contest.model, "student_0").keys()
        assert keys
        assert all("layers.1." in key and "q_proj" in key for key in keys)

    def test_contestants_sample_as_in_their_run(self, runs, tmp_path):
        sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
        sampling |= {"generation_kwargs": {"stop_token_ids": [65]}, "chat_template_kwargs": {"enable_thinking": False}}
        shutil.copytree(runs / "pair", tmp_path / "pair")
        path = tmp_path / "pair" / "population.json"
        saved = json.loads(path.read_text())
        assert saved["settings"].keys() >= sampling.keys()
        assert saved["settings"]["base_revision"] == "main"
        path.write_text(json.dumps(saved | {"settings": saved["settings"] | sampling | {"base_revision": "v1"}}))
        with assemble([str(tmp_path / "pair")], task_kinds=KINDS) as contest:
            args, config = contest.args, contest.model.get_base_model().generation_config
        assert {name: getattr(args, name) for name in sampling} == sampling
        assert args.model_init_kwargs["revision"] == "v1"
        assert config.temperature == 0.7
        assert 65 in config.eos_token_id

    @pytest.mark.parametrize(("pay", "guarded"), [("paper", False), ("guarded", True), ("rarity", True)])
    def test_a_contest_refuses_what_the_run_refused(self, runs, tmp_path, pay, guarded):
        shutil.copytree(runs / "pair", tmp_path / "pair")
        path = tmp_path / "pair" / "population.json"
        saved = json.loads(path.read_text())
        path.write_text(json.dumps(saved | {"settings": saved["settings"] | {"teacher_reward": pay}}))
        with assemble([str(tmp_path / "pair")], task_kinds=KINDS) as contest:
            assert contest.referee.guarded == guarded

    @pytest.mark.parametrize("order", [["pair", "other"], ["other", "pair"]])
    def test_members_are_asked_with_the_chat_template_of_their_own_run(self, runs, tmp_path, order):
        """The base is asked with that of the first run."""
        shutil.copytree(runs / "pair", tmp_path / "other")
        path = tmp_path / "other" / "chat_template.jinja"
        path.write_text("{{ 'other' }}" + path.read_text())
        places = [str(tmp_path / name if name == "other" else runs / name) for name in order]
        with assemble(places, task_kinds=KINDS) as contest:
            members = [contest.students[0], contest.students[-1], "base"]
            prompt = [{"role": "user", "content": "solve abc"}]
            said = contest.player.generate([prompt] * 3, members)
            decode = AutoTokenizer.from_pretrained(runs / "pair").decode
        assert [decode(each.prompt_ids).startswith("other") for each in said] == [
            name == "other" for name in (*order, order[0])
        ]

    def test_a_base_without_a_chat_template_is_asked_with_the_runs(self, runs, random_base, tmp_path):
        shutil.copytree(random_base, tmp_path / "base", ignore=shutil.ignore_patterns("chat_template*"))
        shutil.copytree(runs / "pair", tmp_path / "pair")
        path = tmp_path / "pair" / "population.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model": str(tmp_path / "base")}))
        assert AutoTokenizer.from_pretrained(tmp_path / "base").chat_template is None
        with assemble([str(tmp_path / "pair")], task_kinds=KINDS) as contest:
            (said,) = contest.player.generate([[{"role": "user", "content": "solve abc"}]], ["base"])
        assert said.prompt_ids

    def test_a_player_without_a_trainer_samples_with_the_settings_of_trls(self, random_base, tmp_path):
        options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
        options |= {"generation_kwargs": {"stop_token_ids": [65], "no_repeat_ngram_size": 7}}
        trainer = make_trainer(random_base, str(tmp_path / "run"), options | {"save_strategy": "no"})
        base = trainer.model.get_base_model().generation_config
        own = make_sampling_config(base, trainer.processing_class, trainer.args).to_dict()
        trainer.close()
        trls = trainer.generation_config.to_dict()
        assert {*own.pop("eos_token_id")} == {*trls.pop("eos_token_id")}
        assert trls.pop("stop_token_ids") == [65], "which is among the ends"
        assert own == trls
        assert own["no_repeat_ngram_size"] == 7

    @pytest.mark.parametrize("seed", [3, None])
    def test_a_player_without_a_trainer_says_what_the_trainers_would(self, runs, random_base, tmp_path, seed):
        """The same members, asked the same in one batch, from the same random numbers."""
        with assemble([str(runs / "pair")], task_kinds=KINDS) as contest:
            trainer = make_trainer(random_base, str(tmp_path / "run"), {"save_strategy": "no"})
            trainer.close()
            for name in trainer.population.names:
                write_member(trainer.model, name, read_member(contest.model, name))
            prompts = [[{"role": "user", "content": "solve " + "abc" * i}] for i in range(5)]
            members, said = [*trainer.population.names, "base"], []
            trainer.model.eval()
            for player in (trainer.game.player, contest.player):
                torch.manual_seed(11)
                said.append(player.generate(prompts, members, seeds=seed and [seed] * len(members)))
        assert said[0] == said[1]
        assert len({completion.text for completion in said[0]}) > 1

    def test_a_run_of_an_own_kind_plays_with_what_its_archive_holds(self, random_base, tmp_path, capsys, monkeypatch):
        recipes = Path(__file__).parent.parent / "recipes"
        monkeypatch.syspath_prepend(recipes)
        seeds = read_tasks(str(recipes / "arithmetic_seeds.jsonl"))
        run, kinds = tmp_path / "run", ["arithmetic_kind:Arithmetic"]
        shutil.copyfile(recipes / "arithmetic_seeds.jsonl", tmp_path / "tasks.jsonl")
        args = PopuLoRAConfig(str(run), **SETTINGS | {"task_kinds": kinds, "max_steps": 1, "save_strategy": "no"})
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        trainer = PopuLoRATrainer(random_base, args=args, train_dataset=seeds, peft_config=lora)
        trainer.train()
        trainer.save_model()
        with assemble([str(run)], task_kinds=kinds) as contest:
            shown = [task for task in contest.archive if task.kind == "arithmetic"]
        assert shown == list(TaskArchive.from_dataset(seeds))
        options = ["--proposals", "2", "--attempts", "1", "--out", str(tmp_path / "out"), "--task_kinds", *kinds]
        cli.main(["crossplay", str(run), *options])
        assert "student_1" in capsys.readouterr().out
        (run / "archive.parquet").unlink()
        with pytest.raises(
            SystemExit, match=r"No archive.parquet in .*run: teachers are shown tasks of the kind arith"
        ):
            cli.main(["crossplay", str(run), *options])

    def test_kinds_that_differ_are_told(self, runs, tmp_path, caplog):
        shutil.copytree(runs / "pair", tmp_path / "other")
        path = tmp_path / "other" / "population.json"
        saved = json.loads(path.read_text())
        saved["settings"]["task_kinds"] = ["code_o"]
        path.write_text(json.dumps(saved))
        for given, told in [(["pair", "agent"], 0), (["pair", "other"], 1)]:
            places = [str(tmp_path / name if name == "other" else runs / name) for name in given]
            caplog.clear()
            with assemble(places, task_kinds=KINDS) as contest:
                pass
            lines = [line for line in caplog.messages if "kinds of task differ" in line]
            assert len(lines) == told
        assert f"other was trained on code_o. All play {', '.join(SETTINGS['task_kinds'])}." in lines[0]
        assert {task.kind for task in contest.archive} >= {"letters", "code_o"}

    def test_the_command(self, runs, seed_tasks, tmp_path, capsys):
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text("".join(json.dumps(task.to_record()) + "\n" for task in seed_tasks))
        options = ["--proposals", "4", "--attempts", "2", "--tasks", str(tasks), "--out", str(tmp_path / "out")]
        cli.main(["crossplay", str(runs / "pair"), str(runs / "agent"), *options, "--task_kinds", *KINDS])
        found = json.loads((tmp_path / "out" / "crossplay.json").read_text())
        assert [len(found[key]) for key in ("teachers", "students", "solved", "given")] == [3, 3, 3, 6]
        assert set(found["given"]) == {*found["teachers"], *found["students"]}
        rates = [rate for row in found["solved"] for rate in row if rate is not None]
        assert any(0 < rate <= 1 for rate in rates), "a random base solves the Letters kind by chance"
        assert (tmp_path / "out" / "crossplay.png").read_bytes().startswith(b"\x89PNG")
        assert "agent student_0" in capsys.readouterr().out

    def test_given_tasks_are_run_before_members_are_scored_by_them(self, runs, seed_tasks, tmp_path):
        tasks = tmp_path / "tasks.jsonl"
        rows = [task.to_record() for task in seed_tasks]
        rows[3]["outputs"] = ["77"]
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(
            SystemExit, match="1 flaw.* in 12 given task.*`tasks`, row 3: column `outputs` holds '77', the program"
        ):
            cli.main(
                [
                    "crossplay",
                    str(runs / "pair"),
                    "--tasks",
                    str(tasks),
                    "--out",
                    str(tmp_path),
                    "--task_kinds",
                    *KINDS,
                ]
            )

    def test_what_cannot_end_is_told_before_anybody_is_asked(self, runs, seed_tasks, tmp_path, monkeypatch):
        monkeypatch.setattr(Contest, "play", lambda *_: pytest.fail("members were asked"))
        tasks, taken = tmp_path / "tasks.jsonl", tmp_path / "taken"
        rows = [json.dumps(task.to_record()) + "\n" for task in seed_tasks if task.kind == "code_f"]
        tasks.write_text("".join(rows))
        options = ["crossplay", str(runs / "pair"), "--task_kinds", "code_o", "--tasks", str(tasks), "--out"]
        with pytest.raises(SystemExit, match="The given tasks are of code_f; these members play code_o"):
            cli.main([*options, str(tmp_path / "out")])
        long = make_task("code_o", "def f(a):\n" + "    a += 1\n" * 200 + "    return a", [(1,)])
        tasks.write_text(json.dumps(long.to_record()))
        with pytest.raises(SystemExit, match="The prompt of a code_o task is .* tokens longer than the context"):
            cli.main([*options, str(tmp_path / "out")])
        taken.touch()
        with pytest.raises(SystemExit, match="File exists: .*taken"):
            cli.main([*options, str(taken)])

    def test_students_alone_play_a_kind_whose_tasks_are_only_given(self, runs, tmp_path):
        run = Path(shutil.copytree(runs / "pair", tmp_path / "run"))
        saved = json.loads((run / "population.json").read_text())
        saved["members"] = [member for member in saved["members"] if member["role"] == "student"]
        (run / "population.json").write_text(json.dumps(saved))
        tasks = tmp_path / "tasks.jsonl"
        rows = [Task("countdown", text, (), ()).to_record() for text in ("3 4 5 -> 17", "2 3 4 -> 14")]
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = ["--task_kinds", "tests.countdown:GivenCountdown", "--tasks", str(tasks)]
        cli.main(["crossplay", str(run), *options, "--attempts", "1", "--out", str(tmp_path / "out")])
        found = json.loads((tmp_path / "out" / "crossplay.json").read_text())
        assert (found["teachers"], found["solved"], len(found["given"])) == ([], [], len(saved["members"]))

    def test_a_template_ends_the_answers_of_its_own_members_alone(self, runs, tmp_path, monkeypatch):
        other = Path(shutil.copytree(runs / "agent", tmp_path / "other"))
        template = (other / "chat_template.jinja").read_text()
        (other / "chat_template.jinja").write_text("{{ '' }}" + template)
        found = []

        def note(model, *given):
            found.append(model.get_base_model().generation_config)
            return make_player(model, *given)

        monkeypatch.setattr("trl_populora.evaluate.cross_play.make_player", note)
        with assemble([str(runs / "pair"), str(other)], task_kinds=KINDS):
            assert len(found) == 2
            assert found[0] is found[1], "the first player's ends are not the second's"

    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (["{pair}"], [""]),
            (["{pair}", "{agent}"], ["pair ", "agent "]),
            (["{pair}", "user/name"], ["{pair} ", "user/name "]),
            (["runs/pair", "user/name"], ["runs/pair ", "user/name "]),
            (["{pair}", "{pair}/checkpoint-1"], ["{pair} ", "{pair}/checkpoint-1 "]),
            (["user/one", "user/two"], ["one ", "two "]),
        ],
    )
    def test_members_of_different_runs_are_told_apart(self, tmp_path, given, wanted):
        places = {"pair": str(tmp_path / "pair"), "agent": str(tmp_path / "agent")}
        assert choose_prefixes([run.format(**places) for run in given]) == [name.format(**places) for name in wanted]

    def test_a_population_given_twice_is_refused(self, runs, tmp_path):
        given = [str(runs / "pair"), str(runs / "agent" / ".." / "pair")]
        with pytest.raises(SystemExit, match="A population plays once, but `runs` names one twice: "):
            cli.main(["crossplay", *given, "--out", str(tmp_path / "out")])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--proposals", "0"], "`proposals` must be at least 1, got 0"),
            (["--attempts", "0"], "`attempts` must be at least 1, got 0"),
            (["--tasks", "none.jsonl"], "The tasks 'none.jsonl' cannot be read"),
            (["--tasks", "user/none"], "The tasks 'user/none' cannot be read"),
        ],
    )
    def test_what_the_user_can_mend_is_said_before_anything_is_loaded(self, options, message):
        with pytest.raises(SystemExit, match=f"^populora crossplay: {message}"):
            cli.main(["crossplay", "nowhere", *options])

    def test_populations_that_do_not_fit_are_refused(self, runs, tmp_path):
        other = tmp_path / "other"
        other.mkdir()
        population = json.loads((runs / "pair" / "population.json").read_text())
        population["lora"]["r"] = 99
        (other / "population.json").write_text(json.dumps(population))
        with pytest.raises(SystemExit, match=r"population.json: field `lora.r` is 99"):
            cli.main(
                ["crossplay", str(runs / "pair"), str(other), "--out", str(tmp_path / "out"), "--task_kinds", *KINDS]
            )
