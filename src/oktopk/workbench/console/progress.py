"""How far long work is, on standard error."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any


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
