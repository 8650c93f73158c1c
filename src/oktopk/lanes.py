"""What each bucket keeps from step to step: its reducer, and a selector that remembers where to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oktopk.bucket import Bucket, Layout
from oktopk.comm.base import Communicator
from oktopk.kernels.by_device import DeviceKernels
from oktopk.metrics.meter import Meter, TimedExchange, TimedSelector
from oktopk.reduce.base import Reducer, ReducerSettings
from oktopk.reduce.description import ReducerFactory
from oktopk.settings import WIRE_DTYPES, Settings


@dataclass(frozen=True)
class Lane:
    """Belongs to one layout."""

    selector: TimedSelector
    reducer: Reducer


class Lanes:
    """One for each layout of a bucket; layouts that DDP has given up are forgotten."""

    def __init__(
        self, factory: ReducerFactory, settings: Settings, kernels: DeviceKernels, comm: Communicator, meter: Meter
    ) -> None:
        self._factory = factory
        self._settings = settings
        self._kernels = kernels
        self._comm = comm
        self._meter = meter
        self._lanes: dict[Layout, Lane] = {}
        self._saved: dict[str, Any] = {}

    def of(self, bucket: Bucket) -> Lane:
        lane = self._lanes.get(bucket.layout)
        if lane is None:
            for old in [known for known in self._lanes if known.shares_a_parameter_with(bucket.layout)]:
                del self._lanes[old]
            lane = self._lanes[bucket.layout] = self._make(bucket)
        return lane

    def _make(self, bucket: Bucket) -> Lane:
        device = bucket.flat.device
        home = self._comm.home(device)
        selector = TimedSelector(self._kernels, device, home, self._meter)
        exchange = TimedExchange(self._kernels.on(home), WIRE_DTYPES[self._settings.wire_dtype], meter=self._meter)
        reducer = self._factory(
            ReducerSettings(
                selector=selector,
                exchange=exchange,
                thresholds=self._settings.thresholds,
                tau=self._settings.tau,
                tau_prime=self._settings.tau_prime,
            )
        )
        if bucket.layout.key in self._saved:
            reducer.load_state_dict(self._saved.pop(bucket.layout.key))
        return Lane(selector, reducer)

    def state_dict(self) -> dict[str, Any]:
        return self._saved | {layout.key: lane.reducer.state_dict() for layout, lane in self._lanes.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reducers take up theirs when their bucket is seen."""
        self._lanes.clear()
        self._saved = dict(state)
