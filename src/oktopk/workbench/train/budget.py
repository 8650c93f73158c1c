"""What a run will send, computed before the first step: warm-up and measurements of the second moment included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from oktopk.adapters.grouping import make_groups
from oktopk.adapters.local_steps import turns
from oktopk.allreducer import AllReducer
from oktopk.optim.adamw import is_due
from oktopk.reduce.narrow import PACKINGS
from oktopk.reduce.volume import LENGTH_BYTES
from oktopk.settings import WIRE_DTYPES
from oktopk.wire import VALUE_DTYPES
from oktopk.workbench.plan.advise import COMMON
from oktopk.workbench.plan.model import expected_volume
from oktopk.workbench.report.summary import ring_bytes
from oktopk.workbench.train.config import TrainConfig

_SAMPLE = 1 << 16


@dataclass
class Budget:
    """Bytes that a worker sends in a whole run.

    Attributes:
        whole: What dense fp32 training sends in as many steps.
        num_dense: Exchanges of the warm-up.
        num_sparse: The exchanges after them.
        dense: Sent in the former.
        sparse: Sent in the latter, also by buckets that stay dense.
        measuring: Sent beside them, to measure AdamW's second moment.
    """

    whole: float
    num_dense: int = 0
    num_sparse: int = 0
    dense: float = 0.0
    sparse: float = 0.0
    measuring: float = 0.0
    are_steps: bool = True
    """Whether every step is followed by an exchange."""

    @property
    def of_dense(self) -> float:
        return (self.dense + self.sparse + self.measuring) / self.whole

    def __str__(self) -> str:
        what = "steps" if self.are_steps else "exchanges"
        parts = [
            (self.dense, f"in {self.num_dense} dense {what}"),
            (self.measuring, "to measure the second moment"),
            (self.sparse, f"in {self.num_sparse} sparse {what}"),
        ]
        said = ", ".join(f"{percent(sent / self.whole)} {words}" for sent, words in parts if sent)
        return f"will send about {percent(self.of_dense)} of what dense training sends: {said}"


def percent(part: float) -> str:
    return f"{100 * part:.1f} %" if part >= 0.001 else f"{100 * part:.2g} %"


def expect(config: TrainConfig, model: torch.nn.Module, allreducer: AllReducer, num_steps: int) -> Budget:
    """By the models that the planner has, for `num_steps` steps from the first on."""
    size, settings = allreducer.comm.size, allreducer.settings
    buckets = _buckets(config, model)
    first_sparse = len(allreducer.outline(num_steps).dense_steps)
    changes = config.compress == "update" or config.local_steps > 0
    measures = config.compress == "update" and config.optimizer == "adamw"
    wire_bytes = VALUE_DTYPES[WIRE_DTYPES[settings.wire_dtype]].itemsize

    @cache
    def dense(n: int) -> float:
        return _dense_bytes(n, size, settings.dense_dtype)

    @cache
    def sparse(n: int, k: int) -> float:
        return expected_volume(allreducer.reducer, n, k, size, COMMON, wire_bytes).mean_bytes_sent

    num_parameters = sum(p.numel() for p in model.parameters())
    found = Budget(num_steps * ring_bytes(num_parameters, size), are_steps=not config.local_steps)
    num_sparse = [0] * len(buckets)
    for number, places in enumerate(_exchanges(config, len(buckets), num_steps)):
        is_warm = number < first_sparse
        found.num_dense += is_warm
        found.num_sparse += not is_warm
        for at in places:
            n, stays_dense = buckets[at]
            if is_warm:
                found.dense += dense(n)
                continue
            k = settings.k_at(number, n)
            if stays_dense or n < settings.min_sparse_numel or (changes and k >= n):
                found.sparse += dense(n)
                num_sparse[at] = 0
                continue
            found.sparse += sparse(n, k)
            num_sparse[at] += 1
            if measures and is_due(num_sparse[at]):
                found.measuring += dense(n)
    return found


def _buckets(config: TrainConfig, model: torch.nn.Module) -> list[tuple[int, bool]]:
    """Each bucket's size, and whether it always stays dense. Options of an update may differ between param groups."""
    has_groups = config.compress == "update" and config.optimizer == "adamw"
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = make_groups(named, config.bucket_cap_mb, config.dense_vectors, lambda p: has_groups and p.dim() <= 1)
    return [(group.layout.numel, group.dense) for group in groups]


def _exchanges(config: TrainConfig, num_buckets: int, num_steps: int) -> Iterator[Sequence[int]]:
    """The buckets of each exchange of a run."""
    every = range(num_buckets)
    if not config.local_steps:
        yield from (every for _ in range(num_steps))
        return
    at_turn = turns(num_buckets, config.local_steps, config.local_stream)
    for step in range(1, num_steps + 1):
        is_warm = step <= config.warmup_steps
        due = [at for at in every if is_warm or step % config.local_steps == at_turn[at]]
        left = [at for at in every if at not in due] if step == num_steps else []  # at its end all become equal
        yield from (places for places in (due, left) if places)


def _dense_bytes(n: int, size: int, dtype: str) -> float:
    """A reduction of all n elements, as they travel."""
    whole = expected_volume("dense", n, n, size, COMMON)
    packing = PACKINGS[dtype]
    if packing is None:
        return whole.mean_bytes_sent
    agreement = whole.rounds[0].bytes
    packed = packing.pack(torch.zeros(_SAMPLE)).numel() / _SAMPLE * n / size
    return agreement + (size - 1) * (2 * packed + LENGTH_BYTES)
