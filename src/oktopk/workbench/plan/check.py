"""The model put to the test on the machines at hand: what it predicts, beside what the clock says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm.base import Communicator
from oktopk.workbench.plan.advise import Answer, Question, advise
from oktopk.workbench.plan.calibrate import slowest, wait_for
from oktopk.workbench.plan.model import predict
from oktopk.workbench.simulate.gradients import Synthetic

_WARMUP, _STEPS = 4, 7
_LARGEST = 8_000_000
_LEAST_UNCERTAINTY = 0.1


@dataclass(frozen=True)
class Check:
    """One allreduce of n elements."""

    reducer: str
    n: int
    predicted_s: float
    measured_s: float
    spread: float
    """Of the measured ones: the slowest tenth by the median, less one."""

    @property
    def factor(self) -> float:
        return self.measured_s / self.predicted_s if self.predicted_s else 1.0


def checked(answer: Answer, comm: Communicator, device: torch.device) -> tuple[Answer, list[Check]]:
    """The answer again, corrected by measuring dense and the best candidate; to be called by all ranks alike."""
    question = answer.question
    n = min(max(question.bucket_sizes), _LARGEST)
    checks = [
        _check("dense", 1.0, n, question, comm, device),
        _check(answer.best.reducer, answer.best.density, n, question, comm, device),
    ]
    corrected = replace(
        question,
        dense_factor=checks[0].factor,
        sparse_factor=checks[1].factor,
        uncertainty=max(_LEAST_UNCERTAINTY, *(check.spread for check in checks)),
    )
    return advise(corrected), checks


def _check(reducer: str, density: float, n: int, question: Question, comm: Communicator, device: torch.device) -> Check:
    predicted = predict(reducer, n, density, question.num_ranks, question.link, question.machine, question.common)
    gradient = torch.empty(n, device=device)
    source = Synthetic(n, comm.rank)
    call = _dense(gradient, comm) if reducer == "dense" else _sparse(reducer, density, gradient, comm)
    times: list[float] = []
    for step in range(_WARMUP + _STEPS):
        gradient.copy_(source.at(step))
        wait_for(device)
        comm.barrier()
        start = time.perf_counter()
        call()
        wait_for(device)
        times.append(slowest(comm, time.perf_counter() - start))
    steady = sorted(times[_WARMUP:])
    median = statistics.median(steady)
    return Check(reducer, n, predicted.total_s, median, steady[-1] / median - 1.0)


def _dense(gradient: torch.Tensor, comm: Communicator) -> Callable[[], None]:
    def call() -> None:
        comm.all_reduce(gradient)
        gradient.div_(comm.size)

    return call


def _sparse(reducer: str, density: float, gradient: torch.Tensor, comm: Communicator) -> Callable[[], None]:
    allreducer = AllReducer(reducer, comm=comm, density=density, warmup_steps=0, min_sparse_numel=0)
    bucket = Bucket(gradient, Layout.of([("all", gradient.numel())]))

    def call() -> None:
        allreducer.reduce(bucket)
        allreducer.end_step()

    return call
