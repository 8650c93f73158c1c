"""Driving a reducer through many steps with error feedback, and the laws that what it did must obey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oktopk.checks.finite import largest_safe
from oktopk.comm import CommRecord, CountingCommunicator
from oktopk.comm.base import Communicator
from oktopk.reduce import ReducerSettings
from oktopk.reduce.base import Reduction
from oktopk.reduce.exchange import Exchange
from oktopk.registry import describe, make_communicator, make_kernels, make_selector
from oktopk.select.bucket_selector import BucketSelector
from oktopk.settings import WIRE_DTYPES
from oktopk.sparse_vector import SparseVector
from tests import gradients

LAW_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    reducer: str
    kind: str
    n: int
    k: int
    steps: int
    seed: int = 0
    tau: int = 64
    tau_prime: int = 32
    kernels: str = "auto"
    wire_dtype: str = "fp32"
    thresholds: Literal["exact", "reuse"] = "exact"
    remembers: bool = False
    """Through a selector that knows its bucket, as in an AllReducer."""


@dataclass(frozen=True)
class Step:
    acc: Tensor
    mean: Tensor
    residual: Tensor
    reduction: Reduction
    traffic: list[CommRecord]


def drive(comm: Communicator, case: Case) -> list[Step]:
    """`case.steps` steps of acc = residual + gradient, reduce, residual = acc - contribution, on one rank."""
    source = gradients.Synthetic(case.n, comm.rank, case.kind) if case.kind in gradients.SCHEDULES else None
    kernels = make_kernels(case.kernels)
    bucket = BucketSelector(make_selector(kernels), kernels, torch.device("cpu"))
    settings = ReducerSettings(
        selector=bucket if case.remembers else make_selector(kernels),
        exchange=Exchange(kernels, WIRE_DTYPES[case.wire_dtype]),
        thresholds=case.thresholds,
        tau=case.tau,
        tau_prime=case.tau_prime,
    )
    reducer = describe(case.reducer).factory(settings)
    counting = CountingCommunicator(comm)
    residual = torch.zeros(case.n)
    steps = []
    for step in range(case.steps):
        if source:
            fresh = source.at(step)
        elif case.kind == "at_the_limit":
            fresh = gradients.at_the_limit(case.n, largest_safe(comm.size))
        else:
            fresh = gradients.make(case.kind, case.n, comm.rank, step, case.seed)
        acc = torch.empty(case.n)
        if case.remembers:
            bucket.accumulate(residual, fresh, acc, case.k, largest_safe(comm.size))
        else:
            torch.add(residual, fresh, out=acc)
        before = acc.clone()
        reduction = reducer.reduce(acc, counting, case.k)
        assert torch.equal(acc, before), "a reducer must not write into acc"
        residual = acc - dense(reduction.contribution, case.n)
        steps.append(Step(acc, dense(reduction.mean, case.n), residual, reduction, counting.take()))
    return steps


def drive_over(transport: str, case: Case) -> list[Step]:
    """For the processes of a real world."""
    comm = make_communicator(transport, timeout_s=20.0)
    try:
        return drive(comm, case)
    finally:
        comm.close()


def dense(update: Tensor | SparseVector, n: int) -> Tensor:
    if isinstance(update, SparseVector):
        assert update.length == n
        return update.to_dense()
    return update


def assert_lawful(by_rank: list[list[Step]]) -> None:
    """Same bits on all ranks, and nothing lost or applied twice, element by element, in every step."""
    size = len(by_rank)
    for number, together in enumerate(zip(*by_rank, strict=True)):
        mean = together[0].mean
        assert bool(torch.isfinite(mean).all()), f"step {number}: mean is not finite"
        for rank, step in enumerate(together):
            assert torch.equal(step.mean.view(torch.int32), mean.view(torch.int32)), (
                f"step {number}: rank {rank} differs"
            )
            assert step.reduction.global_count == together[0].reduction.global_count
        owed = torch.stack([step.acc for step in together]).double()
        left = torch.stack([step.residual for step in together]).double()
        gap = (owed.sum(0) - size * mean.double() - left.sum(0)).abs()
        allowed = LAW_TOLERANCE * owed.abs().sum(0) + size * 1.5e-45  # one unit of the smallest denormal each
        assert bool((gap <= allowed).all()), f"step {number}: the law is broken by {(gap - allowed).max():g}"


def assert_same_steps(left: list[list[Step]], right: list[list[Step]]) -> None:
    """Bit for bit, on every rank: what was applied, what is owed, what was counted and sent."""
    for rank, (steps, others) in enumerate(zip(left, right, strict=True)):
        for number, (step, other) in enumerate(zip(steps, others, strict=True)):
            where = f"step {number}, rank {rank}"
            for name in ("mean", "residual"):
                bits, expected = (getattr(one, name).view(torch.int32) for one in (step, other))
                assert torch.equal(bits, expected), f"{where}: another {name} at {(bits != expected).nonzero()[:5]}"
            for name in ("local_count", "global_count", "local_threshold", "global_threshold"):
                assert getattr(step.reduction, name) == getattr(other.reduction, name), f"{where}: another {name}"
            sent = [[(r.operation, r.peer, r.bytes_sent, r.bytes_received) for r in s.traffic] for s in (step, other)]
            assert sent[0] == sent[1], f"{where}: another traffic"
