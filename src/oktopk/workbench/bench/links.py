"""The same allreduce over links of a chosen speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from oktopk.workbench.bench import allreduce
from oktopk.workbench.bench.options import Options
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.tables import Column, Row, elements, figure
from oktopk.workbench.console.words import LOOPBACK, bits_per_s
from oktopk.workbench.worlds import links as netns
from oktopk.workbench.worlds.world import BenchWorld

FOOTNOTE = f"{allreduce.FOOTNOTE}; raw: one plain TCP stream over the same link"
COLUMNS: tuple[Column, ...] = (
    allreduce.COLUMNS[0],
    ("link", lambda row: row["link"]),
    ("raw Mbit/s", lambda row: figure(row["raw_mbit_per_s"], ".0f")),
    *allreduce.COLUMNS[1:],
)


def run(options: Options) -> list[Row]:
    """Rows as of `allreduce`, with the link's nominal and measured speed; one that says why, where there are none."""

    def measure(world: BenchWorld, link: str, progress: Progress) -> list[Row]:
        where = {"bench": "links", **describe(world, options, link, progress)}
        rows: list[Row] = []
        for n in options.sizes:
            progress.part(f"{link}: P = {world.size}, n = {elements(n)}")
            rows += allreduce.compare(world, options, n, progress, where)
        return rows

    return over_links("links", options, measure)


def over_links(bench: str, options: Options, measure: Callable[[BenchWorld, str, Progress], list[Row]]) -> list[Row]:
    """What `measure` finds in a world of each size on each link; a row that says why, where there are no more links."""
    progress = Progress()
    rows: list[Row] = []
    for link in options.rates:
        for size in options.ranks:
            progress.part(f"{link}: starting {size} workers")
            try:
                with netns.seats(size, link) as seats, BenchWorld(seats, options) as world:
                    rows += measure(world, link, progress)
            except netns.LinksUnavailable as error:
                return [*rows, {"bench": bench, "link": link, "skipped": str(error)}]
    progress.end()
    return rows


def describe(world: BenchWorld, options: Options, link: str, progress: Progress) -> Row:
    """What the rows say about their link."""
    if link == LOOPBACK:
        return {"link": link, "rate_mbit_per_s": None, "burst_bytes": None, "raw_mbit_per_s": None}
    speeds = world.run({"what": "raw_link", "options": asdict(options)}, progress)
    return {
        "link": link,
        "rate_mbit_per_s": bits_per_s(link) / 1e6,
        "burst_bytes": netns.burst_bytes(link),
        "raw_mbit_per_s": next(speed for speed in speeds if speed is not None) / 1e6,
    }
