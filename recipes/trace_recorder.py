"""
Notes what a traced program does, as text. This file runs *inside the sandbox*, behind the program that it notes.

`execution_traces.py` appends its source to a program together with a copy of `f` that calls [`Recorder`] at every
statement. A line has the values put in and then the result; what else a statement changed follows:
`xs.append(3); xs = [1, 3]`. Ends the program where a trace gets too long or holds what cannot be written as text.
"""


class Untraceable(BaseException):
    """Ends the traced program; no `except Exception` of its own may catch it."""


class Recorder:
    """
    The lines of one call.

    Args:
        lines, characters (`int`): Most that are noted of all.
        value (`int`): Most characters of one value.
    """

    def __init__(self, lines: int, characters: int, value: int):
        self.left_lines, self.left_characters, self.longest = lines, characters, value
        self.lines: list[str] = []
        self.begun: list[tuple] = []

    def step(self, target: tuple, expression: tuple, names: dict, mark: str, parts: dict):
        """
        Begins a line; what it returns takes the value of the expression, which comes next.

        Args:
            target, expression (`tuple[str, ...]`): Text and names in turn, text first. A name is a variable's, or
                stands for a part of the expression.
            names (`dict[str, object]`): The variables.
            mark (`str`): What stands between expression and value; the value is not noted where it is empty.
            parts (`dict[str, str]`): What stands for parts that get no value.
        """
        self.seen = {name: self.show(value) for name, value in names.items()}
        self.begun.append((target, expression, mark, self.seen, dict(parts)))
        return self.value

    def part(self, name: str, *step):
        """Begins the line of a part, whose value stands for it in what it is a part of."""
        self.step(*step)
        return lambda value: self.part_value(name, value)

    def value(self, value):
        """Ends the line."""
        target, text, shown = self.ended(value)
        if shown is None:
            raise Untraceable(type(value).__name__)
        self.note(target + text + (shown if shown != self.mark + text else ""))
        return value

    def part_value(self, name: str, value):
        """Ends the line of a part; a value that is no plain data has none."""
        target, text, shown = self.ended(value)
        if shown is not None and shown != self.mark + text:
            self.note(target + text + shown)
        if self.begun:
            self.begun[-1][-1][name] = text if shown is None else shown.removeprefix(self.mark)
        return value

    def ended(self, value) -> tuple:
        """Target and expression with values put in, and the value with the mark before it; `None` without a text."""
        target, text, self.mark, self.seen, parts = self.begun.pop()
        known = {**self.seen, **parts}
        shown = self.show(bool(value) if self.mark == ": " else value) if self.mark else ""
        return self.put_in(target, known), self.put_in(text, known), None if shown is None else self.mark + shown

    def sum(self, values, *start):
        """The built-in, with a line of its additions."""
        values = list(values)
        if len(values) > 1 and not start and all(type(value) is int for value in values):
            total, additions = values[0], []
            for value in values[1:]:
                additions.append(f"{total} + {f'({value})' if value < 0 else value} = {total + value}")
                total += value
            self.note(", ".join(additions))
        return sum(values, *start)

    def item(self, target: str, value) -> None:
        """A line for what a loop takes next."""
        shown = self.show(value)
        if shown is None:
            raise Untraceable(type(value).__name__)
        self.note(f"{target} = {shown}")

    def changed(self, told: tuple, names: dict) -> None:
        """Adds to the last line what the statement changed beside the variables that are `told` already."""
        shown = {name: self.show(value) for name, value in names.items() if name not in told}
        new = [f"; {name} = {text}" for name, text in shown.items() if text and text != self.seen.get(name)]
        self.lines[-1] += "".join(new)
        self.spend(0, sum(map(len, new)))

    def end(self, returned) -> None:
        """A call that runs off its end returns `None`."""
        if not self.lines or not self.lines[-1].startswith("return "):
            self.note(f"return {self.show(returned)}")

    def note(self, line: str) -> None:
        self.lines.append(line)
        self.spend(1, len(line))

    def spend(self, lines: int, characters: int) -> None:
        self.left_lines -= lines
        self.left_characters -= characters
        if min(self.left_lines, self.left_characters) < 0:
            raise Untraceable("too long")

    def put_in(self, parts: tuple, known: dict) -> str:
        """Text with the values of its names; a variable without one that can be shown keeps its name."""
        texts = list(parts)
        for place in range(1, len(parts), 2):
            before, after = texts[place - 1], parts[place + 1]
            shown = known.get(parts[place])
            if shown is None:
                continue
            negative = shown.startswith("-") and (before.endswith("-") or after.startswith(" **"))
            number = shown[0] in "-0123456789" and after.startswith(".")
            texts[place] = f"({shown})" if negative or number else shown
        return "".join(texts)

    def show(self, value) -> "str | None":
        """The text of plain data, dictionaries in their order and sets in that of their texts; else `None`."""
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            text = repr(value)
        elif isinstance(value, dict):
            items = [(self.show(key), self.show(item)) for key, item in value.items()]
            text = None if None in [each for item in items for each in item] else ", ".join(map(": ".join, items))
            text = None if text is None else "{" + text + "}"
        elif type(value) in (list, tuple, set, frozenset) or type(value).__name__ == "deque":
            items = [self.show(item) for item in value]
            text = None if None in items else self.bracket(value, items)
        else:
            return None
        if text is not None and len(text) > self.longest:
            raise Untraceable("a value is too long")
        return text

    def bracket(self, value, items: list) -> str:
        if type(value) is tuple:
            return "(" + ", ".join(items) + (",)" if len(items) == 1 else ")")
        if not isinstance(value, (set, frozenset)):
            return "[" + ", ".join(items) + "]"
        braced = "{" + ", ".join(sorted(items)) + "}"
        return "set()" if not items else braced if type(value) is set else f"frozenset({braced})"
