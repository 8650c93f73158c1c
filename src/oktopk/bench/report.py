"""What a benchmark leaves behind: a table for people, a JSON file for programs, and where it was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oktopk.bench.options import Row

Column = tuple[str, Callable[[Row], str]]


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, command: Sequence[str], rows: Sequence[Row], skipped: str | None, seconds: float) -> None:
    """Whole or not at all: readers never see half a file."""
    content = {
        "machine": machine(),
        "command": shlex.join(["oktopk", "bench", *command]),
        "seconds": round(seconds, 1),
        "skipped": skipped,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Plain text: the first column to the left, figures to the right."""
    lines = [[title for title, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    shown: list[str] = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        shown.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join([shown[0], "-" * len(shown[0]), *(line.rstrip() for line in shown[1:])])


@dataclass
class Progress:
    """What is being done, on standard error: one line that is written over on a terminal, else a line for each part."""

    stream: Any = None
    _started: float = 0.0
    _width: int = 0

    def __post_init__(self) -> None:
        self.stream = self.stream or sys.stderr
        self._started = time.monotonic()

    def part(self, text: str) -> None:
        """A new part of the work begins."""
        if self._live:
            self._over(text)
        else:
            self._say(f"[{time.monotonic() - self._started:5.0f} s] {text}")

    def detail(self, text: str) -> None:
        """How far that part is; shown on a terminal only."""
        if self._live:
            self._over(text)

    def note(self, text: str) -> None:
        """Something the reader must know."""
        self.end()
        self._say(text)

    def end(self) -> None:
        if self._live and self._width:
            self._over("")
            self.stream.write("\r")
            self.stream.flush()
            self._width = 0

    @property
    def _live(self) -> bool:
        return bool(self.stream.isatty())

    def _over(self, text: str) -> None:
        line = f"[{time.monotonic() - self._started:5.0f} s] {text}"[:118] if text else ""
        self.stream.write(f"\r{line.ljust(self._width)}")
        self.stream.flush()
        self._width = len(line)

    def _say(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()


# --- figures as people read them


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


def _field(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
