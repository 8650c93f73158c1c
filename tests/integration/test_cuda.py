"""On a GPU: tensors stay there with NCCL, pass through the host with Gloo, and the laws hold as on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import oktopk
from oktopk.registry import REDUCERS
from tests.contract.communicator_checks import run_all_over
from tests.contract.test_communicator import assert_all_passed
from tests.integration.training import batch, flat_parameters
from tests.worlds import GlooWorld, NcclWorld

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
SETTINGS = {"warmup_steps": 2, "density": 0.05, "min_sparse_numel": 0, "guard_every": 1, "timeout_s": 60.0}


def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3)).to(device)


def loss(model: nn.Module, rank: int, step: int, device: str) -> torch.Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x.to(device)), y.to(device))


def train(adapter: str, name: str, steps: int, device: str) -> torch.Tensor:
    rank = dist.get_rank()
    model = net(device)
    if adapter == "ddp":
        model = DDP(model, bucket_cap_mb=0.05)
        oktopk.attach(model, name, **SETTINGS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elif adapter == "adamw":
        settings = {**SETTINGS, "dense_dtype": "int8", "wire_dtype": "bf16"}
        optimizer = oktopk.optim.AdamW(model.named_parameters(), 1e-2, reducer=name, bucket_cap_mb=0.05, **settings)
    elif adapter == "local steps":
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = oktopk.LocalSteps(adamw, model.named_parameters(), 2, name, bucket_cap_mb=0.05, **SETTINGS)
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = oktopk.DistributedOptimizer(sgd, model.named_parameters(), name, bucket_cap_mb=0.05, **SETTINGS)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, rank, step, device).backward()
        optimizer.step()
    return flat_parameters(model).cpu()


@pytest.fixture(scope="module")
def world() -> GlooWorld:
    world = GlooWorld(2)
    yield world
    world.close()


@pytest.mark.parametrize("adapter", ["ddp", "optimizer", "adamw", "local steps"])
@pytest.mark.parametrize("name", list(REDUCERS))
def test_ranks_sharing_a_gpu_over_gloo(adapter: str, name: str, world: GlooWorld) -> None:
    on_gpu = world.run(train, adapter, name, 8, "cuda")
    assert torch.equal(on_gpu[0], on_gpu[1])
    assert_trained_alike(on_gpu[0], world.run(train, adapter, name, 8, "cpu")[0])


def assert_trained_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    """To a hundredth of how far training went, which is 3 % of the parameters' norm here.

    Devices and transports round differently, so now and then another element is the k-th largest.
    """
    went = (other - flat_parameters(net("cpu"))).norm()
    assert float(went / other.norm()) > 0.02
    assert float((one - other).norm() / went) < 1e-2


def test_communicator_contract_over_gloo_with_cuda_tensors(world: GlooWorld) -> None:
    assert_all_passed(world.run(run_all_over, "torch", "cuda"))


def test_nccl() -> None:
    """Beside Gloo: where there is one GPU, there is one rank, whose replicas cannot differ from each other."""
    size = torch.cuda.device_count()
    world, over_gloo = NcclWorld(size), GlooWorld(size)
    try:
        assert_all_passed(world.run(run_all_over, "torch", "cuda"))
        for adapter in ("ddp", "optimizer"):
            results = world.run(train, adapter, "oktopk", 8, "cuda")
            assert all(torch.equal(result, results[0]) for result in results)
            assert_trained_alike(results[0], over_gloo.run(train, adapter, "oktopk", 8, "cpu")[0])
    finally:
        world.close()
        over_gloo.close()
