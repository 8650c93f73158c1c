"""How long selecting took, by wrapping a selector."""

from __future__ import annotations

from torch import Tensor

from oktopk.metrics.stopwatch import Stopwatch
from oktopk.select.base import Selector
from oktopk.sparse_vector import SparseVector


class TimedSelector:
    """Passes every call on; `clock` adds up its seconds."""

    def __init__(self, inner: Selector, clock: Stopwatch) -> None:
        self._inner = inner
        self._clock = clock

    def top_k(self, acc: Tensor, k: int) -> SparseVector:
        return self._clock.time(lambda: self._inner.top_k(acc, k))

    def above(self, acc: Tensor, threshold: float) -> SparseVector:
        return self._clock.time(lambda: self._inner.above(acc, threshold))

    def kth_magnitude(self, acc: Tensor, k: int) -> float:
        return self._clock.time(lambda: self._inner.kth_magnitude(acc, k))

    def normal_threshold(self, acc: Tensor, k: int) -> float:
        return self._clock.time(lambda: self._inner.normal_threshold(acc, k))
