"""The options class of every command, for tests of the pages; None where it has those of another or none."""

from __future__ import annotations

from trl_populora import cli as program
from trl_populora.evaluate.cross_play import CrossPlayArguments
from trl_populora.evaluate.tryout import TryArguments
from trl_populora.hub.export import ExportArguments


OPTIONS = {
    "quickstart": None,
    "train": program.TrainArguments,
    "try": TryArguments,
    "recipes": program.RecipesArguments,
    "report": program.ReportArguments,
    "info": program.InfoArguments,
    "push": program.PushArguments,
    "export": ExportArguments,
    "crossplay": CrossPlayArguments,
    "check-kind": program.CheckKindArguments,
    "sandbox-check": None,
}
