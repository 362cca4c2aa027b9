"""What tasks use: words read from programs, counted over the last accepted tasks, and drawn evenly for replays."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from trl_populora.sandbox.values import encode
from trl_populora.tasks import CodeO, Task
from trl_populora.tasks.features import Features, draw_evenly, name_features, read_features


def program(*lines: str, head: str = "") -> str:
    return f"{head}def f(a):\n    " + "\n    ".join(lines)


class TestWords:
    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            (["return a"], []),
            (["return a + 1 - -3"], ["Add", "Sub"]),
            (["a += 1", "return ~a & 3"], ["Add", "BitAnd", "Invert"]),
            (["return 1 < a <= 3 and not a"], ["And", "Lt", "LtE", "Not"]),
            (["return a[1:]"], ["[x:]"]),
            (["return a[:-1]"], ["[:-]"]),
            (["return a[::-1]"], ["[::-]"]),
            (["return [a[0], a[-1]]"], ["List", "[-]", "[x]"]),
            (["return a.swapcase().split(sep='b')"], [".split(sep)", ".swapcase"]),
            (["return sorted(a, reverse=True)"], ["sorted(reverse)"]),
            (["return [b for b in a if b]"], ["ListComp"]),
            (["if a:", "    return 1", "return 2"], ["If"]),
            (["for b in a:", "    c, d = b", "return c"], ["For"]),
            (["import math", "return math.gcd(a, 4)"], ["math"]),
        ],
    )
    def test_what_a_program_uses(self, lines, words):
        assert list(read_features(program(*lines))) == words

    def test_a_program_cannot_make_words_up(self):
        made_up = [
            "import zzz17",
            "max = g17",
            "if a > 10**9:",
            "    g17(a, zzz=3)",
            "    return a.zzz17(key18=3) or max(a) or dict(zzz19=3)",
            "return a",
        ]
        assert read_features(program(*made_up, head="def g17(b):\n    return b\n")) == (
            "Gt",
            "If",
            "Or",
            "Pow",
            "dict",
        )

    def test_dead_code_says_nothing(self):
        assert read_features(program("b = ~a", "'text'.count", "return a + 1", "return a.upper()")) == ("Add",)

    def test_names_and_layout_do_not_count(self):
        one = program("b = a + 1", "return [b]  # the sum")
        assert read_features(one) == read_features(one.replace("b", "total"))

    @pytest.mark.parametrize("text", ["", "24", "def g(a): return a + 1", "def f(", "(" * 5000])
    def test_a_text_without_an_f_uses_nothing(self, text):
        assert read_features(text) == ()

    @pytest.mark.parametrize("answer", ["word", ["word"], (3,), None])
    def test_a_wrong_answer_of_a_kind_names_kind_and_method(self, answer):
        class Odd(CodeO):
            name = "odd"

            def features(self, task):
                return answer

        with pytest.raises(TypeError, match="task kind 'odd': `features` must return"):
            name_features(Odd(), Task("odd", "def f(a):\n    return a", (encode((3,)),), ("3",)))


class TestRarity:
    def test_it_is_the_rarest_features(self):
        features = Features(window=10)
        for words in [("Add",)] * 4 + [("Add", "Mod")]:
            features.add(words)
        assert features.rarity(("Add",)) == 0.5
        assert features.rarity(("Add", "Mod")) == pytest.approx(0.9)
        assert features.rarity(("Sub",)) == 1.0
        assert features.rarity(()) == 0.0

    def test_tasks_outside_the_window_are_forgotten(self):
        features = Features(window=4)
        for words in [("Add",)] * 4 + [("Sub",)] * 3:
            features.add(words)
        assert (features.rarity(("Add",)), features.rarity(("Sub",))) == (0.75, 0.25)
        features.add(("Sub",))
        assert features.rarity(("Add",)) == 1.0
        assert features.metrics() == {"curriculum/features": 1.0}


def test_saved_and_restored_it_goes_on_as_before():
    rng, vocabulary = random.Random(0), ["Add", "Sub", "Mod", ".upper", "[x:]"]
    one, other = Features(window=20), Features(window=20)

    def play(features: Features, seed: int) -> list[float]:
        rng = random.Random(seed)
        words = [tuple(sorted(rng.sample(vocabulary, 2))) for _ in range(6)]
        for each in words:
            features.add(each)
        return [features.rarity(each) for each in words]

    for _ in range(7):
        play(one, rng.randrange(100))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [play(one, seed) for seed in range(5)] == [play(other, seed) for seed in range(5)]
    assert one.state_dict() == other.state_dict()


def test_a_smaller_window_keeps_the_newest():
    large, small = Features(window=16), Features(window=8)
    for words in [("Add",)] * 8 + [("Mod",)] * 8:
        large.add(words)
    small.load_state_dict(large.state_dict())
    assert (small.rarity(("Add",)), small.rarity(("Mod",))) == (1.0, 0.0)


def test_replays_are_drawn_evenly_over_features_however_few_have_them():
    common = [Task("code_o", program(f"return a + {n}"), (encode((3,)),), ("3",)) for n in range(30)]
    rare = Task("code_o", program("return a.swapcase()"), (encode(("x",)),), ('"X"',))
    plain = Task("code_o", program("return a"), (encode((3,)),), ("3",))
    named = [(task, read_features(task.program)) for task in [*common, rare, plain]]
    drawn = Counter(task == rare for task in draw_evenly(named, 400, random.Random(0)))
    assert drawn[True] == pytest.approx(200, abs=40)
    assert draw_evenly([(plain, ())], 2, random.Random(0)) == [plain, plain]
