"""AllReducer: phases, schedules, state, guards that fire, policies; over simulated ranks."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk import AllReducer, Bucket, GuardViolation, Layout, NonFiniteGradientError, SparseVector, wire
from oktopk.comm import CommunicationError, InjectedFault, World, simulate
from oktopk.comm.base import Communicator
from oktopk.comm.simulator import SimulatedCommunicator
from oktopk.reduce.base import ReducerSettings, SparseReduction
from oktopk.reduce.oktopk import oktopk as make_oktopk
from oktopk.reduce.topk_allgather import topk_a
from oktopk.registry import REDUCERS
from oktopk.select.base import Accumulated
from tests import gradients
from tests.integration.training import FakeTrainer

N = 300
LAYOUT = Layout.of([("a", 100), ("b", 150), ("c", 50)])
QUICK: dict[str, Any] = {"warmup_steps": 2, "density": 0.05, "min_sparse_numel": 0, "tau": 4, "tau_prime": 2}


def bucket(rank: int, step: int, kind: str = "heavy") -> Bucket:
    return Bucket(gradients.make(kind, N, rank, step, seed=1), LAYOUT)


def run_steps(allreducer: AllReducer, rank: int, steps: range) -> list[Tensor]:
    means = []
    for step in steps:
        current = bucket(rank, step)
        allreducer.reduce(current)
        allreducer.end_step()
        means.append(current.flat)
    return means


# --- phases


def test_dense_until_warm_up_ends_then_sparse() -> None:
    def run(comm: Communicator) -> list[str]:
        allreducer = AllReducer("oktopk", comm=comm, **QUICK)
        phases: list[str] = []
        allreducer.add_listener(lambda stats: phases.append(stats.phase))
        run_steps(allreducer, comm.rank, range(5))
        return phases

    assert simulate(2, run) == [["dense", "dense", "sparse", "sparse", "sparse"]] * 2


def test_small_buckets_stay_dense() -> None:
    allreducer = AllReducer("oktopk", **(QUICK | {"warmup_steps": 0, "min_sparse_numel": N + 1}))
    assert allreducer.reduce(bucket(0, 0)).phase == "dense"
    allreducer = AllReducer("oktopk", **(QUICK | {"warmup_steps": 0, "min_sparse_numel": N}))
    assert allreducer.reduce(bucket(0, 0)).phase == "sparse"


def test_density_schedule_is_followed_and_checked() -> None:
    allreducer = AllReducer("topkA", **(QUICK | {"warmup_steps": 0, "density": lambda step: 0.5 / (step + 1)}))
    counts = []
    allreducer.add_listener(lambda stats: counts.append((stats.k, stats.global_count)))
    run_steps(allreducer, 0, range(3))
    assert counts == [(150, 150), (75, 75), (50, 50)]
    allreducer = AllReducer("topkA", **(QUICK | {"warmup_steps": 0, "density": lambda step: 1.0 - step}))
    run_steps(allreducer, 0, range(1))
    with pytest.raises(ValueError, match=r"density=0\.0 at step 1: must be in \(0, 1\]"):
        allreducer.reduce(bucket(0, 1))


@pytest.mark.parametrize(
    ("reducer", "warmup", "steps", "dense", "warning"),
    [
        ("oktopk", 128, 28, 28, "warmup_steps=128 takes up all 28 steps"),
        ("oktopk", 128, 140, 128, None),
        ("oktopk", 0, 5, 0, None),
        ("dense", 0, 5, 5, "reducer 'dense' never compresses"),
    ],
)
def test_outline(
    reducer: str, warmup: int, steps: int, dense: int, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    outline = AllReducer(reducer, warmup_steps=warmup).outline(steps)
    assert (outline.dense_steps, outline.sparse_steps) == (range(dense), range(dense, steps))
    if warning is None:
        assert outline.warning is None
        assert not caplog.records
    else:
        assert warning in str(outline)
        assert warning in caplog.text


ESTIMATING = {"topkAopt", "gaussiank", "gaussiankconcat", "gaussiankSA"}
"""They apply from 3k/4 to k of these heavy-tailed gradients, the others exactly k = 15."""


@pytest.mark.parametrize("name", list(REDUCERS))
def test_one_rank_needs_no_launcher_and_applies_the_largest_of_what_it_owes(name: str) -> None:
    allreducer = AllReducer(name, guard_every=1, **QUICK)
    owed = torch.zeros(N)
    for step, mean in enumerate(run_steps(allreducer, 0, range(6))):
        owed += bucket(0, step).flat
        applied = mean != 0.0
        assert torch.equal(mean[applied], owed[applied])
        if step < 2 or name == "dense":
            assert torch.equal(mean, owed)
        else:
            least, most = (12 if name in ESTIMATING else 15), 15
            assert least <= int(applied.sum()) <= most, f"step {step}"
            assert float(owed[applied].abs().min()) >= float(owed[~applied].abs().max())
        owed[applied] = 0.0
    residual = allreducer.state_dict()["feedback"]["residual"]
    if name == "dense":
        assert residual == {}
    else:
        assert torch.equal(torch.cat([residual[slot.name] for slot in LAYOUT.slots]), owed)


# --- beginning with the next bucket


def pair(rank: int, step: int) -> list[Bucket]:
    other = Bucket(gradients.make("heavy", 80, rank, step, 4), Layout.of([("d", 50), ("e", 30)]))
    return [bucket(rank, step), other]


def run_ahead(allreducer: AllReducer, rank: int, steps: range, ahead: bool) -> list[Tensor]:
    """Two buckets a step; the second is prepared before the first is reduced."""
    means = []
    for step in steps:
        both = pair(rank, step)
        if ahead:
            allreducer.prepare(both[0])
            allreducer.prepare(both[1])
        for current in both:
            allreducer.reduce(current)
            means.append(current.flat)
        allreducer.end_step()
    return means


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["oktopk", "topkA", "dense"])
def test_preparing_buckets_changes_no_bit(name: str, momentum: float, nonfinite: str) -> None:
    settings = QUICK | {"momentum_correction": momentum, "nonfinite": nonfinite, "guard_every": 1}
    plain, prepared = (
        simulate(2, lambda comm, a=ahead: run_ahead(AllReducer(name, comm=comm, **settings), comm.rank, range(8), a))
        for ahead in (False, True)
    )
    for left, right in zip(plain, prepared, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_bucket_prepared_for_a_step_that_is_skipped_leaves_nothing_behind(momentum: float) -> None:
    settings = QUICK | {"momentum_correction": momentum, "nonfinite": "skip", "tau": 1}

    def run(comm: Communicator, with_bad_step: bool) -> list[Tensor]:
        allreducer = AllReducer("topkA", comm=comm, **settings)
        means = run_ahead(allreducer, comm.rank, range(4), ahead=True)
        if with_bad_step:
            bad, other = pair(comm.rank, 7)
            bad.flat[3] = float("nan")
            allreducer.prepare(bad)
            allreducer.prepare(other)
            assert allreducer.reduce(bad).skipped
            assert allreducer.reduce(other).skipped
            allreducer.end_step()
        return means + run_ahead(allreducer, comm.rank, range(4, 7), ahead=True)

    with_skip = simulate(2, lambda comm: run(comm, True))
    for left, right in zip(with_skip, simulate(2, lambda comm: run(comm, False)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_what_was_prepared_before_a_state_was_loaded_does_not_count() -> None:
    """A step that cannot be finished was begun with more than one bucket; then its state is restored."""

    def run(comm: Communicator, with_bad_step: bool) -> list[Tensor]:
        allreducer = AllReducer("topkA", comm=comm, **QUICK)
        means = run_ahead(allreducer, comm.rank, range(4), ahead=False)
        if with_bad_step:
            saved = allreducer.state_dict()
            bad, other = pair(comm.rank, 7)
            bad.flat[3] = float("nan")
            allreducer.prepare(bad)
            allreducer.prepare(other)
            with pytest.raises(NonFiniteGradientError):
                allreducer.reduce(bad)
            allreducer.load_state_dict(saved)
        return means + run_ahead(allreducer, comm.rank, range(4, 7), ahead=False)

    restored = simulate(2, lambda comm: run(comm, True))
    for left, right in zip(restored, simulate(2, lambda comm: run(comm, False)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- state


@pytest.mark.parametrize("name", list(REDUCERS))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_saved_state_continues_bit_identically(name: str, momentum: float) -> None:
    """7 steps straight equal 4, saved and restored into fresh objects, and 3 more; the border lies inside a period."""
    settings = QUICK | {"momentum_correction": momentum}

    def straight(comm: Communicator) -> list[Tensor]:
        return run_steps(AllReducer(name, comm=comm, **settings), comm.rank, range(7))

    def interrupted(comm: Communicator) -> list[Tensor]:
        first = AllReducer(name, comm=comm, **settings)
        means = run_steps(first, comm.rank, range(4))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        run_steps(first, comm.rank, range(4, 5))  # the old one goes on and must not matter
        file.seek(0)
        second = AllReducer(name, comm=comm, **settings)
        second.load_state_dict(torch.load(file, weights_only=True))
        return means + run_steps(second, comm.rank, range(4, 7))

    for whole, pieces in zip(simulate(3, straight), simulate(3, interrupted), strict=True):
        for step, (left, right) in enumerate(zip(whole, pieces, strict=True)):
            assert torch.equal(left, right), f"step {step}"


def test_state_of_another_rank_world_or_reducer_is_refused() -> None:
    states = simulate(2, lambda comm: AllReducer("oktopk", comm=comm).state_dict())
    with pytest.raises(ValueError, match=r"saved state has size=2, this AllReducer has 1"):
        AllReducer("oktopk").load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"saved state has reducer='oktopk', this AllReducer has 'gtopk'"):
        AllReducer("gtopk").load_state_dict(states[0])


def test_two_allreducers_share_nothing() -> None:
    alone, beside, other = (AllReducer("oktopk", **QUICK) for _ in range(3))
    expected = run_steps(alone, 0, range(6))
    seen = []
    for step in range(6):
        seen += run_steps(beside, 0, range(step, step + 1))
        run_steps(other, 5, range(step, step + 1))
    assert all(torch.equal(left, right) for left, right in zip(expected, seen, strict=True))


# --- guards: they pass on what is right, and fire on each injected fault


Change = Callable[[SparseReduction, int], SparseReduction]


def tampered(change: Change) -> Callable[[ReducerSettings], Any]:
    """oktopk whose result is changed on its way back; `change(reduction, rank)`."""

    def tampered_oktopk(settings: ReducerSettings) -> Any:
        reducer = make_oktopk(settings)
        reduce = reducer.reduce

        def reduce_and_change(acc: Accumulated, comm: Communicator, k: int) -> SparseReduction:
            return change(reduce(acc, comm, k), comm.rank)

        reducer.reduce = reduce_and_change  # type: ignore[method-assign]
        return reducer

    return tampered_oktopk


def without_first(vector: SparseVector) -> SparseVector:
    return vector.slice(1, len(vector))


def drop_pair(r: SparseReduction, _: int) -> SparseReduction:
    """Everyone loses the same pair of the result."""
    return replace(r, mean=without_first(r.mean))


def apply_twice(r: SparseReduction, rank: int) -> SparseReduction:
    """Rank 1 does not take a pair that was applied out of its residual: it will be applied again."""
    return r if rank != 1 else replace(r, contribution=without_first(r.contribution))


def misplace(r: SparseReduction, _: int) -> SparseReduction:
    """A value lands on another index, the same on all ranks: sums alone would not see it."""
    indices = r.mean.indices.clone()
    free = next(i for i in range(N) if i not in indices.tolist())
    indices[0] = free
    return replace(r, mean=SparseVector(indices, r.mean.values, N))


def flip_low_bit(r: SparseReduction, rank: int) -> SparseReduction:
    return flip_bit(r, rank, 0)


def flip_high_bit(r: SparseReduction, rank: int) -> SparseReduction:
    return flip_bit(r, rank, 29)


def flip_bit(r: SparseReduction, rank: int, bit: int) -> SparseReduction:
    """Of one value, on rank 2 alone."""
    if rank != 2:
        return r
    bits = r.mean.values.clone().view(torch.int32)
    bits[0] ^= 1 << bit
    return replace(r, mean=SparseVector(r.mean.indices, bits.view(torch.float32), N))


def run_guarded(change: Change, guard_every: int = 1) -> None:
    def run(comm: Communicator) -> None:
        settings = QUICK | {"guard_every": guard_every}
        run_steps(AllReducer(tampered(change), comm=comm, **settings), comm.rank, range(5))

    simulate(4, run)


def test_guards_pass_where_nothing_is_wrong() -> None:
    run_guarded(lambda reduction, _: reduction)


def test_guards_are_off_by_default() -> None:
    run_guarded(drop_pair, guard_every=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_pair, r"step 2, bucket a\.\.c: the conservation law is broken by .* on rank 3"),
        (apply_twice, r"step 2, bucket a\.\.c: the conservation law is broken by .* on rank 3"),
        (misplace, r"step 2, bucket a\.\.c: the conservation law is broken by .* on rank 3"),
        (flip_low_bit, r"step 2, bucket a\.\.c: what was applied differs between ranks: rank\(s\) 2 of 4"),
        (flip_high_bit, r"step 2, bucket a\.\.c: what was applied differs between ranks: rank\(s\) 2 of 4"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_guards_fire(change: Change, message: str) -> None:
    with pytest.raises(GuardViolation, match=message):
        run_guarded(change)


@pytest.mark.parametrize("change", [drop_pair, apply_twice])
def test_guards_see_one_ordinary_pair_among_many(change: Change) -> None:
    """20,000 pairs on each of 16 ranks, and the first of them goes wrong."""
    layout = Layout.of([("w", 200_000)])

    def run(comm: Communicator) -> None:
        allreducer = AllReducer(tampered(change), comm=comm, guard_every=1, warmup_steps=0, density=0.1)
        allreducer.reduce(Bucket(gradients.make("heavy", 200_000, comm.rank, 0, 1), layout))

    with pytest.raises(GuardViolation, match=r"elements 0 to 195 \(from w on"):
        simulate(16, run)


def test_guards_look_only_at_every_nth_step() -> None:
    with pytest.raises(GuardViolation, match="step 3,"):
        run_guarded(drop_pair, guard_every=3)


@pytest.mark.parametrize("name", list(REDUCERS))
@pytest.mark.parametrize("kind", gradients.KINDS)
def test_guards_raise_no_false_alarm(name: str, kind: str) -> None:
    def run(comm: Communicator) -> None:
        allreducer = AllReducer(name, comm=comm, guard_every=1, **(QUICK | {"warmup_steps": 1}))
        for step in range(6):
            allreducer.reduce(bucket(comm.rank, step, kind))
            allreducer.end_step()

    simulate(3, run)


# --- non-finite gradients


def poisoned(rank: int, step: int, value: float, where: int) -> Bucket:
    b = bucket(rank, step)
    b.flat[where] = value
    return b


@pytest.mark.parametrize("name", list(REDUCERS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_raises_on_all_ranks_and_a_saved_state_continues(name: str, value: float) -> None:
    def run(comm: Communicator, with_bad_step: bool) -> tuple[str, list[Tensor]]:
        allreducer = AllReducer(name, comm=comm, **QUICK)
        run_steps(allreducer, comm.rank, range(3))
        message = ""
        if with_bad_step:
            saved = allreducer.state_dict()
            bad = poisoned(comm.rank, 3, value, 120) if comm.rank == 1 else bucket(comm.rank, 3)
            with pytest.raises(NonFiniteGradientError) as caught:
                allreducer.reduce(bad)
            with pytest.raises(RuntimeError, match=r"state_dict\(\) in the middle of a step"):
                allreducer.state_dict()
            allreducer.load_state_dict(saved)
            message = str(caught.value)
        return message, run_steps(allreducer, comm.rank, range(3, 6))

    with_bad, without = (simulate(3, lambda comm, b=bad: run(comm, b)) for bad in (True, False))
    for (message, means), (_, expected) in zip(with_bad, without, strict=True):
        assert message.startswith("step 3, bucket a..c: NaN, Inf or a value too large to sum in the gradient of")
        assert "'b' on rank 1. " in message
        assert all(torch.equal(left, right) for left, right in zip(means, expected, strict=True))


@pytest.mark.parametrize("name", list(REDUCERS))
def test_skip_leaves_the_step_out_and_counts_it(name: str) -> None:
    """The first bucket of the step is fine and already reduced: it must not have happened either."""

    def run(comm: Communicator, with_bad_step: bool) -> list[Tensor]:
        allreducer = AllReducer(name, comm=comm, nonfinite="skip", **(QUICK | {"tau_prime": 1, "tau": 1}))
        means = []
        for step in range(6):
            if step == 3 and with_bad_step:
                fine = Bucket(gradients.make("heavy", 80, comm.rank, step, 4), Layout.of([("d", 80)]))
                bad = poisoned(comm.rank, step, float("nan"), 5) if comm.rank == 0 else bucket(comm.rank, step)
                assert not allreducer.reduce(fine).skipped
                assert allreducer.reduce(bad).skipped
                assert float(bad.flat.abs().sum()) == 0.0
                allreducer.end_step()
                assert allreducer.last_step_skipped
                assert allreducer.num_skipped_steps == 1
            fine = Bucket(gradients.make("heavy", 80, comm.rank, step, 3), Layout.of([("d", 80)]))
            allreducer.reduce(fine)
            means += [fine.flat, *run_steps(allreducer, comm.rank, range(step, step + 1))]
            assert not allreducer.last_step_skipped
        return means

    with_skip = simulate(3, lambda comm: run(comm, True))
    without = simulate(3, lambda comm: run(comm, False))
    for left, right in zip(with_skip, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class NothingButFinite:
    """Passes everything on, and looks at what leaves: a communicator for one test."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def __getattr__(self, name: str) -> Any:
        def checked(*arguments: Any) -> Any:
            for buffer in arguments[0] if isinstance(arguments[0], list) else arguments[:1]:
                if isinstance(buffer, Tensor) and buffer.dtype == torch.uint8 and buffer.numel():
                    assert bool(torch.isfinite(wire.decode(buffer, 10).values).all()), "Inf or NaN left on the wire"
            return getattr(self._inner, name)(*arguments)

        return checked


@pytest.mark.parametrize("name", [name for name in REDUCERS if name != "gaussiank"])  # sends halves that do not decode
def test_values_whose_sum_would_overflow_are_refused_before_anything_is_sent(name: str) -> None:
    """Finite on every rank, but +3e38 twice is Inf, and with -3e38 twice it would become NaN in a tree of sums."""

    def run(comm: Communicator) -> str:
        allreducer = AllReducer(name, comm=NothingButFinite(comm), **(QUICK | {"warmup_steps": 0}))
        huge = Bucket(torch.zeros(10), Layout.of([("a", 4), ("b", 6)]))
        huge.flat[3] = 3e38 if comm.rank < 2 else -3e38
        with pytest.raises(NonFiniteGradientError) as caught:
            allreducer.reduce(huge)
        allreducer.load_state_dict(AllReducer(name, comm=comm).state_dict())
        fine = Bucket(torch.full((10,), 8e37), Layout.of([("a", 4), ("b", 6)]))
        allreducer.reduce(fine)
        assert bool(torch.isfinite(fine.flat).all())
        return str(caught.value)

    assert all("'a' on rank 0, 'a' on rank 1" in message for message in simulate(4, run))


# --- failures


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all_v", "all_gather_v"])
def test_a_failing_rank_breaks_off_the_others(operation: str) -> None:
    outcomes: dict[int, str] = {}

    def run(comm: Communicator) -> None:
        try:
            run_steps(AllReducer("oktopk", comm=comm, **(QUICK | {"warmup_steps": 0})), comm.rank, range(4))
        except (InjectedFault, CommunicationError) as error:
            outcomes[comm.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises(InjectedFault, match=f"rank 1: injected fault at {operation}, call 2"):
        simulate(3, run, World(3).fail_at(1, operation, call=2))
    assert outcomes[1].startswith("InjectedFault")
    for rank in (0, 2):
        assert outcomes[rank].startswith(f"CommunicationError: rank {rank} of 3: {operation} failed: rank 1 failed")


def test_a_rank_that_stops_taking_part_is_not_waited_for_for_ever() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank != 1:
            run_steps(AllReducer("topkA", comm=comm, **QUICK), comm.rank, range(1))

    with pytest.raises(CommunicationError, match=r"rank \d of 3: all_reduce failed: .*a peer did not take part"):
        simulate(3, run, World(3, timeout_s=0.3))


def test_ranks_that_call_different_operations_are_told() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.all_reduce(torch.zeros(1))

    with pytest.raises(CommunicationError, match=r"called (barrier|all_reduce) where others called"):
        simulate(2, run)


# --- listeners


def test_a_trainer_is_told_of_once_and_its_absence_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "oktopk"):
        run_steps(AllReducer("oktopk", **QUICK), 0, range(4))
        assert caplog.records == []
        trainer = FakeTrainer()
        run_steps(AllReducer("oktopk", trainer=trainer, **QUICK), 0, range(4))
    assert [r.levelname for r in caplog.records if "first metric tracked" in r.message] == ["DEBUG"]
    assert len(caplog.records) == 1
    assert trainer.sparsities == [0.0, 0.0, 1 - 15 / N, 1 - 15 / N]


def test_listeners_and_watchers_are_called_until_their_handles_remove_them() -> None:
    allreducer = AllReducer("oktopk", **QUICK)
    told: list[int] = []
    seen: list[tuple[int, bool]] = []
    listening = allreducer.add_listener(lambda stats: told.append(stats.step))
    watching = allreducer.watch(lambda step, b: seen.append((step, torch.equal(b.flat, bucket(0, step).flat))))
    run_steps(allreducer, 0, range(3))
    listening.remove()
    run_steps(allreducer, 0, range(3, 4))
    watching.remove()
    run_steps(allreducer, 0, range(4, 5))
    assert told == [0, 1, 2]
    assert seen == [(0, True), (1, True), (2, True), (3, True)]


# --- who closes a communicator


class Closable(SimulatedCommunicator):
    def __init__(self) -> None:
        super().__init__(World(1), 0)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_only_a_communicator_that_was_made_here_is_closed() -> None:
    given, made = Closable(), Closable()
    AllReducer("oktopk", comm=given).close()
    assert given.closed == 0
    allreducer = AllReducer("oktopk", comm=lambda _: made)
    allreducer.close()
    allreducer.close()
    assert made.closed == 1


def test_skipped_steps_are_told_as_skipped_and_not_collected() -> None:
    """In warm-up as in the sparse phase, and for the buckets that were fine before the bad one came."""
    trainer, told = FakeTrainer(), []
    allreducer = AllReducer("oktopk", trainer=trainer, nonfinite="skip", **(QUICK | {"warmup_steps": 1}))
    allreducer.add_listener(told.append)
    for step in range(2):
        allreducer.reduce(Bucket(gradients.make("heavy", 80, 0, step, 4), Layout.of([("d", 80)])))
        allreducer.reduce(poisoned(0, step, float("nan"), 5))
        allreducer.end_step()
    assert [(stats.phase, stats.skipped) for stats in told] == [("dense", True)] * 2 + [("sparse", True)] * 2
    assert trainer.sparsities == []


def test_traffic_of_others_is_not_counted_as_ours() -> None:
    def run(comm: Communicator) -> list[int]:
        allreducer = AllReducer("dense", comm=comm, **QUICK)
        allreducer.comm.broadcast(torch.zeros(1000), 0)
        return [allreducer.reduce(bucket(comm.rank, step)).bytes_sent for step in range(2)]

    for first, second in simulate(2, run):
        assert first == second


def test_counted_bytes_are_those_of_the_exchange() -> None:
    """Two ranks, topkA: the votes on the gradient's health, then a length, a header of 32 bytes and 15 pairs each way.

    The votes are P + 1 integers, and one more for each parameter where some rank has none for some of them.

    Of the indices, the first takes 8 bytes and each gap one, or two where it is longer than 254: 24 in whole words.
    """

    def run(comm: Communicator, missing: frozenset[str]) -> oktopk.StepStats:
        allreducer = AllReducer(topk_a, comm=comm, **(QUICK | {"warmup_steps": 0}))
        return allreducer.reduce(replace(bucket(comm.rank, 0), missing=missing if comm.rank == 0 else frozenset()))

    for stats in simulate(2, lambda comm: run(comm, frozenset())):
        assert stats.local_count == stats.k == 15
        assert stats.bytes_sent == stats.bytes_received == 8 * (2 + 1) + 8 + 32 + 24 + 15 * 4
        assert stats.messages_sent == stats.messages_received == 1 + 2
    one, other = simulate(2, lambda comm: run(comm, frozenset({"c"})))
    assert one.bytes_received == other.bytes_sent == 8 * (2 + 1) + 8 * 3 + 8 + 32 + 24 + 15 * 4
    assert one.messages_received == other.messages_sent == 2 + 2
