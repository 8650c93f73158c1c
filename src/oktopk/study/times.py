"""How long a run's steps would take over another link: computing as measured, bytes as counted, rounds by the model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.console.words import UsageError
from oktopk.plan.advise import COMMON
from oktopk.plan.calibrate import measure_machine
from oktopk.plan.model import Compute, Link, Machine, Prediction, predict, step_seconds
from oktopk.report.run import Run, Step

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
        """Computing is the median over all runs; the kernels are measured here and now."""
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
        hidden = not any((run.config.number("norm_clip") or 0.0) > 0 for run in runs)
        return Clock(link, machine, Compute(io + forward, backward, device == "cpu", hidden), num_workers)

    def seconds_after(self, run: Run) -> list[float]:
        """After no step, after one, after two."""
        known: dict[tuple[str, int, int], Prediction] = {}
        return [0.0, *accumulate(self._step(run.compressor or "dense", step, known) for step in run.steps)]

    def _step(self, compressor: str, step: Step, known: dict[tuple[str, int, int], Prediction]) -> float:
        # a skipped step has no k; what it sent is shared out by size
        weights = [float(bucket.n if step.skipped or bucket.phase == "dense" else bucket.k) for bucket in step.buckets]
        buckets: list[Prediction] = []
        for bucket, weight in zip(step.buckets, weights, strict=True):
            reducer = "dense" if bucket.phase == "dense" else compressor
            key = (reducer, bucket.n, max(1, bucket.k))
            if key not in known:
                known[key] = self._rounds(*key)
            rounds = known[key]
            num_bytes = step.bytes_sent * weight / sum(weights)
            byte_s = self.link.dense_byte_s if reducer == "dense" else self.link.seconds_per_byte
            buckets.append(replace(rounds, exchange_s=rounds.exchange_s + num_bytes * byte_s))
        return step_seconds(buckets, self.compute)

    def _rounds(self, reducer: str, n: int, k: int) -> Prediction:
        """Of an exchange that carries nothing."""
        link = replace(self.link, seconds_per_byte=_NO_BYTES, dense_byte_s=_NO_BYTES)
        return predict(reducer, n, k / n, self.num_workers, link, self.machine, COMMON)
