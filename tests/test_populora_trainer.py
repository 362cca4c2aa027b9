"""The trainer on a random two-layer base: real generation, real sandbox, real optimizer, two or three steps each."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
from pathlib import Path
from statistics import fmean

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.populora_run import HELD_OUT, letters
from tests.small_run import scale_gradients
from tests.vllm_models import randomise
from trl_populora.lora.members import member_param_groups, member_parameters, read_member
from trl_populora.population.evolution import Birth
from trl_populora.report.load import load_evaluations, load_history, load_run
from trl_populora.report.page import write_report
from trl_populora.report.plots import plot_run
from trl_populora.run.read import read_lines, read_population
from trl_populora.run.records import OnlyKnown
from trl_populora.start import load_tokenizer
from trl_populora.step import microbatch
from trl_populora.step.pay import Outcome, Rules, student_share
from trl_populora.step.rows import student_reward, teacher_reward
from trl_populora.trainer import PopuLoRATrainer


class SilentFor:
    """`letters`, but constant for one member: its advantages are zero, whatever the others do."""

    __name__ = "letters_but_one"

    def __init__(self, member: str):
        self.member = member

    def __call__(self, completions, member, **kwargs):
        return [
            0.0 if name == self.member else value for name, value in zip(member, letters(completions), strict=True)
        ]


@pytest.fixture
def make_trainer(random_base, make_args, seed_dataset, lora):
    made = []

    def make(reward_funcs=letters, train_dataset=seed_dataset, model=random_base, callbacks=None, **overrides):
        args = make_args(**overrides)
        trainer = PopuLoRATrainer(
            model, reward_funcs, args, train_dataset=train_dataset, peft_config=lora, callbacks=callbacks
        )
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def members_of(trainer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: read_member(trainer.model, name) for name in trainer.population.names}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def rollouts_of(run: str) -> list[dict]:
    return [row for path in sorted(Path(run, "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


class TestStep:
    def test_all_members_move_and_the_base_does_not(self, make_trainer):
        trainer = make_trainer()
        before, base = members_of(trainer), trainer.model.get_base_model().model.embed_tokens.weight.clone()
        frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
        trainer.train()
        after = members_of(trainer)
        assert all(not same(before[name], after[name]) for name in before)
        assert torch.equal(base, trainer.model.get_base_model().model.embed_tokens.weight)
        assert frozen
        assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)

    @pytest.mark.parametrize("whole", ["", "in one call"])
    def test_rows_that_are_generated_a_few_at_a_time_are_the_same(self, make_trainer, monkeypatch, whole):
        trainer, batches = make_trainer(), []
        trainer.generation_config.update(do_sample=False, top_k=None, top_p=None)
        trainer._generates_whole = whole
        for seed, name in enumerate(trainer.population.names):
            randomise(trainer.model, name, seed)
        base = trainer.model.get_base_model()
        forward = base.forward

        @functools.wraps(forward)  # whose parameters `generate` looks at
        def counted(*args, **kwargs):
            batches.append(kwargs["input_ids"])
            return forward(*args, **kwargs)

        monkeypatch.setattr(base, "forward", counted)
        asked = [[{"role": "user", "content": text}] for text in ("a" * 9, "b", "b", "b", "c" * 30, "d", "e")]
        members = [*trainer.population.names, "student_0", "base", "teacher_0"]
        answers = []
        for most in (None, 300):
            trainer.args.generation_tokens = most
            batches.clear()
            answers.append(trainer._generate_rows(asked, members))
            longest = max(len(answer.prompt_ids) for answer in answers[-1])
            assert max(map(len, batches)) == (7 if most is None else most // (longest + 24))
        assert answers[0] == answers[1]
        if not whole:
            assert min(map(len, batches)) == 1, "prompts are read one by one"

    @pytest.mark.parametrize(("silent", "checkpointing"), [("teacher_1", True), ("student_0", False)])
    def test_a_member_with_zero_advantages_stands_still(self, make_trainer, silent, checkpointing):
        trainer = make_trainer(SilentFor(silent), gradient_checkpointing=checkpointing)
        before = members_of(trainer)
        trainer.train()
        after = members_of(trainer)
        assert {name for name in before if same(before[name], after[name])} == {silent}

    def test_a_student_without_a_match_stands_still_whatever_its_momentum(self, make_trainer):
        trainer = make_trainer(students=3, max_steps=3)
        steps = []

        class Watch(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                steps.append((members_of(trainer), {row.member for row in trainer.played.rows}))

        trainer.add_callback(Watch())
        before = members_of(trainer)
        trainer.train()
        for after, played in steps:
            assert {name for name in before if not same(before[name], after[name])} == played
            assert len(played) < 5, "two teachers, and at most two of three students"
            before = after

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_generation_leaves_gradient_checkpointing_as_it_was(self, make_trainer, reentrant):
        kwargs = {"use_reentrant": reentrant}
        trainer = make_trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
        trainer.model.gradient_checkpointing_enable(kwargs)
        trainer._generate_rows([[{"role": "user", "content": "x"}]], ["student_0"])
        layers = [m for m in trainer.model.modules() if hasattr(m, "_gradient_checkpointing_func")]
        assert layers
        assert {layer._gradient_checkpointing_func.keywords["use_reentrant"] for layer in layers} == {reentrant}
        assert all(layer.gradient_checkpointing for layer in layers)

    def test_gradient_checkpointing_changes_nothing(self, make_trainer, tmp_path):
        runs = []
        for checkpointing in (False, True):
            path = str(tmp_path / str(checkpointing))
            trainer = make_trainer(gradient_checkpointing=checkpointing, output_dir=path)
            trainer.train()
            runs.append(members_of(trainer))
        assert all(same(runs[0][name], runs[1][name]) for name in runs[0])

    def test_kl_pulls_towards_the_base(self, make_trainer):
        trainer = make_trainer(beta=0.04, max_steps=3)
        trainer.train()
        kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        assert kl[0] == pytest.approx(0, abs=1e-6), "before the first update every member is the base"
        assert kl[-1] > 1e-6

    @pytest.mark.parametrize("pull", ["beta", "teacher_beta"])
    def test_a_blank_micro_batch_has_no_kl_term(self, make_trainer, pull):
        """Its one row has lost its context, without which a token may cost hundreds more at a low temperature."""
        trainer = make_trainer(**{pull: 0.04}, max_steps=1)
        trainer.train()
        (blank,) = microbatch.cut(trainer._buffered_inputs[0], [[]])
        blank["ref_per_token_logps"] += 200.0
        loss = trainer._compute_loss(trainer.model, blank | {"live": 0, "tokens": 0})
        gradients = torch.autograd.grad(loss, [p for p in trainer.model.parameters() if p.requires_grad])
        assert float(loss) == 0.0
        assert not any(gradient.any() for gradient in gradients), "NaN counts as any"

    def test_a_largest_norm_that_is_negative_or_none_is_off_as_0_is(self, make_trainer, tmp_path):
        found = []
        for norm in (0.0, -1.0, None):
            trainer = make_trainer(max_grad_norm=norm, output_dir=str(tmp_path / str(norm)))
            trainer.train()
            found.append(members_of(trainer))
        assert all(same(found[0][name], others[name]) for others in found[1:] for name in others)

    def test_blank_micro_batches_are_in_no_metric_of_the_loss(self, make_trainer, tmp_path):
        """All members still are the base, so leaving most rows out changes the mean entropy of a token little."""

        def of_one_teacher(completions, member, **kwargs):
            return [v if name == "teacher_0" else 0.0 for name, v in zip(member, letters(completions), strict=True)]

        logged = []
        for skips in (False, True):
            trainer = make_trainer(of_one_teacher, max_steps=1, output_dir=str(tmp_path / str(skips)))
            trainer.scorer.skips_blank_rows = skips
            trainer.train()
            logged.append(next(entry for entry in trainer.state.log_history if "entropy" in entry))
        assert logged[1]["batch/live_rows"] < 0.5 < logged[0]["batch/live_rows"]
        assert logged[1]["entropy"] == pytest.approx(logged[0]["entropy"], rel=0.1)

    def test_no_route_outlives_its_step(self, make_trainer):
        """A route left over would score the next step's rows with the members of this one."""
        trainer = make_trainer(max_steps=1)
        trainer.train()
        assert trainer.router.route is None
        with pytest.raises(RuntimeError, match="No route is set"):
            trainer.model(torch.tensor([[1, 2]]))

    def test_a_members_own_model_is_there_for_generate(self, make_trainer):
        trainer = make_trainer(max_steps=1)
        trainer.train()
        trainer.model.eval()
        prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
        with pytest.raises(RuntimeError, match=r"with trainer.member\('student_0'\)"):
            trainer.model.generate(prompt)
        with trainer.member("student_1"):
            logits = trainer.model(prompt).logits
            trainer.model.generate(prompt, num_beams=2, max_new_tokens=2)
        with trainer.router.route_to([trainer.population["student_1"].index] * 2):
            assert torch.equal(logits, trainer.model(prompt).logits)
        with trainer.member("base"):
            assert not torch.equal(logits, trainer.model(prompt).logits)
        with pytest.raises(KeyError, match="No member is called 'nobody'"):
            trainer.member("nobody")
        with pytest.raises(RuntimeError, match="`predict` has no meaning here"):
            trainer.predict(None)

    def test_every_metric_exists_at_every_step(self, make_trainer):
        trainer = make_trainer(max_steps=3)
        trainer.train()
        steps = [set(entry) for entry in trainer.state.log_history if "propose/valid_rate" in entry]
        assert len(steps) == 3
        assert steps[0] == steps[1] == steps[2]
        wanted = {"match/win_prob_mean", "propose/code_o/valid_rate", "verify/reject/format", "solve/rate"}
        wanted |= {"population/teacher/mu_mean", "member/student_0/mu", "member/student_0/grad_norm", "time/verify"}
        wanted |= {
            "curriculum/ast_depth",
            "curriculum/coverage",
            "propose/novel_rate",
            "batch/padding",
            "rewards/letters/mean",
        }
        assert wanted <= steps[0]

    def test_teachers_learn_when_they_propose_once_of_each_kind(self, make_trainer, caplog):
        with caplog.at_level("WARNING", logger="trl_populora"):
            trainer = make_trainer(proposals_per_teacher=3, per_device_train_batch_size=9, max_steps=1, students=2)
        assert caplog.text.count("`proposals_per_teacher=3` is below 4 for each of the 3 `task_kinds`") == 1
        trainer.train()
        rows = [row for row in rollouts_of(trainer.args.output_dir) if row["role"] == "teacher"]
        assert {row["member"] for row in rows if row["advantage"]} == {"teacher_0", "teacher_1"}

    def test_widths_are_multiples_where_the_hardware_wants_them(self, make_trainer):
        trainer = make_trainer(max_steps=1, pad_to_multiple_of=16)
        trainer.train()
        widths = [b[key].shape[1] for b in trainer._buffered_inputs for key in ("prompt_ids", "completion_ids")]
        assert not any(width % 16 for width in widths), widths

    def test_a_member_that_is_replaced_is_served_anew_within_its_step(self, make_trainer, monkeypatch):
        """TRL publishes once per optimizer step, and a callback may have generated before."""
        trainer = make_trainer()
        published = []

        class Served:
            def sync_weights(self):
                published.append(read_member(trainer.model, "student_0"))

            def generate(self, prompts, images, num_generations, profiler):
                return prompts, [[1] for _ in prompts], [[[0.0]] for _ in prompts], None

            def close(self):
                pass

        trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = Served(), True, -1
        ask = ([[{"role": "user", "content": "x"}]], ["student_0"])
        trainer._generate_rows(*ask)
        trainer._generate_rows(*ask)
        assert len(published) == 1
        child = {key: value + 1 for key, value in published[0].items()}
        with pytest.raises(ValueError, match="`sigma` must be positive"):
            trainer.replace_member("student_0", child, step=0, sigma=0.0)
        assert same(read_member(trainer.model, "student_0"), published[0]), "nothing is replaced by half"
        trainer.replace_member("student_0", child, step=0)
        trainer._generate_rows(*ask)
        assert len(published) == 2
        assert same(published[1], child)


class TestSingleAgent:
    @pytest.fixture
    def settings(self, tmp_path):
        return {"single_agent": True, "evolve_every": 0, "max_steps": 2, "per_device_train_batch_size": 4}

    def test_one_adapter_learns_from_both_roles(self, make_trainer, settings, tmp_path):
        updates = []
        for index, reward in enumerate((letters, SilentFor("teacher_0"), SilentFor("student_0"))):
            trainer = make_trainer(reward, **settings, output_dir=str(tmp_path / str(index)))
            assert {name.split(".")[-2] for name, p in trainer.model.named_parameters() if p.requires_grad} == {
                "agent"
            }
            before = read_member(trainer.model, "agent")
            trainer.train()
            updates.append(read_member(trainer.model, "agent"))
            assert not same(before, updates[-1])
        assert not same(updates[0], updates[1]), "the proposals count"
        assert not same(updates[0], updates[2]), "the attempts count"
        assert {row["member"] for row in rollouts_of(str(tmp_path / "0"))} == {"teacher_0", "student_0"}

    def test_its_adapter_is_what_breeds(self, make_trainer, settings):
        trainer = make_trainer(**(settings | {"evolve_every": 100}))
        trainer.train()
        before = read_member(trainer.model, "agent")
        birth = Birth("student_0", "student", ("teacher_0",), "full_gaussian", 1.0, seed=3)
        event = trainer.evolution._give_birth(birth, 2)
        assert event["child"] == "student_0@1"
        assert not same(before, read_member(trainer.model, "agent"))

    def test_is_saved_once_and_starts_other_runs(self, make_trainer, settings, tmp_path):
        trainer = make_trainer(**settings, output_dir=str(tmp_path / "agent"))
        trainer.train()
        trainer.save_model()
        agent = read_member(trainer.model, "agent")
        saved = read_population(tmp_path / "agent")["members"]
        assert {member["adapter"] for member in saved} == {"members/agent"}
        assert [path.name for path in (tmp_path / "agent" / "members").iterdir()] == ["agent"]
        for settings in ({"teachers": 2, "students": 2}, {"single_agent": True, "per_device_train_batch_size": 4}):
            heir = make_trainer(**settings, output_dir=str(tmp_path / "heir"), warm_start=str(tmp_path / "agent"))
            assert all(same(agent, read_member(heir.model, name)) for name in heir.population.adapters)


class TestRewardFunctions:
    def test_see_real_prompts_and_all_columns(self, make_trainer):
        seen = []

        def spy(prompts, completions, role, member, kind, match, task_id, valid, reject_reason, solve_rate, **kwargs):
            seen.append((prompts, role, kind, kwargs["correct"], kwargs["well_formed"]))
            return letters(completions)

        make_trainer(spy, max_steps=1).train()
        prompts, roles, kinds, correct, well_formed = seen[0]
        for prompt, role, kind in zip(prompts, roles, kinds, strict=True):
            verb = {"teacher": "propose", "student": "solve"}[role]
            assert prompt[0]["content"].startswith(f"{verb} {kind}")
        assert {type(value) for value in correct + well_formed} == {bool}

    def test_rows_that_they_leave_without_advantage_get_no_old_log_probabilities(self, make_trainer):
        computed = []
        trainer = make_trainer(letters, max_steps=1, num_iterations=2)
        score = trainer._get_per_token_logps_and_entropies

        def count(*args, **kwargs):
            found = score(*args, **kwargs)
            computed.append(int((~found[0].isnan()).any(1).sum()))
            return found

        trainer._get_per_token_logps_and_entropies = count
        trainer.train()
        live = int((trainer.played.local_worth.advantages != 0).sum())
        assert computed == [live]
        assert 0 < live < len(trainer.played.rows)

    def test_weights_of_the_users_functions_stand_after_the_built_in_ones(self, make_trainer):
        trainer = make_trainer(letters, reward_weights=[0.25])
        assert trainer.reward_weights.tolist() == [1.0, 1.0, 0.25]
        assert trainer.reward_func_names == ["teacher_reward", "student_reward", "letters"]

    def test_a_single_processing_class_goes_to_the_users_only_function(
        self, make_args, random_base, seed_dataset, lora
    ):
        given = AutoTokenizer.from_pretrained(random_base)
        trainer = PopuLoRATrainer(
            random_base,
            letters,
            make_args(),
            train_dataset=seed_dataset,
            peft_config=lora,
            reward_processing_classes=given,
        )
        trainer.close()
        assert trainer.reward_processing_classes == [None, None, given]


class TestRecords:
    def test_rollouts_agree_with_rewards_and_ratings(self, make_trainer):
        trainer = make_trainer(reward_funcs=None, max_steps=1)
        trainer.train()
        rows = rollouts_of(trainer.args.output_dir)
        assert len(rows) == trainer.args.rows_per_step
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        expected = [
            t if t is not None else s
            for t, s in zip(teacher_reward(**columns), student_reward(**columns), strict=True)
        ]
        assert columns["reward"] == pytest.approx(expected)
        proposals = [row for row in rows if row["role"] == "teacher"]
        assert all(row["valid"] != bool(row["reject_reason"]) for row in proposals), "every reject has a reason"
        programs = {task.task_id: task.program for task in trainer.game.archive}
        assert all(row["program"] == programs.get(row["task_id"], "") for row in rows)
        facts = ("kind", "valid", "solve_rate", "chance", "rarity", "program")
        outcomes = [Outcome(**{name: row[name] for name in facts}) for row in proposals]
        assert [row["reward"] for row in proposals] == [Rules().teacher_reward(outcome) for outcome in outcomes]
        shares = [student_share(outcome) for outcome in outcomes]
        logged = next(e for e in trainer.state.log_history if "match/student_share_mean" in e)
        assert logged["match/student_share_mean"] == pytest.approx(sum(shares) / len(shares))

    def test_every_record_counts_steps_from_one(self, make_trainer):
        """
        The step that a line of metrics names is the one that rollouts, archive, lineage and completion tables name.
        """
        letters_only = Dataset.from_list([task for task in HELD_OUT if task["kind"] == "letters"])
        settings = {"max_steps": 3, "evolve_every": 2, "evolve_burn_in": 1, "log_completions": True}
        trainer = make_trainer(task_kinds=["tests.populora_run:Letters"], train_dataset=letters_only, **settings)
        trainer.train()
        trainer.save_model()
        run = Path(trainer.args.output_dir)
        assert [entry["step"] for entry in read_lines(run / "metrics.jsonl")] == [1, 2, 3]
        assert [path.name for path in sorted(run.glob("rollouts/*"))] == [f"step_0000{n}.parquet" for n in (1, 2, 3)]
        proposed: dict[int, set] = {}
        for row in rollouts_of(str(run)):
            if row["role"] == "teacher" and row["valid"]:
                proposed.setdefault(row["step"], set()).add(row["task_id"])
        archived: dict[int, set] = {}
        for task in trainer.archive:
            if task.author != "seed":
                archived.setdefault(task.step, set()).add(task.task_id)
        assert archived == proposed
        assert proposed.keys() == {1, 2, 3}
        assert {event["step"] for event in read_lines(run / "lineage.jsonl")} == {2}
        tables = [pq.read_table(path).to_pydict() for path in sorted(run.glob("completions/*.parquet"))]
        assert [set(table["step"]) for table in tables] == [{1}, {2}, {3}]

    def test_the_last_step_is_logged_unless_none_is(self, make_trainer, tmp_path):
        for name, strategy, wanted in (("some", "steps", [2, 3]), ("none", "no", [])):
            where = tmp_path / name
            settings = {"logging_steps": 2, "logging_strategy": strategy, "save_strategy": "no"}
            make_trainer(max_steps=3, output_dir=str(where), **settings).train()
            assert [entry["step"] for entry in read_lines(where / "metrics.jsonl")] == wanted
        assert load_run(tmp_path / "some").finished

    def test_the_step_after_which_a_callback_stops_is_logged(self, make_trainer, tmp_path):
        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = True

        settings = {"max_steps": 3, "logging_steps": 2, "save_strategy": "no"}
        given = make_trainer(output_dir=str(tmp_path / "given"), callbacks=[Stop()], **settings)
        added = make_trainer(output_dir=str(tmp_path / "added"), **settings)
        added.add_callback(Stop())  # the records are written by an earlier callback
        for trainer in (given, added):
            trainer.train()
            assert [entry["step"] for entry in read_lines(Path(trainer.args.output_dir, "metrics.jsonl"))] == [1]

    def test_trackers_get_no_key_without_a_value_and_the_records_all_of_them(self, make_trainer):
        seen = []

        class Tracker(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                seen.append(dict(logs))

        trainer = make_trainer(max_steps=1)
        assert isinstance(trainer.callback_handler.callbacks[0], OnlyKnown), "those of `report_to` come next"
        trainer.add_callback(Tracker())
        trainer.train()
        assert all(value is not None and not math.isnan(value) for logs in seen for value in logs.values())
        (line,) = read_lines(Path(trainer.args.output_dir, "metrics.jsonl"))
        unknown = {key for key, value in line.items() if value is None}
        assert "curriculum/lines" in unknown, "a random base writes no valid task"
        assert not unknown & seen[0].keys()
        assert seen[0].keys() >= line.keys() - unknown - {"step"}

    def test_every_step_of_several_iterations_leaves_its_line(self, make_trainer, capsys):
        trainer = make_trainer(max_steps=4, num_iterations=2, evolve_every=2, evolve_burn_in=1)
        trainer.train()
        run = trainer.args.output_dir
        assert [(e["step"], "propose/valid_rate" in e, "loss" in e) for e in load_history(run)] == [
            (step, step % 2 == 1, True) for step in (1, 2, 3, 4)
        ]
        assert [e["step"] for e in load_history(run) if e.get("evolve/replaced")] == [3]
        assert load_evaluations(run) == []
        assert load_run(run).members("teacher") == ["teacher_0", "teacher_1"]
        assert load_run(run).kinds == ["code_f", "code_i", "code_o"]
        assert {row["step"] for row in rollouts_of(run)} == {1, 3}
        assert write_report(run).exists()
        assert re.findall(r"^step (\d)/4", capsys.readouterr().out, re.M) == ["1", "2", "3", "4"]

    def test_completion_tables_tell_member_role_and_kind(self, make_trainer):
        trainer = make_trainer(log_completions=True, max_steps=1)
        trainer.train()
        run = trainer.args.output_dir
        (path,) = Path(run, "completions").glob("*.parquet")
        table, rows = pq.read_table(path).to_pydict(), rollouts_of(run)
        for column in ("member", "role", "kind", "prompt", "completion"):
            assert table[column] == [row[column] for row in rows]

    def test_saved_member_equals_the_live_one_in_stock_peft(self, make_trainer, random_base):
        trainer = make_trainer()
        trainer.train()
        trainer.save_model()
        ids = AutoTokenizer.from_pretrained(random_base)("solve code_o", return_tensors="pt")["input_ids"]
        for member in trainer.population:
            base = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float32)
            stock = PeftModel.from_pretrained(base, os.path.join(trainer.args.output_dir, "members", member.name))
            with torch.no_grad(), trainer.router.route_to([member.index]):
                live = trainer.model.eval()(ids).logits.log_softmax(-1)
            assert torch.allclose(stock.eval()(ids).logits.log_softmax(-1), live, atol=1e-5)
        described = json.loads(Path(trainer.args.output_dir, "population.json").read_text())
        assert [m["name"] for m in described["members"]] == trainer.population.names
        assert described["base_model"] == random_base
        configs = Path(trainer.args.output_dir).glob("members/*/adapter_config.json")
        assert {json.loads(path.read_text())["base_model_name_or_path"] for path in configs} == {random_base}

    @pytest.mark.usefixtures("two_plots")
    def test_same_seed_same_files(self, make_trainer, tmp_path):
        contents = []
        for name in ("a", "b"):
            root = tmp_path / name / "run"
            trainer = make_trainer(output_dir=str(root))
            trainer.train()
            trainer.save_model()
            plot_run(root)
            paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
            contents.append({str(path.relative_to(root)): path.read_bytes() for path in paths})
        assert contents[0].keys() == contents[1].keys()
        differ = {path for path in contents[0] if contents[0][path] != contents[1][path]}
        assert differ == {"times.jsonl"}
        times = [entry["time/propose"] for entry in load_history(tmp_path / "a" / "run")]
        assert len(times) == 2
        assert min(times) > 0


class TestMembers:
    def test_replaced_member_is_replaced_whole(self, make_trainer):
        trainer = make_trainer()
        trainer.train()
        donor = read_member(trainer.model, "student_1")
        trainer.replace_member("student_0", donor, step=2, parents=["student_1@0"], operator="clone")
        child = trainer.population["student_0"]
        assert same(read_member(trainer.model, "student_0"), donor)
        assert (child.mu, child.sigma, child.age, child.version) == (25.0, 25.0 / 3, 0, 1)
        groups = {group["member"]: group["params"] for group in trainer.optimizer.param_groups}
        states = {name: [trainer.optimizer.state[p] for p in groups[name]] for name in ("student_0", "student_1")}
        assert all(
            not s["exp_avg"].any() and not s["exp_avg_sq"].any() and s["step"] == 0 for s in states["student_0"]
        )
        assert any(s["exp_avg"].any() and s["step"] == 2 for s in states["student_1"])

    def test_no_process_is_left_after_training(self, make_trainer):
        before = {p.pid for p in psutil.Process().children(recursive=True)}
        trainer = make_trainer(max_steps=1)
        assert {p.pid for p in psutil.Process().children(recursive=True)} - before, "the sandbox has processes"
        trainer.train()
        assert not {p.pid for p in psutil.Process().children(recursive=True)} - before


def run_script(script: str, changes: dict[str, str]) -> dict:
    """Runs a script of README with some texts replaced, each of which it has once. Returns its names."""
    for text, replacement in changes.items():
        assert script.count(text) == 1, text
        script = script.replace(text, replacement)
    names: dict = {}
    exec(script, names)
    return names


class TestReadme:
    def test_the_script_runs_as_it_stands_but_for_sizes(self, random_base, tmp_path, monkeypatch):
        """Nothing in it may need a GPU; its adapters are what its last comment says."""
        readme = Path(__file__).parent.parent / "README.md"
        section = readme.read_text().partition("## In your own script\n")[2].partition("\n## ")[0]
        _, script = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        small = "teachers=1, students=1, proposals_per_teacher=2, attempts_per_task=2, per_device_train_batch_size=6"
        small += ", max_steps=1, max_completion_length=8, prompt_style='compact', sandbox_workers=1"
        changes = {
            '"Qwen/Qwen2.5-0.5B-Instruct"': repr(random_base),
            "teachers=4, students=4, max_steps=200": small,
        }
        monkeypatch.chdir(tmp_path)
        names = run_script(script, changes)
        stock = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(random_base), tmp_path / "runs/mine/members/student_0"
        )
        assert same(get_peft_model_state_dict(stock), read_member(names["trainer"].model, "student_0"))

    def test_the_swapped_class_runs_as_it_stands_but_for_sizes(self, random_base, tmp_path, monkeypatch):
        readme = Path(__file__).parent.parent / "README.md"
        section = readme.read_text().partition("## In your own script\n")[2]
        script, _ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        small = "use_cpu=True, bf16=False, report_to=[], max_steps=1, num_generations=2, per_device_train_batch_size=2"
        changes = {
            '"Qwen/Qwen2.5-0.5B-Instruct"': repr(random_base),
            '"runs/colors", learning_rate=1e-5': f'"runs/colors", {small}, max_completion_length=8',
        }
        monkeypatch.chdir(tmp_path)
        names = run_script(script, changes)
        assert names["has_color"](["It is blue.", "green"], color=["blue", "yellow"]) == [1.0, 0.0]
        for place in range(4):
            assert (tmp_path / f"runs/colors/members/student_{place}/adapter_model.safetensors").exists()


class TestRefusals:
    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("program", None, "column `program` is missing"),
            ("inputs", 3, "column `inputs` must be a list of strings"),
            ("kind", "riddle", "no task of the kinds code_i, code_o, code_f to start from"),
            ("visible", 1, "code_[io] with 1 `inputs`, 1 of them `visible`: nothing is left to grade"),
            ("visible", 0, "code_f with 4 `inputs`, 0 of them `visible`: students would be shown no pair"),
        ],
    )
    def test_broken_dataset(self, make_trainer, seed_tasks, column, value, message):
        records = [task.to_record() for task in seed_tasks]
        for record in records:
            record[column] = value
        with pytest.raises(ValueError, match=message):
            make_trainer(train_dataset=Dataset.from_list(records))

    def test_teachers_with_a_dataset_of_prompts(self, make_trainer):
        with pytest.raises(ValueError, match=r"`teachers=2` with a dataset of prompts: .* nobody knows the answer"):
            make_trainer(train_dataset=Dataset.from_dict({"prompt": ["What is 1 + 1?"]}))

    def test_dataset_of_another_type(self, make_trainer):
        with pytest.raises(TypeError, match="must be a `datasets.Dataset`.*got `list`"):
            make_trainer(train_dataset=[{"prompt": "x"}])

    def test_base_without_chat_template(self, make_trainer, random_base, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(random_base)
        tokenizer.chat_template = None
        AutoModelForCausalLM.from_pretrained(random_base).save_pretrained(tmp_path / "mute")
        tokenizer.save_pretrained(tmp_path / "mute")
        with pytest.raises(ValueError, match=r"mute.*has no chat template.*processing_class"):
            make_trainer(model=str(tmp_path / "mute"))

    def test_a_saved_population_as_base(self, make_trainer, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "population.json").write_text("{}")
        (tmp_path / "run" / "adapter_config.json").write_text("{}")  # the best student's
        with pytest.raises(ValueError, match=r"run'` is a saved population.*`warm_start='.*run'`"):
            make_trainer(model=str(tmp_path / "run"), output_dir=str(tmp_path / "next"))

    def test_unknown_task_kind(self, make_trainer):
        with pytest.raises(ValueError, match=r"Unknown task kind 'code_x'.*code_o"):
            make_trainer(task_kinds=["code_x"])

    def test_output_directory_that_is_a_file(self, make_trainer, tmp_path):
        (tmp_path / "taken").write_text("")
        with pytest.raises(ValueError, match="is not writable"):
            make_trainer(output_dir=str(tmp_path / "taken"))

    @pytest.mark.parametrize(
        "settings",
        [{"task_kinds": ["code_x"]}, {"warm_start": "nowhere", "log_completions": True}],
        ids=["before and", "after TRL has made it"],
    )
    def test_a_start_that_fails_leaves_no_directory(self, make_trainer, tmp_path, settings):
        with pytest.raises(ValueError, match="code_x|nowhere"):
            make_trainer(output_dir=str(tmp_path / "runs" / "mine"), **settings)
        assert not list(tmp_path.iterdir())

    def test_a_start_that_fails_leaves_no_process(self, make_trainer, seed_dataset):
        """Also while somebody holds the error, as a notebook does."""
        before = psutil.Process().children(recursive=True)
        for settings in ({"own_metrics": ["nowhere:f"]}, {"max_completion_length": 10**6}):
            with pytest.raises(ValueError, match=r"nowhere|context|tokens") as held:
                make_trainer(**settings)
            assert psutil.Process().children(recursive=True) == before, held.value
        trainer = make_trainer()
        trainer.close()
        with pytest.raises(ValueError, match="eval_dataset"):
            trainer.evaluate(seed_dataset.select(range(0)))
        assert psutil.Process().children(recursive=True) == before

    @pytest.mark.parametrize("argument", ["tools", "rollout_func", "environment_factory"])
    def test_arguments_that_a_population_cannot_use(self, random_base, make_args, argument):
        with pytest.raises(ValueError, match=f"`{argument}` is not supported: .*(evaluate|TaskKind)"):
            PopuLoRATrainer(random_base, args=make_args(), **{argument: [1]})

    def test_an_optimizer_that_is_older_than_the_members(self, random_base, make_args):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        with pytest.raises(ValueError, match=r"`optimizers` is not supported: .*set `trainer.optimizer` to .*AdamW\("):
            PopuLoRATrainer(random_base, args=make_args(), optimizers=(optimizer, None))
        PopuLoRATrainer(random_base, args=make_args(), optimizers=(None, None)).close()  # TRL's default

    def test_an_own_optimizer_without_a_group_per_member(self, make_trainer):
        trainer, names = make_trainer(teacher_learning_rate=0.0), ["teacher_0", "teacher_1", "student_0"]
        trainable = [p for p in trainer.model.parameters() if p.requires_grad]
        for groups, flaw in [
            (trainable, "has a parameter group of student_0 and student_1 and teacher_0 and teacher_1. Each"),
            (trainer.model.parameters(), "has a parameter group of student_0 and .* and the base. Each"),
            (member_param_groups(trainer.model, dict.fromkeys(names, 0.1)), "lacks parameters of student_1"),
        ]:
            trainer.optimizer = torch.optim.AdamW(groups)
            with pytest.raises(ValueError, match=f"The optimizer {flaw}") as refused:
                trainer.train()
        (call,) = re.findall(r"`trainer.optimizer = (.*?)`,", str(refused.value))
        members, before = {"AdamW": torch.optim.AdamW, "member_param_groups": member_param_groups}, members_of(trainer)
        trainer.optimizer = eval(call, members | {"trainer": trainer})
        trainer.train()
        after = members_of(trainer)
        assert {name for name in before if same(before[name], after[name])} == {"teacher_0", "teacher_1"}

    @pytest.mark.parametrize("how", ["launcher", "arguments"])
    def test_fsdp_of_the_first_version(self, random_base, make_args, monkeypatch, how):
        args = make_args()
        if how == "launcher":
            monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        else:
            monkeypatch.setattr(args, "fsdp_plugin_args", {"fsdp_version": 1})
        with pytest.raises(ValueError, match=r"`fsdp_version=1` is not supported: .*fsdp2.yaml"):
            PopuLoRATrainer(random_base, args=args)

    def test_stock_config(self, random_base, tmp_path):
        from trl import GRPOConfig

        with pytest.raises(TypeError, match="must be a `PopuLoRAConfig`"):
            PopuLoRATrainer(random_base, args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))

    def test_a_failed_constructor_leaves_the_arguments_as_they_were(self, random_base, make_args):
        """In a notebook, the cell that failed is run again with them."""
        args = make_args(beta=0.5, model_init_kwargs={"attn_implementation": "eager"}, reward_weights=[1.0] * 5)
        with pytest.raises(ValueError, match="[Nn]umber of reward weights"):
            PopuLoRATrainer(random_base, args=args)
        assert (args.beta, args.model_init_kwargs) == (0.5, {"attn_implementation": "eager"})


def test_the_arguments_of_a_caller_stay_as_they_were(make_trainer, random_base, make_args, seed_dataset, lora):
    """The next trainer that gets them chooses anew."""
    chosen = {"prompt_style": None, "shots": None, "reward_weights": [2.0], "task_kinds": ["code_o"]}
    args = make_args(**chosen, max_completion_length=48, gradient_checkpointing=True)
    before = copy.deepcopy(args.to_dict())
    trainer = PopuLoRATrainer(random_base, letters, args, train_dataset=seed_dataset, peft_config=lora)
    trainer.train()
    assert {name: value for name, value in args.to_dict().items() if before[name] != value} == {}
    assert (trainer.args.prompt_style, trainer.args.shots, len(trainer.args.reward_weights)) == ("turns", 3, 3)


def test_the_tokenizer_comes_from_where_the_base_does(make_args, random_base, monkeypatch):
    base, load, seen = AutoModelForCausalLM.from_pretrained(random_base), AutoTokenizer.from_pretrained, {}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **given: seen.update(given) or load(name))
    load_tokenizer(base, None, make_args(model_init_kwargs={"revision": "v1"}, trust_remote_code=True))
    assert (seen["revision"], seen["trust_remote_code"]) == ("v1", True)


def test_an_interrupted_backward_leaves_no_route_behind(make_trainer):
    """The next `train()` would score its rows with the members of this step."""
    trainer = make_trainer(max_steps=1)
    watched = next(p for p in trainer.model.parameters() if p.requires_grad)

    def interrupt(gradient):
        assert trainer.router.route is not None
        raise KeyboardInterrupt

    hook = watched.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.router.route is None
    hook.remove()
    trainer.train()
    assert trainer.state.global_step == 1


def test_scaled_gradients_are_unscaled_before_they_are_clipped(make_trainer, tmp_path, monkeypatch):
    plain = make_trainer(max_grad_norm=0.01, output_dir=str(tmp_path / "plain"))
    plain.train()
    scaled = make_trainer(max_grad_norm=0.01, output_dir=str(tmp_path / "scaled"))
    scale_gradients(scaled, monkeypatch)
    scaled.train()
    assert scaled.accelerator.scaler.state_dict()["_growth_tracker"] == 2, "both steps took scaled gradients"
    norms = [[entry["member/teacher_0/grad_norm"] for entry in t.state.log_history[:-1]] for t in (plain, scaled)]
    assert norms[0] == norms[1]
    assert max(norms[0]) > 0.01, "clipping bites"
    one, other = members_of(plain), members_of(scaled)
    assert all(same(one[name], other[name]) for name in one)


def test_the_line_of_a_step_tells_all_rewards_of_a_role(make_trainer, capfd):
    trainer = make_trainer(max_steps=1)
    trainer.train()
    rows = rollouts_of(trainer.args.output_dir)
    means = {role: fmean(row["reward"] for row in rows if row["role"] == role) for role in ("teacher", "student")}
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {role: logged[f"reward/{role}"] for role in means} == pytest.approx(means)
    assert logged["reward/student"] != pytest.approx(logged["rewards/student_reward/mean"], abs=0.01)
    assert f"reward teacher {means['teacher']:+.2f} student {means['student']:+.2f} " in "".join(capfd.readouterr())


def test_the_overflow_of_one_member_lowers_the_scale_and_leaves_the_step_to_the_others(make_trainer, monkeypatch):
    trainer = make_trainer()
    scale_gradients(trainer, monkeypatch)
    broken = next(iter(member_parameters(trainer.model, "teacher_0").values()))
    broken.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    before = members_of(trainer)
    trainer.train()
    after = members_of(trainer)
    assert {name for name in before if same(before[name], after[name])} == {"teacher_0"}
    assert trainer.accelerator.scaler.get_scale() == 2.0**8, "two steps"


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_every_step_has_its_line_and_a_bar_unless_switched_off(make_trainer, capfd, disable_tqdm):
    make_trainer(max_steps=1, disable_tqdm=disable_tqdm).train()
    seen = capfd.readouterr()
    assert seen.out.count("step 1/1 |") == 1
    assert "{'" not in seen.out, "no dict of metrics"
    assert ("1/1 [" in seen.err) != disable_tqdm
