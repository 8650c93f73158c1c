"""What each bucket keeps from step to step: its reducer, and a selector that remembers where to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oktopk.bucket import Bucket, Slot
from oktopk.comm.base import Communicator
from oktopk.reduce.base import Reducer, ReducerSettings
from oktopk.reduce.exchange import Exchange
from oktopk.registry import ReducerFactory
from oktopk.select.base import Selector
from oktopk.select.bucket_selector import BucketSelector
from oktopk.settings import Settings


@dataclass(frozen=True)
class Lane:
    slots: tuple[Slot, ...]
    selector: BucketSelector
    reducer: Reducer


class Lanes:
    """One for each layout of a bucket; layouts that DDP has given up are forgotten."""

    def __init__(
        self, factory: ReducerFactory, settings: Settings, selector: Selector, exchange: Exchange, comm: Communicator
    ) -> None:
        self._factory = factory
        self._settings = settings
        self._selector = selector
        self._exchange = exchange
        self._comm = comm
        self._lanes: dict[str, Lane] = {}
        self._saved: dict[str, Any] = {}

    def of(self, bucket: Bucket) -> Lane:
        key = bucket.key
        if key not in self._lanes:
            names = {slot.name for slot in bucket.slots}
            self._lanes = {
                old: lane for old, lane in self._lanes.items() if names.isdisjoint(slot.name for slot in lane.slots)
            }
            self._lanes[key] = self._make(bucket)
        return self._lanes[key]

    def _make(self, bucket: Bucket) -> Lane:
        selector = BucketSelector(self._selector, self._exchange.kernels, self._comm.home(bucket.gradient.device))
        reducer = self._factory(
            ReducerSettings(
                selector=selector,
                exchange=self._exchange,
                thresholds=self._settings.thresholds,
                tau=self._settings.tau,
                tau_prime=self._settings.tau_prime,
            )
        )
        if bucket.key in self._saved:
            reducer.load_state_dict(self._saved.pop(bucket.key))
        return Lane(bucket.slots, selector, reducer)

    def state_dict(self) -> dict[str, Any]:
        return self._saved | {key: lane.reducer.state_dict() for key, lane in self._lanes.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reducers take up theirs when their bucket is seen."""
        self._lanes.clear()
        self._saved = dict(state)
