"""How long packing and unpacking took, by wrapping an exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from oktopk.metrics.stopwatch import Stopwatch
from oktopk.reduce.exchange import Exchange
from oktopk.sparse_vector import SparseVector


@dataclass(frozen=True)
class TimedExchange(Exchange):
    """`clock` adds up the seconds of encoding and decoding."""

    clock: Stopwatch = field(default_factory=Stopwatch)

    def encode(self, vector: SparseVector) -> Tensor:
        return self.clock.time(lambda: Exchange.encode(self, vector))

    def decode(self, buffer: Tensor, length: int) -> SparseVector:
        return self.clock.time(lambda: Exchange.decode(self, buffer, length))
