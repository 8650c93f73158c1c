"""How long a run's steps would take over another link: computing, rounds, and bytes as they were counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.workbench.plan.model import Compute, Cost, Link, Machine
from oktopk.workbench.report.run import Bucket, Run, Step
from oktopk.workbench.report.values import Values
from oktopk.workbench.study import times
from oktopk.workbench.study.times import Clock

RATE = 1e9
LINK = Link.of_figures(RATE, 1e-4, 1e-5)
MACHINE = Machine(Cost(1e-3, 1e-9), 1e-8, Cost(1e-5, 1e-9), Cost(1e-5, 1e-9), Cost(1e-5, 1e-9))
ONE_BY_ONE = Compute(0.01, 0.02, shared=True, hidden=False)
CLOCK = Clock(LINK, MACHINE, ONE_BY_ONE, num_workers=4)
N = 100_000
DENSITY = 0.01


def bucket(phase: str, n: int = N, k: int | None = None) -> Bucket:
    count = n if phase == "dense" else round(DENSITY * n) if k is None else k
    return Bucket("w", phase, n, count, count, count, None, None, None, {})


def step(
    number: int, bytes_sent: int, *buckets: Bucket, seconds: Mapping[str, float] | None = None, skipped: bool = False
) -> Step:
    """Of which the last bucket sent everything."""
    phase = "sparse" if any(each.phase == "sparse" for each in buckets) else "dense"
    carrying = [*buckets[:-1], *(replace(each, bytes_sent=bytes_sent) for each in buckets[-1:])]
    return Step(number, 0, phase, 0.0, 1.0, 0.5, skipped, 8, bytes_sent, seconds or {}, carrying)


def run(steps: Sequence[Step], reducer: str = "oktopk", norm_clip: float = 1.0) -> Run:
    """Clipped, unless said otherwise: then nothing is hidden behind backward."""
    config = Values({"reducer": reducer, "norm_clip": norm_clip})
    return Run(Path("made"), "made", config, Values({}), steps, [], {}, [], [])


def same_steps(all_bytes: Sequence[int], *buckets: Bucket) -> list[Step]:
    return [step(number, num_bytes, *buckets) for number, num_bytes in enumerate(all_bytes)]


def test_seconds_begin_at_none_and_grow_with_every_step() -> None:
    after = CLOCK.seconds_after(run(same_steps([5000, 0, 70, 5000], bucket("sparse"))))
    assert len(after) == 5
    assert after[0] == 0.0
    taken = [later - earlier for earlier, later in pairwise(after)]
    assert min(taken) > ONE_BY_ONE.forward_s + ONE_BY_ONE.backward_s
    assert taken[3] == pytest.approx(taken[0])
    assert CLOCK.seconds_after(run([])) == [0.0]


@pytest.mark.parametrize("buckets", [["sparse"], ["dense"], ["sparse", "sparse"], ["sparse", "dense", "sparse"]])
@given(sent=st.lists(st.integers(0, 10**9), min_size=1, max_size=6), rate=st.floats(1e6, 1e11))
def test_bytes_take_what_the_link_takes_where_nothing_is_hidden(
    buckets: list[str], sent: list[int], rate: float
) -> None:
    clock = replace(CLOCK, link=Link.of_figures(rate, 1e-4, 1e-5))
    shapes = [bucket(phase, n=N + 1000 * at) for at, phase in enumerate(buckets)]
    with_bytes = clock.seconds_after(run(same_steps(sent, *shapes)))
    without = clock.seconds_after(run(same_steps([0] * len(sent), *shapes)))
    for at in range(len(sent) + 1):
        assert with_bytes[at] - without[at] == pytest.approx(sum(sent[:at]) * 8 / rate, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("reducer", ["dense", "oktopk", "topkA", "gtopk"])
def test_a_slower_link_and_longer_rounds_take_longer(reducer: str) -> None:
    mine = run(same_steps([5000], bucket("dense" if reducer == "dense" else "sparse")), reducer)
    last = CLOCK.seconds_after(mine)[-1]
    assert replace(CLOCK, link=Link.of_figures(RATE / 10, 1e-4, 1e-5)).seconds_after(mine)[-1] > last
    assert replace(CLOCK, link=Link.of_figures(RATE, 1e-3, 1e-5)).seconds_after(mine)[-1] > last


def test_dense_steps_of_a_sparse_run_are_counted_as_dense() -> None:
    link = Link(1e-4, 1e-5, seconds_per_byte=1e-8, dense_byte_s=3e-8)
    clock = replace(CLOCK, link=link)
    steps = [step(0, 600_000, bucket("dense")), step(1, 600_000, bucket("sparse"))]
    sparse = clock.seconds_after(run(steps))
    hops = 4  # up and down among four workers
    computing = ONE_BY_ONE.forward_s + ONE_BY_ONE.backward_s
    assert sparse[1] == pytest.approx(computing + hops * 1e-4 + 600_000 * 3e-8)
    assert sparse[1] == clock.seconds_after(run(steps, "dense"))[1]
    # the sparse step's bytes take less each, and choosing what to send takes its time
    rounds = clock.seconds_after(run([step(0, 0, bucket("sparse"))]))[1]
    assert sparse[2] - sparse[1] == pytest.approx(rounds + 600_000 * 1e-8)
    assert rounds > computing + MACHINE.step.call_s


def test_a_bucket_that_stays_dense_beside_sparse_ones_is_counted_as_dense() -> None:
    link = Link(1e-4, 1e-5, seconds_per_byte=1e-8, dense_byte_s=3e-8)
    clock = replace(CLOCK, link=link)
    sparse, dense = bucket("sparse", 100_000, 3000), bucket("dense", 1000)

    def taken(sparse_bytes: int, dense_bytes: int) -> float:
        carrying = [replace(sparse, bytes_sent=sparse_bytes), replace(dense, bytes_sent=dense_bytes)]
        return clock.seconds_after(run([replace(step(0, 0), buckets=carrying)]))[1]

    assert taken(30_000, 10_000) - taken(0, 0) == pytest.approx(30_000 * 1e-8 + 10_000 * 3e-8)


@pytest.mark.parametrize(("reducer", "num_bytes"), [("oktopk", 9000), ("topkDSA", 9000), ("gtopk", 13_000)])
def test_a_link_carries_both_ways_at_once_and_a_tree_one_way_after_the_other(reducer: str, num_bytes: int) -> None:
    both = replace(bucket("sparse"), bytes_sent=4000, bytes_received=9000)
    with_bytes, without = (
        CLOCK.seconds_after(run([replace(step(0, 0), buckets=[each])], reducer))[1] for each in (both, bucket("sparse"))
    )
    assert with_bytes - without == pytest.approx(num_bytes * 8 / RATE)


def test_bytes_can_hide_behind_backward() -> None:
    """Unless gradients are clipped first: then buckets wait for the end of backward."""
    early = step(0, 0, replace(bucket("sparse"), bytes_sent=100_000), bucket("sparse"))
    beside, behind = (CLOCK.seconds_after(run([early], norm_clip=clip))[1] for clip in (0.0, 5.0))
    bare = replace(CLOCK, compute=replace(ONE_BY_ONE, backward_s=0.0)).seconds_after(run([early], norm_clip=0.0))[1]
    assert beside < behind
    assert beside < bare + ONE_BY_ONE.backward_s


def test_a_step_that_was_skipped_takes_time_too() -> None:
    steps = [step(0, 5000, bucket("sparse")), step(1, 96, bucket("sparse", k=0), skipped=True)]
    after = CLOCK.seconds_after(run(steps))
    assert after[2] - after[1] > ONE_BY_ONE.forward_s + ONE_BY_ONE.backward_s


# --- what a clock is made of


def made_clock(runs: Sequence[Run], monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> tuple[Clock, int, int]:
    """Beside it the size that kernels were measured at, and the threads that they had."""
    asked: list[tuple[int, int]] = []

    def measure(comm: object, device: torch.device, n: int) -> Machine:
        del comm, device
        asked.append((n, torch.get_num_threads()))
        return MACHINE

    monkeypatch.setattr(times, "measure_machine", measure)
    clock = Clock.of(runs, LINK, 4, device)
    ((size, threads),) = asked
    return clock, size, threads


def test_computing_is_the_median_over_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(io: float, forward: float, backward: float) -> dict[str, float]:
        return {"io": io, "forward": forward, "backward": backward, "wait": 9.0}

    first = run([step(0, 1, bucket("dense"), seconds=seconds(5.0, 5.0, 5.0))])  # a start takes long
    second = run(
        [
            step(0, 1, bucket("sparse", 5000), seconds=seconds(0.1, 0.2, 0.4)),
            step(1, 1, bucket("sparse", 70_000), bucket("sparse", 20_000), seconds=seconds(0.2, 0.3, 0.5)),
        ]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        clock, size, during = made_clock([first, second], monkeypatch)
        assert (during, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(threads)
    assert clock.compute.forward_s == pytest.approx(0.2 + 0.3)
    assert clock.compute.backward_s == 0.5
    assert size == N  # the largest bucket of all runs
    assert (clock.link, clock.machine, clock.num_workers) == (LINK, MACHINE, 4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_reducing_takes_the_cores_of_backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    clock, _, _ = made_clock([run([step(0, 1, bucket("dense"))])], monkeypatch, device)
    assert clock.compute.shared is (device == "cpu")
