"""oktopk.optim: AdamW and SGD whose update travels, on several ranks."""

from __future__ import annotations

import copy
import functools
import gc
import io
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import oktopk
from oktopk.comm import CommunicationError, InjectedFault, World, simulate
from oktopk.comm.base import Communicator
from oktopk.metrics.step_stats import StepStats
from oktopk.optim import SGD, AdamW
from oktopk.registry import REDUCERS, make_communicator
from tests.integration.training import Net, batch, flat_parameters, held_out_loss, loss_of
from tests.integration.update_oracle import Oracle, Updates
from tests.worlds import GlooWorld, run_mpi

TINY_BUCKETS = 1200 / 2**20
SPARSE: dict[str, Any] = {
    "warmup_steps": 3, "density": 0.1, "min_sparse_numel": 0, "guard_every": 1, "bucket_cap_mb": TINY_BUCKETS,
    "timeout_s": 30.0,
}  # fmt: skip
WHOLE: dict[str, Any] = SPARSE | {"warmup_steps": 0, "density": 1.0}
Optimizer = AdamW | SGD
OURS: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda params, **settings: AdamW(params, lr=0.01, weight_decay=0.1, **settings),
    "sgd": lambda params, **settings: SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, **settings),
}
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
}
each_kind = pytest.mark.parametrize("kind", OURS)


def lightly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that run in a world: an optimizer looks through all objects for DDP models, so hide older ones."""

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        gc.freeze()
        try:
            return fn(*args)
        finally:
            gc.unfreeze()

    return call


def step_of(optimizer: torch.optim.Optimizer, model: nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def train(comm: Communicator, steps: int, kind: str = "adamw", width: int = 32, **settings: Any) -> list[Tensor]:
    """The parameters after every step."""
    model = Net(width=width)
    optimizer = OURS[kind](model.named_parameters(), comm=comm, **(SPARSE | settings))
    seen = []
    for step in range(steps):
        step_of(optimizer, model, comm.rank, step)
        seen.append(flat_parameters(model))
    optimizer.close()
    return seen


def whole_batch(size: int, steps: int, make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[Tensor]:
    """What data parallelism should equal: one process, the mean loss of all ranks."""
    model = Net()
    optimizer = make(model)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(size)) / size).backward()
        optimizer.step()
        seen.append(flat_parameters(model))
    return seen


def named_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors, with a decay and a learning rate of their own."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": 0.2},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def feedback_of(optimizer: Optimizer, kind: str) -> dict[str, Tensor]:
    """This rank's `residual` or `velocity`, by name."""
    return optimizer.training_state_dict()["allreducer"]["feedback"][kind]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


# --- dense: torch's optimizers on the mean gradient


@each_kind
def test_at_density_one_three_ranks_are_torch_on_the_mean_gradient(kind: str) -> None:
    expected = whole_batch(3, 32, lambda model: TORCHS[kind](model.parameters()))
    for seen in simulate(3, lambda comm: train(comm, 32, kind, **WHOLE)):
        for got, want in zip(seen, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@each_kind
def test_groups_and_schedulers_act_as_in_torch(kind: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])

    def run(comm: Communicator) -> Tensor:
        model = Net()
        optimizer = OURS[kind](named_groups(model), comm=comm, **WHOLE)
        scheduler = schedule(optimizer)
        for step in range(30):
            step_of(optimizer, model, comm.rank, step)
            scheduler.step()
        optimizer.close()
        return flat_parameters(model)

    def plain(with_schedule: bool) -> Tensor:
        model = Net()
        named = [group | {"params": [p for _, p in group["params"]]} for group in named_groups(model)]
        optimizer = TORCHS[kind](named)
        scheduler = schedule(optimizer)
        for step in range(30):
            optimizer.zero_grad()
            (sum(loss_of(model, rank, step) for rank in range(3)) / 3).backward()
            optimizer.step()
            if with_schedule:
                scheduler.step()
        return flat_parameters(model)

    expected = plain(True)
    assert float((plain(False) - expected).abs().max()) > 1e-2, "the schedule must have something to do"
    for parameters in simulate(3, run):
        torch.testing.assert_close(parameters, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_was_still_for_long_moves_as_in_torch(size: int) -> None:
    """After hundreds of steps of zero comes a gradient that grows: then Adam moves by more than twice lr in a step."""
    betas = (0.9, 0.99)

    def gradient(rank: int, step: int) -> Tensor:
        return torch.full((4,), 0.0 if step < 300 else 1.1 ** (step - 300) * (1.0 + rank))

    def run(comm: Communicator) -> list[Tensor]:
        p = nn.Parameter(torch.zeros(4))
        optimizer = AdamW([("p", p)], lr=0.01, betas=betas, comm=comm, **(WHOLE | {"guard_every": 0}))
        seen = []
        for step in range(330):
            p.grad = gradient(comm.rank, step)
            optimizer.step()
            seen.append(p.detach().clone())
        optimizer.close()
        return seen

    q = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([q], lr=0.01, betas=betas)
    results = simulate(size, run)
    largest = 0.0
    for step in range(330):
        before = q.detach().clone()
        q.grad = sum(gradient(rank, step) for rank in range(size)) / size
        optimizer.step()
        largest = max(largest, float((q.detach() - before).abs().max()))
        for seen in results:
            torch.testing.assert_close(seen[step], q.detach(), rtol=1e-4, atol=1e-6)
    assert largest > 0.022


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_is_used_late_starts_as_in_torch(size: int) -> None:
    """Its own steps count for the bias correction, not those of its neighbours."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(40, size, 8, generator=generator)

    def uses(step: int) -> bool:
        return step >= 20 and step % 3 != 0

    def run(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        early, late = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        optimizer = AdamW([("early", early), ("late", late)], lr=0.01, comm=comm, **(WHOLE | {"bucket_cap_mb": 25.0}))
        seen = []
        for step in range(40):
            optimizer.zero_grad()
            early.grad = noise[step, comm.rank].clone()
            late.grad = noise[step, comm.rank].clone() if uses(step) else None
            optimizer.step()
            seen.append((early.detach().clone(), late.detach().clone()))
        optimizer.close()
        return seen

    early, late = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.AdamW([early, late], lr=0.01)
    results = simulate(size, run)
    for step in range(40):
        early.grad = noise[step].mean(0)
        late.grad = noise[step].mean(0) if uses(step) else None
        optimizer.step()
        for seen in results:
            torch.testing.assert_close(seen[step][0], early.detach(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(seen[step][1], late.detach(), rtol=1e-4, atol=1e-6)
    assert float(late.detach().abs().max()) > 0.01


# --- all ranks hold the same bits


@pytest.mark.parametrize("name", list(REDUCERS))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_hold_the_same_bits_after_every_step(name: str, size: int) -> None:
    results = simulate(size, lambda comm: train(comm, 8, width=8, reducer=name, bucket_cap_mb=400 / 2**20))
    assert not torch.equal(results[0][-1], results[0][-2])
    for seen in results[1:]:
        assert all(map(torch.equal, seen, results[0]))


def test_all_ranks_of_sgd_hold_the_same_bits_after_every_step() -> None:
    results = simulate(3, lambda comm: train(comm, 12, "sgd"))
    for seen in results[1:]:
        assert all(map(torch.equal, seen, results[0]))


@pytest.mark.parametrize("nesterov", [False, True])
@each_kind
def test_all_kernels_give_the_same_bits(kind: str, nesterov: bool) -> None:
    extra = {"momentum": 0.9, "nesterov": True} if nesterov else {}

    def run(comm: Communicator, kernels: str) -> list[Tensor]:
        model = Net()
        make = AdamW if kind == "adamw" else SGD
        settings = SPARSE | {"kernels": kernels, "bucket_cap_mb": 25.0} | (extra if kind == "sgd" else {})
        optimizer = make(model.named_parameters(), lr=0.02, weight_decay=0.1, comm=comm, **settings)
        seen = []
        for step in range(STEPS):
            step_of(optimizer, model, comm.rank, step)
            seen.append(flat_parameters(model))
        optimizer.close()
        return seen

    plain, fast = (simulate(2, lambda comm, k=kernels: run(comm, k)) for kernels in ("torch", "numba"))
    assert all(map(torch.equal, plain[0], fast[0]))


STEPS = 37
"""Past the first time that the second moment is measured beside a sparse step."""


@lightly
def train_over(transport: str, kind: str, steps: int) -> Tensor:
    return train(make_communicator(transport, 20.0), steps, kind)[-1]


@pytest.mark.parametrize(("kind", "steps"), [("adamw", STEPS), ("sgd", 8)])
def test_gloo_gives_the_simulated_result(kind: str, steps: int, gloo2: GlooWorld) -> None:
    expected = simulate(2, lambda comm: train(comm, steps, kind))[0][-1]
    for result in gloo2.run(train_over, "torch", kind, steps):
        assert torch.equal(result, expected)


@pytest.mark.slow
def test_mpi_gives_the_simulated_result() -> None:
    expected = simulate(2, lambda comm: train(comm, STEPS))[0][-1]
    for result in run_mpi(2, train_over, "mpi", "adamw", STEPS):
        assert torch.equal(result, expected)


@each_kind
def test_sparse_training_learns(kind: str) -> None:
    """From what 20 dense steps reach, at a tenth of the elements."""

    def run(comm: Communicator) -> list[float]:
        model = Net(width=64)
        optimizer = OURS[kind](model.named_parameters(), comm=comm, **(SPARSE | {"warmup_steps": 20, "guard_every": 0}))
        losses = []
        for step in range(120):
            step_of(optimizer, model, comm.rank, step)
            if step in (19, 119):
                losses.append(held_out_loss(model))
        optimizer.close()
        return losses

    warm, trained = simulate(2, run)[0]
    assert trained < warm - 0.1


# --- the whole algorithm, against one written down again


NUMELS = {"matrix": 35, "bias": 20, "other": 18, "scale": 1}
GROUPS = (("matrix", "bias"), ("other", "scale"))
LEARNING_RATES, DECAYS, BETAS, SPARSE_BETA1 = (0.01, 0.03), (0.1, 0.0), (0.9, 0.99), 0.6
DENSITY, WARMUP = 0.15, 6


@functools.cache
def noise_of(rank: int, step: int, name: str) -> Tensor:
    """Something common to all ranks, something of a rank's own; now and then a spike."""
    generator = torch.Generator().manual_seed(100_000 + 1000 * step + list(NUMELS).index(name))
    common = torch.randn(NUMELS[name], generator=generator)
    generator.manual_seed(10_000_000 * (rank + 1) + 1000 * step + list(NUMELS).index(name))
    own = torch.randn(NUMELS[name], generator=generator)
    return (common + own) * (5.0 if step % 13 == 4 else 1.0)


def scale_of(name: str) -> Tensor:
    """Every fifth element has gradients a hundred times smaller than the others: denominators have a floor."""
    return torch.where(torch.arange(NUMELS[name]) % 5 == 2, 0.01, 1.0)


def start_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(NUMELS[name], generator=generator)


def schedule_of(step: int) -> float:
    return 0.3 + 0.7 * abs(1 - step % 80 / 40)


class OurSide:
    """A model of loose parameters, whose gradient is noise and a pull to zero, of several scales."""

    def __init__(self, comm: Communicator, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.rank = comm.rank
        self.parameters = {name: nn.Parameter(start_of(name).to(dtype)) for name in NUMELS}
        groups = [
            {"params": [(name, self.parameters[name]) for name in names], "lr": lr, "weight_decay": decay}
            for names, lr, decay in zip(GROUPS, LEARNING_RATES, DECAYS, strict=True)
        ]
        settings = {"warmup_steps": WARMUP, "density": DENSITY, "min_sparse_numel": 0, "guard_every": 1} | settings
        self.optimizer = AdamW(groups, betas=BETAS, sparse_beta1=SPARSE_BETA1, comm=comm, **settings)
        self.told: list[StepStats] = []
        self.optimizer.add_listener(self.told.append)

    def step(self, step: int, used: Callable[[str], bool] = lambda _: True, factor: float = 1.0) -> None:
        for group, lr in zip(self.optimizer.param_groups, LEARNING_RATES, strict=True):
            group["lr"] = lr * schedule_of(step)
        self.optimizer.zero_grad()
        losses = [
            (scale_of(name) * p * (noise_of(self.rank, step, name) + 0.5 * p)).sum() * factor
            for name, p in self.parameters.items()
            if used(name)
        ]
        if losses:
            torch.stack(losses).sum().backward()
        self.optimizer.step()

    def flat(self, names: tuple[str, ...]) -> Tensor:
        """Double, in the order in which a bucket has them: last first."""
        return torch.cat([self.parameters[name].detach().double() for name in reversed(names)])


def updates_of(names: tuple[str, ...], num_ranks: int) -> Updates:
    return Updates([NUMELS[name] for name in reversed(names)], num_ranks, BETAS, SPARSE_BETA1)


def in_bucket(by_name: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.cat([by_name[name].double() for name in reversed(names)])


def gradients_at(parameters: Tensor, names: tuple[str, ...], step: int, num_ranks: int) -> list[Tensor]:
    """Of every rank, at these parameters."""
    noise = [in_bucket({name: noise_of(rank, step, name) for name in names}, names) for rank in range(num_ranks)]
    scale = in_bucket({name: scale_of(name) for name in names}, names)
    return [scale * (each + parameters) for each in noise]


def everywhere(names: tuple[str, ...], holds: Callable[[str], bool]) -> Tensor:
    """For every element of a bucket, what holds for its parameter."""
    return torch.cat([torch.full((NUMELS[name],), holds(name)) for name in reversed(names)])


def test_every_step_is_that_of_the_oracle() -> None:
    """Parameters, momentum, second moment and what is owed of three ranks, from the definition, in fp64.

    The second moment is measured again in the 32nd sparse step, the 64th and the 96th.
    """
    num_ranks, steps = 3, 110

    def ours(comm: Communicator) -> list[dict[str, Any]]:
        side = OurSide(comm)
        seen = []
        for step in range(steps):
            side.step(step)
            state = side.optimizer.training_state_dict()
            second = {
                name: state["optimizer"]["state"][at]["exp_avg_sq"].clone() for at, name in enumerate(side.parameters)
            }
            seen.append(
                {
                    "parameters": {name: p.detach().clone() for name, p in side.parameters.items()},
                    "velocity": state["allreducer"]["feedback"]["velocity"],
                    "residual": state["allreducer"]["feedback"]["residual"],
                    "second": second,
                }
            )
        side.optimizer.close()
        return seen

    results = simulate(num_ranks, ours)
    zeros = {name: torch.zeros(numel) for name, numel in NUMELS.items()}
    for names, base, decay in zip(GROUPS, LEARNING_RATES, DECAYS, strict=True):
        start = in_bucket({name: start_of(name) for name in names}, names)
        k = max(1, round(DENSITY * len(start)))
        oracle = Oracle(start, k, decay, updates_of(names, num_ranks))
        for step in range(steps):
            gradients = gradients_at(oracle.parameters, names, step, num_ranks)
            oracle.step(gradients, base * schedule_of(step), dense=step < WARMUP)
            for rank in range(num_ranks):
                now = results[rank][step]
                where = f"{names}, step {step}, rank {rank}"
                for what, expected in (
                    ("parameters", oracle.parameters),
                    ("velocity", oracle.updates.momentum[rank]),
                    ("second", oracle.updates.second),
                    ("residual", oracle.owed[rank]),
                ):
                    got = in_bucket(zeros | now[what], names)
                    torch.testing.assert_close(
                        got, expected, rtol=1e-4, atol=2e-5, msg=lambda m, w=what, at=where: f"{w}, {at}: {m}"
                    )
        assert oracle.updates.num_cut > 0 or names == GROUPS[1], "a spike must be cut to what a rank is allowed"
        assert float(oracle.owed[0].abs().max()) > 1e-3
        assert float((oracle.parameters - start).abs().max()) > 0.1


def test_what_was_applied_and_what_is_owed_add_up_to_all_updates_ever_made() -> None:
    """A thousand steps of all that can happen; parameters in fp64, so that what was applied is known exactly.

    Which elements were applied is taken from the run; every rank's updates come from the oracle.
    """
    num_ranks, steps = 2, 1000
    limit = 8.0

    def is_nan(step: int) -> bool:
        return step % 97 == 13

    def is_dense(step: int) -> bool:
        return step < WARMUP or 400 <= step < 410

    def uses(rank: int, step: int, name: str) -> bool:
        if name == "bias":
            return step % 7 != 3 or step < WARMUP
        return not (name == "other" and rank == 1 and step % 5 == 2)

    def ours(comm: Communicator) -> tuple[list[list[Tensor]], list[dict[str, Tensor]], int, set[int]]:
        side = OurSide(
            comm, torch.float64, norm_clip=limit, nonfinite="skip", guard_every=50,
            density=lambda step: 1.0 if is_dense(step) else DENSITY, warmup_steps=0,
        )  # fmt: skip
        seen, owed = [[side.flat(names) for names in GROUPS]], []
        for step in range(steps):
            factor = float("nan") if is_nan(step) and comm.rank == step % 2 else 1.0
            side.step(step, lambda name, at=step: uses(comm.rank, at, name), factor)
            seen.append([side.flat(names) for names in GROUPS])
            if step % 50 == 49:
                owed.append(feedback_of(side.optimizer, "residual"))
        side.optimizer.close()
        dense_steps = {stats.step for stats in side.told if stats.phase == "dense" and not stats.skipped}
        return seen, owed, side.optimizer.allreducer.num_skipped_steps, dense_steps

    results = simulate(num_ranks, ours)
    for seen, _, skipped, dense_steps in results:
        assert skipped == sum(map(is_nan, range(steps)))
        assert dense_steps == {step for step in range(steps) if is_dense(step) and not is_nan(step)}
        assert all(same(now, of_0) for now, of_0 in zip(seen, results[0][0], strict=True))
    sides = [updates_of(names, num_ranks) for names in GROUPS]
    made = [torch.zeros_like(side.second) for side in sides]
    applied = [torch.zeros_like(side.second) for side in sides]
    clipped = 0
    for step in range(steps):
        before, after = results[0][0][step : step + 2]
        if is_nan(step):
            assert all(map(torch.equal, before, after))
            continue
        gradients = [gradients_at(at, names, step, num_ranks) for at, names in zip(before, GROUPS, strict=True)]
        for rank in range(num_ranks):
            mine = [
                torch.where(everywhere(names, lambda name, r=rank, at=step: uses(r, at, name)), of_all[rank], 0.0)
                for names, of_all in zip(GROUPS, gradients, strict=True)
            ]
            norm = float(torch.cat(mine).norm())
            clipped += norm > limit
            for of_all, g in zip(gradients, mine, strict=True):
                of_all[rank] = g * min(1.0, limit / norm)
        for at, (names, base, decay) in enumerate(zip(GROUPS, LEARNING_RATES, DECAYS, strict=True)):
            lr = base * schedule_of(step)
            held = everywhere(names, lambda name, at=step: not any(uses(rank, at, name) for rank in range(num_ranks)))
            assert torch.equal(before[at][held], after[at][held])
            changes = sides[at].of(gradients[at], lr, is_dense(step), held)
            moved = torch.where(held, 0.0, before[at] * (1.0 - lr * decay) - after[at])
            moved = torch.where(moved.abs() > 1e-12, moved, 0.0)
            if not is_dense(step):
                sides[at].clear(moved != 0)
            made[at] += torch.stack(changes).sum(0)
            applied[at] += moved
            if step % 50 == 49:
                owed = sum(in_bucket(owed[step // 50], names) for _, owed, _, _ in results)
                assert float(owed.abs().max()) > 1e-3
                torch.testing.assert_close(num_ranks * applied[at] + owed, made[at], rtol=0, atol=1e-5)
    assert clipped > 100


# --- momentum is cleared where something was applied


@pytest.mark.parametrize("name", [name for name in REDUCERS if name != "dense"])
def test_momentum_is_cleared_where_something_was_applied_and_nowhere_else(name: str) -> None:
    """On all ranks, whoever sent it. Dense steps clear nothing."""

    def run(comm: Communicator) -> list[tuple[str, Tensor, Tensor]]:
        side = OurSide(comm, torch.float64, reducer=name)
        seen = []
        for step in range(12):
            before = torch.cat([side.flat(names) for names in GROUPS])
            side.step(step)
            after = torch.cat([side.flat(names) for names in GROUPS])
            lr = torch.cat(
                [
                    torch.full((len(side.flat(names)),), base * schedule_of(step) * decay, dtype=torch.float64)
                    for names, base, decay in zip(GROUPS, LEARNING_RATES, DECAYS, strict=True)
                ]
            )
            velocity = feedback_of(side.optimizer, "velocity")
            momentum = torch.cat([in_bucket(velocity, names) for names in GROUPS])
            applied = (before * (1.0 - lr) - after).abs() > 1e-12
            seen.append((side.told[-1].phase, applied, momentum))
        side.optimizer.close()
        return seen

    results = simulate(3, run)
    sparse_steps = 0
    for seen in results:
        for step, (phase, applied, momentum) in enumerate(seen):
            assert phase == ("dense" if step < WARMUP else "sparse")
            if phase == "dense":
                assert bool(applied.all())
                assert bool((momentum != 0).all())
            else:
                sparse_steps += bool(applied.any()) and not bool(applied.all())
                assert torch.equal(momentum == 0, applied)
    assert sparse_steps >= 3 * 5


def test_dense_steps_leave_what_is_owed_and_clear_nothing() -> None:
    """Ranks whose momentum differs continue with the mean of it."""

    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        side = OurSide(comm, density=lambda step: 1.0 if step >= 12 else DENSITY)
        for step in range(12):
            side.step(step)
        owed, momentum = [feedback_of(side.optimizer, "residual")], [feedback_of(side.optimizer, "velocity")]
        for step in range(12, 16):
            side.step(step)
            owed.append(feedback_of(side.optimizer, "residual"))
            momentum.append(feedback_of(side.optimizer, "velocity"))
        assert {stats.phase for stats in side.told if stats.step >= 12} == {"dense"}
        side.optimizer.close()
        return owed, momentum

    results = simulate(2, run)
    for owed, momentum in results:
        assert sum(float(each.abs().sum()) for each in owed[0].values()) > 0
        assert all(same(each, owed[0]) for each in owed[1:])
        assert all(bool((each != 0).all()) for now in momentum[1:] for each in now.values())
    for of_0, of_1 in zip(results[0][1][1:], results[1][1][1:], strict=True):
        assert same(of_0, of_1)
    assert not same(results[0][1][0], results[1][1][0])


# --- the second moment


def test_the_second_moment_is_measured_beside_sparse_steps_and_said_so() -> None:
    """In every 32nd sparse step; after a dense one it begins anew. Bytes hold both exchanges."""
    dense_steps = {0, 1, 2, 70}
    due = {2 + 32, 2 + 64, 70 + 32}

    def run(comm: Communicator) -> list[tuple[StepStats, dict[int, Any]]]:
        model = nn.Linear(40, 20)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.fill_(0.1)
        optimizer = AdamW(
            model.named_parameters(),
            comm=comm,
            density=lambda step: 1.0 if step == 70 else 0.05,
            warmup_steps=3,
            min_sparse_numel=0,
        )
        told: list[StepStats] = []
        optimizer.add_listener(told.append)
        seen = []
        for step in range(110):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + comm.rank)
            model(torch.randn(4, 40, generator=generator)).square().sum().backward()
            optimizer.step()
            state = optimizer.state_dict()["state"]
            seen.append((told[-1], {at: each["exp_avg_sq"].clone() for at, each in state.items()}))
        assert len(told) == 110, "one bucket"
        optimizer.close()
        return seen

    results = simulate(2, run)
    for seen in results:
        assert {stats.step for stats, _ in seen if stats.phase == "dense"} == dense_steps
        assert {stats.step for stats, _ in seen if stats.refreshed} == due
        plain = min(stats.bytes_sent for stats, _ in seen if stats.phase == "sparse" and not stats.refreshed)
        for step, (stats, _) in enumerate(seen):
            if stats.refreshed:
                assert stats.bytes_sent >= plain + 4 * stats.n, "the mean gradient of all elements"
                assert stats.communication_size == 4 * stats.n + 8 * stats.global_count
            changed = step == 0 or not same(seen[step][1], seen[step - 1][1])
            assert changed == (step in dense_steps | due)
    assert all(same(of_0[1], of_1[1]) for of_0, of_1 in zip(*results, strict=True))


@pytest.mark.parametrize("sparse_steps_before", [0, 5])
def test_a_parameter_that_comes_late_is_measured_before_it_moves(sparse_steps_before: int) -> None:
    """Only rank 1 uses it. Until it was measured its update is zero; then it moves as far as Adam allows."""
    first = 3 + sparse_steps_before

    def run(comm: Communicator) -> tuple[list[Tensor], list[StepStats]]:
        torch_generator = torch.Generator().manual_seed(comm.rank)
        early, late = nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(10))
        optimizer = AdamW(
            [("early", early), ("late", late)], lr=0.01, weight_decay=0.0, comm=comm, **(SPARSE | {"density": 0.5})
        )
        told: list[StepStats] = []
        optimizer.add_listener(told.append)
        seen = []
        for step in range(first + 12):
            optimizer.zero_grad()
            early.grad = torch.randn(30, generator=torch_generator)
            if step >= first and comm.rank == 1:
                late.grad = torch.full((10,), 1e-3)
            optimizer.step()
            seen.append(late.detach().clone())
        optimizer.close()
        return seen, [stats for stats in told if "late" in stats.bucket]

    results = simulate(2, run)
    for seen, told in results:
        moved = next(step for step, now in enumerate(seen) if bool(now.any()))
        assert first <= moved <= first + 2
        assert any(stats.refreshed for stats in told if first <= stats.step <= moved)
        assert float(seen[moved].abs().max()) < 0.05, "by the first measurement, not by eps alone"
        assert float(seen[-1].abs().max()) > 0.01
        assert all(map(torch.equal, seen, results[0][0]))


def test_a_parameter_that_is_never_used_costs_nothing() -> None:
    """It was never measured, and nobody waits for it."""

    def run(comm: Communicator) -> list[StepStats]:
        used, never = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(10))
        optimizer = AdamW(
            [("used", used), ("never", never)], comm=comm, warmup_steps=3, density=0.02, min_sparse_numel=0
        )
        told: list[StepStats] = []
        optimizer.add_listener(told.append)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(37):
            optimizer.zero_grad()
            used.grad = torch.randn(300, generator=generator)
            optimizer.step()
        optimizer.close()
        assert not bool(never.detach().any())
        return told

    for told in simulate(2, run):
        assert {stats.unused for stats in told} == {("never",)}
        assert [stats.step for stats in told if stats.refreshed] == [2 + 32]


def test_without_warm_up_nothing_moves_before_it_is_measured() -> None:
    def run(comm: Communicator) -> list[tuple[Tensor, bool]]:
        side = OurSide(comm, warmup_steps=0)
        seen = []
        for step in range(5):
            side.step(step)
            seen.append((side.flat(GROUPS[1]), side.told[-1].refreshed))  # this group has no decay
        side.optimizer.close()
        return seen

    results = simulate(2, run)
    start = in_bucket({name: start_of(name) for name in GROUPS[1]}, GROUPS[1])
    for seen in results:
        assert torch.equal(seen[0][0], start)
        assert not torch.equal(seen[1][0], start)
        assert [refreshed for _, refreshed in seen] == [False, True, False, False, False]
        assert all(torch.equal(now, of_0) for (now, _), (of_0, _) in zip(seen, results[0], strict=True))


# --- accumulation


@pytest.mark.parametrize("way", ["local", "overlap", "clip"])
def test_accumulated_gradients_count_as_one_step(way: str) -> None:
    """Several backwards: all but the last `local`; or any number with overlap=False, and with norm_clip likewise."""

    def run(comm: Communicator) -> tuple[Tensor, int]:
        model = Net()
        extra = {"overlap": {"overlap": False}, "clip": {"norm_clip": 1e9}}.get(way, {})
        optimizer = OURS["adamw"](model.named_parameters(), comm=comm, **(WHOLE | extra))
        told: list[StepStats] = []
        optimizer.add_listener(told.append)
        for step in range(5):
            optimizer.zero_grad()
            optimizer.local = way == "local"
            for part in (10, 20):
                loss_of(model, comm.rank, part + step).backward()
            optimizer.local = False
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
        optimizer.close()
        return flat_parameters(model), len({stats.step for stats in told})

    model = Net()
    plain = TORCHS["adamw"](model.parameters())
    for step in range(5):
        plain.zero_grad()
        for rank in range(2):
            (sum(loss_of(model, rank, part + step) for part in (0, 10, 20)) / 2).backward()
        plain.step()
    for parameters, steps in simulate(2, run):
        assert steps == 5
        torch.testing.assert_close(parameters, flat_parameters(model), rtol=1e-3, atol=1e-4)


def test_without_overlap_gradients_may_be_clipped_before_the_step() -> None:
    """As torch does it: the same as norm_clip."""
    limit = 0.05

    def run(comm: Communicator, by_hand: bool) -> Tensor:
        model = Net()
        extra: dict[str, Any] = {"overlap": False} if by_hand else {"norm_clip": limit}
        optimizer = OURS["sgd"](model.named_parameters(), comm=comm, **(WHOLE | extra))
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            if by_hand:
                assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)) > limit
            optimizer.step()
        optimizer.close()
        return flat_parameters(model)

    unclipped = simulate(2, lambda comm: train(comm, 6, "sgd", **WHOLE))[0][-1]
    for left, right in zip(*(simulate(2, lambda comm, b=by: run(comm, b)) for by in (True, False)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(left, unclipped, rtol=1e-2, atol=1e-3)


def test_each_rank_clips_its_own_gradient() -> None:
    """The larger gradient counts as much as the smaller one."""

    def run(comm: Communicator) -> Tensor:
        p = nn.Parameter(torch.zeros(2))
        optimizer = SGD([("p", p)], lr=1.0, norm_clip=1.0, comm=comm, **WHOLE)
        p.grad = torch.tensor([1000.0, 0.0]) if comm.rank == 0 else torch.tensor([0.0, 2.0])
        optimizer.step()
        optimizer.close()
        return p.detach()

    for parameters in simulate(2, run):
        torch.testing.assert_close(parameters, torch.tensor([-0.5, -0.5]))


# --- parameters without gradient


class Halves(nn.Module):
    """Rank 0 uses `left`, the others `right`; `never` has no gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.never = nn.Linear(10, 3), nn.Linear(10, 3), nn.Linear(10, 3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return (self.left if rank == 0 else self.right)(x)


@each_kind
@pytest.mark.parametrize("name", ["dense", "oktopk", "gtopk"])
def test_a_parameter_without_gradient_contributes_zero_and_blocks_nobody(name: str, kind: str) -> None:
    start = Halves()

    def run(comm: Communicator) -> tuple[list[Tensor], Halves]:
        model = copy.deepcopy(start)
        optimizer = OURS[kind](model.named_parameters(), comm=comm, reducer=name, **(SPARSE | {"density": 0.5}))
        seen = []
        for step in range(7):
            optimizer.zero_grad()
            x, y = batch(comm.rank, step)
            nn.functional.cross_entropy(model(x, comm.rank), y).backward()
            optimizer.step()
            seen.append(flat_parameters(model))
        optimizer.close()
        return seen, model

    results = simulate(3, run)
    for seen, model in results:
        assert all(map(torch.equal, seen, results[0][0]))
        assert torch.equal(model.never.weight, start.never.weight), "decay moved it"
        assert not torch.equal(model.left.weight, start.left.weight)
        assert not torch.equal(model.right.weight, start.right.weight)


def test_a_step_without_any_gradient_does_nothing() -> None:
    """Neither decay, nor momentum, nor what is owed, nor the second moment: as if it had not been.

    So few elements are applied that they are exactly k: up to k/64 more depend on the reducer's last threshold.
    """

    def run(comm: Communicator, idle: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        model = Net()
        optimizer = OURS["adamw"](model.named_parameters(), comm=comm, **(SPARSE | {"density": 0.05}))
        for step in range(6):
            if step == 5:
                before = flat_parameters(model)
                for _ in range(idle):
                    optimizer.zero_grad()
                    optimizer.step()
                assert torch.equal(flat_parameters(model), before)
            step_of(optimizer, model, comm.rank, step)
        state = optimizer.training_state_dict()
        optimizer.close()
        return flat_parameters(model), state["allreducer"]["feedback"], state["optimizer"]

    for with_idle, without in zip(*(simulate(2, lambda comm, i=idle: run(comm, i)) for idle in (2, 0)), strict=True):
        assert same(with_idle, without)


SETTINGS: list[dict[str, Any]] = [
    {"dense_dtype": "int8"},
    {"dense_dtype": "bf16", "min_sparse_numel": 100},
    {"wire_dtype": "bf16", "thresholds": "reuse", "tau": 4},
    {"dense_vectors": True, "norm_clip": 0.05},
]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings))


# --- states


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def continued(
    comm: Communicator, kind: str, stop: int | None, steps: int, dtype: torch.dtype, cap_mb: float, **settings: Any
) -> list[Tensor]:
    """Parameters after every step; at `stop` all goes through a file into fresh objects, with that `bucket_cap_mb`."""
    model = Net().to(dtype)
    optimizer = OURS[kind](named_groups(model), comm=comm, **(SPARSE | settings))
    seen = []
    for step in range(steps):
        if step == stop:
            optimizer.close()
            saved = through_a_file({"model": model.state_dict(), "training": optimizer.training_state_dict()})
            model = Net(seed=77).to(dtype)
            optimizer = OURS[kind](named_groups(model), comm=comm, **(SPARSE | settings | {"bucket_cap_mb": cap_mb}))
            model.load_state_dict(saved["model"])
            optimizer.load_training_state_dict(saved["training"])
            assert same(optimizer.training_state_dict(), saved["training"])
        step_of(optimizer, model, comm.rank, step)
        seen.append(flat_parameters(model))
    optimizer.close()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stop", [2, 8], ids=["dense", "sparse"])
@each_kind
def test_a_state_continues_bit_identically(kind: str, stop: int, dtype: torch.dtype) -> None:
    steps = STEPS if (kind, stop, dtype) == ("adamw", 8, torch.float32) else 12

    def run(comm: Communicator, at: int | None) -> list[Tensor]:
        return continued(comm, kind, at, steps, dtype, TINY_BUCKETS)

    for left, right in zip(*(simulate(2, lambda comm, a=at: run(comm, a)) for at in (stop, None)), strict=True):
        assert all(map(torch.equal, left, right))


@each_setting
def test_a_state_continues_bit_identically_with_any_settings(settings: dict[str, Any]) -> None:
    def run(comm: Communicator, at: int | None) -> list[Tensor]:
        return continued(comm, "adamw", at, 14, torch.float32, TINY_BUCKETS, **settings)

    straight, resumed = (simulate(3, lambda comm, a=at: run(comm, a)) for at in (None, 8))
    for seen in (*straight, *resumed):
        assert all(map(torch.equal, seen, straight[0]))


@each_kind
def test_a_state_continues_in_other_groups(kind: str) -> None:
    """Dense steps do not depend on groups; sparse ones choose otherwise, but what is owed is carried over."""

    def run(comm: Communicator, at: int | None, settings: dict[str, Any]) -> list[Tensor]:
        return continued(comm, kind, at, 14, torch.float32, 25.0, **settings)

    whole = WHOLE | {"bucket_cap_mb": TINY_BUCKETS}
    for left, right in zip(*(simulate(2, lambda comm, a=at: run(comm, a, whole)) for at in (6, None)), strict=True):
        torch.testing.assert_close(left[-1], right[-1], rtol=1e-4, atol=1e-5)
    results = simulate(2, lambda comm: run(comm, 8, {}))
    assert all(map(torch.equal, results[0], results[1]))
    assert bool(torch.isfinite(results[0][-1]).all())


def test_decay_of_sgd_survives_other_groups_where_some_were_never_used() -> None:
    """A group that was not used yet has no decay velocity; the other's must not be lost when they are merged."""

    def run(cap_mb: float | None) -> Tensor:
        used, late = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))

        def make(cap: float) -> SGD:
            named = [("used", used), ("late", late)]
            return SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1, **(WHOLE | {"bucket_cap_mb": cap}))

        optimizer = make(TINY_BUCKETS)
        for step in range(8):
            if step == 4 and cap_mb is not None:
                state = optimizer.training_state_dict()
                optimizer.close()
                optimizer = make(cap_mb)
                optimizer.load_training_state_dict(state)
            optimizer.zero_grad()
            used.grad = torch.zeros(300)
            if step >= 6:
                late.grad = torch.zeros(300)
            optimizer.step()
        optimizer.close()
        return torch.cat([used.detach(), late.detach()])

    torch.testing.assert_close(run(25.0), run(None))
    assert float(run(None)[0]) < 0.9


def test_the_state_of_another_rank_is_refused_and_changes_nothing() -> None:
    def run(comm: Communicator) -> dict[str, Any]:
        model = Net()
        optimizer = OURS["adamw"](model.named_parameters(), comm=comm, **SPARSE)
        for step in range(5):
            step_of(optimizer, model, comm.rank, step)
        state = optimizer.training_state_dict()
        optimizer.close()
        return state

    states = simulate(2, run)

    def load_the_other(comm: Communicator) -> None:
        model = Net()
        optimizer = OURS["adamw"](model.named_parameters(), comm=comm, **SPARSE)
        step_of(optimizer, model, comm.rank, 0)
        before = optimizer.training_state_dict()
        with pytest.raises(ValueError, match=rf"saved state has rank={1 - comm.rank}, this AllReducer has {comm.rank}"):
            optimizer.load_training_state_dict(states[1 - comm.rank])
        assert same(optimizer.training_state_dict(), before)
        step_of(optimizer, model, comm.rank, 1)
        optimizer.close()

    simulate(2, load_the_other)


# --- NaN and Inf, faults


def poisoned(model: Net, value: float) -> Any:
    """The parameter that is handed in last gets this gradient: the other groups were reduced already."""
    return model.hidden.weight.register_hook(lambda g: torch.full_like(g, value))


@pytest.mark.parametrize(
    ("kind", "bad_step"),
    [("adamw", 1), ("adamw", 6), ("adamw", 34), ("sgd", 1), ("sgd", 6)],
    ids=["adamw, dense", "adamw, sparse", "adamw, measuring", "sgd, dense", "sgd, sparse"],
)
def test_nonfinite_gradients_raise_on_all_ranks_and_a_saved_state_continues(kind: str, bad_step: int) -> None:
    def run(comm: Communicator, with_bad_step: bool) -> tuple[list[Tensor], str]:
        model = Net()
        optimizer = OURS[kind](model.named_parameters(), comm=comm, **SPARSE)
        seen, error = [], ""
        for step in range(bad_step + 4):
            if step == bad_step and with_bad_step:
                saved = optimizer.training_state_dict()
                before = flat_parameters(model)
                handle = poisoned(model, float("nan")) if comm.rank == 1 else None
                error = error_of(lambda: step_of(optimizer, model, comm.rank, 40))
                if handle is not None:
                    handle.remove()
                assert torch.equal(flat_parameters(model), before)
                optimizer.load_training_state_dict(saved)
            step_of(optimizer, model, comm.rank, step)
            seen.append(flat_parameters(model))
        optimizer.close()
        return seen, error

    recovered, without = (simulate(2, lambda comm, b=bad: run(comm, b)) for bad in (True, False))
    for (seen, error), (expected, _) in zip(recovered, without, strict=True):
        assert error.startswith(f"NonFiniteGradientError: step {bad_step}, bucket hidden.")
        assert "'hidden.weight' on rank 1" in error
        assert all(map(torch.equal, seen, expected))


@pytest.mark.parametrize(("kind", "value"), [("adamw", float("nan")), ("adamw", float("inf")), ("sgd", float("nan"))])
def test_a_skipped_step_leaves_everything_as_it_was(kind: str, value: float) -> None:
    """Also in steps in which the second moment would have been measured: what was learned of it is forgotten."""
    bad_steps = {2, 6, 7, 36}  # the last dense step, and what would be the 32nd sparse one that is taken
    measured = {0, 1, 37} if kind == "adamw" else set()

    def run(comm: Communicator) -> tuple[list[Tensor], list[StepStats], int]:
        model = Net()
        optimizer = OURS[kind](model.named_parameters(), comm=comm, nonfinite="skip", **SPARSE)
        told: list[StepStats] = []
        optimizer.add_listener(told.append)
        seen = []
        for step in range(40):
            before = optimizer.training_state_dict()
            handle = poisoned(model, value) if comm.rank == 1 and step in bad_steps else None
            step_of(optimizer, model, comm.rank, step)
            if handle is not None:
                handle.remove()
            assert optimizer.allreducer.last_step_skipped == (step in bad_steps)
            if step in bad_steps:
                after = optimizer.training_state_dict()
                assert torch.equal(flat_parameters(model), seen[-1])
                assert same(after["optimizer"], before["optimizer"])
                assert same(after["allreducer"]["feedback"], before["allreducer"]["feedback"])
            learned = [state.get("exp_avg_sq") for state in optimizer.state_dict()["state"].values()]
            known = [state.get("exp_avg_sq") for state in before["optimizer"]["state"].values()]
            assert same(learned, known) == (step not in measured)
            seen.append(flat_parameters(model))
        optimizer.close()
        return seen, told, optimizer.allreducer.num_skipped_steps

    results = simulate(2, run)
    for seen, told, skipped in results:
        assert skipped == len(bad_steps)
        assert all(map(torch.equal, seen, results[0][0]))
        assert {stats.step for stats in told if stats.skipped} == bad_steps
        assert not torch.equal(seen[-1], seen[7])
        assert {stats.step for stats in told if stats.refreshed and not stats.skipped} == measured - {0, 1}


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all_v"])
def test_an_error_in_the_background_comes_out_of_step_and_nobody_hangs(operation: str) -> None:
    caught: dict[int, str] = {}

    def run(comm: Communicator) -> None:
        model = Net()
        optimizer = OURS["adamw"](model.named_parameters(), comm=comm, **SPARSE)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            before = flat_parameters(model)
            try:
                optimizer.step()
            except (InjectedFault, CommunicationError) as error:
                caught[comm.rank] = f"{type(error).__name__}: {error}"
                assert torch.equal(flat_parameters(model), before)
                raise

    with pytest.raises((InjectedFault, CommunicationError)):
        simulate(3, run, World(3, timeout_s=3.0).fail_at(2, operation, call=6))
    assert caught[2] == f"InjectedFault: rank 2: injected fault at {operation}, call 6"
    for rank in (0, 1):
        assert caught[rank].startswith(f"CommunicationError: rank {rank} of 3: ")


def test_ranks_with_other_parameters_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"rank\(s\) \[1\] hold other parameters"):
        simulate(2, lambda comm: OURS["adamw"](Net(width=32 + comm.rank).named_parameters(), comm=comm))


def test_nothing_is_broadcast_unless_asked_for() -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = Net(seed=comm.rank)
        optimizer = OURS["adamw"](model.named_parameters(), comm=comm, **SPARSE)
        before = flat_parameters(model)
        optimizer.broadcast_parameters(root=1)
        optimizer.close()
        return before, flat_parameters(model)

    results = simulate(3, run)
    assert not torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(after, results[1][0]) for _, after in results)


# --- other dtypes


def loose(
    comm: Communicator, dtype: torch.dtype, steps: int, weight_decay: float, pull: float, density: float
) -> Tensor:
    """Parameters of one under gradients of one sign, whose updates are far below what bf16 can tell from one."""
    p = nn.Parameter(torch.ones(32, dtype=dtype))
    optimizer = AdamW(
        [("p", p)], lr=1e-4, weight_decay=weight_decay, comm=comm, **(SPARSE | {"density": density, "warmup_steps": 5})
    )
    gradient = pull * torch.linspace(1.0, 2.0, 32) * (1.0 + comm.rank)
    for _ in range(steps):
        p.grad = gradient.to(dtype)
        optimizer.step()
    state = optimizer.training_state_dict()
    tensors = [value for value in state["optimizer"]["state"][0].values() if isinstance(value, Tensor)]
    tensors += [value for part in ("residual", "velocity") for value in state["allreducer"]["feedback"][part].values()]
    assert {value.dtype for value in tensors} == {torch.float32}
    optimizer.close()
    return p.detach().float()


@pytest.mark.parametrize("density", [1.0, 0.25])
def test_small_updates_of_bf16_parameters_add_up(density: float) -> None:
    """What rounding takes away comes back: the parameter is the rounded fp32 one."""

    def run(dtype: torch.dtype) -> list[Tensor]:
        return simulate(2, lambda comm: loose(comm, dtype, 100, 0.0, 1.0, density))

    small, exact = run(torch.bfloat16), run(torch.float32)
    assert torch.equal(small[0], small[1])
    assert float((1.0 - exact[0]).min()) > 2.0**-9, "further than one bf16 number"
    assert float((small[0] - exact[0]).abs().max()) <= 2.0**-9 + 1e-6


def test_decay_acts_on_bf16_parameters() -> None:
    """By a factor of 1 - 1e-4 each time, which bf16 rounds to one."""
    for parameters in simulate(2, lambda comm: loose(comm, torch.bfloat16, 100, 1.0, 0.0, 0.25)):
        torch.testing.assert_close(parameters, torch.full((32,), (1.0 - 1e-4) ** 100), rtol=0, atol=2.0**-9 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@each_kind
def test_other_dtypes_train_in_step(kind: str, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> tuple[list[Tensor], float]:
        model = Net().to(dtype)
        optimizer = OURS[kind](model.named_parameters(), comm=comm, **(SPARSE | {"warmup_steps": 12}))
        seen = []
        for step in range(24):
            step_of(optimizer, model, comm.rank, step)
            seen.append(flat_parameters(model))
        optimizer.close()
        return seen, held_out_loss(model.float())

    before = held_out_loss(Net())
    results = simulate(2, run)
    for seen, loss in results:
        assert seen[-1].dtype == dtype
        assert all(map(torch.equal, seen, results[0][0]))
        assert loss < before - 0.1


# --- DDP


DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": TINY_BUCKETS},
    {"bucket_cap_mb": TINY_BUCKETS, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": TINY_BUCKETS, "static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": TINY_BUCKETS, "find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


class Branches(nn.Module):
    """`left` is used by rank 0 alone, `right` by the others, `late` by rank 1 from step 6 on, `never` by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(10, 16)
        self.left, self.right = nn.Linear(16, 3), nn.Linear(16, 3)
        self.late, self.never = nn.Linear(16, 3), nn.Linear(16, 3)
        self.rank = self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        out = self.left(h) if self.rank == 0 else self.right(h)
        return out + self.late(h) if self.step >= 6 and self.rank == 1 else out


@lightly
def on_ddp(when: str, options: dict[str, Any], kind: str, branches: bool) -> Tensor:
    """Parameters after training a model: plain, or DDP's, made before the optimizer or after it."""
    rank = dist.get_rank()
    net: Net | Branches = Branches() if branches else Net()
    if isinstance(net, Branches):
        net.rank = rank
    model: nn.Module = net
    if when == "before":
        model = DDP(net, **options)
    optimizer = OURS[kind](model.named_parameters(), **SPARSE)
    if when == "after":
        model = DDP(net, **options)
    for step in range(10):
        if isinstance(net, Branches):
            net.step = step
        step_of(optimizer, model, rank, step)
    optimizer.close()
    return flat_parameters(net)


@functools.cache
def after_ten_steps() -> Tensor:
    return simulate(2, lambda comm: train(comm, 10))[0][-1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", DDP_OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_a_ddp_model_trains_as_the_plain_one(options: dict[str, Any], when: str, gloo2: GlooWorld) -> None:
    """Whether DDP was made before the optimizer or after it."""
    expected = after_ten_steps()
    for parameters in gloo2.run(on_ddp, when, options, "adamw", False):
        assert torch.equal(parameters, expected)


def test_a_ddp_model_trains_as_the_plain_one_with_sgd(gloo2: GlooWorld) -> None:
    expected = simulate(2, lambda comm: train(comm, 10, "sgd"))[0][-1]
    for parameters in gloo2.run(on_ddp, "before", {}, "sgd", False):
        assert torch.equal(parameters, expected)


@pytest.mark.parametrize("view", [False, True])
def test_a_ddp_model_with_unused_parameters_trains_as_the_plain_one(view: bool, gloo2: GlooWorld) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view, "bucket_cap_mb": TINY_BUCKETS}
    expected = gloo2.run(on_ddp, "plain", {}, "adamw", True)
    assert torch.equal(expected[0], expected[1])
    for when in ("before", "after"):
        for parameters in gloo2.run(on_ddp, when, options, "adamw", True):
            assert torch.equal(parameters, expected[0])


@lightly
def gradients_around_close(when: str, drop: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients while the optimizer is there, and after it was closed, or dropped."""
    rank = dist.get_rank()
    net = Net()
    model: nn.Module = DDP(net) if when == "before" else net
    optimizer: Any = OURS["adamw"](model.named_parameters(), **SPARSE)
    if when == "after":
        model = DDP(net)
    seen = []
    for ended in (False, True):
        if ended and drop:
            optimizer = None
            gc.collect()
        elif ended:
            optimizer.close()
        net.load_state_dict(Net().state_dict())
        net.zero_grad()
        loss_of(model, rank, 5).backward()
        seen.append([p.grad.clone() for p in net.parameters()])
        if not ended:
            optimizer.step()
    return seen[0], seen[1]


@pytest.mark.parametrize("drop", [False, True], ids=["closed", "dropped"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ddp_leaves_gradients_local_until_the_optimizer_is_closed(when: str, drop: bool, gloo2: GlooWorld) -> None:
    local = []
    for rank in range(2):
        model = Net()
        loss_of(model, rank, 5).backward()
        local.append([p.grad for p in model.parameters()])
    mean = [(left + right) / 2 for left, right in zip(*local, strict=True)]
    for rank, (during, afterwards) in enumerate(gloo2.run(gradients_around_close, when, drop)):
        for got, want in zip(during, local[rank], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        for got, want in zip(afterwards, mean, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@lightly
def accumulate_on_ddp(way: str, when: str) -> tuple[Tensor, int]:
    rank = dist.get_rank()
    net = Net()
    model: Any = DDP(net) if when == "before" else net
    optimizer = OURS["adamw"](model.named_parameters(), overlap=way != "overlap", **SPARSE)
    if when == "after":
        model = DDP(net)
    told: list[StepStats] = []
    optimizer.add_listener(told.append)
    for step in range(6):
        optimizer.zero_grad()
        if way == "no_sync":
            with model.no_sync():
                loss_of(model, rank, 10 + step).backward()
        else:
            optimizer.local = way == "local"
            loss_of(model, rank, 10 + step).backward()
            optimizer.local = False
        loss_of(model, rank, step).backward()
        optimizer.step()
    optimizer.close()
    return flat_parameters(net), 1 + max(stats.step for stats in told)


@pytest.mark.parametrize("when", ["before", "after"])
def test_no_sync_accumulates_like_local_and_like_no_overlap(when: str, gloo2: GlooWorld) -> None:
    expected = gloo2.run(accumulate_on_ddp, "local", "plain")
    assert expected[0][1] == 6
    for way in ("no_sync", "local" if when == "after" else "overlap"):
        for parameters, steps in gloo2.run(accumulate_on_ddp, way, when):
            assert steps == 6, way
            assert torch.equal(parameters, expected[0][0]), way


@lightly
def refusals_on_ddp() -> dict[str, list[str]]:
    rank = dist.get_rank()
    settings = {key: value for key, value in SPARSE.items() if key != "bucket_cap_mb"}
    said: dict[str, list[str]] = {}

    model = DDP(Net())
    optimizer = OURS["adamw"](model.named_parameters(), **SPARSE)
    said["attach"] = [error_of(lambda: oktopk.attach(model, **settings))]
    said["second optimizer"] = [error_of(lambda: OURS["sgd"](model.named_parameters(), **SPARSE))]
    said["detach"] = [error_of(lambda: oktopk.detach(model))]
    step_of(optimizer, model, rank, 0)
    loss_of(model, rank, 1).backward()
    said["second backward"] = [error_of(lambda: loss_of(model, rank, 2).backward())]
    optimizer.close()

    model = DDP(Net())
    oktopk.attach(model, **settings)
    said["optimizer"] = [error_of(lambda: OURS["adamw"](model.named_parameters(), **SPARSE))]
    oktopk.detach(model)
    optimizer = OURS["adamw"](model.named_parameters(), **SPARSE)
    said["optimizer after detach"] = [error_of(lambda: step_of(optimizer, model, rank, 0))]
    optimizer.close()
    allreducer = oktopk.attach(model, **settings)
    said["attach after close"] = [error_of(lambda: loss_of(model, rank, 0).backward())]
    assert allreducer.step == 1
    oktopk.detach(model)

    net = Net()
    optimizer = OURS["adamw"](net.named_parameters(), **SPARSE)
    model = DDP(net)
    oktopk.attach(model, **settings)
    said["both, the model late"] = [error_of(lambda: loss_of(model, rank, 0).backward())]
    oktopk.detach(model)
    optimizer.zero_grad()
    said["then detached"] = [error_of(lambda: step_of(optimizer, model, rank, 0))]
    optimizer.close()

    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    model = DDP(Net(), process_group=alone)
    said["other ranks"] = [error_of(lambda: OURS["adamw"](model.named_parameters(), **SPARSE))]
    partly = DDP(Net())
    said["a part of the model"] = [error_of(lambda: OURS["adamw"](partly.module.out.named_parameters(), **SPARSE))]
    return said


def test_only_one_exchanges_what_a_ddp_model_has(gloo2: GlooWorld) -> None:
    for said in gloo2.run(refusals_on_ddp):
        lines = {key: line for key, (line,) in said.items()}
        ours = "ValueError: an oktopk optimizer exchanges this model's updates: call its close() first"
        attached = "ValueError: attach() was called on this model before: call oktopk.detach(ddp_model) first"
        assert lines["attach"].startswith(ours)
        assert lines["second optimizer"].startswith(ours)
        assert lines["detach"] == "ValueError: detach(): nothing is attached to this model"
        assert lines["optimizer"].startswith(attached)
        assert lines["both, the model late"].startswith(attached)
        assert lines["second backward"].startswith("RuntimeError: a second backward() reached 'module.")
        assert lines["second backward"].endswith("set `local = True` for all but the last backward of a step")
        for fine in ("optimizer after detach", "attach after close", "then detached"):
            assert lines[fine] == "nothing was raised", fine
        assert lines["other ranks"].startswith(
            "ValueError: the DDP model has a process group of 1 ranks, the optimizer has 2"
        )
        assert lines["a part of the model"].startswith(
            "ValueError: the DDP model has 'module.hidden.weight' and 3 more parameters that the optimizer has not"
        )
        assert all("\n" not in line for line in lines.values())


@lightly
def resumed_on_ddp(stop: int | None) -> Tensor:
    """All through a file into fresh objects, DDP included."""
    rank = dist.get_rank()
    model = DDP(Net())
    optimizer = OURS["adamw"](model.named_parameters(), **SPARSE)
    for step in range(10):
        if step == stop:
            saved = through_a_file({"model": model.state_dict(), "training": optimizer.training_state_dict()})
            optimizer.close()
            model = DDP(Net(seed=5))
            optimizer = OURS["adamw"](model.named_parameters(), **SPARSE)
            model.load_state_dict(saved["model"])
            optimizer.load_training_state_dict(saved["training"])
        step_of(optimizer, model, rank, step)
    optimizer.close()
    return flat_parameters(model)


def test_a_state_continues_bit_identically_on_ddp(gloo2: GlooWorld) -> None:
    for left, right in zip(gloo2.run(resumed_on_ddp, 6), gloo2.run(resumed_on_ddp, None), strict=True):
        assert torch.equal(left, right)


# --- release


@lightly
def dropped(when: str) -> dict[str, int]:
    """What is left of an optimizer nobody holds any more: threads, models, hooks on parameters."""

    def one() -> tuple[list[weakref.ref[Any]], list[nn.Parameter]]:
        rank = dist.get_rank()
        net = Net()
        model: nn.Module = DDP(net) if when == "ddp" else net
        optimizer = OURS["adamw"](model.named_parameters(), **SPARSE)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(4):
            step_of(optimizer, model, rank, step)
            scheduler.step()
        if when == "midway":
            loss_of(model, rank, 9).backward()
        if when == "error":
            line = error_of(lambda: step_of_nan(optimizer, net, rank))
            assert line.startswith("NonFiniteGradientError"), line
        return [weakref.ref(each) for each in (net, model, optimizer)], list(net.parameters())

    gc.collect()
    before = num_threads()
    references, parameters = one()
    patience = time.monotonic() + 10.0
    gc.collect()
    while num_threads() > before and time.monotonic() < patience:
        time.sleep(0.01)
        gc.collect()
    return {
        "threads": num_threads() - before,
        "objects": sum(each() is not None for each in references),
        "hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters),
    }


def num_threads() -> int:
    return sum(thread.name == "oktopk-reductions" for thread in threading.enumerate())


def step_of_nan(optimizer: torch.optim.Optimizer, model: Net, rank: int) -> None:
    optimizer.zero_grad()
    (loss_of(model, rank, 0) * float("nan")).backward()
    optimizer.step()


@pytest.mark.parametrize("when", ["plain", "ddp", "midway", "error"])
def test_nothing_is_left_of_a_dropped_optimizer(when: str, gloo2: GlooWorld) -> None:
    assert gloo2.run(dropped, when) == [{"threads": 0, "objects": 0, "hooks": 0}] * 2
