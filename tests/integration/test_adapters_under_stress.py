"""Both adapters where things go wrong: scalers, unused parameters, threads, NaN, states asked for too early."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import oktopk
from oktopk.adapters import reduction_thread
from oktopk.comm import Communicator, simulate
from oktopk.reduce.base import ReducerSettings
from tests.integration.training import Net, flat_parameters, loss_of
from tests.worlds import GlooWorld

SPARSE: dict[str, Any] = {"warmup_steps": 2, "density": 0.1, "min_sparse_numel": 0, "guard_every": 1, "timeout_s": 30.0}
TINY_BUCKETS = 1200 / 2**20  # several buckets even for a small model
ADAPTERS = ("attach", "wrapper")


@pytest.fixture(scope="module")
def rough_world() -> Iterator[GlooWorld]:
    """For what must not reach other tests if it goes wrong: errors in DDP, changed classes."""
    world = GlooWorld(2)
    yield world
    world.close()


@pytest.fixture(scope="module")
def world_with_scalers() -> Iterator[GlooWorld]:
    """Of its own: a scaler may live on in a traceback, and attach refuses any that is in use."""
    world = GlooWorld(2)
    yield world
    world.close()


class Training:
    """One model under either adapter."""

    def __init__(self, adapter: str, model: nn.Module, lr: float = 0.1, unused: bool = False, **settings: Any) -> None:
        self.net = model
        if adapter == "attach":
            self.model: nn.Module = DDP(model, bucket_cap_mb=TINY_BUCKETS, find_unused_parameters=unused)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            self.allreducer = oktopk.attach(self.model, **settings)  # pyright: ignore[reportArgumentType]
        else:
            self.model = model
            inner = torch.optim.SGD(model.parameters(), lr=lr)
            self.optimizer = oktopk.DistributedOptimizer(
                inner, model.named_parameters(), bucket_cap_mb=TINY_BUCKETS, **settings
            )
            self.allreducer = self.optimizer.allreducer

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.model).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """As a checkpoint would hold it."""
        if isinstance(self.optimizer, oktopk.DistributedOptimizer):
            ours = self.optimizer.training_state_dict()
        else:
            ours = {"optimizer": self.optimizer.state_dict(), "allreducer": self.allreducer.state_dict()}
        return copy.deepcopy({"model": self.net.state_dict(), **ours})

    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["model"])
        if isinstance(self.optimizer, oktopk.DistributedOptimizer):
            self.optimizer.load_training_state_dict(state)
        else:
            self.optimizer.load_state_dict(state["optimizer"])
            self.allreducer.load_state_dict(state["allreducer"])

    def close(self) -> None:
        if isinstance(self.model, DDP):
            oktopk.detach(self.model)
        else:
            self.optimizer.close()


def error_of(call: Callable[[], object]) -> str:
    """Class and message of what comes out."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# --- 1: GradScaler


def with_a_scaler(adapter: str) -> str:
    training = Training(adapter, Net(), **SPARSE)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(loss_of(training.model, dist.get_rank(), 0)).backward()
        scaler.step(training.optimizer)
        scaler.update()

    return error_of(step)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_grad_scaler_is_refused_by_name(adapter: str, world_with_scalers: GlooWorld) -> None:
    for error in world_with_scalers.run(with_a_scaler, adapter):
        assert error.startswith(("ValueError", "RuntimeError"))
        assert "GradScaler" in error
        assert "bf16" in error
        assert error.count("GradScaler") <= 2, "one clear error, not one that quotes another"


def with_a_scaler_refused_once_more() -> tuple[str, str]:
    training = Training("attach", Net(), **SPARSE)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(loss_of(training.model, dist.get_rank(), 0)).backward()

    return error_of(step), error_of(step)


def test_a_scaler_is_refused_again_by_whoever_tries_again(world_with_scalers: GlooWorld) -> None:
    for first, second in world_with_scalers.run(with_a_scaler_refused_once_more):
        assert "GradScaler" in first
        assert "nothing" not in second


def with_a_disabled_scaler(adapter: str) -> str:
    """What a script does that can train in both."""
    training = Training(adapter, Net(), **SPARSE)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = flat_parameters(training.net)

    def steps() -> None:
        for step in range(4):
            training.optimizer.zero_grad()
            scaler.scale(loss_of(training.model, dist.get_rank(), step)).backward()
            scaler.step(training.optimizer)
            scaler.update()

    error = error_of(steps)
    training.close()
    return error if not torch.equal(before, flat_parameters(training.net)) else "nothing moved"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_disabled_grad_scaler_is_harmless(adapter: str, gloo2: GlooWorld) -> None:
    assert gloo2.run(with_a_disabled_scaler, adapter) == ["nothing was raised"] * 2


def scans_for_scalers() -> int:
    """How often all objects are looked through for a model of many buckets."""
    scans = []
    real = gc.get_objects
    gc.get_objects = lambda *args, **kw: scans.append(1) or real(*args, **kw)  # type: ignore[assignment]
    try:
        deep = nn.Sequential(*(nn.Linear(10, 10) for _ in range(19)), nn.Linear(10, 3))
        training = Training("attach", deep, **SPARSE)
        told: list[oktopk.StepStats] = []
        training.allreducer.add_listener(told.append)
        for step in range(4):
            training.step(lambda model, step=step: loss_of(model, dist.get_rank(), step))
        training.close()
    finally:
        gc.get_objects = real
    assert len({stats.bucket for stats in told}) > 4
    return len(scans)


def test_looking_for_a_scaler_does_not_cost_a_scan_for_every_bucket(gloo2: GlooWorld) -> None:
    assert max(gloo2.run(scans_for_scalers)) <= 2


# --- 2: momentum and parameters that nobody uses


class WithBranch(nn.Module):
    """`branch` takes part only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(10, 3)
        self.branch = nn.Linear(10, 3)
        self.with_branch = True

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x) + self.branch(x) if self.with_branch else self.trunk(x)


USED = [*range(5), 25, 26]  # twenty steps without


def branch_under_sgd(size: int, momentum: float, rank_uses: Callable[[int, int], bool]) -> list[Tensor]:
    """torch's own momentum SGD on the mean gradient, None where no rank uses the branch."""
    model = WithBranch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    moved = []
    for step in range(28):
        optimizer.zero_grad()
        for rank in range(size):
            model.with_branch = rank_uses(rank, step)
            (loss_of(model, rank, step) / size).backward()
        optimizer.step()
        moved.append(model.branch.weight.detach().clone())
    return moved


def every_rank(rank: int, step: int) -> bool:  # noqa: ARG001
    return step in USED


def one_rank(rank: int, step: int) -> bool:
    return step in USED and (rank == 1 or step < 2)


def branch_under_us(adapter: str, who: str, warmup_steps: int) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """The branch's weight after every step; its residual's and velocity's sums in the steps without it."""
    rank = dist.get_rank()
    uses = {"every_rank": every_rank, "one_rank": one_rank}[who]
    settings = SPARSE | {"density": 0.3, "warmup_steps": warmup_steps, "momentum_correction": 0.9}
    training = Training(adapter, WithBranch(), lr=0.05, unused=True, **settings)
    moved, owed = [], []
    for step in range(28):
        training.net.with_branch = uses(rank, step)
        training.step(lambda model, step=step: loss_of(model, rank, step))
        moved.append(training.net.branch.weight.detach().clone())
        if 5 <= step < 25:
            feedback = training.allreducer.state_dict()["feedback"]
            residual = feedback["residual"].get("branch.weight", torch.zeros(1))
            owed.append((float(residual.double().sum()), float(feedback["velocity"]["branch.weight"].double().sum())))
    training.close()
    return moved, owed


@pytest.mark.parametrize("who", ["every_rank", "one_rank"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_unused_parameter_moves_as_under_momentum_sgd(adapter: str, who: str, gloo2: GlooWorld) -> None:
    """Dense steps, where momentum correction is momentum SGD: a velocity that went on growing would show 8-fold."""
    expected = branch_under_sgd(2, 0.9, {"every_rank": every_rank, "one_rank": one_rank}[who])
    for moved, owed in gloo2.run(branch_under_us, adapter, who, 1000):
        assert len(set(owed)) == 1, "velocity and residual stay as they are"
        for step in range(5, 25):
            assert torch.equal(moved[step], moved[4])
        for step, (ours, theirs) in enumerate(zip(moved, expected, strict=True)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda m, s=step: f"step {s}: {m}")


@pytest.mark.parametrize("who", ["every_rank", "one_rank"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_unused_parameter_keeps_residual_and_velocity_in_sparse_steps(
    adapter: str, who: str, gloo2: GlooWorld
) -> None:
    results = gloo2.run(branch_under_us, adapter, who, 2)
    for moved, owed in results:
        assert len(set(owed)) == 1
        assert owed[0] != (0.0, 0.0)
        assert all(torch.equal(moved[step], moved[4]) for step in range(5, 25))
        assert not torch.equal(moved[25], moved[24])
        assert all(torch.equal(mine, first) for mine, first in zip(moved, results[0][0], strict=True))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_branch_nobody_ever_uses_is_never_touched(adapter: str, nonfinite: str, gloo2: GlooWorld) -> None:
    assert gloo2.run(never_used, adapter, nonfinite) == [(0.0, True)] * 2


def never_used(adapter: str, nonfinite: str) -> tuple[float, bool]:
    settings = SPARSE | {"momentum_correction": 0.9, "nonfinite": nonfinite}
    training = Training(adapter, WithBranch(), unused=True, **settings)
    training.net.with_branch = False
    before = training.net.branch.weight.detach().clone()
    for step in range(6):
        training.step(lambda model, step=step: loss_of(model, dist.get_rank(), step))
    feedback = training.allreducer.state_dict()["feedback"]
    memories = [memory for memory in feedback.values() if isinstance(memory, dict)]
    kept = [memory["branch.weight"].abs().sum() for memory in memories if "branch.weight" in memory]
    training.close()
    return float(sum(kept)), torch.equal(before, training.net.branch.weight)


# --- 3: hooks from several threads


def train_with_threads(comm: Communicator, order_seed: int) -> tuple[list[list[str]], list[str], Tensor]:
    """Hooks called from one thread for each parameter, as autograd does with several devices, all at once."""
    model = Net()
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        comm=comm,
        bucket_cap_mb=TINY_BUCKETS,
        **SPARSE,
    )
    told: list[oktopk.StepStats] = []
    optimizer.add_listener(told.append)
    expected = [group.layout.name for group in optimizer._groups]
    names = []
    for step in range(6):
        optimizer.zero_grad()
        told.clear()
        optimizer.local = True
        loss_of(model, comm.rank, step).backward()
        optimizer.local = False
        from_many_threads(model, order_seed + 31 * step + comm.rank)
        optimizer.step()
        names.append([stats.bucket for stats in told])
    optimizer.close()
    return names, expected, flat_parameters(model)


def from_many_threads(model: nn.Module, seed: int) -> None:
    parameters = list(model.parameters())
    order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(seed)).tolist()
    together = threading.Barrier(len(parameters))
    failed: list[BaseException] = []

    def call(parameter: nn.Parameter) -> None:
        try:
            together.wait(30)
            for hook in tuple(parameter._post_accumulate_grad_hooks.values()):  # pyright: ignore[reportAttributeAccessIssue]
                hook(parameter)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(parameters[number],)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question whether a group is full, and every submission, lets other threads in."""
    from oktopk.adapters.grouping import Group

    real_full, real_submit = Group.is_full.fget, reduction_thread.ReductionThread.submit
    assert real_full is not None

    def is_full(group: Group) -> bool:
        full = real_full(group)
        time.sleep(20e-6)
        return full

    def submit(*args: Any, **keywords: Any) -> reduction_thread.Ticket:
        time.sleep(20e-6)
        ticket = real_submit(*args, **keywords)
        time.sleep(20e-6)
        return ticket

    monkeypatch.setattr(Group, "is_full", property(is_full))
    monkeypatch.setattr(reduction_thread.ReductionThread, "submit", submit)


@pytest.mark.parametrize("order_seed", range(4))
@pytest.mark.usefixtures("pauses")
def test_hooks_from_many_threads_reduce_every_group_once_and_in_order(order_seed: int) -> None:
    for names, expected, _ in simulate(1, lambda comm: train_with_threads(comm, order_seed)):
        assert len(expected) > 3
        assert names == [expected] * 6


@pytest.mark.usefixtures("pauses")
def test_ranks_whose_hooks_come_in_any_order_stay_in_step() -> None:
    results = simulate(2, lambda comm: train_with_threads(comm, 7))
    for names, expected, parameters in results:
        assert names == [expected] * 6
        assert torch.equal(parameters, results[0][2])
    torch.testing.assert_close(results[0][2], simulate(2, lambda comm: train_with_threads(comm, 99))[0][2])


# --- 5: going on after NaN


def loss_at(model: nn.Module, step: int, nan: bool) -> Tensor:
    loss = loss_of(model, dist.get_rank(), step)
    return loss * float("nan") if nan and dist.get_rank() == 1 else loss


def with_and_without_nan(adapter: str, bad_step: int, extra: dict[str, Any]) -> tuple[Tensor, Tensor, list[str]]:
    """Parameters of a run that never saw the NaN, and of one that did, twice, and loaded what it had saved."""
    straight = Training(adapter, Net(), **(SPARSE | extra))
    for step in range(10):
        straight.step(lambda model, step=step: loss_at(model, step, nan=False))
    expected = flat_parameters(straight.net)
    straight.close()

    training = Training(adapter, Net(), **(SPARSE | extra))
    saved: dict[str, Any] = {}
    errors = []
    for step in range(10):
        if step == bad_step:
            for _ in range(2):
                errors.append(error_of(lambda: training.step(lambda model: loss_at(model, bad_step, nan=True))))
                training.load(saved)
                assert training.allreducer.step == bad_step
        training.step(lambda model, step=step: loss_at(model, step, nan=False))
        saved = training.state()
    found = flat_parameters(training.net)
    training.close()
    return expected, found, errors


@pytest.mark.parametrize("bad_step", [1, 5], ids=["dense", "sparse"])
@pytest.mark.parametrize("extra", [{}, {"momentum_correction": 0.9}, {"norm_clip": 0.5}], ids=["plain", "mc", "clip"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_after_nan_a_loaded_state_goes_on_bit_for_bit(
    adapter: str, extra: dict[str, Any], bad_step: int, gloo2: GlooWorld
) -> None:
    results = gloo2.run(with_and_without_nan, adapter, bad_step, extra)
    for expected, found, errors in results:
        assert len(errors) == 2
        assert all("NonFiniteGradientError" in error for error in errors)
        assert all("on rank 1" in error for error in errors)
        assert torch.equal(found, expected)
    assert torch.equal(results[0][0], results[1][0])


def slow_to_fail(adapter: str) -> tuple[Tensor, Tensor, list[str]]:
    """As above, where jobs behind the failed one are still waiting when the state is loaded."""
    real = reduction_thread.Ticket.fail

    def fail(ticket: Any, error: BaseException) -> None:
        real(ticket, error)  # whoever waits goes on
        time.sleep(0.05)  # before the next job is looked at

    reduction_thread.Ticket.fail = fail
    try:
        return with_and_without_nan(adapter, 5, {})
    finally:
        reduction_thread.Ticket.fail = real


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_jobs_behind_a_failed_one_are_over_before_a_state_is_loaded(adapter: str, rough_world: GlooWorld) -> None:
    for expected, found, errors in rough_world.run(slow_to_fail, adapter):
        assert all("NonFiniteGradientError" in error for error in errors)
        assert torch.equal(found, expected)


def loaded_midway() -> tuple[Tensor, Tensor]:
    """A state loaded between backward and step: what was under way is of no account."""
    real = oktopk.AllReducer.reduce

    def slow(self: oktopk.AllReducer, bucket: oktopk.Bucket) -> oktopk.StepStats:
        time.sleep(0.02)
        return real(self, bucket)

    results = []
    for disturbed in (False, True):
        training = Training("wrapper", Net(), **SPARSE)
        for step in range(8):
            if disturbed and step == 4:
                saved = training.state()
                oktopk.AllReducer.reduce = slow
                training.optimizer.zero_grad()
                loss_at(training.model, 77, nan=False).backward()
                training.load(saved)
                oktopk.AllReducer.reduce = real
            training.step(lambda model, step=step: loss_at(model, step, nan=False))
        results.append(flat_parameters(training.net))
        training.close()
    return results[0], results[1]


def test_a_state_loaded_between_backward_and_step_is_not_disturbed_by_it(rough_world: GlooWorld) -> None:
    for expected, found in rough_world.run(loaded_midway):
        assert torch.equal(found, expected)


def test_without_loading_every_later_step_says_what_went_wrong() -> None:
    def run(comm: Communicator) -> list[str]:
        model = Net()
        optimizer = oktopk.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm, **SPARSE
        )
        errors = []
        for step in range(3):
            (loss_of(model, comm.rank, step) * (float("nan") if step == 0 else 1.0)).backward()
            errors.append(error_of(optimizer.step))
            optimizer.zero_grad()
            errors.append(error_of(optimizer.training_state_dict))
        optimizer.close()
        return errors

    for errors in simulate(2, run):
        assert all("NonFiniteGradientError" in error for error in errors[::2])
        assert all("in the middle of a step" in error for error in errors[1::2]), "a half-taken step is not saved"


# --- 6: states asked for too early


def asked_too_early(extra: dict[str, Any]) -> dict[str, list[str]]:
    model = Net()
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **(SPARSE | extra)
    )
    ways = [optimizer.state_dict, optimizer.training_state_dict, optimizer.allreducer.state_dict]
    found: dict[str, list[str]] = {"before": [error_of(way) for way in ways]}
    for step in range(4):
        optimizer.zero_grad()
        found[f"zeroed {step}"] = [error_of(way) for way in ways]
        loss_of(model, dist.get_rank(), step).backward()
        found[f"backward {step}"] = [error_of(way) for way in ways]
        if step % 2:
            optimizer.synchronize()
            found[f"synchronized {step}"] = [error_of(way) for way in ways]
        optimizer.step()
        found[f"after {step}"] = [error_of(way) for way in ways]
    loss_of(model, dist.get_rank(), 9).backward()
    optimizer.synchronize()
    optimizer.zero_grad()  # the step is dropped
    found["dropped"] = [error_of(way) for way in ways]
    optimizer.close()
    return found


@pytest.mark.parametrize(
    "extra",
    [{}, {"norm_clip": 0.5}, {"nonfinite": "skip"}, {"bucket_cap_mb": TINY_BUCKETS}, {"dense_vectors": True}],
    ids=lambda extra: "+".join(extra) or "default",
)
def test_a_state_is_refused_between_backward_and_step(extra: dict[str, Any], gloo2: GlooWorld) -> None:
    for found in gloo2.run(asked_too_early, extra):
        for when, errors in found.items():
            for error in errors:
                if when.startswith(("backward", "synchronized")):
                    assert error.startswith("RuntimeError: state_dict()"), when
                else:
                    assert error == "nothing was raised", when


def asked_too_early_with_an_unused_parameter() -> list[str]:
    """The first group is never full in backward, so nothing is under way: and yet the state is not whole."""
    model = WithBranch()
    model.with_branch = False
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **SPARSE
    )
    loss_of(model, dist.get_rank(), 0).backward()
    errors = [error_of(optimizer.state_dict), error_of(optimizer.training_state_dict)]
    errors.append(error_of(optimizer.allreducer.state_dict))
    optimizer.step()
    optimizer.training_state_dict()
    optimizer.close()
    return errors


def test_a_state_is_refused_while_groups_wait_for_the_step(gloo2: GlooWorld) -> None:
    for errors in gloo2.run(asked_too_early_with_an_unused_parameter):
        assert all(error.startswith("RuntimeError: state_dict()") for error in errors)


def asked_in_backward() -> tuple[list[str], str]:
    """Under attach: from a hook in the middle of backward, and after it."""
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    allreducer = oktopk.attach(model, **SPARSE)
    loss_of(model, dist.get_rank(), 0).backward()
    errors: list[str] = []
    first = next(iter(model.module.parameters()))  # its gradient comes last, when other buckets are under way
    handle = first.register_hook(lambda _: errors.append(error_of(allreducer.state_dict)))
    loss_of(model, dist.get_rank(), 1).backward()
    handle.remove()
    after = error_of(allreducer.state_dict)
    oktopk.detach(model)
    return errors, after


def test_a_state_is_refused_in_the_middle_of_backward(gloo2: GlooWorld) -> None:
    for (during,), after in gloo2.run(asked_in_backward):
        assert during.startswith("RuntimeError: state_dict()")
        assert after == "nothing was raised"


# --- 8: sparse gradients


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(50, 10, sparse=True)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x[:, 0].abs() * 10).long().clamp(max=49)))


def with_a_sparse_embedding(adapter: str, extra: dict[str, Any]) -> str:
    training = Training(adapter, Words(), **(SPARSE | extra))
    return error_of(lambda: training.step(lambda model: loss_of(model, dist.get_rank(), 0)))


@pytest.mark.parametrize("extra", [{}, {"norm_clip": 0.1}], ids=["plain", "clip"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_sparse_gradient_is_refused_by_name(adapter: str, extra: dict[str, Any], rough_world: GlooWorld) -> None:
    for error in rough_world.run(with_a_sparse_embedding, adapter, extra):
        assert error.startswith("ValueError")
        assert "table.weight" in error
        assert "sparse" in error


# --- 10: errors of any class


def failing(reducer_settings: ReducerSettings) -> Any:
    """A reducer that fails with a class that nobody can import."""
    del reducer_settings

    class OnlyHere(Exception):
        def __init__(self, number: int, reason: str) -> None:
            super().__init__(f"{reason} number {number}")

    class Reducer:
        def reduce(self, *_: Any) -> Any:
            raise OnlyHere(7, "broken gear")

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    return Reducer()


def with_a_failing_reducer(options: dict[str, Any], nonfinite: str) -> list[str]:
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS, **options)
    oktopk.attach(model, failing, **(SPARSE | {"warmup_steps": 1, "nonfinite": nonfinite}))
    loss_of(model, dist.get_rank(), 0).backward()
    errors = [error_of(loss_of(model, dist.get_rank(), step).backward) for step in (1, 2)]
    oktopk.detach(model)
    return errors


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_an_error_of_a_local_class_comes_out_of_backward(
    options: dict[str, Any], nonfinite: str, rough_world: GlooWorld
) -> None:
    for errors in rough_world.run(with_a_failing_reducer, options, nonfinite):
        for error in errors:
            assert error.startswith("RuntimeError")
            assert "OnlyHere: broken gear number 7" in error


# --- 11: momentum in the same pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reducer", ["oktopk", "topkA", "gtopk"])
@pytest.mark.parametrize("n", [1027, 8191])
def test_fused_momentum_has_the_bits_of_plain_torch(reducer: str, n: int, dtype: torch.dtype) -> None:
    layout = oktopk.Layout.of([("first", n // 3), ("second", n - n // 3)])

    def run(kernels: str) -> Callable[[Communicator], list[Tensor]]:
        def rank(comm: Communicator) -> list[Tensor]:
            allreducer = oktopk.AllReducer(
                reducer,
                comm=comm,
                kernels=kernels,  # pyright: ignore[reportArgumentType]
                momentum_correction=0.9,
                density=0.03,
                warmup_steps=3,
                min_sparse_numel=0,
                guard_every=5,
            )
            generator = torch.Generator().manual_seed(comm.rank)
            found = []
            for step in range(60):
                scale = 10.0 ** (step % 7 - 3)
                bucket = oktopk.Bucket((scale * torch.randn(n, generator=generator)).to(dtype), layout)
                if step % 11 == 4:
                    bucket = oktopk.Bucket(bucket.flat, layout, frozenset({"first"}))
                allreducer.reduce(bucket)
                allreducer.end_step()
                found.append(bucket.flat)
            feedback = allreducer.state_dict()["feedback"]
            return [*found, *feedback["residual"].values(), *feedback["velocity"].values()]

        return rank

    for fused, plain in zip(simulate(2, run("numba")), simulate(2, run("torch")), strict=True):
        assert len(fused) == len(plain) == 64
        for number, (mine, theirs) in enumerate(zip(fused, plain, strict=True)):
            assert torch.equal(mine, theirs), number


def test_dense_momentum_is_that_of_torch_sgd() -> None:
    """Bit for bit on one rank: the velocity is rounded as torch rounds it."""

    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        ours, theirs = Net(), Net()
        optimizer = oktopk.DistributedOptimizer(
            torch.optim.SGD(ours.parameters(), lr=0.125),
            ours.named_parameters(),
            comm=comm,
            momentum_correction=0.9,
            warmup_steps=1000,
        )
        plain = torch.optim.SGD(theirs.parameters(), lr=0.125, momentum=0.9)
        for step in range(40):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(ours, 0, step).backward()
            loss_of(theirs, 0, step).backward()
            optimizer.step()
            plain.step()
        optimizer.close()
        return flat_parameters(ours), flat_parameters(theirs)

    (ours, theirs) = simulate(1, run)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
