"""The figures of docs/results/updates.md are those of the files beside it."""

from __future__ import annotations

import json
import re
from statistics import mean, stdev
from typing import Any

import pytest

from tests.worlds import ROOT

RESULTS = ROOT / "docs" / "results"
PAGE = (RESULTS / "updates.md").read_text()
GPT: list[dict[str, Any]] = json.loads((RESULTS / "updates" / "gpt.json").read_text())["runs"]


def section(begins: str) -> str:
    """From the heading that begins so to the next one."""
    start = PAGE.index(begins)
    return PAGE[start : PAGE.find("\n## ", start + 1)]


def rows(text: str, columns: int) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if len(cells) == columns and not cells[0].startswith("-")]


def final(run: dict[str, Any]) -> float:
    assert run["curve"][-1][0] == run["steps"]
    return run["curve"][-1][1]


def test_the_losses_of_the_gpt_are_those_of_the_runs() -> None:
    runs = {(run["steps"], run["name"]): run for run in GPT}
    found = [cells for cells in rows(section("## A GPT"), 5) if cells[0].isdigit()]
    assert len(found) == 6
    for steps, name, loss, behind, sent in found:
        run = runs[int(steps), name]
        dense = min(final(each) for (of, variant), each in runs.items() if of == int(steps) and "dense" in variant)
        assert loss == f"{final(run):.4f}"
        assert behind == f"{final(run) - dense:+.4f}"
        assert sent == f"{run['bytes_percent']:.1f} %"


def test_what_matters_is_what_the_runs_of_2000_steps_say() -> None:
    runs = {run["name"]: run for run in GPT if run["steps"] == 2000}
    found = [cells for cells in rows(section("## A GPT"), 3) if cells[0] in runs]
    assert {cells[0] for cells in found} == set(runs)
    for name, loss, behind in found:
        assert loss == f"{final(runs[name]):.4f}"
        assert behind == f"{final(runs[name]) - final(runs['dense, lr 0.002']):+.4f}"


def test_the_library_is_as_near_to_the_simulation_as_the_page_says() -> None:
    of = {run["how"]: dict(run["curve"]) for run in GPT if run["name"] == "update 0.01, fp32"}
    found = [cells for cells in rows(section("### The library"), 3) if cells[0].isdigit()]
    assert len(found) == len(of["this library"]) == 3
    for steps, simulated, library in found:
        assert float(simulated) == of["simulated"][int(steps)]
        assert float(library) == of["this library"][int(steps)]
        assert abs(float(simulated) - float(library)) < 0.01


@pytest.mark.parametrize(
    ("name", "heading", "digits"),
    [("adamw", "## A small BERT on generated", 1), ("bert", "## A small BERT on Wiki", 0)],
)
def test_the_studies_say_what_their_files_say(name: str, heading: str, digits: int) -> None:
    study = json.loads((RESULTS / "updates" / f"{name}-study.json").read_text())
    assert {run["status"] for run in study["runs"]} == {"finished"}
    variants = dict.fromkeys(run["variant"] for run in study["runs"])
    text = section(heading)
    dense = mean(run["bytes_sent"] for run in study["runs"] if run["variant"] == "dense")
    for variant in variants:
        runs = [run for run in study["runs"] if run["variant"] == variant]
        values = [run["final"] for run in runs]
        figure = f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"
        count = f" {len(runs)} |" if name == "bert" else ""
        share = 100 * mean(run["bytes_sent"] for run in runs) / dense
        assert f"| {variant} | {figure} |{count} {share:.1f} % |" in text
    assert len(re.findall(r"\| (dense|oktopk|update)", text)) == len(variants)


def test_the_readme_says_the_same() -> None:
    readme = (ROOT / "README.md").read_text()
    runs = {(run["steps"], run["name"]): run for run in GPT}
    for steps in (4000, 8000):
        dense, sparse = runs[steps, "dense, lr 0.002"], runs[steps, "update 0.01"]
        line = f"| {final(dense):.3f} | - | **{final(sparse) + 1e-9:.3f}** | {sparse['bytes_percent']:.1f} % |"
        assert line in readme
    study = json.loads((RESULTS / "updates" / "adamw-study.json").read_text())["runs"]
    cells = []
    for variant in ("dense", "oktopk 0.01, 140 dense steps", "update 0.01, 140 dense steps"):
        values = [run["final"] for run in study if run["variant"] == variant]
        cells.append(f"{mean(values):.1f} ± {stdev(values):.1f}")
    assert f"| {cells[0]} | {cells[1]} | **{cells[2]}** | 6.9 % |" in readme
