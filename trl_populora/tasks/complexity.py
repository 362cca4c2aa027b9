"""How demanding programs are, and how much of program space a run has seen (phase 3; paper: curriculum figures).

Standard library `ast` only: radon is dormant, mccabe measures one of the four, complexipy none of them but cognitive
complexity. One walk per program, linear in its size.
"""

from __future__ import annotations


def measure(program: str) -> dict[str, float]:
    return {}
