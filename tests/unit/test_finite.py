"""What all ranks must know before they reduce: who holds something that cannot be summed, and what has no gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch

from oktopk.bucket import Bucket, Layout
from oktopk.checks.finite import Verdict, agree, largest_safe
from oktopk.comm import CountingCommunicator, simulate
from oktopk.comm.base import Communicator
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.select import Accumulated

LAYOUT = Layout.of([("a", 2), ("b", 3), ("c", 1)])
LARGEST = float(np.finfo(np.float32).max)


def looked_at(values: Sequence[float], num_ranks: int, floor: float = math.inf) -> Accumulated:
    """As the pass over a bucket leaves it, which compares with the limit or with something below it."""
    acc, floor = torch.empty(len(values)), min(floor, largest_safe(num_ranks))
    return Accumulated(acc, floor, TorchKernels().accumulate(None, torch.tensor(values), acc, floor, 3, acc.device))


def ask(comm: Communicator, values: Sequence[float], missing: Iterable[str] = (), floor: float = math.inf) -> Verdict:
    acc = looked_at(values, comm.size, floor)
    return agree(Bucket(acc.values, LAYOUT, frozenset(missing)), acc, comm)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 1000])
def test_so_many_of_the_largest_safe_ones_sum_to_a_finite_number(size: int) -> None:
    limit = np.float32(largest_safe(size))
    assert float(limit) == largest_safe(size)
    total = np.float32(0.0)
    for _ in range(size):
        total = np.float32(total + limit)
    assert math.isfinite(float(total))
    assert size * largest_safe(size) >= 0.98 * LARGEST  # and nothing is refused that is far from it


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, LARGEST, -LARGEST], ids=str)
@pytest.mark.parametrize(("at", "name"), [(0, "a"), (1, "a"), (2, "b"), (4, "b"), (5, "c")])
def test_the_first_bad_parameter_of_every_rank_is_named_on_all(size: int, bad: float, at: int, name: str) -> None:
    def check(comm: Communicator) -> Verdict:
        values = [1.0] * 6
        if comm.rank != 1:
            values[at] = values[5] = bad
        return ask(comm, values)

    guilty = {rank: name for rank in range(size) if rank != 1}
    assert [verdict.nonfinite for verdict in simulate(size, check)] == [guilty] * size


@pytest.mark.parametrize("floor", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("size", range(1, 20))
def test_the_limit_is_sharp_and_everyone_gets_the_same_answer(size: int, floor: float) -> None:
    """The fp32 numbers next to it: below and at it are let pass, above it is refused. One rank alone holds them."""
    limit = np.float32(largest_safe(size))
    cases = [
        (np.nextafter(limit, np.float32(0)), {}),
        (limit, {}),
        (np.nextafter(limit, np.float32(np.inf)), {size - 1: "b"}),
    ]
    for magnitude, nonfinite in cases:
        for value in (float(magnitude), -float(magnitude)):

            def check(comm: Communicator, value: float = value) -> Verdict:
                return ask(comm, [0.0, 0.0, value if comm.rank == size - 1 else 0.0, 0.0, 0.0, 0.0], floor=floor)

            assert simulate(size, check) == [Verdict(nonfinite, ())] * size


def test_what_the_pass_saw_nothing_of_is_not_looked_at() -> None:
    """It compared with the limit or less: nothing is beyond it."""
    acc = Accumulated(torch.full((6,), math.nan))
    assert simulate(1, lambda comm: agree(Bucket(acc.values, LAYOUT), acc, comm))[0] == Verdict({}, ())


# --- parameters without a gradient


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_what_nobody_has_a_gradient_for_is_unused(size: int) -> None:
    def check(comm: Communicator) -> Verdict:
        return ask(comm, [1.0] * 6, {"a", "c"} if comm.rank == 0 else {"c"})

    unused = ("a", "c") if size == 1 else ("c",)
    for verdict in simulate(size, check):
        assert tuple(slot.name for slot in verdict.unused) == unused
        assert verdict.nonfinite == {}


def test_where_everyone_has_some_gradient_for_all_nothing_is_unused() -> None:
    verdicts = simulate(3, lambda comm: ask(comm, [1.0] * 6, {"abc"[comm.rank]}))
    assert verdicts == [Verdict({}, ())] * 3


def test_both_are_told_at_once() -> None:
    def check(comm: Communicator) -> Verdict:
        return ask(comm, [1.0, 1.0, math.nan if comm.rank else 1.0, 1.0, 1.0, 1.0], {"c"})

    assert simulate(2, check) == [Verdict({1: "b"}, LAYOUT.slots[2:])] * 2


# --- what it costs


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    ("missing", "on_rank", "num_ints"),
    [((), 0, []), (("b",), 0, [3]), (("a", "b", "c"), 1, [3])],
    ids=["none is missing", "one on one rank", "all on one rank"],
)
def test_one_small_all_reduce_and_another_where_a_gradient_is_missing(
    size: int, missing: tuple[str, ...], on_rank: int, num_ints: list[int]
) -> None:
    """Of P + 1 integers; then of one for each parameter. Every rank takes part in the same ones."""

    def check(comm: Communicator) -> list[tuple[str, int]]:
        counting = CountingCommunicator(comm)
        ask(counting, [1.0] * 6, missing if comm.rank == on_rank else ())
        return [(record.operation, record.bytes_sent) for record in counting.take()]

    expected = [("all_reduce", 8 * count * (size - 1)) for count in (size + 1, *num_ints)]
    assert simulate(size, check) == [expected] * size


def test_a_rank_alone_sends_nothing() -> None:
    def check(comm: Communicator) -> tuple[Verdict, int]:
        counting = CountingCommunicator(comm)
        return ask(counting, [1.0] * 5 + [math.inf], {"a"}), len(counting.take())

    assert simulate(1, check) == [(Verdict({0: "c"}, LAYOUT.slots[:1]), 0)]
