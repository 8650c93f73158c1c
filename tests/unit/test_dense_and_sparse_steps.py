"""Which steps are dense and which sparse, what is said of it, and that changing one's mind loses nothing."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk import AllReducer, Bucket, Layout, Outline, Settings
from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.registry import REDUCERS
from oktopk.schedule import Schedule
from tests import gradients

N = 120
LAYOUT = Layout.of([("a", 50), ("b", 70)])
QUICK: dict[str, Any] = {"warmup_steps": 2, "density": 0.05, "min_sparse_numel": 0, "tau": 4, "tau_prime": 2}
NOT_DECIDED = -1


def gradient(rank: int, step: int) -> Tensor:
    """Small whole numbers: their sums, and halves and quarters of them, are exact."""
    return gradients.make("ties", N, rank, step, seed=3)


def bucket(numel: int, dense: bool = False) -> Bucket:
    return Bucket(torch.zeros(numel), Layout.of([("a", numel)]), dense=dense)


def take_steps(allreducer: AllReducer, rank: int, decisions: Mapping[int, int | None], steps: range) -> list[str]:
    """Phases of these steps; before some of them something is decided."""
    phases = []
    for step in steps:
        if step in decisions:
            allreducer.compress_from(decisions[step])
        phases.append(allreducer.reduce(Bucket(gradient(rank, step), LAYOUT)).phase[0])
        allreducer.end_step()
    return phases


# --- the schedule


@pytest.mark.parametrize(
    ("decided", "expected"),
    [
        (NOT_DECIDED, "ddddssss"),
        (0, "ssssssss"),
        (2, "ddssssss"),
        (6, "ddddddss"),
        (8, "dddddddd"),
        (None, "dddddddd"),
    ],
)
def test_what_was_decided_comes_before_the_setting(decided: int | None, expected: str) -> None:
    allreducer = AllReducer("topkA", **(QUICK | {"warmup_steps": 4}))
    decisions = {} if decided == NOT_DECIDED else {0: decided}
    assert "".join(take_steps(allreducer, 0, decisions, range(8))) == expected


def test_small_buckets_are_dense_whatever_was_decided() -> None:
    schedule = Schedule(Settings(warmup_steps=4, min_sparse_numel=100), "oktopk")
    schedule.decided_first_sparse_step = 0
    sizes = (1, 99, 100, 101)
    assert [schedule.phase(0, bucket(numel)) for numel in sizes] == ["dense", "dense", "sparse", "sparse"]
    assert [schedule.phase(0, bucket(numel, dense=True)) for numel in sizes] == ["dense"] * 4
    schedule.decided_first_sparse_step = None
    assert [schedule.phase(step, bucket(100)) for step in (0, 3, 4, 5)] == ["dense", "dense", "sparse", "sparse"]


@given(
    warmup=st.integers(0, 20),
    decided=st.one_of(st.just(NOT_DECIDED), st.none(), st.integers(0, 30)),
    num_steps=st.integers(1, 25),
)
@settings(max_examples=60, deadline=None)
def test_the_outline_is_what_happens(warmup: int, decided: int | None, num_steps: int) -> None:
    allreducer = AllReducer("oktopk", warmup_steps=warmup, min_sparse_numel=0)
    if decided != NOT_DECIDED:
        allreducer.compress_from(decided)
    outline = allreducer.outline(num_steps)
    phases = take_steps(allreducer, 0, {}, range(num_steps))
    assert [*outline.dense_steps, *outline.sparse_steps] == list(range(num_steps))
    assert phases == ["d"] * len(outline.dense_steps) + ["s"] * len(outline.sparse_steps)


# --- outline() in words


def test_an_outline_says_how_many_steps_of_each_kind() -> None:
    assert str(Outline(range(3), range(3, 10), None)) == "3 dense steps, then 7 sparse steps"
    assert str(AllReducer("oktopk", warmup_steps=5).outline(12)) == "5 dense steps, then 7 sparse steps"
    assert str(Outline(range(3), range(3, 3), "why")) == "3 dense steps, then 0 sparse steps\nwarning: why"


def test_an_outline_without_sparse_steps_says_why_and_what_to_do() -> None:
    too_short = AllReducer("oktopk", warmup_steps=128).outline(28)
    assert too_short.warning == (
        "no step will be sparse: warmup_steps=128 takes up all 28 steps; set warmup_steps below 28 or train longer"
    )
    just = AllReducer("oktopk", warmup_steps=28)
    assert just.outline(28).warning
    assert just.outline(29).warning is None
    never = AllReducer("dense", warmup_steps=0).outline(5)
    assert never.warning == (
        "no step will be sparse: reducer 'dense' never compresses; choose another, such as 'oktopk'"
    )


def test_who_decided_to_stay_dense_is_not_warned_of_it(caplog: pytest.LogCaptureFixture) -> None:
    allreducer = AllReducer("oktopk", warmup_steps=4)
    allreducer.compress_from(None)
    outline = allreducer.outline(10)
    assert (outline.dense_steps, outline.sparse_steps, outline.warning) == (range(10), range(10, 10), None)
    assert not caplog.records
    allreducer.compress_from(7)
    assert str(allreducer.outline(10)) == "7 dense steps, then 3 sparse steps"


@pytest.mark.parametrize("num_steps", [0, -1])
def test_an_outline_of_no_steps_is_refused(num_steps: int) -> None:
    with pytest.raises(ValueError, match=rf"num_steps={num_steps}: must be at least 1"):
        AllReducer("oktopk").outline(num_steps)


# --- to and fro: nothing is lost, nothing is applied twice


def owed(allreducer: AllReducer) -> Tensor:
    """What this rank has not applied yet."""
    stored = allreducer.state_dict()["feedback"]["residual"]
    return torch.cat([stored.get(slot.name, torch.zeros(slot.numel)) for slot in LAYOUT.slots])


def to_and_fro(
    comm: Communicator, name: str, decisions: Mapping[int, int | None], num_steps: int
) -> tuple[list[str], Tensor, Tensor, list[bool]]:
    """Phases, the sum of all that was applied, what is owed at the end, and whether anything was after each step."""
    allreducer = AllReducer(name, comm=comm, guard_every=1, **QUICK)
    applied, phases, owing = torch.zeros(N, dtype=torch.float64), [], []
    for step in range(num_steps):
        if step in decisions:
            allreducer.compress_from(decisions[step])
        bucket = Bucket(gradient(comm.rank, step), LAYOUT)
        phases.append(allreducer.reduce(bucket).phase[0])
        allreducer.end_step()
        applied += bucket.flat.double()
        owing.append(bool(owed(allreducer).any()))
    return phases, applied, owed(allreducer), owing


def total(size: int, num_steps: int) -> Tensor:
    every = [gradient(rank, step).double() for rank in range(size) for step in range(num_steps)]
    return torch.stack(every).sum(0)


@pytest.mark.parametrize("name", [name for name in REDUCERS if name != "dense"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_dense_step_after_sparse_ones_applies_all_that_is_owed(name: str, size: int) -> None:
    """d d s s s s | d, exactly: whole numbers, and a power of two of ranks."""
    seen = simulate(size, lambda comm: to_and_fro(comm, name, {6: None}, 7))
    for phases, applied, left, owing in seen:
        assert "".join(phases) == "ddssssd"
        assert owing[:2] == [False, False]
        assert any(owing[2:6])
        assert not owing[6]
        assert not left.any()
        assert torch.equal(applied * size, total(size, 7))


def test_never_and_back_again() -> None:
    decisions = {0: 1, 3: None, 5: 6, 9: None, 10: 0}
    for phases, applied, left, owing in simulate(2, lambda comm: to_and_fro(comm, "oktopk", decisions, 12)):
        assert "".join(phases) == "dssdddsssdss"
        assert [owing[step] for step in (0, 3, 4, 5, 9)] == [False] * 5
        assert all(owing[step] for step in (2, 8, 11))
        assert left.any()
        assert not torch.equal(applied * 2, total(2, 12))


@given(
    decisions=st.dictionaries(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 12)), max_size=5),
    name=st.sampled_from(["oktopk", "topkA", "gtopk", "topkDSA"]),
    size=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=25, deadline=None)
def test_whatever_was_decided_what_was_applied_and_what_is_owed_is_all_there_was(
    decisions: dict[int, int | None], name: str, size: int
) -> None:
    seen = simulate(size, lambda comm: to_and_fro(comm, name, decisions, 10))
    everyones = torch.stack([left.double() for _, _, left, _ in seen]).sum(0)
    first = 2
    expected = []
    for step in range(10):
        if step in decisions:
            decided = decisions[step]
            first = 1000 if decided is None else decided
        expected.append("s" if step >= first else "d")
    for phases, applied, _, owing in seen:
        assert phases == expected
        assert torch.equal(applied * size + everyones, total(size, 10))
        assert not any(owing[step] for step in range(10) if phases[step] == "d")


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_with_momentum_correction_nothing_is_owed_after_a_dense_step_either(momentum: float) -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        allreducer = AllReducer("oktopk", comm=comm, momentum_correction=momentum, **QUICK)
        take_steps(allreducer, comm.rank, {}, range(5))
        before = owed(allreducer)
        take_steps(allreducer, comm.rank, {5: None}, range(5, 6))
        return before, owed(allreducer)

    for before, after in simulate(2, run):
        assert before.any()
        assert not after.any()


# --- saved with everything else


@pytest.mark.parametrize("decided", [None, 0, 3, 6])
def test_a_saved_state_carries_what_was_decided(decided: int | None) -> None:
    def run(comm: Communicator, interrupted: bool) -> tuple[list[str], Tensor]:
        allreducer = AllReducer("oktopk", comm=comm, **QUICK)
        phases = take_steps(allreducer, comm.rank, {2: decided}, range(4))
        if interrupted:
            file = io.BytesIO()
            torch.save(allreducer.state_dict(), file)
            file.seek(0)
            allreducer = AllReducer("oktopk", comm=comm, **QUICK)
            allreducer.load_state_dict(torch.load(file, weights_only=True))
        return phases + take_steps(allreducer, comm.rank, {}, range(4, 9)), owed(allreducer)

    straight, pieces = (simulate(2, lambda comm, i=i: run(comm, i)) for i in (False, True))
    for (left, left_owed), (right, right_owed) in zip(straight, pieces, strict=True):
        assert left == right
        assert torch.equal(left_owed, right_owed)


def test_loading_a_state_takes_over_that_nothing_was_decided() -> None:
    undecided = AllReducer("oktopk", **QUICK).state_dict()
    allreducer = AllReducer("oktopk", **QUICK)
    allreducer.compress_from(None)
    allreducer.load_state_dict(undecided)
    assert "".join(take_steps(allreducer, 0, {}, range(5))) == "ddsss"


def test_states_from_before_there_was_anything_to_decide_can_be_loaded() -> None:
    old = AllReducer("oktopk", **QUICK).state_dict()
    old.pop("compress_from")
    allreducer = AllReducer("oktopk", **QUICK)
    allreducer.load_state_dict(old)
    assert "".join(take_steps(allreducer, 0, {}, range(5))) == "ddsss"
