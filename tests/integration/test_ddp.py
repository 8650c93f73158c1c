"""attach(ddp_model, ...): real DDP over real Gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import oktopk
from oktopk.metrics.meter import STAGES
from oktopk.metrics.step_stats import StepStats
from oktopk.reduce.base import SparseReduction
from oktopk.registry import REDUCERS
from oktopk.select.base import Accumulated
from oktopk.workbench.simulate.volume import volume
from tests.integration.training import FakeTrainer, Net, batch, flat_parameters, loss_of
from tests.worlds import GlooWorld

SPARSE = {"warmup_steps": 2, "density": 0.1, "min_sparse_numel": 0, "guard_every": 1, "timeout_s": 30.0}
TINY_BUCKETS = 1200 / 2**20  # several buckets even for a small model


def train(
    steps: int,
    reducer: str | None,
    settings: dict[str, Any],
    ddp_options: dict[str, Any],
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, list[StepStats]]:
    """Parameters after training, and what was told of every reduction."""
    rank = dist.get_rank()
    model = DDP((model or Net()).to(dtype), **ddp_options)
    told: list[StepStats] = []
    allreducer = None
    if reducer is not None:
        allreducer = oktopk.attach(model, reducer, **settings)
        allreducer.add_listener(told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    if allreducer is not None:
        oktopk.detach(model)
    return flat_parameters(model), told


def all_reducers_at_density_one(names: list[str]) -> dict[str, torch.Tensor]:
    options = {"bucket_cap_mb": TINY_BUCKETS}
    settings = {"density": 1.0, "warmup_steps": 0, "min_sparse_numel": 0, "guard_every": 1}
    results = {name: train(12, name, settings, options)[0] for name in names}
    results["plain DDP"] = train(12, None, {}, options)[0]
    return results


@pytest.mark.slow
def test_density_one_equals_plain_ddp_for_every_reducer(gloo_worlds: dict[int, GlooWorld]) -> None:
    for result in gloo_worlds[3].run(all_reducers_at_density_one, list(REDUCERS)):
        plain = result.pop("plain DDP")
        for name, parameters in result.items():
            torch.testing.assert_close(parameters, plain, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "ddp_options",
    [
        {},
        {"bucket_cap_mb": TINY_BUCKETS},
        {"bucket_cap_mb": TINY_BUCKETS, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": TINY_BUCKETS, "static_graph": True},
        {"bucket_cap_mb": TINY_BUCKETS, "find_unused_parameters": True},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_replicas_stay_identical_and_lawful(ddp_options: dict[str, Any], gloo: GlooWorld) -> None:
    results = gloo.run(train, 10, "oktopk", SPARSE, ddp_options)
    for parameters, told in results:
        assert torch.equal(parameters, results[0][0])
        assert {stats.phase for stats in told if stats.step < 2} == {"dense"}
        assert {stats.phase for stats in told if stats.step >= 2} == {"sparse"}
        assert max(stats.step for stats in told) == 9


def test_dense_results_do_not_depend_on_bucket_size(gloo2: GlooWorld) -> None:
    settings = {"warmup_steps": 0, "guard_every": 1}
    small, _ = gloo2.run(train, 6, "dense", settings, {"bucket_cap_mb": TINY_BUCKETS})[0]
    large, _ = gloo2.run(train, 6, "dense", settings, {})[0]
    torch.testing.assert_close(small, large, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_gradient_dtypes(dtype: torch.dtype, gloo2: GlooWorld) -> None:
    """The guards check that what bf16 or fp16 rounds away goes back into the residual."""
    results = gloo2.run(train, 8, "oktopk", SPARSE, {"bucket_cap_mb": TINY_BUCKETS}, None, dtype)
    assert results[0][0].dtype == dtype
    assert torch.equal(results[0][0], results[1][0])
    assert bool(torch.isfinite(results[0][0]).all())


# --- bucket rebuild


def owed_over_the_rebuild() -> tuple[torch.Tensor, torch.Tensor, set[str], set[str]]:
    """What every parameter owed before and after the rebuild, with gradients of zero in that step; the buckets."""
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    allreducer = oktopk.attach(model, never_applies, **(SPARSE | {"warmup_steps": 0}))
    told: list[StepStats] = []
    allreducer.add_listener(told.append)
    loss_of(model, dist.get_rank(), 0).backward()
    first = allreducer.state_dict()["feedback"]["residual"]
    (loss_of(model, dist.get_rank(), 1) * 0.0).backward()
    second = allreducer.state_dict()["feedback"]["residual"]
    oktopk.detach(model)
    owed = (torch.cat([state[name] for name in sorted(state)]) for state in (first, second))
    return *owed, {s.bucket for s in told if s.step == 0}, {s.bucket for s in told if s.step == 1}


class NeverApplies:
    """A reducer that applies nothing: everything stays owed."""

    def reduce(self, acc: Accumulated, comm: Any, k: int) -> SparseReduction:  # noqa: ARG002
        nothing = oktopk.SparseVector.empty(acc.values.numel(), acc.values.device)
        return SparseReduction(nothing, nothing, local_count=0, global_count=0)

    def state_dict(self) -> dict[str, Any]:
        return {}


def never_applies(settings: Any) -> NeverApplies:  # noqa: ARG001
    return NeverApplies()


def test_every_element_of_the_residual_is_carried_over_the_rebuild(gloo2: GlooWorld) -> None:
    for first, second, buckets_before, buckets_after in gloo2.run(owed_over_the_rebuild):
        assert buckets_before != buckets_after, "DDP did not rebuild: this test would prove nothing"
        assert float(first.abs().sum()) > 0
        assert torch.equal(first, second)


# --- accumulation, unused parameters


def accumulate_without_sync() -> tuple[torch.Tensor, int]:
    rank = dist.get_rank()
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    allreducer = oktopk.attach(model, "oktopk", density=1.0, warmup_steps=0, min_sparse_numel=0, guard_every=1)
    told: list[StepStats] = []
    allreducer.add_listener(told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 10 + step).backward()
        loss_of(model, rank, step).backward()
        optimizer.step()
    oktopk.detach(model)
    return flat_parameters(model), 1 + max(stats.step for stats in told)


def accumulate_by_hand(size: int) -> torch.Tensor:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(size):
            ((loss_of(model, rank, 10 + step) + loss_of(model, rank, step)) / size).backward()
        optimizer.step()
    return flat_parameters(model)


def test_no_sync_accumulates_and_counts_one_step(gloo2: GlooWorld) -> None:
    for parameters, steps in gloo2.run(accumulate_without_sync):
        assert steps == 3
        torch.testing.assert_close(parameters, accumulate_by_hand(2), rtol=1e-4, atol=1e-6)


class Branches(nn.Module):
    """`left` is used by rank 0 alone, `right` by all but rank 0, `neither` by nobody after the first steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(10, 16)
        self.left = nn.Linear(16, 3)
        self.right = nn.Linear(16, 3)
        self.neither = nn.Linear(16, 3)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.trunk(x))
        out = self.left(h) if dist.get_rank() == 0 else self.right(h)
        return out + self.neither(h) if self.step < 3 else out


def train_with_unused() -> tuple[torch.Tensor, list[float], bool]:
    """Parameters; what `neither` still owes after each later step; whether it moved in them."""
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
    allreducer = oktopk.attach(model, "topkA", **(SPARSE | {"warmup_steps": 0, "density": 0.02}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owed, moved = [], False
    for step in range(8):
        model.module.step = step
        before = model.module.neither.weight.detach().clone()
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        if step >= 3:
            owed.append(float(allreducer.state_dict()["feedback"]["residual"]["neither.weight"].abs().sum()))
            moved |= not torch.equal(before, model.module.neither.weight)
    oktopk.detach(model)
    return flat_parameters(model), owed, moved


def test_a_parameter_nobody_uses_keeps_its_residual_until_it_is_used_again(gloo: GlooWorld) -> None:
    results = gloo.run(train_with_unused)
    for parameters, owed, moved in results:
        assert torch.equal(parameters, results[0][0])
        assert owed[0] > 0
        assert len(set(owed)) == 1, "DDP does not apply it, so nothing may leave the residual"
        assert not moved


def stale_gradient_of_an_unused_parameter() -> tuple[float, float]:
    """No zero_grad: `neither` still holds an old gradient when nobody uses it. Change of its residual, and of .grad."""
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
    allreducer = oktopk.attach(model, "topkA", **(SPARSE | {"warmup_steps": 0, "density": 0.02}))
    loss_of(model, dist.get_rank(), 0).backward()
    gradient = model.module.neither.weight.grad.clone()
    before = allreducer.state_dict()["feedback"]["residual"]["neither.weight"]
    model.module.step = 5
    loss_of(model, dist.get_rank(), 1).backward()
    after = allreducer.state_dict()["feedback"]["residual"]["neither.weight"]
    oktopk.detach(model)
    return float((after - before).abs().sum()), float((model.module.neither.weight.grad - gradient).abs().sum())


def test_a_stale_gradient_does_not_count_as_use(gloo2: GlooWorld) -> None:
    assert gloo2.run(stale_gradient_of_an_unused_parameter) == [(0.0, 0.0)] * 2


# --- process groups


def two_models_in_two_groups(sparse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks 0 and 1 train one model, 2 and 3 another; beside each, the same without us."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    results = []
    for reducer in ("oktopk" if sparse else "dense", None):
        model = DDP(Net(seed=mine), process_group=groups[mine])
        if reducer:
            settings = SPARSE if sparse else {"warmup_steps": 0}
            allreducer = oktopk.attach(model, reducer, **settings)
            assert allreducer.comm.size == 2
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
        results.append(flat_parameters(model))
    return tuple(results)


def test_the_models_own_process_group_is_respected(gloo_worlds: dict[int, GlooWorld]) -> None:
    for ours, plain in gloo_worlds[4].run(two_models_in_two_groups, False):
        torch.testing.assert_close(ours, plain)
    sparse = [ours for ours, _ in gloo_worlds[4].run(two_models_in_two_groups, True)]
    assert torch.equal(sparse[0], sparse[1])
    assert torch.equal(sparse[2], sparse[3])
    assert not torch.equal(sparse[0], sparse[2])


# --- bad gradients


def train_with_nan(policy: str, bad_rank: int, bad_step: int) -> dict[str, Any]:
    rank = dist.get_rank()
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    trainer = FakeTrainer()
    allreducer = oktopk.attach(model, "oktopk", trainer=trainer, **(SPARSE | {"nonfinite": policy}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped, error, gradients_in_skip, saved = [], None, None, allreducer.state_dict()
    try:
        for step in range(6):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            loss = nn.functional.cross_entropy(model(x), y)
            if rank == bad_rank and step == bad_step:
                loss = loss * float("nan")
            saved = allreducer.state_dict()
            before = saved["feedback"]["residual"]
            loss.backward()
            if allreducer.last_step_skipped:
                skipped.append(step)
                after = allreducer.state_dict()["feedback"]["residual"]
                assert before.keys() == after.keys()
                assert all(torch.equal(before[name], after[name]) for name in before), "the residual was touched"
                gradients_in_skip = sum(float(p.grad.abs().sum()) for p in model.parameters())
            optimizer.step()
    except Exception as caught:
        error = str(caught)
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            allreducer.state_dict()
        allreducer.load_state_dict(saved)
    residuals = allreducer.state_dict()["feedback"]["residual"]
    return {
        "finite": all(bool(torch.isfinite(r).all()) for r in residuals.values()),
        "owes_what_was_saved": all(
            torch.equal(r, saved["feedback"]["residual"][name]) for name, r in residuals.items()
        ),
        "steps_told": len(trainer.sparsities),
        "parameters": flat_parameters(model),
        "skipped": skipped,
        "num_skipped": allreducer.num_skipped_steps,
        "error": error,
        "gradients_in_skip": gradients_in_skip,
    }


@pytest.mark.slow
@pytest.mark.parametrize("bad_step", [1, 4], ids=["warm-up", "sparse"])
def test_nan_raises_on_all_ranks_naming_rank_and_parameter(bad_step: int) -> None:
    world = GlooWorld(3)  # of its own: DDP does not survive an error in a hook
    try:
        for result in world.run(train_with_nan, "raise", 1, bad_step):
            assert f"NonFiniteGradientError: step {bad_step}," in result["error"]
            assert "on rank 1" in result["error"]
            assert "'out.weight'" in result["error"] or "'out.bias'" in result["error"]
            assert result["finite"]
            assert result["owes_what_was_saved"]
    finally:
        world.close()


@pytest.mark.parametrize("bad_step", [1, 4], ids=["warm-up", "sparse"])
def test_nan_skips_the_step_on_all_ranks(bad_step: int, gloo2: GlooWorld) -> None:
    results = gloo2.run(train_with_nan, "skip", 1, bad_step)
    for result in results:
        assert result["error"] is None
        assert result["skipped"] == [bad_step]
        assert result["num_skipped"] == 1
        assert result["gradients_in_skip"] == 0.0
        assert result["finite"]
        assert torch.equal(result["parameters"], results[0]["parameters"])


# --- what users see


def collect_metrics() -> tuple[FakeTrainer, list[StepStats]]:
    model = DDP(Net(width=256))
    trainer = FakeTrainer()
    told: list[StepStats] = []
    allreducer = oktopk.attach(model, "oktopk", trainer=trainer, warmup_steps=3, density=0.1, min_sparse_numel=0)
    allreducer.add_listener(told.append)
    for step in range(6):
        loss_of(model, dist.get_rank(), step).backward()
    oktopk.detach(model)
    return trainer, told


def test_metrics_in_both_phases_are_as_defined(gloo2: GlooWorld) -> None:
    results = gloo2.run(collect_metrics)
    n = sum(p.numel() for p in Net(width=256).parameters())
    k = round(0.1 * n)
    modelled = volume("oktopk", n, k, 2, common=0.5)
    agreement = 8 * (2 + 1)
    for trainer, told in results:
        assert [(s.step, s.phase, s.n) for s in told] == [(i, "dense" if i < 3 else "sparse", n) for i in range(6)]
        counts = [stats.global_count for stats in told[3:]]
        assert all(k <= count <= k + k // 64 for count in counts)
        assert trainer.sparsities == [0.0] * 3 + [1 - count / n for count in counts]
        assert trainer.compression_ratios == [1.0] * 3 + [n / count for count in counts]
        assert trainer.communication_sizes == [4.0 * n] * 3 + [8.0 * count for count in counts]
        for stats in told[:3]:
            assert (stats.k, stats.local_count, stats.global_count) == (n, n, n)
            assert (stats.bytes_sent, stats.messages_sent) == (agreement + 4 * n, 1 + 2)
        for stats in told[3:]:
            assert (stats.k, stats.local_count) == (k, k)
            assert stats.bytes_sent == pytest.approx(modelled.bytes_sent, rel=0.15)
        for stats in told:
            assert tuple(stats.seconds) == STAGES
            assert min(stats.seconds.values()) >= 0.0
            assert stats.seconds["exchange"] > 0.0
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert (one.bytes_sent, one.bytes_received) == (other.bytes_received, other.bytes_sent)
        assert (one.global_count, one.messages_sent) == (other.global_count, other.messages_sent)


# --- other ways in, and the way out


def attach_detach_and_attach_again() -> tuple[torch.Tensor, list[int], list[str]]:
    """Two steps each way; parameters, the number of reductions that were told of, and what was refused."""
    rank = dist.get_rank()
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told, refused = [], []
    for attached in (True, False, True):
        steps: list[StepStats] = []
        if attached:
            oktopk.attach(model, "dense", warmup_steps=0).add_listener(steps.append)
        with pytest.raises(ValueError, match="tach") as caught:
            oktopk.attach(model) if attached else oktopk.detach(model)
        refused.append(str(caught.value))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if attached:
            oktopk.detach(model)
        told.append(len(steps))
    return flat_parameters(model), told, refused


def plain_ddp(rounds: int) -> torch.Tensor:
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(rounds):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
    return flat_parameters(model)


def test_detach_leaves_plain_ddp_and_lets_attach_again(gloo2: GlooWorld) -> None:
    expected = gloo2.run(plain_ddp, 3)[0]
    for parameters, told, refused in gloo2.run(attach_detach_and_attach_again):
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
        assert told == [2, 0, 2]
        assert [message.partition(":")[0] for message in refused] == [
            "attach() was called on this model before",
            "detach()",
            "attach() was called on this model before",
        ]


def train_with_hook() -> tuple[torch.Tensor, set[str], int]:
    """As `train`, but by a state and a hook, without names."""
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    state = oktopk.HookState("oktopk", **SPARSE)
    model.register_comm_hook(state, oktopk.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    saved = state.allreducer.state_dict()
    state.close()
    return flat_parameters(model), set(saved["feedback"]["residual"]), saved["step"]


def test_a_hook_and_its_state_do_what_attach_does(gloo2: GlooWorld) -> None:
    expected = gloo2.run(train, 6, "oktopk", SPARSE, {"bucket_cap_mb": TINY_BUCKETS})[0][0]
    for parameters, names, steps in gloo2.run(train_with_hook):
        assert torch.equal(parameters, expected)
        assert names == {f"parameter_{i}" for i in range(6)}
        assert steps == 6


def clipped_gradient(limit: float) -> torch.Tensor:
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    oktopk.attach(model, "dense", norm_clip=limit, warmup_steps=0)
    loss_of(model, dist.get_rank(), 0).backward()
    oktopk.detach(model)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def own_gradient(rank: int) -> torch.Tensor:
    model = Net()
    loss_of(model, rank, 0).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_each_ranks_gradient_is_clipped_before_it_is_averaged(gloo2: GlooWorld) -> None:
    own = [own_gradient(rank) for rank in range(2)]
    norms = sorted(float(gradient.norm()) for gradient in own)
    limit = sum(norms) / 2
    assert norms[0] < limit < norms[1]
    expected = sum(gradient * min(1.0, limit / float(gradient.norm())) for gradient in own) / 2
    for found in gloo2.run(clipped_gradient, limit):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_vectors_stay_dense_where_asked(gloo2: GlooWorld) -> None:
    settings = SPARSE | {"warmup_steps": 0, "dense_vectors": True}
    results = gloo2.run(train, 4, "oktopk", settings, {"bucket_cap_mb": TINY_BUCKETS})
    for parameters, told in results:
        assert torch.equal(parameters, results[0][0])
        for step in range(4):
            sizes = {
                phase: sum(s.n for s in told if s.step == step and s.phase == phase) for phase in ("dense", "sparse")
            }
            assert sizes == {"dense": 32 + 32 + 3, "sparse": 10 * 32 + 32 * 32 + 32 * 3}


def look_at_the_state_during_backward() -> str:
    """From a hook on the parameter whose gradient comes last."""
    model = DDP(Net(), bucket_cap_mb=TINY_BUCKETS)
    allreducer = oktopk.attach(model, "oktopk", **SPARSE)
    errors = []

    def look(_: torch.Tensor) -> None:
        try:
            allreducer.state_dict()
        except RuntimeError as error:
            errors.append(str(error))

    model.module.hidden.weight.register_hook(look)
    for step in range(2):  # DDP hands its buckets over one by one from the second step on
        loss_of(model, dist.get_rank(), step).backward()
    allreducer.state_dict()
    oktopk.detach(model)
    return errors[-1]


def test_no_state_is_given_in_the_middle_of_a_step(gloo2: GlooWorld) -> None:
    for error in gloo2.run(look_at_the_state_during_backward):
        assert error.startswith("state_dict() in the middle of a step")


def refusals() -> list[str]:
    found = []
    embedding = DDP(nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)))
    oktopk.attach(embedding, "oktopk", **SPARSE)
    with pytest.raises(Exception, match="sparse=False") as caught:
        embedding(torch.arange(4)).sum().backward()
    found.append(str(caught.value))
    scaler = torch.amp.GradScaler("cpu")
    model = DDP(Net())
    oktopk.attach(model, "oktopk", **SPARSE)
    with pytest.raises(Exception, match="GradScaler") as caught:
        scaler.scale(loss_of(model, 0, 0)).backward()
    found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_sparse_gradients_and_loss_scaling_are_refused() -> None:
    world = GlooWorld(2)  # of its own: DDP does not survive an error in a hook
    try:
        for sparse, scaled in world.run(refusals):
            assert "0.weight has a gradient of torch.sparse_coo: only dense ones can be reduced" in sparse
            assert "train in bf16, which needs no scaling" in scaled
    finally:
        world.close()


def test_attach_refuses_a_model_without_ddp() -> None:
    with pytest.raises(ValueError, match="needs a DistributedDataParallel model, got Net"):
        oktopk.attach(Net())  # pyright: ignore[reportArgumentType]
