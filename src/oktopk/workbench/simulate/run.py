"""Some steps of one reducer on P simulated ranks: what each of them really sent."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm import World, simulate
from oktopk.comm.base import Communicator
from oktopk.metrics.step_stats import StepStats
from oktopk.workbench.simulate.elements import ElementCounter
from oktopk.workbench.simulate.sources import GradientSource

_PATIENCE_S = 3600.0  # one rank computes at a time: with hundreds of them, the last one waits long


@dataclass(frozen=True)
class RankStep:
    """One step of one rank. `elements_sent` are words as the paper counts them, see `ElementCounter`."""

    rank: int
    stats: StepStats
    elements_sent: float


@dataclass(frozen=True)
class MovedRun:
    """All steps of all ranks: `steps[t][rank]`. The first `num_warmup` are not steady."""

    reducer: str
    num_ranks: int
    n: int
    k: int
    num_warmup: int
    steps: tuple[tuple[RankStep, ...], ...]

    @property
    def steady(self) -> list[RankStep]:
        """Of all ranks."""
        return [each for step in self.steps[self.num_warmup :] for each in step]


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a simulation goes: `num_warmup` steps until thresholds have settled, then `num_steps` to look at."""

    density: float
    num_warmup: int
    num_steps: int


def simulate_run(
    reducer: str, num_ranks: int, source: GradientSource, course: Course, tell: Callable[[str], None] = lambda _: None
) -> MovedRun:
    """The real reducer, error feedback included, with real data in real messages; `tell` hears how far it is.

    The same every time: ranks are summed in their order, whoever comes first.
    """
    num_all = course.num_warmup + course.num_steps

    def run(comm: Communicator) -> list[RankStep]:
        told = tell if comm.rank == 0 else None
        return _steps_of_one_rank(reducer, comm, source, course.density, num_all, told)

    world = World(num_ranks, _PATIENCE_S)
    with _one_thread_each():
        try:
            by_rank = simulate(num_ranks, run, world)
        except KeyboardInterrupt:
            world.break_off("interrupted")  # else its threads would go on to the end
            raise
    by_step = tuple(zip(*by_rank, strict=True))
    first = by_step[0][0].stats
    return MovedRun(reducer, num_ranks, source.n, first.k, course.num_warmup, by_step)


def _steps_of_one_rank(
    reducer: str,
    comm: Communicator,
    source: GradientSource,
    density: float,
    num_steps: int,
    tell: Callable[[str], None] | None,
) -> list[RankStep]:
    counter = ElementCounter(comm)
    allreducer = AllReducer(reducer, comm=counter, density=density, warmup_steps=0, min_sparse_numel=0)
    layout = Layout.of([("gradient", source.n)])
    gradient = torch.empty(source.n, dtype=torch.float32)
    done: list[RankStep] = []
    for step in range(num_steps):
        if tell:
            tell(f"step {step + 1} of {num_steps}")
        source.write(comm.rank, step, gradient)
        counter.take()
        stats = allreducer.reduce(Bucket(gradient, layout))
        allreducer.end_step()
        done.append(RankStep(comm.rank, stats, counter.take()))
    return done


@contextmanager
def _one_thread_each() -> Generator[None]:
    """One rank computes at a time; torch would start a pool of threads for each of hundreds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
