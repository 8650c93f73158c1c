"""Seconds: of calls that are spread over a step, and of stages that follow each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Adds up the seconds of calls until they are taken."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def time(self, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self._seconds += time.perf_counter() - start
        return result

    def take(self) -> float:
        """The seconds since the last call of this."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class StageClock:
    """Wall-clock seconds of consecutive stages."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stage(self, name: str) -> None:
        """The stage of this name ends now."""
        now = time.perf_counter()
        self._seconds[name] = now - self._last
        self._last = now

    def split(self, stage: str, **parts: float) -> dict[str, float]:
        """All stages, with the known parts of one taken apart and its rest called `combine`."""
        whole = self._seconds.pop(stage)
        return {**self._seconds, **parts, "combine": max(0.0, whole - sum(parts.values()))}
