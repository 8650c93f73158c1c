"""The volume table: what was moved, and what the model makes of it for more ranks, beside the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oktopk.reduce.description import lower_bound
from oktopk.registry import describe
from oktopk.workbench.console.tables import Column, Row, byte_count, figure, table
from oktopk.workbench.simulate.run import MovedRun, RankStep
from oktopk.workbench.simulate.volume import fit_common, volume

MOVED, MODEL = "moved", "model"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Traits:
    """What the model must know of the data: see `volume`."""

    chosen: float
    common: float
    skew: float
    evened: bool


def traits_of(runs: Sequence[MovedRun]) -> Traits:
    """Of one reducer's moved runs on two ranks or more; the largest world says most."""
    largest = max(runs, key=lambda run: run.num_ranks)
    description = describe(largest.reducer)
    chosen = max(1.0, _mean(largest.steady, lambda each: each.stats.local_count))
    common = 0.0
    if description.applies_union:
        unions = {
            run.num_ranks: _mean(
                run.steady, lambda each: chosen * each.stats.global_count / max(1, each.stats.local_count)
            )
            for run in runs
        }
        common = fit_common(unions, largest.n, chosen)
    if description.regions is None:
        return Traits(chosen, common, skew=1.0, evened=False)
    size = largest.num_ranks
    scattered = 2 * chosen * (size - 1) / size
    gathered = [max(0.0, each.elements_sent - scattered) for each in largest.steady]
    average = sum(gathered) / len(gathered)
    skew = max(1.0, max(gathered) / average) if average else 1.0
    usual = volume(largest.reducer, largest.n, largest.k, size, common).messages_sent
    more = _mean(largest.steady, lambda each: each.stats.messages_sent) > usual
    return Traits(chosen, common, skew, evened=more and description.regions == "balanced")


def moved_row(run: MovedRun) -> Row:
    steady = run.steady
    row = _row(
        run.reducer,
        run.num_ranks,
        run.n,
        run.k,
        how=MOVED,
        elements=(_mean(steady, lambda each: each.elements_sent), max(each.elements_sent for each in steady)),
        sent_bytes=(
            _mean(steady, lambda each: each.stats.bytes_sent),
            float(max(each.stats.bytes_sent for each in steady)),
        ),
        messages=(
            _mean(steady, lambda each: each.stats.messages_sent),
            float(max(each.stats.messages_sent for each in steady)),
        ),
        chosen=_mean(steady, lambda each: each.stats.local_count),
        applied=_mean(steady, lambda each: each.stats.global_count),
    )
    return {**row, "max_elements_of_all_steps": max(each.elements_sent for step in run.steps for each in step)}


def model_row(reducer: str, num_ranks: int, n: int, k: int, traits: Traits) -> Row:
    expected = volume(
        reducer,
        n,
        k,
        num_ranks,
        traits.common,
        chosen=traits.chosen,
        skew=traits.skew,
        evened=traits.evened,
    )
    return _row(
        reducer,
        num_ranks,
        n,
        k,
        how=MODEL,
        elements=(expected.mean_elements_sent, expected.elements_sent),
        sent_bytes=(expected.mean_bytes_sent, float(expected.bytes_sent)),
        messages=(expected.mean_messages_sent, float(expected.messages_sent)),
        chosen=traits.chosen,
        applied=expected.applied,
    )


def _row(
    reducer: str,
    num_ranks: int,
    n: int,
    k: int,
    *,
    how: str,
    elements: tuple[float, float],
    sent_bytes: tuple[float, float],
    messages: tuple[float, float],
    chosen: float,
    applied: float,
) -> Row:
    bound = describe(reducer).bound
    formula = bound.elements(n, k, num_ranks)
    return {
        "reducer": reducer,
        "ranks": num_ranks,
        "how": how,
        "n": n,
        "k": k,
        "formula": bound.formula,
        "formula_elements": formula,
        "lower_bound_elements": lower_bound(k, num_ranks),
        "mean_elements": elements[0],
        "max_elements": elements[1],
        "elements_ratio": elements[1] / formula if formula else None,
        "within": elements[1] <= formula * (1 + _ROUNDING),
        "mean_bytes": sent_bytes[0],
        "max_bytes": sent_bytes[1],
        "bytes_ratio": sent_bytes[1] / (4 * formula) if formula else None,
        "mean_messages": messages[0],
        "max_messages": messages[1],
        "chosen": chosen,
        "applied": applied,
    }


def _mean(steps: Sequence[RankStep], value: Callable[[RankStep], float]) -> float:
    return sum(value(each) for each in steps) / len(steps)


# --- for people


def _number(key: str) -> Callable[[Row], str]:
    return lambda row: figure(row[key], ",.0f")


def _ratio(key: str) -> Callable[[Row], str]:
    return lambda row: figure(row[key], ".2f")


_COLUMNS: Sequence[Column] = (
    ("reducer", lambda row: row["reducer"]),
    ("P", lambda row: str(row["ranks"])),
    ("how", lambda row: row["how"]),
    ("formula", lambda row: row["formula"]),
    ("elements", _number("formula_elements")),
    ("mean", _number("mean_elements")),
    ("max", _number("max_elements")),
    ("ratio", _ratio("elements_ratio")),
    ("within", lambda row: {True: "yes", False: "no", None: "-"}[row["within"]]),
    ("bytes mean", lambda row: byte_count(row["mean_bytes"])),
    ("bytes max", lambda row: byte_count(row["max_bytes"])),
    ("byte ratio", _ratio("bytes_ratio")),
    ("messages", _number("mean_messages")),
    ("applied/k", lambda row: figure(None if row["applied"] is None else row["applied"] / row["k"], ".2f")),
)

FOOTNOTE = """\
elements: 4-byte words that leave a rank by the paper's formula; a value and its index are two. mean, max: the words
that were sent, over ranks and counted steps. ratio: max / elements. within: max does not exceed the formula.
bytes: all that is on the wire, with headers, lengths and agreements; byte ratio: max / (4 x elements). A pair takes
about 5 bytes, where the paper counts 8. messages: sent by the average rank. applied/k: what is applied, in parts of k.
how: `moved` between simulated ranks by the real reducers, or by `model`, from what was moved on fewer ranks.
topkDSA, gaussiankSA: the formula is the worst case where regions are filled alike; the busiest rank may own a fuller
one. gtopk: the formula counts what a rank sends and receives. gaussiank: what it chooses is only about k.
Unions (applied/k of topkA, topkDSA and gaussiank) keep growing for the first 1/density steps or so."""


def shown(rows: Sequence[Row]) -> str:
    """The rows, reducer by reducer, then the lower bound; a blank line between."""
    bounds = {row["ranks"]: _bound_row(row) for row in rows}
    everything = [*rows, *(bounds[size] for size in sorted(bounds))]
    lines = table(_COLUMNS, everything).splitlines()
    parts = lines[:2]
    for place, row in enumerate(everything):
        if place and row["reducer"] != everything[place - 1]["reducer"]:
            parts.append("")
        parts.append(lines[2 + place])
    return "\n".join(parts)


def verdict(rows: Sequence[Row]) -> str | None:
    """One line on the bound of oktopk, where it was moved: over all steps, those of the warm-up too."""
    mine = [row for row in rows if row["reducer"] == "oktopk" and row["how"] == MOVED and row["ranks"] > 1]
    if not mine:
        return None
    broken = [row for row in mine if row["max_elements_of_all_steps"] > row["formula_elements"]]
    if broken:
        sizes = ", ".join(str(row["ranks"]) for row in broken)
        return f"oktopk: some rank sent MORE than 6k(P-1)/P elements in some step at P = {sizes}"
    most = max(row["max_elements_of_all_steps"] / row["formula_elements"] for row in mine)
    return (
        f"oktopk: no rank sent more than 6k(P-1)/P elements in any step, those of the warm-up included; "
        f"the most was {most:.2f} of it"
    )


def _bound_row(row: Row) -> Row:
    nothing: dict[str, Any] = dict.fromkeys(row)
    return {
        **nothing,
        "reducer": "lower bound",
        "ranks": row["ranks"],
        "how": "-",
        "k": row["k"],
        "formula": "2k(P-1)/P",
        "formula_elements": row["lower_bound_elements"],
    }
