"""LocalSteps: local steps of any optimizer, and an exchange of what they changed."""

from __future__ import annotations

import gc
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import oktopk
from oktopk import LocalSteps
from oktopk.adapters.grouping import make_groups
from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.metrics.step_stats import StepStats
from oktopk.registry import REDUCERS, make_communicator
from tests.integration.local_steps_reference import Make, Plan, Reference, backward
from tests.integration.training import FakeTrainer, Net, batch, flat_parameters, held_out_loss, loss_of
from tests.worlds import GlooWorld, run_mpi

TINY_BUCKETS = 1200 / 2**20
WHOLE = 25.0
QUIET: dict[str, Any] = {"min_sparse_numel": 0, "guard_every": 1, "warmup_steps": 0}


class Halving(torch.optim.Optimizer):
    """An optimizer that nobody has heard of: signs, in steps that become smaller."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = count = self.state[p].get("count", 0) + 1
                p.sub_(p.grad.sign(), alpha=group["lr"] / (1 + count / 4))


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.005),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.05),
    "my own": lambda net: Halving(net.parameters()),
}


def settings_of(plan: Plan) -> dict[str, Any]:
    return {
        **QUIET,
        "every": plan.every,
        "density": 1.0 if plan.density is None else plan.density,
        "warmup_steps": plan.warmup_steps,
        "outer_lr": plan.outer_lr,
        "outer_momentum": plan.outer_momentum,
        "stream": plan.stream,
        "delay": plan.delay,
        "norm_clip": plan.norm_clip,
    }


def wrap(net: nn.Module, comm: Communicator | str = "auto", optimizer: str = "sgd", **settings: Any) -> LocalSteps:
    settings = {"every": 4, "density": 0.1, "bucket_cap_mb": TINY_BUCKETS, **QUIET, **settings}
    reducer = settings.pop("reducer", "oktopk")
    return LocalSteps(OPTIMIZERS[optimizer](net), net.named_parameters(), reducer=reducer, comm=comm, **settings)


def take(net: nn.Module, opt: LocalSteps, rank: int, steps: range, accumulated: int = 1) -> Iterator[int]:
    """Train; after each step its number."""
    for step in steps:
        opt.zero_grad()
        backward(net, rank, step, accumulated)
        opt.step()
        yield step


def train(comm: Communicator, steps: int, optimizer: str = "sgd", **settings: Any) -> tuple[list[Tensor], Tensor]:
    """This rank's parameters after every step, and at last those after synchronize()."""
    net = Net()
    opt = wrap(net, comm, optimizer, **settings)
    trace = [flat_parameters(net) for _ in take(net, opt, comm.rank, range(steps))]
    opt.synchronize()
    opt.close()
    return trace, flat_parameters(net)


def compare(size: int, steps: int, plan: Plan, optimizer: str = "sgd", merge: str = "all", **settings: Any) -> None:
    """Every rank's parameters, what it owes and what it is agreed on, after every step."""
    cap = settings.setdefault("bucket_cap_mb", WHOLE)

    def run(comm: Communicator) -> list[tuple[Tensor, Tensor, Tensor]]:
        net, found = Net(), []
        opt = wrap(net, comm, optimizer, **settings_of(plan), **settings)
        for _ in take(net, opt, comm.rank, range(steps), plan.accumulated):
            parameters = flat_parameters(net)
            with opt.agreed():
                anchor = flat_parameters(net)
            opt.wait()
            found.append((parameters, anchor, owed_by(opt, net)))
        opt.close()
        return found

    results = simulate(size, run)
    reference = Reference(size, plan, OPTIMIZERS[optimizer], parts_of(Net(), cap), merge)
    for step in range(steps):
        reference.step()
        for rank in range(size):
            parameters, anchor, owed = results[rank][step]
            expected = (reference.parameters[rank], reference.anchor, reference.owed[rank])
            for what, mine, theirs in zip(
                ("parameters", "anchor", "owed"), (parameters, anchor, owed), expected, strict=True
            ):
                torch.testing.assert_close(
                    mine.double(),
                    theirs,
                    rtol=1e-3,
                    atol=2e-5,
                    msg=lambda m, w=what, s=step, r=rank: f"{w}, step {s}, rank {r}: {m}",
                )


def owed_by(opt: LocalSteps, net: nn.Module) -> Tensor:
    opt.allreducer.busy, kept = False, opt.allreducer.busy
    feedback = opt.allreducer.state_dict()["feedback"]
    found, carried = feedback["residual"], feedback.get("carried", {})  # what dense steps rounded away
    found = {name: found.get(name, 0.0) + carried.get(name, 0.0) for name in found.keys() | carried.keys()}
    opt.allreducer.busy = kept
    nothing = [torch.zeros(p.numel()) for p in net.parameters()]
    return torch.cat([found.get(name, zero) for (name, _), zero in zip(net.named_parameters(), nothing, strict=True)])


def parts_of(net: nn.Module, cap_mb: float) -> list[Tensor]:
    places, start = {}, 0
    for name, p in net.named_parameters():
        places[name] = torch.arange(start, start + p.numel())
        start += p.numel()
    groups = make_groups(list(net.named_parameters()), cap_mb)
    return [torch.cat([places[slot.name] for slot in group.layout.slots]) for group in groups]


# --- against plain torch


def test_every_step_at_density_one_is_sgd_on_the_mean_gradient() -> None:
    """With momentum and decay: both are linear, so the mean of the ranks' changes is the change of the mean."""
    net = Net()
    opt = OPTIMIZERS["sgd"](net)
    expected = []
    for step in range(12):
        opt.zero_grad()
        (sum(loss_of(net, rank, step) for rank in range(3)) / 3).backward()
        opt.step()
        expected.append(flat_parameters(net))
    for trace, _ in simulate(3, lambda comm: train(comm, 12, every=1, density=1.0)):
        for mine, theirs in zip(trace, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)


PLANS = {
    "local sgd": Plan(every=4),
    "outer lr": Plan(every=3, outer_lr=0.5),
    "diloco": Plan(every=4, outer_lr=0.7, outer_momentum=0.9),
    "diloco, warmed up": Plan(every=4, outer_lr=0.7, outer_momentum=0.9, warmup_steps=5),
    "stream": Plan(every=4, stream=True, outer_lr=0.7, outer_momentum=0.5, warmup_steps=2),
    "delay": Plan(every=5, delay=2, outer_momentum=0.5, warmup_steps=3),
    "stream, delay": Plan(every=4, stream=True, delay=3, outer_lr=0.8),
}


@pytest.mark.parametrize("name", PLANS)
def test_dense_exchanges_equal_plain_local_sgd(name: str) -> None:
    compare(3, 15, PLANS[name], bucket_cap_mb=TINY_BUCKETS)


@pytest.mark.parametrize(("reducer", "merge"), [("topkA", "all"), ("topkA2", "largest"), ("oktopk", "largest")])
@pytest.mark.parametrize("name", PLANS)
def test_sparse_exchanges_equal_plain_torch(name: str, reducer: str, merge: str) -> None:
    """What is not applied stays owed; oktopk applies exactly k where k is below 64."""
    plan = PLANS[name]
    sparse = Plan(**{**vars(plan), "density": 0.04})
    cap = TINY_BUCKETS if plan.stream else WHOLE
    compare(3, 15, sparse, reducer=reducer, merge=merge, bucket_cap_mb=cap)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_accumulated_and_clipped(optimizer: str) -> None:
    """Gradients add up without being told to, and each rank clips its own."""
    compare(2, 7, Plan(every=3, norm_clip=0.3, accumulated=2), optimizer)


def test_the_clip_of_that_test_has_something_to_do() -> None:
    net = Net()
    backward(net, 0, 0, 2)
    assert float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)) > 0.3


def lbfgs(net: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=4, history_size=3)


def closure_for(net: nn.Module, opt: torch.optim.Optimizer, rank: int, step: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of(net, rank, step)
        loss.backward()
        return loss

    return closure


def test_lbfgs_calls_its_closure_as_often_as_it_likes() -> None:
    def run(comm: Communicator) -> tuple[list[float], Tensor]:
        net = Net()
        opt = LocalSteps(lbfgs(net), net.named_parameters(), every=2, comm=comm, density=1.0, **QUIET)
        losses = [float(opt.step(closure_for(net, opt, comm.rank, step)).detach()) for step in range(4)]
        opt.close()
        return losses, flat_parameters(net)

    nets = [Net(), Net()]
    optimizers = [lbfgs(net) for net in nets]
    expected: list[list[float]] = [[], []]
    for step in range(4):
        for rank, (net, opt) in enumerate(zip(nets, optimizers, strict=True)):
            expected[rank].append(float(opt.step(closure_for(net, opt, rank, step)).detach()))
        if step % 2:
            mean = torch.stack([flat_parameters(net) for net in nets]).mean(0)
            for net in nets:
                with torch.no_grad():
                    torch.nn.utils.vector_to_parameters(mean.clone(), net.parameters())
    for rank, (losses, parameters) in enumerate(simulate(2, run)):
        assert losses == pytest.approx(expected[rank], rel=1e-3)
        torch.testing.assert_close(parameters, flat_parameters(nets[0]), rtol=1e-3, atol=1e-4)


def test_a_closures_gradients_are_clipped_too() -> None:
    net, alone = Net(), Net()
    opt = LocalSteps(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), 100, norm_clip=0.01, **QUIET)
    before = flat_parameters(net)
    for step in range(3):
        assert float(opt.step(closure_for(net, opt, 0, step)).detach()) > 0
        moved = float((flat_parameters(net) - before).norm())
        assert moved == pytest.approx(0.01, rel=1e-3)
        before = flat_parameters(net)
    opt.close()
    assert not torch.equal(flat_parameters(net), flat_parameters(alone))


# --- all ranks have the same bits


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(REDUCERS))
def test_after_each_exchange_all_ranks_are_bit_identical(name: str, size: int) -> None:
    settings = {"reducer": name, "every": 3, "warmup_steps": 2, "density": 0.1, "bucket_cap_mb": WHOLE}
    results = [trace for trace, _ in simulate(size, lambda comm: train(comm, 9, **settings))]
    for step in range(9):
        same = [torch.equal(trace[step], results[0][step]) for trace in results]
        exchanged = step < 2 or (step + 1) % 3 == 0
        assert all(same) if exchanged else sum(same) == 1, f"step {step}: {same}"


@pytest.mark.parametrize("settings", [{"stream": True}, {"delay": 2}, {"stream": True, "delay": 3}], ids=str)
def test_anchors_are_bit_identical_while_parameters_never_are(settings: dict[str, Any]) -> None:
    def run(comm: Communicator) -> list[tuple[Tensor, Tensor, Tensor]]:
        net, found = Net(), []
        opt = wrap(net, comm, outer_momentum=0.5, **settings)
        for _ in take(net, opt, comm.rank, range(14)):
            own = flat_parameters(net)
            with opt.agreed():
                anchor = flat_parameters(net)
            found.append((anchor, own, flat_parameters(net)))
        opt.close()
        return found

    results = simulate(3, run)
    for step in range(14):
        anchors, owns, after = zip(*(result[step] for result in results), strict=True)
        assert all(torch.equal(each, anchors[0]) for each in anchors)
        assert not torch.equal(owns[0], owns[1])
        assert all(torch.equal(left, right) for left, right in zip(owns, after, strict=True))
    assert not torch.equal(results[0][0][0], results[0][-1][0])


def test_agreed_gives_a_ranks_own_parameters_back_after_an_error_too() -> None:
    net = Net()
    opt = wrap(net)
    list(take(net, opt, 0, range(2)))
    own = flat_parameters(net)

    def validate() -> None:
        with opt.agreed():
            assert torch.equal(flat_parameters(net), flat_parameters(Net()))
            raise KeyError

    with pytest.raises(KeyError):
        validate()
    assert torch.equal(flat_parameters(net), own)
    opt.close()


def train_over(transport: str, steps: int, settings: dict[str, Any]) -> list[Tensor]:
    comm = make_communicator(transport, 20.0)
    trace, last = train(comm, steps, **settings)
    comm.close()
    return [*trace, last]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"warmup_steps": 2}, {"stream": True, "delay": 2, "outer_momentum": 0.9}], ids=["plain", "everything"]
)
def test_gloo_and_mpi_give_the_simulated_result(settings: dict[str, Any], gloo2: GlooWorld) -> None:
    expected = [[*trace, last] for trace, last in simulate(2, lambda comm: train(comm, 10, **settings))]
    found = [gloo2.run(train_over, "torch", 10, settings)]
    if "delay" in settings:
        found.append(run_mpi(2, train_over, "mpi", 10, settings))
    for results in found:
        for mine, theirs in zip(results, expected, strict=True):
            assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


# --- the law


class Recording(torch.optim.SGD):
    """Adds up what its own steps change, in fp64."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.changed: dict[int, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        result = super().step(closure)
        after = (p.detach() for group in self.param_groups for p in group["params"])
        for at, (old, new) in enumerate(zip(before, after, strict=True)):
            self.changed[at] = self.changed.get(at, 0.0) + (old.double() - new.double())
        return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("reducer", "steps"), [("oktopk", 1000), ("gtopk", 120)])
def test_nothing_is_lost_in_a_thousand_steps(reducer: str, steps: int) -> None:
    """P times what was applied, and what is owed, is what the local steps of all ranks ever changed.

    The learning rate changes, and so does everything else, where a state is loaded; one rank leaves out a step.
    """
    parts: list[dict[str, Any]] = [
        {"every": 1, "warmup_steps": 30, "dense_dtype": "int8"},
        {"every": 7, "delay": 3, "warmup_steps": 30},
        {"every": 4, "stream": True, "wire_dtype": "bf16"},
        {"every": 5, "stream": True, "delay": 4, "norm_clip": 0.05},
    ]

    def run(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        changed: Tensor | float = 0.0
        net, state = Net(width=8), None
        start = flat_parameters(net).double()
        for number, part in enumerate(parts):
            inner = Recording(net.parameters(), lr=0.1, momentum=0.5)
            settings = {**QUIET, "warmup_steps": 0, "density": 0.05, "nonfinite": "skip", "guard_every": 50, **part}
            opt = LocalSteps(
                inner, net.named_parameters(), reducer=reducer, comm=comm, bucket_cap_mb=300 / 2**20, **settings
            )
            if state is not None:
                opt.load_training_state_dict(state)
            for step in range(steps // 4 * number, steps // 4 * (number + 1)):
                opt.param_groups[0]["lr"] = 0.1 / (1 + step % 10)
                opt.zero_grad()
                loss = loss_of(net, comm.rank, step)
                (loss * float("nan") if comm.rank == 1 and step == steps // 3 else loss).backward()
                opt.step()
            if number == len(parts) - 1:
                opt.synchronize()
            state = opt.training_state_dict()
            changed += torch.cat([each.flatten() for each in inner.changed.values()])
            assert opt.allreducer.num_skipped_steps == 0
            opt.close()
        return changed, start - flat_parameters(net).double(), owed_by(opt, net)

    results = simulate(3, run)
    handed_in = sum(changed for changed, _, _ in results)
    applied = results[0][1]
    owed = sum(owed.double() for _, _, owed in results)
    assert all(torch.equal(applied, each) for _, each, _ in results)
    assert float(owed.abs().max()) > 1e-3, "something must be owed, or the law says little"
    torch.testing.assert_close(3 * applied + owed, handed_in, rtol=0, atol=2e-4)


def test_the_ledger_of_bf16_parameters_is_exact() -> None:
    """Changes are handed in as they really are: the anchor is in fp32, the parameters are what it rounds to."""

    def run(comm: Communicator) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        net = Net().bfloat16()
        opt = wrap(net, comm, delay=1, bucket_cap_mb=WHOLE)
        handed_in: list[Tensor] = []
        opt.allreducer.watch(lambda _, bucket: handed_in.append(bucket.flat.clone()))
        start = anchor_of(opt)
        agreed = []
        for _ in take(net, opt, comm.rank, range(40)):
            with opt.agreed():
                agreed.append(flat_parameters(net))
        opt.synchronize()
        opt.param_groups[0]["lr"] = 0.0
        list(take(net, opt, comm.rank, range(40, 44)))
        opt.synchronize()
        assert float(handed_in[-1].abs().max()) == 0.0, "nothing changed: what rounding took away is no change"
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
        owed = opt.allreducer.state_dict()["feedback"]["residual"]
        order = list(opt.training_state_dict()["local_steps"]["anchor"])
        opt.close()
        applied = start - anchor_of(opt)
        return applied, torch.cat([owed[name] for name in order]).double(), sum(handed_in).double(), agreed

    results = simulate(2, run)
    applied = results[0][0]
    assert torch.equal(applied, results[1][0])
    assert all(torch.equal(left, right) for left, right in zip(results[0][3], results[1][3], strict=True))
    owed, handed_in = (sum(result[at] for result in results) for at in (1, 2))
    assert float(handed_in.abs().max()) > 0.1
    torch.testing.assert_close(2 * applied + owed, handed_in, rtol=0, atol=2e-5)


def anchor_of(opt: LocalSteps) -> Tensor:
    return torch.cat(list(opt.training_state_dict()["local_steps"]["anchor"].values())).double()


# --- stream and delay


@pytest.mark.parametrize("every", [2, 3, 8])
def test_a_stream_exchanges_each_group_once_in_a_round_at_its_turn(every: int) -> None:
    def run(comm: Communicator) -> list[list[str]]:
        net = Net()
        opt = wrap(net, comm, every=every, stream=True, warmup_steps=1)
        told: list[StepStats] = []
        opt.add_listener(told.append)
        by_step = []
        for _ in take(net, opt, comm.rank, range(3 * every)):
            by_step.append([stats.bucket for stats in told])
            told.clear()
        opt.close()
        return by_step

    for by_step in simulate(2, run):
        groups = by_step[0]
        assert len(groups) == 4, "in the warm-up all are exchanged"
        rounds = [by_step[start : start + every] for start in (every, 2 * every)]
        assert rounds[0] == rounds[1]
        assert sorted(name for step in rounds[0] for name in step) == sorted(groups)
        assert max(map(len, rounds[0])) == -(-len(groups) // every), "spread evenly"


def step_while_the_other_is_late(folder: str, delay: int) -> bool:
    """Rank 1 comes to the exchange only when rank 0 has taken its next step."""
    comm = make_communicator("torch", 20.0)
    net, mark = Net(), Path(folder) / f"stepped-{delay}"
    opt = wrap(net, comm, every=3, delay=delay)
    for step in take(net, opt, comm.rank, range(3 + delay - 1)):
        if comm.rank == 1 and step == 1:
            for _ in range(2000):
                if mark.exists():
                    break
                time.sleep(0.005)
            assert mark.exists(), "rank 0 waited for this one"
    if comm.rank == 0:
        mark.write_text("")
    list(take(net, opt, comm.rank, range(3 + delay - 1, 9)))
    opt.synchronize()
    opt.close()
    comm.close()
    return True


@pytest.mark.slow
def test_with_delay_steps_go_on_while_an_exchange_is_under_way(gloo2: GlooWorld, tmp_path: Path) -> None:
    assert gloo2.run(step_while_the_other_is_late, str(tmp_path), 2) == [True, True]


# --- synchronize, wait, warm-up


@pytest.mark.parametrize("settings", [{}, {"delay": 3}, {"stream": True, "delay": 1, "outer_momentum": 0.9}], ids=str)
@pytest.mark.parametrize("steps", [6, 8, 9])
def test_synchronize_makes_all_equal_and_twice_is_once(settings: dict[str, Any], steps: int) -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor, int, int]:
        net = Net()
        opt = wrap(net, comm, **settings)
        list(take(net, opt, comm.rank, range(steps)))
        opt.synchronize()
        once, exchanges = flat_parameters(net), opt.allreducer.step
        opt.synchronize()
        opt.close()
        return once, flat_parameters(net), exchanges, opt.allreducer.step

    results = simulate(3, run)
    for once, twice, exchanges, after in results:
        assert torch.equal(once, results[0][0])
        assert torch.equal(once, twice)
        assert exchanges == after


def test_synchronize_exchanges_only_what_changed_since() -> None:
    def run(comm: Communicator) -> list[str]:
        net = Net()
        opt = wrap(net, comm, stream=True)
        told: list[StepStats] = []
        list(take(net, opt, comm.rank, range(3)))  # turn 3 was just now
        opt.add_listener(told.append)
        opt.synchronize()
        opt.close()
        return [stats.bucket for stats in told]

    for names in simulate(2, run):
        assert len(names) == 3


def test_wait_frees_the_communicator_and_changes_nothing() -> None:
    def run(comm: Communicator) -> list[Tensor]:
        net, trace = Net(), []
        opt = wrap(net, comm, delay=3)
        for _ in take(net, opt, comm.rank, range(10)):
            before = flat_parameters(net)
            opt.wait()
            assert torch.equal(before, flat_parameters(net))
            total = torch.ones(1)
            comm.all_reduce(total)  # on this thread, which nobody shares it with now
            assert float(total) == comm.size
            trace.append(before)
        opt.close()
        return trace

    for mine, (theirs, _) in zip(simulate(2, run), simulate(2, lambda comm: train(comm, 10, delay=3)), strict=True):
        assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def test_weights_loaded_after_wrapping_are_where_changes_count_from() -> None:
    """A sparse exchange would else send a hundredth of the way from the first weights to them."""

    def run(comm: Communicator, late: bool) -> Tensor:
        net = Net(seed=0 if late else 5)
        opt = wrap(net, comm)
        with opt.agreed():
            assert torch.equal(flat_parameters(net), flat_parameters(Net(seed=0 if late else 5)))
        net.load_state_dict(Net(seed=5).state_dict())
        list(take(net, opt, comm.rank, range(4)))
        opt.close()
        return flat_parameters(net)

    late, early = (simulate(2, lambda comm, late=late: run(comm, late)) for late in (True, False))
    assert all(torch.equal(left, right) for left, right in zip(late, early, strict=True))


def test_broadcast_parameters_makes_replicas_equal() -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        net = Net(seed=comm.rank)
        opt = wrap(net, comm)
        opt.broadcast_parameters(root=1)
        started = flat_parameters(net)
        list(take(net, opt, comm.rank, range(4)))
        opt.close()
        return started, flat_parameters(net)

    results = simulate(3, run)
    assert all(torch.equal(started, flat_parameters(Net(seed=1))) for started, _ in results)
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)


# --- NaN and Inf


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("with_closure", [False, True])
def test_skip_leaves_out_the_local_step_of_one_rank(delay: int, with_closure: bool) -> None:
    """Its momentum never saw the gradient, and nobody skips an exchange."""

    def run(comm: Communicator) -> tuple[bool, int, Tensor, Tensor]:
        net = Net()
        opt = wrap(net, comm, nonfinite="skip", delay=delay)
        stood_still = False
        for step in range(8):
            bad = comm.rank == 1 and step == 2

            def closure(step: int = step, bad: bool = bad) -> Tensor:
                opt.zero_grad()
                loss = loss_of(net, comm.rank, step) * (float("inf") if bad else 1.0)
                loss.backward()
                return loss

            before = flat_parameters(net)
            if with_closure:
                opt.step(closure)
            else:
                closure()
                opt.step()
            if bad:
                stood_still = torch.equal(before, flat_parameters(net))
        opt.synchronize()
        opt.close()
        momentum = torch.cat([state["momentum_buffer"].flatten() for state in opt.state.values()])
        return stood_still, opt.allreducer.num_skipped_steps, flat_parameters(net), momentum

    results = simulate(3, run)
    assert [stood_still for stood_still, _, _, _ in results] == [False, True, False]
    for _, skipped, parameters, momentum in results:
        assert skipped == 0
        assert torch.equal(parameters, results[0][2])
        assert bool(torch.isfinite(parameters).all() and torch.isfinite(momentum).all())


def test_skip_puts_a_step_back_that_had_begun() -> None:
    """LBFGS has moved when its closure is called for the second time."""
    net = Net()
    opt = LocalSteps(lbfgs(net), net.named_parameters(), 5, nonfinite="skip", min_sparse_numel=0)
    calls: list[float] = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of(net, 0, 0)
        (loss * (float("nan") if calls else 1.0)).backward()
        calls.append(float(loss.detach()))
        return loss

    before = flat_parameters(net)
    assert opt.step(closure) is None
    assert len(calls) == 2
    assert calls[0] != calls[1]
    assert torch.equal(before, flat_parameters(net))
    opt.close()


class Jumps(torch.optim.SGD):
    """A step that leaves the numbers there are."""

    jump = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.jump:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(float("inf"))
        return result


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"outer_momentum": 0.9}], ids=str)
def test_an_exchange_that_all_ranks_skip_leaves_all_where_they_agreed(settings: dict[str, Any]) -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        net = Net()
        inner = Jumps(net.parameters(), lr=0.1)
        opt = LocalSteps(
            inner, net.named_parameters(), 3, comm=comm, density=0.1, **{**QUIET, "nonfinite": "skip", **settings}
        )
        list(take(net, opt, comm.rank, range(5)))
        opt.wait()
        with opt.agreed():
            before = flat_parameters(net)
        owed = owed_by(opt, net)
        inner.jump = comm.rank == 1
        opt.zero_grad()
        loss_of(net, comm.rank, 5).backward()
        opt.step()
        inner.jump = False
        if settings.get("delay"):
            opt.training_state_dict()  # takes the exchange up
        after, still_owed = flat_parameters(net), owed_by(opt, net)
        list(take(net, opt, comm.rank, range(6, 9)))
        opt.synchronize()
        opt.close()
        assert torch.equal(owed, still_owed)
        return before, after, owed, flat_parameters(net), opt.allreducer.num_skipped_steps

    results = simulate(3, run)
    for before, after, _, last, skipped in results:
        assert torch.equal(before, after)
        assert torch.equal(last, results[0][3])
        assert bool(torch.isfinite(last).all())
        assert not torch.equal(last, before)
        assert skipped == 1


def take_bad_steps(net: nn.Module, opt: LocalSteps, rank: int) -> None:
    for step in range(40, 46):
        opt.zero_grad()
        loss = loss_of(net, rank, step)
        (loss * float("nan") if rank == 1 else loss).backward()
        opt.step()


@pytest.mark.parametrize("delay", [0, 2])
def test_raise_comes_out_on_every_rank_and_a_saved_state_continues(delay: int) -> None:
    """Also one that was kept in memory: the local steps before the exchange have long written NaN into momentum."""

    def run(comm: Communicator, with_bad_step: bool) -> tuple[str, Tensor]:
        net, error = Net(), ""
        opt = wrap(net, comm, every=3, delay=delay)
        list(take(net, opt, comm.rank, range(4)))
        saved = opt.training_state_dict()
        if with_bad_step:
            with pytest.raises(oktopk.NonFiniteGradientError) as caught:
                take_bad_steps(net, opt, comm.rank)
            error = str(caught.value)
            opt.load_training_state_dict(saved)
        list(take(net, opt, comm.rank, range(4, 9)))
        opt.synchronize()
        opt.close()
        return error, flat_parameters(net)

    recovered, without = (simulate(2, lambda comm, b=bad: run(comm, b)) for bad in (True, False))
    for (error, left), (_, right) in zip(recovered, without, strict=True):
        assert "on rank 1" in error
        assert torch.equal(left, right)


# --- states


RESUMED: dict[str, dict[str, Any]] = {
    "plain": {"warmup_steps": 2},
    "in the warm-up": {"warmup_steps": 9},
    "outer momentum": {"outer_momentum": 0.9, "outer_lr": 0.7},
    "stream": {"stream": True},
    "delay": {"delay": 3},
    "everything": {"stream": True, "delay": 2, "outer_momentum": 0.9},
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_state_saved_in_the_middle_of_a_round_continues_bit_identically(name: str, optimizer: str) -> None:
    settings = RESUMED[name]

    def run(comm: Communicator) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        traces = []
        net = Net()
        opt = wrap(net, comm, optimizer, **settings)
        list(take(net, opt, comm.rank, range(6)))
        file = io.BytesIO()
        torch.save(opt.training_state_dict(), file)
        traces.append([flat_parameters(net) for _ in take(net, opt, comm.rank, range(6, 15))])
        opt.close()
        file.seek(0)
        net = Net(seed=77)
        opt = wrap(net, comm, optimizer, **settings)
        opt.load_training_state_dict(torch.load(file, weights_only=True))
        traces.append([flat_parameters(net) for _ in take(net, opt, comm.rank, range(6, 15))])
        opt.close()
        traces.append(train(comm, 15, optimizer, **settings)[0][6:])
        return traces[0], traces[1], traces[2]

    for went_on, resumed, never_saved in simulate(2, run):
        assert all(torch.equal(left, right) for left, right in zip(went_on, resumed, strict=True))
        if not settings.get("delay"):  # saving takes up what is under way
            assert all(torch.equal(left, right) for left, right in zip(went_on, never_saved, strict=True))


def test_a_state_is_loaded_into_other_groups() -> None:
    """What is owed, agreed on and remembered follows the parameters."""

    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        net = Net()
        opt = wrap(net, comm, stream=True, outer_momentum=0.5)
        list(take(net, opt, comm.rank, range(6)))
        state = opt.training_state_dict()
        opt.close()
        other = Net(seed=7)
        opt = wrap(other, comm, bucket_cap_mb=WHOLE, outer_momentum=0.5)
        opt.load_training_state_dict(state)
        loaded = flat_parameters(other)
        again = opt.training_state_dict()
        for kind in ("anchor", "outer_velocity"):
            for name, value in state["local_steps"][kind].items():
                assert torch.equal(value, again["local_steps"][kind][name])
        opt.synchronize()
        opt.close()
        assert torch.equal(loaded, flat_parameters(net))
        return loaded, flat_parameters(other)

    results = simulate(2, run)
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)


class Turned(Net):
    """As many elements under the same names, in other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = nn.Parameter(self.out.weight.detach().t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def other_states() -> dict[str, tuple[Callable[[], dict[str, Any]], str]]:
    def of(net: nn.Module, **settings: Any) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            opt = wrap(net, **settings)
            opt.close()
            return opt.training_state_dict()

        return make

    def distributed() -> dict[str, Any]:
        net = Net()
        opt = oktopk.DistributedOptimizer(OPTIMIZERS["sgd"](net), net.named_parameters())
        opt.close()
        return opt.training_state_dict()

    def one_group_more() -> dict[str, Any]:
        net = Net()
        ways = [{"params": list(part.parameters())} for part in (net.hidden, net.middle, net.out)]
        opt = LocalSteps(torch.optim.SGD(ways, lr=0.1), net.named_parameters(), 4, **QUIET)
        opt.close()
        return opt.training_state_dict()

    def damaged() -> dict[str, Any]:
        state = of(Net())()
        del state["local_steps"]["sent"]
        return state

    return {
        "width": (of(Net(width=16)), r"\(3, 16\) for 'out.weight', this model has \(3, 32\): it is of another"),
        "more": (of(Wider()), r"shape \(3,\) for 'more.bias', this model has None: it is of another model"),
        "less": (of(Net().out), r"shape None for '[\w.]+', this model has .* it is of another model"),
        "shape": (of(Turned()), r"\(32, 3\) for 'out.weight', this model has \(3, 32\): it is of another model"),
        "optimizer": (one_group_more, "parameter group"),
        "wrapper": (distributed, r"no 'local_steps': it is not that of LocalSteps.training_state_dict\(\)"),
        "reducer": (of(Net(), reducer="topkA"), "saved state has reducer='topkA'"),
        "damaged": (damaged, "no 'sent': it is damaged; load an earlier one"),
    }


@pytest.mark.parametrize("name", list(other_states()))
def test_the_state_of_another_is_refused_in_one_line_and_nothing_is_changed(name: str) -> None:
    make, message = other_states()[name]
    net = Net()
    opt = wrap(net)
    list(take(net, opt, 0, range(6)))
    before = opt.training_state_dict()
    with pytest.raises(ValueError, match=message) as caught:
        opt.load_training_state_dict(make())
    assert "\n" not in str(caught.value)
    assert_same(before, opt.training_state_dict())
    list(take(net, opt, 0, range(6, 9)))
    opt.close()


def test_another_ranks_state_is_refused() -> None:
    def run(comm: Communicator) -> dict[str, Any]:
        opt = wrap(Net(), comm)
        opt.close()
        return opt.training_state_dict()

    opt = wrap(Net())
    with pytest.raises(ValueError, match="saved state has rank=1"):
        opt.load_training_state_dict(simulate(2, run)[1])
    opt.close()


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for each, other in zip(left, right, strict=True):
            assert_same(each, other)
    else:
        assert left == right


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0: must be a whole number of steps, at least 1$"),
        ({"every": True}, "every=True: must be a whole number"),
        ({"every": 2.0}, r"every=2\.0: must be a whole number"),
        ({"every": 4, "delay": 4}, "delay=4: must be a whole number of steps, at least 0 and below every=4"),
        ({"every": 1, "delay": 1}, "delay=1: .* below every=1"),
        ({"delay": -1}, "delay=-1: must be"),
        ({"outer_lr": 0}, "outer_lr=0: must be a positive number"),
        ({"outer_lr": float("nan")}, "outer_lr=nan: must be a positive number"),
        ({"outer_lr": float("inf")}, "outer_lr=inf: must be a positive number"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1\.0: must be in \[0, 1\)"),
        ({"outer_momentum": -0.1}, r"outer_momentum=-0\.1: must be in \[0, 1\)"),
        ({"norm_clip": 0.0}, r"norm_clip=0\.0: must be a positive norm"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0: must be positive"),
        ({"density": 2}, r"density=2: must be in \(0, 1\]"),
        ({"compresser": "x"}, "unknown setting compresser='x'; known: density,"),
        ({"reducer": "topk"}, "unknown reducer 'topk'; known: dense, topkA"),
        ({"momentum_correction": 0.9}, r"momentum_correction=0\.9: updates hold their momentum already; set it to 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(Net(), **arguments)


def test_parameters_without_a_name_or_with_the_same_are_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match="updates 6 parameters, named_parameters names 5"):
        LocalSteps(OPTIMIZERS["sgd"](net), list(net.named_parameters())[1:], 2)
    with pytest.raises(ValueError, match="holds 'same' twice"):
        LocalSteps(OPTIMIZERS["sgd"](net), [("same", p) for p in net.parameters()], 2)


def test_ranks_with_different_models_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"rank\(s\) \[1\] hold other parameters"):
        simulate(2, lambda comm: wrap(Net(width=32 + comm.rank), comm))


def test_a_parameter_unfrozen_after_wrapping_is_refused() -> None:
    net = Net()
    net.hidden.requires_grad_(False)
    opt = wrap(net)
    net.hidden.requires_grad_(True)
    loss_of(net, 0, 0).backward()
    with pytest.raises(RuntimeError, match="unfreeze parameters first, then make the optimizer"):
        opt.step()
    opt.close()


def test_grad_scaler_is_refused() -> None:
    net = Net()
    opt = wrap(net)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, 0, 0)).backward()
    with pytest.raises(RuntimeError, match="GradScaler does not work with LocalSteps"):
        scaler.step(opt)
    opt.close()


def wrap_ddp(when: str) -> str:
    comm = make_communicator("torch", 20.0)
    net = Net()
    bystander = DDP(nn.Linear(2, 2))
    try:
        if when == "before":
            net = DDP(net)
        opt = wrap(net, comm)
        if when == "after":
            net = DDP(net)
        list(take(net, opt, comm.rank, range(5)))
        opt.close()
        return "trained"
    except ValueError as error:
        return str(error)
    finally:
        del bystander
        comm.close()
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_ddp_model_is_refused_in_one_line(when: str, gloo2: GlooWorld) -> None:
    told = gloo2.run(wrap_ddp, when)
    expected = (
        "trained"
        if when == "never"
        else (
            "the model is under DistributedDataParallel, whose own exchange would be one too many: use the model itself"
        )
    )
    assert told == [expected] * 2


# --- the face of a torch optimizer


def test_schedulers_hooks_and_metrics_keep_working() -> None:
    net, trainer = Net(), FakeTrainer()
    opt = wrap(net, every=2, warmup_steps=1, trainer=trainer, bucket_cap_mb=WHOLE)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    for _ in take(net, opt, 0, range(4)):
        scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
    assert len(calls) == 4
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.state_dict().keys() == {"state", "param_groups"}
    assert [sparsity > 0 for sparsity in trainer.sparsities] == [False, True, True]
    with pytest.raises(ValueError, match="add it to the optimizer first, then wrap"):
        opt.add_param_group({"params": [torch.zeros(1)]})
    assert repr(opt).startswith("LocalSteps(oktopk, every=2, SGD")
    opt.close()


def reduction_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "oktopk-reductions"}


@pytest.mark.parametrize("settings", [{}, {"delay": 3}], ids=str)
def test_a_dropped_optimizer_leaves_no_thread(settings: dict[str, Any]) -> None:
    before = reduction_threads()
    net = Net()
    opt = wrap(net, **settings)
    list(take(net, opt, 0, range(5)))
    (mine,) = reduction_threads() - before
    del opt
    for _ in range(200):  # an exchange that is under way holds on until it is over
        gc.collect()
        mine.join(0.1)
        if not mine.is_alive():
            break
    assert not mine.is_alive()
    loss_of(net, 0, 0).backward()


def test_after_close_nothing_hangs() -> None:
    net = Net()
    opt = wrap(net, every=1)
    opt.close()
    opt.close()
    with pytest.raises(RuntimeError, match="reductions were closed"):
        list(take(net, opt, 0, range(1)))


def test_it_trains() -> None:
    """150 steps with 15 sparse exchanges of 5 %, after 20 dense ones."""

    def run(comm: Communicator) -> float:
        net = Net(width=64)
        settings = {"every": 10, "density": 0.05, "warmup_steps": 20, "outer_lr": 1.0, "bucket_cap_mb": WHOLE}
        opt = wrap(net, comm, **settings)
        list(take(net, opt, comm.rank, range(150)))
        opt.synchronize()
        opt.close()
        return held_out_loss(net)

    assert held_out_loss(Net(width=64)) > 1.0
    assert all(loss < 0.6 for loss in simulate(2, run))


def test_a_batch_is_another_on_every_rank() -> None:
    """Else ranks that never exchange would be equal, and tests of equality would say nothing."""
    assert not torch.equal(batch(0, 0)[0], batch(1, 0)[0])
