"""How long a run's steps would take over another link: computing as measured, bytes as counted, rounds by the model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.registry import describe
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.plan.advise import COMMON
from oktopk.workbench.plan.calibrate import measure_machine
from oktopk.workbench.plan.model import Compute, Link, Machine, Prediction, predict, step_seconds
from oktopk.workbench.report.run import Bucket, Run, Step

_NO_BYTES = 1e-18
"""Seconds a byte of a link that only rounds cost something on."""


@dataclass(frozen=True)
class Clock:
    """The same computing for all runs, so that they differ by what they exchange alone."""

    link: Link
    machine: Machine
    compute: Compute
    num_workers: int

    @staticmethod
    def of(runs: Sequence[Run], link: Link, num_workers: int, device: str) -> Clock:
        """Computing is the median over these runs; the kernels are measured here and now."""
        sizes = {bucket.n for run in runs for step in run.steps[-1:] for bucket in step.buckets}
        if not sizes:
            raise UsageError("no run of this study got through a step; look at what its runs say in their logs folder")
        alone = SimulatedCommunicator(World(1), 0)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as beside other workers
        try:
            machine = measure_machine(alone, torch.device(device), max(sizes))
        finally:
            torch.set_num_threads(threads)
        io, forward, backward = (
            statistics.median(step.seconds.get(stage, 0.0) for run in runs for step in run.steps)
            for stage in ("io", "forward", "backward")
        )
        return Clock(link, machine, Compute(io + forward, backward, device == "cpu"), num_workers)

    @property
    def compute_s(self) -> float:
        return self.compute.forward_s + self.compute.backward_s

    def seconds_after(self, run: Run) -> list[float]:
        """After no step, after one, after two."""
        compute = replace(self.compute, hidden=not (run.config.number("norm_clip") or 0.0) > 0)
        known: dict[tuple[str, int, int], Prediction] = {}
        return [0.0, *accumulate(self._step(run.reducer or "dense", step, compute, known) for step in run.steps)]

    def _step(self, sparse: str, step: Step, compute: Compute, known: dict[tuple[str, int, int], Prediction]) -> float:
        buckets: list[Prediction] = []
        for bucket in step.buckets:
            reducer = "dense" if bucket.phase == "dense" else sparse
            key = (reducer, bucket.n, max(1, bucket.k))
            if key not in known:
                known[key] = self._rounds(*key)
            byte_s = self.link.dense_byte_s if reducer == "dense" else self.link.seconds_per_byte
            carried = known[key].exchange_s + _bytes(reducer, bucket) * byte_s
            buckets.append(replace(known[key], exchange_s=carried))
        return step_seconds(buckets, compute)

    def _rounds(self, reducer: str, n: int, k: int) -> Prediction:
        """Of an exchange that carries nothing."""
        link = replace(self.link, seconds_per_byte=_NO_BYTES, dense_byte_s=_NO_BYTES)
        return predict(reducer, n, k / n, self.num_workers, link, self.machine, COMMON)


def _bytes(reducer: str, bucket: Bucket) -> int:
    """A link carries both ways at once; the root of a tree sends when all has arrived."""
    both = (bucket.bytes_sent, bucket.bytes_received)
    return sum(both) if describe(reducer).half_duplex else max(both)
