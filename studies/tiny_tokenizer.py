"""
The tokenizer of the embedded tiny base: byte-level BPE of 512 entries, and the ChatML template.

Any text can be encoded, but the text of the compact formats comes out short: fences and first lines are single tokens,
so are a newline with its indent and an operator with its blanks; digits and letters of string literals stay single.
Used by `make_tiny_base.py` only.
"""

from __future__ import annotations

import random
import re

import beside_recipes  # noqa: F401
from tiny_documents import BRANCHES, DialogueWriter
from tiny_programs import OPERATIONS
from tiny_traces import CLOSE, OPEN
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


VOCABULARY = 512
END_OF_TURN, PADDING, START_OF_TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
SPECIAL_TOKENS = (PADDING, START_OF_TURN, END_OF_TURN)
WHOLE_TOKENS = (
    OPEN,
    CLOSE,
    *(f"```{name}\n" for name in ("python", "input", "inputs", "output", "message", "examples")),
    *(f"solve {kind}\n" for kind in ("code_o", "code_i", "code_f")),
    *("propose code_o\n", "propose code_i\n", "propose code_f "),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What BPE may merge within: the alternatives are tried from left to right at every place.
PIECES = "|".join(
    (
        r"\n```\n?",
        r"\n +(?:return |if )?",
        r"def f\(",
        r"\):",
        r": ",
        r"[0-9]",
        r"\[::-1\]|\[1:\]|\[0\]",
        r" for x in | if x > ",
        r"\.[a-z]+\(\)?",
        r" (?:->|[!=]=|[-+*<>=]) ",
        r", (?:then )?",
        r" ?[A-Za-z_]+\(?",
        r"\s+",
        r"[^\sA-Za-z0-9_]",
    )
)


def train_tokenizer(seed: int, documents: int = 4000) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on random documents, with the letters of string literals left out."""
    writer = DialogueWriter(random.Random(f"{seed}:tokenizer"), worked=0.5, operations=OPERATIONS)
    names = list(BRANCHES)
    texts = []
    for index in range(documents):
        for dialogue in writer.document(names[index % len(names)])[:1]:
            text = f"user\nassistant\nsystem\n{dialogue.user}{dialogue.assistant}"
            texts.append(re.sub(r"'[A-Za-z]*'", "''", text))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(WHOLE_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in WHOLE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
