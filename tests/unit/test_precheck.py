"""What all ranks must know before they reduce: who holds something that cannot be summed, and what has no gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oktopk.bucket import Bucket
from oktopk.checks.finite import Verdict, agree, largest_safe
from oktopk.comm import simulate
from oktopk.comm.base import Communicator

LAYOUT = Bucket.layout([("a", 2), ("b", 3), ("c", 1)])
LARGEST = float(np.finfo(np.float32).max)


def ask(comm: Communicator, values: list[float], missing: frozenset[str] = frozenset()) -> Verdict:
    acc = torch.tensor(values)
    return agree(Bucket(acc, LAYOUT, missing), acc, float(acc.abs().max()), comm)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 1000])
def test_so_many_of_the_largest_safe_ones_sum_to_a_finite_number(size: int) -> None:
    limit = np.float32(largest_safe(size))
    assert float(limit) == largest_safe(size)
    total = np.float32(0.0)
    for _ in range(size):
        total = np.float32(total + limit)
    assert math.isfinite(float(total))


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


@pytest.mark.parametrize("size", range(1, 20))
def test_at_the_limit_everyone_still_gets_the_same_answer(size: int) -> None:
    """The fp32 numbers next to it: below, at and above. One rank alone holds them."""
    limit = np.float32(largest_safe(size))
    for value in (np.nextafter(limit, np.float32(0)), limit, np.nextafter(limit, np.float32(np.inf))):

        def check(comm: Communicator, value: float = float(value)) -> Verdict:
            return ask(comm, [0.0, 0.0, value if comm.rank == 0 else 0.0, 0.0, 0.0, 0.0])

        verdicts = simulate(size, check)
        assert all(verdict == verdicts[0] for verdict in verdicts)
        assert verdicts[0].nonfinite in ({}, {0: "b"})
        assert bool(verdicts[0].nonfinite) or value <= limit


def test_a_largest_of_which_only_a_safe_bound_is_known_is_believed() -> None:
    acc = torch.ones(6)
    verdict = simulate(1, lambda comm: agree(Bucket(acc, LAYOUT), acc, 0.0, comm))[0]
    assert verdict == Verdict({}, ())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_what_nobody_has_a_gradient_for_is_unused(size: int) -> None:
    def check(comm: Communicator) -> Verdict:
        return ask(comm, [1.0] * 6, frozenset({"a", "c"} if comm.rank == 0 else {"c"}))

    unused = ("a", "c") if size == 1 else ("c",)
    for verdict in simulate(size, check):
        assert tuple(slot.name for slot in verdict.unused) == unused
        assert verdict.nonfinite == {}
