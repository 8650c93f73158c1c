"""What is dropped without close() leaves nothing behind: no thread, no model, no process group."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import oktopk
from oktopk.comm import Communicator, simulate
from tests.integration.training import FakeTrainer, Net, flat_parameters, loss_of
from tests.worlds import GlooWorld

HOW_MANY = 5
SPARSE: dict[str, Any] = {"warmup_steps": 1, "density": 0.1, "min_sparse_numel": 0, "guard_every": 1, "timeout_s": 30.0}
TINY_BUCKETS = 1200 / 2**20
Left = dict[str, Any]


NOTHING = {"threads": 0, "models": 0, "groups": 0}


def num_threads() -> int:
    return sum(thread.name == "oktopk-reductions" for thread in threading.enumerate())


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def settle(models: list[weakref.ref[nn.Module]], threads: int) -> Left:
    """What is left after collecting; threads get a moment to end."""
    patience = time.monotonic() + 10.0
    gc.collect()
    while num_threads() > threads and time.monotonic() < patience:
        time.sleep(0.01)
        gc.collect()  # what was being reduced was still held
    return {
        "threads": num_threads() - threads,
        "models": sum(model() is not None for model in models),
        "groups": num_groups(),
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def wrapped(steps: int, settings: dict[str, Any]) -> nn.Module:
    """Trained a little and let go of; the model is returned so that the caller is the last to hold it."""
    model = Net()
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **(SPARSE | settings)
    )
    train(model, optimizer, steps)
    return model


def attached(steps: int, settings: dict[str, Any]) -> nn.Module:
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS, find_unused_parameters=bool(settings.get("momentum_correction")))
    oktopk.attach(model, **(SPARSE | settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model


def paired(steps: int, settings: dict[str, Any]) -> nn.Module:
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    model.register_comm_hook(oktopk.HookState(**(SPARSE | settings)), oktopk.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model


def dropped_midway(steps: int, settings: dict[str, Any]) -> nn.Module:
    """Let go of between backward and step."""
    model = Net()
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **(SPARSE | settings)
    )
    train(model, optimizer, steps)
    optimizer.zero_grad()
    loss_of(model, dist.get_rank(), 99).backward()
    return model


def after_an_error(wrap: bool) -> nn.Module:
    """Let go of after NaN was refused: an error's traceback must not keep the model alive."""
    model: nn.Module = Net()
    if wrap:
        optimizer: Any = oktopk.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **SPARSE
        )
    else:
        model = DDP(model, bucket_cap_mb=TINY_BUCKETS)
        oktopk.attach(model, **SPARSE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        (loss_of(model, dist.get_rank(), 0) * float("nan")).backward()
        optimizer.step()

    with pytest.raises((oktopk.NonFiniteGradientError, RuntimeError), match="NaN"):
        step()
    return model


@pytest.mark.parametrize("wrap", [True, False], ids=["wrapper", "attach"])
@pytest.mark.usefixtures("alone")
def test_nothing_is_left_after_an_error(wrap: bool) -> None:
    gc.collect()
    threads, groups = num_threads(), num_groups()
    model = after_an_error(wrap)
    reference = weakref.ref(getattr(model, "module", model))
    del model
    left = settle([reference], threads)
    assert left | {"groups": left["groups"] - groups} == NOTHING


@pytest.mark.usefixtures("alone")
def test_a_hook_state_takes_its_gradient_hooks_along() -> None:
    model = Net()
    for close in (True, False):
        state = oktopk.HookState(named_parameters=model.named_parameters(), find_unused_parameters=True)
        assert all(p._backward_hooks for p in model.parameters())
        if close:
            state.close()
        else:
            del state
            gc.collect()
        assert not any(p._backward_hooks for p in model.parameters())


MAKERS = {"wrapper": wrapped, "attach": attached, "pair": paired, "wrapper, midway": dropped_midway}


def five(maker: str, steps: int, settings: dict[str, Any]) -> Left:
    """All held together, then dropped together."""
    gc.collect()
    threads, groups = num_threads(), num_groups()
    models: list[nn.Module] = [MAKERS[maker](steps, settings) for _ in range(HOW_MANY)]
    references = [weakref.ref(getattr(model, "module", model)) for model in models]
    assert len({id(reference()) for reference in references}) == HOW_MANY
    models.clear()
    left = settle(references, threads)
    return left | {"groups": left["groups"] - groups}


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a Gloo world of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("steps", [0, 4], ids=["untrained", "trained"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.usefixtures("alone")
def test_nothing_is_left_of_one_rank(maker: str, steps: int) -> None:
    assert five(maker, steps, {}) == NOTHING


@pytest.mark.parametrize(
    "settings",
    [{}, {"norm_clip": 0.5, "momentum_correction": 0.9}, {"dense_vectors": True, "nonfinite": "skip"}],
    ids=["default", "clipped", "skipping"],
)
@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_left_of_two_ranks(maker: str, settings: dict[str, Any], gloo2: GlooWorld) -> None:
    assert gloo2.run(five, maker, 3, settings) == [NOTHING] * 2


def with_everything_held() -> Left:
    """A listener, a watcher and a trainer that hold the optimizer or the model: cycles, which gc must break."""
    gc.collect()
    threads, groups = num_threads(), num_groups()

    def make() -> weakref.ref[nn.Module]:
        model = Net()
        optimizer = oktopk.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), trainer=FakeTrainer(), **SPARSE
        )
        optimizer.add_listener(lambda _: optimizer.param_groups)
        optimizer.allreducer.watch(lambda *_: model.train())
        model.optimizer = optimizer  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), 0).backward()
        optimizer.step()
        return weakref.ref(model)

    left = settle([make()], threads)
    return left | {"groups": left["groups"] - groups}


def test_cycles_through_listeners_are_released(gloo2: GlooWorld) -> None:
    assert gloo2.run(with_everything_held) == [NOTHING] * 2


# --- what stays alive


@pytest.mark.usefixtures("alone")
def test_a_dropped_wrapper_leaves_the_model_trainable() -> None:
    """Hooks on its parameters are gone, so a new wrapper starts afresh and plain training works."""
    model = Net()
    for _ in range(3):
        optimizer = oktopk.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **SPARSE
        )
        loss_of(model, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
        gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):  # several backwards before a step were refused by a live wrapper
        loss_of(model, 0, step).backward()
    plain.step()


@pytest.mark.usefixtures("alone")
def test_the_allreducer_of_a_living_model_is_not_collected() -> None:
    """attach's result need not be kept: the model holds it."""
    model = DDP(Net())
    told: list[oktopk.StepStats] = []
    oktopk.attach(model, **SPARSE).add_listener(told.append)
    gc.collect()
    loss_of(model, 0, 0).backward()
    gc.collect()
    loss_of(model, 0, 1).backward()
    assert [stats.step for stats in told] == [0, 1]


# --- close


@pytest.mark.usefixtures("alone")
def test_close_twice_is_harmless() -> None:
    threads, groups = num_threads(), num_groups()
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = oktopk.DistributedOptimizer(inner, model.named_parameters(), **SPARSE)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    for _ in range(3):
        optimizer.close()
        optimizer.allreducer.close()
    assert (num_threads(), num_groups()) == (threads, groups)
    inner.zero_grad()
    before = flat_parameters(model)
    loss_of(model, 0, 1).backward()
    inner.step()
    assert not torch.equal(before, flat_parameters(model)), "the wrapped optimizer stays usable"


@pytest.mark.usefixtures("alone")
def test_closing_an_allreducer_and_collecting_it_releases_once() -> None:
    groups = num_groups()
    allreducer = oktopk.AllReducer("oktopk", comm="torch")
    assert num_groups() == groups + 1
    allreducer.close()
    allreducer.close()
    assert num_groups() == groups
    del allreducer
    gc.collect()
    assert num_groups() == groups


def test_a_communicator_that_was_given_stays_open() -> None:
    class Mine:
        """Counts."""

        def __init__(self, inner: Communicator) -> None:
            self._inner = inner
            self.closed = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def close(self) -> None:
            self.closed += 1

        release = close

    def run(comm: Communicator) -> int:
        mine = Mine(comm)
        for end in (oktopk.AllReducer.close, lambda _: None):
            allreducer = oktopk.AllReducer("oktopk", comm=mine)
            end(allreducer)
            del allreducer
            gc.collect()
        return mine.closed

    assert simulate(1, run) == [0]


@pytest.mark.usefixtures("alone")
def test_detach_releases_at_once_and_twice_is_refused() -> None:
    gc.collect()
    threads, groups = num_threads(), num_groups()
    model = DDP(Net())
    allreducer = oktopk.attach(model, **SPARSE)
    loss_of(model, 0, 0).backward()
    assert (num_threads(), num_groups()) == (threads + 1, groups + 1)
    oktopk.detach(model)
    assert (num_threads(), num_groups()) == (threads, groups)
    allreducer.close()
    with pytest.raises(ValueError, match="nothing is attached"):
        oktopk.detach(model)


REFUSED: dict[str, Callable[[], object]] = {
    "unknown setting": lambda: oktopk.attach(DDP(Net()), densty=0.1),  # pyright: ignore[reportCallIssue]
    "impossible value": lambda: oktopk.attach(DDP(Net()), density=2.0),
    "unknown reducer": lambda: oktopk.attach(DDP(Net()), "topkZ"),
    "no parameters": lambda: oktopk.DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), []),
    "impossible cap": lambda: oktopk.DistributedOptimizer(
        torch.optim.SGD(Net().parameters(), lr=0.1), [], bucket_cap_mb=0
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.usefixtures("alone")
def test_what_was_refused_leaves_nothing(refused: str) -> None:
    gc.collect()
    threads, groups = num_threads(), num_groups()
    with pytest.raises(ValueError, match=r"\w+"):
        REFUSED[refused]()
    gc.collect()
    assert (num_threads(), num_groups()) == (threads, groups)


def train_the_others_too() -> list[bool]:
    """Models come and go while one stays: its training is not disturbed by groups that are released meanwhile."""
    staying = Net()
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(staying.parameters(), lr=0.1), staying.named_parameters(), **SPARSE
    )
    equal = []
    for step in range(6):
        attached(1, {}) if step % 2 else wrapped(1, {})
        if dist.get_rank() == step % 2:  # ranks collect when they like
            gc.collect()
        optimizer.zero_grad()
        loss_of(staying, dist.get_rank(), step).backward()
        optimizer.step()
        mine = flat_parameters(staying)
        other = mine.clone()
        dist.broadcast(other, 0)
        equal.append(torch.equal(mine, other))
    optimizer.close()
    gc.collect()
    return equal


def test_ranks_collect_at_different_times(gloo2: GlooWorld) -> None:
    assert gloo2.run(train_the_others_too) == [[True] * 6] * 2
