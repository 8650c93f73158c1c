"""Dense exchanges in fewer bytes: what is rounded away is known, and owed by whoever rounded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oktopk
from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.comm.counting import CountingCommunicator
from oktopk.reduce.dense import Dense
from oktopk.reduce.narrow import PACKINGS, Packing
from oktopk.select.base import Accumulated
from tests.integration.training import Net, flat_parameters, loss_of

NARROW = {name: packing for name, packing in PACKINGS.items() if packing is not None}
LAW = settings(max_examples=60, deadline=None)


def values_of(n: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Some large, some small, some zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * torch.exp(2.0 * torch.randn(n, generator=generator)) * scale
    return values * (torch.rand(n, generator=generator) > 0.1)


@pytest.mark.parametrize("packing", NARROW.values(), ids=NARROW)
@LAW
@given(n=st.integers(0, 5000), seed=st.integers(0, 99), scale=st.sampled_from([1e-38, 1e-30, 1.0, 1e30]))
def test_what_arrives_is_near(packing: Packing, n: int, seed: int, scale: float) -> None:
    values = values_of(n, seed, scale)
    arrived = packing.unpack(packing.pack(values), n)
    assert arrived.shape == values.shape
    assert bool(torch.isfinite(arrived).all())
    assert bool((arrived[values == 0] == 0).all())
    assert bool((arrived * values >= 0).all())
    blocks = torch.nn.functional.pad(values.abs(), (0, -n % 1024)).view(-1, 1024).amax(1).repeat_interleave(1024)[:n]
    allowed = blocks / 254 if packing is NARROW["int8"] else values.abs() / 256
    assert bool(((arrived - values).abs() <= 1.001 * allowed + 1e-40).all())  # denormals have a grid of their own


def test_bytes_of_a_value() -> None:
    sizes = {name: packing.pack(torch.ones(4096)).numel() for name, packing in NARROW.items()}
    assert sizes == {"bf16": 2 * 4096, "int8": 4096 + 4 * 4}


def test_the_largest_numbers_stay_finite() -> None:
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    for packing in NARROW.values():
        assert bool(torch.isfinite(packing.unpack(packing.pack(largest), 3)).all())


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [1, 5, 1024, 5000])
def test_the_law_holds_and_all_ranks_get_the_same_bits(name: str, size: int, n: int) -> None:
    def reduce(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        values = values_of(n, comm.rank)
        before = values.clone()
        found = Dense(NARROW[name]).reduce(Accumulated(values), comm, n)
        assert torch.equal(values, before)
        return found.mean, found.left, values

    results = simulate(size, reduce)
    mean = results[0][0]
    assert all(torch.equal(mean, each[0]) for each in results)
    owed = sum(each[2].double() for each in results)
    left = sum(each[1].double() if each[1] is not None else torch.zeros(n).double() for each in results)
    mass = sum(each[2].double().abs() for each in results)
    assert bool(((size * mean.double() + left - owed).abs() <= 1e-6 * mass + 1e-30).all())
    if size > 1 and n > 5:
        assert all(each[1] is not None and float(each[1].abs().max()) > 0 for each in results)


@pytest.mark.parametrize(("name", "part"), [("bf16", 0.5), ("int8", 0.25)])
def test_bytes_sent_are_the_part_of_a_dense_ring(name: str, part: float) -> None:
    n = 40_000

    def sent(comm: Communicator, packing: Packing | None) -> int:
        counting = CountingCommunicator(comm)
        Dense(packing).reduce(Accumulated(values_of(n, comm.rank)), counting, n)
        return sum(record.bytes_sent for record in counting.take())

    narrow = simulate(4, lambda comm: sent(comm, NARROW[name]))
    ring = simulate(4, lambda comm: sent(comm, None))
    for mine, dense in zip(narrow, ring, strict=True):
        assert part <= mine / dense <= 1.01 * part + 0.002


def train(comm: Communicator, kind: str, steps: int, **how: Any) -> tuple[torch.Tensor, list[int]]:
    model = Net()
    how = {"comm": comm, "min_sparse_numel": 0, "guard_every": 1, "warmup_steps": 6, "density": 0.1, **how}
    if kind == "gradients":
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = oktopk.DistributedOptimizer(sgd, model.named_parameters(), **how)
    elif kind == "updates":
        optimizer = oktopk.optim.AdamW(model.named_parameters(), lr=0.01, **how)
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = oktopk.LocalSteps(sgd, model.named_parameters(), 2, **how)
    sent: list[int] = []
    optimizer.add_listener(lambda stats: sent.append(stats.bytes_sent) if stats.phase == "dense" else None)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
    optimizer.close()
    return flat_parameters(model), sent


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("kind", ["gradients", "updates", "local steps"])
def test_training_with_narrow_dense_steps_keeps_near(kind: str, name: str) -> None:
    """Guards look at the law and at the equality of ranks in every step."""
    narrow = simulate(3, lambda comm: train(comm, kind, 12, dense_dtype=name))
    exact = simulate(3, lambda comm: train(comm, kind, 12))
    assert all(torch.equal(narrow[0][0], each[0]) for each in narrow)
    went = float((exact[0][0] - flat_parameters(Net())).norm())
    apart = float((narrow[0][0] - exact[0][0]).norm())
    assert 0 < apart < 0.5 * went
    assert max(narrow[0][1]) < 0.75 * max(exact[0][1])


def test_what_rounding_takes_away_of_gradients_is_applied_later() -> None:
    """A gradient too small for its block's levels adds up until it is seen, and the sum of all is kept."""
    steps, n = 60, 1024
    layout = oktopk.Layout.of([("weight", n)])

    def run(comm: Communicator) -> torch.Tensor:
        allreducer = oktopk.AllReducer("dense", comm=comm, dense_dtype="int8", guard_every=1)
        applied = torch.zeros(n, dtype=torch.float64)
        for _ in range(steps):
            gradient = torch.full((n,), 0.001)
            gradient[0] = 1.0  # a level is 1/127
            allreducer.reduce(oktopk.Bucket(gradient, layout))
            allreducer.end_step()
            applied += gradient.double()
        return applied

    applied = simulate(2, run)[0]
    assert float(applied[0]) == pytest.approx(steps, rel=1e-3)
    assert bool((applied[1:] > 0).all())
    assert math.isclose(float(applied[1:].mean()), 0.001 * steps, abs_tol=1.1 / 127)
