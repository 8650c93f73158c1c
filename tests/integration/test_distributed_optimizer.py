"""DistributedOptimizer: any optimizer, any communicator."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oktopk
from oktopk import DistributedOptimizer
from oktopk.comm import CommunicationError, InjectedFault, World, simulate
from oktopk.comm.base import Communicator
from oktopk.registry import REDUCERS, make_communicator
from tests.integration.training import FakeTrainer, Net, batch, flat_parameters, held_out_loss, loss_of
from tests.worlds import GlooWorld, run_mpi, try_run_mpi

TINY_BUCKETS = 1200 / 2**20
SPARSE: dict[str, Any] = {"warmup_steps": 2, "density": 0.1, "min_sparse_numel": 0, "guard_every": 1}
ALL: dict[str, Any] = {"density": 1.0, "warmup_steps": 0, "min_sparse_numel": 0, "guard_every": 1}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


def wrap(
    model: nn.Module, comm: Communicator | str = "auto", optimizer: str = "sgd", **settings: Any
) -> DistributedOptimizer:
    settings = {"bucket_cap_mb": TINY_BUCKETS, **settings}
    reducer = settings.pop("reducer", "oktopk")
    return DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()), model.named_parameters(), reducer, comm=comm, **settings
    )


def train(comm: Communicator, steps: int, optimizer: str = "sgd", **settings: Any) -> torch.Tensor:
    model = Net()
    opt = wrap(model, comm, optimizer, **settings)
    for step in range(steps):
        opt.zero_grad()
        loss_of(model, comm.rank, step).backward()
        opt.step()
    opt.close()
    return flat_parameters(model)


def train_whole_batch(size: int, steps: int, optimizer: str) -> torch.Tensor:
    """What data parallelism should equal: one process, the mean loss of all ranks."""
    model = Net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        opt.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(size)) / size).backward()
        opt.step()
    return flat_parameters(model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_at_density_one_equals_training_on_the_whole_batch(optimizer: str) -> None:
    expected = train_whole_batch(3, 8, optimizer)
    for parameters in simulate(3, lambda comm: train(comm, 8, optimizer, **ALL)):
        torch.testing.assert_close(parameters, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", list(REDUCERS))
def test_density_one_equals_the_whole_batch_for_every_reducer(name: str) -> None:
    expected = train_whole_batch(2, 6, "sgd")
    for parameters in simulate(2, lambda comm: train(comm, 6, reducer=name, **ALL)):
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_replicas_stay_identical(size: int) -> None:
    results = simulate(size, lambda comm: train(comm, 10, **SPARSE))
    assert all(torch.equal(result, results[0]) for result in results)


def train_over(transport: str, steps: int) -> torch.Tensor:
    return train(make_communicator(transport, 20.0), steps, **SPARSE)


@pytest.mark.slow
def test_gloo_and_mpi_give_the_simulated_result(gloo2: GlooWorld) -> None:
    """To the bit: sums are taken in rank order everywhere, and two numbers add the same either way round."""
    expected = simulate(2, lambda comm: train(comm, 10, **SPARSE))[0]
    for result in [*gloo2.run(train_over, "torch", 10), *run_mpi(2, train_over, "mpi", 10)]:
        assert torch.equal(result, expected)


# --- convergence


def final_losses(names: list[str]) -> dict[str, tuple[float, torch.Tensor]]:
    """Held-out loss after 200 steps of each reducer at density 0.1, 20 of them dense."""
    results = {}
    for name in names:
        comm = make_communicator("torch", 30.0)
        model = Net(width=64)
        opt = wrap(model, comm, reducer=name, density=0.1, warmup_steps=20, min_sparse_numel=0, bucket_cap_mb=25.0)
        for step in range(200):
            opt.zero_grad()
            loss_of(model, comm.rank, step).backward()
            opt.step()
        opt.close()
        comm.close()
        results[name] = (held_out_loss(model), flat_parameters(model))
    return results


@pytest.mark.slow
def test_every_reducer_reaches_the_loss_of_dense_in_200_steps(gloo2: GlooWorld) -> None:
    """Within 0.08 nats of dense, where training takes it from above 1.0 to below 0.4."""
    results = gloo2.run(final_losses, list(REDUCERS))
    assert held_out_loss(Net(width=64)) > 1.0
    dense, _ = results[0]["dense"]
    assert dense < 0.4
    for name, (loss, parameters) in results[0].items():
        assert loss < dense + 0.08, f"{name}: {loss:.3f}, dense {dense:.3f}"
        assert torch.equal(parameters, results[1][name][1]), f"{name}: replicas differ"


# --- accumulation, clipping, missing gradients


def test_local_accumulates_without_exchange() -> None:
    def accumulate(comm: Communicator) -> tuple[torch.Tensor, int]:
        model = Net()
        opt = wrap(model, comm, **ALL)
        told = []
        opt.add_listener(told.append)
        for step in range(3):
            opt.zero_grad()
            opt.local = True
            loss_of(model, comm.rank, 10 + step).backward()
            opt.local = False
            loss_of(model, comm.rank, step).backward()
            opt.step()
        opt.close()
        return flat_parameters(model), len({stats.step for stats in told})

    model = Net()
    opt = OPTIMIZERS["sgd"](model.parameters())
    for step in range(3):
        opt.zero_grad()
        for rank in range(2):
            ((loss_of(model, rank, 10 + step) + loss_of(model, rank, step)) / 2).backward()
        opt.step()
    for parameters, steps in simulate(2, accumulate):
        assert steps == 3
        torch.testing.assert_close(parameters, flat_parameters(model), rtol=1e-4, atol=1e-5)


def test_a_second_backward_without_local_says_what_to_do() -> None:
    model = Net()
    opt = wrap(model, **SPARSE)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"a second backward\(\) reached .* set `local = True`"):
        loss_of(model, 0, 1).backward()
    opt.close()


def test_norm_clip_scales_the_local_gradient_before_it_is_reduced() -> None:
    limit = 0.05

    def run(comm: Communicator) -> list[torch.Tensor]:
        model = Net()
        opt = wrap(model, comm, norm_clip=limit, **ALL)
        loss_of(model, comm.rank, 0).backward()
        opt.synchronize()
        opt.close()
        return [p.grad.clone() for p in model.parameters()]

    expected = [torch.zeros_like(p) for p in Net().parameters()]
    for rank in range(2):
        model = Net()
        loss_of(model, rank, 0).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        assert float(norm) > limit, "clipping must have something to do"
        for total, p in zip(expected, model.parameters(), strict=True):
            total += p.grad / 2
    for gradients in simulate(2, run):
        for got, want in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-8)


class Halves(nn.Module):
    """Rank 0 uses `left`, the others `right`; `never` has no gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.never = nn.Linear(10, 3), nn.Linear(10, 3), nn.Linear(10, 3)


@pytest.mark.parametrize("name", ["dense", "oktopk", "gtopk"])
def test_a_parameter_without_gradient_contributes_zero_and_blocks_nobody(name: str) -> None:
    def run(comm: Communicator) -> tuple[torch.Tensor, bool, torch.Tensor]:
        model = Halves()
        before = model.never.weight.detach().clone()
        opt = wrap(model, comm, reducer=name, **(SPARSE | {"density": 0.5}))
        for step in range(5):
            opt.zero_grad()
            x, y = batch(comm.rank, step)
            nn.functional.cross_entropy((model.left if comm.rank == 0 else model.right)(x), y).backward()
            opt.step()
        opt.close()
        # weight decay would have moved it, had it been given a gradient of zeros
        untouched = model.never.weight.grad is None and torch.equal(before, model.never.weight)
        return flat_parameters(model), untouched, model.left.weight.detach() - Halves().left.weight.detach()

    results = simulate(3, run)
    for parameters, untouched, moved in results:
        assert torch.equal(parameters, results[0][0])
        assert untouched
        assert float(moved.abs().sum()) > 0


def test_momentum_correction_trains_with_an_optimizer_without_momentum() -> None:
    def run(comm: Communicator) -> tuple[float, torch.Tensor]:
        model = Net(width=64)
        opt = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            "topkA",
            comm=comm,
            momentum_correction=0.9,
            density=0.05,
            warmup_steps=20,
            min_sparse_numel=0,
        )
        for step in range(150):
            opt.zero_grad()
            loss_of(model, comm.rank, step).backward()
            opt.step()
        opt.close()
        return held_out_loss(model), flat_parameters(model)

    results = simulate(2, run)
    assert results[0][0] < 0.6
    assert torch.equal(results[0][1], results[1][1])


# --- the face of a torch optimizer


def test_learning_rate_schedulers_and_hooks_keep_working() -> None:
    model = Net()
    opt = wrap(model, **SPARSE)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(2):
        opt.zero_grad()
        loss_of(model, 0, step).backward()
        opt.step()
        scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.025)
    assert len(calls) == 2
    assert isinstance(opt, torch.optim.Optimizer)
    opt.close()


def test_closure_is_called_once() -> None:
    model = Net()
    opt = wrap(model, **SPARSE)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = loss_of(model, 0, 0)
        loss.backward()
        return loss

    assert float(opt.step(closure).detach()) > 0
    assert calls == [1]
    opt.close()


def test_state_restored_into_fresh_objects_continues_bit_identically() -> None:
    def straight(comm: Communicator) -> torch.Tensor:
        return train(comm, 9, **SPARSE)

    def interrupted(comm: Communicator) -> torch.Tensor:
        model = Net()
        opt = wrap(model, comm, **SPARSE)
        for step in range(4):
            opt.zero_grad()
            loss_of(model, comm.rank, step).backward()
            opt.step()
        opt.close()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "training": opt.training_state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = Net(seed=77)
        opt = wrap(model, comm, **SPARSE)
        model.load_state_dict(saved["model"])
        opt.load_training_state_dict(saved["training"])
        for step in range(4, 9):
            opt.zero_grad()
            loss_of(model, comm.rank, step).backward()
            opt.step()
        opt.close()
        return flat_parameters(model)

    for left, right in zip(simulate(2, straight), simulate(2, interrupted), strict=True):
        assert torch.equal(left, right)


def test_the_wrapped_optimizers_state_is_what_torch_expects() -> None:
    model, alone = Net(), Net()
    opt, plain = wrap(model, **SPARSE), OPTIMIZERS["sgd"](alone.parameters())
    for each, optimizer in ((model, opt), (alone, plain)):
        loss_of(each, 0, 0).backward()
        optimizer.step()
    saved = opt.state_dict()
    assert saved.keys() == plain.state_dict().keys() == {"state", "param_groups"}
    plain.load_state_dict(saved)
    opt.load_state_dict(plain.state_dict())
    whole = opt.training_state_dict()
    assert whole.keys() == {"optimizer", "allreducer"}
    assert whole["allreducer"]["step"] == 1
    opt.close()


def test_no_state_is_given_between_backward_and_step() -> None:
    model = Net()
    opt = wrap(model, **SPARSE)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"^state_dict\(\) between backward\(\) and step\(\): call it after step"):
        opt.state_dict()
    with pytest.raises(RuntimeError, match=r"^state_dict\(\) between backward\(\) and step\(\)"):
        opt.training_state_dict()
    with pytest.raises(RuntimeError, match=r"^state_dict\(\) in the middle of a step"):
        opt.allreducer.state_dict()
    opt.step()
    assert opt.training_state_dict()["allreducer"]["step"] == 1
    opt.close()


@pytest.mark.parametrize(
    ("optimizer", "settings", "warned"),
    [
        ("sgd", {}, True),
        ("sgd", {"momentum_correction": 0.9}, False),
        ("sgd", {"reducer": "dense"}, False),
        ("adamw", {}, False),
    ],
)
def test_momentum_behind_a_sparse_reducer_is_warned_of_once(
    optimizer: str, settings: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(2, lambda comm: train(comm, 3, optimizer, **(SPARSE | settings)))
    said = [record.getMessage() for record in caplog.records if not record.getMessage().startswith("AdamW behind")]
    assert len(said) == warned
    assert all("optimizer has momentum 0.9" in line and "set momentum_correction=0.9" in line for line in said)


def test_two_models_in_one_process_share_nothing() -> None:
    def both(comm: Communicator) -> torch.Tensor:
        first, second = Net(), Net(seed=5)
        one, two = wrap(first, comm, **SPARSE), wrap(second, comm, **SPARSE)
        for step in range(6):
            for model, opt, shift in ((first, one, 0), (second, two, 50)):
                opt.zero_grad()
                loss_of(model, comm.rank, step + shift).backward()
                opt.step()
        one.close()
        two.close()
        return flat_parameters(first)

    for together, alone in zip(simulate(2, both), simulate(2, lambda comm: train(comm, 6, **SPARSE)), strict=True):
        assert torch.equal(together, alone)


def test_nothing_is_broadcast_unless_asked_for() -> None:
    def run(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = Net(seed=comm.rank)
        opt = wrap(model, comm, **SPARSE)
        before = flat_parameters(model)
        opt.broadcast_parameters(root=1)
        after = flat_parameters(model)
        opt.close()
        return before, after

    results = simulate(3, run)
    assert not torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(after, results[1][0]) for _, after in results)


def test_metrics_reach_the_trainer_in_both_phases() -> None:
    def run(comm: Communicator) -> FakeTrainer:
        model = Net()
        opt = wrap(model, comm, bucket_cap_mb=25.0, **SPARSE)
        trainer = FakeTrainer()
        opt.set_trainer(trainer)
        for step in range(5):
            opt.zero_grad()
            loss_of(model, comm.rank, step).backward()
            opt.step()
        opt.close()
        return trainer

    for trainer in simulate(2, run):
        n = sum(p.numel() for p in Net().parameters())
        k = round(0.1 * n)
        assert trainer.sparsities[:2] == [0.0, 0.0]
        assert trainer.compression_ratios[:2] == [1.0, 1.0]
        assert trainer.communication_sizes[:2] == [4.0 * n, 4.0 * n]
        applied = [size / 8 for size in trainer.communication_sizes[2:]]
        assert all(k <= count <= k + k // 64 for count in applied)
        assert trainer.sparsities[2:] == [1 - count / n for count in applied]
        assert trainer.compression_ratios[2:] == [n / count for count in applied]


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm_clip": 0.0}, "norm_clip=0.0: must be a positive norm"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1: must be positive"),
        ({"density": 0}, r"density=0: must be in \(0, 1\]"),
        ({"compresser": "x"}, "unknown setting compresser='x'; known: density,"),
        ({"reducer": "topk"}, "unknown reducer 'topk'; known: dense, topkA"),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(Net(), **arguments)


def test_parameters_without_a_name_or_with_the_same_are_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="updates 6 parameters, named_parameters names 5"):
        DistributedOptimizer(optimizer, list(model.named_parameters())[1:])
    with pytest.raises(ValueError, match="holds 'same' twice"):
        DistributedOptimizer(optimizer, [("same", p) for p in model.parameters()])


def test_ranks_with_different_models_are_told_at_once() -> None:
    def run(comm: Communicator) -> None:
        wrap(Net(width=32 + comm.rank), comm, **SPARSE)

    with pytest.raises(ValueError, match=r"rank\(s\) \[1\] hold other parameters"):
        simulate(2, run)


# --- failures in the background


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all_v"])
def test_an_error_in_the_worker_comes_out_of_step_and_nobody_hangs(operation: str) -> None:
    caught: dict[int, str] = {}

    def run(comm: Communicator) -> None:
        model = Net()
        opt = wrap(model, comm, **SPARSE)
        for step in range(6):
            opt.zero_grad()
            loss_of(model, comm.rank, step).backward()
            try:
                opt.step()
            except (InjectedFault, CommunicationError) as error:
                caught[comm.rank] = f"{type(error).__name__}: {error}"
                assert threading.current_thread().name == f"rank{comm.rank}"
                raise

    with pytest.raises((InjectedFault, CommunicationError)):
        simulate(3, run, World(3, timeout_s=3.0).fail_at(2, operation, call=6))
    assert caught[2] == f"InjectedFault: rank 2: injected fault at {operation}, call 6"
    for rank in (0, 1):
        assert caught[rank].startswith(f"CommunicationError: rank {rank} of 3: ")


def stall(rank_that_stalls: int, transport: str) -> str | None:
    """One rank stops calling step() for longer than the others are willing to wait."""
    model = Net()
    opt = wrap(model, transport, timeout_s=2.0, **SPARSE)
    rank = opt.allreducer.comm.rank
    if rank == rank_that_stalls:
        time.sleep(5.0)
        return None
    loss_of(model, rank, 0).backward()
    try:
        opt.step()
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_that_stalls_is_reported_over_gloo() -> None:
    world = GlooWorld(2)
    try:
        message = world.run(stall, 1, "torch")[0]
    finally:
        world.close()
    assert message.startswith("rank 0 of 2: all_reduce with ranks [1] failed (timeout 2 s)")


@pytest.mark.slow
def test_a_rank_that_stalls_is_reported_over_mpi() -> None:
    code, _, results = try_run_mpi(2, stall_and_leave, 1)
    assert results[0].startswith("rank 0 of 2: all_reduce with ranks [1] failed (timeout 2 s)")
    assert code == 1, "the one that gave up ends the whole job when it exits"


def stall_and_leave(rank_that_stalls: int) -> str | None:
    return stall(rank_that_stalls, "mpi")


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_nonfinite_policies(policy: str) -> None:
    def run(comm: Communicator) -> tuple[str | None, torch.Tensor, int]:
        model = Net()
        opt = wrap(model, comm, nonfinite=policy, **SPARSE)
        error = None
        for step in range(6):
            opt.zero_grad()
            loss = loss_of(model, comm.rank, step)
            (loss * float("inf") if comm.rank == 1 and step == 3 else loss).backward()
            before = flat_parameters(model)
            try:
                opt.step()
            except oktopk.NonFiniteGradientError as caught:
                error = str(caught)
                break
            if opt.allreducer.last_step_skipped:
                assert torch.equal(before, flat_parameters(model)), "momentum or decay moved a skipped step"
                assert all(p.grad is None for p in model.parameters())
        opt.close()
        return error, flat_parameters(model), opt.allreducer.num_skipped_steps

    results = simulate(3, run)
    for error, parameters, skipped in results:
        assert torch.equal(parameters, results[0][1])
        assert bool(torch.isfinite(parameters).all())
        if policy == "raise":
            assert error is not None
            assert error.startswith("step 3, bucket out.")
            assert "on rank 1" in error
        else:
            assert error is None
            assert skipped == 1


def test_a_saved_state_continues_after_an_error() -> None:
    """On the same objects: what was under way, or went wrong, is of no account any more."""

    def run(comm: Communicator, with_bad_step: bool) -> torch.Tensor:
        model = Net()
        opt = wrap(model, comm, **SPARSE)
        for step in range(7):
            if step == 4 and with_bad_step:
                saved = opt.training_state_dict()
                loss = loss_of(model, comm.rank, 40)
                opt.zero_grad()
                (loss * float("nan") if comm.rank == 1 else loss).backward()
                with pytest.raises(oktopk.NonFiniteGradientError):
                    opt.step()
                opt.load_training_state_dict(saved)
            opt.zero_grad()
            loss_of(model, comm.rank, step).backward()
            opt.step()
        opt.close()
        return flat_parameters(model)

    recovered, without = (simulate(2, lambda comm, b=bad: run(comm, b)) for bad in (True, False))
    assert all(torch.equal(left, right) for left, right in zip(recovered, without, strict=True))


# --- misuse is noticed


def test_gradients_changed_while_they_are_reduced_are_noticed() -> None:
    model = Net()
    opt = wrap(model, **SPARSE)
    loss_of(model, 0, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"was changed while it was being reduced: call synchronize\(\)"):
        opt.step()
    opt.close()


def test_gradients_may_be_changed_after_synchronize() -> None:
    def run(comm: Communicator) -> float:
        model = Net()
        opt = wrap(model, comm, **SPARSE)
        loss_of(model, comm.rank, 0).backward()
        opt.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()
        opt.close()
        return float((flat_parameters(model) - flat_parameters(Net())).norm())

    assert all(moved < 1e-3 for moved in simulate(2, run))


@pytest.mark.parametrize("settings", [{}, {"norm_clip": 100.0}], ids=["plain", "clipped"])
def test_synchronize_without_step_does_not_let_replicas_diverge(settings: dict[str, Any]) -> None:
    def run(comm: Communicator) -> torch.Tensor:
        model = Net()
        opt = wrap(model, comm, **SPARSE, **settings)
        loss_of(model, comm.rank, 0).backward()
        opt.synchronize()
        opt.zero_grad()
        loss_of(model, comm.rank, 1).backward()
        opt.step()
        opt.close()
        return flat_parameters(model)

    results = simulate(2, run)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("settings", [{}, {"norm_clip": 100.0}], ids=["plain", "clipped"])
def test_backward_after_synchronize_is_refused(settings: dict[str, Any]) -> None:
    model = Net()
    opt = wrap(model, **SPARSE, **settings)
    loss_of(model, 0, 0).backward()
    opt.synchronize()
    with pytest.raises(RuntimeError, match=r"a second backward\(\)"):
        loss_of(model, 0, 1).backward()
    opt.close()


def test_a_parameter_unfrozen_after_wrapping_is_refused() -> None:
    model = Net()
    model.hidden.requires_grad_(False)
    opt = wrap(model, **SPARSE)
    model.hidden.requires_grad_(True)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="unfreeze parameters first, then make the optimizer"):
        opt.step()
    opt.close()


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e25), (torch.float16, 5000.0)], ids=str)
def test_norm_clip_holds_where_the_norm_overflows_the_dtype(dtype: torch.dtype, value: float) -> None:
    model = nn.Linear(1000, 1, bias=False).to(dtype)
    opt = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), "dense", norm_clip=1.0
    )
    model.weight.grad = torch.full_like(model.weight, value)
    opt.synchronize()
    assert float(model.weight.grad.double().norm()) == pytest.approx(1.0, rel=1e-2)
    opt.close()


def test_after_close_nothing_hangs() -> None:
    model = Net()
    opt = wrap(model, **SPARSE)
    opt.close()
    opt.close()
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="reductions were closed"):
        opt.step()


def test_grad_scaler_lbfgs_and_sparse_gradients_are_refused() -> None:
    model = Net()
    opt = wrap(model, **SPARSE)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0, 0)).backward()
    opt.synchronize()
    with pytest.raises(RuntimeError, match="GradScaler does not work"):
        scaler.step(opt)
    opt.close()
    with pytest.raises(ValueError, match="LBFGS evaluates its closure several times"):
        DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model.named_parameters())
    embedding = nn.Embedding(10, 4, sparse=True)
    opt = DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding.named_parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"'weight' has a gradient of torch.sparse_coo"):
        opt.step()
    opt.close()


def test_auto_does_not_train_alone_where_srun_started_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ValueError, match=r"SLURM_STEP_NUM_TASKS=4, but MPI sees 1 rank"):
        oktopk.AllReducer("oktopk")


def stop_after_a_timeout(sleeper: int) -> str:
    """The one that waited gives up and stops; the sleeper comes late and finds nobody."""
    comm = make_communicator("mpi", 1.0)
    if comm.rank == sleeper:
        time.sleep(3.0)
    try:
        comm.all_reduce(torch.zeros(1000))
    except CommunicationError as error:
        comm.close()
        time.sleep(1.0)
        return str(error)
    return "no error"


@pytest.mark.slow
def test_closing_after_a_timeout_over_mpi_does_not_crash() -> None:
    code, output, results = try_run_mpi(2, stop_after_a_timeout, 1)
    assert results[0].startswith("rank 0 of 2: all_reduce with ranks [1] failed (timeout 1 s)")
    assert code == 1
    assert "Process received signal" not in output, output
