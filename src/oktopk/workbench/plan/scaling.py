"""Weak scaling by the cost model: the same work for each worker, more workers, other links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oktopk.workbench.console.tables import Row
from oktopk.workbench.plan.advise import Answer, Question, advise
from oktopk.workbench.plan.model import Link


@dataclass(frozen=True)
class Grid:
    """Where to look: numbers of workers, and links by name and speed."""

    num_ranks: Sequence[int]
    rates: Sequence[tuple[str, Link]]


def scale(question: Question, grid: Grid) -> list[Row]:
    """A row for each link, number of workers and way to exchange; `answer` says what one would be told there."""
    rows: list[Row] = []
    for name, link in grid.rates:
        for num_ranks in grid.num_ranks:
            answer = advise(replace(question, link=link, num_ranks=num_ranks))
            rows += [_row(name, num_ranks, answer, number) for number in range(1 + len(answer.considered))]
    return rows


def _row(link: str, num_ranks: int, answer: Answer, number: int) -> Row:
    choice = (answer.dense, *answer.considered)[number]
    compute = answer.question.compute
    alone_s = compute.forward_s + compute.backward_s
    return {
        "link": link,
        "ranks": num_ranks,
        "reducer": choice.reducer,
        "density": None if choice.reducer == "dense" else choice.density,
        "step_ms": 1e3 * choice.step_s,
        "allreduce_ms": 1e3 * choice.allreduce_s,
        "of_no_communication": alone_s / choice.step_s if alone_s and choice.step_s else None,
        "speedup": answer.dense.step_s / choice.step_s if choice.step_s else 1.0,
        "chosen": choice is answer.choice,
    }


def crossover(rows: Sequence[Row]) -> list[str]:
    """For each link, in words: where dense wins, and where it stops winning."""
    lines: list[str] = []
    for link in dict.fromkeys(row["link"] for row in rows):
        chosen = [row for row in rows if row["link"] == link and row["chosen"]]
        dense = [row["ranks"] for row in chosen if row["reducer"] == "dense"]
        sparse = [row["ranks"] for row in chosen if row["reducer"] != "dense"]
        if not dense:
            what = "compress at every number of workers looked at"
        elif not sparse:
            what = "stay dense at every number of workers looked at"
        else:
            what = f"stay dense on {_spans(dense)} workers, compress on {_spans(sparse)}"
        lines.append(f"{link}: {what}")
    return lines


def _spans(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
