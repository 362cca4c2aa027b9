"""Recipes run as their README says: YAML parses, commands end with the files they promise."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.models import random_model
from tests.recipe_runs import CONFIGS, RECIPES, ROOT, arguments_of, check_run, check_zero2, save_qwen
from tests.vllm_models import ENGINE_ENVIRONMENT
from tests.without_extras import without_extras
from trl_populora.assets import tiny_base_path, tiny_eval_tasks
from trl_populora.cli import train


sys.path.insert(0, str(RECIPES))

import budget  # noqa: E402
from budget import GIB, GPUS, SHAPES, Rows, Shape, engines_of, levers, memory, read_recipe, seconds  # noqa: E402
from budget_nodes import RECORD_BYTES, Nodes, archive_bytes, sandbox_cores, traffic  # noqa: E402

from trl_populora.lora.layers import (
    Router,  # noqa: E402
    add_members,  # noqa: E402
)
from trl_populora.population.evolution import read_mixture  # noqa: E402
from trl_populora.step.microbatch import Sharing, cut, estimate_pair_cost, plan_micro_batches, read_layout  # noqa: E402  # noqa: E402
from trl_populora.step.player import Completion  # noqa: E402
from trl_populora.step.rows import Row  # noqa: E402


# GPU recipes, with the hardware that their first line and their README name: GPU and training processes.
HARDWARE = {
    "Qwen2.5-0.5B-Instruct/config_2t2s.yaml": ("RTX-4090", 1),
    "Qwen2.5-Coder-7B/config_4t4s.yaml": ("A100-80GB", 1),
    "Qwen2.5-Coder-7B/config_4t4s_24gb.yaml": ("RTX-4090", 1),
    "Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml": ("A100-80GB", 8),
    "Qwen2.5-Coder-7B/config_4t4s_two_nodes.yaml": ("A100-80GB", 8),
    "Qwen2.5-Coder-7B/config_4t4s_paper.yaml": ("A100-80GB", 1),
    "Qwen2.5-Coder-7B/config_single_agent.yaml": ("A100-80GB", 1),
    "Qwen2.5-Coder-7B/config_single_agent_all_rows.yaml": ("A100-80GB", 1),
}


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"))


NARROW = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 100}
TINY = [name for name, path in CONFIGS.items() if "model_name_or_path: tiny" in path.read_text()]


def launch(*arguments: str) -> str:
    """Runs `accelerate launch` on the CPU as the README does, and returns all it printed; fails with that."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/single.yaml"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=without_extras(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's child outlives it otherwise
    assert process.returncode == 0, output[-5000:]
    return output


@pytest.mark.parametrize("name", CONFIGS)
def test_yaml_parses_and_its_batch_fits(name, tmp_path):
    args, model = read_recipe(str(CONFIGS[name]), str(tmp_path))
    assert args.rows_per_step == args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert model.model_name_or_path
    if args.use_vllm:
        assert args.micro_batches(HARDWARE.get(name, ("", 1))[1]) > 0


def test_the_recipe_for_one_gpu_differs_from_its_cpu_twin_in_hardware_alone():
    cpu, gpu = (
        yaml.safe_load(CONFIGS[f"SmolLM2-135M-Instruct/config_2t2s{name}.yaml"].read_text()) for name in ("", "_gpu")
    )
    differ = {key for key in cpu.keys() | gpu.keys() if cpu.get(key) != gpu.get(key)}
    assert differ == {"output_dir", "use_cpu", "generation_tokens", "per_device_train_batch_size"} | {
        key for key in gpu if "vllm" in key
    }


AS_PRINTED = {  # what `docs/paper.md` calls printed, and the tiny recipe and the 7B one have
    "teachers": 4,
    "students": 4,
    "teacher_reward": "paper",
    "ratings": "trueskill",
    "mutations": {"svd_perturb": 1.0},
    "crossovers": {"module_swap": 1.0},
    "pfsp_kappa": 1.0,
    "evolve_every": 10,
    "cull_fraction": 0.25,
    "replay": 0.0,
    "teacher_learning_rate": None,
    "teacher_reward_invalid": -1.0,
    "teacher_reward_unsolved": 0.0,
}


@pytest.mark.parametrize("name", ["paper.yaml", "Qwen2.5-Coder-7B/config_4t4s_paper.yaml"])
def test_the_recipes_of_the_paper_play_all_of_it_as_printed(name, tmp_path):
    args, _ = read_recipe(str(CONFIGS[name]), str(tmp_path))
    breeding = args.breeding
    found = {key: getattr(args, key) for key in AS_PRINTED} | {
        "mutations": read_mixture(breeding.mutations, (), "mutations"),
        "crossovers": read_mixture(breeding.crossovers, (), "crossovers"),
    }
    assert found == AS_PRINTED


def test_the_7b_recipes_that_are_compared_differ_in_what_is_compared():
    def read(name):
        return yaml.safe_load(CONFIGS[f"Qwen2.5-Coder-7B/config_{name}.yaml"].read_text())

    def differ(name):
        ours, theirs = read("4t4s"), read(name)
        return {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}

    alone = {"output_dir", "teachers", "students", "single_agent", "evolve_every", "proposals_per_teacher"}
    assert differ("single_agent_all_rows") == alone | {"per_device_train_batch_size"}
    assert differ("single_agent") == alone | {"per_device_train_batch_size", "max_steps"}
    assert differ("4t4s_paper") == {"output_dir", "vllm_max_model_length", "teacher_baseline", "student_baseline"} | {
        *("ratings", "pfsp_kappa", "teacher_reward", "mutations", "crossovers")
    }
    rows = {}
    for name in ("4t4s", "single_agent", "single_agent_all_rows"):
        recipe = read(name)
        a_step = recipe.get("teachers", 1) * recipe["proposals_per_teacher"] * (1 + recipe["attempts_per_task"])
        rows[name] = a_step * recipe["max_steps"]
    assert rows["single_agent_all_rows"] == rows["4t4s"] == 4 * rows["single_agent"], "of a pair, and of all four"


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_runs_in_one_two_and_four_processes(name, processes, tmp_path):
    args, _ = read_recipe(str(CONFIGS[name]), str(tmp_path))
    assert args.micro_batches(processes) * processes * args.per_device_train_batch_size == args.rows_per_step


class TestBudget:
    @pytest.mark.parametrize("name", HARDWARE)
    def test_the_recipe_fits_its_gpu_on_paper(self, name, tmp_path):
        args, model = read_recipe(str(CONFIGS[name]), str(tmp_path))
        gpu, processes = HARDWARE[name]
        shape = SHAPES[model.model_name_or_path]
        for longest in (False, True):
            like = Rows.of(args, longest)
            budget = memory(args, model, shape, GPUS[gpu], processes, like.prompt)
            assert budget.moment_fits
            assert budget.engine_fits
            tokens = like.prompt + args.max_completion_length
            assert budget.cache_tokens > 8 * tokens, "the engine could not answer eight rows at a time"
        like = Rows.of(args)
        assert sum(seconds(args, shape, GPUS[gpu], engines_of(args, processes), processes, 10**5, like).values()) > 0
        args.per_device_train_batch_size *= 2
        limits = Rows.of(args, longest=True).prompt
        larger = memory(args, model, shape, GPUS[gpu], processes, limits)
        assert not (larger.moment_fits and larger.engine_fits), "a larger batch would fit, too"

    def test_a_sleeping_engine_leaves_its_memory_to_the_update(self, tmp_path):
        args, model = read_recipe(str(CONFIGS["Qwen2.5-Coder-7B/config_4t4s.yaml"]), str(tmp_path))
        shape, gpu, prompt = SHAPES[model.model_name_or_path], GPUS["A100-80GB"], Rows.of(args).prompt
        awake = memory(args, model, shape, gpu, 1, prompt)
        args.vllm_enable_sleep_mode = True
        asleep = memory(args, model, shape, gpu, 1, prompt)
        parts = sum(awake.update.values()), awake.engine_memory
        assert awake.on_one_gpu - asleep.on_one_gpu == pytest.approx(min(parts))

    def test_a_kl_term_of_teachers_computes_all_rows(self, tmp_path):
        args, _ = read_recipe(str(CONFIGS["Qwen2.5-Coder-7B/config_4t4s.yaml"]), str(tmp_path))
        assert Rows.of(args).live < 1
        args.teacher_beta = 0.01
        assert Rows.of(args).live == 1

    def test_the_recipe_for_24_gb_leaves_room_at_the_limits_part_by_part(self, tmp_path):
        args, model = read_recipe(str(CONFIGS["Qwen2.5-Coder-7B/config_4t4s_24gb.yaml"]), str(tmp_path))
        assert (args.teachers, args.students, model.load_in_4bit, args.use_vllm) == (4, 4, True, False)
        shape, gpu = SHAPES[model.model_name_or_path], GPUS["RTX-4090"]
        budget = memory(args, model, shape, gpu, 1, Rows.of(args, longest=True).prompt)
        assert budget.on_one_gpu <= 22 * GIB
        moments = [sum(part.values()) for part in (budget.update, budget.playing)]
        assert budget.on_one_gpu == sum(budget.held.values()) + max(moments)
        like = Rows.of(args)
        started, replayed = (
            seconds(args, shape, gpu, 1, 1, budget.cache_tokens, like, four_bits)["propose and solve"]
            for four_bits in (True, False)
        )
        assert replayed < started / 4, "a base in 4 bits is not recorded"
        args.generation_tokens = None
        assert memory(args, model, shape, gpu, 1, like.prompt).on_one_gpu > 24 * GIB, "what the limit is for"

    @pytest.mark.parametrize("nested", [False, True])
    def test_bytes_of_a_base_in_4_bits_are_those_of_bitsandbytes(self, nested, tmp_path):
        pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
        shape = Shape(256, 2, 4, 2, 512, 1000, False)
        with torch.random.fork_rng():
            Qwen2ForCausalLM(Qwen2Config(**vars(shape))).save_pretrained(tmp_path)
        options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=nested)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=options)
        held = sum(parameter.nbytes for parameter in model.parameters())
        states = [module.weight.quant_state for module in model.modules() if hasattr(module, "quant_state")]
        held += sum(state.absmax.nbytes + (state.state2.absmax.nbytes if nested else 0) for state in states)
        assert len(states) == 14
        # A last block of 256 scales may be a part of one.
        assert held == pytest.approx(shape.bytes(four_bits=True, nested=nested), abs=4 * len(states))

    def test_a_layer_in_4_bits_saves_no_more_for_its_backward_than_is_counted(self, tmp_path):
        """Saved-tensor hooks on a routed decoder layer under bf16 autocast; weights are not counted."""
        pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
        shape, tokens, saved = Shape(256, 1, 4, 2, 1024, 100, False), 127, {}  # no other size is a multiple of 127
        with torch.random.fork_rng():
            Qwen2ForCausalLM(Qwen2Config(**vars(shape))).save_pretrained(tmp_path)
        options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=options)
        router = Router()
        members = add_members(base, ["a"], LoraConfig(r=4, target_modules="all-linear"), router, seed=0).train()
        members.enable_input_require_grads()
        layer = base.model.layers[0]
        forward = layer.forward

        def keep(tensor):
            if tokens in tensor.shape:
                saved[tensor.data_ptr(), tensor.dtype] = tensor
            return tensor

        def watched(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return forward(*args, **kwargs)

        layer.forward = watched
        with router.route_to([0]), torch.autocast("cpu", torch.bfloat16):
            members(input_ids=torch.ones(1, tokens, dtype=torch.long))
        # Beside it stand what members' rank and the tables of positions take, nothing at a 7B model's widths.
        counted = shape.layer_bytes_per_token / 2
        held = sum(tensor.nbytes for tensor in saved.values()) / tokens
        assert held <= counted
        assert held == pytest.approx(8 * shape.intermediate_size + 20 * shape.hidden_size, rel=0.05), "rows in order"

    @pytest.mark.parametrize(
        ("name", "parameters", "adapter"),
        [
            ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, 17_596_416),
            ("Qwen/Qwen2.5-Coder-7B", 7_615_616_512, 80_740_352),
        ],
    )
    def test_parameters_are_those_of_transformers_and_peft(self, name, parameters, adapter):
        shape = SHAPES[name]
        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**vars(shape)))
            assert model.num_parameters() == shape.parameters == parameters
            lora = LoraConfig(r=32, target_modules="all-linear")
            members = add_members(model, ["teacher_0", "student_0"], lora, Router(), seed=0)
        assert members.num_parameters(only_trainable=True) == 2 * shape.adapter_parameters(32) == 2 * adapter

    @pytest.mark.parametrize("name", HARDWARE)
    def test_shared_prompts_save_what_the_trainers_own_dealing_saves(self, name, tmp_path):
        args, model = read_recipe(str(CONFIGS[name]), str(tmp_path))
        sharing = Sharing(False, estimate_pair_cost(Qwen2Config(**vars(SHAPES[model.model_name_or_path]))))
        prompt, completion = Rows.of(args).prompt, args.max_completion_length * 3 // 10
        tasks = torch.cat([torch.arange(8).repeat_interleave(args.attempts_per_task), torch.arange(8, 16)])
        batch = {
            "prompt_ids": torch.zeros(len(tasks), prompt),
            "prompt_mask": torch.ones(len(tasks), prompt, dtype=torch.long),
            "completion_ids": torch.zeros(len(tasks), args.max_completion_length),
            "completion_mask": (torch.arange(args.max_completion_length) < completion).long().repeat(len(tasks), 1),
            "member": tasks % 4 + 4 * (tasks < 8),  # proposals come from teachers and have prompts of their own
        }
        batch["completion_mask"][-1] = 1  # the longest row decides what a micro-batch may hold
        lengths = [batch[mask].sum(1).tolist() for mask in ("prompt_mask", "completion_mask")]
        size = args.per_device_train_batch_size
        plan = plan_micro_batches(batch["member"].tolist(), tasks.tolist(), *lengths, 4, size, sharing)
        parts = cut(batch, plan)
        attempts = [read_layout(part) for part in parts if part["member"].min() >= 4]
        row = prompt + completion
        share = sum(layout.cost(sharing) for layout in attempts) / (row * (1 + sharing.pair_cost * row))
        expected = (8 + share) / len(tasks)
        shape, like = SHAPES[model.model_name_or_path], Rows.of(args)
        assert levers(args, shape, like)["shared prompts"] == pytest.approx(expected, rel=0.1)
        args.beta = 0.1
        assert levers(args, shape, Rows.of(args))["live rows"] == 1.0

    @pytest.mark.parametrize(
        ("architecture", "options"),
        [
            (LlamaForCausalLM, {"tie_word_embeddings": True}),
            (LlamaForCausalLM, {"head_dim": 32, "attention_bias": False}),
            (MistralForCausalLM, {"num_key_value_heads": 1}),
        ],
    )
    def test_a_base_that_is_not_known_is_read_from_its_config(self, architecture, options, tmp_path):
        base = random_model(architecture, **NARROW, **options)
        base.config.save_pretrained(tmp_path)
        shape, layers = Shape.of(str(tmp_path)), [each for each in base.modules() if isinstance(each, torch.nn.Linear)]
        assert shape.parameters == base.num_parameters()
        assert shape.linear_parameters == sum(layer.weight.numel() for layer in layers if layer is not base.lm_head)
        members = add_members(base, ["a"], LoraConfig(r=4, target_modules="all-linear"), Router(), seed=0)
        assert members.num_parameters(only_trainable=True) == shape.adapter_parameters(4)

    @pytest.mark.parametrize(("mode", "slots"), [("colocate", 9), ("server", 8)])
    def test_an_engine_has_a_slot_for_each_member_and_a_colocated_one_for_the_base(self, mode, slots, tmp_path):
        args, model = read_recipe(str(CONFIGS["Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml"]), str(tmp_path))
        args.vllm_mode = mode
        shape = SHAPES[model.model_name_or_path]
        engine = memory(args, model, shape, GPUS["A100-80GB"], 8, 1000).engine
        further = {"colocate": 0, "server": 2 * 32 * (shape.vocab_size + shape.hidden_size)}[mode]
        assert engine[f"{slots} adapters, bf16"] == 2 * slots * (shape.adapter_parameters(32) + further)

    def test_a_slot_has_the_size_that_vllm_gives_it(self):
        """tests/test_vllm.py has a real engine's slots without embeddings and head."""
        shape = Shape.of("tiny")
        assert shape.slot_parameters(16, everywhere=True) == 372_736, "counted in vLLM 0.31"
        assert shape.slot_parameters(9) == shape.slot_parameters(16) == shape.adapter_parameters(16)

    def test_the_embedded_base_is_read_too(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["budget.py", str(CONFIGS["tiny/quickstart.yaml"])])
        budget.main()
        printed = capsys.readouterr().out
        assert printed.startswith("tiny: 3 M parameters")
        assert printed.endswith("Fits.\n")

    @pytest.fixture
    def sweep(self, tmp_path):
        """A recipe that names a dataset of prompts, which nobody reads."""
        recipe = tmp_path / "sweep.yaml"
        recipe.write_text(
            "model_name_or_path: Qwen/Qwen2.5-Coder-7B\ndtype: bfloat16\ndataset_name: my_prompts.jsonl\n"
            "reward_funcs: [my_rewards.right]\nlearning_rate: [1e-5, 3e-5, 1e-4, 3e-4]\n"
            "lora_r: [8, 16, 32, 32]\nlora_alpha: [16, 32, 64, 64]\nmax_steps: 100\n"
        )
        return recipe

    def test_a_recipe_with_a_dataset_has_the_rows_and_members_of_its_run(self, sweep, monkeypatch, capsys):
        args, model = read_recipe(str(sweep))
        assert (args.teachers, args.students, args.max_completion_length) == (0, 4, 512)
        assert args.generation_batch_size == 32
        shape, gpu = SHAPES[model.model_name_or_path], GPUS["H200"]
        in_bf16 = memory(args, model, shape, gpu, 1, 300)
        assert in_bf16.held["members, gradients, Adam"] == 16 * 4 * shape.adapter_parameters(32), "of the largest rank"
        assert in_bf16.playing["keys and values"] == 32 * (300 + 512) * shape.cache_bytes_per_token
        model.dtype = "float32"
        in_fp32 = memory(args, model, shape, gpu, 1, 300)
        assert in_fp32.held["base"] == 2 * in_bf16.held["base"] == 4 * shape.parameters
        args.generation_tokens = 10**6
        assert memory(args, model, shape, gpu, 1, 300).playing == in_fp32.playing, "more than all rows have"
        args.gradient_checkpointing = False
        kept, recomputed = memory(args, model, shape, gpu, 1, 300).update, in_fp32.update
        assert kept["what all layers save"] == 28 * recomputed["one layer, recomputed"] / 2
        assert kept["rounded weights"] == 28 * recomputed["rounded weights"] == 2 * shape.linear_parameters
        args.gradient_checkpointing = True
        args.model_init_kwargs = {"dtype": "bfloat16"}
        assert memory(args, model, shape, gpu, 1, 300).on_one_gpu == in_bf16.on_one_gpu, "these win"
        args.generation_tokens = 4 * (300 + 512)
        assert (
            memory(args, model, shape, gpu, 1, 300).playing["keys and values"]
            == in_bf16.playing["keys and values"] / 8
        )

        monkeypatch.setattr(sys, "argv", ["budget.py", str(sweep), "--prompt_tokens", "300", "--gpu", "RTX-4090"])
        budget.main()
        told = capsys.readouterr().out
        assert "4 adapters, 32 rows a generation, 4 micro-batches per process" in told
        assert "| GiB on a training GPU | with the longest prompts |" in told
        assert re.search(r"^Seconds a generation: generate \d+, log-probs and update \d+; 100 steps take", told, re.M)
        assert re.search(r"\nFits.$|\nDoes not fit: the fullest moment with the longest prompts needs", told)

    def test_members_of_a_dataset_run_are_students(self, sweep, monkeypatch, capsys):
        sweep.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: my_prompts.jsonl\n")
        arguments = ["budget.py", str(sweep), "--prompt_tokens", "300", "--members", "8", "--processes", "2"]
        monkeypatch.setattr(sys, "argv", arguments)
        budget.main()
        assert "8 adapters, 128 rows a generation, 8 micro-batches per process" in capsys.readouterr().out
        sweep.write_text(
            sweep.read_text() + "per_device_train_batch_size: 2\ngeneration_batch_size: 8\nmax_steps: 10\n"
        )
        monkeypatch.setattr(sys, "argv", [*arguments[:-1], "4"])
        budget.main()
        told = capsys.readouterr().out
        assert "8 adapters, 64 rows a generation, 8 micro-batches per process" in told
        hours = float(re.search(r"10 steps take ([\d.]+) hours", told)[1])
        sweep.write_text(sweep.read_text() + "gradient_accumulation_steps: 4\n")
        budget.main()
        longer = float(re.search(r"10 steps take ([\d.]+) hours", capsys.readouterr().out)[1])
        assert longer == pytest.approx(4 * hours, abs=0.3), "a step takes four generations"

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ([], "the recipe has a dataset of prompts: give the tokens of its longest"),
            (["--prompt_tokens", "300", "--nodes", "2"], "`--nodes 2` is for games"),
            (["--prompt_tokens", "300", "--members", "8"], "`learning_rate=.*` lists 4 value"),
        ],
    )
    def test_what_a_dataset_run_lacks_or_cannot_have_is_told(self, sweep, arguments, told, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["budget.py", str(sweep), *arguments])
        with pytest.raises(SystemExit, match=f"^budget.py: {told}"):
            budget.main()

    def test_the_prompts_of_a_game_are_not_told(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["budget.py", str(CONFIGS["tiny/quickstart.yaml"]), "--prompt_tokens", "9"])
        with pytest.raises(SystemExit, match="^budget.py: `--prompt_tokens` is for a recipe with a dataset"):
            budget.main()

    def test_a_recipe_too_large_for_its_card_ends_with_what_does_not_fit(self, monkeypatch, capsys):
        recipe = str(CONFIGS["Qwen2.5-Coder-7B/config_4t4s.yaml"])
        monkeypatch.setattr(sys, "argv", ["budget.py", recipe, "--gpu", "RTX-4090"])
        budget.main()
        table, _, told = capsys.readouterr().out.rpartition("\nDoes not fit: ")
        full = re.search(r"^\| fullest moment \| ([\d.]+) \| ([\d.]+) \|\n\| of \| ([\d.]+) ", table, re.M)
        start, limits, card = full.groups()
        assert f"moment at the start needs {start} of {card} GiB; " in told
        assert f"moment at the limits needs {limits} of {card} GiB; an engine without its cache needs" in told

    def test_nodes_and_members_are_added_to_a_recipe(self, monkeypatch, capsys):
        recipe = str(CONFIGS["Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml"])
        monkeypatch.setattr(sys, "argv", ["budget.py", recipe, "--processes", "8", "--nodes", "4", "--members", "32"])
        budget.main()
        told = capsys.readouterr().out
        assert "`proposals_per_teacher` is raised to 32" in told
        assert "32 adapters on 4 nodes of 8 GPUs" in told
        rows = re.findall(r"^\| ([a-zP, ]+) \| ([\d.]+) \| [\d.]+ \|$", told.partition("busiest node")[2], re.M)
        sizes = {name: float(size) for name, size in rows}
        adapters = 32 * SHAPES["Qwen/Qwen2.5-Coder-7B"].adapter_parameters(32)
        assert sizes["weights"] == pytest.approx(2 * adapters * 31 / 32 / 1e9, abs=1e-3)
        assert sizes["gradients"] == pytest.approx(2 * 36 * sizes["weights"], rel=1e-3), "after each micro-batch"
        assert sizes["publishing"] == 0, "each process has its engine"
        assert sizes["all"] == pytest.approx(sum(size for name, size in sizes.items() if name != "all"), abs=2e-3)
        monkeypatch.setattr(sys, "argv", ["budget.py", recipe, "--processes", "8", "--nodes", "4", "--members", "64"])
        budget.main()
        told = capsys.readouterr().out
        assert "Seconds a step" not in told, "nothing is left for the engine's cache"
        assert told.endswith(
            "MiB a node\nDoes not fit: the fullest moment at the limits needs 88.8 of 79.1 GiB; "
            "an engine without its cache needs 26.2 of 23.7 GiB.\n"
        )
        monkeypatch.setattr(sys, "argv", ["budget.py", recipe, "--processes", "8"])
        budget.main()
        assert "nodes" not in capsys.readouterr().out

    def test_servers_and_nodes_make_more_traffic_and_fewer_cores(self, tmp_path):
        args, _ = read_recipe(str(CONFIGS["Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml"]), str(tmp_path))
        like, one, four = Rows.of(args), Nodes(1, 8, 27, 0), Nodes(4, 8, 7, 3)
        assert traffic(args, 100, one, like)["rows, as Python objects"] == 0
        assert traffic(args, 100, four, like)["publishing"] == 4 * 100 * (1 + 3)
        assert sandbox_cores(args, one, 60.0) == pytest.approx(4 * sandbox_cores(args, four, 60.0))
        assert archive_bytes(args, four) == archive_bytes(args, one), "a node has as many processes"

    def test_a_record_has_about_the_bytes_that_are_counted(self):
        facts = [
            {"task_id": f"{n // 4:016x}", "solve_rate": n / 72, "features": ("slice", "BitAnd", f".name{n}")}
            for n in range(72)
        ]
        written = Completion([1], [1], "text", None)
        rows = [
            Row("student", f"student_{n % 4}", "code_o", n % 4, completion=written, **each)
            for n, each in enumerate(facts)
        ]
        assert 0.5 * RECORD_BYTES < len(pickle.dumps([row.record() for row in rows])) / len(rows) < RECORD_BYTES

    def test_a_base_of_another_form_or_none_is_told_in_one_line(self, monkeypatch, tmp_path):
        random_model(MixtralForCausalLM, **NARROW).config.save_pretrained(tmp_path)
        for base, told in ((tmp_path, f"{tmp_path} is a mixtral; "), ("nobody/nothing", "")):
            recipe = tmp_path / "recipe.yaml"
            recipe.write_text(f"model_name_or_path: {base}\nmax_steps: 1\n")
            monkeypatch.setattr(sys, "argv", ["budget.py", str(recipe)])
            with pytest.raises(SystemExit, match=f"^budget.py: {told}"):
                budget.main()

    def test_cache_bytes_are_those_of_the_keys_and_values(self):
        model = AutoModelForCausalLM.from_pretrained(tiny_base_path(), dtype=torch.bfloat16)
        config = model.config
        cache = model(torch.zeros(1, 10, dtype=torch.long)).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        shape = type(SHAPES["Qwen/Qwen2.5-Coder-7B"])(*(getattr(config, name) for name in names), 1, 1, True)
        assert held == 10 * shape.cache_bytes_per_token


def few_held_out(directory: Path) -> Path:
    """Six of the tiny base's held-out tasks."""
    path = directory / "tasks.jsonl"
    path.write_text("".join(Path(tiny_eval_tasks()).read_text(encoding="utf-8").splitlines(keepends=True)[:6]))
    return path


class TestSmoke:
    """Two steps of every recipe as it stands, small; GPU recipes on a random model of their architecture."""

    @pytest.mark.usefixtures("two_plots")
    @pytest.mark.parametrize(
        "name",
        [
            # The recipes of the embedded base here, those of larger models in the slow suite.
            pytest.param(name, marks=[] if name.startswith("tiny/") else pytest.mark.slow)
            for name in CONFIGS
            if HARDWARE.get(name, ("", 1))[1] == 1
        ],
    )
    def test_one_process(self, name, qwen, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)  # seed tasks are named from there
        tiny = {"model_name_or_path": "tiny", "eval_tasks": few_held_out(tmp_path)}
        train(arguments_of(name, tmp_path / "run", **tiny if name in TINY else {"model_name_or_path": qwen}))
        steps = check_run(name, tmp_path / "run")
        assert all(math.isfinite(step["solve/archive_rate"]) for step in steps), "archived tasks fill the slots"

    @pytest.mark.slow
    @pytest.mark.multiprocess
    def test_eight_gpus_as_two_zero2_processes(self, qwen, tmp_path, monkeypatch):
        engine = {}
        if importlib.util.find_spec("vllm"):
            for key, value in ENGINE_ENVIRONMENT.items():
                monkeypatch.setenv(key, value)
            engine = {"use_vllm": "true", "vllm_engine_kwargs": json.dumps({"enforce_eager": True})}
        name = "Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml"
        check_zero2(name, tmp_path, model_name_or_path=qwen, **engine)


@pytest.mark.slow
def test_quick_start_leaves_what_the_readme_lists(tmp_path):
    run, tasks = tmp_path / "run", few_held_out(tmp_path)
    settings = {"output_dir": run, "max_steps": 2, "evolve_every": 1, "evolve_burn_in": 1, "eval_tasks": tasks}
    settings |= {"proposals_per_teacher": 4, "attempts_per_task": 2, "per_device_train_batch_size": 8}
    overrides = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    output = launch("recipes/train_populora.py", "--config", "recipes/tiny/quickstart.yaml", *overrides)
    assert output.count("| valid") == 2, "one line per step"
    for word in ("match", "propose", "verify", "solve", "update"):
        assert f"{word} " in output
    assert "Population after 2 steps" in output
    assert "Cannot be told: 2 of the 10 steps that a verdict needs are logged." in output
    members = {path.parent.name for path in run.glob("members/*/adapter_model.safetensors")}
    assert members == {"teacher_0", "teacher_1", "student_0", "student_1"}
    assert len(json.loads((run / "population.json").read_text())["members"]) == 4
    lineage = [json.loads(line) for line in (run / "lineage.jsonl").read_text().splitlines()]
    assert {event["role"] for event in lineage} == {"teacher", "student"}
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")
    rows = load_dataset("parquet", data_files=str(run / "rollouts" / "*.parquet"), split="train", cache_dir=tmp_path)
    assert len(rows) == 2 * 2 * 4 * (1 + 2)
    assert all(row["reject_reason"] for row in rows if row["role"] == "teacher" and not row["valid"])


@pytest.mark.parametrize("answer", ["{[1]}", "1 +", "x"])
def test_the_reward_of_the_tiny_prompts_takes_any_answer(answer):
    from tiny_prompts import right

    said = [[{"content": f"```output\n{text}\n```"}] for text in ("3", "4", answer)]
    assert right(said, ["3"] * 3) == [1.0, 0.0, -0.5]
