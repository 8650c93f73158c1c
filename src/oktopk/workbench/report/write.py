"""A report's files: the page and its pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oktopk.workbench.console.files import write_text
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.report.html import page
from oktopk.workbench.report.load import load_run
from oktopk.workbench.report.run import Run

_LONGEST_NAME = 60


def write_report(run_folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write report.html and report/*.png into `out` and return the page's path; UsageError for what cannot be.

    Without `out` one run's report lies in its own folder, that of several beside them.
    """
    return write_files(run_folders, out)[0]


def write_files(run_folders: Sequence[Path], out: Path | None = None) -> list[Path]:
    """As `write_report`: all that was written, the page first."""
    folders = list({folder.resolve(): folder for folder in run_folders}.values())
    runs = _distinct([load_run(folder) for folder in folders])
    target = out or _default_folder(folders)
    try:
        return _write(runs, target)
    except OSError as error:
        raise UsageError(f"--out: '{target}': cannot be written to ({error.strerror}); choose another") from error


def _write(runs: Sequence[Run], target: Path) -> list[Path]:
    try:
        from oktopk.workbench.report.render import render  # only here is matplotlib needed
    except ImportError as error:
        package = (error.name or "matplotlib").partition(".")[0]
        reason = f"a report needs {package}, which is not installed"
        raise UsageError(f"{reason}: pip install 'oktopk[train]'") from error
    pictures = target / "report"
    pictures.mkdir(parents=True, exist_ok=True)
    rendered = render(runs)
    report = target / "report.html"
    written = [report]
    for name, content in rendered.pictures.items():
        path = pictures / f"{_plain(name)}.png"
        path.write_bytes(content)
        written.append(path)
    write_text(report, page(rendered.sections, rendered.compared))
    return written


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs of the same name in different folders are named with their folders."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.folder.resolve().parent.name}/{run.name}") if names.count(run.name) > 1 else run
        for run in runs
    ]


def _default_folder(folders: Sequence[Path]) -> Path:
    if len(folders) == 1:
        return folders[0]
    parents = {folder.parent for folder in folders}
    parent = (
        parents.pop()
        if len(parents) == 1
        else Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    )
    names = [folder.resolve().name for folder in folders]
    joined = "-".join(names)
    short = joined if len(joined) <= _LONGEST_NAME else f"{names[0][:_LONGEST_NAME]}-and-{len(names) - 1}-more"
    return parent / f"report-{_plain(short)}"


def _plain(name: str) -> str:
    """As part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", name)
