"""What a model would write: the texts that the code kinds' parsers read back."""

from __future__ import annotations

from trl_populora.tasks import Proposal
from trl_populora.tasks.python import prompts


def write_proposal(proposal: Proposal) -> str:
    if proposal.kind == "code_f":
        lines = "\n".join(prompts.write_arguments(text) for text in proposal.inputs)
        return prompts.fence(("inputs", lines), ("message", proposal.message))
    return prompts.fence(prompts.show_program(proposal.program), prompts.show_input(proposal.inputs[0]))


def write_answer(kind: str, answer: str) -> str:
    """`answer` is a canonical text; for code_f a program."""
    blocks = {"code_o": prompts.show_output, "code_i": prompts.show_input, "code_f": prompts.show_program}
    return prompts.fence(blocks[kind](answer))
