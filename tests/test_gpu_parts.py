"""`benchmarks/gpu.py`: which parts run, what is kept of them, and a dry run of each script that it calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gpu  # noqa: E402
import gpu_population  # noqa: E402

from trl_populora.assets import tiny_base_path  # noqa: E402

from .without_extras import without_extras  # noqa: E402


NEEDED = {"7B in 4 bits": ["bitsandbytes"], "tests": ["bitsandbytes"]}
NEEDED |= {
    name: ["vllm"] for name in ("tests on vLLM", "publishing", "7B long", "mixed rows", "overlap", "sweep on vLLM")
}
ONLY_WITH_VLLM = {"logp_difference", "publish_ratio_vs_trl"}
ONLY_ON_A_GPU = {"gpu", "memory_gib", "used_gib", "share_of_peak"}
ONLY_ON_A_GPU |= {f"share_of_peak.{phase}" for phase in ("generate", "solve", "update")}
GPU_PARTS = (*gpu.PARTS, *gpu.parts_on(str(tiny_base_path())))


def group_parts() -> dict[str, list[gpu.Part]]:
    """The parts by what can be run alone: of a step at 7B shape TRL's side needs the rows that ours leaves."""
    groups: dict[str, list[gpu.Part]] = {}
    for part in GPU_PARTS:
        groups.setdefault(part.name.removesuffix(", ours").removesuffix(", TRL"), []).append(part)
    return groups


# Each script is walked once in each way that it has; these are other sizes or models of the same walk.
ALIKE = {"0.5B", "7B short", "7B all", "memory at 7B", "sweep", "your model"}
ALIKE |= {f"your model, {name}" for name in ("vs_trl", "vs_trl on vLLM", "sweep", "sweep on vLLM", "mixed rows")}


def kept(part: str, status: str = "done", dry: bool = False, card: str = "H200", figures: dict | None = None) -> dict:
    """A line of `parts.jsonl`."""
    found = {"a": 1} if figures is None else figures
    return {"part": part, "date": "", "card": card, "dry": dry, "status": status, "seconds": 1.0, "figures": found}


def read_parts(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "parts.jsonl").read_text().splitlines()]


def test_every_part_takes_five_minutes_at_most_and_its_files_are_there():
    for part in GPU_PARTS:
        assert 0 < part.minutes <= gpu.LIMIT == 5
        for command in (part.command, part.small):
            script, *options = command.split()
            files = [f"benchmarks/{script}", *(word for word in options if word.endswith((".yaml", ".py")))]
            assert [file for file in files if not (gpu.ROOT / file).exists()] == []


def test_what_has_no_value_is_not_measured():
    rows = gpu.table([]).splitlines()[2:]
    assert len(rows) == sum(1 + len(part.figures) for part in gpu.PARTS)
    assert all("not measured" in row for row in rows)
    figures = {"used_gib": 60.25, "predicted_gib": 57.5, "seconds": {"total": 90.0}}
    table = gpu.table([kept("0.5B", figures=figures)])
    assert "| | GiB in use at the peak | 60.2 | 57.5 |" in table
    assert "| | update | not measured | not measured |" in table


def test_the_table_has_the_newest_that_was_measured():
    lines = [kept("environment", figures={"gpu": each}) for each in ("A", "B")]
    lines += [kept("environment", status="failed: broken", figures={}), kept("environment", dry=True)]
    assert "| | GPU | B |" in gpu.table(lines)
    assert "failed: broken" in gpu.table(lines[2:3])


def test_parts_without_figures_of_this_card_come_next():
    lines = [kept("tests"), kept("0.5B", card="another"), kept("publishing", status="failed: broken")]
    lines += [kept("environment", dry=True)]
    names = [part.name for part in gpu.PARTS]
    left = [part.name for part in gpu.choose(None, gpu.PARTS, lines, "H200", dry=False)]
    assert left == [name for name in names if name != "tests"]
    left = [part.name for part in gpu.choose(None, gpu.PARTS, lines, "CPU", dry=True)]
    assert left == [name for name in names if name != "environment"]
    named = gpu.choose(["0.5B", "tests"], gpu.PARTS, lines, "H200", dry=False)
    assert [part.name for part in named] == ["0.5B", "tests"]
    with pytest.raises(ValueError, match="There is no part 'test'; there are 'environment', 'tests', "):
        gpu.choose(["test"], gpu.PARTS, lines, "H200", dry=False)


def test_a_share_of_the_peak_is_the_assumed_one_where_the_seconds_are():
    predicted = {"propose and solve": 30.0, "log-probs and update": 20.0}
    phases = {"propose": 10.0, "solve": 20.0, "update": 40.0}
    assert gpu_population.share_of_peak(predicted, phases, vllm=True) == pytest.approx({"solve": 0.4, "update": 0.175})
    assert gpu_population.share_of_peak(predicted, phases, vllm=False) == pytest.approx({"update": 0.175})


@pytest.mark.parametrize("log", ['{"a": 1}\n', 'refleaks.html{"a": 1}\n', '{"b": 2}\n{"a": 1}\nleaked {}\n'])
def test_figures_are_found_among_last_words(log):
    assert gpu.figures_in(log) == {"a": 1}
    assert gpu.figures_in("nothing {here}\n") == {}


@pytest.mark.walk
@pytest.mark.parametrize("group", sorted(group_parts().keys() - ALIKE))
def test_a_dry_run_comes_to_every_figure_that_needs_no_gpu(group, tmp_path, monkeypatch):
    parts, needed = group_parts()[group], NEEDED.get(group, ())
    for name, value in without_extras(but=needed).items():
        monkeypatch.setenv(name, value)
    names = [part.name for part in parts]
    own = ["--model", str(tiny_base_path())] if parts[0] not in gpu.PARTS else []
    monkeypatch.setattr(sys, "argv", ["", "--dry-run", "--parts", *names, "--output", str(tmp_path), *own])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    lines = read_parts(tmp_path)
    assert [(line["part"], line["status"]) for line in lines] == [(name, "done") for name in names]
    assert not ended.value.code
    cannot = ONLY_ON_A_GPU if "vllm" in needed else ONLY_ON_A_GPU | ONLY_WITH_VLLM
    for part, line in zip(parts, lines, strict=True):
        missing = {place for place in part.figures.values() if gpu.value_at(line["figures"], place) is None}
        assert missing == cannot.intersection(part.figures.values())


def test_a_part_that_fails_is_named_and_stops_no_other(tmp_path, monkeypatch, capsys):
    fails = "gpu.py --no-such-option"
    monkeypatch.setattr(gpu, "PARTS", [gpu.Part("fails", 1, fails, fails, {"a": "a"}, {}), gpu.PARTS[0]])
    monkeypatch.setattr(sys, "argv", ["", "--dry-run", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    failed, environment = read_parts(tmp_path)
    assert "unrecognized arguments: --no-such-option" in failed["status"]
    assert (environment["status"], environment["card"]) == ("done", "CPU")
    assert environment["figures"]["sandbox"] in "ABC"
    table = (tmp_path / "table.md").read_text()
    assert "| **environment** | done, a dry run |" in table
    assert "| | sandbox level | not measured |  |" in table, "a dry run measures nothing"
    said = capsys.readouterr().out
    assert "[1/2] fails, about 1 minutes ... failed" in said, "the estimate comes first"

    with pytest.raises(SystemExit):
        gpu.main()
    again = read_parts(tmp_path)
    assert again[:2] == [failed, environment], "lines are kept"
    assert [line["part"] for line in again[2:]] == ["fails"], "what is done is not done again"


def test_as_many_parts_run_as_fit_into_the_minutes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PARTS", [gpu.Part("too long", 5, "", "no.py", {}, {}), gpu.PARTS[0]])
    monkeypatch.setattr(sys, "argv", ["", "--dry-run", "--minutes", "3", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert not ended.value.code
    assert [line["part"] for line in read_parts(tmp_path)] == ["environment"]
    assert "too long, about 5 minutes ... does not fit into the 3.0 that are left" in capsys.readouterr().out


def test_a_part_is_stopped_at_its_limit(tmp_path):
    # A fifth of a second: Python has hardly begun to import torch.
    line = gpu.run(gpu.Part("long", 1, "", "gpu.py --environment", {}, {}), tmp_path, True, 0.003)
    assert (line["status"], line["figures"]) == ("stopped after 0.003 minutes", {})
