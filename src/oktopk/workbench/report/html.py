"""The page: one file that needs no other, without scripts, in light and dark, on a phone and on paper."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from oktopk.workbench.console.tables import byte_count
from oktopk.workbench.report.run import Run, Step
from oktopk.workbench.report.state import ending, remarks
from oktopk.workbench.report.style import STYLE
from oktopk.workbench.report.summary import Number, final_numbers, phases_of, share, stage_numbers, thousands
from oktopk.workbench.report.values import clean

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MOST_ROWS = 300


@dataclass(frozen=True)
class Shown:
    """A picture's place on the page: `svg` where there is one, else only the words."""

    name: str
    title: str
    words: str
    svg: str | None


def page(runs: Sequence[tuple[Run, Sequence[Shown]]], compared: Sequence[Shown]) -> str:
    """The whole text, of ASCII letters only: it reads the same whatever a server or an editor takes it for."""
    title = f"oktopk report: {', '.join(run.name for run, _ in runs)}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
    ]
    if len(runs) > 1:
        parts += ["<section><h2>Side by side</h2>", _side_by_side([run for run, _ in runs]), _gallery(compared)]
        parts.append("</section>")
    parts += [_section(run, shown) for run, shown in runs]
    parts.append("</main></body></html>\n")
    return "\n".join(parts).encode("ascii", "xmlcharrefreplace").decode()


def _section(run: Run, shown: Sequence[Shown]) -> str:
    end = ending(run)
    notes = "".join(f"<li>{escape(each)}</li>" for each in remarks(run))
    return "\n".join(
        [
            f'<section data-run="{escape(run.name)}"><h2>{escape(run.name)}</h2>',
            f'<p class="ending" role="status">{escape(end)}</p>' if end else "",
            f'<ul class="remarks">{notes}</ul>' if notes else "",
            _facts(run),
            _auto(run),
            "<h3>Final figures</h3>",
            '<div class="tables">',
            _table("Final figures", ("", ""), ([each.label, each] for each in final_numbers(run))),
            _table(
                "Milliseconds of a step by stage",
                ("milliseconds of a step", *phases_of(run)),
                ([label, *numbers] for label, numbers in stage_numbers(run)),
            ),
            "</div><h3>Pictures</h3>",
            _gallery(shown),
            _step_table(run),
            "</section>",
        ]
    )


# --- what the run was


def _facts(run: Run) -> str:
    planned, facts = run.facts.whole("num_steps"), run.facts
    done = run.steps[-1].step + 1 if run.steps else 0
    dense = facts.whole("dense_steps")
    numbers: list[tuple[str, str | Number]] = [
        ("folder", clean(str(run.folder))),
        ("task", facts.text("task") or run.config.text("task") or "n/a"),
        ("started", (facts.text("started") or "n/a").replace("T", " ")),
        ("status", facts.text("status") or "n/a"),
        ("parameters", Number("num_parameters", "", run.num_parameters, thousands)),
        ("workers", Number("workers", "", run.workers, thousands)),
        ("reducer", run.reducer or "n/a"),
        ("density", Number("density", "", run.density)),
        ("steps planned", Number("num_steps", "", planned, thousands)),
        ("of which dense", Number("dense_steps", "", dense, thousands)),
        ("steps done", Number("steps_done", "", done, thousands)),
    ]
    items = "".join(f"<div><dt>{escape(label)}</dt>{_value('dd', value)}</div>" for label, value in numbers)
    return f'<dl class="facts">{items}</dl>'


def _auto(run: Run) -> str:
    """What the reducer `auto` found out and decided."""
    auto = run.facts.object("auto")
    if not auto:
        return ""
    lines = [clean(str(line)) for line in auto.items("answer")]
    text = "<br>".join(escape(line) for line in lines)
    rechecks = "".join(
        f"<li>step {escape(str(each.whole('step')))}: {escape(each.text('answer') or 'n/a')}</li>"
        for each in auto.objects("rechecks")
    )
    again = f"<p>Asked again:</p><ul>{rechecks}</ul>" if rechecks else ""
    return f'<div class="auto"><h3>What auto chose</h3><p>{text}</p>{again}</div>'


# --- tables


def _value(tag: str, value: str | Number) -> str:
    """A cell; a number in it has its name and its full precision beside it, for programs."""
    if isinstance(value, str):
        return f"<{tag}>{escape(value)}</{tag}>"
    exact = json.dumps(value.value, allow_nan=False)
    data = f'data-key="{escape(value.key)}" data-value="{escape(exact)}"'
    return f'<{tag} class="number" {data}>{escape(value.shown)}</{tag}>'


def _table(label: str, head: Sequence[str], rows: Iterable[Sequence[str | Number]]) -> str:
    """Rows whose first cell is their name; too wide for a phone it scrolls within its own box."""
    titles = "".join(f'<th scope="col">{escape(each)}</th>' for each in head) if any(head) else ""
    body = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th>{"".join(_value("td", each) for each in cells)}</tr>'
        for name, *cells in rows
    )
    top = f"<thead><tr>{titles}</tr></thead>" if titles else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table>{top}<tbody>{body}</tbody></table></div>"
    )


def _side_by_side(runs: Sequence[Run]) -> str:
    """A row for every number that any of them has."""
    by_run = [{each.key: each for each in final_numbers(run)} for run in runs]
    order: list[str] = []
    for numbers in by_run:  # what only one run has comes after what stands before it there
        place = 0
        for key in numbers:
            if key not in order:
                order.insert(place, key)
            place = order.index(key) + 1
    labels = {key: each.label for numbers in by_run for key, each in numbers.items()}
    nothing = {key: Number(key, label, None) for key, label in labels.items()}
    rows = ([labels[key], *(numbers.get(key, nothing[key]) for numbers in by_run)] for key in order)
    return _table("Final figures of all runs", ("", *(run.name for run in runs)), rows)


def _step_table(run: Run) -> str:
    if not run.steps:
        return ""
    steps = thinned(run.steps)
    head = ("step", "phase", "loss", "sparsity", "sent")
    said = "all" if len(steps) == len(run.steps) else f"{len(steps)} of {len(run.steps):,}, evenly chosen"
    rows = (
        [
            str(step.step),
            f"{step.phase}, skipped" if step.skipped else step.phase,
            Number(f"step_{step.step}_loss", "", step.loss),
            Number(f"step_{step.step}_sparsity", "", step.sparsity, share),
            Number(f"step_{step.step}_bytes_sent", "", step.bytes_sent, byte_count),
        ]
        for step in steps
    )
    return f"<details><summary>Steps ({said})</summary>{_table('Steps', head, rows)}</details>"


def thinned(steps: Sequence[Step], most: int = _MOST_ROWS) -> list[Step]:
    """Evenly, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place)] for place in np.linspace(0, len(steps) - 1, most)]


# --- pictures


def _gallery(shown: Sequence[Shown]) -> str:
    figures = "".join(
        f'<figure data-figure="{escape(each.name)}">{each.svg}<figcaption>{escape(each.words)}</figcaption></figure>'
        for each in shown
        if each.svg
    )
    absent = "".join(
        f'<li data-absent="{escape(each.name)}">{escape(each.title)}: {escape(each.words)}</li>'
        for each in shown
        if not each.svg
    )
    left_out = f'<ul class="absent">{absent}</ul>' if absent else ""
    return f'<div class="gallery">{figures}</div>{left_out}'
