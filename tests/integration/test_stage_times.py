"""Where the time of a reduction goes: stages add up to it, and waiting for a late rank is no one's work."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oktopk
from oktopk.comm import Communicator, SimulatedCommunicator, World, simulate
from oktopk.metrics.meter import STAGES
from oktopk.metrics.step_stats import StepStats
from tests.integration.training import Net, loss_of
from tests.worlds import GlooWorld

N = 1_000_000
LAYOUT = [("weight", N - 1000), ("bias", 1000)]
LATE_S, AT_LEAST_S = 0.2, 0.15
OFTEN: dict[str, Any] = {"density": 0.01, "warmup_steps": 4, "guard_every": 0, "timeout_s": 60.0}


def reductions(comm: Any, num_steps: int, settings: dict[str, Any]) -> list[tuple[StepStats, float]]:
    """What was told of every reduction, and how long `reduce` took by a clock around it."""
    reducer = settings.get("reducer", "oktopk")
    settings = {key: value for key, value in settings.items() if key != "reducer"}
    allreducer = oktopk.AllReducer(reducer, comm=comm, **settings)
    layout = oktopk.Layout.of(LAYOUT)
    generator = torch.Generator().manual_seed(allreducer.comm.rank)
    found = []
    for _ in range(num_steps):
        bucket = oktopk.Bucket(torch.randn(N, generator=generator), layout)
        start = time.perf_counter()
        stats = allreducer.reduce(bucket)
        found.append((stats, time.perf_counter() - start))
        allreducer.end_step()
    allreducer.close()
    return found


def unaccounted(found: list[tuple[StepStats, float]], phase: str) -> float:
    """The part of the time around a reduction that no stage has, in the best of several steps."""
    return min(abs(1.0 - sum(stats.seconds.values()) / wall_s) for stats, wall_s in found if stats.phase == phase)


def reductions_over_gloo(num_steps: int, settings: dict[str, Any]) -> list[tuple[StepStats, float]]:
    return reductions("torch", num_steps, settings)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"momentum_correction": 0.9},
        {"nonfinite": "skip", "wire_dtype": "bf16"},
        {"kernels": "torch", "thresholds": "reuse"},
        {"reducer": "gtopk"},
        {"reducer": "topkDSA"},
    ],
    ids=lambda extra: "+".join(map(str, extra.values())) or "default",
)
def test_stages_add_up_to_the_time_of_a_reduction(extra: dict[str, Any], gloo2: GlooWorld) -> None:
    for found in gloo2.run(reductions_over_gloo, 10, OFTEN | extra):
        assert {stats.phase for stats, _ in found} == {"dense", "sparse"}
        for phase in ("dense", "sparse"):
            assert unaccounted(found, phase) < 0.05, phase
        for stats, wall_s in found:
            assert tuple(stats.seconds) == STAGES
            assert all(seconds >= -1e-4 for seconds in stats.seconds.values()), stats.seconds
            assert sum(stats.seconds.values()) <= wall_s * 1.001 + 1e-4, "no moment is booked twice"


def test_stages_of_one_rank_alone_add_up_and_hold_no_waiting() -> None:
    for stats, _ in (found := reductions(SimulatedCommunicator(World(1), 0), 8, OFTEN)):
        assert stats.seconds["meet"] == 0.0
    for phase in ("dense", "sparse"):
        assert unaccounted(found, phase) < 0.05


def test_stages_add_up_on_the_simulator() -> None:
    for found in simulate(2, lambda comm: reductions(comm, 8, OFTEN)):
        assert unaccounted(found, "dense") < 0.05
        assert unaccounted(found, "sparse") < 0.05
        assert all(tuple(stats.seconds) == STAGES for stats, _ in found)


# --- a late rank


def reductions_with_a_late_rank(settings: dict[str, Any], late_steps: list[int], num_steps: int) -> list[StepStats]:
    allreducer = oktopk.AllReducer("oktopk", comm="torch", **settings)
    layout = oktopk.Layout.of(LAYOUT)
    generator = torch.Generator().manual_seed(dist.get_rank())
    told: list[StepStats] = []
    for step in range(num_steps):
        bucket = oktopk.Bucket(torch.randn(N, generator=generator), layout)
        allreducer.comm.barrier()
        if step in late_steps and dist.get_rank() == 1:
            time.sleep(LATE_S)
        told.append(allreducer.reduce(bucket))
        allreducer.end_step()
    allreducer.close()
    return told


def test_a_late_rank_shows_as_waiting_on_the_other_and_nowhere_else(gloo2: GlooWorld) -> None:
    """In the best of three steps of each phase, so that a busy machine does not matter."""
    steps = {"dense": [1, 2, 3], "sparse": [5, 6, 7]}
    punctual, late = gloo2.run(reductions_with_a_late_rank, OFTEN, [*steps["dense"], *steps["sparse"]], 9)
    for phase, late_steps in steps.items():
        assert {punctual[step].phase for step in late_steps} == {phase}
        assert any(waited_and_nothing_else(punctual[step]) for step in late_steps), [punctual[s] for s in late_steps]
        assert any(late[step].seconds["meet"] < AT_LEAST_S for step in late_steps), "the late rank waits for nobody"


def waited_and_nothing_else(stats: StepStats) -> bool:
    worked = max(stats.seconds[name] for name in STAGES if name != "meet")
    return stats.seconds["meet"] >= AT_LEAST_S > worked


def test_a_late_rank_shows_under_the_wrapper_too(gloo2: GlooWorld) -> None:
    punctual, late = gloo2.run(slow_backwards)
    assert any(waited_and_nothing_else(stats) for stats in punctual)
    assert any(stats.seconds["meet"] < AT_LEAST_S for stats in late)


def slow_backwards() -> list[StepStats]:
    """Rank 1 pauses before its backward in the last three steps; the model is one group."""
    model = Net()
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        density=0.1,
        warmup_steps=1,
        min_sparse_numel=0,
    )
    told: list[StepStats] = []
    optimizer.add_listener(told.append)
    for step in range(5):
        optimizer.zero_grad()
        dist.barrier()
        if step >= 2 and dist.get_rank() == 1:
            time.sleep(LATE_S)
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    optimizer.close()
    return told[2:]


# --- steps that are left out


def test_a_skipped_reduction_tells_the_same_stages() -> None:
    """Listeners add up `seconds` by stage: a step that was left out must not lack a name."""
    layout = oktopk.Layout.of([("weight", 4096)])

    def run(comm: Communicator) -> list[StepStats]:
        allreducer = oktopk.AllReducer("oktopk", comm=comm, nonfinite="skip", warmup_steps=0)
        told: list[StepStats] = []
        allreducer.add_listener(told.append)
        for value in (1.0, float("nan")):
            allreducer.reduce(oktopk.Bucket(torch.full((4096,), value), layout))
            allreducer.end_step()
        return told

    for taken, skipped in simulate(2, run):
        assert skipped.skipped
        assert not taken.skipped
        assert tuple(taken.seconds) == STAGES
        assert tuple(skipped.seconds) == STAGES
