"""Writes the page of a report: one self-contained `report.html` that works on a laptop and a phone, without network.

The page inserts text only after `escape`: models write part of it, and a task must not become a script in somebody's
browser. The functions `_write_*` return HTML: a section, or a part of one.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trl_populora.files import write_whole
from trl_populora.report.load import Answers, Run, Sample, load_answers, load_run, load_samples, name_reject
from trl_populora.report.plots import Plot, draw_plots
from trl_populora.report.table import (
    FLAT,
    Change,
    compare_evaluations,
    compare_fifths,
    find_mean,
    format_duration,
    format_percent,
    format_value,
    list_members,
    take_fifths,
)
from trl_populora.report.verdict import Verdict, judge


# Most characters of a prompt or completion on the page, and most rows of the table of births before it is folded.
_SHOWN, _ROWS = 1500, 16
_NO_ROLLOUTS = '<p class="note">This run kept no rollouts (<code>save_rollouts</code>).</p>'

_STYLE = """
:root { color-scheme: light; --line: #d8d8d8; --soft: #f5f5f3; --quiet: #555; --teacher: #B34700; --student: #0072B2; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; max-width: 1160px;
       padding: 1rem clamp(.8rem, 3vw, 2rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .6rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.verdict { border-left: 6px solid #888; background: var(--soft); padding: .5rem .8rem; margin: .6rem 0; }
.verdict.learning { border-color: #00734F; } .verdict.broken { border-color: #B00020; }
.verdict.narrowing { border-color: #B34700; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 0; padding: 0; list-style: none; }
.facts b { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.2rem 2rem; }
.columns > * { min-width: 0; }
figure { margin: 0; padding: .8rem; border: 1px solid var(--line); border-radius: 8px; }
figure h3 { margin: 0 0 .4rem; font-size: 1rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption, .note { color: var(--quiet); font-size: .88rem; margin: .4rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr.clear td { font-weight: 700; }
.teacher { color: var(--teacher); font-weight: 600; } .student { color: var(--student); font-weight: 600; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { background: var(--soft); border-radius: 6px; padding: .6rem; font-size: .82rem; line-height: 1.4;
      margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.tag { border-radius: 4px; padding: 0 .4rem; font-size: .8rem; background: var(--soft); white-space: nowrap; }
.settings td, .settings th { text-align: left; overflow-wrap: anywhere; }
@media (max-width: 640px) {  /* a row of many cells becomes a card, its cells named by their column */
  .cards, .cards tbody { display: block; }
  .cards thead { display: none; }
  .cards tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.2rem; padding: .4rem 0;
              border-bottom: 1px solid var(--line); }
  .cards td { display: flex; justify-content: space-between; gap: .6rem; border: 0; padding: .1rem 0;
              overflow-wrap: anywhere; }
  .cards td::before { content: attr(data-name); color: var(--quiet); white-space: nowrap; }
  .cards td:first-child, .cards td.wide { grid-column: 1 / -1; }
  .cards td:first-child::before { content: none; }
}
"""


def write_report(run: str | Path, directory: str | Path | None = None, name: str | None = None) -> Path:
    """
    Writes `report.html`, one self-contained page, and its pictures as `plots/*.png`.

    Args:
        run: The run's `output_dir`, or the directory of a downloaded population. The run may still be training.
        directory: Where the files go; by default the run's directory.
        name: Title of the page; by default the name of the run's directory.

    Returns:
        `Path`: The page.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    records = load_run(run, name)
    samples = load_shown(run, records)
    target = Path(run if directory is None else directory)
    drawn = draw_plots(records, target / "plots")
    way = os.path.relpath(run, target)
    with write_whole(target / "report.html") as unfinished:
        unfinished.write_text(build_page(records, drawn, samples, way), encoding="utf-8")
    return target / "report.html"


def load_shown(run: str | Path, records: Run) -> list[Sample] | list[Answers]:
    """Loads what the page shows of rollouts: tasks with attempts, or in a dataset run prompts with answers."""
    return load_samples(run) if records.game else load_answers(run)


def build_page(run: Run, plots: Sequence[tuple[Plot, Path]], samples: Sequence[Any], way: str | None = ".") -> str:
    """
    Builds the page as HTML text.

    Args:
        run: Records of the run.
        plots: Pictures and their files. The page holds the pictures themselves.
        samples: As [`load_shown`] loads them.
        way: Relative path from the page to the run's directory, for links to rollouts; `None` for a page without
            links.
    """
    figures = "\n".join(_write_figure(plot, path) for plot, path in plots)
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
{_write_verdict(judge(run))}
{_write_facts(run)}
<h2>What changed</h2>
{_write_changes(run)}
<h2>Members</h2>
{_write_members(run)}
<h2>The run in pictures</h2>
<p class="note">{f"Dotted vertical lines mark {run.marked}. " if run.game or run.lineage else ""}Steps are \
counted as optimizer steps.</p>
<div class="columns">
{figures}
</div>
{_write_end(run, samples, way)}
<h2>Settings</h2>
{_write_settings(run)}
</body>
</html>
"""


def _write_end(run: Run, samples: Sequence[Any], way: str | None) -> str:
    """Writes the sections with births and with samples. A dataset run without evolution has no births."""
    joined = any(event["operator"] == "join" for event in run.lineage)
    births = f"<h2>{'Births, and members that joined' if joined else 'Births'}</h2>\n{_write_births(run)}\n"
    if run.game:
        return f"{births}<h2>Sample tasks with attempts</h2>\n{_write_samples(samples, way)}"
    evolves = any(event["child"] for event in run.lineage) or run.population.get("settings", {}).get("evolve_every")
    shown = "\n".join(map(_write_answers, samples)) or _NO_ROLLOUTS
    return f"{births if evolves else ''}<h2>Sample prompts with answers</h2>\n{shown}"


def _write_answers(answers: Answers) -> str:
    """Writes a prompt of a dataset run, and below it each member's answer with its reward."""
    prompt = answers[0]["prompt"]
    parts = [_write_text(prompt)]
    for row in answers:
        reward = f"{row['reward']:+.2f}" if row["reward"] == row["reward"] else "none"
        tag = f'<span class="tag">{escape(row["member"])}, reward {reward}, row {row["row"]}</span>'
        parts.append(f"<p>{tag}</p>{_write_text(row['completion'])}")
    first = answers[0]
    title = f"step {first['step']} · {' '.join(prompt.split())[:80]}"
    return _fold(f"{Path(first['file']).stem}-{first['row']}", title, "".join(parts))


def _write_verdict(verdict: Verdict) -> str:
    style = verdict.word.split()[0]
    rest = " ".join(filter(None, (verdict.why, verdict.remark)))
    return f'<p class="verdict {style}"><b>{verdict.word.capitalize()}.</b> {escape(rest)}</p>'


def _write_facts(run: Run) -> str:
    """Writes the list of facts at the top, such as steps, base, tokens, duration and versions."""
    last, population = run.latest, run.population
    done = f"{run.step} of {run.planned}" if run.planned else str(run.step)
    # A run that trains and one that was killed leave the same files, so the page cannot tell which it is.
    state = " (in progress or stopped)" if run.planned and not run.finished else ""
    settings = population.get("settings", {})
    steps, evaluations = run.seconds
    told = f", {format_duration(evaluations)} of evaluations" if evaluations else ""
    facts = {
        "steps": done + state,
        "base model": population.get("base_model", "-"),
        **(_list_game_facts(run) if run.game else _list_prompt_facts(run)),
        **_list_step_facts(run),
        **_list_chosen_facts(settings, run.game),
        "tokens": _format_number(last.get("num_tokens"), ",.0f"),
        "seed": settings.get("seed", "-"),
        "duration": f"{format_duration(steps)} of steps" + told,
        "versions": ", ".join(f"{name} {number}" for name, number in population.get("versions", {}).items()) or "-",
    }
    if settings.get("single_agent"):
        facts["single agent"] = "one adapter plays both roles"
    if settings.get("pool_every"):
        pooled = {"both": "teachers and students"}.get(settings["pool"], settings["pool"])
        facts["pooled"] = f"{pooled}, every {settings['pool_every']} steps"
    items = "".join(f"<li>{escape(name)}: <b>{escape(str(value))}</b></li>" for name, value in facts.items())
    return f'<ul class="facts">{items}</ul>'


def _list_step_facts(run: Run) -> dict[str, str]:
    """Lists what a step of the last fifth was like, over all members."""
    late = find_mean(run.history[-max(1, len(run.history) // 5) :])
    length, cut = late("completions/mean_length"), late("completions/clipped_ratio")
    told = None if length is None else f"{length:.0f} tokens" + ("" if cut is None else f", {format_percent(cut)} cut")
    facts = {
        "a step at the end": format_value(late("step_time"), "seconds"),
        "a completion at the end": told or "-",
        "groups with equal rewards at the end": format_value(late(FLAT), "share"),
    }
    return {name: value for name, value in facts.items() if value != "-"}


def _list_chosen_facts(settings: Mapping[str, Any], game: bool) -> dict[str, Any]:
    """Lists the settings on which a run's success hangs most: rates, and in the game pay and prompts."""
    of_teachers = settings.get("teacher_learning_rate") if game else None
    keys = {"learning_rate": "learning rate", "beta": "beta"}
    if game:
        keys |= {"teacher_reward": "teachers' pay", "student_reward": "students' pay", "prompt_style": "prompts"}
    facts = {name: settings[key] for key, name in keys.items() if settings.get(key)}
    if of_teachers is not None:
        facts["learning rate"] = f"{settings.get('learning_rate', '-')}, teachers {of_teachers}"
    return facts


def _list_game_facts(run: Run) -> dict[str, Any]:
    return {
        "task kinds": ", ".join(run.population.get("task_kinds", [])) or "-",
        "teachers": len(run.members("teacher")),
        "students": len(run.members("student")),
        "births": sum(event["child"] is not None for event in run.lineage),
        "tasks in the archive": _format_number(run.latest.get("archive/size"), ".0f"),
    }


def _list_prompt_facts(run: Run) -> dict[str, Any]:
    prompts = run.population.get("settings", {}).get("member_prompts")
    told = {"shared": "the same for all members", "own": "each member has its own"}
    facts = {"members": len(run.members("student")), "prompts": told.get(str(prompts), "-")}
    return (
        facts
        | {"reward functions": ", ".join(run.functions) or "-"}
        | ({"births": births} if (births := sum(event["child"] is not None for event in run.lineage)) else {})
    )


def _write_changes(run: Run) -> str:
    """
    Writes the section "What changed": sentences, then tables.

    The first sentence compares the members' mean on `eval_dataset` in the first and the last evaluation. Each further
    sentence has one clear change between the first and the last fifth of the steps. The last one is about the rest.
    """
    early, late = take_fifths(run)
    if not early:
        return (
            '<p class="note">There is one step so far. From the second step on, early steps are compared with late '
            "ones.</p>"
        )
    played, ((start, end), measured) = compare_fifths(run), compare_evaluations(run)
    clear = [change for change in played if change.clear]
    told = [change.told for change in (*measured[:1], *clear) if change.difference]
    rest = f"{'No other' if clear else 'No'} change between the two fifths can be told from chance by this test."
    # The test needs two steps in each fifth.
    if all(change.clear is None for change in played):
        rest = "The run is too short to tell changes from chance. Ten logged steps are enough."
    items = "".join(f"<li>{escape(text[:1].upper() + text[1:])}.</li>" for text in told)
    parts = [_write_change_table(("", _name_span(early, run), _name_span(late, run), "change"), played)]
    if measured:
        header = ("", f"step {start}", f"step {end}", "change", *(("base",) if run.game else ()))
        parts.insert(0, _write_change_table(header, measured))
    note = (
        "First and last fifth of the logged steps; a dash: nothing was there to measure. Bold: a clear change, by "
        "Welch's test at 1 %. The test treats steps as independent. Neighbouring steps are not quite, so even a bold "
        "line may be chance; and with few steps a large change may stay unmarked."
    )
    tables = "".join(f"<div>{table}</div>" for table in parts)
    return f'<ul>{items}<li>{rest}</li></ul><div class="columns">{tables}</div><p class="note">{note}</p>'


def _name_span(entries: list[dict[str, Any]], run: Run) -> str:
    """Names the steps that some logged entries cover. An entry covers all steps since the entry before it."""
    position = [entry["step"] for entry in run.history].index(entries[0]["step"])
    first = run.history[position - 1]["step"] + 1 if position else 1
    last = entries[-1]["step"]
    return f"step {last}" if first == last else f"steps {first}-{last}"


def _write_change_table(header: Sequence[str], rows: Sequence[Change]) -> str:
    body = []
    for row in rows:
        cells = [escape(row.name), format_value(row.first, row.form), format_value(row.last, row.form)]
        cells.append(format_value(row.difference, row.form, sign=True))
        if "base" in header:
            cells.append(format_value(row.base, row.form))
        body.append((cells, "clear" if row.clear else ""))
    return _write_table(header, body, "")


def _write_members(run: Run) -> str:
    """Writes the table of members."""
    # Until `population.json` is written, names and newest figures come from the metrics. The metrics name seats. A
    # seat may be empty, or have another name than the member in it, whose predecessor they tell of. The file may be of
    # an earlier step than the metrics: `load_best_model_at_end` ends with the members of the best checkpoint.
    known = {member.get("seat", member["name"]): member for member in run.population.get("members", [])}
    figures = ("mu", "sigma") if run.game else ("mu", "sigma", "reward")
    members = [
        {"name": seat}
        | (known.get(seat) or {key: run.latest.get(f"member/{seat}/{key}") for key in figures})
        | {"role": role}
        for role in ("teacher", "student")
        for seat in run.members(role)
        if seat in known or not known
    ]
    found = list_members(run.population, members)
    body = [
        ([f'<span class="{role}">{escape(name)}</span>', *map(escape, cells)], "")
        for role, rows in found.roles.items()
        for name, *cells in rows
    ]
    table = _write_table(found.header, body, "cards")
    if known and (step := run.population.get("step", run.step)) != run.step:
        table = f'<p class="note">Members of step {escape(str(step))}.</p>\n{table}'
    if found.left:
        rows = [(list(map(escape, row)), "") for row in found.left]
        table += f"<h2>Members that left</h2>\n{_write_table(found.header, rows, 'cards')}"
    return table


def _write_births(run: Run) -> str:
    """Writes the table of births and joins. Members that left have a table of their own."""
    births = [event for event in run.lineage if event["child"] is not None]
    if not births:
        return '<p class="note">Nobody has been replaced yet.</p>'
    header = ("child", "step", "its mu", "in place of", "whose mu", "parents", "operator", "cosine to parents")
    body = []
    for event in births:
        replaced = event["replaced"] or {"member": "-", "mu": None}  # who joins replaces nobody
        cells = [
            escape(event["child"]),
            str(event["step"]),
            _format_number(event.get("mu"), ".2f"),
            escape(replaced["member"]),
            _format_number(replaced["mu"], ".2f"),
            escape(", ".join(parent["member"] for parent in event["parents"])),
            escape(event["operator"]),
            ", ".join(_format_number(value, ".2f") for value in event.get("cosine", [])),
        ]
        body.append((cells, ""))
    table = _write_table(header, body, "cards")
    return table if len(body) <= _ROWS else _fold("births", f"all {len(body)} births", table)


def _write_settings(run: Run) -> str:
    settings = run.population.get("settings", {})
    if not settings:
        return '<p class="note">This run has not saved its settings.</p>'
    every = settings | {f"lora: {name}": value for name, value in run.population.get("lora", {}).items()}
    rows = [([f"<code>{escape(name)}</code>", escape(str(value))], "") for name, value in every.items()]
    return _fold("settings", f"all {len(rows)} settings", _write_table(("setting", "value"), rows, "settings"))


def _write_table(header: Sequence[str], body: Sequence[tuple[Sequence[str], str]], style: str) -> str:
    """
    Writes a table.

    Args:
        header: Names of the columns.
        body: Rows, each with its cells as HTML and its CSS class.
        style: CSS class of the table. `"cards"` turns each row into a card on a phone.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    rows = "".join(f'<tr class="{row}">{_write_cells(header, cells)}</tr>' for cells, row in body)
    return f'<table class="{style}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _write_cells(header: Sequence[str], cells: Sequence[str]) -> str:
    # On a phone a card has two cells per line. Half a phone is too narrow for these columns.
    wide = {"parents", "operator", "made by", "in place of", "cosine to parents"}
    return "".join(
        f'<td data-name="{escape(name)}"{" class=wide" if name in wide else ""}>{cell}</td>'
        for name, cell in zip(header, cells, strict=True)
    )


def _fold(name: str, title: str, inside: str) -> str:
    return f'<details id="{escape(name)}"><summary>{escape(title)}</summary>{inside}</details>'


def _write_figure(plot: Plot, path: Path) -> str:
    # The picture's bytes go into the page, so that one file is enough to send to somebody.
    data = base64.b64encode(path.read_bytes()).decode()
    title, caption = escape(plot.title), escape(plot.caption)
    image = f'<img alt="{title}" src="data:image/png;base64,{data}">'
    return f"<figure><h3>{title}</h3>{image}<figcaption>{caption}</figcaption></figure>"


def _write_samples(samples: Sequence[Sample], way: str | None) -> str:
    if not samples:
        return _NO_ROLLOUTS
    whole = "<code>pandas.read_parquet(file).iloc[row]</code>"
    note = f'<p class="note">Long texts are cut. Each sample names its file and rows: {whole} has everything.</p>'
    return note + "\n".join(_write_sample(proposal, attempts, way) for proposal, attempts in samples)


def _write_sample(proposal: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]], way: str | None) -> str:
    if proposal["valid"]:
        verdict = f"solved by {sum(a['correct'] for a in attempts)} of {len(attempts)} attempts"
    else:
        verdict = name_reject(proposal)
    title = f"step {proposal['step']} · {proposal['member']} · {proposal['kind']} · {verdict}"
    parts = [_write_source(proposal, way)]
    # A task that was given has no proposal.
    if proposal["role"] == "teacher":
        parts.append(f"<p>Proposal, reward {proposal['reward']:+.2f}:</p>{_write_text(proposal['completion'])}")
    if attempts:
        parts.append(f"<p>What {escape(attempts[0]['member'])} was asked:</p>{_write_text(attempts[0]['prompt'])}")
    for attempt in attempts:
        mark = "right" if attempt["correct"] else "wrong" if attempt["well_formed"] else "malformed"
        tag = f'<span class="tag">{mark}, reward {attempt["reward"]:+.2f}, row {attempt["row"]}</span>'
        parts.append(f"<p>{tag}</p>" + _write_text(attempt["completion"]))
    return _fold(f"{Path(proposal['file']).stem}-{proposal['row']}", title, "".join(parts))


def _write_source(proposal: Mapping[str, Any], way: str | None) -> str:
    """Names the file, row and task of a proposal. The file is a link unless `way` is `None`."""
    name = proposal["file"]
    if way is not None:
        name = f'<a href="{quote(name if way == "." else f"{way}/{name}")}">{escape(name)}</a>'
    task = f", task <code>{escape(proposal['task_id'])}</code>" if proposal["task_id"] else ""
    return f'<p class="note">{name}, row {proposal["row"]}{task}</p>'


def _write_text(text: str) -> str:
    """Writes what a model wrote or was asked, escaped and cut to a length that reads well."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} [... {len(text) - _SHOWN} more characters]"
    return f"<pre>{escape(shown) or '(nothing)'}</pre>"


def _format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
