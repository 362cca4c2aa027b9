"""A member that was exported says, through stock transformers, what it says in its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from tests.small_run import small_trainer
from trl_populora import cli
from trl_populora.hub.export import export_member
from trl_populora.lora.members import read_member, write_member


QUESTIONS = ["solve abc", "propose", "what is 1 + 1?"]
MEMBER = "student_1"


@pytest.fixture(scope="module")
def run(random_base, seed_tasks, tmp_path_factory):
    """A saved run whose members differ visibly from the base and from each other."""
    output = str(tmp_path_factory.mktemp("run"))
    tasks = [task.to_record() for task in seed_tasks]
    trainer = small_trainer(random_base, tasks, output_dir=output, sandbox_allow_weak=True)
    generator = torch.Generator().manual_seed(0)
    for name in trainer.population.names:
        factors = read_member(trainer.model, name)
        write_member(
            trainer.model, name, {k: v + 0.3 * torch.randn(v.shape, generator=generator) for k, v in factors.items()}
        )
    trainer.save_model()
    trainer.close()
    trainer.model.eval()
    return trainer


def answers(model, tokenizer) -> list[str]:
    """Greedy."""
    said = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        config = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        out = model.generate(input_ids=prompt, generation_config=config)
        said.append(tokenizer.decode(out[0, prompt.shape[1] :]))
    return said


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_an_exported_member_says_what_it_says_in_the_run(run, random_base, tmp_path, capsys, merge):
    out = tmp_path / "out"
    command = ["export", run.args.output_dir, "--member", MEMBER, "--out", str(out)]
    cli.main([*command, "--merge"] if merge else command)
    assert f"{MEMBER} is in {out}." in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(out)
    stock = AutoModelForCausalLM.from_pretrained(out if merge else random_base)
    if not merge:
        stock = PeftModel.from_pretrained(stock, out)
    assert Path(out, "adapter_config.json").exists() != merge
    with run.member(MEMBER):
        expected = answers(run.model, run.processing_class)
    assert answers(stock.eval(), tokenizer) == expected
    assert expected != answers(AutoModelForCausalLM.from_pretrained(random_base).eval(), tokenizer)


def move_base(run, base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies a run and its base, whose settings then name an end that no answer has; the copies of both."""
    root, other = tmp_path / "run", tmp_path / "base"
    shutil.copytree(run.args.output_dir, root)
    shutil.copytree(base, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.generation_config.eos_token_id = 7
    model.generation_config.save_pretrained(other)
    saved = json.loads((root / "population.json").read_text())
    assert saved["local"] == [str(base)]
    (root / "population.json").write_text(json.dumps(saved | {"base_model": str(other), "local": [str(other)]}))
    return root, other


def test_a_merged_model_ends_where_the_members_ended_and_others_may_read_it(run, random_base, tmp_path):
    (root, _), out = move_base(run, random_base, tmp_path), tmp_path / "out"
    export_member(str(root), out, merge=True)
    assert {*GenerationConfig.from_pretrained(out).eos_token_id} == {7, *run.eos_token_ids}
    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_an_export_that_fails_leaves_nothing_and_touches_nothing(run, random_base, tmp_path):
    (root, base), own = move_base(run, random_base, tmp_path), tmp_path / "out.tmp"
    own.mkdir()
    (base / "model.safetensors").write_bytes(b"cut off")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Exception, match="safetensors|deserializ"):
        export_member(str(root), tmp_path / "out", merge=True)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is not here. Run the command where that path leads to the base"):
        export_member(str(root), tmp_path / "out", merge=True)
    (tmp_path / "elsewhere").rename(base)
    assert sorted(tmp_path.iterdir()) == before


def change_students(root: Path, options: dict) -> None:
    """Gives the saved students other LoRA options, and with `rank_pattern` fewer rows and columns."""
    for student in ("student_0", "student_1"):
        adapter = root / "members" / student
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | options))
        with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
            factors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        for module, rank in options.get("rank_pattern", {}).items():
            for key in [key for key in factors if f".{module}.lora_" in key]:
                factors[key] = (factors[key][:rank] if ".lora_A." in key else factors[key][:, :rank]).contiguous()
        save_file(factors, adapter / "adapter_model.safetensors", metadata)


LORA = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 32}},
}


@pytest.mark.parametrize("students", [1, 2])
@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_the_mean_of_the_students_is_the_mean_of_their_updates(run, random_base, tmp_path, merge, options, students):
    out, root = tmp_path / "out", tmp_path / "run"
    shutil.copytree(run.args.output_dir, root)
    change_students(root, options)
    if students == 1:
        saved = json.loads((root / "population.json").read_text())
        saved["members"] = [member for member in saved["members"] if member["name"] != "student_1"]
        (root / "population.json").write_text(json.dumps(saved))
    cli.main(["export", str(root), "--out", str(out), "--merge_students", *(["--merge"] if merge else [])])
    base = AutoModelForCausalLM.from_pretrained(random_base)
    before = {name: weight.detach().clone() for name, weight in base.named_parameters()}
    updates = []
    for student in ("student_0", "student_1")[:students]:
        adapter = root / "members" / student
        one = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(random_base), adapter).merge_and_unload()
        updates.append({name: weight.detach() - before[name] for name, weight in one.named_parameters()})
    stock = AutoModelForCausalLM.from_pretrained(out if merge else random_base)
    if not merge:
        stock = PeftModel.from_pretrained(stock, out).merge_and_unload()
    moved = 0
    for name, weight in stock.named_parameters():
        mean = sum(update[name] for update in updates) / students
        torch.testing.assert_close(weight.detach(), before[name] + mean, atol=1e-5, rtol=1e-4)
        moved += bool(mean.abs().max() > 1e-3)
    assert moved > 3
    assert AutoTokenizer.from_pretrained(out)
    assert not list(out.glob("*/")), "everything lies in the directory itself"
    assert (out / "adapter_config.json").exists() != merge


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_that_is_saved_quantised_is_merged_dequantised(run, random_base, tmp_path, caplog, bits):
    pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
    rounded, root, out = tmp_path / "rounded", tmp_path / "run", tmp_path / "out"
    quantised = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    AutoModelForCausalLM.from_pretrained(random_base, quantization_config=quantised).save_pretrained(rounded)
    shutil.copytree(run.args.output_dir, root)
    saved = json.loads((root / "population.json").read_text())
    (root / "population.json").write_text(json.dumps(saved | {"base_model": str(rounded)}))
    export_member(str(root), out, MEMBER, merge=True)
    assert "is saved quantised" in caplog.text
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert not hasattr(merged.config, "quantization_config")
    expected = AutoModelForCausalLM.from_pretrained(rounded).dequantize()
    expected = PeftModel.from_pretrained(expected, root / "members" / MEMBER).merge_and_unload()
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), weight)


def test_the_best_student_is_exported_when_none_is_named(run, tmp_path):
    assert export_member(run.args.output_dir, tmp_path / "out") == "student_0"
    ours, theirs = (Path(p, "adapter_model.safetensors") for p in (tmp_path / "out", run.args.output_dir))
    assert ours.read_bytes() == Path(theirs.parent, "members", "student_0", theirs.name).read_bytes()


def test_a_directory_may_be_named_with_a_slash_at_its_end(run, tmp_path):
    export_member(run.args.output_dir, f"{tmp_path}/out/", MEMBER)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Path(tmp_path, "out", "adapter_config.json").exists()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(run, tmp_path):
    with pytest.raises(ValueError, match=r"has no member 'student_7'; there are teacher_0, teacher_1, student_0"):
        export_member(run.args.output_dir, tmp_path / "out", "student_7")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="takes all students; leave `member='student_0'` out"):
        export_member(run.args.output_dir, tmp_path / "out", "student_0", merge_students=True)
    with pytest.raises(ValueError, match="is there already. Name a directory that does not exist yet"):
        export_member(run.args.output_dir, tmp_path)
