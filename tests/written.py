"""What a model would write: the texts that the code kinds' parsers read back."""

from __future__ import annotations

from trl_populora.tasks import Proposal, templates


def write_proposal(proposal: Proposal) -> str:
    if proposal.kind == "code_f":
        lines = "\n".join(templates.arguments(text) for text in proposal.inputs)
        return templates.fence(("inputs", lines), ("message", proposal.message))
    return templates.fence(templates.program_block(proposal.program), templates.input_block(proposal.inputs[0]))


def write_answer(kind: str, answer: str) -> str:
    """`answer` is a canonical text; for code_f a program."""
    blocks = {"code_o": templates.output_block, "code_i": templates.input_block, "code_f": templates.program_block}
    return templates.fence(blocks[kind](answer))
