"""Where the time of a reduction goes, and what it moves: measured around the algorithm, not in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oktopk.comm.counting import CommRecord, Traffic
from oktopk.kernels.base import Velocity
from oktopk.kernels.by_device import DeviceKernels
from oktopk.reduce.exchange import Exchange
from oktopk.select.base import Accumulated
from oktopk.select.bucket_selector import BucketSelector
from oktopk.sparse_vector import SparseVector

STAGES = ("meet", "select", "encode", "exchange", "combine", "apply")
"""meet: wait until every rank has come to the reduction. select: add what is owed and choose, which is one pass.
encode: to bytes and back. exchange: send and receive. combine: add up what arrived, cut it to the global threshold; in
a dense step also add what is owed. apply: write the mean, keep what is still owed."""


@dataclass
class Cost:
    """Of one reduction: seconds by stage, and what was sent and received."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    traffic: Traffic = field(default_factory=Traffic)


class Meter:
    """Books every moment of a reduction to exactly one stage, so that the stages add up to its time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._cost: Cost | None = None
        self._stage = "combine"
        self._since = 0.0
        self._communication = "exchange"

    @contextmanager
    def measure(self, cost: Cost) -> Generator[None]:
        """What happens here is booked to `cost`: to `combine`, unless it happens in a stage."""
        self._cost, self._since = cost, self._now()
        try:
            yield
        finally:
            self._book()
            self._cost = None

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """What happens here belongs to this stage and not to the one around it."""
        self._book()
        outer, self._stage = self._stage, name
        try:
            yield
        finally:
            self._book()
            self._stage = outer

    @contextmanager
    def meeting(self) -> Generator[None]:
        """Communication in here is waiting for the other ranks to come: next to nothing is sent."""
        self._communication = "meet"
        try:
            yield
        finally:
            self._communication = "exchange"

    def record(self, record: CommRecord) -> None:
        """A communication has just ended."""
        if self._cost is None:
            return
        self._book()
        self._cost.seconds[self._stage] -= record.seconds
        self._cost.seconds[self._communication] += record.seconds
        self._cost.traffic = self._cost.traffic.plus(Traffic.of([record]))

    def _book(self) -> None:
        now = self._now()
        if self._cost is not None:
            self._cost.seconds[self._stage] += now - self._since
        self._since = now


class TimedSelector(BucketSelector):
    """Books selecting."""

    def __init__(self, kernels: DeviceKernels, device: torch.device, home: torch.device, meter: Meter) -> None:
        super().__init__(kernels, device, home)
        self._meter = meter

    def accumulate(
        self,
        residual: Tensor | None,
        gradient: Tensor,
        out: Tensor,
        k: int,
        limit: float,
        velocity: Velocity | None = None,
    ) -> Accumulated:
        with self._meter.stage("select" if k else "combine"):
            return super().accumulate(residual, gradient, out, k, limit, velocity)

    def top_k(self, acc: Accumulated, k: int) -> SparseVector:
        with self._meter.stage("select"):
            return super().top_k(acc, k)

    def above(self, acc: Accumulated, threshold: float) -> SparseVector:
        with self._meter.stage("select"):
            return super().above(acc, threshold)

    def normal_threshold(self, acc: Accumulated, k: int) -> float:
        with self._meter.stage("select"):
            return super().normal_threshold(acc, k)


@dataclass(frozen=True, kw_only=True)
class TimedExchange(Exchange):
    """Books encoding and decoding."""

    meter: Meter

    def encode(self, vector: SparseVector) -> Tensor:
        with self.meter.stage("encode"):
            return Exchange.encode(self, vector)

    def decode(self, buffer: Tensor, length: int) -> SparseVector:
        with self.meter.stage("encode"):
            return Exchange.decode(self, buffer, length)
