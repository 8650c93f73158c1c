"""Pictures of runs, drawn: each as a PNG for a file and as an SVG for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oktopk.workbench.report.compare import compare_drawings
from oktopk.workbench.report.draw import Absent, Drawing, look, png, settle, svg
from oktopk.workbench.report.figures import run_drawings
from oktopk.workbench.report.html import Shown
from oktopk.workbench.report.run import Run


@dataclass(frozen=True)
class Rendered:
    sections: list[tuple[Run, list[Shown]]] = field(default_factory=list[tuple[Run, list[Shown]]])
    compared: list[Shown] = field(default_factory=list[Shown])
    pictures: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """PNGs by their names."""

    def add(self, made: Sequence[Drawing | Absent], owner: str = "") -> list[Shown]:
        """Pictures of several runs are told apart by their `owner`."""
        return [self._show(each, owner) for each in made]

    def _show(self, made: Drawing | Absent, owner: str) -> Shown:
        if isinstance(made, Absent):
            return Shown(made.name, made.title, made.why, None)
        settle(made.figure)
        prefix = f"f{len(self.pictures)}-"
        self.pictures[f"{owner}-{made.name}" if owner else made.name] = png(made.figure)
        label = f"{owner}: {made.title}" if owner else made.title
        return Shown(made.name, made.title, made.caption, svg(made.figure, prefix, label))


def render(runs: Sequence[Run]) -> Rendered:
    """All of them; what several have in common first."""
    rendered = Rendered()
    several = len(runs) > 1
    with look():
        if several:
            rendered.compared.extend(rendered.add(compare_drawings(runs)))
        for run in runs:
            rendered.sections.append((run, rendered.add(run_drawings(run), run.name if several else "")))
    return rendered
