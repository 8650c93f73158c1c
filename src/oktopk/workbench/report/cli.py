"""`oktopk report RUN [RUN ...] [--out DIR]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oktopk.workbench.console.words import LineParser
from oktopk.workbench.report.load import is_run
from oktopk.workbench.report.write import write_files


def main(arguments: Sequence[str]) -> int:
    """The exit code; UsageError for what cannot be."""
    parser = LineParser(prog="oktopk report", description="One page, and pictures, of one or several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder that `oktopk train` wrote, such as runs/demo")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: into the run; of several: beside them)")
    given = parser.parse_args(list(arguments))
    folders = [Path(text) for text in given.runs]
    earlier = [folder for folder in folders if len(folders) > 1 and _is_report(folder)]
    for folder in earlier:
        print(f"{folder}: left out, it is an earlier report and no run")
    chosen = [folder for folder in folders if folder not in earlier]
    page, *pictures = write_files(chosen or folders, Path(given.out) if given.out else None)
    print(page)
    if pictures:
        print(f"{pictures[0].parent}: {len(pictures)} pictures")
    return 0


def _is_report(folder: Path) -> bool:
    """As `runs/*` may name one."""
    return (folder / "report.html").is_file() and not is_run(folder)
