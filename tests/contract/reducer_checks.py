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
from oktopk.reduce.base import DenseReduction, Reduction
from oktopk.reduce.exchange import Exchange
from oktopk.registry import describe, make_communicator, make_kernels
from oktopk.select import Accumulated
from oktopk.select.bucket_selector import BucketSelector
from oktopk.settings import WIRE_DTYPES
from oktopk.sparse_vector import SparseVector
from tests import gradients
from tests.contract.reference_selector import ReferenceSelector

CPU = torch.device("cpu")


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
    selector: Literal["bucket", "forgetful", "reference"] = "bucket"
    """As in an AllReducer; the same, told nothing of what the pass saw; or the one that is plain to read."""


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
    bucket = BucketSelector(kernels, CPU, CPU)
    settings = ReducerSettings(
        selector=ReferenceSelector() if case.selector == "reference" else bucket,
        exchange=Exchange(kernels.on(CPU), WIRE_DTYPES[case.wire_dtype]),
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
        if case.selector == "bucket":
            acc = bucket.accumulate(residual, fresh, torch.empty(case.n), case.k, largest_safe(comm.size))
        else:
            acc = Accumulated(residual + fresh)
        before = acc.values.clone()
        reduction = reducer.reduce(acc, counting, case.k)
        assert torch.equal(acc.values, before), "a reducer must not write into acc"
        residual = left_after(reduction, acc.values)
        steps.append(Step(acc.values, dense(reduction.mean, case.n), residual, reduction, counting.take()))
    return steps


def left_after(reduction: Reduction, acc: Tensor) -> Tensor:
    if isinstance(reduction, DenseReduction):
        return torch.zeros(acc.numel())
    return acc - dense(reduction.contribution, acc.numel())


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
    """Same bits on all ranks, and nothing lost or applied twice, element by element, in every step.

    What fp32 may have rounded away is that of the guard: see oktopk.checks.conservation.
    """
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
        allowed = (size + 2) * (2.0**-23 * owed.abs().sum(0) + 2.0**-149)  # denormals round by a whole unit each
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
