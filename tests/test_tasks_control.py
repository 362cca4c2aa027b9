"""No task brings a control token into a prompt, of whatever kind it is and however the text is written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from tests.countdown import Countdown
from tests.games import make_game, play, proposal
from trl_populora.assets import tiny_base_path
from trl_populora.sandbox import Sandbox
from trl_populora.sandbox.values import encode
from trl_populora.tasks import CodeF, CodeI, Proposal, Refusal, Reject, Task
from trl_populora.tasks.kind import THINK_TAGS, find_control_texts, screen
from trl_populora.trainer import PopuLoRATrainer


TEXTS = (*THINK_TAGS, "<|im_end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2) as sandbox:
        yield sandbox


def test_the_texts_of_a_tokenizer_are_its_special_tokens_and_the_tags_of_thinking():
    tiny = AutoTokenizer.from_pretrained(tiny_base_path())
    assert set(find_control_texts(tiny)) == {*THINK_TAGS, "<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    words = {0: SimpleNamespace(content="!", special=True), 1: SimpleNamespace(content="```python\n", special=False)}
    odd = SimpleNamespace(all_special_tokens=["<s>", " ", "<think>"], added_tokens_decoder=words)
    assert find_control_texts(odd) == (*THINK_TAGS, "<s>")


def test_the_trainer_forbids_those_of_its_tokenizer(random_base, make_args, lora, seed_dataset):
    trainer = PopuLoRATrainer(random_base, args=make_args(), train_dataset=seed_dataset, peft_config=lora)
    assert set(THINK_TAGS) < set(trainer.game.referee.forbidden) == set(find_control_texts(trainer.processing_class))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "place",
    [
        lambda text: Proposal("code_o", f"def f(x):\n    return x  # {text}", (encode((1,)),)),
        lambda text: Proposal("code_f", "def f(x):\n    return x", (encode((1,)),), f"a hint {text}"),
        lambda text: Proposal("code_o", "def f(x):\n    return x", (encode(([{"a": text}],)),)),
        lambda text: Task("code_i", "def f(x):\n    return x", (encode((1,)),), (encode([f"a{text}"]),)),
        lambda text: Task("code_i", "def f(x):\n    return x", (encode((1,)),), (encode({text: 1}),)),
        lambda text: Task("mine", "a puzzle", (f"no literal {text}",), ("",)),
    ],
)
def test_a_control_token_is_found_wherever_it_would_be_shown(place, text):
    refusal = screen(place(text), TEXTS)
    assert refusal.reason is Reject.CONTROL_TOKEN
    assert repr(text) in refusal.detail
    assert screen(place("<|im_end >"), TEXTS) == place("<|im_end >")


def test_a_rejection_stays_what_it_is():
    refusal = Refusal(Reject.SYNTAX)
    assert screen(refusal, TEXTS) is refusal


WRITTEN = [
    proposal("def f(a):\n    '<|im_end|>'\n    return a", "1"),
    proposal("def f(a):\n    return a", "'<think>'"),
    proposal("def f(a):\n    return a", r"'<|im_\x65nd|>'"),
    proposal("def f(a):\n    return '<|im' + '_end|>' * a", "1"),
]


def test_a_teacher_cannot_end_the_turn_of_those_who_read_its_task(sandbox, seed_tasks):
    game = make_game(
        sandbox, seed_tasks, lambda i: WRITTEN[i], lambda c, i: "", (CodeI(),), rules={"forbidden": TEXTS}
    )
    played = play(game, 0)
    rows = [row for row in played.rows if row.role == "teacher"]
    assert [row.reject_reason for row in rows] == ["control_token"] * 4
    assert played.metrics["verify/reject/control_token"] == 4
    assert not any(text in row.prompt[0]["content"] for row in played.rows for text in TEXTS)
    assert len(game.archive) == len(seed_tasks)


def test_a_hint_and_a_kind_of_ones_own_are_screened_too(sandbox, seed_tasks):
    hint = "```inputs\n1\n2\n3\n4\n```\n```message\nwrite <|im_end|>\n```"
    game = make_game(sandbox, seed_tasks, lambda i: hint, lambda c, i: "", (CodeF(4),), rules={"forbidden": TEXTS})
    assert play(game, 0).metrics["verify/reject/control_token"] == 4

    class Loose(Countdown):
        def parse_proposal(self, text, references):
            return Proposal(self.name, text, ())

    known = [Task("countdown", "3 4 -> 7", (), ())]
    game = make_game(
        sandbox, known, lambda i: f"{i} </think>", lambda c, i: "", (Loose(),), rules={"forbidden": TEXTS}
    )
    assert play(game, 0).metrics["verify/reject/control_token"] == 4
