"""Simulated ranks send and receive, step by step, exactly what real processes do over Gloo."""

from __future__ import annotations

import pytest
import torch

from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.metrics.step_stats import StepStats
from oktopk.registry import REDUCERS
from oktopk.workbench.simulate.gradients import Synthetic
from oktopk.workbench.simulate.run import Course, simulate_run
from oktopk.workbench.simulate.sources import SyntheticSource
from tests.worlds import GlooWorld

N, SEED, STEPS, DENSITY = 20_000, 7, 4, 0.02


def counts_over_gloo(reducer: str) -> list[tuple[int, ...]]:
    """In a real process: its own AllReducer on the same gradients."""
    rank = torch.distributed.get_rank()
    settings = {"density": DENSITY, "warmup_steps": 0, "min_sparse_numel": 0}
    allreducer = AllReducer(reducer, comm="torch", **settings)
    source, layout = Synthetic(N, rank, SEED), Layout.of([("gradient", N)])
    found = []
    for step in range(STEPS):
        found.append(counts(allreducer.reduce(Bucket(source.at(step), layout))))
        allreducer.end_step()
    allreducer.close()
    return found


def counts(stats: StepStats) -> tuple[int, ...]:
    return (
        stats.bytes_sent,
        stats.bytes_received,
        stats.messages_sent,
        stats.messages_received,
        stats.local_count,
        stats.global_count,
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("reducer", sorted(REDUCERS))
def test_counts_are_those_of_real_processes(reducer: str, size: int, gloo_worlds: dict[int, GlooWorld]) -> None:
    course = Course(density=DENSITY, num_warmup=0, num_steps=STEPS)
    simulated = simulate_run(reducer, size, SyntheticSource(N, SEED), course)
    real = gloo_worlds[size].run(counts_over_gloo, reducer)
    for rank in range(size):
        assert [counts(step[rank].stats) for step in simulated.steps] == real[rank], f"rank {rank}"
