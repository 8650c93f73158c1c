"""A short selection of everything, for two cores and three minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from oktopk.workbench.bench.options import CONTENDERS, Options
from oktopk.workbench.console.tables import Row

Run = Callable[[Options], list[Row]]


def run(options: Options, benchmarks: Mapping[str, Callable[[], Run]]) -> list[Row]:
    """Rows of all of them; `benchmarks` loads each by its name."""
    short = {
        "kernels": replace(options, what="kernels", sizes=(1_000_000,), iterations=5),
        "allreduce": replace(options, what="allreduce", sizes=(1_000_000,), ranks=(2, 4), iterations=7),
        "links": replace(options, what="links", sizes=(1_000_000,), rates=("100mbit", "1gbit"), iterations=5),
        "training": replace(options, what="training", peers=CONTENDERS, tasks=("lstman4",), tiny=True, steps=5),
        "soak": replace(options, what="soak", sizes=(100_000,), steps=200),
    }
    return [row for name, part in short.items() for row in benchmarks[name]()(part)]
