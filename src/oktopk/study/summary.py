"""A study's table: what each variant reached, what it sent, and how long it took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from oktopk.console.tables import Column, Row, byte_count, figure
from oktopk.study.definition import Study
from oktopk.study.outcome import Outcome


def rows(study: Study, outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each variant that has a run."""
    found = {name: [each for each in outcomes if each.variant == name] for name in study.variants}
    base = found[study.baseline]
    return [_row(study, name, mine, base) for name, mine in found.items() if mine]


def _row(study: Study, name: str, mine: Sequence[Outcome], base: Sequence[Outcome]) -> Row:
    finals = [each.final for each in mine if each.final is not None]
    reached = [(each, point) for each in mine if (point := each.first_reached(study)) is not None]
    whole = len(finals) == len(mine)
    mean, std = mean_and_std(finals)
    base_mean, base_std = mean_and_std([each.final for each in base if each.final is not None])
    sent, base_sent = (statistics.fmean(each.bytes_sent for each in some) if some else 0.0 for some in (mine, base))
    row: dict[str, Any] = {
        "variant": name,
        "settings": dict(study.variants[name]),
        "runs": len(mine),
        "diverged": len(mine) - len(finals),
        "finals": finals,
        "mean": mean,
        "std": std,
        "behind": None,
        "within": None,
        "bytes_sent": sent,
        "of_baseline": sent / base_sent if base_sent else None,
        "reached": len(reached),
        "steps_to_target": _mean([point.step for _, point in reached]),
        "simulated_s": _mean([point.simulated_s for _, point in reached if point.simulated_s is not None]),
        "measured_s": _mean([point.time_s for each, point in reached if each.alone]),
    }
    if mean is not None and base_mean is not None:
        row["behind"] = (base_mean - mean) if study.higher_is_better else (mean - base_mean)
    if not whole:
        row["within"] = False
    elif row["behind"] is not None and base_std is not None:
        row["within"] = row["behind"] <= base_std
    return row


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The sample's standard deviation; None of fewer than two."""
    return _mean(values), statistics.stdev(values) if len(values) > 1 else None


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
        (f"steps to {study.target:g}", lambda row: figure(row["steps_to_target"], ".0f")),
        (f"simulated, {simulated_link}", lambda row: _seconds(row, "simulated_s")),
        (f"measured, {link}", lambda row: _seconds(row, "measured_s")),
    )


def _final(row: Row) -> str:
    std = "" if row["std"] is None else f" ± {row['std']:.4f}"
    lost = f" ({row['diverged']} of {row['runs']} diverged)" if row["diverged"] else ""
    return f"{figure(row['mean'], '.4f')}{std}{lost}"


def _seconds(row: Row, key: str) -> str:
    if row[key] is None:
        return "-"
    some = f" ({row['reached']} of {row['runs']})" if row["reached"] < row["runs"] else ""
    return f"{row[key]:.1f} s{some}"


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [[show(row).replace("|", "\\|") for _, show in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
