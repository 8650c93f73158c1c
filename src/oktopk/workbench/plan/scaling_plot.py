"""A picture of weak scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from oktopk.workbench.console.tables import Row

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; markers do so in print
_STYLES = {
    "dense": ("#000000", "o", "-"),
    "oktopk": ("#0072B2", "s", "-"),
    "topkA": ("#E69F00", "^", "--"),
    "topkDSA": ("#009E73", "v", "-."),
    "gtopk": ("#D55E00", "D", ":"),
}
_OTHER = ("#56B4E9", "P", "-.")


def draw(path: Path, rows: Sequence[Row]) -> None:
    """One panel for each link: milliseconds of a step against workers; what would be advised has a ring around it."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    figure = Figure(figsize=(3.6 * len(links), 3.8), layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for axes, link in zip(panels, links, strict=True):
        mine = [row for row in rows if row["link"] == link]
        for reducer in dict.fromkeys((*_STYLES, *(row["reducer"] for row in mine))):
            colour, marker, line = _STYLES.get(reducer, _OTHER)
            points = [row for row in mine if row["reducer"] == reducer]
            if points:
                places, times = [row["ranks"] for row in points], [row["step_ms"] for row in points]
                axes.plot(places, times, color=colour, marker=marker, linestyle=line, markersize=5, label=reducer)
        chosen = [row for row in mine if row["chosen"]]
        ringed = {"linestyle": "none", "marker": "o", "markersize": 12, "markerfacecolor": "none"}
        axes.plot(
            [row["ranks"] for row in chosen],
            [row["step_ms"] for row in chosen],
            markeredgecolor="#777777",
            label="advised",
            **ringed,
        )
        ranks = sorted({row["ranks"] for row in mine})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(number) for number in ranks], fontsize=8)
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.set_title(link, loc="left")
        axes.set_xlabel("workers")
        axes.grid(color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("milliseconds of a step, by the cost model")
    panels[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
