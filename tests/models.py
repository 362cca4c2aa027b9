"""Random bases of two narrow layers that tests share, and a tokenizer that is neither trained nor downloaded."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with ChatML: any text survives it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML
    return fast


def random_model(architecture: type[PreTrainedModel], **options) -> PreTrainedModel:
    """Two layers with two heads; the same weights for the same options. `options` are the architecture's config's."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return architecture(architecture.config_class(**(layers | options)))


def save_base(
    path, architecture: type[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, width: int, **options
) -> str:
    """Saves a random model of hidden size `width` beside the tokenizer that it is made for; returns the directory."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width}
    random_model(architecture, **(sizes | ids | options)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def save_byte_base(path, width: int = 32) -> str:
    """Saves a random Qwen3 with the byte tokenizer; its heads are half as wide as the model."""
    options = {"head_dim": width // 2, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    return save_base(path, Qwen3ForCausalLM, make_tokenizer(), width, **options)
