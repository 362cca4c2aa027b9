"""The page of a report: one self-contained `report.html` that reads on a laptop and on a phone, without network.

Whatever a model wrote is escaped: a task must not become a script in somebody's browser.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trl_populora.files import written_whole
from trl_populora.report.load import Run, load_run, load_samples
from trl_populora.report.plots import Plot, draw_plots


# Characters of a completion that are shown, and rows of the table of births before it folds.
_SHOWN, _ROWS = 1500, 16

_STYLE = """
:root { color-scheme: light; --line: #d8d8d8; --soft: #f5f5f3; --teacher: #D55E00; --student: #0072B2; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; max-width: 1160px;
       padding: 1rem clamp(.8rem, 3vw, 2rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .6rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 0; padding: 0; list-style: none; }
.facts b { font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.2rem; }
figure { margin: 0; padding: .8rem; border: 1px solid var(--line); border-radius: 8px; }
figure h3 { margin: 0 0 .4rem; font-size: 1rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption, .note { color: #555; font-size: .88rem; margin-top: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
.teacher { color: var(--teacher); font-weight: 600; } .student { color: var(--student); font-weight: 600; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { background: var(--soft); border-radius: 6px; padding: .6rem; font-size: .82rem; line-height: 1.4;
      margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.tag { border-radius: 4px; padding: 0 .4rem; font-size: .8rem; background: var(--soft); white-space: nowrap; }
"""


def write_report(run: str | Path, directory: str | Path | None = None, name: str | None = None) -> Path:
    """
    Writes `report.html`, one self-contained page, and its pictures as `plots/*.png`.

    Args:
        run (`str` or `Path`): The run's `output_dir`, also while it is going on, or a downloaded population.
        directory (`str` or `Path`, *optional*): Where they go, the run itself by default.
        name (`str`, *optional*): The page's title, the name of the run's directory by default.

    Returns:
        `Path`: The page.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    records = load_run(run, name)
    target = Path(run if directory is None else directory)
    drawn = draw_plots(records, target / "plots")
    with written_whole(target / "report.html") as unfinished:
        unfinished.write_text(page(records, drawn, load_samples(run)), encoding="utf-8")
    return target / "report.html"


def page(run: Run, plots: Sequence[tuple[Plot, Path]], samples: Sequence[tuple[dict, list[dict]]]) -> str:
    """
    Builds the page.

    Args:
        run ([`Run`]): The run's records.
        plots (`list[tuple[Plot, Path]]`): Pictures that were drawn.
        samples (`list[tuple[dict, list[dict]]]`): Proposals with the attempts at them.
    """
    figures = "\n".join(_figure(plot, path) for plot, path in plots)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name)}: PopuLoRA report</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(run.name)}</h1>
{_facts(run)}
<h2>Members</h2>
{_members(run)}
<h2>The run in pictures</h2>
<p class="note">Dotted vertical lines mark evolution events. One population step is one optimizer step.</p>
<div class="plots">
{figures}
</div>
<h2>Births</h2>
{_births(run)}
<h2>Sample tasks with attempts</h2>
{_samples(samples)}
</body>
</html>
"""


def _facts(run: Run) -> str:
    last, population = run.latest, run.population
    planned = population.get("settings", {}).get("max_steps")
    done = f"{last['step']} of {planned}" if planned else str(last["step"])
    state = " (in progress or stopped)" if planned and last["step"] < planned else ""
    facts = {
        "steps": done + state,
        "base model": population.get("base_model", "-"),
        "task kinds": ", ".join(population.get("task_kinds", [])) or "-",
        "teachers": len(run.members("teacher")),
        "students": len(run.members("student")),
        "births": len(run.lineage),
        "tasks in the archive": _number(last.get("archive/size"), ".0f"),
        "tokens": _number(last.get("num_tokens"), ",.0f"),
    }
    items = "".join(f"<li>{escape(name)}: <b>{escape(str(value))}</b></li>" for name, value in facts.items())
    return f'<ul class="facts">{items}</ul>'


def _members(run: Run) -> str:
    last = run.latest
    known = {member["name"]: member for member in run.population.get("members", [])}
    rows = []
    for role in ("teacher", "student"):
        for name in run.members(role):
            mu, sigma = last.get(f"member/{name}/mu"), last.get(f"member/{name}/sigma")
            low = mu - 3 * sigma if mu is not None and sigma is not None else None
            born = max((e["step"] for e in run.lineage if e["child"].startswith(f"{name}@")), default=0)
            cells = [_number(mu, ".2f"), _number(sigma, ".2f"), _number(low, ".2f"), str(born)]
            cells += [escape(str(known.get(name, {}).get(key, "-"))) for key in ("age", "operator")]
            parents = escape(", ".join(known.get(name, {}).get("parents", []))) or "-"
            rows.append(((role == "student", -(mu or 0.0)), name, role, [*cells, parents]))
    header = ("member", "mu", "sigma", "mu - 3 sigma", "born at step", "matches", "made by", "parents")
    body = [f'<td class="{role}">{escape(name)}</td>' + _cells(cells) for _, name, role, cells in sorted(rows)]
    return _table(header, body)


def _births(run: Run) -> str:
    if not run.lineage:
        return '<p class="note">Nobody has been replaced yet.</p>'
    header = ("step", "child", "in place of", "its mu", "parents", "operator", "cosine to parents")
    body = []
    for event in run.lineage:
        replaced = event["replaced"]
        cells = [
            escape(event["child"]),
            escape(replaced["member"]),
            _number(replaced["mu"], ".2f"),
            escape(", ".join(parent["member"] for parent in event["parents"])),
            escape(event["operator"]),
            ", ".join(_number(value, ".2f") for value in event.get("cosine", [])),
        ]
        body.append(f"<td>{event['step']}</td>" + _cells(cells))
    table = _table(header, body)
    return table if len(body) <= _ROWS else f"<details><summary>all {len(body)} births</summary>{table}</details>"


def _table(header: Sequence[str], body: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    rows = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _figure(plot: Plot, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    title, caption = escape(plot.title), escape(plot.caption)
    image = f'<img alt="{title}" src="data:image/png;base64,{data}">'
    return f"<figure><h3>{title}</h3>{image}<figcaption>{caption}</figcaption></figure>"


def _samples(samples: Sequence[tuple[dict, list[dict]]]) -> str:
    if not samples:
        return '<p class="note">This run kept no rollouts (<code>save_rollouts</code>).</p>'
    return "\n".join(_sample(proposal, attempts) for proposal, attempts in samples)


def _sample(proposal: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> str:
    if proposal["valid"]:
        verdict = f"solved by {sum(a['correct'] for a in attempts)} of {len(attempts)} attempts"
    else:
        verdict = f"rejected: {proposal['reject_reason'].replace('_', ' ')}"
    title = f"step {proposal['step']} · {proposal['member']} · {proposal['kind']} · {verdict}"
    parts = [f"<p>Proposal, reward {proposal['reward']:+.2f}:</p>{_text(proposal['completion'])}"]
    if attempts:
        parts.append(f"<p>What {escape(attempts[0]['member'])} was asked:</p>{_text(attempts[0]['prompt'])}")
    for attempt in attempts:
        mark = "right" if attempt["correct"] else "wrong" if attempt["well_formed"] else "malformed"
        parts.append(
            f'<p><span class="tag">{mark}, reward {attempt["reward"]:+.2f}</span></p>' + _text(attempt["completion"])
        )
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def _text(text: str) -> str:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} [... {len(text) - _SHOWN} more characters]"
    return f"<pre>{escape(shown) or '(nothing)'}</pre>"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
