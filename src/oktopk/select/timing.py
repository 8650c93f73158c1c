"""How long selecting took, by wrapping a selector."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from oktopk.select.base import Selector
from oktopk.types import SparseVector

T = TypeVar("T")


class TimedSelector:
    """Passes every call on and adds up its seconds."""

    def __init__(self, inner: Selector) -> None:
        self._inner = inner
        self._seconds = 0.0

    def take(self) -> float:
        """The seconds since the last call of this."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def top_k(self, acc: Tensor, k: int) -> SparseVector:
        return self._timed(lambda: self._inner.top_k(acc, k))

    def above(self, acc: Tensor, threshold: float) -> SparseVector:
        return self._timed(lambda: self._inner.above(acc, threshold))

    def kth_magnitude(self, acc: Tensor, k: int) -> float:
        return self._timed(lambda: self._inner.kth_magnitude(acc, k))

    def normal_threshold(self, acc: Tensor, k: int) -> float:
        return self._timed(lambda: self._inner.normal_threshold(acc, k))

    def _timed(self, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self._seconds += time.perf_counter() - start
        return result
