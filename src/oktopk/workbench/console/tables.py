"""What is shown: tables and figures as people read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
"""One line of a table: plain values only."""
Column = tuple[str, Callable[[Row], str]]


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Plain text: the first column to the left, figures to the right."""
    lines = [[title for title, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    shown: list[str] = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        shown.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join([shown[0], "-" * len(shown[0]), *(line.rstrip() for line in shown[1:])])


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [[show(row).replace("|", "\\|") for _, show in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figure(value: float | None, spec: str = ".3g") -> str:
    return "-" if value is None else format(value, spec)


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def elements(n: int) -> str:
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.4g}{name}"
    return str(n)


def byte_count(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
