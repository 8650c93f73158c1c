"""A study's table: what each variant reached, what it sent, and how long it took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from oktopk.workbench.console.tables import Column, Row, byte_count, figure
from oktopk.workbench.study.definition import Study
from oktopk.workbench.study.outcome import Outcome


def rows(study: Study, outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each variant that has a run. Runs that were lost count as lost, and for nothing else."""
    found = {name: [each for each in outcomes if each.variant == name] for name in study.variants}
    base = found[study.baseline]
    return [_row(study, name, mine, base) for name, mine in found.items() if mine]


def _row(study: Study, name: str, mine: Sequence[Outcome], base: Sequence[Outcome]) -> Row:
    kept, base_kept = ([each for each in some if each.final is not None] for some in (mine, base))
    finals = _finals(kept)
    reached = [(each, point) for each in kept if (point := each.first_reached(study)) is not None]
    measured = [point.time_s for each, point in reached if each.alone]
    mean, std = mean_and_std(finals)
    base_mean, base_std = mean_and_std(_finals(base_kept))
    sent, base_sent = (_mean([each.bytes_sent for each in some]) for some in (kept, base_kept))
    row: dict[str, Any] = {
        "variant": name,
        "settings": dict(study.variants[name]),
        "seeds": len(study.seeds),
        "runs": len(mine),
        "diverged": len(mine) - len(finals),
        "finals": finals,
        "mean": mean,
        "std": std,
        "behind": None,
        "within": None,
        "bytes_sent": sent,
        "of_baseline": sent / base_sent if sent is not None and base_sent else None,
        "reached": len(reached),
        "steps_to_target": _mean([point.step for _, point in reached]),
        "simulated_s": _mean([point.simulated_s for _, point in reached if point.simulated_s is not None]),
        "measured": len(measured),
        "measured_s": _mean(measured),
    }
    if mean is not None and base_mean is not None:
        row["behind"] = (base_mean - mean) if study.higher_is_better else (mean - base_mean)
    if row["diverged"]:
        row["within"] = False
    elif row["behind"] is not None and base_std is not None:
        row["within"] = row["behind"] <= base_std
    return row


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The sample's standard deviation; None of fewer than two."""
    return _mean(values), statistics.stdev(values) if len(values) > 1 else None


def _finals(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.final for each in outcomes if each.final is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def columns(study: Study, simulated_link: str, link: str) -> tuple[Column, ...]:
    return (
        ("variant", lambda row: row["variant"]),
        (f"final {study.metric}", _final),
        ("behind", lambda row: figure(row["behind"], "+.4f")),
        ("within 1 std", lambda row: {True: "yes", False: "NO", None: "-"}[row["within"]]),
        ("sent by a worker", lambda row: byte_count(row["bytes_sent"])),
        (f"of {study.baseline}", lambda row: figure(row["of_baseline"], ".1%")),
        (f"steps to {study.target:g}", lambda row: _counted(row, "steps_to_target", "reached", ".0f", "")),
        (f"simulated, {simulated_link}", lambda row: _counted(row, "simulated_s", "reached", ".1f", " s")),
        (f"measured, {link}", lambda row: _counted(row, "measured_s", "measured", ".1f", " s")),
    )


def _final(row: Row) -> str:
    std = "" if row["std"] is None else f" ± {row['std']:.4f}"
    lost = f", {row['diverged']} diverged" if row["diverged"] else ""
    return f"{figure(row['mean'], '.4f')}{std}{_of(len(row['finals']), row)}{lost}"


def _counted(row: Row, key: str, count: str, spec: str, unit: str) -> str:
    return "-" if row[key] is None else f"{row[key]:{spec}}{unit}{_of(row[count], row)}"


def _of(count: int, row: Row) -> str:
    """How many seeds a mean is of, where it is not of all."""
    return f" ({count} of {row['seeds']})" if count < row["seeds"] else ""
